"""CRC32C (checked on every read) and SHA-256 (the identity of a file), taken together over a stream."""

from __future__ import annotations

import hashlib

import google_crc32c


class RunningDigest:
    """Feed it bytes in order; then `size`, `crc32c` and `sha256` describe all of them."""

    def __init__(self) -> None:
        self.size = 0
        self.crc32c = 0
        self._sha256 = hashlib.sha256()

    def update(self, chunk: bytes) -> None:
        """Add bytes."""
        self.crc32c = google_crc32c.extend(self.crc32c, chunk)
        self._sha256.update(chunk)
        self.size += len(chunk)

    @property
    def sha256(self) -> bytes:
        return self._sha256.digest()


def crc32c(data: bytes) -> int:
    """Return the CRC32C of `data`."""
    return google_crc32c.value(data)

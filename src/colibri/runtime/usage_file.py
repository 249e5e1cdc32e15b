"""How often each expert was used in earlier runs: a small file that the caller names, for a warm start.

The counts choose only what is read first. Nothing is pinned by them: once the model runs, the expert
store keeps what this run uses, so experts of yesterday cannot starve those of today.

File, little-endian: magic, digest of the model (32 bytes), uint32 number of expert sets, uint32 [sets] their
sizes, float64 counts of set 0, 1, ..., then the CRC-32 of all before it, uint32.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from colibri.cbi.temporary import TemporaryFile
from colibri.errors import ColibriError, UsageError

MAGIC = b"CBUSAGE1"
HALF_LIFE = 16384
"""Tokens after which a use counts half: a few long conversations, so that a new habit shows in the next run."""
_HEADER = struct.Struct("<8s32sI")


class DamagedUsageFileError(ColibriError):
    """The file begins as a usage file does, and its rest is not one."""


class UsageFile:
    """Decayed counts of tokens by expert, read when made and brought up to date by `add`.

    `counts`: float64 [experts] for each expert set; zero without a file, or with a damaged one, whose description
    is then in `damage`. A symbolic link is followed. Raises UsageError for a path that cannot hold the file, a
    file of another kind, and one that another model made.
    """

    def __init__(self, path: Path, digest: bytes, expert_counts: Sequence[int]) -> None:
        self.path = path.resolve()
        self._digest = digest
        self._sizes = tuple(expert_counts)
        self.damage: str | None = None
        if not self.path.parent.is_dir():
            raise UsageError(f"usage file {path}: {self.path.parent} is not a folder; create it or choose another file")
        try:
            self.counts = self._read()
        except DamagedUsageFileError as error:
            self.damage = str(error)
            self.counts = self._zeros()

    def hottest(self) -> list[tuple[int, int]]:
        """The experts that were used as (set, expert), most used first.

        Equal ones go in file order. A layer's counts are shares of its own sum, so that none stands out because
        its tokens were counted in more runs.
        """
        shares = np.concatenate([counts / max(counts.sum(), 1e-300) for counts in self.counts])
        sets = np.repeat(np.arange(len(self._sizes)), self._sizes)
        experts = np.concatenate([np.arange(size) for size in self._sizes])
        order = np.argsort(-shares, kind="stable")
        return [(int(sets[i]), int(experts[i])) for i in order if shares[i] > 0]

    def add(self, tokens: int, tokens_per_expert: Sequence[Sequence[int]]) -> None:
        """Add what a run of `tokens` tokens used, and write the file: complete, or as it was.

        Counts that another process has added meanwhile are kept. Raises ColibriError that names the file.
        """
        with suppress(DamagedUsageFileError):  # named when it was read first; its place is taken
            self.counts = self._read()
        fade = 0.5 ** (tokens / HALF_LIFE)
        self.counts = [
            counts * fade + np.asarray(used, np.float64)
            for counts, used in zip(self.counts, tokens_per_expert, strict=True)
        ]
        data = _HEADER.pack(MAGIC, self._digest, len(self._sizes))
        data += np.asarray(self._sizes, "<u4").tobytes()
        data += b"".join(counts.astype("<f8").tobytes() for counts in self.counts)
        file = TemporaryFile(self.path, MAGIC, "usage file")
        try:
            file.write(data + struct.pack("<I", zlib.crc32(data)))
            file.commit()
        finally:
            file.discard()

    def _zeros(self) -> list[np.ndarray]:
        return [np.zeros(size) for size in self._sizes]

    def _read(self) -> list[np.ndarray]:
        size = _HEADER.size + sum(4 + 8 * experts for experts in self._sizes) + 4
        try:
            if self.path.exists() and not self.path.is_file():
                raise UsageError(f"usage file {self.path} is not a regular file; choose another one")
            with self.path.open("rb") as file:
                data = file.read(size + 1)
        except FileNotFoundError:
            return self._zeros()
        except OSError as error:
            raise UsageError(f"usage file {self.path} cannot be read: {error.strerror}; choose another one") from None
        if not data:
            return self._zeros()
        if not data.startswith(MAGIC):
            raise UsageError(f"{self.path} is not a usage file; name another one, and it will be made")
        if len(data) < _HEADER.size:
            raise self._damaged(f"it ends after {len(data)} bytes")
        if data[8:40] != self._digest:
            raise UsageError(
                f"usage file {self.path} is of another model (digest {data[8:40].hex()[:16]}..., "
                f"not {self._digest.hex()[:16]}...); give each model a usage file of its own"
            )
        if len(data) != size or zlib.crc32(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
            raise self._damaged("its size is wrong" if len(data) != size else "its checksum is wrong")
        values = np.frombuffer(data, "<f8", sum(self._sizes), size - 4 - 8 * sum(self._sizes))
        if not (np.isfinite(values) & (values >= 0)).all():
            raise self._damaged("a count is not a number from 0 on")
        return [part.copy() for part in np.split(values, np.cumsum(self._sizes)[:-1])]

    def _damaged(self, how: str) -> DamagedUsageFileError:
        return DamagedUsageFileError(f"usage file {self.path} is damaged ({how}); it is ignored and will be replaced")

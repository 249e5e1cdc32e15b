"""A bounded set of open descriptors that many threads may read from at once."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from colibri.checkpoint.reading import open_regular_file
from colibri.errors import CheckpointError, UsageError


class FileHeader(Protocol):
    """What the header of any kind of file says of the file: size (bytes) and modification time tell it apart."""

    @property
    def path(self) -> Path: ...

    @property
    def file_size(self) -> int: ...

    @property
    def modified_nanoseconds(self) -> int: ...


class OpenFiles:
    """Keeps at most `limit` descriptors; the least recently used idle one is closed to make room.

    A lease must not be taken while holding another one: with all descriptors leased, that would wait for ever.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._condition = threading.Condition()
        self._descriptors: OrderedDict[Path, int] = OrderedDict()
        self._leases: dict[Path, int] = {}
        self._closed = False

    @contextmanager
    def lease(self, header: FileHeader) -> Iterator[int]:
        """Give a descriptor of the header's file that stays open inside the `with` block.

        Raises CheckpointError when the file cannot be opened or is no longer the one whose header was read,
        UsageError after `close`.
        """
        path = header.path
        with self._condition:
            descriptor = self._acquire(header)
            self._leases[path] = self._leases.get(path, 0) + 1
        try:
            yield descriptor
        finally:
            with self._condition:
                self._leases[path] -= 1
                if not self._leases[path]:
                    del self._leases[path]
                    if self._closed:
                        os.close(self._descriptors.pop(path))
                    self._condition.notify_all()

    def close(self) -> None:
        """Close every descriptor: idle ones now, leased ones when their reader is done."""
        with self._condition:
            self._closed = True
            for path in [path for path in self._descriptors if path not in self._leases]:
                os.close(self._descriptors.pop(path))
            self._condition.notify_all()

    def _acquire(self, header: FileHeader) -> int:
        path = header.path
        while True:
            if self._closed:
                raise UsageError(f"{path.parent}: the checkpoint is closed; open it again to read from it.")
            if path in self._descriptors:
                self._descriptors.move_to_end(path)
                return self._descriptors[path]
            if len(self._descriptors) < self._limit:
                break
            idle = next((candidate for candidate in self._descriptors if candidate not in self._leases), None)
            if idle is None:
                self._condition.wait()
            else:
                os.close(self._descriptors.pop(idle))
        descriptor, status = open_regular_file(path)
        if (status.st_size, status.st_mtime_ns) != (header.file_size, header.modified_nanoseconds):
            os.close(descriptor)
            raise CheckpointError(f"{path} was changed while the checkpoint was open; open the checkpoint again.")
        self._descriptors[path] = descriptor
        return descriptor

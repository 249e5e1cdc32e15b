"""A file that appears under its name only when it is complete."""

from __future__ import annotations

import fcntl
import io
import os
import secrets
from pathlib import Path

from colibri.cbi.layout import MAGIC
from colibri.errors import ModelFileError, UsageError

_SUFFIX = ".partial"
_BUFFER_BYTES = 1 << 20


class TemporaryFile:
    """Writes beside `path` under another name; `commit` gives it its name, `discard` removes it.

    What is under the name already stays unless it is empty or begins with `magic`, as a file of that `kind` does.
    Files of the same output left by processes that were killed are removed first; those of running ones are held by
    a lock and stay. Raises UsageError for a path that cannot be written to and ModelFileError when writing fails.
    """

    def __init__(self, path: Path, magic: bytes = MAGIC, kind: str = ".cbi file") -> None:
        self.path = path
        if path.is_dir():
            raise UsageError(f"{path} is a folder; give the name of the file to write.")
        if path.exists() and not path.is_file():
            # Renaming would put the file in the place of a device such as /dev/null.
            raise UsageError(f"{path} is not a regular file; choose another output.")
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent} is not a folder; create it or choose another output.")
        if _holds_something_else(path, magic):
            raise UsageError(f"{path} exists and is not a {kind}; remove it or choose another output.")
        try:
            self._remove_stale()
            self._temporary, descriptor = self._create()
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}; choose another output.") from error
        self._raw = io.FileIO(descriptor, "w")
        self._file = io.BufferedWriter(self._raw, _BUFFER_BYTES)

    def write(self, data: bytes) -> None:
        """Append."""
        try:
            self._file.write(data)
        except OSError as error:
            raise self._failed(error) from error

    def write_at_start(self, data: bytes) -> None:
        """Overwrite the first bytes."""
        try:
            self._file.seek(0)
            self._file.write(data)
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise self._failed(error) from error

    def commit(self) -> None:
        """Flush to the disk, then replace whatever is under the final name in one step."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._temporary.replace(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
            # Closed last, as it holds the lock.
            self._file.close()
        except OSError as error:
            raise self._failed(error) from error

    def discard(self) -> None:
        """Remove the file; harmless after `commit` or a second time."""
        if not self._raw.closed:
            self._temporary.unlink(missing_ok=True)
            # Not the buffer: flushing it to a full disk would fail.
            self._raw.close()

    def _create(self) -> tuple[Path, int]:
        while True:
            temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}{_SUFFIX}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # Another process may have taken it for a stale one before the lock was had.
                if os.fstat(descriptor).st_nlink:
                    return temporary, descriptor
            except BaseException:
                temporary.unlink(missing_ok=True)
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _remove_stale(self) -> None:
        for candidate in self.path.parent.iterdir():
            name = candidate.name
            if not (name.startswith(f".{self.path.name}.") and name.endswith(_SUFFIX)):
                continue
            try:
                descriptor = os.open(candidate, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                candidate.unlink(missing_ok=True)
            except OSError:
                continue
            finally:
                os.close(descriptor)

    def _failed(self, error: OSError) -> ModelFileError:
        return ModelFileError(f"{self.path} could not be written: {error.strerror}; nothing was left behind.")


def _holds_something_else(path: Path, magic: bytes) -> bool:
    """Whether the file would replace what is none of its kind: a weight shard, a config.json, a mistake."""
    try:
        with path.open("rb") as file:
            start = file.read(len(magic))
    except FileNotFoundError:
        return False
    except OSError:
        return True  # it cannot be told, so it stays
    return start not in (b"", magic)

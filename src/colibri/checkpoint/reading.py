"""Positioned reads that either deliver every byte or raise an error that says what was missing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np

from colibri.errors import CheckpointError

# Linux moves at most 2^31 - 4096 bytes in one call and macOS refuses 2^31; a power of two stays below both.
MAXIMUM_BYTES_PER_CALL = 1 << 30


def open_regular_file(path: Path) -> tuple[int, os.stat_result]:
    """Open `path` for reading; the caller closes the descriptor.

    Returns the descriptor and the status of the file behind it (symlinks are followed).
    Raises CheckpointError when it cannot be opened or is not a regular file.
    """
    try:
        # O_NONBLOCK: opening a FIFO without a writer would wait for ever; regular files ignore the flag.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        hint = "; it is a symbolic link to nothing, download the model again" if path.is_symlink() else ""
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}{hint}.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}; check its permissions.") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file; a model file is expected there.")
    return descriptor, status


def read_into(descriptor: int, offset: int, buffer: memoryview, path: Path) -> None:
    """Fill `buffer` (writable, contiguous bytes) from byte `offset` of an open file.

    Interrupted and short reads are continued. `path` only names the file in errors.
    Raises CheckpointError with file, offset, wanted and got when the file ends early or the disk fails.
    """
    wanted = buffer.nbytes
    got = 0
    while got < wanted:
        try:
            count = os.preadv(descriptor, [buffer[got : got + MAXIMUM_BYTES_PER_CALL]], offset + got)
        except InterruptedError:
            continue
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read at offset {offset}: wanted {wanted} bytes, got {got}: "
                f"{error.strerror}; check the disk and the file."
            ) from error
        if count == 0:
            raise CheckpointError(
                f"{path} ends too early at offset {offset}: wanted {wanted} bytes, got {got}; "
                "the file is truncated, download or copy it again."
            )
        got += count


def read_exactly(descriptor: int, offset: int, size: int, path: Path) -> np.ndarray:
    """Return `size` bytes from byte `offset` of an open file as a new uint8 array of shape [size].

    Raises CheckpointError as `read_into` does.
    """
    buffer = np.empty(size, dtype=np.uint8)
    read_into(descriptor, offset, buffer.data, path)
    return buffer

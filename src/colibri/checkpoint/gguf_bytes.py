"""Little-endian values from the start of a GGUF file, each checked against the bytes that are left."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from colibri.checkpoint.reading import read_exactly
from colibri.checkpoint.strict_json import quoted
from colibri.errors import CheckpointError

# Bounds that a hostile header cannot push: far above any real vocabulary, low enough to be read in a second.
MAXIMUM_STRINGS = 1 << 21
MAXIMUM_VALUE_BYTES = 64 << 20
_WINDOW_BYTES = 1 << 18


class ValueType(IntEnum):
    """The types of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_DTYPES = {
    ValueType.UINT8: "u1", ValueType.INT8: "i1", ValueType.UINT16: "<u2", ValueType.INT16: "<i2",
    ValueType.UINT32: "<u4", ValueType.INT32: "<i4", ValueType.FLOAT32: "<f4", ValueType.BOOL: "u1",
    ValueType.UINT64: "<u8", ValueType.INT64: "<i8", ValueType.FLOAT64: "<f8",
}  # fmt: skip
ELEMENT_BYTES = {type: np.dtype(name).itemsize for type, name in _DTYPES.items()}


@dataclass(frozen=True)
class MetadataEntry:
    """A value of the metadata that is not read yet: `size` bytes at `offset`.

    `type` is that of the elements for an array (then `is_array`), and count their number, else 1.
    """

    type: ValueType
    is_array: bool
    offset: int
    count: int
    size: int


class HeaderReader:
    """Reads forward through an open file; `position` is the offset of the next byte.

    Every method raises CheckpointError, naming `what` was read, when the file has fewer bytes left.
    """

    def __init__(self, descriptor: int, file_size: int, path: Path) -> None:
        self.position = 0
        self.path = path
        self._descriptor = descriptor
        self._file_size = file_size
        self._window = b""
        self._window_start = 0
        self._strings = 0

    @property
    def left(self) -> int:
        """Bytes after the position."""
        return self._file_size - self.position

    def integer(self, size: int, what: str) -> int:
        """Read an unsigned integer of `size` bytes."""
        return int.from_bytes(self._take(size, what), "little")

    def text(self, what: str, maximum: int) -> str:
        """Read a length of 8 bytes and as many bytes of UTF-8, at most `maximum`."""
        length = self.integer(8, f"the length of {what}")
        if length > maximum:
            raise CheckpointError(f"{self.path}: {what} has {length} bytes, more than the {maximum} allowed.")
        raw = self._take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8 text at byte {error.start}.") from error

    def skip(self, size: int, what: str) -> None:
        """Go over `size` bytes without reading them."""
        self._require(size, what)
        self.position += size

    def skip_strings(self, count: int, what: str) -> None:
        """Go over `count` strings."""
        self._require(8 * count, what)
        self._strings += count
        if self._strings > MAXIMUM_STRINGS:
            raise CheckpointError(f"{self.path}: the metadata has more than {MAXIMUM_STRINGS} strings, up to {what}.")
        unpack, left = struct.Struct("<Q").unpack_from, count
        while left:
            self._fill(8, what)
            window, at = self._window, self.position - self._window_start
            last = len(window) - 8
            while left and at <= last:
                at += 8 + unpack(window, at)[0]
                left -= 1
            # The last string may reach past the window: checked by its end, which may not pass that of the file.
            self.skip(at + self._window_start - self.position, what)

    def entry(self, type: ValueType, what: str) -> MetadataEntry:
        """Go over a value of `type`; returns where it lies."""
        if type is not ValueType.ARRAY:
            return self._elements(type, False, 1, what)
        element = value_type(self.integer(4, f"the element type of {what}"), what, self.path)
        count = self.integer(8, f"the length of {what}")
        if element is ValueType.ARRAY:
            raise CheckpointError(f"{self.path}: {what} is an array of arrays, which no model needs.")
        return self._elements(element, True, count, what)

    def _elements(self, type: ValueType, is_array: bool, count: int, what: str) -> MetadataEntry:
        start = self.position
        if type is ValueType.STRING:
            self.skip_strings(count, what)
        else:
            self.skip(count * ELEMENT_BYTES[type], what)
        return MetadataEntry(type, is_array, start, count, self.position - start)

    def _require(self, size: int, what: str) -> None:
        if size > self.left:
            raise CheckpointError(
                f"{self.path}: {what} at byte {self.position} needs {quoted(size)} bytes, but the file has {self.left} "
                "left; it is truncated or damaged, download or copy it again."
            )

    def _fill(self, size: int, what: str) -> None:
        """Make the window hold `size` bytes from the position on."""
        self._require(size, what)
        start = self.position - self._window_start
        if start < 0 or start + size > len(self._window):
            wanted = min(max(size, _WINDOW_BYTES), self.left)
            self._window = read_exactly(self._descriptor, self.position, wanted, self.path).tobytes()
            self._window_start = self.position

    def _take(self, size: int, what: str) -> bytes:
        self._fill(size, what)
        start = self.position - self._window_start
        self.position += size
        return self._window[start : start + size]


def value_type(number: int, what: str, path: Path) -> ValueType:
    """Return the type of a number; raises CheckpointError naming `what` has it."""
    try:
        return ValueType(number)
    except ValueError:
        raise CheckpointError(f"{path}: {what} has the unknown value type {number}; the file is damaged.") from None


def read_value(descriptor: int, entry: MetadataEntry, key: str, path: Path) -> Any:
    """Return a value: int, float, bool, str or a list of them.

    float32 becomes the shortest decimal that stands for it, so that 1e-6 is the number that was meant.
    Raises CheckpointError naming the key for text that is not UTF-8 and for a value too large to be one.
    """
    if entry.size > MAXIMUM_VALUE_BYTES:
        raise CheckpointError(f"{path}: {quoted(key)} has {entry.size} bytes, more than {MAXIMUM_VALUE_BYTES}.")
    raw = read_exactly(descriptor, entry.offset, entry.size, path)
    if entry.type is ValueType.STRING:
        values: list[Any] = _strings(raw.tobytes(), entry.count, key, path)
    else:
        numbers = raw.view(_DTYPES[entry.type])
        if entry.type is ValueType.BOOL:
            if (numbers > 1).any():
                raise CheckpointError(f"{path}: {quoted(key)} is neither true nor false.")
            values = [bool(number) for number in numbers]
        elif entry.type is ValueType.FLOAT32 and not entry.is_array:
            values = [float(str(number)) for number in numbers]
        else:
            values = numbers.tolist()
    return values if entry.is_array else values[0]


def _strings(raw: bytes, count: int, key: str, path: Path) -> list[str]:
    result, at = [], 0
    for _ in range(count):
        end = at + 8 + int.from_bytes(raw[at : at + 8], "little")
        try:
            result.append(raw[at + 8 : end].decode())
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: {quoted(key)} is not UTF-8 text.") from error
        at = end
    return result

"""Reads the header of a safetensors file and trusts nothing in it.

The file is: header length (8 bytes, little-endian), header (JSON), data. Dtype, shape and byte span of
every tensor are checked against each other, and the spans must tile the data exactly, so that no
later read can reach outside the file or see another tensor's bytes.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri.checkpoint.reading import open_regular_file, read_exactly
from colibri.checkpoint.strict_json import MAXIMUM_JSON_BYTES, parse_object, quoted
from colibri.errors import CheckpointError

BITS_PER_ELEMENT = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
MAXIMUM_DIMENSIONS = 32
# Also with a zero among the dimensions the others must fit an array library's signed 64-bit strides.
MAXIMUM_ELEMENTS = 1 << 60


@dataclass(frozen=True)
class TensorSpan:
    """One tensor of a file: dtype, shape, and bytes [begin, end) counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """A verified header; size (bytes) and modification time tell whether the file is still the same one."""

    path: Path
    tensors: dict[str, TensorSpan]
    metadata: dict[str, str]
    file_size: int
    modified_nanoseconds: int


def read_header(path: Path) -> SafetensorsHeader:
    """Read and verify the header of a safetensors file.

    Raises CheckpointError naming the file, and the tensor where one is at fault.
    """
    descriptor, status = open_regular_file(path)
    try:
        file_size = status.st_size
        if file_size < 8:
            raise CheckpointError(
                f"{path} has {file_size} bytes, too few for a safetensors file; download or copy it again."
            )
        header_size = int.from_bytes(read_exactly(descriptor, 0, 8, path).tobytes(), "little")
        if header_size > MAXIMUM_JSON_BYTES:
            raise CheckpointError(
                f"{path} declares a header of {header_size} bytes, more than the {MAXIMUM_JSON_BYTES} allowed; "
                "it is damaged or not a safetensors file."
            )
        if header_size > file_size - 8:
            raise CheckpointError(
                f"{path} declares a header of {header_size} bytes but has only {file_size - 8} after its length; "
                "it is truncated, download or copy it again."
            )
        raw = read_exactly(descriptor, 8, header_size, path).tobytes()
    finally:
        os.close(descriptor)

    entries = parse_object(raw, path, "safetensors header")
    metadata = _checked_metadata(entries.pop("__metadata__", {}), path)
    data_begin = 8 + header_size
    data_size = file_size - data_begin
    tensors = {name: _checked_span(name, entry, data_begin, data_size, path) for name, entry in entries.items()}
    _check_tiling(tensors, data_begin, file_size, path)
    return SafetensorsHeader(path, tensors, metadata, file_size, status.st_mtime_ns)


def _checked_metadata(metadata: Any, path: Path) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not an object of strings.")
    return metadata


def _is_natural(value: Any) -> bool:
    # JSON true arrives as bool, which is an int to isinstance.
    return type(value) is int and value >= 0


def _checked_span(name: str, entry: Any, data_begin: int, data_size: int, path: Path) -> TensorSpan:
    where = f"{path}: tensor {quoted(name)}"
    # Names are shown in messages and stored as UTF-8; JSON escapes can spell control codes and lone surrogates.
    if not name.isprintable() or not name:
        raise CheckpointError(f"{where} has a name that is empty or not printable.")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} is not described by exactly dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS_PER_ELEMENT:
        raise CheckpointError(f"{where} has the unknown dtype {quoted(dtype)}.")
    if not isinstance(shape, list) or len(shape) > MAXIMUM_DIMENSIONS or not all(map(_is_natural, shape)):
        raise CheckpointError(f"{where} has a shape that is not a list of at most {MAXIMUM_DIMENSIONS} whole numbers.")
    if math.prod(dimension for dimension in shape if dimension) > MAXIMUM_ELEMENTS:
        raise CheckpointError(f"{where} has a shape that no memory can hold.")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_natural, offsets)):
        raise CheckpointError(f"{where} has data_offsets that are not two whole numbers.")
    begin, end = offsets
    if not begin <= end <= data_size:
        raise CheckpointError(
            f"{where} lies at bytes {quoted(begin)} to {quoted(end)}, outside the {data_size} bytes of data; "
            "the file is truncated or damaged."
        )
    bits = math.prod(shape) * BITS_PER_ELEMENT[dtype]
    if bits != 8 * (end - begin):
        raise CheckpointError(f"{where} needs {bits} bits for its dtype and shape but has {end - begin} bytes.")
    return TensorSpan(dtype, tuple(shape), data_begin + begin, data_begin + end)


def _check_tiling(tensors: dict[str, TensorSpan], data_begin: int, data_end: int, path: Path) -> None:
    cursor = data_begin
    for name, span in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if span.begin < cursor:
            raise CheckpointError(f"{path}: tensor {quoted(name)} overlaps another tensor.")
        if span.begin > cursor:
            raise CheckpointError(
                f"{path}: there is a hole of {span.begin - cursor} unused bytes before tensor {quoted(name)}."
            )
        cursor = span.end
    if cursor != data_end:
        raise CheckpointError(f"{path} has {data_end - cursor} bytes after its last tensor that belong to none.")

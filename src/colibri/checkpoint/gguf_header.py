"""Reads the header of a GGUF file and trusts nothing in it.

The file is: magic, version, counts, metadata, tensor descriptions, padding, data. Type, shape and place of every
tensor are checked against each other and the file's size, so that no later read can reach outside the file.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri.checkpoint.gguf_bytes import HeaderReader, MetadataEntry, ValueType, read_value, value_type
from colibri.checkpoint.reading import open_regular_file
from colibri.checkpoint.strict_json import quoted
from colibri.errors import CheckpointError, UnsupportedModelError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
SMALLEST_ALIGNMENT, LARGEST_ALIGNMENT = 8, 1 << 16
MAXIMUM_KEYS = 1 << 16
MAXIMUM_TENSORS = 1 << 16
MAXIMUM_KEY_BYTES = 65535
MAXIMUM_NAME_BYTES = 255
MAXIMUM_DIMENSIONS = 4
# A key with a value of one byte; a tensor with a name of one byte and one dimension.
_SMALLEST_KEY = 8 + 1 + 4 + 1
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8

# Weights and bytes of one block of each type that can be read.
BLOCKS = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q8_0": (32, 34)}
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: its type (a key of BLOCKS), shape with rows before columns, and bytes [begin, end) of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class GgufHeader:
    """A verified header; size (bytes) and modification time tell whether the file is still the same one."""

    path: Path
    metadata: dict[str, MetadataEntry]
    tensors: dict[str, GgufTensor]
    file_size: int
    modified_nanoseconds: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and verify the header of a GGUF file, of version 2 or 3.

    Raises CheckpointError naming the file, and the key or tensor where one is at fault; UnsupportedModelError for
    another version, a big-endian file, one part of several, and tensor types that cannot be read.
    """
    descriptor, status = open_regular_file(path)
    try:
        reader = HeaderReader(descriptor, status.st_size, path)
        _check_version(reader)
        tensor_count = _count(reader, "tensors", _SMALLEST_TENSOR, MAXIMUM_TENSORS)
        key_count = _count(reader, "metadata keys", _SMALLEST_KEY, MAXIMUM_KEYS)
        metadata = _metadata(reader, key_count)
        alignment = _small(descriptor, path, metadata, "general.alignment", DEFAULT_ALIGNMENT)
        if not SMALLEST_ALIGNMENT <= alignment <= LARGEST_ALIGNMENT or alignment & (alignment - 1):
            raise CheckpointError(
                f"{path}: general.alignment = {alignment} is not a power of two from {SMALLEST_ALIGNMENT} to "
                f"{LARGEST_ALIGNMENT}; the file is damaged."
            )
        parts = _small(descriptor, path, metadata, "split.count", 1)
        if parts > 1:
            raise UnsupportedModelError(
                f"{path} is one of {parts} parts of a model; join them first with llama-gguf-split --merge."
            )
        descriptions = [_description(reader, index) for index in range(tensor_count)]
        _refuse_types(descriptions, path)
        data_begin = -(-reader.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for description in descriptions:
            if description.name in tensors:
                raise CheckpointError(f"{path} has the tensor {quoted(description.name)} twice.")
            tensors[description.name] = _placed(description, alignment, data_begin, status.st_size, path)
    finally:
        os.close(descriptor)
    _check_overlap(tensors, path)
    return GgufHeader(path, metadata, tensors, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class _Description:
    """A tensor as the file describes it: dimensions from the fastest to the slowest, offset into the data."""

    name: str
    dimensions: tuple[int, ...]
    type: str
    offset: int


def _check_version(reader: HeaderReader) -> None:
    path = reader.path
    if reader.left < len(MAGIC) + 4 or reader.integer(4, "the magic") != int.from_bytes(MAGIC, "little"):
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with GGUF; download or copy it again.")
    version = reader.integer(4, "the version")
    if version in (2, 3):
        return
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, 2, 3):
        raise UnsupportedModelError(f"{path} is a big-endian GGUF file; get or convert the little-endian one.")
    if version == 1:
        raise UnsupportedModelError(f"{path} is a GGUF file of version 1; convert the model again to get version 3.")
    raise UnsupportedModelError(f"{path} is a GGUF file of version {version}; versions 2 and 3 can be read.")


def _count(reader: HeaderReader, what: str, smallest: int, maximum: int) -> int:
    count = reader.integer(8, f"the number of {what}")
    if count > maximum:
        raise CheckpointError(f"{reader.path} declares {count} {what}, more than the {maximum} allowed.")
    if count * smallest > reader.left:
        raise CheckpointError(
            f"{reader.path} declares {count} {what}, but has only {reader.left} bytes after their number; "
            "it is truncated or damaged, download or copy it again."
        )
    return count


def _metadata(reader: HeaderReader, count: int) -> dict[str, MetadataEntry]:
    metadata: dict[str, MetadataEntry] = {}
    for index in range(count):
        key = reader.text(f"metadata key {index}", MAXIMUM_KEY_BYTES)
        if not key or not key.isprintable():
            raise CheckpointError(f"{reader.path}: metadata key {index} is empty or not printable.")
        if key in metadata:
            raise CheckpointError(f"{reader.path} has the metadata key {quoted(key)} twice; keep one of them.")
        type = value_type(reader.integer(4, f"the type of {quoted(key)}"), quoted(key), reader.path)
        metadata[key] = reader.entry(type, quoted(key))
    return metadata


def _small(descriptor: int, path: Path, metadata: dict[str, MetadataEntry], key: str, default: int) -> int:
    entry = metadata.get(key)
    if entry is None:
        return default
    value: Any = None if entry.is_array or entry.size > 8 else read_value(descriptor, entry, key, path)
    if entry.type is ValueType.STRING or type(value) is not int or value < 0:
        raise CheckpointError(f"{path}: {key} is not a whole number.")
    return value


def _description(reader: HeaderReader, index: int) -> _Description:
    path = reader.path
    name = reader.text(f"the name of tensor {index}", MAXIMUM_NAME_BYTES)
    where = f"tensor {quoted(name)}"
    if not name or not name.isprintable():
        raise CheckpointError(f"{path}: {where} has a name that is empty or not printable.")
    count = reader.integer(4, f"the number of dimensions of {where}")
    if not 1 <= count <= MAXIMUM_DIMENSIONS:
        raise CheckpointError(f"{path}: {where} has {count} dimensions; 1 to {MAXIMUM_DIMENSIONS} are possible.")
    dimensions = tuple(reader.integer(8, f"a dimension of {where}") for _ in range(count))
    type = reader.integer(4, f"the type of {where}")
    if type not in _TYPE_NAMES:
        raise UnsupportedModelError(
            f"{path}: {where} has the unknown tensor type {type}; supported: {', '.join(BLOCKS)}."
        )
    return _Description(name, dimensions, _TYPE_NAMES[type], reader.integer(8, f"the offset of {where}"))


def _refuse_types(descriptions: list[_Description], path: Path) -> None:
    refused = [description for description in descriptions if description.type not in BLOCKS]
    if not refused:
        return
    counts = Counter(description.type for description in refused)
    listed = ", ".join(f"{count} of {type}" for type, count in counts.items())
    raise UnsupportedModelError(
        f"{path} has tensors in types that are not supported: {listed} (the first is {quoted(refused[0].name)}); "
        f"supported: {', '.join(BLOCKS)}, which llama-quantize --pure writes, or convert the Hugging Face folder."
    )


def _placed(description: _Description, alignment: int, data_begin: int, file_size: int, path: Path) -> GgufTensor:
    where = f"{path}: tensor {quoted(description.name)}"
    block, block_bytes = BLOCKS[description.type]
    dimensions, offset = description.dimensions, description.offset
    if 0 in dimensions:
        raise CheckpointError(f"{where} has a dimension of 0.")
    if dimensions[0] % block:
        raise CheckpointError(
            f"{where} has rows of {quoted(dimensions[0])} weights, not a multiple of the {block} of {description.type}."
        )
    # Python's integers do not wrap, so that dimensions cannot multiply to a small number.
    size = math.prod(dimensions) // block * block_bytes
    if offset % alignment:
        raise CheckpointError(f"{where} has the offset {offset}, which is not a multiple of the alignment {alignment}.")
    begin = data_begin + offset
    if begin + size > file_size:
        raise CheckpointError(
            f"{where} needs {quoted(size)} bytes at {quoted(begin)}, but the file ends at {file_size}; "
            "it is truncated or damaged, download or copy it again."
        )
    return GgufTensor(description.name, description.type, dimensions[::-1], begin, begin + size)


def _check_overlap(tensors: dict[str, GgufTensor], path: Path) -> None:
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin < end:
            raise CheckpointError(f"{path}: tensor {quoted(tensor.name)} overlaps another tensor.")
        end = tensor.end

"""Writes GGUF files: byte by byte for damaged ones, with the gguf package for whole models."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

UINT8, INT8, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 1, 4, 5, 6, 7, 8, 9, 10
F32, Q4_0, Q8_0 = 0, 2, 8
_PACK = {UINT8: "<B", INT8: "<b", UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<B", UINT64: "<Q"}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, type: int, value: Any) -> bytes:
    """A key with its value; a value given as bytes is taken as it is."""
    head = text(name) + struct.pack("<I", type)
    if isinstance(value, bytes):
        return head + value
    return head + (text(value) if type == STRING else struct.pack(_PACK[type], value))


def tensor(name: str, dimensions: Sequence[int], type: int, offset: int, count: int | None = None) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(dimensions) if count is None else count)
        + struct.pack(f"<{len(dimensions)}Q", *dimensions)
        + struct.pack("<IQ", type, offset)
    )


def image(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    tensor_count, key_count = counts or (len(tensors), len(keys))
    header = magic + struct.pack("<IQQ", version, tensor_count, key_count) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


class Raw:
    """A tensor in stored bytes: blocks [..., bytes of a row] of a type of the gguf package."""

    def __init__(self, data: np.ndarray, type: gguf.GGMLQuantizationType) -> None:
        self.data, self.type = data, type


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray | Raw]
) -> Path:
    """Write a file; keys without a prefix are those of the architecture, uint16 arrays are bfloat16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, value in metadata.items():
        full = name if name.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{name}"
        match value:
            case bool():
                writer.add_bool(full, value)
            case int():
                writer.add_uint32(full, value)
            case float():
                writer.add_float32(full, value)
            case str():
                writer.add_string(full, value)
            case _:
                writer.add_array(full, value)
    for name, array in tensors.items():
        if isinstance(array, Raw):
            writer.add_tensor(name, array.data, raw_dtype=array.type)
        elif array.dtype == np.uint16:
            writer.add_tensor(name, array.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def q4_0(scales: np.ndarray, codes: np.ndarray) -> Raw:
    """scales float16 [..., groups], codes 0..15 [..., groups, 32]."""
    packed = (codes[..., :16] | (codes[..., 16:] << 4)).astype(np.uint8)
    return _blocks(scales, packed, gguf.GGMLQuantizationType.Q4_0)


def q8_0(scales: np.ndarray, codes: np.ndarray) -> Raw:
    """scales float16 [..., groups], codes int8 [..., groups, 32]."""
    return _blocks(scales, codes.view(np.uint8), gguf.GGMLQuantizationType.Q8_0)


def _blocks(scales: np.ndarray, packed: np.ndarray, type: gguf.GGMLQuantizationType) -> Raw:
    head = np.ascontiguousarray(scales)[..., None].view(np.uint8)
    return Raw(np.concatenate((head, packed), axis=-1).reshape(*scales.shape[:-1], -1), type)

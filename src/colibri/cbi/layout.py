"""The fixed parts of a `.cbi` file, version 1: structures, numbers and limits of spec/cbi.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from colibri.quantize import FORMATS, LAYOUTS, WeightFormat, WeightLayout

MAGIC = b"COLIBRI\0"
FORMAT_VERSION = 1
CONTRACT_VERSION = 1
DEFAULT_ALIGNMENT = 4096
MINIMUM_ALIGNMENT = 64
MAXIMUM_ALIGNMENT = 65536
PART_ALIGNMENT = 64
"""Sections, tensors and the three parts of an expert record start at multiples of this many bytes."""

MAXIMUM_SECTIONS = 64
MAXIMUM_TENSORS = 1_000_000
MAXIMUM_EXPERT_SETS = 65536
MAXIMUM_EXPERTS = 65536
MAXIMUM_SIDE = 1 << 31
MAXIMUM_NAME_BYTES = 255

CRITICAL = 1
DATA = 2
"""Flags of a section."""

NO_DIGEST = bytes(32)

HEADER = struct.Struct("<8s4I3Q4I32s28sI")
SECTION = struct.Struct("<IHHQQII32s")
TENSOR_HEAD = struct.Struct("<II")
TENSOR = struct.Struct("<IIHHIQQQQII32s8s")
EXPERTS_HEAD = struct.Struct("<II")
EXPERT_SET = struct.Struct("<4I16s")
EXPERT = struct.Struct("<3QII4H3Q12s16sI32s32s")


class SectionType(IntEnum):
    """The sections of version 1."""

    PROGRAM = 1
    TENSORS = 2
    EXPERTS = 3
    TENSOR_DATA = 4
    EXPERT_DATA = 5
    TOKENIZER = 6
    CHAT_TEMPLATE = 7
    SETTINGS = 8
    METADATA = 9
    TOKENIZER_TABLES = 10


SECTION_FLAGS = {
    SectionType.PROGRAM: CRITICAL,
    SectionType.TENSORS: CRITICAL,
    SectionType.EXPERTS: CRITICAL,
    SectionType.TENSOR_DATA: CRITICAL | DATA,
    SectionType.EXPERT_DATA: CRITICAL | DATA,
}

FORMAT_BY_ID: dict[int, WeightFormat] = {format.id: format for format in FORMATS}
LAYOUT_BY_ID: dict[int, WeightLayout] = {layout.id: layout for layout in LAYOUTS}


@dataclass(frozen=True)
class Header:
    """The first 128 bytes, without what is fixed in version 1."""

    alignment: int
    contract_version: int
    file_size: int
    table_offset: int
    section_count: int
    table_crc32c: int
    digest: bytes


@dataclass(frozen=True)
class Section:
    """One entry of the section table; data sections have a zero CRC and digest."""

    type: int
    flags: int
    offset: int
    size: int
    crc32c: int
    sha256: bytes


@dataclass(frozen=True)
class TensorEntry:
    """One tensor [rows, cols]; format and layout are ids of spec/formats.toml, offset and size are in the file."""

    name: str
    format: int
    layout: int
    rows: int
    cols: int
    offset: int
    size: int
    crc32c: int
    sha256: bytes


@dataclass(frozen=True)
class ExpertEntry:
    """One expert's record; formats and part offsets (inside the record) are those of gate, up and down."""

    offset: int
    size: int
    crc32c: int
    formats: tuple[int, int, int]
    parts: tuple[int, int, int]
    sha256: bytes


@dataclass(frozen=True)
class ExpertSetEntry:
    """The experts of one layer: gate and up are [ffn, width], down is [width, ffn]."""

    width: int
    ffn: int
    layer: int
    experts: tuple[ExpertEntry, ...]


def aligned(offset: int, alignment: int) -> int:
    """Return the first multiple of `alignment` that is not below `offset`."""
    return -(-offset // alignment) * alignment

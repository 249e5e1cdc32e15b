"""The structures of a `.cbi` file from bytes, trusting nothing; see spec/cbi.md."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from colibri.cbi import layout
from colibri.cbi.checksums import crc32c
from colibri.cbi.layout import ExpertEntry, ExpertSetEntry, Header, Section, SectionType, TensorEntry
from colibri.errors import ModelFileError, UsageError
from colibri.quantize import default_layout, packed_size


class Parser:
    """Parses the parts of one file; every error is a ModelFileError naming the file and the field."""

    def __init__(self, path: str, file_size: int) -> None:
        self._path = path
        self._file_size = file_size

    def fail(self, message: str) -> NoReturn:
        """Raise ModelFileError."""
        raise ModelFileError(f"{self._path}: {message}.")

    def header(self, data: bytes) -> Header:
        """Parse the first 128 bytes (fewer: the file is too short)."""
        if data[:8] != layout.MAGIC[: len(data[:8])] or not data:
            self.fail("not a .cbi file; make one with `colibri convert`")
        if len(data) < layout.HEADER.size:
            self.fail(f"the file is truncated: {len(data)} bytes are less than a header")
        (
            _, version, header_size, alignment, contract, features, file_size, table_offset, section_count,
            volume, volumes, table_crc, digest, reserved, crc,
        ) = layout.HEADER.unpack(data)  # fmt: skip
        if version != layout.FORMAT_VERSION:
            self.fail(f"format version {version}, this build reads {layout.FORMAT_VERSION}; convert the model again")
        if crc != crc32c(data[:-4]):
            self.fail("the header is damaged (CRC32C); fetch or convert the file again")
        if header_size != layout.HEADER.size:
            self.fail(f"header size {header_size} is not {layout.HEADER.size}")
        if not _is_alignment(alignment):
            self.fail(f"alignment {alignment} is not a power of two from 64 to 65536")
        if contract != layout.CONTRACT_VERSION:
            self.fail(f"numeric contract version {contract}, this build has {layout.CONTRACT_VERSION}; convert again")
        if features:
            self.fail(f"required features {features:#x} are unknown to this build")
        if volume or volumes != 1:
            self.fail(f"volume {volume} of {volumes}: split files are not supported")
        if any(reserved):
            self.fail("reserved bytes of the header are not zero")
        if file_size != self._file_size:
            self.fail(f"the file has {self._file_size} bytes, its header says {file_size}; it is truncated or damaged")
        if not 1 <= section_count <= layout.MAXIMUM_SECTIONS:
            self.fail(f"section count {section_count} is not 1 to {layout.MAXIMUM_SECTIONS}")
        if table_offset % 8 or not self._inside(table_offset, section_count * layout.SECTION.size):
            self.fail(f"section table offset {table_offset} is not inside the file or not a multiple of 8")
        return Header(alignment, contract, file_size, table_offset, section_count, table_crc, digest)

    def sections(self, data: bytes, header: Header) -> list[Section]:
        """Parse the section table."""
        sections, seen = [], set()
        for index in range(header.section_count):
            what = f"section {index}"
            fields = layout.SECTION.unpack_from(data, index * layout.SECTION.size)
            type, version, flags, offset, size, crc, reserved, digest = fields
            known = type in list(SectionType)
            if not known and flags & layout.CRITICAL:
                self.fail(f"{what} has the unknown critical type {type}; a newer build may read it")
            if known and version != 1:
                self.fail(f"{what} (type {type}) has version {version}, this build reads 1")
            if known and flags != layout.SECTION_FLAGS.get(SectionType(type), 0):
                self.fail(f"{what} (type {type}) has flags {flags}, which do not belong to its type")
            if known and type in seen:
                self.fail(f"{what} is a second section of type {type}")
            if reserved or flags & ~(layout.CRITICAL | layout.DATA):
                self.fail(f"{what} has reserved bits that are not zero")
            data_section = flags & layout.DATA
            if data_section and (crc or any(digest)):
                self.fail(f"{what} is a data section with a checksum of its own")
            alignment = header.alignment if data_section else layout.PART_ALIGNMENT
            if offset % alignment or not self._inside(offset, size):
                self.fail(f"{what} at {offset} of {size} bytes is not aligned or not inside the file")
            seen.add(type)
            sections.append(Section(type, flags, offset, size, crc, digest))
        spans = [(s.offset, s.size) for s in sections if s.size]
        spans += [(0, layout.HEADER.size), (header.table_offset, header.section_count * layout.SECTION.size)]
        if _overlap(spans):
            self.fail("sections overlap each other, the header or the table")
        return sections

    def tensors(self, data: bytes, data_section: Section | None) -> list[TensorEntry]:
        """Parse the tensor directory."""
        count, name_bytes = self._head(layout.TENSOR_HEAD, data, "tensor directory")
        if count > layout.MAXIMUM_TENSORS:
            self.fail(f"tensor count {count} is more than {layout.MAXIMUM_TENSORS}")
        names_at = layout.TENSOR_HEAD.size + count * layout.TENSOR.size
        if len(data) != names_at + name_bytes:
            self.fail(f"the tensor directory has {len(data)} bytes, its counts give {names_at + name_bytes}")
        tensors, seen = [], set()
        for index in range(count):
            fields = layout.TENSOR.unpack_from(data, layout.TENSOR_HEAD.size + index * layout.TENSOR.size)
            tensor = self._tensor(index, fields, data[names_at:], data_section)
            if tensor.name in seen:
                self.fail(f"tensor {tensor.name} occurs twice")
            seen.add(tensor.name)
            tensors.append(tensor)
        return tensors

    def _tensor(self, index: int, fields: tuple[Any, ...], names: bytes, section: Section | None) -> TensorEntry:
        name_at, name_length, format, layout_id, reserved, rows, cols, offset, size, crc, reserved_2, sha, rest = fields
        what = f"tensor {index}"
        if not 1 <= name_length <= layout.MAXIMUM_NAME_BYTES or name_at + name_length > len(names):
            self.fail(f"the name of {what} is not inside the names")
        try:
            name = names[name_at : name_at + name_length].decode()
        except UnicodeDecodeError:
            self.fail(f"the name of {what} is not UTF-8")
        what = f"tensor {name}"
        if reserved or reserved_2 or any(rest):
            self.fail(f"reserved bytes of {what} are not zero")
        if not (1 <= rows <= layout.MAXIMUM_SIDE and 1 <= cols <= layout.MAXIMUM_SIDE):
            self.fail(f"{what} has shape [{rows}, {cols}]")
        needed = self.packed_size(what, format, layout_id, rows, cols)
        if size != needed:
            self.fail(f"{what} has size {size}, its shape and format take {needed}")
        if section is None or offset % layout.PART_ALIGNMENT or not _within(offset, size, section):
            self.fail(f"{what} at {offset} is not aligned or not inside the tensor data section")
        return TensorEntry(name, format, layout_id, rows, cols, offset, size, crc, sha)

    def expert_sets(self, data: bytes, data_section: Section | None, alignment: int) -> list[ExpertSetEntry]:
        """Parse the expert directory."""
        set_count, reserved = self._head(layout.EXPERTS_HEAD, data, "expert directory")
        if set_count > layout.MAXIMUM_EXPERT_SETS or reserved:
            self.fail(f"expert set count {set_count} is more than {layout.MAXIMUM_EXPERT_SETS}")
        position, expert_sets = layout.EXPERTS_HEAD.size, []
        for index in range(set_count):
            what = f"expert set {index}"
            if len(data) - position < layout.EXPERT_SET.size:
                self.fail(f"the expert directory ends inside {what}")
            count, width, ffn, layer, rest = layout.EXPERT_SET.unpack_from(data, position)
            position += layout.EXPERT_SET.size
            if not 1 <= count <= layout.MAXIMUM_EXPERTS or any(rest):
                self.fail(f"{what} has {count} experts, or reserved bytes that are not zero")
            if not (1 <= width <= layout.MAXIMUM_SIDE and 1 <= ffn <= layout.MAXIMUM_SIDE):
                self.fail(f"{what} has width {width} and ffn {ffn}")
            if len(data) - position < count * layout.EXPERT.size:
                self.fail(f"the expert directory ends inside {what}")
            experts = []
            for expert in range(count):
                fields = layout.EXPERT.unpack_from(data, position)
                name = f"expert {expert} of set {index}"
                experts.append(self._expert(name, fields, width, ffn, data_section, alignment))
                position += layout.EXPERT.size
            expert_sets.append(ExpertSetEntry(width, ffn, layer, tuple(experts)))
        if position != len(data):
            self.fail(f"{len(data) - position} bytes follow the expert directory")
        if _overlap([(e.offset, e.size) for expert_set in expert_sets for e in expert_set.experts]):
            self.fail("expert records overlap each other")
        return expert_sets

    def _expert(
        self, what: str, fields: tuple[Any, ...], width: int, ffn: int, section: Section | None, alignment: int
    ) -> ExpertEntry:
        offset, stored, plain, codec, crc, *numbers = fields
        formats, reserved, parts = tuple(numbers[:3]), numbers[3], tuple(numbers[4:7])
        nonce, tag, reserved_2, sha, rest = numbers[7:]
        if codec:
            self.fail(f"{what} has codec {codec}; only 0 is supported")
        if reserved or reserved_2 or any(nonce) or any(tag) or any(rest):
            self.fail(f"reserved bytes of {what} are not zero")
        if plain != stored:
            self.fail(f"{what} stores {stored} bytes, but says {plain} plain ones")
        if section is None or not stored or offset % alignment or not _within(offset, stored, section):
            self.fail(f"{what} at {offset} is not aligned or not inside the expert data section")
        spans = []
        shapes = ((ffn, width), (ffn, width), (width, ffn))
        for name, part, format, (rows, cols) in zip(("gate", "up", "down"), parts, formats, shapes, strict=True):
            if format not in layout.FORMAT_BY_ID:
                self.fail(f"{name} of {what} has unknown format {format}")
            layout_id = default_layout(layout.FORMAT_BY_ID[format]).id
            size = self.packed_size(f"{name} of {what}", format, layout_id, rows, cols)
            if part % layout.PART_ALIGNMENT or part + size > stored:
                self.fail(f"{name} of {what} is not aligned or ends beyond the record")
            spans.append((part, size))
        if _overlap(spans):
            self.fail(f"gate, up and down of {what} overlap")
        return ExpertEntry(offset, stored, crc, formats, parts, sha)

    def text(self, data: bytes, what: str) -> str:
        """Decode UTF-8."""
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.fail(f"the {what} section is not UTF-8")

    def json_object(self, data: bytes, what: str) -> dict[str, Any]:
        """Parse a JSON object."""
        try:
            value = json.loads(self.text(data, what))
        except (ValueError, RecursionError):
            self.fail(f"the {what} section is not JSON")
        if not isinstance(value, dict):
            self.fail(f"the {what} section is not a JSON object")
        return value

    def _head(self, head: Any, data: bytes, what: str) -> tuple[int, int]:
        if len(data) < head.size:
            self.fail(f"the {what} is truncated")
        return head.unpack_from(data)

    def packed_size(self, what: str, format: int, layout_id: int, rows: int, cols: int) -> int:
        """Return the bytes that a matrix takes; an error where format and layout do not go together."""
        if format not in layout.FORMAT_BY_ID or layout_id not in layout.LAYOUT_BY_ID:
            self.fail(f"{what} has unknown format {format} or layout {layout_id}")
        try:
            return packed_size(layout.FORMAT_BY_ID[format], layout.LAYOUT_BY_ID[layout_id], rows, cols)
        except UsageError as error:
            raise ModelFileError(f"{self._path}: {what}: {error}") from None

    def _inside(self, offset: int, size: int) -> bool:
        return offset + size <= self._file_size


def _is_alignment(number: int) -> bool:
    return layout.MINIMUM_ALIGNMENT <= number <= layout.MAXIMUM_ALIGNMENT and number & (number - 1) == 0


def _within(offset: int, size: int, section: Section) -> bool:
    return section.offset <= offset and offset + size <= section.offset + section.size


def _overlap(spans: Sequence[tuple[int, int]]) -> bool:
    ordered = sorted(spans)
    return any(first + size > second for (first, size), (second, _) in itertools.pairwise(ordered))

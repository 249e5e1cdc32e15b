"""The bytes of a .cbi file with names for its fields, and the repair of its checksums."""

from __future__ import annotations

import hashlib
import struct
import tomllib
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

OPS = {
    op["number"]: op
    for op in tomllib.loads((Path(__file__).resolve().parents[2] / "spec" / "ops.toml").read_text())["op"]
}
SECTION_NAMES = {1: "program", 2: "tensors", 3: "experts", 4: "tensor_data", 5: "expert_data"}
HEADER = [
    ("magic", 0, 8), ("version", 8, 4), ("header_size", 12, 4), ("alignment", 16, 4), ("contract", 20, 4),
    ("features", 24, 8), ("file_size", 32, 8), ("table_offset", 40, 8), ("section_count", 48, 4), ("volume", 52, 4),
    ("volumes", 56, 4), ("table_crc", 60, 4), ("digest", 64, 8), ("reserved", 96, 8), ("crc", 124, 4),
]  # fmt: skip
SECTION = [
    ("type", 0, 4), ("version", 4, 2), ("flags", 6, 2), ("offset", 8, 8), ("size", 16, 8), ("crc", 24, 4),
    ("reserved", 28, 4), ("sha", 32, 8),
]  # fmt: skip
TENSOR = [
    ("name_offset", 0, 4), ("name_length", 4, 4), ("format", 8, 2), ("layout", 10, 2), ("reserved", 12, 4),
    ("rows", 16, 8), ("cols", 24, 8), ("offset", 32, 8), ("size", 40, 8), ("crc", 48, 4), ("reserved2", 52, 4),
    ("sha", 56, 8), ("reserved3", 88, 8),
]  # fmt: skip
SET = [("count", 0, 4), ("width", 4, 4), ("ffn", 8, 4), ("layer", 12, 4), ("reserved", 16, 8), ("reserved2", 24, 8)]
EXPERT = [
    ("offset", 0, 8), ("stored", 8, 8), ("plain", 16, 8), ("codec", 24, 4), ("crc", 28, 4), ("gate_format", 32, 2),
    ("up_format", 34, 2), ("down_format", 36, 2), ("reserved", 38, 2), ("gate", 40, 8), ("up", 48, 8), ("down", 56, 8),
    ("nonce", 64, 8), ("tag", 76, 8), ("reserved2", 92, 4), ("sha", 96, 8), ("reserved3", 128, 8),
]  # fmt: skip
PROGRAM = [
    "ops_version", "vocabulary_size", "context_limit", "state_format", "value_count", "state_count", "entry_count",
    "op_count", "word_count",
]  # fmt: skip


@dataclass(frozen=True)
class Field:
    offset: int
    size: int  # bytes: 2, 4 or 8


def crc32c(data: bytes) -> int:
    return google_crc32c.value(data)


class Image:
    """A file to be changed. `fields` describe the valid file it was made from."""

    def __init__(self, data: bytes, fields: dict[str, Field] | None = None) -> None:
        self.data = bytearray(data)
        self.fields = find_fields(data) if fields is None else fields

    def get(self, name: str) -> int:
        field = self.fields[name]
        return int.from_bytes(self.data[field.offset : field.offset + field.size], "little")

    def set(self, name: str, value: int) -> None:
        field = self.fields[name]
        number = value % (1 << 8 * field.size)
        self.data[field.offset : field.offset + field.size] = number.to_bytes(field.size, "little")

    def section(self, name: str) -> tuple[int, int]:
        """Offset and size, as the table now says."""
        return self.get(f"section.{name}.offset"), self.get(f"section.{name}.size")

    def resize_section(self, name: str, content: bytes) -> None:
        """Gives the section new bytes of any size, at the end of the file."""
        self.data.extend(bytes(-len(self.data) % 64))
        self.set(f"section.{name}.offset", len(self.data))
        self.set(f"section.{name}.size", len(content))
        self.data.extend(content)
        self.set("header.file_size", len(self.data))

    def repair(self) -> Image:
        """Makes every checksum and digest right again, as far as the ranges make sense."""
        data = self.data
        if len(data) < 128:
            return self
        table, count = self.get("header.table_offset"), self.get("header.section_count")
        entries = [e for i in range(min(count, 64)) if (e := table + 64 * i) + 64 <= len(data)]
        for entry in entries:
            offset, size = struct.unpack_from("<QQ", data, entry + 8)
            kind = struct.unpack_from("<I", data, entry)[0]
            if kind == 2:
                self._repair_tensors(offset, size)
            elif kind == 3:
                self._repair_experts(offset, size)
        for entry in entries:
            flags, offset, size = struct.unpack_from("<HQQ", data, entry + 6)
            if not flags & 2 and offset + size <= len(data):
                content = bytes(data[offset : offset + size])
                struct.pack_into("<I", data, entry + 24, crc32c(content))
                data[entry + 32 : entry + 64] = hashlib.sha256(content).digest()
        content = bytes(data[table : table + 64 * count]) if table < len(data) and count <= 64 else b""
        struct.pack_into("<I", data, 60, crc32c(content))
        data[64:96] = hashlib.sha256(content).digest()
        struct.pack_into("<I", data, 124, crc32c(bytes(data[:124])))
        return self

    def _repair_range(self, entry: int, offset: int, size: int, crc_at: int, sha_at: int) -> None:
        if offset + size <= len(self.data) and entry + sha_at + 32 <= len(self.data):
            content = bytes(self.data[offset : offset + size])
            struct.pack_into("<I", self.data, entry + crc_at, crc32c(content))
            self.data[entry + sha_at : entry + sha_at + 32] = hashlib.sha256(content).digest()

    def _repair_tensors(self, offset: int, size: int) -> None:
        end = min(offset + size, len(self.data))
        if offset + 8 > end:
            return
        count = struct.unpack_from("<I", self.data, offset)[0]
        for entry in range(offset + 8, min(offset + 8 + 96 * count, end) - 95, 96):
            self._repair_range(entry, *struct.unpack_from("<QQ", self.data, entry + 32), 48, 56)

    def _repair_experts(self, offset: int, size: int) -> None:
        end = min(offset + size, len(self.data))
        if offset + 8 > end:
            return
        at = offset + 8
        for _ in range(struct.unpack_from("<I", self.data, offset)[0]):
            if at + 32 > end:
                return
            experts = struct.unpack_from("<I", self.data, at)[0]
            at += 32
            for entry in range(at, min(at + 160 * experts, end) - 159, 160):
                self._repair_range(entry, *struct.unpack_from("<QQ", self.data, entry), 28, 96)
            at += 160 * experts


def find_fields(data: bytes) -> dict[str, Field]:
    """Names every field of a valid file: header.*, section.<name>.*, tensor.<i>.*, set.<i>.*,
    expert.<set>.<i>.*, program.*, value.<i>.*, state.<i>.*, entry.*, op.<i>.*."""
    fields: dict[str, Field] = {}

    def add(prefix: str, base: int, members: list[tuple[str, int, int]]) -> None:
        fields.update({f"{prefix}.{name}": Field(base + offset, size) for name, offset, size in members})

    def u32(at: int) -> int:
        return struct.unpack_from("<I", data, at)[0]

    add("header", 0, HEADER)
    table, count = struct.unpack_from("<QI", data, 40)
    places: dict[int, int] = {}
    for i in range(count):
        kind = u32(table + 64 * i)
        add(f"section.{SECTION_NAMES.get(kind, str(kind))}", table + 64 * i, SECTION)
        places[kind] = struct.unpack_from("<Q", data, table + 64 * i + 8)[0]

    base = places[2]
    add("tensors", base, [("count", 0, 4), ("name_bytes", 4, 4)])
    for i in range(u32(base)):
        add(f"tensor.{i}", base + 8 + 96 * i, TENSOR)

    if 3 in places:
        base = places[3]
        add("experts", base, [("count", 0, 4), ("reserved", 4, 4)])
        at = base + 8
        for s in range(u32(base)):
            add(f"set.{s}", at, SET)
            experts = u32(at)
            at += 32
            for i in range(experts):
                add(f"expert.{s}.{i}", at + 160 * i, EXPERT)
            at += 160 * experts

    base = places[1]
    add("program", base, [(name, 4 * i, 4) for i, name in enumerate(PROGRAM)])
    at = base + 36
    for i in range(u32(base + 16)):
        add(f"value.{i}", at, [("kind", 0, 4), ("width", 4, 4), ("extent", 8, 4), ("name", 12, 8), ("name_end", 24, 8)])
        at += 32
    for i in range(u32(base + 20)):
        names = ("kind", "kv_heads", "key_dim", "value_dim", "layer")
        add(f"state.{i}", at, [(name, 4 * j, 4) for j, name in enumerate(names)])
        at += 20
    add("entry", at, [("name", 0, 8), ("name_end", 24, 8), ("first_op", 32, 4), ("op_count", 36, 4)])
    add("entry", at, [("output_count", 40, 4), ("output_name", 44, 8), ("output_value", 76, 4)])
    at += 80
    for i in range(u32(base + 28)):
        operands = OPS[u32(at)]["operands"]
        members = [("number", 0, 4), ("layer", 4, 4)]
        add(f"op.{i}", at, members + [(operand["name"], 8 + 4 * j, 4) for j, operand in enumerate(operands)])
        at += 8 + 4 * len(operands)
    return fields

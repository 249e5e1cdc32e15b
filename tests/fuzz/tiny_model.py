"""Writes a tiny valid .cbi from spec/cbi.md alone: a second opinion beside the package's writer.

Two layers, two expert sets, every op of the table; tensors in f32, q8_g32 and q4_g32. Needs the
standard library alone, since the native tests are built where nothing else is installed.

    tiny_model.py OUT.cbi
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SPEC = Path(__file__).resolve().parents[2] / "spec"
OPS = {op["name"]: op for op in tomllib.loads((SPEC / "ops.toml").read_text())["op"]}
ABSENT = 0xFFFFFFFF
F32, Q8_G32, Q4_G32 = 1, 4, 6
ROWS, TILED16, TILED16X4 = 1, 2, 3
TOKENS, OUTPUTS, ROUTING = 1, 2, 3
CRITICAL, DATA = 1, 2

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, EXPERTS, CHOSEN = 24, 32, 2, 1, 16, 16, 3, 2


def crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


CRC_TABLE = crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Matrix:
    """A packed matrix [rows, cols]."""

    format: int
    layout: int
    rows: int
    cols: int
    data: bytes


def pack_f32(rows: int, cols: int, layout: int, value: Callable[[int, int], float]) -> Matrix:
    """value(row, column) as float32 in layout rows or tiled16."""
    if layout == ROWS:
        numbers = [value(r, c) for r in range(rows) for c in range(cols)]
    else:
        numbers = [
            value(tile + r, c) if tile + r < rows else 0.0
            for tile in range(0, rows, 16)
            for c in range(cols)
            for r in range(16)
        ]
    return Matrix(F32, layout, rows, cols, struct.pack(f"<{len(numbers)}f", *numbers))


def pack_quantised(
    weight_format: int,
    rows: int,
    cols: int,
    layout: int,
    code: Callable[[int, int], int],
    scale: Callable[[int, int], float],
) -> Matrix:
    """code(row, column): -127..127 for q8, -8..7 for q4 (stored + 8); scale(row, group of 32)."""
    bits = 8 if weight_format == Q8_G32 else 4
    zero = 0 if bits == 8 else 8

    def stored(row: int, column: int) -> int:
        inside = row < rows and column < cols
        return ((code(row, column) if inside else 0) + zero) & (2**bits - 1)

    def scale_of(row: int, group: int) -> bytes:
        inside = row < rows and group * 32 < cols
        return struct.pack("<e", scale(row, group) if inside else 0.0)

    out = bytearray()
    blocks = range(0, round_up(cols, 128), 128)
    if layout == ROWS:
        for row in range(rows):
            for block in blocks:
                codes = [stored(row, block + k) for k in range(128)]
                out += (
                    bytes(codes)
                    if bits == 8
                    else bytes(a | b << 4 for a, b in zip(codes[::2], codes[1::2], strict=True))
                )
                out += b"".join(scale_of(row, block // 32 + g) for g in range(4))
    else:
        for tile in range(0, rows, 16):
            for block in blocks:
                steps = [[stored(tile + r, block + 4 * j + k) for r in range(16) for k in range(4)] for j in range(32)]
                if bits == 8:
                    out += b"".join(bytes(step) for step in steps)
                else:
                    for low, high in zip(steps[::2], steps[1::2], strict=True):
                        out += bytes(a | b << 4 for a, b in zip(low, high, strict=True))
                out += b"".join(scale_of(tile + r, block // 32 + g) for g in range(4) for r in range(16))
                out += bytes(-len(out) % 64)
    return Matrix(weight_format, layout, rows, cols, bytes(out))


def random_matrix(weight_format: int, rows: int, cols: int, layout: int, seed: int) -> Matrix:
    generator = random.Random(seed)
    if weight_format == F32:
        values = [[generator.uniform(-0.5, 0.5) for _ in range(cols)] for _ in range(rows)]
        return pack_f32(rows, cols, layout, lambda r, c: values[r][c])
    low, high = (-127, 127) if weight_format == Q8_G32 else (-8, 7)
    codes = [[generator.randint(low, high) for _ in range(cols)] for _ in range(rows)]
    scales = [[generator.uniform(0.5, 1) / high / 4 for _ in range(-(-cols // 32))] for _ in range(rows)]
    return pack_quantised(weight_format, rows, cols, layout, lambda r, c: codes[r][c], lambda r, g: scales[r][g])


def float_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


class Program:
    """Collects values, states and ops, then encodes them."""

    def __init__(self) -> None:
        self.values: list[tuple[int, int, int, str]] = []
        self.states: list[tuple[int, int, int, int, int]] = []
        self.ops: list[list[int]] = []

    def value(self, name: str, kind: int, width: int, extent: int = 0) -> int:
        self.values.append((kind, width, extent, name))
        return len(self.values) - 1

    def state(self, layer: int) -> int:
        self.states.append((1, KV_HEADS, HEAD_DIM, HEAD_DIM, layer))
        return len(self.states) - 1

    def op(self, name: str, layer: int, **operands: float) -> None:
        words = [OPS[name]["number"], layer]
        for operand in OPS[name]["operands"]:
            number = operands.pop(operand["name"])
            words.append(float_bits(number) if operand["kind"] == "f32" else int(number))
        assert not operands, f"{name} has no operand {list(operands)}"
        self.ops.append(words)

    def encode(self, logits: int) -> bytes:
        words = sum(len(op) for op in self.ops)
        out = struct.pack("<4I", 1, VOCABULARY, 64, 1)
        out += struct.pack("<5I", len(self.values), len(self.states), 1, len(self.ops), words)
        for kind, width, extent, name in self.values:
            out += struct.pack("<3I20s", kind, width, extent, name.encode())
        for state in self.states:
            out += struct.pack("<5I", *state)
        out += struct.pack("<32s3I", b"main", 0, len(self.ops), 1) + struct.pack("<32sI", b"logits", logits)
        return out + b"".join(struct.pack(f"<{len(op)}I", *op) for op in self.ops)


def make_model() -> tuple[bytes, dict[str, Matrix], list[list[tuple[Matrix, Matrix, Matrix]]]]:
    """The program, the tensors by name, and the experts (gate, up, down) of each set."""
    program = Program()
    tensors: dict[str, Matrix] = {}

    def tensor(name: str, weight_format: int, rows: int, cols: int, layout: int) -> int:
        tensors[name] = random_matrix(weight_format, rows, cols, layout, len(tensors))
        return len(tensors) - 1

    hidden = program.value("hidden", TOKENS, WIDTH)
    normed = program.value("normed", TOKENS, WIDTH)
    q = program.value("q", TOKENS, HEADS * HEAD_DIM)
    k = program.value("k", TOKENS, KV_HEADS * HEAD_DIM)
    v = program.value("v", TOKENS, KV_HEADS * HEAD_DIM)
    table = program.value("rope", TOKENS, HEAD_DIM)
    attended = program.value("attended", TOKENS, HEADS * HEAD_DIM)
    scores = program.value("router", TOKENS, EXPERTS)
    routing = program.value("routing", ROUTING, CHOSEN, EXPERTS)
    mixed = program.value("mixed", TOKENS, WIDTH)
    gate = program.value("gate", TOKENS, FFN)
    up = program.value("up", TOKENS, FFN)
    shared_gate = program.value("shared_gate", TOKENS, 1)
    last = program.value("last", OUTPUTS, WIDTH)
    last_normed = program.value("last_normed", OUTPUTS, WIDTH)
    logits = program.value("logits", OUTPUTS, VOCABULARY)

    def norm(layer: int, y: int, x: int, name: str) -> None:
        weight = tensor(name, F32, 1, WIDTH, ROWS)
        program.op("rms_norm", layer, y=y, x=x, weight=weight, group=WIDTH, epsilon=1e-6)

    def matmul(
        layer: int, y: int, x: int, name: str, weight_format: int, rows: int, cols: int, bias: int = ABSENT
    ) -> None:
        weight = tensor(name, weight_format, rows, cols, TILED16 if weight_format == F32 else TILED16X4)
        program.op("matmul", layer, y=y, x=x, weight=weight, bias=bias)

    program.op("embed", ABSENT, y=hidden, table=tensor("embed", Q8_G32, VOCABULARY, WIDTH, ROWS))
    frequencies = tensor("rope_inverse_frequencies", F32, 1, HEAD_DIM // 2, ROWS)
    program.op("rope_table", ABSENT, table=table, inverse_frequencies=frequencies, scale=1.0)
    for layer in range(2):
        cache = program.state(layer)
        norm(layer, normed, hidden, f"layers.{layer}.norm")
        bias = tensor(f"layers.{layer}.q_bias", F32, 1, HEADS * HEAD_DIM, ROWS) if layer else ABSENT
        matmul(layer, q, normed, f"layers.{layer}.q", Q4_G32, HEADS * HEAD_DIM, WIDTH, bias)
        matmul(layer, k, normed, f"layers.{layer}.k", Q8_G32, KV_HEADS * HEAD_DIM, WIDTH)
        matmul(layer, v, normed, f"layers.{layer}.v", F32, KV_HEADS * HEAD_DIM, WIDTH)
        program.op("clamp", layer, y=v, x=v, low=-8.0, high=8.0)
        program.op("rope", layer, y=q, x=q, table=table, head_dim=HEAD_DIM, pairing=1 + layer)
        program.op("rope", layer, y=k, x=k, table=table, head_dim=HEAD_DIM, pairing=1 + layer)
        program.op(
            "attention", layer, y=attended, q=q, k=k, v=v, cache=cache, heads=HEADS, window=4 * layer, scale=0.25
        )  # fmt: skip
        matmul(layer, mixed, attended, f"layers.{layer}.o", Q4_G32, WIDTH, HEADS * HEAD_DIM)
        program.op("add", layer, y=hidden, a=hidden, b=mixed)
        norm(layer, normed, hidden, f"layers.{layer}.norm2")
        matmul(layer, scores, normed, f"layers.{layer}.router", F32, EXPERTS, WIDTH)
        program.op("route", layer, routing=routing, logits=scores, normalise=layer, scale=1.0)
        program.op("experts", layer, y=mixed, x=normed, routing=routing, set=layer, activation=1)
        program.op("add", layer, y=hidden, a=hidden, b=mixed)
    matmul(1, gate, normed, "layers.1.shared.gate", Q4_G32, FFN, WIDTH)
    matmul(1, up, normed, "layers.1.shared.up", Q4_G32, FFN, WIDTH)
    program.op("gated_activation", 1, y=gate, gate=gate, up=up, activation=1)
    matmul(1, mixed, gate, "layers.1.shared.down", Q4_G32, WIDTH, FFN)
    matmul(1, shared_gate, normed, "layers.1.shared.switch", F32, 1, WIDTH)
    program.op("sigmoid_gate", 1, y=mixed, x=mixed, gate=shared_gate)
    program.op("add", 1, y=hidden, a=hidden, b=mixed)
    program.op("gather_outputs", ABSENT, y=last, x=hidden)
    norm(ABSENT, last_normed, last, "norm")
    matmul(ABSENT, logits, last_normed, "head", Q8_G32, VOCABULARY, WIDTH)

    sets: list[list[tuple[Matrix, Matrix, Matrix]]] = []
    for layer in range(2):
        weight_format, layout = (Q4_G32, TILED16X4) if layer == 0 else (F32, TILED16)
        sets.append(
            [
                (
                    random_matrix(weight_format, FFN, WIDTH, layout, 100 + 10 * layer + e),
                    random_matrix(weight_format, FFN, WIDTH, layout, 200 + 10 * layer + e),
                    random_matrix(weight_format, WIDTH, FFN, layout, 300 + 10 * layer + e),
                )
                for e in range(EXPERTS)
            ]
        )
    return program.encode(logits), tensors, sets


def encode_file(
    program: bytes,
    tensors: dict[str, Matrix],
    sets: Sequence[Sequence[tuple[Matrix, Matrix, Matrix]]],
    alignment: int,
) -> bytes:
    """Lays out header, tensor data, expert data, directories, program, texts and the section table."""
    out = bytearray(128)
    sections: list[tuple[int, int, int, int]] = []  # type, flags, offset, size

    def pad(unit: int) -> int:
        out.extend(bytes(-len(out) % unit))
        return len(out)

    start = pad(alignment)
    names, directory = b"", b""
    for name, matrix in tensors.items():
        offset = pad(64)
        out.extend(matrix.data)
        directory += struct.pack("<IIHHI", len(names), len(name), matrix.format, matrix.layout, 0)
        directory += struct.pack("<4Q", matrix.rows, matrix.cols, offset, len(matrix.data))
        directory += struct.pack("<II32s8x", crc32c(matrix.data), 0, hashlib.sha256(matrix.data).digest())
        names += name.encode()
    sections.append((4, CRITICAL | DATA, start, len(out) - start))

    start = pad(alignment)
    experts = struct.pack("<II", len(sets), 0)
    for layer, members in enumerate(sets):
        experts += struct.pack("<4I16x", len(members), WIDTH, FFN, layer)
        for parts in members:
            offset = pad(alignment)
            inside = []
            for part in parts:
                inside.append(pad(64) - offset)
                out.extend(part.data)
            record = bytes(out[offset:])
            experts += struct.pack("<3Q2I", offset, len(record), len(record), 0, crc32c(record))
            experts += struct.pack("<4H3Q32x", *(part.format for part in parts), 0, *inside)
            experts += hashlib.sha256(record).digest() + bytes(32)
    sections.append((5, CRITICAL | DATA, start, len(out) - start))

    contents = [
        (1, CRITICAL, program),
        (2, CRITICAL, struct.pack("<II", len(tensors), len(names)) + directory + names),
        (3, CRITICAL, experts),
        (8, 0, b"{}"),
        (9, 0, b'{"family": "tiny"}'),
        (77, 0, b"a section of a later version, to be skipped"),
    ]
    for section_type, flags, data in contents:
        sections.append((section_type, flags, pad(64), len(data)))
        out.extend(data)

    table = b""
    for section_type, flags, offset, size in sections:
        data = bytes(out[offset : offset + size])
        sums = (0, 0, bytes(32)) if flags & DATA else (crc32c(data), 0, hashlib.sha256(data).digest())
        table += struct.pack("<IHHQQ", section_type, 1, flags, offset, size) + struct.pack("<II32s", *sums)
    table_offset = pad(8)
    out.extend(table)
    header = struct.pack("<8s4I", b"COLIBRI\0", 1, 128, alignment, 1)
    header += struct.pack("<3Q4I", 0, len(out), table_offset, len(sections), 0, 1, crc32c(table))
    header += hashlib.sha256(table).digest() + bytes(28)
    out[:128] = header + struct.pack("<I", crc32c(header))
    return bytes(out)


def tiny_model(alignment: int = 64) -> bytes:
    """A valid file of about 75 KB (more with a larger alignment)."""
    return encode_file(*make_model(), alignment)


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(tiny_model())

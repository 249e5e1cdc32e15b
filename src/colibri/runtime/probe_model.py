"""A small model with the shape of one layer of a large one, for measuring how fast this machine computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from colibri.cbi import CbiFile, CbiWriter
from colibri.cbi.layout import FORMAT_BY_ID, LAYOUT_BY_ID
from colibri.program.ops import ABSENT, BY_NUMBER, Opcode, ValueKind
from colibri.program.program import Entry, Op, Program, State, Value
from colibri.quantize import default_layout, packed_size
from colibri.quantize.formats import ACTIVATION_BLOCK, TILE_ROWS, WeightFormat, WeightLayout

VOCABULARY = 1024
_MOST_LAYERS = 16


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of weights that one token reads."""

    dense: int  # without the head
    head: int
    experts: int

    @property
    def all(self) -> int:
        return self.dense + self.head + self.experts


def token_bytes(file: CbiFile) -> TokenBytes:
    """Count what the ops of a program read for one token."""
    dense = head = experts = 0
    program = file.program
    for op in program.ops:
        if op.opcode == Opcode.EXPERTS:
            records = file.expert_sets[int(op.operands["set"])].experts
            chosen = program.values[int(op.operands["routing"])].width
            experts += chosen * sum(record.size for record in records) // len(records)
        elif op.opcode != Opcode.EMBED:
            size = sum(file.tensors[index].size for index in _weights(op).values())
            is_head = "y" in op.operands and program.values[int(op.operands["y"])].kind == ValueKind.OUTPUTS
            dense, head = dense + (0 if is_head else size), head + (size if is_head else 0)
    return TokenBytes(dense, head, experts)


def write_probe_model(source: CbiFile, path: Path, room: int) -> None:
    """Write the first layer of `source` that has experts (else its first layer), with random weights.

    It is repeated, with fewer experts than the model has where they are large, until the weights take about `room`
    bytes.
    """
    program, random = source.program, np.random.default_rng(1)
    layer = _probed_layer(program)
    own = [op for op in program.ops if op.layer == layer]
    first = program.ops.index(own[0])
    before = [op for op in program.ops[:first] if op.layer is None]
    after = [op for op in program.ops[first:] if op.layer is None]
    experts_op = next((op for op in own if op.opcode == Opcode.EXPERTS), None)
    dense_bytes = sum(source.tensors[index].size for op in own for index in _weights(op).values())
    kept, record = 0, 0
    widths = {i: VOCABULARY for i, v in enumerate(program.values) if _is_logits(program, i, v)}
    extents: dict[int, int] = {}
    if experts_op is not None:
        routing = int(experts_op.operands["routing"])
        expert_set = source.expert_sets[int(experts_op.operands["set"])]
        record = max(expert.size for expert in expert_set.experts)
        chosen = program.values[routing].width
        kept = min(len(expert_set.experts), max(2 * chosen, room // record))
        route = next(op for op in own if op.opcode == Opcode.ROUTE)
        widths[int(route.operands["logits"])] = extents[routing] = kept
    layers = max(1, min(_MOST_LAYERS, room // max(1, dense_bytes + kept * record)))
    values = tuple(
        replace(value, width=widths.get(index, value.width), extent=extents.get(index, value.extent))
        for index, value in enumerate(program.values)
    )

    ops: list[Op] = []
    states: list[State] = []
    tensors: dict[tuple[int, int], int] = {}  # (layer of the probe, index in the source) -> index
    for number, part in [(-1, before), *((n, own) for n in range(layers)), (-1, after)]:
        for op in part:
            operands = dict(op.operands)
            for name, index in _weights(op).items():
                operands[name] = tensors.setdefault((number, index), len(tensors))
            if op.opcode == Opcode.EXPERTS:
                operands["set"] = number
            elif op.opcode == Opcode.ATTENTION:
                states.append(replace(program.states[int(operands["cache"])], layer=number))
                operands["cache"] = len(states) - 1
            ops.append(Op(op.opcode, None if number < 0 else number, operands))
    shapes = _shapes(ops, values, {new: source.tensors[old] for (_, old), new in tensors.items()})

    with CbiWriter(path) as writer:
        for (number, old), new in tensors.items():
            entry, (rows, cols) = source.tensors[old], shapes[new]
            format, layout = FORMAT_BY_ID[entry.format], LAYOUT_BY_ID[entry.layout]
            data = random_weights(format, layout, rows, cols, random)
            writer.add_tensor(f"{entry.name}.{number}", format.name, layout.name, rows, cols, [data])
        if experts_op is not None:
            expert_set = source.expert_sets[int(experts_op.operands["set"])]
            sizes = ((expert_set.ffn, expert_set.width),) * 2 + ((expert_set.width, expert_set.ffn),)
            formats = [FORMAT_BY_ID[number] for number in expert_set.experts[0].formats]
            # All experts have the same weights: what matters is that they lie in different places.
            parts = [
                random_weights(format, default_layout(format), rows, cols, random)
                for format, (rows, cols) in zip(formats, sizes, strict=True)
            ]
            for number in range(layers):
                writer.begin_expert_set(layer=number, width=expert_set.width, ffn=expert_set.ffn)
                for _ in range(kept):
                    writer.add_expert([format.name for format in formats], [[part] for part in parts])
        outputs = program.entries[0].outputs
        writer.finish(
            Program(
                VOCABULARY, program.context_limit, program.default_state_format, values, tuple(states),
                (Entry("main", 0, len(ops), outputs),), tuple(ops),
            )
        )  # fmt: skip


def random_weights(
    format: WeightFormat, layout: WeightLayout, rows: int, cols: int, random: np.random.Generator
) -> bytes:
    """Packed weights whose products neither grow nor vanish."""
    size = packed_size(format.name, layout, rows, cols)
    deviation = cols**-0.5
    if format.is_float:
        count = size * 8 // format.bits
        numbers = (random.standard_normal(count, np.float32) * deviation).astype(np.float32)
        if format.name == "bf16":
            return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return numbers.astype(np.float16 if format.name == "f16" else np.float32).tobytes()
    block_rows = 1 if layout.name == "rows" else TILE_ROWS
    codes = block_rows * ACTIVATION_BLOCK * format.bits // 8
    scales = block_rows * ACTIVATION_BLOCK // format.group
    blocks = size // (codes + 2 * scales)
    largest = 2 ** (format.bits - 1)
    data = np.empty((blocks, codes + 2 * scales), np.uint8)
    data[:, :codes] = random.integers(0, 256, (blocks, codes), np.uint8)
    if format.bits == 8:
        data[:, :codes][data[:, :codes] == 128] = 0  # -128 is no code
    data[:, codes:] = np.full(scales, deviation * 3**0.5 / largest, "<f2").view(np.uint8)
    return data.tobytes()


def _probed_layer(program: Program) -> int | None:
    layers = [op.layer for op in program.ops if op.opcode == Opcode.EXPERTS] or [
        op.layer for op in program.ops if op.layer is not None
    ]
    return layers[0]


def _is_logits(program: Program, index: int, value: Value) -> bool:
    return value.kind == ValueKind.OUTPUTS and any(index == output for _, output in program.entries[0].outputs)


def _weights(op: Op) -> dict[str, int]:
    """Weight operands that are there, by name."""
    names = [operand.name for operand in BY_NUMBER[op.opcode].operands if operand.kind == "weight"]
    return {name: int(op.operands[name]) for name in names if op.operands[name] != ABSENT}


def _shapes(ops: list[Op], values: tuple[Value, ...], entries: dict) -> dict[int, tuple[int, int]]:
    """Rows and columns of each tensor, changed where a value that it makes has changed."""
    shapes = {index: (entry.rows, entry.cols) for index, entry in entries.items()}

    def changes() -> Iterator[tuple[int, int, int]]:
        for op in ops:
            if op.opcode == Opcode.EMBED:
                yield int(op.operands["table"]), VOCABULARY, values[int(op.operands["y"])].width
            elif op.opcode == Opcode.MATMUL:
                made, taken = values[int(op.operands["y"])].width, values[int(op.operands["x"])].width
                yield int(op.operands["weight"]), made, taken
                if op.operands["bias"] != ABSENT:
                    yield int(op.operands["bias"]), 1, made

    return shapes | {index: (rows, cols) for index, rows, cols in changes()}

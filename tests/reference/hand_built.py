"""Writes a `.cbi` file for a program built by hand, without a model family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from colibri.cbi import CbiWriter
from colibri.program import Program, ProgramBuilder
from colibri.program.ops import BY_NUMBER
from colibri.quantize import default_layout, pack, quantise

Matrices = tuple[np.ndarray, np.ndarray, np.ndarray]

_ROW_MAJOR = {("embed", "table"), ("rms_norm", "weight"), ("matmul", "bias"), ("rope_table", "inverse_frequencies")}


def write_file(
    path: Path,
    builder: ProgramBuilder,
    weights: Mapping[str, np.ndarray],
    experts: Mapping[str, Sequence[Matrices]] | None = None,
    *,
    vocabulary_size: int,
    context_limit: int = 4096,
    formats: Mapping[str, str] | None = None,
    expert_formats: tuple[str, str, str] = ("f32", "f32", "f32"),
) -> None:
    """Write the program of `builder`. weights: float32 [rows, columns] by name; experts: gate, up and down by set.

    `formats` names the weights that are not f32.
    """
    program = builder.build(vocabulary_size=vocabulary_size, context_limit=context_limit, default_state_format=1)
    row_major = _row_major_weights(program)
    with CbiWriter(path) as writer:
        for number, name in enumerate(builder.weight_names):
            format = (formats or {}).get(name, "f32")
            layout = "rows" if number in row_major else default_layout(format).name
            packed = pack(quantise(weights[name], format), layout)
            writer.add_tensor(name, format, layout, *weights[name].shape, [packed.tobytes()])
        for set_name in builder.expert_set_names:
            expert_set = (experts or {})[set_name]
            ffn, width = expert_set[0][0].shape
            writer.begin_expert_set(layer=0, width=width, ffn=ffn)
            for matrices in expert_set:
                parts = [
                    [pack(quantise(matrix, format)).tobytes()]
                    for matrix, format in zip(matrices, expert_formats, strict=True)
                ]
                writer.add_expert(expert_formats, parts)
        writer.finish(program)


def _row_major_weights(program: Program) -> set[int]:
    found = set()
    for op in program.ops:
        info = BY_NUMBER[op.opcode]
        for operand in info.operands:
            if (info.name, operand.name) in _ROW_MAJOR:
                found.add(int(op.operands[operand.name]))
    return found

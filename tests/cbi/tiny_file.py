"""Writes a small `.cbi` file of the hand-built program; every value follows from a formula, none from chance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from program.hand_built import HandBuilt, hand_built

from colibri.cbi import CbiWriter
from colibri.quantize import pack, quantise

SETTINGS = {"generation": {"temperature": 0.5}, "note": "e\u0301t\u00e9"}
METADATA = {"family": "hand built"}
TOKENIZER = b'{"version": "1.0"}'
TEMPLATE = "{{ messages[0].content }}"


def values(seed: int, rows: int, cols: int) -> np.ndarray:
    """Deterministic float32 [rows, cols] in (-0.5, 0.5), all multiples of 1/1024."""
    index = np.arange(rows * cols, dtype=np.int64).reshape(rows, cols) + 7919 * seed
    return ((index * 40503 % 1021 - 510) / 1024).astype(np.float32)


def tensor_values(built: HandBuilt) -> dict[str, np.ndarray]:
    """Source values of all tensors by name."""
    return {name: values(seed, rows, cols) for seed, (name, rows, cols) in enumerate(built.weights)}


def expert_values(built: HandBuilt, set_index: int, expert: int) -> list[np.ndarray]:
    """Source values of gate, up and down."""
    _, width, ffn = built.expert_sets[set_index]
    seed = 1000 + 100 * set_index + 10 * expert
    return [values(seed + i, *shape) for i, shape in enumerate(((ffn, width), (ffn, width), (width, ffn)))]


def write_tiny(
    path: Path, matrix_format: str = "f32", expert_formats: Sequence[str] = ("f32", "f32", "f32"), **options
) -> bytes:
    """Write the file and return its digest; options go to CbiWriter."""
    built = hand_built()
    source = tensor_values(built)
    with CbiWriter(path, **options) as writer:
        for name, format, layout, rows, cols in built.tensors(matrix_format):
            packed = pack(quantise(source[name], format), layout).tobytes()
            half = len(packed) // 2
            writer.add_tensor(name, format, layout, rows, cols, [packed[:half], packed[half:]])
        for set_index, (count, width, ffn) in enumerate(built.expert_sets):
            writer.begin_expert_set(layer=set_index, width=width, ffn=ffn)
            for expert in range(count):
                three = zip(expert_values(built, set_index, expert), expert_formats, strict=True)
                writer.add_expert(expert_formats, [[pack(quantise(v, f)).tobytes()] for v, f in three])
        return writer.finish(
            built.program,
            tokenizer_json=TOKENIZER,
            chat_template=TEMPLATE,
            settings=SETTINGS,
            metadata=METADATA,
        )

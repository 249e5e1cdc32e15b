"""Programs of one op under test, run by the C core and by the reference.

Inputs reach the op through embeddings: token t reads row t of a table in float32, exactly. The op's output is gathered
and returned as the logits, so the vocabulary is as large as the output is wide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from reference.hand_built import Matrices, write_file

import colibri
from colibri.program import ProgramBuilder
from colibri.reference import ReferenceEngine


@dataclass
class OneOp:
    """A program in the making. Every input has the same number of rows, at most the vocabulary."""

    output_width: int
    context_limit: int = 4096
    builder: ProgramBuilder = field(default_factory=ProgramBuilder)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)
    experts: dict[str, Sequence[Matrices]] = field(default_factory=dict)
    expert_formats: tuple[str, str, str] = ("f32", "f32", "f32")

    def input(self, name: str, rows: np.ndarray) -> str:
        """Declare a value whose row for token t is rows[t]."""
        table = np.zeros((self.output_width, rows.shape[1]), np.float32)
        table[: len(rows)] = rows
        self.builder.tokens(name, rows.shape[1])
        self.builder.op("embed", y=name, table=self.weight(f"{name}_rows", table))
        return name

    def weight(self, name: str, values: np.ndarray, format: str = "f32") -> str:
        """Declare a weight; a vector becomes one row."""
        self.weights[name] = np.atleast_2d(values).astype(np.float32)
        self.formats[name] = format
        return name

    def op(self, name: str, **operands: Any) -> None:
        """Append an op of layer 0."""
        self.builder.op(name, layer=0, **operands)

    def write(self, path: Path, result: str) -> Path:
        """Write the file whose logits are the value `result`, of kind tokens."""
        self.builder.outputs("logits", self.output_width)
        self.builder.op("gather_outputs", layer=0, y="logits", x=result)
        self.builder.output("logits", "logits")
        write_file(
            path,
            self.builder,
            self.weights,
            self.experts,
            vocabulary_size=self.output_width,
            context_limit=self.context_limit,
            formats=self.formats,
            expert_formats=self.expert_formats,
        )
        return path


@dataclass(frozen=True)
class Results:
    """What both executors give, float32 [n, width]."""

    native: np.ndarray
    reference: np.ndarray

    def agree(self, relative: float = 2e-6, absolute: float = 0.0) -> None:
        """Fail unless every difference is within `relative` of the largest value of its row, plus `absolute`."""
        assert np.isfinite(self.reference).all()
        scale = np.abs(self.reference).max(axis=1, keepdims=True)
        excess = np.abs(self.native.astype(np.float64) - self.reference) - relative * scale - absolute
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        assert excess[worst] <= 0, f"at {worst}: {self.native[worst]} instead of {self.reference[worst]}"

    def equal(self) -> None:
        """Fail unless every bit agrees (zeros of either sign are the same)."""
        np.testing.assert_array_equal(self.native, self.reference)


def run_both(path: Path, tokens: Sequence[int], *, state_format: str = "f32", chunk: int | None = None) -> Results:
    """Give the tokens to both, `chunk` at a time (default: all at once)."""
    chunk = chunk or len(tokens)
    parts = [list(tokens[start : start + chunk]) for start in range(0, len(tokens), chunk)]
    reference = ReferenceEngine(path).session(state_format=state_format)
    expected = np.concatenate([reference.forward(part) for part in parts])
    with (
        colibri.Engine(path, threads=2, kv=state_format) as engine,
        engine.session(context=len(tokens)) as session,
    ):
        found = np.concatenate([session.forward(part) for part in parts])
    return Results(found, expected)


def random_rows(seed: int, rows: int, width: int, scale: float = 1.0) -> np.ndarray:
    """Normal float32 [rows, width]."""
    return (np.random.default_rng(seed).standard_normal((rows, width)) * scale).astype(np.float32)


def adversarial_rows(width: int) -> np.ndarray:
    """Rows that break careless arithmetic: zeros of both signs, denormals, huge and mixed magnitudes, one spike."""
    ramp = np.linspace(-1, 1, width, dtype=np.float32)
    spike = np.zeros(width, np.float32)
    spike[width // 2] = 3.0
    signs = np.where(np.arange(width) % 2, np.float32(-1), np.float32(1))
    rows: Mapping[str, np.ndarray] = {
        "zeros": np.zeros(width, np.float32),
        "negative zeros": -np.zeros(width, np.float32),
        "denormals": signs * np.float32(1e-41),
        "below the activation limit": ramp * np.float32(2.0**-101),
        "huge": signs * np.float32(1e15),
        "magnitudes": signs * np.float32(10.0) ** np.linspace(-18, 6, width, dtype=np.float32),
        "cancelling": signs * np.float32(12345.678),
        "spike": spike,
        "halves": np.float32(127) * spike / 3 + np.float32(0.5) * signs,  # codes exactly between two integers
    }
    return np.stack(list(rows.values())).astype(np.float32)

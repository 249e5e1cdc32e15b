"""The weight formats and layouts: ids, group sizes and tile constants.

The figures equal `spec/formats.toml` (a test compares them); nothing is read from TOML at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from colibri.errors import UsageError

ACTIVATION_BLOCK = 128
"""Consecutive k that share one activation scale; part of the numeric contract, the same for every format."""

TILE_ROWS = 16
"""Output rows of one tile: the lanes of the widest supported vector of 32-bit sums."""

TILE_K = 4
"""Consecutive k of one row that one 32-bit dot-product lane consumes."""

BLOCK_ALIGNMENT = 64
"""Tiled blocks are padded to a cache line, so that every vector load of codes is aligned."""


@dataclass(frozen=True)
class WeightFormat:
    """How one weight is stored.

    `bits` counts the bits of one code; `group` is the number of consecutive k that share a float16 scale
    (0 for float formats).
    """

    name: str
    id: int
    bits: int
    group: int
    summary: str

    @property
    def is_float(self) -> bool:
        """True for formats that store values and have no scales."""
        return self.group == 0

    @property
    def zero(self) -> int:
        """The code that means 0.0."""
        return 8 if self.bits == 4 else 0

    @property
    def code_type(self) -> np.dtype:
        """The NumPy type of one code in memory."""
        names = {"f32": "<f4", "bf16": "<u2", "f16": "<f2"}
        return np.dtype(names.get(self.name, "i1" if self.bits == 8 else "u1"))


@dataclass(frozen=True)
class WeightLayout:
    """How the rows of one matrix are ordered in memory."""

    name: str
    id: int
    summary: str


FORMATS: tuple[WeightFormat, ...] = (
    WeightFormat("f32", 1, 32, 0, "IEEE float32"),
    WeightFormat("bf16", 2, 16, 0, "bfloat16; widened to float32 exactly"),
    WeightFormat("f16", 3, 16, 0, "IEEE float16; widened to float32 exactly"),
    WeightFormat(
        "q8_g32", 4, 8, 32, "signed 8-bit codes, a float16 scale for each 32 weights: w = float(code) * scale"
    ),
    WeightFormat("q4_g32", 6, 4, 32, "codes 0..15, a float16 scale for each 32 weights: w = float(code - 8) * scale"),
)

LAYOUTS: tuple[WeightLayout, ...] = (
    WeightLayout("rows", 1, "row-major, one row after another (embeddings)"),
    WeightLayout("tiled16", 2, "float formats: tiles of 16 rows; for each k, 16 values"),
    WeightLayout(
        "tiled16x4",
        3,
        "quantised formats: tiles of 16 rows, blocks of 128 k, steps of 16 rows x 4 k; then the scales of the block",
    ),
)

_FORMATS_BY_NAME = {format.name: format for format in FORMATS}
_LAYOUTS_BY_NAME = {layout.name: layout for layout in LAYOUTS}


def format_named(name: str) -> WeightFormat:
    """Return the format called `name`; raises UsageError that lists the known names."""
    try:
        return _FORMATS_BY_NAME[name]
    except KeyError:
        known = ", ".join(_FORMATS_BY_NAME)
        raise UsageError(f"unknown weight format {name!r}; choose one of {known}") from None


def layout_named(name: str) -> WeightLayout:
    """Return the layout called `name`; raises UsageError that lists the known names."""
    try:
        return _LAYOUTS_BY_NAME[name]
    except KeyError:
        known = ", ".join(_LAYOUTS_BY_NAME)
        raise UsageError(f"unknown weight layout {name!r}; choose one of {known}") from None

"""The weight formats and layouts: ids, group sizes and tile constants.

The figures equal `spec/formats.toml` (a test compares them); nothing is read from TOML at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    (0 for float formats); `zero_points` says whether each group stores its own integer zero-point.
    """

    name: str
    id: int
    bits: int
    group: int
    zero_points: bool
    summary: str

    @property
    def is_float(self) -> bool:
        """True for formats that store values and have no scales."""
        return self.group == 0

    @property
    def fixed_zero(self) -> int:
        """The code that means 0.0 where groups store no zero-point of their own."""
        return 8 if self.bits == 4 else 0


@dataclass(frozen=True)
class WeightLayout:
    """How the rows of one matrix are ordered in memory."""

    name: str
    id: int
    summary: str


FORMATS: tuple[WeightFormat, ...] = (
    WeightFormat("f32", 1, 32, 0, False, "IEEE float32"),
    WeightFormat("bf16", 2, 16, 0, False, "upper half of a float32"),
    WeightFormat("f16", 3, 16, 0, False, "IEEE float16"),
    WeightFormat("q8_g32", 4, 8, 32, False, "signed int8 codes -127..127, one float16 scale for 32 k"),
    WeightFormat("q8_g64", 5, 8, 64, False, "signed int8 codes -127..127, one float16 scale for 64 k"),
    WeightFormat("q4_g32", 6, 4, 32, False, "codes 0..15 around 8, one float16 scale for 32 k"),
    WeightFormat("q4_g64", 7, 4, 64, False, "codes 0..15 around 8, one float16 scale for 64 k"),
    WeightFormat("q4z_g32", 8, 4, 32, True, "codes 0..15, one float16 scale and one zero-point 0..15 for 32 k"),
    WeightFormat("q4z_g64", 9, 4, 64, True, "codes 0..15, one float16 scale and one zero-point 0..15 for 64 k"),
)

LAYOUTS: tuple[WeightLayout, ...] = (
    WeightLayout("rows", 1, "row-major; a quantised row is blocks of 128 codes, each followed by its scales"),
    WeightLayout("tiled16", 2, "float formats: tiles of 16 rows, for each k the 16 values"),
    WeightLayout("tiled16x4", 3, "quantised formats: tiles of 16 rows, blocks of 128 k, steps of 16 rows x 4 k"),
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

"""The hand-written table equals the specification."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from colibri.errors import UsageError
from colibri.quantize import ACTIVATION_BLOCK, FORMATS, LAYOUTS, format_named, layout_named

SPECIFICATION = Path(__file__).parents[2] / "spec" / "formats.toml"


def test_table_equals_the_specification() -> None:
    specification = tomllib.loads(SPECIFICATION.read_text(encoding="utf-8"))
    assert specification["activation_block"] == ACTIVATION_BLOCK
    formats = [(f["name"], f["id"], f["bits"], f.get("group", 0), f["summary"]) for f in specification["format"]]
    assert formats == [(f.name, f.id, f.bits, f.group, f.summary) for f in FORMATS]
    layouts = [(layout["name"], layout["id"], layout["summary"]) for layout in specification["layout"]]
    assert layouts == [(layout.name, layout.id, layout.summary) for layout in LAYOUTS]


def test_groups_never_straddle_an_activation_block() -> None:
    assert all(ACTIVATION_BLOCK % format.group == 0 for format in FORMATS if not format.is_float)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"q3.*q8_g32"):
        format_named("q3")
    with pytest.raises(UsageError, match=r"columns.*tiled16x4"):
        layout_named("columns")

"""A model in several formats, and engines with room for some of its experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from runtime.tiny import write_tiny

from colibri.runtime.backend import MemoryPlan, NativeOptions
from colibri.runtime.engine import demo_model_path
from colibri.runtime.native_backend import plan_memory


def plan_of(path: Path, huge_pages: str = "off") -> MemoryPlan:
    """The plan of an engine with default options but for the pages that its slots are made of."""
    return plan_memory(path, 1, "", NativeOptions(huge_pages=huge_pages), 64, 0)


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """tiny_file(weights): the tiny model in that format."""
    folder = tmp_path_factory.mktemp("tiny")

    def get(weights: str) -> Path:
        path = folder / f"{weights}.cbi"
        return path if path.exists() else write_tiny(path, weights)

    return get


@pytest.fixture(params=["demo", "tiny-f32", "tiny-q4"])
def model(request: pytest.FixtureRequest, tiny_file: Callable[[str], Path]) -> Path:
    """The demo model, 32 experts in each of 6 layers, and tiny ones of odd sizes."""
    return demo_model_path() if request.param == "demo" else tiny_file(request.param.removeprefix("tiny-"))

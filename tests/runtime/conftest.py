"""Tiny models in several formats and one engine on the demo model, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runtime.tiny import write_tiny

import colibri


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """tiny_file(weights): the tiny model in that format."""
    folder = tmp_path_factory.mktemp("tiny")

    def get(weights: str) -> Path:
        path = folder / f"{weights}.cbi"
        return path if path.exists() else write_tiny(path, weights)

    return get


@pytest.fixture
def tiny(tiny_file: Callable[[str], Path]) -> Iterator[colibri.Engine]:
    """The tiny model in float32."""
    with colibri.Engine(tiny_file("f32"), threads=1) as engine:
        yield engine


@pytest.fixture(scope="session")
def demo() -> Iterator[colibri.Engine]:
    """The model in the package."""
    with colibri.Engine(threads=2) as engine:
        yield engine

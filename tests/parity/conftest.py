"""Builds each tiny model once a run, and opens it on the reference VM or on the C core."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]  # the optional extra `parity` is not installed
else:
    import torch

    # The models are too small to share between threads.
    torch.set_num_threads(1)

if TYPE_CHECKING:
    from parity.tiny_models import Expected, TinyCase


@dataclass(frozen=True)
class Converted:
    """A converted tiny model, its source folder, and what transformers computes from that."""

    path: Path
    source: Path
    expected: Expected


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Converted]:
    """converted(case, weights="f32"): the model as a `.cbi` file, made once."""
    from parity.tiny_models import build

    import colibri

    sources: dict[str, tuple[Path, Expected]] = {}
    files: dict[tuple[str, str], Path] = {}

    def get(case: TinyCase, weights: str = "f32") -> Converted:
        key = str(case)
        if key not in sources:
            source = tmp_path_factory.mktemp("tiny") / "source"
            sources[key] = (source, build(case, source))
        source, expected = sources[key]
        if (key, weights) not in files:
            path = source.parent / f"{weights}.cbi"
            colibri.convert(source, path, weights=weights)
            files[key, weights] = path
        return Converted(files[key, weights], source, expected)

    return get

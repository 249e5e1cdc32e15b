"""Colibri runs Mixture-of-Experts language models that are larger than the memory you have.

import colibri
colibri.convert("folder", "model.cbi", weights="q4")
engine = colibri.Engine("model.cbi")
for piece in engine.generate("Once upon a time", max_tokens=64):
    print(piece, end="")
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from colibri import errors
from colibri.errors import ColibriError

if TYPE_CHECKING:
    from colibri.convert import ConvertReport, convert
    from colibri.runtime.backend import Statistics
    from colibri.runtime.engine import Engine
    from colibri.runtime.generation import Generation, Usage
    from colibri.runtime.sampling import SamplingOptions
    from colibri.runtime.session import Session

__all__ = [
    "ColibriError",
    "ConvertReport",
    "Engine",
    "Generation",
    "SamplingOptions",
    "Session",
    "Statistics",
    "Usage",
    "convert",
    "errors",
]

# Imported when first used, so that `colibri --help` does not wait for NumPy and the core.
_HOMES = {
    "ConvertReport": "colibri.convert",
    "Engine": "colibri.runtime.engine",
    "Generation": "colibri.runtime.generation",
    "SamplingOptions": "colibri.runtime.sampling",
    "Session": "colibri.runtime.session",
    "Statistics": "colibri.runtime.backend",
    "Usage": "colibri.runtime.generation",
}


class _Package(ModuleType):
    """The import system sets `colibri.convert` to the subpackage; users mean the function of that name."""

    @property
    def convert(self) -> Any:
        return import_module("colibri.convert").convert

    @convert.setter
    def convert(self, subpackage: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Package


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("colibri-moe")
    except PackageNotFoundError:  # a source tree that was not installed
        return "0+source"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'colibri' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})

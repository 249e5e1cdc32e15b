"""Colibri runs Mixture-of-Experts language models that are larger than the memory you have.

    import colibri
    colibri.convert("folder", "model.cbi", weights="q4")
    engine = colibri.Engine("model.cbi")
    for piece in engine.generate("Once upon a time", max_tokens=64):
        print(piece, end="")
"""

from importlib.metadata import PackageNotFoundError, version

from colibri import errors
from colibri.convert import ConvertReport, convert
from colibri.errors import ColibriError
from colibri.runtime.backend import Statistics
from colibri.runtime.engine import Engine
from colibri.runtime.generation import Generation, Usage
from colibri.runtime.sampling import SamplingOptions
from colibri.runtime.session import Session

try:
    __version__ = version("colibri-moe")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+source"

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

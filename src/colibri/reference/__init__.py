"""The VM in plain NumPy: the readable definition of every op, and the tolerance oracle of the tests."""

from colibri.reference.engine import ReferenceEngine, ReferenceSession
from colibri.reference.ops import Expert, Routing, Weight
from colibri.reference.state import AttentionState
from colibri.reference.vm import Call, Model, Trace, run

__all__ = [
    "AttentionState",
    "Call",
    "Expert",
    "Model",
    "ReferenceEngine",
    "ReferenceSession",
    "Routing",
    "Trace",
    "Weight",
    "run",
]

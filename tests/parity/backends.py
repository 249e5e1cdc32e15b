"""One interface to the two executors: the NumPy reference and the C core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

import colibri
from colibri.program import Op
from colibri.program.ops import Opcode
from colibri.reference import ReferenceEngine, ReferenceSession, Routing

BACKENDS = ("reference", "native")


class Timeline(Protocol):
    """A session: `forward` appends tokens and returns logits float32 [n, vocabulary]."""

    def forward(self, tokens: list[int], /) -> np.ndarray: ...


class Executor(Protocol):
    def session(self) -> Timeline: ...

    def choices(self, tokens: list[int]) -> dict[int, np.ndarray]:
        """By layer, the experts of each token in rising order: int64 [n, chosen]."""
        ...


@contextmanager
def opened(backend: str, path: Path, state_format: str = "f32") -> Iterator[Executor]:
    """Open a model on `backend`."""
    if backend == "reference":
        yield _Reference(path, state_format)
        return
    with colibri.Engine(path, threads=2, kv=state_format) as engine:
        native = _Native(engine)
        yield native
        for session in native.sessions:
            session.close()


class _Reference:
    def __init__(self, path: Path, state_format: str):
        self._engine = ReferenceEngine(path)
        self._state_format = state_format

    def session(self) -> ReferenceSession:
        return self._engine.session(state_format=self._state_format)

    def choices(self, tokens: list[int]) -> dict[int, np.ndarray]:
        found: dict[int, np.ndarray] = {}

        def note(_index: int, op: Op, result: np.ndarray | Routing) -> None:
            if op.opcode == Opcode.ROUTE:
                assert isinstance(result, Routing)
                assert op.layer is not None
                found[op.layer] = np.sort(result.experts, axis=1)

        self._engine.trace = note
        self.session().forward(tokens)
        self._engine.trace = None
        return found


class _Native:
    def __init__(self, engine: colibri.Engine):
        self._engine = engine
        self.sessions: list[colibri.Session] = []

    def session(self) -> colibri.Session:
        session = self._engine.session()
        self.sessions.append(session)
        return session

    def choices(self, tokens: list[int]) -> dict[int, np.ndarray]:
        """From the counters of the engine: what changes with one token are that token's experts."""
        session = self.session()
        rows: dict[int, list[np.ndarray]] = {}
        before = self._counts()
        for token in tokens:
            session.forward([token])
            after = self._counts()
            for layer, counts in after.items():
                rows.setdefault(layer, []).append(np.flatnonzero(counts - before[layer]))
            before = after
        return {layer: np.array(chosen) for layer, chosen in rows.items()}

    def _counts(self) -> dict[int, np.ndarray]:
        sets = self._engine.statistics().expert_sets
        return {one.layer: np.array(one.tokens_per_expert, np.int64) for one in sets}


def in_chunks(session: Timeline, tokens: list[int], size: int) -> np.ndarray:
    """Logits of all tokens, given to the session `size` at a time."""
    parts = [session.forward(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    return np.concatenate(parts)

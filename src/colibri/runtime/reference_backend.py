"""The NumPy reference as a backend."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colibri.errors import ColibriError
from colibri.program import Op
from colibri.program.ops import BY_NUMBER, Opcode
from colibri.reference import ReferenceEngine, ReferenceSession, Routing
from colibri.runtime.backend import (
    STATE_FORMATS,
    ExpertSetStatistics,
    ForwardItem,
    LatencyStatistics,
    PhaseStatistics,
    Statistics,
)


@dataclass
class _Phase:
    layers: int
    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.by_layer: list[dict[str, float]] = [{} for _ in range(self.layers + 1)]  # the last is outside any

    def count(self, op: Op, seconds: float) -> None:
        times = self.by_layer[-1 if op.layer is None else op.layer]
        name = BY_NUMBER[op.opcode].name
        times[name] = times.get(name, 0.0) + seconds

    def statistics(self) -> PhaseStatistics:
        *layers, outside = map(dict, self.by_layer)
        never = LatencyStatistics()
        return PhaseStatistics(self.tokens, self.passes, self.seconds, 0, never, never, 0, tuple(layers), outside)


_FORMAT_NAMES = {number: name for name, number in STATE_FORMATS.items()}


class ReferenceBackend:
    """A model on the NumPy VM, one item after the other; for checking, not for speed.

    Bytes in the statistics count the float32 values held, whatever the formats of the file.
    """

    def __init__(self, path: Path):
        self._engine = ReferenceEngine(path)
        self._engine.trace = self._count
        self.vocabulary_size = self._engine.vocabulary_size
        self.context_limit = self._engine.context_limit
        self._op_started = 0.0
        layers = max((op.layer + 1 for op in self._engine.model.program.ops if op.layer is not None), default=0)
        self._phases = {"prompt": _Phase(layers), "decode": _Phase(layers)}
        self._phase = self._phases["prompt"]
        expert_sets = self._engine.model.expert_sets
        self._tokens_per_expert = [np.zeros(len(experts), np.int64) for experts in expert_sets]
        self._experts_computed = [0] * len(expert_sets)
        self._layers = [0] * len(expert_sets)
        for op in self._engine.model.program.ops:
            if op.opcode == Opcode.EXPERTS:
                self._layers[int(op.operands["set"])] = op.layer or 0
        self._routing: Routing | None = None

    def open_session(self, context: int, state_format: int) -> ReferenceSession:
        """Open a timeline; state_format 0 is what the file says."""
        return self._engine.session(context, _FORMAT_NAMES.get(state_format))

    def forward_batch(self, items: Sequence[ForwardItem]) -> list[np.ndarray | ColibriError]:
        """Run the items in order; an item that fails gives its exception."""
        results: list[np.ndarray | ColibriError] = []
        for item in items:
            started = self._op_started = time.perf_counter()
            session: ReferenceSession = item.session
            self._phase = self._phases["decode" if len(item.tokens) == 1 else "prompt"]
            try:
                result = session.score(item.tokens) if item.scores else session.forward(item.tokens, item.logits)
                results.append(result)
                self._phase.tokens += len(item.tokens)
                self._phase.passes += 1
            except ColibriError as error:
                results.append(error)
            self._phase.seconds += time.perf_counter() - started
        return results

    def statistics(self) -> Statistics:
        weights = sum(weight.values.nbytes for weight in self._engine.model.weights)
        experts = [self._expert_bytes(number) for number in range(len(self._layers))]
        counts = self._tokens_per_expert
        phases = {name: phase.statistics() for name, phase in self._phases.items()}
        times = [row for phase in self._phases.values() for row in phase.by_layer]
        return Statistics(
            vm="reference",
            cpu="numpy",
            threads=1,
            tokens=sum(phase.tokens for phase in phases.values()),
            passes=sum(phase.passes for phase in phases.values()),
            seconds=sum(phase.seconds for phase in phases.values()),
            seconds_by_op={info.name: sum(row.get(info.name, 0.0) for row in times) for info in BY_NUMBER.values()},
            kernels={},
            weight_bytes=weights + sum(size * len(count) for size, count in zip(experts, counts, strict=True)),
            expert_bytes=sum(size * len(count) for size, count in zip(experts, counts, strict=True)),
            scratch_bytes=0,
            expert_sets=tuple(
                ExpertSetStatistics(
                    layer=self._layers[number],
                    expert_count=len(count),
                    experts_computed=self._experts_computed[number],
                    expert_tokens=int(count.sum()),
                    bytes_touched=self._experts_computed[number] * experts[number],
                    tokens_per_expert=tuple(count.tolist()),
                )
                for number, count in enumerate(counts)
            ),
            phases=phases,
        )

    def close(self) -> None:
        """Nothing to free: the garbage collector does."""

    def _expert_bytes(self, number: int) -> int:
        expert = self._engine.model.expert_sets[number][0]
        return expert.gate.values.nbytes + expert.up.values.nbytes + expert.down.values.nbytes

    def _count(self, _index: int, op: Op, result: np.ndarray | Routing) -> None:
        now = time.perf_counter()
        self._phase.count(op, now - self._op_started)
        self._op_started = now
        if isinstance(result, Routing):
            self._routing = result
        elif op.opcode == Opcode.EXPERTS:
            assert self._routing is not None
            number = int(op.operands["set"])
            counts = np.bincount(self._routing.experts.ravel(), minlength=len(self._tokens_per_expert[number]))
            self._tokens_per_expert[number] += counts
            self._experts_computed[number] += int(np.count_nonzero(counts))

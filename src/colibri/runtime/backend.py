"""What an executor of programs offers to Engine and Session: the C core, or the NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from colibri.errors import ColibriError

LogitsMode = Literal["none", "last", "all"]
STATE_FORMATS = {"f32": 1, "f16": 2, "q8": 3}


@dataclass(frozen=True)
class ExpertSetStatistics:
    """One expert layer, counted since the engine was opened."""

    layer: int
    expert_count: int
    experts_computed: int  # (pass, expert) pairs
    expert_tokens: int  # (token, expert) pairs
    bytes_touched: int
    tokens_per_expert: tuple[int, ...]


@dataclass(frozen=True)
class LatencyStatistics:
    """Seconds; the percentiles are at most a sixteenth above the true ones."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    largest: float = 0.0


@dataclass(frozen=True)
class PhaseStatistics:
    """One kind of pass: decoding (one token of each item) or prompts (any other).

    Dispatch is the time from a router's output to the moment when the last thread begins its first task on the
    experts; `dispatch_switched` has the times in which a thread had a context switch, `dispatch_missed` counts those
    in which the others had done all the work before one came.
    """

    tokens: int
    passes: int
    seconds: float
    parallel_regions: int  # times that work was shared out to the threads and waited for
    dispatch: LatencyStatistics
    dispatch_switched: LatencyStatistics
    dispatch_missed: int
    seconds_by_layer: tuple[dict[str, float], ...]  # for each layer: op -> seconds
    seconds_outside: dict[str, float]  # ops outside any layer


@dataclass(frozen=True)
class Statistics:
    """Counted since the engine was opened; times are seconds of wall clock."""

    vm: str  # "native" or "reference"
    cpu: str  # kernel set: scalar, avx2, avxvnni, avx512, amx, neon, i8mm
    threads: int
    tokens: int
    passes: int
    seconds: float
    seconds_by_op: dict[str, float]
    kernels: dict[str, str]  # weight format -> matmul kernel that ran
    weight_bytes: int
    expert_bytes: int
    scratch_bytes: int
    expert_sets: tuple[ExpertSetStatistics, ...]
    phases: dict[str, PhaseStatistics]  # "prompt" and "decode"


@dataclass(frozen=True)
class ForwardItem:
    """One session's share of a batch: tokens [n] and what to return for them.

    `scores`: instead of logits, float32 [n]: entry i is log p(tokens[i+1] | everything up to i),
    the last is NaN.
    """

    session: Any
    tokens: np.ndarray
    logits: LogitsMode = "all"
    scores: bool = False


class BackendSession(Protocol):
    """State of one timeline. `state_format` and the context are fixed."""

    @property
    def position(self) -> int: ...
    @property
    def context(self) -> int: ...
    def tokens(self) -> np.ndarray: ...
    def truncate(self, position: int) -> None: ...
    def save(self) -> bytes: ...
    def restore(self, blob: bytes) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class Backend(Protocol):
    """A loaded model."""

    vocabulary_size: int
    context_limit: int

    def open_session(self, context: int, state_format: int) -> BackendSession: ...
    def forward_batch(self, items: Sequence[ForwardItem]) -> list[np.ndarray | ColibriError]: ...
    def statistics(self) -> Statistics: ...
    def close(self) -> None: ...

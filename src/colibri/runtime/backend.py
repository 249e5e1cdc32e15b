"""What an executor of programs offers to Engine and Session: the C core, or the NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from colibri.errors import ColibriError

LogitsMode = Literal["none", "last", "all"]
STATE_FORMATS = {"f32": 1, "f16": 2, "q8": 3}
IO_MODES = {"auto": 0, "direct": 1, "buffered": 2}
VERIFY_MODES = {"crc": 0, "full": 1, "off": 2}
HUGE_PAGES = {"auto": 0, "2M": 1, "1G": 2, "off": 3}
MAX_BATCH_TOKENS = 65536
MAX_IO_THREADS = 16
MAX_PREFETCH_DEPTH = 8


@dataclass(frozen=True)
class NativeOptions:
    """How the core runs a model and keeps it in memory. 0 is the core's default; sizes are bytes."""

    max_batch_tokens: int = 0
    io_threads: int = 0
    io: str = "auto"  # of IO_MODES
    verify: str = "crc"  # of VERIFY_MODES
    huge_pages: str = "auto"  # of HUGE_PAGES
    prefetch_depth: int = 0
    lock_memory: bool = False
    guard: bool = False
    pin: bool = False  # each thread on a processor of its own
    expert_bytes: int = 0  # 0: room for all
    state_bytes: int = 0  # of all open sessions together; 0: no limit
    page_cache_bytes: int = 0  # memory that the page cache may have beside all this; 0: not known


@dataclass(frozen=True)
class MemoryPlan:
    """What an engine and one session will take, in bytes; made by `native_backend.plan_memory`."""

    tensor_bytes: int  # weights other than experts
    scratch_bytes: int
    other_bytes: int  # tables, queues, staging, stacks of I/O threads
    session_bytes: int
    all_expert_bytes: int
    least_expert_bytes: int
    wasted_expert_bytes: int
    largest_layer_bytes: int
    token_expert_bytes: int
    expert_count: int
    expert_set_count: int
    vocabulary_size: int
    context_limit: int


@dataclass(frozen=True)
class ExpertSetStatistics:
    """One expert layer, counted since the engine was opened."""

    layer: int
    expert_count: int
    experts_computed: int  # (pass, expert) pairs
    expert_tokens: int  # (token, expert) pairs
    bytes_touched: int
    tokens_per_expert: tuple[int, ...]
    hits: int = 0  # experts asked for that were in memory
    misses: int = 0
    bytes_read: int = 0
    stall_seconds: float = 0.0  # waited for experts
    prefetched: int = 0  # experts read ahead
    prefetched_used: int = 0  # of these, asked for before they were evicted
    evictions: int = 0
    load_seconds: float = 0.0  # sum over reads
    predictable: int = 0  # experts chosen in passes that had predicted this layer
    predicted: int = 0
    recalled: int = 0  # predicted and chosen
    loads_per_expert: tuple[int, ...] = ()
    load_seconds_per_expert: tuple[float, ...] = ()


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
    expert_bytes: int  # of these, expert slots
    scratch_bytes: int
    expert_sets: tuple[ExpertSetStatistics, ...]
    phases: dict[str, PhaseStatistics]  # "prompt" and "decode"
    resident: bool = True  # every expert stays in memory
    is_direct: bool = False  # experts are read past the page cache
    direct_bytes_per_second: int = 0  # of reads past the page cache, measured at open for io="auto"; 0: not measured
    buffered_bytes_per_second: int = 0  # of reads through it, likewise
    predicted_passes: int = 0
    unpredicted_passes: int = 0  # could have predicted experts, but it did not pay
    prediction_seconds: float = 0.0
    all_expert_bytes: int = 0  # of the records of all experts
    token_expert_bytes: int = 0  # of those that one token uses, at most
    warning: str = ""  # what the kernel refused when the engine opened


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

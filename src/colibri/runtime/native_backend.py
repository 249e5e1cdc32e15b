"""The C core as a backend."""

from __future__ import annotations

import ctypes as c
import io
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from colibri.errors import BusyError, ColibriError, MemoryBudgetError, OutOfMemoryError, UsageError
from colibri.program.ops import BY_NUMBER
from colibri.quantize.formats import FORMATS
from colibri.runtime import native
from colibri.runtime.backend import (
    HUGE_PAGES,
    IO_MODES,
    VERIFY_MODES,
    ExpertSetStatistics,
    ForwardItem,
    LatencyStatistics,
    MemoryPlan,
    NativeOptions,
    PhaseStatistics,
    Statistics,
)
from colibri.runtime.budget import array_bytes
from colibri.runtime.interruptible import run_abandonable
from colibri.runtime.native import library
from colibri.runtime.sizes import format_size

_LOGITS_MODES = {"none": 0, "last": 1, "all": 2}


class _Runtime:
    """Threads shared by all engines of a process that ask for the same count and CPU; freed with the last of them."""

    _open: ClassVar[weakref.WeakValueDictionary[tuple[int, int, str, bool], _Runtime]] = weakref.WeakValueDictionary()
    _lock = threading.Lock()

    def __init__(self, threads: int, cpu: str, pin: bool):
        self.handle = c.c_void_p()
        options = native.RuntimeOptions(threads, cpu.encode() or None, None, pin)
        message = native.message_buffer()
        status = library.colibri_init(c.byref(options), c.byref(self.handle), message, len(message))
        native.check(status, message, UsageError)
        _at_collection(self, library.colibri_free, self.handle)

    @classmethod
    def shared(cls, threads: int, cpu: str, pin: bool) -> _Runtime:
        # The process id is part of the key: a forked child must not use its parent's threads.
        key = (os.getpid(), threads, cpu, pin)
        with cls._lock:
            runtime = cls._open.get(key)
            if runtime is None:
                runtime = cls._open[key] = cls(threads, cpu, pin)
            return runtime


# A lock that another thread held at the fork would stay locked in the child.
os.register_at_fork(after_in_child=lambda: setattr(_Runtime, "_lock", threading.Lock()))


def _at_collection(owner: object, close: Callable[[c.c_void_p], int], handle: c.c_void_p, *needed: object) -> Any:
    """Close the handle of an owner that is collected unclosed. `needed` is kept alive until then, so that handles
    go in order even in a cycle; at exit the system frees everything.
    """

    def collected(*_: object) -> None:
        close(handle)
        # Generators of the same cycle run their last lines after this, and may still use the owner.
        handle.value = None

    finalizer = weakref.finalize(owner, collected, *needed)
    finalizer.atexit = False
    return finalizer


class NativeSession:
    """Handle of a colibri_session."""

    def __init__(self, backend: NativeBackend, context: int, state_format: int):
        self._handle = c.c_void_p()
        # Held only for calls that return soon; a forward borrows the handle instead. Reentrant, as a signal
        # handler may cancel.
        self._lock = threading.RLock()
        self._borrowers = 0
        options = native.SessionOptions(context, state_format)
        message = native.message_buffer()
        status = library.colibri_session_open(
            backend.handle, c.byref(options), c.byref(self._handle), message, len(message)
        )
        native.check(status, message)
        self._finalizer = _at_collection(self, library.colibri_session_close, self._handle, backend)

    @contextmanager
    def _open_handle(self) -> Iterator[c.c_void_p]:
        with self._lock:
            if not self._handle:
                raise UsageError("the session is closed; open another one")
            yield self._handle

    def borrow(self) -> int | None:
        """The handle, which stays valid until `give_back`."""
        with self._open_handle() as handle:
            self._borrowers += 1
            return handle.value

    def give_back(self) -> None:
        with self._lock:
            self._borrowers -= 1

    @property
    def position(self) -> int:
        with self._open_handle() as handle:
            return library.colibri_position(handle)

    @property
    def context(self) -> int:
        with self._open_handle() as handle:
            return library.colibri_context(handle)

    def tokens(self) -> np.ndarray:
        """Token ids uint32 [position]."""
        with self._open_handle() as handle:
            count = library.colibri_position(handle)
            return np.ctypeslib.as_array(library.colibri_tokens(handle), (count,)).copy()

    def truncate(self, position: int) -> None:
        message = native.message_buffer()
        with self._open_handle() as handle:
            native.check(library.colibri_truncate(handle, position, message, len(message)), message)

    def save(self) -> bytes:
        message = native.message_buffer()
        with self._open_handle() as handle:
            size = library.colibri_state_size(handle)
            try:
                stream = io.BytesIO()  # hands its bytes out without a copy, which a memory budget has no room for
                stream.seek(size - 1)
                stream.write(b"\0")
            except MemoryError:
                raise OutOfMemoryError(f"not enough memory for a state of {format_size(size)}") from None
            with stream.getbuffer() as view:
                address = c.addressof(c.c_char.from_buffer(view))
                status = library.colibri_state_save(handle, address, size, message, len(message))
        native.check(status, message)
        return stream.getvalue()

    def restore(self, blob: bytes) -> None:
        message = native.message_buffer()
        buffer = np.frombuffer(blob, np.uint8)
        with self._open_handle() as handle:
            status = library.colibri_state_restore(handle, buffer.ctypes.data, buffer.size, message, len(message))
        native.check(status, message)

    def cancel(self) -> None:
        with self._open_handle() as handle:
            library.colibri_cancel(handle)

    def close(self) -> None:
        with self._lock:
            if not self._handle:
                return
            handle, self._handle = self._handle, c.c_void_p()
            if self._borrowers or library.colibri_session_close(handle) == native.BUSY:
                self._handle = handle
                raise BusyError("the session is running; cancel it and wait before closing it")
            self._finalizer.detach()


class NativeBackend:
    """A model in the C core."""

    def __init__(self, path: Path, threads: int, cpu: str, options: NativeOptions, result_limit: int | None = None):
        """result_limit: bytes that the results of one call may have; None: any."""
        self._result_limit = result_limit
        self._runtime = runtime = _Runtime.shared(threads, cpu, options.pin)
        self._lock = threading.Lock()
        self._handle = run_abandonable(lambda: _open_engine(runtime, path, options), library.colibri_engine_close)
        self._finalizer = _at_collection(self, library.colibri_engine_close, self._handle, runtime)
        self._info = native.EngineInfo()
        library.colibri_engine_get_info(self._handle, c.byref(self._info))
        self.vocabulary_size: int = self._info.vocabulary_size
        self.context_limit: int = self._info.context_limit

    @property
    def is_open(self) -> bool:
        return bool(self._handle)

    @property
    def handle(self) -> c.c_void_p:
        if not self._handle:
            raise UsageError("the engine is closed; open another one")
        return self._handle

    def open_session(self, context: int, state_format: int) -> NativeSession:
        with self._lock:
            return NativeSession(self, context, state_format)

    def forward_batch(self, items: Sequence[ForwardItem]) -> list[np.ndarray | ColibriError]:
        """Run all items in one native call (the GIL is released)."""
        handle = self.handle
        results: list[np.ndarray | ColibriError] = []
        borrowed: list[NativeSession] = []
        native_items = (native.Item * len(items))()
        keep: list[np.ndarray] = []  # the arrays must outlive the call
        ready: list[int] = []  # which item each native one is
        self._check_results(items)
        try:
            for index, item in enumerate(items):
                entry = native_items[len(ready)]
                try:
                    result = self._fill(entry, item, keep)
                    entry.session = item.session.borrow()
                except ColibriError as error:
                    results.append(error)
                    continue
                borrowed.append(item.session)
                ready.append(index)
                results.append(result)
            message = native.message_buffer()
            # Without an item no session keeps the engine open, so it may be closed at any time.
            if ready:
                status = library.colibri_forward_batch(handle, native_items, len(ready), message, len(message))
                native.check(status, message)
        finally:
            for session in borrowed:
                session.give_back()
        for index, entry in zip(ready, native_items, strict=False):
            if entry.status != native.OK:
                results[index] = native.error_of(entry.status, entry.message)
        return results

    def _check_results(self, items: Sequence[ForwardItem]) -> None:
        """Refuse a call whose results would not fit in the budget; nothing is computed then."""
        if self._result_limit is None:
            return
        rows = sum({"none": 0, "last": 1, "all": len(item.tokens)}[item.logits] for item in items if not item.scores)
        size = array_bytes(4 * rows * self.vocabulary_size)
        if size > self._result_limit:
            raise MemoryBudgetError(
                f"the logits of {rows} tokens take {format_size(size)} and the memory budget leaves "
                f"{format_size(self._result_limit)} for results; run fewer tokens at once, use last_only=True or "
                "Session.score, or give the engine more ram"
            )

    def _fill(self, entry: native.Item, item: ForwardItem, keep: list[np.ndarray]) -> np.ndarray:
        """Describe an item to the core; returns the array that its results go to."""
        tokens = np.ascontiguousarray(item.tokens, np.uint32)
        keep.append(tokens)
        entry.tokens = tokens.ctypes.data
        entry.token_count = len(tokens)
        entry.logits = entry.scores = None
        if item.scores:
            entry.logits_mode = _LOGITS_MODES["none"]
            result = _array((len(tokens),), np.float32)
            entry.scores = result.ctypes.data
        else:
            entry.logits_mode = _LOGITS_MODES[item.logits]
            rows = {"none": 0, "last": 1, "all": len(tokens)}[item.logits]
            result = _array((rows, self.vocabulary_size), np.float32)
            entry.logits = result.ctypes.data if rows else None
        keep.append(result)
        return result

    def statistics(self) -> Statistics:
        with self._lock:
            return self._statistics()

    def _statistics(self) -> Statistics:
        stats = native.Stats()
        library.colibri_get_stats(self.handle, c.byref(stats))
        sets = tuple(self._set_statistics(index) for index in range(self._info.expert_set_count))
        names = [bytes(name.value).decode() for name in stats.matmul]
        return Statistics(
            vm="native",
            cpu=stats.cpu.decode(),
            threads=library.colibri_thread_count(self._runtime.handle),
            tokens=stats.tokens,
            passes=stats.passes,
            seconds=stats.nanoseconds * 1e-9,
            seconds_by_op={info.name: stats.op_nanoseconds[number] * 1e-9 for number, info in BY_NUMBER.items()},
            kernels={format.name: names[format.id] for format in FORMATS if names[format.id]},
            weight_bytes=self._info.weight_bytes,
            expert_bytes=self._info.expert_bytes,
            scratch_bytes=self._info.scratch_bytes,
            expert_sets=sets,
            resident=bool(stats.resident),
            is_direct=bool(stats.is_direct),
            direct_bytes_per_second=stats.direct_bytes_per_second,
            buffered_bytes_per_second=stats.buffered_bytes_per_second,
            predicted_passes=stats.predicted_passes,
            unpredicted_passes=stats.unpredicted_passes,
            prediction_seconds=stats.prediction_nanoseconds * 1e-9,
            all_expert_bytes=self._info.all_expert_bytes,
            token_expert_bytes=self._info.token_expert_bytes,
            warning=stats.warning.decode("utf-8", "replace"),
            phases={name: self._phase(number, stats.phases[number]) for number, name in enumerate(native.PHASES)},
        )

    def _phase(self, number: int, stats: native.PhaseStats) -> PhaseStatistics:
        profile = np.zeros((self._info.layer_count + 1, native.OP_KINDS), np.uint64)
        library.colibri_get_profile(self.handle, number, profile.ctypes.data)
        *layers, outside = [
            {BY_NUMBER[op].name: float(row[op]) * 1e-9 for op in np.flatnonzero(row).tolist()} for row in profile
        ]
        return PhaseStatistics(
            tokens=stats.tokens,
            passes=stats.passes,
            seconds=stats.nanoseconds * 1e-9,
            parallel_regions=stats.parallel_regions,
            dispatch=_latency(stats.dispatch),
            dispatch_switched=_latency(stats.dispatch_switched),
            dispatch_missed=stats.dispatch_missed,
            seconds_by_layer=tuple(layers),
            seconds_outside=outside,
        )

    def _set_statistics(self, index: int) -> ExpertSetStatistics:
        one = native.ExpertSetStats()
        library.colibri_get_expert_stats(self.handle, index, c.byref(one), None)
        counts, loads, times = np.zeros((3, one.expert_count), np.uint64)
        library.colibri_get_expert_stats(self.handle, index, c.byref(one), counts.ctypes.data)
        library.colibri_get_expert_loads(self.handle, index, loads.ctypes.data, times.ctypes.data)
        return ExpertSetStatistics(
            layer=one.layer,
            expert_count=one.expert_count,
            experts_computed=one.experts_computed,
            expert_tokens=one.expert_tokens,
            bytes_touched=one.bytes_touched,
            tokens_per_expert=tuple(counts.tolist()),
            hits=one.hits,
            misses=one.misses,
            bytes_read=one.bytes_read,
            stall_seconds=one.stall_nanoseconds * 1e-9,
            prefetched=one.prefetched,
            prefetched_used=one.prefetched_used,
            evictions=one.evictions,
            load_seconds=one.load_nanoseconds * 1e-9,
            predictable=one.predictable,
            predicted=one.predicted,
            recalled=one.recalled,
            loads_per_expert=tuple(loads.tolist()),
            load_seconds_per_expert=tuple((times * 1e-9).tolist()),
        )

    def warm(self, expert_set: int, experts: Sequence[int]) -> None:
        """Ask for low-priority reads of these experts, first to last, as far as there is room; does not wait."""
        array = np.ascontiguousarray(experts, np.uint32)
        message = native.message_buffer()
        with self._lock:
            status = library.colibri_engine_warm(
                self.handle, expert_set, array.ctypes.data, len(array), message, len(message)
            )
        native.check(status, message)

    def close(self) -> None:
        with self._lock:
            if not self._handle:
                return
            if library.colibri_engine_close(self._handle) == native.BUSY:
                raise BusyError("the engine has open sessions; close them first")
            self._finalizer.detach()
            self._handle = c.c_void_p()
            del self._runtime


def _latency(stats: native.Latency) -> LatencyStatistics:
    mean = stats.sum / stats.count if stats.count else 0.0
    return LatencyStatistics(stats.count, mean * 1e-9, stats.p50 * 1e-9, stats.p99 * 1e-9, stats.largest * 1e-9)


def _native_options(options: NativeOptions) -> native.EngineOptions:
    return native.EngineOptions(
        max_batch_tokens=options.max_batch_tokens,
        io_threads=options.io_threads,
        io=IO_MODES[options.io],
        verify=VERIFY_MODES[options.verify],
        huge_pages=HUGE_PAGES[options.huge_pages],
        prefetch_depth=options.prefetch_depth,
        lock_memory=options.lock_memory,
        guard=options.guard,
        expert_bytes=options.expert_bytes,
        state_bytes=options.state_bytes,
        page_cache_bytes=options.page_cache_bytes,
    )


def _open_engine(runtime: _Runtime, path: Path, options: NativeOptions) -> c.c_void_p:
    handle = c.c_void_p()
    given = _native_options(options)
    message = native.message_buffer()
    status = library.colibri_engine_open(
        runtime.handle, os.fsencode(path), c.byref(given), c.byref(handle), message, len(message)
    )
    native.check(status, message)
    if options.guard:
        library.colibri_engine_guard(handle, message, len(message))  # refused only beyond 16 engines: no names then
    return handle


def plan_memory(
    path: Path, threads: int, cpu: str, options: NativeOptions, context: int, state_format: int
) -> MemoryPlan:
    """What a NativeBackend with these arguments and a session would take; reads no weight.

    Raises ModelFileError, UnsupportedModelError, UsageError.
    """
    runtime = _Runtime.shared(threads, cpu, options.pin)
    given, session = _native_options(options), native.SessionOptions(context, state_format)
    plan, message = native.MemoryPlan(), native.message_buffer()
    status = library.colibri_plan_memory(
        runtime.handle, os.fsencode(path), c.byref(given), c.byref(session), c.byref(plan), message, len(message)
    )
    native.check(status, message)
    return MemoryPlan(**{name: getattr(plan, name) for name, *_ in native.MemoryPlan._fields_})


def _array(shape: tuple[int, ...], kind: type[np.generic]) -> np.ndarray:
    try:
        return np.empty(shape, kind)
    except MemoryError:
        size = math.prod(shape) * np.dtype(kind).itemsize
        raise OutOfMemoryError(
            f"not enough memory for {size} bytes of results; run fewer tokens at once, or last_only=True"
        ) from None


def validate_file(path: Path) -> None:
    """Let the core check a file as it does when it opens it, in bounded memory; ModelFileError otherwise."""
    message = native.message_buffer()

    def validate() -> int:
        return library.colibri_validate(os.fsencode(path), message, len(message))

    native.check(run_abandonable(validate, lambda _: None), message)

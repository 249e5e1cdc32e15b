"""The C core as a backend."""

from __future__ import annotations

import ctypes as c
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from colibri.errors import BusyError, ColibriError, UsageError
from colibri.program.ops import BY_NUMBER
from colibri.quantize.formats import FORMATS
from colibri.runtime import native
from colibri.runtime.backend import ExpertSetStatistics, ForwardItem, Statistics
from colibri.runtime.native import library

_LOGITS_MODES = {"none": 0, "last": 1, "all": 2}


class _Runtime:
    """Threads shared by all engines of a process that ask for the same count and CPU."""

    _open: dict[tuple[int, int, str], _Runtime] = {}  # noqa: RUF012 - the process-wide table itself
    _lock = threading.Lock()

    def __init__(self, threads: int, cpu: str):
        self.handle = c.c_void_p()
        self.users = 0
        options = native.RuntimeOptions(threads, cpu.encode() or None, None)
        message = native.message_buffer()
        status = library.colibri_init(c.byref(options), c.byref(self.handle), message, len(message))
        native.check(status, message, UsageError)

    @classmethod
    def acquire(cls, threads: int, cpu: str) -> _Runtime:
        # The process id is part of the key: a forked child must not use its parent's threads.
        key = (os.getpid(), threads, cpu)
        with cls._lock:
            if key not in cls._open:
                cls._open[key] = cls(threads, cpu)
            runtime = cls._open[key]
            runtime.users += 1
            return runtime

    def release(self) -> None:
        with self._lock:
            self.users -= 1
            if self.users == 0:
                for key, runtime in list(self._open.items()):
                    if runtime is self:
                        del self._open[key]
                library.colibri_free(self.handle)


class NativeSession:
    """Handle of a colibri_session."""

    def __init__(self, backend: NativeBackend, context: int, state_format: int):
        self._handle = c.c_void_p()
        options = native.SessionOptions(context, state_format)
        message = native.message_buffer()
        status = library.colibri_session_open(
            backend.handle, c.byref(options), c.byref(self._handle), message, len(message)
        )
        native.check(status, message)

    @property
    def handle(self) -> c.c_void_p:
        if not self._handle:
            raise UsageError("the session is closed")
        return self._handle

    @property
    def position(self) -> int:
        return library.colibri_position(self.handle)

    @property
    def context(self) -> int:
        return library.colibri_context(self.handle)

    def tokens(self) -> np.ndarray:
        """Token ids uint32 [position]."""
        count = self.position
        return np.ctypeslib.as_array(library.colibri_tokens(self.handle), (count,)).copy()

    def truncate(self, position: int) -> None:
        message = native.message_buffer()
        native.check(library.colibri_truncate(self.handle, position, message, len(message)), message)

    def save(self) -> bytes:
        message = native.message_buffer()
        buffer = np.empty(library.colibri_state_size(self.handle), np.uint8)
        status = library.colibri_state_save(self.handle, buffer.ctypes.data, buffer.size, message, len(message))
        native.check(status, message)
        return buffer.tobytes()

    def restore(self, blob: bytes) -> None:
        message = native.message_buffer()
        buffer = np.frombuffer(blob, np.uint8)
        status = library.colibri_state_restore(self.handle, buffer.ctypes.data, buffer.size, message, len(message))
        native.check(status, message)

    def cancel(self) -> None:
        library.colibri_cancel(self.handle)

    def close(self) -> None:
        if self._handle:
            if library.colibri_session_close(self._handle) != native.OK:
                raise BusyError("the session is running; cancel it and wait before closing it")
            self._handle = c.c_void_p()


class NativeBackend:
    """A model in the C core."""

    def __init__(self, path: Path, threads: int, cpu: str, max_batch_tokens: int):
        self._runtime = _Runtime.acquire(threads, cpu)
        self._handle = c.c_void_p()
        options = native.EngineOptions(max_batch_tokens)
        message = native.message_buffer()
        try:
            status = library.colibri_engine_open(
                self._runtime.handle, os.fsencode(path), c.byref(options), c.byref(self._handle), message, len(message)
            )
            native.check(status, message)
        except BaseException:
            self._runtime.release()
            raise
        self._info = native.EngineInfo()
        library.colibri_engine_get_info(self._handle, c.byref(self._info))
        self.vocabulary_size: int = self._info.vocabulary_size
        self.context_limit: int = self._info.context_limit

    @property
    def handle(self) -> c.c_void_p:
        if not self._handle:
            raise UsageError("the engine is closed")
        return self._handle

    def open_session(self, context: int, state_format: int) -> NativeSession:
        return NativeSession(self, context, state_format)

    def forward_batch(self, items: Sequence[ForwardItem]) -> list[np.ndarray | ColibriError]:
        """Run all items in one native call (the GIL is released)."""
        native_items = (native.Item * len(items))()
        keep: list[np.ndarray] = []  # the arrays must outlive the call
        results: list[np.ndarray | ColibriError] = []
        for entry, item in zip(native_items, items, strict=True):
            tokens = np.ascontiguousarray(item.tokens, np.uint32)
            keep.append(tokens)
            entry.session = item.session.handle.value
            entry.tokens = tokens.ctypes.data
            entry.token_count = len(tokens)
            if item.scores:
                result = np.empty(len(tokens), np.float32)
                entry.scores = result.ctypes.data
            else:
                rows = {"none": 0, "last": 1, "all": len(tokens)}[item.logits]
                result = np.empty((rows, self.vocabulary_size), np.float32)
                entry.logits_mode = _LOGITS_MODES[item.logits]
                entry.logits = result.ctypes.data if rows else None
            results.append(result)
        message = native.message_buffer()
        status = library.colibri_forward_batch(self.handle, native_items, len(items), message, len(message))
        native.check(status, message)
        for index, entry in enumerate(native_items):
            if entry.status != native.OK:
                results[index] = native.error_of(entry.status, entry.message)
        return results

    def statistics(self) -> Statistics:
        stats = native.Stats()
        library.colibri_get_stats(self.handle, c.byref(stats))
        sets = []
        for index in range(self._info.expert_set_count):
            one = native.ExpertSetStats()
            library.colibri_get_expert_stats(self.handle, index, c.byref(one), None)
            counts = np.zeros(one.expert_count, np.uint64)
            library.colibri_get_expert_stats(self.handle, index, c.byref(one), counts.ctypes.data)
            sets.append(
                ExpertSetStatistics(
                    one.layer,
                    one.expert_count,
                    one.experts_computed,
                    one.expert_tokens,
                    one.bytes_touched,
                    tuple(int(n) for n in counts),
                )
            )
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
            expert_sets=tuple(sets),
        )

    def close(self) -> None:
        if self._handle:
            if library.colibri_engine_close(self._handle) != native.OK:
                raise BusyError("the engine has open sessions; close them first")
            self._handle = c.c_void_p()
            self._runtime.release()


def validate_file(path: Path) -> None:
    """Let the core check a file as it does when it opens it, in bounded memory; ModelFileError otherwise."""
    message = native.message_buffer()
    native.check(library.colibri_validate(os.fsencode(path), message, len(message)), message)

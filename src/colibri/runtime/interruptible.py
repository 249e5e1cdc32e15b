"""Runs long native calls so that Ctrl-C works."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def _wait(done: threading.Event) -> None:
    # A signal that comes just before the thread sleeps does not wake it; so it never sleeps for long.
    while not done.wait(0.1):
        pass


class _Worker:
    """One thread that runs calls for the main thread, kept between calls (starting one costs more than a token)."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="colibri-call", daemon=True).start()

    def _loop(self) -> None:
        while True:
            self._jobs.get()()

    def run(self, call: Callable[[], T], cancel: Callable[[], None], undo: Callable[[], None]) -> T:
        done = threading.Event()
        outcome: list[Any] = [None, None]

        def job() -> None:
            try:
                outcome[0] = call()
            except BaseException as error:  # handed to the caller's thread below
                outcome[1] = error
            done.set()

        try:
            # Inside the try: a signal is handled after `put` at the earliest, so the job always runs.
            self._jobs.put(job)
            _wait(done)
        except BaseException:
            cancel()
            # The caller's sessions are in use until the call ends, whatever more signals come.
            while not done.is_set():
                with suppress(KeyboardInterrupt):
                    _wait(done)
            undo()
            raise
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


_worker: _Worker | None = None
_worker_process: int | None = None


def run_interruptible(call: Callable[[], T], cancel: Callable[[], None], undo: Callable[[], None]) -> T:
    """Run `call`; on Ctrl-C in the main thread call `cancel`, wait for the end, `undo`, raise KeyboardInterrupt.

    Python delivers signals to the main thread only between bytecodes, so a native call there
    would block them; other threads run the call directly.
    """
    global _worker, _worker_process
    if threading.current_thread() is not threading.main_thread():
        return call()
    if _worker is None or _worker_process != os.getpid():
        _worker, _worker_process = _Worker(), os.getpid()
    return _worker.run(call, cancel, undo)


def run_abandonable(call: Callable[[], T], discard: Callable[[T], None]) -> T:
    """Run a `call` that cannot be cancelled; on Ctrl-C leave it behind, and `discard` its result when it ends."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    done, settled = threading.Event(), threading.Lock()
    outcome: list[Any] = [None, None]
    abandoned = False

    def job() -> None:
        try:
            outcome[0] = call()
        except BaseException as error:  # handed to the main thread below
            outcome[1] = error
        with settled:
            done.set()
            left_behind = abandoned and outcome[1] is None
        if left_behind:
            discard(outcome[0])

    try:
        threading.Thread(target=job, name="colibri-open", daemon=True).start()
        _wait(done)
    except BaseException:
        with settled:
            abandoned = True
            finished = done.is_set() and outcome[1] is None
        if finished:
            discard(outcome[0])
        raise
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]

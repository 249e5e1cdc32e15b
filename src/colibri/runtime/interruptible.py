"""Runs long native calls so that Ctrl-C works."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class _Worker:
    """One thread that runs calls for the main thread, kept between calls (starting one costs more than a token)."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="colibri-call", daemon=True).start()

    def _loop(self) -> None:
        while True:
            self._jobs.get()()

    def run(self, call: Callable[[], T], cancel: Callable[[], None]) -> T:
        done = threading.Event()
        outcome: list[Any] = [None, None]

        def job() -> None:
            try:
                outcome[0] = call()
            except BaseException as error:  # handed to the caller's thread below
                outcome[1] = error
            done.set()

        self._jobs.put(job)
        try:
            done.wait()
        except BaseException:
            # The native call still uses the caller's arrays: it must end before they go.
            cancel()
            done.wait()
            raise
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


_worker: _Worker | None = None
_worker_process: int | None = None


def run_interruptible(call: Callable[[], T], cancel: Callable[[], None]) -> T:
    """Run `call`; on Ctrl-C in the main thread call `cancel`, wait for the end, raise KeyboardInterrupt.

    Python delivers signals to the main thread only between bytecodes, so a native call there
    would block them; other threads run the call directly.
    """
    global _worker, _worker_process
    if threading.current_thread() is not threading.main_thread():
        return call()
    import os

    if _worker is None or _worker_process != os.getpid():
        _worker, _worker_process = _Worker(), os.getpid()
    return _worker.run(call, cancel)

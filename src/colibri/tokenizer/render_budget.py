"""What one rendering of a chat template may use: steps, processor time, text and memory.

A template comes with a model file, so it is as untrusted as the file. Every step of a rendering is counted, every text
and container it makes is charged, and anything that could grow faster than its operands is refused before it is made.
A rendering therefore ends by itself: nothing has to be killed from outside.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

SMALLEST_TEXT_LIMIT = 4 << 20
SMALLEST_TOTAL_LIMIT = 128 << 20
STEP_LIMIT = 1_000_000
PROCESSOR_SECONDS = 5.0
# Reading the clock at every step would cost more than the step.
STEPS_BETWEEN_CLOCK_READINGS = 128
LARGE_CHARGE = 1 << 16


class LimitExceeded(Exception):
    """A rendering asked for more than its budget; the message says of what."""


def expanded_size(value: Any, limit: int) -> int:
    """Characters and items of `value` with shared parts counted each time they appear.

    Counting shared parts again is the point: a list that holds the same list twice, forty levels deep, is small in
    memory and endless when it is printed or compared. Stops early with a size above `limit`.
    """
    size = 0
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, (str, bytes)):
            size += len(item)
        elif isinstance(item, (list, tuple, set, frozenset)):
            size += len(item)
            if size <= limit:
                pending.extend(item)
        elif isinstance(item, Mapping):
            size += len(item)
            if size <= limit:
                pending.extend(item.keys())
                pending.extend(item.values())
        else:
            size += 1
        if size > limit:
            break
    return size


class RenderBudget:
    """Counts what one rendering uses.

    `input_size` is the expanded size of the variables it starts from; `verbatim` holds characters that `tojson` may
    not escape.
    """

    def __init__(self, input_size: int = 0, verbatim: str = "") -> None:
        self.verbatim = verbatim
        self.text_limit = SMALLEST_TEXT_LIMIT + 4 * input_size
        self._total_left = SMALLEST_TOTAL_LIMIT + 64 * input_size
        self._steps_left = STEP_LIMIT + input_size
        self._steps_to_clock = STEPS_BETWEEN_CLOCK_READINGS
        self._deadline = time.thread_time() + PROCESSOR_SECONDS

    def step(self) -> None:
        """Count one iteration, call, filter or operator."""
        self._steps_left -= 1
        if self._steps_left < 0:
            raise LimitExceeded("it runs for too many steps")
        self._steps_to_clock -= 1
        if self._steps_to_clock <= 0:
            self._read_clock()

    def _read_clock(self) -> None:
        self._steps_to_clock = STEPS_BETWEEN_CLOCK_READINGS
        # Processor time of this thread, so that a busy machine does not change which templates are refused.
        if time.thread_time() > self._deadline:
            raise LimitExceeded("it runs for too long")

    def require_text(self, size: int) -> None:
        """Refuse a text or container of `size` characters or items before it is made."""
        if size > self.text_limit:
            raise LimitExceeded("it makes a text or list that is too large")

    def charge(self, value: Any) -> Any:
        """Charge a text or container that was just made, and give it back."""
        if isinstance(value, (str, bytes, list, tuple, dict, set)):
            size = expanded_size(value, self.text_limit)
            self.require_text(size)
            self._total_left -= size
            if self._total_left < 0:
                raise LimitExceeded("it makes too much text")
            if size > LARGE_CHARGE:
                self._read_clock()
        return value

    def join(self, parts: Iterable[str]) -> str:
        """Concatenate `parts`, refused before the text is made when it would be too large."""
        kept: list[str] = []
        size = 0
        for part in parts:
            size += len(part)
            self.require_text(size)
            kept.append(part)
        return self.charge("".join(kept))


_current: ContextVar[RenderBudget | None] = ContextVar("render_budget", default=None)


def current_budget() -> RenderBudget:
    """The budget of the rendering that runs in this context."""
    budget = _current.get()
    if budget is None:
        raise LimitExceeded("it runs outside a rendering")
    return budget


@contextmanager
def spending(budget: RenderBudget):
    """Make `budget` the current one inside the `with` block."""
    token = _current.set(budget)
    try:
        yield budget
    finally:
        _current.reset(token)

"""Progress while the first prompt reads its experts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from colibri.errors import ColibriError
from colibri.runtime.backend import Statistics
from colibri.runtime.engine import Engine

DELAY = 0.5
INTERVAL = 0.1


def expected_bytes(statistics: Statistics, tokens: int) -> int:
    """What so many tokens read into empty memory if the router's choices were uniform."""
    if not statistics.all_expert_bytes:
        return 0
    unused = 1 - min(statistics.token_expert_bytes / statistics.all_expert_bytes, 1.0)
    return round(statistics.all_expert_bytes * (1 - unused**tokens))


@contextmanager
def warming(engine: Engine, tokens: int) -> Iterator[None]:
    """Show on stderr, if it is a terminal, how much of the experts of `tokens` tokens has been read.

    Nothing is shown for a model that is in memory already, or that takes less than half a second.
    """
    start = engine.statistics()
    if start.resident or not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(engine, start, tokens, done), name="colibri-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _read(statistics: Statistics) -> int:
    return sum(layer.bytes_read for layer in statistics.expert_sets)


def _show(engine: Engine, start: Statistics, tokens: int, done: threading.Event) -> None:
    if done.wait(DELAY):
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("reading experts"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    # Uniform choices touch most experts: a real prompt often ends before the bar does, and the bar then goes.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=expected_bytes(start, tokens))
        with suppress(ColibriError):  # the engine was closed
            while not done.wait(INTERVAL):
                progress.update(task, completed=_read(engine.statistics()) - _read(start))

"""--io auto measures both ways of reading when it has to, says what it found, and changes no bit."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from runtime.scripts import run_script
from store.conftest import plan_of

import colibri
from colibri.runtime import opening
from colibri.runtime.backend import NativeOptions, Statistics
from colibri.runtime.engine import demo_model_path
from colibri.runtime.memory_limits import MemoryLimits
from colibri.runtime.native_backend import NativeBackend

CACHE = "3MiB"
TOKENS = [(11 * i * i + 5 * i) % 256 for i in range(40)]
MEMORY = Path("/dev/shm")


def run(path: Path | None = None, **options: Any) -> tuple[Statistics, np.ndarray]:
    with colibri.Engine(path, threads=1, **options) as engine, engine.session(64) as session:
        return engine.statistics(), session.forward(TOKENS)


def rates(statistics: Statistics) -> tuple[int, int]:
    return statistics.direct_bytes_per_second, statistics.buffered_bytes_per_second


@pytest.fixture
def file_in_memory() -> Iterator[Path]:
    if not MEMORY.is_dir():
        pytest.skip("there is no file system in memory")
    with TemporaryDirectory(dir=MEMORY, prefix="colibri-test-") as folder:
        path = Path(folder) / "demo.cbi"
        shutil.copy(demo_model_path(), path)
        yield path


def takes_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_auto_measures_and_obeys() -> None:
    statistics, _ = run(expert_cache=CACHE)
    direct, buffered = rates(statistics)
    assert statistics.is_direct == (takes_direct(demo_model_path()) and buffered <= 1.25 * direct)
    if takes_direct(demo_model_path()):
        assert min(direct, buffered) > 1_000_000, "bytes for each second"
    # What was read for it is no read of the model's.
    assert sum(sum(one.loads_per_expert) for one in statistics.expert_sets) == 0


@pytest.mark.parametrize(
    "options",
    [{"io": "direct", "expert_cache": CACHE}, {"io": "buffered", "expert_cache": CACHE}, {}, {"io": "direct"}],
)
def test_nothing_is_measured_where_nothing_is_to_choose(options: dict[str, Any]) -> None:
    statistics, _ = run(**options)
    assert rates(statistics) == (0, 0)
    assert statistics.is_direct == (options.get("io") == "direct" and takes_direct(demo_model_path()))


def test_all_ways_give_the_same_bits(file_in_memory: Path) -> None:
    _, expected = run()
    for path in (demo_model_path(), file_in_memory):
        for io in ("auto", "direct", "buffered"):
            _, logits = run(path, io=io, expert_cache=CACHE)
            assert np.array_equal(logits, expected), (path, io)


@pytest.mark.filterwarnings("ignore:the file cannot be read past the page cache")
def test_a_file_system_in_memory(file_in_memory: Path) -> None:
    """Older kernels refuse reads past the page cache there; others allow them, and then it is measured."""
    statistics, _ = run(file_in_memory, expert_cache=CACHE)
    if takes_direct(file_in_memory):
        assert min(rates(statistics)) > 1_000_000
    else:
        assert not statistics.is_direct and rates(statistics) == (0, 0)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "demo.cbi"
    shutil.copy(demo_model_path(), path)
    path.chmod(stat.S_IRUSR)
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        statistics, _ = run(path, expert_cache=CACHE)
        assert (min(rates(statistics)) > 0) == takes_direct(path)
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_a_tiny_model(tiny_file) -> None:
    path = tiny_file("q4")
    _, expected = run(path)
    statistics, logits = run(path, expert_cache=plan_of(path).least_expert_bytes)
    assert not statistics.resident and np.array_equal(logits, expected)


def test_damage_is_for_the_read_to_tell(tmp_path: Path) -> None:
    """A file that was damaged, or cut, where the experts are opens as ever."""
    data = bytearray(demo_model_path().read_bytes())
    for at in range(4_000_000, 12_000_000, 20_000):
        data[at] ^= 1
    path = tmp_path / "damaged.cbi"
    path.write_bytes(data)
    engine = colibri.Engine(path, threads=1, expert_cache=CACHE)
    with engine, engine.session(64) as session, pytest.raises(colibri.errors.ModelFileError, match="is damaged"):
        session.forward(TOKENS)


def test_memory_without_room_for_the_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast a cached file is read: what this machine has no memory to keep is read past the page cache."""
    if not takes_direct(demo_model_path()):
        pytest.skip("there is nothing to choose")
    budget = colibri.Engine.plan(expert_cache=CACHE)
    left = MemoryLimits(2**40, budget.needed - budget.process + (64 << 20), None)
    monkeypatch.setattr(opening, "memory_limits", lambda: left)
    given: list[NativeOptions] = []

    def open_backend(path: Path, threads: int, cpu: str, options: NativeOptions, limit: int | None) -> NativeBackend:
        given.append(options)
        return NativeBackend(path, threads, cpu, replace(options, page_cache_bytes=1), limit)

    monkeypatch.setattr(opening, "NativeBackend", open_backend)
    with colibri.Engine(expert_cache=CACHE) as engine:
        assert engine.budget is not None and given[0].page_cache_bytes == engine.budget.page_cache
        assert 0 < given[0].page_cache_bytes < 100 << 20
        assert engine.statistics().is_direct and min(rates(engine.statistics())) > 0


def test_it_fits_in_the_budget() -> None:
    """The slots lend their memory: opening takes no more than the plan says."""
    output = run_script(
        """
        import colibri
        from colibri.runtime.memory_limits import process_memory
        with colibri.Engine(expert_cache="3MiB", io_threads=16) as engine:
            print(process_memory().peak - engine.budget.process, engine.budget.needed - engine.budget.process)
        """
    )
    taken, planned = map(int, output.split())
    assert taken <= planned

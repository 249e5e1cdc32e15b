"""The expert store evicts as bench/cache_replay.py says: its misses are the replay's, call by call."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import colibri
from colibri.cbi.reader import CbiFile
from colibri.runtime.engine import demo_model_path

TOKENS = 120
ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert specification and specification.loader
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


cache_replay, record_routes = load("cache_replay"), load("record_routes")


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    """Text of two topics, so that favourites change."""
    ids = np.fromfile(ROOT / "demo" / "heldout.tokens.u16", "<u2").astype(int)
    return [*ids[: TOKENS // 2].tolist(), *ids[200_000 : 200_000 + TOKENS // 2].tolist()]


@pytest.fixture(scope="module")
def trace(tokens: list[int], tmp_path_factory: pytest.TempPathFactory) -> object:
    path = tmp_path_factory.mktemp("trace") / "demo.npz"
    with colibri.Engine() as engine:
        used, counted = record_routes.record(engine, [iter(tokens)], 0, TOKENS, 1)
    record_routes.save(path, demo_model_path(), used, counted)
    return cache_replay.Trace.load(path)


def store_misses(tokens: list[int], slot_bytes: int, io_threads: int) -> tuple[np.ndarray, int]:
    """Misses of each call, and slots in use at the end."""
    misses: list[list[int]] = []
    with colibri.Engine(expert_cache=slot_bytes, prefetch_depth=0, io_threads=io_threads) as engine:
        assert not engine.statistics().resident
        with engine.session(TOKENS) as session:
            for token in tokens:
                session.forward([token], last_only=True)
                misses.append([one.misses for one in engine.statistics().expert_sets])
        sets = engine.statistics().expert_sets
        slots = sum(sum(one.loads_per_expert) - one.evictions for one in sets)
    return np.diff(np.array(misses), axis=0, prepend=0).ravel(), slots


@pytest.mark.parametrize(("share", "io_threads"), [(10, 1), (25, 2), (25, 8), (50, 2), (75, 3)])
def test_the_store_evicts_as_the_replay(trace, tokens: list[int], share: int, io_threads: int) -> None:
    with CbiFile.open(demo_model_path()) as file:
        sizes = {expert.size for one in file.expert_sets for expert in one.experts}
        count = sum(len(one.experts) for one in file.expert_sets)
    (size,) = sizes
    slot = -(-size // 4096) * 4096
    slots = count * share // 100
    misses, used = store_misses(tokens, slots * slot, io_threads)
    assert used == slots
    expected = cache_replay.replay(trace, cache_replay.ExpectedWait(trace, slots), slots)
    assert misses.tolist() == expected.tolist()
    # Another rule would not do: the comparison sees the difference.
    other = cache_replay.replay(trace, cache_replay.Lru(trace, slots), slots)
    assert misses.tolist() != other.tolist()


def test_no_policy_beats_the_optimum(trace) -> None:
    for slots in (19, 48, 96):
        misses = {name: cache_replay.replay(trace, make(trace, slots), slots).sum()
                  for name, make in cache_replay.POLICIES.items()}  # fmt: skip
        assert min(misses, key=misses.__getitem__) == "belady"
        assert misses["expected-wait"] < min(misses["lru"], misses["fifo"], misses["random"])


def test_the_optimum_of_a_trace_done_by_hand() -> None:
    """One layer, two slots, experts 0 1 2 0 1 2 0: the optimum keeps the one that is needed next."""
    needed = [np.array([number]) for number in (0, 1, 2, 0, 1, 2, 0)]
    trace = cache_replay.Trace("hand", 1, 3, needed, np.ones(3), 7, 1)
    assert cache_replay.replay(trace, cache_replay.Belady(trace, 2), 2).tolist() == [1, 1, 1, 0, 1, 0, 1]
    assert cache_replay.replay(trace, cache_replay.Lru(trace, 2), 2).tolist() == [1] * 7

"""Room for few experts, I/O threads, prediction and what was read before change speed only: every comparison is ==."""

from __future__ import annotations

import hashlib
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.cpus import CPUS, this_machine_has
from store.conftest import plan_of

import colibri
from colibri.runtime.backend import STATE_FORMATS
from colibri.runtime.engine import demo_model_path

TOKENS = [(11 * i * i + 5 * i) % 256 for i in range(100)]
PROMPT = 70
slow = pytest.mark.skipif("COLIBRI_SLOW" not in os.environ, reason="slow; set COLIBRI_SLOW=1")


def room_for(path: Path, experts: int, huge_pages: str = "off") -> int:
    """Bytes for so many experts, at most one less than all and at least what one layer needs to go on."""
    plan = plan_of(path, huge_pages)
    slot = -(-plan.all_expert_bytes // plan.expert_count)
    return min(max(experts * slot, plan.least_expert_bytes), plan.all_expert_bytes - 1)


def logits_of(engine: colibri.Engine, steps: int = 1) -> np.ndarray:
    """Logits of a prompt at once and of the tokens after it, `steps` at a time."""
    with engine.session(len(TOKENS)) as session:
        rows = [session.forward(TOKENS[:PROMPT])]
        rows += [session.forward(TOKENS[i : i + steps]) for i in range(PROMPT, len(TOKENS), steps)]
        return np.concatenate(rows)


def digest(logits: np.ndarray) -> str:
    return hashlib.sha256(logits.tobytes()).hexdigest()


@pytest.fixture
def expected(model: Path) -> str:
    with colibri.Engine(model, threads=1) as engine:
        assert engine.statistics().resident
        return digest(logits_of(engine))


def check(model: Path, expected: str, experts: int, **options: Any) -> colibri.runtime.backend.Statistics:
    room = room_for(model, experts, options.get("huge_pages", "off"))
    with colibri.Engine(model, threads=2, expert_cache=room, **options) as engine:
        assert digest(logits_of(engine)) == expected  # cold
        assert digest(logits_of(engine, 3)) == expected  # warm, and in other steps
        statistics = engine.statistics()
    assert not statistics.resident
    assert sum(layer.misses for layer in statistics.expert_sets) > 0
    return statistics


@pytest.mark.parametrize("experts", [1, 4, 7, 8, 9, 24, 100])
def test_room_changes_nothing(model: Path, expected: str, experts: int) -> None:
    statistics = check(model, expected, experts)
    assert statistics.predicted_passes and statistics.unpredicted_passes


@pytest.mark.parametrize(("threads", "depth"), [(1, 0), (2, 2), (8, 1), (8, 8)])
def test_io_threads_and_prediction_change_nothing(model: Path, expected: str, threads: int, depth: int) -> None:
    for experts in (1, 9):
        statistics = check(model, expected, experts, io_threads=threads, prefetch_depth=depth)
        assert bool(statistics.predicted_passes) == (depth > 0)
        assert bool(sum(layer.predicted for layer in statistics.expert_sets)) == (depth > 0)


@pytest.mark.parametrize(
    "options",
    [
        {"io": "buffered"},
        {"io": "direct"},
        {"verify": "full"},
        {"verify": "off"},
        {"mlock": True},
        {"max_batch_tokens": 1},
        {"max_batch_tokens": 64},
        {"max_batch_tokens": 20000},
    ],
)
def test_other_options_change_nothing(model: Path, expected: str, options: dict[str, Any]) -> None:
    check(model, expected, 9, **options)


def test_huge_pages_change_nothing() -> None:
    path = demo_model_path()  # a page is room for all of a tiny model
    with colibri.Engine(path, threads=1) as engine:
        expected = digest(logits_of(engine))
    check(path, expected, 9, huge_pages="2M")


def test_guarded_slots_change_nothing(model: Path, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_DEBUG", "guard")
    check(model, expected, 9)


def test_cpus_change_nothing(model: Path, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in filter(this_machine_has, CPUS):
        monkeypatch.setenv("COLIBRI_CPU", cpu)
        assert check(model, expected, 7).cpu == cpu


def test_state_formats_change_nothing(model: Path) -> None:
    digests = set()
    for kv in STATE_FORMATS:
        with colibri.Engine(model, threads=1, kv=kv) as engine:
            digests.add(wanted := digest(logits_of(engine)))
        check(model, wanted, 5, kv=kv)
    assert len(digests) == len(STATE_FORMATS)


def test_batches_change_nothing(model: Path) -> None:
    lengths = (1, 70, 3, 40, 17)
    with colibri.Engine(model, threads=1) as engine:
        alone = []
        for length in lengths:
            with engine.session() as session:
                alone.append(session.forward(TOKENS[-length:]))
    for experts in (1, 9):
        with colibri.Engine(model, threads=2, expert_cache=room_for(model, experts)) as engine:
            sessions = [engine.session() for _ in lengths]
            items = [(session, TOKENS[-length:]) for session, length in zip(sessions, lengths, strict=True)]
            for result, logits in zip(engine.forward_batch(items), alone, strict=True):
                assert np.array_equal(np.asarray(result), logits)
            for session in sessions:  # the same token by token, together
                session.truncate(0)
            for step in range(max(lengths)):
                batch = [(session, tokens[step : step + 1]) for session, tokens in items if len(tokens) > step]
                rows = [logits[step] for logits in alone if len(logits) > step]
                for result, row in zip(engine.forward_batch(batch), rows, strict=True):
                    assert np.array_equal(np.asarray(result)[0], row)


def test_sampled_text_is_the_same(model: Path) -> None:
    def sampled(**options: Any) -> list[int]:
        with colibri.Engine(model, threads=2, **options) as engine:
            generation = engine.generate(TOKENS[:9], max_tokens=30, temperature=1.5, top_k=0, top_p=1.0, seed=3)
            list(generation)
            return generation.tokens

    assert sampled() == sampled(expert_cache=room_for(model, 8)) == sampled(expert_cache=room_for(model, 1))


@slow
@pytest.mark.parametrize("repeat", range(50))
def test_fifty_times(model: Path, expected: str, repeat: int) -> None:
    grid = list(itertools.product((1, 7, 8, 9), (1, 2, 8), (0, 1, 2)))
    experts, threads, depth = grid[repeat % len(grid)]
    check(model, expected, experts, io_threads=threads, prefetch_depth=depth)

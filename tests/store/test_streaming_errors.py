"""Options that are refused, damaged records, and the figures that an engine gives."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store.conftest import plan_of

import colibri
from colibri.cbi.reader import CbiFile
from colibri.errors import MemoryBudgetError, ModelFileError, OutOfMemoryError, UsageError
from colibri.runtime.backend import NativeOptions
from colibri.runtime.engine import demo_model_path
from colibri.runtime.native_backend import NativeBackend, plan_memory


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"io_threads": 0}, "io_threads must be a whole number from 1 to 16"),
        ({"io_threads": 17}, "io_threads"),
        ({"io": "mmap"}, "io must be one of auto, direct, buffered, not 'mmap'"),
        ({"verify": "no"}, "verify must be one of crc, full, off"),
        ({"huge_pages": "4M"}, "huge_pages must be one of auto, 2M, 1G, off"),
        ({"prefetch_depth": 9}, "prefetch_depth must be a whole number from 0 to 8"),
        ({"max_batch_tokens": 65537}, "max_batch_tokens must be a whole number from 1 to 65536"),
        ({"expert_cache": 0}, "expert_cache"),
        ({"io": []}, "io must be one of"),
        ({"pin": "x"}, "pin must be True or False, not 'x'"),
        ({"mlock": 2**32}, "mlock must be True or False"),
        ({"sessions": None}, "sessions must be a whole number"),
        ({"usage_file": 3}, "usage_file must be a path, not 3"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        colibri.Engine(**options)


def test_room_for_less_than_one_expert_is_refused() -> None:
    with pytest.raises(MemoryBudgetError, match=r"expert_cache=1000 bytes is less than the .* with which it can run"):
        colibri.Engine(expert_cache=1000)


def test_an_unknown_debug_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_DEBUG", "guards")
    with pytest.raises(UsageError, match="COLIBRI_DEBUG must be guard"):
        colibri.Engine()


def test_a_damaged_record_ends_those_who_need_it(tmp_path: Path) -> None:
    path = tmp_path / "damaged.cbi"
    shutil.copy(demo_model_path(), path)
    plan = plan_of(path)
    with CbiFile.open(path) as file:
        records = file.expert_sets
    tokens = [5, 17]
    with colibri.Engine(path, threads=2, io="buffered", expert_cache=plan.least_expert_bytes) as engine:

        def chosen(token: int) -> set[int]:
            before = engine.statistics().expert_sets[0].tokens_per_expert
            with engine.session() as session:
                session.forward([token])
            after = engine.statistics().expert_sets[0].tokens_per_expert
            return {expert for expert, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}

        expert = min(chosen(tokens[0]) - chosen(tokens[1]))
        offset = records[0].experts[expert].offset + 100
        with path.open("r+b") as opened:
            opened.seek(offset)
            byte = opened.read(1)[0]
            opened.seek(offset)
            opened.write(bytes([byte ^ 1]))
        with engine.session() as alone:
            expected = alone.forward([tokens[1]])
        sessions = [engine.session(), engine.session()]
        failed, good = engine.forward_batch([(s, [t]) for s, t in zip(sessions, tokens, strict=True)])
        assert isinstance(failed, ModelFileError)
        assert f"{path}: expert {expert} of layer 0 is damaged" in str(failed)
        assert f"at offset {records[0].experts[expert].offset} differs" in str(failed)
        assert np.array_equal(np.asarray(good), expected)
        assert [session.position for session in sessions] == [0, 1]
        with path.open("r+b") as opened:
            opened.seek(offset)
            opened.write(bytes([byte]))
        assert np.isfinite(sessions[0].forward([tokens[0]])).all()


def test_the_plan_is_what_an_engine_takes() -> None:
    options = NativeOptions(max_batch_tokens=700, expert_bytes=4_000_000, prefetch_depth=1, huge_pages="off")
    plan = plan_memory(demo_model_path(), 2, "", options, 512, 0)
    backend = NativeBackend(demo_model_path(), 2, "", options)
    statistics = backend.statistics()
    assert 0 <= plan.scratch_bytes - statistics.scratch_bytes <= 8192
    assert 0 <= plan.tensor_bytes - (statistics.weight_bytes - statistics.expert_bytes) <= 8192
    assert plan.least_expert_bytes < statistics.expert_bytes <= options.expert_bytes
    assert (plan.expert_count, plan.expert_set_count) == (192, 6)
    assert plan.token_expert_bytes == statistics.token_expert_bytes
    assert statistics.all_expert_bytes + plan.wasted_expert_bytes == plan.all_expert_bytes
    with CbiFile.open(demo_model_path()) as file:
        sizes = [expert.size for experts in file.expert_sets for expert in experts.experts]
    assert statistics.all_expert_bytes == sum(sizes)
    assert plan.token_expert_bytes == 6 * 4 * max(sizes)
    backend.close()


def test_sessions_stay_within_their_memory() -> None:
    plan = plan_memory(demo_model_path(), 1, "", NativeOptions(), 256, 0)
    backend = NativeBackend(demo_model_path(), 1, "", NativeOptions(state_bytes=2 * plan.session_bytes))
    first, second = backend.open_session(256, 0), backend.open_session(256, 0)
    with pytest.raises(OutOfMemoryError, match=f"takes {plan.session_bytes} bytes.* may hold {2 * plan.session_bytes}"):
        backend.open_session(256, 0)
    first.close()
    backend.open_session(256, 0).close()
    second.close()
    backend.close()


def test_a_long_prompt_reads_every_expert_once() -> None:
    plan = plan_of(demo_model_path())
    tokens = [(7 * i * i + i) % 4096 for i in range(900)]
    for depth in (0, 1):
        with colibri.Engine(
            threads=2, max_batch_tokens=900, expert_cache=plan.least_expert_bytes * 9, prefetch_depth=depth
        ) as engine:
            with engine.session() as session:
                session.forward(tokens, last_only=True)
            sets = engine.statistics().expert_sets
        assert all(max(layer.loads_per_expert) == 1 for layer in sets)
        assert sum(layer.bytes_read for layer in sets) <= plan.all_expert_bytes


def test_warm_reads_before_anybody_asks() -> None:
    plan = plan_of(demo_model_path())
    with colibri.Engine(threads=1, expert_cache=plan.all_expert_bytes - 1) as engine:
        backend = engine.backend
        assert isinstance(backend, NativeBackend)
        for index in range(3):
            backend.warm(index, range(32))
        with pytest.raises(UsageError, match=r"experts\[0\] is 32"):
            backend.warm(0, [32])
        with engine.session() as session:
            for _ in range(600):
                if sum(sum(layer.loads_per_expert) for layer in engine.statistics().expert_sets) == 96:
                    break
                session.forward([1, 2, 3])
                session.truncate(0)
        sets = engine.statistics().expert_sets
        assert all(layer.loads_per_expert == (1,) * 32 for layer in sets[:3])

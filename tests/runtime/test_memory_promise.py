"""`ram=` is kept: processes of their own read their VmHWM at the end."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from runtime.scripts import run_script
from runtime.tiny import write_larger

import colibri
from colibri.errors import MemoryBudgetError, UsageError
from colibri.runtime.engine import demo_model_path

MIB = 1 << 20

USE_EVERYTHING = """
    import hashlib, json, sys
    import colibri
    from colibri.runtime.memory_limits import process_memory

    path, context = sys.argv[1], int(sys.argv[3])
    try:
        engine = colibri.Engine(path, ram=sys.argv[2], context=context, threads=2)
    except colibri.errors.MemoryBudgetError as error:
        print(json.dumps({"error": str(error)}))
        raise SystemExit
    numbers = [(7 * i * i + 3 * i) % engine.vocabulary_size for i in range(context)]

    def bytes_read():
        return sum(layer.bytes_read for layer in engine.statistics().expert_sets)

    logits = hashlib.sha256()
    with engine.session() as session:
        session.forward(numbers[: context // 2], last_only=True)  # a long prompt, in chunks
        before = bytes_read()
        for number in numbers[context // 2 :]:
            logits.update(session.forward([number], last_only=True).tobytes())
        read = (bytes_read() - before) / (context - context // 2)
        session.truncate(0)
        session.score(numbers)
    if engine.tokenizer.has_chat_template:
        for seed in range(3):
            answer = engine.generate(messages=[{"role": "user", "content": "Was it good? " * 9}], seed=seed,
                                     max_tokens=30, temperature=1, top_p=0.9, top_logprobs=20)
            assert list(answer)
        text = "and the light was good, " * (context // 25)
        assert list(engine.generate(text, max_tokens=3))
    engine.tokenizer.encode("and the light was good, " * (context // 25))
    budget = engine.budget
    print(json.dumps({
        "peak": process_memory().peak, "ram": budget.ram, "needed": budget.needed, "experts": budget.expert_bytes,
        "all": budget.model.all_expert_bytes, "chunk": budget.max_batch_tokens, "read": read,
        "resident": engine.statistics().resident, "logits": logits.hexdigest(),
    }))
"""


def use(path: Path, ram: int, context: int, timeout: float = 60) -> dict[str, Any]:
    """Everything that takes memory, in a process of its own."""
    result = json.loads(run_script(USE_EVERYTHING, path, str(ram), str(context), timeout=timeout))
    if "error" not in result:
        assert result["ram"] == ram
        assert result["needed"] <= ram
        assert result["peak"] <= ram, f"{(result['peak'] - ram) / MIB:.1f} MiB above the budget"
        assert result["resident"] == (result["experts"] >= result["all"])
    return result


def smallest(path: Path, context: int) -> int:
    error = use(path, 30 * MIB, context)["error"]
    return int(error.split("give ram=")[1].split("MiB")[0]) * MIB


def test_the_demo_keeps_every_budget() -> None:
    """From the smallest that works to one that leaves memory over; the same bits, and fewer reads."""
    least = smallest(demo_model_path(), 400)
    results = [use(demo_model_path(), least + more * MIB, 400) for more in (0, 2, 4, 7, 10, 15, 200)]
    assert results[0]["experts"] < results[0]["all"] // 4
    assert len({result["logits"] for result in results}) == 1
    read = [result["read"] for result in results]
    assert read[0] > 0 and read[-1] == 0
    # Among budgets that are close, luck may decide.
    assert all(fewer <= 1.02 * more for more, fewer in pairwise(read))
    assert [result["experts"] for result in results] == sorted(result["experts"] for result in results)
    assert not results[0]["resident"] and results[-1]["resident"]


def test_less_than_the_smallest_is_refused_before_loading() -> None:
    least = smallest(demo_model_path(), 400)
    output = run_script(
        """
        import sys
        import colibri
        from colibri.runtime.memory_limits import process_memory
        try:
            colibri.Engine(ram=int(sys.argv[1]), context=400)
        except colibri.errors.MemoryBudgetError as error:
            print(error)
        print(process_memory().peak)
        """,
        str(least - 4 * MIB),
    )
    message, peak = output.splitlines()
    assert "dense weights 2.27 MiB" in message and "give ram=" in message
    assert int(peak) < least - 16 * MIB


def test_a_large_tokenizer_counts(tmp_path: Path, tiny_file) -> None:
    """What parsing it takes for a moment is over before the weights come, and what it keeps is part of the sum."""
    output = run_script(
        """
        import dataclasses, json, sys
        from pathlib import Path
        from colibri.cbi import CbiFile
        from colibri.runtime.memory_limits import process_memory
        from colibri.runtime import opening
        import colibri

        with CbiFile.open(Path(sys.argv[1])) as file:
            parts = json.loads(file.tokenizer_json)
        vocabulary = parts["model"]["vocab"]
        first = sorted(vocabulary, key=vocabulary.get)[:60]
        made = [a + b + c for a in first for b in first for c in first][:60000]
        pairs = [a + b for a in first for b in first]
        for token in pairs + made:
            vocabulary.setdefault(token, len(vocabulary) + 300)
        parts["model"]["merges"] = [[p[0], p[1]] for p in pairs] + [[m[:2], m[2]] for m in made]
        source = json.dumps(parts).encode()
        read = opening.ModelText.read

        def with_large_tokenizer(path):
            text = read(path)
            text._tokenizer_json = source
            return text

        before = process_memory().resident
        opening.ModelText.read = with_large_tokenizer
        budget = colibri.Engine(sys.argv[1], ram="500MiB").budget
        print((budget.process - before) / 2**20, process_memory().peak <= budget.ram)
        """,
        tiny_file("f32"),
    )
    grown, kept = output.split()
    assert float(grown) > 10
    assert kept == "True"


def test_results_that_do_not_fit_are_refused() -> None:
    """Nothing is computed, and what fits goes on."""
    output = run_script(
        """
        import colibri
        engine = colibri.Engine(ram="86MiB", context=1000, sessions=2)
        with engine.session() as session:
            try:
                session.forward([5] * 900)
            except colibri.errors.MemoryBudgetError as error:
                print(error)
            print(session.position)
            assert len(session.score([5] * 900)) == 900
            session.truncate(0)
            assert session.forward([5] * 900, last_only=True).shape == (1, 4096)
            blocks = [session, engine.session(8)]
            got = engine.forward_batch([(s, [1, 2]) for s in blocks], last_only=True)
            assert [r.shape for r in got] == [(1, 4096)] * 2
        """
    )
    message, position = output.splitlines()
    assert "logits of 900 tokens take 18.1 MiB" in message or "logits of 900 tokens take 18.06 MiB" in message
    assert "last_only=True" in message and "budget leaves" in message
    assert position == "0"


def test_sessions_that_do_not_fit_are_refused() -> None:
    with colibri.Engine(ram="20GB") as engine:
        assert engine.budget is not None and engine.budget.left is not None
        few = engine.budget
    output = run_script(
        """
        import colibri
        engine = colibri.Engine(ram="75MiB", context=512, sessions=2)
        sessions = []
        try:
            while True:
                sessions.append(engine.session())
        except colibri.errors.OutOfMemoryError as error:
            print(len(sessions), engine.budget.state_limit, engine.budget.model.session_bytes, error)
        sessions.pop().close()
        engine.session().close()
        """
    )
    count, limit, size, message = output.split(maxsplit=3)
    assert int(count) == int(limit) // int(size) >= 2
    assert "512" in message and "bytes" in message
    assert few.state_limit > 1000 * MIB


def test_a_second_engine_counts_what_the_first_may_still_take() -> None:
    output = run_script(
        """
        import colibri
        from colibri.runtime.memory_limits import process_memory
        first = colibri.Engine(ram="400MiB", context=1000, max_batch_tokens=4096)
        second = colibri.Engine(ram="200MiB", context=1000, max_batch_tokens=512)
        assert second.budget.process >= first.budget.needed > process_memory().resident + 40 * 2**20
        for engine in (first, second):
            with engine.session() as session:
                session.score(list(range(1000)))
        print(process_memory().peak <= second.budget.needed)
        first.close()
        print(colibri.Engine(context=1000).budget.process >= first.budget.needed)
        second.close()
        print(colibri.Engine(context=1000).budget.process < first.budget.needed)
        """
    )
    assert output.split() == ["True"] * 3


@pytest.mark.parametrize(
    "options",
    [{"ram": "lots"}, {"ram": 0}, {"ram": True}, {"expert_cache": "-1"}, {"sessions": 0}, {"context": 0},
     {"context": 5000}, {"max_batch_tokens": 0}, {"io": "fast"}, {"verify": "yes"}, {"huge_pages": "4M"},
     {"io_threads": 17}, {"prefetch_depth": -1}],
)  # fmt: skip
def test_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        colibri.Engine(**options)


def test_an_expert_cache() -> None:
    with colibri.Engine(expert_cache="3MiB", io_threads=3, prefetch_depth=0, verify="full", io="buffered") as engine:
        assert engine.budget is not None and engine.budget.expert_bytes == 3 * MIB
        with engine.session(100) as session:
            session.forward(list(range(90)))
        statistics = engine.statistics()
        assert statistics.expert_bytes <= 3 * MIB and not statistics.resident and not statistics.is_direct
        assert sum(layer.bytes_read for layer in statistics.expert_sets) > 3 * MIB
    with pytest.raises(MemoryBudgetError, match=r"expert_cache=1000 bytes is less than the .* with which it can run"):
        colibri.Engine(expert_cache=1000)


@pytest.mark.skipif(os.environ.get("COLIBRI_SLOW") != "1", reason="slow: COLIBRI_SLOW=1 runs it")
def test_a_larger_model_keeps_every_budget(tmp_path: Path) -> None:
    path = write_larger(tmp_path / "larger.cbi")
    least = smallest(path, 1024)
    results = [use(path, least + more * MIB, 1024, timeout=600) for more in (0, 20, 60, 120)]
    assert len({result["logits"] for result in results}) == 1
    assert results[0]["read"] > 0 and results[-1]["read"] == 0

"""Threads, batches, chunks, saved states and CPUs change speed only: every comparison here is ==."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from runtime.cpus import CPUS, FLOAT_KERNELS, this_machine_has

import colibri
from colibri.errors import UsageError

WEIGHTS = ("f32", "q8", "q4")
TOKENS = [(11 * i * i + 5 * i) % 256 for i in range(150)]
DEMO_FOLDER = Path(__file__).parents[2] / "demo"


@pytest.fixture(scope="module")
def demo_f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "demo-f32.cbi"
    colibri.convert(DEMO_FOLDER, path, weights="f32")
    return path


@pytest.fixture(params=[*WEIGHTS, "demo", "demo-f32"])
def model(request: pytest.FixtureRequest, tiny_file: Callable[[str], Path]) -> Path | None:
    """Tiny models of odd sizes, and the demo model (None: q4) at the size of real work."""
    if request.param == "demo":
        return None
    return request.getfixturevalue("demo_f32") if request.param == "demo-f32" else tiny_file(request.param)


def logits_of(engine: colibri.Engine, chunk: int = len(TOKENS)) -> np.ndarray:
    with engine.session(context=len(TOKENS)) as session:
        return np.concatenate([session.forward(TOKENS[i : i + chunk]) for i in range(0, len(TOKENS), chunk)])


def sampled(engine: colibri.Engine, seed: int = 3) -> list[int]:
    generation = engine.generate(TOKENS[:9], max_tokens=40, temperature=1.5, top_k=0, top_p=1.0, seed=seed)
    list(generation)
    return generation.tokens


def test_threads_change_nothing(model: Path | None) -> None:
    results, texts = [], []
    for threads in (1, 2, 3, 8):
        with colibri.Engine(model, threads=threads) as engine:
            assert engine.statistics().threads == threads
            results.append(logits_of(engine))
            texts.append(sampled(engine))
    assert all(np.array_equal(results[0], other) for other in results[1:])
    assert all(texts[0] == other for other in texts[1:])


def test_chunks_change_nothing(model: Path | None) -> None:
    with colibri.Engine(model, threads=2) as engine:
        whole = logits_of(engine)
        assert np.isfinite(whole).all()
        for chunk in (1, 7, 64, 149):
            assert np.array_equal(logits_of(engine, chunk), whole), chunk
    for passes in (1, 5, 64):
        with colibri.Engine(model, threads=2, max_batch_tokens=passes) as engine:
            assert np.array_equal(logits_of(engine), whole), passes


def test_batches_change_nothing(model: Path | None) -> None:
    lengths = (1, 150, 3, 40, 64, 65, 2, 17)
    with colibri.Engine(model, threads=2) as engine:
        alone = []
        for length in lengths:
            with engine.session() as session:
                alone.append(session.forward(TOKENS[-length:]))
        for order in (range(8), reversed(range(8)), (1, 3), (6, 0, 2)):
            chosen = list(order)
            sessions = [engine.session() for _ in chosen]
            items = [(s, TOKENS[-lengths[i] :]) for s, i in zip(sessions, chosen, strict=True)]
            for index, result in zip(chosen, engine.forward_batch(items), strict=True):
                assert np.array_equal(np.asarray(result), alone[index])
            # The same again in steps of different sizes.
            for session in sessions:
                session.truncate(0)
            at = 0
            while at < 150:
                step = [(s, t[at : at + 20]) for s, t in items if len(t) > at]
                rows = iter(engine.forward_batch(step))
                for index, (_, tokens) in zip(chosen, items, strict=True):
                    if len(tokens) > at:
                        assert np.array_equal(np.asarray(next(rows)), alone[index][at : at + 20])
                at += 20
            for session in sessions:
                session.close()


def test_saved_and_restored_is_uninterrupted(model: Path | None) -> None:
    with colibri.Engine(model, threads=2) as engine:
        whole = logits_of(engine)
        for cut in (1, 63, 64, 100):
            with engine.session() as a, engine.session() as b:
                a.forward(TOKENS[:cut])
                blob = a.save()
                b.restore(blob)
                assert np.array_equal(b.forward(TOKENS[cut:]), whole[cut:])
                assert b.save()[: len(blob) // 2] != blob[: len(blob) // 2]


def test_cpus_change_nothing(model: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    results, texts, ran = [], [], []
    for cpu in CPUS:
        monkeypatch.setenv("COLIBRI_CPU", cpu)
        if not this_machine_has(cpu):
            with pytest.raises(UsageError, match=f"COLIBRI_CPU={cpu}"):
                colibri.Engine(model)
            continue
        with colibri.Engine(model, threads=2) as engine:
            results.append(logits_of(engine))
            texts.append(sampled(engine))
            statistics = engine.statistics()
        ran.append(statistics.cpu)
        assert statistics.cpu == cpu
        for weights, name in statistics.kernels.items():
            assert name.endswith(cpu if weights.startswith("q") else FLOAT_KERNELS.get(cpu, cpu)), name
    assert ran[:1] == ["scalar"]
    assert all(np.array_equal(results[0], other) for other in results[1:])
    assert all(texts[0] == other for other in texts[1:])


def test_the_reference_agrees_closely(model: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with colibri.Engine(model) as engine:
        native = logits_of(engine)
        text = list(engine.generate(TOKENS[:9], max_tokens=5, temperature=0))
    monkeypatch.setenv("COLIBRI_VM", "reference")
    with colibri.Engine(model) as engine:
        reference = logits_of(engine)
        assert list(engine.generate(TOKENS[:9], max_tokens=5, temperature=0)) == text
        assert engine.statistics().vm == "reference"
    # An activation at the edge between two codes may fall to either side, and moves all that follows a little.
    difference = np.sqrt(np.mean((reference - native) ** 2) / np.mean(native**2))
    assert difference < (1e-5 if model is not None and "f32" in model.name else 0.06)
    np.testing.assert_allclose(reference[0], native[0], atol=1e-4)


def test_a_seed_gives_the_same_tokens_alone_or_beside_others(model: Path | None) -> None:
    with colibri.Engine(model, threads=2) as engine:
        alone = [sampled(engine, seed) for seed in range(4)]
        assert len({tuple(tokens) for tokens in alone}) == 4
        generations = [
            engine.generate(TOKENS[:9], max_tokens=40, temperature=1.5, top_k=0, top_p=1.0, seed=seed)
            for seed in range(4)
        ]
        # Taken in turns, so that their forwards interleave.
        while any(generation.finish_reason is None for generation in generations):
            for generation in generations:
                next(generation, None)
        assert [generation.tokens for generation in generations] == alone

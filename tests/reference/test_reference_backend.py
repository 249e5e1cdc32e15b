"""COLIBRI_VM=reference: the engine of the package on the NumPy VM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from reference.hand_built import write_file
from reference.small_program import CHOSEN, EXPERTS, FFN, VOCABULARY, WIDTH, small_builder, small_experts, small_weights

import colibri
from colibri.errors import ContextLengthError
from colibri.reference import ReferenceEngine

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def model_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLIBRI_VM", "reference")
    path = tmp_path / "model.cbi"
    experts = {"experts": small_experts()}
    write_file(path, small_builder(), small_weights(), experts, vocabulary_size=VOCABULARY, context_limit=64)
    return path


def test_session_gives_the_references_logits(model_path: Path) -> None:
    expected = ReferenceEngine(model_path).session().forward(TOKENS)
    with colibri.Engine(model_path) as engine, engine.session(context=16) as session:
        assert np.array_equal(session.forward(TOKENS), expected)
        session.truncate(4)
        blob = session.save()
        np.testing.assert_allclose(session.forward(TOKENS[4:], last_only=True), expected[-1:], atol=1e-6)
        session.restore(blob)
        assert session.tokens == TOKENS[:4]
        scores = session.score(TOKENS[4:])
    shifted = expected.astype(np.float64)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(scores, log_probabilities[np.arange(3, 7), TOKENS[4:]], rtol=1e-5)


@pytest.mark.parametrize("kv", ["f32", "f16", "q8"])
def test_state_format_is_passed_on(model_path: Path, kv: str) -> None:
    expected = ReferenceEngine(model_path).session(state_format=kv).forward(TOKENS)
    with colibri.Engine(model_path, kv=kv) as engine, engine.session() as session:
        assert np.array_equal(session.forward(TOKENS), expected)


def test_batch_and_statistics(model_path: Path) -> None:
    with colibri.Engine(model_path) as engine, engine.session(context=4) as short, engine.session() as long:
        failed, logits = engine.forward_batch([(short, TOKENS), (long, TOKENS)])
        assert isinstance(failed, ContextLengthError)
        assert isinstance(logits, np.ndarray)
        statistics = engine.statistics()
    assert (statistics.vm, statistics.tokens, statistics.passes) == ("reference", len(TOKENS), 1)
    (one,) = statistics.expert_sets
    assert one.expert_count == EXPERTS
    assert one.expert_tokens == sum(one.tokens_per_expert) == CHOSEN * len(TOKENS)
    assert one.experts_computed == np.count_nonzero(one.tokens_per_expert)
    assert one.bytes_touched == one.experts_computed * 3 * FFN * WIDTH * 4
    assert statistics.seconds_by_op["experts"] > 0

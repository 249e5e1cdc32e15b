"""Engine and session of the reference on a file built by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from reference.hand_built import write_file
from reference.small_program import EXPERTS, VOCABULARY, small_builder, small_experts, small_model, small_weights

from colibri.errors import CancelledError, ContextLengthError, ModelFileError, StateError, UsageError
from colibri.reference import AttentionState, Call, ReferenceEngine, run

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("reference") / "model.cbi")


def write(path: Path, *, formats: dict[str, str] | None = None, expert_format: str = "f32", seed: int = 0) -> Path:
    experts = {"experts": small_experts()}
    write_file(
        path,
        small_builder(),
        small_weights(seed),
        experts,
        vocabulary_size=VOCABULARY,
        context_limit=64,
        formats=formats,
        expert_formats=(expert_format,) * 3,
    )
    return path


@pytest.fixture
def engine(model_path: Path) -> ReferenceEngine:
    return ReferenceEngine(model_path)


def test_a_file_computes_what_its_program_and_weights_say(engine: ReferenceEngine) -> None:
    model = small_model()
    states = [AttentionState(state, "f32") for state in model.program.states]
    expected = run(model, states, Call(np.array(TOKENS), np.arange(10), np.arange(10)))
    assert engine.vocabulary_size == VOCABULARY
    assert engine.context_limit == 64
    assert len(engine.model.expert_sets[0]) == EXPERTS
    assert np.array_equal(engine.session().forward(TOKENS), expected)


def test_logits_modes(engine: ReferenceEngine) -> None:
    every = engine.session().forward(TOKENS)
    np.testing.assert_allclose(engine.session().forward(TOKENS, "last"), every[-1:], atol=1e-6)
    session = engine.session()
    assert session.forward(TOKENS[:4], "none").shape == (0, VOCABULARY)
    np.testing.assert_allclose(session.forward(TOKENS[4:]), every[4:], atol=1e-6)


def test_truncate_goes_back(engine: ReferenceEngine) -> None:
    session = engine.session()
    session.forward(TOKENS)
    session.truncate(6)
    assert session.position == 6
    assert session.tokens().tolist() == TOKENS[:6]
    expected = engine.session().forward([*TOKENS[:6], 8])[-1:]
    np.testing.assert_allclose(session.forward([8]), expected, atol=1e-6)
    with pytest.raises(UsageError, match="0 to 7"):
        session.truncate(8)


@pytest.mark.parametrize("state_format", ["f32", "f16", "q8"])
def test_restored_equals_uninterrupted(engine: ReferenceEngine, state_format: str) -> None:
    session = engine.session(state_format=state_format)
    session.forward(TOKENS[:6])
    blob = session.save()
    expected = session.forward(TOKENS[6:])
    other = engine.session(state_format=state_format)
    other.forward([7, 7])
    other.restore(blob)
    assert other.position == 6
    assert np.array_equal(other.forward(TOKENS[6:]), expected)


def test_a_state_that_does_not_fit_changes_nothing(engine: ReferenceEngine, tmp_path: Path) -> None:
    source = engine.session()
    source.forward(TOKENS)
    blob = source.save()
    foreign = ReferenceEngine(write(tmp_path / "other.cbi", seed=3)).session()
    short, other_format = engine.session(context=9), engine.session(state_format="f16")
    for session, bad in ((foreign, blob), (short, blob), (other_format, blob), (engine.session(), blob[:-40])):
        session.forward([1, 2])
        with pytest.raises(StateError):
            session.restore(bad)
        assert session.position == 2


def test_scores_are_log_probabilities_of_the_next_token(engine: ReferenceEngine) -> None:
    logits = engine.session().forward(TOKENS).astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    scores = engine.session().score(TOKENS)
    np.testing.assert_allclose(scores[:-1], np.log(probabilities[np.arange(9), TOKENS[1:]]), rtol=1e-5)
    assert np.isnan(scores[-1])


def test_a_failed_call_leaves_the_session(engine: ReferenceEngine) -> None:
    session = engine.session(context=8)
    session.forward(TOKENS[:5])
    with pytest.raises(ContextLengthError, match=r"5 \+ 4"):
        session.forward([1, 2, 3, 4])
    with pytest.raises(UsageError, match="0 to 10"):
        session.forward([VOCABULARY])
    with pytest.raises(UsageError, match="non-empty"):
        session.forward([])
    session.cancel()
    with pytest.raises(CancelledError):
        session.forward([1])
    assert session.position == 5
    expected = engine.session().forward([*TOKENS[:5], 2])[-1:]
    np.testing.assert_allclose(session.forward([2]), expected, atol=1e-6)


def test_a_call_that_fails_in_the_last_op_forgets_its_keys(engine: ReferenceEngine) -> None:
    session = engine.session()
    session.forward(TOKENS[:5])

    def fail(index: int, *_: object) -> None:
        if index == len(engine.model.program.ops) - 1:
            raise KeyboardInterrupt

    engine.trace = fail
    with pytest.raises(KeyboardInterrupt):
        session.forward(TOKENS[5:])
    engine.trace = None
    np.testing.assert_allclose(session.forward(TOKENS[5:]), engine.session().forward(TOKENS)[5:], atol=1e-6)


def test_an_item_that_fails_leaves_the_others(engine: ReferenceEngine) -> None:
    first, second = engine.session(), engine.session(context=2)
    results = engine.forward_batch([(second, TOKENS), (first, TOKENS)])
    assert isinstance(results[0], ContextLengthError)
    assert isinstance(results[1], np.ndarray)
    assert np.array_equal(results[1], engine.session().forward(TOKENS))


@pytest.mark.parametrize("format", ["q8_g32", "q4_g32", "bf16", "f16"])
def test_formats_differ_a_little(engine: ReferenceEngine, format: str, tmp_path: Path) -> None:
    matrices = ("q_weight", "k_weight", "v_weight", "o_weight", "shared_gate_proj", "shared_up_proj", "head")
    path = write(tmp_path / "model.cbi", formats=dict.fromkeys(matrices, format), expert_format=format)
    difference = np.abs(ReferenceEngine(path).session().forward(TOKENS) - engine.session().forward(TOKENS)).max()
    assert 1e-6 < difference < (0.3 if format == "q4_g32" else 0.03)


def test_open_and_session_errors(engine: ReferenceEngine, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"absent\.cbi"):
        ReferenceEngine(tmp_path / "absent.cbi")
    with pytest.raises(UsageError, match="1 to 64"):
        engine.session(context=65)
    with pytest.raises(UsageError, match="q4"):
        engine.session(state_format="q4")

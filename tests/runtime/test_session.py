"""Sessions: forward, score, truncate, save and restore, and every argument that is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.tiny import VOCABULARY

import colibri
from colibri.errors import CancelledError, ContextLengthError, StateError, UsageError

TOKENS = [(7 * i * i + 3 * i) % 256 for i in range(90)]  # beyond one block of 64 positions


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def test_forward_gives_a_row_for_each_token(tiny: colibri.Engine) -> None:
    with tiny.session(context=100) as session:
        logits = session.forward(TOKENS[:3])
        assert logits.shape == (3, VOCABULARY)
        assert logits.dtype == np.float32
        assert (session.position, session.context, session.tokens) == (3, 100, TOKENS[:3])
        assert not np.array_equal(logits[0], logits[1])


def test_last_only_gives_the_last_row(tiny: colibri.Engine) -> None:
    with tiny.session() as a, tiny.session() as b:
        last = a.forward(TOKENS, last_only=True)
        assert last.shape == (1, VOCABULARY)
        assert np.array_equal(last[0], b.forward(TOKENS)[-1])
        assert a.position == b.position == len(TOKENS)


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda t: np.array(t, np.int64), lambda t: np.array(t)[::1]])
def test_tokens_may_be_any_sequence_of_whole_numbers(tiny: colibri.Engine, kind: Callable[[Any], Any]) -> None:
    with tiny.session() as session, tiny.session() as other:
        assert np.array_equal(session.forward(kind(TOKENS)), other.forward(TOKENS))


@pytest.mark.parametrize("tokens", [[], [-1], [0, VOCABULARY], [1.5], [[1, 2]], ["a"], [True], [2**70], None, 3])
def test_wrong_tokens_are_refused_and_nothing_changes(tiny: colibri.Engine, tokens: Any) -> None:
    with tiny.session() as session:
        session.forward([1])
        with pytest.raises(UsageError, match="token"):
            session.forward(tokens)
        with pytest.raises(UsageError, match="token"):
            session.score(tokens)
        assert session.tokens == [1]


def test_truncate_forgets(tiny: colibri.Engine) -> None:
    with tiny.session() as session, tiny.session() as fresh:
        session.forward(TOKENS)
        session.truncate(40)
        assert session.tokens == TOKENS[:40]
        other = [9, 8, 7]
        expected = fresh.forward(TOKENS[:40] + other)[-3:]
        assert np.array_equal(session.forward(other), expected)
        session.truncate(0)
        assert np.array_equal(session.forward(TOKENS[:2]), fresh_logits(tiny, TOKENS[:2]))


def fresh_logits(engine: colibri.Engine, tokens: list[int]) -> np.ndarray:
    with engine.session() as session:
        return session.forward(tokens)


@pytest.mark.parametrize("position", [-1, 4, 1.0, None, True])
def test_truncate_refuses(tiny: colibri.Engine, position: Any) -> None:
    with tiny.session() as session:
        session.forward([1, 2, 3])
        with pytest.raises(UsageError, match="truncate takes a position from 0 to 3"):
            session.truncate(position)
        assert session.position == 3


def test_score_is_the_log_softmax_of_forward(tiny: colibri.Engine) -> None:
    expected = log_softmax(fresh_logits(tiny, TOKENS))[np.arange(len(TOKENS) - 1), TOKENS[1:]]
    with tiny.session() as session:
        scores = session.score(TOKENS)
        assert scores.dtype == np.float32
        assert scores.shape == (len(TOKENS),)
        assert np.isnan(scores[0])
        np.testing.assert_allclose(scores[1:], expected, atol=1e-5)
        assert session.position == len(TOKENS)


def test_score_continues_a_session(tiny: colibri.Engine) -> None:
    with tiny.session() as whole, tiny.session() as parts:
        expected = whole.score(TOKENS)
        parts.forward(TOKENS[:10])
        pieces = [parts.score(TOKENS[a:b]) for a, b in ((10, 11), (11, 64), (64, 90))]
        assert np.array_equal(np.concatenate(pieces), expected[10:])
        assert parts.tokens == TOKENS
        assert np.array_equal(parts.forward([5]), whole.forward([5]))


def test_what_does_not_fit_in_the_context_is_refused(tiny: colibri.Engine) -> None:
    with tiny.session(context=8) as session:
        session.forward(TOKENS[:6])
        for call in (session.forward, session.score):
            with pytest.raises(ContextLengthError, match="context"):
                call(TOKENS[:3])
            assert session.position == 6
        session.forward(TOKENS[6:8])
        with pytest.raises(ContextLengthError):
            session.forward([1])
        assert session.tokens == TOKENS[:8]


@pytest.mark.parametrize("context", [0, -1, 257, 2**40, 1.0, "8", True])
def test_context_outside_the_models_limit_is_refused(tiny: colibri.Engine, context: Any) -> None:
    with pytest.raises(UsageError, match="context must be a whole number from 1 to 256"):
        tiny.session(context=context)


def test_save_and_restore(tiny: colibri.Engine) -> None:
    with tiny.session() as session, tiny.session(context=80) as other:
        session.forward(TOKENS[:70])
        blob = session.save()
        assert isinstance(blob, bytes)
        expected = session.forward(TOKENS[70:])
        other.forward([200, 100])
        other.restore(blob)
        assert other.tokens == TOKENS[:70]
        assert np.array_equal(other.forward(TOKENS[70:75]), expected[:5])
        session.restore(bytearray(blob))
        assert np.array_equal(session.forward(TOKENS[70:]), expected)


def test_an_empty_session_can_be_saved(tiny: colibri.Engine) -> None:
    with tiny.session() as session:
        blob = session.save()
        session.forward([1, 2])
        session.restore(blob)
        assert session.position == 0


def test_blobs_that_do_not_fit_change_nothing(tiny: colibri.Engine, tiny_file: Callable[[str], Path]) -> None:
    with tiny.session() as session:
        session.forward(TOKENS)
        blob = session.save()
    bad = [b"", b"x", blob[:-1], blob + b"\0", blob[:64], bytes(len(blob))]
    bad += [blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :] for at in range(0, len(blob), len(blob) // 50)]
    with colibri.Engine(tiny_file("q8"), kv="f32") as engine, engine.session() as session:
        session.forward(TOKENS)
        bad.append(session.save())
    with colibri.Engine(tiny_file("f32"), kv="f16") as engine, engine.session() as session:
        session.forward(TOKENS)
        bad.append(session.save())
    with tiny.session(context=64) as session:
        session.forward([4, 5])
        for wrong in [*bad, blob]:  # the whole one has more positions than this session
            with pytest.raises(StateError):
                session.restore(wrong)
        assert session.tokens == [4, 5]
        assert np.array_equal(session.forward([6]), fresh_logits(tiny, [4, 5, 6])[-1:])


@pytest.mark.parametrize("wrong", [None, "text", 3, [1]])
def test_restore_takes_bytes_alone(tiny: colibri.Engine, wrong: Any) -> None:
    with tiny.session() as session, pytest.raises(UsageError, match="bytes"):
        session.restore(wrong)


def test_a_closed_session_is_refused(tiny: colibri.Engine) -> None:
    session = tiny.session()
    session.close()
    session.close()
    uses: list[Callable[[], object]] = [
        lambda: session.forward([1]),
        lambda: session.score([1]),
        lambda: session.position,
        lambda: session.context,
        lambda: session.tokens,
        lambda: session.truncate(0),
        session.save,
        lambda: session.restore(b""),
        session.cancel,
        lambda: tiny.generate("text", session=session),
    ]
    for use in uses:
        with pytest.raises(UsageError, match="the session is closed"):
            use()


def test_cancel_hits_the_next_forward_once(tiny: colibri.Engine) -> None:
    with tiny.session() as session:
        session.forward(TOKENS[:4])
        session.cancel()
        with pytest.raises(CancelledError):
            session.forward(TOKENS[4:])
        assert session.tokens == TOKENS[:4]
        assert np.array_equal(session.forward(TOKENS[4:]), fresh_logits(tiny, TOKENS)[4:])
        session.cancel()
        session.truncate(4)  # forgets the cancel too
        session.forward([1])


def test_batch_runs_sessions_together(tiny: colibri.Engine) -> None:
    with tiny.session() as a, tiny.session() as b, tiny.session() as c:
        b.forward([1, 2])
        results = tiny.forward_batch([(a, [5]), (b, [3, 4]), (c, TOKENS)])
        assert [np.asarray(r).shape for r in results] == [(1, VOCABULARY), (2, VOCABULARY), (90, VOCABULARY)]
        for result, tokens, start in zip(results, ([5], [1, 2, 3, 4], TOKENS), (0, 2, 0), strict=True):
            assert isinstance(result, np.ndarray)
            assert np.array_equal(result, fresh_logits(tiny, list(tokens))[start:])
        last = tiny.forward_batch([(a, [6, 7]), (c, [1])], last_only=True)
        assert [np.asarray(r).shape for r in last] == [(1, VOCABULARY), (1, VOCABULARY)]
    assert tiny.forward_batch([]) == []


def test_items_that_fail_have_their_error_in_their_place(
    tiny: colibri.Engine, tiny_file: Callable[[str], Path]
) -> None:
    with (
        colibri.Engine(tiny_file("f32")) as other_engine,
        other_engine.session() as stranger,
        tiny.session() as good,
        tiny.session(context=2) as short,
        tiny.session() as cancelled,
        tiny.session() as wrong,
        tiny.session() as last,
    ):
        closed = tiny.session()
        closed.close()
        short.forward([1])
        cancelled.cancel()
        items = [
            (closed, [1]),
            (good, TOKENS),
            (short, [1, 2]),
            (wrong, [VOCABULARY]),
            (cancelled, [1, 2]),
            (good, [3]),
            (stranger, [1]),
            (last, [8, 9]),
        ]
        results = tiny.forward_batch(items)
        kinds = [UsageError, None, ContextLengthError, UsageError, CancelledError, UsageError, UsageError, None]
        assert [None if isinstance(r, np.ndarray) else type(r) for r in results] == kinds
        assert [s.position for s in (good, short, wrong, cancelled, stranger, last)] == [90, 1, 0, 0, 0, 2]
        assert np.array_equal(np.asarray(results[1]), fresh_logits(tiny, TOKENS))
        assert np.array_equal(np.asarray(results[-1]), fresh_logits(tiny, [8, 9]))
        assert np.array_equal(cancelled.forward([4]), fresh_logits(tiny, [4]))
        with pytest.raises(UsageError, match="another engine"):
            tiny.generate("text", session=stranger)


def test_state_formats(tiny_file: Callable[[str], Path]) -> None:
    logits, sizes = {}, {}
    for kv in (None, "f32", "f16", "q8"):
        with colibri.Engine(tiny_file("f32"), kv=kv) as engine, engine.session() as session:
            logits[kv] = session.forward(TOKENS)
            sizes[kv] = len(session.save())
    assert np.array_equal(logits[None], logits["f32"])  # the default of an f32 file
    assert sizes["f32"] > sizes["f16"] > sizes["q8"]
    for kv, tolerance in (("f16", 2e-2), ("q8", 2e-1)):
        assert not np.array_equal(logits[kv], logits["f32"])
        np.testing.assert_allclose(logits[kv], logits["f32"], atol=tolerance)


@pytest.mark.parametrize(
    "arguments",
    [{"threads": 0}, {"threads": 1.5}, {"threads": 2000}, {"kv": "f8"}, {"max_batch_tokens": 0}, {"threads": True}],
)
def test_engine_arguments_are_checked(tiny_file: Callable[[str], Path], arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(arguments))):
        colibri.Engine(tiny_file("f32"), **arguments)


def test_a_closed_engine_is_refused(tiny_file: Callable[[str], Path]) -> None:
    engine = colibri.Engine(tiny_file("f32"))
    session = engine.session()
    unfinished = engine.generate("text", temperature=0)
    next(unfinished)
    engine.close()
    engine.close()
    for use in (engine.session, engine.statistics, lambda: session.forward([1]), lambda: next(unfinished)):
        with pytest.raises(UsageError, match="closed"):
            use()
    assert engine.vocabulary_size == VOCABULARY


def test_statistics(tiny_file: Callable[[str], Path]) -> None:
    with colibri.Engine(tiny_file("q8"), threads=2) as engine, engine.session() as session:
        before = engine.statistics()
        assert (before.tokens, before.passes, before.kernels) == (0, 0, {})
        session.forward(TOKENS)
        session.forward([1])
        after = engine.statistics()
    assert isinstance(after, colibri.Statistics)
    assert (after.vm, after.threads, after.tokens, after.passes) == ("native", 2, 91, 2)
    assert after.seconds > 0
    assert sum(after.seconds_by_op.values()) == pytest.approx(after.seconds, rel=0.5)
    assert after.seconds_by_op["experts"] > 0
    assert after.kernels["q8_g32"].endswith(after.cpu)
    assert after.weight_bytes > after.expert_bytes > 0
    assert after.scratch_bytes > 0
    assert [s.layer for s in after.expert_sets] == [0, 1]
    for one in after.expert_sets:
        assert one.expert_tokens == sum(one.tokens_per_expert) == 91 * 2
        assert len(one.tokens_per_expert) == one.expert_count == 6
        assert (
            one.bytes_touched * one.expert_count * len(after.expert_sets)
            == one.experts_computed * after.all_expert_bytes
        )

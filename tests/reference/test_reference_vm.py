"""The VM on a program built by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reference.small_program import CHOSEN, EXPERTS, VOCABULARY, small_model

from colibri.errors import CancelledError, NonFiniteError
from colibri.program import Op
from colibri.program.ops import OPS, Opcode
from colibri.reference import AttentionState, Call, Model, Routing, Weight, run

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])


def states(model: Model) -> list[AttentionState]:
    return [AttentionState(state, "f32") for state in model.program.states]


def call(first: int, last: int, output_rows: list[int] | None = None) -> Call:
    rows = np.arange(last - first) if output_rows is None else np.array(output_rows, np.int64)
    return Call(TOKENS[first:last], np.arange(first, last), rows)


def test_chunks_equal_the_whole() -> None:
    model = small_model()
    whole = run(model, states(model), call(0, 12))
    assert whole.shape == (12, VOCABULARY)
    chunked = states(model)
    parts = [run(model, chunked, call(first, last)) for first, last in ((0, 1), (1, 7), (7, 8), (8, 12))]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)


def test_only_the_wanted_rows_are_returned() -> None:
    model = small_model()
    whole = run(model, states(model), call(0, 12))
    some = run(model, states(model), call(0, 12, [11, 2]))
    np.testing.assert_allclose(some, whole[[11, 2]], atol=1e-6)
    assert run(model, states(model), call(0, 12, [])).shape == (0, VOCABULARY)


def test_earlier_tokens_matter_only_inside_the_window() -> None:
    model = small_model()
    changed = TOKENS.copy()
    changed[0] = 7
    whole = run(model, states(model), call(0, 12))
    other = run(model, states(model), Call(changed, np.arange(12), np.arange(12)))
    assert np.abs(other[:5] - whole[:5]).max(axis=1).min() > 1e-4
    np.testing.assert_allclose(other[5:], whole[5:], atol=1e-6)


def test_trace_sees_every_op_and_the_routing() -> None:
    model = small_model()
    seen: list[tuple[int, Op, np.ndarray | Routing]] = []
    logits = run(model, states(model), call(0, 12), lambda *what: seen.append(what))
    assert [index for index, _, _ in seen] == list(range(len(model.program.ops)))
    assert {op.opcode for _, op, _ in seen} == {info.opcode for info in OPS.values()}
    routings = [result for _, op, result in seen if op.opcode == Opcode.ROUTE]
    assert isinstance(routings[0], Routing)
    assert routings[0].experts.shape == (12, CHOSEN)
    assert len(np.unique(routings[0].experts)) > CHOSEN
    assert routings[0].experts.max() < EXPERTS
    assert seen[-1][2] is logits


@pytest.mark.parametrize(("bad", "message"), [("k_weight", "layer 0, op matmul"), ("head", "^op matmul")])
def test_non_finite_names_layer_and_op(bad: str, message: str) -> None:
    model = small_model()
    index = [op.operands["weight"] for op in model.program.ops if op.opcode == Opcode.MATMUL][
        1 if bad == "k_weight" else -1
    ]
    weights = list(model.weights)
    values = weights[int(index)].values.copy()
    values[0, 0] = np.inf
    weights[int(index)] = Weight(values)
    with pytest.raises(NonFiniteError, match=message):
        run(replace(model, weights=weights), states(model), call(0, 12))


def test_cancel_stops_between_ops() -> None:
    model = small_model()
    answers = iter([False] * 4 + [True])
    seen: list[int] = []
    with pytest.raises(CancelledError):
        run(model, states(model), call(0, 12), lambda index, *_: seen.append(index), lambda: next(answers))
    assert seen == [0, 1, 2, 3]

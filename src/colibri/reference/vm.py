"""The virtual machine: a loop over the ops of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.errors import CancelledError, NonFiniteError
from colibri.program import Op, Program
from colibri.program.ops import ABSENT, BY_NUMBER, Activation, Opcode, Pairing
from colibri.reference import ops
from colibri.reference.ops import Expert, Routing, Weight
from colibri.reference.state import AttentionState

Trace = Callable[[int, Op, "np.ndarray | Routing"], None]
"""Called after every op with its index, the op, and what it wrote: float32 [n, width] or the routing."""


@dataclass(frozen=True)
class Model:
    """A program and what its operands index: `weights` by tensor number, `expert_sets` by set number."""

    program: Program
    weights: Sequence[Weight]
    expert_sets: Sequence[Sequence[Expert]]


@dataclass(frozen=True)
class Call:
    """The tokens of one call: ids [n], their positions [n], and the rows [outputs] whose logits are wanted."""

    tokens: np.ndarray
    positions: np.ndarray
    output_rows: np.ndarray


def run(
    model: Model,
    states: Sequence[AttentionState],
    call: Call,
    trace: Trace | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> np.ndarray:
    """Run entry `main`; returns its output, logits float32 [outputs, vocabulary].

    The states grow by n positions; after an exception they may have grown in part, and the caller truncates them.
    Raises NonFiniteError naming the layer, and CancelledError when `cancelled()` turns true between two ops.
    """
    entry = model.program.entries[0]
    values: list[Any] = [None] * len(model.program.values)
    for index in range(entry.first_op, entry.first_op + entry.op_count):
        if cancelled():
            raise CancelledError("the call was cancelled; the session keeps its position")
        op = model.program.ops[index]
        result = _run_op(op, model, states, call, values)
        written = BY_NUMBER[op.opcode].operands[0]
        values[int(op.operands[written.name])] = result
        if trace is not None:
            trace(index, op, result)
    _, logits = entry.outputs[0]
    return values[logits]


def _run_op(
    op: Op, model: Model, states: Sequence[AttentionState], call: Call, values: Sequence[Any]
) -> np.ndarray | Routing:
    """The new value of the op's first operand. Overflow is found afterwards, by looking at the result."""
    try:
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            result = _compute(op, model, states, call, values)
        ops.require_finite(
            result.weights if isinstance(result, Routing) else result, f"op {Opcode(op.opcode).name.lower()}"
        )
    except NonFiniteError as error:
        where = "" if op.layer is None else f"layer {op.layer}, "
        raise NonFiniteError(f"{where}{error}") from None
    return result


def _compute(
    op: Op, model: Model, states: Sequence[AttentionState], call: Call, values: Sequence[Any]
) -> np.ndarray | Routing:
    number = op.operands

    def value(name: str) -> Any:
        return values[int(number[name])]

    def weight(name: str) -> Weight:
        return model.weights[int(number[name])]

    match op.opcode:
        case Opcode.EMBED:
            return ops.embed(weight("table"), call.tokens)
        case Opcode.RMS_NORM:
            return ops.rms_norm(value("x"), weight("weight"), int(number["group"]), number["epsilon"])
        case Opcode.MATMUL:
            bias = None if number["bias"] == ABSENT else weight("bias")
            return ops.matmul(value("x"), weight("weight"), bias)
        case Opcode.ROPE_TABLE:
            return ops.rope_table(call.positions, weight("inverse_frequencies"), number["scale"])
        case Opcode.ROPE:
            return ops.rope(value("x"), value("table"), int(number["head_dim"]), Pairing(int(number["pairing"])))
        case Opcode.CLAMP:
            return ops.clamp(value("x"), number["low"], number["high"])
        case Opcode.ATTENTION:
            state = states[int(number["cache"])]
            state.append(value("k"), value("v"))
            heads, window = int(number["heads"]), int(number["window"])
            return ops.attention(value("q"), state.keys, state.values, call.positions, heads, window, number["scale"])
        case Opcode.ROUTE:
            chosen = model.program.values[int(number["routing"])].width
            return ops.route(value("logits"), chosen, bool(number["normalise"]), number["scale"])
        case Opcode.EXPERTS:
            expert_set = model.expert_sets[int(number["set"])]
            return ops.experts(value("x"), value("routing"), expert_set, Activation(int(number["activation"])))
        case Opcode.GATED_ACTIVATION:
            return ops.gated_activation(value("gate"), value("up"), Activation(int(number["activation"])))
        case Opcode.ADD:
            return ops.add(value("a"), value("b"))
        case Opcode.SIGMOID_GATE:
            return ops.sigmoid_gate(value("x"), value("gate"))
        case Opcode.GATHER_OUTPUTS:
            return ops.gather_outputs(value("x"), call.output_rows)
        case _:
            raise AssertionError(f"op {op.opcode} is in the op table, but not in the reference")

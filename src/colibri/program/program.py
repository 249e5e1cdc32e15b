"""A program: the ops of one model, the values they pass on and the state they keep."""

from __future__ import annotations

from dataclasses import dataclass

from colibri.program.ops import Opcode, StateKind, ValueKind

STATE_F32 = 1
STATE_F16 = 2
STATE_Q8 = 3


@dataclass(frozen=True)
class Value:
    """A register: `width` float32 for each row; routing values hold `width` of `extent` experts for each token."""

    name: str
    kind: ValueKind
    width: int
    extent: int = 0


@dataclass(frozen=True)
class State:
    """What one attention layer keeps of a sequence; key_dim and value_dim are those of one key-value head."""

    kind: StateKind
    kv_heads: int
    key_dim: int
    value_dim: int
    layer: int


@dataclass(frozen=True)
class Op:
    """One op. `operands` maps every operand of the op table to an index or number; an absent weight is ops.ABSENT.

    layer is None for ops outside any layer.
    """

    opcode: Opcode
    layer: int | None
    operands: dict[str, int | float]


@dataclass(frozen=True)
class Entry:
    """A named range of ops and its named outputs (name, value index)."""

    name: str
    first_op: int
    op_count: int
    outputs: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Program:
    """Everything the `program` section of a file holds; see spec/cbi.md.

    context_limit counts the positions the model was made for. Weights and expert sets are indexes into the
    directories of the file.
    """

    vocabulary_size: int
    context_limit: int
    default_state_format: int
    values: tuple[Value, ...]
    states: tuple[State, ...]
    entries: tuple[Entry, ...]
    ops: tuple[Op, ...]

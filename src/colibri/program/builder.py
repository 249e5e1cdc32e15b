"""Builds programs with names in place of indexes."""

from __future__ import annotations

import struct

from colibri.errors import ProgramError
from colibri.program import ops
from colibri.program.ops import Operand, StateKind, ValueKind
from colibri.program.program import STATE_F16, Entry, Op, Program, State, Value


class ProgramBuilder:
    """Collects values, states, expert sets and ops; `build` gives the program.

    Values are registers: declare one once and use it in every layer. Weights are named by strings; their indexes,
    which are those of the file's tensor directory, follow the order of first use (`weight_names`). Expert sets and
    states are declared by name, and numbered in the order of declaration.
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, Value]] = {}
        self._states: dict[str, tuple[int, State]] = {}
        self._expert_sets: dict[str, int] = {}
        self._weights: dict[str, int] = {}
        self._ops: list[Op] = []
        self._outputs: list[tuple[str, str]] = []

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Weights in the order of the tensor directory."""
        return tuple(self._weights)

    @property
    def expert_set_names(self) -> tuple[str, ...]:
        """Expert sets in the order of the expert directory."""
        return tuple(self._expert_sets)

    def value(self, name: str, kind: ValueKind, width: int, extent: int = 0) -> str:
        """Declare a value; declaring it again the same way is harmless. Returns the name."""
        value = Value(name, kind, width, extent)
        known = self._values.setdefault(name, (len(self._values), value))[1]
        if known != value:
            raise ProgramError(f"value {name} is declared as {known} and as {value}.")
        return name

    def tokens(self, name: str, width: int) -> str:
        """Declare a value with one row for each token of the call."""
        return self.value(name, ValueKind.TOKENS, width)

    def outputs(self, name: str, width: int) -> str:
        """Declare a value with one row for each token whose logits are wanted."""
        return self.value(name, ValueKind.OUTPUTS, width)

    def routing(self, name: str, chosen: int, experts: int) -> str:
        """Declare a value that holds, for each token, `chosen` of `experts` and their weights."""
        return self.value(name, ValueKind.ROUTING, chosen, experts)

    def attention_state(self, name: str, *, kv_heads: int, key_dim: int, value_dim: int, layer: int) -> str:
        """Declare the keys and values that one layer keeps; each state is used by one op. Returns the name."""
        if name in self._states:
            raise ProgramError(f"state {name} is declared twice.")
        self._states[name] = (len(self._states), State(StateKind.ATTENTION, kv_heads, key_dim, value_dim, layer))
        return name

    def expert_set(self, name: str) -> str:
        """Declare the experts of one layer; the next index of the expert directory is theirs. Returns the name."""
        if name in self._expert_sets:
            raise ProgramError(f"expert set {name} is declared twice.")
        self._expert_sets[name] = len(self._expert_sets)
        return name

    def op(self, op_name: str, *, layer: int | None = None, **operands: str | int | float | None) -> None:
        """Append an op. Values, weights, states and expert sets are given by name; None is an absent weight.

        Raises ProgramError for an unknown op, operand or name; `verify` checks the rules.
        """
        info = ops.OPS.get(op_name)
        if info is None:
            raise ProgramError(f"there is no op {op_name!r}.")
        names = [operand.name for operand in info.operands]
        missing = [o.name for o in info.operands if o.name not in operands and not o.optional]
        unknown = sorted(set(operands) - set(names))
        if missing or unknown:
            raise ProgramError(f"op {op_name} takes {', '.join(names)}; missing {missing}, unknown {unknown}.")
        resolved = {o.name: self._resolve(op_name, o, operands.get(o.name)) for o in info.operands}
        self._ops.append(Op(info.opcode, layer, resolved))

    def output(self, name: str, value: str) -> None:
        """Make a value an output of the entry `main`."""
        self._outputs.append((name, value))

    def build(self, *, vocabulary_size: int, context_limit: int, default_state_format: int = STATE_F16) -> Program:
        """Return the program: one entry `main` over all ops."""
        outputs = tuple((name, self._index(self._values, value, "value")) for name, value in self._outputs)
        return Program(
            vocabulary_size,
            context_limit,
            default_state_format,
            tuple(value for _, value in self._values.values()),
            tuple(state for _, state in self._states.values()),
            (Entry("main", 0, len(self._ops), outputs),),
            tuple(self._ops),
        )

    def _resolve(self, op_name: str, operand: Operand, given: str | int | float | None) -> int | float:
        where = f"operand {operand.name} of op {op_name}"
        if given is None:
            if not operand.optional:
                raise ProgramError(f"{where} cannot be absent.")
            return ops.ABSENT
        if operand.kind in ("out", "in", "weight", "experts", "state"):
            if not isinstance(given, str):
                raise ProgramError(f"{where} is given by name, not as {given!r}.")
            if operand.kind == "weight":
                return self._weights.setdefault(given, len(self._weights))
            if operand.kind == "experts":
                if given not in self._expert_sets:
                    raise ProgramError(f"{where}: expert set {given} is not declared.")
                return self._expert_sets[given]
            return self._index(self._states if operand.kind == "state" else self._values, given, where)
        if isinstance(given, str):
            raise ProgramError(f"{where} is a number, not {given!r}.")
        # Rounded here, so that a program equals its own decoded bytes.
        return struct.unpack("<f", struct.pack("<f", given))[0] if operand.kind == "f32" else int(given)

    @staticmethod
    def _index(table: dict[str, tuple[int, Value]] | dict[str, tuple[int, State]], name: str, where: str) -> int:
        if name not in table:
            raise ProgramError(f"{where}: {name} is not declared.")
        return table[name][0]

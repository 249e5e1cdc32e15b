"""The rules a program must satisfy before it is written or run: spec/cbi.md and the op table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

from colibri.errors import ProgramError
from colibri.program import ops
from colibri.program.encode import MAXIMUM_ENTRIES, MAXIMUM_OPS, MAXIMUM_OUTPUTS, MAXIMUM_STATES, MAXIMUM_VALUES
from colibri.program.ops import Operand, OpInfo, ValueKind
from colibri.program.program import Entry, Op, Program

MAXIMUM_WIDTH = 1 << 24
MAXIMUM_VOCABULARY = 1 << 24
MAXIMUM_CONTEXT = 1 << 24
MAXIMUM_DIMENSION = 65536
MAXIMUM_CHOSEN_EXPERTS = 256

Tensor = tuple[str, str, str, int, int]
"""name, format, layout, rows, columns"""

ExpertSet = tuple[int, int, int]
"""expert count, model width, expert width"""

_KIND_OF_ROWS = {"tokens": ValueKind.TOKENS, "outputs": ValueKind.OUTPUTS, "routing": ValueKind.ROUTING}
# These are read as plain float32 vectors by every kernel, so no other storage is allowed.
_VECTOR_OPERANDS = {("rms_norm", "weight"), ("matmul", "bias"), ("rope_table", "inverse_frequencies")}


def verify(program: Program, tensors: Sequence[Tensor], expert_sets: Sequence[ExpertSet]) -> None:
    """Raise ProgramError, naming op number, op, layer and rule, unless the program satisfies every rule."""
    _Verifier(program, tensors, expert_sets).run()


class _Verifier:
    """Also the functions (`width`, `rows`, ...) that the rules of the op table call."""

    def __init__(self, program: Program, tensors: Sequence[Tensor], expert_sets: Sequence[ExpertSet]) -> None:
        self._program = program
        self._tensors = tensors
        self._expert_sets = expert_sets
        self._state_used_by: dict[int, int] = {}

    def run(self) -> None:
        self._check_head()
        self._check_values()
        self._check_states()
        highest_layer = 0
        for number, op in enumerate(self._program.ops):
            self._check_op(number, op)
            if op.layer is not None:
                if op.layer < highest_layer:
                    self._fail(number, op, f"the layer falls (the op before it is of layer {highest_layer})")
                highest_layer = op.layer
        for index in range(len(self._program.states)):
            if index not in self._state_used_by:
                raise ProgramError(f"state {index} is used by no op.")
        self._check_entries()

    def width(self, value: int) -> int:
        return self._program.values[value].width

    def extent(self, value: int) -> int:
        return self._program.values[value].extent

    def rows(self, weight: int) -> int:
        return self._tensors[weight][3]

    def cols(self, weight: int) -> int:
        return self._tensors[weight][4]

    def expert_count(self, index: int) -> int:
        return self._expert_sets[index][0]

    def expert_width(self, index: int) -> int:
        return self._expert_sets[index][1]

    def expert_ffn(self, index: int) -> int:
        return self._expert_sets[index][2]

    def kv_heads(self, state: int) -> int:
        return self._program.states[state].kv_heads

    def key_dim(self, state: int) -> int:
        return self._program.states[state].key_dim

    def value_dim(self, state: int) -> int:
        return self._program.states[state].value_dim

    def _fail(self, number: int, op: Op, rule: str) -> None:
        name = ops.BY_NUMBER[op.opcode].name
        place = "outside any layer" if op.layer is None else f"layer {op.layer}"
        raise ProgramError(f"op {number} ({name}, {place}) breaks a rule: {rule}.")

    def _check_head(self) -> None:
        program = self._program
        _in_range("vocabulary size", program.vocabulary_size, 1, MAXIMUM_VOCABULARY)
        _in_range("context limit", program.context_limit, 1, MAXIMUM_CONTEXT)
        _in_range("default state format", program.default_state_format, 1, 3)
        _in_range("value count", len(program.values), 1, MAXIMUM_VALUES)
        _in_range("state count", len(program.states), 0, MAXIMUM_STATES)
        _in_range("entry count", len(program.entries), 1, MAXIMUM_ENTRIES)
        _in_range("op count", len(program.ops), 1, MAXIMUM_OPS)

    def _check_values(self) -> None:
        for index, value in enumerate(self._program.values):
            name = f"value {index} ({value.name})"
            routing = value.kind == ValueKind.ROUTING
            _in_range(f"width of {name}", value.width, 1, MAXIMUM_CHOSEN_EXPERTS if routing else MAXIMUM_WIDTH)
            _in_range(f"extent of {name}", value.extent, 1 if routing else 0, MAXIMUM_DIMENSION if routing else 0)

    def _check_states(self) -> None:
        for index, state in enumerate(self._program.states):
            for field in ("kv_heads", "key_dim", "value_dim"):
                _in_range(f"{field} of state {index}", getattr(state, field), 1, MAXIMUM_DIMENSION)

    def _check_op(self, number: int, op: Op) -> None:
        info = ops.BY_NUMBER[op.opcode]
        any_kinds = set()
        for operand in info.operands:
            number_or_index = op.operands[operand.name]
            self._check_operand(number, op, operand, number_or_index)
            if operand.rows == "any":
                any_kinds.add(self._program.values[int(number_or_index)].kind)
        if len(any_kinds) > 1:
            self._fail(number, op, "its values mix rows of tokens and rows of outputs")
        for first, second in info.distinct:
            if op.operands[first] == op.operands[second]:
                self._fail(number, op, f"{first} and {second} must be different values")
        operands = SimpleNamespace(**op.operands)
        for text, test in info.rules:
            if not test(self, operands):
                self._fail(number, op, text)
        self._check_weights(number, op, info)

    def _check_operand(self, number: int, op: Op, operand: Operand, given: int | float) -> None:
        if operand.kind == "f32":
            if not math.isfinite(given):
                self._fail(number, op, f"{operand.name} is not finite")
            return
        index = int(given)
        if operand.kind in ("out", "in"):
            if index >= len(self._program.values):
                self._fail(number, op, f"{operand.name} is value {index} of {len(self._program.values)}")
            kind = self._program.values[index].kind
            fits = kind != ValueKind.ROUTING if operand.rows == "any" else kind == _KIND_OF_ROWS[operand.rows]
            if not fits:
                self._fail(number, op, f"{operand.name} must have rows of kind {operand.rows}, not {kind.name.lower()}")
            if kind == ValueKind.ROUTING and operand.kind == "out" and op.opcode != ops.Opcode.ROUTE:
                self._fail(number, op, "a routing value is written by route alone")
        elif operand.kind == "weight":
            absent = operand.optional and index == ops.ABSENT
            if not absent and index >= len(self._tensors):
                self._fail(number, op, f"{operand.name} is tensor {index} of {len(self._tensors)}")
        elif operand.kind == "experts":
            if index >= len(self._expert_sets):
                self._fail(number, op, f"{operand.name} is expert set {index} of {len(self._expert_sets)}")
        elif operand.kind == "state":
            self._use_state(number, op, index)
        elif operand.kind in ops.ENUMS and index not in list(ops.ENUMS[operand.kind]):
            self._fail(number, op, f"{operand.name} is not a known {operand.kind}")

    def _use_state(self, number: int, op: Op, index: int) -> None:
        if index >= len(self._program.states):
            self._fail(number, op, f"it uses state {index} of {len(self._program.states)}")
        if index in self._state_used_by:
            self._fail(number, op, f"state {index} is already used by op {self._state_used_by[index]}")
        self._state_used_by[index] = number

    def _check_weights(self, number: int, op: Op, info: OpInfo) -> None:
        for operand in info.operands:
            index = int(op.operands[operand.name]) if operand.kind == "weight" else ops.ABSENT
            if index == ops.ABSENT:
                continue
            name, format, layout, rows, _ = self._tensors[index]
            if (info.name, operand.name) in _VECTOR_OPERANDS:
                if (format, layout) != ("f32", "rows"):
                    self._fail(number, op, f"{operand.name} (tensor {name}) must have format f32 and layout rows")
            elif info.name == "matmul" and layout == "rows":
                self._fail(number, op, f"{operand.name} (tensor {name}) must have a tiled layout")
            elif info.name == "embed" and rows != self._program.vocabulary_size:
                self._fail(number, op, f"{operand.name} (tensor {name}) must have a row for each token id")

    def _check_entries(self) -> None:
        if [entry.name for entry in self._program.entries] != ["main"]:
            raise ProgramError("the program must have one entry named main.")
        for entry in self._program.entries:
            if (entry.first_op, entry.op_count) != (0, len(self._program.ops)):
                raise ProgramError(f"entry {entry.name} must cover all {len(self._program.ops)} ops.")
            _in_range(f"output count of entry {entry.name}", len(entry.outputs), 1, MAXIMUM_OUTPUTS)
            written = self._check_flow(entry)
            self._check_outputs(entry, written)

    def _check_flow(self, entry: Entry) -> set[int]:
        written: set[int] = set()
        for number in range(entry.first_op, entry.first_op + entry.op_count):
            op = self._program.ops[number]
            operands = ops.BY_NUMBER[op.opcode].operands
            for operand in operands:
                index = int(op.operands[operand.name]) if operand.kind == "in" else None
                if index is not None and index not in written:
                    name = self._program.values[index].name
                    self._fail(number, op, f"{operand.name} (value {name}) is read before it is written")
            written.update(int(op.operands[operand.name]) for operand in operands if operand.kind == "out")
        return written

    def _check_outputs(self, entry: Entry, written: set[int]) -> None:
        if [name for name, _ in entry.outputs] != ["logits"]:
            raise ProgramError(f"entry {entry.name} must have one output named logits.")
        index = entry.outputs[0][1]
        _in_range("value of the output logits", index, 0, len(self._program.values) - 1)
        value = self._program.values[index]
        if value.kind != ValueKind.OUTPUTS or value.width != self._program.vocabulary_size:
            raise ProgramError("the output logits must be of kind outputs and as wide as the vocabulary.")
        if index not in written:
            raise ProgramError("the output logits is written by no op of its entry.")
        for number, value in enumerate(self._program.values):
            if number not in written:
                raise ProgramError(f"value {number} ({value.name}) is written by no op.")


def _in_range(what: str, number: int, low: int, high: int) -> None:
    if not low <= number <= high:
        raise ProgramError(f"the {what} is {number}; {low} to {high} are allowed.")

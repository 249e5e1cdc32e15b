"""Programs as text, for people."""

from __future__ import annotations

from collections.abc import Sequence

from colibri.program import ops
from colibri.program.ops import Operand, ValueKind
from colibri.program.program import Op, Program

_STATE_FORMATS = {1: "f32", 2: "f16", 3: "q8"}


def program_text(program: Program, tensor_names: Sequence[str]) -> str:
    """Return a listing of a verified program, one line for each value, state and op, with names in place of indexes."""
    state_format = _STATE_FORMATS.get(program.default_state_format, str(program.default_state_format))
    lines = [
        f"program: vocabulary {program.vocabulary_size}, context {program.context_limit}, state {state_format}",
        "",
        "values",
    ]
    for value in program.values:
        choice = f" of {value.extent}" if value.kind == ValueKind.ROUTING else ""
        lines.append(f"  {value.name:<20} {value.kind.name.lower():<8} {value.width}{choice}")
    lines += ["", "states"]
    for index, state in enumerate(program.states):
        sizes = f"{state.kv_heads} heads, key {state.key_dim}, value {state.value_dim}"
        lines.append(f"  {index:<4} {state.kind.name.lower()} layer {state.layer}: {sizes}")
    for entry in program.entries:
        outputs = ", ".join(f"{name} = {program.values[value].name}" for name, value in entry.outputs)
        lines += ["", f"entry {entry.name} -> {outputs}"]
        for number in range(entry.first_op, entry.first_op + entry.op_count):
            lines.append(_op_text(program, number, tensor_names))
    return "\n".join(lines) + "\n"


def _op_text(program: Program, number: int, tensor_names: Sequence[str]) -> str:
    op = program.ops[number]
    info = ops.BY_NUMBER[op.opcode]
    layer = "" if op.layer is None else str(op.layer)
    results = [_operand_text(program, op, operand, tensor_names) for operand in info.operands if operand.kind == "out"]
    inputs = [
        f"{operand.name}={_operand_text(program, op, operand, tensor_names)}"
        for operand in info.operands
        if operand.kind != "out"
    ]
    return f"  {number:>5} {layer:>4}  {', '.join(results)} = {info.name}({', '.join(inputs)})"


def _operand_text(program: Program, op: Op, operand: Operand, tensor_names: Sequence[str]) -> str:
    given = op.operands[operand.name]
    if operand.kind == "f32":
        return f"{given:.9g}"
    index = int(given)
    if operand.kind in ("out", "in"):
        return program.values[index].name
    if operand.kind == "weight":
        return "none" if index == ops.ABSENT else tensor_names[index]
    if operand.kind in ops.ENUMS:
        return ops.ENUMS[operand.kind](index).name.lower()
    return str(index)

"""Programs to bytes and back, as in spec/cbi.md."""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from typing import TypeVar

from colibri.errors import ProgramError
from colibri.program import ops
from colibri.program.program import Entry, Op, Program, State, Value

VALUE_NAME_BYTES = 20
ENTRY_NAME_BYTES = 32
MAXIMUM_VALUES = 4096
MAXIMUM_STATES = 4096
MAXIMUM_ENTRIES = 16
MAXIMUM_OPS = 1_000_000
MAXIMUM_OUTPUTS = 4

_Kind = TypeVar("_Kind", bound=IntEnum)


def encode(program: Program) -> bytes:
    """Return the bytes of the program section; raises ProgramError for names or numbers that do not fit."""
    words = b"".join(_encode_op(number, op) for number, op in enumerate(program.ops))
    parts = [
        _words(ops.VERSION, program.vocabulary_size, program.context_limit, program.default_state_format),
        _words(len(program.values), len(program.states), len(program.entries), len(program.ops), len(words) // 4),
    ]
    for value in program.values:
        parts.append(_words(value.kind, value.width, value.extent) + _encode_name(value.name, VALUE_NAME_BYTES))
    for state in program.states:
        parts.append(_words(state.kind, state.kv_heads, state.key_dim, state.value_dim, state.layer))
    for entry in program.entries:
        parts.append(_encode_name(entry.name, ENTRY_NAME_BYTES))
        parts.append(_words(entry.first_op, entry.op_count, len(entry.outputs)))
        parts.extend(_encode_name(name, ENTRY_NAME_BYTES) + _words(value) for name, value in entry.outputs)
    return b"".join(parts) + words


def decode(data: bytes) -> Program:
    """Return the program in `data`; raises ProgramError, naming the field, for anything spec/cbi.md does not allow.

    Only the structure is checked here; `verify` checks what the ops mean.
    """
    reader = _Reader(data)
    version = reader.word("op table version")
    if version != ops.VERSION:
        raise ProgramError(f"the program has op table version {version}, this build reads {ops.VERSION}.")
    vocabulary_size, context_limit, state_format = (reader.word("program head") for _ in range(3))
    value_count = reader.count("value count", 1, MAXIMUM_VALUES)
    state_count = reader.count("state count", 0, MAXIMUM_STATES)
    entry_count = reader.count("entry count", 1, MAXIMUM_ENTRIES)
    op_count = reader.count("op count", 1, MAXIMUM_OPS)
    word_count = reader.word("word count")
    values = tuple(reader.value(index) for index in range(value_count))
    states = tuple(reader.state(index) for index in range(state_count))
    entries = tuple(reader.entry(index) for index in range(entry_count))
    start = reader.position
    if len(data) - start != 4 * word_count:
        raise ProgramError(f"the program's word count is {word_count}, but {len(data) - start} bytes of ops follow.")
    program_ops = tuple(reader.op(number) for number in range(op_count))
    if reader.position != len(data):
        raise ProgramError(f"{len(data) - reader.position} bytes follow the last op of the program.")
    return Program(vocabulary_size, context_limit, state_format, values, states, entries, program_ops)


def _words(*numbers: int) -> bytes:
    try:
        return struct.pack(f"<{len(numbers)}I", *numbers)
    except struct.error:
        raise ProgramError(f"a number of the program does not fit 32 bits: {list(map(int, numbers))}.") from None


def _encode_name(name: str, size: int) -> bytes:
    encoded = name.encode()
    if not encoded or len(encoded) > size or b"\0" in encoded:
        raise ProgramError(f"the name {name!r} must take 1 to {size} bytes without NUL.")
    return encoded.ljust(size, b"\0")


def _encode_op(number: int, op: Op) -> bytes:
    info = ops.BY_NUMBER[op.opcode]
    if set(op.operands) != {operand.name for operand in info.operands}:
        raise ProgramError(f"op {number} ({info.name}) has operands {sorted(op.operands)}; the op table differs.")
    parts = [_words(op.opcode, ops.ABSENT if op.layer is None else op.layer)]
    for operand in info.operands:
        value = op.operands[operand.name]
        parts.append(struct.pack("<f", value) if operand.kind == "f32" else _words(int(value)))
    return b"".join(parts)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def take(self, size: int, what: str) -> bytes:
        end = self.position + size
        if end > len(self._data):
            raise ProgramError(f"the program ends inside {what}.")
        piece = self._data[self.position : end]
        self.position = end
        return piece

    def word(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def count(self, what: str, low: int, high: int) -> int:
        number = self.word(what)
        if not low <= number <= high:
            raise ProgramError(f"the program's {what} is {number}; {low} to {high} are allowed.")
        return number

    def kind(self, kinds: type[_Kind], what: str) -> _Kind:
        number = self.word(what)
        try:
            return kinds(number)
        except ValueError:
            raise ProgramError(f"{what} has unknown kind {number}.") from None

    def name(self, size: int, what: str) -> str:
        raw = self.take(size, what)
        text = raw.rstrip(b"\0")
        if not text or b"\0" in text:
            raise ProgramError(f"the name of {what} is empty or not padded with zeros.")
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise ProgramError(f"the name of {what} is not UTF-8.") from None

    def value(self, index: int) -> Value:
        what = f"value {index}"
        kind = self.kind(ops.ValueKind, what)
        width, extent = self.word(what), self.word(what)
        return Value(self.name(VALUE_NAME_BYTES, what), kind, width, extent)

    def state(self, index: int) -> State:
        what = f"state {index}"
        kind = self.kind(ops.StateKind, what)
        return State(kind, self.word(what), self.word(what), self.word(what), self.word(what))

    def entry(self, index: int) -> Entry:
        what = f"entry {index}"
        name = self.name(ENTRY_NAME_BYTES, what)
        first_op, op_count = self.word(what), self.word(what)
        output_count = self.count(f"output count of {what}", 1, MAXIMUM_OUTPUTS)
        outputs = tuple(
            (self.name(ENTRY_NAME_BYTES, f"output {i} of {what}"), self.word(what)) for i in range(output_count)
        )
        return Entry(name, first_op, op_count, outputs)

    def op(self, number: int) -> Op:
        what = f"op {number}"
        opcode = self.word(what)
        info = ops.BY_NUMBER.get(opcode)
        if info is None:
            raise ProgramError(f"op {number} has unknown number {opcode}; a newer build may know it.")
        layer = self.word(what)
        operands: dict[str, int | float] = {}
        for operand in info.operands:
            if operand.kind == "f32":
                value = struct.unpack("<f", self.take(4, what))[0]
                if not math.isfinite(value):
                    raise ProgramError(f"op {number} ({info.name}): {operand.name} is not finite.")
                operands[operand.name] = value
            else:
                operands[operand.name] = self.word(what)
        return Op(info.opcode, None if layer == ops.ABSENT else layer, operands)

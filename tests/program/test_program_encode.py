import random
import struct

import pytest
from program.hand_built import hand_built

from colibri.errors import ProgramError
from colibri.program import decode, encode, verify


def test_a_program_equals_its_decoded_bytes():
    program = hand_built().program
    assert decode(encode(program)) == program


def test_the_bytes_are_those_of_the_specification():
    program = hand_built().program
    data = encode(program)
    head = struct.unpack_from("<9I", data)
    assert head[:4] == (1, 24, 128, 2)
    assert head[4:8] == (len(program.values), len(program.states), 1, len(program.ops))
    first_value = struct.unpack_from("<3I20s", data, 36)
    assert first_value == (1, 15, 0, b"x".ljust(20, b"\0"))
    words = head[8]
    assert struct.unpack_from("<4I", data, len(data) - 4 * words) == (1, 0xFFFFFFFF, 0, 0)
    states_at = 36 + 32 * len(program.values)
    assert struct.unpack_from("<5I", data, states_at) == (1, 2, 6, 6, 0)
    entry_at = states_at + 20 * len(program.states)
    assert struct.unpack_from("<32s3I32sI", data, entry_at) == (
        b"main".ljust(32, b"\0"), 0, len(program.ops), 1, b"logits".ljust(32, b"\0"), len(program.values) - 1,
    )  # fmt: skip


def test_every_shortened_program_is_refused():
    data = encode(hand_built().program)
    for size in range(len(data)):
        with pytest.raises(ProgramError):
            decode(data[:size])
    with pytest.raises(ProgramError, match="word count"):
        decode(data + bytes(4))


@pytest.mark.parametrize(
    ("offset", "word", "message"),
    [
        (0, 2, "op table version 2"),
        (16, 0, "value count is 0"),
        (16, 4097, "value count is 4097"),
        (20, 4097, "state count"),
        (24, 0, "entry count"),
        (24, 17, "entry count"),
        (28, 0, "op count"),
        (28, 1_000_001, "op count"),
        (32, 7, "word count"),
        (36, 9, "value 0 has unknown kind 9"),
    ],
)
def test_a_wrong_word_is_named(offset, word, message):
    data = bytearray(encode(hand_built().program))
    data[offset : offset + 4] = word.to_bytes(4, "little")
    with pytest.raises(ProgramError, match=message):
        decode(bytes(data))


def test_a_name_must_be_padded_with_zeros_and_utf8():
    data = bytearray(encode(hand_built().program))
    data[48 : 48 + 3] = b"\0ab"
    with pytest.raises(ProgramError, match="name of value 0"):
        decode(bytes(data))
    data[48 : 48 + 3] = b"\xff\0\0"
    with pytest.raises(ProgramError, match="value 0 is not UTF-8"):
        decode(bytes(data))


def test_mutated_programs_never_escape_as_another_error():
    built = hand_built()
    good, chance = encode(built.program), random.Random(3)
    refused = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(0, len(data), 4)
            word = chance.choice((0, 1, 2, 5, 255, 4096, 0x7F800000, 0xFFFFFFFF, chance.getrandbits(32)))
            data[at : at + 4] = word.to_bytes(4, "little")
        try:
            verify(decode(bytes(data)), built.tensors(), built.expert_sets)
        except ProgramError:
            refused += 1
    assert refused > 2000

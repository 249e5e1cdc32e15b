import pytest
from program.hand_built import hand_built

from colibri.errors import ProgramError
from colibri.program import ProgramBuilder, program_text
from colibri.program.ops import ABSENT, OPS, Opcode


def test_every_op_of_the_table_is_used_by_the_hand_built_program():
    assert {op.opcode for op in hand_built().program.ops} == {info.opcode for info in OPS.values()}


def test_weights_are_numbered_in_the_order_of_first_use():
    b = ProgramBuilder()
    b.tokens("x", 4)
    b.outputs("y", 8)
    b.op("embed", y="x", table="first")
    b.op("rms_norm", y="x", x="x", weight="second", group=4, epsilon=0.1)
    b.op("matmul", y="y", x="x", weight="first", bias="third")
    b.output("logits", "y")
    program = b.build(vocabulary_size=8, context_limit=16)
    assert b.weight_names == ("first", "second", "third")
    assert program.ops[2].operands == {"y": 1, "x": 0, "weight": 0, "bias": 2}
    assert program.entries[0].outputs == (("logits", 1),)


def test_an_optional_weight_may_be_left_out():
    b = ProgramBuilder()
    b.tokens("x", 4)
    b.tokens("y", 4)
    b.op("matmul", layer=3, y="y", x="x", weight="w")
    op = b.build(vocabulary_size=8, context_limit=16).ops[0]
    assert (op.opcode, op.layer, op.operands["bias"]) == (Opcode.MATMUL, 3, ABSENT)


@pytest.mark.parametrize(
    ("name", "operands", "message"),
    [
        ("multiply", {}, "no op 'multiply'"),
        ("add", {"y": "x", "a": "x"}, "missing \\['b'\\]"),
        ("add", {"y": "x", "a": "x", "b": "x", "c": "x"}, "unknown \\['c'\\]"),
        ("add", {"y": "x", "a": "x", "b": "nowhere"}, "nowhere is not declared"),
        ("add", {"y": "x", "a": "x", "b": 0}, "given by name"),
        ("embed", {"y": "x", "table": None}, "cannot be absent"),
        ("clamp", {"y": "x", "x": "x", "low": "x", "high": 1.0}, "is a number"),
    ],
)
def test_a_wrong_op_is_refused(name, operands, message):
    b = ProgramBuilder()
    b.tokens("x", 4)
    with pytest.raises(ProgramError, match=message):
        b.op(name, **operands)


def test_a_value_is_declared_one_way_only():
    b = ProgramBuilder()
    b.tokens("x", 4)
    b.tokens("x", 4)
    with pytest.raises(ProgramError, match="value x is declared"):
        b.tokens("x", 5)


def test_the_listing_names_values_and_tensors():
    built = hand_built()
    text = program_text(built.program, [name for name, _, _ in built.weights])
    assert "q = matmul(x=h, weight=1.q, bias=1.q_bias)" in text
    assert "d = experts(x=x, routing=routing, set=1, activation=silu)" in text
    assert "entry main -> logits = logits" in text
    assert len(text.splitlines()) > len(built.program.ops)

from dataclasses import replace

import pytest
from program.hand_built import VOCABULARY, WIDTH, HandBuilt, hand_built

from colibri.errors import ProgramError
from colibri.program import Entry, Op, State, Value, verify
from colibri.program.ops import ABSENT, OPS, StateKind, ValueKind

OP_COUNT = len(hand_built().program.ops)


def check(built: HandBuilt, **changes) -> None:
    program = replace(built.program, **changes)
    verify(program, built.tensors(), built.expert_sets)


def with_op(built: HandBuilt, name: str, layer: int | None = None, **operands) -> tuple[Op, ...]:
    """The ops with operands of the first op called `name` replaced."""
    index = next(i for i, op in enumerate(built.program.ops) if op.opcode == OPS[name].opcode)
    op = built.program.ops[index]
    op = replace(op, operands={**op.operands, **operands}, layer=op.layer if layer is None else layer)
    return (*built.program.ops[:index], op, *built.program.ops[index + 1 :])


def value(built: HandBuilt, name: str) -> int:
    return [v.name for v in built.program.values].index(name)


def tensor(built: HandBuilt, name: str) -> int:
    return [w[0] for w in built.weights].index(name)


@pytest.mark.parametrize("format", ["f32", "bf16", "q8_g32", "q4_g32"])
def test_the_hand_built_program_is_valid_in_every_format(format):
    built = hand_built()
    verify(built.program, built.tensors(format), built.expert_sets)


def test_every_operand_out_of_range_is_refused():
    built = hand_built()
    for name, info in OPS.items():
        for operand in info.operands:
            if operand.kind in ("out", "in", "weight", "experts", "state"):
                far = ABSENT - 1 if operand.optional else ABSENT
                with pytest.raises(ProgramError, match=f"{name}.*{far}"):
                    check(built, ops=with_op(built, name, **{operand.name: far}))
            elif operand.kind == "f32":
                with pytest.raises(ProgramError, match=f"{operand.name} is not finite"):
                    check(built, ops=with_op(built, name, **{operand.name: float("nan")}))
            elif operand.kind != "u32":
                with pytest.raises(ProgramError, match=f"not a known {operand.kind}"):
                    check(built, ops=with_op(built, name, **{operand.name: 99}))


@pytest.mark.parametrize(
    ("name", "operands", "rule"),
    [
        ("rms_norm", {"group": 0}, "group >= 1"),
        ("rms_norm", {"group": 4}, "width\\(x\\) % group == 0"),
        ("rms_norm", {"group": 5}, "cols\\(weight\\) == group"),
        ("rms_norm", {"epsilon": -1.0}, "epsilon >= 0"),
        ("clamp", {"low": 3.0}, "low <= high"),
        ("rope", {"head_dim": 4}, "width\\(table\\) <= head_dim"),
        ("rope", {"head_dim": 0}, "head_dim >= 1"),
        ("attention", {"heads": 3}, "heads % kv_heads\\(cache\\) == 0"),
        ("attention", {"heads": 2}, "width\\(q\\) == heads"),
        ("attention", {"scale": 0.0}, "scale > 0"),
    ],
)
def test_a_rule_of_the_op_table_names_op_layer_and_rule(name, operands, rule):
    built = hand_built()
    with pytest.raises(ProgramError, match=f"op \\d+ \\({name}, layer 0\\) breaks a rule: {rule}"):
        check(built, ops=with_op(built, name, **operands))


def test_shapes_of_tensors_count():
    built = hand_built()
    for wrong, rule in (((VOCABULARY, WIDTH + 1), "cols\\(table\\)"), ((VOCABULARY - 1, WIDTH), "row for each token")):
        tensors = built.tensors()
        tensors[0] = (*tensors[0][:3], *wrong)
        with pytest.raises(ProgramError, match=rule):
            verify(built.program, tensors, built.expert_sets)
    with pytest.raises(ProgramError, match="expert_count"):
        verify(built.program, built.tensors(), ((4, WIDTH, 12), built.expert_sets[1]))


def test_a_vector_must_be_plain_f32_and_a_matrix_tiled():
    built = hand_built()
    tensors = built.tensors()
    index = tensor(built, "0.norm")
    tensors[index] = ("0.norm", "f32", "tiled16", 1, WIDTH)
    with pytest.raises(ProgramError, match="format f32 and layout rows"):
        verify(built.program, tensors, built.expert_sets)
    tensors = built.tensors()
    index = tensor(built, "0.q")
    tensors[index] = ("0.q", "f32", "rows", *tensors[index][3:])
    with pytest.raises(ProgramError, match="tiled layout"):
        verify(built.program, tensors, built.expert_sets)


def test_values_that_must_differ():
    built = hand_built()
    for name, info in OPS.items():
        for first, second in info.distinct:
            op = next(op for op in built.program.ops if op.opcode == info.opcode)
            with pytest.raises(ProgramError):
                check(built, ops=with_op(built, name, **{first: op.operands[second]}))
    with pytest.raises(ProgramError, match="y and x must be different values"):
        check(built, ops=with_op(built, "experts", y=value(built, "x")))


def test_rows_of_tokens_and_outputs_do_not_mix():
    built = hand_built()
    with pytest.raises(ProgramError, match="mix rows"):
        check(built, ops=with_op(built, "add", b=value(built, "last")))
    with pytest.raises(ProgramError, match="rows of kind tokens"):
        check(built, ops=with_op(built, "rope", x=value(built, "routing")))
    with pytest.raises(ProgramError, match="rows of kind any"):
        check(built, ops=with_op(built, "add", b=value(built, "routing")))


def test_a_value_is_written_before_it_is_read():
    built = hand_built()
    ops = built.program.ops[1:]
    entry = replace(built.program.entries[0], op_count=len(ops))
    with pytest.raises(ProgramError, match=r"rms_norm, layer 0.*x \(value x\) is read before"):
        check(built, ops=ops, entries=(entry,))


def test_states_are_used_by_exactly_one_op():
    built = hand_built()
    with pytest.raises(ProgramError, match="state 0 is already used"):
        second = built.program.ops
        index = [i for i, op in enumerate(second) if op.opcode == OPS["attention"].opcode][1]
        op = replace(second[index], operands={**second[index].operands, "cache": 0})
        check(built, ops=(*second[:index], op, *second[index + 1 :]))
    spare = State(StateKind.ATTENTION, 1, 1, 1, 9)
    with pytest.raises(ProgramError, match="state 2 is used by no op"):
        check(built, states=(*built.program.states, spare))


def test_layers_do_not_fall():
    built = hand_built()
    with pytest.raises(ProgramError, match=r"matmul, layer 0.*layer falls"):
        check(built, ops=with_op(built, "clamp", layer=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary_size": 0}, "vocabulary size is 0"),
        ({"context_limit": (1 << 24) + 1}, "context limit"),
        ({"default_state_format": 4}, "default state format is 4"),
        ({"states": (State(StateKind.ATTENTION, 0, 1, 1, 0),) * 2}, "kv_heads of state 0 is 0"),
        ({"states": (State(StateKind.ATTENTION, 2, 6, 65537, 0),) * 2}, "value_dim of state 0"),
        ({"entries": (Entry("other", 0, 1, (("logits", 0),)),)}, "one entry named main"),
        ({"entries": (Entry("main", 5, 1000, (("logits", 0),)),)}, "must cover all"),
        ({"entries": (Entry("main", 0, OP_COUNT, (("hidden", 0),)),)}, "one output named logits"),
        ({"entries": (Entry("main", 0, OP_COUNT, (("logits", 0),)),)}, "kind outputs"),
        ({"values": (*hand_built().program.values, Value("spare", ValueKind.TOKENS, 1))}, "spare.*written by no op"),
        ({"vocabulary_size": VOCABULARY + 1}, "row for each token"),
    ],
)
def test_the_head_and_the_entry(changes, message):
    with pytest.raises(ProgramError, match=message):
        check(hand_built(), **changes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Value("x", ValueKind.TOKENS, 0), "width of value 0"),
        (Value("x", ValueKind.TOKENS, (1 << 24) + 1), "width of value 0"),
        (Value("x", ValueKind.TOKENS, WIDTH, 3), "extent of value 0"),
        (Value("x", ValueKind.ROUTING, 257, 300), "width of value 0"),
        (Value("x", ValueKind.ROUTING, 2, 0), "extent of value 0"),
    ],
)
def test_values_have_bounds(wrong, message):
    built = hand_built()
    with pytest.raises(ProgramError, match=message):
        check(built, values=(wrong, *built.program.values[1:]))

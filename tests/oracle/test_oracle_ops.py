"""Every op alone, C against NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle.one_op import OneOp, adversarial_rows, random_rows, run_both

import colibri
from colibri.errors import NonFiniteError
from colibri.program.ops import Activation, Pairing
from colibri.quantize import FORMATS
from colibri.reference import ReferenceEngine

WIDTHS = (1, 3, 16, 33, 128, 200)


def both_kinds_of_rows(width: int) -> np.ndarray:
    return np.concatenate((random_rows(width, 7, width), adversarial_rows(width)))


def all_tokens(rows: np.ndarray) -> list[int]:
    return list(range(len(rows)))


@pytest.mark.parametrize("format", ["f32", "bf16", "f16", "q8_g32"])
def test_embed_is_exact(format: str, tmp_path: Path) -> None:
    # The table is square because the output is as wide as the vocabulary; 150 is no multiple of a block.
    width = 150
    program = OneOp(width)
    program.builder.tokens("x", width)
    table = random_rows(0, width, width)
    program.builder.op("embed", y="x", table=program.weight("table", table, format))
    results = run_both(program.write(tmp_path / "model.cbi", "x"), list(range(width))[::-1])
    results.equal()
    assert np.abs(results.native - table[::-1]).max() < (0.05 if format == "q8_g32" else 0.02)


@pytest.mark.parametrize(("width", "group"), [(17, 17), (64, 16), (96, 32), (21, 3), (200, 200)])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.5])
def test_rms_norm(width: int, group: int, epsilon: float, tmp_path: Path) -> None:
    program = OneOp(max(width, 20))
    if width < program.output_width:
        program = OneOp(width)
    rows = np.concatenate((random_rows(1, 6, width), 1e-3 * random_rows(2, 3, width), 1e15 * random_rows(3, 3, width)))
    if epsilon:
        rows = np.concatenate((rows, np.zeros((1, width), np.float32), np.full((1, width), 1e-30, np.float32)))
    rows = rows[: program.output_width]
    program.input("x", rows)
    program.builder.tokens("y", width)
    weight = program.weight("weight", 1 + 0.2 * random_rows(4, 1, group))
    program.op("rms_norm", y="y", x="x", weight=weight, group=group, epsilon=epsilon)
    run_both(program.write(tmp_path / "model.cbi", "y"), all_tokens(rows)).agree()


@pytest.mark.parametrize("format", [format.name for format in FORMATS])
@pytest.mark.parametrize("k", [1, 40, 128, 130, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_matmul(format: str, k: int, bias: bool, tmp_path: Path) -> None:
    output = 53  # three tiles of 16 rows and a tail
    program = OneOp(output)
    rows = both_kinds_of_rows(k)
    program.input("x", rows)
    program.builder.tokens("y", output)
    weight = program.weight("weight", random_rows(5, output, k) / np.float32(np.sqrt(k)), format)
    name = program.weight("bias", random_rows(6, 1, output)) if bias else None
    program.op("matmul", y="y", x="x", weight=weight, bias=name)
    path = program.write(tmp_path / "model.cbi", "y")
    # Alternating signs cancel: the bound is on the terms, not on their sum.
    largest_term = np.abs(rows).max(axis=1, keepdims=True)
    results = run_both(path, all_tokens(rows))
    scaled = np.abs(results.native.astype(np.float64) - results.reference) / np.maximum(largest_term, 1e-30)
    assert scaled.max() < 5e-6
    assert np.abs(results.reference[:7]).min() > 0


@pytest.mark.parametrize("format", [format.name for format in FORMATS if not format.is_float])
@pytest.mark.parametrize("k", [128, 300])
def test_matmul_with_extreme_codes(format: str, k: int, tmp_path: Path) -> None:
    """Every code and every activation at its limit: a 16-bit sum anywhere would saturate."""
    output = 48
    program = OneOp(output)
    signs = np.where(np.random.default_rng(8).random((output, k)) < 0.5, -1.0, 1.0).astype(np.float32)
    signs[0], signs[1] = 1, -1
    rows = np.concatenate((signs[:6], np.full((1, k), 1.0, np.float32)))
    program.input("x", rows)
    program.builder.tokens("y", output)
    program.op("matmul", y="y", x="x", weight=program.weight("weight", signs * 127, format), bias=None)
    results = run_both(program.write(tmp_path / "model.cbi", "y"), all_tokens(rows))
    results.agree()
    assert np.abs(results.reference[0, 0]) > 100 * k


@pytest.mark.parametrize("rotary", [8, 20])
@pytest.mark.parametrize("pairing", list(Pairing))
def test_rope(rotary: int, pairing: Pairing, tmp_path: Path) -> None:
    heads, head_dim = 3, 20
    program = OneOp(heads * head_dim)
    rows = random_rows(9, 60, heads * head_dim)
    program.input("x", rows)
    rope_table(program, rotary, scale=1.3)
    program.builder.tokens("y", heads * head_dim)
    program.op("rope", y="y", x="x", table="table", head_dim=head_dim, pairing=pairing)
    path = program.write(tmp_path / "model.cbi", "y")
    run_both(path, all_tokens(rows)).agree()
    run_both(path, all_tokens(rows), chunk=7).agree()


def test_rope_in_place(tmp_path: Path) -> None:
    program = OneOp(24)
    rows = random_rows(10, 24, 24)
    program.input("x", rows)
    rope_table(program, 8, scale=1.0)
    program.op("rope", y="x", x="x", table="table", head_dim=12, pairing=Pairing.INTERLEAVED)
    run_both(program.write(tmp_path / "model.cbi", "x"), all_tokens(rows)).agree()


def test_rope_table_far_away(tmp_path: Path) -> None:
    """Positions up to 70,000: the reduction of large angles."""
    frequencies = np.array([1.0, 0.7310586, 0.1, 1e-4, 1e-6, 3.0], np.float32)
    program = OneOp(2 * len(frequencies), context_limit=1 << 17)
    program.builder.tokens("table", 2 * len(frequencies))
    program.builder.tokens("unused", 1)
    program.builder.op("embed", y="unused", table=program.weight("one", np.ones((2 * len(frequencies), 1))))
    name = program.weight("frequencies", frequencies)
    program.builder.op("rope_table", table="table", inverse_frequencies=name, scale=1.5)
    path = program.write(tmp_path / "model.cbi", "table")
    results = run_both(path, [0] * 70_000, chunk=35_000)
    results.agree(absolute=3e-7)
    assert np.array_equal(results.native[0], np.float32([1.5] * 6 + [0] * 6))


def rope_table(program: OneOp, rotary: int, scale: float) -> None:
    program.builder.tokens("table", rotary)
    frequencies = program.weight("frequencies", 0.3 ** np.arange(rotary // 2, dtype=np.float32))
    program.builder.op("rope_table", table="table", inverse_frequencies=frequencies, scale=scale)


@pytest.mark.parametrize("width", WIDTHS)
def test_clamp_and_add_are_exact(width: int, tmp_path: Path) -> None:
    program = OneOp(width)
    rows, others = both_kinds_of_rows(width)[:width], random_rows(11, width, width)
    program.input("x", rows)
    program.input("z", others)
    program.op("clamp", y="x", x="x", low=-0.75, high=0.5)
    program.op("add", y="x", a="x", b="z")
    results = run_both(program.write(tmp_path / "model.cbi", "x"), all_tokens(rows))
    results.equal()
    np.testing.assert_array_equal(results.native, np.clip(rows, -0.75, 0.5) + others[: len(rows)])


@pytest.mark.parametrize("width", WIDTHS)
def test_gated_activation(width: int, tmp_path: Path) -> None:
    program = OneOp(width)
    gate = np.concatenate((random_rows(12, 3, width, 4.0), np.full((1, width), -90.0), np.full((1, width), 1e4)))
    gate = np.concatenate((gate, adversarial_rows(width)[:4]))[:width]
    up = random_rows(13, width, width)[: len(gate)]
    program.input("gate", gate)
    program.input("up", up)
    program.op("gated_activation", y="gate", gate="gate", up="up", activation=Activation.SILU)
    run_both(program.write(tmp_path / "model.cbi", "gate"), all_tokens(gate)).agree(absolute=1e-36)


@pytest.mark.parametrize("width", [1, 33, 200])
def test_sigmoid_gate(width: int, tmp_path: Path) -> None:
    program = OneOp(width)
    gates = np.array([[0.0], [-100.0], [100.0], [1.5], [-1.5], [-87.0], [1e-40], [88.7]], np.float32)[:width]
    program.input("x", random_rows(14, len(gates), width))
    program.input("gate", gates)
    program.op("sigmoid_gate", y="x", x="x", gate="gate")
    run_both(program.write(tmp_path / "model.cbi", "x"), all_tokens(gates)).agree(absolute=1e-36)


@pytest.mark.parametrize("op", ["add", "rms_norm", "matmul", "quantised matmul", "clamp", "gated_activation"])
def test_numbers_too_large_are_an_error_naming_layer_and_op(op: str, tmp_path: Path) -> None:
    """One value of one row is too much for the op, or the op makes infinity that the next one finds."""
    width, found = 40, "add"
    program = OneOp(width)
    rows = random_rows(15, 4, width)
    rows[2, 37] = 1e38  # beyond any whole vector
    program.input("x", rows)
    program.builder.tokens("y", width)
    if op == "add":
        program.op("add", y="y", a="x", b="x")
        program.op("add", y="y", a="y", b="y")
    elif op == "rms_norm":
        program.op("rms_norm", y="y", x="x", weight=program.weight("w", np.ones(width)), group=width, epsilon=1e-6)
        found = "rms_norm"
    elif op == "clamp":
        program.op("gated_activation", y="x", gate="x", up="x", activation=Activation.SILU)
        program.op("clamp", y="y", x="x", low=-1.0, high=1.0)
        found = "clamp"
    else:
        if op.endswith("matmul"):
            format = "q8_g32" if op.startswith("quantised") else "f32"
            weight = program.weight("w", 1000 * random_rows(1, width, width), format)
            program.op("matmul", y="y", x="x", weight=weight)
        else:
            program.op("gated_activation", y="y", gate="x", up="x", activation=Activation.SILU)
        program.op("add", y="y", a="y", b="y")
    path = program.write(tmp_path / "model.cbi", "y")
    with pytest.raises(NonFiniteError, match="layer 0, op "):
        ReferenceEngine(path).session().forward([0, 1, 2, 3])
    with colibri.Engine(path) as engine, engine.session(context=8) as session:
        with pytest.raises(NonFiniteError, match=f"^layer 0, op {found}.*token position 2$"):
            session.forward([0, 1, 2, 3])
        assert session.position == 0
        assert session.forward([0, 1, 3]).shape == (3, width)

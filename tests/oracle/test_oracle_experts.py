"""Routing and experts, C against NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle.one_op import OneOp, random_rows, run_both
from reference.hand_built import Matrices

import colibri
from colibri.errors import NonFiniteError
from colibri.program.ops import Activation, Flag
from colibri.quantize import FORMATS
from colibri.reference import ReferenceEngine


def routed(program: OneOp, logits: np.ndarray, chosen: int, normalise: bool, scale: float) -> None:
    program.input("router_logits", logits)
    program.builder.routing("routing", chosen, logits.shape[1])
    flag = Flag.YES if normalise else Flag.NO
    program.op("route", routing="routing", logits="router_logits", normalise=flag, scale=scale)


def with_experts(program: OneOp, x: np.ndarray, experts: list[Matrices]) -> None:
    program.builder.expert_set("set")
    program.experts["set"] = experts
    program.input("x", x)
    program.builder.tokens("y", x.shape[1])
    program.op("experts", y="y", x="x", routing="routing", set="set", activation=Activation.SILU)


def router_cases(experts: int) -> np.ndarray:
    tied = np.zeros(experts, np.float32)
    tied[[1, experts // 2, experts - 1]] = 2.0
    return np.stack(
        [
            *random_rows(1, 6, experts, 2.0),
            np.zeros(experts, np.float32),
            tied,
            -tied,
            np.linspace(-300, 300, experts, dtype=np.float32),
            np.linspace(3e30, -3e30, experts, dtype=np.float32),
        ]
    )


@pytest.mark.parametrize(("experts", "chosen"), [(12, 3), (17, 1), (40, 8), (11, 11)])
@pytest.mark.parametrize("normalise", [False, True])
def test_route(experts: int, chosen: int, normalise: bool, tmp_path: Path) -> None:
    """Expert e writes 1 at place e (silu of 30 is 30 in float32), so the output is the routing weights themselves."""
    program = OneOp(experts)
    routed(program, router_cases(experts), chosen, normalise, scale=2.5)
    x = np.zeros((len(router_cases(experts)), experts), np.float32)
    x[:, 0] = 1
    gate, up = np.zeros((1, experts), np.float32), np.zeros((1, experts), np.float32)
    gate[0, 0], up[0, 0] = 30, np.float32(1 / 30)
    with_experts(program, x, [(gate, up, np.eye(experts, dtype=np.float32)[:, e : e + 1]) for e in range(experts)])
    results = run_both(program.write(tmp_path / "model.cbi", "y"), list(range(len(x))))
    np.testing.assert_array_equal(results.native != 0, results.reference != 0)
    np.testing.assert_allclose(results.native, results.reference, rtol=5e-6, atol=1e-30)
    assert (results.reference[:6] != 0).sum(axis=1).tolist() == [chosen] * 6
    # Ties: the lowest experts.
    assert np.flatnonzero(results.native[6]).tolist() == list(range(chosen))


def random_experts(count: int, width: int, ffn: int, seed: int = 2) -> list[Matrices]:
    return [
        (
            random_rows(seed + 3 * e, ffn, width) / np.float32(np.sqrt(width)),
            random_rows(seed + 3 * e + 1, ffn, width) / np.float32(np.sqrt(width)),
            random_rows(seed + 3 * e + 2, width, ffn) / np.float32(np.sqrt(ffn)),
        )
        for e in range(count)
    ]


@pytest.mark.parametrize("format", [format.name for format in FORMATS])
@pytest.mark.parametrize(("width", "ffn"), [(40, 24), (130, 200), (33, 1)])
def test_experts(format: str, width: int, ffn: int, tmp_path: Path) -> None:
    program = OneOp(width)
    program.expert_formats = (format, format, format)
    routed(program, random_rows(20, width, 9, 2.0), 3, normalise=True, scale=1.0)
    x = random_rows(21, width, width)
    x[3] = 0
    with_experts(program, x, random_experts(9, width, ffn))
    path = program.write(tmp_path / "model.cbi", "y")
    # A product between two codes may round either way after the activation function: single rows may then differ.
    results = run_both(path, list(range(width)))
    if "q" in format:
        difference = np.abs(results.native - results.reference).max(axis=1)
        assert np.mean(difference < 5e-6 * np.abs(results.reference).max()) > 0.9
        results.agree(2e-2)
    else:
        results.agree(5e-6, absolute=1e-6)  # a hidden value may be what is left of a sum that cancels
    one_by_one = run_both(path, list(range(width)), chunk=1)
    np.testing.assert_array_equal(one_by_one.native, results.native)


def test_mixed_formats_in_one_expert(tmp_path: Path) -> None:
    program = OneOp(64)
    program.expert_formats = ("q8_g32", "bf16", "f32")
    routed(program, random_rows(22, 64, 5), 2, normalise=False, scale=1.5)
    with_experts(program, random_rows(23, 64, 64), random_experts(5, 64, 48))
    run_both(program.write(tmp_path / "model.cbi", "y"), list(range(64))).agree(5e-6)


def test_an_expert_that_overflows_is_named(tmp_path: Path) -> None:
    width, logits = 32, np.zeros((4, 6), np.float32)
    logits[2, 4] = 9  # token 2 alone uses expert 4
    program = OneOp(width)
    routed(program, logits, 1, normalise=True, scale=1.0)
    experts = random_experts(6, width, 16)
    experts[4] = (experts[4][0], np.full((16, width), 1e38, np.float32), experts[4][2])
    with_experts(program, np.ones((4, width), np.float32), experts)
    path = program.write(tmp_path / "model.cbi", "y")
    with pytest.raises(NonFiniteError, match=r"layer 0.*expert 4"):
        ReferenceEngine(path).session().forward([0, 1, 2, 3])
    with colibri.Engine(path) as engine, engine.session(context=8) as session:
        with pytest.raises(NonFiniteError, match=r"layer 0.*expert 4"):
            session.forward([0, 1, 2, 3])
        assert session.forward([0, 1, 3]).shape == (3, width)

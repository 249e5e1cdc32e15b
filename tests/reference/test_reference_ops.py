"""Each op against the formula written out with plain Python numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from colibri.errors import NonFiniteError
from colibri.program.ops import Activation, Pairing
from colibri.quantize import FORMATS, dequantise, quantise, quantise_activations
from colibri.reference import Expert, Routing, Weight, ops


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def vector(values: np.ndarray) -> Weight:
    return Weight(values.reshape(1, -1))


def test_embed_takes_rows_of_the_table() -> None:
    table = random(5, 3)
    assert np.array_equal(ops.embed(Weight(table), np.array([4, 0, 4])), table[[4, 0, 4]])


@pytest.mark.parametrize("group", [4, 12])
def test_rms_norm_divides_each_group_by_its_root_mean_square(group: int) -> None:
    x, weight = random(2, 12), random(group, seed=1)
    y = ops.rms_norm(x, vector(weight), group, 0.5)
    for row in range(2):
        for start in range(0, 12, group):
            values = [float(v) for v in x[row, start : start + group]]
            root = math.sqrt(sum(v * v for v in values) / group + 0.5)
            expected = [v / root * float(w) for v, w in zip(values, weight, strict=True)]
            np.testing.assert_allclose(y[row, start : start + group], expected, rtol=1e-6)


def test_matmul_adds_the_bias() -> None:
    x, weight, bias = random(2, 5), random(3, 5, seed=1), random(3, seed=2)
    y = ops.matmul(x, Weight(weight), vector(bias))
    for row in range(2):
        for out in range(3):
            expected = sum(float(x[row, k]) * float(weight[out, k]) for k in range(5)) + float(bias[out])
            assert y[row, out] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert np.array_equal(ops.matmul(x, Weight(weight)), ops.matmul(x, Weight(weight), vector(np.zeros(3, np.float32))))


@pytest.mark.parametrize("format", [format.name for format in FORMATS if not format.is_float])
def test_quantised_matmul_is_the_scaled_sum_of_integer_dot_products(format: str) -> None:
    k, rows = 200, 3
    x = random(2, k) * np.float32(3)
    weight = quantise(random(rows, k, seed=1), format)
    y = ops.matmul(x, Weight(dequantise(weight), quantised=True))
    codes, scales = quantise_activations(x)
    group = weight.format.group
    for row in range(2):
        for out in range(rows):
            total = 0.0
            for block in range(2):
                inner = 0.0
                for start in range(128 * block, min(k, 128 * (block + 1)), group):
                    exact = sum(
                        int(codes[row, block, column - 128 * block])
                        * (int(weight.codes[out, column]) - weight.format.zero)
                        for column in range(start, min(start + group, k))
                    )
                    inner += exact * float(weight.scales[out, start // group])
                total += inner * float(scales[row, block])
            assert y[row, out] == pytest.approx(total, rel=1e-6, abs=1e-6)
    unquantised = ops.matmul(x, Weight(dequantise(weight)))
    assert np.abs(y - unquantised).max() > 1e-4


def test_rope_table_rounds_the_angle_to_float32() -> None:
    inverse = np.array([1.0, 0.1, 0.012345678], np.float32)
    table = ops.rope_table(np.array([0, 3, 100_003]), vector(inverse), 1.5)
    assert table.shape == (3, 6)
    np.testing.assert_array_equal(table[0], np.float32([1.5, 1.5, 1.5, 0, 0, 0]))
    for row, position in ((1, 3), (2, 100_003)):
        for i in range(3):
            angle = float(np.float32(position) * inverse[i])
            assert table[row, i] == pytest.approx(1.5 * math.cos(angle), abs=1e-6)
            assert table[row, 3 + i] == pytest.approx(1.5 * math.sin(angle), abs=1e-6)
    unrounded = 1.5 * math.sin(100_003 * float(inverse[2]))
    assert abs(table[2, 5] - unrounded) > 1e-6


@pytest.mark.parametrize("pairing", list(Pairing))
def test_rope_rotates_pairs_and_passes_the_rest(pairing: Pairing) -> None:
    heads, head_dim, rotary = 2, 7, 4
    x = random(3, heads * head_dim)
    table = ops.rope_table(np.arange(5, 8), vector(np.array([1.0, 0.3], np.float32)), 1.0)
    y = ops.rope(x, table, head_dim, pairing).reshape(3, heads, head_dim)
    x = x.reshape(3, heads, head_dim)
    for row in range(3):
        for head in range(heads):
            for i in range(2):
                first, second = (i, i + 2) if pairing == Pairing.HALF else (2 * i, 2 * i + 1)
                number = complex(x[row, head, first], x[row, head, second])
                turned = number * complex(table[row, i], table[row, 2 + i])
                assert y[row, head, first] == pytest.approx(turned.real, abs=1e-6)
                assert y[row, head, second] == pytest.approx(turned.imag, abs=1e-6)
            assert np.array_equal(y[row, head, rotary:], x[row, head, rotary:])


def test_clamp_bounds_both_sides() -> None:
    x = np.array([[-2, -0.5, 0.25, 9]], np.float32)
    assert ops.clamp(x, -0.5, 0.5).tolist() == [[-0.5, -0.5, 0.25, 0.5]]


@pytest.mark.parametrize("window", [0, 1, 3])
def test_attention_sees_what_the_mask_allows(window: int) -> None:
    heads, kv_heads, key_dim, value_dim, known, new = 4, 2, 3, 2, 6, 4
    q, keys, values = (
        random(new, heads * key_dim),
        random(10, kv_heads, key_dim, seed=1),
        random(10, kv_heads, 2, seed=2),
    )
    y = ops.attention(q, keys, values, np.arange(known, known + new), heads, window, 0.7)
    for row in range(new):
        position = known + row
        seen = range(max(0, position - window + 1) if window else 0, position + 1)
        for head in range(heads):
            query = q[row, head * key_dim : (head + 1) * key_dim]
            kv = head // (heads // kv_heads)
            weights = [
                math.exp(0.7 * sum(float(a) * float(b) for a, b in zip(query, keys[j, kv], strict=True))) for j in seen
            ]
            for d in range(value_dim):
                expected = sum(w * float(values[j, kv, d]) for w, j in zip(weights, seen, strict=True)) / sum(weights)
                assert y[row, head * value_dim + d] == pytest.approx(expected, abs=1e-6)


def test_attention_ignores_values_behind_the_mask() -> None:
    keys = np.zeros((3, 1, 2), np.float32)
    values = np.array([[[1.0]], [[2.0]], [[1e30]]], np.float32)
    y = ops.attention(np.zeros((2, 2), np.float32), keys, values, np.array([0, 1]), 1, 0, 1.0)
    assert y.ravel().tolist() == [1.0, 1.5]


def test_route_without_normalising_keeps_the_softmax_over_all_experts() -> None:
    logits = np.array([[1.0, 3.0, 2.0, -1.0]], np.float32)
    powers = [math.exp(v) for v in (1.0, 3.0, 2.0, -1.0)]
    plain = ops.route(logits, 2, normalise=False, scale=1.0)
    assert plain.experts.tolist() == [[1, 2]]
    np.testing.assert_allclose(plain.weights, [[powers[1] / sum(powers), powers[2] / sum(powers)]], rtol=1e-6)
    normalised = ops.route(logits, 2, normalise=True, scale=2.5)
    both = powers[1] + powers[2]
    np.testing.assert_allclose(normalised.weights, [[2.5 * powers[1] / both, 2.5 * powers[2] / both]], rtol=1e-6)


def test_route_gives_ties_to_the_lowest_expert() -> None:
    routing = ops.route(np.array([[0, 5, 1, 5, 5], [2, 2, 2, 2, 2]], np.float32), 3, True, 1.0)
    assert routing.experts.tolist() == [[1, 3, 4], [0, 1, 2]]
    np.testing.assert_allclose(routing.weights, np.full((2, 3), 1 / 3), rtol=1e-6)


def test_route_takes_probabilities_that_underflow_as_equal() -> None:
    routing = ops.route(np.array([[-200, -100, -190, 0]], np.float32), 3, normalise=False, scale=1.0)
    assert routing.experts.tolist() == [[3, 0, 1]]
    assert routing.weights.tolist() == [[1, 0, 0]]


def test_experts_adds_the_weighted_outputs_of_the_chosen() -> None:
    width, ffn = 4, 3
    chosen = [
        Expert(
            Weight(random(ffn, width, seed=i)),
            Weight(random(ffn, width, seed=i + 9)),
            Weight(random(width, ffn, seed=i + 99)),
        )
        for i in range(3)
    ]
    x = random(2, width, seed=7)
    routing = Routing(np.array([[2, 0], [1, 2]]), np.array([[0.7, 0.2], [0.6, 0.1]], np.float32))
    y = ops.experts(x, routing, chosen, Activation.SILU)
    for row in range(2):
        expected = np.zeros(width)
        for number, weight in zip(routing.experts[row], routing.weights[row], strict=True):
            gate, up = chosen[number].gate.values @ x[row], chosen[number].up.values @ x[row]
            hidden = gate / (1 + np.exp(-gate)) * up
            expected += float(weight) * (chosen[number].down.values @ hidden)
        np.testing.assert_allclose(y[row], expected, rtol=1e-5, atol=1e-6)


def test_experts_names_the_expert_that_overflows() -> None:
    good = Expert(*(Weight(np.ones((2, 2), np.float32)) for _ in range(3)))
    bad = Expert(good.gate, Weight(np.full((2, 2), 3e38, np.float32)), good.down)
    routing = Routing(np.array([[0, 1]]), np.array([[0.5, 0.5]], np.float32))
    with pytest.raises(NonFiniteError, match="expert 1"), np.errstate(over="ignore"):
        ops.experts(np.ones((1, 2), np.float32), routing, [good, bad], Activation.SILU)


def test_gated_activation_is_silu_of_gate_times_up() -> None:
    gate, up = np.array([[-800.0, -1.0, 0.0, 2.0]], np.float32), np.array([[3.0, 3.0, 3.0, 3.0]], np.float32)
    y = ops.gated_activation(gate, up, Activation.SILU)
    np.testing.assert_allclose(y, [[0, -3 / (1 + math.e), 0, 6 / (1 + math.exp(-2))]], rtol=1e-6)


def test_sigmoid_gate_scales_each_row_by_its_gate() -> None:
    x, gate = random(3, 4), np.array([[-900.0], [0.0], [2.0]], np.float32)
    y = ops.sigmoid_gate(x, gate)
    np.testing.assert_allclose(y, x * np.array([[0], [0.5], [1 / (1 + math.exp(-2))]]), rtol=1e-6)


def test_add_and_gather_outputs() -> None:
    a, b = random(3, 2), random(3, 2, seed=1)
    assert np.array_equal(ops.add(a, b), a + b)
    assert np.array_equal(ops.gather_outputs(a, np.array([2])), a[2:])

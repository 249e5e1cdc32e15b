"""Quantised weights: error bounds, range, edge cases, and what must never come out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from colibri.errors import NonFiniteError, UsageError
from colibri.quantize import FORMATS, QuantisedRows, dequantise, format_named, quantise

QUANTISED = [format.name for format in FORMATS if not format.is_float]
FLOATS = [format.name for format in FORMATS if format.is_float]


def gaussian(rows: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)


def code_range(name: str) -> tuple[int, int]:
    """Lowest and highest stored code."""
    return (-127, 127) if name.startswith("q8") else (0, 15)


def assert_nearest(values: np.ndarray, quantised: QuantisedRows) -> None:
    """Within half a scale of the source, but for codes at an end of the range (those may clip)."""
    group = quantised.format.group
    scales = np.repeat(np.abs(quantised.scales.astype(np.float32)), group, axis=1)[:, : values.shape[1]]
    lowest, highest = code_range(quantised.format.name)
    inside = (quantised.codes > lowest) & (quantised.codes < highest)
    error = np.abs(dequantise(quantised).astype(np.float64) - values)
    slack = 1e-6 * np.abs(values)
    # 2^-25 is half of the smallest float16 scale: groups below it become exact zeros, with scale 0.
    assert (error <= scales / 2 + slack + 2.0**-25)[inside].all()


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("k", [1, 40, 127, 128, 300])
def test_codes_are_in_range_and_nearest(name: str, k: int) -> None:
    values = gaussian(17, k)
    quantised = quantise(values, name)
    lowest, highest = code_range(name)
    assert quantised.codes.min() >= lowest
    assert quantised.codes.max() <= highest
    assert quantised.shape == (17, k)
    assert quantised.scales.shape == (17, -(-k // 32))
    assert_nearest(values, quantised)


@pytest.mark.parametrize("name", QUANTISED)
def test_a_weight_is_one_float32_product(name: str) -> None:
    quantised = quantise(gaussian(3, 96), name)
    zero = 8 if name == "q4_g32" else 0
    for row, column in [(0, 0), (1, 31), (1, 32), (2, 95)]:
        code = np.float32(int(quantised.codes[row, column]) - zero)
        expected = code * np.float32(quantised.scales[row, column // 32])
        assert dequantise(quantised)[row, column] == expected


@pytest.mark.parametrize("name", QUANTISED)
def test_groups_of_zeros_are_exact(name: str) -> None:
    values = gaussian(4, 128)
    values[1] = 0
    values[2, 32:64] = -0.0
    quantised = quantise(values, name)
    result = dequantise(quantised)
    assert np.isfinite(quantised.scales).all()
    assert not result[1].any()
    assert not result[2, 32:64].any()
    assert (quantised.codes[1] == format_named(name).zero).all()


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("magnitude", [1e-45, 1e-39, 1e-30, 2.0**-25])
def test_groups_below_float16_become_exact_zeros(name: str, magnitude: float) -> None:
    quantised = quantise(np.full((2, 64), magnitude, dtype=np.float32), name)
    assert np.isfinite(quantised.scales).all()
    assert not dequantise(quantised).any()


@pytest.mark.parametrize("name", QUANTISED)
def test_tiny_groups_are_off_by_less_than_the_smallest_float16(name: str) -> None:
    values = gaussian(8, 64) * np.float32(1e-7)
    result = dequantise(quantise(values, name))
    assert np.abs(result - values).max() <= 2.0**-25 * 1.001


@pytest.mark.parametrize("name", QUANTISED)
def test_one_huge_weight_does_not_spoil_the_other_groups(name: str) -> None:
    values = gaussian(1, 96) * np.float32(1e-3)
    values[0, 40] = 6e4
    result = dequantise(quantise(values, name))
    assert np.isfinite(result).all()
    assert abs(result[0, 40] - 6e4) < 6e4 * 0.07
    alone = np.concatenate([values[:, :32], values[:, 64:]], axis=1)
    assert np.array_equal(np.concatenate([result[:, :32], result[:, 64:]], axis=1), dequantise(quantise(alone, name)))


@pytest.mark.parametrize("name", QUANTISED)
def test_largest_representable_magnitude_and_beyond(name: str) -> None:
    limit = 65504.0 * (127 if name.startswith("q8") else 7)
    for sign in (1, -1):
        values = np.full((1, 32), sign * limit, dtype=np.float32)
        assert np.allclose(dequantise(quantise(values, name)), values, rtol=1e-3)
    values[0, 7] = limit * 1.01
    with pytest.raises(UsageError, match=r"layers\.3\.down"):
        quantise(values, name, name="layers.3.down")


@pytest.mark.parametrize("name", QUANTISED + FLOATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_an_error_naming_the_tensor(name: str, bad: float) -> None:
    values = gaussian(700, 300)
    values[611, 299] = bad
    with pytest.raises(NonFiniteError, match=r"model\.up"):
        quantise(values, name, name="model.up")


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize(("low", "high"), [(2.0, 3.0), (-3.0, -2.0)])
def test_one_sided_groups(name: str, low: float, high: float) -> None:
    values = np.random.default_rng(1).uniform(low, high, (8, 64)).astype(np.float32)
    quantised = quantise(values, name)
    assert_nearest(values, quantised)
    plain_step = 3 / (127 if name.startswith("q8") else 7)
    assert np.sqrt(np.mean((dequantise(quantised) - values) ** 2)) < plain_step / np.sqrt(12)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("constant", [5.0, -5.0, 0.0078125])
def test_constant_groups_are_exact_to_float16(name: str, constant: float) -> None:
    values = np.full((2, 64), constant, dtype=np.float32)
    assert np.allclose(dequantise(quantise(values, name)), values, rtol=2.0**-11, atol=0)


@pytest.mark.parametrize(("name", "lowest", "highest"), [("q8_g32", -127, 127), ("q4_g32", -8, 7)])
@pytest.mark.parametrize("sign", [1, -1])
def test_weights_already_on_a_grid_come_back_unchanged(name: str, lowest: int, highest: int, sign: int) -> None:
    generator = np.random.default_rng(2)
    codes = generator.integers(lowest, highest + 1, (64, 4, 32))
    codes[:, :, 5] = lowest  # plain rounding always reaches the end of the range
    scales = generator.uniform(1e-3, 2e-2, (64, 4, 1)).astype(np.float16).astype(np.float32) * sign
    values = (codes.astype(np.float32) * scales).reshape(64, 128)
    assert np.array_equal(dequantise(quantise(values, name)), values)


def test_search_beats_plain_rounding() -> None:
    values = gaussian(256, 512)
    groups = values.reshape(-1, 32)
    scale = np.abs(groups).max(axis=1, keepdims=True) / 7
    plain = np.clip(np.rint(groups / scale), -8, 7) * scale
    plain_error = np.mean((plain - groups) ** 2)
    assert np.mean((dequantise(quantise(values, "q4_g32")) - values) ** 2) < 0.75 * plain_error


def test_rare_outliers_spoil_only_their_group() -> None:
    generator = np.random.default_rng(3)
    values = generator.standard_normal((256, 2048)).astype(np.float32)
    outlier = generator.random(values.shape) < 0.001
    values[outlier] *= 20
    row_scale = np.abs(values).max(axis=1, keepdims=True) / 7
    per_row = np.rint(values / row_scale) * row_scale

    def rms(result: np.ndarray) -> float:
        return float(np.sqrt(np.mean((result - values)[~outlier] ** 2)))

    assert rms(dequantise(quantise(values, "q4_g32"))) < 0.25 * rms(per_row)


@pytest.mark.parametrize("name", QUANTISED)
def test_result_does_not_depend_on_the_slices(name: str) -> None:
    values = gaussian(1200, 200)
    whole = quantise(values, name)
    for row in (0, 255, 256, 1199):
        alone = quantise(values[row : row + 1], name)
        assert np.array_equal(alone.codes, whole.codes[row : row + 1])
        assert np.array_equal(alone.scales, whole.scales[row : row + 1])


@pytest.mark.parametrize("name", QUANTISED)
@settings(max_examples=60, deadline=None)
@given(arrays(np.float32, (2, 40), elements=st.floats(-4.5e5, 4.5e5, width=32)))
def test_any_finite_weights(name: str, values: np.ndarray) -> None:
    quantised = quantise(values, name)
    assert np.isfinite(quantised.scales).all()
    assert_nearest(values, quantised)


@pytest.mark.parametrize("values", [np.zeros((2, 4)), np.zeros(4, dtype=np.float32), np.zeros((1, 2, 4), np.float32)])
def test_wrong_type_or_shape(values: np.ndarray) -> None:
    with pytest.raises(UsageError, match=r"model\.q"):
        quantise(values, "q8_g32", name="model.q")


def test_float32_and_16_bit_sources_are_lossless() -> None:
    every_half = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    halves = every_half.view(np.float16)
    halves = halves[np.isfinite(halves)].astype(np.float32)[None]
    stored = dequantise(quantise(halves, "f16"))
    assert np.array_equal(stored.view(np.uint32), halves.view(np.uint32))

    brains = (every_half.astype(np.uint32) << 16).view(np.float32)
    brains = brains[np.isfinite(brains)][None]
    stored = dequantise(quantise(brains, "bf16"))
    assert np.array_equal(stored.view(np.uint32), brains.view(np.uint32))
    assert np.array_equal(dequantise(quantise(brains, "f32")).view(np.uint32), brains.view(np.uint32))


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x00008000, 0x00018000]], np.uint32)
    expected = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF82, 0x0000, 0x0002]
    assert quantise(bits.view(np.float32), "bf16").codes[0].tolist() == expected


@pytest.mark.parametrize(("name", "fits", "overflows"), [("f16", 65519.996, 65520.0), ("bf16", 3.39e38, 3.4e38)])
def test_float_overflow_is_an_error_naming_the_tensor(name: str, fits: float, overflows: float) -> None:
    assert np.isfinite(dequantise(quantise(np.array([[fits, -fits]], np.float32), name))).all()
    with pytest.raises(UsageError, match=r"model\.head"):
        quantise(np.array([[1, -overflows]], np.float32), name, name="model.head")

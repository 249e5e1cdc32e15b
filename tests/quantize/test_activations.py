"""The activation quantiser of the numeric contract, against its definition spelled out in scalars."""

from __future__ import annotations

import numpy as np
import pytest

from colibri.errors import NonFiniteError
from colibri.quantize import dequantise_activations, quantise_activations


@pytest.mark.parametrize("k", [1, 127, 128, 300])
def test_equals_the_definition(k: int) -> None:
    values = np.random.default_rng(0).standard_normal((3, k)).astype(np.float32)
    codes, scales = quantise_activations(values)
    blocks = -(-k // 128)
    assert codes.shape == (3, blocks, 128)
    assert scales.shape == (3, blocks)
    for row in range(3):
        for block in range(blocks):
            part = values[row, block * 128 : (block + 1) * 128]
            largest = np.float32(max(abs(value) for value in part))
            factor = np.float32(127) / largest
            expected = [int(np.rint(np.float32(value * factor))) for value in part]
            assert codes[row, block].tolist() == expected + [0] * (128 - len(part))
            assert scales[row, block] == largest / np.float32(127)


def test_blocks_below_the_threshold_are_zeros() -> None:
    threshold = np.float32(2.0**-100)
    below = np.nextafter(threshold, np.float32(0))
    values = np.zeros((1, 384), dtype=np.float32)
    values[0, 5] = threshold
    values[0, 128:256] = below
    codes, scales = quantise_activations(values)
    assert codes[0, 0, 5] == 127
    assert scales[0, 0] > 0
    assert not codes[0, 1:].any()
    assert not scales[0, 1:].any()


def test_codes_never_pass_127_and_ties_go_to_even() -> None:
    largest = np.random.default_rng(1).uniform(1e-3, 1e3, 10000).astype(np.float32)
    values = np.zeros((10000, 128), dtype=np.float32)
    values[:, 0], values[:, 1] = largest, -largest
    codes, _ = quantise_activations(values)
    assert (codes[:, 0, 0] == 127).all()
    assert (codes[:, 0, 1] == -127).all()
    ties = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5]], dtype=np.float32)
    assert quantise_activations(ties)[0][0, 0, :6].tolist() == [127, 0, 2, 2, 0, -2]


def test_dequantised_values_are_within_half_a_step() -> None:
    values = np.random.default_rng(2).standard_normal((5, 200)).astype(np.float32) * np.float32(1e6)
    codes, scales = quantise_activations(values)
    result = dequantise_activations(codes, scales, 200)
    assert result.shape == values.shape
    step = np.repeat(scales, 128, axis=1)[:, :200]
    assert (np.abs(result - values) <= step * 0.5001).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_activations_name_their_place(bad: float) -> None:
    values = np.zeros((2, 130), dtype=np.float32)
    values[1, 129] = bad
    with pytest.raises(NonFiniteError, match="layer 3 expert 7"):
        quantise_activations(values, name="layer 3 expert 7")

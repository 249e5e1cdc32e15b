"""The state keeps what its format can hold."""

from __future__ import annotations

import numpy as np
import pytest

from colibri.errors import NonFiniteError, UsageError
from colibri.program import State
from colibri.program.ops import StateKind
from colibri.reference import AttentionState

SHAPE = State(StateKind.ATTENTION, kv_heads=2, key_dim=4, value_dim=3, layer=5)


def rows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return (
        generator.standard_normal((count, 8)).astype(np.float32),
        generator.standard_normal((count, 6)).astype(np.float32),
    )


def test_f32_keeps_every_bit_and_truncates() -> None:
    state = AttentionState(SHAPE, "f32")
    keys, values = rows(5, 0)
    state.append(keys[:3], values[:3])
    state.append(keys[3:], values[3:])
    assert np.array_equal(state.keys.reshape(5, 8), keys)
    state.truncate(2)
    assert np.array_equal(state.values, values[:2].reshape(2, 2, 3))


def test_f16_rounds_to_half_precision() -> None:
    state = AttentionState(SHAPE, "f16")
    keys, values = rows(2, 1)
    state.append(keys, values)
    assert np.array_equal(state.keys.reshape(2, 8), keys.astype(np.float16).astype(np.float32))
    assert not np.array_equal(state.keys.reshape(2, 8), keys)


def test_q8_has_one_scale_for_each_position_and_head() -> None:
    state = AttentionState(SHAPE, "q8")
    key = np.array([[127.0, -3.4, 0.6, 0, 0.127, 0.0034, -0.0126, 0]], np.float32)
    state.append(key, np.zeros((1, 6), np.float32))
    np.testing.assert_allclose(state.keys[0, 0], [127, -3, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(state.keys[0, 1], [0.127, 0.003, -0.013, 0], rtol=1e-6)
    assert not state.values.any()


def test_errors_name_layer_and_format() -> None:
    keys, values = rows(1, 2)
    values[0, 1] = 70000
    with pytest.raises(NonFiniteError, match=r"layer 5.*value.*f16"):
        AttentionState(SHAPE, "f16").append(keys, values)
    AttentionState(SHAPE, "q8").append(keys, values)
    keys[0, 0] = np.nan
    with pytest.raises(NonFiniteError, match=r"layer 5.*key"):
        AttentionState(SHAPE, "f32").append(keys, values)
    with pytest.raises(UsageError, match="q4"):
        AttentionState(SHAPE, "q4")

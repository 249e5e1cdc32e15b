"""What attention remembers of the tokens so far: keys and values, rounded to the session's state format."""

from __future__ import annotations

import numpy as np

from colibri.errors import NonFiniteError, UsageError
from colibri.program import State

STATE_FORMATS = ("f32", "f16", "q8")


class AttentionState:
    """Keys float32 [positions, kv_heads, key_dim] and values float32 [positions, kv_heads, value_dim].

    They are kept as floats that the state format can hold exactly: what a reader of the stored form would see.
    """

    def __init__(self, state: State, state_format: str):
        if state_format not in STATE_FORMATS:
            raise UsageError(f"unknown state format {state_format!r}; choose one of {', '.join(STATE_FORMATS)}")
        self.layer = state.layer
        self.state_format = state_format
        self.keys = np.zeros((0, state.kv_heads, state.key_dim), np.float32)
        self.values = np.zeros((0, state.kv_heads, state.value_dim), np.float32)

    def append(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Add the next n positions: keys [n, kv_heads * key_dim], values [n, kv_heads * value_dim].

        Raises NonFiniteError naming the layer when a value does not fit the format.
        """
        count = len(keys)
        new_keys = self._rounded(keys.reshape(count, *self.keys.shape[1:]), "key")
        new_values = self._rounded(values.reshape(count, *self.values.shape[1:]), "value")
        self.keys = np.concatenate((self.keys, new_keys))
        self.values = np.concatenate((self.values, new_values))

    def truncate(self, position: int) -> None:
        """Forget positions >= position."""
        self.keys = self.keys[:position]
        self.values = self.values[:position]

    def _rounded(self, x: np.ndarray, what: str) -> np.ndarray:
        if not np.isfinite(x).all():
            raise NonFiniteError(f"layer {self.layer}: a {what} is NaN or infinite; check the weights of the model")
        if self.state_format == "f16":
            return self._through_float16(x, what)
        return _through_int8(x) if self.state_format == "q8" else x

    def _through_float16(self, x: np.ndarray, what: str) -> np.ndarray:
        with np.errstate(over="ignore", under="ignore"):
            rounded = x.astype(np.float16).astype(np.float32)
        if not np.isfinite(rounded).all():
            raise NonFiniteError(
                f"layer {self.layer}: a {what} is too large for state format f16; open the session with f32"
            )
        return rounded


def _through_int8(x: np.ndarray) -> np.ndarray:
    """One scale for each position and head: scale = m / 127, code = rint(x * (127 / m)), m the largest magnitude."""
    largest = np.abs(x).max(axis=2, keepdims=True)
    tiny = largest < np.float32(2.0**-100)
    factor = np.float32(127) / np.where(tiny, np.float32(1), largest)
    codes = np.rint(x * factor)
    return np.where(tiny, np.float32(0), codes * (largest / np.float32(127)))

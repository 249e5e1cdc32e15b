"""Rotary position embeddings as numbers: inverse frequencies and a scale for cos and sin.

The formulas are those of transformers' modeling_rope_utils, in float32 step by step. Powers are computed in float64
and rounded, so that every machine converts a model to the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.errors import CheckpointError, UnsupportedModelError
from colibri.families.config import ConfigReader

_KEYS = {
    "default": set(),
    # Only GGUF files have it: each frequency is divided by a number of its own.
    "factors": {"factors"},
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True)
class Rope:
    """inverse_frequencies: float32 [head_dim / 2]; scale multiplies cos and sin; context_limit in positions."""

    inverse_frequencies: np.ndarray
    scale: float
    context_limit: int


@dataclass(frozen=True)
class _Parameters:
    """The object `rope_parameters` (or `rope_scaling`), each key checked when read."""

    where: str
    values: dict[str, Any]

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(f"{self.where}: {key} = {value!r} of the RoPE parameters should be a number above 0.")
        return value

    def optional(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)


def read_rope(config: ConfigReader, *, head_dim: int, default_theta: float = 10000.0) -> Rope:
    """Read RoPE from config.json in either form: rope_theta and rope_scaling, or rope_parameters.

    Raises UnsupportedModelError naming a type or key that has no fixed inverse frequencies here.
    """
    positions = config.integer("max_position_embeddings")
    scaling, modern = config.mapping("rope_scaling"), config.mapping("rope_parameters")
    theta = config.number("rope_theta", default=default_theta, above=0)
    values = dict(scaling or modern or {})
    values.setdefault("rope_theta", theta)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _KEYS:
        hint = " (it depends on the length of the text)" if kind in ("dynamic", "longrope") else ""
        raise UnsupportedModelError(
            f"{config.where}: RoPE type {kind!r} is not supported{hint}; supported: {', '.join(_KEYS)}."
        )
    config.only("partial_rotary_factor", 1, default=1)
    if values.get("partial_rotary_factor", 1) not in (1, None):
        raise UnsupportedModelError(f"{config.where}: partial_rotary_factor of the RoPE parameters is not supported.")
    unknown = sorted(set(values) - _KEYS[kind] - _COMMON_KEYS)
    if unknown:
        listed = ", ".join(f"{key} = {values[key]!r}" for key in unknown)
        raise UnsupportedModelError(f"{config.where}: RoPE type {kind!r} with {listed} is not supported.")
    # A key beside the object goes before one in it, as in transformers.
    original = config.optional_integer("original_max_position_embeddings")
    if original is not None:
        values["original_max_position_embeddings"] = original
    parameters = _Parameters(config.where, values)
    powers = _powers(parameters.number("rope_theta"), head_dim)
    if kind == "linear":
        return Rope(np.float32(1) / powers / np.float32(parameters.number("factor")), 1.0, positions)
    if kind == "factors":
        return Rope(np.float32(1) / powers / _factors(parameters, len(powers)), 1.0, positions)
    if kind == "llama3":
        return Rope(_llama3(parameters, np.float32(1) / powers, positions), 1.0, positions)
    if kind == "yarn":
        return _yarn(parameters, powers, head_dim, positions)
    return Rope(np.float32(1) / powers, 1.0, positions)


def _powers(theta: float, dim: int) -> np.ndarray:
    exponents = np.arange(0, dim, 2).astype(np.float32) / np.float32(dim)
    return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)


def _factors(parameters: _Parameters, count: int) -> np.ndarray:
    values = parameters.values.get("factors")
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointError(f"{parameters.where}: the RoPE parameters should have a list of {count} factors.")
    factors = np.asarray(values, dtype=np.float32)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(f"{parameters.where}: the factors of the RoPE parameters should be numbers above 0.")
    return factors


def _llama3(parameters: _Parameters, frequencies: np.ndarray, positions: int) -> np.ndarray:
    factor = np.float32(parameters.number("factor"))
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    original = parameters.number("original_max_position_embeddings", positions)
    if high <= low:
        raise CheckpointError(f"{parameters.where}: high_freq_factor must exceed low_freq_factor.")
    wavelengths = np.float32(2 * math.pi) / frequencies
    long, short = wavelengths > np.float32(original / low), wavelengths < np.float32(original / high)
    scaled = np.where(long, frequencies / factor, frequencies)
    smooth = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * scaled / factor + smooth * scaled
    return np.where(~short & ~long, blended, scaled).astype(np.float32)


def _yarn(parameters: _Parameters, powers: np.ndarray, dim: int, positions: int) -> Rope:
    base = parameters.number("rope_theta")
    original = parameters.number("original_max_position_embeddings", positions)
    factor = parameters.number("factor", positions / original)
    scale = parameters.optional("attention_factor")
    if scale is None:
        mscale, mscale_all_dim = parameters.optional("mscale"), parameters.optional("mscale_all_dim")
        scale = _magnitude(factor)
        if mscale is not None and mscale_all_dim is not None:
            scale = _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim)

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(parameters.number("beta_fast", 32)), dimension(parameters.number("beta_slow", 1))
    truncate = parameters.values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError(f"{parameters.where}: truncate of the RoPE parameters should be true or false.")
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # An empty ramp would divide by zero.
    span = 0.001 if low == high else high - low
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(span)
    kept = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    interpolated = np.float32(1) / (np.float32(factor) * powers)
    frequencies = interpolated * (np.float32(1) - kept) + np.float32(1) / powers * kept
    # Files that stretch a model with YaRN often leave max_position_embeddings at the original length.
    return Rope(frequencies.astype(np.float32), float(scale), max(positions, int(original * factor)))


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

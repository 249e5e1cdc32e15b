"""Exact and rounded conversions between float32 and the 16-bit float storage types."""

from __future__ import annotations

import numpy as np

from colibri.errors import NonFiniteError, UsageError


def require_finite(values: np.ndarray, name: str) -> None:
    """Raise NonFiniteError naming `name` if any value is NaN or infinite."""
    if not np.isfinite(values).all():
        raise NonFiniteError(f"{name}: the source holds NaN or infinity; repair the checkpoint")


def float32_to_bf16(values: np.ndarray, name: str) -> np.ndarray:
    """Round float32 to bf16, ties to even; returns the bits as uint16 of the same shape.

    Raises UsageError naming `name` where a value rounds to infinity and NonFiniteError for NaN or infinity.
    """
    require_finite(values, name)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    rounded = rounded.astype(np.uint16)
    if ((rounded & np.uint16(0x7FFF)) == np.uint16(0x7F80)).any():
        raise UsageError(f"{name}: a value is too large for bf16; choose f32")
    return rounded


def bf16_to_float32(bits: np.ndarray) -> np.ndarray:
    """Widen bf16 bits (uint16) to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_float16(values: np.ndarray, name: str) -> np.ndarray:
    """Round float32 to float16, ties to even, denormals kept.

    Raises UsageError naming `name` where a value rounds to infinity and NonFiniteError for NaN or infinity.
    """
    require_finite(values, name)
    with np.errstate(over="ignore", under="ignore"):
        rounded = values.astype(np.float16)
    if np.isinf(rounded).any():
        raise UsageError(f"{name}: a value is too large for f16 (65504); choose bf16 or f32")
    return rounded

"""Weights to codes and back: value = float(code - zero) * float(scale), one float32 multiplication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from colibri.errors import NonFiniteError, UsageError
from colibri.quantize.floats import bf16_to_float32, float32_to_bf16, float32_to_float16, require_finite
from colibri.quantize.formats import WeightFormat, format_named
from colibri.quantize.search import LARGEST_FLOAT16, SMALLEST_FLOAT16, GroupSearch

# Columns and two work arrays of this many float32 stay in a 2 MiB second-level cache.
_CHUNK_VALUES = 1 << 16


@dataclass(frozen=True)
class QuantisedRows:
    """One matrix in a weight format.

    `codes` [rows, k] is int8 (8-bit formats), uint8 0..15 (4-bit), float32 (f32), float16 (f16) or the bits as
    uint16 (bf16). `scales` float16 [rows, groups] and `zeros` uint8 [rows, groups] are None where the format has
    none; groups = ceil(k / group).
    """

    format: WeightFormat
    codes: np.ndarray
    scales: np.ndarray | None = None
    zeros: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, k)."""
        rows, k = self.codes.shape
        return rows, k


def quantise(values: np.ndarray, format: WeightFormat | str, *, name: str = "tensor") -> QuantisedRows:
    """Convert float32 [rows, k] to `format`, with the scales (and zero-points) of least squared error.

    Works in slices: beside its result it needs about 1 MiB, whatever the size. Safe to call from several threads.
    A group below the float16 range becomes exact zeros. Raises, naming `name`, NonFiniteError for NaN or infinity
    and UsageError for values that the format cannot hold or a wrong shape or type.
    """
    if isinstance(format, str):
        format = format_named(format)
    if values.ndim != 2 or values.dtype != np.float32:
        raise UsageError(f"{name}: expected float32 [rows, k], got {values.dtype} {list(values.shape)}")
    if format.is_float:
        return QuantisedRows(format, _float_codes(values, format, name))
    rows, k = values.shape
    groups = -(-k // format.group)
    codes = np.empty((rows, k), dtype=np.int8 if format.bits == 8 else np.uint8)
    scales = np.empty((rows, groups), dtype=np.float16)
    zeros = np.empty((rows, groups), dtype=np.uint8) if format.zero_points else None
    step = max(1, _CHUNK_VALUES // max(1, groups * format.group))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        _quantise_slice(values[part], format, name, codes[part], scales[part], None if zeros is None else zeros[part])
    return QuantisedRows(format, codes, scales, zeros)


def dequantise(quantised: QuantisedRows) -> np.ndarray:
    """Return float32 [rows, k]."""
    format, codes = quantised.format, quantised.codes
    if format.name == "bf16":
        return bf16_to_float32(codes)
    if format.is_float:
        return codes.astype(np.float32)
    assert quantised.scales is not None
    rows, k = codes.shape
    groups = quantised.scales.shape[1]
    values = np.zeros((rows, groups * format.group), dtype=np.float32)
    values[:, :k] = codes
    grouped = values.reshape(rows, groups, format.group)
    if quantised.zeros is not None:
        grouped -= quantised.zeros[:, :, None]
    elif format.fixed_zero:
        grouped -= np.float32(format.fixed_zero)
    grouped *= quantised.scales.astype(np.float32)[:, :, None]
    return np.ascontiguousarray(values[:, :k])


def _float_codes(values: np.ndarray, format: WeightFormat, name: str) -> np.ndarray:
    if format.name == "bf16":
        return float32_to_bf16(values, name)
    if format.name == "f16":
        return float32_to_float16(values, name)
    require_finite(values, name)
    return values.copy()


def _quantise_slice(
    values: np.ndarray,
    format: WeightFormat,
    name: str,
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
) -> None:
    rows, k = values.shape
    groups = scales.shape[1]
    padded = np.zeros((rows * groups, format.group), dtype=np.float32)
    padded.reshape(rows, groups * format.group)[:, :k] = values
    columns = np.ascontiguousarray(padded.T)
    largest = np.maximum(columns.max(axis=0), -columns.min(axis=0))
    _check_range(largest, format, name)
    # Half the smallest float16 rounds to code 0 at any scale; as exact zeros no reciprocal can overflow.
    columns[:, largest <= np.float32(SMALLEST_FLOAT16 / 2)] = 0
    search = GroupSearch(columns)
    if format.bits == 8:
        fit, below, above = search.int8(), 127.0, 127.0
    elif format.zero_points:
        fit = search.asymmetric()
        below, above = fit.zero, np.float32(15.0) - fit.zero
    else:
        fit, below, above = search.symmetric(), 8.0, 7.0
    found = search.codes(below, above)
    found += fit.zero
    codes[:] = found.T.reshape(rows, groups * format.group)[:, :k].astype(codes.dtype)
    scales[:] = fit.scale.reshape(rows, groups)
    if zeros is not None:
        zeros[:] = fit.zero.reshape(rows, groups)


def _check_range(largest: np.ndarray, format: WeightFormat, name: str) -> None:
    """Raise unless every group maximum is finite and its scale fits float16."""
    if not np.isfinite(largest).all():
        raise NonFiniteError(f"{name}: the source holds NaN or infinity; repair the checkpoint")
    limit = LARGEST_FLOAT16 * (127 if format.bits == 8 else 7)
    if (largest > np.float32(limit)).any():
        raise UsageError(f"{name}: {largest.max():.4g} is too large for {format.name}; choose bf16 or f32")

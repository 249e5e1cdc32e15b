"""Weights to codes and back: value = float(code - zero) * float(scale), one float32 multiplication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from colibri.errors import NonFiniteError, UsageError
from colibri.quantize.floats import bf16_to_float32, float32_to_bf16, float32_to_float16, require_finite
from colibri.quantize.formats import WeightFormat, format_named
from colibri.quantize.search import INT4, INT8, LARGEST_FLOAT16, SMALLEST_FLOAT16, ScaleSearch

# The columns and two work arrays of this many float32 stay in a 1 MiB second-level cache.
_CHUNK_VALUES = 1 << 16


@dataclass(frozen=True)
class QuantisedRows:
    """One matrix in a weight format.

    `codes` [rows, k] is int8 -127..127 (8-bit formats), uint8 0..15 (4-bit), float32 (f32), float16 (f16) or the
    bits as uint16 (bf16). `scales` is float16 [rows, ceil(k / group)], with no columns for float formats.
    """

    format: WeightFormat
    codes: np.ndarray
    scales: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, k)."""
        rows, k = self.codes.shape
        return rows, k

    @classmethod
    def of_floats(cls, format: WeightFormat, codes: np.ndarray) -> QuantisedRows:
        """A matrix of a float format: codes [rows, k] as stored, no scales."""
        return cls(format, codes, np.empty((codes.shape[0], 0), dtype=np.float16))


def quantise(values: np.ndarray, format: WeightFormat | str, *, name: str = "tensor") -> QuantisedRows:
    """Convert float32 [rows, k] to `format`; scales are those of least squared error.

    Works in slices: beside its result it needs a few rows or about 1 MiB. Safe to call from several threads.
    A group too small for any float16 scale becomes exact zeros. Raises, naming `name`: NonFiniteError for NaN or
    infinity, UsageError for values that the format cannot hold and for a wrong shape or type.
    """
    if isinstance(format, str):
        format = format_named(format)
    if values.ndim != 2 or values.dtype != np.float32:
        raise UsageError(f"{name}: expected float32 [rows, k], got {values.dtype} {list(values.shape)}")
    if format.is_float:
        return QuantisedRows.of_floats(format, _float_codes(values, format, name))
    rows, k = values.shape
    groups = -(-k // format.group)
    codes = np.empty((rows, k), dtype=format.code_type)
    scales = np.empty((rows, groups), dtype=np.float16)
    step = max(1, _CHUNK_VALUES // max(1, groups * format.group))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        _quantise_slice(values[part], format, name, codes[part], scales[part])
    return QuantisedRows(format, codes, scales)


def dequantise(quantised: QuantisedRows) -> np.ndarray:
    """Return float32 [rows, k]."""
    format, codes = quantised.format, quantised.codes
    if format.name == "bf16":
        return bf16_to_float32(codes)
    if format.is_float:
        return codes.astype(np.float32)
    rows, k = codes.shape
    groups = quantised.scales.shape[1]
    values = np.zeros((rows, groups * format.group), dtype=np.float32)
    values[:, :k] = codes
    values -= np.float32(format.zero)
    grouped = values.reshape(rows, groups, format.group)
    grouped *= quantised.scales.astype(np.float32)[:, :, None]
    return np.ascontiguousarray(values[:, :k])


def _float_codes(values: np.ndarray, format: WeightFormat, name: str) -> np.ndarray:
    if format.name == "bf16":
        return float32_to_bf16(values, name)
    if format.name == "f16":
        return float32_to_float16(values, name)
    require_finite(values, name)
    return values.copy()


def _quantise_slice(values: np.ndarray, format: WeightFormat, name: str, codes: np.ndarray, scales: np.ndarray) -> None:
    """Write the codes and scales of `values` [rows, k] into `codes` and `scales`."""
    rows, k = values.shape
    groups = scales.shape[1]
    padded = np.zeros((rows, groups * format.group), dtype=np.float32)
    padded[:, :k] = values
    columns = np.ascontiguousarray(padded.reshape(rows * groups, format.group).T)
    largest = np.maximum(columns.max(axis=0, initial=0), -columns.min(axis=0, initial=0))
    _require_range(largest, format, name)
    # Half the smallest float16 rounds to code 0 at any scale; made exact zeros, no reciprocal can overflow.
    columns[:, largest <= np.float32(SMALLEST_FLOAT16 / 2)] = 0
    search = ScaleSearch(columns, INT8 if format.bits == 8 else INT4)
    search.run()
    found = search.codes()
    found += np.float32(format.zero)
    codes[:] = found.T.reshape(rows, groups * format.group)[:, :k]
    scales[:] = search.scales.reshape(rows, groups)


def _require_range(largest: np.ndarray, format: WeightFormat, name: str) -> None:
    """Raise unless every group maximum is finite and needs no scale beyond float16."""
    if not np.isfinite(largest).all():
        raise NonFiniteError(f"{name}: the source holds NaN or infinity; repair the checkpoint")
    limit = LARGEST_FLOAT16 * (127 if format.bits == 8 else 7)
    if (largest > np.float32(limit)).any():
        raise UsageError(f"{name}: magnitude {largest.max():.4g} is too large for {format.name}; choose bf16 or f32")

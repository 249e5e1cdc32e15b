"""Exact widening of stored floats to float32."""

from __future__ import annotations

import numpy as np

BYTES_PER_ELEMENT = {"F32": 4, "BF16": 2, "F16": 2}


def upcast_into(raw: np.ndarray, dtype: str, output: np.ndarray) -> None:
    """Widen little-endian stored elements to float32, bit-exactly.

    raw: uint8 [bytes]; dtype: a key of BYTES_PER_ELEMENT; output: float32 [elements], contiguous.
    bf16 and f32 keep every bit, those of a NaN included; f16 keeps every value, and a NaN stays a NaN.
    """
    if dtype == "BF16":
        # A shift of integers: arithmetic on floats would quiet NaNs, and flush denormals if the caller asked for it.
        np.left_shift(raw.view("<u2"), np.uint32(16), out=output.view(np.uint32))
    elif dtype == "F16":
        with np.errstate(invalid="ignore"):  # The CPU reports a signalling NaN as invalid; it is only copied here.
            output[:] = raw.view("<f2")
    else:
        output.view(np.uint32)[:] = raw.view("<u4")

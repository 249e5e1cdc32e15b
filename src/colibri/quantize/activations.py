"""Activation quantisation of the numeric contract: int8 codes, one float32 scale for each block of k."""

from __future__ import annotations

import numpy as np

from colibri.errors import NonFiniteError
from colibri.quantize.formats import ACTIVATION_BLOCK

_SMALLEST_MAGNITUDE = np.float32(2.0**-100)


def quantise_activations(
    values: np.ndarray, block: int = ACTIVATION_BLOCK, *, name: str = "activations"
) -> tuple[np.ndarray, np.ndarray]:
    """Quantise rows of activations exactly as the contract says.

    `values` is float32 [rows, k]. Returns codes int8 [rows, blocks, block] (k zero-padded to whole blocks) and
    scales float32 [rows, blocks]. With m the largest magnitude of a block: code = rint(x * (127 / m)) and
    scale = m / 127; a block with m < 2^-100 gives zeros. Raises NonFiniteError naming `name`.
    """
    rows, k = values.shape
    blocks = -(-k // block)
    padded = np.zeros((rows, blocks * block), dtype=np.float32)
    padded[:, :k] = values
    padded = padded.reshape(rows, blocks, block)
    largest = np.abs(padded).max(axis=2, initial=0.0)
    if not np.isfinite(largest).all():
        raise NonFiniteError(f"{name}: NaN or infinity cannot be quantised; check the input and the weights before it")
    tiny = largest < _SMALLEST_MAGNITUDE
    safe = np.where(tiny, np.float32(1.0), largest)
    factor = np.where(tiny, np.float32(0.0), np.float32(127.0) / safe)
    codes = np.rint(padded * factor[:, :, None]).astype(np.int8)
    scales = np.where(tiny, np.float32(0.0), largest / np.float32(127.0))
    return codes, scales


def dequantise_activations(codes: np.ndarray, scales: np.ndarray, k: int) -> np.ndarray:
    """Return float32 [rows, k]: float(code) * scale, the padding dropped."""
    values = codes.astype(np.float32) * scales[:, :, None]
    return values.reshape(codes.shape[0], -1)[:, :k]

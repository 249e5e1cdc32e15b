"""Takes the blocks of 32 weights apart that GGUF files store: codes and float16 scales, and their exact values."""

from __future__ import annotations

import numpy as np

from colibri.checkpoint.upcast import upcast_into

GROUP = 32


def codes_and_scales(raw: np.ndarray, type: str) -> tuple[np.ndarray, np.ndarray]:
    """Split rows of blocks; nothing is rounded.

    raw: uint8 [rows, bytes of a row], type Q4_0 or Q8_0. Returns codes [rows, cols], uint8 0..15 for Q4_0 and int8
    for Q8_0, and scales float16 [rows, cols / 32].
    """
    rows = raw.shape[0]
    if type == "Q4_0":
        blocks = raw.reshape(rows, -1, 2 + GROUP // 2)
        codes = np.empty((*blocks.shape[:2], GROUP), dtype=np.uint8)
        np.bitwise_and(blocks[:, :, 2:], 15, out=codes[:, :, : GROUP // 2])
        np.right_shift(blocks[:, :, 2:], 4, out=codes[:, :, GROUP // 2 :])
    else:
        blocks = raw.reshape(rows, -1, 2 + GROUP)
        codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2").reshape(rows, -1)
    return codes.reshape(rows, -1), scales


def decode_rows(raw: np.ndarray, type: str, output: np.ndarray) -> None:
    """Write the exact values of rows of any readable type into `output`, float32 [rows, cols], contiguous."""
    if type not in ("Q4_0", "Q8_0"):
        upcast_into(raw.reshape(-1), type, output.reshape(-1))
        return
    codes, scales = codes_and_scales(raw, type)
    output[:] = codes
    if type == "Q4_0":
        output -= np.float32(8)
    output.reshape(*scales.shape, GROUP)[:] *= scales.astype(np.float32)[:, :, None]

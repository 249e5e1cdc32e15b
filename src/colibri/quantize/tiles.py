"""Quantised matrices to bytes and back, in the orders the kernels read.

`tiled16x4` (quantised formats): rows are padded to tiles of 16, k to blocks of 128. Tiles ascend, and within a tile
blocks ascend. A block is its codes, then its scales (for each group, 16 float16), then zero bytes up to a multiple
of 64. Codes come in 32 steps of 16 rows x 4 k; int8 steps follow one another, 64 bytes each; 4-bit steps 2i and
2i + 1 are the low and the high nibbles of vector i, 64 bytes. Padded weights have the code of zero, padded groups
the scale 0.

`tiled16` (float formats): tiles of 16 rows; within one, for each k, the 16 values.

`rows`: row after row, unpadded; a quantised row is blocks of 128 codes, each followed by its scales. Two 4-bit codes
share a byte, the first in the low nibble.
"""

from __future__ import annotations

import numpy as np

from colibri.errors import UsageError
from colibri.quantize.codes import QuantisedRows
from colibri.quantize.formats import (
    ACTIVATION_BLOCK,
    BLOCK_ALIGNMENT,
    TILE_K,
    TILE_ROWS,
    WeightFormat,
    WeightLayout,
    format_named,
    layout_named,
)

_STEPS = ACTIVATION_BLOCK // TILE_K
_STEP_BYTES = TILE_ROWS * TILE_K


def default_layout(format: WeightFormat | str) -> WeightLayout:
    """The layout of matmul weights in `format`: `tiled16` for float formats, else `tiled16x4`."""
    return layout_named("tiled16" if _format(format).is_float else "tiled16x4")


def packed_size(format: WeightFormat | str, layout: WeightLayout | str, rows: int, k: int) -> int:
    """Bytes of a [rows, k] matrix; raises UsageError where the format does not come in that layout."""
    format, layout = _format(format), _layout(layout)
    _require_supported(format, layout)
    blocks = _ceil(k, ACTIVATION_BLOCK)
    if layout.name == "tiled16x4":
        return _ceil(rows, TILE_ROWS) * blocks * _block_bytes(format)
    if format.is_float:
        padded = rows if layout.name == "rows" else _ceil(rows, TILE_ROWS) * TILE_ROWS
        return padded * k * (format.bits // 8)
    return rows * blocks * _row_block_bytes(format)


def pack(quantised: QuantisedRows, layout: WeightLayout | str | None = None) -> np.ndarray:
    """Return the bytes of `quantised`, uint8 [packed_size], in `layout` (by default that of matmul weights).

    Raises UsageError where the format does not come in that layout.
    """
    format = quantised.format
    layout = default_layout(format) if layout is None else _layout(layout)
    _require_supported(format, layout)
    if layout.name == "tiled16x4":
        return _pack_tiles(quantised)
    if layout.name == "tiled16":
        rows, k = quantised.shape
        padded = np.zeros((_ceil(rows, TILE_ROWS) * TILE_ROWS, k), dtype=format.code_type)
        padded[:rows] = quantised.codes
        return _bytes(padded.reshape(-1, TILE_ROWS, k).transpose(0, 2, 1), format)
    if format.is_float:
        return _bytes(quantised.codes, format)
    return _pack_row_blocks(quantised)


def unpack(
    array: np.ndarray | bytes | memoryview,
    rows: int,
    k: int,
    format: WeightFormat | str,
    layout: WeightLayout | str | None = None,
) -> QuantisedRows:
    """Inverse of `pack`; padding is dropped. Raises UsageError if `array` is not packed_size bytes long."""
    format = _format(format)
    layout = default_layout(format) if layout is None else _layout(layout)
    data = np.frombuffer(array, dtype=np.uint8)
    size = packed_size(format, layout, rows, k)
    if data.size != size:
        raise UsageError(f"{format.name} {layout.name} [{rows}, {k}] takes {size} bytes, got {data.size}")
    if layout.name == "tiled16x4":
        return _unpack_tiles(data, rows, k, format)
    if layout.name == "tiled16":
        values = data.view(format.code_type).reshape(-1, k, TILE_ROWS).transpose(0, 2, 1).reshape(-1, k)
        return QuantisedRows.of_floats(format, values[:rows].copy())
    if format.is_float:
        return QuantisedRows.of_floats(format, data.view(format.code_type).reshape(rows, k).copy())
    return _unpack_row_blocks(data, rows, k, format)


def _pack_tiles(quantised: QuantisedRows) -> np.ndarray:
    format = quantised.format
    codes, scales = _padded(quantised, TILE_ROWS)
    tiles, blocks = codes.shape[0] // TILE_ROWS, codes.shape[1] // ACTIVATION_BLOCK
    steps = codes.view(np.uint8).reshape(tiles, TILE_ROWS, blocks, _STEPS, TILE_K).transpose(0, 2, 3, 1, 4)
    steps = steps.reshape(tiles, blocks, _STEPS, _STEP_BYTES)
    if format.bits == 4:
        steps = steps[:, :, 0::2] | (steps[:, :, 1::2] << np.uint8(4))
    packed = np.zeros((tiles, blocks, _block_bytes(format)), dtype=np.uint8)
    code_bytes, scale_bytes = _code_bytes(format), _scale_bytes(format)
    packed[:, :, :code_bytes] = steps.reshape(tiles, blocks, code_bytes)
    ordered = np.ascontiguousarray(scales.reshape(tiles, TILE_ROWS, blocks, -1).transpose(0, 2, 3, 1))
    packed[:, :, code_bytes : code_bytes + scale_bytes] = ordered.view(np.uint8).reshape(tiles, blocks, scale_bytes)
    return packed.reshape(-1)


def _unpack_tiles(data: np.ndarray, rows: int, k: int, format: WeightFormat) -> QuantisedRows:
    tiles, blocks = _ceil(rows, TILE_ROWS), _ceil(k, ACTIVATION_BLOCK)
    packed = data.reshape(tiles, blocks, _block_bytes(format))
    code_bytes, scale_bytes = _code_bytes(format), _scale_bytes(format)
    steps = packed[:, :, :code_bytes].reshape(tiles, blocks, -1, _STEP_BYTES)
    if format.bits == 4:
        steps = np.stack((steps & np.uint8(15), steps >> np.uint8(4)), axis=3)
    steps = steps.reshape(tiles, blocks, _STEPS, TILE_ROWS, TILE_K).transpose(0, 3, 1, 2, 4)
    codes = steps.reshape(tiles * TILE_ROWS, blocks * ACTIVATION_BLOCK).view(format.code_type)
    scales = np.ascontiguousarray(packed[:, :, code_bytes : code_bytes + scale_bytes]).view("<f2")
    scales = scales.reshape(tiles, blocks, -1, TILE_ROWS).transpose(0, 3, 1, 2)
    return _trimmed(format, codes, scales.reshape(tiles * TILE_ROWS, -1), rows, k)


def _pack_row_blocks(quantised: QuantisedRows) -> np.ndarray:
    codes, scales = _padded(quantised, 1)
    rows, padded_k = codes.shape
    blocks = padded_k // ACTIVATION_BLOCK
    code_part = codes.view(np.uint8)
    if quantised.format.bits == 4:
        code_part = code_part[:, 0::2] | (code_part[:, 1::2] << np.uint8(4))
    code_part = code_part.reshape(rows, blocks, -1)
    return np.concatenate((code_part, scales.view(np.uint8).reshape(rows, blocks, -1)), axis=2).reshape(-1)


def _unpack_row_blocks(data: np.ndarray, rows: int, k: int, format: WeightFormat) -> QuantisedRows:
    packed = data.reshape(rows, _ceil(k, ACTIVATION_BLOCK), _row_block_bytes(format))
    code_bytes = ACTIVATION_BLOCK * format.bits // 8
    codes = packed[:, :, :code_bytes].reshape(rows, -1)
    if format.bits == 4:
        codes = np.stack((codes & np.uint8(15), codes >> np.uint8(4)), axis=2).reshape(rows, -1)
    codes = codes.view(format.code_type)
    scales = np.ascontiguousarray(packed[:, :, code_bytes:]).view("<f2").reshape(rows, -1)
    return _trimmed(format, codes, scales, rows, k)


def _padded(quantised: QuantisedRows, row_multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales padded to whole tiles and blocks, so that every padded weight is exactly 0."""
    format = quantised.format
    rows, k = quantised.shape
    padded_rows = _ceil(rows, row_multiple) * row_multiple
    padded_k = _ceil(k, ACTIVATION_BLOCK) * ACTIVATION_BLOCK
    codes = np.full((padded_rows, padded_k), format.zero, dtype=format.code_type)
    codes[:rows, :k] = quantised.codes
    scales = np.zeros((padded_rows, padded_k // format.group), dtype="<f2")
    scales[:rows, : quantised.scales.shape[1]] = quantised.scales
    return codes, scales


def _trimmed(format: WeightFormat, codes: np.ndarray, scales: np.ndarray, rows: int, k: int) -> QuantisedRows:
    groups = _ceil(k, format.group)
    return QuantisedRows(format, codes[:rows, :k].copy(), scales[:rows, :groups].astype(np.float16))


def _code_bytes(format: WeightFormat) -> int:
    return TILE_ROWS * ACTIVATION_BLOCK * format.bits // 8


def _scale_bytes(format: WeightFormat) -> int:
    return TILE_ROWS * (ACTIVATION_BLOCK // format.group) * 2


def _block_bytes(format: WeightFormat) -> int:
    return _ceil(_code_bytes(format) + _scale_bytes(format), BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


def _row_block_bytes(format: WeightFormat) -> int:
    return ACTIVATION_BLOCK * format.bits // 8 + 2 * (ACTIVATION_BLOCK // format.group)


def _bytes(values: np.ndarray, format: WeightFormat) -> np.ndarray:
    return np.array(values, dtype=format.code_type, order="C").reshape(-1).view(np.uint8)


def _require_supported(format: WeightFormat, layout: WeightLayout) -> None:
    matmul = "tiled16" if format.is_float else "tiled16x4"
    if layout.name not in (matmul, "rows"):
        raise UsageError(f"format {format.name} does not come in layout {layout.name}")


def _format(format: WeightFormat | str) -> WeightFormat:
    return format_named(format) if isinstance(format, str) else format


def _layout(layout: WeightLayout | str) -> WeightLayout:
    return layout_named(layout) if isinstance(layout, str) else layout


def _ceil(value: int, step: int) -> int:
    return -(-value // step)

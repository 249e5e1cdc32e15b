"""Quantised matrices to bytes and back, in the orders the kernels read.

`tiled16x4` (quantised formats): rows are padded to tiles of 16, k to blocks of 128. Tiles ascend, and within a tile
blocks ascend. A block is its codes, its scales (for each group, 16 float16), its zero-points if any (for each group,
16 bytes), then zero bytes up to a multiple of 64. Codes come in 32 steps of 16 rows x 4 k; int8 steps follow one
another, 64 bytes each; 4-bit steps 2i and 2i + 1 share the low and high nibbles of vector i, 64 bytes.

`tiled16` (float formats): tiles of 16 rows; within one, for each k, the 16 values.

`rows`: row after row, unpadded; a quantised row is blocks of 128 codes, each followed by its scales.
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
        padded = np.zeros((_ceil(rows, TILE_ROWS) * TILE_ROWS, k), dtype=quantised.codes.dtype)
        padded[:rows] = quantised.codes
        return _bytes(padded.reshape(-1, TILE_ROWS, k).transpose(0, 2, 1))
    if format.is_float:
        return _bytes(quantised.codes)
    return _pack_row_blocks(quantised)


def unpack(
    array: np.ndarray | bytes, rows: int, k: int, format: WeightFormat | str, layout: WeightLayout | str | None = None
) -> QuantisedRows:
    """Inverse of `pack`; padding is dropped. Raises UsageError if `array` is not packed_size bytes long."""
    format = _format(format)
    layout = default_layout(format) if layout is None else _layout(layout)
    data = np.frombuffer(array, dtype=np.uint8) if isinstance(array, bytes) else array.reshape(-1).view(np.uint8)
    size = packed_size(format, layout, rows, k)
    if data.size != size:
        raise UsageError(f"{format.name} {layout.name} [{rows}, {k}] takes {size} bytes, got {data.size}")
    if layout.name == "tiled16x4":
        return _unpack_tiles(data, rows, k, format)
    if layout.name == "tiled16":
        values = data.view(_float_type(format)).reshape(-1, k, TILE_ROWS).transpose(0, 2, 1)
        return QuantisedRows(format, np.ascontiguousarray(values).reshape(-1, k)[:rows].copy())
    if format.is_float:
        return QuantisedRows(format, data.view(_float_type(format)).reshape(rows, k).copy())
    return _unpack_row_blocks(data, rows, k, format)


def _pack_tiles(quantised: QuantisedRows) -> np.ndarray:
    format = quantised.format
    codes, scales, zeros = _padded(quantised, TILE_ROWS)
    tiles, blocks, groups = _tile_counts(codes, format)
    packed = np.zeros((tiles, blocks, _block_bytes(format)), dtype=np.uint8)
    steps = codes.view(np.uint8).reshape(tiles, TILE_ROWS, blocks, _STEPS, TILE_K).transpose(0, 2, 3, 1, 4)
    steps = np.ascontiguousarray(steps).reshape(tiles, blocks, _STEPS, _STEP_BYTES)
    if format.bits == 4:
        steps = steps[:, :, 0::2] | (steps[:, :, 1::2] << np.uint8(4))
    code_bytes, scale_bytes = _code_bytes(format), groups * TILE_ROWS * 2
    packed[:, :, :code_bytes] = steps.reshape(tiles, blocks, code_bytes)
    packed[:, :, code_bytes : code_bytes + scale_bytes] = _group_major(scales, tiles, blocks, groups).view(np.uint8)
    if zeros is not None:
        start = code_bytes + scale_bytes
        packed[:, :, start : start + groups * TILE_ROWS] = _group_major(zeros, tiles, blocks, groups)
    return packed.reshape(-1)


def _unpack_tiles(data: np.ndarray, rows: int, k: int, format: WeightFormat) -> QuantisedRows:
    tiles, blocks = _ceil(rows, TILE_ROWS), _ceil(k, ACTIVATION_BLOCK)
    groups = ACTIVATION_BLOCK // format.group
    packed = data.reshape(tiles, blocks, _block_bytes(format))
    code_bytes, scale_bytes = _code_bytes(format), groups * TILE_ROWS * 2
    steps = packed[:, :, :code_bytes].reshape(tiles, blocks, -1, _STEP_BYTES)
    if format.bits == 4:
        steps = np.stack((steps & np.uint8(15), steps >> np.uint8(4)), axis=3)
    steps = steps.reshape(tiles, blocks, _STEPS, TILE_ROWS, TILE_K).transpose(0, 3, 1, 2, 4)
    codes = np.ascontiguousarray(steps).reshape(tiles * TILE_ROWS, -1)[:rows, :k]
    scale_part = np.ascontiguousarray(packed[:, :, code_bytes : code_bytes + scale_bytes]).view("<f2")
    scales = _row_major(scale_part, tiles, blocks, groups)
    zeros = None
    if format.zero_points:
        start = code_bytes + scale_bytes
        zeros = _row_major(packed[:, :, start : start + groups * TILE_ROWS], tiles, blocks, groups)
    return _trimmed(format, codes, scales, zeros, rows, k)


def _pack_row_blocks(quantised: QuantisedRows) -> np.ndarray:
    codes, scales, _ = _padded(quantised, 1)
    rows, padded_k = codes.shape
    blocks = padded_k // ACTIVATION_BLOCK
    parts = (
        codes.view(np.uint8).reshape(rows, blocks, ACTIVATION_BLOCK),
        scales.view(np.uint8).reshape(rows, blocks, -1),
    )
    return np.concatenate(parts, axis=2).reshape(-1)


def _unpack_row_blocks(data: np.ndarray, rows: int, k: int, format: WeightFormat) -> QuantisedRows:
    packed = data.reshape(rows, _ceil(k, ACTIVATION_BLOCK), _row_block_bytes(format))
    codes = packed[:, :, :ACTIVATION_BLOCK].reshape(rows, -1)[:, :k]
    scales = np.ascontiguousarray(packed[:, :, ACTIVATION_BLOCK:]).view("<f2").reshape(rows, -1)
    return _trimmed(format, codes, scales, None, rows, k)


def _padded(quantised: QuantisedRows, row_multiple: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes, scales and zero-points padded to whole tiles and blocks, so that every padded weight is exactly 0."""
    format = quantised.format
    assert quantised.scales is not None
    rows, k = quantised.shape
    padded_rows = _ceil(rows, row_multiple) * row_multiple
    padded_k = _ceil(k, ACTIVATION_BLOCK) * ACTIVATION_BLOCK
    groups = quantised.scales.shape[1]
    scales = np.zeros((padded_rows, padded_k // format.group), dtype="<f2")
    scales[:rows, :groups] = quantised.scales
    zeros = None
    codes = np.full((padded_rows, padded_k), format.fixed_zero, dtype=quantised.codes.dtype)
    if quantised.zeros is not None:
        zeros = np.full(scales.shape, format.fixed_zero, dtype=np.uint8)
        zeros[:rows, :groups] = quantised.zeros
        # The end of a partial group shares that group's scale, so its code must be that group's zero-point.
        codes[:] = np.repeat(zeros, format.group, axis=1)
    codes[:rows, :k] = quantised.codes
    return codes, scales, zeros


def _trimmed(
    format: WeightFormat, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, rows: int, k: int
) -> QuantisedRows:
    groups = _ceil(k, format.group)
    return QuantisedRows(
        format,
        np.array(codes, dtype=np.uint8, order="C").view(np.int8 if format.bits == 8 else np.uint8),
        scales[:rows, :groups].astype(np.float16, order="C"),
        None if zeros is None else zeros[:rows, :groups].copy(),
    )


def _group_major(values: np.ndarray, tiles: int, blocks: int, groups: int) -> np.ndarray:
    ordered = values.reshape(tiles, TILE_ROWS, blocks, groups).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(ordered).reshape(tiles, blocks, groups * TILE_ROWS)


def _row_major(values: np.ndarray, tiles: int, blocks: int, groups: int) -> np.ndarray:
    ordered = values.reshape(tiles, blocks, groups, TILE_ROWS).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(ordered).reshape(tiles * TILE_ROWS, blocks * groups)


def _tile_counts(codes: np.ndarray, format: WeightFormat) -> tuple[int, int, int]:
    rows, k = codes.shape
    return rows // TILE_ROWS, k // ACTIVATION_BLOCK, ACTIVATION_BLOCK // format.group


def _code_bytes(format: WeightFormat) -> int:
    return TILE_ROWS * ACTIVATION_BLOCK * format.bits // 8


def _block_bytes(format: WeightFormat) -> int:
    per_group = TILE_ROWS * (3 if format.zero_points else 2)
    used = _code_bytes(format) + ACTIVATION_BLOCK // format.group * per_group
    return _ceil(used, BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


def _row_block_bytes(format: WeightFormat) -> int:
    return ACTIVATION_BLOCK + 2 * (ACTIVATION_BLOCK // format.group)


def _float_type(format: WeightFormat) -> str:
    return {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}[format.name]


def _bytes(values: np.ndarray) -> np.ndarray:
    little = values.astype(values.dtype.newbyteorder("<"), order="C", copy=False)
    return np.array(little, order="C").reshape(-1).view(np.uint8)


def _require_supported(format: WeightFormat, layout: WeightLayout) -> None:
    matmul = "tiled16" if format.is_float else "tiled16x4"
    if layout.name != matmul and not (layout.name == "rows" and format.bits >= 8):
        raise UsageError(f"format {format.name} does not come in layout {layout.name}")


def _format(format: WeightFormat | str) -> WeightFormat:
    return format_named(format) if isinstance(format, str) else format


def _layout(layout: WeightLayout | str) -> WeightLayout:
    return layout_named(layout) if isinstance(layout, str) else layout


def _ceil(value: int, step: int) -> int:
    return -(-value // step)

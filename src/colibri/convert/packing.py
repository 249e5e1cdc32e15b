"""Reads, converts and packs matrices a slice of rows at a time, on several threads, in order and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from colibri.families import Role, Source, TensorSource
from colibri.quantize import (
    QuantisedRows,
    dequantise,
    format_named,
    layout_named,
    pack,
    packed_size,
    quantise,
)

# A slice and the work on it take about four times this much memory.
SLICE_BYTES = 4 << 20
# Slices being converted or waiting to be written: bounds the memory, whatever the number of threads.
MAXIMUM_SLICES = 24
# Tiles have 16 rows, so slices of whole tiles can be packed one by one.
_TILE_ROWS = 16


@dataclass(frozen=True)
class Matrix:
    """One matrix of the file: where it comes from and how it is stored."""

    name: str
    role: Role
    source: Source
    format: str
    layout: str

    @property
    def packed_size(self) -> int:
        """Bytes in the file."""
        return packed_size(self.format, self.layout, self.source.rows, self.source.cols)

    def slices(self) -> list[tuple[int, int]]:
        """Return row ranges of about SLICE_BYTES of float32; they do not depend on the number of threads."""
        rows = max(_TILE_ROWS, SLICE_BYTES // (4 * self.source.cols) // _TILE_ROWS * _TILE_ROWS)
        return [(start, min(start + rows, self.source.rows)) for start in range(0, self.source.rows, rows)]


@dataclass(frozen=True)
class PackedSlice:
    """The bytes of some rows, and the sums of squares of their values and of the errors."""

    data: bytes
    squares: float
    squared_errors: float


def pack_in_order(matrices: Sequence[Matrix], threads: int) -> Generator[PackedSlice, None, None]:
    """Yield the slices of all matrices in order. Close the generator to stop early.

    Raises what reading and quantising raise, naming the tensor.
    """
    jobs = ((matrix, start, stop) for matrix in matrices for start, stop in matrix.slices())
    window = min(2 * threads, MAXIMUM_SLICES)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="colibri-convert")
    waiting: deque[Future[PackedSlice]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(_pack_slice, *job))
            if len(waiting) >= window:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _pack_slice(matrix: Matrix, start: int, stop: int) -> PackedSlice:
    source, format, layout = matrix.source, format_named(matrix.format), layout_named(matrix.layout)
    if isinstance(source, TensorSource) and not format.is_float and source.stored_format == format.name:
        # Copied as they are: a search for scales would find others that are no better.
        quantised = QuantisedRows(format, *source.read_codes(start, stop))
        return PackedSlice(pack(quantised, layout).tobytes(), 0.0, 0.0)
    values = source.read(start, stop)
    quantised = quantise(values, format, name=source.name)
    squares, squared_errors = 0.0, 0.0
    if matrix.format != "f32":
        squares = _sum_of_squares(values)
        squared_errors = _sum_of_squares(dequantise(quantised) - values)
    return PackedSlice(pack(quantised, layout).tobytes(), squares, squared_errors)


def _sum_of_squares(values: np.ndarray) -> float:
    # Each row in float32, the rows in float64: precise enough for a report, without a float64 copy of the slice.
    return float(np.einsum("ij,ij->i", values, values).sum(dtype=np.float64))

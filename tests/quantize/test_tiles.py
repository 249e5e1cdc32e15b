"""Packed layouts: exact byte positions, padding that multiplies to zero, and round trips of odd shapes."""

from __future__ import annotations

import numpy as np
import pytest

from colibri.errors import UsageError
from colibri.quantize import (
    FORMATS,
    QuantisedRows,
    default_layout,
    dequantise,
    format_named,
    pack,
    packed_size,
    quantise,
    unpack,
)

QUANTISED = ["q8_g32", "q4_g32"]
PAIRS = [
    *((format.name, default_layout(format).name) for format in FORMATS),
    *((name, "rows") for name in ("f32", "bf16", "f16", *QUANTISED)),
]


def random_codes(name: str, rows: int, k: int, seed: int = 0) -> QuantisedRows:
    """Any codes and scales, not only those that a search would choose."""
    generator = np.random.default_rng(seed)
    format = format_named(name)
    if format.is_float:
        return quantise(generator.standard_normal((rows, k)).astype(np.float32), name)
    lowest, highest = (-127, 127) if format.bits == 8 else (0, 15)
    codes = generator.integers(lowest, highest, (rows, k), endpoint=True).astype(format.code_type)
    scales = generator.standard_normal((rows, -(-k // format.group))).astype(np.float16)
    return QuantisedRows(format, codes, scales)


@pytest.mark.parametrize(("name", "layout"), PAIRS)
@pytest.mark.parametrize("rows", [1, 4, 15, 16, 17, 33])
@pytest.mark.parametrize("k", [1, 40, 127, 128, 129, 300])
def test_round_trip(name: str, layout: str, rows: int, k: int) -> None:
    source = random_codes(name, rows, k)
    packed = pack(source, layout)
    assert packed.dtype == np.uint8
    assert packed.shape == (packed_size(name, layout, rows, k),)
    result = unpack(packed.tobytes(), rows, k, name, layout)
    assert result.format is source.format
    assert result.codes.dtype == source.codes.dtype
    assert np.array_equal(result.codes, source.codes)
    assert np.array_equal(result.scales, source.scales)


@pytest.mark.parametrize(
    ("name", "layout", "size"),
    [
        ("f32", "tiled16", 32 * 130 * 4),
        ("bf16", "tiled16", 32 * 130 * 2),
        ("f16", "rows", 17 * 130 * 2),
        ("q8_g32", "tiled16x4", 2 * 2 * (2048 + 128)),
        ("q8_g32", "rows", 17 * 2 * (128 + 8)),
        ("q4_g32", "tiled16x4", 2 * 2 * (1024 + 128)),
        ("q4_g32", "rows", 17 * 2 * (64 + 8)),
    ],
)
def test_sizes(name: str, layout: str, size: int) -> None:
    assert packed_size(name, layout, 17, 130) == size


@pytest.mark.parametrize("name", QUANTISED)
def test_every_tiled_byte_is_where_the_kernels_read_it(name: str) -> None:
    rows, k = 20, 300
    source = random_codes(name, rows, k)
    block_bytes = 2176 if name == "q8_g32" else 1152
    packed = pack(source).reshape(2, 3, block_bytes)
    for row in range(rows):
        for column in range(k):
            block = packed[row // 16, column // 128]
            step, inside = divmod(column % 128, 4)
            position = (row % 16) * 4 + inside
            if name == "q8_g32":
                code = int(block[step * 64 + position].view(np.int8))
            else:
                code = (int(block[step // 2 * 64 + position]) >> (4 * (step % 2))) & 15
            assert code == source.codes[row, column]
            group = column % 128 // 32
            start = (2048 if name == "q8_g32" else 1024) + (group * 16 + row % 16) * 2
            assert block[start : start + 2].view("<f2")[0] == source.scales[row, column // 32]


@pytest.mark.parametrize("name", QUANTISED)
def test_padding_is_exactly_zero(name: str) -> None:
    rows, k = 5, 40
    padded = unpack(pack(random_codes(name, rows, k)), 16, 128, name)
    values = dequantise(padded)
    assert not values[rows:].any()
    assert not values[:, k:].any()
    zero = format_named(name).zero
    assert (padded.codes[rows:] == zero).all()
    assert (padded.codes[:, k:] == zero).all()
    assert not padded.scales[rows:].any()
    assert not padded.scales[:, 2:].any()


@pytest.mark.parametrize(("name", "size"), [("f32", 4), ("bf16", 2), ("f16", 2)])
def test_float_tiles_hold_the_16_rows_of_each_k(name: str, size: int) -> None:
    rows, k = 18, 5
    source = random_codes(name, rows, k)
    packed = pack(source).view(source.codes.dtype).reshape(2, k, 16)
    assert packed.itemsize == size
    for row in range(rows):
        assert np.array_equal(packed[row // 16, :, row % 16], source.codes[row])
    assert not packed[1, :, 2:].any()


def test_rows_hold_128_codes_then_their_scales() -> None:
    source = random_codes("q8_g32", 3, 200)
    packed = pack(source, "rows").reshape(3, 2, 136)
    assert np.array_equal(packed[:, 0, :128].view(np.int8), source.codes[:, :128])
    assert np.array_equal(packed[:, 1, :72].view(np.int8), source.codes[:, 128:])
    assert not packed[:, 1, 72:128].any()
    assert np.array_equal(packed[2, 0, 128:].view("<f2"), source.scales[2, :4])
    assert np.array_equal(packed[2, 1, 128:].view("<f2")[:3], source.scales[2, 4:])
    assert not packed[2, 1, 134:].any()


def test_4_bit_rows_hold_two_codes_in_a_byte() -> None:
    source = random_codes("q4_g32", 3, 200)
    packed = pack(source, "rows").reshape(3, 2, 72)
    for column in range(200):
        byte = packed[:, column // 128, column % 128 // 2]
        assert np.array_equal(byte >> 4 if column % 2 else byte & 15, source.codes[:, column])
    assert (packed[:, 1, 36:64] == 0x88).all()
    assert np.array_equal(packed[:, 0, 64:].copy().view("<f2"), source.scales[:, :4])
    assert not packed[:, 1, 70:].any()


def test_negative_zero_and_denormals_survive_float_tiles() -> None:
    values = np.array([[-0.0, 1e-40, 6e-8]], dtype=np.float32)
    for name in ("f32", "bf16", "f16"):
        source = quantise(values, name)
        result = unpack(pack(source), 1, 3, name)
        assert np.array_equal(result.codes.view(np.uint8), source.codes.view(np.uint8))
        assert np.signbit(dequantise(result)[0, 0])


def test_a_matrix_with_fewer_rows_than_a_tile() -> None:
    """A router-like matrix: 4 rows, 40 columns, neither a multiple of a tile nor of a group."""
    values = np.random.default_rng(4).standard_normal((4, 40)).astype(np.float32)
    for format in FORMATS:
        quantised = quantise(values, format)
        assert np.array_equal(dequantise(unpack(pack(quantised), 4, 40, format)), dequantise(quantised))


@pytest.mark.parametrize(("name", "layout"), [("q4_g32", "tiled16"), ("f32", "tiled16x4"), ("q8_g32", "tiled16")])
def test_layouts_that_a_format_does_not_have(name: str, layout: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.*{layout}"):
        packed_size(name, layout, 16, 128)
    with pytest.raises(UsageError, match=f"{name}.*{layout}"):
        pack(random_codes(name, 16, 128), layout)


@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_length_is_an_error_with_both_sizes(change: int) -> None:
    with pytest.raises(UsageError, match=rf"1152.*{1152 + change}"):
        unpack(bytes(1152 + change), 16, 128, "q4_g32")

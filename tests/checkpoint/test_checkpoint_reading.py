"""Reading tensor data: exact values, slices, interrupted reads, files over 4 GiB, many threads."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from colibri.checkpoint import Checkpoint, checkpoint, open_checkpoint, reading
from colibri.errors import CheckpointError, UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from conftest import FolderWriter, TensorWriter


@pytest.fixture
def open_arrays(tmp_path: Path, write_tensors: TensorWriter) -> Callable[[dict[str, np.ndarray]], Checkpoint]:
    def write_and_open(arrays: dict[str, np.ndarray]) -> Checkpoint:
        write_tensors(tmp_path / "model.safetensors", arrays)
        (tmp_path / "config.json").write_text("{}")
        return open_checkpoint(tmp_path)

    return write_and_open


def test_every_bf16_value_is_widened_bit_for_bit(open_arrays: Any) -> None:
    stored = np.arange(65536, dtype=np.uint16)  # All of them: both zeros, denormals, infinities, quiet and other NaNs.
    read = open_arrays({"w": stored.reshape(256, 256)}).read("w")
    assert read.dtype == np.float32 and read.shape == (256, 256)
    expected = [struct.unpack("<I", b"\0\0" + struct.pack("<H", value))[0] for value in range(65536)]
    assert read.reshape(-1).view(np.uint32).tolist() == expected


def test_every_f16_value_is_widened_exactly(tmp_path: Path) -> None:
    stored = np.arange(65536, dtype=np.uint16).view(np.float16)
    save_file({"w": stored}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint(tmp_path) as opened:
        read = opened.read("w")
    for bits, value in enumerate(read.tolist()):
        sign = -1.0 if bits >> 15 else 1.0
        exponent, fraction = bits >> 10 & 31, bits & 1023
        if exponent == 31 and fraction:
            assert value != value
            continue
        expected = (
            float("inf") if exponent == 31 else (fraction + (1024 if exponent else 0)) * 2.0 ** (max(exponent, 1) - 25)
        )
        assert struct.pack("<d", value) == struct.pack("<d", sign * expected)


def test_f32_bits_are_kept(open_arrays: Any) -> None:
    bits = np.array([0, 1 << 31, 1, 0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x007FFFFF], dtype=np.uint32)
    assert open_arrays({"w": bits.view(np.float32)}).read("w").view(np.uint32).tolist() == bits.tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("piece_bytes", [4, 12, 8 << 20])
def test_slices_equal_slices_of_the_whole(
    open_arrays: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any, piece_bytes: int
) -> None:
    monkeypatch.setattr(checkpoint, "BYTES_PER_PIECE", piece_bytes)
    stored = np.random.default_rng(1).integers(0, 30000, (7, 2, 3)).astype(dtype)
    expected = stored if dtype is np.float32 else (stored.astype(np.uint32) << 16).view(np.float32)
    opened = open_arrays({"before": np.ones(5, np.uint16), "w": stored, "after": np.ones(5, np.uint16)})
    for start in range(8):
        np.testing.assert_array_equal(opened.read("w", start), expected[start:])
        for stop in range(start, 8):
            read = opened.read("w", start, stop)
            assert read.shape == (stop - start, 2, 3) and read.flags.c_contiguous and read.flags.writeable
            np.testing.assert_array_equal(read, expected[start:stop])


def test_a_slice_reads_only_its_own_bytes(open_arrays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_arrays({"w": np.zeros((100, 8), np.float32)})
    begin = opened.info("w").file.stat().st_size - 3200
    asked: list[tuple[int, int]] = []
    original = os.preadv

    def recorded(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        asked.append((offset, sum(buffer.nbytes for buffer in buffers)))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(reading.os, "preadv", recorded)
    opened.read("w", 10, 13)
    assert asked == [(begin + 10 * 32, 3 * 32)]


def test_scalars_and_empty_tensors(open_arrays: Any) -> None:
    opened = open_arrays({"scalar": np.float32(2.5).reshape(()), "none": np.zeros((3, 0), np.float32)})
    assert opened.read("scalar").shape == () and opened.read("scalar") == 2.5
    assert opened.read("none").shape == (3, 0) and opened.read("none", 1, 2).shape == (1, 0)
    with pytest.raises(UsageError, match="'scalar'"):
        opened.read("scalar", 0, 1)


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (0, 4), (2, 1), (4, None), (0, -1)])
def test_rows_that_do_not_exist_are_refused(open_arrays: Any, start: int, stop: int | None) -> None:
    with pytest.raises(UsageError, match=r"'w'.*3 rows"):
        open_arrays({"w": np.zeros((3, 2), np.float32)}).read("w", start, stop)


def test_unknown_tensor_and_closed_checkpoint(open_arrays: Any) -> None:
    with open_arrays({"w": np.zeros(3, np.float32)}) as opened:
        opened.read("w")
        assert "w" in opened and "v" not in opened
        for call in (opened.read, opened.info):
            with pytest.raises(CheckpointError, match="no tensor 'v'"):
                call("v")
    opened.close()
    with pytest.raises(UsageError, match="closed"):
        opened.read("w")


@pytest.mark.parametrize("dtype", ["f8", "i8", "i1", "u1", "?"])
def test_other_dtypes_are_listed_but_not_read(tmp_path: Path, dtype: str) -> None:
    save_file({"w": np.zeros(4, dtype)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint(tmp_path) as opened:
        stored = {"f8": "F64", "i8": "I64", "i1": "I8", "u1": "U8", "?": "BOOL"}[dtype]
        assert opened.info("w").dtype == stored
        with pytest.raises(UnsupportedModelError, match=f"'w' has dtype {stored}"):
            opened.read("w")


def test_short_and_interrupted_reads_change_nothing(
    tmp_path: Path, write_sharded: FolderWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = write_sharded(tmp_path)
    original = os.preadv
    calls = {"all": 0, "interrupted": 0}

    def hindered(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls["all"] += 1
        if calls["all"] % 3 == 0:
            calls["interrupted"] += 1
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        return original(descriptor, [buffers[0][: 1 + calls["all"] % 7]], offset)

    monkeypatch.setattr(reading.os, "preadv", hindered)
    with open_checkpoint(tmp_path) as opened:
        assert opened.config["model_type"] == "tiny"
        for name, array in arrays.items():
            np.testing.assert_array_equal(opened.read(name), array)
    assert calls["interrupted"] > 100


def test_one_call_never_asks_for_more_than_the_system_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(100)))
    monkeypatch.setattr(reading, "MAXIMUM_BYTES_PER_CALL", 7)
    asked: list[int] = []
    original = os.preadv

    def recorded(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(buffers[0].nbytes)
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(reading.os, "preadv", recorded)
    descriptor, _ = reading.open_regular_file(path)
    try:
        assert reading.read_exactly(descriptor, 3, 90, path).tobytes() == bytes(range(3, 93))
    finally:
        os.close(descriptor)
    assert max(asked) == 7


def test_a_read_error_names_file_offset_and_counts(open_arrays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_arrays({"w": np.zeros(10, np.float32)})
    path = opened.info("w").file
    begin = path.stat().st_size - 40
    original = os.preadv

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset > begin:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(descriptor, [buffers[0][:12]], offset)

    monkeypatch.setattr(reading.os, "preadv", failing)
    with pytest.raises(CheckpointError) as caught:
        opened.read("w")
    for part in (str(path), f"offset {begin}", "wanted 40", "got 12", os.strerror(errno.EIO)):
        assert part in str(caught.value)


def test_truncation_while_open_is_an_error(open_arrays: Any) -> None:
    opened = open_arrays({"v": np.zeros(10, np.float32), "w": np.zeros(10, np.float32)})
    opened.read("v")
    path = opened.info("w").file
    os.truncate(path, path.stat().st_size - 25)
    with pytest.raises(CheckpointError, match="wanted 40 bytes, got 15; the file is truncated"):
        opened.read("w")


def test_a_file_replaced_after_opening_is_noticed(open_arrays: Any, write_tensors: TensorWriter) -> None:
    opened = open_arrays({"w": np.zeros(10, np.float32)})
    write_tensors(opened.info("w").file, {"other": np.zeros(11, np.float32)})
    with pytest.raises(CheckpointError, match="was changed"):
        opened.read("w")


def test_tensor_beyond_four_gib(tmp_path: Path) -> None:
    far = 9 << 29  # 4.5 GiB
    wanted = np.arange(1, 7, dtype="<f4")
    header = json.dumps(
        {
            "padding": {"dtype": "U8", "shape": [far], "data_offsets": [0, far]},
            "w": {"dtype": "F32", "shape": [3, 2], "data_offsets": [far, far + 24]},
        }
    ).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(far, os.SEEK_CUR)
        file.write(wanted.tobytes())
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint(tmp_path) as opened:
        assert opened.read("w").tolist() == [[1, 2], [3, 4], [5, 6]]
        assert opened.read("w", 2).tolist() == [[5, 6]]


def test_many_threads_share_few_descriptors(
    tmp_path: Path, write_tensors: TensorWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 24
    generator = np.random.default_rng(3)
    arrays = {f"w{i}": generator.standard_normal((50, 4)).astype(np.float32) for i in range(count)}
    for i in range(count):
        write_tensors(tmp_path / f"model-{i + 1:05d}-of-{count:05d}.safetensors", {f"w{i}": arrays[f"w{i}"]})
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(checkpoint, "MAXIMUM_OPEN_FILES", 3)
    monkeypatch.setattr(checkpoint, "BYTES_PER_PIECE", 64)

    live: set[int] = set()
    most = 0
    original_open, original_close = os.open, os.close

    def counting_open(*arguments: Any) -> int:
        nonlocal most
        descriptor = original_open(*arguments)
        live.add(descriptor)
        most = max(most, len(live))
        return descriptor

    def counting_close(descriptor: int) -> None:
        live.discard(descriptor)
        original_close(descriptor)

    with open_checkpoint(tmp_path) as opened:
        monkeypatch.setattr(reading.os, "open", counting_open)
        monkeypatch.setattr(reading.os, "close", counting_close)

        def read_and_compare(task: int) -> bool:
            name = f"w{task * 7 % count}"
            return np.array_equal(opened.read(name, task % 50), arrays[name][task % 50 :])

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read_and_compare, range(600)))
        assert most == 3
    assert not live


def test_closing_during_a_read_lets_it_finish_and_then_frees_the_descriptor(
    open_arrays: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(40, dtype=np.float32)
    opened = open_arrays({"w": array})
    original = os.preadv
    used: list[int] = []

    def closing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        opened.close()
        used.append(descriptor)
        return original(descriptor, [buffers[0][:64]], offset)

    monkeypatch.setattr(reading.os, "preadv", closing)
    np.testing.assert_array_equal(opened.read("w"), array)
    assert len(used) == 3 and len(set(used)) == 1
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(used[0])

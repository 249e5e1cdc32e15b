"""Safetensors headers as hostile input: hand-made attacks, then random damage."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import save_file

from colibri.checkpoint import open_checkpoint
from colibri.checkpoint.safetensors import read_header
from colibri.errors import CheckpointError


def container(header: str | bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    raw = json.dumps(header).encode() if isinstance(header, dict) else header
    raw = raw.encode() if isinstance(raw, str) else raw
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def tensor(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


EIGHT = bytes(8)
GOOD = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'

# name of the attack: (file, what the message must hold)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "0 bytes"),
    "seven bytes": (b"\x02\0\0\0\0\0\0", "7 bytes"),
    "length only, header missing": (container("", length=16), "truncated"),
    "length 2^64-1": (container("{}", length=2**64 - 1), "18446744073709551615"),
    "length over 100 MB": (container("{}", length=100_000_001), "100000001"),
    "length one past the file": (container("{}", length=3), "truncated"),
    "empty header": (container(""), "not valid JSON"),
    "not UTF-8": (container(b'{"a\xff": 1}'), "not UTF-8"),
    "byte order mark": (container(b"\xef\xbb\xbf{}"), "not valid JSON"),
    "not JSON": (container("{'a': 1}"), "not valid JSON"),
    "text after the object": (container("{}{}"), "not valid JSON"),
    "an array": (container("[]"), "not a JSON object"),
    "null": (container("null"), "not a JSON object"),
    "deep nesting": (container("[" * 200_000), "nesting too deep"),
    "number of 5000 digits": (container('{"a": ' + "9" * 5000 + "}"), "number too long"),
    "tensor twice": (container(f'{{"a": {GOOD}, "a": {GOOD}}}', EIGHT), "key 'a' twice"),
    "dtype twice": (container(f'{{"a": {{"dtype": "I8", {GOOD[1:]}}}', EIGHT), "key 'dtype' twice"),
    "metadata not strings": (container({"__metadata__": {"format": 1}}), "__metadata__"),
    "metadata not an object": (container({"__metadata__": ["pt"]}), "__metadata__"),
    "entry not an object": (container({"a": [1]}), "tensor 'a'"),
    "entry without shape": (container({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, EIGHT), "tensor 'a'"),
    "entry with another key": (container({"a": tensor() | {"strides": [1]}}, EIGHT), "tensor 'a'"),
    "unknown dtype": (container({"a": tensor(dtype="F31")}, EIGHT), "unknown dtype 'F31'"),
    "dtype a list": (container({"a": tensor(dtype=["F32"])}, EIGHT), "unknown dtype"),
    "negative dimension": (container({"a": tensor(shape=[-2])}, EIGHT), "tensor 'a' has a shape"),
    "two negative dimensions": (container({"a": tensor(shape=[-2, -1])}, EIGHT), "tensor 'a' has a shape"),
    "fractional dimension": (container({"a": tensor(shape=[2.0])}, EIGHT), "tensor 'a' has a shape"),
    "boolean dimension": (container({"a": tensor(shape=[True, 2])}, EIGHT), "tensor 'a' has a shape"),
    "shape a number": (container({"a": tensor(shape=2)}, EIGHT), "tensor 'a' has a shape"),
    "33 dimensions": (container({"a": tensor(shape=[1] * 32 + [2])}, EIGHT), "tensor 'a' has a shape"),
    "product wraps to 2 in 64 bits": (container({"a": tensor(shape=[2**63 + 1, 2])}, EIGHT), "no memory"),
    "product wraps to 0 in 64 bits": (container({"a": tensor(shape=[2**32, 2**32], offsets=[0, 0])}), "no memory"),
    "zero beside a huge dimension": (container({"a": tensor(shape=[0, 2**62], offsets=[0, 0])}), "no memory"),
    "shape larger than span": (container({"a": tensor(shape=[3])}, EIGHT), "tensor 'a' needs 96 bits"),
    "shape smaller than span": (container({"a": tensor(shape=[1])}, EIGHT), "tensor 'a' needs 32 bits"),
    "half bytes that do not add up": (container({"a": tensor("F4", [15], [0, 8])}, EIGHT), "tensor 'a' needs 60 bits"),
    "begin after end": (container({"a": tensor(offsets=[8, 0])}, EIGHT), "tensor 'a' lies at"),
    "negative begin": (container({"a": tensor(offsets=[-8, 0])}, EIGHT), "tensor 'a' has data_offsets"),
    "three offsets": (container({"a": tensor(offsets=[0, 8, 8])}, EIGHT), "tensor 'a' has data_offsets"),
    "offsets as text": (container({"a": tensor(offsets=["0", "8"])}, EIGHT), "tensor 'a' has data_offsets"),
    "end past the data": (container({"a": tensor()}, bytes(7)), "tensor 'a' lies at"),
    "end near 2^64": (container({"a": tensor(offsets=[2**64 - 8, 2**64])}, EIGHT), "tensor 'a' lies at"),
    "same bytes twice": (container({"a": tensor(), "b": tensor()}, EIGHT), "overlaps"),
    "partial overlap": (container({"a": tensor(), "b": tensor(offsets=[4, 12])}, bytes(12)), "'b' overlaps"),
    "empty tensor inside another": (container({"a": tensor(), "b": tensor("F32", [0], [4, 4])}, EIGHT), "overlaps"),
    "hole before the first": (container({"a": tensor(offsets=[4, 12])}, bytes(12)), "hole of 4"),
    "hole between": (container({"a": tensor(), "b": tensor(offsets=[12, 20])}, bytes(20)), "hole of 4"),
    "trailing bytes": (container({"a": tensor()}, bytes(9)), "1 bytes after"),
    "data without tensors": (container({}, EIGHT), "8 bytes after"),
    "empty name": (container({"": tensor()}, EIGHT), "not printable"),
    "lone surrogate in the name": (container(f'{{"\\ud800": {GOOD}}}', EIGHT), "not printable"),
    "control code in the name": (container(f'{{"\\u001b[2J": {GOOD}}}', EIGHT), "not printable"),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_header_is_refused_by_name(attack: str, tmp_path: Path) -> None:
    content, expected = HOSTILE[attack]
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert str(path) in message
    assert expected in message
    assert "\n" not in message and len(message) < 1000
    message.encode()


def test_long_hostile_names_keep_the_message_short(tmp_path: Path) -> None:
    path = tmp_path / "long.safetensors"
    path.write_bytes(container({"n" * 1_000_000: tensor(dtype="d" * 1_000_000)}, EIGHT))
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert len(str(caught.value)) < 1000


def test_unordered_headers_empty_tensors_and_metadata_load(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    header = {
        "late": tensor("I8", [4], [8, 12]),
        "__metadata__": {"format": "pt"},
        "empty at the end": tensor("F64", [3, 0, 5], [12, 12]),
        "empty at a border": tensor("BF16", [0], [8, 8]),
        "early": tensor("F16", [2, 2], [0, 8]),
        "half bytes": tensor("F4", [2, 3], [12, 15]),
        "scalar": tensor("U8", [], [15, 16]),
    }
    content = container(header, bytes(16))
    path.write_bytes(content)
    read = read_header(path)
    begin = len(content) - 16
    assert read.metadata == {"format": "pt"}
    assert {name: (span.begin - begin, span.end - begin) for name, span in read.tensors.items()} == {
        name: tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__"
    }
    assert read.tensors["early"].shape == (2, 2) and read.tensors["scalar"].shape == ()


@pytest.mark.parametrize("content", [container({}), container("{}   "), container("  {} ")])
def test_file_without_tensors_loads(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "none.safetensors"
    path.write_bytes(content)
    assert read_header(path).tensors == {}


def test_agrees_with_the_safetensors_library(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    arrays = {
        f"{dtype}.{rank}": np.ones((2, 3, 1)[:rank], dtype)
        for dtype in ("f4", "f2", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?", "c8")
        for rank in range(4)
    }
    save_file(arrays, path, {"format": "np"})
    tensors = read_header(path).tensors
    whole = path.read_bytes()
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape
        assert whole[tensors[name].begin : tensors[name].end] == array.tobytes()


def test_agrees_with_the_safetensors_library_on_the_demo_model() -> None:
    for path in sorted((Path(__file__).parents[2] / "demo").glob("model-*.safetensors")):
        whole = path.read_bytes()
        expected = {
            name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in deserialize(whole)
        }
        assert len(expected) > 100
        spans = read_header(path).tensors
        assert {name: (s.dtype, s.shape, whole[s.begin : s.end]) for name, s in spans.items()} == expected


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_what_is_not_a_regular_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(path)


def damaged(content: bytes, generator: random.Random, header_end: int) -> bytes:
    """Change one thing in the header, or cut the file."""
    kind = generator.randrange(7)
    position = generator.randrange(header_end)
    before, here, after = content[:position], content[position], content[position + 1 :]
    if kind == 0:
        return before + bytes([here ^ 1 << generator.randrange(8)]) + after
    if kind == 1:
        return before + bytes([generator.randrange(256)]) + after
    if kind == 2:
        return before + content[position + generator.randrange(1, 9) :]
    if kind == 3:
        inserted = [b"9", b"0", b"-", b"e9", b'"', b"{", b"[", b"]", b"\\u", b"\xff", b" ", b"1" * 30]
        return before + generator.choice(inserted) + content[position:]
    if kind == 4:
        start = generator.randrange(header_end)
        return before + content[start : start + generator.randrange(1, 64)] + content[position:]
    if kind == 5:
        return content[: generator.randrange(len(content))]
    digits = [i for i in range(8, header_end) if content[i : i + 1].isdigit()]
    chosen = generator.choice(digits or [position])
    return content[:chosen] + b"%d" % generator.randrange(10) + content[chosen + 1 :]


def repeatedly_damaged(content: bytes, generator: random.Random) -> bytes:
    for _ in range(generator.choice([1, 1, 1, 2, 4])):
        content = damaged(content, generator, max(8, len(content) - 26)) if len(content) > 8 else content
    if len(content) > 34 and generator.random() < 0.7:
        # Repair the length, so that damage reaches the JSON and the spans.
        content = (len(content) - 34).to_bytes(8, "little") + content[8:]
    return content


def misdescribed(header: dict[str, Any], generator: random.Random) -> bytes:
    """Keep the JSON sound and change what one tensor claims."""
    changed = json.loads(json.dumps(header))
    entry = changed[generator.choice("abcd")]
    numbers = [-1, 0, 1, 2, 3, 4, 6, 12, 24, 26, 27, 2**31, 2**32, 2**63, 2**64 + 1, 1.5, True, None, "2"]
    field = generator.choice(["dtype", "shape", "shape", "data_offsets", "data_offsets"])
    if field == "dtype":
        entry[field] = generator.choice(["F32", "F16", "BF16", "U16", "I32", "F64", "f32", "", 4, None])
    elif entry[field] and generator.random() < 0.8:
        entry[field][generator.randrange(len(entry[field]))] = generator.choice(numbers)
    else:
        entry[field] = [generator.choice(numbers) for _ in range(generator.randrange(4))]
    return container(changed, bytes(range(26)))


def test_random_damage_gives_an_error_or_a_sound_file(tmp_path: Path) -> None:
    generator = random.Random(20)
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    header = {
        "__metadata__": {"format": "pt"},
        "a": tensor("BF16", [2, 3], [0, 12]),
        "b": tensor("F32", [3], [12, 24]),
        "c": tensor("F16", [], [24, 26]),
        "d": tensor("F32", [0, 4], [26, 26]),
    }
    valid = container(header, bytes(range(26)))
    outcomes = {"file refused": 0, "tensor refused": 0, "loaded": 0}
    for round_number in range(2000):
        content = misdescribed(header, generator) if round_number % 2 else repeatedly_damaged(valid, generator)
        path.write_bytes(content)
        started = time.process_time()
        try:
            with open_checkpoint(tmp_path) as checkpoint:
                size = 0
                for name in checkpoint.names():
                    info = checkpoint.info(name)
                    if info.dtype in ("F32", "F16", "BF16"):
                        size += checkpoint.read(name).size
                assert size <= 13
            outcomes["loaded"] += 1
        except CheckpointError as error:
            assert str(tmp_path) in str(error)
            outcomes["tensor refused" if "tensor '" in str(error) else "file refused"] += 1
        assert time.process_time() - started < 1
    # Damage must reach every stage, or the test would only exercise the JSON parser.
    assert outcomes["file refused"] > 300 and outcomes["tensor refused"] > 500 and outcomes["loaded"] > 50, outcomes

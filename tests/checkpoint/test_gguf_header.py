"""Headers of GGUF files as hostile input."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from checkpoint.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    FLOAT32,
    INT32,
    Q4_0,
    Q8_0,
    STRING,
    UINT8,
    UINT32,
    UINT64,
    image,
    key,
    tensor,
    text,
)

from colibri.checkpoint import open_checkpoint
from colibri.checkpoint.gguf_header import read_gguf_header
from colibri.errors import CheckpointError, ColibriError, UnsupportedModelError

HUGE = 1 << 60
NAME = key("general.name", STRING, "x")
ONE = tensor("w", [8], F32, 0)


def array(element: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", element, count) + data


DAMAGED = {
    "empty": (b"", "is not a GGUF file"),
    "short": (b"GGUF\x03", "is not a GGUF file"),
    "magic": (image(magic=b"GGML"), "is not a GGUF file"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "number of tensors"),
    "tensor count": (image(counts=(1 << 40, 0)), f"declares {1 << 40} tensors"),
    "tensor count near 2^64": (image(counts=(2**64 - 1, 0)), "declares 18446744073709551615 tensors"),
    "tensor count of a short file": (image(counts=(5000, 0)), "5000 tensors, but has only"),
    "key count near 2^64": (image(counts=(0, 2**64 - 1)), "declares 18446744073709551615 metadata keys"),
    "key count of a short file": (image(counts=(0, 60000)), "60000 metadata keys, but has only"),
    "key length": (image([struct.pack("<Q", HUGE) + bytes(40)]), "metadata key 0 has"),
    "key length past the end": (image([struct.pack("<Q", 60000) + bytes(40)]), "needs 60000 bytes"),
    "key without text": (image([key("", UINT8, 1)]), "is empty or not printable"),
    "key with control codes": (image([key("a\nb", UINT8, 1)]), "is empty or not printable"),
    "key not UTF-8": (image([key(b"\xff\xfe", UINT8, 1)]), "is not UTF-8"),
    "key twice": (image([NAME, NAME]), "'general.name' twice"),
    "value type": (image([key("a", 13, bytes(8))]), "unknown value type 13"),
    "string length": (image([key("a", STRING, struct.pack("<Q", HUGE) + bytes(64))]), "'a' at byte"),
    "string length near 2^64": (image([key("a", STRING, struct.pack("<Q", 2**64 - 1) + bytes(64))]), "'a' at byte"),
    "array length": (image([key("a", ARRAY, array(UINT8, HUGE) + bytes(64))]), f"needs {HUGE} bytes"),
    "array length times size wraps": (image([key("a", ARRAY, array(UINT64, 1 << 61) + bytes(64))]), "needs"),
    "array of strings length": (image([key("a", ARRAY, array(STRING, HUGE) + bytes(64))]), "needs"),
    "array of strings with a long one": (
        image([key("a", ARRAY, array(STRING, 2, text("b") + struct.pack("<Q", HUGE)) + bytes(64))]),
        "needs",
    ),
    "nested array": (image([key("a", ARRAY, array(ARRAY, 1, array(UINT8, 1)) + bytes(64))]), "array of arrays"),
    "element type": (image([key("a", ARRAY, array(99, 1) + bytes(64))]), "unknown value type 99"),
    "value cut off": (image([key("a", UINT64, b"1234")], alignment=1), "needs 8 bytes"),
    "alignment 0": (image([key("general.alignment", UINT32, 0)]), "general.alignment = 0"),
    "alignment 4": (image([key("general.alignment", UINT32, 4)]), "general.alignment = 4"),
    "alignment 48": (image([key("general.alignment", UINT32, 48)]), "general.alignment = 48"),
    "alignment 2^30": (image([key("general.alignment", UINT32, 1 << 30)]), "general.alignment"),
    "alignment as text": (image([key("general.alignment", STRING, "32")]), "general.alignment is not a whole"),
    "alignment as float": (image([key("general.alignment", FLOAT32, 32.0)]), "general.alignment is not a whole"),
    "alignment as array": (
        image([key("general.alignment", ARRAY, array(UINT32, 1, bytes(4)))]),
        "general.alignment is not a whole",
    ),
    "alignment negative": (image([key("general.alignment", INT32, -32)]), "general.alignment is not a whole"),
    "alignment neither true nor false": (image([key("general.alignment", BOOL, 2)]), "neither true nor false"),
    "no dimensions": (image([], [tensor("w", [], F32, 0)], bytes(64)), "has 0 dimensions"),
    "five dimensions": (image([], [tensor("w", [1] * 5, F32, 0)], bytes(64)), "has 5 dimensions"),
    "2^32 - 1 dimensions": (image([], [tensor("w", [1], F32, 0, 2**32 - 1)], bytes(64)), "dimensions"),
    "dimension 0": (image([], [tensor("w", [0], F32, 0)], bytes(64)), "a dimension of 0"),
    "dimensions wrap to 0": (image([], [tensor("w", [1 << 32, 1 << 32], F32, 0)], bytes(64)), "needs 7378"),
    "dimensions wrap to a little": (
        image([], [tensor("w", [(1 << 42) + 1, 1 << 22], F32, 0)], bytes(64)),
        "but the file ends",
    ),
    "four largest dimensions": (image([], [tensor("w", [2**64 - 1] * 4, F32, 0)], bytes(64)), "but the file ends"),
    "rows of part of a block": (image([], [tensor("w", [33, 2], Q8_0, 0)], bytes(256)), "not a multiple of the 32"),
    "tensor name length": (image([], [struct.pack("<Q", HUGE) + bytes(64)]), "the name of tensor 0 has"),
    "tensor name empty": (image([], [tensor("", [8], F32, 0)], bytes(64)), "empty or not printable"),
    "tensor twice": (image([], [ONE, tensor("w", [8], F32, 32)], bytes(64)), "'w' twice"),
    "offset not aligned": (image([], [tensor("w", [4], F32, 16)], bytes(64)), "not a multiple of the alignment 32"),
    "offset past the end": (image([], [tensor("w", [8], F32, 64)], bytes(64)), "but the file ends"),
    "offset near 2^64": (image([], [tensor("w", [8], F32, 2**64 - 32)], bytes(64)), "but the file ends"),
    "size past the end": (image([], [tensor("w", [32, 4], Q4_0, 0)], bytes(64)), "but the file ends"),
    "overlap": (image([], [tensor("v", [16], F32, 0), tensor("w", [8], F32, 32)], bytes(64)), "'w' overlaps"),
    "same place": (image([], [tensor("v", [8], F32, 0), tensor("w", [8], F32, 0)], bytes(64)), "overlaps"),
    "descriptions cut off": (image([], [ONE, ONE[:20]], counts=(2, 0), alignment=1), "is truncated or damaged"),
}
UNSUPPORTED = {
    "version 1": (image(version=1), "of version 1"),
    "version 4": (image(version=4), "of version 4; versions 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "part of several": (image([key("split.count", UINT32, 2), key("split.no", UINT32, 0)]), "one of 2 parts"),
    "Q4_K": (image([], [tensor("w", [256], 12, 0)], bytes(144)), "1 of Q4_K"),
    "Q6_K": (image([], [tensor("w", [256], 14, 0)], bytes(210)), "1 of Q6_K"),
    "MXFP4": (image([], [tensor("w", [32], 39, 0)], bytes(32)), "1 of MXFP4"),
    "IQ4_XS": (image([], [ONE, tensor("v", [256], 23, 32)], bytes(200)), r"1 of IQ4_XS \(the first is 'v'\)"),
    "a type from the future": (image([], [tensor("w", [32], 999, 0)], bytes(64)), "unknown tensor type 999"),
}


def refusal(path: Path, data: bytes, kind: type[ColibriError]) -> str:
    path.write_bytes(data)
    started = time.process_time()
    with pytest.raises(kind) as caught:
        read_gguf_header(path)
    assert time.process_time() - started < 1
    assert type(caught.value) is kind
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 1000
    return message


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(tmp_path: Path, case: str) -> None:
    data, expected = DAMAGED[case]
    assert expected in refusal(tmp_path / "m.gguf", data, CheckpointError)


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_other_kinds_of_files_are_refused_by_name(tmp_path: Path, case: str) -> None:
    data, expected = UNSUPPORTED[case]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=expected):
        open_checkpoint(tmp_path / "m.gguf")


def whole_file() -> bytes:
    keys = [
        key("general.architecture", STRING, "qwen3moe"),
        key("general.alignment", UINT32, 64),
        key("a.flag", BOOL, 1),
        key("a.numbers", ARRAY, array(INT32, 3, bytes(12))),
        key("a.texts", ARRAY, array(STRING, 3, text("one") + text("") + text("three"))),
    ]
    tensors = [tensor("v", [64, 2, 3], Q8_0, 448), tensor("w", [32, 2], F32, 0), tensor("x", [32], Q4_0, 256)]
    return image(keys, tensors, bytes(448 + 408), alignment=64)


@pytest.mark.parametrize("version", [2, 3])
def test_a_whole_file_is_read(tmp_path: Path, version: int) -> None:
    data = bytearray(whole_file())
    data[4] = version
    (tmp_path / "m.gguf").write_bytes(data)
    header = read_gguf_header(tmp_path / "m.gguf")
    begin = len(data) - 856
    assert {t.name: (t.type, t.shape, t.begin - begin, t.end - begin) for t in header.tensors.values()} == {
        "v": ("Q8_0", (3, 2, 64), 448, 856),
        "w": ("F32", (2, 32), 0, 256),
        "x": ("Q4_0", (32,), 256, 274),
    }
    assert header.metadata["a.texts"].count == 3
    assert header.file_size == len(data)


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    data = whole_file()
    path = tmp_path / "m.gguf"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            read_gguf_header(path)


def test_mutations_never_do_worse_than_a_named_error(tmp_path: Path) -> None:
    data = whole_file()
    header_size = len(data) - 856
    chance, outcomes = random.Random(48), Counter()
    path = tmp_path / "m.gguf"
    started = time.monotonic()
    for _ in range(2000):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(header_size)
            match chance.randrange(4):
                case 0:
                    damaged[at] = chance.randrange(256)
                case 1:
                    damaged[at] ^= 1 << chance.randrange(8)
                case 2:
                    number = chance.choice((0, 1, 0xFFFFFFFF, 1 << 31, 1 << 62, 2**64 - 1))
                    damaged[at : at + 8] = struct.pack("<Q", number)
                case _:
                    del damaged[at : at + chance.randint(1, 16)]
        path.write_bytes(damaged)
        try:
            with open_checkpoint(path):
                pass
        except ColibriError as error:
            message = str(error)
        outcomes["tensor" if "tensor" in message else "metadata"] += 1
        assert str(path) in message
    # Damage must reach every stage, and none may be slow.
    assert min(outcomes.values()) > 200, outcomes
    assert time.monotonic() - started < 60


_OPEN = """
import sys, time
from colibri.checkpoint import open_checkpoint
from colibri.errors import ColibriError
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
for path in sys.argv[1:]:
    began = time.process_time()
    try:
        open_checkpoint(path)
    except ColibriError as error:
        print(time.process_time() - began, peak(), error)
"""


def test_a_large_file_with_a_hostile_header_costs_neither_time_nor_memory(tmp_path: Path) -> None:
    """Lengths that the file's size allows, in a sparse file of 20 GiB."""
    size = 20 << 30
    heads = {
        "key": image([struct.pack("<Q", 16 << 30)]),
        "string": image([key("general.architecture", STRING, struct.pack("<Q", 16 << 30))]),
        "array": image([key("qwen3moe.block_count", ARRAY, array(UINT8, 16 << 30))]),
        "strings": image([key("tokenizer.ggml.tokens", ARRAY, array(STRING, 1 << 30))]),
        "many strings": image([key("tokenizer.ggml.tokens", ARRAY, array(STRING, 2_000_000))]),
        "keys": image(counts=(0, 1 << 24)),
        "tensors": image(counts=(1 << 24, 0)),
        "experts": image(
            [
                key("general.architecture", STRING, "qwen3moe"),
                *(key(f"qwen3moe.{name}", UINT32, 1) for name in ("attention.head_count", "context_length")),
                *(key(f"qwen3moe.{name}", UINT32, 2) for name in ("embedding_length", "block_count", "expert_count")),
                key("qwen3moe.attention.layer_norm_rms_epsilon", FLOAT32, 1e-6),
            ],
            [
                tensor("token_embd.weight", [2, 8], F32, 0),
                tensor("blk.0.ffn_up_exps.weight", [1, 1, 1 << 30], F32, 64),
            ],
        ),
    }
    paths = []
    for name, head in heads.items():
        paths.append(tmp_path / f"{name}.gguf")
        paths[-1].write_bytes(head)
        os.truncate(paths[-1], size)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _OPEN, *map(str, paths)]
    lines = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.splitlines()
    assert len(lines) == len(paths)
    for line, path in zip(lines, paths, strict=True):
        seconds, peak_kib, message = line.split(" ", 2)
        assert float(seconds) < 2, line
        assert int(peak_kib) < 100 << 10, line
        assert str(path) in message


def test_a_directory_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").mkdir()
    with pytest.raises(CheckpointError, match="has no weights"):
        open_checkpoint(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"gone\.gguf cannot be opened"):
        open_checkpoint(tmp_path / "gone.gguf")


def test_a_file_is_known_by_its_content_too(tmp_path: Path) -> None:
    (tmp_path / "sha256-0123").write_bytes(image(version=1))
    with pytest.raises(UnsupportedModelError, match="of version 1"):
        open_checkpoint(tmp_path / "sha256-0123")

"""Thousands of damaged files: the core refuses or accepts each, and keeps its promises."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from fuzz.harness import SANITIZE, Outcome, build, run
from fuzz.image import Image
from fuzz.mutate import Mutator
from fuzz.tiny_model import tiny_model

FILES = int(os.environ.get("COLIBRI_FUZZ", "500"))
BATCH = 250
OK, IO, BAD_FILE, UNSUPPORTED, OUT_OF_MEMORY = 0, 2, 3, 4, 5


@pytest.fixture(scope="module")
def fuzz_open(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fuzz"), ["-O1", *SANITIZE])


@pytest.fixture(scope="module")
def model() -> bytes:
    return tiny_model()


def test_damaged_files(fuzz_open: Path, model: bytes) -> None:
    mutator = Mutator(model)
    outcomes: list[Outcome] = []
    repaired = 0
    for start in range(0, FILES, BATCH):
        mutations = [mutator.mutate(seed) for seed in range(start, min(start + BATCH, FILES))]
        repaired += sum(mutation.repaired for mutation in mutations)
        outcomes += run(fuzz_open, (mutation.data for mutation in mutations))
    assert len(outcomes) == FILES
    statuses = Counter(outcome.status for outcome in outcomes)
    deep = sum("checksum" not in o.message and "not a .cbi" not in o.message for o in outcomes)
    print(f"{FILES} files, {repaired} with repaired checksums, {deep} past them, statuses {dict(statuses)}")
    assert repaired >= 0.8 * FILES
    assert deep >= 0.75 * FILES
    assert set(statuses) <= {OK, IO, BAD_FILE, UNSUPPORTED}
    assert statuses[BAD_FILE] > FILES / 2


@pytest.mark.parametrize("alignment", [64, 4096, 65536])
def test_valid_file(fuzz_open: Path, alignment: int) -> None:
    assert run(fuzz_open, [tiny_model(alignment)]) == [Outcome(OK, "")]


def test_short_and_interrupted_reads(fuzz_open: Path, model: bytes) -> None:
    assert run(fuzz_open, [model], "short-reads", "1") == [Outcome(OK, "")]


def test_every_allocation_failing(fuzz_open: Path, model: bytes) -> None:
    number = 0
    while True:
        number += 1
        (outcome,) = run(fuzz_open, [model], "fail-allocation", str(number))
        if outcome.status == OK:
            break
        assert outcome.status == OUT_OF_MEMORY
        assert "not enough memory" in outcome.message
    assert number > 15


def test_file_cut_while_in_use(fuzz_open: Path, model: bytes) -> None:
    for end in (100, 4000, len(model) - 10):
        (outcome,) = run(fuzz_open, [model], "end-at", str(end))
        assert outcome.status == IO
        assert "the file ends there, it was cut while in use" in outcome.message


def test_read_error_names_file_offset_and_amounts(fuzz_open: Path, model: bytes) -> None:
    (outcome,) = run(fuzz_open, [model], "fail-at", "300")
    assert outcome.status == IO
    assert outcome.message.startswith("/proc/self/fd/")
    assert "reading 3264 bytes at offset 128 gave only 0: Input/output error" in outcome.message


def test_offsets_beyond_4_gib(fuzz_open: Path, model: bytes, tmp_path: Path) -> None:
    """The tensors lie 4.5 GiB into a sparse file."""
    far = 9 << 29
    image = Image(model)
    start, size = image.section("tensor_data")
    image.set("section.tensor_data.offset", start + far)
    for name in image.fields:
        if re.fullmatch(r"tensor\.\d+\.offset", name):
            image.set(name, image.get(name) + far)
    image.set("header.file_size", start + far + size)
    image.repair()
    path = tmp_path / "far.cbi"
    with path.open("wb") as file:
        file.write(image.data)
        file.seek(start + far)
        file.write(model[start : start + size])
    assert paths_outcome(fuzz_open, path) == "0 \n"


def paths_outcome(fuzz_open: Path, path: Path) -> str:
    done = subprocess.run([fuzz_open, path], capture_output=True, timeout=20, check=True)
    return done.stdout.decode()


def test_paths_that_are_no_model(fuzz_open: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.cbi"
    os.mkfifo(pipe)
    empty = tmp_path / "empty.cbi"
    empty.touch()
    text = tmp_path / "text.cbi"
    text.write_text("hello")
    long = tmp_path / ("d" * 200) / ("f" * 200)
    for path, status, part in [
        (tmp_path / "missing.cbi", IO, "No such file or directory"),
        (tmp_path, IO, "is a directory"),
        (pipe, IO, "is not a regular file"),
        (empty, BAD_FILE, "is empty"),
        (text, BAD_FILE, "is not a .cbi file"),
        (long, IO, "cannot be opened"),
    ]:
        line = paths_outcome(fuzz_open, path)
        assert line.startswith(f"{status} "), line
        assert part in line
        assert path.name in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(fuzz_open: Path, model: bytes, tmp_path: Path) -> None:
    path = tmp_path / "secret.cbi"
    path.write_bytes(model)
    path.chmod(0)
    assert "Permission denied" in paths_outcome(fuzz_open, path)

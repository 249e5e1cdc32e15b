"""Builds tests/fuzz/fuzz_open.c with the reader's sources and feeds it files."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [f"csrc/{folder}/{name}" for folder, name in (("core", "*.c"), ("file", "*.c"), ("experts", "*.c"))]
WRAPPED = ("pread", "malloc", "calloc", "realloc")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


@dataclass(frozen=True)
class Outcome:
    """What the core said of one file: a colibri_status and its message."""

    status: int
    message: str


def build(folder: Path, flags: Sequence[str]) -> Path:
    """Compiles fuzz_open into `folder`; skips the test where there is no gcc."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is needed to build fuzz_open")
    program = folder / "fuzz_open"
    files = [str(path) for pattern in SOURCES for path in sorted(ROOT.glob(pattern))]
    command = [compiler, "-std=c11", "-D_GNU_SOURCE", "-g", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", *flags]
    command += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/include'}", str(ROOT / "tests/fuzz/fuzz_open.c"), *files]
    command += [f"-Wl,--wrap={name}" for name in WRAPPED] + ["-pthread", "-o", str(program)]
    subprocess.run(command, check=True, cwd=folder)
    return program


def run(program: Path, files: Iterable[bytes], *options: str) -> list[Outcome]:
    """Streams the files through the program; fails the test if it reports a broken promise."""
    stream = b"".join(struct.pack("<Q", len(data)) + data for data in files)
    done = subprocess.run([program, *options], input=stream, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    lines = done.stdout.decode(errors="replace").splitlines()
    return [Outcome(int(status), message) for status, _, message in (line.partition(" ") for line in lines)]

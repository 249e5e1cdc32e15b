"""The whole benchmark on the tiny shape, without peers."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf")

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / "run.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_one_round_of_the_tiny_shape(tmp_path: Path):
    output = tmp_path / "tiny.csv"
    done = run(
        "--shape", "tiny", "--rounds", 1, "--threads", 1, "--only", "load,q4_0,ops", "--output", output,
        "--models", tmp_path / "models", "--llama-python", "/no/such/python",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with output.open() as file:
        rows = list(csv.DictReader(file))
    found = {(row["section"], row["measure"]): float(row["value"]) for row in rows if row["round"] == "1"}
    for measure in (
        "prompt 64", "prompt 256", "prompt 1024", "first token after 256", "decode after 64", "decode after 256",
        "decode after 1024", "batch 4 decode", "batch 8 decode", "step p50", "step p99", "experts of prompt 256",
    ):  # fmt: skip
        assert found["q4_0", measure] > 0, measure
    for measure in ("open, warm", "open + 16 tokens, warm", "peak RSS, prompt of 256"):
        assert found["load", measure] > 0, measure
    assert 0 < found["q4_0", "decode after 256, share of bandwidth"] <= 1
    assert found["q4_0", "batch 8 decode"] > found["q4_0", "decode after 64"] / 8
    assert found["ops", "router"] > 0 and found["ops", "matmul f32"] > 0
    notes = {(row["section"], row["engine"]): row["note"] for row in rows if row["round"] == "note"}
    assert notes["q4_0", "llama.cpp"] == "/no/such/python cannot be started: No such file or directory"
    assert notes["q4_0", "ik_llama.cpp"] == "not run: no interpreter; give --ik-python"
    assert "== q4_0" in done.stdout and str(output) in done.stdout


def test_an_unknown_section_is_refused():
    done = run("--only", "q4_0,speed")
    assert done.returncode == 2
    assert "--only: speed is unknown, choose from load, q4_0" in done.stderr

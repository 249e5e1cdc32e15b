"""Runs `colibri` as a user does, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEMO_FOLDER = Path(__file__).parents[2] / "demo"
COMMAND = [sys.executable, "-m", "colibri"]
# What is set where the tests run must not decide them.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("COLIBRI_")}
# Hundreds of starts, which need not compile every module each time.
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)
ENVIRONMENT["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "colibri-tests-bytecode")


def colibri(
    *arguments: str | Path, stdin: str | bytes = b"", env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "input": data, "timeout": 60} | options
    done = subprocess.run([*COMMAND, *arguments], env=ENVIRONMENT | dict(env or {}), check=False, **options)
    text = [None if output is None else output.decode() for output in (done.stdout, done.stderr)]
    return subprocess.CompletedProcess(done.args, done.returncode, *text)


def assert_fails(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Check that it said what is wrong in exactly one line, and nothing else."""
    assert done.stderr.endswith("\n"), done
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("colibri: ")
    for word in words:
        assert word in done.stderr, done.stderr
    assert not done.stdout
    assert done.returncode == code

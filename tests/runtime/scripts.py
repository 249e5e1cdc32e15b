"""Runs Python code in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path


def run_script(code: str, *arguments: str | Path, timeout: float = 60) -> str:
    """What the script printed; a failure or a hang of the script is one of the test."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout

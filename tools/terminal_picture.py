#!/usr/bin/env python3
"""Draw docs/images/terminal.svg: real commands and their real output, as a terminal shows them.

terminal_picture.py [--output docs/images/terminal.svg]
"""

from __future__ import annotations

import argparse
import io
import pathlib
import shlex
import subprocess
import sys

from rich.console import Console
from rich.text import Text

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMANDS = [
    """colibri run --chat 'Define "harbor".'""",
    """colibri run 'And the LORD spake unto Moses,' --max-tokens 48 --seed 7""",
    """colibri run 'import os' --max-tokens 40 --temperature 0 --statistics""",
]
COLUMNS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs" / "images" / "terminal.svg")
    arguments = parser.parse_args()
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for command in COMMANDS:
        words = shlex.split(command)
        done = subprocess.run(
            [sys.executable, "-m", *words],
            capture_output=True,
            text=True,
            check=True,
            env=None,
        )
        console.print(Text(f"$ {command}", style="bold"))
        # The prompt is not echoed by `run`; statistics go to stderr, after the text.
        console.print(Text(done.stdout.rstrip() + "\n"))
        if done.stderr.strip():
            console.print(Text("\n".join(done.stderr.splitlines()[:14]) + "\n", style="dim"))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(arguments.output), title="colibri")
    print("wrote", arguments.output)


if __name__ == "__main__":
    main()

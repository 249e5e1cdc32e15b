#!/usr/bin/env python3
"""Write docs/cli.md: the --help text of every command, so that the page cannot disagree with it.

cli_page.py            write the page
cli_page.py --check    exit 1 if it is out of date
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "cli.md"
COMMANDS = ["", "convert", "run", "chat", "inspect", "validate", "plan", "perplexity", "bench"]


def help_text(command: str) -> str:
    """What `colibri COMMAND --help` prints on a terminal of 100 columns."""
    environment = os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    words = [sys.executable, "-m", "colibri", *command.split(), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def page() -> str:
    parts = ["# The command line", "", "Written by `tools/cli_page.py` from `--help`.", ""]
    for command in COMMANDS:
        parts += [f"## colibri {command}".rstrip(), "", "```", help_text(command), "```", ""]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    text = page()
    if parser.parse_args().check:
        if not PAGE.exists() or PAGE.read_text() != text:
            sys.exit("docs/cli.md is out of date: run tools/cli_page.py")
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()

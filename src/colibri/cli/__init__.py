"""The `colibri` command: thin, one file for each group of commands."""

from __future__ import annotations

import os
import sys

import click

from colibri.errors import ColibriError


def main() -> None:
    """Run the command line; every expected failure is one line on stderr and an exit code."""
    from colibri.cli.app import app

    try:
        code = app(standalone_mode=False)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "colibri"
        code = _fail(f"{command}: {error.format_message()} (see {command} --help)", 2)
    except click.exceptions.Exit as exit_:
        code = exit_.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = _fail("interrupted", 130)
    except ColibriError as error:
        code = _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader of our output went away (`colibri run ... | head`): nothing is wrong, nothing to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code = _fail(f"{where}{error.strerror or error}", 1)
    sys.exit(code or 0)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    try:
        print(f"colibri: {line}", file=sys.stderr)
    except BrokenPipeError:
        pass
    return code

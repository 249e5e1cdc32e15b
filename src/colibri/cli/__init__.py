"""The `colibri` command: thin, one file for each group of commands."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from contextlib import suppress
from io import TextIOWrapper
from typing import Any

from colibri.errors import ColibriError, MemoryBudgetWarning, UsageFileWarning

INTERRUPTED = 130


def main() -> None:
    """Run the command line; every expected failure is one line on stderr and an exit code."""
    try:
        code = _run()
    except KeyboardInterrupt:
        # A second Ctrl-C would only spoil the message.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = _fail("interrupted", INTERRUPTED)
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        # Not sys.exit: where the signal came inside code that an extension module ran, Python remembers it and
        # would end by the signal after an orderly exit, with another exit status.
        os._exit(code)
    except ColibriError as error:
        code = _fail(str(error), error.exit_code)
    except MemoryError:
        code = _fail("not enough memory; use a smaller model or a shorter --context", 1)
    except FileNotFoundError as error:
        # Without a name it is os.getcwd, which has no file to name.
        code = _fail(f"{error.filename or 'the current folder'}: {error.strerror}; change to one that exists", 1)
    except OSError as error:
        code = _fail(f"{error.filename or 'standard output'}: {error.strerror or error}", 1)
    _give_up_output()
    sys.exit(code)


def _run() -> int:
    if sys.stdout is None:
        raise ColibriError("standard output is closed; redirect it to a file or to /dev/null")
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal that cannot show a character gets a question mark, not an end of the answer.
        sys.stdout.reconfigure(errors="replace")

    import typer

    from colibri.cli.app import app

    warnings.showwarning = _warn

    # Typer is built on Click, or has it inside; either way this is its class for a wrong command line.
    usage_error: type[Exception] = typer.BadParameter.__bases__[0]
    try:
        # Commands give back what is to be done, so that Typer's handling of errors ends with the parsing.
        command = app(prog_name="colibri", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except usage_error as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "colibri"
        message = getattr(error, "format_message", error.__str__)()
        return _fail(f"{message.rstrip('.')}; see {path} --help", 2)
    if callable(command):
        command()
        sys.stdout.flush()
        return 0
    if command == INTERRUPTED:  # Typer has caught a Ctrl-C
        raise KeyboardInterrupt
    return command or 0


def _warn(message: Warning | str, kind: type[Warning], *where: Any) -> None:
    if issubclass(kind, (MemoryBudgetWarning, UsageFileWarning)) and sys.stderr is not None:
        with suppress(OSError):
            print(f"colibri: warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"colibri: {line}", file=sys.stderr, flush=True)
    return code


def _give_up_output() -> None:
    """Drop what cannot be written, about which Python would complain once more at exit."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

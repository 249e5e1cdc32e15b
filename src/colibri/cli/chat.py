"""`colibri chat`: an interactive conversation."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any

from colibri.cli.engine_options import EngineOptions
from colibri.cli.output import write
from colibri.cli.warming import warming
from colibri.errors import ColibriError, ContextLengthError, TemplateError
from colibri.runtime.engine import Engine
from colibri.runtime.session import Session

HELP = "/reset forgets the conversation, /help shows this, /exit (or Ctrl-D) ends; Ctrl-C stops an answer"


def chat_command(
    model: Path | None, max_tokens: int, sampling: Mapping[str, Any], context: int | None, options: EngineOptions
) -> None:
    if sys.stdin is None:
        raise ColibriError("standard input is closed; chat reads the questions from it")
    interactive = sys.stdin.isatty()
    if isinstance(sys.stdin, TextIOWrapper):
        # In some locales Python would hand on wrong bytes as half characters.
        sys.stdin.reconfigure(errors="strict")
    if interactive:
        # Arrow keys and history in `input`, where Python has readline; importing it enables it.
        with suppress(ImportError):
            import readline  # noqa: F401
    with Engine(model, context=context, **options) as engine, engine.session() as session:
        if not engine.tokenizer.has_chat_template:
            raise TemplateError(f"{engine.path} has no chat template; use colibri run with a plain prompt")
        if interactive:
            write(f"{engine.path.name}: {HELP}")
        messages: list[dict[str, str]] = []
        while True:
            try:
                text = input("> " if interactive else "")
            except EOFError:
                if interactive:
                    write("")
                return
            except UnicodeDecodeError:
                raise ColibriError("standard input is not UTF-8 text; convert it to UTF-8") from None
            except KeyboardInterrupt:
                if not interactive:
                    raise
                write("\n(Ctrl-D or /exit ends)")
                continue
            command = text.strip()
            if command == "/exit":
                return
            if command == "/help":
                write(HELP)
            elif command == "/reset":
                messages.clear()
            elif command:
                try:
                    _answer(engine, session, messages, text, max_tokens, sampling)
                except (ContextLengthError, TemplateError) as error:
                    if not interactive:
                        raise
                    messages.pop()
                    write(f"{error} (/reset starts again)")
                except KeyboardInterrupt:
                    if not interactive:
                        raise
                    write(" (stopped)")


def _answer(
    engine: Engine,
    session: Session,
    messages: list[dict[str, str]],
    text: str,
    max_tokens: int,
    sampling: Mapping[str, Any],
) -> None:
    """Write the answer to `text`; both join `messages`, the answer also when Ctrl-C cut it."""
    messages.append({"role": "user", "content": text})
    generation = engine.generate(messages=messages, max_tokens=max_tokens, session=session, **sampling)
    try:
        with warming(engine, generation.usage.prompt_tokens) if len(messages) == 1 else nullcontext():
            first = next(generation, "")
        for piece in chain([first], generation):
            write(piece, end="")
    finally:
        messages.append({"role": "assistant", "content": generation.text})
    write("")

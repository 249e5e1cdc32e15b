"""`colibri chat`: an interactive conversation."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colibri.errors import ContextLengthError, TemplateError
from colibri.runtime.engine import Engine

HELP = "/reset forgets the conversation, /help shows this, /exit (or Ctrl-D) ends; Ctrl-C stops an answer"


def chat_command(
    model: Path | None, max_tokens: int, sampling: Mapping[str, Any], threads: int | None, context: int | None
) -> None:
    _enable_line_editing()
    with Engine(model, threads=threads) as engine, engine.session(context) as session:
        if not engine.tokenizer.has_chat_template:
            raise TemplateError(f"{engine.path} has no chat template: use colibri run with a plain prompt")
        interactive = sys.stdin.isatty()
        if interactive:
            print(f"{engine.path.name}: {HELP}")
        messages: list[dict[str, str]] = []
        while True:
            try:
                text = input("> " if interactive else "")
            except EOFError:
                if interactive:
                    print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit ends)" if interactive else "", file=sys.stderr)
                continue
            command = text.strip()
            if not command:
                continue
            if command == "/exit":
                return
            if command == "/help":
                print(HELP)
                continue
            if command == "/reset":
                messages.clear()
                continue
            messages.append({"role": "user", "content": text})
            try:
                generation = engine.generate(messages=messages, max_tokens=max_tokens, session=session, **sampling)
            except (ContextLengthError, TemplateError) as error:
                messages.pop()
                print(f"colibri: {error}; /reset starts again", file=sys.stderr)
                continue
            try:
                for piece in generation:
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                print(" (stopped)", end="", file=sys.stderr)
            print()
            messages.append({"role": "assistant", "content": generation.text})


def _enable_line_editing() -> None:
    """Arrow keys and history in `input`, where Python has readline."""
    try:
        import readline  # noqa: F401 - importing it is what enables it
    except ImportError:
        pass

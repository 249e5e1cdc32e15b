"""`colibri run`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from colibri.errors import UsageError
from colibri.runtime.backend import Statistics
from colibri.runtime.engine import Engine


def choose_prompt(arguments: Sequence[str], prompt_file: Path | None) -> tuple[Path | None, str]:
    """Split `[MODEL.cbi] PROMPT` and read the prompt; UsageError when it is missing, double or empty."""
    rest = list(arguments)
    model = None
    if len(rest) > (1 if prompt_file else 2):
        raise UsageError(f"run takes [MODEL.cbi] PROMPT, but {rest[-1]!r} is one too many: quote the prompt")
    if prompt_file and rest:
        model = Path(rest.pop())
    elif len(rest) == 2:
        model = Path(rest.pop(0))
    if prompt_file:
        text, name = _read(prompt_file), str(prompt_file)
    elif not rest:
        raise UsageError('no prompt: give one (colibri run "text"), --prompt-file FILE, or - for standard input')
    elif rest[0] == "-":
        text, name = _decode(sys.stdin.buffer.read(), "standard input"), "standard input"
    else:
        text, name = rest[0], "PROMPT"
        if model is None and text.endswith(".cbi") and Path(text).exists():
            raise UsageError(f"{text} is a model file, but there is no prompt: colibri run {text} PROMPT")
    if not text:
        raise UsageError(f"the prompt is empty ({name}): give at least one character")
    return model, text


def _read(path: Path) -> str:
    try:
        return _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"cannot read the prompt file {path}: {error.strerror}") from None


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt ({name}) is not UTF-8 at byte {error.start}") from None


def run_command(
    arguments: Sequence[str],
    *,
    prompt_file: Path | None,
    chat: bool,
    max_tokens: int,
    sampling: Mapping[str, Any],
    stop: Sequence[str],
    threads: int | None,
    context: int | None,
    as_json: bool,
    statistics: bool,
) -> None:
    model, text = choose_prompt(arguments, prompt_file)
    with Engine(model, threads=threads) as engine:
        source: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        start = time.perf_counter()
        generation = engine.generate(**source, max_tokens=max_tokens, stop=stop, context=context, **sampling)
        for piece in generation:
            if not as_json:
                print(piece, end="", flush=True)
        seconds = time.perf_counter() - start
        if as_json:
            result = {
                "text": generation.text,
                "tokens": generation.tokens,
                "finish_reason": generation.finish_reason,
                "prompt_tokens": generation.usage.prompt_tokens,
                "completion_tokens": generation.usage.completion_tokens,
                "seconds": round(seconds, 4),
            }
            if statistics:
                result["statistics"] = statistics_object(engine.statistics())
            print(json.dumps(result, ensure_ascii=False))
        else:
            print()
            if statistics:
                print_statistics(engine.statistics())


def statistics_object(statistics: Statistics) -> dict[str, Any]:
    """Statistics as JSON types."""
    from dataclasses import asdict

    return asdict(statistics)


def print_statistics(statistics: Statistics) -> None:
    """Tables on stderr: totals, time by op, experts by layer."""
    console = Console(stderr=True)
    console.print(
        f"{statistics.tokens} tokens in {statistics.passes} passes, {statistics.seconds:.3f} s, "
        f"{statistics.threads} threads, {statistics.vm} {statistics.cpu}"
    )
    for weights, kernel in statistics.kernels.items():
        console.print(f"{weights}: {kernel}")
    times = Table("op", "ms", "%")
    total = sum(statistics.seconds_by_op.values()) or 1.0
    for name, seconds in sorted(statistics.seconds_by_op.items(), key=lambda pair: -pair[1]):
        if seconds > 0:
            times.add_row(name, f"{seconds * 1e3:.2f}", f"{100 * seconds / total:.1f}")
    console.print(times)
    if statistics.expert_sets:
        experts = Table("layer", "experts computed", "tokens x experts", "MiB touched", "busiest expert")
        for layer in statistics.expert_sets:
            busiest = max(range(layer.expert_count), key=layer.tokens_per_expert.__getitem__)
            experts.add_row(
                str(layer.layer),
                str(layer.experts_computed),
                str(layer.expert_tokens),
                f"{layer.bytes_touched / 2**20:.1f}",
                f"{busiest} ({layer.tokens_per_expert[busiest]} tokens)",
            )
        console.print(experts)

"""`colibri run`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from colibri.cli.engine_options import EngineOptions
from colibri.cli.output import write, write_json
from colibri.cli.warming import warming
from colibri.errors import ColibriError, UsageError
from colibri.runtime.backend import LatencyStatistics, Statistics
from colibri.runtime.engine import Engine


def choose_prompt(arguments: Sequence[str], prompt_file: Path | None) -> tuple[Path | None, str]:
    """Split `[MODEL.cbi] PROMPT` and read the prompt; UsageError when it is missing, double or empty."""
    rest = list(arguments)
    most = 1 if prompt_file else 2
    if len(rest) > most:
        raise UsageError(f"run takes {'MODEL.cbi' if prompt_file else '[MODEL.cbi] PROMPT'}, and {rest[most]!r} is one "
                         "too many; quote a prompt of several words")  # fmt: skip
    if prompt_file and rest == ["-"]:
        raise UsageError("the prompt is given twice, by --prompt-file and as -; leave one out")
    model = Path(rest.pop(0)) if len(rest) == most else None
    if prompt_file:
        text, name = read_text(prompt_file, "the prompt file"), str(prompt_file)
    elif not rest:
        raise UsageError('there is no prompt; give one (run "text"), --prompt-file FILE, or - for standard input')
    elif rest[0] == "-":
        text, name = decode(_standard_input(), "standard input"), "standard input"
    else:
        text, name = decode(os.fsencode(rest[0]), "PROMPT"), "PROMPT"
        # Nobody continues a file name: the prompt was forgotten, or a second model given.
        if text.endswith(".cbi") and not any(map(str.isspace, text)):
            raise UsageError(f"{text} is a model file and there is no prompt; give one: run {model or text} PROMPT")
    if not text:
        raise UsageError(f"the prompt is empty ({name}); give at least one character")
    return model, text


def read_text(path: Path, what: str) -> str:
    """The text of a UTF-8 file; ColibriError when there is none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ColibriError(f"cannot read {what} {path}: {error.strerror}") from None
    return decode(data, str(path))


def decode(data: bytes, name: str) -> str:
    """UTF-8 text; ColibriError gives the first wrong byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ColibriError(f"{name} is not UTF-8 text (byte {error.start}); convert it to UTF-8") from None


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise ColibriError("standard input is closed; give the prompt as an argument or by --prompt-file")
    return sys.stdin.buffer.read()


def run_command(
    arguments: Sequence[str],
    *,
    prompt_file: Path | None,
    chat: bool,
    max_tokens: int,
    sampling: Mapping[str, Any],
    stop: Sequence[str],
    context: int | None,
    options: EngineOptions,
    as_json: bool,
    statistics: bool,
) -> None:
    model, text = choose_prompt(arguments, prompt_file)
    with Engine(model, context=context, **options) as engine:
        source: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        start = time.perf_counter()
        generation = engine.generate(**source, max_tokens=max_tokens, stop=stop, **sampling)
        try:
            with warming(engine, generation.usage.prompt_tokens):
                first = next(generation, "")
            for piece in chain([first], generation):
                if not as_json:
                    write(piece, end="")
        except KeyboardInterrupt:
            if sys.stdout.isatty():
                write("")
            raise
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
            write_json(result)
        else:
            write("")
            if statistics:
                print_statistics(engine.statistics())


def statistics_object(statistics: Statistics) -> dict[str, Any]:
    """Statistics as JSON types."""
    return asdict(statistics)


def print_statistics(statistics: Statistics) -> None:
    """Tables on stderr: totals, time by op, experts by layer."""
    from rich.console import Console
    from rich.table import Table

    from colibri.cli.experts_report import print_experts

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
    for name, phase in statistics.phases.items():
        if phase.passes:
            console.print(
                f"{name}: {phase.tokens} tokens in {phase.passes} passes, {phase.seconds:.3f} s, "
                f"{phase.parallel_regions / phase.passes:.0f} parallel regions in each"
            )
            if phase.dispatch.count or phase.dispatch_switched.count or phase.dispatch_missed:
                console.print(
                    f"  router to the last thread's first expert task: {_latency(phase.dispatch)}; "
                    f"with a context switch: {_latency(phase.dispatch_switched)}; missed {phase.dispatch_missed}"
                )
    if statistics.expert_sets:
        print_experts(console, statistics)


def _latency(latency: LatencyStatistics) -> str:
    if not latency.count:
        return "none"
    return (
        f"{latency.count} times, mean {latency.mean * 1e6:.1f} us, p50 {latency.p50 * 1e6:.1f}, "
        f"p99 {latency.p99 * 1e6:.1f}, largest {latency.largest * 1e6:.1f}"
    )

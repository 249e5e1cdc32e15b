"""`colibri perplexity` and `colibri bench`."""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from colibri.cli.engine_options import EngineOptions
from colibri.cli.generate import read_text
from colibri.cli.output import write, write_json
from colibri.cli.profile import phase_profile, profile_table
from colibri.errors import ColibriError, MemoryBudgetError, UsageError
from colibri.runtime.engine import Engine
from colibri.runtime.memory_limits import process_memory
from colibri.runtime.model_text import ModelText
from colibri.runtime.session import Session

DEFAULT_WINDOW = 256


def perplexity_of(engine: Engine, tokens: np.ndarray, window: int) -> tuple[float, int]:
    """Perplexity over windows of `window` tokens, each on its own, and the number of predictions."""
    total, count = 0.0, 0
    with engine.session(window) as session:
        for start in range(0, len(tokens) - 1, window):
            session.truncate(0)
            scores = session.score(tokens[start : start + window])[1:]
            total -= float(np.sum(scores, dtype=np.float64))
            count += len(scores)
    return math.exp(total / count), count


def perplexity_command(model: Path, text: Path, context: int | None, options: EngineOptions, as_json: bool) -> None:
    content = read_text(text, "the text file")
    # Before the model is open: encoding a long text takes much memory for a moment, which the budget must not hold.
    file = ModelText.read(model)
    window = file.context_of(context or min(DEFAULT_WINDOW, file.context_limit))
    tokens = np.asarray(file.tokenizer.encode(content), np.uint32)
    if len(tokens) < 2:
        raise ColibriError(f"{text} gives {len(tokens)} tokens and perplexity needs 2; give a longer text")
    del content, file
    try:
        engine = Engine(model, context=window, **options)
    except MemoryBudgetError as error:
        raise MemoryBudgetError(f"{error} (encoding {text} took memory as well: a shorter text takes less)") from None
    with engine:
        start = time.perf_counter()
        value, predictions = perplexity_of(engine, tokens, window)
        seconds = time.perf_counter() - start
    if as_json:
        write_json({"perplexity": value, "predictions": predictions, "context": window, "seconds": round(seconds, 4)})
    else:
        write(f"perplexity {value:.4f} over {predictions} predictions, windows of {window} tokens, {seconds:.1f} s")


def bench_command(
    model: Path,
    *,
    prompt: int,
    generate: int,
    batch: int,
    repeat: int,
    topic: int | None,
    profile: bool,
    options: EngineOptions,
    as_json: bool,
) -> None:
    context, limit = prompt + generate, ModelText.read(model).context_limit
    if context > limit:
        raise UsageError(
            f"--prompt and --generate add up to {context}, the model's context holds {limit}; lower one of them"
        )
    start = time.perf_counter()
    with Engine(model, context=context, sessions=batch, **options) as engine:
        sessions = [engine.session() for _ in range(batch)]
        load = time.perf_counter() - start
        vocabulary = engine.vocabulary_size
        low, high = (0, vocabulary) if topic is None else (vocabulary * topic // 16, vocabulary * (topic + 1) // 16)
        random = np.random.default_rng(0)
        prompt_rates: list[float] = []
        decode_rates: list[float] = []
        latencies: list[float] = []
        for _ in range(repeat):
            for session in sessions:
                session.truncate(0)
            start = time.perf_counter()
            for session in sessions:
                session.forward(random.integers(low, high, prompt), last_only=True)
            prompt_rates.append(batch * prompt / (time.perf_counter() - start))
            begin = time.perf_counter()
            for _ in range(generate):
                start = time.perf_counter()
                _decode(engine, [(session, [int(random.integers(low, high))]) for session in sessions])
                latencies.append(time.perf_counter() - start)
            decode_rates.append(batch * generate / (time.perf_counter() - begin))
        done = engine.statistics()
        for session in sessions:
            session.close()
    latencies.sort()
    p50, p99 = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
    decode = done.phases["decode"]
    result: dict[str, Any] = {
        "engine": "colibri",
        "model": str(model),
        "threads": done.threads,
        "cpu": done.cpu,
        "batch": batch,
        "load_s": round(load, 3),
        "prompt_tokens_per_s": round(statistics.median(prompt_rates), 2),
        "decode_tokens_per_s": round(statistics.median(decode_rates), 2),
        "decode_p50_ms": round(1e3 * p50, 3),
        "decode_p99_ms": round(1e3 * p99, 3),
        "decode_p99_over_p50": round(p99 / p50, 3),
        "decode_regions_per_pass": round(decode.parallel_regions / decode.passes, 1),
        "dispatch_mean_us": round(1e6 * decode.dispatch.mean, 2),
        "dispatch_p99_us": round(1e6 * decode.dispatch.p99, 2),
        "dispatch_count": decode.dispatch.count,
        "dispatch_switched_count": decode.dispatch_switched.count,
        "dispatch_switched_p99_us": round(1e6 * decode.dispatch_switched.p99, 2),
        "dispatch_missed": decode.dispatch_missed,
        "peak_rss_mib": _peak_rss_mib(),
    }
    phases = {name: phase_profile(phase) for name, phase in done.phases.items()} if profile else {}
    if as_json:
        write_json(result | ({"profile": phases} if profile else {}))
        return
    for name, value in result.items():
        write(f"{name:24} {value}")
    for name, phase in phases.items():
        write(f"\n{name}: milliseconds for each of {phase['tokens']} tokens, by layer and op")
        write(profile_table(phase))


def _decode(engine: Engine, items: list[tuple[Session, list[int]]]) -> None:
    for result in engine.forward_batch(items, last_only=True):
        if isinstance(result, ColibriError):
            raise result


def _peak_rss_mib() -> int | None:
    """VmHWM of this process; None where /proc has none."""
    memory = process_memory()
    return None if memory is None else memory.peak >> 20

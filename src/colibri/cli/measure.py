"""`colibri perplexity` and `colibri bench`."""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path

import numpy as np

from colibri.cli.engine_options import EngineOptions
from colibri.cli.generate import read_text
from colibri.cli.output import write, write_json
from colibri.errors import ColibriError, UsageError
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
    with Engine(model, context=window, **options) as engine:
        start = time.perf_counter()
        value, predictions = perplexity_of(engine, tokens, window)
        seconds = time.perf_counter() - start
    if as_json:
        write_json({"perplexity": value, "predictions": predictions, "context": window, "seconds": round(seconds, 4)})
    else:
        write(f"perplexity {value:.4f} over {predictions} predictions, windows of {window} tokens, {seconds:.1f} s")


def bench_command(
    model: Path,
    prompt: int,
    generate: int,
    batch: int,
    repeat: int,
    topic: int | None,
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
    result = {
        "engine": "colibri",
        "model": str(model),
        "threads": done.threads,
        "cpu": done.cpu,
        "batch": batch,
        "load_s": round(load, 3),
        "prompt_tokens_per_s": round(statistics.median(prompt_rates), 2),
        "decode_tokens_per_s": round(statistics.median(decode_rates), 2),
        "decode_p50_ms": round(1e3 * latencies[len(latencies) // 2], 3),
        "decode_p99_ms": round(1e3 * latencies[int(len(latencies) * 0.99)], 3),
        "peak_rss_mib": _peak_rss_mib(),
    }
    if as_json:
        write_json(result)
    else:
        for name, value in result.items():
            write(f"{name:22} {value}")


def _decode(engine: Engine, items: list[tuple[Session, list[int]]]) -> None:
    for result in engine.forward_batch(items, last_only=True):
        if isinstance(result, ColibriError):
            raise result


def _peak_rss_mib() -> int | None:
    """VmHWM of this process; None where /proc has none."""
    memory = process_memory()
    return None if memory is None else memory.peak >> 20

#!/usr/bin/env python3
"""How well the next layers' experts are predicted, and what reading them ahead changes.

    bench/prediction.py [MODEL.cbi] [--share 0.5] [--tokens 200] [--depth 0 --depth 1 ...]

Decodes the same tokens with each depth, one token of each engine in turn so that they meet the same machine: those
of --text, else random ones. One line of CSV for each depth: recall (of the chosen experts, the share that was
predicted), precision (of the predicted, the share chosen), hit rate, MiB read, milliseconds of stall and of wall
clock for each token, and what became of the records read ahead.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from pathlib import Path

import numpy as np

import colibri
from colibri.runtime.backend import NativeOptions, Statistics
from colibri.runtime.engine import demo_model_path
from colibri.runtime.native_backend import plan_memory

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (
    "depth",
    "recall",
    "precision",
    "hit_rate",
    "mib_per_token",
    "stall_ms_per_token",
    "median_ms_per_token",
    "read_ahead",
    "of_it_used",
    "passes_with",
    "passes_without",
)
FIELDS = ("hits", "misses", "bytes_read", "stall_seconds", "prefetched", "prefetched_used")


def totals(statistics: Statistics) -> dict[str, float]:
    return {name: sum(getattr(layer, name) for layer in statistics.expert_sets) for name in FIELDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=demo_model_path())
    parser.add_argument("--share", type=float, default=0.5, help="of the memory for all experts")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--text", type=Path, help="UTF-8 text to decode, for a model with a tokenizer")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--depth", type=int, action="append")
    arguments = parser.parse_args()
    plan = plan_memory(arguments.model, 1, "", NativeOptions(), 64, 0)
    room = max(int(plan.all_expert_bytes * arguments.share), plan.least_expert_bytes)
    depths = arguments.depth or [0, 1, 2]
    engines = [
        colibri.Engine(arguments.model, threads=arguments.threads, expert_cache=room, prefetch_depth=depth)
        for depth in depths
    ]
    if arguments.text:
        tokens = engines[0].tokenizer.encode(arguments.text.read_text())[: arguments.tokens]
    else:
        tokens = np.random.default_rng(0).integers(0, plan.vocabulary_size, arguments.tokens).tolist()
    sessions = [engine.session(len(tokens)) for engine in engines]
    seconds: list[list[float]] = [[] for _ in engines]
    for step, token in enumerate(tokens):
        for index in range(len(engines))[:: 1 if step % 2 else -1]:
            start = time.perf_counter()
            sessions[index].forward([token], last_only=True)
            seconds[index].append(time.perf_counter() - start)
    output = csv.writer(sys.stdout, lineterminator="\n")
    output.writerow(COLUMNS)
    for depth, engine, times in zip(depths, engines, seconds, strict=True):
        done = engine.statistics()
        sums = totals(done)
        sets = done.expert_sets
        recalled = sum(layer.recalled for layer in sets)
        output.writerow(
            [
                depth,
                f"{recalled / max(sum(layer.predictable for layer in sets), 1):.3f}",
                f"{recalled / max(sum(layer.predicted for layer in sets), 1):.3f}",
                f"{sums['hits'] / (sums['hits'] + sums['misses']):.3f}",
                f"{sums['bytes_read'] / 2**20 / len(tokens):.2f}",
                f"{1e3 * sums['stall_seconds'] / len(tokens):.3f}",
                f"{1e3 * statistics.median(times):.3f}",
                sums["prefetched"],
                sums["prefetched_used"],
                done.predicted_passes,
                done.unpredicted_passes,
            ]
        )


if __name__ == "__main__":
    main()

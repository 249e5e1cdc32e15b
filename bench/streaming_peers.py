#!/usr/bin/env python3
"""One engine of bench/streaming.py in a process of its own: loads a model, then runs requests.

    streaming_peers.py colibri MODEL.cbi [--ram SIZE] [--threads 2]
    streaming_peers.py llama.cpp MODEL.gguf [--threads 2]

llama.cpp maps the file and does not repack weights, the only way in which it runs a model larger than memory; it
runs in an interpreter with llama-cpp-python. Requests and answers are JSON lines:

    ready:   {"load_s": 0.4, "vocabulary": 50304, ...}
    request: {"prompt": 1, "steps": 64, "topic": null, "seed": 5}
    answer:  {"prompt_s": 1.2, "step_s": [...], "prompt_bytes": 0, "step_bytes": 0, "stall_s": 0.1, "faults": 0}
    last:    {"peak_rss": 900000000} after standard input has ended
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TOPICS = 16


def token_ids(request: dict[str, Any], vocabulary: int) -> tuple[list[int], list[int]]:
    """Prompt and steps, the same for every engine; a topic is one of 16 blocks of ids (bench/make_model.py)."""
    topic = request["topic"]
    low, high = (0, vocabulary) if topic is None else (vocabulary * topic // TOPICS, vocabulary * (topic + 1) // TOPICS)
    random = np.random.default_rng(request["seed"])
    return random.integers(low, high, request["prompt"]).tolist(), random.integers(low, high, request["steps"]).tolist()


def proc_value(file: str, key: str) -> int:
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


class Colibri:
    def __init__(self, path: str, threads: int, ram: str | None, context: int):
        import colibri

        self.engine = colibri.Engine(path, threads=threads, ram=ram, context=context)
        self.vocabulary = self.engine.vocabulary_size
        budget = self.engine.budget
        self.facts: dict[str, Any] = {
            "cpu": self.engine.statistics().cpu,
            "slot_bytes": self.engine.statistics().expert_bytes,
            "ram": budget.ram if budget else None,
            "max_batch_tokens": budget.max_batch_tokens if budget else None,
            "resident": self.engine.statistics().resident,
            "direct": self.engine.statistics().is_direct,
        }
        self.session = self.engine.session()

    def start(self, prompt: list[int]) -> None:
        self.session.truncate(0)
        self.session.forward(prompt, last_only=True).argmax()

    def step(self, token: int) -> None:
        self.session.forward([token], last_only=True).argmax()

    def counters(self) -> dict[str, float]:
        sets = self.engine.statistics().expert_sets
        return {
            "hits": sum(one.hits for one in sets),
            "misses": sum(one.misses for one in sets),
            "expert_bytes": sum(one.bytes_read for one in sets),
            "stall_s": sum(one.stall_seconds for one in sets),
            "prefetched": sum(one.prefetched for one in sets),
            "prefetched_used": sum(one.prefetched_used for one in sets),
        }


class LlamaCpp:
    def __init__(self, path: str, threads: int, context: int):
        import llama_cpp as api  # pyright: ignore[reportMissingImports] - a peer, not a dependency

        self.api = api
        self.quiet = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self.quiet, ctypes.c_void_p(0))
        api.llama_backend_init()
        parameters = api.llama_model_default_params()
        names = [field[0] for field in parameters._fields_]
        if "load_mode" in names:
            parameters.load_mode = api.LLAMA_LOAD_MODE_MMAP
        else:
            parameters.use_mmap = True
        parameters.use_extra_bufts = False  # weights in another order would be a copy in memory
        self.model = api.llama_model_load_from_file(path.encode(), parameters)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = context, 512, 512
        options.n_threads = options.n_threads_batch = threads
        self.context = api.llama_init_from_model(self.model, options)
        if not self.context:
            raise SystemExit(f"llama.cpp has no context of {context} for {path}")
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(512, 0, 1)
        self.facts: dict[str, Any] = {"system": api.llama_print_system_info().decode(), "version": api.__version__}

    def start(self, prompt: list[int]) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self.position = 0
        for first in range(0, len(prompt), 512):
            self._decode(prompt[first : first + 512])

    def step(self, token: int) -> None:
        self._decode([token])

    def _decode(self, tokens: list[int]) -> None:
        batch = self.batch
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, self.position + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == len(tokens) - 1
        batch.n_tokens = len(tokens)
        self.position += len(tokens)
        if self.api.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        self.api.llama_get_logits(self.context)

    def counters(self) -> dict[str, float]:
        return {}


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    prompt, steps = token_ids(request, engine.vocabulary)
    marks = [(engine.counters(), proc_value("io", "read_bytes"))]
    start = time.perf_counter()
    engine.start(prompt)
    result: dict[str, Any] = {"prompt_s": time.perf_counter() - start}
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    marks.append((engine.counters(), proc_value("io", "read_bytes")))
    result["step_s"] = []
    for token in steps:
        start = time.perf_counter()
        engine.step(token)
        result["step_s"].append(time.perf_counter() - start)
    marks.append((engine.counters(), proc_value("io", "read_bytes")))
    before, middle, after = marks
    result["prompt_bytes"], result["step_bytes"] = middle[1] - before[1], after[1] - middle[1]
    result["faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
    return result | {name: value - middle[0][name] for name, value in after[0].items()}


def serve(load: Callable[[], Any]) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is no answer

    def say(values: dict[str, Any]) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    start = time.perf_counter()
    engine = load()
    say({"load_s": time.perf_counter() - start, "vocabulary": engine.vocabulary} | engine.facts)
    for line in sys.stdin:
        say(answer(engine, json.loads(line)))
    say({"peak_rss": 1024 * proc_value("status", "VmHWM")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["colibri", "llama.cpp"])
    parser.add_argument("model")
    parser.add_argument("--ram")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=512)
    a = parser.parse_args()
    if a.engine == "colibri":
        serve(lambda: Colibri(a.model, a.threads, a.ram, a.context))
    else:
        serve(lambda: LlamaCpp(a.model, a.threads, a.context))


if __name__ == "__main__":
    main()

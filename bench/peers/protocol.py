"""The engine's side of a benchmark: one process holds one loaded model and answers requests.

Every script of this folder runs in the interpreter of its engine, so this file needs nothing but
NumPy. Requests and answers are JSON lines on standard input and output; what an engine itself prints goes
to standard error. Holding the model lets the caller alternate between engines every few seconds.

    ready:   {"load_s": 0.4, ...facts}
    request: {"prompt": 256, "steps": 32, "batch": 1, "seed": 5}
    answer:  {"prompt_s": 1.2, "step_s": [0.03, ...], ...}
    last:    {"peak_rss_mib": 900} after standard input has ended
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np


class Engine(Protocol):
    """A loaded model."""

    vocabulary: int
    facts: dict[str, Any]

    def run(self, ids: np.ndarray, steps: np.ndarray) -> dict[str, Any]:
        """Prompts ids [batch, n], one after the other, then steps [m, batch], all sequences together.

        Returns prompt_s, seconds until the first token after each prompt was chosen, summed; and step_s [m].
        """
        ...


def token_ids(request: dict[str, Any], vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a request, the same for every engine: prompts [batch, n] and steps [m, batch]."""
    random = np.random.default_rng(request["seed"])
    ids = random.integers(0, vocabulary, (request["batch"], request["prompt"]))
    return ids, random.integers(0, vocabulary, (request["steps"], request["batch"]))


def peak_rss_mib() -> int:
    """VmHWM: the most this process has had resident."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def serve(load: Callable[[], Any], answer: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None) -> None:
    """Load, then answer requests until standard input ends.

    `answer` is for what is no engine: it gets the loaded thing and the request.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(values: dict[str, Any]) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    start = time.perf_counter()
    engine = load()
    say({"load_s": time.perf_counter() - start} | getattr(engine, "facts", {}))
    for line in sys.stdin:
        request = json.loads(line)
        say(answer(engine, request) if answer else engine.run(*token_ids(request, engine.vocabulary)))
    say({"peak_rss_mib": peak_rss_mib()})

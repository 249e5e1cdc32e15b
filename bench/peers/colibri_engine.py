#!/usr/bin/env python3
"""Colibri as a peer of its own benchmark: the Python API, with what the statistics say about each run.

colibri_engine.py MODEL.cbi [--threads 2]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from protocol import serve

import colibri
from colibri.cbi import CbiFile
from colibri.errors import ColibriError
from colibri.program.ops import Opcode


class Colibri:
    def __init__(self, path: str, threads: int):
        self.engine = colibri.Engine(path, threads=threads)
        self.vocabulary = self.engine.vocabulary_size
        statistics = self.engine.statistics()
        self.facts: dict[str, Any] = {"cpu": statistics.cpu, "weight_bytes": statistics.weight_bytes}
        self.dense_bytes = 0
        self.expert_operations: list[int] = []

    def describe(self) -> None:
        """What one token reads besides experts, and the arithmetic of one expert; from the file's directories."""
        with CbiFile.open(self.engine.path) as file:
            tables = {op.operands["table"] for op in file.program.ops if op.opcode == Opcode.EMBED}
            others = {op.operands["weight"] for op in file.program.ops if "weight" in op.operands}
            self.dense_bytes = sum(
                tensor.size for i, tensor in enumerate(file.tensors) if i in others or i not in tables
            )
            self.expert_operations = [3 * 2 * s.width * s.ffn for s in file.expert_sets]

    def run(self, ids: np.ndarray, steps: np.ndarray) -> dict[str, Any]:
        if not self.dense_bytes:
            self.describe()
        engine = self.engine
        sessions = [engine.session(ids.shape[1] + len(steps)) for _ in ids]
        try:
            before, start = engine.statistics(), time.perf_counter()
            for session, prompt in zip(sessions, ids, strict=True):
                session.forward(prompt, last_only=True).argmax()
            answer: dict[str, Any] = {"prompt_s": time.perf_counter() - start}
            middle, seconds = engine.statistics(), []
            for step in steps:
                start = time.perf_counter()
                tokens = [(session, [token]) for session, token in zip(sessions, step, strict=True)]
                for logits in engine.forward_batch(tokens, last_only=True):
                    if isinstance(logits, ColibriError):
                        raise logits
                seconds.append(time.perf_counter() - start)
            after = engine.statistics()
            answer["step_s"] = seconds
            answer["expert_s"] = middle.seconds_by_op["experts"] - before.seconds_by_op["experts"]
            answer["expert_operations"] = sum(
                (m.expert_tokens - b.expert_tokens) * each
                for b, m, each in zip(before.expert_sets, middle.expert_sets, self.expert_operations, strict=True)
            )
            if len(steps):
                experts = sum(
                    a.bytes_touched - m.bytes_touched
                    for m, a in zip(middle.expert_sets, after.expert_sets, strict=True)
                )
                state = sum(len(session.save()) for session in sessions)
                answer["bytes_for_step"] = experts / len(steps) + self.dense_bytes + state
                dispatch = after.phases["decode"].dispatch  # since the start, of all steps
                if len(ids) == 1 and dispatch.count:
                    answer["dispatch_us"] = {"mean": 1e6 * dispatch.mean, "p99": 1e6 * dispatch.p99}
            return answer
        finally:
            for session in sessions:
                session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(lambda: Colibri(arguments.model, arguments.threads))


if __name__ == "__main__":
    main()

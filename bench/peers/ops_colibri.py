#!/usr/bin/env python3
"""Single ops of the core on 1024 rows: a program of little else, timed by the statistics by op.

    ops_colibri.py router|"matmul f32" THREADS

The sizes are those of ops_torch.py and ops_numpy.py.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from protocol import serve

import colibri
from colibri.cbi import CbiWriter
from colibri.program import ProgramBuilder
from colibri.quantize import pack, quantise

ROWS, WIDTH, EXPERTS, CHOSEN, REPEATS = 1024, 2048, 64, 8, 5


def write(path: Path, outputs: int, router: bool) -> None:
    """Tokens choose a random row of WIDTH inputs; the product is also the logits."""
    random, builder = np.random.default_rng(0), ProgramBuilder()
    builder.tokens("x", WIDTH)
    builder.tokens("y", outputs)
    builder.op("embed", y="x", table="rows")
    builder.op("matmul", layer=0, y="y", x="x", weight="weight")
    if router:
        builder.routing("routing", CHOSEN, EXPERTS)
        builder.op("route", layer=0, routing="routing", logits="y", normalise=1, scale=1.0)
    builder.outputs("logits", outputs)
    builder.op("gather_outputs", y="logits", x="y")
    builder.output("logits", "logits")
    with CbiWriter(path) as writer:
        for name, layout in (("rows", "rows"), ("weight", "tiled16")):
            values = random.standard_normal((outputs, WIDTH), dtype=np.float32)
            data = pack(quantise(values, "f32"), layout).tobytes()
            writer.add_tensor(name, "f32", layout, outputs, WIDTH, [data])
        writer.finish(builder.build(vocabulary_size=outputs, context_limit=ROWS, default_state_format=1))


def load() -> colibri.Engine:
    router = sys.argv[1] == "router"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ops.cbi"
        write(path, EXPERTS if router else WIDTH, router)
        return colibri.Engine(path, threads=int(sys.argv[2]), max_batch_tokens=ROWS)


def answer(engine: colibri.Engine, request: dict[str, Any]) -> dict[str, Any]:
    tokens = np.random.default_rng(1).integers(0, engine.vocabulary_size, ROWS)
    seconds = []
    for _ in range(REPEATS):
        before = engine.statistics().seconds_by_op
        with engine.session(ROWS) as session:
            session.forward(tokens, last_only=True)
        after = engine.statistics().seconds_by_op
        seconds.append(sum(after[op] - before[op] for op in ("matmul", "route")))
    return {"seconds": seconds}


if __name__ == "__main__":
    serve(load, answer)

#!/usr/bin/env python3
"""Colibri beside its peers: makes the models, runs all in alternation, prints and stores a table.

Sections:
  load     opening a model in a fresh process, page cache warm and cold, and peak RSS
  q4_0     decode, prompts and batches on identical Q4_0 weights, beside llama.cpp and ik_llama.cpp
  threads  all threads beside one
  bf16     beside transformers (eager and compiled) and vLLM
  f32      beside transformers
  ops      the router beside torch, a float32 product beside NumPy
  kernels  every kernel of every ISA

Peers live in interpreters of their own (the options below, or the environment variables LLAMA_PYTHON, IK_PYTHON,
TORCH_PYTHON, VLLM_PYTHON); see README.md for how to install each. One that is missing or fails is recorded with
the reason.

    run.py [--shape b1] [--rounds 5] [--only q4_0,load] [--llama-python PYTHON] ...
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import machine
import sections
from models import Models
from table import Table

HERE = Path(__file__).resolve().parent
SECTIONS = ("load", "q4_0", "threads", "bf16", "f32", "ops", "kernels")
PEERS = ("llama", "ik", "torch", "vllm")


@dataclass(frozen=True)
class Run:
    """What every section gets."""

    models: Models
    tools: machine.Tools
    table: Table
    rounds: int
    threads: int
    pythons: dict[str, str | None]
    short: bool


def time_kernels(run: Run, path: Path) -> None:
    """Store the kernel benchmark as it is; it has its own columns."""
    mebibytes = sections.PROBE_MIB.get(run.models.shape, 256)
    command = [str(run.tools.kernels), "--threads", str(run.threads), "--mib", str(mebibytes)]
    path.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"kernels: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="b1", choices=["tiny", "b1", "b7"])
    parser.add_argument("--models", type=Path, default=HERE / "models", help="folder for the models")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds")
    parser.add_argument("--short", action="store_true", help="q4_0: only a prompt of 256, its decoding and 8 sequences")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    parser.add_argument("--build", type=Path, default=HERE.parent / "build" / "bench", help="folder for the C programs")
    parser.add_argument("--output", type=Path, help="CSV; default bench/results/SHAPE.csv")
    for peer in PEERS:
        parser.add_argument(f"--{peer}-python", default=os.environ.get(f"{peer.upper()}_PYTHON"), metavar="PYTHON")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if unknown := [name for name in wanted if name not in SECTIONS]:
        parser.error(f"--only: {unknown[0]} is unknown, choose from {', '.join(SECTIONS)}")
    if arguments.rounds < 1 or arguments.threads < 1:
        parser.error("--rounds and --threads are at least 1")
    output: Path = arguments.output or HERE / "results" / f"{arguments.shape}.csv"
    output.parent.mkdir(parents=True, exist_ok=True)

    run = Run(
        models=Models(arguments.shape, arguments.models),
        tools=machine.build_tools(arguments.build.resolve()),
        table=Table(),
        rounds=arguments.rounds,
        threads=arguments.threads,
        pythons={peer: getattr(arguments, f"{peer}_python") for peer in PEERS},
        short=arguments.short,
    )
    work = {
        "load": sections.load,
        "q4_0": sections.q4_0,
        "threads": sections.threads,
        "bf16": sections.bf16,
        "f32": sections.f32,
        "ops": sections.ops,
    }
    for name in wanted:
        print(f"{name} ...", file=sys.stderr, flush=True)
        if name == "kernels":
            time_kernels(run, output.with_name(f"{output.stem}-kernels.csv"))
        else:
            work[name](run)
        run.table.write_csv(output)
    print(run.table.text())
    print(f"stored in {output}")


if __name__ == "__main__":
    main()

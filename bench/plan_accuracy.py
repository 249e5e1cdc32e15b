#!/usr/bin/env python3
"""What `colibri plan` expects, beside what `colibri bench` then measures.

    bench/plan_accuracy.py MODEL.cbi [--ram 700MiB --ram 1GiB ...] [--rounds 5] [--prompt 512] [--out FILE.csv]

In each round and for each budget, the machine is measured anew (`plan --refresh`) and the model run at once after it.
Decoding is predicted for the usage that an earlier run of the same budget recorded. One line of CSV for each budget and
measure: both medians, and the median of predicted / measured with its range. Without --ram: the default budget.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COLUMNS = ("model", "ram", "measure", "predicted", "measured", "ratio", "lowest", "highest", "rounds")


def colibri(*arguments: str) -> dict[str, Any]:
    run = subprocess.run([sys.executable, "-m", "colibri", *arguments, "--json"], capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"plan_accuracy.py: colibri {' '.join(arguments)}: {run.stderr.strip()}")
    return json.loads(run.stdout)


def compare(arguments: argparse.Namespace, ram: str | None, usage: Path) -> list[dict[str, float]]:
    """For each round: predicted and measured tokens for each second."""
    common = [str(arguments.model), "--threads", str(arguments.threads), "--usage-file", str(usage)]
    common += ["--ram", ram] if ram else []
    run = ["bench", *common, "--prompt", str(arguments.prompt)]
    colibri(*run)  # records the usage
    rounds = []
    for _ in range(arguments.rounds):
        plan = colibri("plan", *common, "--context", str(arguments.prompt), "--refresh")
        measured = colibri(*run)
        expected = plan.get("recorded") or plan["uniform"]
        rounds.append(
            {
                "predicted decode": expected["decode"],
                "decode": measured["decode_tokens_per_s"],
                "predicted prompt": expected["prompt"],
                "prompt": measured["prompt_tokens_per_s"],
            }
        )
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ram", action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for ram in arguments.ram or [None]:
        with tempfile.TemporaryDirectory() as folder:
            rounds = compare(arguments, ram, Path(folder) / "usage")
        for measure in ("decode", "prompt"):
            ratios = [r[f"predicted {measure}"] / r[measure] for r in rounds]
            medians = [statistics.median(r[name] for r in rounds) for name in (f"predicted {measure}", measure)]
            figures = [statistics.median(ratios), min(ratios), max(ratios)]
            row = [arguments.model.name, ram or "default", measure]
            row += [f"{m:.1f}" for m in medians] + [f"{f:.2f}" for f in figures] + [str(len(rounds))]
            rows.append(row)
            print(", ".join(f"{name} {value}" for name, value in zip(COLUMNS[1:], row[1:], strict=True)), flush=True)
    if arguments.out:
        with arguments.out.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()

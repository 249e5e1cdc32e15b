#!/usr/bin/env python3
"""What grouping pays: all experts of a layer in one queue of tasks, against one call for each expert.

Builds the same program both ways, runs them in alternation and prints the median of the ratios inside each round;
both must give the same bits.

    grouped.py MODEL.cbi [--rounds 5] [--threads 2] [--prompt 256] [--batch 1] [--steps 48]
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
from pathlib import Path

import machine

HERE = Path(__file__).resolve().parent
KINDS = ("grouped", "ungrouped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--build", type=Path, default=HERE.parent / "build" / "bench", help="folder for the C programs")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "grouped.csv")
    arguments = parser.parse_args()
    folder = machine.build(arguments.build.resolve(), KINDS) / "bench"
    size = [arguments.model, arguments.threads, arguments.prompt, arguments.batch, arguments.steps]
    tokens = {"prompt": arguments.batch * arguments.prompt, "decode": arguments.batch * arguments.steps}
    rows: list[dict[str, object]] = []
    ratios: dict[str, list[float]] = {"prompt": [], "decode": []}
    for number in range(arguments.rounds):
        answers = {}
        for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
            command = [str(folder / kind), *map(str, size)]
            answers[kind] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        if answers["grouped"]["bits"] != answers["ungrouped"]["bits"]:
            raise SystemExit("grouped and ungrouped logits differ")
        for phase, times in ratios.items():
            rates = {kind: tokens[phase] / answers[kind][f"{phase}_s"] for kind in KINDS}
            times.append(rates["grouped"] / rates["ungrouped"])
            rows.append({"round": number + 1, "phase": phase} | {kind: round(rate, 2) for kind, rate in rates.items()})
    for phase, times in ratios.items():
        middle = statistics.median(times)
        print(f"{phase}: grouped is {middle:.2f} times as fast ({min(times):.2f} to {max(times):.2f})")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["round", "phase", *KINDS])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Perplexity of the engine for every `--weights`, on the demo model and its held-out tokens.

Converts the checkpoint anew for each format and scores windows of 256 tokens, each on its own
(255 predictions). bench/choose_formats.py simulates formats that do not exist; this runs those that do.

    quality.py [--source demo] [--tokens demo/heldout.tokens.u16] [--windows 160] [--output bench/results/quality.csv]
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import tempfile

import numpy as np

import colibri
from colibri.cli.measure import perplexity_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
WINDOW = 256
WEIGHTS = ("f32", "bf16", "f16", "keep", "q8", "q4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=pathlib.Path, default=ROOT / "demo")
    parser.add_argument("--tokens", type=pathlib.Path, default=ROOT / "demo" / "heldout.tokens.u16")
    parser.add_argument("--windows", type=int, default=160)
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "bench" / "results" / "quality.csv")
    arguments = parser.parse_args()
    tokens = np.fromfile(arguments.tokens, "<u2")[: arguments.windows * WINDOW].astype(np.uint32)
    rows: list[dict[str, object]] = []
    baseline = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for weights in WEIGHTS:
            path = pathlib.Path(folder) / f"{weights}.cbi"
            report = colibri.convert(arguments.source, path, weights=weights)
            with colibri.Engine(path) as engine:
                value, predictions = perplexity_of(engine, tokens, WINDOW)
            baseline = baseline or value
            change = 100 * (value / baseline - 1)
            rows.append(
                {
                    "weights": weights,
                    "mib": round(report.file_bytes / 2**20, 2),
                    "perplexity": round(value, 4),
                    "change_percent": round(change, 3),
                    "predictions": predictions,
                }
            )
            print(f"{weights:5} {report.file_bytes / 2**20:7.2f} MiB  perplexity {value:.4f}  {change:+.3f}%")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()

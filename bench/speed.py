#!/usr/bin/env python3
"""Decode, prompt and batch speed on a random model of a real shape, beside llama.cpp.

Makes the model once (Hugging Face folder and GGUF with identical weights), converts it, then runs
Colibri and the peer in alternation, each in a process of its own, and prints medians and
ratios. The CSV holds every single run and the ratios, so that each printed figure can be
checked. A peer that cannot run is recorded as such.

    speed.py [--shape b1] [--llama-python PYTHON] [--runs 5] [--output bench/results/speed.csv]

PYTHON is an interpreter with llama-cpp-python installed (see peer_llamacpp.py for its best build).
"""

from __future__ import annotations

import argparse
import csv
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def run_json(command: list[str]) -> dict:
    """The last line of a command's output as JSON; {"error": ...} when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr.strip() or "no output").splitlines()
        return {"error": lines[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def prepare(shape: str, models: pathlib.Path, weights: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Make and convert the model unless it is there; returns (.cbi, .gguf)."""
    folder, gguf, cbi = models / shape, models / f"{shape}.gguf", models / f"{shape}-{weights}.cbi"
    models.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.safetensors.index.json").exists() or not gguf.exists():
        make = [sys.executable, str(HERE / "make_model.py"), "--shape", shape, "--hf", str(folder), "--gguf", str(gguf)]
        subprocess.run(make, check=True)
    if not cbi.exists():
        convert = [sys.executable, "-m", "colibri", "convert", str(folder), str(cbi), "--weights", weights]
        subprocess.run(convert, check=True)
    return cbi, gguf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="b1", choices=["tiny", "b1", "b7"])
    parser.add_argument("--weights", default="q4", choices=["q4", "q8"])
    parser.add_argument("--models", type=pathlib.Path, default=HERE / "models", help="folder for the models")
    parser.add_argument("--llama-python", help="interpreter with llama-cpp-python; without it no peer runs")
    parser.add_argument("--runs", type=int, default=5, help="alternating runs of each engine")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--generate", type=int, default=48)
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "speed.csv")
    arguments = parser.parse_args()
    cbi, gguf = prepare(arguments.shape, arguments.models, arguments.weights)

    size = ["--prompt", str(arguments.prompt), "--generate", str(arguments.generate)]
    ours = [sys.executable, "-m", "colibri", "bench", str(cbi), "--json", "--repeat", "1", *size]
    jobs: dict[str, list[str]] = {
        "colibri": [*ours, "--threads", "2"],
        "colibri 1 thread": [*ours, "--threads", "1"],
        "colibri batch 8": [*ours, "--threads", "2", "--batch", "8"],
    }
    if arguments.llama_python:
        peer = [arguments.llama_python, str(HERE / "peer_llamacpp.py"), str(gguf), "--repeat", "1", *size]
        jobs["llama.cpp"] = [*peer, "--threads", "2"]
        jobs["llama.cpp batch 8"] = [*peer, "--threads", "2", "--batch", "8"]

    figures = ("prompt_tokens_per_s", "decode_tokens_per_s", "decode_p50_ms", "decode_p99_ms", "load_s", "peak_rss_mib")
    results: dict[str, list[dict]] = {name: [] for name in jobs}
    for _ in range(arguments.runs):
        for name, command in jobs.items():
            results[name].append(run_json(command))

    rows: dict[str, dict] = {}
    table: list[dict] = []
    for name, runs in results.items():
        errors = [run["error"] for run in runs if "error" in run]
        rows[name] = {"engine": name, "round": "median", "error": errors[0] if errors else ""}
        if not errors:
            rows[name] |= {figure: round(statistics.median(run[figure] for run in runs), 3) for figure in figures}
            table += [{"engine": name, "round": i} | {f: run[f] for f in figures} for i, run in enumerate(runs, 1)]
        table.append(rows[name])

    print(f"shape {arguments.shape}, {arguments.weights}, prompt {arguments.prompt}, medians of {arguments.runs} runs")
    for model in (cbi, gguf):
        print(f"  {model.name}: {model.stat().st_size / 2**20:.0f} MiB")
    for row in rows.values():
        print("  " + "  ".join(f"{key} {value}" for key, value in row.items() if value != ""))

    def ratio(text: str, a: str, figure_a: str, b: str, figure_b: str) -> None:
        """Median over the runs of the ratio inside one round, so that drift of the machine cancels."""
        if a not in rows or b not in rows or rows[a]["error"] or rows[b]["error"]:
            return
        values = [x[figure_a] / y[figure_b] for x, y in zip(results[a], results[b], strict=True)]
        middle, of_medians = statistics.median(values), rows[a][figure_a] / rows[b][figure_b]
        # Two ways to the same figure: where they differ much, the machine was too noisy to quote either.
        print(f"  {text}: {middle:.2f} ({min(values):.2f} to {max(values):.2f}), of the medians {of_medians:.2f}")
        table.append({"engine": text, "round": "ratio", "ratio": round(middle, 3), "of_medians": round(of_medians, 3)})

    decode, prompt = "decode_tokens_per_s", "prompt_tokens_per_s"
    ratio("prompt / decode", "colibri", prompt, "colibri", decode)
    ratio("batch 8 / batch 1 decode", "colibri batch 8", decode, "colibri", decode)
    ratio("2 threads / 1 thread decode", "colibri", decode, "colibri 1 thread", decode)
    ratio("decode, colibri / llama.cpp", "colibri", decode, "llama.cpp", decode)
    ratio("prompt, colibri / llama.cpp", "colibri", prompt, "llama.cpp", prompt)
    ratio("batch 8 decode, colibri / llama.cpp", "colibri batch 8", decode, "llama.cpp batch 8", decode)

    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["engine", "round", *figures, "ratio", "of_medians", "error"])
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()

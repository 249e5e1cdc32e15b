#!/usr/bin/env python3
"""A model larger than memory: Colibri beside llama.cpp inside the same memory limit, and the limit of the disk.

Both run in alternation, each round in new processes inside a control group of `--limit` (bench/memory_limit.py:
needs root or a writable group; the page cache counts). Before a process starts, the model files leave the page
cache. A process decodes from a cold start, decodes again warm, and reads prompts of 128 and 256 tokens; with
`--topic` it does the same with tokens of one topic. All engines get the same tokens.

The disk's limit of a decode is what Belady's optimum would read with the slots that Colibri has (routing recorded
with everything resident, bench/cache_replay.py), at the rate at which this disk reads records past the page
cache, measured in the same run. A sweep over `--budget` shows peak memory and bytes read for each token.

    streaming.py MODEL.cbi [--gguf MODEL.gguf --llama-python PYTHON] [--limit 2GiB] [--rounds 5] [--steps 64]
                 [--topic K] [--budget 1GiB]... [--output bench/results/streaming.csv]

MODEL.cbi is MODEL.gguf converted with `--weights keep`: shape b7 of bench/make_model.py for the published figures.
LLAMA_PYTHON in the environment stands for --llama-python.
"""

from __future__ import annotations

import argparse
import csv
import json
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import machine
import numpy as np
from cache_replay import Belady, ExpectedWait, Trace, replay
from memory_limit import Group, memory_limit
from record_routes import counts_of
from streaming_peers import token_ids

import colibri
from colibri.cbi.reader import CbiFile
from colibri.runtime.sizes import format_size, parse_size

HERE = Path(__file__).resolve().parent
PAGE = 4096
PROMPTS = (128, 256)
FIELDS: tuple[str, ...] = (
    "engine", "limit", "phase", "round", "tokens_per_s", "p50_ms", "p99_ms", "mib_per_token", "stall_ms_per_token",
    "hit_percent", "faults", "peak_rss_mib", "peak_group_mib", "belady_mib_per_token", "policy_mib_per_token",
    "disk_mib_per_s", "limit_tokens_per_s", "of_limit_percent", "error",
)  # fmt: skip
Row = dict[str, Any]


def requests(steps: int, topic: int | None) -> dict[str, dict[str, Any]]:
    """What a process is asked for, in order."""
    result = {name: {"prompt": 1, "steps": steps, "topic": None, "seed": i} for i, name in enumerate(("cold", "warm"))}
    result |= {f"prompt {n}": {"prompt": n, "steps": 0, "topic": None, "seed": n} for n in PROMPTS}
    if topic is not None:
        for i, name in enumerate(("topic first", "topic warm")):
            result[name] = {"prompt": 1, "steps": steps, "topic": topic, "seed": 10 + i}
    return result


def run_engine(
    command: list[str], plan: dict[str, dict[str, Any]], group: Group | None
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, Any]]:
    """One process: (facts, answer of each phase, last line). What was answered before it died is kept."""
    enter = group.enter if group else None
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, preexec_fn=enter) as process:
        assert process.stdin and process.stdout and process.stderr
        errors: list[str] = []
        drain = threading.Thread(target=lambda lines: errors.extend(lines), args=(process.stderr,))
        drain.start()
        facts: dict[str, Any] = {}
        answers: dict[str, dict[str, Any]] = {}
        last: dict[str, Any] = {}
        try:
            facts = json.loads(process.stdout.readline())
            for name, request in plan.items():
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                answers[name] = json.loads(process.stdout.readline())
            process.stdin.close()
            last = json.loads(process.stdout.readline())
        except (json.JSONDecodeError, BrokenPipeError):
            process.wait()
            drain.join()
            killed = " (killed: out of memory)" if group and group.kills() else ""
            last["error"] = (errors[-1].strip() if errors else f"ended with status {process.returncode}") + killed
        drain.join()
    if group:
        last["peak_group"] = group.peak()
    return facts, answers, last


def row_of(engine: str, limit: str, phase: str, round_: int, answer: dict[str, Any], prompt: int) -> Row:
    row: Row = {"engine": engine, "limit": limit, "phase": phase, "round": round_}
    seconds = sorted(answer["step_s"])
    if not seconds:
        return row | {
            "tokens_per_s": prompt / answer["prompt_s"],
            "mib_per_token": answer["prompt_bytes"] / prompt / 2**20,
        }
    row |= {
        "tokens_per_s": len(seconds) / sum(seconds),
        "p50_ms": 1e3 * statistics.median(seconds),
        "p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
        "mib_per_token": answer["step_bytes"] / len(seconds) / 2**20,
        "faults": answer["faults"],
    }
    if "stall_s" in answer:
        row["stall_ms_per_token"] = 1e3 * answer["stall_s"] / len(seconds)
        row["hit_percent"] = 100 * answer["hits"] / max(1, answer["hits"] + answer["misses"])
    return row


def disk_rate(path: Path, seconds: float = 2.0) -> float:
    """Bytes/s of whole records in random order past the page cache: the best of 1, 2 and 4 threads."""
    with CbiFile.open(path) as file:
        records = [(e.offset, -(-e.size // PAGE) * PAGE) for one in file.expert_sets for e in one.experts]
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        raise SystemExit(f"{path} cannot be opened past the page cache: {error.strerror}; put it on a disk") from None
    end = path.stat().st_size
    try:

        def read(seed: int) -> int:
            random, done, stop = np.random.default_rng(seed), 0, time.perf_counter() + seconds
            with mmap.mmap(-1, max(size for _, size in records)) as buffer, memoryview(buffer) as view:
                while time.perf_counter() < stop:
                    offset, size = records[int(random.integers(len(records)))]
                    with view[:size] as part:
                        got = os.preadv(descriptor, [part], offset)
                    if got < min(size, end - offset):
                        raise SystemExit(f"{path}: a record at {offset} gave {got} of {size} bytes")
                    done += got
            return done

        best = 0.0
        for threads in (1, 2, 4):
            with ThreadPoolExecutor(threads) as pool:
                start = time.perf_counter()
                done = sum(pool.map(read, range(threads)))
                best = max(best, done / (time.perf_counter() - start))
        return best
    finally:
        os.close(descriptor)


def traced(path: Path, plan: dict[str, dict[str, Any]]) -> tuple[Trace, dict[str, slice]]:
    """The routing of the whole plan with everything resident, and which passes are the steps of a phase."""
    used: list[np.ndarray] = []
    spans: dict[str, slice] = {}
    with colibri.Engine(path, context=512, prefetch_depth=0) as engine, engine.session() as session:
        if not engine.statistics().resident:
            raise SystemExit(f"{path} does not fit in this machine's memory, so its routing cannot be recorded")
        before = counts_of(engine)
        for name, request in plan.items():
            prompt, steps = token_ids(request, engine.vocabulary_size)
            session.truncate(0)
            for tokens in [prompt, *([token] for token in steps)]:
                session.forward(tokens, last_only=True)
                after = counts_of(engine)
                used.append(after > before)
                before = after
            spans[name] = slice(len(used) - len(steps), len(used))
    layers, experts = used[0].shape
    needed = [layer * experts + np.flatnonzero(one[layer]) for one in used for layer in range(layers)]
    with CbiFile.open(path) as file:
        sizes = np.array([e.size for one in file.expert_sets for e in one.experts])
    return Trace(path.stem, layers, experts, needed, sizes, len(used), min(map(len, needed))), spans


def bytes_per_token(
    trace: Trace, spans: dict[str, slice], slots: int, make: Callable[[Trace, int], Any]
) -> dict[str, float]:
    """Of each phase that decodes, when the whole plan runs with so many slots."""
    misses = replay(trace, make(trace, slots), slots).reshape(-1, trace.layers).sum(1)
    size = float(trace.expert_bytes.mean())
    return {name: float(misses[span].mean()) * size for name, span in spans.items() if span.stop > span.start}


def medians(rows: list[Row]) -> list[Row]:
    """One row for each engine, limit and phase, with the medians of what is a number."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["engine"], row["limit"], row["phase"]), []).append(row)
    result: list[Row] = []
    for (engine, limit, phase), group in groups.items():
        one: Row = {"engine": engine, "limit": limit, "phase": phase, "round": "median"}
        for name in FIELDS[4:-1]:
            values = [row[name] for row in group if isinstance(row.get(name), int | float)]
            if values:
                one[name] = statistics.median(values)
        one["error"] = next((row["error"] for row in group if row.get("error")), "")
        result.append(one)
    return result


def print_table(rows: list[Row]) -> None:
    columns = ("engine", "limit", "phase", *FIELDS[4:9], "hit_percent", "peak_rss_mib", "of_limit_percent")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        values = [row.get(name, "") for name in columns]
        text = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in values]
        print("| " + " | ".join(text) + " |" + (f" {row['error']}" if row.get("error") else ""))


def compare(arguments: argparse.Namespace, threads: list[str]) -> list[Row]:
    """Rounds inside the limit."""
    plan = requests(arguments.steps, arguments.topic)
    trace, spans = traced(arguments.model, plan)
    limit = parse_size("--limit", arguments.limit)
    ram = arguments.ram or str(int(limit * 0.97))
    peers = str(HERE / "streaming_peers.py")
    jobs = {"colibri": [sys.executable, peers, "colibri", str(arguments.model), "--ram", ram, *threads]}
    if arguments.gguf and arguments.llama_python:
        jobs["llama.cpp"] = [arguments.llama_python, peers, "llama.cpp", str(arguments.gguf), *threads]
    rows: list[Row] = []
    for round_ in range(1, arguments.rounds + 1):
        rate = disk_rate(arguments.model)
        for engine, command in jobs.items():
            for path in (arguments.model, arguments.gguf):
                if path:
                    machine.evict(path)
            with memory_limit(limit) as group:
                facts, answers, last = run_engine(command, plan, group)
            best: dict[str, float] = {}
            ours: dict[str, float] = {}
            if "slot_bytes" in facts:
                slots = facts["slot_bytes"] // (-(-int(trace.expert_bytes.max()) // PAGE) * PAGE)
                best = bytes_per_token(trace, spans, slots, Belady)
                ours = bytes_per_token(trace, spans, slots, ExpectedWait)
            for phase, answer in answers.items():
                row = row_of(engine, arguments.limit, phase, round_, answer, plan[phase]["prompt"])
                row["peak_rss_mib"] = last.get("peak_rss", 0) / 2**20 or ""
                row["peak_group_mib"] = (last.get("peak_group") or 0) / 2**20 or ""
                row["disk_mib_per_s"] = rate / 2**20
                if phase in best:
                    row["belady_mib_per_token"], row["policy_mib_per_token"] = best[phase] / 2**20, ours[phase] / 2**20
                    if best[phase]:
                        row["limit_tokens_per_s"] = rate / best[phase]
                        row["of_limit_percent"] = 100 * row["tokens_per_s"] * best[phase] / rate
                rows.append(row)
            for phase in plan:
                if phase not in answers:
                    error = last.get("error", "no answer")
                    rows.append(
                        {"engine": engine, "limit": arguments.limit, "phase": phase, "round": round_, "error": error}
                    )
        print(f"round {round_}: the disk reads records at {rate / 2**20:.0f} MiB/s", file=sys.stderr)
    return rows


def sweep(arguments: argparse.Namespace, threads: list[str]) -> tuple[list[Row], list[str]]:
    """Each budget in a process of its own, without a control group; and the claims that do not hold."""
    plan = {name: one for name, one in requests(arguments.steps, None).items() if name in ("cold", "warm")}
    rows: list[Row] = []
    broken: list[str] = []
    before = float("inf")
    for budget in sorted(arguments.budget, key=lambda text: parse_size("--budget", text)):
        machine.evict(arguments.model)
        command = [sys.executable, str(HERE / "streaming_peers.py"), "colibri", str(arguments.model), "--ram", budget]
        _, answers, last = run_engine([*command, *threads], plan, None)
        if "error" in last:
            rows.append({"engine": "colibri", "limit": budget, "phase": "warm", "round": 1, "error": last["error"]})
            broken.append(f"{budget}: {last['error']}")
            continue
        for phase, answer in answers.items():
            row = row_of("colibri", f"ram {budget}", phase, 1, answer, 1)
            rows.append(row | {"peak_rss_mib": last["peak_rss"] / 2**20})
        read = rows[-1]["mib_per_token"]
        if last["peak_rss"] > parse_size("--budget", budget):
            broken.append(f"{budget}: the peak was {format_size(last['peak_rss'])}")
        if read > before:
            broken.append(f"{budget}: {read:.1f} MiB read for each token, and {before:.1f} with less memory")
        before = read
    if before and not broken:
        broken.append(f"{before:.1f} MiB read for each token with the largest budget; nothing if the model fits")
    return rows, broken


def print_ratios(rows: list[Row]) -> list[Row]:
    """Colibri / llama.cpp inside one round, so that drift of the machine cancels: median (least to most)."""
    result: list[Row] = []
    speeds = {
        (row["engine"], row["phase"], row["round"]): row["tokens_per_s"] for row in rows if row.get("tokens_per_s")
    }
    for phase in dict.fromkeys(row["phase"] for row in rows):
        both = [
            speed / speeds["llama.cpp", phase, round_]
            for (engine, of, round_), speed in speeds.items()
            if engine == "colibri" and of == phase and ("llama.cpp", phase, round_) in speeds
        ]
        if both:
            print(f"{phase}: {statistics.median(both):.2f} x llama.cpp ({min(both):.2f} to {max(both):.2f})")
            result.append(
                {
                    "engine": "colibri / llama.cpp",
                    "phase": phase,
                    "round": "ratio",
                    "tokens_per_s": statistics.median(both),
                }
            )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.cbi")
    parser.add_argument("--gguf", type=Path, help="the same weights for llama.cpp")
    parser.add_argument("--llama-python", default=os.environ.get("LLAMA_PYTHON"), help="has llama-cpp-python")
    parser.add_argument("--limit", default="2GiB", help="of the control group")
    parser.add_argument("--ram", help="Colibri's budget in it [97%% of the limit]")
    parser.add_argument("--rounds", type=int, default=5, help="0: only the sweep")
    parser.add_argument("--steps", type=int, default=64, help="tokens of a decode")
    parser.add_argument("--topic", type=int, choices=range(16))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", action="append", default=[], help="a budget of the sweep; may be repeated")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "streaming.csv")
    arguments = parser.parse_args()
    threads = ["--threads", str(arguments.threads)]
    rows = compare(arguments, threads) if arguments.rounds else []
    swept, broken = sweep(arguments, threads) if arguments.budget else ([], [])
    table = medians(rows)
    print_table(table + swept)
    ratios = print_ratios(rows)
    for claim in broken:
        print(f"does not hold: {claim}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for row in rows + table + ratios + swept:
            writer.writerow({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

"""The parts of a benchmark run: who takes part in each, what is asked, and what is made of the answers."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import machine
from table import OURS, PROBE, percentile
from worker import Worker, WorkerError

if TYPE_CHECKING:
    from run import Run

PEERS = Path(__file__).resolve().parent / "peers"
PROBE_MIB = {"tiny": 32}
"""Memory that probes read, much more than caches hold; 1 GiB for shapes that are not here."""
STEADY_MIB = 256
"""A fixed portion of work that takes about as long as a decode step of b1."""
RSS = "peak RSS, prompt of 256"


@dataclass(frozen=True)
class Peer:
    """How to start one engine. python None: not given; `environment` as for Worker."""

    name: str
    python: str | None
    arguments: tuple[str, ...]
    option: str = ""
    environment: dict[str, str | None] = field(default_factory=dict)

    def start(self) -> Worker:
        if self.python is None:
            raise WorkerError(f"not run: no interpreter; give {self.option}")
        return Worker([self.python, str(PEERS / self.arguments[0]), *self.arguments[1:]], self.environment)


@dataclass(frozen=True)
class Request:
    """Prompts of `prompt` tokens in `batch` sequences, then `steps` decode steps of all together."""

    prompt: int
    steps: int
    batch: int = 1

    def message(self, seed: int) -> dict[str, Any]:
        return {"prompt": self.prompt, "steps": self.steps, "batch": self.batch, "seed": seed}


def ours(run: Run, weights: str) -> Peer:
    model = str(run.models.cbi(weights))
    return Peer(OURS, sys.executable, ("colibri_engine.py", model, "--threads", str(run.threads)))


def gguf_peers(run: Run) -> list[Peer]:
    arguments = ("llamacpp.py", str(run.models.gguf()), "--threads", str(run.threads))
    return [
        Peer("llama.cpp", run.pythons["llama"], arguments, "--llama-python"),
        Peer("ik_llama.cpp", run.pythons["ik"], (*arguments, "--ik"), "--ik-python"),
    ]


# ---- all engines in alternation ----


class Team:
    """Started peers; one that fails is noted in the table and takes no further part."""

    def __init__(self, run: Run, section: str, stack: ExitStack):
        self.run, self.section, self.stack = run, section, stack
        self.workers: dict[str, Worker] = {}

    def start(self, peer: Peer) -> dict[str, Any] | None:
        try:
            worker = self.stack.enter_context(peer.start())
        except WorkerError as error:
            self.drop(peer.name, error)
            return None
        self.workers[peer.name] = worker
        return worker.ready

    def drop(self, name: str, error: WorkerError) -> None:
        """Ours must work; without any other engine the benchmark still means something."""
        if name == OURS:
            raise SystemExit(f"{self.section}: {name}: {error}")
        self.run.table.notes[self.section, name] = str(error)
        self.workers.pop(name, None)

    def ask(self, name: str, message: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return self.workers[name].ask(message)
        except WorkerError as error:
            self.drop(name, error)
            return None

    def alternate(self, number: int, message: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Ask all, each round beginning with another."""
        names = list(self.workers)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if (answer := self.ask(name, message)) is not None:
                yield name, answer

    def finish(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, worker in list(self.workers.items()):
            try:
                yield name, worker.finish()
            except WorkerError as error:
                self.drop(name, error)


def add_rates(run: Run, section: str, name: str, number: int, request: Request, answer: dict[str, Any]) -> None:
    """The figures of one answer."""

    def add(measure: str, value: float, unit: str) -> None:
        run.table.add(section, measure, name, number, value, unit)

    step_s, tokens = answer["step_s"], request.batch * request.prompt
    decode = request.batch * len(step_s) / sum(step_s) if step_s else 0
    if request.batch > 1:
        add(f"batch {request.batch} decode", decode, "tokens/s")
        return
    add(f"prompt {request.prompt}", tokens / answer["prompt_s"], "tokens/s")
    add(f"first token after {request.prompt}", 1e3 * answer["prompt_s"], "ms")
    if step_s:
        add(f"decode after {request.prompt}", decode, "tokens/s")
    for statistic, value in answer.get("dispatch_us", {}).items():
        add(f"dispatch after {request.prompt}, {statistic}", value, "us")


def compare(run: Run, section: str, peers: Iterable[Peer], requests: Iterable[Request], bounds: bool = False) -> None:
    """Alternate between the peers, request by request. bounds: also how near we come to what the machine can do."""
    requests = list(requests)
    step_ms: dict[tuple[str, Request], list[float]] = {}
    probe_ms: list[float] = []
    mebibytes, isa = PROBE_MIB.get(run.models.shape, 1024), ""
    with ExitStack() as stack:
        team = Team(run, section, stack)
        for peer in peers:
            ready = team.start(peer)
            if ready is None:
                continue
            isa = ready.get("cpu", isa)
            # Compiles what is compiled at first use, and touches all weights.
            for request in requests:
                if peer.name in team.workers:
                    team.ask(peer.name, Request(request.prompt, min(request.steps, 2), request.batch).message(0))
            run.table.notes.setdefault((section, peer.name), describe(ready))
        for number, request in itertools.product(range(1, run.rounds + 1), requests):
            limits = run.tools.limits(run.threads, isa, mebibytes) if bounds and request.batch == 1 else None
            if bounds and request == requests[0]:
                work = min(STEADY_MIB, mebibytes)
                probe_ms += run.tools.probe("steady", run.threads, work, max(request.steps, 1))["ms"]
            for name, answer in team.alternate(number, request.message(number)):
                add_rates(run, section, name, number, request, answer)
                step_ms.setdefault((name, request), []).extend(1e3 * s for s in answer["step_s"])
                if limits and name == OURS:
                    add_bounds(run, section, number, request, answer, limits)
        for name, last in team.finish():
            run.table.add(section, "peak RSS of all this", name, 1, last["peak_rss_mib"], "MiB")
    for (name, request), values in step_ms.items():
        if bounds and values and request == requests[0]:
            add_latencies(run, section, name, values)
    if probe_ms:
        add_latencies(run, section, PROBE, probe_ms)


def add_latencies(run: Run, section: str, name: str, milliseconds: list[float]) -> None:
    """Over the steps of all rounds; the probe is a fixed portion of work, so its p99/p50 is the machine's own."""
    middle, slow = percentile(milliseconds, 0.5), percentile(milliseconds, 0.99)
    run.table.add(section, "step p50", name, 1, middle, "ms")
    run.table.add(section, "step p99", name, 1, slow, "ms")
    run.table.add(section, "step p99/p50", name, 1, slow / middle, "x")


def describe(ready: dict[str, Any]) -> str:
    facts = {key: value for key, value in ready.items() if key != "load_s"}
    return ", ".join(f"{key} {value}" for key, value in facts.items())


# ---- how near to the machine ----


def add_bounds(
    run: Run, section: str, number: int, request: Request, answer: dict[str, Any], limits: dict[str, float]
) -> None:
    """Bytes that decoding reads and operations of the experts in prompts, against what the machine can do."""

    def add(measure: str, value: float, unit: str) -> None:
        run.table.add(section, measure, OURS, number, value, unit)

    if answer["expert_s"] > 0:
        rate = answer["expert_operations"] / answer["expert_s"] * 1e-12
        add(f"experts of prompt {request.prompt}", rate, "TOPS")
        for unit in ("amx", "vnni"):
            if f"{unit}_tops" in limits:
                peak = max(limits[f"{unit}_tops"], rate)
                add(f"{unit} int8 peak beside prompt {request.prompt}", peak, "TOPS")
                add(f"experts of prompt {request.prompt}, share of {unit} peak", rate / peak, "x")
    if answer["step_s"]:
        read = answer["bytes_for_step"] / statistics.median(answer["step_s"]) * 1e-9
        bandwidth = max(limits["gb_per_s"], read)
        add(f"decode after {request.prompt} reads", read, "GB/s")
        add(f"bandwidth beside decode after {request.prompt}", bandwidth, "GB/s")
        add(f"decode after {request.prompt}, share of bandwidth", read / bandwidth, "x")


# ---- the sections ----


def q4_0(run: Run) -> None:
    requests = [Request(256, 48), Request(64, 24, 8)]
    if not run.short:
        requests += [Request(64, 24), Request(1024, 32), Request(64, 24, 4)]
    compare(run, "q4_0", [ours(run, "keep"), *gguf_peers(run)], requests, bounds=True)


def threads(run: Run) -> None:
    """What the second and further threads bring, and how soon they take part."""
    model = str(run.models.cbi("keep"))
    one = Peer("one thread", sys.executable, ("colibri_engine.py", model, "--threads", "1"))
    compare(run, "threads", [ours(run, "keep"), one], [Request(256, 48)])


def load(run: Run) -> None:
    """A fresh process each time. Cold: the file's pages dropped with posix_fadvise, checked with mincore."""
    caches: dict[str, Callable[[Path], None]] = {"warm": machine.fill_cache, "cold": machine.evict}
    peers = [ours(run, "keep"), *gguf_peers(run)]
    for number, (cache, prepare), peer in itertools.product(range(1, run.rounds + 1), caches.items(), peers):
        if ("load", peer.name) in run.table.notes:
            continue
        try:
            prepare(Path(peer.arguments[1]))
        except machine.StillCached as error:
            run.table.notes["load", f"{cache} cache"] = f"not run: {error}"
            continue
        try:
            with peer.start() as worker:
                first = worker.ask(Request(16, 0).message(number))
                worker.ask(Request(256, 8).message(number))
                last = worker.finish()
        except WorkerError as error:
            if peer.name == OURS:
                raise SystemExit(f"load: {OURS}: {error}") from error
            run.table.notes["load", peer.name] = str(error)
            continue
        open_s = worker.ready["load_s"]
        run.table.add("load", f"open, {cache}", peer.name, number, open_s, "s")
        run.table.add("load", f"open + 16 tokens, {cache}", peer.name, number, open_s + first["prompt_s"], "s")
        if cache == "warm":
            run.table.add("load", RSS, peer.name, number, last["peak_rss_mib"], "MiB")
    for peer in peers:
        size = Path(peer.arguments[1]).stat().st_size / 2**20
        for number, resident in run.table.values("load", RSS, peer.name).items():
            run.table.add("load", "peak RSS / file", peer.name, number, resident / size, "x")
            limit = 1.15 * size + 120
            run.table.add("load", "peak RSS / (1.15 file + 120 MiB)", peer.name, number, resident / limit, "x")
    disk = run.tools.probe("disk", run.models.gguf())["gb_per_s"]
    run.table.add("load", "O_DIRECT read of the file", PROBE, 1, disk, "GB/s")


def folder_section(run: Run, section: str, peers: Callable[[str], list[Peer]]) -> None:
    checkpoint = run.models.checkpoint()
    if checkpoint is None:
        run.table.notes[section, OURS] = f"not run: shape {run.models.shape} has no Hugging Face folder"
        return
    compare(run, section, [ours(run, section), *peers(str(checkpoint))], [Request(256, 16)])


def bf16(run: Run) -> None:
    def peers(folder: str) -> list[Peer]:
        torch, threads = run.pythons["torch"], ("--threads", str(run.threads))
        arguments = ("transformers_engine.py", folder, *threads, "--dtype", "bf16")
        return [
            Peer("transformers", torch, arguments, "--torch-python"),
            Peer("transformers compiled", torch, (*arguments, "--compile"), "--torch-python"),
            Peer("vllm", run.pythons["vllm"], ("vllm_engine.py", folder, *threads), "--vllm-python"),
        ]

    folder_section(run, "bf16", peers)


def f32(run: Run) -> None:
    def peers(folder: str) -> list[Peer]:
        arguments = ("transformers_engine.py", folder, "--threads", str(run.threads), "--dtype", "f32")
        return [Peer("transformers", run.pythons["torch"], arguments, "--torch-python")]

    folder_section(run, "f32", peers)


def ops(run: Run) -> None:
    """Single ops on 1024 rows; every answer holds the seconds of several executions."""
    threads = str(run.threads)
    # Variables that hold back OpenBLAS (set on some machines for old builds) would slow the peer.
    free = dict.fromkeys(("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")) | {"OPENBLAS_NUM_THREADS": threads}
    work = {
        "router": Peer("torch", run.pythons["torch"], ("ops_torch.py", threads), "--torch-python"),
        "matmul f32": Peer("numpy", sys.executable, ("ops_numpy.py",), environment=free),
    }
    for measure, peer in work.items():
        with ExitStack() as stack:
            team = Team(run, "ops", stack)
            for each in (Peer(OURS, sys.executable, ("ops_colibri.py", measure, threads)), peer):
                ready = team.start(each)
                if ready is not None and each.name != OURS:
                    run.table.notes["ops", each.name] = describe(ready)
            for number in range(run.rounds + 1):
                for name, answer in team.alternate(number, {}):
                    if number:  # the first execution warms up
                        run.table.add("ops", measure, name, number, 1e3 * min(answer["seconds"]), "ms")

"""Small measurements of this machine for the planner, kept in a file of the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from colibri.cbi import CbiFile
from colibri.errors import ColibriError, ModelFileError
from colibri.runtime.memory_limits import memory_limits
from colibri.runtime.probe_model import VOCABULARY, token_bytes, write_probe_model

if TYPE_CHECKING:
    from colibri.runtime.engine import Engine

MIB = 1 << 20
_PROBE_BYTES = 512 * MIB
"""More than the last cache of most processors holds."""
_DISK_BYTES = 192 * MIB
_DECODE_STEPS = 24
PROMPT_SIZES = (16, 64, 256, 1024)
COMPUTE_RATES = ("decode", *(f"prompt {size}" for size in PROMPT_SIZES))
DISK_RATES = ("bytes_per_second",)
_PAGE = 4096
_FORMAT = 2


class MeasurementCache:
    """Results by key, in `colibri/machine.json` of the XDG cache folder.

    Where that cannot be read or written, everything is measured each time. refresh: measure again, and keep that.
    """

    def __init__(self, refresh: bool = False) -> None:
        self.path = _cache_file()
        self._refresh = refresh

    def get(self, key: str, rates: Iterable[str], measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """The kept result of `measure` for this key, else a new one. rates: what it must have, above 0."""
        found = self._read().get(key)
        if not self._refresh and isinstance(found, dict) and all(_is_rate(found.get(name)) for name in rates):
            return found
        result = measure()
        self._write(self._read() | {key: result})
        return result

    def _read(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            if self.path is not None:
                data = json.loads(self.path.read_bytes())
                if isinstance(data, dict) and data.get("format") == _FORMAT and isinstance(data.get("results"), dict):
                    return data["results"]
        return {}

    def _write(self, results: dict[str, Any]) -> None:
        if self.path is None:
            return
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.path.parent)
            try:
                with open(descriptor, "w") as file:  # noqa: PTH123 - a descriptor
                    json.dump({"format": _FORMAT, "results": results}, file)
                Path(name).replace(self.path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise


def _is_rate(value: object) -> bool:
    return isinstance(value, float | int) and math.isfinite(value) and value > 0


def _cache_file() -> Path | None:
    folder = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # no home
        return (Path(folder) if Path(folder).is_absolute() else Path.home() / ".cache") / "colibri" / "machine.json"
    return None


def processor_name() -> str:
    """What /proc/cpuinfo calls the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "CPU part"):
                return value.strip()
    return "unknown"


def compute_key(path: Path, threads: int | None) -> str:
    """What decides how fast a model is computed: processor, kernels, threads, and the shape of its layers."""
    import colibri

    with CbiFile.open(path) as file:
        shape = [repr(op.operands) for op in file.program.ops[:64]] + [str(file.program.values)]
        shape += [f"{t.format} {t.layout} {t.rows} {t.cols}" for t in file.tensors[:64]]
        shape += [f"{s.width} {s.ffn} {len(s.experts)} {s.experts[0].formats}" for s in file.expert_sets[:1]]
    digest = hashlib.sha256("\n".join(shape).encode()).hexdigest()[:16]
    usable = len(os.sched_getaffinity(0))
    cpu = os.environ.get("COLIBRI_CPU", "")
    return f"compute {processor_name()} | {usable} {threads} {cpu} | {colibri.__version__} | {digest}"


def measure_compute(path: Path, threads: int | None) -> dict[str, float]:
    """Bytes of weights for each second: in decoding, and times tokens in prompts of PROMPT_SIZES tokens ("prompt 64").

    Runs a model of random weights with the shape of a layer of this one. Raises ColibriError where it cannot.
    """
    from colibri.runtime.engine import Engine

    wanted = min(_PROBE_BYTES, path.stat().st_size)
    try:
        with _ended_by_exceptions(), tempfile.TemporaryDirectory(prefix="colibri-") as folder:
            probe = Path(folder) / "probe.cbi"
            with CbiFile.open(path) as file:
                _write_probe(file, probe, wanted)
                experts = len(file.expert_sets[0].experts) if file.expert_sets else 1
            with CbiFile.open(probe) as file:
                of_token = token_bytes(file)
                kept = len(file.expert_sets[0].experts) if file.expert_sets else 1
                limit = file.program.context_limit
            # As many tokens for each expert as in the model.
            sizes = {size: max(1, min(size * kept // experts, limit - 1)) for size in PROMPT_SIZES}
            context = min(limit, max(_DECODE_STEPS, *sizes.values()) + 1)
            with Engine(probe, threads=threads, context=context, max_batch_tokens=context) as engine:
                probe.unlink()  # nothing is left behind, however this process ends
                decode = _median_of(engine, [1] * min(_DECODE_STEPS, context), 3)
                prompts = {size: min(_median_of(engine, [count], 1) for _ in range(3)) for size, count in sizes.items()}
    except OSError as error:
        raise ColibriError(f"the planner cannot measure this machine: {error.strerror}; set TMPDIR to a folder with "
                           f"{2 * wanted // MIB + 1} MiB free") from None  # fmt: skip
    body = of_token.dense + of_token.experts
    return {"decode": of_token.all / decode} | {
        f"prompt {size}": body * sizes[size] / seconds for size, seconds in prompts.items()
    }


@contextmanager
def _ended_by_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit meanwhile, so that temporary files go."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_probe(source: CbiFile, path: Path, wanted: int) -> None:
    """Of `wanted` bytes (no more than the model has, which may fit a cache), or of a part of what is free."""
    limits = memory_limits()
    memory = wanted if limits is None else limits.free // 8
    try:
        write_probe_model(source, path, min(wanted, memory, shutil.disk_usage(path.parent).free // 4))
    except ColibriError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise


def _median_of(engine: Engine, counts: list[int], repeat: int) -> float:
    """Seconds of a forward, the median over `repeat` timelines of forwards with so many random tokens."""
    random, seconds = np.random.default_rng(0), []
    with engine.session() as session:
        for _ in range(repeat):
            session.truncate(0)
            for count in counts:
                tokens = random.integers(0, VOCABULARY, count)
                start = time.perf_counter()
                session.forward(tokens, last_only=True)
                seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def prompt_speed(measured: dict[str, float], tokens: int) -> float:
    """Between the measured sizes by their logarithm, beyond them as the nearest."""
    speeds = [measured[f"prompt {size}"] for size in PROMPT_SIZES]
    return float(np.interp(math.log(tokens), [math.log(size) for size in PROMPT_SIZES], speeds))


def disk_key(path: Path, threads: int, direct: bool) -> str:
    """The file system, the size of the records, and how they are read."""
    with CbiFile.open(path) as file:
        record = max((e.size for s in file.expert_sets for e in s.experts), default=MIB)
    way = "" if direct else " | buffered"
    return f"disk {path.stat().st_dev} {_file_system(path)} | {record} | {threads}{way}"


def _file_system(path: Path) -> str:
    """Type and source of the mount that holds a path, as its number may change with the next start."""
    real, best = str(path.resolve()), ("", "")
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines():
            front, _, back = line.partition(" - ")
            mount = front.split(" ")[4]
            if (real + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best[0]):
                best = mount, " ".join(back.split(" ")[:2])
    return best[1]


def measure_disk(path: Path, threads: int, direct: bool) -> dict[str, float]:
    """Bytes for each second of reads of whole expert records by `threads` threads.

    direct: past the page cache, if that is possible; else through it, as much of them as it may hold.
    """
    with CbiFile.open(path) as file:
        records = [(e.offset, e.size) for s in file.expert_sets for e in s.experts]
    if not records:
        size = path.stat().st_size
        records = [(at, MIB) for at in range(0, size - MIB, MIB)]
    order = np.random.default_rng(int(time.time())).permutation(len(records))
    chosen, total = [], 0
    for index in order:
        chosen.append(records[index])
        total += records[index][1]
        if total >= _DISK_BYTES:
            break
    for flag in (getattr(os, "O_DIRECT", 0) if direct else 0, 0):
        try:
            return _read_all(path, flag, chosen, threads) | {"is_direct": int(bool(flag))}
        except OSError as error:
            if not flag:
                raise ModelFileError(f"{path} cannot be read: {error.strerror}") from None
    raise AssertionError("unreachable")


def _read_all(path: Path, flag: int, records: list[tuple[int, int]], threads: int) -> dict[str, float]:
    descriptor = os.open(path, os.O_RDONLY | flag)
    try:
        largest = max(size for _, size in records)

        def read(part: list[tuple[int, int]]) -> int:
            done = 0
            with mmap.mmap(-1, -(-largest // _PAGE) * _PAGE) as buffer, memoryview(buffer) as view:
                for offset, size in part:
                    with view[: -(-size // _PAGE) * _PAGE] as place:
                        done += min(size, os.preadv(descriptor, [place], offset))
            return done

        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            done = sum(pool.map(read, [records[i::threads] for i in range(threads)]))
        return {"bytes_per_second": done / (time.perf_counter() - start)}
    finally:
        os.close(descriptor)

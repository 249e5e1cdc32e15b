"""What the machine can do: the compiled probes, the kernel benchmark, and the page cache."""

from __future__ import annotations

import csv
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Tools:
    """The programs of this folder, compiled."""

    probes: Path
    kernels: Path

    def probe(self, *arguments: object) -> dict[str, Any]:
        """One line of probes.c."""
        command = [str(self.probes), *map(str, arguments)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def limits(self, threads: int, isa: str, mebibytes: int) -> dict[str, float]:
        """Memory GB/s and TOPS of the int8 units at this moment.

        Memory is read in three ways, and by the kernel of decoding: the best of all counts.
        """
        memory = self.probe("bandwidth", threads, mebibytes)["gb_per_s"]
        limits = {"gb_per_s": max(memory, self.kernel_read_rate(threads, isa, mebibytes))}
        units = self.probe("int8", threads)
        return limits | {name: rate for name, rate in units.items() if name.endswith("_tops")}

    def kernel_read_rate(self, threads: int, isa: str, mebibytes: int) -> float:
        """GB/s at which the kernel of decoding reads 4-bit weights."""
        choice = {"isa": isa, "op": "matmul", "format": "q4_g32", "rows": 1, "threads": threads, "mib": mebibytes}
        command = [str(self.kernels), *(str(word) for name, value in choice.items() for word in (f"--{name}", value))]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        return max(float(row["gb_per_s"]) for row in csv.DictReader(lines))


def build_tools(folder: Path) -> Tools:
    """Compile probes and kernel benchmark."""
    build(folder, ("probes", "kernels"))
    return Tools(folder / "bench" / "probes", folder / "bench" / "kernels")


def build(folder: Path, programs: Sequence[str]) -> Path:
    """Compile programs of bench/CMakeLists.txt; returns the folder."""
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    cmake, ninja = shutil.which("cmake", path=beside), shutil.which("ninja", path=beside)
    if cmake is None:
        raise SystemExit("cmake is missing; pip install '.[bench]' brings it")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    configure = [cmake, "-S", str(ROOT), "-B", str(folder), "-DCOLIBRI_BENCH=ON", *generator]
    compile = [cmake, "--build", str(folder), "--target", *programs, "--parallel", "2"]
    for command in (configure, compile):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return folder


class StillCached(Exception):
    """A file could not be dropped from the page cache."""


def cached_share(path: Path) -> float:
    """Share of a file's pages that are in the page cache."""
    library = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as view:
        resident = np.zeros(-(-len(view) // mmap.PAGESIZE), np.uint8)
        address = np.frombuffer(view, np.uint8)
        try:
            if library.mincore(ctypes.c_void_p(address.ctypes.data), ctypes.c_size_t(len(view)), resident.ctypes):
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
        finally:
            del address
    return float((resident & 1).mean())


def evict(path: Path) -> None:
    """Drop a file from the page cache with posix_fadvise; StillCached if it stays (another program maps it)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    if (share := cached_share(path)) > 0.01:
        raise StillCached(f"{share:.0%} of {path} stays in the page cache; another program has it mapped")


def fill_cache(path: Path) -> None:
    """Read a file, so that it is in the page cache."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(8 << 20)
        while file.readinto(buffer):
            pass

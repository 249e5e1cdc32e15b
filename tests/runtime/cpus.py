"""Every kernel set (COLIBRI_CPU), in ascending order: what /proc/cpuinfo must list, and whose float kernels it has."""

from __future__ import annotations

from pathlib import Path

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
FLAGS: dict[str, set[str]] = {
    "scalar": set(),
    "avx2": AVX2,
    "avxvnni": AVX2 | {"avx_vnni"},
    "avx512": AVX512,
    "amx": AVX512 | {"amx_tile", "amx_int8"},
    "neon": {"asimddp"},
    "i8mm": {"asimddp", "i8mm"},
}
CPUS = tuple(FLAGS)
FLOAT_KERNELS = {"avxvnni": "avx2", "amx": "avx512", "i8mm": "neon"}


def this_machine_has(cpu: str) -> bool:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return FLAGS[cpu] <= set(next((line.split() for line in lines if line.startswith(("flags", "Features"))), []))

"""The tables of `colibri bench --profile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colibri.runtime.backend import PhaseStatistics


def phase_profile(phase: PhaseStatistics) -> dict[str, Any]:
    """Milliseconds for each token as JSON types: by layer and op, by op outside any layer, and the rest."""

    def per_token(seconds: float) -> float:
        return round(1e3 * seconds / max(phase.tokens, 1), 6)

    layers = [{op: per_token(seconds) for op, seconds in times.items()} for times in phase.seconds_by_layer]
    outside = {op: per_token(seconds) for op, seconds in phase.seconds_outside.items()}
    in_ops = sum(sum(times.values()) for times in (*phase.seconds_by_layer, phase.seconds_outside))
    return {
        "tokens": phase.tokens,
        "ms_per_token": per_token(phase.seconds),
        "layers": layers,
        "outside": outside,
        "other": per_token(max(phase.seconds - in_ops, 0.0)),
    }


def profile_table(profile: Mapping[str, Any]) -> str:
    """Rows are layers, columns are ops, the busiest first; sums and percent at both edges."""
    rows: dict[str, dict[str, float]] = {str(number): times for number, times in enumerate(profile["layers"])}
    rows["outside"] = profile["outside"]
    rows["other"] = {"other": profile["other"]}
    sums: dict[str, float] = {}
    for times in rows.values():
        for op, ms in times.items():
            sums[op] = sums.get(op, 0.0) + ms
    ops = sorted(sums, key=lambda op: -sums[op])
    total = sum(sums.values()) or 1.0
    lines = [["layer", *ops, "total", "%"]]
    for name, times in (*rows.items(), ("total", sums)):
        whole = sum(times.values())
        cells = [f"{times[op]:.4f}" if op in times else "-" for op in ops]
        lines.append([name, *cells, f"{whole:.4f}", f"{100 * whole / total:.1f}"])
    lines.append(["%", *(f"{100 * sums[op] / total:.1f}" for op in ops), "100.0", ""])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )

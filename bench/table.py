"""Samples of a benchmark, their medians, and ratios formed inside each round.

The speed of a shared machine drifts by more than engines differ, so a ratio is formed between two samples of one
round, taken seconds apart, and the median of these is quoted. The ratio of the medians stands beside it: where the two
disagree, the machine was too noisy to quote either.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS = "colibri"
PROBE = "probe"
"""In the place of an engine: what the machine itself does."""
NOISE = 0.05
"""How far the two ways to a ratio may be apart before a warning."""

_LESS_IS_BETTER = {"s", "ms", "us", "MiB"}
_FIELDS: tuple[str, ...] = (
    "section",
    "measure",
    "engine",
    "round",
    "value",
    "low",
    "high",
    "of_medians",
    "unit",
    "note",
)


@dataclass(frozen=True)
class Sample:
    """One figure. round counts from 1; what is measured once for a whole run is round 1."""

    section: str
    measure: str
    engine: str
    round: int
    value: float
    unit: str


@dataclass(frozen=True)
class Ratio:
    """How many times as good as a peer: the median over the rounds, its range, and the ratio of the medians."""

    middle: float
    low: float
    high: float
    of_medians: float

    @property
    def noisy(self) -> bool:
        return abs(self.middle / self.of_medians - 1) > NOISE


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


@dataclass
class Table:
    """All samples of a run. notes: (section, engine) -> why it was not run, or what to know about it."""

    samples: list[Sample] = field(default_factory=list)
    notes: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, section: str, measure: str, engine: str, round: int, value: float, unit: str) -> None:
        self.samples.append(Sample(section, measure, engine, round, value, unit))

    def values(self, section: str, measure: str, engine: str) -> dict[int, float]:
        """Value by round."""
        return {
            sample.round: sample.value
            for sample in self.samples
            if (sample.section, sample.measure, sample.engine) == (section, measure, engine)
        }

    def ratio(self, section: str, measure: str, peer: str) -> Ratio | None:
        """How many times as good as the peer we are; above 1 is better, whatever the unit. None without both."""
        ours, theirs = self.values(section, measure, OURS), self.values(section, measure, peer)
        rounds = sorted(ours.keys() & theirs.keys())
        if not rounds or not all(ours[r] > 0 and theirs[r] > 0 for r in rounds):
            return None
        inverse = self._unit(section, measure) in _LESS_IS_BETTER
        pairs = [(theirs[r], ours[r]) if inverse else (ours[r], theirs[r]) for r in rounds]
        inside = [a / b for a, b in pairs]
        of_medians = statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)
        return Ratio(statistics.median(inside), min(inside), max(inside), of_medians)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every sample, every median, every ratio and every note, for the CSV."""
        for s in self.samples:
            yield _row(s.section, s.measure, s.engine, s.round, s.value, unit=s.unit)
        for section, measure, engine in self._keys():
            values = list(self.values(section, measure, engine).values())
            middle, unit = statistics.median(values), self._unit(section, measure)
            yield _row(section, measure, engine, "median", middle, min(values), max(values), unit=unit)
        for section, measure, peer, ratio in self.ratios():
            note = "noisy" if ratio.noisy else ""
            yield _row(
                section, measure, f"{OURS} / {peer}", "ratio", ratio.middle, ratio.low, ratio.high, ratio.of_medians,
                unit="x", note=note,
            )  # fmt: skip
        for (section, engine), note in self.notes.items():
            yield _row(section, "", engine, "note", note=note)

    def ratios(self) -> Iterator[tuple[str, str, str, Ratio]]:
        """(section, measure, peer, ratio) wherever both were measured."""
        for section, measure, peer in self._keys():
            comparable = peer not in (OURS, PROBE) and self._unit(section, measure) != "x"
            if comparable and (ratio := self.ratio(section, measure, peer)):
                yield section, measure, peer, ratio

    def write_csv(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, _FIELDS)
            writer.writeheader()
            writer.writerows(self.rows())

    def text(self) -> str:
        """For people: a block for each section, ratios below, notes last."""
        lines: list[str] = []
        for section in dict.fromkeys([key[0] for key in self._keys()] + [key[0] for key in self.notes]):
            keys = [key for key in self._keys() if key[0] == section]
            engines, measures = dict.fromkeys(key[2] for key in keys), dict.fromkeys(key[1] for key in keys)
            width = max([len(measure) for measure in measures] + [8]) + 2
            lines += ["", f"== {section}", " " * width + "".join(f"{engine:>26}" for engine in engines)]
            for measure in measures:
                cells = [self._cell(section, measure, engine) for engine in engines]
                unit = self._unit(section, measure)
                lines.append(f"{measure:{width}}" + "".join(f"{cell:>26}" for cell in cells) + f"  {unit}")
            for of, measure, peer, ratio in self.ratios():
                if of == section:
                    lines.append(
                        f"  {measure}: {OURS} is {ratio.middle:.2f}x {peer} "
                        f"({ratio.low:.2f} to {ratio.high:.2f}; of the medians {ratio.of_medians:.2f})"
                        + ("  NOISY: the two disagree" if ratio.noisy else "")
                    )
            lines += [f"  {engine}: {note}" for (of, engine), note in self.notes.items() if of == section]
        return "\n".join(lines[1:])

    def _keys(self) -> list[tuple[str, str, str]]:
        return list(dict.fromkeys((s.section, s.measure, s.engine) for s in self.samples))

    def _unit(self, section: str, measure: str) -> str:
        return next(s.unit for s in self.samples if (s.section, s.measure) == (section, measure))

    def _cell(self, section: str, measure: str, engine: str) -> str:
        values = list(self.values(section, measure, engine).values())
        if not values:
            return "-"
        middle = f"{statistics.median(values):.4g}"
        return middle if len(values) == 1 else f"{middle} ({min(values):.4g}-{max(values):.4g})"


def _row(
    section: str,
    measure: str,
    engine: str,
    round: int | str,
    value: float | None = None,
    low: float | None = None,
    high: float | None = None,
    of_medians: float | None = None,
    unit: str = "",
    note: str = "",
) -> dict[str, Any]:
    numbers = ["" if x is None else f"{x:.6g}" for x in (value, low, high, of_medians)]
    return dict(zip(_FIELDS, (section, measure, engine, round, *numbers, unit, note), strict=True))

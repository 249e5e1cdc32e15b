"""Medians and ratios of the benchmark, by hand."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from table import Table, percentile


def of_rounds(unit: str, **engines: list[float]) -> Table:
    table = Table()
    for engine, values in engines.items():
        for number, value in enumerate(values, 1):
            table.add("s", "m", engine, number, value, unit)
    return table


def test_ratios_are_formed_inside_the_rounds():
    ratio = of_rounds("tokens/s", colibri=[10, 20, 60], peer=[5, 5, 20]).ratio("s", "m", "peer")
    assert ratio is not None
    assert (ratio.middle, ratio.low, ratio.high) == (3, 2, 4)
    assert ratio.of_medians == 4
    assert ratio.noisy


@pytest.mark.parametrize("unit", ["s", "ms", "MiB"])
def test_less_is_better_for_times_and_memory(unit: str):
    ratio = of_rounds(unit, colibri=[1, 2], peer=[3, 4]).ratio("s", "m", "peer")
    assert ratio is not None
    assert (ratio.low, ratio.high) == (2, 3)
    assert math.isclose(ratio.of_medians, 3.5 / 1.5)


def test_a_steady_machine_gives_no_warning():
    table = of_rounds("tokens/s", colibri=[10, 10.1, 9.9], peer=[5, 5.05, 4.95])
    ratio = table.ratio("s", "m", "peer")
    assert ratio is not None and not ratio.noisy
    assert "NOISY" not in table.text()
    assert "NOISY" in of_rounds("tokens/s", colibri=[10, 20, 60], peer=[5, 5, 20]).text()


def test_rounds_that_one_of_them_missed_do_not_count():
    ratio = of_rounds("tokens/s", colibri=[10, 99], peer=[5]).ratio("s", "m", "peer")
    assert ratio is not None and (ratio.middle, ratio.of_medians) == (2, 2)
    assert of_rounds("tokens/s", colibri=[10]).ratio("s", "m", "peer") is None


def test_shares_and_probes_are_not_compared():
    assert list(of_rounds("x", colibri=[1], peer=[2]).ratios()) == []
    assert list(of_rounds("ms", colibri=[1], probe=[2]).ratios()) == []


def test_percentile_is_a_value_that_was_measured():
    assert percentile(range(1, 101), 0.5) == 50
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([7], 0.99) == 7
    assert percentile([3, 1, 2], 0.99) == 3


def test_csv_has_samples_medians_ratios_and_notes(tmp_path: Path):
    table = of_rounds("tokens/s", colibri=[10, 20, 60], peer=[5, 5, 20])
    table.notes["s", "absent"] = "not run: no interpreter"
    table.write_csv(tmp_path / "new" / "t.csv")
    with (tmp_path / "new" / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    kinds = [row["round"] for row in rows]
    assert kinds == ["1", "2", "3"] * 2 + ["median"] * 2 + ["ratio", "note"]
    ratio = rows[-2]
    assert [ratio[key] for key in ("value", "low", "high", "of_medians", "note")] == ["3", "2", "4", "4", "noisy"]
    assert (rows[-1]["engine"], rows[-1]["note"]) == ("absent", "not run: no interpreter")

"""The experts' part of the statistics, and the progress of a cold model."""

from __future__ import annotations

import io
import sys
import time
from dataclasses import replace

import pytest
from store.conftest import plan_of

import colibri
from colibri.cli import warming
from colibri.cli.experts_report import notes
from colibri.cli.generate import print_statistics
from colibri.runtime.backend import Statistics
from colibri.runtime.engine import demo_model_path


def ran(expert_cache: int | None) -> Statistics:
    with colibri.Engine(threads=1, expert_cache=expert_cache) as engine:
        list(engine.generate("In the beginning", max_tokens=20, temperature=0))
        return engine.statistics()


def test_a_resident_model_has_no_reads_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    statistics = ran(None)
    print_statistics(statistics)
    shown = capsys.readouterr().err
    assert "busiest" in shown and "hit %" not in shown and "prediction" not in shown


def test_reads_and_prediction_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    statistics = ran(plan_of(demo_model_path()).all_expert_bytes // 2)
    sets = statistics.expert_sets
    hits, misses = sum(layer.hits for layer in sets), sum(layer.misses for layer in sets)
    assert hits and misses
    assert hits + misses == sum(layer.experts_computed for layer in sets)
    print_statistics(statistics)
    shown = capsys.readouterr().err
    row = next(line for line in shown.splitlines() if "│ all " in line)
    assert f"{100 * hits / (hits + misses):.1f}" in row
    assert f"{sum(layer.bytes_read for layer in sets) / 2**20:.1f}" in row
    recalled, predictable = sum(layer.recalled for layer in sets), sum(layer.predictable for layer in sets)
    assert 0.5 < recalled / predictable < 1  # of a trained model, with its own router
    assert f"{100 * recalled / predictable:.1f}% of the chosen experts were predicted" in shown


def test_the_measured_rates_are_shown() -> None:
    statistics = replace(ran(plan_of(demo_model_path()).all_expert_bytes // 2), is_direct=True)
    shown = {
        rates: "\n".join(
            notes(replace(statistics, direct_bytes_per_second=rates[0], buffered_bytes_per_second=rates[1]))
        )
        for rates in ((0, 0), (2_340_000_000, 910_000_000), (2_000_000_000, 4_000_000_000))
    }
    assert all("reads go past the page cache" in text for text in shown.values())
    assert "measured at the start" not in shown[0, 0]
    assert "measured at the start: 2.34 GB/s past it, 0.91 GB/s through it\n" in shown[2_340_000_000, 910_000_000]
    assert "4.00 GB/s through it, a gain too small, or memory has no room" in shown[2_000_000_000, 4_000_000_000]


def test_experts_that_stand_out_are_named() -> None:
    statistics = ran(plan_of(demo_model_path()).all_expert_bytes // 2)
    first = replace(
        statistics.expert_sets[0],
        tokens_per_expert=(0, 0, *[5] * 30),
        loads_per_expert=(0, 0, 70, *[2] * 29),
        load_seconds_per_expert=(0.0, 0.0, 0.07, 0.05, *[0.002] * 28),
    )
    lines = "\n".join(notes(replace(statistics, expert_sets=(first,), warning="memory is not locked")))
    assert "warning: memory is not locked" in lines
    assert "slow to read (over 3 times the mean): 1 of 32 experts (layer/expert 0/3)" in lines
    assert "read often (over 3 times the mean): 1 of 32 experts (layer/expert 0/2)" in lines
    assert "never used: 2 of 32 experts (layer/expert 0/0, 0/1)" in lines
    assert "0.5-1 ms: 1," not in lines and "1-2 ms: 29" in lines and "16-32 ms: 1" in lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(warming, "DELAY", 0.0)
    monkeypatch.setattr(warming, "INTERVAL", 0.01)
    with (
        colibri.Engine(threads=1, expert_cache=plan_of(demo_model_path()).all_expert_bytes // 2) as engine,
        engine.session() as session,
        warming.warming(engine, 3),
    ):
        session.forward([1, 2, 3])
        time.sleep(0.5)
    assert ("reading experts" in screen.getvalue()) == terminal


def test_expected_bytes_grow_to_all() -> None:
    statistics = ran(None)
    expected = [warming.expected_bytes(statistics, tokens) for tokens in (0, 1, 2, 10, 10000)]
    assert expected == sorted(expected)
    assert expected[:2] == [0, statistics.token_expert_bytes]
    assert expected[-1] == statistics.all_expert_bytes

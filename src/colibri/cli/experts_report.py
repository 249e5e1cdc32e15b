"""The experts' part of `run --statistics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from colibri.runtime.backend import ExpertSetStatistics, Statistics

FLAGGED_ABOVE = 3.0
"""An expert is flagged when its reads, or the time of one, exceed the mean so many times."""
MOST_NAMED = 8


def print_experts(console: Console, statistics: Statistics) -> None:
    """A row for each layer, then what stands out."""
    sets = statistics.expert_sets
    table = Table("layer", "experts computed", "tokens x experts", "MiB touched", "busiest expert")
    if not statistics.resident:
        for title in ("hits", "misses", "hit %", "MiB read", "stall ms", "read ahead", "of it used %"):
            table.add_column(title, justify="right")
    for layer in sets:
        table.add_row(*_row(layer, statistics.resident))
    if not statistics.resident:
        table.add_section()
        table.add_row("all", *_sums(sets))
    for column in table.columns:
        column.overflow = "fold"  # a narrow terminal breaks numbers, it never loses digits
    console.print(table)
    for line in notes(statistics):
        console.print(line, highlight=False)


def _row(layer: ExpertSetStatistics, resident: bool) -> list[str]:
    busiest = max(range(layer.expert_count), key=layer.tokens_per_expert.__getitem__)
    named = f"{busiest} ({layer.tokens_per_expert[busiest]} tokens)"
    first = [str(layer.layer), *_computed([layer]), named]
    return first if resident else [*first, *_traffic([layer])]


def _sums(sets: Sequence[ExpertSetStatistics]) -> list[str]:
    return [*_computed(sets), "", *_traffic(sets)]


def _computed(sets: Sequence[ExpertSetStatistics]) -> list[str]:
    return [
        str(sum(layer.experts_computed for layer in sets)),
        str(sum(layer.expert_tokens for layer in sets)),
        _mib(sum(layer.bytes_touched for layer in sets)),
    ]


def _traffic(sets: Sequence[ExpertSetStatistics]) -> list[str]:
    hits, misses = sum(layer.hits for layer in sets), sum(layer.misses for layer in sets)
    ahead = sum(layer.prefetched for layer in sets)
    return [
        str(hits),
        str(misses),
        _percent(hits, hits + misses),
        _mib(sum(layer.bytes_read for layer in sets)),
        f"{1e3 * sum(layer.stall_seconds for layer in sets):.1f}",
        str(ahead),
        _percent(sum(layer.prefetched_used for layer in sets), ahead),
    ]


def notes(statistics: Statistics) -> list[str]:
    """Lines about reading, prediction and single experts; empty for what has nothing to say."""
    sets = statistics.expert_sets
    lines = [f"warning: {statistics.warning}"] if statistics.warning else []
    if not statistics.resident:
        way = "past" if statistics.is_direct else "through"
        lines.append(f"experts have {_mib(statistics.expert_bytes)} MiB of memory, reads go {way} the page cache")
        lines += _read_rates(statistics)
        lines += _prediction(statistics)
        lines += _read_times(sets)
    never = [(layer, expert) for layer in sets for expert, used in enumerate(layer.tokens_per_expert) if not used]
    return lines + _named("never used", never, sum(layer.expert_count for layer in sets))


def _read_rates(statistics: Statistics) -> list[str]:
    direct, buffered = statistics.direct_bytes_per_second, statistics.buffered_bytes_per_second
    if not direct:
        return []
    is_unused = statistics.is_direct and buffered > direct
    unused = ", a gain too small, or memory has no room for the file" if is_unused else ""
    return [f"measured at the start: {direct / 1e9:.2f} GB/s past it, {buffered / 1e9:.2f} GB/s through it{unused}"]


def _prediction(statistics: Statistics) -> list[str]:
    passes = statistics.predicted_passes + statistics.unpredicted_passes
    if not passes:
        return []
    sets = statistics.expert_sets
    recalled = sum(layer.recalled for layer in sets)
    return [
        f"prediction: in {statistics.predicted_passes} of {passes} passes of few tokens, "
        f"{_percent(recalled, sum(layer.predictable for layer in sets))}% of the chosen experts were predicted, "
        f"{_percent(recalled, sum(layer.predicted for layer in sets))}% of the predicted ones chosen, "
        f"{1e3 * statistics.prediction_seconds:.1f} ms"
    ]


def _read_times(sets: Sequence[ExpertSetStatistics]) -> list[str]:
    """A histogram of the experts' mean read times, and the experts that are slow or read often."""
    read = [
        (layer, expert, loads, seconds / loads)
        for layer in sets
        for expert, (loads, seconds) in enumerate(
            zip(layer.loads_per_expert, layer.load_seconds_per_expert, strict=True)
        )
        if loads
    ]
    if not read:
        return []
    count = sum(layer.expert_count for layer in sets)
    mean_loads = sum(loads for _, _, loads, _ in read) / count
    mean_seconds = sum(loads * seconds for _, _, loads, seconds in read) / sum(loads for _, _, loads, _ in read)
    bins = Counter(_power_of_two(1e3 * seconds) for *_, seconds in read)
    parts = [f"{2.0**power:g}-{2.0 ** (power + 1):g} ms: {bins[power]}" for power in sorted(bins)]
    slow = [(layer, expert) for layer, expert, _, seconds in read if seconds > FLAGGED_ABOVE * mean_seconds]
    often = [(layer, expert) for layer, expert, loads, _ in read if loads > FLAGGED_ABOVE * mean_loads]
    return [
        f"experts by mean time of a read: {', '.join(parts)}",
        *_named(f"slow to read (over {FLAGGED_ABOVE:g} times the mean)", slow, count),
        *_named(f"read often (over {FLAGGED_ABOVE:g} times the mean)", often, count),
    ]


def _power_of_two(value: float) -> int:
    power = -10
    while value >= 2.0 ** (power + 1):
        power += 1
    return power


def _named(what: str, experts: Sequence[tuple[ExpertSetStatistics, int]], count: int) -> list[str]:
    if not experts:
        return []
    names = ", ".join(f"{layer.layer}/{expert}" for layer, expert in experts[:MOST_NAMED])
    more = f" and {len(experts) - MOST_NAMED} more" if len(experts) > MOST_NAMED else ""
    return [f"{what}: {len(experts)} of {count} experts (layer/expert {names}{more})"]


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"

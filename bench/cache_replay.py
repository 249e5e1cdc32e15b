#!/usr/bin/env python3
"""Replay recorded routing through eviction policies: hit rates and bytes read per token, beside the optimum.

The rules of the expert store hold for every policy. Layers call one after another; a call needs its
experts together: those resident when it begins are hits, the others are read, and no read may take the
slot of an expert that the call needs. Slots for a share of all experts, empty at the start. A prompt's
call that needs more experts than there are slots works in waves; then the experts it has done with are the
only victims left. Belady's optimum gives away the expert whose next call is the furthest in the future.

    cache_replay.py [TRACE.npz]... [--share 10]... [--policy NAME]... [--output bench/results/cache_replay.csv]

Without traces all of bench/traces/ (bench/record_routes.py). The cold start counts in every figure.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
SHARES: tuple[int, ...] = (10, 25, 50, 75)
RESCALE = 2.0**500


@dataclass(frozen=True)
class Trace:
    """Calls in order: call c is layer c % layers of pass c // layers and needs the experts needed[c].

    An expert's number is layer * experts + its index in the layer.
    """

    name: str
    layers: int
    experts: int
    needed: list[np.ndarray]
    expert_bytes: np.ndarray
    tokens: int
    top_k: int  # experts of one token in one layer

    @classmethod
    def load(cls, path: pathlib.Path) -> Trace:
        with np.load(path) as file:
            layers, experts = int(file["layers"]), int(file["experts"])
            used = np.unpackbits(file["used"], axis=1, count=layers * experts).reshape(-1, layers, experts)
            numbers = [layer * experts + np.flatnonzero(one[layer]) for one in used for layer in range(layers)]
            top_k = min(len(one) for one in numbers)
            return cls(path.stem, layers, experts, numbers, file["expert_bytes"], int(file["tokens"].sum()), top_k)

    def next_calls(self) -> list[np.ndarray]:
        """For each call, when each of its experts is needed next (the number of calls: never)."""
        after = np.full(self.layers * self.experts, len(self.needed), np.int64)
        result: list[np.ndarray] = []
        for call in range(len(self.needed) - 1, -1, -1):
            result.append(after[self.needed[call]])
            after[self.needed[call]] = call
        return result[::-1]


class Policy:
    """Who goes when a slot is needed. The victim is the candidate of the least key, the lowest number among equals."""

    def __init__(self, trace: Trace, slots: int):
        self.layers, self.experts, self.slots = trace.layers, trace.experts, slots
        self.key = np.zeros(trace.layers * trace.experts)

    def begin(self, call: int, needed: np.ndarray, hits: np.ndarray) -> None:
        """A call needs these experts (before its victims are chosen); hits: which of them are resident."""

    def victims(self, candidates: np.ndarray, count: int) -> np.ndarray:
        """`count` of the candidates (bool [layers * experts])."""
        return least(self.key, candidates, count)

    def fill(self, call: int, missing: np.ndarray) -> None:
        """These were read."""


def least(key: np.ndarray, candidates: np.ndarray, count: int) -> np.ndarray:
    numbers = np.flatnonzero(candidates)
    return numbers[np.argsort(key[numbers], kind="stable")[:count]]


class Random(Policy):
    """Any."""

    def __init__(self, trace: Trace, slots: int):
        super().__init__(trace, slots)
        self.random = np.random.default_rng(0)

    def victims(self, candidates: np.ndarray, count: int) -> np.ndarray:
        return self.random.choice(np.flatnonzero(candidates), count, replace=False)


class Fifo(Policy):
    """The one read first."""

    def fill(self, call: int, missing: np.ndarray) -> None:
        self.key[missing] = call


class Lru(Policy):
    """The one needed least recently."""

    def begin(self, call: int, needed: np.ndarray, hits: np.ndarray) -> None:
        self.key[needed] = call


class LayerLru(Lru):
    """The least recent of the layer that calls, so that each keeps the slots it took when there were free ones."""

    def begin(self, call: int, needed: np.ndarray, hits: np.ndarray) -> None:
        super().begin(call, needed, hits)
        self.layer = call % self.layers

    def victims(self, candidates: np.ndarray, count: int) -> np.ndarray:
        own = np.zeros(candidates.size, bool)
        own[self.layer * self.experts : (self.layer + 1) * self.experts] = True
        mine = least(self.key, candidates & own, count)
        return np.concatenate([mine, least(self.key, candidates & ~own, count - len(mine))])


class Lfu(Policy):
    """The one needed least often since the start."""

    def begin(self, call: int, needed: np.ndarray, hits: np.ndarray) -> None:
        self.key[needed] += 1


class DecayedLfu(Policy):
    """The one of the least count, where a call counts half after `half_life` tokens (LRFU)."""

    half_life = 64.0

    def begin(self, call: int, needed: np.ndarray, hits: np.ndarray) -> None:
        if call % self.layers == 0:
            self.key *= 0.5 ** (1 / self.half_life)
        self.key[needed] += 1


class LruTwo(Policy):
    """The one whose last but one call is the oldest (LRU-2); before it those called once only."""

    def __init__(self, trace: Trace, slots: int):
        super().__init__(trace, slots)
        self.last = np.full(self.key.size, -1.0)
        self.calls = len(trace.needed)

    def begin(self, call: int, needed: np.ndarray, hits: np.ndarray) -> None:
        before = self.last[needed]
        self.key[needed] = np.where(before < 0, call - self.calls, before)
        self.last[needed] = call


class TwoQueues(Policy):
    """2Q: a FIFO of a quarter of the slots for new ones, LRU for those called again soon after they left it."""

    def __init__(self, trace: Trace, slots: int):
        super().__init__(trace, slots)
        self.state = np.zeros(self.key.size, np.int8)  # 1: in the FIFO, 2: kept, 3: remembered after the FIFO

    def begin(self, call: int, needed: np.ndarray, hits: np.ndarray) -> None:
        old = needed[hits & (self.state[needed] == 2)]
        self.key[old] = call

    def victims(self, candidates: np.ndarray, count: int) -> np.ndarray:
        fifo, kept = candidates & (self.state == 1), candidates & (self.state == 2)
        surplus = max(0, int((self.state == 1).sum()) + count - max(1, self.slots // 4))
        first = least(self.key, fifo, min(surplus, count))
        rest = least(self.key, kept, count - len(first))
        chosen = np.concatenate([first, rest])
        if len(chosen) < count:
            fifo[first] = False
            chosen = np.concatenate([chosen, least(self.key, fifo, count - len(chosen))])
        self.state[chosen] = np.where(self.state[chosen] == 1, 3, 0)
        remembered = self.state == 3
        self.state[least(self.key, remembered, max(0, int(remembered.sum()) - self.slots // 2))] = 0
        return chosen

    def fill(self, call: int, missing: np.ndarray) -> None:
        self.state[missing] = np.where(self.state[missing] == 3, 2, 1)
        self.key[missing] = call


class Adaptive(Policy):
    """ARC: lists of those called once and more often, sized by which of them forgot too early."""

    def __init__(self, trace: Trace, slots: int):
        super().__init__(trace, slots)
        self.state = np.zeros(self.key.size, np.int8)  # 1: once, 2: again, 3 and 4: remembered after these
        self.once = 0.0  # slots meant for those called once

    def begin(self, call: int, needed: np.ndarray, hits: np.ndarray) -> None:
        for number in needed[~hits]:
            recent, frequent = int((self.state == 3).sum()), int((self.state == 4).sum())
            if self.state[number] == 3:
                self.once = min(self.slots, self.once + max(1.0, frequent / recent))
            elif self.state[number] == 4:
                self.once = max(0.0, self.once - max(1.0, recent / frequent))
        old = needed[hits]
        self.state[old] = 2
        self.key[old] = call

    def victims(self, candidates: np.ndarray, count: int) -> np.ndarray:
        chosen = np.empty(0, np.int64)
        left = candidates.copy()
        while len(chosen) < count:
            once, again = left & (self.state == 1), left & (self.state == 2)
            surplus = (self.state == 1).sum() > self.once
            one = least(self.key, once if once.any() and (surplus or not again.any()) else again, 1)
            self.state[one] += 2
            left[one] = False
            chosen = np.concatenate([chosen, one])
        for state, limit in ((3, self.slots - int((self.state == 1).sum())), (4, self.slots)):
            remembered = self.state == state
            self.state[least(self.key, remembered, max(0, int(remembered.sum()) - limit))] = 0
        return chosen

    def fill(self, call: int, missing: np.ndarray) -> None:
        self.state[missing] = np.where(self.state[missing] >= 3, 2, 1)
        self.key[missing] = call


class ExpectedWait(Policy):
    """The one whose next call is expected last, as csrc/experts/policy.c does it: docs/adr/0007-eviction-policy.md.

    An expert's score counts its calls, where all older ones lose 1 / window with each call of the layer; the layer's
    next call needs it with a chance of about score / window.
    """

    uses = 2.0  # calls of the mean expert in a window

    def __init__(self, trace: Trace, slots: int):
        super().__init__(trace, slots)
        window = self.uses * trace.experts / trace.top_k
        self.growth = window / (window - 1)
        self.period = trace.layers * window
        self.weight = np.ones(trace.layers)  # of a call now; that it grows is how older ones fade
        self.score = np.zeros(self.key.size)
        self.layer_of = np.arange(self.key.size) // trace.experts

    def begin(self, call: int, needed: np.ndarray, hits: np.ndarray) -> None:
        self.layer, self.needed = call % self.layers, needed
        self.weight[self.layer] *= self.growth
        self.score[needed] += self.weight[self.layer]
        if self.weight[self.layer] > RESCALE:
            self.weight[self.layer] /= RESCALE
            self.score[self.layer_of == self.layer] /= RESCALE

    def victims(self, candidates: np.ndarray, count: int) -> np.ndarray:
        ahead = (self.layer_of - self.layer - 1) % self.layers
        with np.errstate(divide="ignore"):
            wait = ahead + self.period * (self.weight[self.layer_of] / self.score)
        wait[self.needed] = 0
        return least(-wait, candidates, count)


class Hindsight(Policy):
    """The one called least often in the whole trace: the best that counting could know, were it constant."""

    def __init__(self, trace: Trace, slots: int):
        super().__init__(trace, slots)
        for needed in trace.needed:
            self.key[needed] += 1


class Belady(Policy):
    """The one needed last in the future."""

    def __init__(self, trace: Trace, slots: int):
        super().__init__(trace, slots)
        self.next = trace.next_calls()

    def begin(self, call: int, needed: np.ndarray, hits: np.ndarray) -> None:
        self.key[needed] = -self.next[call]


def decayed(half_life: float) -> Callable[[Trace, int], Policy]:
    def make(trace: Trace, slots: int) -> Policy:
        policy = DecayedLfu(trace, slots)
        policy.half_life = half_life
        return policy

    return make


POLICIES: dict[str, Callable[[Trace, int], Policy]] = {
    "belady": Belady,
    "hindsight": Hindsight,
    "random": Random,
    "fifo": Fifo,
    "lru": Lru,
    "layer-lru": LayerLru,
    "lru-2": LruTwo,
    "2q": TwoQueues,
    "arc": Adaptive,
    "lfu": Lfu,
    "lfu-decay-16": decayed(16),
    "lfu-decay-64": decayed(64),
    "lfu-decay-256": decayed(256),
    "expected-wait": ExpectedWait,
}


def replay(trace: Trace, policy: Policy, slots: int) -> np.ndarray:
    """Misses of each call, int64 [calls]."""
    misses = np.zeros(len(trace.needed), np.int64)
    resident = np.zeros(trace.layers * trace.experts, bool)
    free = slots
    for call, needed in enumerate(trace.needed):
        there = resident[needed]
        missing = needed[~there]
        misses[call] = len(missing)
        policy.begin(call, needed, there)
        first, waves = missing, missing[:0]
        if len(needed) > slots:
            first, waves = np.split(missing, [slots - int(there.sum())])
        fresh = min(free, len(first))
        free -= fresh
        if len(first) > fresh:
            candidates = resident.copy()
            candidates[needed] = False
            resident[policy.victims(candidates, len(first) - fresh)] = False
        if len(first):
            resident[first] = True
            policy.fill(call, first)
        for number in waves:
            resident[policy.victims(resident, 1)] = False
            resident[number] = True
            policy.fill(call, np.array([number]))
    return misses


def rows_of(trace: Trace, share: int, policies: list[str]) -> list[dict[str, object]]:
    slots = trace.layers * trace.experts * share // 100
    record = float(trace.expert_bytes.mean())
    requests = np.array([len(needed) for needed in trace.needed])
    rows: list[dict[str, object]] = []
    best = 0.0
    for name in policies:
        misses = replay(trace, POLICIES[name](trace, slots), slots)
        hits = requests - misses
        rate = 100 * hits.sum() / requests.sum()
        by_layer = hits.reshape(-1, trace.layers).sum(0) / requests.reshape(-1, trace.layers).sum(0)
        best = rate if name == "belady" else best
        rows.append(
            {
                "trace": trace.name,
                "share": share,
                "slots": slots,
                "policy": name,
                "hits": hits.sum(),
                "misses": misses.sum(),
                "hit_percent": round(rate, 2),
                "below_belady": round(best - rate, 2) if best else "",
                "mib_per_token": round(misses.sum() * record / trace.tokens / 2**20, 4),
                "least_layer_hit_percent": round(100 * by_layer.min(), 2),
            }
        )
    return rows


def print_summary(rows: list[dict[str, object]], shares: list[int], policies: list[str]) -> None:
    """Mean hit rates over the traces and, in brackets, the points that Belady's is higher, at most."""
    print("| policy | " + " | ".join(f"{share}%" for share in shares) + " |")
    print("|---|" + "---|" * len(shares))
    for name in policies:
        cells: list[str] = []
        for share in shares:
            mine = [row for row in rows if row["policy"] == name and row["share"] == share]
            rate = np.mean([float(str(row["hit_percent"])) for row in mine])
            gaps = [float(str(row["below_belady"])) for row in mine if row["below_belady"] != ""]
            cells.append(f"{rate:.1f}" + (f" ({max(gaps):.1f})" if gaps and name != "belady" else ""))
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=pathlib.Path)
    parser.add_argument("--share", type=int, action="append", help="slots in percent of all experts [10, 25, 50, 75]")
    parser.add_argument("--policy", action="append", choices=list(POLICIES))
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "cache_replay.csv")
    arguments = parser.parse_args()
    shares: list[int] = arguments.share or list(SHARES)
    policies = arguments.policy or list(POLICIES)
    rows: list[dict[str, object]] = []
    for path in arguments.traces or sorted((HERE / "traces").glob("*.npz")):
        trace = Trace.load(path)
        for share in shares:
            rows += rows_of(trace, share, policies)
        print(f"{trace.name}: {len(trace.needed)} calls, {trace.layers} layers of {trace.experts}, top {trace.top_k}")
    print_summary(rows, shares, policies)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()

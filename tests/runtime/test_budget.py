"""Dividing memory: what is refused, what goes to experts, which chunk, and what calls and sessions may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from colibri.errors import MemoryBudgetError, OutOfMemoryError
from colibri.runtime.backend import MemoryPlan
from colibri.runtime.budget import POSITION_BYTES, RESERVE, Budget, Wishes, plan_budget
from colibri.runtime.memory_limits import GroupLimit, MemoryLimits, ProcessMemory

MIB = 1 << 20
MODEL = MemoryPlan(
    tensor_bytes=200 * MIB,
    scratch_bytes=0,  # `measure` gives it
    other_bytes=2 * MIB,
    session_bytes=100 * MIB,
    all_expert_bytes=4000 * MIB,
    least_expert_bytes=3 * MIB,
    wasted_expert_bytes=0,
    largest_layer_bytes=400 * MIB,
    token_expert_bytes=300 * MIB,
    expert_count=1000,
    expert_set_count=10,
    vocabulary_size=32768,
    context_limit=8192,
)
PROCESS = ProcessMemory(resident=50 * MIB, peak=60 * MIB)
MACHINE = MemoryLimits(total=32000 * MIB, available=24000 * MIB, group=None)
WISHES = Wishes("m.cbi", context=4096, sessions=1)


def measure(chunk: int) -> MemoryPlan:
    return replace(MODEL, scratch_bytes=chunk * MIB // 8)


def plan(
    ram: int | None = None, process: ProcessMemory | None = PROCESS, limits: MemoryLimits | None = MACHINE, **wishes
) -> Budget:
    return plan_budget(measure, replace(WISHES, ram=ram, **wishes), process, limits)


def smallest(**wishes) -> int:
    """The figure that a refusal gives."""
    with pytest.raises(MemoryBudgetError) as caught:
        plan(100 * MIB, **wishes)
    return int(str(caught.value).split("give ram=")[1].split("MiB")[0]) * MIB


def test_the_sum_is_the_promise() -> None:
    budget = plan(1000 * MIB)
    model = budget.model
    assert budget.python == RESERVE + 4096 * POSITION_BYTES
    parts = (
        PROCESS.resident, model.tensor_bytes, model.scratch_bytes, model.other_bytes, model.session_bytes,
        budget.results, budget.python, budget.expert_bytes,
    )  # fmt: skip
    assert budget.needed == sum(parts) == 1000 * MIB
    assert budget.left == 0 and not budget.is_resident


def test_what_is_left_goes_to_more_sessions_and_results() -> None:
    budget = plan(6000 * MIB)
    assert budget.is_resident and budget.expert_bytes == MODEL.all_expert_bytes
    assert budget.left is not None and budget.result_limit is not None
    assert budget.left > 1000 * MIB
    assert budget.state_limit == MODEL.session_bytes + budget.left // 2
    # Sessions and results at their limits together still keep the promise.
    grown = budget.needed - budget.state - budget.results + budget.state_limit + budget.result_limit
    assert grown <= 6000 * MIB


def test_the_smallest_budget_of_the_refusal_works_and_less_does_not() -> None:
    least = smallest()
    assert plan(least).expert_bytes >= MODEL.least_expert_bytes
    assert plan(least).max_batch_tokens == 16
    with pytest.raises(MemoryBudgetError):
        plan(least - 3 * MIB)


def test_a_refusal_gives_figures_and_what_to_change() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        plan(200 * MIB, sessions=2, max_batch_tokens=512, expert_cache=10 * MIB)
    message = str(caught.value)
    for words in (
        "m.cbi", "ram=200 MiB", "tokenizer 50 MiB", "dense weights 200 MiB", "state (2 x 4096 positions) 200 MiB",
        "(512 tokens at a time) 64 MiB", "stacks 2 MiB", "experts 10 MiB", "largest layer has 400 MiB", "3.91 GiB",
        "shorter context", "fewer sessions", "smaller max_batch_tokens", "smaller expert_cache", "fewer bits",
    ):  # fmt: skip
        assert words in message
    assert "\n" not in message
    assert isinstance(caught.value, OutOfMemoryError) and caught.value.exit_code == 1


@pytest.mark.parametrize("ram", [*range(500, 6000, 250)])
def test_experts_grow_with_the_budget(ram: int) -> None:
    small, large = plan(ram * MIB), plan((ram + 250) * MIB)
    for budget in (small, large):
        assert budget.needed <= (budget.ram or 0)
        assert MODEL.least_expert_bytes <= budget.expert_bytes <= MODEL.all_expert_bytes
    # A larger chunk may take an eighth of what is won, at most.
    assert large.expert_bytes >= small.expert_bytes


def test_the_chunk() -> None:
    # All fits: the default.
    assert plan(6000 * MIB).max_batch_tokens == 512
    # All fits with a small chunk alone: that one, as reading experts again costs more than a small chunk.
    needed = plan(6000 * MIB, max_batch_tokens=64).needed
    budget = plan(needed)
    assert budget.is_resident and budget.max_batch_tokens == 64
    # Experts are read again for each chunk: larger than the default, but an eighth of their memory at most.
    streaming = plan(3500 * MIB)
    assert streaming.max_batch_tokens == 2048
    assert streaming.model.scratch_bytes <= (streaming.expert_bytes + streaming.model.scratch_bytes) // 8
    assert plan(smallest() + 20 * MIB).max_batch_tokens == 32
    # Never far more than there can be tokens.
    assert plan(3500 * MIB, context=100).max_batch_tokens == 128
    assert plan(3500 * MIB, context=100, sessions=3).max_batch_tokens == 512
    assert plan(3500 * MIB, context=1).max_batch_tokens == 16
    # What was asked for wins, or is refused.
    assert plan(3500 * MIB, max_batch_tokens=1000).max_batch_tokens == 1000
    with pytest.raises(MemoryBudgetError, match="max_batch_tokens"):
        plan(1000 * MIB, max_batch_tokens=8192)


def test_an_expert_cache() -> None:
    budget = plan(3000 * MIB, expert_cache=500 * MIB)
    assert budget.expert_bytes == 500 * MIB
    assert plan(6000 * MIB, expert_cache=9000 * MIB).is_resident
    with pytest.raises(MemoryBudgetError, match="smaller expert_cache"):
        plan(1000 * MIB, expert_cache=900 * MIB)
    with pytest.raises(MemoryBudgetError, match=r"expert_cache=1 MiB .* 3 MiB .* 400 MiB, all 3.91 GiB"):
        plan(3000 * MIB, expert_cache=1 * MIB)


def test_a_process_that_is_too_large_already() -> None:
    with pytest.raises(MemoryBudgetError, match="give ram=2001MiB"):
        plan(100 * MIB, process=ProcessMemory(50 * MIB, 2000 * MIB))
    with pytest.raises(MemoryBudgetError, match=r"already had 1.95 GiB .* ram=1000 MiB"):
        plan(1000 * MIB, process=ProcessMemory(50 * MIB, 2000 * MIB))
    # What was, before there was a budget, does not matter.
    assert plan(process=ProcessMemory(50 * MIB, 2000 * MIB), limits=grouped(1800)).needed < 1800 * MIB


def grouped(limit: int, used: int = 0) -> MemoryLimits:
    return replace(MACHINE, group=GroupLimit("/sys/fs/cgroup/a/memory.max", limit * MIB, used * MIB))


def test_what_is_left_for_page_cache() -> None:
    """Of the machine and of the control group, once everything planned is taken."""
    budget = plan(1000 * MIB)
    assert budget.page_cache == 24000 * MIB - (1000 * MIB - PROCESS.resident)
    assert plan(1000 * MIB, limits=grouped(2048, 48)).page_cache == 2000 * MIB - (1000 * MIB - PROCESS.resident)
    assert plan(1000 * MIB, limits=replace(MACHINE, available=900 * MIB)).page_cache == 0
    assert plan(1000 * MIB, limits=None).page_cache is None


def test_the_default_leaves_a_margin() -> None:
    """In a container of 2 GiB on a machine with 24: the container counts."""
    budget = plan(limits=grouped(2048, 48))
    assert budget.ram == PROCESS.resident + 2000 * MIB - 125 * MIB
    assert budget.needed - budget.process <= 2000 * MIB - 125 * MIB
    assert plan().ram == PROCESS.resident + 24000 * MIB - 1500 * MIB
    small = replace(MODEL, tensor_bytes=0, session_bytes=0)
    budget = plan_budget(lambda _: small, WISHES, PROCESS, grouped(512))
    assert budget.ram == PROCESS.resident + (512 - 64) * MIB


def test_a_container_that_is_too_small_is_named() -> None:
    with pytest.raises(MemoryBudgetError, match=r"/sys/fs/cgroup/a/memory.max, less a margin.*more memory"):
        plan(limits=grouped(256))
    with pytest.raises(MemoryBudgetError, match="at least"):
        plan(limits=grouped(256, 300))


def test_a_budget_above_the_containers_limit_is_refused_not_killed() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        plan(3000 * MIB, limits=grouped(2048, 48))
    message = str(caught.value)
    for words in ("ram=2.93 GiB", "/sys/fs/cgroup/a/memory.max", "limit 2 GiB", "leaves 1.95 GiB", "raise that limit"):
        assert words in message
    most = int(message.split("give ram=")[1].split("MiB")[0]) * MIB
    assert plan(most, limits=grouped(2048, 48)).needed <= most
    # A budget is no wish to fill it: what fits may have any.
    assert plan(9000 * MIB, limits=grouped(5000)).is_resident


def test_a_budget_above_the_machines_memory_is_a_warning() -> None:
    assert plan(3000 * MIB).warning is None
    warning = plan(3000 * MIB, limits=replace(MACHINE, available=1000 * MIB)).warning
    assert warning is not None and "1000 MiB available" in warning and "ram=2.93 GiB" in warning


def test_where_proc_does_not_tell() -> None:
    budget = plan(process=None, limits=None)
    assert budget.is_resident and budget.ram is None and budget.left is None
    assert budget.state_limit == 0 and budget.result_limit is None
    assert plan(process=None, limits=None, expert_cache=10 * MIB).expert_bytes == 10 * MIB
    with pytest.raises(MemoryBudgetError, match="/proc"):
        plan(1000 * MIB, process=None)
    # The machine's memory is unknown, but the process can be watched.
    assert plan(1000 * MIB, limits=None).needed == 1000 * MIB


def test_a_model_without_experts() -> None:
    dense = replace(MODEL, all_expert_bytes=0, least_expert_bytes=0, largest_layer_bytes=0, token_expert_bytes=0)
    check: Callable[[int], MemoryPlan] = lambda chunk: replace(dense, scratch_bytes=chunk)  # noqa: E731
    budget = plan_budget(check, replace(WISHES, ram=500 * MIB), PROCESS, MACHINE)
    assert budget.is_resident and budget.expert_bytes == 0 and budget.max_batch_tokens == 512

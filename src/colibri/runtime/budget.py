"""The promise of `ram=`: what a model takes, whether it fits, and what goes to the experts.

Peak resident set <= budget, with
budget = this process now (tokenizer loaded) + growth of Python + planned memory of the core + results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from colibri.errors import MemoryBudgetError
from colibri.runtime.backend import MemoryPlan
from colibri.runtime.memory_limits import MemoryLimits, ProcessMemory
from colibri.runtime.sizes import format_size

MIB = 1 << 20
# What Python and its libraries grow by after a model is open: code that is read when it first runs, tables, threads.
RESERVE = 16 * MIB
# A position of a context costs Python at most this: text, its encoding, and lists of ids.
POSITION_BYTES = 1024
# NumPy asks for huge pages, so a large array may take the rest of one at either end.
_ARRAY_ROUNDING = 4 * MIB

DEFAULT_BATCH_TOKENS = 512
_SMALLEST_BATCH = 16
_LARGEST_BATCH = 4096
# A larger chunk reads each expert less often for a prompt, and leaves less memory to keep experts in.
_SHARE_OF_CHUNK = 8


@dataclass(frozen=True)
class Wishes:
    """What the caller asked for; None where the budget decides. Sizes in bytes."""

    name: str  # of the model, for messages
    context: int  # positions of each session
    sessions: int
    ram: int | None = None
    expert_cache: int | None = None
    max_batch_tokens: int | None = None


@dataclass(frozen=True)
class Budget:
    """A plan that fits. `ram` is None where nothing is known about this machine's memory and nothing was asked."""

    wishes: Wishes
    model: MemoryPlan
    process: int
    ram: int | None
    max_batch_tokens: int
    expert_bytes: int  # of slots
    warning: str | None = None
    page_cache: int | None = None
    """What this machine and its control groups have left for page cache once all of `needed` is taken, if known."""

    @property
    def python(self) -> int:
        """Growth of Python and its libraries after the model is open."""
        return RESERVE + POSITION_BYTES * self.wishes.context * self.wishes.sessions

    @property
    def results(self) -> int:
        """Arrays that calls return: the last logits of every session, and the sampler's memory."""
        row = 4 * self.model.vocabulary_size
        return array_bytes(row * self.wishes.sessions) + array_bytes(4 * row)

    @property
    def state(self) -> int:
        return self.model.session_bytes * self.wishes.sessions

    @property
    def needed(self) -> int:
        """All that is planned."""
        return sum(self.parts.values()) + self.expert_bytes

    @property
    def parts(self) -> dict[str, int]:
        """What takes memory, experts left out, for people."""
        wishes = self.wishes
        sessions = (
            f"{wishes.sessions} x {wishes.context} positions" if wishes.sessions > 1 else f"{wishes.context} positions"
        )
        return {
            "interpreter, libraries and tokenizer": self.process,
            "dense weights": self.model.tensor_bytes,
            f"attention state ({sessions})": self.state,
            f"working memory ({self.max_batch_tokens} tokens at a time)": self.model.scratch_bytes,
            "tables, staging and stacks": self.model.other_bytes,
            "results": self.results,
            "growth of Python": self.python,
        }

    @property
    def is_resident(self) -> bool:
        """All experts stay in memory."""
        return self.expert_bytes >= self.model.all_expert_bytes

    @property
    def left(self) -> int | None:
        """What the plan leaves of the budget; None without one."""
        return None if self.ram is None else self.ram - self.needed

    @property
    def state_limit(self) -> int:
        """Bytes that the states of all open sessions may have together; 0: no limit."""
        return 0 if self.left is None else self.state + self.left // 2

    @property
    def result_limit(self) -> int | None:
        """Bytes that the results of one call may have; None: no limit."""
        return (
            None
            if self.left is None
            else array_bytes(4 * self.model.vocabulary_size * self.wishes.sessions) + self.left // 2
        )


def array_bytes(size: int) -> int:
    """What an array of `size` bytes may add to the resident set."""
    return size + (_ARRAY_ROUNDING if size >= _ARRAY_ROUNDING else 4096)


def plan_budget(
    measure: Callable[[int], MemoryPlan], wishes: Wishes, process: ProcessMemory | None, limits: MemoryLimits | None
) -> Budget:
    """Divide the memory. `measure` gives the core's plan for a number of tokens computed together.

    Raises MemoryBudgetError, with the figures and what to change, when not even the smallest plan fits, when this
    process has had more than `ram` already, and when a control group would end it.
    """
    if process is None or (limits is None and wishes.ram is None):
        if wishes.ram is not None:
            raise MemoryBudgetError(
                "ram cannot be kept here: /proc does not tell what this process takes; leave it out"
            )
        chunk = wishes.max_batch_tokens or DEFAULT_BATCH_TOKENS
        model = measure(chunk)
        return Budget(wishes, model, 0, None, chunk, _wanted(wishes, model))
    ram = wishes.ram if wishes.ram is not None else process.resident + _default_share(limits)
    budget = _largest_plan(measure, wishes, process, ram)
    if budget is None:
        raise _refusal(measure, wishes, process, ram, limits)
    if wishes.ram is not None and process.peak > ram:
        raise MemoryBudgetError(
            f"this process has already had {format_size(process.peak)} in memory, more than ram={format_size(ram)}; "
            "give it more, or start a new process"
        )
    return replace(budget, warning=_check_limits(budget, limits), page_cache=_page_cache(budget, limits))


def _default_share(limits: MemoryLimits | None) -> int:
    """Of what is free; the rest is for the system and for other processes to grow."""
    free = 0 if limits is None else limits.free
    return free - min(free, max(64 * MIB, free // 16))


def _wanted(wishes: Wishes, model: MemoryPlan) -> int:
    """The most memory for experts that is of use."""
    return model.all_expert_bytes if wishes.expert_cache is None else min(model.all_expert_bytes, wishes.expert_cache)


def _largest_plan(
    measure: Callable[[int], MemoryPlan], wishes: Wishes, process: ProcessMemory, ram: int
) -> Budget | None:
    def plan(chunk: int) -> Budget | None:
        model = measure(chunk)
        empty = Budget(wishes, model, process.resident, ram, chunk, 0)
        wanted = _wanted(wishes, model)
        experts = min(ram - empty.needed, wanted)
        if experts < model.least_expert_bytes or (wishes.expert_cache is not None and experts < wanted):
            return None
        return replace(empty, expert_bytes=experts)

    if wishes.max_batch_tokens is not None:
        return plan(wishes.max_batch_tokens)
    smallest, best = plan(_SMALLEST_BATCH), None
    if smallest is None:
        return None
    # Chunks that leave room for all experts come first; more than the default is of no use then.
    most = max(_SMALLEST_BATCH, wishes.context * wishes.sessions)
    for chunk in _chunks(min(_LARGEST_BATCH, most)):
        larger = plan(chunk)
        if larger is None or (smallest.is_resident and (not larger.is_resident or chunk > DEFAULT_BATCH_TOKENS)):
            break
        if (
            not larger.is_resident
            and smallest.expert_bytes - larger.expert_bytes > smallest.expert_bytes // _SHARE_OF_CHUNK
        ):
            break
        best = larger
    return best or smallest


def _chunks(most: int) -> list[int]:
    """Powers of two, up to the first that is `most` or more."""
    chunks = [_SMALLEST_BATCH]
    while chunks[-1] < most:
        chunks.append(2 * chunks[-1])
    return [chunk for chunk in chunks if chunk <= _LARGEST_BATCH]


def _refusal(
    measure: Callable[[int], MemoryPlan],
    wishes: Wishes,
    process: ProcessMemory,
    ram: int,
    limits: MemoryLimits | None,
) -> MemoryBudgetError:
    chunk = wishes.max_batch_tokens or _SMALLEST_BATCH
    model = measure(chunk)
    layer, all_experts = format_size(model.largest_layer_bytes), format_size(model.all_expert_bytes)
    least_experts = model.least_expert_bytes
    if wishes.expert_cache is not None:
        if wishes.expert_cache < least_experts:
            return MemoryBudgetError(
                f"{wishes.name}: expert_cache={format_size(wishes.expert_cache)} is less than the "
                f"{format_size(least_experts)} with which it can run; the experts of its largest layer have "
                f"{layer}, all {all_experts}"
            )
        least_experts = _wanted(wishes, model)
    least = Budget(wishes, model, process.resident, ram, chunk, least_experts)
    figures = ", ".join(f"{name} {format_size(size)}" for name, size in least.parts.items())
    changes = [
        f"give ram={_up(max(least.needed, process.peak))}"
        if wishes.ram is not None
        else "use a machine or container with more memory",
        *(["a shorter context"] if wishes.context > 1 else []),
        *(["fewer sessions"] if wishes.sessions > 1 else []),
        *(["a smaller max_batch_tokens"] if chunk > _SMALLEST_BATCH else []),
        *(["a smaller expert_cache"] if least_experts > model.least_expert_bytes else []),
        "a file converted to fewer bits",
    ]
    return MemoryBudgetError(
        f"{wishes.name} does not fit in {_named(wishes, ram, limits)}: it needs at least {_up(least.needed)}, of which "
        f"{figures}, experts {format_size(least_experts)} (the largest layer has {layer}, all layers {all_experts}); "
        + ", or ".join(changes)
    )


def _check_limits(budget: Budget, limits: MemoryLimits | None) -> str | None:
    """Refuse what a control group would be killed for; a warning for what only the machine may lack."""
    wishes, more = budget.wishes, budget.needed - budget.process
    if limits is None or wishes.ram is None:
        return None
    takes = f"{wishes.name} would take {format_size(more)} more within ram={format_size(wishes.ram)}"
    if limits.group is not None and more > limits.group.free:
        group = limits.group
        raise MemoryBudgetError(
            f"{takes}, and {group.file} (limit {format_size(group.limit)}) leaves {format_size(group.free)}, so the "
            f"system would end this process; give ram={_down(budget.process + group.free)} at most, or raise that limit"
        )
    if more > limits.available:
        return (
            f"{takes}, and this machine has {format_size(limits.available)} available; it may become slow, or run out "
            "of memory"
        )
    return None


def _page_cache(budget: Budget, limits: MemoryLimits | None) -> int | None:
    return None if limits is None else max(0, limits.free - (budget.needed - budget.process))


def _named(wishes: Wishes, ram: int, limits: MemoryLimits | None) -> str:
    if wishes.ram is not None:
        return f"ram={format_size(ram)}"
    reason = "free memory" if limits is None else limits.reason
    return f"the {format_size(ram)} that this process may have ({reason}, less a margin)"


def _up(size: int) -> str:
    """In MiB, so that giving it back is enough also when the process has grown a little."""
    return f"{-(-size // MIB) + 1}MiB"


def _down(size: int) -> str:
    return f"{max(0, size // MIB - 1)}MiB"

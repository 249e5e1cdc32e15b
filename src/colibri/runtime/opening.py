"""Opens what runs a model: the core within a memory budget, or the NumPy reference."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import ClassVar

from colibri.errors import MemoryBudgetWarning, UsageError
from colibri.runtime import native
from colibri.runtime.arguments import EngineArguments
from colibri.runtime.backend import Backend, MemoryPlan
from colibri.runtime.budget import Budget, plan_budget
from colibri.runtime.memory_limits import ProcessMemory, memory_limits, process_memory
from colibri.runtime.model_text import ModelText
from colibri.runtime.native_backend import NativeBackend, plan_memory
from colibri.runtime.usage_file import UsageFile


class _Promised:
    """Budgets of the engines of this process that are open: what they may still grow to counts for the next one."""

    _budgets: ClassVar[weakref.WeakKeyDictionary[NativeBackend, int]] = weakref.WeakKeyDictionary()
    lock = threading.RLock()

    @classmethod
    def add(cls, backend: NativeBackend, budget: Budget) -> None:
        cls._budgets[backend] = budget.needed

    @classmethod
    def process_memory(cls) -> ProcessMemory | None:
        now = process_memory()
        open_ones = [needed for backend, needed in cls._budgets.items() if backend.is_open]
        return None if now is None else replace(now, resident=max([now.resident, *open_ones]))


# A lock that another thread held at the fork would stay locked in the child.
os.register_at_fork(after_in_child=lambda: setattr(_Promised, "lock", threading.RLock()))


def open_backend(
    text: ModelText, arguments: EngineArguments, usage: UsageFile | None = None
) -> tuple[Backend, Budget | None]:
    """Open a model as COLIBRI_VM says, and give its budget if it has one. What `usage` counts is read first.

    Raises MemoryBudgetError, ModelFileError, UnsupportedModelError, UsageError, OutOfMemoryError.
    """
    if _chosen_vm() == "reference":
        arguments.check_reference()
        from colibri.runtime.reference_backend import ReferenceBackend

        return ReferenceBackend(text.path), None
    with _Promised.lock, _named_cpu() as cpu:
        budget = _plan(text, arguments, cpu)
        options = replace(
            arguments.native_options(),
            max_batch_tokens=budget.max_batch_tokens,
            expert_bytes=0 if budget.is_resident else budget.expert_bytes,
            state_bytes=budget.state_limit,
            page_cache_bytes=0 if budget.page_cache is None else max(1, budget.page_cache),  # 0 is "not known"
        )
        backend = NativeBackend(text.path, arguments.threads or 0, cpu, options, budget.result_limit)
        _Promised.add(backend, budget)
    if usage is not None and not budget.is_resident:
        for expert_set, group in groupby(usage.hottest(), lambda one: one[0]):
            backend.warm(expert_set, [expert for _, expert in group])
    for message in (budget.warning, backend.statistics().warning):
        if message:
            warnings.warn(message, MemoryBudgetWarning, stacklevel=3)
    return backend, budget


def plan_engine(path: Path, arguments: EngineArguments) -> Budget:
    """What a model would take that is not open. Raises what `open_backend` does."""
    if _chosen_vm() == "reference":
        raise UsageError("COLIBRI_VM=reference keeps no memory budget; unset it to plan")
    with _Promised.lock, _named_cpu() as cpu:
        return _plan(ModelText.read(path), arguments, cpu)


def _plan(text: ModelText, arguments: EngineArguments, cpu: str) -> Budget:
    # First, as it counts, and as what parsing it takes for a moment is over then.
    text.load_tokenizer()
    native.release_free_memory()
    wishes = arguments.wishes(str(text.path), text.context_of(arguments.context))
    threads, options = arguments.threads or 0, arguments.native_options()

    @cache
    def measure(max_batch_tokens: int) -> MemoryPlan:
        changed = replace(options, max_batch_tokens=max_batch_tokens)
        return plan_memory(text.path, threads, cpu, changed, wishes.context, arguments.state_format)

    return plan_budget(measure, wishes, _Promised.process_memory(), memory_limits())


def _chosen_vm() -> str:
    vm = os.environ.get("COLIBRI_VM", "native") or "native"
    if vm not in ("native", "reference"):
        raise UsageError(f"COLIBRI_VM must be native or reference, not {vm!r}")
    return vm


@contextmanager
def _named_cpu() -> Iterator[str]:
    """What COLIBRI_CPU says; an error that it causes names it."""
    cpu = os.environ.get("COLIBRI_CPU", "")
    try:
        yield cpu
    except UsageError as error:
        raise UsageError(f"COLIBRI_CPU={cpu}: {error}" if f"'{cpu}'" in str(error) else str(error)) from None

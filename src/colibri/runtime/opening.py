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
from typing import ClassVar

from colibri.errors import MemoryBudgetWarning, UsageError
from colibri.runtime import native
from colibri.runtime.backend import Backend, MemoryPlan, NativeOptions
from colibri.runtime.budget import Budget, Wishes, plan_budget
from colibri.runtime.memory_limits import ProcessMemory, memory_limits, process_memory
from colibri.runtime.model_text import ModelText
from colibri.runtime.native_backend import NativeBackend, plan_memory


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


def chosen_vm() -> str:
    """What COLIBRI_VM says: "native" or "reference"."""
    vm = os.environ.get("COLIBRI_VM", "native") or "native"
    if vm not in ("native", "reference"):
        raise UsageError(f"COLIBRI_VM must be native or reference, not {vm!r}")
    return vm


def plan_native(text: ModelText, threads: int, options: NativeOptions, wishes: Wishes, state_format: int) -> Budget:
    """Divide the memory for a model that is not open yet; its tokenizer is loaded first, as it counts.

    Raises MemoryBudgetError, ModelFileError, UnsupportedModelError, UsageError.
    """
    text.load_tokenizer()
    native.release_free_memory()
    with _named_cpu() as cpu:

        @cache
        def measure(max_batch_tokens: int) -> MemoryPlan:
            changed = replace(options, max_batch_tokens=max_batch_tokens)
            return plan_memory(text.path, threads, cpu, changed, wishes.context, state_format)

        return plan_budget(measure, wishes, _Promised.process_memory(), memory_limits())


def open_native(
    text: ModelText, threads: int, options: NativeOptions, wishes: Wishes, state_format: int
) -> tuple[NativeBackend, Budget]:
    """Open a model in the core within its budget. Raises what `plan_native` does, and OutOfMemoryError."""
    with _Promised.lock, _named_cpu() as cpu:
        budget = plan_native(text, threads, options, wishes, state_format)
        planned = replace(
            options,
            max_batch_tokens=budget.max_batch_tokens,
            expert_bytes=0 if budget.is_resident else budget.expert_bytes,
            state_bytes=budget.state_limit,
        )
        backend = NativeBackend(text.path, threads, cpu, planned, budget.result_limit)
        _Promised.add(backend, budget)
    for message in (budget.warning, backend.statistics().warning):
        if message:
            warnings.warn(message, MemoryBudgetWarning, stacklevel=3)
    return backend, budget


def open_reference(text: ModelText, given: dict[str, bool]) -> Backend:
    """Open a model in NumPy; UsageError names an option of `given` that is set, as none of them exists there."""
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"{name} has no meaning with COLIBRI_VM=reference; leave one of them out")
    from colibri.runtime.reference_backend import ReferenceBackend

    return ReferenceBackend(text.path)


@contextmanager
def _named_cpu() -> Iterator[str]:
    """What COLIBRI_CPU says; an error that it causes names it."""
    cpu = os.environ.get("COLIBRI_CPU", "")
    try:
        yield cpu
    except UsageError as error:
        raise UsageError(f"COLIBRI_CPU={cpu}: {error}" if f"'{cpu}'" in str(error) else str(error)) from None

"""Checks of arguments, and those of an engine together."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields

from colibri.errors import UsageError
from colibri.runtime.backend import (
    HUGE_PAGES,
    IO_MODES,
    MAX_BATCH_TOKENS,
    MAX_IO_THREADS,
    MAX_PREFETCH_DEPTH,
    STATE_FORMATS,
    VERIFY_MODES,
    NativeOptions,
)
from colibri.runtime.budget import Wishes
from colibri.runtime.sizes import parse_size

DEFAULT_PREFETCH_DEPTH = 1
_MOST_SESSIONS = 1 << 20
# What decides where weights lie and how they are read, which the reference does in its own way.
_NATIVE_ONLY = (
    "ram", "pin", "expert_cache", "io_threads", "io", "verify", "prefetch_depth", "mlock", "huge_pages", "usage_file",
)  # fmt: skip


def whole_number(name: str, value: int | None, low: int, high: int) -> int:
    """`value`, an optional whole number, or 0 for None; UsageError calls it `name`."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, not {value!r}")
    return value


def one_of(name: str, value: str, known: Iterable[str]) -> str:
    """`value`, if it is known; UsageError calls it `name`."""
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    return value


@dataclass(frozen=True)
class EngineArguments:
    """The keywords of `Engine`, where they are described; UsageError names one that cannot be used."""

    threads: int | None = None
    kv: str | None = None
    ram: str | int | None = None
    context: int | None = None
    sessions: int = 1
    max_batch_tokens: int | None = None
    pin: bool = False
    expert_cache: str | int | None = None
    io_threads: int | None = None
    io: str = "auto"
    verify: str = "crc"
    prefetch_depth: int | None = None
    mlock: bool = False
    huge_pages: str = "auto"
    usage_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        whole_number("threads", self.threads, 1, 1024)
        whole_number("max_batch_tokens", self.max_batch_tokens, 1, MAX_BATCH_TOKENS)
        whole_number("sessions", self.sessions, 1, _MOST_SESSIONS)
        whole_number("io_threads", self.io_threads, 1, MAX_IO_THREADS)
        whole_number("prefetch_depth", self.prefetch_depth, 0, MAX_PREFETCH_DEPTH)
        one_of("io", self.io, IO_MODES)
        one_of("verify", self.verify, VERIFY_MODES)
        one_of("huge_pages", self.huge_pages, HUGE_PAGES)
        if self.kv is not None:
            one_of("kv", self.kv, STATE_FORMATS)
        if self.sessions is None:
            raise UsageError(f"sessions must be a whole number from 1 to {_MOST_SESSIONS}, not None")
        for name in ("mlock", "pin"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if not isinstance(self.usage_file, str | os.PathLike | None):
            raise UsageError(f"usage_file must be a path, not {self.usage_file!r}")
        for name in ("ram", "expert_cache"):
            if getattr(self, name) is not None:
                parse_size(name, getattr(self, name))

    @property
    def state_format(self) -> int:
        return STATE_FORMATS[self.kv] if self.kv else 0

    def native_options(self) -> NativeOptions:
        """What the core is told; the budget fills in the rest."""
        depth = DEFAULT_PREFETCH_DEPTH if self.prefetch_depth is None else self.prefetch_depth
        return NativeOptions(
            io_threads=self.io_threads or 0,
            io=self.io,
            verify=self.verify,
            huge_pages=self.huge_pages,
            prefetch_depth=depth,
            lock_memory=self.mlock,
            guard=_debug_guard(),
            pin=self.pin,
        )

    def wishes(self, name: str, context: int) -> Wishes:
        """What the budget is asked for, for the model `name` and sessions of `context` positions."""
        ram = None if self.ram is None else parse_size("ram", self.ram)
        slots = None if self.expert_cache is None else parse_size("expert_cache", self.expert_cache)
        return Wishes(name, context, self.sessions, ram, slots, self.max_batch_tokens)

    def check_reference(self) -> None:
        """UsageError names an argument that has no meaning in the NumPy reference."""
        for field in fields(self):
            if field.name in _NATIVE_ONLY and getattr(self, field.name) != field.default:
                raise UsageError(f"{field.name} has no meaning with COLIBRI_VM=reference; leave one of them out")


def _debug_guard() -> bool:
    value = os.environ.get("COLIBRI_DEBUG", "")
    if value not in ("", "guard"):
        raise UsageError(f"COLIBRI_DEBUG must be guard or empty, not {value!r}")
    return value == "guard"

"""Checks of arguments."""

from __future__ import annotations

from collections.abc import Iterable

from colibri.errors import UsageError


def whole_number(name: str, value: int | None, low: int, high: int) -> int:
    """`value`, an optional whole number, or 0 for None; UsageError calls it `name`."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, not {value!r}")
    return value


def one_of(name: str, value: str, known: Iterable[str]) -> str:
    """`value`, if it is known; UsageError calls it `name`."""
    if value not in known:
        raise UsageError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    return value

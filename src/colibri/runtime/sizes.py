"""Amounts of memory as text."""

from __future__ import annotations

import re
from decimal import Decimal

from colibri.errors import UsageError

_UNITS = {
    "": 1, "b": 1,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_LARGEST = 2**62
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(name: str, value: str | int) -> int:
    """Bytes of `value`: a whole number of bytes, or text such as "1.5GiB", "800 MB" or "2G".

    KiB, MiB, GiB, TiB and K, M, G, T count by 1024; KB, MB, GB, TB by 1000; a fraction of a byte is dropped. Raises
    UsageError, calling the value `name`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = None if match is None else _UNITS.get(match[2].lower())
        if match is None or unit is None or (unit == 1 and "." in match[1]):
            raise UsageError(f'{name} must be a size such as 2GiB, 1.5GiB, 800MB or a number of bytes, not "{value}"')
        size = int(Decimal(match[1]) * unit) if len(match[1]) < 40 else _LARGEST + 1
    else:
        raise UsageError(f'{name} must be a number of bytes or a text such as "2GiB", not {value!r}')
    if not 1 <= size <= _LARGEST:
        raise UsageError(f"{name} must be from 1 byte to {format_size(_LARGEST)}, not {value}")
    return size


def format_size(size: int) -> str:
    """`size` bytes to three or four digits, for messages; whole KiB so that small differences show."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            number = size / unit
            return f"{number:.0f} {name}" if number >= 100 or number == int(number) else f"{number:.2f} {name}"
    return f"{size} bytes"

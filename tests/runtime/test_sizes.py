"""Sizes as text."""

from __future__ import annotations

import pytest

from colibri.errors import UsageError
from colibri.runtime.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1), ("123456", 123456), (4096, 4096), ("10B", 10), (" 2 GiB ", 2 << 30), ("2gib", 2 << 30),
        ("2G", 2 << 30), ("2g", 2 << 30), ("1.5GiB", 3 << 29), ("1.5G", 3 << 29), ("2GB", 2 * 10**9),
        ("0.5 MB", 500000), ("3MiB", 3 << 20), ("7K", 7168), ("7KB", 7000), ("7KiB", 7168), ("1TiB", 1 << 40),
        ("1TB", 10**12), ("1T", 1 << 40), ("0.1KiB", 102), ("0.001KiB", 1), ("1.1GB", 11 * 10**8),
        ("4503599627370497", 4503599627370497), ("9007199254740993B", 9007199254740993),
    ],
)  # fmt: skip
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size("ram", text) == size


@pytest.mark.parametrize(
    "value",
    [
        "", " ", "GiB", "2 GiBs", "2XB", "-1", "-1GiB", "+1", "1e9", "1_000", "1,5GiB", "1.GiB", ".5GiB", "nan", "inf",
        "0x10", "2 2", "1.5", "1.5B", "50%", "2GiB 1", "\u0662GiB", "0", "0GiB", 0, -5, True, 1.5, None, "9" * 50,
        "9" * 500, "99999999TiB", 1 << 63,
    ],
)  # fmt: skip
def test_nonsense(value) -> None:
    with pytest.raises(UsageError, match=r"^--ram must be "):
        parse_size("--ram", value)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (1536, "1.50 KiB"), (3 << 29, "1.50 GiB"),
     (2 << 30, "2 GiB"), (453 << 20, "453 MiB"), ((100 << 20) + 1, "100 MiB"), (5 << 40, "5 TiB")],
)  # fmt: skip
def test_format(size: int, text: str) -> None:
    assert format_size(size) == text

"""What a conversion tells: sizes, and how far the stored weights are from the source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri.convert.packing import Matrix, PackedSlice
from colibri.families import Role


@dataclass(frozen=True)
class RoleError:
    """Errors of the weights of one role, as RMS of the error / RMS of the weights; 0 where storage is exact.

    format: the formats that occur, with + between them. Weights that are copied as stored count for nothing.
    largest is that of the worst tensor, named largest_tensor (its name in the checkpoint).
    """

    role: str
    format: str
    rms_error: float
    largest: float
    largest_tensor: str


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion. notes are sentences for the user; digest identifies the file."""

    path: Path
    family: str
    weights: str
    file_bytes: int
    parameters: int
    errors: tuple[RoleError, ...]
    notes: tuple[str, ...]
    digest: bytes


class ErrorSums:
    """Collects the errors of all slices."""

    def __init__(self) -> None:
        self._sums: dict[Role, list[float]] = {}
        self._formats: dict[Role, set[str]] = {}
        self._largest: dict[Role, tuple[float, str]] = {}

    def add(self, matrix: Matrix, slices: Sequence[PackedSlice]) -> None:
        """Add a whole matrix."""
        squares = sum(piece.squares for piece in slices)
        squared_errors = sum(piece.squared_errors for piece in slices)
        sums = self._sums.setdefault(matrix.role, [0.0, 0.0])
        sums[0] += squares
        sums[1] += squared_errors
        self._formats.setdefault(matrix.role, set()).add(matrix.format)
        error = _relative(squared_errors, squares)
        if matrix.role not in self._largest or error > self._largest[matrix.role][0]:
            self._largest[matrix.role] = error, matrix.source.name

    def report(self) -> tuple[RoleError, ...]:
        """Return one entry for each role that occurs."""
        return tuple(
            RoleError(
                role.value, "+".join(sorted(self._formats[role])), _relative(sums[1], sums[0]), *self._largest[role]
            )
            for role, sums in self._sums.items()
        )


def as_metadata(errors: Sequence[RoleError]) -> dict[str, Any]:
    """Return the report as JSON data; rounded, because the last digits depend on the machine."""
    return {
        error.role: {
            "format": error.format,
            "rms_error": float(f"{error.rms_error:.4g}"),
            "largest": float(f"{error.largest:.4g}"),
            "largest_tensor": error.largest_tensor,
        }
        for error in errors
    }


def _relative(squared_errors: float, squares: float) -> float:
    return math.sqrt(squared_errors / squares) if squares else 0.0

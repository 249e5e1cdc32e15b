"""What a family hands on: a program, and where each of its weights comes from."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from colibri.checkpoint import Checkpoint
from colibri.program import Program


class Role(Enum):
    """What a weight does; conversion chooses its format by it.

    An embedding that is also the head (tied) has the role HEAD: its layout must serve the matrix product.
    VECTOR and ROUTER weights are stored as exact float32.
    """

    EMBEDDING = "embedding"
    HEAD = "head"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    ROUTER = "router"
    VECTOR = "vector"
    EXPERT = "expert"


class Source(Protocol):
    """A matrix [rows, cols] that can be read a few rows at a time, from any thread."""

    @property
    def name(self) -> str:
        """Name for error messages."""
        ...

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def stored_format(self) -> str | None:
        """The weight format that holds the values exactly; None where there is none."""
        ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) as float32 [stop - start, cols]; raises CheckpointError for a failed read."""
        ...


@dataclass(frozen=True)
class TensorSource:
    """A whole tensor of the checkpoint; one of a single axis counts as one row."""

    checkpoint: Checkpoint
    tensor: str
    rows: int
    cols: int

    @property
    def name(self) -> str:
        """Name for error messages."""
        return self.checkpoint.label(self.tensor)

    @property
    def stored_format(self) -> str | None:
        """See Source."""
        return self.checkpoint.stored_format(self.tensor)

    def read(self, start: int, stop: int) -> np.ndarray:
        """See Source."""
        if len(self.checkpoint.info(self.tensor).shape) == 1:
            return self.checkpoint.read(self.tensor).reshape(1, self.cols)[start:stop]
        return self.checkpoint.read(self.tensor, start, stop)

    def read_codes(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return codes and scales of rows [start, stop) as stored, where stored_format is a quantised format."""
        return self.checkpoint.read_codes(self.tensor, start, stop)


class LastExpert:
    """Reads tensors [experts, rows, cols]; keeps the expert read last, as its rows are asked for in several pieces."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._key: tuple[str, int] | None = None
        self._values: np.ndarray | None = None

    def stored_format(self, name: str) -> str | None:
        """Return the format that holds the values of the tensor `name` exactly; None where there is none."""
        return self._checkpoint.stored_format(name)

    def read(self, name: str, expert: int, start: int, stop: int) -> np.ndarray:
        """Return a copy of rows [start, stop) of one expert of the tensor `name`, float32."""
        with self._lock:
            values = self._values if self._key == (name, expert) else None
            if values is None:
                # Freed first: two experts at once could be more than the memory allowed.
                self._key = self._values = None
                values = self._checkpoint.read(name, expert, expert + 1)[0]
                self._key, self._values = (name, expert), values
            return values[start:stop].copy()


@dataclass(frozen=True)
class FusedSource:
    """Rows [first_row, first_row + rows) of one expert of a tensor [experts, all rows, cols]."""

    reader: LastExpert
    tensor: str
    expert: int
    first_row: int
    rows: int
    cols: int

    @property
    def name(self) -> str:
        """Name for error messages."""
        return f"{self.tensor}[{self.expert}]"

    @property
    def stored_format(self) -> str | None:
        """See Source."""
        return self.reader.stored_format(self.tensor)

    def read(self, start: int, stop: int) -> np.ndarray:
        """See Source."""
        return self.reader.read(self.tensor, self.expert, self.first_row + start, self.first_row + stop)


@dataclass(frozen=True)
class ArraySource:
    """Numbers that the family computed; float32 [rows, cols]."""

    name: str
    values: np.ndarray

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def cols(self) -> int:
        return self.values.shape[1]

    @property
    def stored_format(self) -> str:
        """See Source."""
        return "f32"

    def read(self, start: int, stop: int) -> np.ndarray:
        """See Source."""
        return self.values[start:stop]


@dataclass(frozen=True)
class WeightPlan:
    """A tensor of the file: its name there, its role and its source."""

    name: str
    role: Role
    source: Source


@dataclass(frozen=True)
class ExpertSources:
    """gate and up [ffn, width], down [width, ffn]."""

    gate: Source
    up: Source
    down: Source


@dataclass(frozen=True)
class ExpertSetPlan:
    """The experts of one layer, in order; width is the model's, ffn the expert's."""

    layer: int
    width: int
    ffn: int
    experts: tuple[ExpertSources, ...]


@dataclass(frozen=True)
class ModelPlan:
    """A model before conversion: weights and expert sets are in the order the program counts them.

    notes are sentences for the user (tensors that were skipped, a head that is not used).
    """

    family: str
    program: Program
    weights: tuple[WeightPlan, ...]
    expert_sets: tuple[ExpertSetPlan, ...]
    notes: tuple[str, ...] = ()

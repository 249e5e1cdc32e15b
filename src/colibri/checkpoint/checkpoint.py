"""An open checkpoint: named tensors, read when asked for, a slice at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from colibri.checkpoint.open_files import OpenFiles
from colibri.checkpoint.reading import read_exactly
from colibri.checkpoint.safetensors import SafetensorsHeader
from colibri.checkpoint.strict_json import quoted
from colibri.checkpoint.upcast import BYTES_PER_ELEMENT, upcast_into
from colibri.errors import CheckpointError, OutOfMemoryError, UnsupportedModelError, UsageError

MAXIMUM_OPEN_FILES = 16
# Stored bytes pass through a buffer of this size, so that a read needs little more memory than its result.
BYTES_PER_PIECE = 8 << 20
_FORMATS = {"F32": "f32", "BF16": "bf16", "F16": "f16"}


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without reading it; dtype is the stored one: "F32", "BF16", "F16", ..."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path


class Checkpoint(ABC):
    """The tensors and configuration of one model; use `open_checkpoint` to get one.

    path: the folder or file, absolute. config: config.json, or what it would be. generation_config:
    generation_config.json or None. config_name: what config is called in messages.
    Reads may come from many threads at once. Nothing is ever written.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], generation_config: dict[str, Any] | None, config_name: str
    ) -> None:
        self.path = path
        self.config = config
        self.generation_config = generation_config
        self.config_name = config_name
        self.config_source = f"{config_name} of {path}"
        self._files = OpenFiles(MAXIMUM_OPEN_FILES)

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""

    @abstractmethod
    def __contains__(self, name: object) -> bool: ...

    @abstractmethod
    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and file of a tensor; raises CheckpointError when there is none of this name."""

    @abstractmethod
    def label(self, name: str) -> str:
        """Return what the source itself calls a tensor, for messages; the tensor need not be there."""

    @abstractmethod
    def stored_format(self, name: str) -> str | None:
        """Return the weight format that holds the stored values exactly ("f32", "q4_g32", ...); None if there is none.

        Raises CheckpointError when there is no tensor of this name.
        """

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows [start, stop) of a tensor's first axis as a new float32 array; only their bytes are read.

        Shape: [stop - start, *rest]; stop=None means to the end. A tensor of shape [] is read whole.
        Raises CheckpointError for an unknown name or a failed read, UnsupportedModelError for a dtype that cannot be
        read, UsageError for rows that do not exist, OutOfMemoryError when the result does not fit.
        """

    def read_codes(self, name: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows [start, stop) of a matrix as stored, where `stored_format` is a quantised format.

        Returns codes [rows, cols] (uint8 0..15 for 4 bits, int8 for 8) and scales float16 [rows, groups]. Raises as
        `read` does, and NonFiniteError for a scale that is NaN or infinity.
        """
        raise UsageError(f"{self.path}: tensor {quoted(self.label(name))} is not stored in codes.")

    def close(self) -> None:
        """Close the files; later reads raise UsageError. Closing twice is harmless."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _empty(self, shape: tuple[int, ...], label: str) -> np.ndarray:
        """A new float32 array for the values of a tensor."""
        try:
            return np.empty(shape, dtype=np.float32)
        except MemoryError as error:
            raise OutOfMemoryError(
                f"{self.path}: tensor {quoted(label)} needs {4 * math.prod(shape)} bytes of memory, which cannot be "
                "had."
            ) from error

    def _rows(self, name: str, shape: tuple[int, ...], start: int, stop: int | None) -> tuple[int, tuple[int, ...]]:
        """The first element and the shape of rows [start, stop) of a tensor of this shape."""
        if not shape:
            if start != 0 or stop is not None:
                raise UsageError(f"tensor {quoted(name)} of {self.path} has no axis to slice; read it whole.")
            return 0, ()
        end = shape[0] if stop is None else stop
        if not 0 <= start <= end <= shape[0]:
            raise UsageError(
                f"tensor {quoted(name)} of {self.path} has {shape[0]} rows; rows {start} to {end} do not exist."
            )
        return start * math.prod(shape[1:]), (end - start, *shape[1:])


class SafetensorsCheckpoint(Checkpoint):
    """A Hugging Face folder with safetensors files."""

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        generation_config: dict[str, Any] | None,
        headers: Mapping[str, SafetensorsHeader],
    ) -> None:
        """headers: for each tensor name, the verified header of the file that holds it."""
        super().__init__(path, config, generation_config, "config.json")
        self._headers = dict(headers)

    def names(self) -> list[str]:
        """See Checkpoint."""
        return sorted(self._headers)

    def __contains__(self, name: object) -> bool:
        return name in self._headers

    def info(self, name: str) -> TensorInfo:
        """See Checkpoint."""
        header = self._header(name)
        span = header.tensors[name]
        return TensorInfo(name, span.dtype, span.shape, header.path)

    def label(self, name: str) -> str:
        """See Checkpoint."""
        return name

    def stored_format(self, name: str) -> str | None:
        """See Checkpoint."""
        return _FORMATS.get(self._header(name).tensors[name].dtype)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """See Checkpoint; dtypes F32, BF16 and F16 can be read."""
        header = self._header(name)
        span = header.tensors[name]
        if span.dtype not in BYTES_PER_ELEMENT:
            raise UnsupportedModelError(
                f"{header.path}: tensor {quoted(name)} has dtype {span.dtype}, which is not supported; "
                "use a checkpoint in F32, BF16 or F16."
            )
        first, shape = self._rows(name, span.shape, start, stop)
        output = self._empty(shape, name)
        element_bytes = BYTES_PER_ELEMENT[span.dtype]
        self._fill(header, span.begin + first * element_bytes, span.dtype, output.reshape(math.prod(shape)))
        return output

    def _header(self, name: str) -> SafetensorsHeader:
        try:
            return self._headers[name]
        except KeyError:
            raise CheckpointError(
                f"{self.path} has no tensor {quoted(name)}; the checkpoint is incomplete or of another architecture."
            ) from None

    def _fill(self, header: SafetensorsHeader, offset: int, dtype: str, output: np.ndarray) -> None:
        element_bytes = BYTES_PER_ELEMENT[dtype]
        elements_per_piece = BYTES_PER_PIECE // element_bytes
        with self._files.lease(header) as descriptor:
            for first in range(0, output.size, elements_per_piece):
                piece = output[first : first + elements_per_piece]
                raw = read_exactly(descriptor, offset + first * element_bytes, piece.size * element_bytes, header.path)
                upcast_into(raw, dtype, piece)

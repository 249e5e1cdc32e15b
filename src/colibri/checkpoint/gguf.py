"""Opens a GGUF file as the checkpoint that a Hugging Face folder of the same model would be."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from colibri.checkpoint.checkpoint import Checkpoint, TensorInfo
from colibri.checkpoint.gguf_blocks import GROUP, codes_and_scales, decode_rows
from colibri.checkpoint.gguf_bytes import MetadataEntry, read_value
from colibri.checkpoint.gguf_config import ARCHITECTURES, Metadata, config_of
from colibri.checkpoint.gguf_header import BLOCKS, GgufHeader, read_gguf_header
from colibri.checkpoint.gguf_names import PlacedTensor, gguf_name, place_tensors
from colibri.checkpoint.reading import open_regular_file, read_exactly
from colibri.checkpoint.strict_json import quoted
from colibri.errors import CheckpointError, NonFiniteError, UnsupportedModelError

_BYTES_PER_PIECE = 4 << 20
# A value of one layer each is the longest that the configuration needs.
_LONGEST_SETTING = 1 << 16
_MAXIMUM_ROPE_FACTORS = 1 << 15
_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16", "Q4_0": "q4_g32", "Q8_0": "q8_g32"}
_GENERATION_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


class GgufCheckpoint(Checkpoint):
    """A model in one GGUF file; `open_gguf` makes one.

    Tensors go by their Hugging Face names, experts one by one, and the rows of q and k are in the order of
    Hugging Face also where the file has them in pairs.
    """

    def __init__(self, header: GgufHeader, metadata: dict[str, Any], rope_factors: np.ndarray | None) -> None:
        """metadata: the values of `general.*` and of the architecture's keys."""
        where = f"metadata of {header.path}"
        name = metadata.get("general.architecture")
        architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if architecture is None or not isinstance(name, str):
            raise UnsupportedModelError(
                f"{where}: architecture {quoted(name)} is not supported; supported: {', '.join(ARCHITECTURES)}."
            )
        config = config_of(name, Metadata(metadata, name, where), header.tensors, rope_factors)
        generation = {new: metadata[old] for old, new in _GENERATION_KEYS.items() if old in metadata}
        for key, value in generation.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CheckpointError(f"{where}: the sampling default for {key}, {quoted(value)}, is not a number.")
        super().__init__(header.path, config, generation or None, "metadata")
        self._header = header
        self._naming = architecture.naming
        head_rows = config["head_dim"] if architecture.paired_rows else 0
        self._placed = place_tensors(header.tensors, architecture.naming, head_rows, str(header.path))
        _check_pairs(self._placed, header.path)

    def names(self) -> list[str]:
        """See Checkpoint."""
        return sorted(self._placed)

    def __contains__(self, name: object) -> bool:
        return name in self._placed

    def info(self, name: str) -> TensorInfo:
        """See Checkpoint; dtype is a key of BLOCKS."""
        placed = self._tensor(name)
        return TensorInfo(name, placed.tensor.type, placed.shape, self.path)

    def label(self, name: str) -> str:
        """See Checkpoint."""
        return self._placed[name].label if name in self._placed else gguf_name(name, self._naming)

    def stored_format(self, name: str) -> str | None:
        """See Checkpoint."""
        return _FORMATS[self._tensor(name).tensor.type]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """See Checkpoint; also raises NonFiniteError for blocks with a scale of NaN or infinity."""
        placed = self._tensor(name)
        if len(placed.shape) == 1:
            first, (count,) = self._rows(name, placed.shape, start, stop)
            return self._values(placed, 0, 1)[0, first : first + count].copy()
        first, shape = self._rows(name, placed.shape, start, stop)
        row = first // placed.shape[-1]
        return self._values(placed, row, row + math.prod(shape[:-1])).reshape(shape)

    def read_codes(self, name: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See Checkpoint."""
        placed = self._tensor(name)
        if BLOCKS[placed.tensor.type][0] == 1:
            return super().read_codes(name, start, stop)
        self._rows(name, placed.shape, start, stop)
        codes = np.empty((stop - start, placed.shape[-1]), np.uint8 if placed.tensor.type == "Q4_0" else np.int8)
        scales = np.empty((stop - start, placed.shape[-1] // GROUP), np.float16)
        for first, last, raw in self._pieces(placed, start, stop):
            codes[first:last], scales[first:last] = codes_and_scales(raw, placed.tensor.type)
        return codes, scales

    def tokenizer_metadata(self) -> dict[str, Any]:
        """Return the keys that begin with `tokenizer.` and their values."""
        with self._files.lease(self._header) as descriptor:
            return {
                key: read_value(descriptor, entry, key, self.path)
                for key, entry in self._header.metadata.items()
                if key.startswith("tokenizer.")
            }

    def _tensor(self, name: str) -> PlacedTensor:
        try:
            return self._placed[name]
        except KeyError:
            raise CheckpointError(
                f"{self.path} has no tensor {quoted(self.label(name))}; it is incomplete or of another architecture."
            ) from None

    def _values(self, placed: PlacedTensor, start: int, stop: int) -> np.ndarray:
        output = self._empty((stop - start, placed.shape[-1]), placed.label)
        for first, last, raw in self._pieces(placed, start, stop):
            decode_rows(raw, placed.tensor.type, output[first:last])
        return output

    def _pieces(self, placed: PlacedTensor, start: int, stop: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (first, last, bytes [last - first, bytes of a row]) for rows [start, stop), counted from start."""
        block, block_bytes = BLOCKS[placed.tensor.type]
        row_bytes = placed.shape[-1] // block * block_bytes
        step = max(1, _BYTES_PER_PIECE // row_bytes)
        with self._files.lease(self._header) as descriptor:
            for first in range(start, stop, step):
                last = min(first + step, stop)
                # Rows that were stored in pairs come from anywhere in their head, so whole heads are read.
                heads = placed.head_rows or 1
                low, high = first // heads * heads, -(-last // heads) * heads
                offset = placed.tensor.begin + (placed.first_row + low) * row_bytes
                raw = read_exactly(descriptor, offset, (high - low) * row_bytes, self.path).reshape(-1, row_bytes)
                if placed.head_rows:
                    raw = raw[_stored_rows(np.arange(first, last), placed.head_rows) - low]
                self._require_finite_scales(placed, raw)
                yield first - start, last - start, raw

    def _require_finite_scales(self, placed: PlacedTensor, raw: np.ndarray) -> None:
        block, block_bytes = BLOCKS[placed.tensor.type]
        if block == 1:
            return
        scales = np.ascontiguousarray(raw.reshape(-1, block_bytes)[:, :2]).view("<u2")
        if ((scales & 0x7C00) == 0x7C00).any():
            raise NonFiniteError(
                f"{placed.label} of {self.path}: a scale is NaN or infinity; repair or download the file again."
            )


def open_gguf(path: Path) -> GgufCheckpoint:
    """Open the GGUF file at `path`, which is absolute; tensor data is read later.

    Raises CheckpointError for a file that is damaged, contradictory or hostile, and UnsupportedModelError for an
    architecture, key or tensor type that cannot be run; both name the file and what is at fault.
    """
    header = read_gguf_header(path)
    descriptor, _ = open_regular_file(path)
    try:
        metadata = _settings(descriptor, header)
        factors = _rope_factors(descriptor, header)
    finally:
        os.close(descriptor)
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{path} is a GGUF file of type {quoted(kind)}; give the file of the model itself.")
    version = metadata.get("general.quantization_version", 2)
    if version != 2 and any(tensor.type in ("Q4_0", "Q8_0") for tensor in header.tensors.values()):
        raise UnsupportedModelError(f"{path}: general.quantization_version = {version!r} is not supported, only 2 is.")
    return GgufCheckpoint(header, metadata, factors)


def _settings(descriptor: int, header: GgufHeader) -> dict[str, Any]:
    """Read the values of general.architecture, of the architecture's own keys, and of a few general ones."""

    def read(key: str, entry: MetadataEntry) -> Any:
        if entry.size > _LONGEST_SETTING:
            raise CheckpointError(f"{header.path}: {quoted(key)} has {entry.size} bytes, too many for a setting.")
        return read_value(descriptor, entry, key, header.path)

    wanted = ("general.architecture", "general.type", "general.quantization_version", *_GENERATION_KEYS)
    values = {key: read(key, header.metadata[key]) for key in wanted if key in header.metadata}
    prefix = f"{values.get('general.architecture', '')}."
    if prefix[:-1] in ARCHITECTURES:
        values |= {key: read(key, entry) for key, entry in header.metadata.items() if key.startswith(prefix)}
    return values


def _rope_factors(descriptor: int, header: GgufHeader) -> np.ndarray | None:
    tensor = header.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAXIMUM_ROPE_FACTORS:
        raise UnsupportedModelError(f"{header.path}: rope_freqs.weight is not a vector of float32.")
    return read_exactly(descriptor, tensor.begin, tensor.end - tensor.begin, header.path).view("<f4")


def _check_pairs(placed: dict[str, PlacedTensor], path: Path) -> None:
    for tensor in placed.values():
        heads = tensor.head_rows
        if heads and (heads % 2 or len(tensor.shape) != 2 or tensor.shape[0] % heads):
            raise CheckpointError(
                f"{path}: tensor {tensor.label} of shape {list(tensor.shape)} has no whole heads of {heads} rows."
            )


def _stored_rows(rows: np.ndarray, head_rows: int) -> np.ndarray:
    """Where rows in the order of Hugging Face (all first halves of a head's pairs, then all second ones) lie."""
    head, inside = np.divmod(rows, head_rows)
    second, pair = np.divmod(inside, head_rows // 2)
    return head * head_rows + 2 * pair + second

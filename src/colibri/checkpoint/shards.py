"""Decides which files of a folder hold the model, and which of them holds each tensor.

Folders carry more than the model: other formats, adapters, older or scaled copies. Files are therefore
taken only by name, from the index or a complete numbered set, never because they happen to lie there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

import numpy as np

from colibri.checkpoint.reading import open_regular_file, read_exactly
from colibri.checkpoint.safetensors import SafetensorsHeader, read_header
from colibri.checkpoint.strict_json import first_names, quoted, read_object
from colibri.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
BYTES_PER_COMPARISON = 8 << 20
_SHARD_PATTERN = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")


def locate_tensors(folder: Path, present: Collection[str]) -> dict[str, SafetensorsHeader]:
    """Return for each tensor name the verified header of the file that holds it.

    present: the names of the folder's entries.
    Raises CheckpointError when shards or tensors are missing, contradict each other or are damaged.
    """
    if INDEX_NAME in present:
        return _locate_by_index(folder)
    if SINGLE_NAME in present:
        return _locate_by_headers(folder, [SINGLE_NAME])
    return _locate_by_headers(folder, _complete_set(folder, present))


def _locate_by_index(folder: Path) -> dict[str, SafetensorsHeader]:
    index_path = folder / INDEX_NAME
    weight_map = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path} has no weight_map that names the file of each tensor.")
    for tensor_name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _is_plain_file_name(file_name):
            raise CheckpointError(
                f"{index_path} places tensor {quoted(tensor_name)} in {quoted(file_name)}, "
                "which is not the plain name of a file in the folder."
            )
    file_names = sorted(set(weight_map.values()))
    _require_files(folder, file_names, index_path)
    headers = {file_name: read_header(folder / file_name) for file_name in file_names}

    strays = [name for name, file_name in weight_map.items() if name not in headers[file_name].tensors]
    if strays:
        raise CheckpointError(
            f"{index_path} lists {len(strays)} of {len(weight_map)} tensors in files that lack them: "
            f"{first_names(strays)} (the first should be in {quoted(weight_map[strays[0]])}); "
            "download index and shards again."
        )
    return {name: headers[file_name] for name, file_name in weight_map.items()}


def _is_plain_file_name(name: str) -> bool:
    return name.isprintable() and name not in ("", ".", "..") and "/" not in name and "\\" not in name


def _require_files(folder: Path, file_names: list[str], wanted_by: Path) -> None:
    missing = [name for name in file_names if not _exists(folder / name)]
    if missing:
        raise CheckpointError(
            f"{wanted_by}: {len(missing)} of {len(file_names)} shards missing: {first_names(missing)}; "
            "download them into the same folder."
        )


def _exists(path: Path) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # There but not readable: opening it gives the error with the right reason.
    return True


def _complete_set(folder: Path, present: Collection[str]) -> list[str]:
    # Counted from what is there: a file name may claim 99,999 siblings, and a folder may hold many such names.
    numbers_by_count: dict[int, set[int]] = {}
    for match in filter(None, map(_SHARD_PATTERN.fullmatch, present)):
        number, count = int(match[1]), int(match[2])
        if 1 <= number <= count:
            numbers_by_count.setdefault(count, set()).add(number)
    complete = [count for count, numbers in numbers_by_count.items() if len(numbers) == count]
    if len(complete) > 1:
        raise CheckpointError(
            f"{folder} has {len(complete)} complete sets of shards and no {INDEX_NAME}; "
            "leave only the set that is meant, or add its index."
        )
    if not numbers_by_count:
        raise CheckpointError(_nothing_found(folder, present))
    # With no complete set, the one that lacks the fewest shards is most likely the one that was meant.
    count = complete[0] if complete else min(numbers_by_count, key=lambda count: count - len(numbers_by_count[count]))
    shards = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    _require_files(folder, shards, folder)
    return shards


def _nothing_found(folder: Path, present: Collection[str]) -> str:
    gguf = sorted(name for name in present if name.endswith(".gguf"))
    if gguf:
        return f"{folder} has no safetensors but GGUF files: give one of them, {first_names(gguf)}, and not the folder."
    others = sorted(name for name in present if re.fullmatch(r"pytorch_model.*\.bin(\.index\.json)?", name))
    if others:
        return (
            f"{folder} has its weights only in {first_names(others)}, a format that is not supported yet; "
            "save the model as safetensors (in transformers: save_pretrained) and give that folder."
        )
    return (
        f"{folder} has no weights: looked for {INDEX_NAME}, {SINGLE_NAME} and "
        "model-00001-of-0000N.safetensors; give the folder that holds them."
    )


def _locate_by_headers(folder: Path, file_names: list[str]) -> dict[str, SafetensorsHeader]:
    located: dict[str, SafetensorsHeader] = {}
    for file_name in file_names:
        header = read_header(folder / file_name)
        for name in header.tensors:
            first = located.setdefault(name, header)
            if first is not header and not _same_data(name, first, header):
                raise CheckpointError(
                    f"{folder}: tensor {quoted(name)} is in {first.path.name} and, with different data, in "
                    f"{file_name}; add {INDEX_NAME} to say which one is meant."
                )
    if not located:
        raise CheckpointError(f"{folder}: {first_names(file_names)} has no tensors; download the model again.")
    return located


def _same_data(name: str, first: SafetensorsHeader, second: SafetensorsHeader) -> bool:
    left, right = first.tensors[name], second.tensors[name]
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    left_descriptor, _ = open_regular_file(first.path)
    try:
        right_descriptor, _ = open_regular_file(second.path)
        try:
            size = left.end - left.begin
            for position in range(0, size, BYTES_PER_COMPARISON):
                count = min(BYTES_PER_COMPARISON, size - position)
                left_bytes = read_exactly(left_descriptor, left.begin + position, count, first.path)
                right_bytes = read_exactly(right_descriptor, right.begin + position, count, second.path)
                if not np.array_equal(left_bytes, right_bytes):
                    return False
        finally:
            os.close(right_descriptor)
    finally:
        os.close(left_descriptor)
    return True

"""Writers of small model folders, independent of the code under test."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

TensorWriter = Callable[[Path, Mapping[str, np.ndarray]], None]
FolderWriter = Callable[[Path], dict[str, np.ndarray]]


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write float32 arrays as F32 and uint16 arrays as BF16."""
    header, data = {}, b""
    for name, array in arrays.items():
        stored = array.tobytes()
        dtype = {"float32": "F32", "uint16": "BF16"}[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + len(stored)]}
        data += stored
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save_sharded_folder(folder: Path) -> dict[str, np.ndarray]:
    """Write config, index and three shards with two tensors each; return the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(7)
    arrays = {f"layer.{i}.weight": generator.standard_normal((4 + i, 3)).astype(np.float32) for i in range(6)}
    weight_map = {}
    for shard in range(3):
        file_name = f"model-{shard + 1:05d}-of-00003.safetensors"
        names = [f"layer.{2 * shard}.weight", f"layer.{2 * shard + 1}.weight"]
        save_arrays(folder / file_name, {name: arrays[name] for name in names})
        weight_map |= dict.fromkeys(names, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "tiny", "limit": [0.0, Infinity]}')
    return arrays


@pytest.fixture
def write_tensors() -> TensorWriter:
    return save_arrays


@pytest.fixture
def write_sharded() -> FolderWriter:
    return save_sharded_folder

"""Opens a Hugging Face folder: config.json, generation_config.json and safetensors weights."""

from __future__ import annotations

import os
from pathlib import Path

from colibri.checkpoint.checkpoint import Checkpoint
from colibri.checkpoint.shards import locate_tensors
from colibri.checkpoint.strict_json import read_object
from colibri.errors import CheckpointError

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the Hugging Face folder at `path`; every header is verified now, tensor data is read later.

    Raises CheckpointError naming the folder or file that is missing, unreadable, damaged or contradictory.
    """
    if not os.fspath(path):
        raise CheckpointError("the checkpoint's path is empty; give the folder that holds config.json.")
    # Absolute, so that reading still works after a change of the working directory; symlinks stay as they are,
    # because in a download cache the names of the link targets are hashes.
    folder = Path(path).absolute()
    present = _entries(folder)
    headers = locate_tensors(folder, present)
    if CONFIG_NAME not in present:
        raise CheckpointError(f"{folder} has no {CONFIG_NAME}; copy it from the model's repository.")
    config = read_object(folder / CONFIG_NAME)
    generation_config = read_object(folder / GENERATION_CONFIG_NAME) if GENERATION_CONFIG_NAME in present else None
    return Checkpoint(folder, config, generation_config, headers)


def _entries(folder: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} does not exist; give a folder that holds config.json and weights.") from error
    except NotADirectoryError as error:
        kind = "a GGUF file, a format that is not supported yet" if folder.suffix == ".gguf" else "a file"
        raise CheckpointError(f"{folder} is {kind}; give a folder that holds config.json and safetensors.") from error
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}; check its permissions.") from error
    except ValueError as error:
        raise CheckpointError(f"{str(folder)!r} cannot be a path: {error}; give a folder.") from error

"""Opens a Hugging Face folder (config.json, generation_config.json, safetensors weights) or a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

from colibri.checkpoint.checkpoint import Checkpoint, SafetensorsCheckpoint
from colibri.checkpoint.gguf import open_gguf
from colibri.checkpoint.gguf_header import MAGIC
from colibri.checkpoint.shards import locate_tensors
from colibri.checkpoint.strict_json import read_object
from colibri.errors import CheckpointError

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the Hugging Face folder or GGUF file at `path`; headers are verified now, tensor data is read later.

    Raises CheckpointError naming the folder or file that is missing, unreadable, damaged or contradictory, and
    UnsupportedModelError for a GGUF file of a model that cannot be run.
    """
    if not os.fspath(path):
        raise CheckpointError("the checkpoint's path is empty; give the folder that holds config.json, or a GGUF file.")
    # Absolute, so that reading still works after a change of the working directory; symlinks stay as they are,
    # because in a download cache the names of the link targets are hashes.
    folder = Path(path).absolute()
    if _is_gguf(folder):
        return open_gguf(folder)
    present = _entries(folder)
    headers = locate_tensors(folder, present)
    if CONFIG_NAME not in present:
        raise CheckpointError(f"{folder} has no {CONFIG_NAME}; copy it from the model's repository.")
    config = read_object(folder / CONFIG_NAME)
    generation_config = read_object(folder / GENERATION_CONFIG_NAME) if GENERATION_CONFIG_NAME in present else None
    return SafetensorsCheckpoint(folder, config, generation_config, headers)


def _is_gguf(path: Path) -> bool:
    """Say whether to read a GGUF file: by its name or, for caches that name files by their hash, by its content."""
    try:
        if path.suffix.lower() == ".gguf":
            return not path.is_dir()
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def _entries(folder: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} does not exist; give a folder that holds config.json and weights.") from error
    except NotADirectoryError as error:
        raise CheckpointError(
            f"{folder} is a file; give a folder that holds config.json and safetensors, or a file NAME.gguf."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}; check its permissions.") from error
    except ValueError as error:
        raise CheckpointError(f"{str(folder)!r} cannot be a path: {error}; give a folder.") from error

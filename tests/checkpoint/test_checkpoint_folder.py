"""Folders: which files count, what is missing or contradictory, read-only and symlinked layouts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import colibri.errors
from colibri.checkpoint import open_checkpoint
from colibri.errors import CheckpointError

if TYPE_CHECKING:
    from conftest import FolderWriter, TensorWriter

INDEX = "model.safetensors.index.json"
ONE = np.ones((2, 2), np.float32)
TWO = ONE + 1


def shard(number: int, count: int = 3) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def assert_holds(folder: str | Path, arrays: dict[str, np.ndarray]) -> None:
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.names() == sorted(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(checkpoint.read(name), array)


def refusal(folder: str | Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_map(folder: Path, changes: dict[str, str]) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(index))


def test_indexed_folder(tmp_path: Path, write_sharded: FolderWriter) -> None:
    arrays = write_sharded(tmp_path)
    assert_holds(tmp_path, arrays)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.path == tmp_path
        assert checkpoint.config == {"model_type": "tiny", "limit": [0.0, float("inf")]}
        assert checkpoint.generation_config is None
        info = checkpoint.info("layer.3.weight")
        assert (info.name, info.dtype, info.shape, info.file) == (
            "layer.3.weight",
            "F32",
            (7, 3),
            tmp_path / shard(2),
        )


def test_generation_config(tmp_path: Path, write_sharded: FolderWriter) -> None:
    write_sharded(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text("[]")
    assert "generation_config.json: the file is not a JSON object" in refusal(tmp_path)


def test_stray_files_change_nothing(tmp_path: Path, write_sharded: FolderWriter, write_tensors: TensorWriter) -> None:
    arrays = write_sharded(tmp_path)
    other = {name: array * 2 for name, array in arrays.items()} | {"extra": ONE}
    for stray in ("consolidated.safetensors", "adapter_model.safetensors", "model.safetensors", shard(1, 1)):
        write_tensors(tmp_path / stray, other)
    (tmp_path / "pytorch_model.bin").write_bytes(b"junk")
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    (tmp_path / "original").mkdir()
    write_tensors(tmp_path / "original" / "model.safetensors", other)
    assert_holds(tmp_path, arrays)


def test_single_file_without_index(tmp_path: Path, write_tensors: TensorWriter) -> None:
    write_tensors(tmp_path / "model.safetensors", {"w": ONE})
    for stray in ("consolidated.safetensors", shard(1, 2), "mtp.safetensors"):
        write_tensors(tmp_path / stray, {"w": TWO})
    (tmp_path / "config.json").write_text("{}")
    assert_holds(tmp_path, {"w": ONE})


def test_complete_set_without_index(tmp_path: Path, write_sharded: FolderWriter, write_tensors: TensorWriter) -> None:
    arrays = write_sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    for stray in ("consolidated.safetensors", shard(1, 5), shard(0), shard(4)):
        write_tensors(tmp_path / stray, {"layer.0.weight": TWO})
    assert_holds(tmp_path, arrays)
    (tmp_path / shard(2)).unlink()
    write_tensors(tmp_path / shard(1, 99999), {"w": ONE})
    assert f"1 of 3 shards missing: '{shard(2)}'" in refusal(tmp_path)


def test_incomplete_set_names_ten_shards(tmp_path: Path, write_tensors: TensorWriter) -> None:
    write_tensors(tmp_path / shard(7, 40), {"w": ONE})
    (tmp_path / "config.json").write_text("{}")
    message = refusal(tmp_path)
    assert "39 of 40 shards missing" in message and message.count(".safetensors") == 10
    assert shard(1, 40) in message and shard(7, 40) not in message and "..." in message


def test_two_complete_sets_are_ambiguous(tmp_path: Path, write_tensors: TensorWriter) -> None:
    for name in (shard(1, 1), shard(1, 2), shard(2, 2)):
        write_tensors(tmp_path / name, {f"w.{name}": ONE})
    (tmp_path / "config.json").write_text("{}")
    assert "2 complete sets" in refusal(tmp_path)


def test_missing_indexed_shards_are_counted(tmp_path: Path, write_sharded: FolderWriter) -> None:
    write_sharded(tmp_path)
    (tmp_path / shard(2)).unlink()
    message = refusal(tmp_path)
    assert "1 of 3 shards missing" in message and shard(2) in message and shard(1) not in message
    (tmp_path / shard(1)).unlink()
    (tmp_path / shard(1)).symlink_to("../blobs/gone")
    assert "2 of 3 shards missing" in refusal(tmp_path)


def test_index_that_lists_a_tensor_its_shard_lacks(tmp_path: Path, write_sharded: FolderWriter) -> None:
    write_sharded(tmp_path)
    edit_map(tmp_path, {f"ghost.{i:02d}": shard(3) for i in range(15)})
    message = refusal(tmp_path)
    assert "15 of 21 tensors" in message and message.count("ghost") == 10 and shard(3) in message


def test_index_that_moves_a_tensor_to_another_shard(tmp_path: Path, write_sharded: FolderWriter) -> None:
    write_sharded(tmp_path)
    edit_map(tmp_path, {"layer.0.weight": shard(3)})
    assert "'layer.0.weight'" in refusal(tmp_path)


@pytest.mark.parametrize(
    "file_name",
    ["../outside.safetensors", "sub/x.safetensors", "/etc/passwd", "..", ".", "", "a\\b", "a\0b", "\udcff", 5, None],
)
def test_index_that_points_out_of_the_folder(
    tmp_path: Path, write_sharded: FolderWriter, write_tensors: TensorWriter, file_name: str
) -> None:
    folder = tmp_path / "model"
    write_sharded(folder)
    for place in (tmp_path / "outside.safetensors", folder / "sub" / "x.safetensors"):
        place.parent.mkdir(exist_ok=True)
        write_tensors(place, {"layer.0.weight": ONE})
    edit_map(folder, {"layer.0.weight": file_name})
    message = refusal(folder)
    assert INDEX in message and "'layer.0.weight'" in message and "plain name" in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": []}', "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "key 'a' twice"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_damaged_index(tmp_path: Path, write_sharded: FolderWriter, content: bytes, expected: str) -> None:
    write_sharded(tmp_path)
    (tmp_path / INDEX).write_bytes(content)
    message = refusal(tmp_path)
    assert str(tmp_path / INDEX) in message and expected in message


def test_index_in_an_unfinished_download_is_not_ignored(tmp_path: Path, write_sharded: FolderWriter) -> None:
    write_sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / INDEX).symlink_to("../../blobs/gone")
    message = refusal(tmp_path)
    assert INDEX in message and "symbolic link to nothing" in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"{", "not valid JSON"), (b'"text"', "not a JSON object"), (b'{"a": 1, "a": 2}', "twice"), (None, "config.json")],
)
def test_config_is_required_and_valid(
    tmp_path: Path, write_sharded: FolderWriter, content: bytes | None, expected: str
) -> None:
    write_sharded(tmp_path)
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    message = refusal(tmp_path)
    assert "config.json" in message and str(tmp_path) in message and expected in message


@pytest.mark.parametrize("same", [True, False])
def test_tensor_in_two_shards_without_index(tmp_path: Path, write_tensors: TensorWriter, same: bool) -> None:
    second = {"v": TWO, "w": ONE if same else TWO}
    write_tensors(tmp_path / shard(1, 2), {"w": ONE})
    write_tensors(tmp_path / shard(2, 2), second)
    (tmp_path / "config.json").write_text("{}")
    if same:
        assert_holds(tmp_path, second)
    else:
        message = refusal(tmp_path)
        assert "'w'" in message and shard(1, 2) in message and shard(2, 2) in message
        # An index that says which one is meant settles it.
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"v": shard(2, 2), "w": shard(1, 2)}}))
        assert_holds(tmp_path, {"v": TWO, "w": ONE})


def test_tensor_in_two_shards_with_same_bytes_but_other_shape(tmp_path: Path, write_tensors: TensorWriter) -> None:
    write_tensors(tmp_path / shard(1, 2), {"w": ONE})
    write_tensors(tmp_path / shard(2, 2), {"w": ONE.reshape(4)})
    (tmp_path / "config.json").write_text("{}")
    assert "different data" in refusal(tmp_path)


@pytest.mark.parametrize("file_name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_formats_that_are_not_supported_yet_are_named(tmp_path: Path, file_name: str) -> None:
    (tmp_path / file_name).write_bytes(b"GGUF")
    message = refusal(tmp_path)
    assert file_name in message and "not supported yet" in message and "safetensors" in message


def test_a_folder_of_gguf_files_says_to_give_one(tmp_path: Path) -> None:
    (tmp_path / "tiny-q4_0.gguf").write_bytes(b"GGUF")
    message = refusal(tmp_path)
    assert "give one of them, 'tiny-q4_0.gguf'" in message


def test_folder_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    message = refusal(tmp_path)
    assert str(tmp_path) in message and INDEX in message and "model.safetensors" in message


def test_file_without_tensors_is_refused(tmp_path: Path, write_tensors: TensorWriter) -> None:
    write_tensors(tmp_path / "model.safetensors", {})
    (tmp_path / "config.json").write_text("{}")
    assert "has no tensors" in refusal(tmp_path)


def test_paths_that_are_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUX")
    assert f"{file} is a file" in refusal(file)
    assert f"{gguf} is not a GGUF file" in refusal(gguf)
    assert f"{tmp_path / 'gone'} does not exist" in refusal(tmp_path / "gone")
    assert "a\\x00b" in refusal("a\0b")
    assert "empty" in refusal("")
    assert "x" * 300 in refusal(tmp_path / ("x" * 300))


@pytest.mark.parametrize("name", ["with blanks  inside", "模型", "🐦 colibrí", "-dash", "a'b\"c"])
def test_unusual_and_relative_paths(
    tmp_path: Path, write_sharded: FolderWriter, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    arrays = write_sharded(tmp_path / name)
    assert_holds(tmp_path / name, arrays)
    monkeypatch.chdir(tmp_path)
    with open_checkpoint(name) as checkpoint:
        monkeypatch.chdir("/")
        np.testing.assert_array_equal(checkpoint.read("layer.0.weight"), arrays["layer.0.weight"])


def test_download_cache_layout(tmp_path: Path, write_sharded: FolderWriter) -> None:
    repository = tmp_path / "models--x--y"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "0123abcd"
    arrays = write_sharded(snapshot)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        file.rename(blob)
        file.symlink_to(Path("../../blobs") / blob.name)
    assert_holds(snapshot, arrays)
    (tmp_path / "first link").symlink_to(snapshot)
    (tmp_path / "second link").symlink_to("first link")
    assert_holds(tmp_path / "second link", arrays)


READ_AS_USER = """
import os, sys
import numpy
folder, closed_file, closed_folder, user = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
from colibri.checkpoint import open_checkpoint
from colibri.errors import CheckpointError
if os.geteuid() == 0:
    try:
        os.setegid(user)
        os.seteuid(user)
    except OSError:
        sys.exit(77)
try:
    open(os.path.join(folder, "probe"), "w")
    sys.exit("the folder is writable")
except PermissionError:
    pass
with open_checkpoint(folder) as checkpoint:
    print(sum(float(checkpoint.read(name).sum(dtype=numpy.float64)) for name in checkpoint.names()))
for path in (closed_file, closed_folder):
    try:
        open_checkpoint(path)
        sys.exit("an unreadable path was read")
    except CheckpointError as error:
        print(error)
"""


def test_read_only_folder_without_privileges(write_sharded: FolderWriter) -> None:
    place = Path(tempfile.mkdtemp())  # Not tmp_path: its parents are closed to other users.
    place.chmod(0o755)
    arrays = write_sharded(place / "模型")
    for name in ("closed file", "closed folder"):
        shutil.copytree(place / "模型", place / name)
    source = Path(colibri.errors.__file__).parent.parent
    script = place / "script.py"
    script.write_text(READ_AS_USER)
    folders = [place / "模型", place / "closed file", place / "closed folder"]
    try:
        for path in place.rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        (folders[1] / shard(2)).chmod(0)
        folders[2].chmod(0)
        environment = {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}  # And no HOME.
        finished = subprocess.run(
            [sys.executable, str(script), *map(str, folders), "65534"],
            env=environment,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=60,
        )
        if finished.returncode == 77:
            pytest.skip("root without the right to change its user id")
        assert finished.returncode == 0, finished.stderr
        total, file_message, folder_message = finished.stdout.splitlines()
        assert float(total) == sum(float(array.sum(dtype=np.float64)) for array in arrays.values())
        assert str(folders[1] / shard(2)) in file_message and "Permission denied" in file_message
        assert str(folders[2]) in folder_message and "Permission denied" in folder_message
    finally:
        for path in [place, *folders]:
            path.chmod(0o755)
        shutil.rmtree(place)

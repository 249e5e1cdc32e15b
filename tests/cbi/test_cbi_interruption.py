"""A final name never holds a half-written file."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cbi.tiny_file import write_tiny

from colibri.cbi import CbiFile, CbiWriter
from colibri.errors import UsageError


def test_an_interruption_keeps_the_old_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "model.cbi"
    write_tiny(path)
    old = path.read_bytes()

    def chunks():
        yield bytes(8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), CbiWriter(path) as writer:
        assert len(list(tmp_path.iterdir())) == 2
        writer.add_tensor("t", "f32", "rows", 1, 4, chunks())
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == old


def test_an_old_file_is_replaced_in_one_step(tmp_path):
    path = tmp_path / "model.cbi"
    write_tiny(path)
    with CbiFile.open(path) as open_before:
        digest = open_before.digest
        assert write_tiny(path, "f16") != digest
        # The reader of the old file is not disturbed.
        open_before.verify_digests()
    with CbiFile.open(path) as file:
        assert file.digest != digest


_FULL = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from cbi.tiny_file import write_tiny
from colibri.errors import ModelFileError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    write_tiny(Path(sys.argv[2]))
except ModelFileError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [0, 3000, 40000])
def test_a_full_disk_leaves_nothing_behind(tmp_path, limit):
    path = tmp_path / "model.cbi"
    command = [sys.executable, "-c", _FULL, str(Path(__file__).parent.parent), str(path), str(limit)]
    result = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    assert f"{path} could not be written: File too large" in result.stdout, result.stderr
    assert result.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_files_of_killed_writers_are_removed_and_those_of_running_ones_kept(tmp_path):
    path = tmp_path / "model.cbi"
    stale, running, foreign = (
        tmp_path / name
        for name in (".model.cbi.0000aaaa.partial", ".model.cbi.0000bbbb.partial", ".other.cbi.1.partial")
    )
    for other in (stale, running, foreign):
        other.write_bytes(b"half")
    with running.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_tiny(path)
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted((running.name, foreign.name, path.name))
    write_tiny(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted((foreign.name, path.name))


def test_two_writers_at_once_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "model.cbi"
    with CbiWriter(path) as first:
        first.add_tensor("t", "f32", "rows", 1, 4, [bytes(16)])
        digest = write_tiny(path)
    with CbiFile.open(path) as file:
        assert file.digest == digest


def test_paths_that_cannot_be_written(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        CbiWriter(tmp_path)
    with pytest.raises(UsageError, match=f"{tmp_path}/none is not a folder"):
        CbiWriter(tmp_path / "none" / "model.cbi")
    with pytest.raises(UsageError, match="cannot be written: File name too long"):
        CbiWriter(tmp_path / ("x" * 250))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(UsageError, match="cannot be written: Permission denied"):
        CbiWriter(tmp_path / "model.cbi")


def test_the_mode_follows_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write_tiny(tmp_path / "model.cbi")
    finally:
        os.umask(old)
    assert (tmp_path / "model.cbi").stat().st_mode & 0o777 == 0o640


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

"""What earlier runs used, kept in a file that the caller names, chooses what is read first and nothing else."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri
from colibri.errors import ColibriError, UsageError, UsageFileWarning
from colibri.runtime import usage_file
from colibri.runtime.usage_file import UsageFile

DIGEST, SIZES = bytes(range(32)), (3, 2)
SLOTS = 2 << 20  # room for some of the demo model's experts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.usage"


def made(path: Path) -> UsageFile:
    return UsageFile(path, DIGEST, SIZES)


def filled(path: Path) -> bytes:
    made(path).add(10, [[5, 0, 1], [0, 7]])
    return path.read_bytes()


def counts(path: Path) -> list[list[float]]:
    return [one.tolist() for one in made(path).counts]


def test_counts_come_back_and_fade(path: Path) -> None:
    assert counts(path) == [[0, 0, 0], [0, 0]] and not path.exists()
    filled(path)
    assert counts(path) == [[5, 0, 1], [0, 7]]
    made(path).add(usage_file.HALF_LIFE, [[0, 100, 0], [1, 0]])
    assert counts(path) == [[2.5, 100, 0.5], [1, 3.5]]
    assert made(path).hottest() == [(0, 1), (1, 1), (1, 0), (0, 0), (0, 2)]


def test_what_another_process_adds_meanwhile_is_kept(path: Path) -> None:
    first, second = made(path), made(path)
    first.add(0, [[1, 0, 0], [0, 0]])
    second.add(0, [[0, 2, 0], [0, 0]])
    assert counts(path) == [[1, 2, 0], [0, 0]]


def test_a_link_is_followed(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    filled(link)
    assert link.is_symlink() and counts(path)[1] == [0, 7]


def test_every_cut_and_every_flipped_bit_is_noticed(path: Path) -> None:
    data = filled(path)
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        if length < 8:
            with pytest.raises(UsageError, match="is not a usage file"):
                made(path)
        else:
            assert str(path) in (made(path).damage or "") and not np.concatenate(made(path).counts).any()
    for bit in range(8 * 40, 8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert "checksum" in (made(path).damage or "")
    path.write_bytes(data + b"\0")
    one = made(path)
    assert "size" in (one.damage or "")
    one.add(1, [[1, 1, 1], [1, 1]])
    assert made(path).damage is None and counts(path)[0] == [1, 1, 1]


def test_another_models_file_and_others_are_refused_and_stay(path: Path, tmp_path: Path) -> None:
    data = filled(path)
    with pytest.raises(UsageError, match=r"model\.usage is of another model .*of its own"):
        UsageFile(path, bytes(32), SIZES)
    assert path.read_bytes() == data
    path.write_text("my notes")
    with pytest.raises(UsageError, match="is not a usage file"):
        made(path)
    assert path.read_text() == "my notes"
    for wrong, why in ((tmp_path, "not a regular file"), (tmp_path / "none" / "x", "none is not a folder")):
        with pytest.raises(UsageError, match=why):
            made(wrong)
    one = made(tmp_path / "late")
    (tmp_path / "late").write_text("notes")
    with pytest.raises(UsageError, match="is not a usage file"):
        one.add(1, [[1, 1, 1], [1, 1]])
    assert (tmp_path / "late").read_text() == "notes"


@contextmanager
def full_disk() -> Iterator[None]:
    """No file grows beyond some bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_old_file(path: Path) -> None:
    data = filled(path)
    with full_disk(), pytest.raises(ColibriError, match=r"model\.usage could not be written"):
        made(path).add(1, [[1, 1, 1], [1, 1]])
    assert path.read_bytes() == data and list(path.parent.iterdir()) == [path]


KILLED = """
import os, sys
from pathlib import Path
from colibri.runtime.usage_file import UsageFile
where = sys.argv[2]
real = getattr(os, where, None) or getattr(Path, where)
def die(*arguments):
    os.kill(os.getpid(), 9)
setattr(os if hasattr(os, where) and where == "fsync" else Path, where, die)
UsageFile(Path(sys.argv[1]), bytes(range(32)), (3, 2)).add(1, [[1, 1, 1], [1, 1]])
"""


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_kill_half_way_leaves_the_old_file(path: Path, where: str) -> None:
    data = filled(path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), where], check=False)
    assert done.returncode == -9 and path.read_bytes() == data
    assert len(list(path.parent.iterdir())) == 2  # what it left is removed by the next one
    filled(path)
    assert list(path.parent.iterdir()) == [path]


def run(path: Path | None, tokens: list[int], **options: Any) -> tuple[np.ndarray, int]:
    """Logits of a run one by one, and the misses."""
    with colibri.Engine(expert_cache=SLOTS, usage_file=path, prefetch_depth=0, **options) as engine:
        with engine.session(256) as session:
            logits = np.concatenate([session.forward([token]) for token in tokens])
        return logits, sum(one.misses for one in engine.statistics().expert_sets)


def test_an_engine_learns_and_computes_the_same(path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 4096, 40).tolist()
    plain, cold = run(None, tokens)
    first, unlearned = run(path, tokens)
    assert unlearned == cold and path.stat().st_size == 8 + 32 + 4 + 6 * (4 + 32 * 8) + 4
    with colibri.Engine(expert_cache=SLOTS, usage_file=path) as engine:
        file = engine._usage_file
        assert file and sum(one.sum() for one in file.counts) == pytest.approx(40 * 6 * 4)
    learned, warm = run(path, tokens)
    assert (plain == first).all() and (plain == learned).all()
    assert warm <= cold


def test_old_favourites_do_not_starve_a_run(path: Path) -> None:
    """Experts that this run does not use cost it at most their slots once."""
    tokens = np.random.default_rng(2).integers(0, 512, 150).tolist()
    _, cold = run(None, tokens)
    with colibri.Engine() as engine:
        with engine.session(256) as session:
            session.forward(tokens, last_only=True)
        used = [np.array(one.tokens_per_expert) for one in engine.statistics().expert_sets]
        opposite = [(one.max() - one) * 1_000_000 for one in used]
        UsageFile(path, engine._text.digest, engine._text.expert_counts).add(0, [one.tolist() for one in opposite])
    _, misled = run(path, tokens)
    with colibri.Engine() as engine:
        slots = SLOTS * 6 * 32 // engine.statistics().expert_bytes
    assert misled - cold <= slots


def test_damage_and_failing_writes_are_warnings(path: Path) -> None:
    run(path, [1, 2])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UsageFileWarning, match=r"model\.usage is damaged .* ignored"):
        run(path, [1, 2])
    data = path.read_bytes()
    with full_disk(), pytest.warns(UsageFileWarning, match=r"not kept: .*model\.usage could not be written"):
        run(path, [1, 2])
    assert path.read_bytes() == data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(path, [1, 2])
    with pytest.raises(UsageError, match="of another model"):
        path.write_bytes(data[:8] + bytes(32) + data[40:])
        run(path, [1, 2])


def test_nothing_is_written_without_a_token_or_twice(path: Path) -> None:
    engine = colibri.Engine(usage_file=path)
    engine.close()
    assert not path.exists()
    engine = colibri.Engine(usage_file=path)
    with engine.session(8) as session:
        session.forward([1])
    engine.close()
    data = path.read_bytes()
    engine.close()
    assert path.read_bytes() == data


def test_the_reference_refuses_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_VM", "reference")
    with pytest.raises(UsageError, match="usage_file has no meaning"):
        colibri.Engine(usage_file=path)

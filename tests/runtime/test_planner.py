"""The planner's arithmetic, and what it says when it cannot measure."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from colibri.errors import ColibriError, ModelFileError
from colibri.runtime import machine
from colibri.runtime.engine import Engine, demo_model_path
from colibri.runtime.prediction import Prediction, Speeds, predict
from colibri.runtime.probe_model import TokenBytes

WEIGHTS = TokenBytes(dense=1_000_000, head=500_000, experts=500_000)
SPEEDS = Speeds(decode=1e9, prompt=1e11, disk=1e8)


def predicted(prompt: int, share: float = 1.0) -> Prediction:
    return predict(Engine.plan(demo_model_path(), context=512), WEIGHTS, SPEEDS, share, prompt)


def test_decoding_reads_weights_and_the_state_of_the_prompt() -> None:
    state = Engine.plan(demo_model_path(), context=512).model.session_bytes
    for prompt in (1, 256, 512, 4096):
        read = 2_000_000 + state * min(prompt, 512) // 512
        assert predicted(prompt).decode == pytest.approx(1e9 / read)
        assert predicted(prompt).decode_bound == "memory"


def test_what_is_missing_comes_from_the_disk() -> None:
    half = predicted(1, 0.5)
    assert half.decode_bytes_read == 250_000
    assert half.decode_bound == "disk"
    assert half.decode < 1e8 / 250_000  # and what no read goes on beside takes its time too
    assert predicted(1).decode_bytes_read == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EACCES])
def test_no_room_for_the_probe(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise ModelFileError("probe.cbi could not be written") from OSError(number, "no room")

    monkeypatch.setattr(machine, "write_probe_model", full)
    with pytest.raises(
        ColibriError, match=r"cannot measure this machine: no room; set TMPDIR to a folder with \d+ MiB"
    ):
        machine.measure_compute(demo_model_path(), 1)


def test_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(machine.tempfile, "gettempdir", none)
    monkeypatch.setattr(machine.tempfile, "tempdir", None)
    monkeypatch.setattr(machine.tempfile, "_get_default_tempdir", none, raising=False)
    with pytest.raises(ColibriError, match="No usable temporary directory found; set TMPDIR"):
        machine.measure_compute(demo_model_path(), 1)


def test_the_probe_is_no_larger_than_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[int] = []

    def stop(_source: object, _path: Path, room: int) -> None:
        rooms.append(room)
        raise ModelFileError("stop") from OSError(errno.ENOSPC, "stop")

    monkeypatch.setattr(machine, "write_probe_model", stop)
    with pytest.raises(ColibriError):
        machine.measure_compute(demo_model_path(), 1)
    assert 0 < rooms[0] <= demo_model_path().stat().st_size


def test_a_disk_can_be_measured_both_ways() -> None:
    past, through = (machine.measure_disk(demo_model_path(), 2, direct) for direct in (True, False))
    assert not through["is_direct"]
    assert past["bytes_per_second"] > 0 < through["bytes_per_second"]
    assert machine.disk_key(demo_model_path(), 2, True) != machine.disk_key(demo_model_path(), 2, False)

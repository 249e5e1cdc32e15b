"""`colibri plan`: figures that agree with the engine, measurements that are kept."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli.command import assert_fails, colibri

MIB = 1 << 20


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def plan(model: Path, cache: Path, *arguments: str) -> dict[str, Any]:
    # Measuring takes a second or two, and much longer where other processes compute.
    done = colibri("plan", model, "--json", *arguments, env={"XDG_CACHE_HOME": str(cache)}, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def least_budget(model: Path) -> int:
    """MiB in which the model runs at all; it depends on the interpreter."""
    refused = colibri("plan", model, "--ram", "20MiB", "--context", "64").stderr
    found = re.search(r"give ram=(\d+)MiB", refused)
    assert found, refused
    return int(found[1])


def test_the_plan_is_what_the_engine_does(demo_model: Path, cache: Path) -> None:
    ram = least_budget(demo_model) + 4  # MiB, of the 10.5 that all experts take
    options = ["--ram", f"{ram}MiB", "--context", "64"]
    planned = plan(demo_model, cache, *options)
    assert planned["needed"] <= planned["ram"] == ram * MIB
    assert planned["needed"] == sum(planned["parts"].values())
    done = colibri("run", demo_model, "In the beginning", *options, "--max-tokens", "2", "--json", "--statistics")
    statistics = json.loads(done.stdout)["statistics"]
    # `plan` has some modules loaded that `run` has not, and the other way round.
    assert abs(statistics["expert_bytes"] - planned["expert_bytes"]) < 3 * MIB
    assert 0 < planned["expert_share"] < 1
    assert planned["uniform"]["decode_bytes_read"] == pytest.approx(
        (1 - planned["expert_share"]) * planned["token_expert_bytes"], rel=0.01
    )
    assert plan(demo_model, cache, "--ram", "200MiB")["expert_share"] == 1


def test_more_memory_is_never_slower(demo_model: Path, cache: Path) -> None:
    least = least_budget(demo_model)
    sizes = (least + 1, least + 4, least + 7, least + 50)
    plans = [plan(demo_model, cache, "--ram", f"{ram}MiB", "--context", "64") for ram in sizes]
    for less, more in pairwise(plans):
        assert more["uniform"]["decode"] >= less["uniform"]["decode"]
        assert more["uniform"]["decode_bytes_read"] <= less["uniform"]["decode_bytes_read"]
    assert plans[-1]["uniform"]["decode_bound"] == "memory"
    assert plans[-1]["uniform"]["prompt_bound"] == "arithmetic"


def test_measurements_are_kept(demo_model: Path, cache: Path) -> None:
    first, again = (plan(demo_model, cache)["machine"] for _ in range(2))
    assert first == again
    assert json.loads((cache / "colibri/machine.json").read_text())["results"]
    assert plan(demo_model, cache, "--refresh")["machine"] != first
    for content in ("", "{", "[]", '{"format": 9}', '{"format": 1, "results": {"x": 5}}', "\0\xff"):
        (cache / "colibri/machine.json").write_text(content)
        assert plan(demo_model, cache)["machine"]["decode_bytes_per_second"] > 0


@pytest.mark.parametrize("number", ["0", "-1", "NaN", "1e400", "true", '"x"', None])
def test_damaged_measurements_are_made_anew(demo_model: Path, cache: Path, number: str | None) -> None:
    plan(demo_model, cache)
    file = cache / "colibri/machine.json"
    kept = json.loads(file.read_text())
    text = json.dumps(kept | {"results": {key: {name: "@" for name in of} for key, of in kept["results"].items()}})
    file.write_text(text.replace('"@"', number) if number else re.sub(r'"[^"]*": "@",? ?', "", text))
    planned = plan(demo_model, cache)
    assert min(planned["uniform"]["decode"], planned["uniform"]["prompt"]) > 0
    assert planned["machine"]["disk_bytes_per_second"] > 0


def test_a_killed_plan_leaves_no_file(demo_model: Path, cache: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "colibri", "plan", str(demo_model), "--refresh"]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not list(tmp_path.glob("colibri-*/*")):
            time.sleep(0.001)
        process.terminate()
        process.communicate()
    assert process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)
    assert not list(tmp_path.iterdir())


def test_without_a_place_to_keep_them(demo_model: Path, tmp_path: Path) -> None:
    locked = tmp_path / "file"
    locked.touch()  # no folder can be made below a file, not even by root
    assert plan(demo_model, locked)["machine"]["disk_bytes_per_second"] > 0
    done = colibri("plan", demo_model, "--json", env={"XDG_CACHE_HOME": "relative", "HOME": str(tmp_path / "home")})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "home/.cache/colibri/machine.json").exists()
    assert not Path("relative").exists()


def test_the_picture(demo_model: Path, cache: Path) -> None:
    done = colibri("plan", demo_model, "--ram", "91MiB", "--context", "64", env={"XDG_CACHE_HOME": str(cache)})
    for words in (
        "in 91 MiB",
        "dense weights",
        "experts in memory",
        "together",
        "of 10.50 MiB fit",
        "tokens/s, bound by",
    ):
        assert words in done.stdout
    assert "█" in done.stdout


def test_refusals(demo_model: Path, tiny_model: Path, tmp_path: Path) -> None:
    assert_fails(colibri("plan", demo_model, "--ram", "20MiB"), 1, "does not fit", "give ram=")
    assert_fails(colibri("plan", demo_model, "--ram", "x"), 2, "ram")
    assert_fails(colibri("plan", demo_model, "--context", "5000"), 2, "context", "1024")
    assert_fails(colibri("plan", tmp_path / "none.cbi"), 1, "none.cbi")
    assert_fails(colibri("plan", tiny_model, env={"COLIBRI_VM": "reference"}), 2, "COLIBRI_VM")


def test_other_shapes(tiny_model: Path, ids_model: Path, cache: Path) -> None:
    for model in (tiny_model, ids_model):
        assert plan(model, cache, "--batch", "3")["sessions"] == 3
    assert os.listdir(cache / "colibri") == ["machine.json"]

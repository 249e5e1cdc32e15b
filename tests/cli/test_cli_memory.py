"""--ram and the options of memory and reading: each does what it says, or is refused by name."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cli.command import assert_fails, colibri

MIB = 1 << 20
PROMPT = "In the beginning God created the heaven and the earth."


def run_json(*arguments: str | Path, **options: Any) -> dict[str, Any]:
    done = colibri(
        "run", *arguments, PROMPT, "--json", "--statistics", "--max-tokens", "12", "--context", "64", **options
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


def layers(result: dict[str, Any], key: str) -> int:
    return sum(layer[key] for layer in result["statistics"]["expert_sets"])


def smallest(command: str, *arguments: str | Path) -> int:
    done = colibri(command, *arguments, "--ram", "20MiB", "--context", "64")
    assert_fails(
        done, 1, "does not fit in ram=20 MiB", "dense weights", "attention state (64 positions)", "largest layer"
    )
    return int(done.stderr.split("give ram=")[1].split("MiB")[0])


def test_ram_changes_memory_and_no_token() -> None:
    plain = run_json()
    assert plain["statistics"]["resident"] and layers(plain, "misses") == 0
    least = smallest("run", PROMPT)
    small = run_json("--ram", f"{least}MiB")
    assert not small["statistics"]["resident"] and layers(small, "misses") > 0
    assert small["statistics"]["expert_bytes"] < plain["statistics"]["expert_bytes"] // 4
    assert small["tokens"] == plain["tokens"]
    assert run_json("--ram", f"{least + 40}MiB")["statistics"]["resident"]


def test_perplexity_and_bench_take_it(demo_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PROMPT * 20)
    arguments = [demo_model, "--text", text]
    least = smallest("perplexity", *arguments)
    results = [
        json.loads(colibri("perplexity", *arguments, "--context", "64", "--json", *more).stdout)
        for more in ([], ["--ram", f"{least}MiB"])
    ]
    assert results[0]["perplexity"] == results[1]["perplexity"]

    sizes = ["--prompt", "40", "--generate", "24", "--repeat", "1"]
    assert_fails(colibri("bench", demo_model, *sizes, "--ram", "20MiB", "--batch", "3"), 1, "state (3 x 64 positions)")
    done = colibri("bench", demo_model, *sizes, "--ram", "90MiB", "--json")
    assert json.loads(done.stdout)["peak_rss_mib"] <= 90


def test_chat_takes_it() -> None:
    done = colibri("chat", "--ram", "20MiB", stdin="hello\n")
    assert_fails(done, 1, "does not fit in ram=20 MiB", "1024 positions")
    assert colibri("chat", "--ram", "90MiB", "--max-tokens", "3", stdin="hello\n").returncode == 0


def test_every_option_does_what_it_says() -> None:
    cache = ["--expert-cache", "2MiB"]
    plain = run_json(*cache)
    assert plain["statistics"]["expert_bytes"] <= 2 * MIB
    for options, key, value in (
        (["--io", "direct"], "is_direct", True),
        (["--io", "buffered"], "is_direct", False),
        (["--prefetch-depth", "0"], "predicted_passes", 0),
        (["--max-batch", "1"], "passes", plain["prompt_tokens"] + plain["completion_tokens"] - 1),
    ):
        result = run_json(*cache, *options)
        assert result["statistics"][key] == value, options
        assert result["tokens"] == plain["tokens"]
    assert run_json(*cache, "--prefetch-depth", "2")["statistics"]["predicted_passes"] > 0
    for options in (["--verify", "full"], ["--verify", "off"], ["--io-threads", "5"], ["--huge-pages", "off"]):
        assert run_json(*cache, *options)["tokens"] == plain["tokens"], options


@pytest.mark.parametrize(("verify", "code"), [("crc", 1), ("full", 1), ("off", 0)])
def test_what_is_verified(demo_model: Path, tmp_path: Path, verify: str, code: int) -> None:
    """Damage to the last byte that an expert uses for a scale changes the text, or is found."""
    data = bytearray(demo_model.read_bytes())
    for at in range(4_000_000, 12_000_000, 20_000):
        data[at] ^= 1
    damaged = tmp_path / "damaged.cbi"
    damaged.write_bytes(data)
    done = colibri("run", damaged, PROMPT, "--expert-cache", "3MiB", "--verify", verify, "--max-tokens", "3")
    assert done.returncode == code, done.stderr
    if code:
        assert "damaged.cbi" in done.stderr and "expert" in done.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--ram", "lots"), ("--ram", "0"), ("--ram", "-1GiB"), ("--ram", "2XB"), ("--ram", "nan"), ("--ram", ""),
        ("--expert-cache", "some"), ("--expert-cache", "1.5"), ("--prefetch-depth", "-1"), ("--prefetch-depth", "99"),
        ("--io-threads", "0"), ("--io-threads", "17"), ("--io", "mmap"), ("--verify", "sometimes"),
        ("--huge-pages", "4M"), ("--max-batch", "0"), ("--max-batch", "70000"),
    ],
)  # fmt: skip
def test_nonsense(option: str, value: str) -> None:
    done = colibri("run", "x", option, value)
    name = option if option in done.stderr else option[2:].replace("-", "_").replace("max_batch", "max_batch_tokens")
    assert_fails(done, 2, name)


@pytest.mark.parametrize(
    "options",
    [["--ram", "1GiB"], ["--expert-cache", "1GiB"], ["--io-threads", "2"], ["--io", "direct"], ["--verify", "off"],
     ["--prefetch-depth", "0"], ["--mlock"], ["--huge-pages", "2M"]],
)  # fmt: skip
def test_the_reference_has_none_of_them(options: list[str], tiny_model: Path) -> None:
    name = options[0][2:].replace("-", "_")
    assert_fails(colibri("run", tiny_model, "x", *options, env={"COLIBRI_VM": "reference"}), 2, name, "COLIBRI_VM")


def small_lock_limit() -> None:
    """And no right to pass it, which root has."""
    drop_from_bounding_set, may_lock = 24, 14
    ctypes.CDLL(None).prctl(drop_from_bounding_set, may_lock, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))


def test_memory_that_the_system_does_not_lock() -> None:
    """One line of warning with the limit, and the text comes."""
    done = colibri("run", PROMPT, "--mlock", "--max-tokens", "2", preexec_fn=small_lock_limit)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("colibri: warning: ") and done.stderr.count("\n") == 1, done.stderr
    assert "lock" in done.stderr and "65536" in done.stderr, done.stderr
    assert done.stdout.strip()


def test_huge_pages_that_the_system_does_not_have() -> None:
    if Path("/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages").exists():
        free = Path("/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages").read_text()
        if int(free):
            pytest.skip("there are some")
    done = colibri("run", PROMPT, "--huge-pages", "1G", "--max-tokens", "2")
    assert done.returncode == 0
    assert done.stderr.startswith("colibri: warning: ") and done.stderr.count("\n") == 1, done.stderr
    assert "1 GiB" in done.stderr


def test_a_memory_cgroup(demo_model: Path) -> None:
    """The default keeps within the group; more than it has is refused. Needs to be root, as in a container."""
    folder = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")
    limit = "memory.limit_in_bytes" if folder.name == "memory" else "memory.max"
    group = folder / f"colibri-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(200 * MIB))
    except OSError:
        pytest.skip("no memory cgroup can be made here")
    try:

        def join() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        done = colibri("bench", demo_model, "--repeat", "1", "--generate", "4", "--json", preexec_fn=join)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["peak_rss_mib"] < 150
        assert colibri("run", PROMPT, "--ram", "5GiB", "--max-tokens", "3", preexec_fn=join).returncode == 0
        done = colibri("run", PROMPT, "--max-batch", "4096", "--ram", "5GiB", "--context", "1024", preexec_fn=join)
        (group / limit).write_text(str(64 * MIB))
        done = colibri("run", PROMPT, "--max-batch", "4096", "--ram", "5GiB", preexec_fn=join)
        assert_fails(done, 1, limit, "limit 64 MiB", "end this process", "give ram=")
        assert_fails(colibri("run", PROMPT, "--max-batch", "4096", preexec_fn=join), 1, limit, "less a margin")
    finally:
        subprocess.run(["sleep", "0.2"], check=False)
        group.rmdir()

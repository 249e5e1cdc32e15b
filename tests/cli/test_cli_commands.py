"""What each command prints, and that every option reaches the engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.command import DEMO_FOLDER, ENVIRONMENT, colibri
from families.tiny_folder import write_family
from runtime.cpus import CPUS

import colibri as package

COMMANDS = ("convert", "run", "chat", "inspect", "validate", "perplexity", "bench")


def output(*arguments: Any, **options: Any) -> str:
    done = colibri(*map(str, arguments), **options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_version() -> None:
    assert output("--version") == f"colibri {package.__version__}\n"


def test_help() -> None:
    text = output("--help")
    assert output() == output("-h") == text
    assert all(re.search(rf"^  {command} +\w", text, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str) -> None:
    text = output(command, "--help")
    assert text.startswith(f"Usage: colibri {command} ")
    assert text == output(command, "-h")
    if command in ("run", "chat"):
        for option in ("--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--seed", "--threads"):
            assert option in text


def test_help_and_version_start_without_the_engine() -> None:
    code = (
        "import sys, colibri.cli.app, colibri; colibri.__version__;"
        "print([m for m in ('numpy', 'tokenizers', 'jinja2', 'colibri.runtime') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_run_prints_what_the_engine_generates(demo_model: Path) -> None:
    with package.Engine() as engine:
        expected = "".join(engine.generate("In the beginning", max_tokens=12))
    assert output("run", "In the beginning", "--max-tokens", 12) == expected + "\n"
    assert output("run", demo_model, "In the beginning", "--max-tokens", 12) == expected + "\n"


def test_run_reads_prompts_as_they_are(tmp_path: Path, demo_model: Path) -> None:
    text = 'import os\n\ndef café(path):\n    """'
    path = tmp_path / "prompt.txt"
    path.write_text(text, encoding="utf-8")
    expected = output("run", text, "--max-tokens", 8)
    assert output("run", "-", "--max-tokens", 8, stdin=text) == expected
    assert output("run", "--prompt-file", path, "--max-tokens", 8) == expected
    assert output("run", demo_model, "--prompt-file", path, "--max-tokens", 8) == expected


def run_json(*arguments: Any, **options: Any) -> dict[str, Any]:
    text = output("run", *arguments, "--json", **options)
    assert text.count("\n") == 1
    return json.loads(text)


def test_run_json() -> None:
    with package.Engine() as engine:
        generation = engine.generate("In the", max_tokens=9, seed=5, temperature=1.0, top_k=50, top_p=0.8, min_p=0.01)
        list(generation)
    result = run_json("In the", "--max-tokens", 9, "--seed", 5, "--temperature", 1, "--top-k", 50, "--top-p", 0.8,
                      "--min-p", 0.01)  # fmt: skip
    assert result.pop("seconds") > 0
    assert result == {
        "text": generation.text,
        "tokens": generation.tokens,
        "finish_reason": "length",
        "prompt_tokens": generation.usage.prompt_tokens,
        "completion_tokens": 9,
    }


@pytest.mark.parametrize(
    "options",
    [["--temperature", "2"], ["--seed", "8"], ["--top-k", "1"], ["--top-p", "0.01"], ["--min-p", "0.9"]],
)
def test_every_sampling_option_reaches_the_sampler(options: list[str]) -> None:
    base = ["In the", "--max-tokens", 12, "--temperature", 1, "--top-p", 1]
    assert run_json(*base, *options)["tokens"] != run_json(*base)["tokens"]


def test_run_limits() -> None:
    text = run_json("In the", "--max-tokens", 30)["text"]
    word = text.split()[3]
    stopped = run_json("In the", "--max-tokens", 30, "--stop", "never there", "--stop", word)
    assert stopped["text"] == text[: text.index(word)]
    assert stopped["finish_reason"] == "stop"
    cut = run_json("In the", "--max-tokens", 30, "--context", 10)
    assert cut["prompt_tokens"] + cut["completion_tokens"] == 11
    assert cut["finish_reason"] == "length"


def test_run_chat_asks_through_the_template() -> None:
    with package.Engine() as engine:
        generation = engine.generate(messages=[{"role": "user", "content": 'Define "harbor".'}])
        text = "".join(generation)
    result = run_json("--chat", 'Define "harbor".')
    assert (result["text"], result["finish_reason"]) == (text, "stop")
    assert result["prompt_tokens"] == generation.usage.prompt_tokens


def test_statistics() -> None:
    result = run_json("In the", "--max-tokens", 3, "--statistics", "--threads", 1, env={"COLIBRI_CPU": "scalar"})
    statistics = result["statistics"]
    assert (statistics["vm"], statistics["cpu"], statistics["threads"]) == ("native", "scalar", 1)
    assert statistics["tokens"] == result["prompt_tokens"] + 2
    assert len(statistics["expert_sets"]) == 6
    done = colibri("run", "In the", "--max-tokens", "3", "--statistics", "--threads", "1")
    assert done.returncode == 0
    assert done.stdout.count("\n") >= 1
    assert statistics["phases"]["decode"]["passes"] == 2
    for words in (
        "4 tokens in 3 passes",
        "1 threads",
        "experts",
        "attention",
        "busiest expert",
        "decode: 2 tokens in 2",
    ):
        assert words in done.stderr


def test_the_reference_runs_the_same_text() -> None:
    arguments = ("In the", "--max-tokens", 6, "--temperature", 0)
    reference = run_json(*arguments, "--statistics", env={"COLIBRI_VM": "reference"})
    assert reference["statistics"]["vm"] == "reference"
    assert reference["tokens"] == run_json(*arguments)["tokens"]


def test_a_terminal_without_the_characters_gets_question_marks(tiny_model: Path) -> None:
    text = output("run", tiny_model, "é", "--max-tokens", 40, "--temperature", 2, env={"PYTHONIOENCODING": "ascii"})
    assert "?" in text


def test_chat_keeps_the_conversation() -> None:
    first, second = {"role": "user", "content": 'Define "harbor".'}, {"role": "user", "content": 'Define "sea".'}
    with package.Engine() as engine:

        def answer(*messages: dict[str, str]) -> str:
            return "".join(engine.generate(messages=messages, temperature=0, max_tokens=60))

        one = answer(first)
        two = answer(first, {"role": "assistant", "content": one}, second)
        alone = answer(second)
    assert two != alone
    lines = [first["content"], "", second["content"], "/reset", second["content"], "/exit", "never asked"]
    text = output("chat", "--temperature", 0, "--max-tokens", 60, stdin="\n".join(lines) + "\n")
    assert text == f"{one}\n{two}\n{alone}\n"
    assert output("chat", stdin="") == ""
    assert "/reset" in output("chat", stdin="/help")


def test_inspect(demo_model: Path) -> None:
    text = output("inspect", demo_model)
    for words in ("qwen3_moe", "4,096", "experts", "q4", "1,024"):
        assert words in text
    result = json.loads(output("inspect", demo_model, "--json"))
    assert (result["family"], result["layers"], result["vocabulary"]) == ("qwen3_moe", 6, 4096)
    assert result["bytes"] == demo_model.stat().st_size
    assert "tensors" not in result
    full = json.loads(output("inspect", demo_model, "--json", "--tensors", "--program"))
    assert {t["format"] for t in full["tensors"] if "router" in t["name"] or "gate" in t["name"]} <= {"f32"}
    assert len(full["expert_sets"]) == 6
    assert "attention" in full["program"]
    long = output("inspect", demo_model, "--tensors", "--program")
    assert long.startswith(text)
    assert "experts of layer 5" in long
    assert "rms_norm" in long


def test_validate(demo_model: Path) -> None:
    digest = json.loads(output("inspect", demo_model, "--json"))["digest"]
    assert output("validate", demo_model) == f"{demo_model}: valid, SHA-256 tree {digest}\n"


def test_convert(tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", "mixtral")
    text = output("convert", source, tmp_path / "a.cbi", "--weights", "f32", "--threads", 1)
    assert text.startswith(f"{tmp_path / 'a.cbi'}: mixtral, ")
    assert json.loads(output("inspect", tmp_path / "a.cbi", "--json"))["weights"] == "f32"
    output("convert", source, tmp_path / "b.cbi")
    assert json.loads(output("inspect", tmp_path / "b.cbi", "--json"))["weights"] == "q8"


def test_perplexity(demo_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text((DEMO_FOLDER / "heldout" / "kjv.txt").read_text()[:6000])
    result = json.loads(output("perplexity", demo_model, "--text", path, "--json"))
    with package.Engine() as engine:
        ids = engine.tokenizer.encode(path.read_text())
    assert result["context"] == 256
    assert result["predictions"] == len(ids) - -(-len(ids) // 256)
    assert 5 < result["perplexity"] < 30
    text = output("perplexity", demo_model, "--text", path, "--threads", 1)
    assert text.startswith(f"perplexity {result['perplexity']:.4f} over {result['predictions']} predictions")
    other = json.loads(output("perplexity", demo_model, "--text", path, "--json", "--context", 64))
    assert other["perplexity"] > result["perplexity"]


def test_bench(demo_model: Path) -> None:
    options = ("--prompt", 32, "--generate", 5, "--batch", 2, "--threads", 1, "--repeat", 2, "--topic", 3)
    result = json.loads(output("bench", demo_model, *options, "--json"))
    assert (result["engine"], result["batch"], result["threads"]) == ("colibri", 2, 1)
    assert result["model"] == str(demo_model)
    for name in ("load_s", "prompt_tokens_per_s", "decode_tokens_per_s", "decode_p50_ms", "peak_rss_mib"):
        assert result[name] > 0
    assert result["decode_p99_ms"] >= result["decode_p50_ms"]
    assert result["cpu"] in CPUS
    assert result["decode_p99_over_p50"] == pytest.approx(result["decode_p99_ms"] / result["decode_p50_ms"], rel=0.01)
    assert result["decode_regions_per_pass"] == 0  # one thread
    assert result["dispatch_count"] == result["dispatch_switched_count"] == result["dispatch_missed"] == 0
    assert "profile" not in result
    text = output("bench", demo_model, "--prompt", 8, "--generate", 2, "--repeat", 1)
    assert "decode_tokens_per_s" in text
    assert "rms_norm" not in text


def test_bench_profile(demo_model: Path) -> None:
    options = ("--prompt", 40, "--generate", 6, "--batch", 2, "--repeat", 1, "--threads", 2, "--profile")
    result = json.loads(output("bench", demo_model, *options, "--json"))
    assert result["decode_regions_per_pass"] > 0
    assert result["dispatch_count"] + result["dispatch_switched_count"] + result["dispatch_missed"] > 0
    profile = result["profile"]
    assert (profile["prompt"]["tokens"], profile["decode"]["tokens"]) == (80, 12)
    for phase in profile.values():
        assert len(phase["layers"]) == 6
        assert all(times["experts"] > 0 and times["attention"] > 0 for times in phase["layers"])
        assert phase["outside"]["embed"] > 0
        parts = sum(sum(times.values()) for times in (*phase["layers"], phase["outside"])) + phase["other"]
        assert parts == pytest.approx(phase["ms_per_token"], rel=0.01)
    lines = output("bench", demo_model, *options).splitlines()
    for name, tokens in (("prompt", 80), ("decode", 12)):
        start = lines.index(f"{name}: milliseconds for each of {tokens} tokens, by layer and op")
        table = [line.split() for line in lines[start + 1 : start + 12]]
        assert table[0][0] == "layer"
        assert set(table[0]) >= {"experts", "matmul", "attention", "route", "total", "%"}
        assert [row[0] for row in table[1:]] == [*map(str, range(6)), "outside", "other", "total", "%"]
        assert table[-2][-1] == table[-1][-1] == "100.0"
        whole = table[0].index("total")
        assert float(table[-2][whole]) == pytest.approx(sum(float(row[whole]) for row in table[1:-2]), abs=0.001)


def test_pin(demo_model: Path, tmp_path: Path) -> None:
    """Threads on processors of their own give the same text; too many are refused."""
    text = output("run", "In the beginning", "--max-tokens", 5)
    assert output("run", "In the beginning", "--max-tokens", 5, "--pin", "--threads", 1) == text
    heldout = tmp_path / "text.txt"
    heldout.write_text("In the beginning was the word.")
    for arguments in (
        ("run", "In the beginning"),
        ("chat",),
        ("perplexity", demo_model, "--text", heldout),
        ("bench", demo_model),
    ):
        done = colibri(*map(str, arguments), "--pin", "--threads", "1024", stdin="")
        assert (done.returncode, done.stdout) == (2, "")
        assert re.search(r"threads is 1024 and this process may use \d+ processors", done.stderr)

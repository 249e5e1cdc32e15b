"""Every way to go wrong: one line on stderr that names the thing, 2 for a wrong command line, 1 for a failure."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest
from cli.command import COMMAND, ENVIRONMENT, assert_fails, colibri
from families.tiny_folder import write_family
from runtime.tiny import write_tiny


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], ["frobnicate", "colibri --help"]),
        (["--frobnicate"], ["--frobnicate", "colibri --help"]),
        (["run", "--frobnicate", "x"], ["--frobnicate", "colibri run --help"]),
        (["run", "x", "--temperature"], ["--temperature"]),
        (["run", "x", "--temperature", "x"], ["--temperature", "number"]),
        (["run", "x", "--temperature", "nan"], ["--temperature"]),
        (["run", "x", "--temperature", "-1"], ["--temperature"]),
        (["run", "x", "--temperature", "inf"], ["temperature"]),
        (["run", "x", "--top-p", "2"], ["--top-p"]),
        (["run", "x", "--top-p", "0"], ["top_p"]),
        (["run", "x", "--top-k", "-1"], ["--top-k"]),
        (["run", "x", "--top-k", "1.5"], ["--top-k"]),
        (["run", "x", "--top-k", "99999999999"], ["top_k"]),
        (["run", "x", "--min-p", "1.1"], ["--min-p"]),
        (["run", "x", "--seed", "-1"], ["--seed"]),
        (["run", "x", "--seed", str(2**64)], ["seed"]),
        (["run", "x", "--max-tokens", "0"], ["--max-tokens"]),
        (["run", "x", "--max-tokens", "many"], ["--max-tokens"]),
        (["run", "x", "--threads", "0"], ["--threads"]),
        (["run", "x", "--threads", "5000"], ["--threads"]),
        (["run", "x", "--context", "0"], ["--context"]),
        (["run", "x", "--context", "1025"], ["context", "1024", "1025"]),
        (["run", "x", "--stop", ""], ["stop"]),
        (["run"], ["no prompt", "--prompt-file"]),
        (["run", "model.cbi"], ["model.cbi", "no prompt"]),
        (["run", "a.cbi", "b.cbi"], ["b.cbi", "no prompt"]),
        (["run", "a.cbi", "two", "words"], ["'words'", "quote"]),
        (["run", "-", "--prompt-file", "f"], ["--prompt-file", "twice"]),
        (["run", "a.cbi", "text", "--prompt-file", "f"], ["'text'"]),
        (["run", ""], ["prompt", "empty"]),
        (["run", "-"], ["prompt", "empty", "standard input"]),
        (["chat", "--top-p", "x"], ["--top-p", "colibri chat --help"]),
        (["chat", "a.cbi", "b.cbi"], ["b.cbi"]),
        (["inspect"], ["MODEL.cbi", "colibri inspect --help"]),
        (["inspect", "a.cbi", "b.cbi"], ["b.cbi"]),
        (["validate"], ["MODEL.cbi"]),
        (["convert"], ["SOURCE"]),
        (["convert", "source"], ["OUT.cbi"]),
        (["perplexity", "a.cbi"], ["--text"]),
        (["perplexity", "a.cbi", "--text", "f", "--context", "1"], ["--context"]),
        (["bench"], ["MODEL.cbi"]),
        (["bench", "a.cbi", "--topic", "16"], ["--topic"]),
        (["bench", "a.cbi", "--batch", "0"], ["--batch"]),
        (["bench", "a.cbi", "--repeat", "0"], ["--repeat"]),
    ],
)
def test_a_wrong_command_line(arguments: list[str], words: list[str]) -> None:
    assert_fails(colibri(*arguments), 2, *words)


@pytest.mark.parametrize("command", ["run", "chat", "inspect", "validate", "perplexity", "bench"])
def test_model_files_that_cannot_be_used(command: str, demo_model: Path, tmp_path: Path) -> None:
    content = demo_model.read_bytes()
    files = {
        "empty.cbi": b"",
        "text.cbi": b"This is not a model.\n" * 9,
        "truncated.cbi": content[: len(content) // 2],
        "header.cbi": content[:60],
        "version.cbi": content[:8] + b"\x63" + content[9:],
    }
    says = {"empty.cbi": "not a .cbi file", "text.cbi": "not a .cbi file", "truncated.cbi": "truncated",
            "header.cbi": "", "version.cbi": "version 99", "folder.cbi": "folder", "pipe.cbi": "not a regular file",
            "missing.cbi": "does not exist",
            "missing/model.cbi": "does not exist"}  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder.cbi").mkdir()
    os.mkfifo(tmp_path / "pipe.cbi")
    (tmp_path / "text.txt").write_text("text")
    more = {"run": ["a prompt"], "perplexity": ["--text", tmp_path / "text.txt"]}.get(command, [])
    # Each command opens files by the same way; the long list is for one of them.
    for name in says if command == "run" else ("truncated.cbi", "missing.cbi"):
        assert_fails(colibri(command, tmp_path / name, *more, stdin="hello\n"), 1, str(tmp_path / name), says[name])


@pytest.mark.parametrize("command", ["run", "validate"])
def test_a_damaged_expert_is_named(command: str, demo_model: Path, tmp_path: Path) -> None:
    data = bytearray(demo_model.read_bytes())
    data[9_000_000] ^= 4
    path = tmp_path / "damaged.cbi"
    path.write_bytes(data)
    more = ["x"] if command == "run" else []
    assert_fails(colibri(command, path, *more), 1, "damaged.cbi", "expert", "damaged")


def test_a_prompt_longer_than_the_context(demo_model: Path, tmp_path: Path) -> None:
    assert_fails(colibri("run", "one two three four", "--context", "3"), 1, "the context holds 3")
    path = tmp_path / "long.txt"
    path.write_text("word " * 3000)
    assert_fails(colibri("run", "--prompt-file", path), 1, "the context holds 1024")
    assert_fails(colibri("chat", stdin="word " * 3000), 1, "the context holds 1024")


def test_prompts_that_cannot_be_read(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    assert_fails(colibri("run", "--prompt-file", tmp_path / "none.txt"), 1, "none.txt", "No such file")
    assert_fails(colibri("run", "--prompt-file", tmp_path), 1, str(tmp_path), "directory")
    assert_fails(colibri("run", "--prompt-file", latin), 1, "latin.txt", "UTF-8", "byte 3")
    assert_fails(colibri("run", "-", stdin=b"caf\xe9"), 1, "standard input", "UTF-8")
    assert_fails(colibri("chat", stdin=b"caf\xe9\n"), 1, "standard input", "UTF-8")
    assert_fails(colibri("run", os.fsdecode(b"caf\xe9")), 1, "PROMPT", "UTF-8")
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert_fails(colibri("run", "--prompt-file", empty), 2, "empty.txt", "empty")


def test_texts_for_perplexity(tiny_model: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a")
    assert_fails(colibri("perplexity", tiny_model, "--text", short), 1, "short.txt", "1 tokens")
    assert_fails(colibri("perplexity", tiny_model, "--text", tmp_path / "none.txt"), 1, "none.txt")
    assert_fails(colibri("perplexity", tiny_model, "--text", short, "--context", "300"), 2, "context", "256")


def test_bench_beyond_the_context(tiny_model: Path) -> None:
    assert_fails(colibri("bench", tiny_model, "--prompt", "300"), 2, "--prompt", "256")


def test_models_without_tokenizer_or_template(ids_model: Path, plain_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text")
    assert_fails(colibri("run", ids_model, "x"), 1, "ids.cbi", "no tokenizer")
    assert_fails(colibri("chat", ids_model, stdin="x\n"), 1, "ids.cbi", "no tokenizer")
    assert_fails(colibri("perplexity", ids_model, "--text", text), 1, "ids.cbi", "no tokenizer")
    assert_fails(colibri("run", plain_model, "--chat", "x"), 1, "plain.cbi", "no chat template")
    assert_fails(colibri("chat", plain_model, stdin="x\n"), 1, "plain.cbi", "no chat template")
    for command in ("inspect", "validate"):
        assert colibri(command, ids_model).returncode == 0


def test_environment_variables() -> None:
    assert_fails(colibri("run", "x", env={"COLIBRI_CPU": "z80"}), 2, "COLIBRI_CPU=z80", "scalar")
    assert_fails(colibri("run", "x", env={"COLIBRI_VM": "java"}), 2, "COLIBRI_VM", "java", "reference")


def test_sources_and_outputs_of_convert(tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", "qwen3_moe")
    output = tmp_path / "model.cbi"
    cases: list[tuple[int, list[str | Path], str]] = [
        (1, [tmp_path / "none", output], "none"),
        (1, [tmp_path, output], str(tmp_path)),
        (2, [source, tmp_path / "none" / "model.cbi"], str(tmp_path / "none")),
        (2, [source, tmp_path], str(tmp_path)),
        (2, [source, "/dev/null"], "/dev/null"),
        (2, [source, output, "--weights", "q3"], "q3"),
        (2, [source, source / "model.safetensors"], "model.safetensors"),
    ]
    for code, arguments, name in cases:
        assert_fails(colibri("convert", *arguments), code, name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    assert not Path("/dev/null").is_file()


def test_a_full_disk(tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", "qwen3_moe")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    # Python would leave cut bytecode files.
    env = {"PYTHONDONTWRITEBYTECODE": "1"}
    done = colibri("convert", source, tmp_path / "model.cbi", preexec_fn=limit, env=env)
    assert_fails(done, 1, "model.cbi", "could not be written")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("arguments", [["run", "In the"], ["run", "In the", "--json"], ["--help"], ["inspect"]])
def test_output_that_cannot_be_written(arguments: list[str], demo_model: Path) -> None:
    if arguments == ["inspect"]:
        arguments = ["inspect", str(demo_model), "--json"]
    with Path("/dev/full").open("wb") as full:
        assert_fails(colibri(*arguments, stdout=full), 1, "standard output", "No space left")


def test_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        assert_fails(colibri("run", "In the", stdout=closed), 1, "standard output")
    with subprocess.Popen(
        [*COMMAND, "run", "In the", "--max-tokens", "500", "--temperature", "1.5"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        error = process.stderr.read().decode()
    assert error.startswith("colibri: standard output was closed")
    assert error.count("\n") == 1
    assert process.returncode == 1


def test_closed_streams(tiny_model: Path) -> None:
    def shell(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", line, "sh", *COMMAND], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
        )

    assert_fails(shell('"$@" run x >&-'), 1, "standard output is closed")
    assert_fails(shell('"$@" run - <&-'), 1, "standard input is closed")
    assert_fails(shell('"$@" chat <&-'), 1, "standard input is closed")
    silent = shell('"$@" run x >&- 2>&-')
    assert (silent.returncode, silent.stdout, silent.stderr) == (1, "", "")
    silent = shell(f'"$@" run {tiny_model} x --max-tokens 2 2>&-')
    assert silent.returncode == 0


def test_a_template_that_refuses(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "refuses.cbi", template="{{ raise_exception('ask me nothing') }}")
    assert_fails(colibri("run", model, "--chat", "x"), 1, "ask me nothing")
    assert_fails(colibri("chat", model, stdin="x\n"), 1, "ask me nothing")


def test_a_folder_deleted_under_the_command_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'rmdir "$PWD"; exec {" ".join(COMMAND)} convert . out.cbi'
    done = subprocess.run(["sh", "-c", script], cwd=gone, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert_fails(done, 1, "the current folder", "change to one that exists")

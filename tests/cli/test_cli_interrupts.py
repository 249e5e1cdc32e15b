"""Ctrl-C in the command line, in the prompt, in decoding and in a conversation."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli.command import COMMAND, DEMO_FOLDER, ENVIRONMENT


@contextmanager
def started(*arguments: str | Path, cpu: str = "") -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [*COMMAND, *arguments],
        env=ENVIRONMENT | {"COLIBRI_CPU": cpu},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        yield process


def interrupt(process: subprocess.Popen[bytes]) -> bytes:
    """Press Ctrl-C; check the end and return what was printed."""
    pressed = time.perf_counter()
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=30)
    assert error == b"colibri: interrupted\n"
    assert process.returncode == 130
    assert time.perf_counter() - pressed < 2
    return output


def wait_for_forward(process: subprocess.Popen[bytes]) -> None:
    """Until the engine is open and has computed for a while."""
    tasks, started_at = Path(f"/proc/{process.pid}/task"), time.perf_counter()
    while time.perf_counter() - started_at < 20:
        names = [(task / "comm").read_text().strip() for task in list(tasks.iterdir()) if (task / "comm").exists()]
        if len(names) > 1:
            time.sleep(0.15)
            return
        time.sleep(0.005)


def test_in_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("a b " * 480)
    with started("run", "--prompt-file", path, "--threads", "1", cpu="scalar") as process:
        wait_for_forward(process)
        assert interrupt(process) == b""


def test_in_decoding() -> None:
    with started("run", "In the", "--max-tokens", "900", "--temperature", "1.5", cpu="scalar") as process:
        assert process.stdout
        assert process.stdout.read(1)
        interrupt(process)


def wait_for_command(process: subprocess.Popen[bytes]) -> None:
    """Until the command imports what it needs; before that, a signal ends Python itself, which no program can help."""
    maps, started_at = Path(f"/proc/{process.pid}/maps"), time.perf_counter()
    while "_multiarray_umath" not in maps.read_text() and time.perf_counter() - started_at < 20:
        time.sleep(0.002)


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.4])
def test_at_any_time(delay: float, demo_model: Path) -> None:
    text = DEMO_FOLDER / "heldout" / "pydoc.txt"
    with started("perplexity", demo_model, "--text", text, cpu="scalar") as process:
        wait_for_command(process)
        time.sleep(delay)
        assert interrupt(process) == b""


def test_in_a_conversion(tmp_path: Path) -> None:
    with started("convert", DEMO_FOLDER, tmp_path / "model.cbi", "--threads", "1") as process:
        deadline = time.perf_counter() + 20
        while not list(tmp_path.iterdir()) and time.perf_counter() < deadline:
            time.sleep(0.005)
        interrupt(process)
    assert list(tmp_path.iterdir()) == []


def test_in_a_piped_conversation() -> None:
    with subprocess.Popen(
        [*COMMAND, "chat"], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b'Define "harbor".\n')
        process.stdin.flush()
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


class Terminal:
    """A program on a terminal."""

    def __init__(self, *arguments: str | Path):
        self.seen = ""
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.execve(COMMAND[0], [*COMMAND, *map(str, arguments)], ENVIRONMENT | {"TERM": "dumb"})

    def expect(self, text: str) -> str:
        """Read until `text` comes, and return all up to it."""
        deadline = time.perf_counter() + 20
        while text not in self.seen:
            assert time.perf_counter() < deadline, self.seen
            if select.select([self._descriptor], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self._descriptor, 4096).decode(errors="replace")
                except OSError:  # the program has ended
                    assert text in self.seen, self.seen
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def close(self) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._descriptor)
        return code


def test_in_a_conversation_it_stops_the_answer_alone(tiny_model: Path) -> None:
    terminal = Terminal("chat", tiny_model, "--temperature", "5", "--context", "256", "--max-tokens", "200")
    terminal.expect("Ctrl-C stops an answer")
    terminal.expect("> ")
    time.sleep(0.3)  # readline does not see a signal before it waits for a key
    terminal.type("\x03")
    terminal.expect("(Ctrl-D or /exit ends)")
    terminal.expect("> ")
    terminal.type("/help\n")
    terminal.expect("/reset forgets")
    terminal.expect("> ")
    terminal.type("x" * 300 + "\n")
    terminal.expect("the context holds 256")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.close() == 0


def test_an_answer_can_be_stopped() -> None:
    terminal = Terminal("chat", "--temperature", "1.5", "--max-tokens", "900", "--top-p", "1", "--seed", "1")
    terminal.expect("> ")
    stopped = False
    for question in range(20):
        terminal.type(f"Tell me about the sea, number {question}.\n")
        terminal.expect(f"number {question}.")
        terminal.type("\x03")
        answer = terminal.expect("> ")
        if "(stopped)" in answer:
            stopped = True
            break
        terminal.type("/reset\n")
        terminal.expect("> ")
    assert stopped
    terminal.type("/exit\n")
    assert terminal.close() == 0

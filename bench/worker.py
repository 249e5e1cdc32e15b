"""A child process that answers JSON lines (peers/protocol.py)."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any


class WorkerError(Exception):
    """The worker ended, or did not answer in time; the message is its own last word."""


class Worker:
    """Starts the command and waits until it is ready; `ready` holds what it said. Use as a context manager."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str | None] | None = None, timeout: float = 600
    ):
        """environment: variables to set, or (None) to remove. Raises WorkerError."""
        variables = dict(os.environ)
        for name, value in (environment or {}).items():
            variables.pop(name, None)
            if value is not None:
                variables[name] = value
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=variables
            )
        except OSError as error:
            raise WorkerError(f"{command[0]} cannot be started: {error.strerror}") from error
        self._buffer = b""
        self.ready = self._reply(timeout)

    def ask(self, request: dict[str, Any], timeout: float = 600) -> dict[str, Any]:
        """Send a request and return the answer; WorkerError if there is none, and the process is gone then."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended; what it said comes with the error
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return self._reply(timeout)

    def finish(self) -> dict[str, Any]:
        """End the worker and return its last words."""
        assert self._process.stdin
        self._process.stdin.close()
        last = self._reply(60)
        self._stop()
        return last

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _reply(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(timeout):
                    self._stop()
                    raise WorkerError(f"no answer within {timeout:.0f} s")
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise WorkerError(self._last_word())
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _last_word(self) -> str:
        self._process.wait()
        if self._errors.closed:
            return "it has ended"
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        told = [line for line in lines if "Error" in line or "ASSERT" in line] or lines
        self._stop()
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"status {code}"
        return f"ended with {how}: {told[-1][:300] if told else 'no output'}"

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream and not stream.closed:
                with contextlib.suppress(BrokenPipeError):  # a request that nobody read
                    stream.close()

"""The child processes of the benchmark: answers, failures with their reason, time-outs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from worker import Worker, WorkerError

BENCH = Path(__file__).resolve().parents[2] / "bench"

ECHO = """
import sys
sys.path.insert(0, sys.argv[1])
from protocol import serve

def answer(engine, request):
    if request.get("end"):
        raise SystemExit("out of luck")
    print("more noise")
    return {"got": request["n"] + engine}

serve(lambda: 1, answer)
"""


def start(code: str = ECHO, **options: float) -> Worker:
    return Worker([sys.executable, "-c", code, str(BENCH / "peers")], **options)


def test_answers_and_last_words():
    with start() as worker:
        assert worker.ready["load_s"] >= 0
        assert [worker.ask({"n": n}) for n in (1, 2)] == [{"got": 2}, {"got": 3}]
        assert worker.finish()["peak_rss_mib"] > 0


def test_the_reason_of_a_failure_is_kept():
    with start() as worker, pytest.raises(WorkerError, match="status 1: out of luck"):
        worker.ask({"end": True})


def test_a_program_that_cannot_load():
    with pytest.raises(WorkerError, match="ModuleNotFoundError: No module named 'no_such_engine'"):
        start("import no_such_engine")
    with pytest.raises(WorkerError, match="/no/such/python cannot be started"):
        Worker(["/no/such/python"])


def test_no_answer_in_time():
    with pytest.raises(WorkerError, match="no answer within"):
        start("import time\ntime.sleep(60)", timeout=0.2)

"""Ctrl-C in the main thread, and cancels from other threads, at every moment of a forward."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from runtime.scripts import run_script

import colibri
from colibri.errors import BusyError, CancelledError
from colibri.runtime.interruptible import run_abandonable, run_interruptible

TOKENS = [(17 * i * i + i) % 4096 for i in range(900)]


def test_ctrl_c_leaves_a_usable_session() -> None:
    """Interrupts a forward after 0 to 1.2 of its own time: in its first op, within, at the end and after it."""
    output = run_script(
        """
        import os, signal, threading, time
        import numpy as np
        import colibri

        engine = colibri.Engine(threads=2, max_batch_tokens=64)
        tokens = [(17 * i * i + i) % 4096 for i in range(400)]
        with engine.session() as session:
            session.forward(tokens)
            session.truncate(0)
            started = time.perf_counter()
            expected = session.forward(tokens, last_only=True)
            seconds = time.perf_counter() - started

        interrupted = 0
        for trial in range(40):
            with engine.session() as session:
                session.forward([5])
                timer = threading.Timer(1.2 * seconds * trial / 40, os.kill, (os.getpid(), signal.SIGINT))
                logits = None
                try:
                    timer.start()
                    logits = session.forward(tokens)
                    time.sleep(10)
                    raise SystemExit("no interrupt came")
                except KeyboardInterrupt:
                    pass
                timer.join()
                if session.position == 1:
                    assert logits is None
                    interrupted += 1
                    # The cancel is over: it does not hit this one.
                    assert session.forward(tokens).shape == (400, 4096)
                else:  # the interrupt came when the forward had ended
                    assert session.position == 401
                session.truncate(0)
                assert np.array_equal(session.forward(tokens, last_only=True), expected)
        print(interrupted)
        """
    )
    assert int(output) >= 5


def test_ctrl_c_ends_a_long_forward_promptly() -> None:
    output = run_script(
        """
        import os, signal, threading, time
        import colibri

        engine = colibri.Engine(threads=1, max_batch_tokens=1)
        session = engine.session()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            for _ in range(1000):
                session.truncate(0)
                session.forward(list(range(1000)), last_only=True)
        except KeyboardInterrupt:
            pass
        started = time.perf_counter()
        # The process must not be busy with what was interrupted.
        used = time.process_time()
        time.sleep(0.2)
        print(time.process_time() - used, session.position)
        """
    )
    used, position = output.split()
    assert float(used) < 0.1
    assert position == "0"


def test_more_ctrl_c_do_not_free_what_is_in_use() -> None:
    output = run_script(
        """
        import os, signal, threading
        import colibri
        from colibri.runtime.interruptible import run_interruptible

        running, ended, events = threading.Event(), threading.Event(), []

        def call():
            running.set()
            ended.wait()
            events.append("call ended")

        def press():
            running.wait()
            for _ in range(5):
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(0.02)
            ended.set()

        threading.Thread(target=press).start()
        try:
            run_interruptible(call, lambda: events.append("cancel"), lambda: events.append("undo"))
        except KeyboardInterrupt:
            events.append("raised")
        print(events)
        """
    )
    assert output.strip() == "['cancel', 'call ended', 'undo', 'raised']"


def test_ctrl_c_while_a_model_is_opened_leaves_it_behind() -> None:
    output = run_script(
        """
        import os, signal, threading
        from colibri.runtime.interruptible import run_abandonable

        running, ended, discarded = threading.Event(), threading.Event(), threading.Event()

        def call():
            running.set()
            ended.wait()
            return "model"

        def press():
            running.wait()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=press).start()
        try:
            run_abandonable(call, lambda model: (print("discarded", model), discarded.set()))
        except KeyboardInterrupt:
            print("raised")
        ended.set()
        discarded.wait(10)
        """
    )
    assert output.split("\n")[:2] == ["raised", "discarded model"]


RUNNERS: list[Callable[[Callable[[], object]], object]] = [
    lambda call: run_interruptible(call, lambda: None, lambda: None),
    lambda call: run_abandonable(call, lambda _: None),
]


@pytest.mark.parametrize("run", RUNNERS)
def test_results_and_errors_come_through(run: Callable[[Callable[[], object]], object]) -> None:
    assert run(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 // 0)


def test_cancel_from_another_thread() -> None:
    with colibri.Engine(threads=1, max_batch_tokens=16) as engine, engine.session() as session:
        session.forward([1])
        outcome: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(1000):
                    session.forward(TOKENS)
                    session.truncate(1)
            except CancelledError as error:
                outcome.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.02)
        started = time.perf_counter()
        while thread.is_alive():  # a cancel between forward and truncate is forgotten
            session.cancel()
            thread.join(0.2)
        assert time.perf_counter() - started < 2
        assert len(outcome) == 1
        session.truncate(1)
        assert session.tokens == [1]
        session.forward([2])


def test_a_cancel_leaves_the_rest_of_the_batch_alone(demo: colibri.Engine) -> None:
    with demo.session() as session:
        expected = session.forward(TOKENS, last_only=True)
    for delay in (0.0, 0.005, 0.02):
        with demo.session() as a, demo.session() as b:
            timer = threading.Timer(delay, a.cancel)
            timer.start()
            results = demo.forward_batch([(a, TOKENS), (b, TOKENS)], last_only=True)
            timer.join()
            assert np.array_equal(np.asarray(results[1]), expected)
            if isinstance(results[0], CancelledError):
                assert a.position == 0
            else:
                assert np.array_equal(np.asarray(results[0]), expected)


def test_one_caller_at_a_time() -> None:
    with colibri.Engine(threads=1, max_batch_tokens=1) as engine, engine.session() as session:
        blob = session.save()

        def work() -> None:
            with suppress(CancelledError):
                session.forward(TOKENS, last_only=True)

        thread = threading.Thread(target=work)
        thread.start()
        while not is_busy(session.save):
            assert thread.is_alive()
        assert is_busy(lambda: session.forward([1]))
        assert is_busy(lambda: session.truncate(0))
        assert is_busy(lambda: session.restore(blob))
        assert is_busy(session.close)
        assert is_busy(engine.close)
        session.cancel()
        thread.join()
        session.forward([1])


def is_busy(use: Callable[[], object]) -> bool:
    try:
        use()
    except BusyError:
        return True
    return False


def test_threads_with_sessions_of_their_own(demo: colibri.Engine) -> None:
    def text(seed: int) -> str:
        return "".join(demo.generate("In the beginning", max_tokens=25, temperature=1.0, seed=seed))

    alone = [text(seed) for seed in range(6)]
    beside: list[str] = [""] * 6

    def work(seed: int) -> None:
        beside[seed] = text(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert beside == alone


def test_within_a_running_event_loop(demo: colibri.Engine) -> None:
    """As in a notebook, where the main thread runs a loop."""
    import asyncio

    async def cell() -> str:
        return "".join(demo.generate("In the", max_tokens=5, temperature=0))

    async def in_a_worker() -> str:
        return await asyncio.to_thread(lambda: "".join(demo.generate("In the", max_tokens=5, temperature=0)))

    assert asyncio.run(cell()) == asyncio.run(in_a_worker()) != ""

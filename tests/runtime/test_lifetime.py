"""Engines and sessions that are not closed, forks, paths, and what a process leaves behind."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from runtime.scripts import run_script

import colibri


def test_unclosed_handles_are_freed() -> None:
    """Also in a cycle, where the collector may take an engine before its sessions."""
    output = run_script(
        """
        import gc, time
        from pathlib import Path
        import colibri

        def resident():
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

        def threads():
            time.sleep(0.5)  # until the system has removed those that ended
            return len(list(Path("/proc/self/task").iterdir()))

        def use(cycle):
            engine = colibri.Engine(threads=3)
            session = engine.session()
            session.forward([1, 2, 3])
            unfinished = engine.generate("abc", max_tokens=9)
            next(unfinished)
            if cycle:
                engine.extra = [session, unfinished, engine]

        use(False)
        gc.collect()
        memory, count = resident(), threads()
        for trial in range(12):
            use(trial % 2)
            gc.collect()
        print(resident() - memory, threads() - count)
        """
    )
    grown, threads = map(float, output.split())
    assert grown < 20  # one model holds 14 MiB, and its working memory more
    assert threads == 0


def test_unclosed_handles_at_exit() -> None:
    code = """
        import threading
        import colibri
        engine = colibri.Engine(threads=2, max_batch_tokens=8)
        session = engine.session()
        session.forward([1])
        unfinished = engine.generate("abc", max_tokens=9)
        next(unfinished)
        daemon = engine.session()
        threading.Thread(target=lambda: daemon.forward(list(range(1000))), daemon=True).start()
        print("done")
        """
    for _ in range(3):
        assert run_script(code) == "done\n"


def test_a_session_keeps_its_engine_alive(tiny_file: Callable[[str], Path]) -> None:
    session = colibri.Engine(tiny_file("f32")).session()
    assert session.forward([1, 2]).shape[0] == 2
    session.engine.close()


def test_engines_share_the_threads_of_a_process() -> None:
    output = run_script(
        """
        import time
        from pathlib import Path
        import colibri

        def threads():
            time.sleep(0.5)  # until the system has removed those that ended
            return len(list(Path("/proc/self/task").iterdir()))

        first = colibri.Engine(threads=4)
        before = threads()
        second = colibri.Engine(threads=4)
        print(threads() - before)
        first.close()
        with second.session() as session:
            print(session.forward([1]).shape)
        """
    )
    assert output == "0\n(1, 4096)\n"


def test_a_forked_child_gets_errors_and_can_open_its_own() -> None:
    output = run_script(
        """
        import os, sys, warnings
        import numpy as np
        import colibri

        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork with threads
        engine = colibri.Engine(threads=2)
        session = engine.session()
        expected = session.forward([1, 2, 3])
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            for name, use in {
                "forward": lambda: session.forward([4]),
                "session": engine.session,
                "truncate": lambda: session.truncate(0),
                "save": session.save,
            }.items():
                try:
                    use()
                    print(name, "worked")
                except colibri.ColibriError as error:
                    assert "forked" in str(error), error
            session.close()
            engine.close()
            with colibri.Engine(threads=2) as own, own.session() as other:
                assert np.array_equal(other.forward([1, 2, 3]), expected)
            print("child", flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert session.forward([4]).shape == (1, 4096)
        session.close()
        engine.close()
        print("parent")
        """
    )
    assert output == "child\nparent\n"


@pytest.mark.parametrize("name", ["with blanks", "モデル", "modèle 🐦", "it's"])
def test_any_path_will_do(tiny_file: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    path = folder / f"{name}.cbi"
    shutil.copy(tiny_file("f32"), path)
    for given in (path, str(path), os.path.relpath(path)):
        with colibri.Engine(given) as engine:
            assert len("".join(engine.generate("ab", max_tokens=3, temperature=0, stop=["zz"]))) > 0
    link = tmp_path / "link.cbi"
    link.symlink_to(path)
    with colibri.Engine(link) as engine, engine.session() as session:
        session.forward([1])


def test_a_read_only_folder_is_only_read(tiny_file: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "model.cbi"
    shutil.copy(tiny_file("q4"), path)
    path.chmod(0o444)
    folder.chmod(0o555)
    before = {p: p.stat().st_mtime_ns for p in (folder, path)}
    try:
        # Root may write in spite of the mode, so the times tell.
        with colibri.Engine(path) as engine:
            list(engine.generate("ab", max_tokens=3))
        assert {p: p.stat().st_mtime_ns for p in (folder, path)} == before
        assert [p.name for p in folder.iterdir()] == ["model.cbi"]
    finally:
        folder.chmod(stat.S_IRWXU)


def test_a_core_that_does_not_fit_is_named(tmp_path: Path) -> None:
    """The package beside no core, or beside one of another version."""
    package = tmp_path / "colibri"
    left_out = shutil.ignore_patterns("*.so", "*.cbi", "__pycache__")
    shutil.copytree(Path(colibri.__file__).parent, package, ignore=left_out)
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import colibri
        try:
            colibri.Engine("model.cbi")
        except colibri.ColibriError as error:
            print(error)
        """
    assert "libcolibri.so" in run_script(code)
    (package / "libcolibri.so").write_bytes(b"not a library")
    output = run_script(code)
    assert "libcolibri.so" in output
    assert "pip install" in output

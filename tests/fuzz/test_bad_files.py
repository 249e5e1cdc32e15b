"""Every rule of spec/cbi.md is checked, with a message of its own; the reader is covered by tests."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from fuzz.bad_files import BAD_FILES, ORIGINAL, BadFile
from fuzz.harness import ROOT, SANITIZE, Outcome, build, run
from fuzz.mutate import Mutator


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    program = build(tmp_path_factory.mktemp("bad"), ["-O1", *SANITIZE])
    results = run(program, [bad.make(ORIGINAL) for bad in BAD_FILES])
    return {bad.name: outcome for bad, outcome in zip(BAD_FILES, results, strict=True)}


def test_names_are_distinct() -> None:
    assert len({bad.name for bad in BAD_FILES}) == len(BAD_FILES)


@pytest.mark.parametrize("bad", BAD_FILES, ids=lambda bad: bad.name)
def test_bad_file(outcomes: dict[str, Outcome], bad: BadFile) -> None:
    outcome = outcomes[bad.name]
    assert bad.message in outcome.message
    assert outcome.message.startswith("/proc/self/fd/")
    assert outcome.status == bad.status


@pytest.mark.skipif(os.environ.get("COLIBRI_SLOW") != "1", reason="slow: COLIBRI_SLOW=1 runs it")
def test_line_coverage(tmp_path: Path) -> None:
    program = build(tmp_path, ["-O0", "--coverage"])
    mutator = Mutator(bytes(ORIGINAL.data))
    run(program, [bad.make(ORIGINAL) for bad in BAD_FILES])
    run(program, [mutator.mutate(seed).data for seed in range(500)])
    run(program, [bytes(ORIGINAL.data)], "fail-at", "300")
    lines: dict[str, float] = {}
    for notes in tmp_path.glob("*.gcno"):
        report = subprocess.run(["gcov", "-n", notes], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for name, percent in re.findall(r"File '([^']+)'\nLines executed:([\d.]+)%", report):
            if Path(name).parent == ROOT / "csrc/file":
                lines[Path(name).name] = float(percent)
    print(lines)
    assert {"model.c", "directory.c", "program.c", "validate.c", "op_rules_generated.h"} <= set(lines)
    assert min(lines.values()) >= 90

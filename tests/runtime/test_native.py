"""The ctypes declarations against csrc/include/colibri.h."""

from __future__ import annotations

import ctypes
import doctest
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from colibri.errors import ColibriError
from colibri.runtime import engine, native, session

HEADER = Path(__file__).parents[2] / "csrc" / "include" / "colibri.h"
STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "colibri_runtime_options": native.RuntimeOptions,
    "colibri_engine_options": native.EngineOptions,
    "colibri_engine_info": native.EngineInfo,
    "colibri_session_options": native.SessionOptions,
    "colibri_memory_plan": native.MemoryPlan,
    "colibri_item": native.Item,
    "colibri_sampling": native.Sampling,
    "colibri_sample_result": native.SampleResult,
    "colibri_latency": native.Latency,
    "colibri_phase_stats": native.PhaseStats,
    "colibri_stats": native.Stats,
    "colibri_expert_set_stats": native.ExpertSetStats,
}


def test_every_function_is_that_of_the_header() -> None:
    declared = set(re.findall(r"COLIBRI_API [^;]*?(colibri_\w+)\(", HEADER.read_text()))
    assert set(native._PROTOTYPES) == declared


def test_numbers_are_those_of_the_header() -> None:
    text = HEADER.read_text()
    numbers = {name: int(value) for name, value in re.findall(r"(COLIBRI_\w+) ?=? (\d+)", text)}
    assert numbers["COLIBRI_ABI_VERSION"] == native.ABI_VERSION
    assert numbers["COLIBRI_MESSAGE_SIZE"] == native.MESSAGE_SIZE
    assert numbers["COLIBRI_TOP_LOGPROBS"] == native.TOP_LOGPROBS
    assert numbers["COLIBRI_OP_KINDS"] == native.OP_KINDS
    assert [numbers[f"COLIBRI_PHASE_{name.upper()}"] for name in native.PHASES] == [0, 1]
    statuses = re.search(r"enum colibri_status \{(.*?)\}", text, re.DOTALL)
    assert statuses is not None
    listed = {int(value) for value in re.findall(r"= (\d+)", statuses[1])}
    assert listed == {native.OK, *native._ERRORS}
    assert (numbers["COLIBRI_UNSUPPORTED"], numbers["COLIBRI_BUSY"]) == (native.UNSUPPORTED, native.BUSY)
    assert isinstance(native.error_of(99, b""), ColibriError)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_structures_are_laid_out_as_in_c(tmp_path: Path) -> None:
    lines = []
    for name, structure in STRUCTURES.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in structure._fields_:
            lines.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));'
            )
    source = tmp_path / "layout.c"
    source.write_text('#include <stdio.h>\n#include "colibri.h"\nint main(void) {\n' + "\n".join(lines) + "\n}\n")
    program = tmp_path / "layout"
    subprocess.run(["cc", "-I", HEADER.parent, "-o", program, source], check=True)
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    expected = []
    for name, structure in STRUCTURES.items():
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        for field, *_ in structure._fields_:
            place = getattr(structure, field)
            expected.append(f"{name}.{field} {place.offset} {place.size}")
    assert output.splitlines() == expected


def test_examples_in_the_documentation_of_the_interface() -> None:
    for module in (engine, session):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0

"""What stands under the output's name: a model is replaced, anything else stays."""

import shutil
from pathlib import Path

import pytest

from colibri.convert import convert
from colibri.errors import UsageError

DEMO = Path(__file__).resolve().parent.parent.parent / "demo"


@pytest.mark.parametrize("name", sorted(path.name for path in DEMO.iterdir() if path.is_file()))
def test_no_file_of_the_source_folder_is_replaced(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(DEMO, source, ignore=shutil.ignore_patterns("heldout*" if not name.startswith("heldout") else ""))
    before = (source / name).read_bytes()
    with pytest.raises(UsageError, match=r"exists and is not a \.cbi file"):
        convert(source, source / name)
    assert (source / name).read_bytes() == before


def test_a_text_file_stays_also_through_a_link(tmp_path: Path) -> None:
    letter, link = tmp_path / "letter.txt", tmp_path / "link.cbi"
    letter.write_text("Dear reader")
    link.symlink_to(letter)
    for output in (letter, link):
        with pytest.raises(UsageError, match=r"exists and is not a \.cbi file"):
            convert(DEMO, output)
    assert letter.read_text() == "Dear reader"


def test_a_model_and_an_empty_file_are_replaced(tmp_path: Path) -> None:
    output = tmp_path / "model.cbi"
    output.touch()
    convert(DEMO, output, weights="q4")
    first = output.read_bytes()
    convert(DEMO, output, weights="q8")
    assert len(output.read_bytes()) > len(first)
    convert(DEMO, output, weights="q4")
    assert output.read_bytes() == first

"""The documentation agrees with the product."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_command_line_page_shows_the_help():
    done = subprocess.run([sys.executable, ROOT / "tools" / "cli_page.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_links_between_pages_lead_somewhere():
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "spec").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def test_the_readme_example_runs(tmp_path: Path):
    """The Python example of the README, with the demo model in the place of model.cbi."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    program = code[1].replace('"model.cbi", ', "")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()

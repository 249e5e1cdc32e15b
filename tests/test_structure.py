"""The architecture as tests: imports go one way, ctypes is in one module, the docs name every module."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "colibri"

# A package may import those of smaller rank, and itself.
RANK = {
    "errors": 0,
    "checkpoint": 1,
    "tokenizer": 1,
    "program": 1,
    "quantize": 1,
    "families": 2,
    "cbi": 2,
    "convert": 3,
    "reference": 3,
    "runtime": 4,
    "cli": 5,
}


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: use absolute imports"
            names.add(node.module)
    return names


def area_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_go_one_way():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        area = area_of(path)
        if area in ("__init__", "__main__"):
            continue
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "colibri" and len(parts) > 1 and parts[1] != area and RANK[parts[1]] >= RANK[area]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_ctypes_is_used_by_the_runtime_alone():
    users = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if "ctypes" in imports_of(p)}
    assert users and all(user.startswith("runtime/") for user in users), users
    loads = [p for p in PACKAGE.rglob("*.py") if "CDLL(" in p.read_text()]
    assert [p.name for p in loads] == ["native.py"]


def test_the_map_names_every_module():
    page = (ROOT / "docs" / "data-path.md").read_text()
    areas = {p.name for p in PACKAGE.iterdir() if p.is_dir() and list(p.glob("*.py"))}
    missing = [area for area in areas if f"`{area}/`" not in page]
    folders = {p.name for p in (ROOT / "csrc").iterdir() if p.is_dir() and p.name != "include"}
    missing += [folder for folder in folders if f"`{folder}/`" not in page]
    assert not missing


def test_files_stay_small():
    long = [str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*.py") if len(p.read_text().splitlines()) > 500]
    long += [str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.[ch]") if len(p.read_text().splitlines()) > 800]
    long += [
        str(p.relative_to(ROOT)) for p in (PACKAGE / "families").glob("*.py") if len(p.read_text().splitlines()) > 250
    ]
    assert not long

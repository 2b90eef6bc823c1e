"""The habits of the code base: lint, types, and what each file says of itself."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tables import deep

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for folder in ("src", "csrc", "tests", "benchmarks", "examples")
    for ending in ("*.py", "*.pyx", "*.pxd", "*.pyi", "*.c", "*.h")
    for path in (ROOT / folder).rglob(ending)
    if not (path.suffix == ".c" and "src" in path.parts)  # generated
]


@pytest.mark.parametrize("command", [["ruff", "check", "."], *deep(["mypy"])], ids=lambda c: c[0])
def test_tool_is_content(command):
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (the dev extra has it)")
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file(path):
    text = path.read_text()
    if path.name == "__init__.py" and not text:
        return
    opening = text.lstrip()
    if path.suffix in (".c", ".h"):
        assert opening.startswith(f"/* {path.name} — "), "first say what the file is for"
    elif path.suffix in (".py", ".pyx"):
        assert opening.startswith('"""'), "first say what the file is for"
        # echoing.is_lost knows finalizers by their frames' name.
        assert not re.search(r"^\s*__del__ = ", text, re.MULTILINE), "define it by its name"


def test_every_atomic_has_an_explicit_order():
    plain = re.compile(r"atomic_(load|store|fetch_\w+|exchange|compare_exchange_\w+?)\b")
    for path in (ROOT / "csrc").glob("*.[ch]"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in plain.finditer(line):
                assert "_explicit" in match.group(0), f"{path.name}:{number}: {line}"

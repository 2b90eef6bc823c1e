"""docs/programs.md: each library's program runs as it stands there."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "programs.md").read_text()
PROGRAMS = re.findall(r"^## (.+?)$.*?```python\n(.*?)```", PAGE, re.M | re.S)


@pytest.mark.parametrize(("library", "code"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_the_program_runs(library, code, tmp_path):
    for module in re.findall(r"^(?:from|import) (\w+)", code, re.M):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    script = tmp_path / "program.py"
    script.write_text(code)
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=110, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr

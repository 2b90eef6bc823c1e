"""docs/coming-from: the code after the change, on each page, runs as it is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "coming-from").glob("*.md"))


def code_after(page):
    """The first Python block under the heading `## After`."""
    after = page.read_text().split("\n## After\n", 1)[1]
    found = re.search(r"```python\n(.*?)```", after, re.S)
    assert found is not None, f"{page.name} shows no code under its heading After"
    return found[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_runs(page, tmp_path):
    code = code_after(page)
    for module in re.findall(r"^(?:from|import) (\w+)", code, re.M):
        pytest.importorskip(module)
    script = tmp_path / "after.py"
    script.write_text(code)
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_before_and_after_are_short(page):
    assert "\n## Before\n" in page.read_text()
    assert len(code_after(page).strip().splitlines()) <= 15

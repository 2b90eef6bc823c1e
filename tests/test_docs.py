"""README.md and docs: their code runs."""

import importlib
import importlib.util
import re
from contextlib import closing

import pytest
from forking import Forker
from tables import deep
from test_sources import BLOCK, PAGES, ROOT

DEFAULT = ("README.md", "docs/quickstart.md")


def programs():
    """What runs: the blocks of a page, one after the other; each library's of docs/programs.md."""
    for page in PAGES:
        if page.name == "inside.md":
            continue  # test_inside_page.py runs each of its programs, and looks at what they log
        text = page.read_text()
        code = "".join(match["code"] for match in BLOCK.finditer(text) if not match["why"])
        name = str(page.relative_to(ROOT))
        if page.name == "programs.md":
            for heading, block in re.findall(
                r"^## (.+?)$.*?```python\n(.*?)```", text, re.M | re.S
            ):
                yield f"{name}: {heading}", block
        elif code:
            yield name, code


PROGRAMS = dict(programs())


@pytest.fixture(scope="module")
def forker():
    with closing(Forker()) as forker:
        yield forker


@pytest.mark.parametrize(
    "name", [*DEFAULT, *deep(*(name for name in PROGRAMS if name not in DEFAULT))]
)
def test_the_code_of_a_page_runs(name, tmp_path, forker, monkeypatch):
    code = PROGRAMS[name]
    for module in re.findall(r"^(?:from|import) ([\w.]+)", code, re.M):
        if importlib.util.find_spec(module.split(".")[0]) is None:
            pytest.skip(f"{module} is not installed")
        if module.startswith("shmvec.adapters"):
            try:
                importlib.import_module(module)
            except ImportError as missing:  # what it adapts to
                pytest.skip(str(missing))
    monkeypatch.chdir(tmp_path)
    script = forker.begin(code)
    try:
        status = script.wait(250)
    finally:
        script.kill()
        output = "".join(script.communicate())
    # Of a library that is there what it needs itself may be missing.
    missing = re.search(
        r"^(?:ModuleNotFound|Import)Error: (.+)|DependencyNotInstalled: (.+)", output, re.M
    )
    if missing is not None and "shmvec" not in (what := missing[1] or missing[2]):
        pytest.skip(what)
    assert status == 0, output

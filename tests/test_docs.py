"""README.md and docs: the code runs, links lead somewhere, nothing public is left out."""

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from forking import Forker

import shmvec

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^(<!-- not run: (?P<why>.+?) -->\n)?```python\n(?P<code>.*?)^```", re.M | re.S)
INCLUDED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def programs():
    """What runs: the blocks of a page, one after the other; each library's of docs/programs.md."""
    for page in PAGES:
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


PROGRAMS = list(programs())


def imported(module):
    """A module of ours, unless what it adapts to is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def forker():
    with closing(Forker()) as forker:
        yield forker


@pytest.mark.parametrize(("name", "code"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_the_code_of_a_page_runs(name, code, tmp_path, forker, monkeypatch):
    for module in re.findall(r"^(?:from|import) ([\w.]+)", code, re.M):
        if importlib.util.find_spec(module.split(".")[0]) is None:
            pytest.skip(f"{module} is not installed")
        if module.startswith("shmvec.adapters"):
            imported(module)
    monkeypatch.chdir(tmp_path)
    script = forker.begin(code)
    try:
        status = script.wait(110)
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


@pytest.mark.parametrize("page", sorted(DOCS.glob("coming-from/*.md")), ids=lambda page: page.stem)
def test_pages_for_newcomers_show_little_code(page):
    before, after = re.search(
        r"\n## Before\n(.*?)\n## After\n(.*)", page.read_text(), re.S
    ).groups()
    assert BLOCK.search(before)["why"], "their code is not run here"
    first = BLOCK.search(after)
    assert not first["why"] and first["code"].count("\n") <= 15


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(page):
    """Of a page's headings, as GitHub and MyST make them."""
    for heading in re.findall(r"^#{1,6} (.+)$", without_code(page.read_text()), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
        yield re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


def toctrees(page):
    """The pages that a page has in its tables of contents, and theirs."""
    yield page
    for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.M | re.S):
        for entry in tree.splitlines():
            if entry and not entry.startswith(":"):
                path = re.sub(r"^.+ <(.+)>$", r"\1", entry)  # of "title <path>"
                yield from toctrees((page.parent / path).with_suffix(".md"))


def test_every_page_is_in_the_contents_once():
    assert sorted(toctrees(DOCS / "index.md")) == sorted(DOCS.rglob("*.md"))


def test_what_a_search_finds_first_are_pages():
    """Each word in docs/conf.py leads to one page."""
    (searched,) = (
        ast.literal_eval(made.value)
        for made in ast.parse((DOCS / "conf.py").read_text()).body
        if isinstance(made, ast.Assign) and ast.unparse(made.targets[0]) == "SEARCHED"
    )
    words = [word for page in searched.values() for word in page.split(", ")]
    assert sorted(words) == sorted(set(words))
    for name in searched:
        assert (DOCS / f"{name}.md").read_text().startswith("# "), name


def test_pages_that_include_another_file_say_which():
    for page, source in INCLUDED.items():
        assert f"{{include}} ../{source}" in (DOCS / page).read_text()


REFERENCE = "".join(page.read_text() for page in sorted(DOCS.glob("api/*.md")))
SOURCE = Path(shmvec.__file__).parent


def public_modules():
    """All modules of the package itself, and the adapters that README.md names."""
    for path in SOURCE.iterdir():
        if not path.name.startswith("_") and (
            path.suffix == ".py" or (path / "__init__.py").exists()
        ):
            if path.name != "adapters":
                yield f"shmvec.{path.stem}"
    yield from set(re.findall(r"\bshmvec\.adapters\.\w+", (ROOT / "README.md").read_text()))


def test_every_public_module_is_in_the_reference_once():
    assert sorted(re.findall(r"automodule:: (\S+)", REFERENCE)) == sorted(public_modules())


@pytest.mark.parametrize("module", sorted(public_modules()))
def test_every_public_name_has_what_the_reference_shows(module):
    """Sphinx leaves out what has no docstring; a constant's or alias's is a comment `#:`."""
    path = SOURCE.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = path.read_text()
    names = re.search(r"^__all__ = (\[.*?\])", text, re.M | re.S)
    if names is None:
        return
    made = imported(module)
    for name in ast.literal_eval(names[1]):
        value = getattr(made, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert value.__doc__, name
        else:
            written = f"py:data:: {module}.{name}\n" in REFERENCE
            assert written or re.search(rf"^#: .+\n{name}\b", text, re.M), name


def test_what_shmvec_itself_has_is_in_the_reference():
    index = (DOCS / "api" / "index.md").read_text()
    for name in shmvec.__all__:
        assert f"`shmvec.{name}" in index, name


def test_import_shmvec_is_enough_for_its_public_modules():
    """README.md calls them shmvec.cluster and so on; adapters need what they adapt to."""
    names = {name for name in public_modules() if not name.startswith("shmvec.adapters")}
    names -= {"shmvec.auto", "shmvec.entry"}  # imported for what that does, by name
    program = f"import shmvec; {'; '.join(sorted(names))}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_command_is_in_the_reference():
    page = (DOCS / "api" / "commands.md").read_text()
    shown = subprocess.run(
        [sys.executable, "-m", "shmvec", "--help"], check=True, capture_output=True, timeout=60
    )
    (commands,) = set(re.findall(r"\{([\w,]+)\}", shown.stdout.decode()))
    assert re.findall(r"^\| `python -m shmvec (\w+)", page, re.M) == commands.split(",")


def test_every_extra_is_in_the_table():
    (extras,) = re.findall(
        r"^\[project.optional-dependencies\]\n(.*?)\n\n\[",
        (ROOT / "pyproject.toml").read_text(),
        re.M | re.S,
    )
    table = "".join(re.findall(r"^\| (`.*?) \|", (DOCS / "install.md").read_text(), re.M))
    assert set(re.findall(r"`(\w+)`", table)) == set(re.findall(r"^(\w+) =", extras, re.M))

"""Lint of sources and prose: tools, habits of files, imports, links, and what the reference shows.

Each test is of all files, and names all that offend.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import get_origin

import pytest
from processes import output_of

import shmvec
from shmvec import _core
from shmvec.__main__ import main

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shmvec"
TESTS = ROOT / "tests"
DOCS = ROOT / "docs"
SOURCES = [
    path
    for folder in ("src", "csrc", "tests", "benchmarks", "examples")
    for ending in ("*.py", "*.pyx", "*.pxd", "*.c", "*.h")
    for path in (ROOT / folder).rglob(ending)
    if not (path.suffix == ".c" and "src" in path.parts)  # generated
]
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^(<!-- not run: (?P<why>.+?) -->\n)?```python\n(?P<code>.*?)^```", re.M | re.S)
INCLUDED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}

# What each room may import of this package, besides itself and what stands before it.
ROOMS = [
    ("_pickling", "_cores", "_autoreset", "_hints", "spaces"),
    ("faults",),
    ("_arguments", "_core", "states"),
    ("_options", "stats", "rendering"),
    ("_memory", "_wrappers"),
    ("_processes",),
    ("_named",),
    ("exchange",),
    ("vector_env", "_policy", "_pure"),
    ("aio", "entry", "evaluation", "pipeline", "planning", "replay", "trace"),
    ("auto", "adapters", "cluster", "_commands"),
    ("__main__", "testing"),
]
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}
# Types that are named only, and what is imported when it is asked for.
UPWARDS = {("_memory", "exchange"), ("vector_env", "trace")}
# What checks arguments, words hints and counts cores: adapters use it, too.
HELPERS = {"_arguments", "_cores", "_hints", "_options"}
# Names with an underscore that are not ours, and that tests need.
NEEDED = {
    "_exit", "_getframe", "_is_gil_enabled",  # Python documents them
    "_forkserver", "_forkserver_alive_fd",  # a descriptor that multiprocessing keeps for good
    "_async_worker", "_add_info", "_max_episode_steps",  # Gymnasium's own
    "_state", "_name",  # which code of Gymnasium's users and of DI-engine reads of ours, too
    "_repr_html_", "_repr_pretty_",  # IPython calls them
    "_core", "_multiarray_umath", "_ARRAY_API",  # NumPy's table of C functions, for C code
}  # fmt: skip
TRANSLATIONS = sorted(
    path for of in ("adapters", "cluster", "planning") for path in PACKAGE.glob(f"{of}/**/*.py")
)


# ---- tools, and what each file says of itself ----------------------------------------------------


def run_tool(*command):
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (the dev extra has it)")
    command = [sys.executable, "-m", *command]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


def test_ruff_is_content():
    done = run_tool("ruff", "check", ".")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.deep
def test_mypy_is_content_and_sees_the_options_of_a_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import shmvec\n"
        "shmvec.ShmVectorEnv([], True, context='fork', num_workers=2)\n"
        "shmvec.ShmVectorEnv([], num_workers='2')\n"
        "shmvec.ShmVectorEnv([], workers=2)\n"
        "print(shmvec.evaluate('CartPole-v1', print).returns)\n"
        "print(shmvec.evaluate(shmvec.Task('CartPole-v1'), print).returns)\n"
        "print(shmvec.evaluate({'a': 'CartPole-v1'}, print)['a'].returns)\n"
        "print(shmvec.evaluate(['CartPole-v1'], print).compared_with)\n"
        f"# {program}\n"  # else mypy's cache names the file of an earlier run
    )
    done = run_tool("mypy", "src", str(program))
    errors = re.findall(r"^(.*):(\d+): error: .*\[(.*)\]", done.stdout, re.M)
    expected = [("3", "arg-type"), ("4", "call-arg")]
    assert errors == [(str(program), *each) for each in expected], done.stdout + done.stderr


def habits_broken(path):
    text = path.read_text()
    opening = text.lstrip()
    if path.suffix in (".c", ".h"):
        if not opening.startswith(f"/* {path.name} — "):
            yield "first say what the file is for"
    elif path.suffix in (".py", ".pyx") and not (path.name == "__init__.py" and not text):
        if not opening.startswith('"""'):
            yield "first say what the file is for"
        # echoing.is_lost knows finalizers by their frames' name.
        if re.search(r"^\s*__del__ = ", text, re.MULTILINE):
            yield "define __del__ by its name"
    if path.parent.name == "csrc":
        plain = r"atomic_(?:load|store|fetch_\w+|exchange|compare_exchange_\w+?)\b"
        for match in re.finditer(plain, text):
            if "_explicit" not in match[0]:
                yield f"{match[0]} has no explicit order"


def test_habits_of_files():
    offenders = [
        f"{path.relative_to(ROOT)}: {why}" for path in SOURCES for why in habits_broken(path)
    ]
    assert not offenders, "\n".join(offenders)


# ---- which folder may import which ---------------------------------------------------------------


@cache
def parsed(path):
    return ast.parse(path.read_text())


def imports(path):
    """Modules of this package that a file imports, as "folder.module", and which names of them."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shmvec"):
            module = (node.module or "").removeprefix("shmvec").lstrip(".")
            for alias in node.names:
                yield module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("shmvec."):
                    yield alias.name.removeprefix("shmvec."), ""


def sources():
    """All modules of the package, by their names without "shmvec."."""
    for path in PACKAGE.rglob("*"):
        if path.suffix in (".py", ".pyx", ".pxd") and path != PACKAGE / "__init__.py":
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


def all_imports(path):
    if path.suffix == ".py":
        yield from imports(path)
        return
    cimports = r"^\s*from shmvec\.?([\w.]*) c?import \(?([\w, ]*)"
    for match in re.finditer(cimports, path.read_text(), re.MULTILINE):
        for name in match[2].split(","):
            yield match[1], name.strip()


def test_rooms_import_in_one_direction():
    offenders = []
    for module, path in sources():
        room = module.split(".")[0]
        for other, _ in all_imports(path):
            there = other.split(".")[0]
            if there in ("", room) or (room, there) in UPWARDS:
                continue
            if RANK[there] >= RANK[room]:
                offenders.append(f"{path.relative_to(PACKAGE)} imports shmvec.{other}")
    assert not offenders, "\n".join(offenders)


def test_no_modules_import_each_other():
    modules = {module for module, _ in sources()}
    needs = {module: set() for module in modules}
    for module, path in sources():
        for other, name in all_imports(path):
            deeper = f"{other}.{name}".lstrip(".")
            needs[module] |= {deeper if deeper in modules else other} & modules - {module}
    while True:  # take away what needs nothing that is left
        free = {module for module, others in needs.items() if not others}
        if not free:
            break
        needs = {module: needs[module] - free for module in needs.keys() - free}
    assert not needs, f"circles among {sorted(needs)}"


def test_what_is_imported_from_the_core_is_there():
    """mypy does not know what a compiled module has."""
    paths = [path for path in SOURCES if path.suffix == ".py"]
    used = {name for path in paths for module, name in imports(path) if module == "_core"}
    assert used - {"memory"} == set(_core.__all__)  # a test imports this compiled module itself
    assert all(hasattr(_core, name) for name in used)


def own_names(tree):
    """Names with an underscore that a module defines: functions, classes, attributes, slots."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, (ast.Name, ast.arg)):
            yield node.id if isinstance(node, ast.Name) else node.arg


def private_names_used(path):
    tree = parsed(path)
    own = set(own_names(tree))
    for module, name in imports(path):
        parts = module.split(".")
        if parts[0] != path.relative_to(PACKAGE).parts[0]:  # else a helper in its own folder
            if module not in HELPERS and any(part.startswith("_") for part in parts):
                yield f"imports shmvec.{module}"
        if name.startswith("_"):
            yield f"imports {name} of shmvec.{module}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        if node.attr.startswith("__"):
            continue
        on_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        above = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
        if on_itself or above or node.attr in own:
            continue
        yield f"line {node.lineno}: {ast.unparse(node)} is another module's own"


def secrets_told(path):
    """A subclass reaches into its base through `self`: so what it names there is its own, too."""
    tree = parsed(path)
    own = set(own_names(tree))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for module, name in imports(path):
        if module.split(".")[0] == path.relative_to(PACKAGE).parts[0]:
            continue  # one translation, in several files
        for node in classes:
            if name in {ast.unparse(base).split("[")[0] for base in node.bases}:
                home = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
                theirs = set(own_names(parsed(home))) if home.exists() else set()
                for inner in ast.walk(node):
                    if (
                        isinstance(inner, ast.Attribute)
                        and isinstance(inner.value, ast.Name)
                        and inner.value.id == "self"
                        and inner.attr.startswith("_")
                        and not inner.attr.startswith("__")
                    ):
                        if inner.attr in theirs and inner.attr not in own:
                            yield f"line {inner.lineno}: self.{inner.attr} is of {name}"


def test_translations_use_public_names_only():
    offenders = [
        f"{path.relative_to(PACKAGE)}: {why}"
        for path in TRANSLATIONS
        for found in (private_names_used, secrets_told)
        for why in found(path)
    ]
    assert not offenders, "\n".join(offenders)


def defined(tree):
    """Names that a module defines, for itself or on ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def called(node):
    """The last part of the name of what is called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def names_of_others(tree):
    """Each use of a name with an underscore of another object or module: its node, the name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr.startswith("_"):
                if ast.unparse(node.value) not in ("self", "cls", "super()"):
                    yield node, node.attr
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if not (
                    node.module == "shmvec" and (PACKAGE / alias.name).with_suffix(".py").exists()
                ):
                    yield node, alias.name
        elif isinstance(node, ast.Call) and called(node).endswith(("attr", "setitem")):
            for argument in node.args[:2]:  # of setattr and monkeypatch's methods
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node, argument.value.rpartition(".")[2]


@pytest.mark.deep
def test_tests_use_public_names_only():
    """A private name may change with no test of its own; a folder of ours is private to users."""
    offenders = []
    for path in sorted(TESTS.rglob("*.py")):
        if path.is_relative_to(TESTS / "upstream"):
            continue  # scripts that run other projects' tests
        tree = parsed(path)
        own = NEEDED.union(defined(tree))
        for node, name in names_of_others(tree):
            if name.startswith("_") and not name.startswith("__") and name not in own:
                is_folder = isinstance(node, ast.Attribute) and (PACKAGE / name).is_dir()
                if not is_folder:
                    offenders.append(f"{path.relative_to(TESTS)}:{node.lineno}: {name}")
    assert not offenders, "\n".join(offenders)


# ---- prose ---------------------------------------------------------------------------------------


def test_pages_for_newcomers_show_little_code():
    """Before, in code that is not run here, and after it, in at most fifteen lines that are."""
    offenders = []
    for page in sorted(DOCS.glob("coming-from/*.md")):
        parts = re.search(r"\n## Before\n(.*?)\n## After\n(.*)", page.read_text(), re.S)
        before, after = map(BLOCK.search, parts.groups())
        if not before["why"] or after["why"] or after["code"].count("\n") > 15:
            offenders.append(page.name)
    assert not offenders


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(page):
    """Of a page's headings, as GitHub and MyST make them."""
    for heading in re.findall(r"^#{1,6} (.+)$", without_code(page.read_text()), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
        yield re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def test_links_lead_somewhere():
    offenders = []
    for page in {*PAGES, *ROOT.glob("*.md")}:
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
            if re.match(r"https?:|mailto:", target):
                continue
            path, _, anchor = target.partition("#")
            found = page.parent / path if path else page
            if not found.exists() or (anchor and anchor not in anchors(found)):
                offenders.append(f"{page.relative_to(ROOT)}: {target}")
    assert not offenders, "\n".join(offenders)


def toctrees(page):
    """The pages that a page has in its tables of contents, and theirs."""
    yield page
    for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.M | re.S):
        for entry in tree.splitlines():
            if entry and not entry.startswith(":"):
                path = re.sub(r"^.+ <(.+)>$", r"\1", entry)  # of "title <path>"
                yield from toctrees((page.parent / path).with_suffix(".md"))


def test_the_picture_of_a_step_names_files_that_exist():
    picture = (DOCS / "_static" / "step.svg").read_text("utf-8")
    named = re.findall(r"[\w./]+\.(?:pyx|py|h)\b", picture)
    folders = [PACKAGE, PACKAGE / "_core", PACKAGE / "_processes", ROOT]
    assert len(named) > 15
    assert not [name for name in named if not any((each / name).exists() for each in folders)]


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


def public_modules():
    """All modules of the package itself, and the adapters that a page lists."""
    for path in PACKAGE.iterdir():
        if not path.name.startswith("_") and (
            path.suffix == ".py" or (path / "__init__.py").exists()
        ):
            if path.name != "adapters":
                yield f"shmvec.{path.stem}"
    yield from set(re.findall(r"\bshmvec\.adapters\.\w+", (DOCS / "programs.md").read_text()))


def test_every_public_module_is_in_the_reference_once():
    assert sorted(re.findall(r"automodule:: (\S+)", REFERENCE)) == sorted(public_modules())


def names_without_words(module):
    """Sphinx leaves out what has no docstring; a constant's or alias's is a comment `#:`."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = path.read_text()
    names = re.search(r"^__all__ = (\[.*?\])", text, re.M | re.S)
    try:
        made = importlib.import_module(module)
    except ImportError:  # what it adapts to is not installed: its own classes and functions
        kinds = (ast.ClassDef, ast.FunctionDef)
        for node in ast.parse(text).body:
            if isinstance(node, kinds) and names and f'"{node.name}"' in names[1]:
                if not ast.get_docstring(node):
                    yield node.name
        return
    for name in ast.literal_eval(names[1]) if names else ():
        value = getattr(made, name)
        is_alias = get_origin(value) is not None  # which Python 3.10 takes for a class
        if not is_alias and (inspect.isclass(value) or inspect.isroutine(value)):
            if not value.__doc__:
                yield name
        elif f"py:data:: {module}.{name}\n" not in REFERENCE:
            if not re.search(rf"^#: .+\n{name}\b", text, re.M):
                yield name


def test_every_public_name_has_what_the_reference_shows():
    offenders = [
        f"{module}.{name}" for module in public_modules() for name in names_without_words(module)
    ]
    shmvec.uninstall()  # shmvec.auto, which was imported for it, installs
    assert not offenders, "\n".join(offenders)


def test_what_shmvec_itself_has_is_in_the_reference():
    index = (DOCS / "api" / "index.md").read_text()
    for name in shmvec.__all__:
        assert f"`shmvec.{name}" in index, name


@pytest.mark.deep
def test_import_shmvec_is_enough_for_its_public_modules():
    """Pages call them shmvec.cluster and so on; adapters need what they adapt to."""
    names = {name for name in public_modules() if not name.startswith("shmvec.adapters")}
    names -= {"shmvec.auto", "shmvec.entry"}  # imported for what that does, by name
    program = f"import shmvec; {'; '.join(sorted(names))}"
    output_of("-c", program)


def test_every_command_is_in_the_reference(capsys):
    page = (DOCS / "api" / "commands.md").read_text()
    with pytest.raises(SystemExit):
        main(["--help"])
    (commands,) = set(re.findall(r"\{([\w,]+)\}", capsys.readouterr().out))
    assert re.findall(r"^\| `python -m shmvec (\w+)", page, re.M) == commands.split(",")


def test_every_extra_is_in_the_table():
    (extras,) = re.findall(
        r"^\[project.optional-dependencies\]\n(.*?)\n\n\[",
        (ROOT / "pyproject.toml").read_text(),
        re.M | re.S,
    )
    table = "".join(re.findall(r"^\| (`.*?) \|", (DOCS / "install.md").read_text(), re.M))
    assert set(re.findall(r"`(\w+)`", table)) == set(re.findall(r"^(\w+) =", extras, re.M))

"""Which folder may import which: in one direction, and nothing private is used from outside."""

import ast
import re
from pathlib import Path

import pytest

from shmvec import _core

PACKAGE = Path(__file__).parents[1] / "src" / "shmvec"
# What each room may import of this package, besides itself and what stands before it.
ROOMS = [
    ("_pickling", "_cores", "_autoreset", "_hints", "spaces"),
    ("faults",),
    ("_arguments", "_core", "states"),
    ("_options", "stats", "rendering"),
    ("_memory", "_wrappers"),
    ("_processes",),
    ("_trace", "_named"),
    ("exchange",),
    ("vector_env", "_policy"),
    ("entry", "evaluation", "pipeline", "planning", "replay"),
    ("auto", "adapters", "cluster", "_commands"),
    ("__main__", "testing"),
]
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}
# Types that are named only, and what is imported when it is asked for.
UPWARDS = {("_memory", "exchange"), ("evaluation", "cluster")}
# What checks arguments, words hints and counts cores: adapters use it, too.
HELPERS = {"_arguments", "_cores", "_hints", "_options"}
TESTS = Path(__file__).parent
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


def imported(path):
    """Modules of this package that a file imports, as "folder.module", and which names of them."""
    for node in ast.walk(ast.parse(path.read_text())):
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
        if path.suffix in (".py", ".pyi", ".pyx", ".pxd") and path != PACKAGE / "__init__.py":
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


def all_imports(path):
    if path.suffix in (".py", ".pyi"):
        yield from imported(path)
        return
    cimports = r"^\s*from shmvec\.?([\w.]*) c?import \(?([\w, ]*)"
    for match in re.finditer(cimports, path.read_text(), re.MULTILINE):
        for name in match[2].split(","):
            yield match[1], name.strip()


def test_rooms_import_in_one_direction():
    for module, path in sources():
        room = module.split(".")[0]
        for other, _ in all_imports(path):
            there = other.split(".")[0]
            if there in ("", room) or (room, there) in UPWARDS:
                continue
            assert RANK[there] < RANK[room], f"{path.name} imports shmvec.{other}"


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


def test_what_the_core_offers_is_typed_in_its_stub():
    typed = set()
    for node in ast.parse((PACKAGE / "_core" / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.AnnAssign):
            typed.add(node.target.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            is_type = any("Protocol" in ast.unparse(base) for base in getattr(node, "bases", ()))
            typed |= set() if is_type else {node.name}
    assert typed == set(_core.__all__)
    assert all(hasattr(_core, name) for name in typed)


def own_names(tree):
    """Names with an underscore that a module defines: functions, classes, attributes, slots."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, (ast.Name, ast.arg)):
            yield node.id if isinstance(node, ast.Name) else node.arg


@pytest.mark.parametrize("path", TRANSLATIONS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_translations_use_public_names_only(path):
    tree = ast.parse(path.read_text())
    own = set(own_names(tree))
    for module, name in imported(path):
        parts = module.split(".")
        if parts[0] != path.relative_to(PACKAGE).parts[0]:  # else a helper in its own folder
            private = any(part.startswith("_") for part in parts)
            assert module in HELPERS or not private, f"imports shmvec.{module}"
        assert not name.startswith("_"), f"imports {name} of shmvec.{module}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        if node.attr.startswith("__"):
            continue
        on_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        above = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
        if on_itself or above or node.attr in own:
            continue
        where = f"{path.name}:{node.lineno}"
        raise AssertionError(f"{where}: {ast.unparse(node)} is another module's own")


@pytest.mark.parametrize("path", TRANSLATIONS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_derived_from_here_keeps_its_secrets(path):
    """A subclass reaches into its base through `self`: so what it names there is its own, too."""
    tree = ast.parse(path.read_text())
    own = set(own_names(tree))
    for module, name in imported(path):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).split("[")[0] == name for base in node.bases
            ):
                if module.split(".")[0] == path.relative_to(PACKAGE).parts[0]:
                    continue  # one translation, in several files
                home = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
                theirs = set(own_names(ast.parse(home.read_text()))) if home.exists() else set()
                for inner in ast.walk(node):
                    if (
                        isinstance(inner, ast.Attribute)
                        and isinstance(inner.value, ast.Name)
                        and inner.value.id == "self"
                        and inner.attr.startswith("_")
                        and not inner.attr.startswith("__")
                    ):
                        assert inner.attr in own or inner.attr not in theirs, (
                            f"{path.name}:{inner.lineno}: self.{inner.attr} is of {name}"
                        )


def defined(tree):
    """Names that a module defines, for itself or on ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) == "self":
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def names_of_others(tree):
    """Each use of a name with an underscore of another object or module: its node, the name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            on = ast.unparse(node.value)
            if on not in ("self", "cls", "super()"):
                yield node, node.attr
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if not (
                    node.module == "shmvec" and (PACKAGE / alias.name).with_suffix(".py").exists()
                ):
                    yield node, alias.name
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("attr", "setitem")):
            for argument in node.args[:2]:  # of setattr and monkeypatch's methods
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node, argument.value.rpartition(".")[2]


def test_tests_use_public_names_only():
    """A private name may change with no test of its own; a folder of ours is private to users."""
    for path in sorted(TESTS.rglob("*.py")):
        if path.is_relative_to(TESTS / "upstream"):
            continue  # scripts that run other projects' tests
        tree = ast.parse(path.read_text())
        own = NEEDED.union(defined(tree))
        for node, name in names_of_others(tree):
            if name.startswith("_") and not name.startswith("__") and name not in own:
                is_folder = isinstance(node, ast.Attribute) and (PACKAGE / name).is_dir()
                where = f"{path.relative_to(TESTS)}:{node.lineno}"
                assert is_folder, f"{where} uses {name}, another's private name"

"""Who may know whom: folders import in one direction, and nothing private is used from outside."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "shmvec"
# What each folder may import of this package besides itself; "" are the public modules it may.
MAY_IMPORT = {
    "_core": {"_classes", "_shared.layout", "faults"},  # types only, and an exception
    "_shared": {"_classes", "_core", "faults"},
    "_worker": {"_classes", "_core", "_shared", "faults", "_parent.arguments"},  # for annotations
    # The last for annotations.
    "_parent": {"_classes", "_core", "_shared", "faults", "spaces", "exchange"},
    # The last but one for infos as Gymnasium gathers them.
    "_loops": {"exchange", "faults", "spaces", "_core.told", "_parent.rollout"},
}
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


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_import_in_one_direction(folder):
    for path in (PACKAGE / folder).glob("*.py*"):
        if path.suffix not in (".py", ".pyi"):
            continue
        for module, _ in imported(path):
            allowed = MAY_IMPORT[folder] | {folder, ""}
            assert (
                any(module == one or module.startswith(f"{one}.") for one in allowed if one)
                or module == ""
            ), f"{path.name} imports shmvec.{module}"


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
        assert not any(part.startswith("_") for part in parts), f"imports shmvec.{module}"
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

"""Each product can be taken off: the package without it keeps the contract of the vector env.

A product is a folder or a few files, and its lines in ``shmvec/__init__.py``. The engine names no
product, and a product may name another only where EDGES says so.
"""

import re
import shutil
from pathlib import Path

import pytest
from processes import output_of
from test_sources import PACKAGE, ROOT, all_imports, sources

CONTRACT = Path(__file__).with_name("contract_of_the_engine.py")

# Each product's modules; a folder stands for all that is in it.
PRODUCTS = {
    "aio": {"aio"},
    "commands": {"_commands", "__main__"},
    "testing": {"testing"},
    "trace": {"trace", "_core.trace"},
    "replay": {"replay", "_core.replay", "_memory.log"},
    "pipeline": {"pipeline"},
    "evaluation": {"evaluation"},
    "planning": {"planning", "states"},
    "cluster": {"cluster"},
    "wrappers": {"_wrappers"},
}
# An adapter is what has its name, and the modules whose names begin with it; the others that begin
# with an underscore are what adapters share.
ADAPTERS = sorted(
    path.stem for path in (PACKAGE / "adapters").iterdir() if not path.name.startswith("_")
)
for adapter in ADAPTERS:
    PRODUCTS[adapter] = {f"adapters.{adapter}"} | {
        f"adapters.{path.stem}" for path in (PACKAGE / "adapters").glob(f"_{adapter}_*.py")
    }

# Who may name whom.
EDGES = {
    ("cluster", "evaluation"),  # whose episodes it plays on nodes
    ("cluster", "pipeline"),  # a Collector has a Pipeline on each node
    ("commands", "evaluation"),
    ("commands", "wrappers"),  # the limit is measured with them
    ("engine", "trace"),  # the type of what ShmVectorEnv.trace returns
    ("engine", "wrappers"),  # where a worker's envs are: a chain in, a stepper out
    ("pettingzoo", "sb3"),
    ("plangym", "planning"),
    ("sb3", "replay"),  # its buffer
    ("testing", "commands"),  # check_env_fn
}


def product_of(module):
    for name, modules in PRODUCTS.items():
        if any(module == each or module.startswith(f"{each}.") for each in modules):
            return name
    return "engine"


def edges():
    """Pairs of a product that names another, and that."""
    known = {module for module, _ in sources()}
    for module, path in sources():
        for other, name in all_imports(path):
            deeper = f"{other}.{name}".lstrip(".")
            named = product_of(deeper if deeper in known else other)
            if named not in ("engine", product_of(module)):
                yield product_of(module), named, f"{module} names {other}"


def test_products_name_the_engine_and_few_others():
    found = set(edges())
    assert {(of, named) for of, named, _ in found} == EDGES, sorted(
        where for of, named, where in found if (of, named) not in EDGES
    )


def files_without(products):
    """The files of the package, sources and what is built, that are not of these products."""
    gone = {module for name in products for module in PRODUCTS[name]}
    for path in PACKAGE.rglob("*"):
        parts = path.relative_to(PACKAGE).parts
        names = (*parts[:-1], parts[-1].split(".")[0])
        modules = {".".join(names[:end]) for end in range(1, len(names) + 1)}
        if path.is_file() and "__pycache__" not in parts and not modules & gone:
            yield path


def without_lines(text, products):
    """``shmvec/__init__.py`` without the names of these products."""
    modules = {module for name in products for module in PRODUCTS[name]}
    gone = [re.escape(module) for module in modules]
    names = re.findall(rf'^    "(\w+)": "shmvec\.(?:{"|".join(gone)})",$', text, re.M)
    quoted = "|".join([f'"{name}"' for name in names] + [f'"{module}"' for module in gone])
    return re.sub(
        rf"^    (?:{quoted}|\"\w+\": \"shmvec\.(?:{'|'.join(gone)})\"),\n", "", text, flags=re.M
    )


def build_house(folder, products):
    """A copy of the package without products, of links to its files."""
    for path in files_without(products):
        place = folder / "shmvec" / path.relative_to(PACKAGE)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path == PACKAGE / "__init__.py":
            place.write_text(without_lines(path.read_text(), products))
        else:
            place.symlink_to(path)
    return folder


def test_the_engine_alone_keeps_the_contract(tmp_path):
    output_of(CONTRACT, build_house(tmp_path, PRODUCTS))


@pytest.mark.deep
@pytest.mark.deadline(1000)
def test_the_rest_does_without_any_one(tmp_path):
    """It keeps the contract, and all that no edges lead from to the product can be imported."""
    houses = []
    for product in PRODUCTS:
        users = {product}
        for _ in EDGES:
            users |= {of for of, named in EDGES if named in users}
        left = set(files_without([product]))
        modules = [
            f"shmvec.{module}"
            for module, path in sources()
            if path.suffix == ".py" and path in left and product_of(module) not in users
            if module not in ("auto", "__main__")  # which act when they are imported
        ]
        folder = build_house(tmp_path / f"without {product}", [product])
        houses.append(",".join([str(folder), *modules]))
    output_of(CONTRACT, *houses, timeout=900)


@pytest.mark.deep
@pytest.mark.deadline(1000)
def test_the_engine_is_built_from_its_sources_alone(tmp_path):
    """Neither Cython nor C of a product is there."""
    for path in files_without(PRODUCTS):
        if path.suffix in (".py", ".pyx", ".pxd"):
            place = tmp_path / "src" / "shmvec" / path.relative_to(PACKAGE)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    init = tmp_path / "src" / "shmvec" / "__init__.py"
    init.write_text(without_lines(init.read_text(), PRODUCTS))
    others = shutil.ignore_patterns("model", "tests")
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc", ignore=others)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    debug = {"SHMVEC_DEBUG": "1"}  # compiles in less time
    output_of("setup.py", "build_ext", "--inplace", cwd=tmp_path, environ=debug, timeout=900)
    output_of(CONTRACT, tmp_path / "src")

"""The sdist builds a wheel from a clean checkout, and the wheel works without the sources."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[1]


def run(*command, cwd, **environment):
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of all but what was built; what Cython has generated is there, and not packed."""
    target = tmp_path_factory.mktemp("checkout") / "shmvec"
    ignore = shutil.ignore_patterns(
        "*.so", "build", "dist", "*.egg-info", "__pycache__", ".venv", ".git", ".*_cache"
    )
    shutil.copytree(ROOT, target, ignore=ignore, dirs_exist_ok=True)
    return target


def test_sdist_and_wheel(checkout, tmp_path):
    pytest.importorskip("build")
    out = tmp_path / "dist"
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
    run(*build, "--sdist", cwd=checkout)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4
        archive.extractall(tmp_path, **safe)
    package = checkout / "src" / "shmvec"
    generated = [*package.glob("_*/*.c"), *package.glob("_core/counters.pxd")]
    endings = ("c", "h", "py", "pyx", "pxd")
    sources = {
        path
        for end in endings
        for folder in ("csrc", "src")
        for path in (checkout / folder).rglob(f"*.{end}")
    }
    needed = {str(path.relative_to(checkout)) for path in sources.difference(generated)}
    assert len(needed) > 150 and needed <= names, needed - names
    assert {"LICENSE", "src/shmvec/py.typed", "tests/conftest.py"} <= names
    assert {"SECURITY.md", "CITATION.cff", ".github/workflows/wheels.yml"} <= names
    assert not [name for name in names if name.endswith(".so")]
    assert not [name for name in names if re.match(r"src/.*\.c$", name)], "generated C"

    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    for path in generated:  # of the same sources, as was seen: Cython takes as long as gcc
        shutil.copy2(path, source / path.relative_to(checkout))
    # One is compiled here; to compile all of them again takes minutes.
    target = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    for path in (ROOT / "src/shmvec").glob("_*/*.so"):
        if not path.name.startswith("process."):
            copy = source / "build" / target / path.relative_to(ROOT / "src")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
            os.utime(copy, times=(2**32, 2**32))  # newer than what is made here of csrc
    run(*build, "--wheel", cwd=source)
    assert len(list(source.glob("build/temp.*/**/src/**/*.o"))) == 1
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert {"shmvec/py.typed", "shmvec/__init__.py"} <= names
    modules = [path.stem for path in (ROOT / "src/shmvec").glob("_*/*.pyx")]
    built = [Path(name).name.split(".")[0] for name in names if name.endswith(".so")]
    assert sorted(built) == sorted(modules)
    endings = {"".join(Path(name).suffixes[-1:]) for name in names if name.startswith("shmvec/")}
    assert endings == {".py", ".so", ".typed"}, "sources are in the sdist"
    assert not [name for name in names if not name.startswith(("shmvec/", "shmvec-"))]
    program = (
        "import shmvec; assert 'site' in shmvec.__file__\n"
        "envs = shmvec.make_vec('CartPole-v1', 3)\n"
        "print(envs.reset(seed=1)[0].shape); envs.close()"
    )
    site = str(tmp_path / "site")
    assert run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=site) == "(3, 4)\n"


@pytest.mark.parametrize(
    "elsewhere", ["sys.platform = 'darwin'", "sys.platform = 'win32'", "sys.maxsize = 2**31 - 1"]
)
def test_where_it_does_not_run_the_build_says_what_to_use(elsewhere):
    imports = "import runpy, sys, Cython.Build, setuptools.command.build_ext"
    program = f"{imports}; {elsewhere}; runpy.run_path('setup.py')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "needs 64-bit Linux" in line and "here use gymnasium.vector.AsyncVectorEnv" in line


def test_an_unbuilt_tree_says_what_to_do(checkout, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import shmvec"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode != 0
    assert "compiled core is missing" in done.stderr and "pip install -e ." in done.stderr


def test_readme_commands():
    """CI runs the test command of the README, to the letter."""
    readme = (ROOT / "README.md").read_text()
    lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    (command,) = [line for line in lines if line.startswith("python3")]
    assert command in readme
    assert ".venv/bin/python -m shmvec bench" in readme


def test_readme_command_in_workflow():
    """The workflow that tests each Python runs the README's command, too."""
    (command,) = re.findall(r"^python3 .*pytest.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert f"- run: {command}\n" in (ROOT / ".github/workflows/ci.yml").read_text()


def test_actions_are_pinned_and_have_few_rights():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        for used in re.findall(r"uses: (.+)", text):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", used), used
        assert "\npermissions:\n  contents: read\n" in text
        assert text.count("actions/checkout@") == text.count("persist-credentials: false")
        assert set(re.findall(r"(\S+): write", text)) <= {"id-token"}


def test_version_is_the_same_everywhere():
    import shmvec

    assert f"\nversion: {shmvec.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    released = re.search(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released and released.group(1) == shmvec.__version__
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in pyproject and 'attr = "shmvec.__version__"' in pyproject


def test_wheels_are_tested_by_what_is_there():
    """cibuildwheel's configuration names tests that exist, and each Python that is supported."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    commands = re.findall(r'^test-command = "(.*)"$', pyproject, re.MULTILINE)
    assert len(commands) == 2  # one for Pythons without a GIL
    for word in " ".join(commands).split():
        assert not word.startswith("tests/") or (ROOT / word).exists(), word
    pythons = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', pyproject)
    for minor in pythons:
        assert f"cp3{minor}-*" in pyproject
        assert f'"3.{minor}"' in (ROOT / ".github/workflows/ci.yml").read_text()

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
        timeout=900,
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


@pytest.mark.deadline(1000)
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
    assert {"AGENTS.md", "SECURITY.md", "CITATION.cff", ".github/workflows/wheels.yml"} <= names
    assert {".pre-commit-config.yaml", ".github/ISSUE_TEMPLATE/bug.yml"} <= names
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
    assert sorted(built) == sorted([*modules, "cyutility"])
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


@pytest.mark.deadline(1000)
def test_the_wheel_for_macos_and_windows(checkout, tmp_path):
    """It has no extension, pip on Linux refuses it, and where it may be it works."""
    pytest.importorskip("build")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path)]
    run(*build, cwd=checkout, SHMVEC_PURE="1")
    (wheel,) = tmp_path.glob("*.whl")
    _, _, python, abi, platforms = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none")
    assert {platform.split("_")[0] for platform in platforms.split(".")} == {"macosx", "win"}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("/WHEEL"))
        tags = re.findall(r"^Tag: (.+)$", archive.read(metadata).decode(), re.M)
    assert sorted(tags) == sorted(f"py3-none-{platform}" for platform in platforms.split("."))
    modules = {path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.py")}
    inside = {Path(name) for name in names if name.startswith("shmvec/")}
    assert inside == modules | {Path("shmvec/py.typed")}

    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    on_linux = subprocess.run(
        [*pip, "--target", str(tmp_path / "linux")], capture_output=True, text=True, timeout=250
    )
    assert on_linux.returncode != 0 and "not a supported wheel on this platform" in on_linux.stderr
    site = tmp_path / "site"
    for platform in platforms.split("."):
        only = ["--platform", platform, "--only-binary", ":all:"]
        run(*pip, "--target", str(site), "--upgrade", *only, cwd=tmp_path)
    program = (
        "import shmvec; assert 'site' in shmvec.__file__\n"
        "if __name__ == '__main__':\n"
        "    envs = shmvec.make_vec('CartPole-v1', 3)\n"
        "    print(shmvec.is_native, envs.reset(seed=1)[0].shape); envs.close()"
    )
    script = tmp_path / "program.py"
    script.write_text(program)
    pure = {"PYTHONPATH": str(site), "SHMVEC_PURE": "1"}
    assert run(sys.executable, str(script), cwd=tmp_path, **pure) == "False (3, 4)\n"
    pure["SHMVEC_PURE"] = "0"  # a missing extension is an error on Linux
    native = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **pure},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert native.returncode == 1 and "ImportError: shmvec's compiled core is" in native.stderr


@pytest.mark.parametrize("elsewhere", ["sys.platform = 'freebsd14'", "sys.maxsize = 2**31 - 1"])
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

    cited = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {shmvec.__version__}\n" in cited
    readme = (ROOT / "README.md").read_text()
    assert f"version = {{{shmvec.__version__}}}" in readme
    for word in re.findall(r'^title: "(.+)"|^date-released: "(\d+)', cited, re.M):
        assert f"{{{''.join(word)}}}" in readme
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
    assert f'\nrequires-python = ">=3.{pythons[0]}"\n' in pyproject
    for minor in pythons:
        assert f"cp3{minor}-*" in pyproject
        assert f'"3.{minor}"' in (ROOT / ".github/workflows/ci.yml").read_text()


def loaded(name):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / name).read_text())


def test_issue_forms_ask_for_what_the_page_names():
    """GitHub shows a form that is wrong as none."""
    fields = {}
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()):
        form = loaded(path)
        assert all(form[key] for key in ("name", "description", "labels"))
        named = [field for field in form["body"] if field["type"] != "markdown"]
        labels = [field["attributes"]["label"] for field in named]
        ids = [field["id"] for field in named]
        assert len(set(ids)) == len(set(labels)) == len(named) >= 4
        fields[path.stem] = dict(zip(ids, named, strict=True))
    assert fields.keys() == {"bug", "feature"}
    page = (ROOT / "docs" / "report-a-bug.md").read_text()
    commands = set(re.findall(r"`(python -m shmvec (\w+).*?)`", page))
    assert {name for _, name in commands} == {"check", "doctor", "stacks"}
    for command, name in commands:
        field = fields["bug"][name]
        assert f"`{command}`" in field["attributes"]["label"]
        assert field.get("validations", {}).get("required", name == "stacks")
    switches = [option["label"] for option in fields["bug"]["switches"]["attributes"]["options"]]
    assert switches[:-1] == re.findall(r"^\| (`.+?`) \|", page, re.M)


def test_the_other_files_of_the_repository_are_what_they_should_be():
    updates = loaded(".github/dependabot.yml")["updates"]
    assert [each["package-ecosystem"] for each in updates] == ["github-actions"]
    lint = loaded(".github/workflows/ci.yml")["jobs"]["lint"]["steps"]
    commands = [step["run"] for step in lint if step.get("run", "").startswith(".venv/")]
    (local,) = loaded(".pre-commit-config.yaml")["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == commands
    for text in re.findall(r"`(.+?)`", (ROOT / ".github/pull_request_template.md").read_text()):
        for word in text.split():
            assert "/" not in word and not word.endswith(".md") or (ROOT / word).exists(), word


def test_agents_md_names_what_is_there():
    """Its commands are the README's and CONTRIBUTING's, and its paths exist."""
    text = (ROOT / "AGENTS.md").read_text()
    assert len(text.splitlines()) <= 40
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    commands = [line.split("  #")[0].strip() for line in "".join(blocks).splitlines()]
    others = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    for command in commands:
        if "tests/" not in command and "guard" not in command:
            assert command in others, command
    words = [
        word for each in [*commands, *re.findall(r"`([^`\n]+)`", text)] for word in each.split()
    ]
    package = [ROOT, ROOT / "src" / "shmvec"]
    paths = [word for word in words if re.fullmatch(r"[\w/.-]+(/|\.\w{2,})", word)]
    paths = [path for path in paths if not path.startswith((".venv", "."))]
    assert len(paths) > 15
    for path in paths:
        assert any((folder / path).exists() for folder in package), path

"""Builds and runs the C tests, plain and under sanitizers."""

import fcntl
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
SOURCES = sorted((ROOT / "csrc").glob("*.c"))
STRICT = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion"]
STRICT += ["-Wshadow", "-Werror", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'tests'}"]
BUILDS = {
    "plain": ["-O2"],
    "thread": ["-O1", "-g", "-fsanitize=thread"],
    "address,undefined": [
        "-O1",
        "-g",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ],
}
TESTS = sorted(path.stem for path in (ROOT / "csrc" / "tests").glob("test_*.c"))

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


def compile_c(flags: list[str], inputs: list[Path], folder: Path) -> None:
    command = [COMPILER, *STRICT, *flags, "-pthread", *map(str, inputs)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def usable(flags: list[str], folder: Path) -> bool:
    """Whether the compiler has these sanitizers and the system lets them run."""
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    try:
        command = [COMPILER, *flags, str(folder / "empty.c"), "-o", str(folder / "empty")]
        subprocess.run(command, check=True, capture_output=True, timeout=250)
        subprocess.run([str(folder / "empty")], check=True, capture_output=True, timeout=250)
    except subprocess.CalledProcessError:
        return False
    return True


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Where csrc is compiled, once for each build: all processes of xdist share it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of the whole session
    (folder / "csrc").mkdir(exist_ok=True)
    return folder / "csrc"


def objects(compiled: Path, build_name: str) -> list[Path]:
    """Those of csrc in a build, made by who comes first; none where it cannot be had here."""
    folder, making = compiled / build_name, compiled / f"{build_name}, making"
    with open(compiled / f"{build_name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(making, ignore_errors=True)  # of one who failed at it
            making.mkdir()
            if usable(BUILDS[build_name], making):
                compile_c([*BUILDS[build_name], "-c"], SOURCES, making)
            making.rename(folder)
    return sorted(folder.glob("*.o"))


def test_all_headers_have_a_test():
    tested = {name.removeprefix("test_") for name in TESTS}
    headers = {path.stem for path in (ROOT / "csrc").glob("*.h")} - {"platform"}
    assert headers == tested


TAKES_ROUNDS = [
    name for name in TESTS if "rounds_of" in (ROOT / "csrc/tests" / f"{name}.c").read_text()
]


@pytest.mark.parametrize("name", TESTS)
def test_c(name, compiled, tmp_path):
    source = ROOT / "csrc" / "tests" / f"{name}.c"
    compile_c([*BUILDS["plain"], "-o", name], [source, *objects(compiled, "plain")], tmp_path)
    done = run(tmp_path / name, "10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr


@pytest.mark.deep
@pytest.mark.parametrize(
    "build_name, name",
    [
        (build, name)
        for build in BUILDS
        for name in (TAKES_ROUNDS if build == "plain" else TESTS)  # the others test_c runs in full
    ],
)
def test_c_in_full(name, build_name, compiled, tmp_path):
    parts = objects(compiled, build_name)
    if not parts:
        pytest.skip(f"{COMPILER} has no -fsanitize={build_name} here")
    source = ROOT / "csrc" / "tests" / f"{name}.c"
    compile_c([*BUILDS[build_name], "-o", name], [source, *parts], tmp_path)
    # A sanitizer sees a race or a wrong access wherever it may happen, in fewer rounds.
    of_rounds = "1" if build_name == "plain" else "4"
    done = run(tmp_path / name, of_rounds)
    if "address" in build_name and done.returncode == -signal.SIGALRM:
        # Older AddressSanitizers (gcc 12's) do not hold their allocator's locks over a fork: beside
        # a thread that has one, the child waits for it for ever.
        done = run(tmp_path / name, of_rounds)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=250)

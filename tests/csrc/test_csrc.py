"""Builds and runs the C tests and the micro-benchmark, plain and under sanitizers."""

import os
import shutil
import subprocess
import sys
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


def build(source: Path, flags: list[str], target: Path) -> None:
    command = [COMPILER, *STRICT, *flags, str(source), *map(str, SOURCES), "-o", str(target)]
    done = subprocess.run([*command, "-pthread"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def usable(flags: list[str], folder: Path) -> bool:
    """Whether the compiler has these sanitizers and the system lets them run."""
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    try:
        command = [COMPILER, *flags, str(folder / "empty.c"), "-o", str(folder / "empty")]
        subprocess.run(command, check=True, capture_output=True, timeout=100)
        subprocess.run([str(folder / "empty")], check=True, capture_output=True, timeout=100)
    except subprocess.CalledProcessError:
        return False
    return True


def test_all_headers_have_a_test():
    tested = {name.removeprefix("test_") for name in TESTS}
    headers = {path.stem for path in (ROOT / "csrc").glob("*.h")} - {"platform"}
    assert headers == tested


@pytest.mark.parametrize("build_name", BUILDS)
@pytest.mark.parametrize("name", TESTS)
def test_c(name, build_name, tmp_path):
    flags = BUILDS[build_name]
    if not usable(flags, tmp_path):
        pytest.skip(f"{COMPILER} has no -fsanitize={build_name} here")
    build(ROOT / "csrc" / "tests" / f"{name}.c", flags, tmp_path / name)
    done = subprocess.run([str(tmp_path / name)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr


def test_micro_benchmark_runs():
    command = [sys.executable, str(ROOT / "benchmarks" / "primitives.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [line.rsplit(None, 2) for line in done.stdout.splitlines()[1:]]
    assert {"clock", "pause", "round trip between processes, park"} <= {row[0] for row in rows}
    assert all(float(row[1]) > 0 for row in rows)

"""Runs the tests with other versions of Gymnasium and NumPy, each in an environment of its own.

    python tests/upstream/versions.py                       # all rows, the default suite: hours
    python tests/upstream/versions.py oldest --fast         # the fast part, with the oldest
    python tests/upstream/versions.py gymnasium==1.2.0 numpy==1.26.4 -- tests/test_modes.py

Prints one line a row, with pytest's closing line, and before it what pytest said where tests fail;
the exit status is 1 then. A row whose versions cannot be installed says so and fails nothing.
shmvec must be installed from this checkout, with `pip install -e .`, for the Python that runs this:
the environments share its compiled modules.
"""

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
ROWS = {
    "oldest": [
        "gymnasium==1.0.0",
        "numpy==1.24.4",
        "cloudpickle==2.2.1",
        "threadpoolctl==3.5.0",
        "ale-py==0.10.1",
    ],
    "1.1": ["gymnasium==1.1.1"],
    "1.2": ["gymnasium==1.2.2"],
    "1.3": ["gymnasium==1.3.0"],
    "numpy-1": ["numpy<2"],
    "newest": [],
}
# What Gymnasium and NumPy have a part in: the contract, spaces, results, modes, infos, evaluations;
# and workers that die. With what these tests import, of which an env of its own is soon made.
FAST = [
    f"tests/{name}.py"
    for name in (
        "adapters/test_pettingzoo",
        "core/test_codec",
        "core/test_infos",
        "faults/test_deaths",
        "test_casts",
        "test_contract",
        "test_equivalence",
        "test_evaluation",
        "test_installed",
        "test_modes",
        "test_rollout",
        "test_vector_env",
        "test_wrappers",
    )
]
# Of these each case, of the others what runs by default.
WHOLE = "test_codec or test_infos or test_casts or test_contract or test_modes or test_wrappers"
FAST_NEEDS = ["pytest", "pytest-xdist", "hypothesis", "scipy"]
INSTALLED_WITHIN_S = 600
SHOWN = ("gymnasium", "numpy", "cloudpickle")


def needed(extras: set[str]) -> list[str]:
    """The requirements of shmvec with these extras."""
    found = []
    for requirement in importlib.metadata.requires("shmvec") or ():
        name, _, marker = requirement.partition(";")
        extra = re.search(r"extra == ['\"](.+?)['\"]", marker)
        if extra is None or extra[1] in extras:
            found.append(name.strip())
    return found


def installed(python: Path, wanted: list[str]) -> str:
    """Installs this; returns why it cannot be, in one line, or nothing."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    try:  # NumPy takes minutes to compile
        subprocess.run(
            [*pip, "install", "-q", "--only-binary", "numpy,scipy", *wanted],
            check=True,
            capture_output=True,
            text=True,
            timeout=INSTALLED_WITHIN_S,
        )
    except subprocess.TimeoutExpired:
        return f"pip takes more than {INSTALLED_WITHIN_S} seconds"
    except subprocess.CalledProcessError as error:
        return next(reversed(error.stderr.strip().splitlines()), "pip failed")
    return ""


def run(folder: Path, row: str, pins: list[str], wanted: list[str], tests: list[str]) -> bool:
    """Makes an environment, runs the tests in it and prints the row; returns whether none fails."""
    venv.create(folder)
    python = folder / "bin" / "python"
    reason = installed(python, [*pins, *wanted])
    if reason:
        print(f"{row}: not run: {' '.join(pins)} cannot be installed: {reason}", flush=True)
        return True
    show = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in %r), sep=', ')"
    versions = subprocess.check_output([python, "-c", show % (SHOWN,)], text=True).strip()
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-n", "3", "--dist", "worksteal", *tests]
        + ["-p", "no:cacheprovider"],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        print(*lines[-200:], sep="\n")
    print(f"{row}: {versions}: {lines[-1].strip('= ')}", flush=True)
    return done.returncode == 0


def main() -> int:
    """Runs the rows that are asked for; returns 1 if tests of one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rows", nargs="*", help=f"{', '.join(ROWS)}, or pins (default: all rows)")
    parser.add_argument("--fast", action="store_true", help="only the part that .ci/run runs")
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    arguments, tests = parser.parse_args(given[:end]), given[end + 1 :]
    pins = [each for each in arguments.rows if each not in ROWS]
    rows = {name: ROWS[name] for name in arguments.rows if name in ROWS}
    if pins:
        rows[" ".join(pins)] = pins
    fast = ["-m", "", "-k", f"not deep or {WHOLE}", *FAST]
    chosen = tests or (fast if arguments.fast else [])
    # ruff and mypy check the sources: the same everywhere.
    wanted = [each for each in needed({"bench", "dev"}) if not each.startswith(("ruff", "mypy"))]
    if arguments.fast:
        wanted = [*needed(set()), *FAST_NEEDS]
    passed = []
    for name, row in (rows or ROWS).items():
        with tempfile.TemporaryDirectory(prefix="shmvec-versions-") as folder:
            passed.append(run(Path(folder), name, row, wanted, chosen))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())

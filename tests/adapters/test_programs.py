"""examples/coming_from: programs run as they are, and learn as far as a few seconds allow."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep
PROGRAMS = Path(__file__).parents[2] / "examples" / "coming_from"
DEADLINE = 110.0
# By program: what it needs, its arguments here, and what of its last lines' numbers must be so.
CASES = {
    "actorcritic": ([], "--updates 150", lambda count, first, last: last > first + 20),
    "baselines": ([], "--updates 150", lambda count, first, last: last > first + 20),
    "ding": (
        ["ding.framework.middleware"],
        "--env-steps 200",
        lambda steps, updates, length: steps >= 200 and updates > 0 and length >= 8,
    ),
    "pettingzoo": (
        ["stable_baselines3", "mpe2"],
        "--total-steps 8000",
        lambda before, after, steps: after > before + 5,
    ),
    "plangym": ([], "--moves 20", lambda score, moves, walkers: score == moves == 20),
    "sb3": (
        ["stable_baselines3"],
        "--total-steps 4000",
        lambda before, after, steps: after > before + 30,
    ),
    "tianshou": (
        ["tianshou"],
        "--epochs 1 --epoch-steps 500",
        lambda best, steps: steps >= 500,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_program(name, tmp_path):
    needed, arguments, holds = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what they import
        for module in needed:
            pytest.importorskip(module)
    done = subprocess.run(
        [sys.executable, PROGRAMS / f"{name}_program.py", *arguments.split()],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # the cores are the envs'
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[-2 if name == "ding" else -1 :]
    said = " ".join(lines).partition(":")[2] if name == "plangym" else " ".join(lines)
    assert holds(*map(float, re.findall(r"-?\d+(?:\.\d+)?", said))), done.stdout

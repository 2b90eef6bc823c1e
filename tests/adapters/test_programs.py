"""examples/coming_from: programs run as they are, and learn as far as a few seconds allow."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep
PROGRAMS = Path(__file__).parents[2] / "examples" / "coming_from"
DEADLINE = 110.0
# By program: what it needs, its arguments here, and how much better it is to be at the end.
CASES = {
    "actorcritic": ([], ["--updates", "150"], 20),
    "baselines": ([], ["--updates", "150"], 20),
    "pettingzoo": (["stable_baselines3", "mpe2"], ["--total-steps", "8000"], 5),
    "sb3": (["stable_baselines3"], ["--total-steps", "4000"], 30),
    "tianshou": (["tianshou"], ["--epochs", "1", "--epoch-steps", "500"], None),
}


@pytest.mark.parametrize("name", CASES)
def test_program(name):
    needed, arguments, better = CASES[name]
    for module in needed:
        pytest.importorskip(module)
    done = subprocess.run(
        [sys.executable, PROGRAMS / f"{name}_program.py", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # the cores are the envs'
    )
    assert done.returncode == 0, done.stderr
    numbers = [float(one) for one in re.findall(r"-?\d+(?:\.\d+)?", done.stdout.splitlines()[-1])]
    if better is None:  # seconds do not do: it has run to its end
        assert numbers[1] >= 500, done.stdout
    else:
        first, last = numbers[-2:] if name in ("actorcritic", "baselines") else numbers[:2]
        assert last > first + better, done.stdout

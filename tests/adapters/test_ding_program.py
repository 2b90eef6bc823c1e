"""DI-engine's DQN pipeline, in examples/coming_from, runs to its end on our env manager."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep
PROGRAM = Path(__file__).parents[2] / "examples" / "coming_from" / "ding_program.py"

with warnings.catch_warnings():  # of its own imports
    warnings.simplefilter("ignore")
    pytest.importorskip("ding.framework.middleware")


def test_the_pipeline_runs(tmp_path):
    ran = subprocess.run(
        [sys.executable, PROGRAM, "--env-steps", "200"],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    steps, updates = re.search(r"^(\d+) env steps, (\d+) updates", ran.stdout, re.M).groups()
    assert int(steps) >= 200 and int(updates) > 0
    assert float(re.search(r"last evaluation: (.*)", ran.stdout)[1]) >= 8

"""tests/upstream: its scripts swap the class, count what that applies to, and tell what differs."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

UPSTREAM = Path(__file__).parent / "upstream"
TESTS = """
import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv

def test_made():
    envs = AsyncVectorEnv([lambda: gym.make("CartPole-v1")])
    envs.close()
    assert type(envs).__name__ == "ShmVectorEnv"

def test_of_something_else():
    assert False
"""


def script(name, *arguments):
    command = [sys.executable, UPSTREAM / name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def test_tests_run_with_the_class_swapped(tmp_path):
    (tmp_path / "tests" / "vector").mkdir(parents=True)
    (tmp_path / "tests" / "vector" / "test_some.py").write_text(TESTS)
    ran = script("run.py", "gymnasium", "--source", tmp_path, "--", "-k", "test_")
    assert ran.returncode == 1, ran.stderr
    assert "all: 2: 1 passed, 1 failed, 0 skipped" in ran.stdout
    assert "applied: 1: 1 passed, 0 failed, 0 skipped" in ran.stdout


def test_what_has_no_tests_in_its_distribution_says_what_to_clone():
    ran = script("run.py", "gymnasium")
    assert ran.returncode == 1
    assert "https://github.com/Farama-Foundation/Gymnasium" in ran.stderr


@pytest.mark.skipif(find_spec("baselines") is not None, reason="baselines is installed")
def test_a_system_that_is_not_installed_is_asked_for():
    ran = script("run.py", "baselines")
    assert ran.returncode == 1
    assert "pip install baselines" in ran.stderr and "Traceback" not in ran.stderr


def test_a_kind_of_env_becomes_first_the_page(tmp_path):
    pytest.importorskip("mujoco")
    page = tmp_path / "page.md"
    page.write_text("| ALE |\n| MuJoCo | old |\n")
    ran = script("compatibility.py", "MuJoCo", "--write", page)
    assert ran.returncode == 0, ran.stderr
    first, row = page.read_text().splitlines()
    assert first == "| ALE |"
    assert row.count("| equal ") == 3, row + ran.stderr

"""conftest.py: a run of tests ends, whatever befalls one of its processes."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

TESTS = """
import os, time
from pathlib import Path

def test_that_ends_its_process():
    if os.fork() == 0:
        while not Path({there!r}).exists():
            time.sleep(0.1)
        os._exit(0)
    os._exit(1)

def test_another():
    pass
"""


def test_the_end_of_a_process_is_noticed_though_a_fork_of_it_lives(tmp_path):
    there = tmp_path / "there"
    (tmp_path / "test_ends.py").write_text(TESTS.format(there=str(there)))
    (tmp_path / "conftest.py").symlink_to(Path(__file__).with_name("conftest.py"))
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", tmp_path]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=250)
    finally:
        there.touch()
    assert "node down" in done.stdout and "1 failed, 1 passed" in done.stdout, done.stdout

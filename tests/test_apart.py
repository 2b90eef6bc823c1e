"""benchmarks/harness.py: contenders in processes of their own, with interpreters of their own."""

import os
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
from processes import BENCHMARKS, gone

from shmvec._commands.measuring import Slice

pytestmark = pytest.mark.deep


@pytest.fixture
def apart(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from harness import Apart

    this = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(this)  # the processes find no tests
    yield Apart
    cloudpickle.unregister_pickle_by_value(this)


class Contender:
    def __init__(self, turn):
        self.run = turn

    def close(self):
        pass


def test_a_turn(apart):
    with closing(apart(partial(Contender, lambda a: Slice(a, 2.0, 3.0)), stopped=True)) as one:
        for a in range(3):
            assert one.run(a) == Slice(a, 2.0, 3.0)
        assert isinstance(one.run(1), Slice)


def test_another_interpreter_and_path(apart, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nOTHER=7 exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    (tmp_path / "found_there.py").write_text("WHAT = 'found'")

    def turn():
        import found_there

        return [os.environ["OTHER"], os.environ["PYTHONPATH"], found_there.WHAT]

    there = apart(partial(Contender, turn), python=str(python), path=[str(tmp_path)])
    with closing(there):
        assert there.run() == ["7", str(tmp_path), "found"]
    with closing(apart(partial(Contender, turn), python=str(python), path=[])) as elsewhere:
        with pytest.raises(ImportError, match="found_there"):
            elsewhere.run()


def failing(what):
    raise what


@pytest.mark.parametrize(
    ("start", "patience", "error", "said"),
    [
        (lambda: failing(ImportError("no torch")), 200, ImportError, "no torch"),
        (lambda: failing(ValueError("8 envs are\nodd")), 200, RuntimeError, "ValueError: 8 envs a"),
        (lambda: os._exit(3), 200, RuntimeError, "ended"),
        (lambda: os.read(os.pipe()[0], 1), 1, TimeoutError, "no answer in 1 s"),
    ],
)
def test_what_does_not_start_says_why(apart, start, patience, error, said):
    with pytest.raises(error, match=said):
        apart(start, patience=patience).ready()


def test_what_it_leaves_behind_is_ended(apart, tmp_path):
    def turn():
        return subprocess.Popen(["sleep", "1000"]).pid

    with closing(apart(partial(Contender, turn), stopped=True)) as one:
        left = one.run()
        assert Path(f"/proc/{left}").exists()
    assert gone([left], 60)

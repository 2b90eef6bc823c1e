"""Races: contenders take turns and are closed, and their figures and steps are counted right."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import shmvec
from shmvec._commands.bench import NoopEnv
from shmvec._commands.measuring import LIMIT, Slice, Stepper, cells, line, race

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


class Recorded:
    """A contender that returns what it is told, after its warm-up."""

    def __init__(self, log, name, times):
        self.log, self.name, self.times = log, name, [times[0], *times]

    def run(self, seconds):
        self.log.append(self.name)
        us = self.times.pop(0)
        return Slice(us, 1e6 / us)

    def close(self):
        self.log.append(f"close {self.name}")


def test_a_race():
    log = []
    a, b = partial(Recorded, log, "a", [1, 2, 3]), partial(Recorded, log, "b", [4, 4, 6])
    results = race({"a": a, "b": b}, 1.0, 3)
    assert log[:2] == ["a", "b"] and log[-2:] == ["close b", "close a"]
    rounds = [set(log[first : first + 2]) for first in (2, 4, 6)]
    assert rounds == [{"a", "b"}] * 3 and len(log) == 10
    assert results["a"].median == Slice(2, 5e5) and results["b"].median.batch_us == 4
    assert results["a"].spread == 1 and results["b"].spread == 0.5
    assert results["b"].ratio(results["a"], "batch_us") == 2  # of 4, 2 and 2
    assert results["a"].ratio(results["b"]) == 2
    row = results["a"].figures(results["b"])
    assert line("a", *cells(row)) == "| a | 2.0 | 100% | 500,000 | 2.00 |"
    assert cells({"steps_per_s": 1000}) == ["", "", "1,000", ""]


def test_who_is_not_installed_is_left_out():
    def missing():
        raise ImportError("no such thing")

    log, left_out = [], {}
    starts = {"missing": missing, "a": partial(Recorded, log, "a", [1])}
    assert list(race(starts, 1.0, 1, left_out=left_out)) == ["a"]
    assert left_out == {"missing": "no such thing"}
    with pytest.raises(ImportError):
        race(dict(reversed(starts.items())), 1.0, 1)
    assert log[-1] == "close a"


def test_all_are_closed_after_an_error():
    log = []
    with pytest.raises(IndexError):  # too few times for so many rounds
        race({"a": partial(Recorded, log, "a", [1])}, 1.0, 2)
    assert log[-1] == "close a"


def test_the_limit():
    results = race({"a": partial(Recorded, [], "a", [1e6])}, 0.1, 1, limit=[NoopEnv])
    assert list(results) == [LIMIT, "a"]
    assert 0 < results["a"].ratio(results[LIMIT]) < 1 == results[LIMIT].ratio(results[LIMIT])


@pytest.mark.parametrize(
    ("ends", "steps"),
    [
        ([None], 4),
        ([([True, False, False, False], [False, True, False, False])], 2),  # two reset each time
        ([([True], [False], [2])], 0),
        ([([True], [False], [2]), ([False], [False], [2])], 0.5),
    ],
)
def test_steps_that_only_reset_do_not_count(ends, steps):
    ends = [None if end is None else tuple(map(np.array, end)) for end in ends]
    turn = iter(range(10**9))
    stepper = Stepper(lambda actions: ends[next(turn) % len(ends)], lambda: None, 4)
    one = stepper.run(0.02)
    batches = next(turn)
    counted = one.steps_per_s * one.batch_us * batches / 1e6
    assert abs(counted - steps * batches) < 4.1  # the first has nobody to reset


def test_two_builds(tmp_path):
    tree = str(Path(shmvec.__file__).parents[1])
    arguments = ["--before", tree, "--after", tree, "--workload", "noop-1", "one-by-one"]
    shown = subprocess.run(
        [sys.executable, str(BENCHMARKS / "before_after.py"), *arguments]
        + ["--seconds", "0.04", "--rounds", "2"],
        env={**os.environ, "PYTHONPATH": tree},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shown.returncode == 0, shown.stderr
    assert "| noop-1 | " in shown.stdout and "| one-by-one | " in shown.stdout

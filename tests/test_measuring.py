"""Races: contenders take turns and are closed, and their figures and steps are counted right."""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import shmvec
from shmvec._commands import measuring
from shmvec._commands.bench import NoopEnv
from shmvec._commands.measuring import LIMIT, Limit, Slice, Stepper, cells, race, table_line

pytestmark = pytest.mark.deep

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


class Recorded:
    """A contender that returns the times given, after its warm-up."""

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
    results = race({"a": a, "b": b}, 1e-9, 3)
    assert log[:2] == ["a", "b"] and log[-2:] == ["close b", "close a"]
    rounds = [set(log[first : first + 2]) for first in (2, 4, 6)]
    assert rounds == [{"a", "b"}] * 3 and len(log) == 10
    assert results["a"].median == Slice(2, 5e5) and results["b"].median.batch_us == 4
    assert results["a"].spread == 1 and results["b"].spread == 0.5
    assert results["b"].ratio(results["a"], "batch_us") == 2  # of 4, 2 and 2
    assert results["a"].ratio(results["b"]) == pytest.approx(2)
    row = results["a"].figures(results["b"])
    assert table_line("a", *cells(row)) == "| a | 2.0 | 100% | 500,000 | 2.00 |"
    assert cells({"steps_per_s": 1000}) == ["", "", "1,000", ""]


class Timed:
    """A contender whose turns take so many seconds by a clock that stands still otherwise."""

    def __init__(self, clock, log, name, turns):
        self.clock, self.log, self.name = clock, log, name
        self.turns = [(0.1, 1.0, 1.0), *turns]  # after the warm-up: seconds, batches, steps a batch

    def run(self, seconds):
        taken, batches, steps = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        self.clock[0] += taken
        self.log.append((self.name, seconds))
        return Slice(1e6 * taken / batches, steps * batches / taken)

    def close(self):
        pass


def test_turns_of_a_round_alternate_and_are_summed_up(monkeypatch):
    """Something that is rare and slow counts as often as it happens."""
    clock, log = [0.0], []
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])
    quick = (0.05, 50, 1)
    seldom = [quick, quick, quick, (0.15, 50, 1)] * 2  # the last of four had a slow reset
    results = race(
        {
            "seldom": partial(Timed, clock, log, "seldom", seldom),
            "slow": partial(Timed, clock, log, "slow", [(0.3, 1, 8)]),
            "even": partial(Timed, clock, log, "even", [quick]),
        },
        0.6,
        2,
    )
    turns = log[3:]
    assert {seconds for _, seconds in turns} == {0.05}
    assert [name for name, _ in turns].count("slow") == 2  # one is a round's time
    assert {name for name, _ in turns[:3]} == {"seldom", "slow", "even"}
    assert results["even"].median == pytest.approx((1000, 1000, 0))
    assert results["seldom"].median.steps_per_s == pytest.approx(200 / 0.3)
    assert results["slow"].median == pytest.approx((3e5, 8 / 0.3, 0))


def test_who_is_not_installed_is_left_out():
    def missing():
        raise ImportError("no such thing")

    log, left_out = [], {}
    starts = {"missing": missing, "a": partial(Recorded, log, "a", [1])}
    assert list(race(starts, 1e-9, 1, left_out=left_out)) == ["a"]
    assert left_out == {"missing": "no such thing"}
    with pytest.raises(ImportError):
        race(dict(reversed(starts.items())), 1.0, 1)
    assert log[-1] == "close a"


def test_all_are_closed_after_an_error():
    log = []
    with pytest.raises(IndexError):  # too few times for so many rounds
        race({"a": partial(Recorded, log, "a", [1])}, 1e-9, 2)
    assert log[-1] == "close a"


def test_the_limit():
    slow = partial(Stepper, lambda actions: time.sleep(0.001), lambda: None)
    results = race({"a": slow}, 0.1, 1, limit=[NoopEnv])
    assert list(results) == [LIMIT, "a"]
    assert 0 < results["a"].ratio(results[LIMIT]) < 1 == results[LIMIT].ratio(results[LIMIT])


class Asleep(NoopEnv):
    """Sleeps in each step, and notes it in a file."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def step(self, action):
        time.sleep(0.02)
        self.file.write_bytes(self.file.read_bytes() + b".")
        return super().step(action)


class Given(NoopEnv):
    """Notes which actions it is given, up to a number."""

    def __init__(self, file):
        super().__init__()
        self.file, self.left = file, 1000

    def step(self, action):
        if self.left:
            self.left -= 1
            self.file.write_bytes(self.file.read_bytes() + b"01"[action : action + 1])
        return super().step(action)


def test_the_limit_steps_all_envs_with_all_actions(tmp_path):
    files = [tmp_path / str(env) for env in range(4)]
    for file in files:
        file.write_bytes(b"")
    with closing(Limit([partial(Given, file) for file in files], 1)) as limit:
        deadline = time.monotonic() + 30
        while min(len(each.read_bytes()) for each in files) < 500 and time.monotonic() < deadline:
            limit.run(0.05)
    assert all(set(file.read_bytes()[-200:]) == set(b"01") for file in files)
    counts = [len(file.read_bytes()) for file in files]
    assert counts == [1000] * 4 or max(counts) - min(counts) < 20


def test_a_turn_of_the_limit_is_short_where_steps_are_long(tmp_path):
    steps = tmp_path / "steps"
    steps.write_bytes(b"")
    with closing(Limit([partial(Asleep, steps)], 1)) as limit:
        for process in limit.exchange.processes:
            os.kill(process.pid, signal.SIGINT)  # Ctrl-C is the program's, which ends them
        assert 0 < limit.run(0.05).steps_per_s < 50
    assert 1 <= len(steps.read_bytes()) <= 3  # and not 64


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
    assert abs(counted - steps * batches) < 4.1  # the first has no env to reset


def guard(*arguments):
    tree = Path(shmvec.__file__).parents[1]
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "guard.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=250,
    )


SHORT = ("--seconds", 0.08, "--rounds", 8, "--starts", 1, "--workload", "noop-1")


def test_a_build_beside_itself():
    tree = Path(shmvec.__file__).parents[1]
    shown = guard("--tolerance", 1000, tree, tree, *SHORT, "one-by-one")
    assert shown.returncode == 0, shown.stderr
    assert "| noop-1 | " in shown.stdout and "| one-by-one | " in shown.stdout


def test_a_build_that_loses(tmp_path):
    tree = Path(shmvec.__file__).parents[1]
    slower = tmp_path / "src" / "shmvec"
    shutil.copytree(tree / "shmvec", slower)
    with (slower / "__init__.py").open("a") as code:
        code.write(SLOWS_DOWN)
    shown = guard("--tolerance", 2, tree, tmp_path, *SHORT)
    assert shown.returncode == 1, shown.stderr
    assert f"slower than {tree}: noop-1" in shown.stdout


SLOWS_DOWN = """
import shmvec.exchange
import time

step = shmvec.exchange.Exchange.step
shmvec.exchange.Exchange.step = lambda *args, **kwargs: (time.sleep(0.1), step(*args, **kwargs))[1]
"""


@pytest.fixture
def parts(monkeypatch):
    """What guard.py is made of."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "guard.py"))


def test_a_loss_is_more_than_chance(parts):
    loses = parts["loses"]
    chance = [1 + 0.001 * turn for turn in range(-12, 12)]
    slower = [1.05 * ratio for ratio in chance]
    assert loses(slower, chance, 0.02)
    assert not loses(slower, chance, 0.06)  # that is allowed
    assert not loses(chance, slower, 0.02)  # it is faster
    assert not loses([1.05, 0.95] * 12, chance, 0.02)  # by turns
    assert not loses([*slower[:16], *[0.9] * 8], chance, 0.02)  # of some rounds only
    assert not loses(slower, [1.1, 0.9] * 12, 0.02)  # another process of the same is as slow


def test_commits_are_built(parts, tmp_path):
    built = parts["built"]
    repository = tmp_path / "repository"
    (repository / "src" / "shmvec" / "_core").mkdir(parents=True)
    (repository / "src" / "shmvec" / "_core" / "version").write_text("1")
    (repository / "setup.py").write_text("open('src/shmvec/_core/made.so', 'w').close()")
    git = ["git", "-C", str(repository), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "1"]):
        subprocess.run([*git, *command], check=True, timeout=250)
    (repository / "src" / "shmvec" / "_core" / "version").write_text("2")
    with built("HEAD", repository) as tree:
        assert (tree / "shmvec" / "_core" / "version").read_text() == "1"
        assert (tree / "shmvec" / "_core" / "made.so").exists()
    assert not tree.exists()
    shown = subprocess.run([*git, "worktree", "list"], capture_output=True, text=True, timeout=250)
    assert len(shown.stdout.splitlines()) == 1
    for what in (str(repository), "no-such-commit"):  # one that is not built, and none
        with pytest.raises(SystemExit, match=re.escape(what)), built(what, repository):
            pass

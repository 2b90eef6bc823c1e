"""benchmarks/tune_training.py: its table is consistent, and the code it prints works."""

import itertools
import re
import time
from contextlib import closing
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from processes import BENCHMARKS, run_benchmark

pytestmark = pytest.mark.deep

pytest.importorskip("torch", reason="the examples extra")


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_it_runs(tmp_path):
    arguments = ["CartPole-v1", "--num-envs", "2", "--seconds", "0.02"]
    shown, (results,) = run_benchmark("tune_training.py", tmp_path, *arguments)
    rows = results["rows"]
    assert any(row["system"] == "SyncVectorEnv" for row in rows) and results["best"] in rows
    assert any(row["num_workers"] == 0 for row in rows)
    for row in rows:
        assert sum(row[part] for part in ("env", "policy", "learning", "handling")) == (
            pytest.approx(1)
        )
    code = re.split("\nBest, .* × SyncVectorEnv, .* × the defaults .*:\n", shown)[1]
    assert "torch.set_num_threads(" in code
    names = {}
    exec(code, names)
    with closing(names["envs"]) as envs:
        assert envs.num_envs == 2


def test_where_the_time_goes_is_not_where_others_had_their_turn(benchmarks, monkeypatch):
    from learner import Clock, Recipe
    from tune_training import Trained

    clock, later = Clock(), itertools.count(time.perf_counter() + 1000)
    trained = Trained.__new__(Trained)
    trained.recipe = Recipe()
    trained.training = SimpleNamespace(steps=0, clock=clock, iterate=lambda: clock("env"))
    monkeypatch.setattr(time, "perf_counter", later.__next__)
    trained.run(0)
    assert clock.seconds["env"] < 500


@pytest.mark.parametrize("fastest", ["park", "adaptive"])
def test_the_best_with_each_wait_policy(fastest, benchmarks, monkeypatch):
    """The wait policies are tried with the best number of workers, beside SyncVectorEnv."""
    import tune_training
    from learner import PARTS

    from shmvec._commands import measuring

    asked = []

    def measured(make, recipe, candidates, seconds, say):
        asked.append(candidates)
        rows = []
        for one in candidates:
            rate = 100 + 50 * (one.num_workers == 1) + 50 * (one.wait_policy == fastest == "park")
            figures = {"batch_us": 1, "spread": 0, "steps_per_s": rate, "times_sync": rate / 100}
            rows.append({**asdict(one), **figures, **dict.fromkeys(PARTS, 0.25)})
        return rows

    monkeypatch.setattr(tune_training, "measure", measured)
    for module in (measuring, tune_training):
        monkeypatch.setattr(module, "usable_cores", lambda: 2)
    results = tune_training.tune(None, 4)
    first, again = asked
    assert {one.wait_policy for one in first} == {"adaptive"}
    assert [one.wait_policy for one in again if one.system == "ShmVectorEnv"] == [
        "adaptive",
        "spin",
        "park",
    ]
    assert {one.num_workers for one in again} == {None, 1}  # None: SyncVectorEnv's
    assert results["best"]["wait_policy"] == fastest and results["best"]["num_workers"] == 1
    shown = tune_training.report(results, "CODE")
    assert ("wait_policy='park'" in shown) == (fastest == "park")
    worth = "2.00" if fastest == "park" else "1.50"
    assert f"\nBest, {worth} × SyncVectorEnv, {worth} × the defaults" in shown

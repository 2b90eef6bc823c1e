"""benchmarks/training.py: runs learn the same, rows are whole, and what tune prints works."""

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


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cartpole", "dqn"])
def test_the_same_curve(tmp_path, kind):
    arguments = ["--run", kind, "--system", "sync", "ours", "rollout", "ours-waits"]
    shown, results = run_benchmark(
        "training.py", tmp_path, *arguments, "--steps", "1024", "--rounds", "1"
    )
    rows = results["training"]
    third = "ShmVectorEnv, rollouts" if kind == "cartpole" else "ShmVectorEnv, waits"
    assert [row["system"] for row in rows] == ["SyncVectorEnv", "ShmVectorEnv", third]
    assert len({tuple(row["curves"]) for row in rows}) == 1 and rows[0]["episodes"] > 10
    assert len([line for line in shown.splitlines() if line.startswith(f"| {kind} |")]) == 3
    for row in rows:
        assert 900 < row["steps"] <= 1024
        parts = sum(row[f"{part}_s"] for part in ("env", "policy", "learning", "handling"))
        assert parts == pytest.approx(row["wall_s"], rel=0.1, abs=0.05)
        assert (row["workers_cpu_s"] > 0) == (row["system"] != "SyncVectorEnv")


def test_curves_of_their_own(tmp_path):
    """By a pipeline and by a replay; what the file has of other runs and numbers of envs stays."""
    few = ["--system", "pipeline", "replay", "--steps", "700", "--rounds"]
    run_benchmark("training.py", tmp_path, "--run", "dqn", *few, "2")
    _, results = run_benchmark(
        "training.py", tmp_path, "--run", "cartpole", *few, "1", "--num-envs", "2"
    )
    rows = results["training"]
    assert [(row["num_envs"], row["system"]) for row in rows] == [
        (1, "ShmVectorEnv, Replay"),
        (2, "ShmVectorEnv, Pipeline"),
    ]
    assert len(rows[0]["curves"]) == 2 and len(set(rows[0]["curves"])) == 1
    assert all(row["episodes"] > 5 for row in rows)


def test_other_curves_are_reported(benchmarks):
    from training import disagreements

    row = {"run": "cartpole", "threads": "1", "system": "ShmVectorEnv", "options": ""}
    same = [{**row, "curves": ["a", "b"]}, {**row, "system": "sync", "curves": ["a", "b"]}]
    assert not list(disagreements(same))
    (message,) = disagreements([*same, {**row, "system": "async", "curves": ["b", "a"]}])
    assert "cartpole" in message and "not the same" in message


# ---- tune ----------------------------------------------------------------------------------------


def test_tune_runs(tmp_path):
    arguments = ["tune", "CartPole-v1", "--num-envs", "2", "--seconds", "0.02"]
    shown, (results,) = run_benchmark("training.py", tmp_path, *arguments)
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
    from training import TrainingRun

    clock, later = Clock(), itertools.count(time.perf_counter() + 1000)
    run = TrainingRun.__new__(TrainingRun)
    run.recipe = Recipe()
    run.training = SimpleNamespace(steps=0, clock=clock, iterate=lambda: clock("env"))
    monkeypatch.setattr(time, "perf_counter", later.__next__)
    run.run(0)
    assert clock.seconds["env"] < 500


@pytest.mark.parametrize("fastest", ["park", "adaptive"])
def test_the_best_with_each_wait_policy(fastest, benchmarks, monkeypatch):
    """The wait policies are tried with the best number of workers, beside SyncVectorEnv."""
    import training
    from learner import PARTS

    from shmvec._commands import measuring

    asked = []

    def train_candidates(make, recipe, candidates, seconds, say):
        asked.append(candidates)
        rows = []
        for one in candidates:
            rate = 100 + 50 * (one.num_workers == 1) + 50 * (one.wait_policy == fastest == "park")
            figures = {"batch_us": 1, "spread": 0, "steps_per_s": rate, "times_sync": rate / 100}
            rows.append({**asdict(one), **figures, **dict.fromkeys(PARTS, 0.25)})
        return rows

    monkeypatch.setattr(training, "train_candidates", train_candidates)
    for module in (measuring, training):
        monkeypatch.setattr(module, "usable_cores", lambda: 2)
    results = training.tune(None, 4)
    first, again = asked
    assert {one.wait_policy for one in first} == {"adaptive"}
    assert [one.wait_policy for one in again if one.system == "ShmVectorEnv"] == [
        "adaptive",
        "spin",
        "park",
    ]
    assert {one.num_workers for one in again} == {None, 1}  # None: SyncVectorEnv's
    assert results["best"]["wait_policy"] == fastest and results["best"]["num_workers"] == 1
    shown = "\n".join(training.report(results, "CODE"))
    assert ("wait_policy='park'" in shown) == (fastest == "park")
    worth = "2.00" if fastest == "park" else "1.50"
    assert f"\nBest, {worth} × SyncVectorEnv, {worth} × the defaults" in shown

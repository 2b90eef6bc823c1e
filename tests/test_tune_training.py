"""tune --train: it runs, its table is consistent, and the code it prints works."""

import importlib.util
import json
import re
import sys
from contextlib import closing
from dataclasses import asdict
from types import SimpleNamespace

import pytest

import shmvec.__main__

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs torch (the examples extra)"
)


@needs_torch
def test_tune_train(tmp_path, capsys):
    file = tmp_path / "results.json"
    arguments = ["tune", "CartPole-v1", "--train", "--num-envs", "2", "--seconds", "0.02"]
    assert shmvec.__main__.main([*arguments, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    (results,) = json.loads(file.read_text())
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
    exec("import torch\n" + code, names)
    with closing(names["envs"]) as envs:
        assert envs.num_envs == 2


@needs_torch
def test_where_the_time_goes_is_not_where_others_had_their_turn():
    from shmvec._commands.learner import Clock, Recipe
    from shmvec._commands.tune_training import _Trained

    clock = Clock()
    trained = _Trained.__new__(_Trained)
    trained._recipe = Recipe()
    trained.training = SimpleNamespace(steps=0, clock=clock, iterate=lambda: clock("env"))
    clock._last -= 1000  # as if so many seconds had passed since
    trained.run(0)
    assert clock.seconds["env"] < 500


@needs_torch
@pytest.mark.parametrize("fastest", ["park", "adaptive"])
def test_the_best_with_each_wait_policy(fastest, monkeypatch):
    """The wait policies are tried with the best number of workers, beside SyncVectorEnv."""
    from shmvec._commands import measuring, tune_training
    from shmvec._commands.learner import PARTS

    asked = []

    def measured(make, recipe, candidates, seconds, say):
        asked.append(candidates)
        rows = []
        for one in candidates:
            rate = 100 + 50 * (one.num_workers == 1) + 50 * (one.wait_policy == fastest == "park")
            figures = {"batch_us": 1, "spread": 0, "steps_per_s": rate, "times_sync": rate / 100}
            rows.append({**asdict(one), **figures, **dict.fromkeys(PARTS, 0.25)})
        return rows

    monkeypatch.setattr(tune_training, "_measure", measured)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--compute", "5"], "--compute does not go"), ([], "pip install 'shmvec[examples]'")],
)
def test_tune_train_says_what_it_cannot(arguments, message, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "shmvec._commands.learner", raising=False)
    monkeypatch.delitem(sys.modules, "shmvec._commands.tune_training", raising=False)
    monkeypatch.delattr("shmvec._commands.tune_training", raising=False)
    with pytest.raises(SystemExit) as caught:
        shmvec.__main__.main(["tune", "CartPole-v1", "--train", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err

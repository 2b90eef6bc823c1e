"""The tune command: it finds envs, its table is consistent, and the code it prints works."""

import json
import re
from contextlib import closing

import pytest
import tables

import shmvec.__main__
from shmvec._commands import tune
from shmvec._commands.measuring import MIN_SPEEDUP, simplest
from shmvec._commands.tune import Setting, report
from shmvec._cores import usable_cores
from shmvec._named import find_env

ENV = """
import gymnasium as gym
import numpy as np


class Counter(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=10):
        self.length = length

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(3), {}

    def step(self, action):
        self.count += 1
        return np.zeros(3), 1.0, self.count == self.length, False, {"count": self.count}


not_a_function = 3
"""


def run_code(shown):
    """Runs what is below "Best" and returns the vector env."""
    names = {}
    exec(shown.split("\nBest", 1)[1].split(":\n", 1)[1], names)
    return names["envs"]


@pytest.fixture
def sure(monkeypatch):
    """Takes the best setting of few, short rounds, on whatever machine."""
    monkeypatch.setattr(tune, "is_best", lambda best, simpler: True)


@pytest.mark.deep
def test_a_registered_env(tmp_path, capsys, sure):
    results, picture = tmp_path / "results.json", tmp_path / "picture.png"
    arguments = ["tune", "CartPole-v1", "--num-envs", "3", "1", "--seconds", "0.01"]
    arguments += ["--kwargs", '{"sutton_barto_reward": true}', "--compute", "10"]
    assert shmvec.__main__.main([*arguments, "--json", str(results), "--plot", str(picture)]) == 0
    shown = capsys.readouterr()
    found = json.loads(results.read_text())
    assert "[1/2] 1 envs" in shown.err and "[2/2] 3 envs" in shown.err
    assert found["env"]["observation_bytes"] == 16 and found["env"]["infos_per_step"] == 0
    assert found["env"]["step_us"] > 0 and found["limit"] > 0
    names = Setting.__dataclass_fields__
    settings = [Setting(**{name: row[name] for name in names}) for row in found["rows"]]
    assert len(set(settings)) == len(settings)
    assert {setting.num_envs for setting in settings} == {1, 3}
    assert {setting.batch_size for setting in settings} == {None, 1}
    assert Setting(3, 3) in settings  # a worker each
    if usable_cores() > 1:
        assert any(setting.caller_steps for setting in settings)
    assert sum(row["best"] for row in found["rows"]) == 2
    for spread in (0.9, 0.1):  # where turns differ that much, the table says that it is doubtful
        said = report({**found, "rows": [{**row, "spread": spread} for row in found["rows"]]}, "")
        assert ("The machine was busy (spread 90%): repeat this" in said) is (spread > 0.5)
    assert any(row["best"] and found["best"].items() <= row.items() for row in found["rows"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    with closing(run_code(shown.out)) as envs:
        assert envs.num_envs in (1, 3)
        envs.reset(seed=1)
        assert envs.step(envs.action_space.sample())[1][0] == 0  # Sutton's and Barto's reward


@pytest.mark.deep
def test_an_env_that_sleeps_is_tried_with_overlap(tmp_path, capsys, monkeypatch, sure):
    slow = ENV.replace("self.count += 1", "self.count += 1; time.sleep(0.005)")
    (tmp_path / "sleeping_env.py").write_text(f"import time\n{slow}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arguments = [f"{tmp_path}/sleeping_env.py:Counter", "--num-envs", "4", "--seconds", "0.005"]
    results = tmp_path / "results.json"
    assert shmvec.__main__.main(["tune", *arguments, "--json", str(results)]) == 0
    found = json.loads(results.read_text())
    assert found["env"]["asleep"] > 0.5
    assert any(row["overlap"] == "auto" for row in found["rows"])
    assert "overlap='auto'" in capsys.readouterr().out


@pytest.mark.deep
def test_an_env_of_coroutines_is_refused(tmp_path):
    (tmp_path / "env.py").write_text(ENV.replace("def step", "async def step"))
    with pytest.raises(TypeError, match="step or reset of Counter is a coroutine function"):
        shmvec.__main__.main(["tune", f"{tmp_path}/env.py:Counter", "--seconds", "0.05"])


def test_an_env_in_a_file(tmp_path, capsys, monkeypatch, sure):
    (tmp_path / "counter_env.py").write_text(ENV)
    monkeypatch.syspath_prepend(tmp_path)  # the code to paste imports it
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arguments = [f"{tmp_path}/counter_env.py:Counter", "--kwargs", '{"length": 1}']
    arguments += ["--num-envs", "2", "--seconds", "0.03"]
    assert shmvec.__main__.main(["tune", *arguments]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"an observation has 24 bytes, an info 1 keys", shown)
    assert re.search(r"µs every 1 steps", shown)
    with closing(run_code(shown)) as envs:
        assert envs.get_attr("length") == (1, 1)


@pytest.mark.deep
def test_a_module(tmp_path, monkeypatch):
    (tmp_path / "counter_module.py").write_text(ENV)
    monkeypatch.syspath_prepend(tmp_path)
    make, code = find_env("counter_module:Counter", {"length": 3})
    assert make().length == 3 and "return Counter(length=3)" in code
    make, code = find_env("counter_module:CartPole-v1", {})
    assert make().spec.id == "CartPole-v1" and "gym.make('counter_module:CartPole-v1')" in code


@pytest.mark.deep
def test_simpler_settings_are_preferred():
    def row(rate, **setting):
        return {**vars(Setting(4, **setting)), "steps_per_s": rate}

    plain = row(100)
    assert simplest([plain, row(102, num_workers=1)], MIN_SPEEDUP) is plain
    assert simplest([plain, row(104, num_workers=1)], MIN_SPEEDUP) is not plain
    assert Setting(4).options() == {}
    assert Setting(4, 0, "park", False).options() == {
        "num_workers": 0,
        "wait_policy": "park",
        "copy": False,
    }


@pytest.mark.deep
def test_an_env_that_lacks_a_core_does_not_sleep():
    assert tune.asleep_share(10.0, 9.0, 0.5) == pytest.approx(0.05)
    assert tune.asleep_share(10.0, 3.0, 6.9) == pytest.approx(0.01)  # on a busy machine
    assert tune.asleep_share(10.0, 0.5, 0.5) == pytest.approx(0.9)
    assert tune.asleep_share(10.0, 9.0, 9.0) == 0


def row(*rounds, spread=0.1, share=0.8, **setting):
    figures = {"batch_us": 9.0, "spread": spread, "steps_per_s": max(rounds)}
    return {
        **vars(Setting(4, **setting)),
        **figures,
        "share_of_limit": share,
        "rounds": list(rounds),
        "best": False,
    }


@pytest.mark.deep
def test_no_setting_is_best_where_rounds_differ_more_than_settings():
    defaults, one = row(100, 110, 90, 100), row(120, 130, 105, 95, num_workers=1)
    assert tune.is_best(one, [defaults])  # in all rounds but one
    assert not tune.is_best(row(900, 130, 80, 95, num_workers=1), [defaults])
    assert not tune.is_best(row(900, 140, 100, 90, wait_policy="park"), [defaults, one])
    assert tune.is_best(defaults, [])
    assert not tune.is_best(row(100, 110, 90, 100, spread=20.39), [])


@pytest.mark.deep
def test_what_is_said_of_the_best_setting():
    env = dict.fromkeys(
        "step_us step_deviation_us step_p99_us reset_us steps_per_episode observation_bytes "
        "infos_per_step memory_bytes".split(),
        1,
    )
    machine = {"cpu": "", "usable_cores": 2, "python": "", "gymnasium": "", "shmvec": ""}
    found = {"machine": machine, "check": None, "env": env, "batch": None}
    found |= {"rows": [row(100, share=3.55)], "best": vars(Setting(4))}
    assert "Best, and the defaults:" in report(found, "") and "3.55" not in report(found, "")
    none = report({**found, "best": None}, "")
    assert "No best setting" in none and "\nBest" not in none and "ShmVectorEnv(" not in none
    batch = report({**found, "batch": row(200, batch_size=2)}, "")
    assert "batch_size=2 makes 200 steps/s" in batch and "\nBest" in batch
    many = report({**found, "best": vars(Setting(4, num_workers=4))}, "")
    assert "or other programs use the cores" in many


def test_bad_arguments(capsys, tmp_path):
    file = tmp_path / "env_file.py"
    file.write_text(ENV)
    for arguments, message in [
        (["NoSuchEnv-v0"], "NoSuchEnv"),
        (["no_such_module:make"], "cannot import"),
        (["no_such_file.py:make"], "no file"),
        ([f"{file}:nothing"], "no function"),
        ([f"{file}:not_a_function"], "no function"),
        (["CartPole-v1", "--kwargs", "{"], "not JSON"),
        (["CartPole-v1", "--kwargs", "[1]"], "must be a JSON object"),
        (["CartPole-v1", "--num-envs", "0"], "must be positive"),
        (["CartPole-v1", "--plot", "/no/such/folder/file.png"], "no folder"),
        ([], "required"),
    ]:
        with tables.row(*arguments):
            with pytest.raises(SystemExit) as caught:
                shmvec.__main__.main(["tune", *arguments])
            assert caught.value.code == 2
            assert message in capsys.readouterr().err


@pytest.mark.deep
def test_plotting_needs_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        shmvec.__main__.main(["tune", "CartPole-v1", "--plot", str(tmp_path / "p.png")])
    assert "pip install 'shmvec[plot]'" in capsys.readouterr().err

"""The bench command: it runs, its numbers are consistent, and missing packages are named."""

import json

import pytest

import shmvec.__main__
from shmvec._commands import bench


@pytest.mark.deep
def test_command(tmp_path, capsys):
    file = tmp_path / "results.json"
    arguments = ["bench", "--env", "Noop", "CartPole-v1", "--num-envs", "1", "3"]
    arguments += ["--num-workers", "2", "--seconds", "0.1", "--json", str(file)]
    assert shmvec.__main__.main(arguments) == 0
    shown = capsys.readouterr()
    results = json.loads(file.read_text())
    assert len(results["rows"]) == 2 * 2 * 4
    assert bench.table(results) in shown.out
    assert "[4/4] CartPole-v1, 3 envs" in shown.err
    for row in results["rows"]:
        assert row["steps_per_s"] > 0
        if row["system"] != "limit":
            # Steps are counted without the resets that autoreset makes instead of steps.
            assert row["steps_per_s"] * row["batch_us"] / 1e6 < row["num_envs"] * 1.5
        if row["system"] == "AsyncVectorEnv":
            assert row["times_async"] == 1


def test_compute(capsys):
    arguments = ["bench", "--env", "Noop", "--num-envs", "2", "--seconds", "0.1"]
    assert shmvec.__main__.main([*arguments, "--compute", "50"]) == 0
    assert "parent slowed by" in capsys.readouterr().out


def test_missing_packages_are_named(monkeypatch, capsys):
    missing = bench.Workload(bench.NoopEnv, ("json", "no_such_package"))
    monkeypatch.setitem(bench.WORKLOADS, "ALE/Pong-v5", missing)
    arguments = ["bench", "--env", "ALE/Pong-v5", "Noop", "--num-envs", "1", "--seconds", "0.05"]
    assert shmvec.__main__.main(arguments) == 0
    out = capsys.readouterr().out
    assert "ALE/Pong-v5 is left out: no_such_package not installed" in out
    assert "pip install 'shmvec[bench]'" in out and "| Noop | 1 | ShmVectorEnv |" in out
    assert shmvec.__main__.main(arguments[:3] + arguments[4:]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--env", "Chess"], "invalid choice"),
        (["bench", "--num-envs", "0"], "must be positive"),
        (["bench", "--seconds", "soon"], "invalid"),
        (["bench", "--json", "/no/such/folder/file"], "no folder"),
        ([], "required"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        shmvec.__main__.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", bench.DEFAULT_WORKLOADS)
def test_workloads_step(name):
    workload = bench.WORKLOADS[name]
    if workload.missing():
        pytest.skip(f"{name} needs {workload.missing()}")
    env = workload.make()
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    env.step(env.action_space.sample())
    env.close()

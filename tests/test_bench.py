"""The bench command: it runs, its numbers are consistent, and missing packages are named."""

import json

import pytest
from tables import deep

import shmvec.__main__
from shmvec._commands import bench, measuring


@pytest.mark.deep
def test_command(tmp_path, capsys):
    file = tmp_path / "results.json"
    arguments = ["bench", "Noop", "CartPole-v1", "--num-envs", "3"]
    arguments += ["--num-workers", "2", "--seconds", "0.05", "--json", str(file)]
    assert shmvec.__main__.main(arguments) == 0
    shown = capsys.readouterr()
    results = json.loads(file.read_text())
    assert len(results["rows"]) == 2 * 4
    assert bench.table(results) in shown.out
    assert "[2/2] CartPole-v1, 3 envs" in shown.err
    for row in results["rows"]:
        assert row["steps_per_s"] > 0
        if row["system"] != "limit":
            # Steps are counted without the resets that autoreset makes instead of steps.
            assert row["steps_per_s"] * row["batch_us"] / 1e6 < row["num_envs"] * 1.5
        if row["system"] == "AsyncVectorEnv":
            assert row["times_async"] == 1


def test_compute(capsys):
    arguments = ["bench", "Noop", "--num-envs", "2", "--seconds", "0.02"]
    assert shmvec.__main__.main([*arguments, "--compute", "50"]) == 0
    assert "parent slowed by" in capsys.readouterr().out


@pytest.mark.deep
def test_an_env_of_ones_own_and_what_the_table_says(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from shmvec._commands.bench import NoopEnv\n"
        "class Mine(NoopEnv):\n"
        "    def __init__(self, size):\n"
        "        super().__init__()\n"
        "        assert size == 3\n"
    )
    arguments = ["bench", f"{file}:Mine", "--kwargs", '{"size": 3}', "--num-envs", "2"]
    assert shmvec.__main__.main([*arguments, "--seconds", "0.02"]) == 0
    out = capsys.readouterr().out
    assert f"| {file}:Mine | 2 | AsyncVectorEnv |" in out
    assert f"\n{file}:Mine, 2 envs: " in out and " × AsyncVectorEnv, " in out


@pytest.mark.deep
def test_what_is_said_of_a_result():
    row = {"env": "Mine", "num_envs": 8, "system": "ShmVectorEnv", "batch_us": 1.0, "spread": 0.9}
    row |= {"steps_per_s": 10.0, "share_of_limit": 0.84, "times_async": 5.12, "times_sync": 1.4}
    settings = {"compute_us": None}
    results = {"machine": measuring.machine(), "settings": settings, "rows": [row], "left_out": {}}
    said = bench.table(results)
    assert "Mine, 8 envs: 5.1 × AsyncVectorEnv, 1.4 × SyncVectorEnv, 0.84 of the limit." in said
    assert "The machine was busy (spread 90%): repeat this" in said
    assert "medians of the rounds' ratios, not quotients of medians" in said
    row |= {"times_sync": 0.5, "spread": 0.1}
    assert "num_workers=0" in bench.table(results) and "busy" not in bench.table(results)
    row |= {"times_sync": 2.0, "share_of_limit": 5.0}
    assert "envs sleep" in bench.table(results)


@pytest.mark.deep
def test_missing_packages_are_named(monkeypatch, capsys):
    missing = bench.Workload(bench.NoopEnv, ("json", "no_such_package"))
    monkeypatch.setitem(bench.WORKLOADS, "ALE/Pong-v5", missing)
    arguments = ["bench", "ALE/Pong-v5", "Noop", "--num-envs", "1", "--seconds", "0.05"]
    assert shmvec.__main__.main(arguments) == 0
    out = capsys.readouterr().out
    assert "ALE/Pong-v5 is left out: no_such_package not installed" in out
    assert "pip install 'shmvec[bench]'" in out and "| Noop | 1 | ShmVectorEnv |" in out
    assert shmvec.__main__.main(arguments[:2] + arguments[3:]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--num-envs", "0"], "must be positive"),
        *deep(
            (["bench", "Chess-v0"], "Chess"),
            (["bench", "nowhere.py:Chess"], "no file nowhere.py"),
            (["bench", "--seconds", "soon"], "invalid"),
            (["bench", "--json", "/no/such/folder/file"], "no folder"),
            ([], "required"),
        ),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        shmvec.__main__.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.deep
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

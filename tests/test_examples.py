"""The examples run, learn, and learn the same with AsyncVectorEnv."""

import re
from pathlib import Path

import pytest
from processes import output_of

pytestmark = pytest.mark.deep

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *arguments):
    return output_of(EXAMPLES / name, *arguments).splitlines()


def test_cross_entropy_learns():
    lines = run("cross_entropy.py")
    means = [float(line.split()[3].strip(",")) for line in lines[:-1]]
    assert means[0] < 100 and means[-1] > 300
    # Which envs are ready first changes nothing but the time, which is the last line.
    assert run("cross_entropy.py", "--batch-size", "10")[:-1] == lines[:-1]


def test_ppo_gets_the_same_curve_on_every_class():
    pytest.importorskip("torch")
    curves = set()
    for options in (
        ("--vector-env", "shm"),
        ("--vector-env", "async"),
        ("--vector-env", "sync"),
        ("--data", "rollout"),
        ("--data", "pipeline"),
    ):
        last = run("ppo.py", *options, "--total-steps", "4000", "--log-dir", "")[-1]
        episodes, curve = re.search(r"(\d+) episodes.* curve (\w{16})$", last).groups()
        assert int(episodes) > 50
        curves.add(curve)
    assert len(curves) == 1


def test_dqn_learns_cartpole():
    pytest.importorskip("torch")
    lines = run("dqn.py", "--total-timesteps", "6000")
    means = [float(line.split()[4]) for line in lines[:-1]]
    assert len(means) > 5 and means[-1] > 1.5 * min(means[:3])
    assert int(lines[-1].split()[0].replace(",", "")) > 5500


def test_dqn_on_frames_of_pong():
    pytest.importorskip("torch")
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    options = ["--learning-starts", "300", "--total-timesteps", "400", "--batch-size", "8"]
    last = run("dqn.py", "--env-id", "ALE/Pong-v5", *options, "--capacity", "500")[-1]
    assert last == "400 transitions, 24 updates"


def test_dqn_and_sac_update_as_often_as_they_are_told():
    pytest.importorskip("torch")
    last = run("dqn.py", "--total-timesteps", "1400")[-1]
    assert last.endswith(" transitions, 99 updates")
    last = run("sac.py", "--total-timesteps", "620", "--batch-size", "32")[-1]
    assert last.endswith(" transitions, 118 updates")


def test_ppo_logs_what_tensorboard_users_expect(tmp_path):
    pytest.importorskip("torch")
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run("ppo.py", "--total-steps", "1000", "--log-dir", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    events = accumulators.EventAccumulator(str(folder))
    events.Reload()
    charts = {"episodic_return", "episodic_length", "learning_rate", "SPS"}
    losses = {"policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"}
    assert {f"charts/{name}" for name in charts} <= set(events.Tags()["scalars"])
    assert {f"losses/{name}" for name in losses} <= set(events.Tags()["scalars"])


def test_planning_plays_better_than_chance_and_draws_it(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    options = ("--moves", "45", "--samples", "20", "--plot", str(picture))
    line = run("planning.py", *options)[0]
    planned, at_random = re.search(r"(\d+) in \d+ moves by planning, (\d+) in", line).groups()
    assert int(planned) > 2 * int(at_random)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_planning_in_pong():
    pytest.importorskip("ale_py")
    line = run("planning.py", "--env", "pong", "--moves", "1", "--samples", "2")[0]
    assert "in 1 moves by planning" in line

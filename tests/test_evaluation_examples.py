"""Examples and benchmark of evaluation: states and plans belong to an env, and rows are whole."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from processes import output_of, run_benchmark
from short_walks import Walk

from shmvec import evaluate

pytestmark = pytest.mark.deep

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Recurrent:
    """Predicts as sb3_contrib's recurrent policies do; an action depends on all of the episode."""

    def predict(self, observations, state=None, episode_start=None, deterministic=False):
        assert deterministic
        n = len(observations)
        state = (np.zeros((2, n, 3)), np.zeros((2, n, 3))) if state is None else state
        for part in state:
            assert part.shape == (2, n, 3)
            assert not part[:, episode_start].any()
        hidden = state[0] / 2 + observations[None]
        cells = state[1] + 1
        actions = (np.abs(hidden[0, :, 0] * 7) + cells[0, :, 0]).astype(int) % 5
        return actions, (hidden, cells)


class Plain:
    """As a policy without a state."""

    def predict(self, observations, state=None, episode_start=None, deterministic=False):
        assert state is None
        return np.abs(observations[:, 0] * 7).astype(int) % 5, None


@pytest.mark.parametrize("model", [Recurrent(), Plain()])
def test_sb3_models(model):
    evaluate_policy = example("evaluate_sb3").evaluate_policy
    alone = evaluate_policy(model, Walk, 12, return_episode_rewards=True, seeds=3, num_envs=1)
    together = evaluate_policy(model, Walk, 12, return_episode_rewards=True, seeds=3, num_envs=5)
    assert alone == together
    mean, std = evaluate_policy(model, Walk, 12, seeds=3, num_envs=3)
    assert (mean, std) == (np.mean(alone[0]), np.std(alone[0]))


def test_sb3_itself():
    pytest.importorskip("stable_baselines3")
    said = output_of(EXAMPLES / "evaluate_sb3.py", "--train-steps", 2000)
    assert re.fullmatch(r"return [\d.]+ \+- [\d.]+ over 100 episodes\n", said)


@pytest.mark.parametrize("num_envs", [2, 5])
def test_chunks_of_actions(num_envs):
    chunks = example("evaluate_lerobot").Chunks
    sizes = []

    def predict(observations):
        sizes.append(len(observations))
        first = np.abs(observations[:, 0] * 7)
        return np.stack([first + i for i in range(6)], axis=1)

    def postprocess(actions):
        return actions.astype(int) % 5

    alone = evaluate(Walk, chunks(predict, 3, postprocess), 12, seeds=3, num_envs=1)
    asked = sum(sizes)
    assert asked == np.ceil(alone.lengths / 3).sum()
    result = evaluate(Walk, chunks(predict, 3, postprocess), 12, seeds=3, num_envs=num_envs)
    assert result.returns.tolist() == alone.returns.tolist()
    assert sum(sizes) == 2 * asked


def test_chunks_of_tensors_and_dicts():
    torch = pytest.importorskip("torch")
    chunks = example("evaluate_lerobot").Chunks
    policy = chunks(lambda batch: torch.stack([batch["x"]["y"]] * 2, 1).requires_grad_(), 2)
    observations = {"x": {"y": torch.tensor([1.0, 2.0, 3.0])}}
    assert policy(observations, np.array([4, 2, 0])).tolist() == [1.0, 2.0, 3.0]
    observations = {"x": {"y": torch.tensor([4.0, 5.0, 6.0])}}
    policy.reset(np.array([2]))
    assert policy(observations, np.array([4, 2, 0])).tolist() == [1.0, 5.0, 3.0]


def test_sb3_eval_callback(tmp_path):
    """It reports what it reports with DummyVecEnv, and training goes the same way."""
    pytest.importorskip("stable_baselines3")
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv

    from shmvec.adapters.sb3 import ShmVecEnv

    reports = []
    for kind in (DummyVecEnv, ShmVecEnv):
        envs, others = (make_vec_env("CartPole-v1", 3, seed=s, vec_env_cls=kind) for s in (1, 2))
        callback = EvalCallback(
            others, n_eval_episodes=7, eval_freq=64, log_path=str(tmp_path), verbose=0
        )
        PPO("MlpPolicy", envs, n_steps=64, seed=1, device="cpu").learn(600, callback)
        envs.close()
        others.close()
        with np.load(tmp_path / "evaluations.npz") as found:
            reports.append({name: found[name].tolist() for name in found})
    assert reports[0] == reports[1] and len(reports[0]["timesteps"]) > 2


@pytest.mark.parametrize(
    ("part", "needed", "envs"),
    [
        ("cleanrl", ["torch", "mujoco"], 3),
        ("sb3", ["stable_baselines3", "mujoco"], 2),
        ("pusht", ["lerobot", "gym_pusht"], 3),
        ("pusht", ["lerobot", "gym_pusht"], 1),
    ],
)
def test_the_benchmark_of_other_evaluations(part, needed, envs, tmp_path):
    for name in needed:
        pytest.importorskip(name)
    small = ["--envs", str(envs), "--episodes", "4", "--steps", "15", "--rounds", "1"]
    _, results = run_benchmark("evaluation.py", tmp_path, part, *small)
    *others, ours = [row["same"] for row in results["rows"]]
    assert set(others) == {"yes"}
    if part == "pusht" and envs == 1:  # no env is stepped after its episode has ended
        assert ours == "the returns"


def test_the_benchmark(tmp_path):
    small = ["--episodes", "12", "--sleep-ms", "0.1", "--busy-ms", "0.01", "--rounds", "1"]
    shown, results = run_benchmark("evaluation.py", tmp_path, *small)
    rows = results["rows"]
    assert [row["system"] for row in rows] == ["evaluate", "frozen", "stepped on"] * 2
    for row in rows:
        assert row["of_steps"] > 1 if row["system"] == "stepped on" else row["of_steps"] == 1
        assert row["same"] == "yes" and f"| {row['system']} |" in shown

"""Beside DI-engine itself, if it is installed: the same timesteps, and a place in its registry."""

import multiprocessing
import warnings
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest

from shmvec.adapters.ding import (
    AsyncSubprocessEnvManager,
    SubprocessEnvManagerV2,
    SyncSubprocessEnvManager,
)

with warnings.catch_warnings():  # of its own imports
    warnings.simplefilter("ignore")
    envs_of_ding = pytest.importorskip("ding.envs")

pytestmark = pytest.mark.deep
pytestmark = [pytestmark, pytest.mark.filterwarnings("ignore")]


class Drawn:
    """An env of DI-engine's that draws its observations, for both."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(4)
    reward_space = gym.spaces.Box(0, 9, (1,), np.float32)

    def __init__(self, length):
        self.length, self.random = length, np.random.default_rng(0)

    def seed(self, seed, dynamic_seed=True):
        self.random = np.random.default_rng(seed)

    def reset(self):
        self.count = 0
        return self.random.random(3, np.float32)

    def step(self, action):
        self.count += 1
        info = {"count": self.count, "abnormal": action == 3}
        return envs_of_ding.BaseEnvTimestep(
            self.random.random(3, np.float32), np.array([action], np.float32),
            self.count == self.length, info,
        )  # fmt: skip

    def close(self):
        pass


def play(kind, **changes):
    """All timesteps of a run, as plain values."""
    cfg = kind.default_config()
    for key, value in {"reset_inplace": True, "episode_num": 3, **changes}.items():
        cfg[key] = value
    results = []
    with closing(kind([lambda i=i: Drawn(3 + i) for i in range(3)], cfg)) as envs:
        envs.seed(5)
        envs.launch()
        for turn in range(12):
            if not envs.ready_env:  # the original's ready_obs would wait for ever
                break
            ready = envs.ready_obs
            results += [(env, obs.tolist()) for env, obs in sorted(ready.items())]
            for env, step in sorted(envs.step({env: (env + turn) % 3 for env in ready}).items()):
                results.append((env, step.obs.tolist(), step.reward.tolist(), step.done))
                results.append(step.info["count"])
        results.append([envs.env_state_done(env) for env in range(3)])
    for process in multiprocessing.active_children():  # the original leaves zombies
        process.join()
    return results


def test_timesteps_are_those_of_the_original():
    original = envs_of_ding.SyncSubprocessEnvManager
    assert play(SyncSubprocessEnvManager) == play(original)
    assert play(SyncSubprocessEnvManager, auto_reset=False, reset_inplace=False) == play(
        original, auto_reset=False, reset_inplace=False
    )


def test_defaults_are_those_of_the_original():
    ours, theirs = (
        SyncSubprocessEnvManager.default_config(),
        envs_of_ding.SyncSubprocessEnvManager.default_config(),
    )
    assert {key: ours[key] for key in theirs if key != "cfg_type"} == {
        key: value for key, value in theirs.items() if key != "cfg_type"
    }
    asynchronous = envs_of_ding.AsyncSubprocessEnvManager.default_config()
    ours = AsyncSubprocessEnvManager.default_config()
    assert all(ours[key] == value for key, value in asynchronous.items() if key != "cfg_type")


def test_a_place_in_the_registry_of_the_original():
    from ding.utils import ENV_MANAGER_REGISTRY, deep_merge_dicts
    from easydict import EasyDict

    ENV_MANAGER_REGISTRY.register("shm_subprocess_v2", SubprocessEnvManagerV2)
    user = EasyDict(type="shm_subprocess_v2", episode_num=2)
    kind = envs_of_ding.get_env_manager_cls(user)
    merged = deep_merge_dicts(kind.default_config(), user)
    manager = envs_of_ding.create_env_manager(merged, [lambda: Drawn(4)] * 2)
    with closing(manager) as envs:
        assert type(envs) is SubprocessEnvManagerV2
        envs.launch()
        assert envs.step([0, 1])[1].obs.shape == (3,)

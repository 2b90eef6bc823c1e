"""``recycle_after=`` of every adapter that takes it: its workers are replaced, and it goes on."""

import os
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from sb3_stand_in import ShmVecEnv
from tianshou_or_stand_in import SubprocVectorEnv

from shmvec.adapters.actorcritic import MultiEnv, create_subprocess_envs
from shmvec.adapters.baselines import SubprocVecEnv
from shmvec.adapters.pettingzoo import ParallelVectorEnv

NUM_STEPS = 20
RECYCLE = {"num_workers": 1, "recycle_after": 5}


class Long(gym.Env):
    """Goes on and on, and observes how far it has come, in which process."""

    observation_space = gym.spaces.Box(0, np.inf, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)
    spec = None

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        return self.observe(), 1.0, False, False, {}

    def observe(self):
        return np.array([self.count, os.getpid()], np.float64)


class Alone:
    """The same, as the only agent of a parallel env."""

    possible_agents = ("me",)
    render_mode = None

    def __init__(self):
        self.env, self.agents = Long(), ["me"]

    def observation_space(self, agent):
        return self.env.observation_space

    def action_space(self, agent):
        return self.env.action_space

    def reset(self, seed=None, options=None):
        return {"me": self.env.reset()[0]}, {}

    def step(self, actions):
        return *({"me": value} for value in self.env.step(actions["me"])[:-1]), {}


def of_sb3():
    envs = ShmVecEnv([Long] * 2, start_method="fork", **RECYCLE)
    envs.reset()
    return envs, lambda: envs.step([1, 1])[::2]


def of_baselines():
    envs = SubprocVecEnv([Long] * 2, context="fork", **RECYCLE)
    envs.reset()
    return envs, lambda: envs.step([1, 1])[::2]


def of_tianshou():
    envs = SubprocVectorEnv([Long] * 2, **RECYCLE)
    envs.reset()

    def step():
        observations, _, _, truncated, _ = envs.step([1, 1])
        if truncated.any():
            observations[truncated] = envs.reset(np.flatnonzero(truncated))[0]
        return observations, truncated

    return envs, step


def of_actorcritic():
    envs = MultiEnv(create_subprocess_envs([Long] * 2, **RECYCLE))
    envs.reset()

    def step():
        observations, _, _, infos = envs.step([1, 1])
        return observations, ["fault" in info for info in infos]

    return envs, step


def of_pettingzoo():
    envs = ParallelVectorEnv([Alone] * 2, autoreset_mode="SameStep", **RECYCLE)
    envs.reset()

    def step():
        observations, _, _, truncated, _ = envs.step({"me": [1, 1]})
        return observations["me"].copy(), truncated["me"]

    return envs, step


def of_rows(base_class):
    parallel = ParallelVectorEnv([Alone] * 2, autoreset_mode="SameStep", **RECYCLE)
    rows = parallel.as_rows(base_class)
    rows.reset()
    if base_class == "gymnasium":
        return rows, lambda: rows.step([1, 1])[::3]
    return rows, lambda: rows.step([1, 1])[::2]


MADE = {
    "sb3": of_sb3,
    "baselines": of_baselines,
    "tianshou": of_tianshou,
    "actorcritic": of_actorcritic,
    "pettingzoo": of_pettingzoo,
    "rows": partial(of_rows, "gymnasium"),
    "sb3 rows": partial(of_rows, "stable_baselines3"),
}


@pytest.mark.parametrize("system", MADE)
def test_workers_are_replaced_after_so_many_steps(system):
    if system == "sb3 rows":
        pytest.importorskip("stable_baselines3")
    envs, step = MADE[system]()
    try:
        seen = [step() for _ in range(NUM_STEPS)]
        pids = [int(observations[0][1]) for observations, _ in seen]
        replaced = [i for i in range(1, NUM_STEPS) if pids[i] != pids[i - 1]]
        assert len(replaced) == 3
        # The first step of a new worker tells that the episode was broken off.
        assert [i for i, (_, told) in enumerate(seen) if np.any(told)] == replaced
        assert max(observations[0][0] for observations, _ in seen) == 5
    finally:
        envs.close()

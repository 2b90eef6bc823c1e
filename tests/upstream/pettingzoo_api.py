"""PettingZoo's parallel_api_test, for envs that live in a worker of ParallelVectorEnv.

Not named test_*: `run.py pettingzoo` runs it. The test wants one env; `Alone` is the only one of a
vector env.
"""

import functools
import importlib

import numpy as np
import pytest
from pettingzoo import ParallelEnv
from pettingzoo.test import parallel_api_test

from shmvec.adapters.pettingzoo import ParallelVectorEnv

ENVS = [
    *(
        f"mpe2.simple_{name}_v3"
        for name in ("adversary", "push", "reference", "spread", "tag", "world_comm")
    ),
    "mpe2.simple_crypto_v3",
    "mpe2.simple_speaker_listener_v4",
    "mpe2.simple_v3",
]


class Alone(ParallelEnv):
    """The only env of a ParallelVectorEnv, as a ParallelEnv."""

    def __init__(self, env_fn):
        self.envs = ParallelVectorEnv([env_fn], num_workers=1)
        self.possible_agents = self.envs.possible_agents
        self.observation_space = functools.cache(self.envs.single_observation_space)
        self.action_space = functools.cache(self.envs.single_action_space)
        self.agents = []

    def first(self, by_agent, agents):
        """What the env says about these agents."""
        return {agent: row(by_agent[agent]) for agent in agents if agent in by_agent}

    def reset(self, seed=None, options=None):
        observations, infos = self.envs.reset(seed=seed, options=options)
        self.agents = [agent for agent, alive in self.envs.alive.items() if alive[0]]
        return self.first(observations, self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        asked = self.agents
        batched = {agent: np.asarray(action)[None] for agent, action in actions.items()}
        results = self.envs.step(batched)
        over = {agent for agent in asked if results[2][agent][0] or results[3][agent][0]}
        born = {agent for agent, alive in self.envs.alive.items() if alive[0]} - over
        self.agents = [agent for agent in self.possible_agents if agent in born]
        seen = [agent for agent in self.possible_agents if agent in over | born]
        return *(self.first(part, seen) for part in results[:4]), {agent: {} for agent in seen}

    def close(self):
        self.envs.close()


def row(batch):
    """The first row of arrays, in dicts or not."""
    if isinstance(batch, dict):
        return {key: row(value) for key, value in batch.items()}
    return batch[0]


@pytest.mark.parametrize("module", ENVS)
def test_parallel_api(module):
    env = Alone(importlib.import_module(module).parallel_env)
    try:
        parallel_api_test(env, num_cycles=100)
    finally:
        env.close()

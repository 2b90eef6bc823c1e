"""Envs for the tests of Tianshou's interface: to the right, until they get there."""

import multiprocessing
import sys

import gymnasium as gym
import numpy as np
from gymnasium import spaces

DEADLINE = 100.0
LEFT, RIGHT, GATED = range(3)


class Walk(gym.Env):
    """To the right until `size`; an action can make it wait for a gate."""

    metadata = {"render_modes": ["rgb_array"], "name": "walk"}

    def __init__(self, size, kind="array", gate=None):
        self.action_space = spaces.Discrete(3)
        self.size, self.kind, self.gate = size, kind, gate
        self.received = []
        box = spaces.Box(0, size, (1,), np.float32)
        self.observation_space = {
            "array": box,
            "image": spaces.Box(0, 255, (2, 3, 3), np.uint8),
            "dict": spaces.Dict({"index": box, "rand": spaces.Box(0, 1, (1,), np.float64)}),
            "nested": spaces.Dict(
                {
                    "index": box,
                    "inner": spaces.Dict(
                        {"pair": spaces.Tuple((spaces.Discrete(2), box)), "word": spaces.Text(3)}
                    ),
                }
            ),
            "tuple": spaces.Tuple((box, box)),
            "discrete": spaces.Discrete(100),
        }.get(kind)

    def _observation(self):
        index = np.array([self.index], np.float32)
        return {
            "array": lambda: index,
            "image": lambda: np.full((2, 3, 3), self.index, np.uint8),
            "dict": lambda: {"index": index, "rand": self.np_random.random(1)},
            "nested": lambda: {
                "index": index,
                "inner": {"pair": (np.int64(1), index + 1), "word": "abc"[: self.index]},
            },
            "tuple": lambda: (index, index),
            "discrete": lambda: np.int64(self.index),
            "growing": lambda: np.zeros((self.size, self.index)),
            "object": lambda: Thing(self.size, self.index),
        }[self.kind]()

    def reset(self, *, seed=None, options=None, **others):
        super().reset(seed=seed)
        self.received.append((seed, options, others))
        self.index = (options or {}).get("start", 0)
        if seed == GATED and self.gate is not None:
            assert self.gate.wait(DEADLINE)
        return self._observation(), {"size": self.size}

    def step(self, action):
        if action == GATED and self.gate is not None:
            assert self.gate.wait(DEADLINE)
        self.received.append(action)
        assert self.index < self.size, "a step after the end of the episode"
        self.index = max(self.index - 1, 0) if action == LEFT else self.index + 1
        over = self.index == self.size
        info = {"size": self.size, "flag": np.bool_(over), "value": 1 if over else 0.5}
        reward = float(over)
        return self._observation(), reward, over, False, info

    @property
    def loaded(self):
        return sorted({"torch", "tianshou", "shmvec.adapters.tianshou"} & set(sys.modules))

    def render(self, scale=1):
        return np.full((2, 2, 3), self.size * scale, np.uint8)


class Gate:
    """Closed until it is set, for processes; unlike an Event it does not mind if one is killed."""

    def __init__(self):
        self.semaphore = multiprocessing.get_context("fork").Semaphore(0)

    def set(self):
        self.semaphore.release()

    def wait(self, timeout):
        passed = self.semaphore.acquire(timeout=timeout)
        self.semaphore.release()
        return passed


class Thing:
    """An observation that NumPy cannot stack."""

    def __init__(self, size, index):
        self.size, self.index = size, index

    def __eq__(self, other):
        return (self.size, self.index) == (other.size, other.index)


def walks(sizes=(2, 3, 4, 5), **options):
    return [lambda size=size: Walk(size, **options) for size in sizes]

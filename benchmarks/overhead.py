"""What a batch step costs besides the envs: ns an env, the worker's and the parent's part together.

Steps envs that only hand out ready-made results, in this process (num_workers=0), so that neither
processes nor waiting are in it, beside a bare loop over the same env:

    python benchmarks/overhead.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

import shmvec

NUM_ENVS = 32
REPEATS = 9
SECONDS = 0.1


class Ready(gym.Env[Any, Any]):
    """Returns a copy of the same observation and info each time."""

    def __init__(self, observation_space: Any, action_space: Any, info: dict[str, Any]) -> None:
        """Samples the observation."""
        self.observation_space = observation_space
        self.action_space = action_space
        self._observation = observation_space.sample()
        self._info = info

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the observation."""
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Returns copies."""
        return self._observation.copy(), 1.0, False, False, dict(self._info)


def ns(run: Callable[[], object]) -> float:
    """Median over the repeats of the mean time of a call."""
    means = []
    for _ in range(REPEATS):
        calls, start = 0, time.perf_counter()
        while (taken := time.perf_counter() - start) < SECONDS:
            run()
            calls += 1
        means.append(1e9 * taken / calls)
    return statistics.median(means)


def main() -> None:
    """Prints a table."""
    box, discrete = gym.spaces.Box, gym.spaces.Discrete
    number = np.float64(1.5)
    cases = {
        "4 floats, Discrete": (box(-1, 1, (4,)), discrete(2), {}),
        "17 doubles, 6 floats": (box(-1, 1, (17,), np.float64), box(-1, 1, (6,)), {}),
        "... and 4 float infos": (
            box(-1, 1, (17,), np.float64),
            box(-1, 1, (6,)),
            {f"key{i}": number for i in range(4)},
        ),
        "... and 8 float infos": (
            box(-1, 1, (17,), np.float64),
            box(-1, 1, (6,)),
            {f"key{i}": number for i in range(8)},
        ),
        "84x84x4 bytes, Discrete": (box(0, 255, (4, 84, 84), np.uint8), discrete(6), {}),
    }
    print(f"{NUM_ENVS} envs{'':23} env alone   added by the vector env, an env")
    for name, case in cases.items():
        envs = shmvec.ShmVectorEnv([lambda case=case: Ready(*case)] * NUM_ENVS, num_workers=0)
        envs.reset()
        actions = envs.action_space.sample()
        listed, env = list(actions), Ready(*case)

        def alone(env: Ready = env, listed: list[Any] = listed) -> None:
            for action in listed:
                env.step(action)

        bare = ns(alone)
        whole = ns(lambda envs=envs, actions=actions: envs.step(actions))
        print(f"{name:30} {bare / NUM_ENVS:9.0f} ns {(whole - bare) / NUM_ENVS:16.0f} ns")
        envs.close()


if __name__ == "__main__":
    main()

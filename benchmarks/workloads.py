"""The envs that benchmarks/matrix.py and costs.py step: some real, some of known cost."""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec import bench

__all__ = ["ENVPOOL", "WORKLOADS", "work"]

EnvFns = Sequence[Callable[[], gym.Env[Any, Any]]]


class Work(gym.Env[Any, Any]):
    """An env of known cost: it computes checksums of so many bytes."""

    action_space = gym.spaces.Discrete(2)

    def __init__(
        self, step: int, reset: int, shape: tuple[int, ...] = (4,), length: int = 0
    ) -> None:
        """Takes the bytes of work of a step and of a reset; episodes of 0 steps never end."""
        kind = np.uint8 if len(shape) > 1 else np.float32
        self.observation_space = gym.spaces.Box(0, 1, shape, kind)
        self._observation = np.zeros(shape, kind)
        self._step, self._reset = bytes(step), bytes(reset)
        self._length = length
        self._count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Works as long as a reset takes."""
        if self._reset:
            zlib.crc32(self._reset)
        self._count = 0
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Works as long as a step takes."""
        if self._step:
            zlib.crc32(self._step)
        self._count += 1
        return self._observation, 0.0, self._count == self._length, False, {}


def work(us: float) -> int:
    """How many bytes have a checksum that takes so many µs while nothing disturbs it.

    An amount, so that disturbance adds to the time.
    """
    return int(us * _bytes_per_us())


@functools.cache
def _bytes_per_us() -> float:
    """Measured once, in the main process: all contenders get the same work."""
    probe = bytes(1 << 16)
    best = float("inf")
    for _ in range(2000):
        start = time.perf_counter()
        zlib.crc32(probe)
        best = min(best, time.perf_counter() - start)
    return len(probe) / (1e6 * best)


def _works(
    step_us: float, reset_times: float = 1, **kwargs: Any
) -> Callable[[int], list[Callable[[], Any]]]:
    return lambda n: [partial(Work, work(step_us), work(step_us * reset_times), **kwargs)] * n


def _uneven(n: int) -> list[Callable[[], Any]]:
    """One env in eight takes ten times longer."""
    slow, fast = partial(Work, work(200), 0), partial(Work, work(20), 0)
    return [slow if i % 8 == 7 else fast for i in range(n)]


def _ant() -> gym.Env[Any, Any]:
    import mujoco

    mujoco.set_mju_user_warning(lambda message: None)
    return gym.make("Ant-v5")


def _real(name: str) -> Callable[[int], list[Callable[[], Any]]]:
    return lambda n: [bench.WORKLOADS[name].make] * n


# From a number of envs to the functions that make them.
WORKLOADS: dict[str, Callable[[int], EnvFns]] = {
    "noop": _works(0),
    "noop-image": _works(0, shape=(84, 84, 4)),
    "work20": _works(20),
    "work50": _works(50),
    "work1000": _works(1000),
    "uneven": _uneven,
    "slow-resets": _works(20, reset_times=50, length=100),
    "cartpole": _real("CartPole-v1"),
    "halfcheetah": _real("HalfCheetah-v5"),
    "ant": lambda n: [_ant] * n,
    "pong": _real("ALE/Pong-v5"),
}

# What EnvPool has of them.
ENVPOOL = {"cartpole": "CartPole-v1", "halfcheetah": "HalfCheetah-v4", "ant": "Ant-v4"}

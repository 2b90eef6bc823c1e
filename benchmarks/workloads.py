"""What the benchmarks step, and their common command line: bench's envs, and some of known cost."""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec._commands.bench import WORKLOADS as REAL
from shmvec._commands.bench import Workload

__all__ = [
    "ENVPOOL",
    "WORKLOADS",
    "arguments",
    "cartpole",
    "cheetah",
    "clipped",
    "pong",
    "slow_cartpole",
]


class Work(gym.Env[Any, Any]):
    """An env of known cost: it computes checksums of so many bytes."""

    action_space = gym.spaces.Discrete(2)

    def __init__(
        self, step: int, reset: int = 0, shape: tuple[int, ...] = (4,), length: int = 0
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


def _bytes_per_us() -> float:
    """Of which a checksum is computed while nothing disturbs it."""
    probe = bytes(1 << 16)
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        zlib.crc32(probe)
        best = min(best, time.perf_counter() - start)
    return len(probe) / (1e6 * best)


def _ant() -> gym.Env[Any, Any]:
    import mujoco

    mujoco.set_mju_user_warning(lambda message: None)
    return gym.make("Ant-v5")


def cartpole() -> gym.Env[Any, Any]:
    """CartPole as CleanRL's ppo.py and dqn.py wrap it."""
    return gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))


class _Longer(gym.Wrapper[Any, Any, Any, Any]):
    """An env each of whose steps computes for so many seconds more, of a core's time."""

    def __init__(self, env: gym.Env[Any, Any], more_s: float) -> None:
        super().__init__(env)
        self._more_s = more_s

    def step(self, action: Any) -> Any:
        end = time.thread_time() + self._more_s
        while time.thread_time() < end:
            pass
        return self.env.step(action)


def slow_cartpole() -> gym.Env[Any, Any]:
    """``cartpole``, whose steps take a millisecond more."""
    return _Longer(cartpole(), 1e-3)


def cheetah() -> gym.Env[Any, Any]:
    """HalfCheetah as CleanRL's ppo_continuous_action.py wraps it."""
    env: Any = gym.wrappers.RecordEpisodeStatistics(REAL["HalfCheetah-v5"].make())
    env = gym.wrappers.NormalizeObservation(gym.wrappers.ClipAction(env))
    env = gym.wrappers.TransformObservation(env, clipped, env.observation_space)
    return gym.wrappers.TransformReward(gym.wrappers.NormalizeReward(env), clipped)


def clipped(value: Any) -> Any:
    """Between -10 and 10."""
    return value.clip(-10, 10)


def pong() -> gym.Env[Any, Any]:
    """Pong as CleanRL's ppo_atari.py wraps it: 84 x 84, four frames."""
    env = gym.wrappers.RecordEpisodeStatistics(REAL["ALE/Pong-v5"].make())
    return gym.wrappers.TransformReward(env, _sign)


def _sign(reward: Any) -> float:
    return float((reward > 0) - (reward < 0))


_US = _bytes_per_us()  # measured once: all contenders get the same amounts, which disturbance slows
_FAST, _SLOW = (partial(Work, int(us * _US)) for us in (20, 200))

WORKLOADS = {
    **REAL,
    "Noop-image": Workload(partial(Work, 0, shape=(84, 84, 4))),
    **{f"Work-{us}": Workload(partial(Work, int(us * _US))) for us in (20, 50, 1000)},
    "Uneven": Workload(_FAST, others=(*[_FAST] * 6, _SLOW)),  # one of eight is ten times slower
    "Slow-resets": Workload(partial(Work, int(20 * _US), int(1000 * _US), length=100)),
    "Ant-v5": Workload(_ant, ("mujoco",)),
    "CartPole-wrapped": Workload(cartpole),  # these as training scripts have them
    "HalfCheetah-wrapped": Workload(cheetah, ("mujoco",)),
    "Pong-wrapped": Workload(pong, REAL["ALE/Pong-v5"].modules),
}

# What EnvPool has of them.
ENVPOOL = {"CartPole-v1": "CartPole-v1", "HalfCheetah-v5": "HalfCheetah-v4", "Ant-v5": "Ant-v4"}


def arguments(
    doc: str, workloads: Sequence[str], nums_envs: Sequence[int], seconds: float = 2.0
) -> argparse.ArgumentParser:
    """A command line with what all benchmarks let the user choose, and these defaults."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(workloads))
    parser.add_argument("--num-envs", nargs="+", type=int, default=list(nums_envs))
    parser.add_argument("--seconds", type=float, default=seconds, help="for each contender")
    return parser

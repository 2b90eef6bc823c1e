"""ShmVectorEnv and every peer, each through its own public API, as contenders of a race.

A peer that is not installed raises ImportError when it is started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from harness import ENVPOOL

import shmvec
from shmvec._commands.measuring import Compute, Stepper, vector_env

__all__ = [
    "CPP",
    "Start",
    "every_step",
    "of_four",
    "of_tianshou",
    "ours",
    "peers",
    "tianshous",
]

CPP = " (C++)"  # in the names of those that do not run Python envs

# Starts a contender, whose parent computes between steps.
Start = Callable[["Compute | None"], Stepper]


def of_gymnasium(make: Callable[[], Any]) -> Start:
    """A system with Gymnasium's interface."""
    return partial(vector_env, make)


def ours(fns: Sequence[Any], **options: Any) -> Start:
    """ShmVectorEnv with some options."""
    return of_gymnasium(partial(shmvec.ShmVectorEnv, fns, **options))


def every_step(
    n: int,
    start: Callable[[], Any],
    sample: Callable[[Any], Any],
    step: Callable[[Any, Any], object] = lambda envs, actions: envs.step(actions),
) -> Start:
    """A system that resets what is over in the same step, so that each one counts.

    Args:
        n: Number of envs.
        start: Makes the vector env and resets it.
        sample: Actions for it.
        step: Steps it with actions.
    """

    def contender(compute: Compute | None) -> Stepper:
        envs = start()

        def one(actions: Any) -> None:
            step(envs, actions)

        return Stepper(one, lambda: sample(envs), n, compute=compute, close=envs.close)

    return contender


def of_four(n: int, make: Callable[[], Any]) -> Start:
    """A system whose step returns observations, rewards, dones and infos, and resets what is over.

    Such are OpenAI baselines and Stable-Baselines3.
    """

    def start() -> Any:
        envs = make()
        envs.action_space.seed(0)
        envs.reset()
        return envs

    return every_step(n, start, lambda envs: [envs.action_space.sample() for _ in range(n)])


def _sb3(fns: Sequence[Any]) -> Any:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    # By its default each worker imports torch first: minutes for 32.
    return SubprocVecEnv(list(fns), start_method="fork")


def of_tianshou(n: int, make: Callable[[], Any]) -> Start:
    """A vector env with Tianshou's interface, whose users reset what is over."""

    def start() -> Any:
        envs = make()
        envs.action_space[0].seed(0)
        envs.reset()
        return envs

    def step(envs: Any, actions: Any) -> None:
        results = envs.step(actions)
        done = results[2] | results[3]
        if done.any():
            envs.reset(np.flatnonzero(done))

    def sample(envs: Any) -> Any:
        return np.array([envs.action_space[0].sample() for _ in range(n)])

    return every_step(n, start, sample, step)


def tianshous(kind: str, fns: Sequence[Any]) -> Start:
    """One of Tianshou's own vector envs, by the name of its class."""

    def make() -> Any:
        import tianshou.env

        return getattr(tianshou.env, kind)(list(fns))

    return of_tianshou(len(fns), make)


def _envpool(task: str, n: int) -> Start:
    def contender(compute: Compute | None) -> Stepper:
        import envpool

        envs = envpool.make_gymnasium(task, num_envs=n)
        envs.action_space.seed(0)
        envs.reset()
        return Stepper(
            lambda actions: envs.step(actions)[2:4],
            lambda: np.array([envs.action_space.sample() for _ in range(n)]),
            n,
            compute=compute,
            close=envs.close,
        )

    return contender


def _ale(n: int) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("pong", n)


def peers(workload: str, fns: Sequence[Any]) -> dict[str, Start]:
    """What starts each, by name."""
    n = len(fns)
    starts = {
        "AsyncVectorEnv": of_gymnasium(partial(gym.vector.AsyncVectorEnv, fns)),
        "SyncVectorEnv": of_gymnasium(partial(gym.vector.SyncVectorEnv, fns)),
        "SB3 SubprocVecEnv": of_four(n, partial(_sb3, fns)),
        "Tianshou SubprocVectorEnv": tianshous("SubprocVectorEnv", fns),
        "Tianshou ShmemVectorEnv": tianshous("ShmemVectorEnv", fns),
    }
    if workload in ENVPOOL:
        starts["EnvPool" + CPP] = _envpool(ENVPOOL[workload], n)
    if workload == "ALE/Pong-v5":
        starts["ALE AtariVectorEnv" + CPP] = of_gymnasium(partial(_ale, n))
    return starts

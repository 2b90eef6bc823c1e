"""ShmVectorEnv and every peer, each through its own public API, as something that is stepped.

A peer that is not installed raises ImportError when it is made.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from workloads import ENVPOOL

import shmvec

__all__ = ["CPP", "Contender", "of_four", "of_tianshou", "ours", "peers", "tianshous"]

CPP = " (C++)"  # in the names of those that do not run Python envs
_BATCHES = 16  # of actions, sampled beforehand

Make = Callable[[], "Contender"]


class Contender:
    """A vector env of some system, which is stepped in slices.

    Attributes:
        name: Of the system and its setting.
        close: Closes it.
        idle: CPU use of its processes while nobody stepped it, a share of one core.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Any],
        step: Callable[[Any, Any], Any],
        done: Callable[[Any], np.ndarray],
        sample: Callable[[Any], Any],
        resets_are_steps: bool = False,
    ) -> None:
        """Starts it.

        Args:
            name: Of the system.
            start: Makes the vector env and resets it.
            step: Steps the vector env with a batch of actions; returns its results.
            done: From these, which envs' episodes are over.
            sample: A batch of actions.
            resets_are_steps: Whether the step that ends an episode also resets, so that each step
                counts. Else an env that was done is reset by the next one, which does not count.
        """
        self.name = name
        before = _children()
        envs = start()
        self._processes = _children() - before
        self.close = envs.close
        self._actions = [sample(envs) for _ in range(_BATCHES)]
        self._step, self._done_of = lambda actions: step(envs, actions), done
        self._resets_are_steps = resets_are_steps
        self._done: np.ndarray | None = None
        self.idle = 0.0
        self._batches: list[np.ndarray] = []
        self._cycles: list[float] = []
        self._rates: list[float] = []
        self._cpu: list[float] = []

    def run(self, seconds: float, compute: bytes, keep: bool = True) -> None:
        """One slice: steps, and computes between steps what takes the checksum of `compute`.

        What the benchmark itself does between steps is in no figure.
        """
        step, actions, clock = self._step, self._actions, time.perf_counter
        times: list[float] = []
        steps, elapsed = 0, 0.0
        cpu = self._cpu_seconds()
        while elapsed < seconds:
            batch = actions[len(times) % _BATCHES]
            start = clock()
            results = step(batch)
            stepped = clock()
            if compute:
                zlib.crc32(compute)
                elapsed += clock() - start
            else:
                elapsed += stepped - start
            times.append(stepped - start)
            done = self._done_of(results)
            over = 0 if self._done is None or self._resets_are_steps else int(self._done.sum())
            steps += len(done) - over
            self._done = done
        if keep:
            self._batches.append(np.asarray(times))
            self._cycles.append(elapsed / len(times))
            self._rates.append(steps / elapsed)
            self._cpu.append(1e6 * (self._cpu_seconds() - cpu) / max(1, steps))

    def rest(self, measured: Callable[[], object]) -> None:
        """Lets `measured` wait, and takes what its processes use meanwhile."""
        before, start = _cpu_seconds(self._processes), time.perf_counter()
        measured()
        used = _cpu_seconds(self._processes) - before
        self.idle = used / (time.perf_counter() - start)

    def _cpu_seconds(self) -> float:
        return time.process_time() + _cpu_seconds(self._processes)

    def row(self, limit: float) -> dict[str, Any]:
        """The figures of all slices."""
        means = [1e6 * float(times.mean()) for times in self._batches]
        everything = 1e6 * np.concatenate(self._batches)
        median = statistics.median(means)
        rate = statistics.median(self._rates)
        return {
            "system": self.name,
            "batch_us": median,
            "spread": (max(means) - min(means)) / median,
            "p50_us": float(np.percentile(everything, 50)),
            "p99_us": float(np.percentile(everything, 99)),
            "cycle_us": 1e6 * statistics.median(self._cycles),
            "steps_per_s": rate,
            "share_of_limit": rate / limit,
            "cpu_s_per_million": statistics.median(self._cpu),
            "idle_cpu": self.idle,
        }


def _children() -> set[int]:
    """Living processes that this one has started, and that those have."""
    found: set[int] = set()
    parents = ["self"]
    while parents:
        for path in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
            try:
                pids = {int(pid) for pid in path.read_text().split()}
            except OSError:
                continue
            parents += [str(pid) for pid in pids - found]
            found |= pids
    return found


def _cpu_seconds(pids: set[int]) -> float:
    """CPU time that processes have used so far."""
    total = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                total += int(path.read_text().split()[0])
            except OSError:
                continue
    return 1e-9 * total


def _vector_env(name: str, make: Callable[[], Any]) -> Make:
    """A system with Gymnasium's interface."""

    def start() -> Any:
        envs = make()
        envs.action_space.seed(0)
        envs.reset(seed=0)
        return envs

    return lambda: Contender(
        name,
        start,
        lambda envs, actions: envs.step(actions),
        lambda results: np.asarray(results[2]) | np.asarray(results[3]),
        lambda envs: envs.action_space.sample(),
    )


def ours(name: str, fns: Sequence[Any], **options: Any) -> Make:
    """ShmVectorEnv with some options."""
    return _vector_env(name, lambda: shmvec.ShmVectorEnv(list(fns), **options))


def of_four(name: str, n: int, make: Callable[[], Any]) -> Make:
    """A system whose step returns observations, rewards, dones and infos, and resets what is over.

    Such are OpenAI baselines and Stable-Baselines3.
    """

    def start() -> Any:
        envs = make()
        envs.action_space.seed(0)
        envs.reset()
        return envs

    return lambda: Contender(
        name,
        start,
        lambda envs, actions: envs.step(actions),
        lambda results: np.asarray(results[2]),
        lambda envs: [envs.action_space.sample() for _ in range(n)],
        resets_are_steps=True,
    )


def _sb3(fns: Sequence[Any]) -> Make:
    def make() -> Any:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        return SubprocVecEnv(list(fns))

    return of_four("SB3 SubprocVecEnv", len(fns), make)


def of_tianshou(name: str, n: int, make: Callable[[], Any]) -> Make:
    """A vector env with Tianshou's interface, whose users reset what is over."""

    def start() -> Any:
        envs = make()
        envs.action_space[0].seed(0)
        envs.reset()
        return envs

    def step(envs: Any, actions: Any) -> Any:
        results = envs.step(actions)
        done = results[2] | results[3]
        if done.any():
            envs.reset(np.flatnonzero(done))
        return done

    return lambda: Contender(
        name,
        start,
        step,
        lambda done: done,
        lambda envs: np.array([envs.action_space[0].sample() for _ in range(n)]),
        resets_are_steps=True,
    )


def tianshous(kind: str, fns: Sequence[Any]) -> Make:
    """One of Tianshou's own vector envs, by the name of its class."""

    def make() -> Any:
        import tianshou.env

        return getattr(tianshou.env, kind)(list(fns))

    return of_tianshou(f"Tianshou {kind}", len(fns), make)


def _envpool(task: str, n: int) -> Make:
    def start() -> Any:
        import envpool

        envs = envpool.make_gymnasium(task, num_envs=n)
        envs.action_space.seed(0)
        envs.reset()
        return envs

    return lambda: Contender(
        "EnvPool" + CPP,
        start,
        lambda envs, actions: envs.step(actions),
        lambda results: np.asarray(results[2] | results[3]),
        lambda envs: np.array([envs.action_space.sample() for _ in range(n)]),
    )


def _ale(n: int) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("pong", n)


def peers(workload: str, fns: Sequence[Any]) -> dict[str, Make]:
    """By the name of what must be installed, how each is made."""
    n = len(fns)
    made = {
        "AsyncVectorEnv": _vector_env("AsyncVectorEnv", lambda: gym.vector.AsyncVectorEnv(fns)),
        "SyncVectorEnv": _vector_env("SyncVectorEnv", lambda: gym.vector.SyncVectorEnv(fns)),
        "stable_baselines3": _sb3(fns),
        "tianshou (Subproc)": tianshous("SubprocVectorEnv", fns),
        "tianshou (Shmem)": tianshous("ShmemVectorEnv", fns),
    }
    if workload in ENVPOOL:
        made["envpool"] = _envpool(ENVPOOL[workload], n)
    if workload == "pong":
        made["ale_py.vector_env"] = _vector_env("ALE AtariVectorEnv" + CPP, lambda: _ale(n))
    return made

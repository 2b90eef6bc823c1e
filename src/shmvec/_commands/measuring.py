"""Measuring vector envs fairly: slices that take turns, and the limit of what can be reached.

The limit: free-running loops, one process a core, without any communication. A vector env cannot be
faster on these cores.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TextIO

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

import shmvec
from shmvec._shared.scheduling import usable_cores

__all__ = ["Compute", "Limit", "Progress", "Slice", "VectorContender", "machine"]

_WARM_UP_S = 0.1
_CHUNK_S = 0.02  # between two looks at the clock
_ACTION_BATCHES = 16  # sampled beforehand, so that sampling is not measured


@dataclass(frozen=True)
class Slice:
    """One turn of one contender.

    Attributes:
        batch_us: Mean time of a batch step, with what the parent computed after it.
        steps_per_s: Env steps; resets made by autoreset are none.
        compute_us: Mean time that the parent computed after a batch step.
    """

    batch_us: float
    steps_per_s: float
    compute_us: float = 0.0


class Compute:
    """A fixed amount of work for the parent, of about so many µs when nothing disturbs it."""

    def __init__(self, us: float) -> None:
        """Finds out how many turns of a loop that is."""
        self._turns = 1000
        self._turns = max(1, int(self._turns * us / min(self() for _ in range(200))))

    def __call__(self) -> float:
        """Works; returns how long it took, in µs."""
        start = time.perf_counter_ns()
        for _ in range(self._turns):
            pass
        return (time.perf_counter_ns() - start) / 1000


class VectorContender:
    """A vector env that is stepped with random actions."""

    def __init__(self, envs: VectorEnv[Any, Any, Any], compute: Compute | None) -> None:
        """Resets the vector env, and steps it for a while.

        Args:
            envs: The vector env; closed by :meth:`close`.
            compute: What the parent does between steps.
        """
        self.envs = envs
        self._compute = compute
        envs.action_space.seed(0)
        self._actions = [envs.action_space.sample() for _ in range(_ACTION_BATCHES)]
        envs.reset(seed=0)
        self._done = np.zeros(envs.num_envs, bool)
        self._chunk = 1
        self.run(_WARM_UP_S)

    def run(self, seconds: float) -> Slice:
        """One turn, of at least so many seconds."""
        envs, actions, compute = self.envs, self._actions, self._compute
        batches = steps = 0
        elapsed = computed = 0.0
        while elapsed < seconds:
            ends = []
            start = time.perf_counter()
            for turn in range(self._chunk):
                _, _, terminations, truncations, _ = envs.step(actions[turn % _ACTION_BATCHES])
                ends.append((terminations, truncations))
                if compute is not None:
                    computed += compute()
            taken = time.perf_counter() - start
            elapsed += taken
            batches += self._chunk
            for terminations, truncations in ends:
                steps += envs.num_envs - int(self._done.sum())
                self._done = terminations | truncations
            self._chunk = max(1, min(10_000, int(self._chunk * _CHUNK_S / taken)))
        return Slice(1e6 * elapsed / batches, steps / elapsed, computed / batches)

    def close(self) -> None:
        """Closes the vector env."""
        self.envs.close()


class Limit:
    """Free-running loops, one process a core: what no vector env can exceed on these cores."""

    def __init__(self, makes: Sequence[Callable[[], gym.Env[Any, Any]]], cores: int) -> None:
        """Starts the processes.

        Args:
            makes: Make the envs that each process steps, by turns.
            cores: How many processes.
        """
        context = multiprocessing.get_context("spawn")
        packed = cloudpickle.dumps(list(makes))
        self._pipes, self._processes = [], []
        for _ in range(cores):
            mine, theirs = context.Pipe()
            process = context.Process(target=_free_run, args=(packed, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self.run(_WARM_UP_S)

    def run(self, seconds: float) -> Slice:
        """One turn: the steps a second of all processes together."""
        for pipe in self._pipes:
            pipe.send(seconds)
        rate = 0.0
        for pipe in self._pipes:
            steps, elapsed = pipe.recv()
            rate += steps / elapsed
        return Slice(0.0, rate)

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has ended with an error already
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join()


def _free_run(packed: bytes, pipe: Connection) -> None:
    """Steps envs for as long as told, again and again; answers (steps, seconds)."""
    envs = [make() for make in cloudpickle.loads(packed)]
    envs[0].action_space.seed(0)
    actions = [envs[0].action_space.sample() for _ in range(64)]
    turns = [(envs[turn % len(envs)], action) for turn, action in enumerate(actions)]
    for env in envs:
        env.reset(seed=0)
    while (seconds := pipe.recv()) is not None:
        steps = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            for env, action in turns:
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            steps += len(turns)
        pipe.send((steps, time.perf_counter() - start))
    for env in envs:
        env.close()


class Progress:
    """A line that says what is being done: rewritten on a terminal, else printed once."""

    def __init__(self, stream: TextIO | None, title: str) -> None:
        """Begins something that is called `title`."""
        self._stream = stream
        self._title = title
        if stream is not None and not stream.isatty():
            print(title, file=stream, flush=True)

    def __call__(self, what: str) -> None:
        """Says what is being done now."""
        if self._stream is not None and self._stream.isatty():
            print(f"\r\x1b[K{self._title}: {what}", end="", file=self._stream, flush=True)

    def done(self) -> None:
        """Removes the line."""
        if self._stream is not None and self._stream.isatty():
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def machine() -> dict[str, Any]:
    """What a measurement belongs to: processor, cores and versions."""
    return {
        "cpu": _cpu_model(),
        "usable_cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "shmvec": shmvec.__version__,
        "gymnasium": gym.__version__,
        "numpy": np.__version__,
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

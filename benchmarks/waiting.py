"""Envs that wait: many at once in a worker, resets ahead, and what both cost envs that compute.

    pip install 'shmvec[bench]' torchrl        # PyTorch RL is left out where it is missing
    python benchmarks/waiting.py                             # all parts
    python benchmarks/waiting.py --part asleep --num-envs 1000
    python benchmarks/waiting.py --part resets compute

`asleep`: a step sleeps 50 ms, 20 more or less, drawn anew each time. A batch step in lockstep
cannot take less than the longest of them, which is printed. Beside shmvec with two workers, by
threads and by coroutines: one process an env (AsyncVectorEnv, and shmvec without overlap) and
PyTorch RL's AsyncEnvPool, as far as they go. Memory is what all processes have more than before,
divided by the number of envs, where pages that n processes share count as one nth.

`resets`: 8 envs in two workers, a step sleeps 20 ms, a reset 2 s, an episode has 100 steps; the
limit is the steps alone. `compute`: CartPole-v1, whose steps only compute.

Contenders take turns; the table has medians and spreads, (largest - smallest) / median.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv
from harness import memory

from shmvec import ShmVectorEnv
from shmvec._commands.measuring import (
    LIMIT,
    Slice,
    cells,
    described,
    line,
    machine,
    race,
    vector_env,
)
from shmvec._cores import descendants

PARTS = ("asleep", "resets", "compute")
STEP_S, SPREAD_S = 0.050, 0.020
MOST_PROCESSES = 64  # for contenders that have one for each env


class Sleeper(gym.Env[Any, Any]):
    """Sleeps in its steps and resets."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(
        self,
        step_s: float = STEP_S,
        spread_s: float = SPREAD_S,
        reset_s: float = 0.0,
        length: int = 0,
    ) -> None:
        """Takes how long it sleeps, and how many steps an episode has; 0: it has no end."""
        self._step_s, self._spread_s, self._reset_s = step_s, spread_s, reset_s
        self._length = length

    def _reset(self, seed: int | None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._count = 0
        return np.zeros(4, np.float32), {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Sleeps, and begins an episode."""
        time.sleep(self._reset_s)
        return self._reset(seed)

    def _drawn(self) -> float:
        return self._step_s + self.np_random.uniform(-self._spread_s, self._spread_s)

    def _result(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._count += 1
        return np.zeros(4, np.float32), 1.0, self._count == self._length, False, {}

    def step(self, action: Any) -> Any:
        """Sleeps."""
        time.sleep(self._drawn())
        return self._result()


class AsyncSleeper(Sleeper):
    """The same as a coroutine."""

    async def step(self, action: Any) -> Any:
        """Sleeps."""
        await asyncio.sleep(self._drawn())
        return self._result()


class Rounds:
    """A contender that makes batch steps, and has noted what memory its start took."""

    def __init__(
        self, start: Callable[[], tuple[Callable[[], object], Callable[[], object]]], num_envs: int
    ) -> None:
        """Takes what starts it: it returns functions that make a batch step, and close it."""
        before = _memory_mb()
        self._step, self.close = start()
        self._num_envs = num_envs
        self.mb_an_env = (_memory_mb() - before) / num_envs

    def run(self, seconds: float) -> Slice:
        """Makes batch steps for at least so many seconds."""
        start, batches = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < seconds or batches == 0:
            self._step()
            batches += 1
        return Slice(1e6 * elapsed / batches, batches * self._num_envs / elapsed)


def _memory_mb() -> float:
    return sum(memory(pid).pss for pid in (os.getpid(), *descendants(os.getpid())))


def _vector(make: Callable[[], Any], num_envs: int) -> Any:
    envs = make()
    envs.reset(seed=0)
    actions = np.zeros(num_envs, np.int64)
    return partial(envs.step, actions), envs.close


def _torchrl(num_envs: int) -> Any:
    from torchrl.envs import AsyncEnvPool, GymWrapper

    def make() -> Any:
        return GymWrapper(Sleeper())

    pool = AsyncEnvPool([make] * num_envs, backend="threading")
    state = pool.rand_action(pool.reset())
    return partial(pool.step, state), pool.close


def asleep(num_envs: int, seconds: float, rounds: int) -> None:
    """Prints the table of envs that sleep."""
    few = min(num_envs, MOST_PROCESSES)

    def ours(kind: type[Sleeper], number: int, **options: Any) -> Callable[[], Rounds]:
        make = partial(ShmVectorEnv, [kind] * number, **options)
        return partial(Rounds, partial(_vector, make, number), number)

    gymnasium = partial(AsyncVectorEnv, [Sleeper] * few)
    contenders: dict[Any, tuple[int, Callable[[], Rounds]]] = {
        f"shmvec, overlap={num_envs}": (
            num_envs,
            ours(Sleeper, num_envs, num_workers=2, overlap=num_envs),
        ),
        'shmvec, overlap="auto"': (
            num_envs,
            ours(Sleeper, num_envs, num_workers=2, overlap="auto"),
        ),
        "shmvec, coroutines": (num_envs, ours(AsyncSleeper, num_envs, num_workers=2)),
        "PyTorch RL, AsyncEnvPool": (
            num_envs,
            partial(Rounds, partial(_torchrl, num_envs), num_envs),
        ),
        f"shmvec, overlap={few}": (few, ours(Sleeper, few, num_workers=2, overlap=few)),
        "shmvec, a process an env": (few, ours(Sleeper, few, num_workers=few)),
        "AsyncVectorEnv": (few, partial(Rounds, partial(_vector, gymnasium, few), few)),
    }
    left_out: dict[Any, str] = {}
    mb: dict[Any, float] = {}
    results = race(
        {name: start for name, (_, start) in contenders.items()},
        seconds,
        rounds,
        left_out=left_out,
        started=lambda running: mb.update(
            (name, each.mb_an_env) for name, each in running.items() if isinstance(each, Rounds)
        ),
    )
    print(f"\nA step sleeps {1e3 * STEP_S:.0f} ms, {1e3 * SPREAD_S:.0f} more or less\n")
    print("| system | envs | longest sleep, ms | batch step, ms | spread | MB an env |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, result in results.items():
        number = contenders[name][0]
        longest = STEP_S + SPREAD_S * (1 - 2 / (number + 1))  # on average
        print(
            line(
                name,
                number,
                f"{1e3 * longest:.1f}",
                f"{result.median.batch_us / 1e3:.1f}",
                f"{result.spread:.0%}",
                f"{mb[name]:.2f}",
            )
        )
    for name, why in left_out.items():
        print(f"{name} was left out: {why}")


def resets(rounds: int, step_s: float = 0.02, reset_s: float = 2.0, length: int = 100) -> None:
    """Prints the table of envs with long resets: the time of whole episodes, in lockstep."""
    fns = [partial(Sleeper, step_s, 0.0, reset_s, length)] * 8
    settings: Sequence[dict[str, Any]] = ({}, {"overlap": 4}, {"overlap": 4, "spare_envs": 1})
    running = {
        str(options or "the defaults"): ShmVectorEnv(fns, num_workers=2, **options)
        for options in settings
    }
    taken: dict[str, list[float]] = {name: [] for name in running}
    actions = np.zeros(len(fns), np.int64)
    for envs in running.values():
        envs.reset(seed=0)
    for turn in range(rounds):
        names = list(running)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            envs = running[name]
            start = time.perf_counter()
            for _ in range(length + 1):  # an episode, and its end
                envs.step(actions)
            taken[name].append(time.perf_counter() - start)
    print(
        f"\n8 envs: {length} steps of {1e3 * step_s:.0f} ms, a reset of {reset_s:g} s; 2 workers\n"
    )
    print("| setting | an episode of all, s | spread | steps alone, s |")
    print("|---|--:|--:|--:|")
    for name, times in taken.items():
        at_once = 1 if name == "the defaults" else 4
        limit = length * step_s * (4 / at_once)
        median = float(np.median(times))
        print(
            line(name, f"{median:.2f}", f"{(max(times) - min(times)) / median:.0%}", f"{limit:.2f}")
        )
    for envs in running.values():
        envs.close()


def compute(seconds: float, rounds: int) -> None:
    """Prints the table of envs that only compute."""
    make = partial(gym.make, "CartPole-v1")
    settings: Sequence[dict[str, Any]] = (
        {},
        {"overlap": "auto"},
        {"overlap": 16},
        {"spare_envs": 1},
    )
    starts = {
        str(options or "the defaults"): partial(
            vector_env, partial(ShmVectorEnv, [make] * 32, num_workers=2, **options)
        )
        for options in settings
    }
    results = race(starts, seconds, rounds, limit=[make])
    limit = results.pop(LIMIT)
    print("\nCartPole-v1, 32 envs, 2 workers\n")
    print("| setting | batch step, µs | spread | steps/s | of the limit | × the defaults |")
    print("|---|--:|--:|--:|--:|--:|")
    default = results["the defaults"]
    for name, result in results.items():
        print(line(name, *cells(result.figures(limit)), f"{result.ratio(default):.2f}"))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--num-envs", type=int, default=1000, help="of those that sleep")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each contender, in all")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(described(machine()))
    if "asleep" in options.part:
        asleep(options.num_envs, options.seconds, options.rounds)
    if "resets" in options.part:
        resets(options.rounds)
    if "compute" in options.part:
        compute(options.seconds, options.rounds)


if __name__ == "__main__":
    main()

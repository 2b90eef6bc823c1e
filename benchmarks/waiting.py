"""Envs that wait: many at once in a worker, resets ahead, and the cost of both for other envs.

    pip install 'shmvec[bench]' torchrl        # without torchrl, PyTorch RL is left out
    python benchmarks/waiting.py                             # all parts
    python benchmarks/waiting.py --part asleep --num-envs 1000
    python benchmarks/waiting.py --part resets builds compute

`asleep`: a step sleeps 50 ms, 20 more or less, drawn anew each time. A batch step in lockstep takes
at least the longest of them, which is printed. shmvec with two workers, by threads and by
coroutines, is compared with one process for each env (AsyncVectorEnv, and shmvec without overlap)
and PyTorch RL's AsyncEnvPool, for as many envs as these can have. Memory is the growth of all
processes' memory divided by the number of envs; a page that n processes share counts as one nth.

`resets`: 8 envs in two workers; a step sleeps 20 ms, a reset 2 s, an episode has 100 steps. The
limit is the steps alone. `builds`: 20 envs in two workers; each takes 1.5 s to make and to close.
`compute`: CartPole-v1, whose steps only compute.

Contenders take turns; the table has medians and spreads, (largest - smallest) / median.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv
from harness import Calls, arguments, heading, in_turns, memory, write_results

from shmvec import ShmVectorEnv
from shmvec._commands.measuring import (
    LIMIT,
    cells,
    describe_machine,
    machine,
    race,
    table_line,
    vector_env_stepper,
)
from shmvec._cores import descendant_ids

STEP_S, SPREAD_S = 0.050, 0.020
BUILD_S = 1.5
MAX_PROCESSES = 64  # of contenders that have one for each env


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
        """Takes the times to sleep, and the number of steps of an episode; 0: no end."""
        self._step_s, self._spread_s, self._reset_s = step_s, spread_s, reset_s
        self._length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Sleeps, and begins an episode."""
        time.sleep(self._reset_s)
        super().reset(seed=seed)
        self._count = 0
        return np.zeros(4, np.float32), {}

    def _drawn(self) -> float:
        return self._step_s + self.np_random.uniform(-self._spread_s, self._spread_s)

    def _result(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._count += 1
        return np.zeros(4, np.float32), 1.0, self._count == self._length, False, {}

    def step(self, action: Any) -> Any:
        """Sleeps."""
        time.sleep(self._drawn())
        return self._result()


class SlowToMake(Sleeper):
    """Sleeps as it is made and as it is closed."""

    def __init__(self) -> None:
        """Sleeps."""
        super().__init__()
        time.sleep(BUILD_S)

    def close(self) -> None:
        """Sleeps."""
        time.sleep(BUILD_S)


class AsyncSleeper(Sleeper):
    """Sleeps in a coroutine."""

    async def step(self, action: Any) -> Any:
        """Sleeps."""
        await asyncio.sleep(self._drawn())
        return self._result()


def _memory_mb() -> float:
    return sum(memory(pid).pss for pid in (os.getpid(), *descendant_ids(os.getpid())))


def stepping(envs: Any, steps: int = 1) -> Calls:
    """Resets envs; returns a contender whose calls make ``steps`` batch steps."""
    envs.reset(seed=0)
    actions = np.zeros(envs.num_envs, np.int64)

    def call() -> None:
        for _ in range(steps):
            envs.step(actions)

    return Calls(call, envs.close, num_envs=envs.num_envs)


def torchrl(num_envs: int) -> Calls:
    """PyTorch RL's pool of threads."""
    from torchrl.envs import AsyncEnvPool, GymWrapper

    pool = AsyncEnvPool([lambda: GymWrapper(Sleeper())] * num_envs, backend="threading")
    state = pool.rand_action(pool.reset())
    return Calls(partial(pool.step, state), pool.close, num_envs=num_envs)


def asleep(num_envs: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Measures envs that sleep, and prints their table."""
    few = min(num_envs, MAX_PROCESSES)

    def ours(kind: type[Sleeper], number: int, workers: int = 2, **options: Any) -> Calls:
        return stepping(ShmVectorEnv([kind] * number, num_workers=workers, **options))

    contenders: dict[str, tuple[int, Callable[[], Calls]]] = {
        "shmvec, coroutines": (num_envs, partial(ours, AsyncSleeper, num_envs)),
        'shmvec, overlap="auto"': (num_envs, partial(ours, Sleeper, num_envs, overlap="auto")),
        f"shmvec, overlap={num_envs}": (
            num_envs,
            partial(ours, Sleeper, num_envs, overlap=num_envs),
        ),
        "PyTorch RL, AsyncEnvPool": (num_envs, partial(torchrl, num_envs)),
        f"shmvec, overlap={few}": (few, partial(ours, Sleeper, few, overlap=few)),
        "shmvec, a process an env": (few, partial(ours, Sleeper, few, few)),
        "AsyncVectorEnv": (few, lambda: stepping(AsyncVectorEnv([Sleeper] * few))),
    }
    mb: dict[str, float] = {}

    def weighed(name: str) -> Calls:
        number, start = contenders[name]
        before = _memory_mb()
        running = start()
        mb[name] = (_memory_mb() - before) / number
        return running

    left_out: dict[str, str] = {}
    starts = {name: partial(weighed, name) for name in contenders}
    results = race(starts, seconds, rounds, left_out=left_out)
    print(f"\nA step sleeps {1e3 * STEP_S:.0f} ms, {1e3 * SPREAD_S:.0f} more or less\n")
    print(heading("system", "envs", "longest sleep, ms", "batch step, ms", "spread", "MB an env"))
    rows = []
    for name, result in results.items():
        number = contenders[name][0]
        longest = STEP_S + SPREAD_S * (1 - 2 / (number + 1))  # on average
        ms, spread = result.median.batch_us / 1e3, result.spread
        figures = f"{1e3 * longest:.1f}", f"{ms:.1f}", f"{spread:.0%}", f"{mb[name]:.2f}"
        print(table_line(name, number, *figures))
        row = {"part": "asleep", "system": name, "num_envs": number, "batch_ms": ms}
        rows.append({**row, "spread": spread, "mb_an_env": mb[name]})
    for name, why in left_out.items():
        print(f"{name} was left out: {why}")
    return rows


def resets(
    num_envs: int, seconds: float, rounds: int, step_s: float = 0.02, reset_s: float = 2.0
) -> list[dict[str, Any]]:
    """Measures whole episodes of envs with long resets, in lockstep, and prints their table."""
    length = 100
    fns = [partial(Sleeper, step_s, 0.0, reset_s, length)] * 8
    settings: Sequence[dict[str, Any]] = ({}, {"overlap": 4}, {"overlap": 4, "spare_envs": 1})
    with ExitStack() as stack:
        running = {}
        for options in settings:
            envs = ShmVectorEnv(fns, num_workers=2, **options)
            episode = stack.enter_context(closing(stepping(envs, length + 1)))  # and its end
            running[str(options or "the defaults")] = partial(episode.run, 0.0)
        results = in_turns(running, rounds)
    print(
        f"\n8 envs: {length} steps of {1e3 * step_s:.0f} ms, a reset of {reset_s:g} s; 2 workers\n"
    )
    print(heading("setting", "an episode of all, s", "spread", "steps alone, s"))
    rows = []
    for name, result in results.items():
        limit = (
            length * step_s * (4 if name == "the defaults" else 1)
        )  # of envs one after the other
        episode_s = 1e-6 * result.median.batch_us
        print(table_line(name, f"{episode_s:.2f}", f"{result.spread:.0%}", f"{limit:.2f}"))
        row = {"part": "resets", "system": name, "episode_s": episode_s}
        rows.append({**row, "spread": result.spread, "limit_s": limit})
    return rows


def builds(num_envs: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Measures starting and closing envs that are slow to make, and prints their table."""
    print(f"\n20 envs that take {BUILD_S:g} s to make, and to close\n")
    print(heading("setting", "first observation, s", "close, s"))
    settings: Sequence[dict[str, Any]]
    settings = ({}, {"overlap": 20}, {"num_workers": 20})
    rows = []
    for options in settings:
        times = []
        for _ in range(rounds):
            begin = time.monotonic()
            envs = ShmVectorEnv([SlowToMake] * 20, **{"num_workers": 2, **options})
            envs.reset(seed=0)
            ready = time.monotonic()
            envs.close()
            times.append((ready - begin, time.monotonic() - ready))
        first_s, close_s = map(median, zip(*times, strict=True))
        name = str(options or "the defaults")
        print(table_line(name, f"{first_s:.1f}", f"{close_s:.1f}"))
        rows.append({"part": "builds", "system": name, "first_s": first_s, "close_s": close_s})
    return rows


def compute(num_envs: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Measures envs that only compute, and prints their table."""
    make = partial(gym.make, "CartPole-v1")
    settings: Sequence[dict[str, Any]]
    settings = ({}, {"overlap": "auto"}, {"overlap": 16}, {"spare_envs": 1})
    starts: dict[str, Any] = {}
    for options in settings:
        ours = partial(ShmVectorEnv, [make] * 32, num_workers=2, **options)
        starts[str(options or "the defaults")] = partial(vector_env_stepper, ours)
    results = race(starts, seconds, rounds, limit=[make])
    limit = results.pop(LIMIT)
    print("\nCartPole-v1, 32 envs, 2 workers\n")
    figures = "batch step, µs", "spread", "steps/s", "of the limit", "× the defaults"
    print(heading("setting", *figures))
    rows = []
    for name, result in results.items():
        found, ratio = result.figures(limit), result.ratio(results["the defaults"])
        print(table_line(name, *cells(found), f"{ratio:.2f}"))
        rows.append({"part": "compute", "system": name, **found, "times_defaults": ratio})
    return rows


PARTS = {"asleep": asleep, "resets": resets, "builds": builds, "compute": compute}


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__, seconds=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--num-envs", type=int, default=1000, help="of those that sleep")
    options = parser.parse_args()
    print(describe_machine(machine()))
    rows = []
    for part in options.part:
        rows += PARTS[part](options.num_envs, options.seconds, options.rounds)
        write_results(options.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()

"""Envs that tasks of an event loop await, compared with send/recv and with threads.

    python benchmarks/awaiting.py
    python benchmarks/awaiting.py --part waiting --num-envs 256 --rounds 9

`model`: a CartPole's step computes for a millisecond more, and a model on a server takes 5 ms. Each
task awaits the model between its steps; the loops without tasks sleep as long for a batch. The
limit is loops without a model, one a core. `waiting`: a step sleeps 100 ms, in two workers.

`to_thread` steps single envs of this process in threads, one for each env. The lag of an event loop
is how late a timer of 5 ms fires while the tasks run. Contenders take turns; the table has medians
and spreads, (largest - smallest) / median.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from harness import Asleep, Calls, arguments, heading, slow_cartpole, write_results

from shmvec import ShmVectorEnv, aio
from shmvec._commands.measuring import (
    LIMIT,
    Result,
    cells,
    describe_machine,
    machine,
    race,
    table_line,
)

MODEL_S = 0.005
STEP_S = 0.1
TIMER_S = 0.005
STEPS = 4  # of each env, in a call

Step = Callable[[int], Awaitable[Any]]


class Tasks:
    """A contender with a task for each env, in its own event loop."""

    def __init__(self, open_envs: Any, num_envs: int, model_s: float) -> None:
        """Enters ``open_envs``, which returns a coroutine function that steps an env.

        Args:
            open_envs: An asynchronous context manager. The function that it returns takes an env's
                index, and resets an env whose episode is over.
            num_envs: Number of envs.
            model_s: Seconds that a model takes.
        """
        self._loop = asyncio.new_event_loop()
        self._open, self._model_s = open_envs, model_s
        self._step: Step = self._loop.run_until_complete(open_envs.__aenter__())
        self._num_envs = num_envs
        self.lags: list[float] = []
        self._calls = Calls(
            lambda: self._loop.run_until_complete(self._play()),
            self._end,
            num_envs=num_envs,
            batches=STEPS,
        )
        self.run, self.close = self._calls.run, self._calls.close

    def _end(self) -> None:
        self._loop.run_until_complete(self._open.__aexit__(None, None, None))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _play(self) -> None:
        watch = asyncio.ensure_future(self._watch())
        await asyncio.gather(*map(self._task, range(self._num_envs)))
        watch.cancel()

    async def _task(self, env: int) -> None:
        for _ in range(STEPS):
            if self._model_s:
                await asyncio.sleep(self._model_s)
            await self._step(env)

    async def _watch(self) -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(TIMER_S)
            self.lags.append(time.perf_counter() - begin - TIMER_S)


class Awaited:
    """The steps of ``shmvec.aio``."""

    def __init__(self, fns: Sequence[Callable[[], Any]], **options: Any) -> None:
        """Takes the functions that make the envs."""
        self._envs = aio.make(fns, **options)

    async def __aenter__(self) -> Step:
        """Starts and resets the envs."""
        await self._envs.__aenter__()
        await asyncio.gather(*(env.reset(seed=env.index) for env in self._envs))
        return self._step

    async def _step(self, index: int) -> None:
        _, _, terminated, truncated, _ = await self._envs[index].step(1)
        if terminated or truncated:
            await self._envs[index].reset()

    async def __aexit__(self, *error: object) -> None:
        """Closes them."""
        await self._envs.close()


class Threads:
    """The steps of single envs in threads of this process."""

    def __init__(self, fns: Sequence[Callable[[], gym.Env[Any, Any]]]) -> None:
        """Makes the envs."""
        self._envs = [make() for make in fns]
        for env in self._envs:
            env.reset(seed=0)

    async def __aenter__(self) -> Step:
        """Gives ``to_thread`` a thread for each env."""
        executor = ThreadPoolExecutor(len(self._envs))
        asyncio.get_running_loop().set_default_executor(executor)
        return self._step

    async def _step(self, index: int) -> None:
        env = self._envs[index]
        _, _, terminated, truncated, _ = await asyncio.to_thread(env.step, 1)
        if terminated or truncated:
            await asyncio.to_thread(env.reset)

    async def __aexit__(self, *error: object) -> None:
        """Closes them."""
        for env in self._envs:
            env.close()


def batches(fns: Sequence[Callable[[], Any]], model_s: float, size: int, **options: Any) -> Calls:
    """The loop of ``recv`` and ``send``, with a model for each batch."""
    envs = ShmVectorEnv(fns, batch_size=size, **options)
    envs.async_reset(seed=0)
    number = len(fns)
    for _ in range(number // size):
        envs.recv()

    def call() -> None:
        envs.send(np.ones(number, np.int64), np.arange(number))
        for left in range(number * STEPS - size, -1, -size):
            ids = envs.recv()[-1]["env_id"]
            time.sleep(model_s)
            if left > number - size:  # else no env may be left in flight at the end
                envs.send(np.ones(size, np.int64), ids)

    return Calls(call, envs.close, num_envs=number, batches=STEPS)


def compare(
    fns: Sequence[Callable[[], Any]],
    seconds: float,
    rounds: int,
    *,
    model_s: float,
    limit: bool,
    **options: Any,
) -> list[dict[str, Any]]:
    """Races all ways to step these envs; prints and returns their rows."""
    number = len(fns)
    tasks: dict[str, Tasks] = {}

    def start(name: str, kind: Callable[[], Any]) -> Tasks:
        tasks[name] = Tasks(kind(), number, model_s)
        return tasks[name]

    starts: dict[str, Callable[[], Any]] = {
        "shmvec.aio": partial(start, "shmvec.aio", partial(Awaited, fns, **options)),
        "asyncio.to_thread": partial(start, "asyncio.to_thread", partial(Threads, fns)),
        "send/recv, half of the envs": partial(batches, fns, model_s, number // 2, **options),
        "send/recv, all envs": partial(batches, fns, model_s, number, **options),
    }
    results: dict[Any, Result] = race(starts, seconds, rounds, limit=fns[:1] if limit else ())
    reference = results.pop(LIMIT, None)
    print(
        heading("system", "all envs' step, µs", "spread", "steps/s", "of the limit", "lag p99, ms")
    )
    rows = []
    for name, result in results.items():
        median = result.median
        share = number / STEP_S
        found = {
            "batch_us": 1e6 * number / median.steps_per_s,
            "spread": result.spread,
            "steps_per_s": median.steps_per_s,
            "share_of_limit": result.ratio(reference) if reference else median.steps_per_s / share,
        }
        lag = float("nan")
        if name in tasks:
            lag = 1e3 * float(np.percentile(tasks[name].lags, 99))
        print(table_line(name, *cells(found), f"{lag:.1f}" if name in tasks else ""))
        rows.append({"system": name, "num_envs": number, **found, "lag_p99_ms": lag})
    return rows


def model(num_envs: int | None, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """The table of envs that compute a millisecond, and a model of 5 ms."""
    number = num_envs or 64
    print(f"\n{number} envs whose step computes 1 ms, a model of {1e3 * MODEL_S:g} ms\n")
    fns = [slow_cartpole] * number
    return compare(fns, seconds, rounds, model_s=MODEL_S, limit=True, num_workers=2)


def waiting(num_envs: int | None, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """The table of envs that sleep 100 ms, in two workers."""
    number = num_envs or 256
    print(f"\n{number} envs whose step sleeps {1e3 * STEP_S:g} ms, which is the limit; 2 workers\n")
    fns = [partial(Asleep, STEP_S, 0.0, 0)] * number
    options = {"num_workers": 2, "overlap": number}
    return compare(fns, seconds, rounds, model_s=0.0, limit=False, **options)


PARTS = {"model": model, "waiting": waiting}


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__, seconds=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--num-envs", type=int, help="default: 64, and 256 that sleep")
    options = parser.parse_args()
    print(describe_machine(machine()))
    rows = []
    for part in options.part:
        found = PARTS[part](options.num_envs, options.seconds, options.rounds)
        rows += [{"part": part, **row} for row in found]
        write_results(options.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()

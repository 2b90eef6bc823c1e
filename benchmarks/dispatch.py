"""What it costs to hand out single steps: TorchRL's own benchmarks of AsyncEnvPool, rebuilt.

    python benchmarks/dispatch.py          # a minute; TorchRL takes part where it is installed

Two cells, with the numbers of TorchRL's benchmarks/test_envs_benchmark.py:

- dispatch: 8 envs that take no time, each in a worker. What is measured is what the consumer
  needs for a transition: to receive it, write an action, and send it.
- slow resets: 32 envs that sleep for 1 ms a step and for 200 ms a reset, after 200 steps, each in a
  worker: 16,000 transitions a second could be had of them. Resets are made by the workers.

In both, ready envs are received, at most all at once, given an action of ones and sent off.

- shmvec: `recv(min_envs=1)` and `send`, autoreset mode SAME_STEP;
- torchrl: `AsyncEnvPool(exchange="shm")`, `async_step_and_maybe_reset_send` and `_recv`;
- limit: the same envs, each in a loop of its own (only in "slow resets"): a sleep takes longer than
  it is asked to, which is in it.

Figures are medians of rounds, in which systems take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

import shmvec
from shmvec._commands.measuring import (
    LIMIT,
    Contender,
    Limit,
    Progress,
    Slice,
    described,
    line,
    machine,
    race,
)

CELLS = {"dispatch": (8, 0.0, 0.0, 10_000_000), "slow resets": (32, 1e-3, 0.2, 200)}


class Counting(gym.Env[Any, Any]):
    """Counts its steps; steps and resets sleep."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, step_s: float, reset_s: float, most: int) -> None:
        """Takes how long, and after how many steps an episode ends."""
        self._step_s, self._reset_s, self._most = step_s, reset_s, most
        self._count = np.zeros(1, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins to count."""
        super().reset(seed=seed)
        if self._reset_s:
            time.sleep(self._reset_s)
        self._count = np.zeros(1, np.float32)
        return self._count, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Counts."""
        if self._step_s:
            time.sleep(self._step_s)
        self._count = self._count + 1
        return self._count, 1.0, bool(self._count[0] >= self._most), False, {}


class Loop:
    """A consumer that receives what is ready, and sends it off again."""

    def __init__(self, turn: Callable[[], int], close: Callable[[], object]) -> None:
        """Takes a turn, which returns how many transitions it was."""
        self._turn, self.close = turn, close

    def run(self, seconds: float) -> Slice:
        """One turn of the race; "a batch" is a transition."""
        made = 0
        begin = time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            made += self._turn()
        return Slice(1e6 * elapsed / made, made / elapsed)


def ours(num_envs: int, step_s: float, reset_s: float, most: int) -> Contender:
    """Our subject."""
    envs = shmvec.ShmVectorEnv(
        [partial(Counting, step_s, reset_s, most)] * num_envs,
        num_workers=num_envs,
        batch_size=num_envs,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    actions = np.ones((num_envs, 1), np.float32)
    envs.async_reset(seed=0)
    envs.send(actions, envs.recv()[4]["env_id"])

    def turn() -> int:
        ready = envs.recv(min_envs=1)[4]["env_id"]
        envs.send(actions[: len(ready)], ready)
        return len(ready)

    return Loop(turn, envs.close)


def torchrl(num_envs: int, step_s: float, reset_s: float, most: int) -> Contender:
    """TorchRL's pool.

    Raises:
        ImportError: It is not installed.
    """
    import torch
    from tensordict import set_capture_non_tensor_stack
    from torchrl.envs import AsyncEnvPool, GymWrapper

    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_capture_non_tensor_stack(False))
        closes = stack.pop_all()
    pool = AsyncEnvPool(
        [partial(_wrapped, GymWrapper, step_s, reset_s, most)] * num_envs,
        backend="multiprocessing",
        exchange="shm",
    )
    found = pool.reset()
    found["action"] = torch.ones(num_envs, 1)
    pool.async_step_and_maybe_reset_send(found)

    def turn() -> int:
        try:
            _, ready = pool.async_step_and_maybe_reset_recv(
                min_get=1, max_get=num_envs, timeout=1e-3
            )
        except TimeoutError:  # no env is ready
            return 0
        ready["action"] = torch.ones(ready.shape[0], 1)
        pool.async_step_and_maybe_reset_send(ready)
        return int(ready.shape[0])

    def close() -> None:
        pool._maybe_shutdown()
        closes.close()

    return Loop(turn, close)


def _wrapped(wrapper: Any, step_s: float, reset_s: float, most: int) -> Any:
    return wrapper(Counting(step_s, reset_s, most))


def measure(cell: str, systems: list[str], seconds: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each system."""
    num_envs, step_s, reset_s, most = numbers = CELLS[cell]
    starts: dict[str, Callable[[], Contender]] = {"shmvec": partial(ours, *numbers)}
    if "torchrl" in systems:
        starts["torchrl"] = partial(torchrl, *numbers)
    if step_s and LIMIT in systems:
        starts[LIMIT] = partial(Limit, [partial(Counting, step_s, reset_s, most)], num_envs)
    progress = Progress(sys.stderr, cell)
    left_out: dict[Any, str] = {}
    results = race(starts, seconds, rounds, left_out=left_out, say=progress)
    progress.done()
    for name, why in left_out.items():
        print(f"{name}: left out ({why})", file=sys.stderr)
    ceiling = num_envs * most / (most * step_s + reset_s) if step_s else None
    return [
        {
            "cell": cell,
            "envs": num_envs,
            "system": name,
            "transition_us": result.median.batch_us,
            "spread": result.spread,
            "transitions_per_s": result.median.steps_per_s,
            "of_ceiling": result.median.steps_per_s / ceiling if ceiling else None,
            "of_limit": result.ratio(results[LIMIT]) if LIMIT in results else None,
            "times_shmvec": result.ratio(results["shmvec"], "batch_us"),
        }
        for name, result in results.items()
    ]


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cell", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument(
        "--systems", nargs="*", choices=["torchrl", LIMIT], default=["torchrl", LIMIT]
    )
    parser.add_argument("--seconds", type=float, default=6, help="of each system in each cell")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    for cell in options.cell:
        rows += measure(cell, options.systems, options.seconds, options.rounds)
    on = machine()
    print(f"{described(on)}\n")
    print(
        line(
            "cell", "envs", "system", "µs a transition", "spread", "transitions/s",
            "of the ceiling", "of the limit", "× shmvec's µs",
        )
    )  # fmt: skip
    print(line("---", "--:", "---", *["--:"] * 6))
    for row in rows:
        shares = [
            "" if row[key] is None else f"{row[key]:.2f}" for key in ("of_ceiling", "of_limit")
        ]
        print(
            line(
                row["cell"],
                row["envs"],
                row["system"],
                f"{row['transition_us']:,.1f}",
                f"{row['spread']:.0%}",
                f"{row['transitions_per_s']:,.0f}",
                *shares,
                f"{row['times_shmvec']:.1f}",
            )
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": on, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

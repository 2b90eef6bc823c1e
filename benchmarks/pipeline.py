"""Collecting while the policy computes (`shmvec.Pipeline`), beside lockstep (`rollout`).

    python benchmarks/pipeline.py                     # all cells: two minutes
    python benchmarks/pipeline.py --cell equal dear --seconds 4

In each cell 16 envs compute for some time in each step, and the policy for each row that it is
asked about, or, in "fixed", for each batch: both by counting, so that nothing but a core is needed.
"equal" policies take as long for all envs as these take for a step in one worker; "cheap" ones a
tenth, "dear" ones three times as long. "cartpole" is that, with a policy of one line of NumPy.
Systems take turns in one run:

- pipeline: `Pipeline.collect(32)`, which finds out, in its first calls, which are not measured,
  whether two groups or lockstep are faster;
- two groups: the same with `deterministic=True`, which has two groups, whatever it costs;
- lockstep: `ShmVectorEnv.rollout(32)`, the policy asked about all envs at once;
- both at once: no vector env: processes do the envs' work while this one does the policy's, and
  none waits for another. Cores may be slower when all are busy: of "equal" with one worker this can
  be reached. It is no limit where there are more processes than cores, or the policy is cheap: here
  each computes all the time, and takes from the others what they would have there.

The limit cannot be beaten on cores that are not: the policy's work, the envs' divided by the
workers, or both divided by the cores, whichever is longest. Figures are medians of rounds;
"× lockstep" is the median ratio of the same round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

import shmvec
from shmvec._commands.measuring import (
    Compute,
    Progress,
    Slice,
    described,
    line,
    machine,
    race,
)
from shmvec._cores import usable_cores

NUM_ENVS = 16
LENGTH = 32


class Busy(gym.Env[Any, Any]):
    """Computes for some time in each step."""

    observation_space = gym.spaces.Box(0, 1, (8,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, compute: Compute) -> None:
        """Takes what to do."""
        self._compute = compute

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode that never ends."""
        super().reset(seed=seed)
        return np.zeros(8, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes its time."""
        self._compute()
        return np.zeros(8, np.float32), 1.0, False, False, {}


class Policy:
    """Computes for some time, for each row or for each batch."""

    def __init__(self, compute: Compute | None, fixed: bool) -> None:
        """Takes what to do for a row, or for a batch."""
        self._compute = compute
        self._fixed = fixed

    def __call__(
        self, observations: npt.NDArray[np.float32], env_ids: Any
    ) -> tuple[npt.NDArray[np.int64], dict[str, Any]]:
        """Chooses."""
        if self._compute is not None:
            for _ in range(1 if self._fixed else len(observations)):
                self._compute()
        return (observations[:, 2] > 0).astype(np.int64), {"values": observations[:, 0]}


@dataclass(frozen=True)
class Cell:
    """What is measured: times are of all envs, in µs."""

    name: str
    workers: int
    envs_us: float
    policy_us: float
    fixed: bool = False

    @property
    def limit_us(self) -> float:
        """What a step of all envs takes at least."""
        both = (self.envs_us + self.policy_us) / usable_cores()
        return max(self.policy_us, self.envs_us / self.workers, both)

    def makers(self) -> tuple[Callable[[], Any], Policy]:
        """What makes an env, and the policy: the same work in all systems."""
        if self.name == "cartpole":
            return partial(gym.make, "CartPole-v1"), Policy(None, False)
        rows = 1 if self.fixed else NUM_ENVS
        policy = Policy(Compute(self.policy_us / rows), self.fixed)
        return partial(Busy, Compute(self.envs_us / NUM_ENVS)), policy


class Lockstep:
    """The policy is asked about all envs, then all envs step."""

    def __init__(self, cell: Cell, make: Callable[[], Any], policy: Policy) -> None:
        """Starts the envs."""
        self.envs = shmvec.ShmVectorEnv([make] * NUM_ENVS, num_workers=cell.workers)
        self.envs.reset(seed=0)
        self.policy = policy
        self.close = self.envs.close

    def collect(self) -> None:
        """A rollout, with what the policy has said besides."""
        rollout = self.envs.rollout(LENGTH)
        everyone = np.arange(NUM_ENVS)
        values = np.empty((LENGTH, NUM_ENVS), np.float32)
        for t in range(LENGTH):
            actions, extras = self.policy(rollout.observations[t], everyone)
            rollout.step(actions)
            values[t] = extras["values"]

    def run(self, seconds: float) -> Slice:
        """One turn."""
        rollouts = 0
        begin = time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds or not rollouts:
            self.collect()
            rollouts += 1
        steps = rollouts * LENGTH
        return Slice(1e6 * elapsed / steps, steps * NUM_ENVS / elapsed)


class Pipelined(Lockstep):
    """Our subject."""

    def __init__(
        self, cell: Cell, make: Callable[[], Any], policy: Policy, deterministic: bool = False
    ) -> None:
        """Starts the envs."""
        super().__init__(cell, make, policy)
        self.pipeline = shmvec.Pipeline(self.envs, policy, deterministic=deterministic)
        for _ in range(12):
            self.collect()

    def collect(self) -> None:
        """A rollout."""
        self.pipeline.collect(LENGTH)


class AtOnce:
    """All the work of a step, done at once by as many processes, with nothing between them."""

    def __init__(self, cell: Cell, make: Callable[[], Any], policy: Policy) -> None:
        """Starts a process for each worker."""
        self._policy = policy
        self._env = make()
        context = multiprocessing.get_context("fork")
        self._ends, self._processes = [], []
        for _ in range(cell.workers):
            own, other = context.Pipe()
            count = NUM_ENVS // cell.workers
            process = context.Process(target=self._work, args=(other, count), daemon=True)
            process.start()
            self._ends.append(own)
            self._processes.append(process)

    def _work(self, end: Any, num_envs: int) -> None:
        while (seconds := end.recv()) is not None:
            end.send(self._timed(lambda: [self._env.step(0) for _ in range(num_envs)], seconds))

    @staticmethod
    def _timed(work: Callable[[], Any], seconds: float) -> float:
        """What it takes in µs, on average over so many seconds."""
        count, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds or not count:
            work()
            count += 1
        return 1e6 * elapsed / count

    def run(self, seconds: float) -> Slice:
        """One turn: a step takes as long as the slowest of them does."""
        seen = np.zeros((NUM_ENVS, 8), np.float32)
        for end in self._ends:
            end.send(seconds)
        own = self._timed(lambda: self._policy(seen, None), seconds)
        slowest = max([own, *(end.recv() for end in self._ends)])
        return Slice(slowest, 1e6 * NUM_ENVS / slowest)

    def close(self) -> None:
        """Ends the processes."""
        for end, process in zip(self._ends, self._processes, strict=True):
            end.send(None)
            process.join()


def cells(us: float) -> list[Cell]:
    """All of them, of envs that take so long for a step of all."""
    return [
        Cell(name, workers, us, factor * us, fixed=name == "fixed")
        for workers in (1, 2)
        for name, factor in (("equal", 1), ("cheap", 0.1), ("dear", 3), ("fixed", 0.5))
    ] + [Cell("cartpole", workers, 0, 0) for workers in (1, 2)]


def measure(cell: Cell, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each system."""
    progress = Progress(sys.stderr, f"{cell.name}, {cell.workers} workers")
    made = cell, *cell.makers()
    systems: dict[str, Callable[[], Any]] = {
        "lockstep": partial(Lockstep, *made),
        "pipeline": partial(Pipelined, *made),
        "two groups": partial(Pipelined, *made, deterministic=True),
    }
    if cell.limit_us > 0:
        systems["both at once"] = partial(AtOnce, *made)
    results = race(
        systems,
        seconds,
        rounds,
        say=progress,
    )
    progress.done()
    return [
        {
            "cell": cell.name,
            "workers": cell.workers,
            "envs_us": cell.envs_us,
            "policy_us": cell.policy_us,
            "system": name,
            "step_us": result.median.batch_us,
            "spread": result.spread,
            "limit_us": cell.limit_us,
            "times_lockstep": result.ratio(results["lockstep"]),
        }
        for name, result in results.items()
    ]


def shown(row: dict[str, Any]) -> str:
    """A line of the table."""
    known = row["limit_us"] > 0
    times = [f"{row[key]:,.0f}" if known else "" for key in ("envs_us", "policy_us", "limit_us")]
    return line(
        row["cell"],
        row["workers"],
        *times,
        row["system"],
        f"{row['step_us']:,.0f}",
        f"{row['spread']:.0%}",
        f"{row['times_lockstep']:.2f}",
    )


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["equal", "cheap", "dear", "fixed", "cartpole"]
    parser.add_argument("--cell", nargs="+", choices=names, default=names)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--us", type=float, default=1600, help="of a step of all envs")
    parser.add_argument("--seconds", type=float, default=4, help="of each system in each cell")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    on = machine()
    print(f"{described(on)}; {NUM_ENVS} envs\n")
    columns = "cell", "workers", "envs, µs", "policy, µs", "limit, µs", "system", "a step, µs"
    print(line(*columns, "spread", "× lockstep"))
    print(line("---", *["--:"] * 4, "---", *["--:"] * 3), flush=True)
    rows = []
    for cell in cells(options.us):
        if cell.name in options.cell and cell.workers in options.workers:
            found = measure(cell, options.seconds, options.rounds)
            print(*map(shown, found), sep="\n", flush=True)
            rows += found
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": on, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Exact evaluation beside the loops that people write: waiting for the slowest of each round.

    python benchmarks/evaluation.py                            # four minutes
    python benchmarks/evaluation.py --episodes 200 --rounds 1

The episodes have random lengths, the same ones for all contenders, which take turns in one run:

- evaluate: shmvec.evaluate;
- frozen: rounds of as many episodes as there are envs, in lockstep by ShmVectorEnv; an env that
  is done stands still (its action is masked) until the last one is;
- stepped on: the same with AsyncVectorEnv, where an env that is done is stepped on in vain.

In the cells "sleep" a step sleeps, as an env does that waits for a simulator, with a worker for
each env; the policy takes no time. In the cells "busy" a step computes, in one worker, and the
policy computes for as long as the steps of half of the envs take: doing one after the other
needs twice the time. The limit is what cannot be beaten: the larger of the env's work, divided by
the workers, and of the policy's, for batches of half of the envs.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

import shmvec
from shmvec._commands.measuring import Progress, described, line, machine, spread, turns

NUM_ENVS = 10
SHORTEST, LONGEST = 60, 300


class Timed(gym.Env[Any, Any]):
    """An episode's length is random; a step takes so long."""

    observation_space = gym.spaces.Box(0, 1, (8,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, step_s: float, sleeps: bool) -> None:
        """Takes how long, and whether it sleeps or computes."""
        self._step_s = step_s
        self._sleeps = sleeps

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Draws the length."""
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(SHORTEST, LONGEST + 1))
        return np.zeros(8, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes its time."""
        spend(self._step_s, self._sleeps)
        self._left -= 1
        return np.zeros(8, np.float32), 1.0, self._left <= 0, False, {}


def spend(seconds: float, sleeps: bool) -> None:
    """Takes so long: of a core's time, if it does not sleep."""
    if sleeps:
        time.sleep(seconds)
        return
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


class Cell:
    """An env, a policy, and the episodes to play."""

    def __init__(self, name: str, step_s: float, episodes: int) -> None:
        """Draws the lengths."""
        self.name, self.step_s, self.episodes = name, step_s, episodes
        self.sleeps = name == "sleep"
        self.workers = NUM_ENVS if self.sleeps else 1
        self.policy_s = 0.0 if self.sleeps else step_s * NUM_ENVS / 2
        env = self.make()
        self.lengths = []
        for seed in range(episodes):
            env.reset(seed=seed)
            self.lengths.append(env._left)

    def make(self) -> Timed:
        """One env."""
        return Timed(self.step_s, self.sleeps)

    def policy(self, observations: Any, env_ids: Any = None) -> npt.NDArray[np.int64]:
        """Computes for as long as it takes for half of the envs, for more in proportion."""
        spend(self.policy_s * max(1.0, len(observations) / (NUM_ENVS / 2)), False)
        return np.zeros(len(observations), np.int64)

    @property
    def limit_s(self) -> float:
        """What cannot be beaten."""
        steps = sum(self.lengths)
        return max(self.step_s * steps / self.workers, self.policy_s * steps / (NUM_ENVS / 2))

    def given_out(self, lengths: Sequence[int]) -> float:
        """When the last episode ends at best, by the limit, if they are given out in this order.

        A loop that does not know their lengths can only take them as they come.
        """
        free = [0] * NUM_ENVS
        for length in lengths:
            heapq.heapreplace(free, free[0] + length)
        return max(free) * NUM_ENVS / sum(lengths)

    def evaluate(self) -> int:
        """Ours; returns the steps made."""
        result = shmvec.evaluate(
            self.make,
            self.policy,
            self.episodes,
            seeds=0,
            num_envs=NUM_ENVS,
            num_workers=self.workers,
        )
        assert result.lengths.tolist() == self.lengths
        return result.steps

    def frozen(self) -> int:
        """Rounds of lockstep in which those that are done stand still."""
        envs = shmvec.ShmVectorEnv(
            [self.make] * NUM_ENVS,
            num_workers=self.workers,
            autoreset_mode=AutoresetMode.DISABLED,
        )
        steps = 0
        for begin in range(0, self.episodes, NUM_ENVS):
            observations, _ = envs.reset(seed=begin)
            alive = np.arange(begin, begin + NUM_ENVS) < self.episodes
            while alive.any():
                actions = self.policy(observations)
                observations, _, terminations, *_ = envs.step(actions, mask=alive)
                steps += int(alive.sum())
                alive &= ~terminations
        envs.close()
        return steps

    def stepped_on(self) -> int:
        """The same, all of them being stepped all the time."""
        envs = AsyncVectorEnv([self.make] * NUM_ENVS)
        steps = 0
        for begin in range(0, self.episodes, NUM_ENVS):
            observations, _ = envs.reset(seed=begin)
            alive = np.arange(begin, begin + NUM_ENVS) < self.episodes
            while alive.any():
                observations, _, terminations, *_ = envs.step(self.policy(observations))
                steps += NUM_ENVS
                alive &= ~terminations
        envs.close()
        return steps


def measure(cell: Cell, rounds: int) -> list[dict[str, Any]]:
    """All contenders of a cell, in turn: one row for each."""
    contenders: dict[str, Callable[[], int]] = {
        "evaluate": cell.evaluate,
        "frozen": cell.frozen,
        "stepped on": cell.stepped_on,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    steps = dict.fromkeys(contenders, 0)
    title = f"{cell.name}, {cell.step_s * 1e3:g} ms a step, {cell.episodes} episodes"
    progress = Progress(sys.stderr, title)
    for order in turns(contenders, rounds):
        for name in order:
            progress(name)
            begin = time.perf_counter()
            steps[name] = contenders[name]()
            seconds[name].append(time.perf_counter() - begin)
    progress.done()
    return [
        {
            "cell": cell.name,
            "step_ms": cell.step_s * 1e3,
            "workers": cell.workers,
            "episodes": cell.episodes,
            "system": name,
            "seconds": median(taken),
            "spread": spread(taken),
            "steps": steps[name],
            "steps_needed": sum(cell.lengths),
            "of_limit": median(taken) / cell.limit_s,
            "times_evaluate": median(
                theirs / ours for theirs, ours in zip(taken, seconds["evaluate"], strict=True)
            ),
        }
        for name, taken in seconds.items()
    ]


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cell", nargs="+", choices=["sleep", "busy"], default=["sleep", "busy"])
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--sleep-ms", type=float, default=20.0, help="of a step that sleeps")
    parser.add_argument("--busy-ms", type=float, default=0.5, help="of a step that computes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    for name in options.cell:
        step_s = (options.sleep_ms if name == "sleep" else options.busy_ms) / 1e3
        cell = Cell(name, step_s, options.episodes)
        rows += measure(cell, options.rounds)
    on = machine()
    print(f"{described(on)}; {NUM_ENVS} envs, episodes of {SHORTEST} to {LONGEST} steps\n")
    names = ["env", "ms a step", "workers", "episodes", "system", "s", "spread", "steps"]
    print(line(*names, "of those needed", "× the limit", "× evaluate"))
    print(line("---", *["--:"] * 3, "---", *["--:"] * 6))
    for row in rows:
        print(
            line(
                row["cell"],
                f"{row['step_ms']:g}",
                row["workers"],
                row["episodes"],
                row["system"],
                f"{row['seconds']:.2f}",
                f"{row['spread']:.0%}",
                f"{row['steps']:,}",
                f"{row['steps'] / row['steps_needed']:.2f}",
                f"{row['of_limit']:.2f}",
                f"{row['times_evaluate']:.2f}",
            )
        )
    in_order = cell.given_out(cell.lengths)
    longest_first = cell.given_out(sorted(cell.lengths, reverse=True))
    print(f"\nGiven out in their order, the episodes end {in_order:.2f} x the limit at best;")
    print(f"the longest first, {longest_first:.2f} x.")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": on, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

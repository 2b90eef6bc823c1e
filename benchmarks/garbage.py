"""What collecting garbage costs envs: the share of their steps' time, by generation.

    python benchmarks/garbage.py                                   # CartPole, HalfCheetah, cycles
    python benchmarks/garbage.py --workload ALE/Pong-v5 cycles

That share is the most that could be gained by collecting at another time, while workers wait, say.
`gc.callbacks` times the interpreter's own collections, in a free-running loop that resets envs
whose episode is over. As a share of one loop's time it is hardly disturbed by what else runs.
`cycles` makes some in most of its steps, and `history` keeps the last 20,000 of them.
"""

from __future__ import annotations

import argparse
import collections
import gc
import time
from typing import Any

import gymnasium as gym
import numpy as np
from harness import WORKLOADS

from shmvec._commands.bench import Workload
from shmvec._commands.measuring import described, line, machine


class Thing:
    """An object of a world, which knows what it is part of, and its parts know it."""

    def __init__(self, *parts: Any) -> None:
        """Links it with its parts, both ways."""
        self.parts = list(parts)
        self.whole: Thing | None = None
        for part in parts:
            part.whole = self


class Cycles(gym.Env[Any, Any]):
    """A world of objects, whose events are cycles; the last ``kept`` of them stay."""

    observation_space = gym.spaces.Box(0, 255, (8, 8), np.uint8)
    action_space = gym.spaces.Discrete(5)

    def __init__(self, kept: int = 0) -> None:
        """Has no events yet."""
        self._past: collections.deque[Thing] = collections.deque(maxlen=kept)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Makes a world."""
        super().reset(seed=seed)
        self._places = self.np_random.integers(0, 8, (12, 2)).tolist()
        self._count = 0
        return np.zeros((8, 8), np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Moves all units; two that meet are an event."""
        self._count += 1
        grid = np.zeros((8, 8), np.uint8)
        for unit, (x, y) in enumerate(self._places):
            move = (int(action) + unit + self._count) % 5
            x = min(7, max(0, x + (move == 1) - (move == 2)))
            y = min(7, max(0, y + (move == 3) - (move == 4)))
            if grid[x, y]:
                self._past.append(Thing(Thing(), Thing()))
            grid[x, y] += 1
            self._places[unit] = x, y
        return grid, 0.0, False, self._count == 200, {}


ENVS = {
    **WORKLOADS,
    "cycles": Workload(Cycles),
    "history": Workload(lambda: Cycles(20_000)),
}


def shares(env: gym.Env[Any, Any], seconds: float) -> list[str]:
    """Steps a loop; what a step takes, the share of each generation, and the longest collection."""
    spent, longest, began = [0.0, 0.0, 0.0], 0.0, 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal longest, began
        if phase == "start":
            began = time.perf_counter()
        else:
            took = time.perf_counter() - began
            spent[info["generation"]] += took
            longest = max(longest, took)

    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(64)]
    env.reset(seed=0)
    steps, elapsed = 0, 0.0
    gc.callbacks.append(note)
    start = time.perf_counter()
    while elapsed < seconds:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        steps += len(actions)
        elapsed = time.perf_counter() - start
    gc.callbacks.remove(note)
    each = [f"{one / elapsed:.2%}" for one in (sum(spent), *spent)]
    return [f"{1e6 * elapsed / steps:,.1f}", *each, f"{1000 * longest:.2f}"]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ["CartPole-v1", "HalfCheetah-v5", "cycles", "history"]
    parser.add_argument("--workload", nargs="+", choices=ENVS, default=default)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each")
    options = parser.parse_args()
    print(described(machine()))
    print("\n| workload | step, µs | collections | gen 0 | gen 1 | gen 2 | longest, ms |")
    print("|---" + "|--:" * 6 + "|")
    for name in options.workload:
        if missing := ENVS[name].missing():
            print(line(name, f"needs {', '.join(missing)}", *[""] * 5), flush=True)
            continue
        env = ENVS[name].make()
        try:
            print(line(name, *shares(env, options.seconds)), flush=True)
        finally:
            env.close()


if __name__ == "__main__":
    main()

"""Planning from states: batches of (state, action) pairs beside free-running loops.

    python benchmarks/planning.py                          # CartPole, HalfCheetah, Pong
    python benchmarks/planning.py --workload halfcheetah --batch 1000

Two limits are measured in the same run, one process a core and no communication: loops that only
step, and loops that set a state, step, and take the state that comes of it, as the workers must.
plangym's ParallelEnv is measured beside them where it is installed and has the env.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec import bench, measuring
from shmvec._shared.scheduling import usable_cores
from shmvec.planning import EnvState, PlanningVectorEnv

ROUNDS = 7
STATES = 200  # different ones, along games that are played at random


class FromStates(gym.Wrapper[Any, Any, Any, Any]):
    """Sets a state before each step, and takes the one after it; by turns the states of a game."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        """Plays at random, and keeps the states."""
        super().__init__(env)
        env.reset(seed=0)
        env.action_space.seed(0)
        self._state = EnvState(env, include_rng=True)
        self._states = []
        for _ in range(STATES):
            self._states.append(self._state.get().copy())
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
        self._turn = 0

    def step(self, action: Any) -> Any:
        """One pair."""
        self._turn = (self._turn + 1) % STATES
        self._state.set(self._states[self._turn])
        result = self.env.step(action)
        self._state.get()
        return result


def _pong() -> gym.Env[Any, Any]:
    return bench.WORKLOADS["ALE/Pong-v5"].make()


WORKLOADS: dict[str, Callable[[], gym.Env[Any, Any]]] = {
    "cartpole": partial(gym.make, "CartPole-v1"),
    "halfcheetah": partial(gym.make, "HalfCheetah-v5"),
    "pong": _pong,
}
# What plangym calls them.
PLANGYM = {
    "cartpole": ("ClassicControl", "CartPole-v1"),
    "halfcheetah": ("Mujoco", "HalfCheetah-v5"),
}


class Planner:
    """Something with plangym's step_batch."""

    def __init__(self, name: str, env: Any, batch: int) -> None:
        """Prepares a batch: states along random games, and random actions."""
        self.name = name
        self.env = env
        state = env.reset()[0]
        states = []
        for _ in range(min(STATES, batch)):
            states.append(state)
            state, _, _, end, truncated, _ = env.step(env.sample_action(), state)
            if end or truncated:
                state = env.reset()[0]
        self._states: Any = [states[i % len(states)] for i in range(batch)]
        self._actions: Any = [env.sample_action() for _ in range(batch)]
        if isinstance(env, PlanningVectorEnv):  # it takes arrays
            self._states = np.stack(self._states)
            self._actions = np.stack(self._actions)
        self.rates: list[float] = []

    def run(self, seconds: float, keep: bool = True) -> None:
        """One slice."""
        steps, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            self.env.step_batch(self._actions, self._states)
            steps += len(self._actions)
        if keep:
            self.rates.append(steps / elapsed)


def plangym(workload: str, batch: int) -> Planner:
    """Plangym's ParallelEnv."""
    import plangym as original

    family, name = PLANGYM[workload]
    env = original.make(name, n_workers=usable_cores())
    return Planner("plangym ParallelEnv", env, batch)


def measure(workload: str, batch: int, seconds: float) -> None:
    """One workload: prints its rows."""
    make = WORKLOADS[workload]
    limits = {
        "limit: steps alone": measuring.Limit([make], usable_cores()),
        "limit: with states": measuring.Limit([lambda: FromStates(make())], usable_cores()),
    }
    reached: dict[str, list[float]] = {name: [] for name in limits}
    running: list[Planner] = []
    try:
        running.append(Planner("PlanningVectorEnv", PlanningVectorEnv(make), batch))
        if workload in PLANGYM:
            try:
                running.append(plangym(workload, batch))
            except ImportError as error:
                print(f"left out: plangym ({error})")
        for planner in running:
            planner.run(0.2, keep=False)
        for _ in range(ROUNDS):
            for name, limit in limits.items():
                reached[name].append(limit.run(seconds / ROUNDS).steps_per_s)
            for planner in running:
                planner.run(seconds / ROUNDS)
    finally:
        for limit in limits.values():
            limit.close()
        for planner in running:
            planner.env.close()
    rows = reached | {planner.name: planner.rates for planner in running}
    alone, with_states = (statistics.median(reached[name]) for name in limits)
    for name, rates in rows.items():
        rate = statistics.median(rates)
        spread = (max(rates) - min(rates)) / rate
        print(
            f"| {workload} | {batch} | {name} | {rate:,.0f} | {spread:.0%} | {rate / alone:.2f} "
            f"| {rate / with_states:.2f} |",
            flush=True,
        )


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1000])
    parser.add_argument("--seconds", type=float, default=3.5, help="for each contender")
    options = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in measuring.machine().items()))
    print("\n| env | batch | system | steps/s | spread | of steps alone | of steps with states |")
    print("|---" * 7 + "|")
    for workload in options.workload:
        for batch in options.batch:
            measure(workload, batch, options.seconds)


if __name__ == "__main__":
    main()

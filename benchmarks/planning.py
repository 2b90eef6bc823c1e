"""Planning from states: batches of (state, action) pairs beside free-running loops.

    python benchmarks/planning.py                          # CartPole, HalfCheetah, Pong
    python benchmarks/planning.py --workload HalfCheetah-v5 --batch 1000

Two limits are measured in the same run, one process a core and no communication: loops that only
step, and loops that set a state, step, and take the state that comes of it, as the workers must.
plangym's ParallelEnv is measured beside them where it is installed and has the env.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec._commands.bench import DEFAULT_WORKLOADS, WORKLOADS
from shmvec._commands.measuring import LIMIT, Limit, Stepper, cells, described, line, machine, race
from shmvec._cores import usable_cores
from shmvec.planning import PlanningVectorEnv, StateAccess

WITH_STATES = "limit, with states"
STATES = 200  # different ones, along games that are played at random


class FromStates(gym.Wrapper[Any, Any, Any, Any]):
    """Sets a state before each step, and takes the one after it; by turns the states of a game."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        """Plays at random, and keeps the states."""
        super().__init__(env)
        env.reset(seed=0)
        env.action_space.seed(0)
        self._state = StateAccess(env, include_rng=True)
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


PLANGYM = ("CartPole-v1", "HalfCheetah-v5")  # what plangym has of them


def planner(make: Callable[[], Any], batch: int) -> Stepper:
    """Something with plangym's step_batch: states along random games, and random actions."""
    env = make()
    state = env.reset()[0]
    states: Any = []
    for _ in range(min(STATES, batch)):
        states.append(state)
        state, _, _, end, truncated, _ = env.step(env.sample_action(), state)
        if end or truncated:
            state = env.reset()[0]
    states = [states[i % len(states)] for i in range(batch)]
    arrays = isinstance(env, PlanningVectorEnv)
    if arrays:
        states = np.stack(states)

    def sample() -> Any:
        actions = [env.sample_action() for _ in range(batch)]
        return np.stack(actions) if arrays else actions

    def step(actions: Any) -> None:
        env.step_batch(actions, states)

    return Stepper(step, sample, batch, close=env.close)


def plangym(workload: str) -> Any:
    """Plangym's ParallelEnv."""
    import plangym as original

    return original.make(workload, n_workers=usable_cores())


def measure(workload: str, batch: int, seconds: float) -> None:
    """One workload: prints its rows."""
    make = WORKLOADS[workload].make
    starts: dict[str, Any] = {
        WITH_STATES: lambda: Limit([lambda: FromStates(make())], usable_cores()),
        "PlanningVectorEnv": lambda: planner(lambda: PlanningVectorEnv(make), batch),
    }
    if workload in PLANGYM:
        starts["plangym ParallelEnv"] = lambda: planner(lambda: plangym(workload), batch)
    left_out: dict[str, str] = {}
    results = race(starts, seconds, limit=[make], left_out=left_out)
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    for name, result in results.items():
        with_states = f"{result.ratio(results[WITH_STATES]):.2f}"
        figures = cells(result.figures(results[LIMIT]))
        print(line(workload, batch, name, *figures, with_states), flush=True)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", nargs="+", choices=DEFAULT_WORKLOADS, default=DEFAULT_WORKLOADS
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1000])
    parser.add_argument("--seconds", type=float, default=3.5, help="for each contender")
    options = parser.parse_args()
    print(described(machine()))
    print("\n| env | batch | system | batch, µs | spread | steps/s | of the limit ", end="")
    print("| of that with states |")
    print("|---" * 8 + "|")
    for workload, batch in product(options.workload, options.batch):
        measure(workload, batch, options.seconds)


if __name__ == "__main__":
    main()

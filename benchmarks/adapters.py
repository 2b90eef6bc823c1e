"""Each adapter beside the system whose interface it has, through that interface.

    python benchmarks/adapters.py                                # all that are installed
    python benchmarks/adapters.py --system sb3 --workload halfcheetah --num-envs 8

Contenders of a system take turns, in slices, in one run, with plain ShmVectorEnv beside them: what
an adapter costs is the difference to that. An original that is not installed is left out, by name.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import peers
from peers import Make
from workloads import WORKLOADS

from shmvec import measuring
from shmvec.scheduling import usable_cores

ROUNDS = 5


def sb3(fns: Sequence[Any]) -> dict[str, Make]:
    """Stable-Baselines3's VecEnvs, their processes forked."""

    def contender(name: str, make: Callable[[], Any]) -> Make:
        def start() -> Any:
            envs = make()
            envs.action_space.seed(0)
            envs.reset()
            return envs

        return lambda: peers.Contender(
            name,
            start,
            lambda envs, actions: envs.step(actions),
            lambda results: np.asarray(results[2]),
            lambda envs: np.array([envs.action_space.sample() for _ in fns]),
            resets_are_steps=True,  # in the step that ends an episode
        )

    def ours() -> Any:
        from shmvec.adapters.sb3 import ShmVecEnv

        return ShmVecEnv(list(fns), "fork")

    def subproc() -> Any:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        return SubprocVecEnv(list(fns), "fork")

    def dummy() -> Any:
        from stable_baselines3.common.vec_env import DummyVecEnv

        return DummyVecEnv(list(fns))

    makes = {"ShmVecEnv": ours, "SubprocVecEnv": subproc, "DummyVecEnv": dummy}
    return {name: contender(f"SB3 {name}", make) for name, make in makes.items()}


# By the name of a system: from functions that make envs to its contenders, by name.
SYSTEMS: dict[str, Callable[[Sequence[Any]], dict[str, Make]]] = {"sb3": sb3}


def measure(system: str, workload: str, n: int, seconds: float) -> list[dict[str, Any]]:
    """All contenders of one system, by turns; what is not installed is said."""
    fns = WORKLOADS[workload](n)
    limit = measuring.Limit(WORKLOADS[workload](8), usable_cores())
    running = []
    limits = []
    try:
        running.append(peers.ours("ShmVectorEnv", fns)())
        for name, make in SYSTEMS[system](fns).items():
            try:
                running.append(make())
            except ImportError as error:
                print(f"left out: {name} ({error})")
        for contender in running:
            contender.run(0.1, b"", keep=False)
        for _ in range(ROUNDS):
            limits.append(limit.run(seconds / ROUNDS).steps_per_s)
            for contender in running:
                contender.run(seconds / ROUNDS, b"")
    finally:
        limit.close()
        for contender in running:
            contender.close()
    return [contender.row(statistics.median(limits)) for contender in running]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=["cartpole", "halfcheetah"]
    )
    parser.add_argument("--num-envs", nargs="+", type=int, default=[8])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each contender")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the originals; none of ours

    print(", ".join(f"{name} {value}" for name, value in measuring.machine().items()))
    for system in options.system:
        for workload in options.workload:
            for n in options.num_envs:
                print(f"\n{system}: {workload}, {n} envs\n")
                print(
                    "| system | batch, µs | spread | steps/s | of the limit |\n" + "|---" * 5 + "|"
                )
                for row in measure(system, workload, n, options.seconds):
                    print(
                        f"| {row['system']} | {row['batch_us']:,.1f} | {row['spread']:.0%} "
                        f"| {row['steps_per_s']:,.0f} | {row['share_of_limit']:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()

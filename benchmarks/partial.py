"""Partial batches beside lockstep: what is won by not waiting for the slowest, or for the parent.

    python benchmarks/partial.py                                    # uneven envs, CartPole, ...
    python benchmarks/partial.py --workload halfcheetah --compute 200 2000

In each cell the contenders take turns, in slices, in one run: ShmVectorEnv in lockstep, with
batches of a half and of a quarter of the envs, and with batches of one worker as views
(copy=False); and EnvPool's C++ envs with the same batches, where it has the env. The parent
computes for --compute µs on each batch of *all* envs, so half as long on half a batch: that is
what a learner's network does.

Env steps a second are given, their spread over the slices, and how many times those of lockstep.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from workloads import ENVPOOL, WORKLOADS, work

import shmvec
from shmvec._commands.measuring import machine

ROUNDS = 5


class Contender:
    """A vector env with ``recv`` and ``send``; with batches of all envs that is lockstep."""

    def __init__(self, name: str, envs: Any, num_envs: int, batch: int, compute: int) -> None:
        """Resets the envs."""
        self.name, self.envs, self.rates = name, envs, list[float]()
        self._lockstep = batch == num_envs and isinstance(envs, shmvec.ShmVectorEnv)
        self._compute = bytes(compute * batch // num_envs)
        envs.action_space.seed(0)
        space = getattr(envs, "single_action_space", envs.action_space)
        self._actions = np.array([space.sample() for _ in range(batch)])
        self._over = np.zeros(num_envs, bool)
        if self._lockstep:
            envs.reset(seed=0)
        else:
            envs.async_reset()

    def run(self, seconds: float, keep: bool = True) -> None:
        """One slice; steps that only reset do not count."""
        steps, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            if self._lockstep:
                _, _, terminated, truncated, _ = self.envs.step(self._actions)
                ids = slice(None)
            else:
                _, _, terminated, truncated, infos = self.envs.recv()
                ids = infos["env_id"]
            zlib.crc32(self._compute)
            if not self._lockstep:
                self.envs.send(self._actions, ids)
            steps += len(terminated) - np.count_nonzero(self._over[ids])
            self._over[ids] = terminated | truncated
        if keep:
            self.rates.append(steps / elapsed)


def contenders(
    workload: str, n: int, compute_us: float, num_workers: int | None
) -> list[Contender]:
    """Starts them."""
    compute = work(compute_us)
    fns = list(WORKLOADS[workload](n))
    options = {} if num_workers is None else {"num_workers": min(num_workers, n)}
    made = [Contender("ShmVectorEnv, lockstep", shmvec.ShmVectorEnv(fns, **options), n, n, compute)]
    for batch in (n // 2, n // 4):
        envs = shmvec.ShmVectorEnv(fns, batch_size=batch, **options)
        made.append(Contender(f"ShmVectorEnv, batches of {batch}", envs, n, batch, compute))
    workers = made[0].envs.num_workers
    if n % workers == 0:  # a batch is those of one worker, and no copy is made
        batch = n // workers
        envs = shmvec.ShmVectorEnv(fns, batch_size=batch, copy=False, **options)
        name = f"ShmVectorEnv, batches of {batch}, copy=False"
        made.append(Contender(name, envs, n, batch, compute))
    if workload in ENVPOOL:
        try:
            import envpool
        except ImportError:
            print("EnvPool is left out: it is not installed", file=sys.stderr)
            return made
        for batch in (n, n // 2, n // 4):
            envs = envpool.make_gymnasium(ENVPOOL[workload], num_envs=n, batch_size=batch)
            made.append(Contender(f"EnvPool (C++), batches of {batch}", envs, n, batch, compute))
    return made


def measure(
    workload: str, n: int, compute_us: float, num_workers: int | None, seconds: float
) -> list[dict[str, Any]]:
    """One cell."""
    running = contenders(workload, n, compute_us, num_workers)
    try:
        for contender in running:
            contender.run(0.2, keep=False)
        for _ in range(ROUNDS):
            for contender in running:
                contender.run(seconds / ROUNDS)
    finally:
        for contender in running:
            contender.envs.close()
    reference = statistics.median(running[0].rates)
    rows = []
    for contender in running:
        rate = statistics.median(contender.rates)
        rows.append(
            {
                "workload": workload,
                "num_envs": n,
                "compute_us": compute_us,
                "system": contender.name,
                "steps_per_s": rate,
                "spread": (max(contender.rates) - min(contender.rates)) / rate,
                "times_lockstep": rate / reference,
            }
        )
    return rows


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        choices=WORKLOADS,
        default=["uneven", "slow-resets", "cartpole", "halfcheetah"],
    )
    parser.add_argument("--num-envs", nargs="+", type=int, default=[32])
    parser.add_argument("--num-workers", type=int, help="of ShmVectorEnv (default: one a core)")
    parser.add_argument("--compute", nargs="+", type=float, default=[0, 200, 2000], metavar="US")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each contender in a cell")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of peers; none of ours
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print("\n| workload | envs | parent, µs | system | steps/s | spread | × lockstep |")
    print("|---|--:|--:|---|--:|--:|--:|")
    rows: list[dict[str, Any]] = []

    for workload in options.workload:
        for n in options.num_envs:
            for compute_us in options.compute:
                cell = measure(workload, n, compute_us, options.num_workers, options.seconds)
                rows += cell
                for row in cell:
                    print(
                        f"| {workload} | {n} | {compute_us:.0f} | {row['system']} "
                        f"| {row['steps_per_s']:,.0f} | {row['spread']:.0%} "
                        f"| {row['times_lockstep']:.2f} |",
                        flush=True,
                    )
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

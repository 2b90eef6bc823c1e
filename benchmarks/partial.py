"""Partial batches beside lockstep: what is won by not waiting for the slowest, or for the parent.

    python benchmarks/partial.py                                    # uneven envs, CartPole, ...
    python benchmarks/partial.py --workload HalfCheetah-v5 --compute 200 2000

In each cell the contenders take turns, in slices, in one run: ShmVectorEnv in lockstep, with
batches of a half and of a quarter of the envs, and with batches of one worker as views
(copy=False); and EnvPool's C++ envs with the same batches, where it has the env. The parent
computes for --compute µs on each batch of *all* envs, so half as long on half a batch: that is
what a learner's network does.

Besides the usual figures it is said how many times the steps a second of lockstep that is. The
limit, free-running loops, steps all envs equally often: where some are slow, partial batches may
exceed it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from harness import ENVPOOL, WORKLOADS, arguments, write_results

import shmvec
from shmvec._commands.measuring import (
    LIMIT,
    Compute,
    Stepper,
    cells,
    described,
    line,
    machine,
    race,
    vector_env,
)
from shmvec._cores import usable_cores

LOCKSTEP = "ShmVectorEnv, lockstep"


def batches(make: Callable[[], Any], num_envs: int, batch: int, compute_us: float) -> Stepper:
    """A vector env with ``recv`` and ``send``, whose parent computes between the two."""
    envs = make()
    envs.action_space.seed(0)
    space = getattr(envs, "single_action_space", envs.action_space)
    envs.async_reset()
    ids = envs.recv()[-1]["env_id"]

    def step(actions: Any) -> Any:
        nonlocal ids
        envs.send(actions, ids)
        _, _, terminated, truncated, infos = envs.recv()
        ids = infos["env_id"]
        return terminated | truncated, False, ids

    return Stepper(
        step,
        lambda: np.array([space.sample() for _ in range(batch)]),
        num_envs,
        compute=_compute(compute_us * batch / num_envs),
        close=envs.close,
    )


def _compute(us: float) -> Compute | None:
    return Compute(us) if us else None


def contenders(
    workload: str, n: int, compute_us: float, num_workers: int | None
) -> dict[str, Callable[[], Stepper]]:
    """What starts them, by name."""
    fns = WORKLOADS[workload].fns(n)
    workers = min(n, num_workers or usable_cores())

    def lockstep() -> Stepper:
        make = partial(shmvec.ShmVectorEnv, fns, num_workers=workers)
        return vector_env(make, _compute(compute_us))

    def ours(batch: int, copy: bool = True) -> Stepper:
        make = partial(shmvec.ShmVectorEnv, fns, batch_size=batch, copy=copy, num_workers=workers)
        return batches(make, n, batch, compute_us)

    def envpool(batch: int) -> Stepper:
        import envpool

        make = partial(envpool.make_gymnasium, ENVPOOL[workload], num_envs=n, batch_size=batch)
        return batches(make, n, batch, compute_us)

    starts: dict[str, Callable[[], Stepper]] = {LOCKSTEP: lockstep}
    for size in (n // 2, n // 4):
        starts[f"ShmVectorEnv, batches of {size}"] = partial(ours, size)
    if n % workers == 0:  # a batch is those of one worker, and no copy is made
        size = n // workers
        starts[f"ShmVectorEnv, batches of {size}, copy=False"] = partial(ours, size, False)
    for size in (n, n // 2, n // 4) if workload in ENVPOOL else ():
        starts[f"EnvPool (C++), batches of {size}"] = partial(envpool, size)
    return starts


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__, ["Uneven", "Slow-resets", "CartPole-v1", "HalfCheetah-v5"], [32])
    parser.add_argument("--num-workers", type=int, help="of ShmVectorEnv (default: one a core)")
    parser.add_argument("--compute", nargs="+", type=float, default=[0, 200, 2000], metavar="US")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of peers; none of ours
    print(described(machine()))
    print("\n| workload | envs | parent, µs | system | batch step, µs | spread | steps/s ", end="")
    print("| of the limit | × lockstep |\n|---|--:|--:|---" + "|--:" * 5 + "|")
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for workload, n, us in product(options.workload, options.num_envs, options.compute):
        results = race(
            contenders(workload, n, us, options.num_workers),
            options.seconds,
            limit=WORKLOADS[workload].makes,
            left_out=left_out,
        )
        for system, result in results.items():
            row = {
                "workload": workload,
                "num_envs": n,
                "compute_us": us,
                "system": system,
                **result.figures(results[LIMIT]),
                "times_lockstep": result.ratio(results[LOCKSTEP]),
            }
            rows.append(row)
            times = f"{row['times_lockstep']:.2f}"
            print(line(workload, n, us, system, *cells(row), times), flush=True)
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    write_results(options.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()

"""`shmvec.Pipeline` and partial batches, which step some envs while others wait, and lockstep.

    python benchmarks/pipeline.py                     # all cells: a minute and a half
    python benchmarks/pipeline.py --cell equal dear --seconds 4
    python benchmarks/pipeline.py --cell network --device cuda --num-envs 256
    python benchmarks/pipeline.py partial             # uneven envs, CartPole, ...
    python benchmarks/pipeline.py partial --workload HalfCheetah-v5 --compute 200 2000

Systems take turns in one run. Figures are medians of rounds; "× lockstep" is the median ratio of
the same round.

In each cell 16 envs compute in each step, and the policy computes for each row (in "fixed", for
each batch). Both count, so that they need only a core. "equal" policies take as long for all envs
as these take for a step in one worker, "cheap" ones a tenth, "dear" ones three times as long.
"cartpole" is CartPole, with a policy of one line of NumPy.

- pipeline: `Pipeline.collect(32)`, which finds out in its first calls whether two groups or
  lockstep are faster; these calls are not measured;
- two groups: the same with `deterministic=True`, which always has two groups;
- lockstep: `ShmVectorEnv.rollout(32)`, with the policy asked about all envs at once.

The limit is the longest of the policy's work, the envs' work divided by the workers, and both
divided by the cores.

"network" (not by default, because it needs torch) has frames of (4, 84, 84) uint8, and Mnih et
al.'s network on --device as a policy. `Pipeline(device=).collect(32)` is compared with the envs
alone, stepped in lockstep with the same action, and with the network alone, asked about half of the
envs, with observations that are on the device already. The limit is the slower of these two.

partial: ShmVectorEnv in lockstep, with batches of a half and of a quarter of the envs, and with
batches of one worker as views (copy=False); and EnvPool's C++ envs with the same batches, if it has
the env. The parent computes for --compute µs on each batch of *all* envs, and half as long on half
a batch, like a learner's network. The limit, free-running loops, steps all envs equally often, so
partial batches may exceed it if some envs are slow.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from contenders import in_batches
from harness import ENVPOOL, WORKLOADS, Calls, arguments, heading, write_results

import shmvec
from shmvec._commands.measuring import (
    LIMIT,
    Compute,
    Progress,
    Stepper,
    cells,
    describe_machine,
    machine,
    race,
    table_line,
    vector_env_stepper,
)
from shmvec._cores import usable_cores

NUM_ENVS, LENGTH = 16, 32
FRAMES = (4, 84, 84)
LOCKSTEP = "lockstep"
# The time of a policy for all envs, divided by that of their step in one worker.
POLICIES = {"equal": 1, "cheap": 0.1, "dear": 3, "fixed": 0.5, "cartpole": 0}

Policy = Callable[[Any, Any], tuple[Any, dict[str, Any]]]
Row = dict[str, Any]


# ---- a pipeline ----------------------------------------------------------------------------------


class Showing(gym.Env[Any, Any]):
    """An env that computes and returns an observation made before; episodes never end."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, space: gym.spaces.Box, compute: Callable[[], object]) -> None:
        """Takes the observation space and what to do in a step."""
        self.observation_space, self._compute = space, compute

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Draws some observations."""
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self._turn = 0
        self._observations = [self.observation_space.sample() for _ in range(4)]
        return self._observations[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Computes."""
        self._compute()
        self._turn = (self._turn + 1) % 4
        return self._observations[self._turn], 1.0, False, False, {}


def busy_policy(compute: Callable[[], object], fixed: bool) -> Policy:
    """Makes a policy that computes for each row or for each batch."""

    def policy(observations: npt.NDArray[np.float32], env_ids: Any) -> Any:
        for _ in range(1 if fixed else len(observations)):
            compute()
        return (observations[:, 2] > 0).astype(np.int64), {"values": observations[:, 0]}

    return policy


def network_policy(device: Any) -> Policy:
    """Makes a policy of Mnih et al.'s network (2015): the most probable actions, and values."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()]
    layers += [nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(512, 3)).to(device)

    @torch.no_grad()
    def policy(observations: Any, env_ids: Any) -> Any:
        answer = network(observations.float() / 255)
        return answer[:, :2].argmax(1), {"values": answer[:, 2]}

    return policy


def envs_of(make: Callable[[], Any], num_envs: int, workers: int) -> shmvec.ShmVectorEnv:
    """Makes and resets the envs."""
    envs = shmvec.ShmVectorEnv([make] * num_envs, num_workers=workers)
    envs.reset(seed=0)
    return envs


def lockstep(make: Callable[[], Any], num_envs: int, workers: int, policy: Policy) -> Calls:
    """Asks the policy about all envs, then steps all; stores the policy's values."""
    envs, everyone = envs_of(make, num_envs, workers), np.arange(num_envs)

    def collect() -> None:
        rollout = envs.rollout(LENGTH)
        values = np.empty((LENGTH, num_envs), np.float32)
        for t in range(LENGTH):
            actions, extras = policy(rollout.observations[t], everyone)
            rollout.step(actions)
            values[t] = extras["values"]

    return Calls(collect, envs.close, num_envs=num_envs, batches=LENGTH)


def pipelined(
    make: Callable[[], Any], num_envs: int, workers: int, policy: Policy, **options: Any
) -> Calls:
    """Collects by a Pipeline."""
    envs = envs_of(make, num_envs, workers)
    collect = partial(shmvec.Pipeline(envs, policy, **options).collect, LENGTH)
    for _ in range(12):
        collect()
    return Calls(collect, envs.close, num_envs=num_envs, batches=LENGTH)


def computing(name: str, workers: int, options: argparse.Namespace) -> tuple[Any, float]:
    """The contenders of a cell, and its limit in µs; 0: not known."""
    factor, fixed = POLICIES[name], name == "fixed"
    if name == "cartpole":
        made: Any = partial(gym.make, "CartPole-v1"), NUM_ENVS, workers
        policy, limit_us = busy_policy(lambda: None, True), 0.0
    else:
        policy_us = factor * options.us
        numbers = gym.spaces.Box(0, 1, (8,), np.float32)
        made = partial(Showing, numbers, Compute(options.us / NUM_ENVS)), NUM_ENVS, workers
        policy = busy_policy(Compute(policy_us / (1 if fixed else NUM_ENVS)), fixed)
        both = (options.us + policy_us) / usable_cores()
        limit_us = max(policy_us, options.us / workers, both)
    starts = {
        LOCKSTEP: partial(lockstep, *made, policy),
        "pipeline": partial(pipelined, *made, policy),
        "two groups": partial(pipelined, *made, policy, deterministic=True),
    }
    return starts, limit_us


def on_device(workers: int, num_envs: int, name: str) -> dict[str, Callable[[], Calls]]:
    """The contenders of "network"."""
    import torch

    torch.set_num_threads(1)
    device = torch.device(name)
    policy = network_policy(device)
    half = max(1, num_envs // 2)
    observations = torch.zeros((half, *FRAMES), dtype=torch.uint8, device=device)
    make = partial(Showing, gym.spaces.Box(0, 255, FRAMES, np.uint8), lambda: None)

    def alone() -> Calls:
        envs, actions = envs_of(make, num_envs, workers), np.zeros(num_envs, np.int64)

        def collect() -> None:
            rollout = envs.rollout(LENGTH)
            for _ in range(LENGTH):
                rollout.step(actions)

        return Calls(collect, envs.close, num_envs=num_envs, batches=LENGTH)

    def ask() -> None:
        policy(observations, None)[0].cpu()  # where the envs need the actions

    return {
        "pipeline": partial(pipelined, make, num_envs, workers, policy, device=device),
        "envs alone": alone,
        # A batch of it has half of the envs.
        "network alone": lambda: Calls(ask, num_envs=num_envs, batches=half / num_envs),
    }


def pipelines(options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each system in each cell."""
    for name, workers in product(options.cell, options.workers):
        progress = Progress(sys.stderr, f"{name}, {workers} workers")
        if name == "network":
            starts, limit_us = on_device(workers, options.num_envs, options.device), 0.0
        else:
            starts, limit_us = computing(name, workers, options)
        results = race(starts, options.seconds, options.rounds, say=progress)
        progress.done()
        if name == "network":
            parts = (results[f"{part} alone"].median.batch_us for part in ("envs", "network"))
            limit_us = max(parts)
        for system, result in results.items():
            us = result.median.batch_us
            row: Row = {"cell": name, "workers": workers, "system": system}
            row |= {"batch_us": us, "spread": result.spread}
            if limit_us:
                row |= {"limit_us": limit_us, "share_of_limit": limit_us / us}
            if LOCKSTEP in results:
                row["times_lockstep"] = result.ratio(results[LOCKSTEP])
            yield row


# ---- partial batches -----------------------------------------------------------------------------


def batches(make: Callable[[], Any], num_envs: int, batch: int, compute_us: float) -> Stepper:
    """A vector env with ``recv`` and ``send``, between which the parent computes."""
    envs = make()
    envs.action_space.seed(0)
    space = getattr(envs, "single_action_space", envs.action_space)
    return Stepper(
        in_batches(envs),
        lambda: np.array([space.sample() for _ in range(batch)]),
        num_envs,
        compute=Compute(compute_us * batch / num_envs) if compute_us else None,
        close=envs.close,
    )


def batch_contenders(
    workload: str, n: int, compute_us: float, num_workers: int | None
) -> dict[str, Callable[[], Stepper]]:
    """The functions that start the contenders, by name."""
    fns = WORKLOADS[workload].fns(n)
    workers = min(n, num_workers or usable_cores())

    def all_at_once() -> Stepper:
        make = partial(shmvec.ShmVectorEnv, fns, num_workers=workers)
        return vector_env_stepper(make, Compute(compute_us) if compute_us else None)

    def ours(batch: int, copy: bool = True) -> Stepper:
        make = partial(shmvec.ShmVectorEnv, fns, batch_size=batch, copy=copy, num_workers=workers)
        return batches(make, n, batch, compute_us)

    def envpool(batch: int) -> Stepper:
        import envpool

        make = partial(envpool.make_gymnasium, ENVPOOL[workload], num_envs=n, batch_size=batch)
        return batches(make, n, batch, compute_us)

    starts: dict[str, Callable[[], Stepper]] = {LOCKSTEP: all_at_once}
    for size in (n // 2, n // 4):
        starts[f"batches of {size}"] = partial(ours, size)
    if n % workers == 0:  # a batch is those of one worker, and no copy is made
        size = n // workers
        starts[f"batches of {size}, copy=False"] = partial(ours, size, False)
    for size in (n, n // 2, n // 4) if workload in ENVPOOL else ():
        starts[f"EnvPool (C++), batches of {size}"] = partial(envpool, size)
    return starts


def partials(options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each system in each cell."""
    warnings.simplefilter("ignore")  # those of peers; shmvec gives none
    left_out: dict[str, str] = {}
    for workload, n, us in product(options.workload, options.num_envs, options.compute):
        starts = batch_contenders(workload, n, us, options.num_workers)
        limit = WORKLOADS[workload].kinds
        results = race(starts, options.seconds, limit=limit, left_out=left_out)
        for system, result in results.items():
            figures = result.figures(results[LIMIT])
            row = {"workload": workload, "num_envs": n, "compute_us": us, "system": system}
            yield {**row, **figures, "times_lockstep": result.ratio(results[LOCKSTEP])}
    for name, why in left_out.items():
        print(f"left out: {name} ({why})", file=sys.stderr)


def main() -> None:
    """Measures, and prints a table."""
    rest = sys.argv[1:]
    if rest[:1] == ["partial"]:
        parser = arguments(
            __doc__, ["Uneven", "Slow-resets", "CartPole-v1", "HalfCheetah-v5"], [32]
        )
        parser.add_argument("--num-workers", type=int, help="of ShmVectorEnv (default: one a core)")
        compute: Any = {"type": float, "metavar": "US", "default": [0, 200, 2000]}
        parser.add_argument("--compute", nargs="+", **compute)
        named = {"workload": "workload", "num_envs": "envs", "compute_us": "parent, µs"}
        measure, rest = partials, rest[1:]
    else:
        parser = arguments(__doc__, seconds=4)
        names = [*POLICIES, "network"]
        parser.add_argument("--cell", nargs="+", choices=names, default=list(POLICIES))
        parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
        parser.add_argument("--us", type=float, default=1600, help="of a step of all envs")
        parser.add_argument("--device", default="cpu", help="of the network")
        parser.add_argument("--num-envs", type=int, default=256, help="with the network")
        parser.add_argument("--rounds", type=int, default=8)
        named = {"cell": "cell", "workers": "workers"}
        measure = pipelines
    options = parser.parse_args(rest)
    print(f"{describe_machine(machine())}\n")
    rate = ["steps/s"] if measure is partials else []  # a pipeline's batches may hold resets
    figures = "batch step, µs", "spread", *rate, "of the limit", "× lockstep"
    print(heading(*named.values(), "system", *figures), flush=True)
    rows = []
    for row in measure(options):
        rows.append(row)
        batch, its_spread, per_s, share = cells(row)
        times = f"{row['times_lockstep']:.2f}" if "times_lockstep" in row else ""
        shown = batch, its_spread, *([per_s] if rate else []), share, times
        print(table_line(*(row[key] for key in (*named, "system")), *shown), flush=True)
    write_results(options.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()

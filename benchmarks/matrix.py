"""ShmVectorEnv beside every peer that is installed, over envs of all speeds and many settings.

    python benchmarks/matrix.py                              # all of it: hours
    python benchmarks/matrix.py --workload Noop Work-20 --num-envs 8 32 --num-workers --compute 0

Each cell is a workload, a number of envs and what the parent computes between steps. In it the
contenders take turns, in one run: ShmVectorEnv with its defaults, with each number of
workers and each wait policy asked for, Gymnasium's vector envs, Stable-Baselines3's SubprocVecEnv,
Tianshou's SubprocVectorEnv and ShmemVectorEnv, EnvPool's C++ envs and ALE's AtariVectorEnv (the
ceiling, where they have the env). A peer that is not installed is left out, by name.

For each the medians over the rounds: the batch step, its p50 and p99, env steps a second, their
share of the limit (free-running loops, one a core), CPU-seconds (parent and workers) per million
env steps, and CPU use while no env steps (`idle`: workers only, of one core). The spread is that of
the whole cycle of step and computing. Steps are counted as Gymnasium does: a step that only resets
is none.

At the end, `lost` names the cells in which a Python peer was faster than ShmVectorEnv's defaults,
and `policy` those in which a fixed wait policy was, by more than 10 %. Compared is the whole cycle:
waiting workers may slow the parent's computing down.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import peers
from harness import WORKLOADS, arguments, cpu_s, versions, write_results

from shmvec._commands.measuring import (
    LIMIT,
    Compute,
    Slice,
    Stepper,
    cells,
    described,
    line,
    machine,
    race,
)
from shmvec._cores import WAIT_POLICIES, descendants

OURS = "ShmVectorEnv"
MORE = ("p50_us", "p99_us", "cpu_s_per_million")
CELL = ("workload", "num_envs", "compute_us")


class Watched:
    """A contender whose batch steps are timed one by one, and whose processes' CPU time is read."""

    def __init__(self, start: Callable[[], Stepper]) -> None:
        """Starts it."""
        before = set(descendants(os.getpid()))
        self._stepper = start()
        self._processes = set(descendants(os.getpid())) - before
        self._step, self._stepper.step = self._stepper.step, self._timed
        self._times: list[float] = []
        self._turns: list[tuple[int, float, float]] = []  # batch steps, CPU-seconds, env steps
        self.close = self._stepper.close

    def _timed(self, actions: Any) -> Any:
        start = time.perf_counter()
        ends = self._step(actions)
        self._times.append(time.perf_counter() - start)
        return ends

    def run(self, seconds: float) -> Slice:
        """One turn."""
        begin = len(self._times)
        before = time.process_time() + self.cpu_s()
        one = self._stepper.run(seconds)
        used = time.process_time() + self.cpu_s() - before
        batches = len(self._times) - begin
        self._turns.append((batches, used, one.steps_per_s * one.batch_us * batches / 1e6))
        return one

    def figures(self) -> dict[str, float]:
        """Of all turns together, without the warm-up."""
        (warm_up, *_), *turns = self._turns
        _, used, steps = map(sum, zip(*turns, strict=True))
        quantiles = 1e6 * np.percentile(self._times[warm_up:], (50, 99))
        return dict(zip(MORE, (*quantiles, 1e6 * used / max(1, steps)), strict=True))

    def cpu_s(self) -> float:
        """What its processes, other than this one, have used so far."""
        return cpu_s(self._processes)


def contenders(workload: str, n: int, options: argparse.Namespace) -> dict[str, peers.Start]:
    """All that take part, by name."""
    fns = WORKLOADS[workload].fns(n)
    starts = {OURS: peers.ours(fns)}
    for count in sorted({min(int(count), n) for count in options.num_workers if count != "N"}):
        starts[f"{OURS}, {count} workers"] = peers.ours(fns, num_workers=count)
    if "N" in options.num_workers:
        starts[f"{OURS}, a worker an env"] = peers.ours(fns, num_workers=n)
    for policy in options.policy:
        starts[f"{OURS}, {policy}"] = peers.ours(fns, wait_policy=policy)
    return starts | (peers.peers(workload, fns) if options.peers else {})


def measure(
    workload: str, n: int, compute_us: float, options: argparse.Namespace, left_out: dict[str, str]
) -> list[dict[str, Any]]:
    """One cell."""
    compute = Compute(compute_us) if compute_us else None
    watched: dict[str, Watched] = {}
    idle: dict[str, float] = {}
    burner = multiprocessing.Process(target=_burn, daemon=True)

    def started(running: Mapping[str, Any]) -> None:
        watched.update({name: one for name, one in running.items() if name != LIMIT})
        if options.idle:
            idle.update(_rest(watched))
        if options.burner:
            burner.start()

    try:
        results = race(
            {
                name: partial(Watched, partial(start, compute))
                for name, start in contenders(workload, n, options).items()
            },
            options.seconds,
            limit=WORKLOADS[workload].makes,
            left_out=left_out,
            started=started,
        )
    finally:
        if burner.pid is not None:
            burner.kill()
            burner.join()
    cell = {"workload": workload, "num_envs": n, "compute_us": compute_us}
    return [
        {
            **cell,
            "system": name,
            **result.figures(results[LIMIT]),
            "batch_us": result.median.batch_us - result.median.compute_us,
            "cycle_us": result.median.batch_us,
            "idle_cpu": idle.get(name, 0.0),
            **(watched[name].figures() if name in watched else dict.fromkeys(MORE, 0.0)),
        }
        for name, result in results.items()
    ]


def _rest(watched: Mapping[str, Watched]) -> dict[str, float]:
    """CPU use while no env steps: a second to calm down, and one that is measured."""
    time.sleep(1)
    start, before = time.perf_counter(), {name: one.cpu_s() for name, one in watched.items()}
    time.sleep(1)
    passed = time.perf_counter() - start
    return {name: (one.cpu_s() - before[name]) / passed for name, one in watched.items()}


def _burn() -> None:
    """A foreign process that takes a core."""
    while True:
        pass


def _cells(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each cell: ShmVectorEnv with its defaults, and the others."""
    for ours in (row for row in rows if row["system"] == OURS):
        cell = [row for row in rows if all(row[key] == ours[key] for key in CELL)]
        yield ours, [row for row in cell if row["system"] not in (OURS, LIMIT)]


def lost(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Cells in which a Python peer was faster, or a fixed policy by more than 10 %."""
    policies = {f"{OURS}, {policy}" for policy in WAIT_POLICIES}
    for ours, others in _cells(rows):
        for row in others:
            if row["system"] in policies:
                word, factor = "policy", 1.1
            elif OURS in row["system"] or peers.CPP in row["system"]:
                continue
            else:
                word, factor = "lost", 1.0
            if factor * row["cycle_us"] < ours["cycle_us"]:
                yield (
                    f"{word}: {ours['workload']}, {ours['num_envs']} envs, parent computes "
                    f"{ours['compute_us']:.0f} µs: {row['system']} {row['cycle_us']:.1f} µs a "
                    f"cycle ± {row['spread']:.0%}, {OURS} {ours['cycle_us']:.1f} ± "
                    f"{ours['spread']:.0%}"
                )


def _line(row: dict[str, Any]) -> str:
    more = (f"{row[name]:,.1f}" for name in MORE)
    cell = row["workload"], row["num_envs"], f"{row['compute_us']:.0f}", row["system"]
    return line(*cell, *cells(row), *more, f"{row['idle_cpu']:.3%}")


def _count(text: str) -> str:
    if text != "N" and int(text) < 1:
        raise argparse.ArgumentTypeError("a number of workers, or N: one for each env")
    return text


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__, list(WORKLOADS), [1, 2, 8, 32, 128])
    parser.add_argument(
        "--num-workers",
        nargs="*",
        type=_count,
        default=["1", "2", "8", "N"],
        help="besides the default number; N: one for each env",
    )
    parser.add_argument("--policy", nargs="*", choices=WAIT_POLICIES[1:], default=WAIT_POLICIES[1:])
    parser.add_argument("--compute", nargs="+", type=float, default=[0, 200, 2000], metavar="US")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="only ShmVectorEnv")
    parser.add_argument("--burner", action="store_true", help="let a foreign process burn a core")
    parser.add_argument("--idle", action="store_true", help="measure CPU use while idle, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of peers; none of ours

    print(described(machine()))
    print("\n| workload | envs | parent, µs | system | batch, µs | spread | steps/s ", end="")
    print("| of the limit | p50 | p99 | CPU s/10⁶ | idle |\n|" + "---|" * 12)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    combinations = list(product(options.workload, options.num_envs, options.compute))
    for number, (workload, n, us) in enumerate(combinations, 1):
        title = f"[{number}/{len(combinations)}] {workload}, {n} envs, {us:.0f} µs"
        print(title, file=sys.stderr, flush=True)
        cell = measure(workload, n, us, options, left_out)
        rows += cell
        print("\n".join(map(_line, cell)), flush=True)
        setup = {**machine(), "libraries": versions()}
        write_results(options.json, {"machine": setup, "left_out": left_out, "rows": rows})
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    for complaint in lost(rows):
        print(complaint)


if __name__ == "__main__":
    main()

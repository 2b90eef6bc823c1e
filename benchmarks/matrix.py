"""ShmVectorEnv beside every peer that is installed, over envs of all speeds and many settings.

    python benchmarks/matrix.py                              # all of it: hours
    python benchmarks/matrix.py --workload noop work20 --num-envs 8 32 --num-workers --compute 0

Each cell is a workload, a number of envs and what the parent computes between steps. In it the
contenders take turns, in slices, in one run: ShmVectorEnv with its defaults, with each number of
workers and each wait policy asked for, Gymnasium's vector envs, Stable-Baselines3's SubprocVecEnv,
Tianshou's SubprocVectorEnv and ShmemVectorEnv, EnvPool's C++ envs and ALE's AtariVectorEnv (the
ceiling, where they have the env). A peer that is not installed is left out, by name.

For each: the batch step's median over the slices, their spread, its p50 and p99, env steps a
second, their share of the limit (free-running loops, one a core), CPU-seconds (parent and workers)
per million env steps, and CPU use while nobody steps (`idle`: workers only, of one core). Steps are
counted as Gymnasium does: a step that only resets is none.

At the end, `lost` names the cells in which a Python peer was faster than ShmVectorEnv's defaults,
and `policy` those in which a fixed wait policy was, by more than 10 %. Compared is the whole cycle
of step and computing: waiting workers may slow the parent's computing down.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import peers
from peers import Contender
from workloads import WORKLOADS, work

from shmvec import measuring
from shmvec._shared.scheduling import WAIT_POLICIES, usable_cores

ROUNDS = 5
OURS = "ShmVectorEnv"
CELL = ("workload", "num_envs", "compute_us")


def contenders(
    workload: str, n: int, options: argparse.Namespace, left_out: dict[str, str]
) -> list[Contender]:
    """Starts them all; what is not installed is named in `left_out`."""
    fns = WORKLOADS[workload](n)
    made = [peers.ours(OURS, fns)()]
    try:
        for count in sorted({min(int(count), n) for count in options.num_workers if count != "N"}):
            made.append(peers.ours(f"{OURS}, {count} workers", fns, num_workers=count)())
        if "N" in options.num_workers:
            made.append(peers.ours(f"{OURS}, a worker an env", fns, num_workers=n)())
        for policy in options.policy:
            made.append(peers.ours(f"{OURS}, {policy}", fns, wait_policy=policy)())
        for name, make in peers.peers(workload, fns).items() if options.peers else ():
            try:
                made.append(make())
            except ImportError as error:
                left_out[name] = str(error)
    except BaseException:
        for contender in made:
            contender.close()
        raise
    return made


def measure(
    workload: str, n: int, compute_us: float, options: argparse.Namespace, left_out: dict[str, str]
) -> list[dict[str, Any]]:
    """One cell."""
    compute = bytes(work(compute_us))
    limit = measuring.Limit(WORKLOADS[workload](8), usable_cores())  # 8: what is uneven repeats
    limits = []
    running: list[Contender] = []
    burner = multiprocessing.Process(target=_burn, daemon=True) if options.burner else None
    try:
        running = contenders(workload, n, options, left_out)
        if options.idle:
            _rest(running)
        if burner is not None:
            burner.start()
        for contender in running:
            contender.run(0.1, compute, keep=False)
        for _ in range(ROUNDS):
            limits.append(limit.run(options.seconds / ROUNDS).steps_per_s)
            for contender in running:
                contender.run(options.seconds / ROUNDS, compute)
    finally:
        if burner is not None and burner.pid is not None:
            burner.kill()
            burner.join()
        limit.close()
        for contender in running:
            contender.close()
    reached = statistics.median(limits)
    cell = {"workload": workload, "num_envs": n, "compute_us": compute_us, "limit": reached}
    return [{**cell, **contender.row(reached)} for contender in running]


def _rest(running: list[Contender]) -> None:
    """Lets all be idle, at the same time: a second to calm down, and one that is measured."""
    time.sleep(1)
    measured = partial(time.sleep, 1)
    for contender in running:  # each inside the one before
        measured = partial(contender.rest, measured)
    measured()


def _burn() -> None:
    """A foreign process that takes a core."""
    while True:
        pass


def _cells(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each cell: ShmVectorEnv with its defaults, and the others."""
    for ours in rows:
        if ours["system"] == OURS:
            yield (
                ours,
                [
                    row
                    for row in rows
                    if row is not ours and all(row[key] == ours[key] for key in CELL)
                ],
            )


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
    return (
        f"| {row['workload']} | {row['num_envs']} | {row['compute_us']:.0f} | {row['system']} "
        f"| {row['batch_us']:,.1f} | {row['spread']:.0%} | {row['p50_us']:,.1f} "
        f"| {row['p99_us']:,.1f} | {row['steps_per_s']:,.0f} | {row['share_of_limit']:.2f} "
        f"| {row['cpu_s_per_million']:,.1f} | {row['idle_cpu']:.3%} |"
    )


def _count(text: str) -> str:
    if text != "N" and int(text) < 1:
        raise argparse.ArgumentTypeError("a number of workers, or N: one for each env")
    return text


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--num-envs", nargs="+", type=int, default=[1, 2, 8, 32, 128])
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
    parser.add_argument("--seconds", type=float, default=2.0, help="for each contender in a cell")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for benchmarks/plot.py")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of peers; none of ours

    machine = measuring.machine()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print("\n| workload | envs | parent, µs | system | batch, µs | spread | p50 | p99 ", end="")
    print("| steps/s | of the limit | CPU s/10⁶ | idle |\n|" + "---|" * 12)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    cells = [
        (workload, n, us)
        for workload in options.workload
        for n in options.num_envs
        for us in options.compute
    ]
    for number, (workload, n, us) in enumerate(cells, 1):
        title = f"[{number}/{len(cells)}] {workload}, {n} envs, {us:.0f} µs"
        print(title, file=sys.stderr, flush=True)
        cell = measure(workload, n, us, options, left_out)
        rows += cell
        print("\n".join(map(_line, cell)), flush=True)
        if options.json is not None:
            results = {"machine": machine, "left_out": left_out, "rows": rows}
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    for line in lost(rows):
        print(line)


if __name__ == "__main__":
    main()

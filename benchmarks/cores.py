"""What more cores are worth: ShmVectorEnv and all peers on 1, 2, 4, 8, 16 cores of one machine.

    python benchmarks/cores.py --json cores.json         # by itself, in at most 25 minutes
    python benchmarks/plot.py cores.json --out figures   # cores.png

As many of the numbers of cores as this process may use; each by an affinity, the cores of one NUMA
node after those of another. In each cell (cores and workload) every contender is started, takes
three turns, each beside a turn of the limit (free-running loops, one a core), and is closed before
the next one starts: so many processes need not fit into memory together. There are --envs-per-core
envs, at least 8. ShmVectorEnv steps all, and batches of half of them; peers do what
benchmarks/peers.py and benchmarks/frameworks.py start, the latter with each of their settings, of
which the best is kept.

Time is given out evenly to the cells that are left, and in a cell to its contenders: with too
little, turns are shorter, and what remains of a cell whose time is over is left out, by name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peers
from frameworks import apart, frameworks
from guard import in_batches, stepping
from workloads import WORKLOADS

from shmvec._commands.measuring import (
    Limit,
    Result,
    Slice,
    cells,
    described,
    line,
    machine,
)

NODES = Path("/sys/devices/system/node")
ROUNDS = 3
WARM_UP_S = 0.1
LEAST_S, MOST_S = 0.05, 1.0  # a turn
OWN = ("ShmVectorEnv", "ShmVectorEnv, partial")


def nodes() -> dict[int, int]:
    """The NUMA node of each usable core."""
    found = {core: 0 for core in os.sched_getaffinity(0)}
    for folder in NODES.glob("node[0-9]*"):
        for part in (folder / "cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            for core in range(int(first), int(last or first) + 1) if first else ():
                if core in found:
                    found[core] = int(folder.name.removeprefix("node"))
    return found


def contenders(workload: str, n: int) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """System, setting, and what starts it: ours first."""
    make, fns = WORKLOADS[workload].make, WORKLOADS[workload].fns(n)
    yield OWN[0], "", partial(peers.ours(fns), None)
    if n > 1:
        yield OWN[1], f"batch {n // 2}", stepping(make, n, in_batches, batch_size=n // 2)
    for system, start in peers.peers(workload, fns).items():
        yield system, "", partial(start, None)
    for system, settings in frameworks(make, n).items():
        if system not in OWN:
            for setting, begin in settings.items():
                yield system, setting, partial(apart, system, begin)


def cell(
    workload: str, n: int, systems: Sequence[str], deadline: float, left_out: dict[str, str]
) -> list[dict[str, Any]]:
    """All contenders, one after the other, until the deadline."""
    every = [one for one in contenders(workload, n) if not systems or one[0] in systems]
    rows: list[dict[str, Any]] = []
    with contextlib.closing(
        Limit([WORKLOADS[workload].make], len(os.sched_getaffinity(0)))
    ) as limit:
        limit.run(WARM_UP_S)
        for number, (system, setting, start) in enumerate(every):
            name = f"{system} {setting}".strip()
            share = (deadline - time.perf_counter()) / (len(every) - number)
            if share < 2 * ROUNDS * LEAST_S:
                left_out[f"{workload}, {n} envs: {name}"] = "no time"
                continue
            begin = time.perf_counter()
            try:
                turns = _turns(start, limit, share, begin)
            except (ImportError, RuntimeError, TimeoutError) as error:
                left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            ours, theirs = (Result(part) for part in zip(*turns, strict=True))
            rows.append({"system": system, "setting": setting, **ours.figures(theirs)})
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["share_of_limit"] >= best.get(row["system"], row)["share_of_limit"]:
            best[row["system"]] = row
    return list(best.values())


def _turns(
    start: Callable[[], Any], limit: Limit, share: float, begin: float
) -> list[tuple[Slice, Slice]]:
    """Turns of one contender, each beside one of the limit."""
    with contextlib.closing(start()) as running:
        running.run(WARM_UP_S)
        left = share - (time.perf_counter() - begin)
        seconds = min(MOST_S, max(LEAST_S, left / (2 * ROUNDS)))
        return [(running.run(seconds), limit.run(seconds)) for _ in range(ROUNDS)]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    workloads = ["CartPole-v1", "HalfCheetah-v5", "ALE/Pong-v5", "Noop-image"]
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=workloads)
    parser.add_argument("--cores", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--envs-per-core", type=int, default=8)
    parser.add_argument("--system", nargs="+", default=[], help="only these")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="for benchmarks/plot.py")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of peers; none of ours
    begin = time.perf_counter()
    places = nodes()
    order = sorted(places, key=lambda core: (places[core], core))
    told = {**machine(), "numa_nodes": len(set(places.values()))}
    print(f"{described(told)}, {told['numa_nodes']} NUMA nodes")
    counts = [count for count in options.cores if count <= len(order)]
    missing = [count for count in options.cores if count > len(order)]
    if missing:
        print(f"not run, there are no more cores: {', '.join(map(str, missing))}")
    print(
        "\n| workload | cores | NUMA | envs | system | setting | batch, µs | spread | steps/s ",
        end="",
    )
    print("| of the limit |\n|" + "---|" * 10, flush=True)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    pairs = [(count, name) for count in counts for name in options.workload]
    for number, (count, name) in enumerate(pairs):
        if WORKLOADS[name].missing():
            left_out[name] = f"{' and '.join(WORKLOADS[name].missing())} not installed"
            continue
        print(f"[{number + 1}/{len(pairs)}] {name}, {count} cores", file=sys.stderr, flush=True)
        left = 60 * options.minutes - (time.perf_counter() - begin)
        deadline = time.perf_counter() + left / (len(pairs) - number)
        n = max(8, options.envs_per_core * count)
        used = order[:count]
        os.sched_setaffinity(0, used)
        try:
            found = cell(name, n, options.system, deadline, left_out)
        finally:
            os.sched_setaffinity(0, order)
        spans = len({places[core] for core in used})
        for row in found:
            row.update(workload=name, cores=count, numa_nodes=spans, num_envs=n)
            shown = name, count, spans, n, row["system"], row["setting"]
            print(line(*shown, *cells(row)), flush=True)
        rows += found
        if options.json is not None:
            results = {"machine": told, "left_out": left_out, "cores": rows}
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    for what, why in left_out.items():
        print(f"left out: {what} ({why})")


if __name__ == "__main__":
    main()

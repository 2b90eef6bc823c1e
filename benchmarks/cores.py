"""ShmVectorEnv and all peers in one table, on 1, 2, 4, 8, 16 cores of one machine.

    python benchmarks/cores.py --json cores.json         # by itself, in at most 25 minutes
    python benchmarks/plot.py cores.json --out figures   # cores.png
    python benchmarks/cores.py --cores 2 --num-envs 32 --workload CartPole-v1 --json part.json
    python benchmarks/cores.py --system 'Sample Factory' --python 'Sample Factory=../old/bin/python'
    python benchmarks/cores.py --json cores.json --show  # the table of all parts so far

As many of the numbers of cores as this process may use; each by an affinity, the cores of one NUMA
node after those of another. There are --envs-per-core envs, at least 8, or --num-envs. In each cell
(cores, workload and envs) every contender is started, alternates with the limit every 50 ms
(free-running loops, one a core), and is closed before the next one starts: so many processes need
not fit into memory together. ShmVectorEnv steps all, and batches of half of them; peers do what
benchmarks/peers.py and benchmarks/frameworks.py start, the latter with each of their settings, of
which the table has the best. A contender that can not do it has a row that says why.

Time is given out evenly to the cells that are left, and in a cell to its contenders, the first
setting of each system before second ones: with too little, rounds are shorter, and what is left
of a cell whose time is over is left out, by name, and the script fails in the end. What --json's
file has of other cells and systems stays there, if machine and versions are the same: so it can be
made in parts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peers
from frameworks import apart, frameworks
from guard import in_batches, stepping
from harness import ENVPOOL, WORKLOADS, Row, merged, versions, write_results

from shmvec._commands.measuring import (
    LIMIT,
    Limit,
    Result,
    alternated,
    cells,
    described,
    line,
    machine,
)

NODES = Path("/sys/devices/system/node")
ROUNDS = 5
LEAST_S = 0.05  # of a round
WARM_UP_S = 0.1
NO_TIME = "no time"
GYMNASIUM = ("AsyncVectorEnv", "SyncVectorEnv")  # like ours, these start in this process
HEAD = "workload cores NUMA envs system setting".split() + [
    *("batch, µs", "spread", "steps/s", "of the limit")
]
CELL = ("workload", "cores", "num_envs", "system")


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


def _unable(why: str) -> Any:
    raise RuntimeError(why)


def contenders(
    workload: str, n: int, pythons: Mapping[str, str]
) -> dict[str, dict[str, Callable[[], Any]]]:
    """What starts each system with each of its settings: ours first."""
    make, fns = WORKLOADS[workload].make, WORKLOADS[workload].fns(n)
    ours, envpool = "ShmVectorEnv", "EnvPool" + peers.CPP
    found: dict[str, dict[str, Callable[[], Any]]] = {
        ours: {"": partial(peers.ours(fns), None)},
        f"{ours}, partial": {
            f"batch {n // 2}": stepping(make, n, in_batches, batch_size=n // 2)
            for _ in range(n > 1)
        },
    }
    for system, start in peers.peers(workload, fns).items():
        begin = partial(start, None)
        if system not in GYMNASIUM:
            begin = partial(apart, begin, pythons.get(system, sys.executable))
        found[system] = {"": begin}
    if workload not in ENVPOOL:
        found[envpool] = {"": partial(_unable, "it has no such env")}
    for system, settings in frameworks(make, n).items():
        python = pythons.get(system, sys.executable)
        found[system] = {
            setting: partial(apart, begin, python) for setting, begin in settings.items()
        }
    for settings in found.values():
        if not settings:
            settings[""] = partial(_unable, f"none of its settings divides {n} envs")
    return found


def in_turn(
    systems: Mapping[str, Mapping[str, Callable[[], Any]]],
) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """The first setting of each system, then the second ones."""
    for number in range(max(map(len, systems.values()))):
        for system, settings in systems.items():
            for setting, start in list(settings.items())[number : number + 1]:
                yield system, setting, start


def cell(
    workload: str,
    systems: Mapping[str, Mapping[str, Callable[[], Any]]],
    deadline: float,
    seconds: float,
    keep: Callable[[list[Row]], object],
    say: Callable[[str], object],
) -> None:
    """All contenders, one after the other, until the deadline; keeps all rows after each.

    Args:
        workload: What they step.
        systems: What starts each, by setting.
        deadline: When they must be done, by `time.perf_counter`.
        seconds: How long each contender and its limit are measured at most.
        keep: Takes all rows so far.
        say: Is called with what was done.
    """
    every = list(in_turn(systems))
    rows: list[Row] = []
    with contextlib.closing(
        Limit([WORKLOADS[workload].make], len(os.sched_getaffinity(0)))
    ) as limit:
        limit.run(WARM_UP_S)
        for number, (system, setting, start) in enumerate(every):
            row: Row = {"system": system, "setting": setting}
            rows.append(row)
            left = deadline - time.perf_counter()
            share = left / (len(every) - number)
            if share < 2 * ROUNDS * LEAST_S:
                row["reason"] = NO_TIME
                keep(rows)
                continue
            begin = time.perf_counter()
            try:
                ours, theirs = _measured(start, limit, begin + share, seconds)
            except Exception as error:  # whatever a peer can not do
                row["reason"] = next(iter(str(error).splitlines()), type(error).__name__)
            else:
                row.update({name: round(of, 4) for name, of in ours.figures(theirs).items()})
            keep(rows)
            say(f"{system} {setting}: {time.perf_counter() - begin:.1f} s")


def _measured(
    start: Callable[[], Any], limit: Limit, until: float, seconds: float
) -> tuple[Result, Result]:
    """One contender, and the limit beside it."""
    with contextlib.closing(start()) as running:
        running.run(WARM_UP_S)
        left = max(2 * ROUNDS * LEAST_S, min(seconds, until - time.perf_counter()))
        found = alternated({"it": running, LIMIT: limit}, left / 2, ROUNDS)
        return found["it"], found[LIMIT]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines: of each system the best setting, or why it has none."""
    order = list(WORKLOADS)
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        systems = [*contenders(row["workload"], row["num_envs"], {}), row["system"]]
        place = order.index(row["workload"]), row["num_envs"], row["cores"]
        key = (*place, systems.index(row["system"]), row["system"])
        if row.get("share_of_limit", -1) > best.setdefault(key, row).get("share_of_limit", -1):
            best[key] = row
    yield line(*HEAD)
    yield "|---|--:|--:|--:|---|---|--:|--:|--:|--:|"
    for _, row in sorted(best.items()):
        shown = [row[name] for name in ("workload", "cores", "numa_nodes", "num_envs", "system")]
        yield line(*shown, row.get("reason", row["setting"]), *cells(row))


def measure(
    options: argparse.Namespace, say: Callable[[str], object], keep: Callable[[list[Row]], object]
) -> None:
    """All cells that were asked for."""
    begin = time.perf_counter()
    places = nodes()
    order = sorted(places, key=lambda core: (places[core], core))
    missing = [count for count in options.cores if count > len(order)]
    if missing:
        print(f"not run, there are no more cores: {', '.join(map(str, missing))}")
    todo = [
        (count, name, n)
        for count in options.cores
        if count <= len(order)
        for name in options.workload
        for n in options.num_envs or [max(8, options.envs_per_core * count)]
    ]
    for number, (count, name, n) in enumerate(todo):
        say(f"[{number + 1}/{len(todo)}] {name}, {count} cores, {n} envs")
        used = order[:count]
        spans = len({places[core] for core in used})
        where = {"workload": name, "cores": count, "numa_nodes": spans, "num_envs": n}
        os.sched_setaffinity(0, used)
        try:
            systems = contenders(name, n, options.python)
            if options.system:
                systems = {one: systems[one] for one in systems if one in options.system}
            if WORKLOADS[name].missing():
                why = f"{' and '.join(WORKLOADS[name].missing())} not installed"
                systems = {one: {"": partial(_unable, why)} for one in systems}
            left = 60 * options.minutes - (time.perf_counter() - begin)
            deadline = time.perf_counter() + left / (len(todo) - number)
            kept = partial(_keep_there, keep, where)
            cell(name, systems, deadline, options.seconds, kept, say)
        finally:
            os.sched_setaffinity(0, order)


def _keep_there(keep: Callable[[list[Row]], object], where: Row, rows: list[Row]) -> None:
    keep([{**where, **row} for row in rows])


def _setup(pythons: Mapping[str, str]) -> dict[str, Any]:
    """Machine and versions."""
    return {
        **machine(),
        "numa_nodes": len(set(nodes().values())),
        "libraries": versions(sys.executable),
        "apart": {system: versions(python) for system, python in pythons.items()},
    }


def _named(given: str) -> tuple[str, str]:
    system, _, python = given.rpartition("=")
    return system, python


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    workloads = ["CartPole-v1", "HalfCheetah-v5", "ALE/Pong-v5", "Noop-image"]
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=workloads)
    parser.add_argument("--cores", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--envs-per-core", type=int, default=8)
    parser.add_argument("--num-envs", nargs="+", type=int, help="in place of --envs-per-core")
    parser.add_argument("--system", nargs="+", default=[], help="only these")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all")
    parser.add_argument("--seconds", type=float, default=6.0, help="for a contender at most")
    parser.add_argument(
        "--python",
        action="append",
        type=_named,
        default=[],
        metavar="SYSTEM=INTERPRETER",
        help="one for a system alone, but for ours and Gymnasium's",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="for benchmarks/plot.py")
    parser.add_argument("--show", action="store_true", help="print what is there, measure nothing")
    options = parser.parse_args()
    options.python = dict(options.python)
    warnings.simplefilter("ignore")  # of peers; none of ours
    results: dict[str, Any] = {}
    measured: list[Row] = []
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text())
    if options.show:
        if not results:
            parser.error("--show prints what is in --json's file, and there is none")
    else:
        setup = _setup(options.python)
        if results and (setup | {"apart": 0} != results["machine"] | {"apart": 0}):
            parser.error(f"{options.json} is of another machine or other versions")
        setup["apart"] = {**results.get("machine", setup)["apart"], **setup["apart"]}
        results = {"machine": setup, "cores": results.get("cores", [])}

        def keep(rows: list[Row]) -> None:
            measured[:] = merged(measured, rows, CELL)
            results["cores"] = merged(results["cores"], rows, CELL)
            write_results(options.json, results)

        measure(options, partial(print, file=sys.stderr, flush=True), keep)
    setup = results["machine"]
    print(f"{described(setup)}, {setup['numa_nodes']} NUMA nodes")
    for system, found in {"": setup["libraries"], **setup["apart"]}.items():
        print(f"{system}: " * bool(system) + ", ".join(map(" ".join, found.items())))
    print("", *table(results["cores"]), sep="\n", flush=True)
    if any(row.get("reason") == NO_TIME for row in measured):
        sys.exit("there was no time for some of them: see the table")


if __name__ == "__main__":
    main()

"""ShmVectorEnv and every other system that is installed, with envs of all speeds and settings.

    python benchmarks/matrix.py settings                     # all of it: hours
    python benchmarks/matrix.py settings --workload Noop Work-20 --num-envs 8 --compute 0
    python benchmarks/matrix.py settings --adapter sb3 --num-workers --policy
    python benchmarks/matrix.py cores --json cores.json      # by itself, in at most 25 minutes
    python benchmarks/matrix.py cores --json cores.json --show
    python benchmarks/matrix.py gymnasium                    # by Gymnasium's own benchmark
    python benchmarks/plot.py cores.json --out figures

settings: a cell is a workload, a number of envs and the time that the parent computes between
steps. All contenders of a cell take turns in one run: ShmVectorEnv with its defaults, with the
given numbers of workers and wait policies, and the given systems of benchmarks/contenders.py, by
default the vector envs. `bound, k` are k processes that step without any communication. Systems
that are not installed are left out and named. The table has medians over the rounds: the batch
step, env steps a second, their share of the limit (free-running loops, one a core), and CPU-seconds
(parent and workers) per million env steps. The spread is that of the whole cycle of step and
computing. At the end, `lost` names the cells in which a Python peer was faster than ShmVectorEnv's
defaults, and `policy` those in which a fixed wait policy was faster by more than 10 %. The whole
cycle is compared, because waiting workers may slow the parent's computing down.

cores: on the given numbers of cores, as far as this process may use them, each by an affinity, and
filling one NUMA node after the other. There are --envs-per-core envs, at least 8, or --num-envs. In
each cell (cores, workload and envs) every contender is started, alternates with the limit every
50 ms, and is closed before the next one starts, so their processes need not fit into memory
together. The table has the best setting of each system; if a system fails, its row says why. Time
is divided evenly among the remaining cells, and in a cell among its contenders, the first setting
of each system before second ones. With too little time, rounds are shorter; contenders that get
none are left out and named, and the script fails in the end. Results of other cells and systems
stay in --json's file if machine and versions are the same, so it can be made in parts.

gymnasium: `gymnasium.utils.performance.benchmark_vector_step` of Gymnasium 1.4, which anybody can
run without us, by turns for ShmVectorEnv and Gymnasium's vector envs. It samples actions while it
measures.
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
from itertools import product
from pathlib import Path
from typing import Any

from contenders import (
    ADAPTERS,
    CPP,
    IN_PROCESS,
    OURS,
    PEERS,
    SINGLES,
    Bound,
    Start,
    apart,
    ours,
    systems,
)
from gymnasium.utils import performance
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from harness import (
    ASLEEP,
    WORKLOADS,
    Row,
    arguments,
    cpu_s,
    heading,
    in_turns,
    merged,
    versions,
    write_results,
)

from shmvec import ShmVectorEnv
from shmvec._commands.measuring import (
    LIMIT,
    Compute,
    Limit,
    Result,
    Slice,
    Stepper,
    alternate,
    cells,
    describe_machine,
    machine,
    race,
    table_line,
)
from shmvec._cores import WAIT_POLICIES, descendant_ids, usable_cores

Say = Callable[[str], object]

# ---- settings ------------------------------------------------------------------------------------

CELL = ("workload", "num_envs", "compute_us")


class Watched:
    """A contender whose parent computes between batch steps, and whose CPU time is read."""

    def __init__(self, start: Start, compute: Compute | None) -> None:
        """Starts the contender."""
        before = descendant_ids(os.getpid())
        self._contender = start()
        self._processes = set(descendant_ids(os.getpid())).difference(before)
        self._turns: list[tuple[float, float]] = []  # CPU-seconds, env steps
        self._batches, self._computed, self._compute = 0, 0.0, compute
        self.close = self._contender.close
        if isinstance(self._contender, Stepper):
            self._step, self._contender.step = self._contender.step, self._counted

    def _counted(self, actions: Any) -> Any:
        self._batches += 1
        ends = self._step(actions)
        if self._compute is not None:
            self._computed += self._compute()
        return ends

    def run(self, seconds: float) -> Slice:
        """Takes a turn."""
        before, self._batches, self._computed = self._used(), 0, 0.0
        one: Slice = self._contender.run(seconds)
        steps = one.steps_per_s * one.batch_us * self._batches / 1e6
        self._turns.append((self._used() - before, steps))
        return one._replace(compute_us=self._computed / max(1, self._batches))

    def _used(self) -> float:
        return time.process_time() + cpu_s(self._processes)

    def cpu_s_per_million(self) -> float:
        """CPU-seconds per million steps, without the warm-up; 0 if batches are not counted."""
        used, steps = map(sum, zip(*self._turns[1:], strict=True))
        return 1e6 * used / steps if steps else 0.0


def contenders(workload: str, n: int, options: argparse.Namespace) -> dict[str, Start]:
    """The functions that start all contenders, by name."""
    fns = WORKLOADS[workload].fns(n)
    starts: dict[str, Start] = {OURS: partial(ours, fns)}
    counts = sorted({min(int(count), n) for count in options.num_workers if count != "N"})
    for count in counts:
        starts[f"{OURS}, {count} workers"] = partial(ours, fns, num_workers=count)
        if options.bound:
            starts[f"bound, {count}"] = partial(Bound, fns, processes=count)
    if "N" in options.num_workers:
        starts[f"{OURS}, a worker an env"] = partial(ours, fns, num_workers=n)
    for policy in options.policy:
        starts[f"{OURS}, {policy}"] = partial(ours, fns, wait_policy=policy)
    known = systems(workload, n)
    for name in [*options.system, *(one for of in options.adapter for one in ADAPTERS[of])]:
        for setting, start in known[name].items():
            starts[f"{name}, {setting}" if setting else name] = start
    return starts


def measured(
    workload: str, n: int, compute_us: float, options: argparse.Namespace, left_out: dict[str, str]
) -> list[Row]:
    """Measures one cell."""
    compute = Compute(compute_us) if compute_us else None
    watched: dict[str, Watched] = {}

    def started(running: Mapping[str, Any]) -> None:
        watched.update({name: one for name, one in running.items() if name != LIMIT})

    loops = n if workload == ASLEEP else usable_cores()
    starts: dict[str, Callable[[], Any]] = {LIMIT: partial(Limit, WORKLOADS[workload].kinds, loops)}
    for name, start in contenders(workload, n, options).items():
        starts[name] = partial(Watched, start, compute)
    results = race(starts, options.seconds, left_out=left_out, started=started)
    return [
        {
            "workload": workload,
            "num_envs": n,
            "compute_us": compute_us,
            "system": name,
            **result.figures(results[LIMIT]),
            "batch_us": result.median.batch_us - result.median.compute_us,
            "cycle_us": result.median.batch_us,
            "cpu_s_per_million": watched[name].cpu_s_per_million() if name in watched else 0.0,
        }
        for name, result in results.items()
    ]


def lost(rows: list[Row]) -> Iterator[str]:
    """Describes cells in which a Python peer was faster, or a fixed policy by more than 10 %."""
    factors = dict.fromkeys(PEERS, 1.0) | {f"{OURS}, {policy}": 1.1 for policy in WAIT_POLICIES}
    ours = {tuple(row[key] for key in CELL): row for row in rows if row["system"] == OURS}
    for row in rows:
        cell, system = ours[tuple(row[key] for key in CELL)], row["system"]
        factor = 0.0 if CPP in system else factors.get(system, 0.0)
        if 0 < factor * row["cycle_us"] < cell["cycle_us"]:
            yield (
                f"{'lost' if system in PEERS else 'policy'}: {row['workload']}, "
                f"{row['num_envs']} envs, parent computes {row['compute_us']:.0f} µs: {system} "
                f"{row['cycle_us']:.1f} µs a cycle ± {row['spread']:.0%}, {OURS} "
                f"{cell['cycle_us']:.1f} ± {cell['spread']:.0%}"
            )


def settings(options: argparse.Namespace) -> None:
    """Measures all cells, and prints the table."""
    setup = {**machine(), "libraries": versions()}
    print(describe_machine(setup))
    columns = "workload", "envs", "parent, µs", "system", "batch, µs", "spread", "steps/s"
    print("", heading(*columns, "of the limit", "CPU s/10⁶"), sep="\n")
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    combinations = list(product(options.workload, options.num_envs, options.compute))
    for number, (workload, n, us) in enumerate(combinations, 1):
        title = f"[{number}/{len(combinations)}] {workload}, {n} envs, {us:.0f} µs"
        print(title, file=sys.stderr, flush=True)
        cell = measured(workload, n, us, options, left_out)
        rows += cell
        for row in cell:
            shown = row["workload"], row["num_envs"], f"{row['compute_us']:.0f}", row["system"]
            print(table_line(*shown, *cells(row), f"{row['cpu_s_per_million']:,.1f}"), flush=True)
        write_results(options.json, {"machine": setup, "left_out": left_out, "rows": rows})
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    for complaint in lost(rows):
        print(complaint)


# ---- cores ---------------------------------------------------------------------------------------

NODES = Path("/sys/devices/system/node")
ROUNDS = 5
MIN_ROUND_S = 0.05
WARM_UP_S = 0.1
NO_TIME = "no time"


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


def alone(
    workload: str, n: int, options: argparse.Namespace
) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yields functions that start the systems: the first setting of each, then the second ones."""
    known = systems(workload, n)
    asked = options.system or [name for name in known if name not in NOT_ON_CORES]
    if missing := WORKLOADS[workload].missing():
        why = f"{' and '.join(missing)} not installed"
        known = {name: {"": partial(_unable, why)} for name in asked}
    for number in range(max(1, *(len(known[name]) for name in asked))):
        for name in asked:
            if not known[name] and number == 0:
                why = "it has no such env" if CPP in name else f"no setting divides {n} envs"
                yield name, "", partial(_unable, why)
            for setting, start in list(known[name].items())[number : number + 1]:
                python = options.python.get(name, sys.executable)
                yield name, setting, start if name in IN_PROCESS else partial(apart, start, python)


def cell(
    workload: str, n: int, options: argparse.Namespace, deadline: float, say: Say
) -> Iterator[list[Row]]:
    """Measures contenders one after the other until the deadline; yields all rows after each."""
    every = list(alone(workload, n, options))
    rows: list[Row] = []
    with contextlib.closing(
        Limit([WORKLOADS[workload].make], len(os.sched_getaffinity(0)))
    ) as limit:
        limit.run(WARM_UP_S)
        for number, (system, setting, start) in enumerate(every):
            row: Row = {"system": system, "setting": setting}
            rows.append(row)
            begin = time.perf_counter()
            share = (deadline - begin) / (len(every) - number)
            if share < 2 * ROUNDS * MIN_ROUND_S:
                row["reason"] = NO_TIME
                yield rows
                continue
            try:
                result, reference = _with_limit(start, limit, begin + share, options.seconds)
            except Exception as error:  # whatever a peer cannot do
                row["reason"] = next(iter(str(error).splitlines()), type(error).__name__)
            else:
                figures = result.figures(reference).items()
                row.update({name: round(value, 4) for name, value in figures})
            yield rows
            say(f"{system} {setting}: {time.perf_counter() - begin:.1f} s")


def _with_limit(
    start: Callable[[], Any], limit: Limit, until: float, seconds: float
) -> tuple[Result, Result]:
    """Measures one contender and the limit by turns."""
    with contextlib.closing(start()) as running:
        running.run(WARM_UP_S)
        left = max(2 * ROUNDS * MIN_ROUND_S, min(seconds, until - time.perf_counter()))
        found = alternate({"it": running, LIMIT: limit}, left / 2, ROUNDS)
        return found["it"], found[LIMIT]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields lines of the table: each system's best setting, or why it has none."""
    workloads = list(WORKLOADS)
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        order = [*systems(row["workload"], row["num_envs"]), row["system"]]
        place = workloads.index(row["workload"]), row["num_envs"], row["cores"]
        key = (*place, order.index(row["system"]), row["system"])
        if row.get("share_of_limit", -1) > best.setdefault(key, row).get("share_of_limit", -1):
            best[key] = row
    head = "workload", "cores", "NUMA", "envs", "system", "setting", "batch, µs", "spread"
    yield heading(*head, "steps/s", "of the limit")
    for _, row in sorted(best.items()):
        shown = [row[name] for name in ("workload", "cores", "numa_nodes", "num_envs", "system")]
        yield table_line(*shown, row.get("reason", row["setting"]), *cells(row))


def on_cores(options: argparse.Namespace, say: Say) -> Iterator[list[Row]]:
    """Measures all cells; yields the rows of a cell so far after each contender."""
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
            left = 60 * options.minutes - (time.perf_counter() - begin)
            deadline = time.perf_counter() + left / (len(todo) - number)
            for rows in cell(name, n, options, deadline, say):
                yield [{**where, **row} for row in rows]
        finally:
            os.sched_setaffinity(0, order)


def cores(options: argparse.Namespace) -> None:
    """Measures, or shows results of a file."""
    options.python = dict(options.python)
    results: dict[str, Any] = {}
    lacking = False
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text())
    if options.show and not results:
        sys.exit("--show prints what is in --json's file, and there is none")
    if not options.show:
        setup = {
            **machine(),
            "numa_nodes": len(set(nodes().values())),
            "libraries": versions(),
            "apart": {system: versions(python) for system, python in options.python.items()},
        }
        if results and (setup | {"apart": 0} != results["machine"] | {"apart": 0}):
            sys.exit(f"{options.json} is of another machine or other versions")
        setup["apart"] = {**results.get("machine", setup)["apart"], **setup["apart"]}
        results = {"machine": setup, "cores": results.get("cores", [])}
        for rows in on_cores(options, partial(print, file=sys.stderr, flush=True)):
            lacking |= rows[-1].get("reason") == NO_TIME
            key = "workload", "cores", "num_envs", "system"
            results["cores"] = merged(results["cores"], rows, key)
            write_results(options.json, results)
    setup = results["machine"]
    print(f"{describe_machine(setup)}, {setup['numa_nodes']} NUMA nodes")
    for system, found in {"": setup["libraries"], **setup["apart"]}.items():
        print(f"{system}: " * bool(system) + ", ".join(map(" ".join, found.items())))
    print("", *table(results["cores"]), sep="\n", flush=True)
    if lacking:
        sys.exit("there was no time for some contenders: see the table")


# ---- gymnasium -----------------------------------------------------------------------------------


def gymnasium(options: argparse.Namespace) -> None:
    """Prints the table of Gymnasium's own benchmark."""
    if not hasattr(performance, "benchmark_vector_step"):
        sys.exit("this Gymnasium has no benchmark_vector_step: 1.4 has")
    rows: list[Row] = []
    print(describe_machine(machine()), "", sep="\n")
    print(heading("workload", "envs", "system", "steps/s", "spread", "× Async"))
    for workload, n in product(options.workload, options.num_envs):
        kinds: list[Any] = [ShmVectorEnv, AsyncVectorEnv, SyncVectorEnv]
        with contextlib.ExitStack() as stack:
            turns = {}
            for kind in kinds:
                envs = stack.enter_context(contextlib.closing(kind(WORKLOADS[workload].fns(n))))
                turns[kind.__name__] = partial(_benchmark, envs, options.seconds / options.rounds)
            results = in_turns(turns, options.rounds)
        for name, result in results.items():
            rate, times = result.median.steps_per_s, result.ratio(results["AsyncVectorEnv"])
            row = {"workload": workload, "num_envs": n, "system": name, "steps_per_s": rate}
            rows.append({**row, "spread": result.spread, "times_async": times})
            shown = f"{rate:,.0f}", f"{result.spread:.0%}", f"{times:.2f}"
            print(table_line(workload, n, name, *shown), flush=True)
    write_results(options.json, {"machine": machine(), "gymnasium": rows})


def _benchmark(envs: Any, seconds: Any) -> Slice:
    rate = performance.benchmark_vector_step(envs, seconds, 0)
    return Slice(1e6 * envs.num_envs / rate, rate)


# ---- the command line ----------------------------------------------------------------------------

NOT_ON_CORES = (*SINGLES, *(name for of in ADAPTERS.values() for name in of if name not in PEERS))
BARE = ["CartPole-v1", "HalfCheetah-v5", "ALE/Pong-v5"]


def _count(text: str) -> str:
    if text != "N" and int(text) < 1:
        raise argparse.ArgumentTypeError("a number of workers, or N: one for each env")
    return text


def _system_python(text: str) -> tuple[str, str]:
    system, _, python = text.rpartition("=")
    return system, python


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)
    known = list(systems("Noop", 2))

    one = what.add_parser("settings", help="all in one run, at many settings")
    arguments("", list(WORKLOADS), [1, 2, 8, 32, 128], parser=one)
    more = "besides the default number; N: one for each env"
    one.add_argument(
        "--num-workers", nargs="*", type=_count, default=["1", "2", "8", "N"], help=more
    )
    one.add_argument("--policy", nargs="*", choices=WAIT_POLICIES[1:], default=WAIT_POLICIES[1:])
    one.add_argument("--compute", nargs="+", type=float, default=[0, 200, 2000], metavar="US")
    one.add_argument("--system", nargs="*", choices=known, default=PEERS, metavar="SYSTEM")
    one.add_argument("--adapter", nargs="+", choices=ADAPTERS, default=[], help="and its system")
    one.add_argument("--bound", action="store_true", help="processes without communication, too")

    one = what.add_parser("cores", help="all, one after the other, on 1 to 16 cores")
    arguments("", [*BARE, "Noop-image"], seconds=6.0, parser=one)
    one.add_argument("--num-envs", nargs="+", type=int, help="in place of --envs-per-core")
    one.add_argument("--envs-per-core", type=int, default=8)
    one.add_argument("--cores", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    one.add_argument("--system", nargs="+", choices=known, metavar="SYSTEM", help="only these")
    one.add_argument("--minutes", type=float, default=25.0, help="for all")
    one.add_argument(
        "--python",
        action="append",
        type=_system_python,
        default=[],
        metavar="SYSTEM=INTERPRETER",
        help="an interpreter for one system, other than ours and Gymnasium's",
    )
    one.add_argument(
        "--show", action="store_true", help="print the file's results, measure nothing"
    )

    one = what.add_parser("gymnasium", help="by Gymnasium's own benchmark")
    arguments("", ["CartPole-v1"], [8], 15.0, parser=one)
    one.add_argument("--rounds", type=int, default=3)

    options = parser.parse_args()
    warnings.simplefilter("ignore")  # those of peers; shmvec gives none
    {"settings": settings, "cores": cores, "gymnasium": gymnasium}[options.what](options)


if __name__ == "__main__":
    main()

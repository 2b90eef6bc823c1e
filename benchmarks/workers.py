"""More workers than cores: what each number of workers reaches, what it could, where it goes.

    python benchmarks/workers.py                         # CartPole, 32 envs, 1 to 32 workers
    python benchmarks/workers.py --workload HalfCheetah-v5 --num-workers 2 3 8
    python benchmarks/workers.py --num-workers 4 --json FILE   # adds to what FILE has of others

For each number of workers, by turns in one run: ShmVectorEnv in lockstep, and with
`pin_workers=True`; and `bound`, as many processes, an equal number on each core, which take turns
there. In its turn each steps its envs once. They do not communicate, but they have their own
copies of all that an interpreter touches, and a step that follows another process's finds none of
that in the core's caches (primitives.py has what that costs without Python). Of the bound only the
stepping counts, as if handing a core over took no time: a batch step is as long as the turns on the
core where they take longest. No order in which workers run, each at one go and always on its core,
is faster than that.

Shares are of the limit: free-running loops, one a core, whose processes never change. `step, µs` is
the time of an env's step; `switches` are those from process to process in a batch step, the
parent's included.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from harness import WORKLOADS, Row, arguments, merged, read_rows, write_results

from shmvec import ShmVectorEnv
from shmvec._commands.measuring import LIMIT, Slice, cells, described, line, machine, race
from shmvec._commands.measuring import vector_env as stepping
from shmvec._cores import split_evenly

LINE = 128  # bytes: what is one core's is not on a line with what is another's
OURS, PINNED, BOUND = "ShmVectorEnv", "pin_workers", "bound"


class Ours:
    """ShmVectorEnv, of which is noted how long its envs' steps take, and the context switches."""

    def __init__(
        self, workload: str, num_envs: int, num_workers: int, pin_workers: bool = False
    ) -> None:
        """Starts it."""
        fns = WORKLOADS[workload].fns(num_envs)
        self._envs: Any = ShmVectorEnv(fns, num_workers=num_workers, pin_workers=pin_workers)
        self._pids = [*(process.pid for process in self._envs.processes), os.getpid()]
        self._stepper = stepping(lambda: self._envs)
        self.close = self._stepper.close
        self.figures: list[tuple[float, float]] = []  # a turn each: µs a step, switches a batch

    def run(self, seconds: float) -> Slice:
        """One turn."""
        switches, before = _switches(self._pids), self._envs.stats()
        one = self._stepper.run(seconds)
        done = self._envs.stats() - before
        step_us = sum(1e6 * worker.step_s for worker in done.workers)
        self.figures.append(
            (
                step_us / sum(worker.steps for worker in done.workers),
                (_switches(self._pids) - switches) / done.workers[0].requests,
            )
        )
        return one


def _switches(pids: Sequence[int]) -> int:
    """Context switches that processes have made so far."""
    lines = (line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


class Bound:
    """Processes that take turns on the cores, without any communication."""

    def __init__(self, workload: str, num_envs: int, num_workers: int) -> None:
        """Starts them."""
        context = multiprocessing.get_context("fork")
        cores = sorted(os.sched_getaffinity(0))
        self._num_envs, self._cores = num_envs, len(cores)
        self._turns = mmap.mmap(-1, LINE * len(cores))  # how many a core has seen
        self._pipes, self._processes = [], []
        self.figures: list[tuple[float, ...]] = []
        fns = WORKLOADS[workload].fns(num_envs)
        for index, envs in enumerate(split_evenly(num_envs, num_workers)):
            here, place = index % len(cores), index // len(cores)
            among = len(range(here, num_workers, len(cores)))
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_take_turns,
                args=(fns[envs.start : envs.stop], cores[here], here, place, among),
                kwargs={"turns": self._turns, "pipe": theirs},
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, seconds: float) -> Slice:
        """One turn: a batch step as if there were nothing but stepping."""
        self._turns[:] = bytes(len(self._turns))
        for pipe in self._pipes:
            pipe.send(seconds)
        turns_us = [pipe.recv() for pipe in self._pipes]
        batch_us = max(sum(turns_us[core :: self._cores]) for core in range(self._cores))
        self.figures.append((sum(turns_us) / self._num_envs,))
        return Slice(batch_us, 1e6 * self._num_envs / batch_us)

    def close(self) -> None:
        """Ends the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()
            pipe.close()


def _take_turns(
    fns: Sequence[Callable[[], Any]],
    core: int,
    here: int,
    place: int,
    among: int,
    *,
    turns: mmap.mmap,
    pipe: Connection,
) -> None:
    """Steps envs for the time given, when it is its turn: answers how long a turn takes, in µs."""
    os.sched_setaffinity(0, {core})
    turn = np.frombuffer(turns, np.int64, 1, LINE * here)
    envs = [make() for make in fns]
    envs[0].action_space.seed(0)
    actions = [envs[0].action_space.sample() for _ in range(64)]
    for env in envs:
        env.reset(seed=0)
    clock, give_way = time.perf_counter_ns, os.sched_yield
    while (seconds := pipe.recv()) is not None:
        count = stepping_ns = 0
        end = clock() + int(1e9 * seconds)
        while (now := clock()) < end:
            if turn[0] % among != place:
                give_way()
                continue
            action = actions[count % 64]
            for env in envs:
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            stepping_ns += clock() - now
            count += 1
            turn[0] += 1
        pipe.send(stepping_ns / 1e3 / max(1, count))
    for env in envs:
        env.close()


HEAD = [
    line(
        *("workload", "envs", "workers", "system", "batch, µs", "spread", "steps/s"),
        *("of the limit", "step, µs", "switches"),
    ),
    "|---|--:|--:|---" + "|--:" * 6 + "|",
]

KINDS: dict[str, Callable[[str, int, int], Any]] = {
    BOUND: Bound,
    OURS: Ours,
    PINNED: partial(Ours, pin_workers=True),
}


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__, ["CartPole-v1"], [32])
    parser.add_argument("--num-workers", nargs="+", type=int, default=[1, 2, 3, 4, 8, 16, 32])
    options: argparse.Namespace = parser.parse_args()
    setup = machine()
    rows = read_rows(options.json, "workers", setup)
    print(described(setup), "", *HEAD, sep="\n", flush=True)
    for workload in options.workload:
        if missing := WORKLOADS[workload].missing():
            print(f"left out: {workload} ({' and '.join(missing)} not installed)")
            continue
        for n in options.num_envs:
            found = measure(workload, n, options)
            print(*map(shown, found), sep="\n", flush=True)
            rows = merged(rows, found, ("workload", "num_envs", "workers"))
            write_results(options.json, {"machine": setup, "workers": rows})


def measure(workload: str, n: int, options: argparse.Namespace) -> list[Row]:
    """The rows of a workload and a number of envs."""
    running: dict[Any, Any] = {}
    starts = {
        (count, name): partial(kind, workload, n, count)
        for count in options.num_workers
        if count <= n
        for name, kind in KINDS.items()
    }
    limit = WORKLOADS[workload].makes
    results = race(starts, options.seconds, limit=limit, started=running.update)
    rows: list[Row] = []
    for key, result in results.items():
        row = {"workload": workload, "num_envs": n}
        row |= dict(zip(("workers", "system"), ("", LIMIT) if key == LIMIT else key, strict=True))
        row |= result.figures(results[LIMIT])
        if key != LIMIT:
            medians = map(statistics.median, zip(*running[key].figures[1:], strict=True))
            row |= dict(zip(("step_us", "switches"), medians, strict=False))
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines, by workload and number of envs and of workers."""
    yield from HEAD
    order = list(WORKLOADS)
    for row in sorted(
        rows, key=lambda row: (order.index(row["workload"]), row["num_envs"], row["workers"] or 0)
    ):
        yield shown(row)


def shown(row: Row) -> str:
    """A line of the table."""
    more = [f"{row[name]:,.1f}" if name in row else "" for name in ("step_us", "switches")]
    names = ("workload", "num_envs", "workers", "system")
    return line(*(row[name] for name in names), *cells(row), *more)


if __name__ == "__main__":
    main()

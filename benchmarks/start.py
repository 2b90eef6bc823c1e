"""How long vector envs take to start and to close, and what memory they need, beside peers.

    python benchmarks/start.py                                       # all of it: hours
    python benchmarks/start.py --env HalfCheetah-v5 --num-envs 8 --method fork forkserver

A cell is an env, a number of envs, a start method ("default": the system's own), and whether the
parent has made one env before. In it the contenders take turns in one run, and each sample is a
process of its own (benchmarks/start_once.py), with torch imported as a training script has it:
ShmVectorEnv with a worker for each env and with its default number of workers, AsyncVectorEnv, and
TorchRL's ParallelEnv where it is installed.

For each the medians over the rounds: seconds from the constructor to the first observation (`first
obs`, with their spread) and the CPU-seconds that all processes have used by then; the seconds of a
second start in the same process (`again`: what is imported by then, or a fork server that runs, is
used once more), and of `close`; memory of the workers: Pss in
all, a worker's, and what is private in all (Pss divides a page by the number of processes that have
it, the parent among them); `server`: the Pss of a fork server and the like. `× Async` compares with
AsyncVectorEnv: the median over the rounds of the ratio of first observations, of CPU-seconds, and
of the memory of all processes but the parent, by Pss and by what is private.

The limit: one import of the env's packages in a fresh interpreter and so many bare forks of a
process that has everything imported; a line names these parts, and what making the envs takes. A
forked worker whose parent has imported all already needs only the forks, and the envs.

At the end, `slower` and `larger` name the cells in which ShmVectorEnv is not as good as
AsyncVectorEnv.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from shmvec._commands.bench import DEFAULT_WORKLOADS, WORKLOADS
from shmvec._commands.measuring import LIMIT, described, line, machine, spread, turns
from shmvec._cores import descendants

NAMES = {
    "shmvec-n": "ShmVectorEnv, a worker an env",
    "shmvec": "ShmVectorEnv",
    "async": "AsyncVectorEnv",
    "torchrl": "TorchRL ParallelEnv",
}
OURS = (NAMES["shmvec-n"], NAMES["shmvec"])
ASYNC = NAMES["async"]
CELL = ("env", "num_envs", "method", "made")
COLUMNS = {
    "env": "env",
    "num_envs": "envs",
    "method": "start",
    "made": "made before",
    "system": "system",
    "workers": "workers",
    "first_s": "first obs, s",
    "spread": "spread",
    "cpu_s": "CPU, s",
    "again_s": "again, s",
    "close_s": "close, s",
    "pss_mb": "Pss, MB",
    "worker_mb": "a worker",
    "private_mb": "private",
    "server_mb": "server",
    "times_async": "× Async: s",
    "cpu_async": "CPU",
    "pss_async": "Pss",
    "private_async": "private",
}
RATIOS = ("times_async", "cpu_async", "pss_async", "private_async")
FORMATS = {"workers": ".0f", "spread": ".0%"}
FORMATS |= dict.fromkeys(("first_s", "cpu_s", "again_s", "close_s", *RATIOS), ".2f")

SPARE = 1 / 8  # of the machine's memory: a sample that leaves less is ended
LEAVE_S = 2.0  # what processes get to end after their sample
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Failed(Exception):
    """A sample has no result; says why."""


class OutOfTime(Exception):
    """The run's time is over."""


def sample(asked: dict[str, Any], seconds: float, deadline: float) -> dict[str, float]:
    """One sample, in a process of its own; nothing of it is left afterwards.

    Args:
        asked: For start_once.py.
        seconds: How long it may take.
        deadline: When the run ends.

    Raises:
        Failed: It has ended with an error, or would have needed more time or memory.
        ImportError: What it needs is not installed.
        OutOfTime: The run's time is over.
    """
    program = Path(__file__).with_name("start_once.py")
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        process = subprocess.Popen(
            [sys.executable, str(program), json.dumps(asked)], stdout=said, stderr=complained
        )
        try:
            _watch(process, seconds, deadline)
        finally:
            _clear_away(process)
        said.seek(0)
        complained.seek(0)
        if process.returncode:
            last = (complained.read().strip() or f"exit code {process.returncode}").splitlines()[-1]
            if last.startswith(("ImportError", "ModuleNotFoundError")):
                raise ImportError(last)
            raise Failed(last)
        found: dict[str, float] = json.loads(said.read().splitlines()[-1])
        return found


def _watch(process: subprocess.Popen[bytes], seconds: float, deadline: float) -> None:
    begin = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            return
        if time.monotonic() > deadline:
            raise OutOfTime
        if time.monotonic() > begin + seconds:
            raise Failed(f"over {seconds:g} s")
        if _available() < SPARE:
            raise Failed(f"less than {SPARE:.0%} of the machine's memory left")


def _available() -> float:
    """The share of the machine's memory that is free."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kb = {name: int(value) for name, value, *_ in lines}
    return kb["MemAvailable:"] / kb["MemTotal:"]


def _clear_away(process: subprocess.Popen[bytes]) -> None:
    """Ends a sample's process if it has not ended, and all that it has left."""
    begin = time.monotonic() - (LEAVE_S if process.poll() is None else 0)
    while left := descendants(os.getpid()):  # orphans come to this process; see main()
        for pid in left:
            # A resource tracker ends after those that it is for, and then removes what they left.
            if time.monotonic() > begin + LEAVE_S * (2 if _is_tracker(pid) else 1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.01)
        for pid in set(left) - {process.pid}:
            with contextlib.suppress(ChildProcessError):  # it is not this process's own, or gone
                os.waitpid(pid, os.WNOHANG)
    process.wait()


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def measure(
    cell: dict[str, Any], options: argparse.Namespace, deadline: float, left_out: dict[str, str]
) -> list[dict[str, Any]]:
    """One cell: a row for each contender, the limit first; left out is what is not installed.

    A round for which there is no time any more does not count.
    """
    found: dict[str, list[dict[str, float]]] = {LIMIT: [], **{name: [] for name in options.system}}
    failed: dict[str, str] = {}
    for order in turns(list(found), options.rounds):
        taken: dict[str, dict[str, float]] = {}
        try:
            for system in order:
                if system in failed or NAMES.get(system) in left_out:
                    continue
                asked = {**cell, "system": system, "torch": options.torch, "again": options.again}
                try:
                    taken[system] = sample(asked, options.sample_limit, deadline)
                except Failed as error:
                    failed[system] = str(error)
                except ImportError as error:
                    left_out[NAMES[system]] = str(error)
        except OutOfTime:
            break
        for system, one in taken.items():
            found[system].append(one)
    rows = []
    for system, samples in found.items():
        row = {**cell, "system": NAMES.get(system, system)}
        if system in failed:
            rows.append({**row, "error": failed[system]})
        elif samples:
            rows.append({**row, **_figures(samples)})
            if "async" not in failed and found.get("async") and system != LIMIT:
                rows[-1] |= _beside(samples, found["async"])
    return rows


def _figures(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians over the rounds."""
    row = {name: statistics.median(one[name] for one in samples) for name in samples[0]}
    row["spread"] = spread([one["first_s"] for one in samples])
    row["worker_mb"] = row["pss_mb"] / row["workers"]
    return row


def _beside(
    samples: Sequence[dict[str, float]], reference: Sequence[dict[str, float]]
) -> dict[str, float]:
    """Ratios to another's samples of the same rounds: what disturbed both cancels."""
    rounds = list(zip(samples, reference, strict=True))

    def ratio(*figures: str) -> float:
        return statistics.median(
            sum(ours[name] for name in figures) / sum(theirs[name] for name in figures)
            for ours, theirs in rounds
        )

    return {
        "times_async": ratio("first_s"),
        "cpu_async": ratio("cpu_s"),
        "pss_async": ratio("pss_mb", "server_mb"),
        "private_async": ratio("private_mb", "server_mb"),
    }


def table_line(row: dict[str, Any]) -> str:
    """A row of the table: a cell for each of COLUMNS, empty where there is no figure."""
    if "error" in row:
        head = [_cell(name, row[name]) for name in (*CELL, "system")]
        return line(*head, "", row["error"].replace("|", "/"), *[""] * (len(COLUMNS) - 7))
    return line(*(_cell(name, row[name]) if name in row else "" for name in COLUMNS))


def _cell(name: str, value: Any) -> str:
    if name == "made":
        return "yes" if value else "no"
    return f"{value:{FORMATS.get(name, ',.1f')}}" if isinstance(value, float) else str(value)


def parts(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the limit of each env and number of envs consists of."""
    limits = [row for row in rows if row["system"] == LIMIT and "error" not in row]
    for env, n in dict.fromkeys((row["env"], row["num_envs"]) for row in limits):
        same = [row for row in limits if (row["env"], row["num_envs"]) == (env, n)]
        imported, forks, envs = (
            statistics.median(row[name] for row in same)
            for name in ("import_s", "forks_s", "envs_s")
        )
        yield (
            f"limit: {env}, {n} envs: one import {imported:.2f} s, {n} forks {forks:.2f} s; making "
            f"the envs, on all cores, {envs:.2f} s"
        )


def complaints(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Where ShmVectorEnv is slower or larger than AsyncVectorEnv."""
    for row in rows:
        if row["system"] not in OURS:
            continue
        cell = ", ".join(_cell(name, row[name]) for name in CELL[:3])
        cell += f"{', an env made before' if row['made'] else ''}: {row['system']}"
        if "error" in row:
            yield f"failed: {cell}: {row['error']}"
        for word, figure, of in (
            ("slower", "times_async", "time"),
            ("slower", "cpu_async", "CPU time"),
            ("larger", "pss_async", "memory"),
            ("larger", "private_async", "private memory"),
        ):
            if row.get(figure, 0) > 1:
                yield f"{word}: {cell}: {row[figure]:.2f} of AsyncVectorEnv's {of}"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    methods = ["fork", "forkserver", "spawn", "default"]
    parser.add_argument("--env", nargs="+", choices=WORKLOADS, default=list(DEFAULT_WORKLOADS))
    parser.add_argument("--num-envs", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--method", nargs="+", choices=methods, default=methods)
    parser.add_argument("--made", nargs="+", choices=["no", "yes"], default=["no", "yes"])
    parser.add_argument("--system", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--again",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether each starts a second time",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--sample-limit", type=float, default=180.0, metavar="S", help="of one sample, in seconds"
    )
    parser.add_argument(
        "--time-limit", type=float, default=3 * 3600.0, metavar="S", help="of the run, in seconds"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    deadline = time.monotonic() + options.time_limit
    # What a sample has started and left behind comes here, to be ended.
    ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)

    print(described(machine()))
    installed = importlib.util.find_spec("torch") is not None
    if options.torch:
        version = importlib.metadata.version("torch") if installed else ""
        print(f"torch {version} imported in the parent" if installed else "torch is not installed")
    options.torch &= installed
    print(f"\n{line(*COLUMNS.values())}")
    print("|" + "---|" * 5 + "--:|" * (len(COLUMNS) - 5), flush=True)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    values = product(options.env, options.num_envs, options.method, options.made)
    for env, n, method, made in values:
        missing = WORKLOADS[env].missing()
        if missing:
            left_out[env] = f"{' and '.join(missing)} not installed"
            continue
        cell = {"env": env, "num_envs": n, "method": method, "made": made == "yes"}
        name = f"{env}, {n} envs, {method}, made before: {made}"
        print(name, file=sys.stderr, flush=True)
        found = measure(cell, options, deadline, left_out)
        if not found:
            left_out[name] = f"{options.time_limit:g} s are over"
            continue
        rows += found
        print("\n".join(map(table_line, found)), flush=True)
        if options.json is not None:
            results = {"machine": machine(), "left_out": left_out, "rows": rows}
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    print()
    for what, why in left_out.items():
        print(f"left out: {what} ({why})")
    for said in (*parts(rows), *complaints(rows)):
        print(said)


if __name__ == "__main__":
    main()

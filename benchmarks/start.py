"""The times of starting and closing vector envs, and their memory, compared with peers.

    python benchmarks/start.py                                       # all of it: hours
    python benchmarks/start.py --env HalfCheetah-v5 --num-envs 8 --method fork forkserver

A cell is an env, a number of envs, a start method ("default": the system's own), and whether the
parent has made an env before. The contenders of a cell take turns in one run: ShmVectorEnv with a
worker for each env and with its default number of workers, AsyncVectorEnv, and TorchRL's
ParallelEnv if it is installed. Each sample is a fresh process (this file with ``--sample``), which
has imported torch, like a training script.

The table has medians over the rounds:

- `first obs`: seconds from the constructor to the first observation, with their spread; and the
  CPU-seconds of all processes until then;
- `again`: seconds of a second start in the same process, which uses what is imported by then, or a
  running fork server; and seconds of `close`;
- the workers' memory: Pss of all and of one, and private pages of all (Pss divides a page by the
  number of processes that have it, including the parent);
- `server`: the Pss of a fork server and the like;
- `× Async`: ratios to AsyncVectorEnv of the same round: of first observations, of CPU-seconds, and
  of the memory of all processes but the parent, by Pss and by private pages.

The limit is one import of the env's packages in a fresh interpreter, and the bare forks of a
process that has imported everything. A forked worker whose parent has imported everything needs
only the fork and its envs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import gymnasium as gym

# A sample is like a user's script: it imports gymnasium and torch at its top, so a start method
# that runs the main script again in each worker imports them again there. Imports that only the
# benchmark needs come later, so that workers do not make them.
SAMPLE = json.loads(sys.argv[2]) if sys.argv[1:2] == ["--sample"] else None
if SAMPLE is not None and SAMPLE["torch"]:
    importlib.import_module("torch")


# ---- a sample ------------------------------------------------------------------------------------

# A fresh interpreter that makes two envs: the times at which each was ready, and CPU times.
FRESH = """
import pickle, sys, time
make = pickle.load(sys.stdin.buffer)
for _ in range(2):
    make().reset()
    print(time.perf_counter(), time.process_time())
"""

# Imports of users' scripts, which are not part of a start.
IMPORTS = {
    "shmvec-n": "shmvec.vector_env",
    "shmvec": "shmvec.vector_env",
    "async": "gymnasium",
    "torchrl": "torchrl.envs",
}


def vector_env(system: str, make: Callable[[], Any], n: int, context: str | None) -> Any:
    """Starts a system's vector env; TorchRL's default start method is spawn."""
    module: Any = sys.modules[IMPORTS[system]]
    if system == "torchrl":
        return module.ParallelEnv(n, lambda: module.GymWrapper(make()), mp_start_method=context)
    if system == "async":
        return gym.vector.AsyncVectorEnv([make] * n, context=context)
    options = {"num_workers": n} if system == "shmvec-n" else {}
    return module.ShmVectorEnv([make] * n, context=context, **options)


def started(start: Callable[[], Any]) -> dict[str, float]:
    """Measures one start: seconds to the first observation, memory, and seconds of closing."""
    from harness import cpu_s

    from shmvec._cores import descendant_ids

    before = time.process_time() + cpu_s(descendant_ids(os.getpid()))
    begin = time.perf_counter()
    envs = start()
    envs.reset()
    ready = time.perf_counter()
    used = time.process_time() + cpu_s(descendant_ids(os.getpid())) - before
    own = isinstance(envs, gym.vector.VectorEnv)  # TorchRL's has any attribute: its envs'
    ours = envs.processes if own else multiprocessing.active_children()
    workers = {process.pid for process in ours}
    for pid in tuple(workers):
        workers.update(descendant_ids(pid))
    found = {"cpu_s": used, "workers": len(ours), **total(workers)}
    # Other processes: a fork server, a resource tracker.
    found["server_mb"] = total(set(descendant_ids(os.getpid())) - workers)["pss_mb"]
    begin_close = time.perf_counter()
    envs.close()
    return {"first_s": ready - begin, **found, "close_s": time.perf_counter() - begin_close}


def total(pids: Iterable[int]) -> dict[str, float]:
    """The memory of several processes together."""
    from harness import memory

    each = [memory(pid) for pid in pids]
    pss, private = (sum((getattr(one, name) for one in each), 0.0) for name in ("pss", "private"))
    return {"pss_mb": pss, "private_mb": private}


def limit(make: Callable[[], Any], n: int) -> dict[str, float]:
    """Measures the limit: one import, and ``n`` forks."""
    import cloudpickle

    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", FRESH], input=cloudpickle.dumps(make), stdout=-1, check=True
    )
    first, first_cpu, second, second_cpu = map(float, done.stdout.split())
    make().reset()
    forks = bare_forks(n)
    import_s = first - begin - (second - first)
    found = {**forks, "import_s": import_s, "forks_s": forks["first_s"]}
    found["first_s"] += import_s
    found["cpu_s"] += first_cpu - (second_cpu - first_cpu)
    return found


def bare_forks(n: int) -> dict[str, float]:
    """Measures forks that do nothing: seconds until all run and of ending them; their memory."""
    from harness import cpu_s

    reading, writing = os.pipe()
    pids: list[int] = []
    before = time.process_time()
    begin = time.perf_counter()
    for _ in range(n):
        pid = os.fork()
        if pid == 0:
            os.write(writing, b"x")
            signal.pause()
        pids.append(pid)
    running = 0
    while running < n:
        running += len(os.read(reading, n))
    ready = time.perf_counter()
    used = time.process_time() + cpu_s(pids) - before
    found = {"cpu_s": used, "workers": n, **total(pids), "server_mb": 0.0}
    begin_close = time.perf_counter()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    return {"first_s": ready - begin, **found, "close_s": time.perf_counter() - begin_close}


def take_sample(request: dict[str, Any]) -> dict[str, float]:
    """Starts one vector env twice, or measures the limit."""
    import cloudpickle

    from shmvec._commands import bench

    cloudpickle.register_pickle_by_value(bench)  # other systems' workers must not import shmvec
    make, n, system = bench.WORKLOADS[request["env"]].make, request["num_envs"], request["system"]
    if system == "limit":
        return limit(make, n)
    importlib.import_module(IMPORTS[system])
    if request["made"]:
        make().close()
    context = None if request["method"] == "default" else request["method"]
    found = started(lambda: vector_env(system, make, n, context))
    found["again_s"] = started(lambda: vector_env(system, make, n, context))["first_s"]
    return found


# ---- samples by turns ----------------------------------------------------------------------------

NAMES = {
    "shmvec-n": "ShmVectorEnv, a worker an env",
    "shmvec": "ShmVectorEnv",
    "async": "AsyncVectorEnv",
    "torchrl": "TorchRL ParallelEnv",
}
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
RATIOS = {  # to AsyncVectorEnv, of the sums of these figures
    "times_async": ("first_s",),
    "cpu_async": ("cpu_s",),
    "pss_async": ("pss_mb", "server_mb"),
    "private_async": ("private_mb", "server_mb"),
}
FORMATS = {"workers": ".0f", "spread": ".0%"}
FORMATS |= dict.fromkeys(("first_s", "cpu_s", "again_s", "close_s", *RATIOS), ".2f")

MIN_FREE_MEMORY = 1 / 8  # share of the machine's memory; a sample that leaves less is ended
END_S = 2.0  # time for processes to end after their sample
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Failed(Exception):
    """A sample has no result; the message says why."""


def sample(request: dict[str, Any], seconds: float) -> dict[str, float]:
    """Takes a sample in another process, of which nothing is left afterwards.

    Args:
        request: The argument of :func:`take_sample`.
        seconds: The time limit.

    Raises:
        Failed: The sample ended with an error, or needed too much time or memory.
        ImportError: Something that it needs is not installed.
    """
    command = [sys.executable, __file__, "--sample", json.dumps(request)]
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
        try:
            _watch(process, seconds)
        finally:
            _end_processes(process)
        stdout.seek(0)
        stderr.seek(0)
        if process.returncode:
            last = (stderr.read().strip() or f"exit code {process.returncode}").splitlines()[-1]
            if last.startswith(("ImportError", "ModuleNotFoundError")):
                raise ImportError(last)
            raise Failed(last)
        found: dict[str, float] = json.loads(stdout.read().splitlines()[-1])
        return found


def _watch(process: subprocess.Popen[bytes], seconds: float) -> None:
    begin = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            return
        if time.monotonic() > begin + seconds:
            raise Failed(f"over {seconds:g} s")
        with open("/proc/meminfo", encoding="ascii") as file:
            kb = {name: int(value) for name, value, *_ in map(str.split, file)}
        if kb["MemAvailable:"] < MIN_FREE_MEMORY * kb["MemTotal:"]:
            raise Failed(f"less than {MIN_FREE_MEMORY:.0%} of the machine's memory left")


def _end_processes(process: subprocess.Popen[bytes]) -> None:
    """Ends a sample's process if it has not ended, and its orphans."""
    from shmvec._cores import descendant_ids

    begin = time.monotonic() - (END_S if process.poll() is None else 0)
    while left := descendant_ids(os.getpid()):  # orphans come to this process; see main()
        for pid in left:
            # A resource tracker ends after those that it is for, and then removes what they left.
            if time.monotonic() > begin + END_S * (2 if _is_tracker(pid) else 1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.01)
        for pid in set(left) - {process.pid}:
            with contextlib.suppress(
                ChildProcessError
            ):  # it is not this process's child, or has ended
                os.waitpid(pid, os.WNOHANG)
    process.wait()


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"resource_tracker" in file.read()
    return False


def measure(
    cell: dict[str, Any], options: Any, left_out: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Measures a cell; yields a row for each contender that is installed, the limit first."""
    from shmvec._commands.measuring import turn_orders

    found: dict[str, list[dict[str, float]]] = {name: [] for name in ("limit", *options.system)}
    failed: dict[str, str] = {}
    for order in turn_orders(list(found), options.rounds):
        for system in order:
            if system in failed or NAMES.get(system) in left_out:
                continue
            request = {**cell, "system": system, "torch": options.torch}
            try:
                found[system].append(sample(request, options.sample_limit))
            except Failed as error:
                failed[system] = str(error)
            except ImportError as error:
                left_out[NAMES[system]] = str(error)
    for system, samples in found.items():
        row = {**cell, "system": NAMES.get(system, system)}
        if system in failed:
            yield {**row, "error": failed[system]}
        elif samples:
            references = [] if system == "limit" or "async" in failed else found.get("async", [])
            yield {**row, **_figures(samples, references)}


def _figures(
    samples: Sequence[dict[str, float]], references: Sequence[dict[str, float]]
) -> dict[str, float]:
    """Medians over the rounds, and ratios to AsyncVectorEnv of the same rounds."""
    from statistics import median

    from shmvec._commands.measuring import spread

    row = {name: median(one[name] for one in samples) for name in samples[0]}
    row["spread"] = spread([one["first_s"] for one in samples])
    row["worker_mb"] = row["pss_mb"] / row["workers"]
    for name, figures in RATIOS.items() if references else ():
        row[name] = median(
            sum(ours[figure] for figure in figures) / sum(theirs[figure] for figure in figures)
            for ours, theirs in zip(samples, references, strict=True)
        )
    return row


def cells(row: dict[str, Any]) -> Iterator[str]:
    """Yields a cell for each of COLUMNS, empty if there is no figure."""
    shown = {**row, "made": "yes" if row["made"] else "no"}
    if "error" in row:
        shown["first_s"] = row["error"].replace("|", "/")
    for name in COLUMNS:
        value = shown.get(name, "")
        form = FORMATS.get(name, ",.1f")
        yield format(value, form) if isinstance(value, float) else str(value)


def main() -> None:
    """Runs the command line."""
    import argparse
    from importlib.util import find_spec
    from pathlib import Path

    from harness import heading, write_results

    from shmvec._commands.bench import DEFAULT_WORKLOADS, WORKLOADS
    from shmvec._commands.measuring import describe_machine, machine, table_line

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3)
    methods = ["fork", "forkserver", "spawn", "default"]
    parser.add_argument("--env", nargs="+", choices=WORKLOADS, default=list(DEFAULT_WORKLOADS))
    parser.add_argument("--num-envs", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--method", nargs="+", choices=methods, default=methods)
    parser.add_argument("--made", nargs="+", choices=["no", "yes"], default=["no", "yes"])
    parser.add_argument("--system", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--sample-limit", type=float, default=180.0, metavar="S")
    options = parser.parse_args()
    # Orphans of samples become children of this process, which ends them.
    ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)

    options.torch &= find_spec("torch") is not None
    print(f"{describe_machine(machine())}; torch is {'' if options.torch else 'not '}imported\n")
    print(heading(*COLUMNS.values()), flush=True)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for env, n, method, made in product(
        options.env, options.num_envs, options.method, options.made
    ):
        if missing := WORKLOADS[env].missing():
            left_out[env] = f"{' and '.join(missing)} not installed"
            continue
        cell = {"env": env, "num_envs": n, "method": method, "made": made == "yes"}
        for row in measure(cell, options, left_out):
            rows.append(row)
            print(table_line(*cells(row)), flush=True)
        write_results(options.json, {"machine": machine(), "left_out": left_out, "rows": rows})
    for what, why in left_out.items():
        print(f"left out: {what} ({why})")


if __name__ == "__main__":
    if SAMPLE is None:
        main()
    else:
        warnings.simplefilter("ignore")  # those of peers; shmvec gives none
        print(json.dumps(take_sample(SAMPLE)))

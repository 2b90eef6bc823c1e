"""How long vector envs take to start and to close, and what memory they need, beside peers.

    python benchmarks/start.py                                       # all of it: hours
    python benchmarks/start.py --env HalfCheetah-v5 --num-envs 8 --method fork forkserver

A cell is an env, a number of envs, a start method ("default": the system's own), and whether the
parent has made one env before. In it the contenders take turns in one run, and each sample is a
fresh process (this file with ``--sample``), with torch imported as a training script has it:
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
process that has everything imported. A forked worker whose parent has imported all already needs
only the forks, and the envs.
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

# A sample is as a user's script: gymnasium and torch are imported at its top, so that a start
# method which runs the main script once more in each worker imports them once more there. What
# only the benchmark needs is imported later: a worker shall not import it.
SAMPLE = json.loads(sys.argv[2]) if sys.argv[1:2] == ["--sample"] else None
if SAMPLE is not None and SAMPLE["torch"]:
    importlib.import_module("torch")


# ---- a sample ------------------------------------------------------------------------------------

# A fresh interpreter that makes envs: when the first was ready, when the second, and CPU times.
FRESH = """
import pickle, sys, time
make = pickle.load(sys.stdin.buffer)
for _ in range(2):
    make().reset()
    print(time.perf_counter(), time.process_time())
"""

# What users' scripts import is not part of a start.
IMPORTS = {
    "shmvec-n": "shmvec.vector_env",
    "shmvec": "shmvec.vector_env",
    "async": "gymnasium",
    "torchrl": "torchrl.envs",
}


def vector_env(system: str, make: Callable[[], Any], n: int, context: str | None) -> Any:
    """Starts a system's; TorchRL's default start method is spawn."""
    module: Any = sys.modules[IMPORTS[system]]
    if system == "torchrl":
        return module.ParallelEnv(n, lambda: module.GymWrapper(make()), mp_start_method=context)
    if system == "async":
        return gym.vector.AsyncVectorEnv([make] * n, context=context)
    options = {"num_workers": n} if system == "shmvec-n" else {}
    return module.ShmVectorEnv([make] * n, context=context, **options)


def started(start: Callable[[], Any]) -> dict[str, float]:
    """One start: the seconds to the first observation and of closing; between them, memory."""
    from harness import cpu_s

    from shmvec._cores import descendants

    before = time.process_time() + cpu_s(descendants(os.getpid()))
    begin = time.perf_counter()
    envs = start()
    envs.reset()
    ready = time.perf_counter()
    used = time.process_time() + cpu_s(descendants(os.getpid())) - before
    own = isinstance(envs, gym.vector.VectorEnv)  # TorchRL's has any attribute: its envs'
    ours = envs.processes if own else multiprocessing.active_children()
    workers = {process.pid for process in ours}
    for pid in tuple(workers):
        workers.update(descendants(pid))
    found = {"cpu_s": used, "workers": len(ours), **total(workers)}
    # What else there is: a fork server, a resource tracker.
    found["server_mb"] = total(set(descendants(os.getpid())) - workers)["pss_mb"]
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
    """What there is to do at least: one import, and so many forks; and making the envs."""
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
    """Forks that do nothing: the seconds until all run, and of ending them; their memory."""
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


def take_sample(asked: dict[str, Any]) -> dict[str, float]:
    """Starts one vector env twice, or measures the limit."""
    import cloudpickle

    from shmvec._commands import bench

    cloudpickle.register_pickle_by_value(bench)  # workers of others shall import nothing of ours
    make, n, system = bench.WORKLOADS[asked["env"]].make, asked["num_envs"], asked["system"]
    if system == "limit":
        return limit(make, n)
    importlib.import_module(IMPORTS[system])
    if asked["made"]:
        make().close()
    context = None if asked["method"] == "default" else asked["method"]
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
RATIOS = {  # to AsyncVectorEnv: of which figures
    "times_async": ("first_s",),
    "cpu_async": ("cpu_s",),
    "pss_async": ("pss_mb", "server_mb"),
    "private_async": ("private_mb", "server_mb"),
}
FORMATS = {"workers": ".0f", "spread": ".0%"}
FORMATS |= dict.fromkeys(("first_s", "cpu_s", "again_s", "close_s", *RATIOS), ".2f")

SPARE = 1 / 8  # of the machine's memory: a sample that leaves less is ended
LEAVE_S = 2.0  # what processes get to end after their sample
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Failed(Exception):
    """A sample has no result; says why."""


def sample(asked: dict[str, Any], seconds: float) -> dict[str, float]:
    """One sample, in a process of its own; nothing of it is left afterwards.

    Args:
        asked: For :func:`take_sample`.
        seconds: How long it may take.

    Raises:
        Failed: It has ended with an error, or would have needed more time or memory.
        ImportError: What it needs is not installed.
    """
    command = [sys.executable, __file__, "--sample", json.dumps(asked)]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        process = subprocess.Popen(command, stdout=said, stderr=complained)
        try:
            _watch(process, seconds)
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
        if kb["MemAvailable:"] < SPARE * kb["MemTotal:"]:
            raise Failed(f"less than {SPARE:.0%} of the machine's memory left")


def _clear_away(process: subprocess.Popen[bytes]) -> None:
    """Ends a sample's process if it has not ended, and all that it has left."""
    from shmvec._cores import descendants

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
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"resource_tracker" in file.read()
    return False


def measure(
    cell: dict[str, Any], options: Any, left_out: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """One cell: a row for each contender, the limit first; left out is what is not installed."""
    from shmvec._commands.measuring import turns

    found: dict[str, list[dict[str, float]]] = {name: [] for name in ("limit", *options.system)}
    failed: dict[str, str] = {}
    for order in turns(list(found), options.rounds):
        for system in order:
            if system in failed or NAMES.get(system) in left_out:
                continue
            asked = {**cell, "system": system, "torch": options.torch}
            try:
                found[system].append(sample(asked, options.sample_limit))
            except Failed as error:
                failed[system] = str(error)
            except ImportError as error:
                left_out[NAMES[system]] = str(error)
    for system, samples in found.items():
        row = {**cell, "system": NAMES.get(system, system)}
        if system in failed:
            yield {**row, "error": failed[system]}
        elif samples:
            beside = [] if system == "limit" or "async" in failed else found.get("async", [])
            yield {**row, **_figures(samples, beside)}


def _figures(
    samples: Sequence[dict[str, float]], beside: Sequence[dict[str, float]]
) -> dict[str, float]:
    """Medians over the rounds, and the ratios to another's of the same rounds."""
    from statistics import median

    from shmvec._commands.measuring import spread

    row = {name: median(one[name] for one in samples) for name in samples[0]}
    row["spread"] = spread([one["first_s"] for one in samples])
    row["worker_mb"] = row["pss_mb"] / row["workers"]
    for name, figures in RATIOS.items() if beside else ():
        row[name] = median(
            sum(ours[figure] for figure in figures) / sum(theirs[figure] for figure in figures)
            for ours, theirs in zip(samples, beside, strict=True)
        )
    return row


def cells(row: dict[str, Any]) -> Iterator[str]:
    """A cell for each of COLUMNS, empty where there is no figure."""
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
    from shmvec._commands.measuring import described, line, machine

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
    # What a sample has started and left behind comes here, to be ended.
    ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)

    options.torch &= find_spec("torch") is not None
    print(f"{described(machine())}; torch is {'' if options.torch else 'not '}imported\n")
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
            print(line(*cells(row)), flush=True)
        write_results(options.json, {"machine": machine(), "left_out": left_out, "rows": rows})
    for what, why in left_out.items():
        print(f"left out: {what} ({why})")


if __name__ == "__main__":
    if SAMPLE is None:
        main()
    else:
        warnings.simplefilter("ignore")  # of peers; none of ours
        print(json.dumps(take_sample(SAMPLE)))

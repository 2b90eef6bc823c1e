"""Starts one vector env twice, in a process of its own: what benchmarks/start.py runs for a sample.

It is as a user's script: gymnasium and torch are imported at its top, so that a start method which
runs the main script once more in each worker imports them once more there; how envs are made goes
to workers by value, so that those of others import nothing of shmvec. What was asked for stands in
the command line, what was found on the last line that it prints, both as JSON.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium as gym

ASKED = json.loads(sys.argv[1])
if ASKED["torch"]:
    importlib.import_module("torch")

# A fresh interpreter that makes envs: when the first was ready, when the second, and CPU times.
FRESH = """
import pickle, sys, time
make = pickle.load(sys.stdin.buffer)
for _ in range(2):
    make().reset()
    print(time.perf_counter(), time.process_time())
"""


def shmvec(make: Callable[[], Any], n: int, context: str | None) -> Any:
    """Ours, with the default number of workers."""
    import shmvec

    return shmvec.ShmVectorEnv([make] * n, context=context)


def shmvec_n(make: Callable[[], Any], n: int, context: str | None) -> Any:
    """Ours, a worker an env."""
    import shmvec

    return shmvec.ShmVectorEnv([make] * n, context=context, num_workers=n)


def async_(make: Callable[[], Any], n: int, context: str | None) -> Any:
    """Gymnasium's."""
    return gym.vector.AsyncVectorEnv([make] * n, context=context)


def torchrl(make: Callable[[], Any], n: int, context: str | None) -> Any:
    """TorchRL's; its default start method is spawn."""
    from torchrl.envs import GymWrapper, ParallelEnv

    return ParallelEnv(n, lambda: GymWrapper(make()), mp_start_method=context)


SYSTEMS = {"shmvec-n": shmvec_n, "shmvec": shmvec, "async": async_, "torchrl": torchrl}
# What their users' scripts import; so it is not part of a start.
OURS = "shmvec.vector_env"
IMPORTS = {"shmvec-n": OURS, "shmvec": OURS, "torchrl": "torchrl.envs"}


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
    found = {
        "cpu_s": used,
        "workers": len(ours),
        **total(workers),
        # What else there is: a fork server, a resource tracker.
        "server_mb": total(set(descendants(os.getpid())) - workers)["pss_mb"],
    }
    begin_close = time.perf_counter()
    envs.close()
    return {"first_s": ready - begin, **found, "close_s": time.perf_counter() - begin_close}


def total(pids: Iterable[int]) -> dict[str, float]:
    """The memory of several processes together."""
    from harness import memory

    each = [memory(pid) for pid in pids]
    return {
        "pss_mb": sum((one.pss for one in each), 0.0),
        "private_mb": sum((one.private for one in each), 0.0),
    }


def limit(make: Callable[[], Any], n: int) -> dict[str, float]:
    """What there is to do at least: one import, and so many forks; and making the envs."""
    import cloudpickle

    from shmvec._cores import usable_cores

    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", FRESH], input=cloudpickle.dumps(make), stdout=-1, check=True
    )
    first, first_cpu, second, second_cpu = map(float, done.stdout.split())
    make().reset()
    forks = bare_forks(n)
    import_s = first - begin - (second - first)
    return {
        "import_s": import_s,
        "forks_s": forks["first_s"],
        "envs_s": (second - first) * n / min(n, usable_cores()),
        **forks,
        "first_s": import_s + forks["first_s"],
        "cpu_s": first_cpu - (second_cpu - first_cpu) + forks["cpu_s"],
    }


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


def main() -> None:
    """Runs the command line."""
    warnings.simplefilter("ignore")  # of peers; none of ours
    import cloudpickle

    from shmvec._commands import bench

    cloudpickle.register_pickle_by_value(bench)
    make, n, system = bench.WORKLOADS[ASKED["env"]].make, ASKED["num_envs"], ASKED["system"]
    if system == "limit":
        found = limit(make, n)
    else:
        importlib.import_module(IMPORTS.get(system, "gymnasium"))
        if ASKED["made"]:
            make().close()
        context = None if ASKED["method"] == "default" else ASKED["method"]
        found = started(lambda: SYSTEMS[system](make, n, context))
        if ASKED["again"]:
            found["again_s"] = started(lambda: SYSTEMS[system](make, n, context))["first_s"]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

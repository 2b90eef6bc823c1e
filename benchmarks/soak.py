"""A soak: workers are restarted and envs fail while a vector env is stepped; nothing may grow.

    python benchmarks/soak.py                       # 10^6 steps and 1,000 restarts
    python benchmarks/soak.py --seconds 3600        # until the time is up

CartPole envs that raise now and then; two or more workers at once are killed, or some restarted on
demand; steps, partial batches and rollouts take turns. Memory of the parent and of its workers,
descriptors, processes and /dev/shm are read at regular intervals. The last line says whether they
were flat: the last quarter's median is compared with the second quarter's. The exit status is 1 if
they were not.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from harness import memory

import shmvec
from shmvec._commands.measuring import described, machine

WORKERS = 4
GROWTH = {"memory, MB": 4.0, "workers, MB": 4.0, "descriptors": 0, "processes": 0, "/dev/shm": 0}


class Frail(gym.Wrapper):
    """Raises before one step in 20,000."""

    def step(self, action: Any) -> Any:
        """Steps, or raises."""
        if random.random() < 5e-5:
            raise LookupError("bad luck")
        return super().step(action)


def make() -> gym.Env[Any, Any]:
    """An env."""
    return Frail(gym.make("CartPole-v1"))


def reading(envs: shmvec.ShmVectorEnv) -> dict[str, float]:
    """What may not grow."""
    gc.collect()
    workers = [memory(process.pid).private for process in envs.processes]
    return {
        "memory, MB": memory(os.getpid()).private,
        "workers, MB": statistics.mean(workers),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "processes": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "/dev/shm": len(os.listdir("/dev/shm")),
    }


def bursts(envs: shmvec.ShmVectorEnv, actions: np.ndarray, length: int) -> int:
    """Steps, partial batches and a rollout; returns the number of env steps."""
    for _ in range(length):
        envs.step(actions)
    envs.send(actions)
    for _ in range(length):
        ids = envs.recv(min_envs=4)[-1]["env_id"]
        envs.send(actions[ids], ids)
    out = len(actions)
    while out:
        out -= len(envs.recv(min_envs=1)[1])
    rollout = envs.rollout(32)
    for _ in range(32):
        rollout.step(actions)
    return (length + 32 + 1) * len(actions) + 4 * length


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--restarts", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, help="run so long instead")
    parser.add_argument("--num-envs", type=int, default=8)
    options = parser.parse_args()
    logging.getLogger("shmvec").setLevel(logging.CRITICAL)  # a line for each fault otherwise
    print(described(machine()), flush=True)

    policy = shmvec.FaultPolicy(
        on_crash="restart", on_error="reset", max_restarts=10**9, backoff_s=0
    )
    envs = shmvec.ShmVectorEnv([make] * options.num_envs, num_workers=WORKERS, faults=policy)
    envs.reset(seed=0)
    actions = np.arange(options.num_envs) % 2
    rng = random.Random(0)
    steps = together = 0
    readings, begin = list[dict[str, float]](), time.monotonic()

    def goes_on() -> bool:
        if options.seconds is not None:
            return time.monotonic() - begin < options.seconds
        return steps < options.steps or envs.stats().faults.restarts < options.restarts

    length = max(1, options.steps // options.restarts // options.num_envs // 2)
    while goes_on():
        steps += bursts(envs, actions, length)
        if rng.random() < 0.8:
            for process in rng.sample(envs.processes, rng.randint(2, WORKERS)):
                process.kill()
            together += 1
        else:
            envs.restart([rng.randrange(options.num_envs)])
        envs.step(actions)
        if len(readings) < steps / options.steps * 100:
            readings.append(reading(envs))
    faults = envs.stats().faults
    envs.close()
    print(
        f"{steps:,} steps, {faults.restarts:,} restarts ({faults.crashes:,} of workers that were "
        f"killed, two or more at once, {together:,} times), {faults.errors:,} errors in envs, "
        f"{time.monotonic() - begin:.0f} s"
    )
    print("\n| | second quarter | last quarter | most |\n|---|--:|--:|--:|")
    quarter = max(1, len(readings) // 4)
    flat = True
    for name, allowed in GROWTH.items():
        values = [one[name] for one in readings]
        early = statistics.median(values[quarter : 2 * quarter] or values)
        late = statistics.median(values[-quarter:])
        flat &= late - early <= allowed
        print(f"| {name} | {early:,.1f} | {late:,.1f} | {max(values):,.1f} |")
    print("\nflat" if flat else "\nNOT FLAT")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())

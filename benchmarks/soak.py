"""A soak test: workers are restarted and envs fail while a vector env steps; nothing may grow.

    python benchmarks/soak.py                       # 10^6 steps and 1,000 restarts
    python benchmarks/soak.py --seconds 3600        # until the time is up
    python benchmarks/soak.py learning --json learning.json      # a minute or two
    python benchmarks/plot.py learning.json --out figures        # learning.png

CartPole envs raise now and then. Two or more workers at once are killed, or some are restarted on
demand. Steps, partial batches and rollouts take turns. Memory of the parent and of its workers,
descriptors, processes and /dev/shm are read at regular intervals. The last line says whether they
were flat: the last quarter's median is compared with the second quarter's. The exit status is 1 if
they were not.

learning: the effect of restarts on a learning curve. A policy gradient with a linear policy, in
NumPy, learns CartPole from rollouts of 32 envs in 4 workers. In half of the runs the workers in
turn are killed in the middle of every second rollout, and restarted as the FaultPolicy says. The
episodes of their envs are truncated, which is like any truncation for the learner. The mean lengths
of the episodes that end in each rollout are compared. Episodes that a kill has cut off are learned
from, but do not count in the means.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from harness import memory, versions, write_results

import shmvec
from shmvec._commands.measuring import describe_machine, machine

WORKERS = 4
ENVS, LENGTH, EVERY, RATE = 32, 128, 2, 8.0  # of learning
GROWTH = {"memory, MB": 4.0, "workers, MB": 4.0, "descriptors": 0, "processes": 0, "/dev/shm": 0}


class Frail(gym.Wrapper):
    """Raises before one step in 20,000."""

    def step(self, action: Any) -> Any:
        """Steps, or raises."""
        if random.random() < 5e-5:
            raise LookupError("bad luck")
        return super().step(action)


def make() -> gym.Env[Any, Any]:
    """Makes an env."""
    return Frail(gym.make("CartPole-v1"))


def reading(envs: shmvec.ShmVectorEnv) -> dict[str, float]:
    """Reads what must not grow."""
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
    in_flight = len(actions)
    while in_flight:
        in_flight -= len(envs.recv(min_envs=1)[1])
    rollout = envs.rollout(32)
    for _ in range(32):
        rollout.step(actions)
    return (length + 32 + 1) * len(actions) + 4 * length


def soak(options: argparse.Namespace) -> int:
    """Steps and reads what must not grow; returns the exit status."""
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


def learn(seed: int, rollouts: int, kills: bool) -> dict[str, Any]:
    """Makes a run; returns mean lengths of episodes by rollout, and the number of restarts."""
    policy = shmvec.FaultPolicy(on_crash="restart", max_restarts=rollouts, backoff_s=0)
    envs = shmvec.make_vec(
        "CartPole-v1", ENVS, vector_kwargs={"num_workers": WORKERS, "faults": policy}
    )
    envs.reset(seed=seed)
    random, weights = np.random.default_rng(seed), np.zeros(4)
    ages, lengths = np.zeros(ENVS), []
    for number in range(rollouts):
        rollout = envs.rollout(LENGTH)
        gradients, resets, ended = np.zeros((LENGTH, ENVS, 4)), np.zeros((LENGTH, ENVS), bool), []
        for t in range(LENGTH):
            observations = rollout.observations[t].astype(float)
            resets[t] = rollout.terminations[t] | rollout.truncations[t]
            right = 1 / (1 + np.exp(-observations @ weights))
            actions = (random.random(ENVS) < right).astype(int)
            gradients[t] = (actions - right)[:, None] * observations
            if kills and t == LENGTH // 2 and number % EVERY == 1:
                os.kill(envs.processes[number // EVERY % WORKERS].pid, signal.SIGKILL)
            infos = rollout.step(actions)
            ages += ~resets[t]
            over = rollout.terminations[t + 1] | rollout.truncations[t + 1]
            ended += ages[over & ~infos.get("_fault", np.zeros(ENVS, bool))].tolist()
            ages[over] = 0
        returns, later = np.zeros((LENGTH, ENVS)), np.zeros(ENVS)
        for t in reversed(range(LENGTH)):
            over = rollout.terminations[t + 1] | rollout.truncations[t + 1]
            later = rollout.rewards[t + 1] + 0.98 * later * ~over
            returns[t] = later
        used = ~resets  # a reset used no action
        advantages = (returns - returns[used].mean()) / returns[used].std() * used
        weights = weights + RATE * (advantages[:, :, None] * gradients).mean((0, 1))
        lengths.append(float(np.mean(ended)) if ended else float(LENGTH))
        del rollout
    restarts = envs.stats().faults.restarts
    envs.close()
    return {"seed": seed, "kills": kills, "restarts": restarts, "lengths": lengths}


def learning(options: argparse.Namespace) -> int:
    """Learns with and without kills, by turns; returns the exit status."""
    runs = []
    for seed in range(options.seeds):
        for kills in (False, True):
            run = learn(seed, options.rollouts, kills)
            runs.append(run)
            last = np.mean(run["lengths"][-5:])
            print(
                f"seed {seed}: {run['restarts']:2} restarts, {last:.0f} steps an episode at the end"
            )
    setup = {**machine(), "libraries": versions()}
    write_results(options.json, {"machine": setup, "learning": runs})
    return 0


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=["soak", "learning"], default="soak")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--restarts", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, help="run so long instead")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5, help="of learning: runs of each kind")
    parser.add_argument("--rollouts", type=int, default=50, help="of learning")
    parser.add_argument("--json", type=Path, metavar="FILE", help="of learning, for plot.py")
    options = parser.parse_args()
    logging.getLogger("shmvec").setLevel(logging.CRITICAL)  # a line for each fault otherwise
    print(describe_machine(machine()), flush=True)
    return learning(options) if options.part == "learning" else soak(options)


if __name__ == "__main__":
    sys.exit(main())

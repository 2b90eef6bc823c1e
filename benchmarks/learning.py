"""What restarts do to a learning curve: CartPole, learned while workers are killed, and while not.

    python benchmarks/learning.py --json learning.json      # a minute or two
    python benchmarks/plot.py learning.json --out figures   # learning.png

A policy gradient with a linear policy, in NumPy, over rollouts of 32 envs in 4 workers; in half of
the runs a worker, by turns, is killed in the middle of every second rollout, and restarted as the
FaultPolicy says. The episodes of its envs are truncated, which the learner sees as it sees any
truncation. Compared are the mean lengths of the episodes that have ended in each rollout; those
that were cut off by a kill are learned from, and not among them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from harness import versions

import shmvec
from shmvec._commands.measuring import described, machine

ENVS, WORKERS, LENGTH, EVERY, RATE = 32, 4, 128, 2, 8.0


def learn(seed: int, rollouts: int, kills: bool) -> dict[str, Any]:
    """One run: the mean length of episodes by rollout, and how often a worker was restarted."""
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


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind")
    parser.add_argument("--rollouts", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="FILE", help="for benchmarks/plot.py")
    options = parser.parse_args()
    print(described(machine()))
    logging.getLogger("shmvec").setLevel(logging.ERROR)  # each restart is a line
    runs = []
    for seed in range(options.seeds):
        for kills in (False, True):
            run = learn(seed, options.rollouts, kills)
            runs.append(run)
            last = np.mean(run["lengths"][-5:])
            print(
                f"seed {seed}: {run['restarts']:2} restarts, {last:.0f} steps an episode at the end"
            )
    if options.json is not None:
        setup = {**machine(), "libraries": versions()}
        options.json.write_text(json.dumps({"machine": setup, "learning": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Checkpoints of a whole run: weights, random generators and the state of every env.

    pip install shmvec
    python examples/recipes/checkpoint.py --file run.pickle    # after a crash, run it again

The resumed run has the results of an uninterrupted one, bit for bit, if the envs' states can be
taken (docs/planning.md). It uses SAME_STEP, in which no env waits for its reset after a step.
"""

import argparse
import copy
import pickle
from pathlib import Path

import gymnasium as gym
import numpy as np

import shmvec
from shmvec.states import StateAccess


class WithSnapshot(gym.Wrapper):
    """Adds snapshots of the env's state and of the generator that its resets draw from."""

    def snapshot(self):
        """Return everything that the env needs to go on from here."""
        state = StateAccess(self.env, include_rng=True).get()
        return copy.deepcopy(state), self.np_random.bit_generator.state

    def restore(self, snapshot):
        """Go on from a snapshot."""
        state, generator = snapshot
        StateAccess(self.env, include_rng=True).set(state)
        self.np_random.bit_generator.state = generator


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, default="run.pickle")
    file = parser.parse_args().file
    options = {"wrappers": [WithSnapshot], "autoreset_mode": "SameStep"}
    envs = shmvec.make_vec("CartPole-v1", num_envs=8, **options)
    observations, _ = envs.reset(seed=1)
    first, weights, rng = 0, np.zeros(4), np.random.default_rng(1)
    if file.exists():
        first, weights, rng, observations, snapshots = pickle.loads(file.read_bytes())
        for env, snapshot in enumerate(snapshots):
            envs.call_some([env], "restore", snapshot)
    for step in range(first, 1000):  # learn the values of a random policy
        before, actions = observations, rng.integers(0, 2, envs.num_envs)
        observations, rewards, terminations, _, _ = envs.step(actions)
        errors = rewards + 0.9 * ~terminations * (observations @ weights) - before @ weights
        weights = weights + 0.01 * errors @ before
        if (step + 1) % 100 == 0:
            run = step + 1, weights, rng, observations, envs.call("snapshot")
            unfinished = file.with_suffix(".unfinished")
            unfinished.write_bytes(pickle.dumps(run))
            unfinished.replace(file)  # a crash leaves the old file or the new one
            print(f"step {step + 1}: {weights}", flush=True)
    envs.close()

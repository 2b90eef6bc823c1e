"""Normalised observations and rewards, with statistics that are saved and loaded.

    pip install shmvec
    python examples/recipes/normalize.py --folder statistics

Around the vector env, NormalizeObservation and NormalizeReward keep one set of statistics for all
envs. That is what a policy needs. Around each env, they run in the workers, in compiled code, and
each env has statistics of its own: `envs.get_attr("obs_rms")` (docs/wrappers.md).
"""

import argparse
from pathlib import Path

import numpy as np
from gymnasium.wrappers.utils import RunningMeanStd
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward

import shmvec


def save(file: Path, statistics: RunningMeanStd) -> None:
    """Save a wrapper's statistics."""
    np.savez(file, mean=statistics.mean, var=statistics.var, count=statistics.count)


def load(file: Path, statistics: RunningMeanStd) -> None:
    """Load statistics that `save` has written."""
    with np.load(file) as arrays:
        statistics.mean, statistics.var = arrays["mean"], arrays["var"]
        statistics.count = arrays["count"].item()


def main() -> None:
    """Collect statistics in training, and use them in an evaluation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default="statistics")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)

    observed = NormalizeObservation(shmvec.make_vec("Pendulum-v1", num_envs=16))
    envs = NormalizeReward(observed, gamma=0.99)
    envs.action_space.seed(1)
    envs.reset(seed=1)
    for _ in range(500):
        observations, rewards, *_ = envs.step(envs.action_space.sample())
    print(f"the last observations: mean {observations.mean():.2f}, std {observations.std():.2f}")
    save(folder / "observations.npz", observed.obs_rms)
    save(folder / "returns.npz", envs.return_rms)  # load these to train on
    envs.close()

    evaluated = NormalizeObservation(shmvec.make_vec("Pendulum-v1", num_envs=4))
    load(folder / "observations.npz", evaluated.obs_rms)
    evaluated.update_running_mean = False  # an evaluation does not change them
    observations, _ = evaluated.reset(seed=2)
    print(f"normalised by {evaluated.obs_rms.count:.0f} observations: {observations[0]}")
    evaluated.close()


if __name__ == "__main__":
    main()

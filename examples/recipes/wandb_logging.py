"""Returns, lengths and speed in Weights & Biases, on a step axis of env steps.

    pip install shmvec wandb
    python examples/recipes/wandb_logging.py                        # offline, into ./wandb
    WANDB_MODE=online python examples/recipes/wandb_logging.py      # `wandb sync` sends it later

The envs are made before wandb.init, which starts threads, so workers are forked from a program that
has none. If it must be the other way round, choose context="forkserver" (docs/simulators.md).
"""

import argparse
import os
import time

import numpy as np
import wandb
from gymnasium.wrappers import RecordEpisodeStatistics

import shmvec


def main() -> None:
    """Step at random, and log a row every hundred steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=5)
    options = parser.parse_args()

    envs = shmvec.make_vec("CartPole-v1", options.num_envs, wrappers=[RecordEpisodeStatistics])
    mode = os.environ.get("WANDB_MODE", "offline")
    with wandb.init(project="shmvec", config=vars(options), mode=mode) as run:
        envs.action_space.seed(1)
        envs.reset(seed=1)
        for iteration in range(options.iterations):
            returns, lengths, begin = [], [], time.perf_counter()
            for _ in range(100):  # your rollout and your update
                *_, infos = envs.step(envs.action_space.sample())
                if "episode" in infos:
                    returns += infos["episode"]["r"][infos["_episode"]].tolist()
                    lengths += infos["episode"]["l"][infos["_episode"]].tolist()
            steps = 100 * options.num_envs
            row = {"speed/steps_per_second": steps / (time.perf_counter() - begin)}
            if returns:
                row |= {"episode/return": np.mean(returns), "episode/length": np.mean(lengths)}
            run.log(row, step=(iteration + 1) * steps)
        print(f"{options.iterations} rows in {run.dir}")
    envs.close()


if __name__ == "__main__":
    main()

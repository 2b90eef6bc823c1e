"""Atari as DQN and PPO see it: AtariPreprocessing, clipped rewards, four stacked frames.

    pip install shmvec ale-py opencv-python-headless
    python examples/recipes/atari_preprocessing.py

All wrappers run in the workers, in compiled code (docs/wrappers.md), and frames come to the main
process through shared memory. RecordEpisodeStatistics is inside of ClipReward: it counts the game's
own scores.
"""

import argparse
import time
from functools import partial

import ale_py
import gymnasium as gym
import numpy as np
from gymnasium.wrappers import (
    AtariPreprocessing,
    ClipReward,
    FrameStackObservation,
    RecordEpisodeStatistics,
)

import shmvec


def make_atari(env_id: str) -> gym.Env:
    """Make one env."""
    gym.register_envs(ale_py)
    env = gym.make(env_id, frameskip=1, repeat_action_probability=0.25)  # the wrapper skips
    env = AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    env = ClipReward(RecordEpisodeStatistics(env), -1.0, 1.0)
    return FrameStackObservation(env, 4)


def main() -> None:
    """Step at random."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env-id", default="ALE/Breakout-v5")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    envs = shmvec.ShmVectorEnv([partial(make_atari, options.env_id)] * options.num_envs)
    envs.action_space.seed(1)
    observations, _ = envs.reset(seed=1)
    scores = []
    begin = time.perf_counter()
    for _ in range(options.steps):
        observations, rewards, _, _, infos = envs.step(envs.action_space.sample())
        if "episode" in infos:
            scores += infos["episode"]["r"][infos["_episode"]].tolist()
    rate = options.steps * options.num_envs / (time.perf_counter() - begin)
    envs.close()
    print(f"{observations.shape} {observations.dtype}, {rate:,.0f} steps/s")
    print(f"{len(scores)} episodes, mean score {np.mean(scores or [0]):.1f}")


if __name__ == "__main__":
    main()

"""Returns and lengths of episodes, by RecordEpisodeStatistics: around each env, or around all.

    pip install shmvec
    python examples/recipes/episode_statistics.py

Both report the same episodes under the same keys. Around each env the wrapper runs in the workers,
in compiled code (docs/wrappers.md). It also works with rollouts, pipelines and partial
batches. Around the vector env it runs after each step, while the workers wait.
"""

import time
from functools import partial

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers.vector import RecordEpisodeStatistics as RecordAll

import shmvec

STEPS = 1000
make_vec = partial(shmvec.make_vec, "CartPole-v1", num_envs=32)


def play(envs: gym.vector.VectorEnv) -> tuple[list[tuple[int, float, int]], float]:
    """Step at random; return (env, return, length) of each episode, and steps per second."""
    episodes = []
    envs.action_space.seed(1)
    envs.reset(seed=1)
    begin = time.perf_counter()
    for _ in range(STEPS):
        *_, infos = envs.step(envs.action_space.sample())
        if "episode" in infos:
            ended = infos["episode"]
            for env in np.flatnonzero(infos["_episode"]):
                episodes.append((int(env), float(ended["r"][env]), int(ended["l"][env])))
    seconds = time.perf_counter() - begin
    envs.close()
    return episodes, STEPS * envs.num_envs / seconds


def main() -> None:
    """Play the same steps both ways."""
    around_each, each_rate = play(make_vec(wrappers=[RecordEpisodeStatistics]))
    around_all, all_rate = play(RecordAll(make_vec()))
    assert around_each == around_all
    mean = np.mean([total for _, total, _ in around_each])
    print(f"{len(around_each)} episodes, mean return {mean:.1f}")
    print(f"around each env: {each_rate:,.0f} steps/s, around all: {all_rate:,.0f} steps/s")


if __name__ == "__main__":
    main()

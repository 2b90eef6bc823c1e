"""Videos, by RecordVideo: of one env of the vector env, or of all of them as tiles of one picture.

    pip install shmvec moviepy 'gymnasium[classic-control]'
    python examples/recipes/record_video.py --folder videos           # one env
    python examples/recipes/record_video.py --folder videos --all     # all envs

Around one env, the wrapper runs in that env's worker, and only that env renders. Around all, each
frame of each env comes to the main process, which is slow: record few episodes.
"""

import argparse
from functools import partial
from pathlib import Path

import gymnasium as gym
from gymnasium.wrappers import RecordVideo
from gymnasium.wrappers.vector import RecordVideo as RecordAll  # Gymnasium 1.2.1 or newer

import shmvec

ENV_ID, NUM_ENVS = "CartPole-v1", 4


def make_recorded(folder: str) -> gym.Env:
    """Make an env that records every other episode of its own."""
    env = gym.make(ENV_ID, render_mode="rgb_array")
    return RecordVideo(env, folder, episode_trigger=lambda episode: episode % 2 == 0)


def vector_env(folder: str, of_all: bool) -> gym.vector.VectorEnv:
    """Make a vector env, of which one env or all are recorded."""
    if of_all:
        make = partial(gym.make, ENV_ID, render_mode="rgb_array")
        envs = shmvec.ShmVectorEnv([make] * NUM_ENVS)
        # The first env's episodes count.
        return RecordAll(envs, folder, episode_trigger=lambda episode: episode % 2 == 0)
    others = [partial(gym.make, ENV_ID)] * (NUM_ENVS - 1)
    return shmvec.ShmVectorEnv([partial(make_recorded, folder), *others])


def main() -> None:
    """Record a hundred steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="videos")
    parser.add_argument("--all", action="store_true", help="record all envs")
    options = parser.parse_args()
    envs = vector_env(options.folder, options.all)
    envs.action_space.seed(1)
    envs.reset(seed=1)
    for _ in range(100):
        envs.step(envs.action_space.sample())
    envs.close()  # writes the last video
    for video in sorted(Path(options.folder).glob("*.mp4")):
        print(video)


if __name__ == "__main__":
    main()

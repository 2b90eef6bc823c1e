"""Stacked observations, by FrameStackObservation around each env.

    pip install shmvec
    python examples/recipes/frame_stacking.py

The CartPole hides its velocities; the last four positions and angles show them. The wrapper runs in
the workers, in compiled code (docs/wrappers.md). A shmvec.Replay stores each frame of a stack
once (docs/replay.md).
"""

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import FrameStackObservation, TransformObservation

import shmvec

STACKED = 4


def make_stacked() -> gym.Env:
    """Make a CartPole whose observation is its last four positions and angles."""
    env = gym.make("CartPole-v1")
    limits = env.observation_space.high[[0, 2]]
    space = gym.spaces.Box(-limits, limits, dtype=np.float32)
    env = TransformObservation(env, lambda observation: observation[[0, 2]], space)
    # At the start of an episode the first frame is repeated; padding_type="zero" has zeros there.
    return FrameStackObservation(env, STACKED, padding_type="reset")


def main() -> None:
    """Balance poles without and with the velocities that the stack shows."""
    envs = shmvec.ShmVectorEnv([make_stacked] * 8)
    for weight in (0, 20):
        stacks, _ = envs.reset(seed=1)
        episodes = 0
        for _ in range(500):
            angles = stacks[:, :, 1]  # (8, 4): the newest is the last
            velocities = angles[:, -1] - angles[:, -2]
            actions = (angles[:, -1] + weight * velocities > 0).astype(int)
            stacks, _, terminations, truncations, _ = envs.step(actions)
            episodes += np.count_nonzero(terminations | truncations)
        seen = "with" if weight else "without"
        print(f"{seen} velocities: {8 * 500 / episodes:.0f} steps an episode; {stacks.shape}")
    envs.close()


if __name__ == "__main__":
    main()

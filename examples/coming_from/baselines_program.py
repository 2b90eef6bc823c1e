"""A program for OpenAI baselines' ``SubprocVecEnv``: a runner, and a learner of CartPole.

    python examples/coming_from/baselines_program.py

The runner has the loop of baselines' A2C: it steps ``nsteps`` times and keeps the observations that
the next batch begins with. Only the import has changed, and gym is Gymnasium. See
docs/coming-from/baselines.md.
"""

import argparse

import gymnasium as gym
import numpy as np
from linear import ActorCritic

from shmvec.adapters.baselines import SubprocVecEnv


class Runner:
    """Collects batches, (steps, envs, ...)."""

    def __init__(self, env: SubprocVecEnv, model: ActorCritic, nsteps: int) -> None:
        """Resets the envs."""
        self.env, self.model, self.nsteps = env, model, nsteps
        self.obs = env.reset()
        self.lengths = np.zeros(env.num_envs)
        self.episodes: list[float] = []

    def run(self):
        """Returns a batch, and the observations after it."""
        mb_obs, mb_actions, mb_rewards, mb_dones = [], [], [], []
        for _ in range(self.nsteps):
            actions = self.model.sample_actions(self.obs)
            mb_obs.append(self.obs)
            mb_actions.append(actions)
            self.obs, rewards, dones, _ = self.env.step(actions)
            mb_rewards.append(rewards)
            mb_dones.append(dones)
            self.lengths += 1
            self.episodes += self.lengths[dones].tolist()
            self.lengths[dones] = 0
        return np.array(mb_obs), mb_actions, mb_rewards, mb_dones, self.obs


def main() -> None:
    """Learns, and prints how long episodes were."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=600)
    updates = parser.parse_args().updates
    env = SubprocVecEnv([lambda: gym.make("CartPole-v1")] * 8, in_series=4)
    model = ActorCritic(env.observation_space.shape[0], env.action_space.n)
    env.reset(seed=1)
    runner = Runner(env, model, nsteps=32)
    for _ in range(updates):
        model.learn(*runner.run())
    env.close()
    first, last = (np.mean(some) for some in (runner.episodes[:50], runner.episodes[-50:]))
    print(f"{len(runner.episodes)} episodes: length {first:.0f} at first, {last:.0f} at last")


if __name__ == "__main__":
    main()

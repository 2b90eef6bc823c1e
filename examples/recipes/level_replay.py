"""Prioritized level replay (arXiv:2010.03934): envs play instructive levels more often.

    pip install shmvec
    python examples/recipes/level_replay.py

A level is a seed, here of a cart's force and first state. The next one is drawn by its score (here
how early the pole fell; learners take an episode's mean |advantage|), or by how long ago that was.
"""

import gymnasium as gym
import numpy as np

import shmvec

TEMPERATURE, STALE, MOST_STEPS = 0.5, 0.1, 500


class Levels(gym.Wrapper):
    """A CartPole whose force depends on the seed, too."""

    def reset(self, **arguments):
        """Reset the env, and draw its force."""
        result = self.env.reset(**arguments)
        self.unwrapped.force_mag = self.unwrapped.np_random.uniform(1, 20)
        return result


def draw(scores, drawn, generator):
    """Draw a level; `drawn` has the time at which each was drawn last, and is updated."""
    now, unseen = drawn.max() + 1, np.flatnonzero(drawn == 0)
    by_rank = (1 + np.argsort(np.argsort(-scores))) ** (-1 / TEMPERATURE)
    chances = (1 - STALE) * by_rank / by_rank.sum() + STALE * (now - drawn) / (now - drawn).sum()
    level = int(unseen[0] if len(unseen) else generator.choice(len(scores), p=chances))
    drawn[level] = now
    return level


def play(envs, policy, steps, num_levels=50, seed=1):
    """Return levels and lengths of the episodes, in the order in which they ended."""
    lot = np.zeros(num_levels), np.zeros(num_levels), np.random.default_rng(seed)
    levels, following = ([draw(*lot) for _ in range(envs.num_envs)] for _ in range(2))
    observations, _ = envs.reset(seed=levels)
    envs.set_reset_seeds(following)
    ages, played = np.zeros(envs.num_envs, int), []
    for _ in range(steps):
        observations, _, terminations, truncations, _ = envs.step(policy(observations))
        ages += 1
        for env in np.flatnonzero(terminations | truncations):
            played.append((levels[env], ages[env]))
            lot[0][levels[env]] = 1 - ages[env] / MOST_STEPS
            levels[env], following[env], ages[env] = following[env], draw(*lot), 0
            envs.set_reset_seeds([following[env]], [env])
    return np.array(played)


if __name__ == "__main__":
    with shmvec.make_vec("CartPole-v1", 8, wrappers=[Levels], autoreset_mode="SameStep") as envs:
        played = play(envs, lambda observations: (observations[:, 2] > 0).astype(int), 4000)
    for some in played[:50], played[50:]:
        print(f"{len(some)} episodes of {some[:, 1].mean():.0f} steps on average")

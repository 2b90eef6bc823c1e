"""A curriculum that the learner drives: episodes get harder once it masters the present ones.

    pip install shmvec
    python examples/recipes/curriculum.py

Each env begins its next episode with the options that the learner set last, and no episode is cut
off. The options of CartPole are the bounds of its first state: they are the difficulty here. The
learner is REINFORCE (Williams, 1992) with four weights; yours is a network.
"""

import numpy as np

import shmvec

STEPS, DISCOUNT, RATE, MASTERED = 200, 0.97, 15.0, 90


def chances(observations, weights):
    """Compute the probability of each env's action 1."""
    return 1 / (1 + np.exp(-observations @ weights))


def returns_to_go(rewards, over):
    """Compute each step's discounted sum of the episode's rewards from there on."""
    sums, following = np.zeros(rewards.shape), 0.0
    for t in reversed(range(len(rewards))):
        sums[t] = following = rewards[t] + DISCOUNT * following * ~over[t]
    return sums


def train(envs, iterations=20, seed=1):
    """Return each iteration's difficulty and the mean length of episodes that ended in it."""
    generator, weights, difficulty, history = np.random.default_rng(seed), np.zeros(4), 0.05, []
    observations, ages = envs.reset(seed=seed)[0], np.zeros(envs.num_envs, int)
    for _ in range(iterations):
        envs.set_reset_options({"low": -difficulty, "high": difficulty})
        steps, lengths = [], []
        for _ in range(STEPS):
            actions = (generator.random(envs.num_envs) < chances(observations, weights)).astype(int)
            following, rewards, terminations, truncations, _ = envs.step(actions)
            over = terminations | truncations
            steps.append((observations, actions, rewards, over))
            ages += 1
            lengths += ages[over].tolist()
            ages[over], observations = 0, following
        seen, acted, rewards, over = map(np.stack, zip(*steps, strict=True))
        earned = returns_to_go(rewards, over)
        earned = (earned - earned.mean()) / earned.std()
        step = (earned * (acted - chances(seen, weights)))[..., None] * seen
        weights += RATE * step.mean((0, 1))
        history.append((difficulty, np.mean(lengths)))
        if history[-1][1] > MASTERED:
            difficulty = min(0.2, difficulty + 0.025)
    return history


if __name__ == "__main__":
    with shmvec.make_vec("CartPole-v1", 16, autoreset_mode="SameStep") as envs:
        for difficulty, length in train(envs)[::2]:
            print(f"first states within {difficulty:.3f}: episodes of {length:.0f} steps")

"""Generalised advantages (arXiv:1506.02438) that are right for truncated episodes, in three ways.

    pip install shmvec
    python examples/recipes/gae.py

A truncated episode would have gone on, so the value of its final observation counts. A terminated
one has no such value. In autoreset mode NEXT_STEP, the step returns the final observation, and the
next step is a reset, which is left out. In SAME_STEP, it is in infos["final_obs"].
"""

import numpy as np

import shmvec


def value(observations):
    """Estimate values. Your value function and your policy are networks."""
    return 10 - abs(observations[..., 2])


def gae(rewards, values, next_values, terminations, ends, discount=0.99, decay=0.95):
    """Compute advantages (steps, envs); next_values are the values of next observations."""
    deltas = rewards + discount * next_values * ~terminations - values
    advantages, following = np.zeros(rewards.shape), 0.0
    for t in reversed(range(len(rewards))):
        advantages[t] = following = deltas[t] + discount * decay * ~ends[t] * following
    return advantages


def by_rollout(envs, policy, steps=200):
    """Return advantages, and which steps to learn from; in NEXT_STEP, without copies."""
    envs.reset(seed=1)
    rollout = envs.rollout(steps)
    for t in range(steps):
        rollout.step(policy(rollout.observations[t]))
    values, terminations = value(rollout.observations), rollout.terminations[1:]
    ends = terminations | rollout.truncations[1:]
    return gae(rollout.rewards[1:], values[:-1], values[1:], terminations, ends), rollout.valid


def by_steps(envs, policy, steps=200):
    """Return advantages, and which steps to learn from; in NEXT_STEP or SAME_STEP."""
    observations, _ = envs.reset(seed=1)
    kept, valid = [], np.ones(envs.num_envs, bool)
    for _ in range(steps):
        following, rewards, terminations, truncations, infos = envs.step(policy(observations))
        ends, reached = terminations | truncations, following.copy()
        for env in np.flatnonzero(infos.get("_final_obs", [])):  # SAME_STEP
            reached[env] = infos["final_obs"][env]
        kept.append((rewards, value(observations), value(reached), terminations, ends, valid))
        observations, valid = following, ~ends | (envs.autoreset_mode.value == "SameStep")
    *arrays, valid = map(np.stack, zip(*kept, strict=True))
    return gae(*arrays), valid


if __name__ == "__main__":
    for mode, collect in ("NextStep", by_rollout), ("NextStep", by_steps), ("SameStep", by_steps):
        with shmvec.make_vec("CartPole-v1", 8, max_episode_steps=50, autoreset_mode=mode) as envs:
            advantages, valid = collect(envs, lambda o: (o[..., 2] > 0).astype(int))
        print(f"{collect.__name__}, {mode}: {valid.sum()} steps, mean {advantages[valid].mean()}")

"""A linear actor-critic in NumPy, for programs here whose own learners would need TensorFlow.

Softmax over linear scores, a linear value, returns over a few steps bootstrapped by it, and plain
gradient steps: enough to show that a program learns from what its envs return.
"""

import numpy as np

DISCOUNT = 0.99


class ActorCritic:
    """Policy and value of discrete actions; features are the observation, its squares and 1."""

    def __init__(self, num_inputs: int, num_actions: int, seed: int = 0) -> None:
        """All weights are 0: every action is as likely as any other."""
        self.policy = np.zeros((2 * num_inputs + 1, num_actions))
        self.value = np.zeros(2 * num_inputs + 1)
        self.rng = np.random.default_rng(seed)

    def features(self, observations: np.ndarray) -> np.ndarray:
        """What both are linear in, (..., 2 n + 1)."""
        observations = np.clip(np.asarray(observations, np.float64), -5, 5)
        return np.concatenate(
            [observations, observations**2, np.ones((*observations.shape[:-1], 1))], -1
        )

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Of each action."""
        scores = features @ self.policy
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        return scores / scores.sum(-1, keepdims=True)

    def sample_actions(self, observations: np.ndarray) -> np.ndarray:
        """One for each observation."""
        chances = self.probabilities(self.features(observations)).cumsum(-1)
        return (self.rng.random((len(chances), 1)) > chances).sum(-1).clip(max=len(chances[0]) - 1)

    def learn(self, observations, actions, rewards, dones, last_observations) -> None:
        """One step of both, from arrays (steps, envs, ...) and the observations after them."""
        returns = np.zeros(np.shape(rewards))
        ahead = self.features(last_observations) @ self.value
        for step in reversed(range(len(returns))):
            ahead = np.asarray(rewards[step]) + DISCOUNT * ahead * ~np.asarray(dones[step], bool)
            returns[step] = ahead
        features = self.features(observations)
        advantages = returns - features @ self.value
        self.value += 0.02 * np.einsum("se,sef->f", advantages, features) / advantages.size
        taken = np.eye(self.policy.shape[1])[np.asarray(actions)]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        push = (taken - self.probabilities(features)) * advantages[..., None]
        self.policy += 0.3 * np.einsum("sef,sea->fa", features, push) / advantages.size

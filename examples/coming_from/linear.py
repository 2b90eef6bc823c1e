"""A linear actor-critic in NumPy, for programs whose own learners would need TensorFlow.

It has a softmax over linear scores, a linear value, returns of a few steps that are bootstrapped by
that value, and plain gradient steps: enough to show that a program learns.
"""

import numpy as np

DISCOUNT = 0.99


class ActorCritic:
    """Policy and value of discrete actions; features are the observation, its squares and 1."""

    def __init__(self, num_inputs: int, num_actions: int, seed: int = 0) -> None:
        """Sets all weights to 0, so that all actions are equally likely."""
        self.policy = np.zeros((2 * num_inputs + 1, num_actions))
        self.value = np.zeros(2 * num_inputs + 1)
        self.rng = np.random.default_rng(seed)

    def features(self, observations: np.ndarray) -> np.ndarray:
        """Computes the features of observations, (..., 2 n + 1)."""
        observations = np.clip(np.asarray(observations, np.float64), -5, 5)
        return np.concatenate(
            [observations, observations**2, np.ones((*observations.shape[:-1], 1))], -1
        )

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Computes the probability of each action."""
        scores = features @ self.policy
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        return scores / scores.sum(-1, keepdims=True)

    def sample_actions(self, observations: np.ndarray) -> np.ndarray:
        """Samples an action for each observation."""
        chances = self.probabilities(self.features(observations)).cumsum(-1)
        return (self.rng.random((len(chances), 1)) > chances).sum(-1).clip(max=len(chances[0]) - 1)

    def learn(self, observations, actions, rewards, dones, last_observations) -> None:
        """Makes a gradient step, from arrays (steps, envs, ...) and the observations after them."""
        returns = np.zeros(np.shape(rewards))
        total = self.features(last_observations) @ self.value
        for step in reversed(range(len(returns))):
            total = np.asarray(rewards[step]) + DISCOUNT * total * ~np.asarray(dones[step], bool)
            returns[step] = total
        features = self.features(observations)
        advantages = returns - features @ self.value
        self.value += 0.02 * np.einsum("se,sef->f", advantages, features) / advantages.size
        one_hot = np.eye(self.policy.shape[1])[np.asarray(actions)]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        gradients = (one_hot - self.probabilities(features)) * advantages[..., None]
        self.policy += 0.3 * np.einsum("sef,sea->fa", features, gradients) / advantages.size

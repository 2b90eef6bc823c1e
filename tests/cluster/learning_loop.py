"""What the tests of clusters collect with: a policy with weights and a state, and a learner."""

import hashlib

import gymnasium as gym
import numpy as np

import shmvec
from shmvec.cluster import Fragment


class Policy:
    """Draws actions from a linear layer; says what it thinks, and in which episode it is."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.weights = np.zeros((4, 2))
        self.episodes = {}

    def reset(self, env_ids):
        for env in env_ids.tolist():
            self.episodes[env] = self.episodes.get(env, 0) + 1

    def set_weights(self, weights):
        self.weights = weights["layer"]

    def __call__(self, observations, env_ids):
        logits = observations @ self.weights
        actions = (logits + self.random.gumbel(size=logits.shape)).argmax(axis=1)
        episodes = np.array([self.episodes[env] for env in env_ids.tolist()])
        return actions, {"logits": logits, "episode": episodes}


class Learner:
    """Turns fragments into weights, by no algorithm in particular."""

    def __init__(self):
        self.weights = {"layer": np.zeros((4, 2))}

    def update(self, fragment):
        seen = fragment.observations[:-1][fragment.valid]
        self.weights["layer"] += 0.1 * np.outer(seen.mean(axis=0), [1, -1])  # in place


def make_envs(num_envs=3, env_id="CartPole-v1", **options):
    options = {"num_workers": 1, **options}
    return shmvec.ShmVectorEnv([lambda: gym.make(env_id)] * num_envs, **options)


def digest(fragment):
    """Of all that a fragment holds, but for how long it took."""
    sums = hashlib.sha256()

    def add(value):
        if isinstance(value, dict):
            for key in value:
                sums.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for part in value:
                add(part)
        elif isinstance(value, np.ndarray) and value.dtype != object:
            sums.update(repr((value.dtype, value.shape)).encode() + value.tobytes())
        else:
            sums.update(repr(value).encode())

    for name in Fragment.__dataclass_fields__:
        if name != "seconds":
            add(getattr(fragment, name))
    return sums.hexdigest()


def learn(collector, count):
    """Digests of so many fragments, and of what was learned."""
    learner, digests = Learner(), []
    for _ in range(count):
        fragment = next(collector)
        digests.append(digest(fragment))
        learner.update(fragment)
        collector.set_weights(learner.weights)
    return [*digests, learner.weights["layer"].tobytes()]

"""Stable-Baselines3's ``evaluate_policy`` on top of ``shmvec.evaluate``.

    python examples/evaluate_sb3.py --train-steps 20000 --episodes 100

Two things are different. Each episode has its own seed, and the next free env plays it, so the
number of envs does not matter. Recurrent policies (sb3_contrib) have a state for each env.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

import shmvec


class Model:
    """Makes a policy with a state for each env of what has Stable-Baselines3's ``predict``."""

    def __init__(self, model: Any, deterministic: bool = True) -> None:
        """Takes a model or a policy."""
        self._model = model
        self._deterministic = deterministic
        self._states: dict[int, list[Any]] = {}  # by env; an env without one begins an episode

    def reset(self, env_ids: npt.NDArray[np.int64]) -> None:
        """Drops the states of these envs, in which episodes begin."""
        for env in env_ids.tolist():
            self._states.pop(env, None)

    def __call__(self, observations: Any, env_ids: npt.NDArray[np.int64]) -> Any:
        """Returns actions for a batch."""
        envs = env_ids.tolist()
        actions, states = self._model.predict(
            observations,
            state=self._state_of(envs),
            episode_start=np.array([env not in self._states for env in envs]),
            deterministic=self._deterministic,
        )
        if states is not None:  # arrays (layers, envs, size)
            for row, env in enumerate(envs):
                self._states[env] = [part[:, row] for part in states]
        return actions

    def _state_of(self, envs: list[int]) -> tuple[Any, ...] | None:
        state = next((self._states[env] for env in envs if env in self._states), None)
        if state is None:
            return None
        zeros = [np.zeros_like(part) for part in state]
        rows = [self._states.get(env, zeros) for env in envs]
        return tuple(np.stack(parts, axis=1) for parts in zip(*rows, strict=True))


def evaluate_policy(
    model: Any,
    env: Any,
    n_eval_episodes: int = 10,
    deterministic: bool = True,
    return_episode_rewards: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Evaluates a model, like Stable-Baselines3's function of this name.

    Args:
        model: An algorithm or a policy: it has ``predict``.
        env: An id, a function that makes an env, or a ``ShmVectorEnv``, as for ``shmvec.evaluate``.
        n_eval_episodes: Number of episodes.
        deterministic: Whether the model does not sample its actions.
        return_episode_rewards: Whether to return lists.
        **options: Further options of ``shmvec.evaluate``.

    Returns:
        The mean return and its standard deviation; or lists of the returns and the lengths.
    """
    result = shmvec.evaluate(env, Model(model, deterministic), n_eval_episodes, **options)
    if return_episode_rewards:
        return result.returns.tolist(), result.lengths.tolist()
    return float(result.mean), float(result.returns.std())


def main() -> None:
    """Trains a little, and evaluates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--train-steps", type=int, default=20_000)
    parser.add_argument("--episodes", type=int, default=100)
    options = parser.parse_args()

    from stable_baselines3 import PPO

    model = PPO("MlpPolicy", options.env, seed=1, device="cpu")
    model.learn(options.train_steps)
    mean, std = evaluate_policy(model, options.env, options.episodes, seeds=1)
    print(f"return {mean:.1f} +- {std:.1f} over {options.episodes} episodes")


if __name__ == "__main__":
    main()

"""``TianshouEnv``: an env in a worker of Tianshou's vector envs; Tianshou is not imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec.adapters._shared import AskedEnv
from shmvec.spaces import Anything

SPACE_NAMES = ("observation_space", "action_space")
REWARD_KEY = "shmvec.reward"  # in an info: a reward that is no scalar
KWARGS_KEY = "shmvec.kwargs"  # in options: further keyword arguments of `reset`


class TianshouEnv(AskedEnv):
    """An env with Tianshou's rules for arguments of ``reset``, rewards and attributes."""

    def __init__(
        self, index: int, env_fn: Callable[[], gym.Env[Any, Any]], share_memory: bool
    ) -> None:
        """Builds the env."""
        super().__init__(env_fn(), *(() if share_memory else (Anything(), Anything())))
        self.reward_space = None  # rewards that are arrays go with the info
        self.index = index
        self._step = self.env.step

    def reset(self, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        """Resets with only the user's arguments: Tianshou's envs may take no others."""
        further: dict[str, Any] = {}
        if isinstance(options, dict) and KWARGS_KEY in options:
            further, options = options[KWARGS_KEY], options["options"]
        arguments = {"seed": seed, "options": options}
        return self.env.reset(**further, **{k: v for k, v in arguments.items() if v is not None})

    def step(self, action: Any) -> Any:
        """Steps the env; a reward that is an array goes with the info."""
        result: Any = self._step(action)
        reward = result[1]
        if isinstance(reward, (float, int)) or np.ndim(reward) == 0:
            return result
        observation, reward, terminated, truncated, info = result
        return observation, 0.0, terminated, truncated, {**info, REWARD_KEY: np.asarray(reward)}

    def shmvec_describe(self) -> dict[str, Any]:
        """The env's spaces, and whether it has a method ``seed``."""
        spaces_of_env = {name: getattr(self.env, name, None) for name in SPACE_NAMES}
        return {**spaces_of_env, "seed": hasattr(self.env, "seed")}

    def shmvec_set(self, name: str, value: Any) -> None:
        """Sets an attribute of the env itself."""
        setattr(self.env.unwrapped, name, value)

    def shmvec_seed(self, seeds: Sequence[int | None]) -> Any:
        """Seeds the env as Tianshou does, with its own one of the seeds of all envs."""
        seed = seeds[self.index]
        space = getattr(self.env, "action_space", None)
        if space is not None:
            space.seed(seed)
        seed_env = getattr(self.env, "seed", None)
        return seed if seed_env is None else seed_env(seed)

"""The env of Tianshou's vector envs, in its worker, where Tianshou itself is not needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec.exchange import HostedEnv
from shmvec.spaces import Anything

SPACES = ("observation_space", "action_space")
REWARD = "shmvec.reward"  # in an info: a reward that is no scalar
KWARGS = "shmvec.kwargs"  # in options: further keyword arguments of `reset`


class TianshouEnv(HostedEnv):
    """An env with Tianshou's rules for arguments of ``reset``, rewards and attributes."""

    def __init__(
        self, index: int, env_fn: Callable[[], gym.Env[Any, Any]], share_memory: bool
    ) -> None:
        """Builds the env."""
        super().__init__(env_fn(), *(() if share_memory else (Anything(), Anything())))
        self.index = index
        self._step = self.env.step

    def reset(self, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        """Resets with the given arguments alone: Tianshou's envs may take no others."""
        others: dict[str, Any] = {}
        if isinstance(options, dict) and KWARGS in options:
            others, options = options[KWARGS], options["options"]
        given = {"seed": seed, "options": options}
        return self.env.reset(**others, **{k: v for k, v in given.items() if v is not None})

    def step(self, action: Any) -> Any:
        """Steps the env; rewards that are no numbers go with the info."""
        result: Any = self._step(action)
        reward = result[1]
        if isinstance(reward, (float, int)) or np.ndim(reward) == 0:
            return result
        observation, reward, terminated, truncated, info = result
        return observation, 0.0, terminated, truncated, {**info, REWARD: np.asarray(reward)}

    def get_wrapper_attr(self, name: str) -> Any:
        """One of the methods below, or an attribute of the env, which a worker calls."""
        if name.startswith("shmvec_"):
            return getattr(self, name)
        return super().get_wrapper_attr(name)

    def shmvec_describe(self) -> dict[str, Any]:
        """The env's spaces, and whether it has a method ``seed``."""
        spaces_of_env = {name: getattr(self.env, name, None) for name in SPACES}
        return {**spaces_of_env, "seed": hasattr(self.env, "seed")}

    def shmvec_get(self, name: str) -> Any:
        """An attribute of the env; a method is returned, not called."""
        return super().get_wrapper_attr(name)

    def shmvec_set(self, name: str, value: Any) -> None:
        """Sets an attribute of the env itself."""
        setattr(self.env.unwrapped, name, value)

    def shmvec_seed(self, seeds: Sequence[int | None]) -> Any:
        """Seeds the env as Tianshou does, with its seed among those of all envs."""
        seed = seeds[self.index]
        space = getattr(self.env, "action_space", None)
        if space is not None:
            space.seed(seed)
        own = getattr(self.env, "seed", None)
        return seed if own is None else own(seed)

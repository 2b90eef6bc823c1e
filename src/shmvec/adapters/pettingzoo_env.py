"""A parallel env in its worker, as one that the core can step; PettingZoo itself is not needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from shmvec.exchange import HostedEnv

__all__ = ["AGENTS", "ALIVE", "FLAGS", "OF_AGENT", "REWARDS", "TERMINATED", "TRUNCATED", "Team"]

Space: TypeAlias = gym.Space[Any]

# What an env's observation holds beside those of its agents: rewards, and rows of flags.
AGENTS, REWARDS, FLAGS = "agents", "rewards", "flags"
TERMINATED, TRUNCATED, ALIVE = range(3)
OF_AGENT = "agent "  # before the name of an agent, as a key of infos
_NEEDED = ("observation_space", "action_space", "reset", "step")


class Team(HostedEnv):
    """A parallel env as one that the core can step: what all agents are told is its observation."""

    def __init__(self, index: int, env_fn: Callable[[], Any]) -> None:
        """Builds the env."""
        env = env_fn()
        name = f"env_fns[{index}]() returned a {type(env).__name__}"
        missing = [method for method in _NEEDED if not callable(getattr(env, method, None))]
        if missing:
            raise TypeError(
                f"{name} without the methods {', '.join(missing)}; it must return a "
                "pettingzoo.ParallelEnv (others become one by pettingzoo.utils.aec_to_parallel)"
            )
        if not hasattr(env, "possible_agents"):
            raise TypeError(
                f"{name} without possible_agents. PettingZoo's API lets a ParallelEnv do without, "
                "but arrays for all agents need to know all that there may ever be: set it to "
                "their names in the env, or around it"
            )
        self.agents = list(env.possible_agents)
        self._keys = {agent: str(agent) for agent in self.agents}
        if not self.agents or len(set(self._keys.values())) < len(self.agents):
            raise ValueError(f"agents need names that differ, and there must be one: {self.agents}")
        self._indices = {agent: index for index, agent in enumerate(self.agents)}
        count = len(self.agents)
        seen = {key: env.observation_space(agent) for agent, key in self._keys.items()}
        self._nothing = {key: _nothing(space) for key, space in seen.items()}
        self._acting: list[tuple[Any, str]] = []  # who acts in the next step, and its key
        super().__init__(
            env,
            spaces.Dict(
                {
                    AGENTS: spaces.Dict(seen),
                    REWARDS: spaces.Box(-np.inf, np.inf, (count,), np.float64),
                    FLAGS: spaces.Box(0, 1, (3, count), np.bool_),
                }
            ),
            spaces.Dict({key: env.action_space(agent) for agent, key in self._keys.items()}),
        )

    def reset(self, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        """Resets the env."""
        observations, infos = self.env.reset(seed=seed, options=options)
        return self._told(observations, {}, {}, {}), self._infos(infos)

    def step(self, actions: dict[str, Any]) -> Any:
        """Steps the env, with actions of those who are alive."""
        acting = {agent: actions[key] for agent, key in self._acting}
        *results, infos = self.env.step(acting)
        if len(results) != 4:
            raise ValueError(
                f"step() returned {len(results) + 1} values; expected (observations, rewards, "
                "terminations, truncations, infos)"
            )
        told = self._told(*results)
        return told, 0.0, not self._acting, False, self._infos(infos)

    def close(self) -> None:
        """Closes the env, if it can be."""
        if hasattr(self.env, "close"):
            super().close()

    def _told(
        self,
        observations: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        terminations: Mapping[Any, Any],
        truncations: Mapping[Any, Any],
    ) -> dict[str, Any]:
        """What all agents are told; and notes who acts next."""
        keys, indices, count = self._keys, self._indices, len(self.agents)
        told = self._nothing.copy()
        pay = [0.0] * count
        terminated, truncated, alive = [False] * count, [False] * count, [False] * count
        try:
            for agent, observation in observations.items():
                told[keys[agent]] = observation
            for agent, reward in rewards.items():
                pay[indices[agent]] = reward
            for agent, flag in terminations.items():
                terminated[indices[agent]] = bool(flag)
            for agent, flag in truncations.items():
                truncated[indices[agent]] = bool(flag)
            acting = []
            # Without the list, who is told something goes on.
            for agent in getattr(self.env, "agents", observations):
                index = indices[agent]
                if terminated[index] or truncated[index]:
                    continue
                if agent not in observations:
                    raise ValueError(f"agent {agent!r} is alive and has got no observation")
                alive[index] = True
                acting.append((agent, keys[agent]))
        except KeyError as error:
            raise self._stranger(agent) from error
        self._acting = acting
        return {
            AGENTS: told,
            REWARDS: np.array(pay, np.float64),
            FLAGS: np.array((terminated, truncated, alive)),
        }

    def _infos(self, infos: Mapping[Any, Any] | None) -> dict[str, Any]:
        found = {}
        for agent, info in (infos or {}).items():
            if agent not in self._keys:
                raise self._stranger(agent)
            if info:
                found[OF_AGENT + self._keys[agent]] = info
        return found

    def _stranger(self, agent: Any) -> ValueError:
        return ValueError(
            f"the env tells of an agent {agent!r} that is not in possible_agents, {self.agents}"
        )

    def get_wrapper_attr(self, name: str) -> Any:
        """What the env has, or all its agents."""
        return self.agents if name == "shmvec_agents" else getattr(self.env, name)

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Sets an attribute where it is: of the env, or of what is around it."""
        holder = self.env
        while name not in getattr(holder, "__dict__", ()) and hasattr(holder, "env"):
            holder = holder.env
        setattr(holder if hasattr(holder, name) else self.env, name, value)


def _nothing(space: Space) -> Any:
    """What an agent observes that is not there: zeros, as far as the space has them."""
    if isinstance(space, spaces.Dict):
        return {key: _nothing(part) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nothing(part) for part in space.spaces)
    if isinstance(space, spaces.Text):
        return ""
    empty: Any = create_empty_array(space, 1)
    return None if empty is None else empty[0]

"""In a worker: an env whose step after an episode's end resets it first, all in one request.

The core must not know of ends then, in whose modes such a step is a reset or an error. So they
travel in infos, which costs nothing where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from shmvec.exchange import HostedEnv

__all__ = ["Episodes", "build", "take_end"]

_ENDED = "shmvec.ended"  # in an info: 1: terminated; 2: truncated; 3: both


class Episodes(HostedEnv):
    """Stands for an env, whose ends it tells in infos; closes it once."""

    def __init__(self, env: Any) -> None:
        """Takes the env."""
        super().__init__(env)
        self._over = False
        self._closed = False

    def get_wrapper_attr(self, name: str) -> Any:
        """What the env or one of its wrappers has."""
        return self.close if name == "close" else super().get_wrapper_attr(name)

    def reset(self, **arguments: Any) -> Any:
        """Resets the env."""
        result = self.env.reset(**arguments)
        self._over = False
        return result

    def step(self, action: Any) -> Any:
        """Resets the env if its episode is over, and steps it."""
        # A copy: the step may change the arrays.
        began = deepcopy(self.reset()) if self._over else None
        result = self.env.step(action)
        if len(result) != 5:
            return result  # the core says what is wrong
        observation, reward, terminated, truncated, info = result
        if terminated or truncated:
            self._over = True
            info = {**info, _ENDED: bool(terminated) + 2 * bool(truncated)}
        if began is not None:
            info = {**info, "reset_observation": began[0], "reset_info": began[1]}
        return observation, reward, False, False, info

    def close(self) -> None:
        """Closes the env, once."""
        if not self._closed:
            self._closed = True
            self.env.close()


def build(env_fn: Callable[[], Any], host: type[HostedEnv], *arguments: Any) -> Any:
    """Makes an env and what stands for it; what is no env is left to the core, which says so."""
    env = env_fn()
    needed = ("reset", "step", "observation_space", "action_space")
    return host(env, *arguments) if all(hasattr(env, name) for name in needed) else env


def take_end(info: dict[str, Any]) -> tuple[bool, bool]:
    """Takes out of an info how the step ended the episode: (terminated, truncated)."""
    ended = int(info.pop(_ENDED, 0))
    return bool(ended & 1), bool(ended & 2)

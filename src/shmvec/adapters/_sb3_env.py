"""``SB3Env``: an env in a worker, with the methods that ``shmvec.adapters.sb3`` calls.

This module does not import Stable-Baselines3, which would import torch in each worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym

from shmvec.adapters._shared import AskedEnv

RESET_INFO = "reset"  # the key of a reset's info


class SB3Env(AskedEnv):
    """A user's env, and the methods that ``ShmVecEnv`` calls."""

    def __init__(self, env_fn: Callable[[], Any]) -> None:
        """Builds the env."""
        super().__init__(as_gymnasium_env(env_fn()))

    def reset(self, *, options: Any = None, **seed: Any) -> Any:
        """Resets the env; passes no options if there are none, since its reset may not take any.

        The info gets one key, which keeps it apart from the core's report of the last episode.
        """
        result = self.env.reset(options=options, **seed) if options else self.env.reset(**seed)
        if isinstance(result, tuple) and len(result) == 2 and result[1]:
            observation, info = result
            return observation, {RESET_INFO: info} if isinstance(info, dict) else info
        return result

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Sets an attribute of the env, or of the wrapper that has it."""
        if hasattr(self.env, name):  # Gymnasium 1.0 ignores the outermost wrapper
            setattr(self.env, name, value)
        else:
            self.env.set_wrapper_attr(name, value)

    def shmvec_get_env(self) -> gym.Env[Any, Any]:
        """The env itself; only with ``num_workers=0``, since it need not be picklable."""
        env: gym.Env[Any, Any] = self.env
        return env

    def shmvec_has_attr(self, name: str) -> bool:
        """Whether there is such an attribute; its value need not be picklable."""
        try:
            self.shmvec_get_attr(name)
        except AttributeError:
            return False
        return True

    def shmvec_is_wrapped(self, wrapper_class: type[Any]) -> bool:
        """Whether one of the env's wrappers is of this class."""
        env: Any = self.env
        while isinstance(env, gym.Wrapper):
            if isinstance(env, wrapper_class):
                return True
            env = env.env
        return False


def as_gymnasium_env(env: Any) -> gym.Env[Any, Any]:
    """A Gymnasium env as it is, and an env of old Gym in Stable-Baselines3's wrapper.

    Raises:
        ValueError: It is no env.
        ImportError: It is an env of old Gym, and shimmy is not installed.
    """
    if isinstance(env, gym.Env):
        return env
    from stable_baselines3.common.vec_env.patch_gym import _patch_env

    patched: gym.Env[Any, Any] = _patch_env(env)
    return patched

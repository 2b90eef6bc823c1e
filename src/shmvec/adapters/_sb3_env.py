"""One env in its worker, as ``shmvec.adapters.sb3`` wants it reset, asked and changed.

Nothing here imports Stable-Baselines3, which imports torch: workers need neither, unless the envs
do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym

from shmvec.exchange import HostedEnv

RESET_INFO = "reset"  # the key


class SB3Env(HostedEnv):
    """An env of the user's, and the methods that ``ShmVecEnv`` calls in its worker.

    ``Exchange.call`` finds only these methods: ``get_attr`` returns an attribute of the env and
    never calls it, and ``env_method`` calls methods named ``reset`` or ``step`` like any other.
    """

    def __init__(self, env_fn: Callable[[], Any]) -> None:
        """Builds the env."""
        super().__init__(gymnasium_env(env_fn()))

    def reset(self, *, options: Any = None, **seed: Any) -> Any:
        """Resets the env, without options where there are none: its reset may not take any.

        The info is put under one key, apart from the core's report of the last episode.
        """
        result = self.env.reset(options=options, **seed) if options else self.env.reset(**seed)
        if isinstance(result, tuple) and len(result) == 2 and result[1]:
            observation, info = result
            return observation, {RESET_INFO: info} if isinstance(info, dict) else info
        return result

    def get_wrapper_attr(self, name: str) -> Any:
        """One of the methods below, which a worker calls."""
        return getattr(self, name)

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Sets an attribute of the env, or of the wrapper that has it."""
        if hasattr(self.env, name):  # Gymnasium 1.0 passes over the outermost wrapper
            setattr(self.env, name, value)
        else:
            self.env.set_wrapper_attr(name, value)

    def itself(self) -> gym.Env[Any, Any]:
        """The env, which only ``num_workers=0`` can return."""
        env: gym.Env[Any, Any] = self.env
        return env

    def get_attr(self, name: str) -> Any:
        """An attribute of the env or one of its wrappers."""
        return self.env.get_wrapper_attr(name)

    def has_attr(self, name: str) -> bool:
        """Whether there is such an attribute; its value need not be picklable."""
        try:
            self.env.get_wrapper_attr(name)
        except AttributeError:
            return False
        return True

    def env_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the env or one of its wrappers."""
        return self.env.get_wrapper_attr(name)(*args, **kwargs)

    def is_wrapped(self, wrapper_class: type[Any]) -> bool:
        """Whether one of the env's wrappers is of this class."""
        env: Any = self.env
        while isinstance(env, gym.Wrapper):
            if isinstance(env, wrapper_class):
                return True
            env = env.env
        return False


def gymnasium_env(env: Any) -> gym.Env[Any, Any]:
    """A Gymnasium env: the given one, or one of old Gym, wrapped as Stable-Baselines3 does.

    Raises:
        ValueError: It is an env of neither.
        ImportError: It is an env of old Gym, and shimmy is not installed.
    """
    if isinstance(env, gym.Env):
        return env
    from stable_baselines3.common.vec_env.patch_gym import _patch_env

    patched: gym.Env[Any, Any] = _patch_env(env)
    return patched

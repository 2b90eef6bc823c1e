"""What the caller of a manager passes, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shmvec.adapters.ding.config import integer
from shmvec.adapters.ding.states import EnvStateError, Slot

__all__ = ["checked_envs", "checked_params", "checked_seeds"]


def checked_envs(actions: Any, slots: Sequence[Slot]) -> list[int]:
    """The envs to step.

    Raises:
        TypeError: It is no mapping, or an id is no integer.
        ValueError: There is no such env.
        EnvStateError: One cannot be stepped now.
    """
    if not isinstance(actions, Mapping):
        raise TypeError(f"step() takes a dict {{env_id: action}}, got {type(actions).__name__}")
    envs = [_checked_env(env, len(slots)) for env in actions]
    if not all(slots[env].ready for env in envs):
        states = ", ".join(
            f"{env}: {slots[env].state.name}" + (" (in flight)" if slots[env].in_flight else "")
            for env in envs
        )
        raise EnvStateError(
            f"current env states are: {{{states}}}, please check whether the requested env is "
            "in reset or done. Nothing was sent to any env."
        )
    return envs


def _checked_env(env: Any, num_envs: int) -> int:
    index = integer("env ids are ints", env)
    if not 0 <= index < num_envs:
        raise ValueError(f"there is no env {env}: there are {num_envs}")
    return index


def checked_params(reset_param: Any, num_envs: int) -> dict[int, dict[str, Any] | None]:
    """Keyword arguments of resets, by env.

    Raises:
        TypeError: They are no mapping of mappings.
        ValueError: There is no such env.
    """
    if not isinstance(reset_param, Mapping):
        raise TypeError(
            f"reset_param must be a dict {{env_id: kwargs}}, got {type(reset_param).__name__}"
        )
    params: dict[int, dict[str, Any] | None] = {}
    for env, kwargs in reset_param.items():
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(
                f"the reset_param of env {env} must be a dict of keyword arguments or None, "
                f"got {kwargs!r}"
            )
        params[_checked_env(env, num_envs)] = None if kwargs is None else dict(kwargs)
    return params


def checked_seeds(seed: Any, num_envs: int) -> dict[int, int | None]:
    """The seed of each env that gets one.

    Raises:
        TypeError: One is no integer.
        ValueError: One is negative, there is no such env, or there are too many or too few.
    """
    if isinstance(seed, Mapping):
        seeds = {_checked_env(env, num_envs): value for env, value in seed.items()}
    elif isinstance(seed, (list, tuple, np.ndarray)):
        if len(seed) != num_envs:
            raise ValueError(f"there are {len(seed)} seeds for {num_envs} envs")
        seeds = dict(enumerate(seed))
    else:
        first = integer("seed must be an int, a list or a dict", seed)
        seeds = {env: first + env for env in range(num_envs)}
    for env, value in seeds.items():
        if value is not None:
            seeds[env] = integer(f"the seed of env {env} must be an int", value)
            if value < 0:
                raise ValueError(f"the seed of env {env} must not be negative, got {value}")
    return seeds

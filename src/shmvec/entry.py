"""Vector entry points: ``"shmvec.entry:CartPole-v1"`` is a function that makes such a vector env.

For ``EnvSpec.vector_entry_point``: Gymnasium looks the part behind the colon up in this module, and
calls it with ``num_envs``, ``max_episode_steps`` and the spec's kwargs but without the id. Being a
string, it survives ``spec.to_json()``.

Example:
    >>> import gymnasium as gym
    >>> gym.register("Fast/CartPole-v1", vector_entry_point="shmvec.entry:CartPole-v1")
    >>> envs = gym.make_vec("Fast/CartPole-v1", num_envs=2, num_workers=1)
    >>> type(envs).__name__, envs.num_envs, envs.num_workers
    ('ShmVectorEnv', 2, 1)
    >>> envs.close()
    >>> del gym.registry["Fast/CartPole-v1"]
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym

from shmvec._ways_in.make_vec import make_vec
from shmvec.vector_env import ShmVectorEnv

_VERSIONED = re.compile(r".+-v\d+")  # other ids are known only once they are registered
_OPTIONS = frozenset(inspect.signature(ShmVectorEnv).parameters) - {"env_fns"}


def __getattr__(name: str) -> Callable[..., ShmVectorEnv]:
    """The entry point for an env id."""
    if name not in gym.registry and not _VERSIONED.fullmatch(name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(_make, name)


def _make(
    id: str, num_envs: int = 1, max_episode_steps: int | None = None, **kwargs: Any
) -> ShmVectorEnv:
    """Arguments named as options of ``ShmVectorEnv`` go there, all others to the env."""
    options = {name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys()}
    if max_episode_steps is not None:
        kwargs["max_episode_steps"] = max_episode_steps
    return make_vec(id, num_envs, vector_kwargs=options, **kwargs)

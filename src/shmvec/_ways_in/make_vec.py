"""``make_vec``: vector envs by id, with Gymnasium's signature."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, _find_spec

from shmvec.vector_env import ShmVectorEnv

__all__ = ["make_vec"]


def make_vec(
    id: str | EnvSpec,
    num_envs: int = 1,
    vector_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] | None = None,
    **kwargs: Any,
) -> ShmVectorEnv:
    """Makes a :class:`ShmVectorEnv` of copies of a registered env.

    As :func:`gymnasium.make_vec`, without its ``vectorization_mode``.

    Args:
        id: Of the env, "module:Env-v0" to import a module first, or a spec.
        num_envs: How many.
        vector_kwargs: Arguments of :class:`ShmVectorEnv`, ``num_workers`` for example.
        wrappers: Functions that wrap each env.
        **kwargs: Arguments of the env, as for :func:`gymnasium.make`.

    Returns:
        The vector env. Its ``spec`` says how it was made.

    Raises:
        gymnasium.error.Error: There is no env of that id, or it has no entry point.
        ValueError: ``num_envs`` is not positive.

    Example:
        >>> import shmvec
        >>> envs = shmvec.make_vec("CartPole-v1", num_envs=2)
        >>> envs
        ShmVectorEnv(CartPole-v1, num_envs=2)
        >>> envs.close()
    """
    if isinstance(id, EnvSpec):
        spec = copy.deepcopy(id)
    elif isinstance(id, str):
        spec = copy.deepcopy(_find_spec(id))
    else:
        raise gym.error.Error(f"Invalid id type: {type(id)}. Expected `str` or `EnvSpec`")
    # A spec that a vector env was made from carries these arguments.
    made_with, spec.kwargs = spec.kwargs, {}
    num_envs = made_with.pop("num_envs", num_envs)
    vector_kwargs = made_with.pop("vector_kwargs", vector_kwargs) or {}
    wrappers = made_with.pop("wrappers", wrappers) or ()
    made_with.pop("vectorization_mode", None)
    env_kwargs = {**made_with, **kwargs}
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}")
    if spec.entry_point is None:
        raise gym.error.Error(
            f"Cannot create vectorized environment for {spec.id} because it doesn't have an "
            "entry point defined."
        )

    def make_env() -> gym.Env[Any, Any]:
        env = gym.make(spec, **env_kwargs)
        for wrapper in wrappers:
            env = wrapper(env)
        return env

    envs = ShmVectorEnv([make_env] * num_envs, **vector_kwargs)
    vector_spec = copy.deepcopy(spec)
    vector_spec.kwargs = dict(env_kwargs)
    if num_envs != 1:
        vector_spec.kwargs["num_envs"] = num_envs
    if vector_kwargs:
        vector_spec.kwargs["vector_kwargs"] = vector_kwargs
    if wrappers:
        vector_spec.kwargs["wrappers"] = wrappers
    envs.spec = vector_spec
    return envs

"""Entry points: ``make_vec``, ``vector_entry_point``, and ``install`` for unchanged programs.

As an ``EnvSpec.vector_entry_point``, ``"shmvec.entry:CartPole-v1"`` is a function that makes a
vector env of that id: Gymnasium looks up the part behind the colon in this module, and calls it
with ``num_envs``, ``max_episode_steps`` and the spec's kwargs. Being a string, it survives
``spec.to_json()``.

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

import copy
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import gymnasium.vector
from gymnasium.envs.registration import EnvSpec

from shmvec._arguments import checked_count, checked_wrappers
from shmvec._core import is_native
from shmvec._hints import did_you_mean, find_env_spec, refuse_unknown
from shmvec._options import OPTIONS, add_installed, end_installed
from shmvec.faults import add_note

if TYPE_CHECKING or is_native:
    from shmvec.vector_env import ShmVectorEnv
else:
    from shmvec._pure import ShmVectorEnv

__all__ = ["Installation", "install", "make_vec", "uninstall"]

_CLASS_NAME = "AsyncVectorEnv"
_ORIGINAL = gymnasium.vector.AsyncVectorEnv
_VERSIONED_ID = re.compile(r".+-v\d+")  # other ids count only once they are registered


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
        id: The env's id, "module:Env-v0" to import a module first, or a spec.
        num_envs: Number of envs.
        vector_kwargs: Options of :class:`ShmVectorEnv`, as a dict: for those that the env also has
            as arguments.
        wrappers: Functions that wrap each env.
        **kwargs: Options of :class:`ShmVectorEnv`, ``num_workers`` for example, and arguments of
            the env, as for :func:`gymnasium.make`. A name that is also in ``vector_kwargs`` is an
            argument of the env.

    Returns:
        The vector env. Its ``spec`` says how it was made.

    Raises:
        gymnasium.error.Error: There is no env of that id, or it has no entry point.
        ValueError: ``num_envs`` is not positive.
        TypeError: ``num_envs`` is no integer, or ``wrappers`` no list of functions.

    Example:
        >>> import shmvec
        >>> with shmvec.make_vec("CartPole-v1", num_envs=2, num_workers=1) as envs:
        ...     envs.num_workers, envs.reset(seed=1)[0].shape
        (1, (2, 4))
    """
    if "vectorization_mode" in kwargs:
        raise TypeError(
            f"make_vec has no vectorization_mode (got {kwargs['vectorization_mode']!r}): it always "
            "makes a ShmVectorEnv. Leave it out"
        )
    if isinstance(id, EnvSpec):
        spec = copy.deepcopy(id)
    elif isinstance(id, str):
        spec = copy.deepcopy(find_env_spec(id))
    else:
        hint = " For an env of your own: ShmVectorEnv([make_env] * 8)" if callable(id) else ""
        raise gym.error.Error(f"Invalid id type: {type(id)}. Expected `str` or `EnvSpec`.{hint}")
    # The spec that this function gives to a vector env has these arguments, too.
    spec_kwargs, spec.kwargs = spec.kwargs, {}
    num_envs = checked_count("num_envs", spec_kwargs.pop("num_envs", num_envs))
    vector_kwargs = {**(spec_kwargs.pop("vector_kwargs", vector_kwargs) or {})}
    wrappers = spec_kwargs.pop("wrappers", wrappers)
    wrappers = () if wrappers is None else checked_wrappers(wrappers)
    spec_kwargs.pop("vectorization_mode", None)
    env_kwargs = {**spec_kwargs, **kwargs}
    for name in (OPTIONS.keys() & kwargs.keys()) - vector_kwargs.keys():
        vector_kwargs[name] = env_kwargs.pop(name)
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

    try:
        envs = ShmVectorEnv([make_env] * num_envs, **vector_kwargs)
    except TypeError as error:
        for name in env_kwargs:
            if f"argument {name!r}" not in str(error):
                continue
            hint = did_you_mean([name], [*OPTIONS, "num_envs", "vector_kwargs", "wrappers"])
            if name in vector_kwargs:
                add_note(error, f"{name!r} is also in vector_kwargs; this one is passed to the env")
            elif hint:
                add_note(error, f"{name!r} is no option of make_vec{hint}")
        raise
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


def __getattr__(name: str) -> Callable[..., ShmVectorEnv]:
    """The entry point for the env id ``name``."""
    if name not in gym.registry and not _VERSIONED_ID.fullmatch(name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(_make, name)


def _make(
    id: str, num_envs: int = 1, max_episode_steps: int | None = None, **kwargs: Any
) -> ShmVectorEnv:
    """Makes a vector env as ``gymnasium.make_vec`` asks an entry point to."""
    if max_episode_steps is not None:
        kwargs["max_episode_steps"] = max_episode_steps
    return make_vec(id, num_envs, **kwargs)


class Installation:
    """A call of :func:`install`, as a context manager that ends it."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Takes the options that the call has installed."""
        self._options = options

    def __enter__(self) -> Installation:
        """Returns the installation, which is already in force."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends this installation and later ones; with the first one, uninstalls."""
        if end_installed(self._options):
            _rebind(ShmVectorEnv, _ORIGINAL)


def install(**options: Any) -> Installation:
    """Replaces ``gymnasium.vector.AsyncVectorEnv`` by :class:`ShmVectorEnv`, everywhere.

    The name is rebound in ``gymnasium.vector`` and in every module that has imported it by this
    name before. Existing vector envs, and classes derived from the original, stay as they are.
    Installing twice has the effect of installing once.

    Args:
        **options: Options of :class:`ShmVectorEnv`, for vector envs made from now on where a call
            does not give them, or gives None. ``num_workers`` is then at most the number of envs.
            docs/settings.md lists environment variables that do the same.

    Returns:
        A context manager; at the end of its block everything is as it was before.

    Raises:
        TypeError: :class:`ShmVectorEnv` has no such option.

    Example:
        >>> import gymnasium as gym
        >>> import shmvec
        >>> with shmvec.install(num_workers=1):
        ...     envs = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async")
        ...     isinstance(envs, gym.vector.AsyncVectorEnv), type(envs).__name__, envs.num_workers
        (True, 'ShmVectorEnv', 1)
        >>> envs.close()
        >>> gym.vector.AsyncVectorEnv.__name__
        'AsyncVectorEnv'
    """
    refuse_unknown("ShmVectorEnv", options, OPTIONS)
    added = add_installed(options)
    _rebind(_ORIGINAL, ShmVectorEnv)
    return Installation(added)


def uninstall() -> None:
    """Undoes :func:`install`; harmless if nothing is installed."""
    end_installed()
    _rebind(ShmVectorEnv, _ORIGINAL)


def _rebind(old: type[Any], new: type[Any]) -> None:
    """Replaces the class in every module that has it under its name."""
    for name, module in list(sys.modules.items()):
        try:  # getattr would load a module that is loaded lazily
            namespace = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        if name.split(".")[0] == "shmvec" or not isinstance(namespace, dict):
            continue
        if namespace.get(_CLASS_NAME) is old:
            namespace[_CLASS_NAME] = new

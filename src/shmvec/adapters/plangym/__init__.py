"""plangym's interface: ``make`` and ``ParallelEnv``, whose batches shmvec's workers step.

Replace ``import plangym`` by ``from shmvec.adapters import plangym``, or import ``ParallelEnv``
from here instead of ``plangym.vectorization``. Methods, their arguments and results are those of
`plangym's envs <https://github.com/FragileTech/plangym>`_, which are stepped unchanged. For
Gymnasium's envs, plangym need not be installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shmvec.adapters.plangym._gymnasium_env import GymnasiumEnv
from shmvec.adapters.plangym._parallel import ParallelEnv

__all__ = ["GymnasiumEnv", "ParallelEnv", "make"]


def make(
    name: str,
    n_workers: int | None = None,
    ray: bool = False,
    domain_name: str | None = None,
    state: str | None = None,
    **kwargs: Any,
) -> Any:
    """Makes an env by its name, as ``plangym.make`` does.

    Args:
        name: Name of the env. Its class is plangym's, where plangym is installed and has one;
            otherwise ``GymnasiumEnv``.
        n_workers: Number of worker processes. None: the env itself, without workers.
        ray: In plangym, whether workers are Ray's. Here they are the same processes as without it:
            eight, unless ``n_workers`` is given.
        domain_name: Name of a domain of dm_control.
        state: State of a game of Retro's.
        **kwargs: Arguments of the env's class; and of ``ParallelEnv``, if there are workers.

    Example:
        >>> from shmvec.adapters import plangym
        >>> env = plangym.make("CartPole-v1", n_workers=2)
        >>> state, observation, info = env.reset()
        >>> new_states, *_, infos = env.step_batch([0, 1, 0], [state] * 3, dt=2)
        >>> [info["n_step"] for info in infos]
        [2, 2, 2]
        >>> env.close()
    """
    env_class = _plangym_class(name, domain_name, state) or GymnasiumEnv
    for key, value in (("domain_name", domain_name), ("state", state)):
        if value is not None:
            kwargs[key] = value
    if n_workers is None and not ray:
        return env_class(name=name, **kwargs)
    if n_workers is not None:
        kwargs["n_workers"] = n_workers
    return ParallelEnv(env_class, name=name, **kwargs)


def _plangym_class(name: str, domain_name: str | None, state: str | None) -> Any:
    """The class that plangym has for an env; None if it has none, or is not installed."""
    try:
        registry = import_module("plangym.registry")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "plangym":
            raise  # a module that plangym needs is missing
        return None
    env_class = registry.get_planenv_class(name, domain_name, state)
    # plangym returns BalloonEnv for every name that it does not know.
    is_fallback = env_class.__name__ == "BalloonEnv" and not name.startswith("BalloonLearning")
    return None if is_fallback else env_class

"""plangym's interface: ``make`` and ``ParallelEnv``, whose batches shmvec's workers step.

Write ``from shmvec.adapters import plangym`` where a program says ``import plangym``, or import
``ParallelEnv`` from here and not from ``plangym.vectorization``. Methods, their arguments and
results are those of `plangym's envs <https://github.com/FragileTech/plangym>`_, which are stepped
as they are; it need not be installed for Gymnasium's.
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
    env_class = _class_for(name, domain_name, state) or GymnasiumEnv
    for key, value in (("domain_name", domain_name), ("state", state)):
        if value is not None:
            kwargs[key] = value
    if n_workers is None and not ray:
        return env_class(name=name, **kwargs)
    if n_workers is not None:
        kwargs["n_workers"] = n_workers
    return ParallelEnv(env_class, name=name, **kwargs)


def _class_for(name: str, domain_name: str | None, state: str | None) -> Any:
    """The class that plangym has for an env; None if it has none, or is not installed."""
    try:
        registry = import_module("plangym.registry")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "plangym":
            raise  # what plangym needs is missing
        return None
    found = registry.get_planenv_class(name, domain_name, state)
    # plangym returns BalloonEnv for every name that it does not know.
    stray = found.__name__ == "BalloonEnv" and not name.startswith("BalloonLearning")
    return None if stray else found

"""``install``: lets ``gymnasium.vector.AsyncVectorEnv`` mean ``ShmVectorEnv``.

Code that cannot be changed then runs on shared memory: ``gymnasium.make_vec(...,
vectorization_mode="async")``, and libraries that name the class.
"""

from __future__ import annotations

import inspect
import sys
from types import TracebackType
from typing import Any

import gymnasium.vector

from shmvec._parent.defaults import add_installed, end_installed
from shmvec.vector_env import ShmVectorEnv

__all__ = ["Installation", "install", "uninstall"]

_NAME = "AsyncVectorEnv"
_OPTIONS = inspect.signature(ShmVectorEnv).parameters.keys() - {"env_fns"}
_ORIGINAL = gymnasium.vector.AsyncVectorEnv


class Installation:
    """What :func:`install` returns: a context manager that ends what it began."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Takes the options, among those that are installed."""
        self._options = options

    def __enter__(self) -> Installation:
        """Does nothing more."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends this installation, and those that came after it; uninstalls with the first."""
        if end_installed(self._options):
            _rebind(ShmVectorEnv, _ORIGINAL)


def install(**options: Any) -> Installation:
    """Lets ``gymnasium.vector.AsyncVectorEnv`` mean :class:`ShmVectorEnv`, everywhere.

    The name is bound anew in ``gymnasium.vector`` and in every module that has imported it by this
    name before. Vector envs that exist, and classes derived from the original, stay what they are.
    Installing twice is as good as once.

    Args:
        **options: Of :class:`ShmVectorEnv`, for all that are made from now on and are not given
            them, or None. ``num_workers`` is then at most the number of envs. docs/settings.md
            lists environment variables that do the same.

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
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise TypeError(f"ShmVectorEnv has no option {', '.join(map(repr, unknown))}")
    added = add_installed(options)
    _rebind(_ORIGINAL, ShmVectorEnv)
    return Installation(added)


def uninstall() -> None:
    """Undoes :func:`install`; harmless if nothing is installed."""
    end_installed()
    _rebind(ShmVectorEnv, _ORIGINAL)


def _rebind(old: type[Any], new: type[Any]) -> None:
    """Replaces the class wherever it goes by the name."""
    for name, module in list(sys.modules.items()):
        try:  # without asking the module: one that is loaded lazily would load
            namespace = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        if name.split(".")[0] == "shmvec" or not isinstance(namespace, dict):
            continue
        if namespace.get(_NAME) is old:
            namespace[_NAME] = new

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

from shmvec._parent.defaults import installed, set_installed
from shmvec.vector_env import ShmVectorEnv

__all__ = ["Installation", "install", "uninstall"]

_NAME = "AsyncVectorEnv"
_OPTIONS = inspect.signature(ShmVectorEnv).parameters.keys() - {"env_fns"}
_ORIGINAL = gymnasium.vector.AsyncVectorEnv


class Installation:
    """What :func:`install` returns: a context manager that ends what it began."""

    def __init__(self, began: bool, before: dict[str, Any]) -> None:
        """Remembers whether there was anything to install, and the options before."""
        self._began = began
        self._before = before

    def __enter__(self) -> Installation:
        """Does nothing more."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Uninstalls, unless it was installed before; the options are again what they were."""
        if self._began:
            uninstall()
        set_installed(self._before)


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
    before = installed()
    set_installed({**before, **options})
    return Installation(_rebind(_ORIGINAL, ShmVectorEnv), before)


def uninstall() -> None:
    """Undoes :func:`install`; harmless if nothing is installed."""
    set_installed({})
    _rebind(ShmVectorEnv, _ORIGINAL)


def _rebind(old: type[Any], new: type[Any]) -> bool:
    """Replaces the class wherever it goes by the name; says whether it was anywhere."""
    found = False
    for name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if name.split(".")[0] == "shmvec" or not isinstance(namespace, dict):
            continue
        if namespace.get(_NAME) is old:
            namespace[_NAME] = new
            found = True
    return found

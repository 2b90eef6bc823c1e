"""What several adapters share: a step in flight, attributes, envs in workers, episodes' ends."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from shmvec.exchange import HostedEnv

STEP = SimpleNamespace(value="step")  # is pending in an exchange between a step's two calls
waiting_property = property(
    lambda self: self._exchange.pending is STEP, doc="Whether a step was begun and not waited for."
)


def delegate(to: str, name: str) -> Any:
    """A property that returns the attribute or method ``name`` of the attribute ``to``."""
    return property(lambda self: getattr(getattr(self, to), name), doc=f"``{to}.{name}``.")


class AskedEnv(HostedEnv):
    """An env in a worker, whose methods with the prefix "shmvec_" are for its adapter."""

    def get_wrapper_attr(self, name: str) -> Any:
        """A method of this class with the prefix, or an attribute of the env."""
        return getattr(self, name) if name.startswith("shmvec_") else super().get_wrapper_attr(name)

    def shmvec_get_attr(self, name: str) -> Any:
        """An attribute of the env or one of its wrappers; a method is returned, not called."""
        return super().get_wrapper_attr(name)

    def shmvec_env_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the env or one of its wrappers."""
        return self.shmvec_get_attr(name)(*args, **kwargs)

    def close(self) -> None:
        """Closes the env, if it has a method ``close``."""
        if hasattr(self.env, "close"):
            self.env.close()


def register_as(kind: type[Any], *names: str) -> None:
    """Registers a class with the system's abstract classes that are imported, for ``isinstance``.

    Classes of other versions of the system may be missing, or not be abstract.

    Args:
        kind: The class.
        *names: Names of the abstract classes, as "module:class".
    """
    for name in names:
        module, _, abstract_class = name.partition(":")
        register = getattr(getattr(sys.modules.get(module), abstract_class, None), "register", None)
        if register is not None:
            register(kind)


def split_final_info(infos: list[Any], env: int) -> tuple[Any, dict[str, Any]]:
    """Replaces the info of a reset by the info of the episode's last step.

    Returns:
        The episode's last observation, None if it is not known, and the info of the reset.
    """
    reset_info: dict[str, Any] = infos[env]
    infos[env] = reset_info.pop("final_info", {})
    return reset_info.pop("final_obs", None), reset_info

"""Helpers of several adapters: a step in flight, attributes, classes, ends of episodes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

STEP = SimpleNamespace(value="step")  # is pending in an exchange between a step's two calls
waiting_property = property(
    lambda self: self._exchange.pending is STEP, doc="Whether a step was begun and not waited for."
)


def delegate(to: str, name: str) -> Any:
    """A property that returns the attribute or method ``name`` of the attribute ``to``."""
    return property(lambda self: getattr(getattr(self, to), name), doc=f"``{to}.{name}``.")


def register_as(kind: type[Any], *names: str) -> None:
    """Registers a class with the system's abstract classes that are imported, for ``isinstance``.

    Args:
        kind: The class.
        *names: Names of the abstract classes, as "module:class".
    """
    for name in names:
        module, _, abstract_class = name.partition(":")
        if module in sys.modules:
            getattr(sys.modules[module], abstract_class).register(kind)


def split_final_info(infos: list[Any], env: int) -> tuple[Any, dict[str, Any]]:
    """Replaces the info of a reset by the info of the episode's last step.

    Returns:
        The episode's last observation, None if it is not known, and the info of the reset.
    """
    reset_info: dict[str, Any] = infos[env]
    infos[env] = reset_info.pop("final_info", {})
    return reset_info.pop("final_obs", None), reset_info

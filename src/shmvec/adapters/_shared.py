"""Helpers of several adapters: forwarded attributes, ends of episodes, a step that was begun."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

STEP = SimpleNamespace(value="step")  # what is pending in an exchange between a step's two calls
waiting = property(
    lambda self: self._exchange.pending is STEP, doc="Whether a step was begun and not waited for."
)


def forwarded(to: str, name: str) -> Any:
    """A property that returns the attribute or method ``name`` of the attribute ``to``."""
    return property(lambda self: getattr(getattr(self, to), name), doc=f"``{to}.{name}``.")


def split_end(infos: list[Any], env: int) -> tuple[Any, dict[str, Any]]:
    """Puts the last step's info of an episode in place of the info of the reset after it.

    Returns:
        The episode's last observation, None if it is not known, and the info of the reset.
    """
    reset_info: dict[str, Any] = infos[env]
    infos[env] = reset_info.pop("final_info", {})
    return reset_info.pop("final_obs", None), reset_info

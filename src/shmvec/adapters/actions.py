"""One action for each env, in a list, as other systems pass them: batched for the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import spaces

__all__ = ["batched"]


def batched(space: Any, actions: Sequence[Any]) -> Any:
    """Turns a list of actions into the dict or tuple that a Dict or Tuple space batches them to.

    Args:
        space: That of one env's actions.
        actions: One for each env, each as the space says.

    Returns:
        The same values by key or place, each in a list; the list itself for all other spaces.

    Raises:
        ValueError: One of them lacks a key or has another number of parts.

    Example:
        >>> from gymnasium.spaces import Dict, Discrete
        >>> from shmvec.adapters.actions import batched
        >>> batched(Dict(x=Discrete(2), y=Discrete(3)), [{"x": 0, "y": 2}, {"x": 1, "y": 0}])
        {'x': [0, 1], 'y': [2, 0]}
    """
    if isinstance(space, spaces.Dict):
        for index, action in enumerate(actions):
            if not hasattr(action, "keys") or set(action.keys()) != set(space.keys()):
                raise ValueError(
                    f"wrong actions: that of env {index} must be a dict with the keys "
                    f"{list(space.keys())}, got {action!r}. Nothing was sent to any env."
                )
        return {
            key: batched(part, [action[key] for action in actions]) for key, part in space.items()
        }
    if isinstance(space, spaces.Tuple):
        for index, action in enumerate(actions):
            if not isinstance(action, (tuple, list)) or len(action) != len(space.spaces):
                raise ValueError(
                    f"wrong actions: that of env {index} must be a tuple of {len(space.spaces)} "
                    f"parts, got {action!r}. Nothing was sent to any env."
                )
        return tuple(
            batched(part, [action[place] for action in actions])
            for place, part in enumerate(space.spaces)
        )
    return actions

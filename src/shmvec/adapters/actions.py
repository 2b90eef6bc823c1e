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
        keys, wanted = list(space.keys()), f"a dict with the keys {list(space.keys())}"
        fitting = [hasattr(each, "keys") and set(each.keys()) == set(keys) for each in actions]
    elif isinstance(space, spaces.Tuple):
        keys, wanted = list(range(len(space))), f"a tuple of {len(space)} parts"
        fitting = [isinstance(each, (tuple, list)) and len(each) == len(keys) for each in actions]
    else:
        return actions
    if not all(fitting):
        env = fitting.index(False)
        raise ValueError(
            f"wrong actions: that of env {env} must be {wanted}, got {actions[env]!r}. Nothing was "
            "sent to any env."
        )
    parts = {key: batched(space[key], [each[key] for each in actions]) for key in keys}
    return parts if isinstance(space, spaces.Dict) else tuple(parts.values())

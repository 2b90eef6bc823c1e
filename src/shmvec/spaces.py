"""A space for anything, and values taken apart as their space says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.vector.utils import create_shared_memory

__all__ = ["Anything", "batched", "mapped", "one_of"]

Space = gym.Space[Any]


class Anything(gym.Space[Any]):
    """The space of any object that can be pickled: its values travel as messages."""

    def __init__(self) -> None:
        """Makes the space; it has no shape and no dtype."""
        super().__init__()

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        """Nothing can be sampled."""
        raise NotImplementedError("what may be anything cannot be sampled")

    def contains(self, x: Any) -> bool:
        """Anything will do."""
        return True

    def __eq__(self, other: object) -> bool:
        """All are equal."""
        return isinstance(other, Anything)

    __hash__ = None  # type: ignore[assignment]


@create_shared_memory.register(Anything)
def _in_messages(space: Anything, n: int = 1, ctx: Any = None) -> None:
    """Such values travel as messages: they need no shared array."""


def mapped(space: Space, leaf: Callable[..., Any], *values: Any) -> Any:
    """Applies a function to the parts of nested values; the results are nested likewise.

    Args:
        space: The space, whose Dicts and Tuples the values follow.
        leaf: The function: called once for each part, with that part of every value.
        *values: Values of this space, or batches of it.

    Example:
        >>> from gymnasium.spaces import Dict, Discrete, Tuple
        >>> mapped(Dict(x=Discrete(2), y=Tuple([Discrete(3)])), len, {"x": [0, 1], "y": ([2, 0],)})
        {'x': 2, 'y': (2,)}
    """
    if isinstance(space, gym.spaces.Dict):
        return {
            key: mapped(part, leaf, *(value[key] for value in values))
            for key, part in space.items()
        }
    if isinstance(space, gym.spaces.Tuple):
        return tuple(
            mapped(part, leaf, *of_part)
            for part, *of_part in zip(space.spaces, *values, strict=True)
        )
    return leaf(*values)


def one_of(space: Space, batch: Any, index: int) -> Any:
    """One value of a batch; its parts are views."""
    return mapped(space, lambda values: values[index], batch)


def batched(space: Any, actions: Sequence[Any]) -> Any:
    """Turns a list of actions into the dict or tuple that a Dict or Tuple space batches them to.

    Args:
        space: Action space of one env.
        actions: One for each env, each as the space says.

    Returns:
        The same values by key or place, each in a list; the list itself for all other spaces.

    Raises:
        ValueError: One of them lacks a key or has another number of parts.

    Example:
        >>> from gymnasium.spaces import Dict, Discrete
        >>> from shmvec.spaces import batched
        >>> batched(Dict(x=Discrete(2), y=Discrete(3)), [{"x": 0, "y": 2}, {"x": 1, "y": 0}])
        {'x': [0, 1], 'y': [2, 0]}
    """
    if isinstance(space, gym.spaces.Dict):
        keys, wanted = list(space.keys()), f"a dict with the keys {list(space.keys())}"
        fitting = [hasattr(each, "keys") and set(each.keys()) == set(keys) for each in actions]
    elif isinstance(space, gym.spaces.Tuple):
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
    return parts if isinstance(space, gym.spaces.Dict) else tuple(parts.values())

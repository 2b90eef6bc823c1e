"""A space for anything, and functions on values that are nested as their space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.vector.utils import create_shared_memory

__all__ = ["Anything", "batched", "mapped", "one_of"]

Space = gym.Space[Any]


class Anything(gym.Space[Any]):
    """The space of any object that can be pickled: its values are sent as messages."""

    def __init__(self) -> None:
        """Makes the space; it has no shape and no dtype."""
        super().__init__()

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        """Raises NotImplementedError."""
        raise NotImplementedError("the space of anything cannot be sampled")

    def contains(self, x: Any) -> bool:
        """Returns True."""
        return True

    def __eq__(self, other: object) -> bool:
        """Whether the other is such a space, too."""
        return isinstance(other, Anything)

    __hash__ = None  # type: ignore[assignment]


@create_shared_memory.register(Anything)
def _in_messages(space: Anything, n: int = 1, ctx: Any = None) -> None:
    """Makes no shared array: such values are sent as messages."""


def mapped(space: Space, leaf: Callable[..., Any], *values: Any) -> Any:
    """Applies a function to the parts of nested values; the results are nested likewise.

    Args:
        space: The space; values are nested as its Dicts and Tuples.
        leaf: The function, called once for each part, with that part of every value.
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
    """Returns one value of a batch; its arrays are views."""
    return mapped(space, lambda values: values[index], batch)


def batched(space: Any, actions: Sequence[Any]) -> Any:
    """Converts a list of actions to a batch of a Dict or Tuple space: a dict or tuple of lists.

    Args:
        space: Action space of one env.
        actions: One action for each env.

    Returns:
        The same values by key or place, each in a list; for all other spaces the list itself.

    Raises:
        ValueError: An action lacks a key or has another number of parts.

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

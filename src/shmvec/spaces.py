"""A space for anything, and values taken apart as their space says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.vector.utils import create_shared_memory

__all__ = ["Anything", "mapped", "one_of"]

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

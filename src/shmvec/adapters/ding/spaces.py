"""Spaces of DI-engine's envs as the core has them: gym's as Gymnasium's, and numbers with a form.

gym need not be installed: its spaces are known by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

__all__ = ["Numbers", "of_gymnasium"]

_PLAIN, _NO_DIMENSION, _ONE_DIMENSION = range(3)


def of_gymnasium(space: Any) -> Any:
    """A space as Gymnasium's, if it is one of gym's; any other as it is."""
    if isinstance(space, gym.Space):
        return space
    for base in type(space).__mro__:
        if base.__module__.partition(".")[0] == "gym" and base.__name__ in _SPACES_OF_GYM:
            return _SPACES_OF_GYM[base.__name__](space)
    return space  # the core says what is wrong


_SPACES_OF_GYM: dict[str, Callable[[Any], Any]] = {
    "Box": lambda space: spaces.Box(space.low, space.high, space.shape, space.dtype),
    "Discrete": lambda space: spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0))),
    "MultiDiscrete": lambda space: spaces.MultiDiscrete(space.nvec, space.dtype),
    "MultiBinary": lambda space: spaces.MultiBinary(space.n),
    "Tuple": lambda space: spaces.Tuple([of_gymnasium(each) for each in space.spaces]),
    "Dict": lambda space: spaces.Dict({k: of_gymnasium(v) for k, v in space.spaces.items()}),
}


class Numbers(spaces.Box):
    """Of rows in which the actions of a Discrete space travel: a number, and the form it had.

    DI-engine's policies give arrays of one dimension or of none, and some of its envs take nothing
    but arrays.

    Attributes:
        space: The Discrete space.
    """

    def __init__(self, space: spaces.Discrete) -> None:
        """Takes the space of the numbers."""
        limits = np.iinfo(np.int64)
        super().__init__(limits.min, limits.max, (2,), np.int64)
        self.space = space

    def rows(self, actions: Sequence[Any]) -> npt.NDArray[np.int64]:
        """Actions as the core takes them.

        Raises:
            ValueError: One is no single number.
            TypeError: One is no integer.
        """
        rows = np.empty((len(actions), 2), np.int64)
        for row, action in enumerate(actions):
            form = _PLAIN
            if isinstance(action, np.ndarray):
                form = _ONE_DIMENSION if action.ndim == 1 else _NO_DIMENSION
            number = np.asarray(action)
            kind = number.dtype.kind
            if number.size != 1 or number.ndim > 1 or kind not in "biu":
                error = TypeError if number.size == 1 else ValueError
                raise error(
                    f"wrong actions: {action!r} is no integer, as {self.space} needs. Nothing was "
                    "sent to any env."
                )
            rows[row] = number.item(), form
        return rows

    def action(self, row: npt.NDArray[np.int64]) -> Any:
        """The action of a row."""
        form = row[1]
        if form == _PLAIN:
            return row[0]
        return row[:1] if form == _ONE_DIMENSION else row[0:1].reshape(())

    def __eq__(self, other: object) -> bool:
        """Whether the actions are of equal spaces."""
        return isinstance(other, Numbers) and self.space == other.space

    def __repr__(self) -> str:
        """As the space of the actions."""
        return repr(self.space)

"""Batches of actions and states: checked, and taken apart into what each round sends."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import concatenate, create_empty_array

from shmvec.spaces import Anything

__all__ = ["Batches", "checked_dt"]

Rows = npt.NDArray[np.intp]

# Spaces whose batches are one array.
_ARRAYS = (
    gym.spaces.Box,
    gym.spaces.Discrete,
    gym.spaces.MultiBinary,
    gym.spaces.MultiDiscrete,
)


class Batches:
    """What batches of one kind of env are made of."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        state_space: gym.Space[Any],
    ) -> None:
        """Takes the spaces of one env."""
        self._observation_space = observation_space
        self._action_space = action_space
        # What stands where a batch has no actions or states.
        self._no_action = create_empty_array(action_space, 1)
        self._no_state = (
            None
            if isinstance(state_space, Anything)
            else np.zeros(state_space.shape or (), state_space.dtype)
        )

    def actions(self, actions: Any) -> tuple[Any, int]:
        """Actions as the action space batches them, and how many they are."""
        space = self._action_space
        if isinstance(space, _ARRAYS):
            array = np.asarray(actions)
            if array.ndim == 0 or (array.shape[1:] != space.shape and len(array)):
                raise ValueError(
                    f"wrong actions: their shape is {array.shape}, for envs whose action has "
                    f"{space.shape}; expected one for each of the batch. Nothing was sent."
                )
            return array, len(array)
        if isinstance(actions, list):
            if not actions:
                return actions, 0
            try:
                room: Any = create_empty_array(space, len(actions))
                return concatenate(space, actions, room), len(actions)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"wrong actions: {error}. Nothing was sent.") from error
        count = _length(actions)
        if count is None:
            raise ValueError(
                f"wrong actions: they must be a list, or batched as {space} says, got "
                f"{type(actions).__name__}. Nothing was sent."
            )
        return actions, count

    def states(self, states: Any, count: int) -> Any:
        """States as an array, or as a list if they are not of fixed size."""
        if self._no_state is None:
            states = list(states)
            found: Any = (len(states),)
        else:
            states = np.asarray(states)
            if count == 0 and len(states) == 0:
                return states
            found = states.shape
            if states.dtype != self._no_state.dtype:
                raise TypeError(
                    f"wrong states: they are {states.dtype}, not {self._no_state.dtype}. "
                    "Nothing was sent."
                )
        expected = (count,) if self._no_state is None else (count, *self._no_state.shape)
        if found != expected:
            raise ValueError(
                f"wrong states: their shape is {found}, expected {expected}, one for each of "
                f"{count} actions. Nothing was sent."
            )
        return states

    def one_state(self, state: Any) -> Any:
        """A batch of one state, checked."""
        return self.states([state] if self._no_state is None else np.asarray(state)[None], 1)

    def part(
        self, actions: Any, states: Any, orders: npt.NDArray[np.int64], where: Rows
    ) -> dict[str, Any]:
        """Actions of the rows, of some of a batch; None: there are no actions, or no states."""
        count = len(where)
        if actions is None:
            actions, of_actions = self._no_action, np.zeros(count, np.intp)
        else:
            of_actions = where
        if states is None:
            states = [None] if self._no_state is None else self._no_state[None]
            of_states = np.zeros(count, np.intp)
        else:
            of_states = where
        return {
            "action": _chosen(actions, of_actions),
            "state": _chosen(states, of_states),
            "orders": orders[where],
        }

    def empty(self) -> dict[str, Any]:
        """What a batch of nothing has to show."""
        states: Any = () if self._no_state is None else self._no_state[None][:0]
        observations = create_empty_array(self._observation_space, 0)
        return {"observation": observations, "state": states, "ends": np.zeros((0, 2))}


def checked_dt(dt: Any, count: int) -> npt.NDArray[np.int64]:
    """How often each action is repeated."""
    times = np.asarray(dt)
    if times.dtype.kind not in "iu":
        raise TypeError(f"dt must be an int or an array of ints, got {times.dtype}: {dt!r}")
    if times.ndim > 1 or (times.ndim == 1 and len(times) != count):
        raise ValueError(f"dt must be one int or {count}, one for each action, got {times.shape}")
    if (times < 1).any():
        raise ValueError(f"dt must be at least 1, got {dt!r}")
    return np.broadcast_to(times, count).astype(np.int64)


def _chosen(values: Any, which: Rows) -> Any:
    """Some of a batch, of indices that grow or are all the same."""
    if isinstance(values, dict):
        return {key: _chosen(part, which) for key, part in values.items()}
    if isinstance(values, np.ndarray):
        first, last = which[0], which[-1]
        return values[first : last + 1] if len(which) == last + 1 - first else values[which]
    if isinstance(values, list):
        return tuple(values[index] for index in which.tolist())
    return tuple(_chosen(part, which) for part in values)


def _length(values: Any) -> int | None:
    """How many a batch are, by its first array."""
    if isinstance(values, np.ndarray):
        return len(values) if values.ndim else None
    if isinstance(values, dict):
        values = tuple(values.values())
    return _length(values[0]) if isinstance(values, tuple) and values else None

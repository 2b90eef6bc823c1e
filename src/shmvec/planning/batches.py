"""Batches of actions and states: checked, and taken apart into what each round sends."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import concatenate, create_empty_array

from shmvec.planning.pieces import chosen
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
        self._state_space = state_space
        # What stands where a batch has no actions or states.
        nothing: Any = create_empty_array(action_space, 1)
        self._no_action = (None,) if nothing is None else nothing  # of a class of the user's
        self._no_state = (
            None
            if isinstance(state_space, Anything)
            else np.zeros(state_space.shape or (), state_space.dtype)
        )

    def actions(self, actions: Any) -> tuple[Any, int]:
        """Actions as the action space batches them, and how many they are."""
        space = self._action_space
        try:
            if isinstance(actions, list) and not isinstance(space, _ARRAYS):
                if not actions:
                    return actions, 0
                room: Any = create_empty_array(space, len(actions))
                return concatenate(space, actions, room), len(actions)
            actions, counts = _batched(space, actions)
            if len(counts) != 1:
                raise ValueError(f"their parts are of {sorted(counts)} actions")
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"wrong actions: {error}. Nothing was sent.") from error
        return actions, counts.pop()

    def states(self, states: Any, count: int) -> Any:
        """States as an array, or as a list if they are not of fixed size."""
        if self._no_state is None:
            try:
                states = list(states)
            except TypeError as error:
                raise TypeError(f"wrong states: {error}. Nothing was sent.") from error
            found: Any = (len(states),)
        else:
            try:
                states = np.asarray(states)
            except ValueError as error:  # of different shapes
                raise ValueError(f"wrong states: {error}. Nothing was sent.") from error
            if count == 0 and states.shape[:1] == (0,):
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
            "action": chosen(self._action_space, actions, of_actions),
            "state": chosen(self._state_space, states, of_states),
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
    if times.size == 0:  # an empty list, too
        times = times.astype(np.int64)
    if times.dtype.kind not in "iu":
        raise TypeError(f"dt must be an int or an array of ints, got {times.dtype}: {dt!r}")
    if times.ndim > 1 or (times.ndim == 1 and len(times) != count):
        raise ValueError(f"dt must be one int or {count}, one for each action, got {times.shape}")
    if (times < 1).any():
        raise ValueError(f"dt must be at least 1, got {dt!r}")
    return np.broadcast_to(times, count).astype(np.int64)


def _batched(space: gym.Space[Any], actions: Any) -> tuple[Any, set[int]]:
    """Actions as a space batches them, and how many they are: by each of their parts."""
    if isinstance(space, gym.spaces.Dict):
        if not isinstance(actions, dict) or actions.keys() != space.keys():
            raise ValueError(f"expected a dict of {list(space)}")
        of_keys = {key: _batched(part, actions[key]) for key, part in space.items()}
        counts: set[int] = set().union(*(count for _, count in of_keys.values()))
        return {key: values for key, (values, _) in of_keys.items()}, counts
    if isinstance(space, gym.spaces.Tuple):
        if not isinstance(actions, tuple) or len(actions) != len(space.spaces):
            raise ValueError(f"expected a tuple of {len(space.spaces)} parts")
        parts = [_batched(*pair) for pair in zip(space.spaces, actions, strict=True)]
        return tuple(values for values, _ in parts), set().union(*(count for _, count in parts))
    if isinstance(space, _ARRAYS):
        actions = np.asarray(actions)
        if actions.ndim == 0 or (actions.shape[1:] != space.shape and len(actions)):
            raise ValueError(
                f"their shape is {actions.shape}, for envs whose action has {space.shape}; "
                "expected one for each of the batch"
            )
    elif not isinstance(actions, (list, tuple, np.ndarray)):
        raise ValueError(f"expected a list or tuple of actions, got {type(actions).__name__}")
    return actions, {len(actions)}

"""Batches of actions and states: checked, split among the rows, and joined from their answers.

Values are split and joined by their space, since a tuple may hold parts of one value, or values.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import concatenate, create_empty_array

from shmvec.exchange import Answers
from shmvec.planning.rows import DT, INDEX, NUM_ORDERS, SET, WANTED
from shmvec.spaces import Anything, mapped

__all__ = ["Batch", "Batches", "checked_dt"]

Where = npt.NDArray[np.intp]

# Spaces whose batches are one array.
_ARRAYS = (
    gym.spaces.Box,
    gym.spaces.Discrete,
    gym.spaces.MultiBinary,
    gym.spaces.MultiDiscrete,
)


class Batches:
    """Makes batches for the rows of one kind of env.

    Attributes:
        row_observation_space: Space of a row's observations, see rows.py.
        row_action_space: Space of a row's actions.
        observation_space: Observation space of one env.
        action_space: Action space of one env.
        state_space: State space of one env.
        list_infos: Whether infos are a list of dicts.
    """

    def __init__(self, row_observation_space: Any, row_action_space: Any, list_infos: bool) -> None:
        """Makes batches for rows with these spaces."""
        self.row_observation_space = row_observation_space
        self.row_action_space = row_action_space
        self.list_infos = list_infos
        self.observation_space: gym.Space[Any] = row_observation_space["observation"]
        self.action_space: gym.Space[Any] = row_action_space["action"]
        self.state_space: gym.Space[Any] = row_action_space["state"]
        self._states_differ = isinstance(self.state_space, Anything)  # in size

    def to_step(self, actions: Any, states: Any, dt: Any, with_states: bool, kept: bool) -> Batch:
        """A batch of the arguments of ``step_batch``; copied if it is to be ``kept``.

        Raises:
            ValueError: Numbers or shapes do not fit.
            TypeError: A dtype does not.
        """
        actions, count = self._actions(actions)
        times = checked_dt(dt, count)
        given = states is not None
        if given:
            states = self._states(states, count)
        if kept:
            actions, states = copy.deepcopy((actions, states))
        if not given:
            states = _nothing(self.state_space, count)
        return Batch(self, actions, states, times, given, with_states)

    def to_set(self, state: Any, count: int) -> Batch:
        """A batch that sets a checked state in ``count`` rows."""
        actions = _nothing(self.action_space, count)
        return Batch(self, actions, self._states([state] * count, count), 0, True, False)

    def checked_state(self, state: Any) -> Any:
        """A state, checked and converted as those of a batch are."""
        return self._states([state], 1)[0]

    def _actions(self, actions: Any) -> tuple[Any, int]:
        """Actions as the action space batches them, and how many they are."""
        space = self.action_space
        counts: set[int] = set()

        def checked(space: gym.Space[Any], actions: Any) -> Any:
            if isinstance(space, _ARRAYS):
                actions = np.asarray(actions)
                if actions.ndim == 0 or (actions.shape[1:] != space.shape and len(actions)):
                    raise ValueError(
                        f"their shape is {actions.shape}, for envs whose action has "
                        f"{space.shape}; expected one for each of the batch"
                    )
                if len(actions) and not np.can_cast(actions.dtype, space.dtype, "same_kind"):
                    raise TypeError(f"they are {actions.dtype}, not {space.dtype}")
            elif not isinstance(actions, (list, tuple, np.ndarray)):
                raise ValueError(f"expected a list or tuple, got {type(actions).__name__}")
            counts.add(len(actions))
            return actions

        try:
            if isinstance(actions, list) and not isinstance(space, _ARRAYS):
                if not actions:
                    return actions, 0
                room: Any = create_empty_array(space, len(actions))
                actions = concatenate(space, actions, room)
            actions = mapped(space, checked, space, actions)
            if len(counts) != 1:
                raise ValueError(f"their parts are of {sorted(counts)} actions")
        except (IndexError, KeyError, TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"wrong actions: {error}. Nothing was sent.") from error
        return actions, counts.pop()

    def _states(self, states: Any, count: int) -> Any:
        """States as an array, or as a list if they are not of fixed size."""
        space = self.state_space
        try:
            states = list(states) if self._states_differ else np.asarray(states)
            found = (len(states),) if self._states_differ else states.shape
            expected = (count, *(space.shape or ()))
            if found[:1] == expected[:1] == (0,):  # an empty list has no further shape
                return states
            if not self._states_differ and states.dtype != space.dtype:
                raise TypeError(f"they are {states.dtype}, not {space.dtype}")
            if found != expected:
                raise ValueError(
                    f"their shape is {found}, expected {expected}, one for each of {count} actions"
                )
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"wrong states: {error}. Nothing was sent.") from error
        return states


class Batch:
    """The requests of one batch, and its results as they come.

    Attributes:
        count: The number of actions and states.
        sets_states: Whether its rows begin with its states.
    """

    def __init__(
        self, kind: Batches, actions: Any, states: Any, dt: Any, given: bool, with_states: bool
    ) -> None:
        """Makes a batch of checked values.

        Args:
            kind: The spaces.
            actions: The actions.
            states: The states, or placeholders.
            dt: How often each action is repeated.
            given: Whether states are given.
            with_states: Whether new states are returned.
        """
        self.count = len(states)
        self.sets_states = given
        self._with_states = with_states
        self._kind = kind
        orders = np.zeros((self.count, NUM_ORDERS), np.int64)
        orders[:, DT], orders[:, SET], orders[:, WANTED] = dt, given, with_states
        orders[:, INDEX] = np.arange(self.count)
        self._row_actions = {"action": actions, "state": states, "orders": orders}
        self._observed: Any = None  # made when the first part comes, if that is not all
        self._rewards = np.zeros(self.count)
        self._infos: list[tuple[Any, Where]] = []

    def part(self, where: Where) -> Any:
        """The actions of some rows; the indices must be in ascending order."""
        first, end = where[0], where[-1] + 1

        def chosen(values: Any) -> Any:
            if isinstance(values, np.ndarray):  # neighbours need no copy
                return values[first:end] if len(where) == end - first else values[where]
            return tuple(values[index] for index in where.tolist())

        return mapped(self._kind.row_action_space, chosen, self._row_actions)

    def put(self, where: Where, answers: Answers) -> None:
        """Puts answers into their places, where later ones replace earlier; infos are joined."""
        self._infos.append((answers.infos, where))
        if self._observed is None and len(where) == self.count and not answers.reports:
            self._observed, self._rewards = answers.observations, answers.rewards  # not copied
            return

        def place(room: Any, values: Any) -> None:
            if isinstance(room, np.ndarray):
                room[where] = values
            else:
                for index, value in zip(where.tolist(), values, strict=True):
                    room[index] = value

        self._observed = self._room() if self._observed is None else self._observed
        mapped(self._kind.row_observation_space, place, self._observed, answers.observations)
        self._rewards[where] = answers.rewards

    def give_up(self, where: Where) -> None:
        """Marks rows whose answers were put as truncated."""
        self._observed["ends"][where] = (0, 1)

    def results(self) -> tuple[Any, ...]:
        """The results of ``step_batch``."""

        def batched(values: Any) -> Any:
            return tuple(values) if isinstance(values, list) else values

        observed = self._room() if self._observed is None else self._observed
        ends = observed["ends"].astype(bool)
        results = (
            mapped(self._kind.observation_space, batched, observed["observation"]),
            self._rewards,
            ends[:, 0].copy(),
            ends[:, 1].copy(),
            (_listed_infos if self._kind.list_infos else _joined_infos)(self._infos, self.count),
        )
        states = observed["state"]
        states = states if isinstance(states, np.ndarray) else list(states)
        return (states, *results) if self._with_states else results

    def _room(self) -> Any:
        """Empty arrays or lists for the observations of all rows, nested as their space."""

        def room(values: Any) -> Any:
            return values if isinstance(values, np.ndarray) else [None] * self.count

        space = self._kind.row_observation_space
        return mapped(space, room, create_empty_array(space, self.count))


def checked_dt(dt: Any, count: int) -> npt.NDArray[np.int64]:
    """Checks how often each action is repeated; returns an array."""
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


def _nothing(space: gym.Space[Any], count: int) -> Any:
    """Placeholders for values that are not read; None where Gymnasium does not know the space."""

    def values(part: Any) -> Any:
        return (None,) * count if part is None else part

    return mapped(space, values, create_empty_array(space, count))


def _listed_infos(pieces: Sequence[tuple[list[dict[str, Any]], Where]], count: int) -> Any:
    """Infos of a batch, one dict for each row; later values replace earlier ones."""
    if len(pieces) == 1 and len(pieces[0][1]) == count:
        return pieces[0][0]
    joined: list[dict[str, Any]] = [{}] * count
    for infos, where in pieces:
        for index, info in zip(where.tolist(), infos, strict=True):
            joined[index] = {**joined[index], **info}
    return joined


def _joined_infos(pieces: Sequence[tuple[dict[str, Any], Where]], count: int) -> dict[str, Any]:
    """Gathered infos of a batch, joined from its pieces; later values replace earlier ones."""
    if len(pieces) == 1 and len(pieces[0][1]) == count:
        return pieces[0][0]
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for infos, _ in pieces for key in infos):
        found = [(infos[key], where) for infos, where in pieces if key in infos]
        if all(isinstance(value, dict) for value, _ in found):
            joined[key] = _joined_infos(found, count)
            continue
        arrays = [(np.asarray(value), where) for value, where in found]
        joined[key] = room = _empty([array for array, _ in arrays], count)
        for array, where in arrays:
            room[where] = array
    return joined


def _empty(arrays: Sequence[Any], count: int) -> Any:
    """Zeros, or Nones, as Gymnasium's infos have for envs without a value."""
    shapes = {array.shape[1:] for array in arrays}
    dtypes = {array.dtype for array in arrays}
    dtype: Any = dtypes.pop()
    for other in dtypes:
        numeric = dtype.kind in "biufc" and other.kind in "biufc"
        dtype = np.result_type(dtype, other) if numeric else np.dtype(object)
    if len(shapes) > 1 or dtype.kind == "O":
        return np.full((count, *(shapes.pop() if len(shapes) == 1 else ())), None, object)
    return np.zeros((count, *shapes.pop()), dtype)

"""Batches of actions and states: checks them, splits them among rows, and joins the answers.

Values are split and joined by their space: a tuple can be one value with parts, or several values.
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
from shmvec.faults import Fault
from shmvec.planning.rows import DT, INDEX, NUM_ORDERS, RETURN, SET
from shmvec.spaces import ARRAY_SPACES, Anything, mapped

__all__ = ["Batch", "Batches", "checked_dt"]

Places = npt.NDArray[np.intp]


class Batches:
    """Makes batches for the rows of one kind of env.

    Attributes:
        row_observation_space: Space of a row's observations; see rows.py.
        row_action_space: Space of a row's actions; see rows.py.
        observation_space: Observation space of one env.
        action_space: Action space of one env.
        state_space: State space of one env.
        list_infos: Whether infos are a list of dicts.
    """

    def __init__(self, row_observation_space: Any, row_action_space: Any, list_infos: bool) -> None:
        """Prepares to make batches for rows with these spaces."""
        self.row_observation_space = row_observation_space
        self.row_action_space = row_action_space
        self.list_infos = list_infos
        self.observation_space: gym.Space[Any] = row_observation_space["observation"]
        self.action_space: gym.Space[Any] = row_action_space["action"]
        self.state_space: gym.Space[Any] = row_action_space["state"]
        self._states_differ = isinstance(self.state_space, Anything)  # in size

    def make_step_batch(
        self, actions: Any, states: Any, dt: Any, with_states: bool, copy_values: bool
    ) -> Batch:
        """Makes a batch of the arguments of ``step_batch``, or of copies of them.

        Raises:
            ValueError: Numbers or shapes do not fit.
            TypeError: A dtype does not fit.
        """
        actions, count = self._actions(actions)
        times = checked_dt(dt, count)
        sets_states = states is not None
        if sets_states:
            states = self._states(states, count)
        if copy_values:
            actions, states = copy.deepcopy((actions, states))
        if not sets_states:
            states = _placeholders(self.state_space, count)
        return Batch(self, actions, states, times, sets_states, with_states)

    def make_set_batch(self, state: Any, count: int) -> Batch:
        """Makes a batch that sets a checked state in ``count`` rows."""
        actions = _placeholders(self.action_space, count)
        return Batch(self, actions, self._states([state] * count, count), 0, True, False)

    def checked_state(self, state: Any) -> Any:
        """A state, checked and converted as those of a batch are."""
        return self._states([state], 1)[0]

    def _actions(self, actions: Any) -> tuple[Any, int]:
        """Actions, checked, as the action space batches them, and their number."""
        space = self.action_space
        counts: set[int] = set()

        def checked(space: gym.Space[Any], actions: Any) -> Any:
            if isinstance(space, ARRAY_SPACES):
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
            if isinstance(actions, list) and not isinstance(space, ARRAY_SPACES):
                if not actions:
                    return actions, 0
                empty: Any = create_empty_array(space, len(actions))
                actions = concatenate(space, actions, empty)
            actions = mapped(space, checked, space, actions)
            if len(counts) != 1:
                raise ValueError(f"their parts are of {sorted(counts)} actions")
        except (IndexError, KeyError, TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"wrong actions: {error}. Nothing was sent.") from error
        return actions, counts.pop()

    def _states(self, states: Any, count: int) -> Any:
        """States, checked, as an array, or as a list if they are not of fixed size."""
        space = self.state_space
        try:
            states = list(states) if self._states_differ else np.asarray(states)
            shape = (len(states),) if self._states_differ else states.shape
            expected = (count, *(space.shape or ()))
            if shape[:1] == expected[:1] == (0,):  # an empty list has no further axes
                return states
            if not self._states_differ and states.dtype != space.dtype:
                raise TypeError(f"they are {states.dtype}, not {space.dtype}")
            if shape != expected:
                raise ValueError(
                    f"their shape is {shape}, expected {expected}, one for each of {count} actions"
                )
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"wrong states: {error}. Nothing was sent.") from error
        return states


class Batch:
    """The requests of a batch, and the results that have come so far.

    Attributes:
        count: The number of actions and states.
        sets_states: Whether its rows set its states before they step.
        faults: Those that have cost rows.
    """

    def __init__(
        self,
        kind: Batches,
        actions: Any,
        states: Any,
        dt: Any,
        sets_states: bool,
        with_states: bool,
    ) -> None:
        """Makes a batch of checked values.

        Args:
            kind: The spaces.
            actions: The actions.
            states: The states, or placeholders.
            dt: How often each action is repeated.
            sets_states: Whether the states are set.
            with_states: Whether new states are returned.
        """
        self.count = len(states)
        self.sets_states = sets_states
        self.faults: list[Fault] = []
        self._with_states = with_states
        self._kind = kind
        orders = np.zeros((self.count, NUM_ORDERS), np.int64)
        orders[:, DT], orders[:, INDEX] = dt, np.arange(self.count)
        orders[:, SET], orders[:, RETURN] = sets_states, with_states
        self._row_actions = {"action": actions, "state": states, "orders": orders}
        self._observations: Any = None  # made with the first answers, unless they are all
        self._rewards = np.zeros(self.count)
        self._infos: list[tuple[Any, Places]] = []

    def select(self, places: Places) -> Any:
        """The actions of the rows at some places, which must be in ascending order."""
        first, end = places[0], places[-1] + 1

        def rows(values: Any) -> Any:
            if isinstance(values, np.ndarray):  # a slice of neighbours is not copied
                return values[first:end] if len(places) == end - first else values[places]
            return tuple(values[index] for index in places.tolist())

        return mapped(self._kind.row_action_space, rows, self._row_actions)

    def put(self, places: Places, answers: Answers) -> None:
        """Stores answers at their places; they replace earlier ones, but infos are joined."""
        self._infos.append((answers.infos, places))
        if self._observations is None and len(places) == self.count and not answers.reports:
            self._observations, self._rewards = answers.observations, answers.rewards  # not copied
            return

        def place(empty: Any, values: Any) -> None:
            if isinstance(empty, np.ndarray):
                empty[places] = values
            else:
                for index, value in zip(places.tolist(), values, strict=True):
                    empty[index] = value

        if self._observations is None:
            self._observations = self._empty_results()
        mapped(self._kind.row_observation_space, place, self._observations, answers.observations)
        self._rewards[places] = answers.rewards

    def truncate(self, places: Places) -> None:
        """Marks rows that have answers as truncated."""
        self._observations["ends"][places] = (0, 1)

    def results(self) -> tuple[Any, ...]:
        """The results of ``step_batch``."""

        def batched(values: Any) -> Any:
            return tuple(values) if isinstance(values, list) else values

        observations = self._empty_results() if self._observations is None else self._observations
        ends = observations["ends"].astype(bool)
        results = (
            mapped(self._kind.observation_space, batched, observations["observation"]),
            self._rewards,
            ends[:, 0].copy(),
            ends[:, 1].copy(),
            (_list_infos if self._kind.list_infos else _join_infos)(self._infos, self.count),
        )
        states = observations["state"]
        states = states if isinstance(states, np.ndarray) else list(states)
        return (states, *results) if self._with_states else results

    def _empty_results(self) -> Any:
        """Uninitialised arrays or lists for all rows' observations, nested as their space."""

        def empty(values: Any) -> Any:
            return values if isinstance(values, np.ndarray) else [None] * self.count

        space = self._kind.row_observation_space
        return mapped(space, empty, create_empty_array(space, self.count))


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


def _placeholders(space: gym.Space[Any], count: int) -> Any:
    """Placeholders for values that are not read; None for spaces that Gymnasium does not know."""

    def values(part: Any) -> Any:
        return (None,) * count if part is None else part

    return mapped(space, values, create_empty_array(space, count))


def _list_infos(pieces: Sequence[tuple[list[dict[str, Any]], Places]], count: int) -> Any:
    """A batch's infos as a list of dicts; later values replace earlier ones."""
    if len(pieces) == 1 and len(pieces[0][1]) == count:
        return pieces[0][0]
    joined: list[dict[str, Any]] = [{}] * count
    for infos, places in pieces:
        for index, info in zip(places.tolist(), infos, strict=True):
            joined[index] = {**joined[index], **info}
    return joined


def _join_infos(pieces: Sequence[tuple[dict[str, Any], Places]], count: int) -> dict[str, Any]:
    """A batch's infos as a dict of arrays; later values replace earlier ones."""
    if len(pieces) == 1 and len(pieces[0][1]) == count:
        return pieces[0][0]
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for infos, _ in pieces for key in infos):
        values = [(infos[key], places) for infos, places in pieces if key in infos]
        if all(isinstance(value, dict) for value, _ in values):
            joined[key] = _join_infos(values, count)
            continue
        arrays = [(np.asarray(value), places) for value, places in values]
        joined[key] = empty = _empty_info_array([array for array, _ in arrays], count)
        for array, places in arrays:
            empty[places] = array
    return joined


def _empty_info_array(arrays: Sequence[Any], count: int) -> Any:
    """An array of zeros or Nones, which Gymnasium's infos have for envs without a value."""
    shapes = {array.shape[1:] for array in arrays}
    dtypes = {array.dtype for array in arrays}
    dtype: Any = dtypes.pop()
    for other in dtypes:
        numeric = dtype.kind in "biufc" and other.kind in "biufc"
        dtype = np.result_type(dtype, other) if numeric else np.dtype(object)
    if len(shapes) > 1 or dtype.kind == "O":
        return np.full((count, *(shapes.pop() if len(shapes) == 1 else ())), None, object)
    return np.zeros((count, *shapes.pop()), dtype)

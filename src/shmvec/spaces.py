"""Spaces: those of a vector env, which must fit together; one for anything; values by space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space, create_shared_memory

from shmvec._shared.layout import check_shared_memory
from shmvec._worker.process import Report

__all__ = ["Anything", "agreed_spaces", "mapped", "one_of"]

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
    """They lie in no slab, so that no array is needed; and nobody needs to be told."""


def mapped(space: Space, leaf: Callable[..., Any], *values: Any) -> Any:
    """Does something with the parts of nested values, and puts the results together likewise.

    Args:
        space: What Dicts and Tuples the values are made of.
        leaf: Called for each part of all of the values.
        *values: Of this space, or batches of it.

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
    """One value of a batch, of which parts are views."""
    return mapped(space, lambda values: values[index], batch)


def agreed_spaces(
    name: str,
    ranges: Sequence[range],
    reports: Sequence[Report],
    mode: str | tuple[Space, Space],
    shared_memory: bool,
) -> tuple[Space, Space, Space, Space]:
    """The spaces of observations and actions, of one env and of the batch.

    Args:
        name: Of the vector env's class, for messages.
        ranges: The envs of each worker.
        reports: What each worker says of its envs.
        mode: The ``observation_mode``.
        shared_memory: Whether observations are to lie in shared memory.

    Returns:
        Observation space of one env, of the batch; action space of one env, of the batch.

    Raises:
        RuntimeError: Spaces of the envs differ.
        ValueError: The observation space cannot be shared memory.
    """
    first = reports[0]
    observation_spaces: list[Any] = []
    action_spaces: list[Any] = []
    for envs, report in zip(ranges, reports, strict=True):
        observation_spaces += [report.observation_space] * len(envs)
        action_spaces += [report.action_space] * len(envs)
        for env, which, space in report.unequal:
            (observation_spaces if which == "observation_space" else action_spaces)[env] = space

    num_envs = len(observation_spaces)
    if isinstance(mode, tuple):
        batched, single = mode
    else:
        single = first.observation_space
        batched = (
            batch_space(single, num_envs)
            if mode == "same"
            else batch_differing_spaces(observation_spaces)
        )
    if shared_memory:
        check_shared_memory(single)
    for env, space in enumerate(observation_spaces):
        where = f"The observation space of env {env} is {space}, not {single}."
        if mode == "same" and space != single:
            raise RuntimeError(
                f"{name}(..., observation_mode='same') however some of the sub-environments "
                "observation spaces are not equivalent. If this is intentional, use "
                f"`observation_mode='different'` instead. {where}"
            )
        if mode != "same" and not is_space_dtype_shape_equiv(single, space):
            raise RuntimeError(
                f"{name}(..., observation_mode='different' or custom space) however the "
                "sub-environment's observation spaces do not share a common shape and dtype. "
                f"{where}"
            )
    for env, space in enumerate(action_spaces):
        if space != first.action_space:
            raise RuntimeError(
                "Some environments have an action space different from "
                f"`{first.action_space}`. In order to batch actions, the action spaces "
                "from all environments must be equal. "
                f"The action space of env {env} is {space}."
            )
    return single, batched, first.action_space, batch_space(first.action_space, num_envs)

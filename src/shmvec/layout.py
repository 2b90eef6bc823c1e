"""Spaces to slabs: which array lies where in the shared segment, with which dtype and shape.

The parent makes the layout from the spaces; it travels to the workers as it is, so that both
sides agree even where equal spaces list their keys in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from shmvec._core.codec import (
    ACTION_ITEMSIZE,
    ActionCodec,
    ArrayCodec,
    Codec,
    DictCodec,
    TextCodec,
    TupleCodec,
)
from shmvec._core.segment import Segment

__all__ = ["Layout", "Slabs"]

_ALIGNMENT = 128  # a cache line and its neighbour, as in csrc/platform.h

# Takes an array's shape and dtype, gives the array (or nothing, while sizes are only added up).
_Place = Callable[[tuple[int, ...], npt.DTypeLike], Any]


@dataclass(frozen=True)
class Slabs:
    """The arrays of a segment, ready to use. Rewards are float64, flags bool, all ``(num_envs,)``.

    Attributes:
        observations: Codec of the observations.
        actions: Codec of the actions.
        rewards: Rewards of the last step.
        terminations: Whether it ended an episode.
        truncations: Whether it cut one short.
    """

    observations: Codec
    actions: Codec
    rewards: npt.NDArray[np.float64]
    terminations: npt.NDArray[np.bool_]
    truncations: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Layout:
    """What the slabs of a segment hold.

    Attributes:
        observation_space: Observation space of one env.
        action_space: Action space of one env.
        num_envs: Number of envs, the first dimension of every array.
    """

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    num_envs: int

    def check(self) -> None:
        """Raises ValueError, naming the part, if a space cannot be laid out."""
        _check(self.observation_space, "observation space")
        _check(self.action_space, "action space")

    @property
    def nbytes(self) -> int:
        """Bytes of slabs that the layout needs."""
        total = 0

        def place(shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
            nonlocal total
            total = _aligned(total) + math.prod(shape) * np.dtype(dtype).itemsize

        self._walk(place, lambda kind, *arguments: None)
        return _aligned(total)

    def attach(self, segment: Segment) -> Slabs:
        """The slabs of a segment that was made with this layout's ``nbytes``."""
        offset = 0

        def place(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
            nonlocal offset
            offset = _aligned(offset)
            array = segment.array(offset, shape, dtype)
            offset += array.nbytes
            return array

        return Slabs(*self._walk(place, lambda kind, *arguments: kind(*arguments)))

    def _walk(self, place: _Place, make: Callable[..., Any]) -> tuple[Any, ...]:
        """Visits every array in the order in which they lie in the segment."""
        n = self.num_envs

        def walk(space: gym.Space[Any], leaf: Callable[[gym.Space[Any]], Any]) -> Any:
            if isinstance(space, spaces.Dict):
                return make(DictCodec, {k: walk(s, leaf) for k, s in space.spaces.items()})
            if isinstance(space, spaces.Tuple):
                return make(TupleCodec, [walk(s, leaf) for s in space.spaces])
            if isinstance(space, spaces.Text):
                return make(TextCodec, place((n, 1 + space.max_length), np.uint32))
            return leaf(space)

        def observation(space: gym.Space[Any]) -> Any:
            return make(ArrayCodec, place((n, *_shape(space)), np.dtype(space.dtype)))

        def action(space: gym.Space[Any]) -> Any:
            shape = _shape(space)
            itemsize = max(ACTION_ITEMSIZE, np.dtype(space.dtype).itemsize)
            memory = place((n, math.prod(shape) * itemsize), np.uint8)
            return make(ActionCodec, memory, place((1,), np.uint8), shape, space.dtype, space)

        return (
            walk(self.observation_space, observation),
            walk(self.action_space, action),
            place((n,), np.float64),
            place((n,), np.bool_),
            place((n,), np.bool_),
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _shape(space: gym.Space[Any]) -> tuple[int, ...]:
    assert space.shape is not None
    return tuple(int(size) for size in space.shape)


def _check(space: gym.Space[Any], path: str) -> None:
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            _check(part, f"{path}[{key!r}]")
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            _check(part, f"{path}[{index}]")
    elif not isinstance(
        space,
        (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Text),
    ):
        raise ValueError(
            f"the {path} cannot be laid out in shared memory: {space} is a "
            f"{type(space).__name__}, which has no fixed size. Use Box, Discrete, MultiDiscrete, "
            "MultiBinary, Text, or Dict and Tuple of these (a gymnasium wrapper such as "
            "FlattenObservation or TransformObservation can convert it)."
        )

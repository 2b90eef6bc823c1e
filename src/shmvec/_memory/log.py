"""Layout of a replay's log, whose memory is reserved as the log fills."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from shmvec._core import ArrayCodec, Codec, DictCodec, TupleCodec
from shmvec._core.replay import ReplayLog
from shmvec._memory.layout import Layout, Place, memory_placer, sequential_placer, total_nbytes
from shmvec._memory.segment import free_memory, seal_size

__all__ = ["LogLayout", "PiecewiseReservation", "open_log"]

AnyLog = TypeVar("AnyLog", bound=ReplayLog)

_PIECE_BYTES = 64 << 20  # bytes that are reserved at a time


@dataclass(frozen=True)
class LogLayout:
    """The layout of a log.

    Attributes:
        observation_space: Observation space of one env.
        action_space: Action space of one env.
        num_envs: Number of envs.
        depth: Number of records of each env.
        last_frame_only: Whether observations are stacks of frames, of which the last one is kept.
        zero_padded: Whether an episode's first stacks are filled with zeros, not its first frame.
        reward_shape: The shape of an env's reward.
    """

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    num_envs: int
    depth: int
    last_frame_only: bool
    zero_padded: bool
    reward_shape: tuple[int, ...] = ()

    @classmethod
    def for_segment(cls, layout: Layout, depth: int, last_only: int, zeros: int) -> LogLayout:
        """The layout for the envs of a segment's layout."""
        env_spaces = layout.observation_space, layout.action_space
        shape = () if layout.reward_space is None else layout.reward_space.shape
        return cls(*env_spaces, layout.num_envs, depth, bool(last_only), bool(zeros), shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return total_nbytes(self.arrays)

    @cached_property
    def row_nbytes(self) -> int:
        """Bytes of a record."""
        return sum(array.row_nbytes for array in self.array_places)

    @cached_property
    def array_places(self) -> list[ArrayPlace]:
        """Where the arrays lie, in order."""
        array_places: list[ArrayPlace] = []

        def array(offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
            num_rows = self.depth * self.num_envs
            array_places.append(ArrayPlace(offset, shape, np.dtype(dtype), num_rows))
            return array_places[-1]

        self.arrays(sequential_placer(array))
        return array_places

    def arrays(self, place: Place) -> tuple[Any, ...]:
        """Places counts (committed, written), interrupted, kinds, rewards, observations, actions.

        Observations and actions are nested as their spaces are.
        """
        n, rows = self.num_envs, self.depth * self.num_envs
        return (
            (place((n,), np.int64), place((n,), np.int64)),
            place((n,), np.uint8),
            place((rows,), np.uint8),
            place((rows, *self.reward_shape), np.float64),
            self._observations(rows, place),
            create_empty_array(self.action_space, rows, place),
        )

    def _observations(self, rows: int, place: Place) -> Any:
        space = self.observation_space
        if not self.last_frame_only:
            return create_empty_array(space, rows, place)
        assert space.shape is not None  # a stack is a Box
        return place((rows, *space.shape[1:]), np.dtype(space.dtype))

    def make_log(self, memory: Any, kind: Callable[..., AnyLog]) -> AnyLog:
        """A log over memory of ``nbytes``."""
        arrays = self.arrays(memory_placer(memory))
        counts, interrupted, kinds, rewards, observations, actions = arrays
        return kind(
            memory,
            counts,
            interrupted,
            kinds,
            rewards,
            (observations, actions),
            (_codec(self.observation_space, observations), _codec(self.action_space, actions)),
            self.last_frame_only,
            self.zero_padded,
        )


@dataclass(frozen=True)
class ArrayPlace:
    """Where an array of a log lies.

    Attributes:
        offset: Its first byte.
        shape: Its shape.
        dtype: Its dtype.
        num_rows: Number of rows of the log; an array of so many rows fills with the log.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    num_rows: int

    @cached_property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row; 0: the array does not fill with the log, and is reserved at once."""
        return self.nbytes // self.num_rows if self.shape[0] == self.num_rows else 0


def open_log(layout: Layout, memory: Any, *sizes: int) -> ReplayLog:
    """A worker's log over memory, given the layout of the segment and the log's sizes."""
    return LogLayout.for_segment(layout, *sizes).make_log(memory, ReplayLog)


class PiecewiseReservation:
    """The reservation of a log's memory, in large pieces, as it fills."""

    def __init__(self, descriptor: int, layout: LogLayout, folder: str | None) -> None:
        """Sizes the file of the descriptor, and reserves the arrays that do not fill with the log.

        Args:
            descriptor: Memory, or a file in a folder. ``close`` closes it, or a failure here does.
            layout: The layout.
            folder: The folder; None: the log lies in memory.

        Raises:
            OSError: There is not enough memory, or room on the disk, for the whole log.
        """
        self._finalizer = weakref.finalize(self, os.close, descriptor)  # closes it only once
        self._descriptor, self._layout, self._folder = descriptor, layout, folder
        self._reserved_positions = 0  # rows of these positions of each env are reserved
        try:
            self._check(layout.nbytes)
            os.ftruncate(descriptor, layout.nbytes)
            if folder is None:  # a process is killed if it reads pages that were cut off
                seal_size(descriptor)
            for array in layout.array_places:
                if not array.row_nbytes:
                    self._reserve(array.offset, array.nbytes)
        except BaseException:
            self.close()
            raise

    def reserve(self, position: int) -> int:
        """Reserves rows up to a position, and some more; returns the position that is reached.

        Raises:
            OSError: There is not enough memory.
        """
        layout = self._layout
        piece = max(1, _PIECE_BYTES // max(1, layout.row_nbytes * layout.num_envs))
        end = min(layout.depth, max(position, self._reserved_positions + piece))
        rows = layout.num_envs * (end - self._reserved_positions)
        if rows == 0:  # they were reserved for a saved log
            return end
        self._check(rows * layout.row_nbytes)
        first = layout.num_envs * self._reserved_positions
        for array in layout.array_places:
            self._reserve(array.offset + first * array.row_nbytes, rows * array.row_nbytes)
        self._reserved_positions = end
        return end

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Offset and number of the bytes that are reserved of each array."""
        rows = self._layout.num_envs * self._reserved_positions
        return [
            (array.offset, rows * array.row_nbytes if array.row_nbytes else array.nbytes)
            for array in self._layout.array_places
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return sum(nbytes for _, nbytes in self.ranges)

    def _reserve(self, offset: int, nbytes: int) -> None:
        if nbytes == 0:  # the array is empty
            return
        try:
            os.posix_fallocate(self._descriptor, offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise self._no_room(nbytes) from error

    def _check(self, nbytes: int) -> None:
        if self._free() < nbytes:
            raise self._no_room(nbytes)

    def _free(self) -> int:
        if self._folder is None:
            return free_memory()
        status = os.statvfs(self._folder)
        own_bytes = os.fstat(self._descriptor).st_blocks * 512
        return status.f_bavail * status.f_frsize + own_bytes

    def _no_room(self, nbytes: int) -> OSError:
        layout = self._layout
        where = "memory" if self._folder is None else f"the disk of {self._folder}"
        return OSError(
            errno.ENOSPC,
            f"a replay of {layout.depth * layout.num_envs:,} records of {layout.row_nbytes:,} "
            f"bytes needs {layout.nbytes:,} bytes, {nbytes:,} of them now, and there are "
            f"{self._free():,} free in {where}. Take a smaller capacity, smaller observations, or "
            "frame_stack= if they are stacks of frames",
        )

    def close(self) -> None:
        """Closes the descriptor and gives up its lock; the memory stays while it is mapped."""
        if self._folder is not None and self._finalizer.alive:
            with contextlib.suppress(OSError):  # otherwise the mapping would hold the lock
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._finalizer()


def _codec(space: gym.Space[Any], arrays: Any) -> Codec:
    """A codec over arrays that are nested as a space is."""
    if isinstance(space, spaces.Dict):
        return DictCodec({key: _codec(part, arrays[key]) for key, part in space.items()})
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, arrays, strict=True)
        return TupleCodec([_codec(part, array) for part, array in parts])
    return ArrayCodec(arrays)

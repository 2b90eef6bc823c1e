"""Layout of a replay's log: which array lies where, and the memory that is reserved as it fills."""

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
from shmvec._memory.layout import Layout, Place, nbytes_of, placing, placing_in
from shmvec._memory.segment import free_memory, seal_size

__all__ = ["LogLayout", "Piecewise", "open_log"]

AnyLog = TypeVar("AnyLog", bound=ReplayLog)

_PIECE = 64 << 20  # bytes that are reserved at a time


@dataclass(frozen=True)
class LogLayout:
    """The layout of a log.

    Attributes:
        observation_space: Observation space of one env.
        action_space: Action space of one env.
        num_envs: Number of envs.
        depth: Number of records kept of each env.
        newest: Whether of an observation, which is a stack of frames, the last frame is kept.
        zeros: Whether zeros precede an episode in a stack, not its first frame.
    """

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    num_envs: int
    depth: int
    newest: bool
    zeros: bool

    @classmethod
    def of(cls, layout: Layout, depth: int, newest: int, zeros: int) -> LogLayout:
        """The layout for the envs of a segment's."""
        spaces_of_one = layout.observation_space, layout.action_space
        return cls(*spaces_of_one, layout.num_envs, depth, bool(newest), bool(zeros))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return nbytes_of(self.arrays)

    @cached_property
    def row_nbytes(self) -> int:
        """Bytes of a record."""
        return sum(array.row_nbytes for array in self.places)

    @cached_property
    def places(self) -> list[Array]:
        """Where the arrays lie, in order."""
        found: list[Array] = []

        def array(offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
            found.append(Array(offset, shape, np.dtype(dtype), self.depth * self.num_envs))
            return found[-1]

        self.arrays(placing(array))
        return found

    def arrays(self, place: Place) -> tuple[Any, ...]:
        """Places counts (committed, written), interrupted, kinds, rewards, observations, actions.

        Observations and actions are nested as their spaces are.
        """
        n, rows = self.num_envs, self.depth * self.num_envs
        return (
            (place((n,), np.int64), place((n,), np.int64)),
            place((n,), np.uint8),
            place((rows,), np.uint8),
            place((rows,), np.float64),
            self._observations(rows, place),
            create_empty_array(self.action_space, rows, place),
        )

    def _observations(self, rows: int, place: Place) -> Any:
        space = self.observation_space
        if not self.newest:
            return create_empty_array(space, rows, place)
        assert space.shape is not None  # a stack is a Box
        return place((rows, *space.shape[1:]), np.dtype(space.dtype))

    def log(self, memory: Any, kind: Callable[..., AnyLog]) -> AnyLog:
        """A log over memory of ``nbytes``."""
        counts, interrupted, kinds, rewards, observations, actions = self.arrays(placing_in(memory))
        return kind(
            memory,
            counts,
            interrupted,
            kinds,
            rewards,
            (observations, actions),
            (_codec(self.observation_space, observations), _codec(self.action_space, actions)),
            self.newest,
            self.zeros,
        )


@dataclass(frozen=True)
class Array:
    """Where an array of a log lies.

    Attributes:
        offset: Its first byte.
        shape: Its shape.
        dtype: Its dtype.
        num_rows: Number of rows of the log; an array of as many fills with it.
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
        """Bytes of a row; 0: it has none, and is there at once."""
        return self.nbytes // self.num_rows if self.shape[0] == self.num_rows else 0


def open_log(layout: Layout, memory: Any, *sizes: int) -> ReplayLog:
    """A worker's log over memory, given the layout of the segment and the log's sizes."""
    return LogLayout.of(layout, *sizes).log(memory, ReplayLog)


class Piecewise:
    """The reservation of a log's memory, in large pieces, as it fills."""

    def __init__(self, descriptor: int, layout: LogLayout, folder: str | None) -> None:
        """Sizes the file of the descriptor, and reserves what is there at once.

        Args:
            descriptor: Of memory, or of a file in a folder. `close` closes it, or a failure here.
            layout: The layout.
            folder: The folder.

        Raises:
            OSError: There will not be enough memory, or room on the disk, for all of it.
        """
        self._closes = weakref.finalize(self, os.close, descriptor)  # once, however often called
        self._descriptor, self._layout, self._folder = descriptor, layout, folder
        self._positions = 0  # up to which rows are reserved
        try:
            self._check(layout.nbytes)
            os.ftruncate(descriptor, layout.nbytes)
            if folder is None:  # a process that reads pages which were cut off is killed
                seal_size(descriptor)
            for array in layout.places:
                if not array.row_nbytes:
                    self._reserve(array.offset, array.nbytes)
        except BaseException:
            self.close()
            raise

    def reserve(self, position: int) -> int:
        """Reserves rows up to a position and some more; returns the position reached.

        Raises:
            OSError: There is not enough memory.
        """
        layout = self._layout
        more = max(1, _PIECE // max(1, layout.row_nbytes * layout.num_envs))
        until = min(layout.depth, max(position, self._positions + more))
        rows = layout.num_envs * (until - self._positions)
        if rows == 0:  # they were reserved for what was loaded
            return until
        self._check(rows * layout.row_nbytes)
        first = layout.num_envs * self._positions
        for array in layout.places:
            self._reserve(array.offset + first * array.row_nbytes, rows * array.row_nbytes)
        self._positions = until
        return until

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Offset and bytes of what is reserved of each array."""
        rows = self._layout.num_envs * self._positions
        return [
            (array.offset, rows * array.row_nbytes if array.row_nbytes else array.nbytes)
            for array in self._layout.places
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return sum(nbytes for _, nbytes in self.ranges)

    def _reserve(self, offset: int, nbytes: int) -> None:
        if nbytes == 0:  # an array of empty shape, or none of rows
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
        has = os.fstat(self._descriptor).st_blocks * 512
        return status.f_bavail * status.f_frsize + has

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
        if self._folder is not None and self._closes.alive:
            with contextlib.suppress(OSError):  # the mapping would hold it as long as it is there
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._closes()


def _codec(space: gym.Space[Any], arrays: Any) -> Codec:
    """A codec over arrays that are nested as a space is."""
    if isinstance(space, spaces.Dict):
        return DictCodec({key: _codec(part, arrays[key]) for key, part in space.items()})
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, arrays, strict=True)
        return TupleCodec([_codec(part, array) for part, array in parts])
    return ArrayCodec(arrays)

from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

def segment_bytes(
    num_workers: int,
    num_envs: int,
    records: int,
    info_bytes: int,
    action_bytes: int,
    slab_bytes: int,
) -> int:
    """Bytes of memory that such a segment needs.

    Args:
        num_workers: Number of workers, each with rings of its own.
        num_envs: Number of envs.
        records: Requests and completions that each ring has room for.
        info_bytes: Room of each ring of messages from a worker to the parent.
        action_bytes: Room of each ring of messages from the parent to a worker.
        slab_bytes: Room for the arrays.

    Raises:
        ValueError: A size is out of range.
    """

def reserve(descriptor: int, nbytes: int) -> None:
    """Sizes a shared-memory descriptor and reserves all its pages.

    Raises:
        OSError: There is not that much memory (``ENOSPC``), or the descriptor is unfit.
    """

class Segment:
    """A mapping that holds a segment; csrc/segment.h says what lies where."""

    memory: Buffer
    @staticmethod
    def create(
        memory: Buffer,
        num_workers: int,
        num_envs: int,
        records: int,
        info_bytes: int,
        action_bytes: int,
        slab_bytes: int,
    ) -> Segment:
        """Formats zeroed memory of at least :func:`segment_bytes` as a segment."""
    @staticmethod
    def open(memory: Buffer) -> Segment:
        """Attaches to a segment that another process created, after validating it.

        Raises:
            ValueError: The memory holds no intact segment of this version.
        """
    @staticmethod
    def look(memory: Buffer, nbytes: int) -> Segment:
        """Looks at a segment from outside, for an ``Insight`` only.

        Args:
            memory: The begin of it, read-only or a copy: its header, or all of the ``front``.
            nbytes: How large all of it is.

        Raises:
            ValueError: The memory holds no intact segment of this version.
        """
    @property
    def front(self) -> int:
        """Bytes at the begin in which all is that onlookers read."""
    @property
    def num_workers(self) -> int: ...
    @property
    def num_envs(self) -> int: ...
    def array(
        self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """An array over ``offset`` of the slabs; it keeps the mapping alive."""

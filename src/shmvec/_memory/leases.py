"""Leases of batches that are borrowed views: a held batch is not written over."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np

from shmvec._core import Lease

__all__ = ["Leases", "release"]


class Leases:
    """Ends the leases of old batches, even if those are still held."""

    def __init__(self, most: int | None) -> None:
        """Takes how many of the last batches keep their leases; None: all."""
        self._most = most
        self.limited = most is not None
        self._held: deque[weakref.ref[Lease] | None] = deque()

    def add(self, lease: Lease | None) -> None:
        """Notes the next batch's lease; None: it has none."""
        if self._most is None:
            return
        self._held.append(None if lease is None else weakref.ref(lease))
        if len(self._held) > self._most:
            oldest = self._held.popleft()
            alive = None if oldest is None else oldest()
            if alive is not None:
                alive.release()


def release(array: Any) -> None:
    """Ends the lease of a batch, given one of its arrays or a view of one.

    Raises:
        TypeError: The argument is no array.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"release() takes an array of a batch, such as its rewards, got {type(array).__name__}"
        )
    owner: Any = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if isinstance(owner, Lease):  # else the array is a copy, without a lease
        owner.release()

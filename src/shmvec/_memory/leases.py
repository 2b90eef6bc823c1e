"""Batches that were handed out as views, and are not written while somebody holds them."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np

from shmvec._core import Lease

__all__ = ["Leases", "release"]


class Leases:
    """Ends the leases of old batches, also of those that somebody still holds."""

    def __init__(self, most: int | None) -> None:
        """Takes how many of the last ones stay; None: all do."""
        self._most = most
        self.limited = most is not None
        self._held: deque[weakref.ref[Lease] | None] = deque()

    def add(self, lease: Lease | None) -> None:
        """Notes the next batch; None: it holds no lease."""
        if self._most is None:
            return
        self._held.append(None if lease is None else weakref.ref(lease))
        if len(self._held) > self._most:
            oldest = self._held.popleft()
            alive = None if oldest is None else oldest()
            if alive is not None:
                alive.release()


def release(array: Any) -> None:
    """Ends the lease that an array of a batch, or a view of one, holds.

    Raises:
        TypeError: It is no array.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"release() takes an array of a batch, such as its rewards, got {type(array).__name__}"
        )
    owner: Any = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if isinstance(owner, Lease):  # else a copy, which holds nothing
        owner.release()

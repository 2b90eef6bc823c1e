"""Which envs are stepped while the policy is asked about others, and whether that pays."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shmvec.exchange import split_evenly

__all__ = ["Faster", "grouped"]

_TRIES = 2  # of each way, of which the faster counts
_AGAIN = 50  # after so many calls the other way is tried again


def grouped(owned: Sequence[range], count: int) -> list[npt.NDArray[np.intp]]:
    """Fixed groups of envs, none of them empty, of sizes as equal as can be.

    Each takes its share of each worker's envs, side by side, so that all workers step one group
    while the policy is busy with another; where workers have too few, of the workers.

    Args:
        owned: Each worker's envs.
        count: Of groups, at most as many as envs.

    Example:
        >>> [group.tolist() for group in grouped([range(0, 4), range(4, 7)], 2)]
        [[0, 1, 4], [2, 3, 5, 6]]
        >>> [group.tolist() for group in grouped([range(i, i + 1) for i in range(5)], 2)]
        [[0, 1, 2], [3, 4]]
    """
    if all(len(envs) < count for envs in owned):
        everyone = [env for envs in owned for env in envs]
        return [np.array(everyone)[part] for part in split_evenly(len(everyone), count)]
    groups: list[list[int]] = [[] for _ in range(count)]
    for envs in owned:
        sizes = [len(envs) // count] * count
        # Those that are left over go to who has least; of equals the last, whose turn comes last.
        for _ in range(len(envs) % count):
            least = min(reversed(range(count)), key=lambda index: len(groups[index]) + sizes[index])
            sizes[least] += 1
        begin = envs.start
        for group, size in zip(groups, sizes, strict=True):
            group += range(begin, begin + size)
            begin += size
    return [np.array(group, np.intp) for group in groups]


class Faster:
    """Which of two ways is faster: both are tried, and the slower one again now and then."""

    def __init__(self) -> None:
        """Knows nothing."""
        self._taken: tuple[deque[float], ...] = deque(maxlen=_TRIES), deque(maxlen=_TRIES)
        self._calls = 0

    def choose(self) -> int:
        """The way to go now: 0 or 1."""
        first, second = self._taken
        if len(second) < _TRIES:
            return int(len(first) > len(second))
        best = int(min(second) < min(first))
        return 1 - best if self._calls % _AGAIN == 0 else best

    def took(self, way: int, seconds: float) -> None:
        """Notes how long a way has taken."""
        self._calls += 1
        self._taken[way].append(seconds)

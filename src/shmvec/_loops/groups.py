"""Which envs are stepped together while the policy is asked about others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shmvec.exchange import split_evenly

__all__ = ["grouped"]


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

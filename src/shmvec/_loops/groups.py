"""Which envs are stepped while the policy is asked about others, and whether that pays."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shmvec.exchange import split_evenly

__all__ = ["Faster", "grouped"]

_SLICE = 16  # steps for which one way is gone
_PAIRS = 5  # slices of each way, of which most count
_AGAIN = 25  # slices, at least, until the slower way is tried again
_COST = 0.01  # of the time, at most, by which such tries may make all slower
_GAIN, _KEEP = 0.93, 0.97  # time in groups by that in lockstep: to begin with them, to stay


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
    """Whether groups are faster than lockstep, which is found out while steps are made.

    Groups save at most the time of the policy or that of the envs, whichever is shorter: where that
    would not be enough, they are not tried. Else slices of both ways take turns, so that what
    disturbs one disturbs the other. Lockstep is left if most of the last ratios say that groups are
    clearly faster. Then the slower way gets a slice now and then: the slower it is, the more
    rarely, so that it costs no more than a hundredth of the time; and another one at once where
    that was a surprise.
    """

    def __init__(self) -> None:
        """Begins with lockstep."""
        self.grouped = False  # how most steps are made
        self._ratios: deque[float] = deque(maxlen=_PAIRS)
        self._usual = 0.0  # seconds that a step has taken last
        self._may_pay = True  # whether groups may be fast enough, as lockstep was last
        self._steps = _SLICE  # until the other way is tried

    def choose(self, length: int, left: int) -> tuple[bool, int]:
        """How to go on.

        Args:
            length: Steps of a rollout.
            left: Of these.

        Returns:
            Whether in groups; and for how many steps.
        """
        slices = -(-length // _SLICE)
        most = -(-length // slices)
        if self._steps > 0 or not (self.grouped or self._may_pay):
            return self.grouped, min(left, max(most, self._steps))
        if left < most:  # too few to be compared
            return self.grouped, left
        return not self.grouped, most

    def took(self, grouped: bool, steps: int, seconds: float, policy: float) -> None:
        """Notes how many steps were made, and how long one, and the policy for it, has taken."""
        if not grouped:
            self._may_pay = min(policy, seconds - policy) > (1 - _GAIN) * seconds
        if grouped == self.grouped:
            self._usual, self._steps = seconds, self._steps - steps
            return
        ratio = seconds / self._usual if grouped else self._usual / seconds
        self._ratios.append(ratio)
        self._steps = _SLICE
        most = _KEEP if self.grouped else _GAIN
        for_groups = sum(each < most for each in self._ratios)
        if max(for_groups, len(self._ratios) - for_groups) > _PAIRS // 2:
            typical = statistics.median(self._ratios)
            self.grouped = for_groups > _PAIRS // 2
            if (ratio < most) == self.grouped:
                loss = (1 / typical if self.grouped else typical) - 1
                self._steps = int(_SLICE * max(_AGAIN, loss / _COST))

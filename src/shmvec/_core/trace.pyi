import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

KINDS: dict[int, str]  # what an entry may be of, and its name

class Recorder:
    """A writer's end of a ring; its first entry says who writes."""

    def __init__(
        self, memory: Buffer, rings: int, size: int, index: int, pid: int, takes: bool = False
    ) -> None:
        """Takes a ring.

        Args:
            memory: Where the rings are; it is kept as long as this is.
            rings: How many there are.
            size: Of how many entries each; a power of two.
            index: Which is taken.
            pid: The process's number.
            takes: Whether it takes results after its waits, as the parent does.

        Raises:
            ValueError: There is no such ring, or the memory is too small.
        """

def trace_bytes(rings: int, size: int) -> int:
    """How much memory so many rings take."""

class Switch:
    """Has writers go on, until it is turned off or forgotten."""

    def __init__(self, memory: Buffer) -> None:
        """Takes the memory that holds the rings, and keeps it."""

    def off(self) -> None:
        """Has writers let go of the memory when they next come to it."""

def read(memory: Buffer, rings: int, size: int, index: int) -> tuple[npt.NDArray[np.void], int]:
    """The entries of a ring, oldest first, and how many before these are gone.

    Returns:
        An array with fields ``begin`` and ``end``, in ns of the monotonic clock, ``env`` and
        ``kind``; they make no sense if the memory was damaged.
    """

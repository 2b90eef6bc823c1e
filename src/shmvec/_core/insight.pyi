import numpy as np
import numpy.typing as npt

from shmvec._core.segment import Segment

class Insight:
    """What a segment says of its vector env.

    Attributes:
        in_use: Whether it was made ready, and not closed.
        process: The parent's id, as that sees itself.
        processes: Those of its workers likewise; 0: it is being started. Empty if there are none.
        number: Which of its process's it is, counted from 1, closed ones as well.
        nbytes: Bytes of the segment.
        num_workers: Worker processes.
        num_envs: Envs.
        cores: That parent and workers may use.
        elapsed_s: Seconds since it was made ready.
    """

    def __init__(self, segment: Segment) -> None:
        """Looks at a segment, of which it needs the ``front`` and reads only.

        Raises:
            ValueError: There is less of it.
        """
    @property
    def in_use(self) -> bool:
        """Whether it is.

        Raises:
            ValueError: It is damaged.
        """
    @property
    def process(self) -> int: ...
    @property
    def processes(self) -> list[int]: ...
    @property
    def number(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def num_envs(self) -> int: ...
    @property
    def cores(self) -> int: ...
    @property
    def elapsed_s(self) -> float: ...
    def parent(self) -> dict[str, int]:
        """What the parent has counted, with the wait that it is in."""
    def workers(self) -> list[dict[str, int]]:
        """What each worker has, with those before it, and what of a request it has done."""
    def ranges(self) -> list[tuple[int, int]]:
        """The envs of each worker: the first, and how many."""
    def spent_before(self) -> list[tuple[float, float]]:
        """Seconds that each worker's process had a core, and lacked one, before it served."""
    def faults(self) -> dict[str, int]:
        """What went wrong, how often."""
    def timings(self) -> npt.NDArray[np.uint64]:
        """How long each env's steps and resets have taken.

        Returns:
            For each env, steps and resets: their sum and the longest, in ns, and the buckets of
            csrc/timings.h.
        """
    def doing(self, at: int | None = None) -> list[tuple[int, str, float] | None]:
        """What each worker does now: (env, whether it resets, seconds); None: neither.

        Args:
            at: Up to when seconds are counted, in ns of the monotonic clock; None: now.
        """
    def waiting(self) -> float | None:
        """Seconds for which the parent has been waiting now; None: it is not."""

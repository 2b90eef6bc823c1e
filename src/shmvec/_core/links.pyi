from collections.abc import Callable, Sequence
from typing import Any

from shmvec._core.insight import Insight
from shmvec._core.segment import Segment
from shmvec._core.trace import Recorder
from shmvec._core.turn import Turn

class Links:
    """The parent's ends of the rings and channels of all workers."""

    waiting: bool
    turn: Turn
    closed: bool
    rouse: Callable[[int], None]

    def __init__(
        self,
        segment: Segment,
        ranges: Sequence[range],
        channels: list[Any],
        look: Callable[[], None],
        rouse: Callable[[int], None],
        budgets: Callable[[], Any],
        limits: tuple[float | None, float | None] = (None, None),
        inline: Callable[[], None] | None = None,
        hang_after: float | None = None,
        hung: Callable[[list[tuple[int, tuple[int, str] | None, float]]], None] | None = None,
    ) -> None:
        """Attaches to the rings.

        Args:
            segment: Where they are.
            ranges: The envs of each worker.
            channels: The control channel of each worker; the list may change.
            look: Raises if a worker has ended; called in every slice of a wait.
            rouse: Wakes workers that doze, of these bits of the bell.
            budgets: Says how to wait.
            limits: Seconds that a step and a reset of one env may take.
            inline: Serves what was asked where there are no processes.
            hang_after: Seconds; None: for ever.
            hung: Is told, once, of each worker that is at something for longer, by its index, what
                that is ((env, whether it is reset); None: something else), and the seconds.
        """

    def remind(self) -> None:
        """Calls all workers again."""

    def pump(self) -> None:
        """Reads and writes the channels; what comes waits in them until it is taken."""

    def is_idle(self, worker: int) -> bool:
        """Whether a worker has answered all that it was asked, and that was taken."""
    def has_answered(self, worker: int) -> bool:
        """Whether it has answered all that it was asked, be that taken or not."""

    def steps_of(self, worker: int) -> int:
        """Steps of envs that the process which is this worker now has made."""

    def insight(self) -> Insight:
        """What the segment says now of the vector env."""

    def record(
        self,
        recorder: Recorder | None,
        workers: Sequence[int] = (),
        packed: Any = None,
        descriptor: int = -1,
    ) -> None:
        """Has what is done from now on be recorded; None: not any more.

        Args:
            recorder: Of this side.
            workers: Which are to record, too; they answer nothing.
            packed: The message to them.
            descriptor: Which goes with it: of the memory.

        Raises:
            RuntimeError: A worker has many such requests before it already. None was told, then.
        """

    def count_fault(self, name: str, number: int = 1) -> None:
        """Counts faults, by their name in csrc/notice.h.

        Raises:
            ValueError: There is no such counter.
        """

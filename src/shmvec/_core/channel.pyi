from collections.abc import Sequence

class Message:
    """What came through a channel.

    Attributes:
        sequence: Number of the request it belongs to.
        goodbye: Whether it is the last one.
        content: What was put.
        descriptors: That came with it. Whoever takes the message closes them.
    """

    sequence: int
    goodbye: bool
    content: bytes
    descriptors: list[int]

class Channel:
    """One end of a control channel."""

    descriptor: int
    broken: str | None

    def __init__(self, descriptor: int) -> None:
        """Takes over a stream socket."""

    def put(
        self,
        sequence: int,
        content: bytes,
        descriptors: Sequence[int] = (),
        goodbye: bool = False,
    ) -> None:
        """Sends a message of a request, now or as soon as there is room; never blocks."""

    def pump(self) -> bool:
        """Writes and reads what can be now; whether there is more to write, or was any to read."""

    def find(self, sequence: int) -> Message | None:
        """The message of a request, or None if it has not come; older ones are dropped."""

    def take(self, sequence: int) -> Message | None:
        """The same, and it is the caller's from now on, with its descriptors."""

    def fail(self, why: str) -> None:
        """Notes that what comes through it cannot be trusted any more."""

    @property
    def unsent(self) -> bool:
        """Whether something waits to be written."""

    @property
    def farewell(self) -> bytes | None:
        """What the other side has said last, if it has said goodbye; others are dropped."""

    def fileno(self) -> int:
        """The descriptor, for ``select``."""

    def close(self) -> None:
        """Closes it, and the descriptors in messages that nobody has taken."""

class Tee:
    """A pipe whose content is copied to a descriptor, and its end remembered; see csrc/tee.h.

    Attributes:
        end: The end of the pipe to write to; -1 once it is closed here.
    """

    end: int

    def __init__(self, target: int) -> None:
        """Begins to copy.

        Args:
            target: To what; where it is closed, what comes is only remembered.

        Raises:
            OSError: There can be no more descriptors or threads.
        """

    def close_end(self) -> None:
        """Others have it now, who may write to it."""

    def last(self) -> bytes:
        """The last 16 kB that were written."""

    def settle(self, patience: float) -> bool:
        """Waits until what was written before is passed on.

        Args:
            patience: Seconds for which the target may take nothing.

        Returns:
            Whether all is passed on.
        """

    def close(self) -> None:
        """It goes once its last writer has."""

def buffer_c_lines() -> None:
    """Has C's stdout pass on whole lines; what is in its buffer goes out first."""

def flush_c() -> None:
    """Passes on what C's stdout holds."""

from collections.abc import Sequence

def lead(mark: int) -> None:
    """Marks this process, and so what it starts from now on.

    Args:
        mark: From 2**62 up to 2**63.

    Raises:
        OSError: The hard limit that the mark must be below is too low.
    """

def send(marks: Sequence[int], number: int, spared: int = 0) -> int:
    """Sends a signal to every process with one of these marks, but to this one.

    Args:
        marks: The marks.
        number: Of the signal; 0: none.
        spared: Another process that gets none.

    Returns:
        How many there are.
    """

def is_free(number: int) -> bool:
    """Whether nobody in this process, Python or C, has a handler for a signal, or ignores it."""

def guard(number: int, descriptor: int) -> None:
    """Puts a handler around the one that a signal has, which writes to a descriptor.

    It leaves errno as it was, runs in the first thread, writes a zero byte after what that one has
    written, and does not call it once the descriptor means another file; nor while the interpreter
    counts a call in, if it cannot be walked through then: a byte 1 comes before the zero byte.
    """

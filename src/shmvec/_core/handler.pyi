def is_free(number: int) -> bool:
    """Whether nobody in this process, Python or C, has a handler for a signal, or ignores it."""

def keep_errno(number: int) -> None:
    """Has the handler that this process has for a signal leave errno as it was."""

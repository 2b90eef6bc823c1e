def keep_errno(number: int) -> None:
    """Has the handler that this process has for a signal leave errno as it was."""

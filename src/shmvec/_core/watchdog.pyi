def start(descriptor: int) -> None:
    """Has this process killed when the process of a pidfd is gone, with its group if it leads it.

    Args:
        descriptor: The pidfd; it must stay open until ``stop``.

    Raises:
        OSError: It is no pidfd, a watchdog runs already, or there can be no more threads.
    """

def stop() -> None:
    """Ends the watch, if there is one."""

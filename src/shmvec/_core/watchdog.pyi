def start(descriptor: int, mark: int) -> None:
    """Has this process killed when the process of a pidfd is gone, with its family.

    Args:
        descriptor: The pidfd; it must stay open until ``stop``.
        mark: By which the family is known; its process group goes, too, if it leads one.

    Raises:
        OSError: It is no pidfd, a watchdog runs already, or there can be no more threads.
    """

def stop() -> None:
    """Ends the watch, if there is one."""

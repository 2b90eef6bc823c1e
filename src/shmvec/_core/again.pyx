"""Whether code of a user's raises by itself, or a signal's handler did that ran in it."""

from signal import SIG_BLOCK, SIG_SETMASK, pthread_sigmask, valid_signals


def raises_again(attempt, *arguments):
    """Tries what has raised once more, while no signal's handler can run.

    Returns:
        Whether it raises an Exception again: it would whenever it is tried.

    Raises:
        BaseException: What handlers of signals raise that have come before.
    """
    before = pthread_sigmask(SIG_BLOCK, ())
    try:
        pthread_sigmask(SIG_BLOCK, valid_signals())  # which runs handlers that are due
        try:
            attempt(*arguments)
        except Exception:
            return True
        return False
    finally:
        pthread_sigmask(SIG_SETMASK, before)

"""Whether code of a user's raises by itself, or a signal's handler did that ran in it."""

from _thread import allocate_lock, start_new_thread


def raises_again(attempt, *arguments):
    """Tries what has raised once more, where no signal's handler can run: in another thread.

    (A mask would not do: a signal that this thread blocks is taken by another one, and its handler
    still runs here.)

    Returns:
        Whether it raises an Exception again: it would whenever it is tried.

    Raises:
        BaseException: What handlers of signals raise meanwhile, and what else the attempt raises.
    """
    done, raised, disturbed = allocate_lock(), [], None

    def run():
        try:
            attempt(*arguments)
        except BaseException as error:
            raised.append(error)
        finally:
            done.release()

    done.acquire()
    start_new_thread(run, ())
    while True:
        # Compiled: a handler runs, and raises, in the waiting only.
        try:
            done.acquire()
            break
        except BaseException as error:
            disturbed = error
    if disturbed is not None:
        raise disturbed
    if raised and not isinstance(raised[0], Exception):
        raise raised[0]
    return bool(raised)

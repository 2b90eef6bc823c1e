"""Whether code of a user's raises by itself, or a signal's handler did that ran in it."""

from _thread import allocate_lock, start_new_thread
from contextvars import copy_context


def raises_again(attempt, *arguments):
    """Tries what has raised once more, where no signal's handler can run: in another thread.

    (A mask would not do: a signal that this thread blocks is taken by another one, and its handler
    still runs here.)

    It is in a copy of this thread's context: what raises may be the caller's own setting, of numpy's
    errors (``np.errstate``), of decimals or, in a free-threaded Python, of warnings.

    Returns:
        Whether it raises an Exception again: it would whenever it is tried.

    Raises:
        BaseException: What handlers of signals raise meanwhile, and what else the attempt raises.
    """
    done, raised, disturbed = allocate_lock(), [], None
    context = copy_context()

    def run():
        try:
            context.run(attempt, *arguments)
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

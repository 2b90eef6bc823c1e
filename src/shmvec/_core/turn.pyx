"""One thread at a time: a call takes its turn, and another thread's is refused.

In C, as there is no moment then at which a signal's handler may raise between a `with` and what it
has to undo.
"""

cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident()


cdef class Turn:
    """Held during a call, by one thread: another one is refused."""

    cdef unsigned long owner
    cdef int depth

    def __enter__(self):
        cdef unsigned long me = PyThread_get_thread_ident()
        if self.depth > 0 and self.owner != me:
            raise RuntimeError(
                "another thread waits for this vector env: use it in one thread at a time")
        self.owner = me
        self.depth += 1

    def __exit__(self, *error):
        self.depth -= 1


cdef class Loan:
    """A turn in which `begin()` is lent, and the owner is in a state that refuses his calls."""

    cdef Turn turn
    cdef object begin, owner, state, usual
    cdef bint out

    def __init__(self, Turn turn, begin, owner, state):
        self.turn = turn
        self.begin = begin
        self.owner = owner
        self.state = state

    def __enter__(self):
        self.turn.__enter__()
        try:
            lent = self.begin()
            self.usual = self.owner._state
            self.owner._in_call = True
            self.owner._state = self.state
        except BaseException:
            self.turn.__exit__()
            raise
        self.begin = lent
        self.out = True
        return lent

    def __exit__(self, *error):
        self.out = False
        self.owner._state = self.usual  # first: what follows may be interrupted
        try:
            self.owner._in_call = self.begin.num_asked > 0
        finally:
            self.turn.__exit__()

    def __del__(self):
        # Python 3.14 looks for signals between a call of `__enter__` and the block of its `with`.
        if self.out:
            self.__exit__()

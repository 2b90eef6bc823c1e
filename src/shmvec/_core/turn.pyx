"""One call at a time: it takes its turn, and another thread's is refused: csrc/turn.h.

So is a call out of the middle of one, by a handler of a signal or of log records. In C, as there is no
moment then at which a signal's handler may raise between a `with` and what it has to undo.
"""

cimport cython

from shmvec._core.csrc cimport (
    SV_TRACE_CALLER,
    sv_now_ns,
    sv_trace_enter,
    sv_turn_depth,
    sv_turn_give,
    sv_turn_take,
)
from shmvec._core.trace cimport Recorder

from gymnasium.error import AlreadyPendingCallError

cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident()


@cython.final
@cython.binding(False)  # a step takes it: called as a method of C's own
cdef class Turn:
    def __enter__(self):
        self.take()

    def __exit__(self, kind, error, traceback):
        self.give()

    def record(self, Recorder recorder):
        self.trace = NULL if recorder is None else &recorder.trace
        self.recorder = recorder

    cdef int take(self) except -1:
        self.take_aside()
        if self.waits > 0:
            sv_turn_give(&self.turn)
            self.refuse("Using a vector env")
        return 0

    cdef int take_aside(self) except -1:
        if not sv_turn_take(&self.turn, PyThread_get_thread_ident()):
            raise RuntimeError(
                "another thread waits for this vector env: use it in one thread at a time")
        return 0

    cdef void give(self) noexcept:
        if self.trace is not NULL and self.turn.depth == 1:  # however the call has ended
            sv_trace_enter(self.trace, SV_TRACE_CALLER, sv_now_ns())
        sv_turn_give(&self.turn)

    @property
    def depth(self):
        return sv_turn_depth(&self.turn, PyThread_get_thread_ident())

    def give_back(self, uint32_t left):
        while self.depth > left:
            self.give()

    def refuse(self, what):
        raise AlreadyPendingCallError(
            f"{what} in the middle of another call of it, as a handler of a signal or of log records "
            "does here: use it when that call has returned.",
            "step",
        )

    def aside(self):
        return Aside(self)

    def hold(self):
        return Hold(self)


cdef class Aside:
    cdef Turn turn

    def __init__(self, Turn turn):
        self.turn = turn

    def __enter__(self):
        self.turn.take_aside()

    def __exit__(self, kind, error, traceback):
        self.turn.give()


cdef class Hold:
    cdef Turn turn
    cdef bint held

    def __init__(self, Turn turn):
        self.turn = turn

    def __enter__(self):
        self.turn.waits += 1
        self.held = True

    def __exit__(self, kind, error, traceback):
        self.turn.waits -= self.held
        self.held = False

    def __del__(self):
        # Python 3.14 looks for signals between a call of `__enter__` and the block of its `with`.
        self.__exit__(None, None, None)


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
        self.turn.take()
        try:
            lent = self.begin()
            self.usual = self.owner._state
            self.owner._in_call = True
            self.owner._state = self.state
        except BaseException:
            self.turn.give()
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
            self.turn.give()

    def __del__(self):
        # As above.
        if self.out:
            self.__exit__()

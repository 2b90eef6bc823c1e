"""Guard that admits one call at a time: it refuses re-entrant calls and other threads'.

Calls that ask envs, take their answers or replace workers enter and leave a guard in C
(csrc/guard.h), where no signal handler can raise in between. So a call that ends with an exception,
whatever it is and wherever it comes from, has left the guard, and has abandoned its requests whose
answers it did not take.
"""

cimport cython

from shmvec._core.csrc cimport (
    SV_TRACE_CALLER,
    sv_guard_enter,
    sv_guard_is_mine,
    sv_guard_leave,
    sv_now_ns,
    sv_trace_enter,
)

from functools import wraps

from gymnasium.error import AlreadyPendingCallError

from shmvec.faults import cut_traceback

cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident()


@cython.final
cdef class Guard:
    """Refuses a call while another one is under way, in this thread or in another."""

    cdef int enter(self) except -1:
        if not sv_guard_enter(&self.guard, PyThread_get_thread_ident()):
            self.refuse()
        return 0

    cdef void leave(self) noexcept:
        if self.trace is not NULL:  # also if the call has raised
            sv_trace_enter(self.trace, SV_TRACE_CALLER, sv_now_ns())
        sv_guard_leave(&self.guard)

    def refuse(self):
        raise AlreadyPendingCallError(
            "another call of this vector env is under way: of another thread, or the one that this "
            "handler of a signal or of log records has interrupted. Use it in one thread at a time, "
            "when that call has returned.",
            "step",
        )

    def beside(self, function):
        cdef bint entered = sv_guard_enter(&self.guard, PyThread_get_thread_ident())
        if not entered and not sv_guard_is_mine(&self.guard, PyThread_get_thread_ident()):
            self.refuse()
        try:
            return function()
        finally:
            if entered:
                self.leave()

    def record(self, Recorder recorder):
        self.trace = NULL if recorder is None else &recorder.trace
        self.recorder = recorder

    # ---- pending and abandoned calls ---------------------------------------------------------

    cdef void note_asked(self) noexcept:
        self.asked += 1
        self.untaken = True
        self.asker = PyThread_get_thread_ident()

    cdef int abandon_own(self, uint64_t asked, pending) except -1:
        """Abandons what this thread has begun or asked, and not taken, since ``asked``."""
        cdef uint64_t me = PyThread_get_thread_ident()
        if pending is None and self.pending is not None and self.beginner == me:
            self.pending = self.held = None
        if self.untaken and self.asked != asked and self.asker == me:
            self.abandoned = True
        return 0

    cdef int enter_whole(self) except -1:
        """Begins a call that abandons what it asked if it raises; calls do not nest."""
        self.enter()
        self.asked_before = self.asked
        self.pending_before = self.pending
        self.claimed = False
        return 0

    cdef int abandon_all(self) except -1:
        """Abandons what such a call has claimed, begun or asked, and not taken."""
        if self.claimed and self.untaken:
            self.abandoned = True
        return self.abandon_own(self.asked_before, self.pending_before)

    def leave_pending(self, pending, held=None):
        self.beginner = PyThread_get_thread_ident()
        self.held = held
        self.pending = pending

    def claim(self, pending):
        if self.pending is not pending:
            return None
        held = self.held
        self.pending = self.held = None
        self.claimed = True
        return (held,)

    def disown(self):
        sv_guard_leave(&self.guard)

    def abandon(self):
        self.abandoned = True

    def settled(self):
        self.abandoned = False

    def both(self, begin, finish):
        cdef uint64_t asked = self.asked
        cdef object pending = self.pending
        try:
            begin()
            return finish()
        except BaseException:
            self.abandon_own(asked, pending)
            raise


def exclusive(method):
    """A method that runs under its object's guard."""
    @wraps(method)
    def call(self, *args, **kwargs):
        cdef Guard guard = self.guard
        guard.enter()
        try:
            return method(self, *args, **kwargs) if kwargs else method(self, *args)
        finally:
            guard.leave()
    return call


def whole(method):
    """A method that runs under its object's guard, and abandons what it asked if it raises."""
    @wraps(method)
    def call(self, *args, **kwargs):
        cdef Guard guard = self.guard
        guard.enter_whole()
        try:
            return method(self, *args, **kwargs) if kwargs else method(self, *args)
        except BaseException as error:
            guard.abandon_all()
            raise cut_traceback(error)
        finally:
            guard.leave()
    return call


@cython.final
cdef class Loan:
    def __init__(self, Guard guard, begin, pending, bint keeps):
        self.guard = guard
        self.begin = begin
        self.pending = pending
        self.keeps = keeps

    def __enter__(self):
        cdef Guard guard = self.guard
        guard.enter()
        try:
            lent = self.begin()
            guard.pending = self.pending
        finally:
            guard.leave()
        return lent

    def __exit__(self, kind, error, traceback):
        self.end(self.keeps and kind is None)

    def __del__(self):
        # After an exception between `__enter__` and the block there is no borrower.
        self.end(False)

    cdef int end(self, bint keeps) except -1:
        if self.guard.pending is self.pending:
            self.guard.pending = None
            if not keeps:
                self.guard.abandoned = True  # has the next call discard what is in flight
        return 0

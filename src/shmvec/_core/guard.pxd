from libc.stdint cimport uint64_t

from shmvec._core.csrc cimport sv_guard, sv_trace
from shmvec._core.trace cimport Recorder


cdef class Guard:
    cdef sv_guard guard
    cdef sv_trace *trace           # NULL: nothing is recorded
    cdef Recorder recorder         # of that trace: it is kept as long as this looks at it
    cdef readonly object held      # the request of what is pending, if it was not sent yet
    cdef uint64_t beginner         # the thread that has begun what is pending
    cdef readonly object pending   # what another call is to take; or the loan; None: nothing
    cdef readonly bint abandoned   # what is in flight is of a call that has raised: it is discarded
    cdef uint64_t asked            # how often envs were asked something
    cdef uint64_t asker            # the thread that has asked last
    cdef bint untaken                # and of that nothing was taken since
    cdef bint claimed              # the call that is under way has claimed what was pending
    cdef int enter(self) except -1
    cdef void leave(self) noexcept
    cdef void note_asked(self) noexcept
    cdef int abandon_own(self, uint64_t asked, pending) except -1


cdef class Loan:
    cdef Guard guard
    cdef object begin    # checks whether there may be one, and returns what is lent
    cdef object pending  # of the guard while it lasts
    cdef bint keeps      # what is in flight at its end stays so
    cdef int end(self, bint keeps) except -1

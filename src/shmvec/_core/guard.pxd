from libc.stdint cimport uint64_t

from shmvec._core.csrc cimport sv_guard, sv_trace
from shmvec._core.trace cimport Recorder


cdef class Guard:
    cdef sv_guard guard
    cdef sv_trace *trace           # NULL: nothing is recorded
    cdef Recorder recorder         # the recorder of this trace, which keeps its memory
    cdef readonly object held      # the request of the pending call, if it was not sent yet
    cdef uint64_t beginner         # the thread that has begun the pending call
    cdef readonly object pending   # a call that was begun and not finished, or a loan, or None
    cdef readonly bint abandoned   # requests in flight are of a call that has raised
    cdef uint64_t asked            # how often envs were asked
    cdef uint64_t asker            # the thread that has asked last
    cdef bint untaken                # no answer was taken since the last request
    cdef bint claimed              # the call that is under way has claimed the pending one
    cdef uint64_t asked_before     # `asked` and `pending` as the call that is under way began
    cdef object pending_before
    cdef int enter(self) except -1
    cdef void leave(self) noexcept
    cdef void note_asked(self) noexcept
    cdef int abandon_own(self, uint64_t asked, pending) except -1
    cdef int enter_whole(self) except -1
    cdef int abandon_all(self) except -1


cdef class Loan:
    cdef Guard guard
    cdef object begin    # checks whether a loan is possible, and returns what is lent
    cdef object pending  # the guard's `pending` while the loan lasts
    cdef bint keeps      # requests stay in flight at the loan's end
    cdef int end(self, bint keeps) except -1

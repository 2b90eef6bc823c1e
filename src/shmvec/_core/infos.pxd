from libc.stdint cimport uint8_t, uint32_t

from shmvec._core.codec cimport Codec
from shmvec._core.links cimport Links


cdef enum State:
    IDLE       # not asked, or its answer was taken; its episode may be broken: see Ledger.after
    IN_FLIGHT  # asked, and has not answered
    READY      # it has answered: it is in the queue
    LOST       # asked, and its worker has died
    FAILED     # asked, and has raised


cdef class Report:
    cdef readonly object fault
    cdef readonly bint cut_off    # whether the answer is a truncation in place of lost results
    cdef readonly list last       # [the last observation] if a reset has overwritten it; else None


cdef Report report_of(fault, bint cut_off, list last)


cdef class Inbox:
    cdef Links links
    cdef object slabs
    cdef Codec observations
    cdef list decoders                 # one for each worker
    cdef object columns
    cdef dict held                     # env: [info, or (decoder, message)], moved out of the rings
    cdef bint has_read                 # messages were read whose room is not given back yet
    # The ledger's entries, one for each env.
    cdef const uint32_t[::1] workers
    cdef const uint8_t[::1] states     # a State
    cdef const uint32_t[::1] sequences # the number of its request
    cdef uint32_t[::1] flags           # the flags of its answer
    cdef int renew(self, uint32_t worker) except -1
    cdef bint has_any(self, const Py_ssize_t[::1] envs) noexcept
    cdef int hold(self, Py_ssize_t env) except -1
    cdef int order(self, const Py_ssize_t[::1] ready, const Py_ssize_t[::1] envs) except -1
    cdef list read_held(self, Py_ssize_t env)
    cdef list each_of_all(self, list workers, uint32_t sequence)
    cdef dict gather_all(self, list workers, uint32_t sequence, vector_env)
    cdef list each(self, const Py_ssize_t[::1] envs)
    cdef object gather(self, const Py_ssize_t[::1] envs, const Py_ssize_t[::1] rows, dict reports,
                       vector_env)
    cdef int give_back(self) except -1
    cdef int discard(self, Py_ssize_t env) except -1
    cdef int discard_all(self, uint32_t sequence) except -1

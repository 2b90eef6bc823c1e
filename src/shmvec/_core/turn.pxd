from libc.stdint cimport uint32_t

from shmvec._core.csrc cimport sv_trace, sv_turn
from shmvec._core.trace cimport Recorder


cdef class Turn:
    cdef sv_turn turn
    cdef uint32_t waits  # others' code may run: handlers, envs of this process
    cdef sv_trace *trace  # NULL: nobody wants to know
    cdef Recorder recorder
    cdef int take(self) except -1
    cdef int take_aside(self) except -1
    cdef void give(self) noexcept

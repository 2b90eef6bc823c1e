from libc.stdint cimport uint8_t

from shmvec._core.arrays cimport Lease
from shmvec._core.codec cimport Codec


cdef class Results:
    cdef readonly Codec observations
    cdef readonly object rewards
    cdef readonly object terminations
    cdef readonly object truncations
    cdef readonly Py_ssize_t num_envs
    cdef readonly Py_ssize_t num_frames
    cdef double[::1] reward_of
    cdef uint8_t[::1] terminated_of
    cdef uint8_t[::1] truncated_of
    cdef object memory
    cdef object leases       # a flag a row
    cdef uint8_t[::1] leased_of
    cdef int copy_row(self, Results source, Py_ssize_t row, Py_ssize_t target) except -1
    cdef tuple gather(self, object rows)
    cpdef tuple view(self, Lease lease, Py_ssize_t first, tuple lead)

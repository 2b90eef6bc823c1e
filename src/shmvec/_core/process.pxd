from cpython.buffer cimport Py_buffer

from shmvec._core cimport csrc as c


cdef int check_trace_ring(Py_ssize_t nbytes, rings, size, index) except -1


cdef class Descriptor:
    cdef readonly int number  # -1: it is closed
    cpdef void close(self) noexcept


cdef class Recorder:
    cdef c.sv_trace trace
    cdef Py_buffer _export

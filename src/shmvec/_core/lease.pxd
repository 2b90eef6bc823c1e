from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint8_t


cdef class Lease:
    cdef object __weakref__
    cdef object memory
    cdef Py_buffer export
    cdef uint8_t[::1] leased
    cdef bint ended
    cdef Py_ssize_t first
    cdef Py_ssize_t count
    cdef void end(self) noexcept
    cdef object show(self, char *start, tuple shape, object dtype)

from cpython.buffer cimport Py_buffer


cdef class Lease:
    cdef object __weakref__
    cdef object memory
    cdef Py_buffer export
    cdef object leased
    cdef Py_ssize_t first
    cdef Py_ssize_t count
    cdef object show(self, char *start, tuple shape, object dtype)

from cpython.buffer cimport Py_buffer


cdef class Codec:
    cdef int write(self, Py_ssize_t env, object value) except -1
    cdef object read(self, Py_ssize_t env)
    cpdef object batch(self, bint copy)
    cdef int write_batch(self, object values) except -1

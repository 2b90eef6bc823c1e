from cpython.buffer cimport Py_buffer


cdef class Codec:
    cdef int write(self, Py_ssize_t env, object value) except -1
    cdef bint keep(self, Py_ssize_t env, object value) except -1
    cdef object read(self, Py_ssize_t env)
    cpdef object batch(self, bint copy)
    cdef int write_batch(self, object values) except -1


cdef class MessageCodec(Codec):
    cdef object space
    cdef object batched_space
    cdef list values
    cdef object arrays
    cdef list split(self, object batch)

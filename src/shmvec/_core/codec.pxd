from shmvec._core.lease cimport Lease


# Where an array's data is; it stays there while the caller holds the array.
cdef void *address_of(object array) except? NULL


cdef class Codec:
    cdef int write(self, Py_ssize_t env, object value) except -1
    cdef bint keep(self, Py_ssize_t env, object value) except -1
    cdef object read(self, Py_ssize_t env)
    cpdef object batch(self, bint copy, Py_ssize_t first=*, Py_ssize_t count=*)
    cdef object gather(self, const Py_ssize_t[::1] envs)
    cdef object view(self, Lease lease, Py_ssize_t first, tuple lead)
    cdef int put_many(self, Py_ssize_t first, object values) except -1
    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1
    cdef int write_rows(self, const Py_ssize_t[::1] envs, object values) except -1


cdef class MessageCodec(Codec):
    cdef object space
    cdef Py_ssize_t num_envs
    cdef dict batched_spaces
    cdef list values
    cdef object arrays
    cdef list split(self, object batch, Py_ssize_t count)

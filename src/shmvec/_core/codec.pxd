from libc.stdint cimport uint8_t, uint32_t


# The address of an array's data, valid while the caller holds the array.
cdef void *address_of(object array) except? NULL


# A copy of a contiguous array, given the size of its elements, which must not be objects.
cdef object copied(object array, Py_ssize_t itemsize)


cdef class Codec:
    cdef int write(self, Py_ssize_t env, object value) except -1
    cdef bint keep(self, Py_ssize_t env, object value) except -1
    cdef object read(self, Py_ssize_t env)
    cpdef object batch(self, bint copy, Py_ssize_t first=*, Py_ssize_t count=*)
    cdef object gather(self, const Py_ssize_t[::1] envs)
    cdef object view(self, object lease, Py_ssize_t first, tuple lead)
    cdef int put_many(self, Py_ssize_t first, object values) except -1
    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1
    cdef int write_rows(self, const Py_ssize_t[::1] envs, object values) except -1


cdef class ActionCodec(Codec):
    cdef object memory
    cdef uint8_t[::1] codes
    cdef char *base
    cdef Py_ssize_t capacity  # bytes of a row
    cdef uint32_t fitting     # a bit for each format in which an action fits a row
    cdef object shape
    cdef Py_ssize_t ndim
    cdef Py_ssize_t size
    cdef object dtype
    cdef object space
    cdef bint scalar
    cdef list arrays          # the rows as an array of each format, made when first used
    cdef list slots           # of each of these arrays one view a row, for vector actions
    cdef object last_dtype    # the dtype of the last batch
    cdef int last_code        # the code of this dtype
    cdef object rows(self, int code)
    cdef object checked(self, object values, Py_ssize_t count)
    cdef bint is_usual(self, object values, Py_ssize_t count)
    cdef object wrong(self, what, Py_ssize_t count, kind=*)


cdef class MessageCodec(Codec):
    cdef object space
    cdef Py_ssize_t num_envs
    cdef object explain
    cdef dict batched_spaces
    cdef list values
    cdef object arrays
    cdef object joined(self, envs, object arrays)
    cdef list split(self, object batch, Py_ssize_t count)

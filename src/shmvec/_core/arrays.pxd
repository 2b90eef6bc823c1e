from cpython.buffer cimport Py_buffer
from cpython.object cimport PyObject
from libc.stdint cimport uint8_t

from shmvec._core.csrc cimport sv_hold


# The beginning of an array, NumPy's PyArrayObject_fields: the same in 1.x and 2.x.
cdef struct Fields:
    PyObject ob_base
    char *data
    int nd
    Py_ssize_t *dimensions
    Py_ssize_t *strides
    PyObject *base
    PyObject *descr
    int flags


cdef inline Fields *_fields(object array) noexcept:
    return <Fields *><PyObject *>array


cdef inline void *data_of(object array) noexcept:
    """Where the elements of an array are."""
    return _fields(array).data


cdef inline int ndim_of(object array) noexcept:
    return _fields(array).nd


cdef inline const Py_ssize_t *shape_of(object array) noexcept:
    return _fields(array).dimensions


cdef inline Py_ssize_t size_of(object array) noexcept:
    """The number of elements of an array."""
    cdef Py_ssize_t size = 1
    cdef int axis
    for axis in range(_fields(array).nd):
        size *= _fields(array).dimensions[axis]
    return size


cdef inline bint has_dtype(object array, object dtype) noexcept:
    """Whether an array has this very dtype; one that is equal to it does not count."""
    return _fields(array).descr == <PyObject *>dtype


cdef inline bint is_contiguous(object array) noexcept:
    """Whether the elements lie one behind the other, in C's order."""
    return _fields(array).flags & 1  # NPY_ARRAY_C_CONTIGUOUS


# A new array of the same shape and dtype, contiguous in C's order; nothing is written to it.
cdef object new_like(object array)


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


cdef struct Block:
    sv_hold hold      # arrays that live in it; a block that is never to be used again counts one
    void *copy        # for the fork that is being made; NULL: none


cdef class Pool:
    cdef object capsule   # of the allocator, which lives as long as its arrays do
    cdef readonly list codecs  # of observations of all envs, one a block
    cdef Py_ssize_t unheld(self)
    cdef object array(self, char *start, tuple shape, object dtype)

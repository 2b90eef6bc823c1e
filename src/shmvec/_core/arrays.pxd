from cpython.object cimport PyObject


# The first fields of an array, NumPy's PyArrayObject_fields: the same in NumPy 1.x and 2.x.
cdef struct Fields:
    PyObject ob_base
    char *data
    int nd
    Py_ssize_t *dimensions
    Py_ssize_t *strides
    PyObject *base
    PyObject *descr
    int flags
    PyObject *weakreflist


cdef inline Fields *_fields(object array) noexcept:
    return <Fields *><PyObject *>array


cdef inline void *data_of(object array) noexcept:
    """The address of an array's elements."""
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
    """Whether the elements lie side by side, in C's order."""
    return _fields(array).flags & 1  # NPY_ARRAY_C_CONTIGUOUS


cdef inline bint is_aligned(object array) noexcept:
    """Whether C may read the elements as their type."""
    return (_fields(array).flags & 0x100) != 0  # NPY_ARRAY_ALIGNED


cdef inline bint is_writeable(object array) noexcept:
    return (_fields(array).flags & 0x400) != 0  # NPY_ARRAY_WRITEABLE


# A new array of the same shape and dtype, contiguous in C's order; nothing is written to it.
cdef object new_like(object array)


# The same, of another dtype.
cdef object new_like_as(object array, object dtype)


# Arrays that are handed out again; see arrays.pyx.
cdef class Pool:
    cdef object like
    cdef bint large
    cdef Py_ssize_t nbytes
    cdef list kept
    cdef Py_ssize_t oldest
    cdef object new(self)
    cdef object copy(self)
    cdef bint is_free(self, PyObject *array) noexcept


# An array over memory of an exporter, from `start` on, which keeps the exporter.
cdef object array_over(object exporter, char *start, tuple shape, object dtype)

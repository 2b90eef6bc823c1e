"""Access to NumPy's arrays in C, and arrays over the memory of other objects."""

from cpython.buffer cimport PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_INCREF

import numpy as np

try:
    from numpy._core import _multiarray_umath as _umath
except ImportError:  # an older one
    from numpy.core import _multiarray_umath as _umath


# To read an attribute of an array takes Python as long as to copy a few numbers, so on the step's
# path C reads the fields. NumPy's headers are not used for so little: a build would need NumPy, of
# a new enough version. The declarations here are NumPy's binary interface, on which every extension
# depends that was compiled with the headers of a past version: neither the fields of an array nor
# the places of functions in NumPy's table change. (The fields of a dtype differ between 1.x and 2.x,
# and are not read here.) All of it is checked when this module is imported; a NumPy that differs is
# refused.

# Places in the table, as in NumPy's __multiarray_api.h.
ABI_VERSION = 0       # PyArray_GetNDArrayCVersion
API_VERSION = 211     # PyArray_GetNDArrayCFeatureVersion
NEW_LIKE_ARRAY = 277  # PyArray_NewLikeArray

cdef unsigned int _API_LEAST = 0xf  # the version of NumPy 1.22
cdef int _C_ORDER = 0

ctypedef unsigned int (*Version)() noexcept
ctypedef object (*NewLikeArray)(PyObject *prototype, int order, PyObject *dtype, int subok)

cdef NewLikeArray _new_like_array


def looked_at(array):
    """What C reads of an array: address, shape, size, whether of its dtype, contiguous, aligned."""
    cdef int axis
    return (<size_t>data_of(array), tuple([shape_of(array)[axis] for axis in range(ndim_of(array))]),
            size_of(array), has_dtype(array, array.dtype), is_contiguous(array),
            is_aligned(array))


def looks(array):
    """The same by NumPy's attributes."""
    return (array.__array_interface__["data"][0], array.shape, array.size, True,
            array.flags.c_contiguous, array.flags.aligned)


cdef int _connect() except -1:
    global _new_like_array
    cdef void **table
    try:
        table = <void **>PyCapsule_GetPointer(_umath._ARRAY_API, NULL)
    except (AttributeError, ValueError) as error:
        raise _unknown("it shows no table of functions") from error
    cdef unsigned int abi = (<Version>table[<int>ABI_VERSION])()
    if abi >> 24 not in (1, 2):
        raise _unknown(f"its binary interface is {abi:#x}")
    if (<Version>table[<int>API_VERSION])() < _API_LEAST:
        raise _unknown("it is too old")
    _new_like_array = <NewLikeArray>table[<int>NEW_LIKE_ARRAY]
    whole = np.zeros((4, 2, 3), np.int16)
    skewed = np.zeros(9, np.uint8)[1:].view(np.int16)
    of_floats = new_like_as(whole, np.dtype(np.float32))
    for array in (whole, whole[1:, :, 2], whole[0, 1, 2:], skewed, new_like(whole), of_floats):
        if looked_at(array) != looks(array):
            raise _unknown("its arrays are not laid out as those of 1.x and 2.x")
    return 0


cdef object _unknown(str what):
    return ImportError(f"shmvec does not know NumPy {np.__version__}: {what}. "
                       "It needs NumPy 1.24 or newer, of 1.x or 2.x.")


cdef object new_like(object array):
    return _new_like_array(<PyObject *>array, _C_ORDER, NULL, False)


cdef object new_like_as(object array, object dtype):
    Py_INCREF(dtype)  # which the call takes
    return _new_like_array(<PyObject *>array, _C_ORDER, <PyObject *>dtype, False)


_connect()


cdef object array_over(object exporter, char *start, tuple shape, object dtype):
    """An array over memory of an exporter, from `start` on, which keeps the exporter."""
    cdef Py_buffer view
    PyObject_GetBuffer(exporter, &view, PyBUF_WRITABLE)
    cdef Py_ssize_t offset = start - <char *>view.buf
    PyBuffer_Release(&view)
    return np.ndarray(shape, dtype, exporter, offset)

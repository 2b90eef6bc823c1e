"""Access to NumPy's arrays in C, and arrays over the memory of other objects."""

from cpython.buffer cimport PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.list cimport PyList_GET_ITEM
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_INCREF
from libc.string cimport memcpy

from weakref import ref

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
    alone = _fields(whole).weakreflist is NULL
    held = ref(whole)
    if not alone or _fields(whole).weakreflist is not <PyObject *>held:
        raise _unknown("its arrays do not keep weak references where those of 1.x and 2.x do")
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


cdef extern from *:
    """
    /* Whether there is one reference only.  Without a GIL a count does not say so. */
    #ifdef Py_GIL_DISABLED
    #define sv_is_unshared(object) 0
    #else
    #define sv_is_unshared(object) (Py_REFCNT(object) == 1)
    #endif
    """
    bint sv_is_unshared(PyObject *object) noexcept

cdef Py_ssize_t _LONG = 1 << 16  # bytes from which on a copy releases the GIL
# Flags of a new array: contiguous in C's order, owner of its data, aligned, writable.
cdef int _AS_MADE = 0x1 | 0x4 | 0x100 | 0x400
cdef Py_ssize_t _KEPT = 3  # a caller holds the last array, and often the one before


cdef class Pool:
    """Contiguous arrays like a given one, whose elements must not be objects.

    An array that nobody holds any more is handed out again, in a fraction of the time that a new one
    takes: a batch step needs four.
    """

    def __init__(self, like, large=False):
        """Takes an array, and whether large ones are kept, too: for other kinds malloc does."""
        self.like = like
        self.large = large
        self.nbytes = size_of(like) * <Py_ssize_t>like.itemsize
        self.kept = []
        self.oldest = 0

    cdef object new(self):
        """An array in which anything may be."""
        cdef Py_ssize_t i = 0
        cdef object array
        cdef PyObject *kept
        while i < len(self.kept):
            kept = PyList_GET_ITEM(self.kept, i)  # borrowed: a reference would count
            if self.is_free(kept):
                return self.kept[i]
            if sv_is_unshared(kept):  # changed, or somebody waits for its end
                del self.kept[i]
                self.oldest = 0
            else:
                i += 1
        array = new_like(self.like)
        if self.nbytes >= _LONG and not self.large:
            return array
        if len(self.kept) < _KEPT:
            self.kept.append(array)
        else:
            self.kept[self.oldest] = array
            self.oldest = (self.oldest + 1) % _KEPT
        return array

    cdef object copy(self):
        """A copy of the given array."""
        cdef object array = self.new()
        cdef const void *source = data_of(self.like)
        cdef void *target = data_of(array)
        if self.nbytes < _LONG:
            memcpy(target, source, self.nbytes)
        else:
            with nogil:
                memcpy(target, source, self.nbytes)
        return array

    cdef bint is_free(self, PyObject *array) noexcept:
        """Whether only `kept` has an array, and it is as it was made: users may change its shape."""
        cdef Fields *fields = <Fields *>array
        cdef Fields *like = _fields(self.like)
        cdef int axis
        if (not sv_is_unshared(array) or fields.weakreflist is not NULL or fields.base is not NULL
                or fields.descr is not like.descr or fields.flags & _AS_MADE != _AS_MADE
                or fields.nd != like.nd):
            return False
        for axis in range(like.nd):
            if fields.dimensions[axis] != like.dimensions[axis]:
                return False
        return True


cdef object array_over(object exporter, char *start, tuple shape, object dtype):
    """An array over memory of an exporter, from `start` on, which keeps the exporter."""
    cdef Py_buffer view
    PyObject_GetBuffer(exporter, &view, PyBUF_WRITABLE)
    cdef Py_ssize_t offset = start - <char *>view.buf
    PyBuffer_Release(&view)
    return np.ndarray(shape, dtype, exporter, offset)

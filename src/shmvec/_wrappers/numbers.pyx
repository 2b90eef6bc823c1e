"""What twins compute with: plain arrays, NumPy's float64, and floating-point flags.

A twin computes as NumPy does, operation by operation; this folder is compiled without contraction
of products and sums. If an operation raises a flag (overflow, division by zero, invalid,
underflow), the twin, which has not changed anything yet, leaves the step to Python: NumPy then
warns or raises as it was set to.
"""

from cpython.object cimport PyObject

import numpy as np

from shmvec._core.memory cimport is_aligned, is_contiguous, ndim_of, shape_of

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        object (*tp_alloc)(PyTypeObject *kind, Py_ssize_t count)
    ctypedef struct PyFloatObject:
        double ob_fval

cdef extern from "<fenv.h>" nogil:
    int FE_DIVBYZERO, FE_OVERFLOW, FE_UNDERFLOW, FE_INVALID
    int feclearexcept(int flags)
    int fetestexcept(int flags)

float32, float64 = np.dtype(np.float32), np.dtype(np.float64)
cdef object _array = np.ndarray
cdef object _float64 = np.float64


cdef bint is_plain(object array) noexcept:
    """Whether it is an array, and of no subclass, that is contiguous and aligned."""
    return type(array) is _array and is_contiguous(array) and is_aligned(array)


cdef bint same_shape(object array, object other) noexcept:
    cdef int axis
    if ndim_of(array) != ndim_of(other):
        return False
    for axis in range(ndim_of(array)):
        if shape_of(array)[axis] != shape_of(other)[axis]:
            return False
    return True


cdef bint is_float64(object value) noexcept:
    """Whether it is a NumPy float64, which has the layout of a Python float."""
    return type(value) is _float64


cdef object new_float64(double value):
    cdef PyTypeObject *kind = <PyTypeObject *><PyObject *>_float64
    number = kind.tp_alloc(kind, 0)
    value_pointer(number)[0] = value
    return number


cdef double *value_pointer(object float64) noexcept:
    """The address of a float64's value."""
    return &(<PyFloatObject *><PyObject *>float64).ob_fval


cdef int clear_flags() except -1:
    if raised_flags():
        feclearexcept(FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW | FE_INVALID)
    return 0


cdef bint raised_flags() noexcept:
    return fetestexcept(FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW | FE_INVALID) != 0


def _check():
    number = new_float64(2.5)
    if (type(number) is not np.float64 or number != np.float64(2.5)
            or np.sqrt(number) != np.sqrt(2.5)):
        raise ImportError(
            f"shmvec does not know the layout of float64 of NumPy {np.__version__}: install "
            "another version of NumPy")


_check()

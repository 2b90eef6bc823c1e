"""Twins of RescaleAction and RescaleObservation.

Both call one of the functions that ``rescale_box`` makes, which hold a gradient and an intercept.
"""

from libc.math cimport isfinite

from shmvec._core.memory cimport data_of, has_dtype, ndim_of, new_like, size_of
from shmvec._wrappers.numbers cimport (
    clear_flags,
    float32,
    float64,
    is_plain,
    raised_flags,
    same_shape,
)
from shmvec._wrappers.transforms cimport Transform, TransformAction, TransformObservation

ctypedef fused real:
    float
    double


cdef class RescaleAction(TransformAction):
    cdef object transform(self, object func, object action):
        return _apply(self, func, action, True)


cdef class RescaleObservation(TransformObservation):
    cdef object transform(self, object func, object observation):
        return _apply(self, func, observation, False)


cdef object _apply(Transform twin, object func, object array, bint backward):
    """What the function of a wrapper returns for an array."""
    cdef object rescaled = None
    if func is twin.func:
        rescaled = _rescale_array(
            array, twin.cells[0].cell_contents, twin.cells[1].cell_contents, backward)
    return func(array) if rescaled is None else rescaled


cdef object _rescale_array(object array, object gradient, object intercept, bint backward):
    """A rescaled copy; None if that is left to NumPy."""
    if not (is_plain(array) and is_plain(gradient) and is_plain(intercept) and ndim_of(array)
            and same_shape(array, gradient) and same_shape(array, intercept)):
        return None
    cdef bint single = has_dtype(array, float32)
    cdef object dtype = float32 if single else float64
    if not (has_dtype(array, dtype) and has_dtype(gradient, dtype) and has_dtype(intercept, dtype)):
        return None
    rescaled = new_like(array)
    cdef bint exact
    clear_flags()
    if single:
        exact = _rescale[float](
            <float *>data_of(array), <float *>data_of(gradient), <float *>data_of(intercept),
            backward, <float *>data_of(rescaled), size_of(array))
    else:
        exact = _rescale[double](
            <double *>data_of(array), <double *>data_of(gradient), <double *>data_of(intercept),
            backward, <double *>data_of(rescaled), size_of(array))
    return None if not exact or raised_flags() else rescaled


cdef bint _rescale(const real *values, const real *gradients, const real *intercepts, bint backward,
                   real *rescaled, Py_ssize_t count) noexcept:
    """Rescales, forward or backward; False: a number is not finite."""
    cdef Py_ssize_t i
    cdef bint finite = True
    for i in range(count):
        if backward:
            rescaled[i] = (values[i] - intercepts[i]) / gradients[i]
        else:
            rescaled[i] = gradients[i] * values[i] + intercepts[i]
        finite = finite and isfinite(rescaled[i])
    return finite

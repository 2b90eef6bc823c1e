"""Twins of wrappers that apply a function to an observation, an action or a reward.

A user's function is called. For Gymnasium's own, FlattenObservation, ClipAction and ClipReward are
compiled, for arrays and numbers of the usual kinds. If a number and a bound are zeros of different
signs, NumPy's function is called, because the choice between them is NumPy's.
"""

from libc.math cimport signbit
from libc.string cimport memcpy

from types import FunctionType

import gymnasium as gym

from shmvec._core.memory cimport data_of, has_dtype, ndim_of, new_like, size_of
from shmvec._wrappers.chain cimport Chain, Step, Stepper, Twin
from shmvec._wrappers.numbers cimport (
    float32,
    float64,
    is_float64,
    is_plain,
    new_float64,
    same_shape,
)

cdef object _box = gym.spaces.Box

ctypedef fused real:
    float
    double


cdef class Transform(Twin):
    def __init__(self, wrapper, Chain chain, inner_env, Stepper inner, method):
        Twin.__init__(self, wrapper, chain, inner_env, inner, method)
        self.func = wrapper.func
        self.cells = self.func.__closure__ if type(self.func) is FunctionType else None

    cdef object transform(self, object func, object value):
        return func(value)


cdef class TransformObservation(Transform):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        attributes = self.step_inner(action, step)
        if attributes is None:
            step.observation = self.wrapper.observation(step.observation)
        else:
            step.observation = self.transform(self.get(attributes, "func"), step.observation)
        return 0


cdef class TransformAction(Transform):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        return self.inner.step(self.transform(self.get(attributes, "func"), action), step)


cdef class TransformReward(Transform):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        attributes = self.step_inner(action, step)
        if attributes is None:
            step.reward = self.wrapper.reward(step.reward)
        else:
            step.reward = self.transform(self.get(attributes, "func"), step.reward)
        return 0


cdef class FlattenObservation(TransformObservation):
    cdef object transform(self, object func, object observation):
        if (func is self.func and self.cells[0].cell_contents is self.inner_env
                and is_plain(observation)):
            space = self.inner.space("observation_space", "_observation_space")
            if type(space) is _box and has_dtype(observation, space.dtype):
                return _flatten(observation)
        return func(observation)


cdef class ClipAction(TransformAction):
    cdef object transform(self, object func, object action):
        if func is self.func and self.cells[0].cell_contents is self.inner_env and is_plain(action):
            space = self.inner.space("action_space", "_action_space")
            if type(space) is _box:
                clipped = _clip_array(action, space.low, space.high)
                if clipped is not None:
                    return clipped
        return func(action)


cdef class ClipReward(TransformReward):
    cdef object transform(self, object func, object reward):
        cdef double value
        cdef double low = 0
        cdef double high = 0
        if func is not self.func or not (type(reward) is float or is_float64(reward)):
            return func(reward)
        most, least = self.cells[0].cell_contents, self.cells[1].cell_contents  # max_, min_reward
        if not (_is_bound(least) and _is_bound(most)):
            return func(reward)
        value = reward
        if least is not None:
            low = least
            if not value == value or (value == low and signbit(value) != signbit(low)):
                return func(reward)
            if value < low:
                value = low
        if most is not None:
            high = most
            if not value == value or (value == high and signbit(value) != signbit(high)):
                return func(reward)
            if value > high:
                value = high
        return new_float64(value)


cdef bint _is_bound(object value):
    """Whether a bound is None, or a number that a double represents exactly."""
    if value is None:
        return True
    if type(value) is float or is_float64(value):
        return value == value
    return type(value) is int and -(1 << 53) <= value <= 1 << 53


cdef object _flatten(object array):
    """A one-dimensional copy."""
    if ndim_of(array) == 1:
        flat = new_like(array)
        memcpy(data_of(flat), data_of(array), array.nbytes)
        return flat
    return array.flatten()


cdef object _clip_array(object array, object low, object high):
    """A clipped copy, as np.clip makes it; None if it is left to np.clip."""
    if not (is_plain(low) and is_plain(high) and same_shape(array, low)
            and same_shape(array, high) and ndim_of(array)):
        return None
    cdef object clipped
    if has_dtype(array, float32) and has_dtype(low, float32) and has_dtype(high, float32):
        clipped = new_like(array)
        if _clip(<float *>data_of(array), <float *>data_of(low), <float *>data_of(high),
                 <float *>data_of(clipped), size_of(array)):
            return clipped
    elif has_dtype(array, float64) and has_dtype(low, float64) and has_dtype(high, float64):
        clipped = new_like(array)
        if _clip(<double *>data_of(array), <double *>data_of(low), <double *>data_of(high),
                 <double *>data_of(clipped), size_of(array)):
            return clipped
    return None


cdef bint _clip(const real *values, const real *lows, const real *highs, real *clipped,
                Py_ssize_t count) noexcept:
    cdef Py_ssize_t i
    cdef real value
    for i in range(count):
        value = values[i]
        # Comparisons with NaN are false.
        if not lows[i] <= highs[i] or not value == value:
            return False
        if value == lows[i] and signbit(value) != signbit(lows[i]):
            return False
        if value < lows[i]:
            value = lows[i]
        if value == highs[i] and signbit(value) != signbit(highs[i]):
            return False
        clipped[i] = highs[i] if value > highs[i] else value
    return True

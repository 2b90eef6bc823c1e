"""Twins of NormalizeObservation and NormalizeReward.

Gymnasium's RunningMeanStd is updated by one sample at a time. The mean of that is the sample, and
its variance is 0 if it is finite. The rest of the formulas is computed here in their order, and
rounded as NumPy rounds: a float32 array times a Python float gives float32.
"""

cimport cython
from libc.math cimport isfinite, sqrt, sqrtf

import numpy as np

from gymnasium.wrappers.utils import RunningMeanStd

from shmvec._core.memory cimport data_of, has_dtype, ndim_of, new_like, new_like_as, size_of
from shmvec._wrappers.chain cimport Chain, Step, Stepper, Twin, attributes_of, version_of
from shmvec._wrappers.numbers cimport (
    clear_flags,
    float32,
    float64,
    value_pointer,
    is_float64,
    is_plain,
    new_float64,
    raised_flags,
    same_shape,
)

ctypedef fused input_real:
    float
    double

ctypedef fused moment_real:
    float
    double


cdef object _bool = np.bool_
cdef object _running_mean_std = RunningMeanStd


cdef class _Normalizing(Twin):
    """A twin of a wrapper with a RunningMeanStd."""
    cdef unsigned int rms_version

    def __init__(self, wrapper, Chain chain, inner_env, Stepper inner, method):
        Twin.__init__(self, wrapper, chain, inner_env, inner, method)
        self.rms_version = version_of(_running_mean_std)

    cdef dict moments(self, object rms):
        """The attributes of a RunningMeanStd; None if it is of another class, or was changed."""
        if type(rms) is not _running_mean_std:
            return None
        if version_of(_running_mean_std) != self.rms_version:
            self.chain_state.changed = True
            return None
        cdef dict attributes = attributes_of(rms)
        if "update" in attributes or "update_from_moments" in attributes:
            return None
        return attributes


@cython.final
cdef class NormalizeObservation(_Normalizing):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        attributes = self.step_inner(action, step)
        normal = None if attributes is None else self.normalize(attributes, step.observation)
        step.observation = (
            self.wrapper.observation(step.observation) if normal is None else normal)
        return 0

    cdef object normalize(self, dict attributes, object observation):
        """The normalized observation; None if it is left to Python, and nothing was changed."""
        cdef dict moments = self.moments(attributes.get("obs_rms"))
        if moments is None or not is_plain(observation) or ndim_of(observation) == 0:
            return None
        update, epsilon = attributes.get("_update_running_mean"), attributes.get("epsilon")
        mean, var, count = moments.get("mean"), moments.get("var"), moments.get("count")
        if not (type(epsilon) is float and type(count) is float and type(update) is bool
                and is_plain(mean) and is_plain(var)
                and same_shape(observation, mean) and same_shape(observation, var)):
            return None
        cdef bint single = has_dtype(observation, float32)
        if not single and not has_dtype(observation, float64):
            return None
        cdef bint single_moments = has_dtype(mean, float32)
        if not has_dtype(var, float32 if single_moments else float64):
            return None
        if single_moments != single and not (single and has_dtype(mean, float64)):
            return None
        normal = new_like_as(observation, float32)
        cdef object new_mean = mean
        cdef object new_var = var
        if update:
            new_mean, new_var = new_like(mean), new_like(var)
        cdef Py_ssize_t size = size_of(observation)
        cdef double seen = count
        cdef double floor = epsilon
        cdef bint exact
        clear_flags()
        if single_moments:
            exact = _normalize[float, float](
                <float *>data_of(observation), <float *>data_of(mean), <float *>data_of(var),
                seen, floor, update, <float *>data_of(new_mean), <float *>data_of(new_var),
                <float *>data_of(normal), size)
        elif single:
            exact = _normalize[float, double](
                <float *>data_of(observation), <double *>data_of(mean), <double *>data_of(var),
                seen, floor, update, <double *>data_of(new_mean), <double *>data_of(new_var),
                <float *>data_of(normal), size)
        else:
            exact = _normalize[double, double](
                <double *>data_of(observation), <double *>data_of(mean), <double *>data_of(var),
                seen, floor, update, <double *>data_of(new_mean), <double *>data_of(new_var),
                <float *>data_of(normal), size)
        if not exact or raised_flags():
            return None
        if update:
            moments["mean"], moments["var"], moments["count"] = new_mean, new_var, seen + 1
        return normal


cdef bint _normalize(const input_real *values, const moment_real *means,
                     const moment_real *variances, double count, double epsilon, bint update,
                     moment_real *new_means, moment_real *new_variances, float *normal,
                     Py_ssize_t size) noexcept:
    """Updates moments, and normalizes by them; False: a number is not finite."""
    cdef Py_ssize_t i
    cdef moment_real before = <moment_real>count
    cdef moment_real total = <moment_real>(count + 1)
    cdef moment_real small = <moment_real>epsilon
    cdef moment_real value, mean, var, delta, squares
    cdef bint finite = True
    for i in range(size):
        value, mean, var = <moment_real>values[i], means[i], variances[i]
        if update:
            delta = value - mean
            mean = mean + delta / total
            squares = var * before + 0
            squares = squares + delta * delta * before / total
            var = squares / total
            new_means[i], new_variances[i] = mean, var
        delta = value - mean
        var = var + small
        if moment_real is float:
            var = sqrtf(var)
        else:
            var = sqrt(var)
        normal[i] = <float>(delta / var)
        finite = finite and isfinite(value) and isfinite(mean) and isfinite(var)
        finite = finite and isfinite(normal[i])
    return finite


@cython.final
cdef class NormalizeReward(_Normalizing):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        attributes = self.step_inner(action, step)
        normal = self.normalize(attributes, step.reward, step.terminated)
        if normal is None:
            normal = self.normalize_by_numpy(step.reward, step.terminated)
        step.reward = normal
        return 0

    cdef object normalize_by_numpy(self, object reward, object terminated):
        wrapper = self.wrapper
        wrapper.discounted_reward = (
            wrapper.discounted_reward * wrapper.gamma * (1 - terminated) + float(reward))
        if wrapper._update_running_mean:
            wrapper.return_rms.update(wrapper.discounted_reward)
        return reward / np.sqrt(wrapper.return_rms.var + wrapper.epsilon)

    cdef object normalize(self, dict attributes, object reward, object terminated):
        """The normalized reward; None if it is left to Python, and nothing was changed."""
        cdef dict moments = self.moments(attributes.get("return_rms"))
        discounted = attributes.get("discounted_reward")
        if (moments is None or not (type(reward) is float or is_float64(reward))
                or not is_plain(discounted) or not has_dtype(discounted, float64)
                or ndim_of(discounted) != 1 or size_of(discounted) != 1):
            return None
        if type(terminated) is not bool and type(terminated) is not _bool:
            return None
        update, epsilon, gamma = (
            attributes.get("_update_running_mean"), attributes.get("epsilon"),
            attributes.get("gamma"))
        mean, var, count = moments.get("mean"), moments.get("var"), moments.get("count")
        if not (type(epsilon) is float and type(gamma) is float and type(update) is bool
                and type(count) is float and is_float64(mean) and is_float64(var)):
            return None
        cdef double value = reward
        cdef double seen = count
        cdef double discount = gamma
        cdef double small = epsilon
        cdef bint ended = terminated
        new_discounted, normal = new_like(discounted), new_float64(0)
        new_mean, new_var = new_float64(0), new_float64(0)
        clear_flags()
        if not _normalize_reward(
                <double *>data_of(discounted), value_pointer(mean), value_pointer(var), discount,
                ended, value, seen, small, update, <double *>data_of(new_discounted),
                value_pointer(new_mean), value_pointer(new_var),
                value_pointer(normal)) or raised_flags():
            return None
        attributes["discounted_reward"] = new_discounted
        if update:
            moments["mean"], moments["var"], moments["count"] = new_mean, new_var, seen + 1
        return normal


# All values are in memory, so that the compiler moves no operation across the checks of the flags.
cdef bint _normalize_reward(const double *discounted, const double *mean, const double *var,
                            double gamma, bint ended, double reward, double count, double epsilon,
                            bint update, double *new_discounted, double *new_mean,
                            double *new_var, double *normal) noexcept:
    """Updates moments, and normalizes by them; False: a number is not finite."""
    cdef double total = count + 1
    cdef double alive = 1 - ended
    cdef double delta, squares
    new_discounted[0] = discounted[0] * gamma * alive + reward
    new_mean[0], new_var[0] = mean[0], var[0]
    if update:
        delta = new_discounted[0] - mean[0]
        new_mean[0] = mean[0] + delta / total
        squares = var[0] * count + 0
        squares = squares + delta * delta * count / total
        new_var[0] = squares / total
    normal[0] = reward / sqrt(new_var[0] + epsilon)
    return (isfinite(new_discounted[0]) and isfinite(new_mean[0]) and isfinite(new_var[0])
            and isfinite(normal[0]))

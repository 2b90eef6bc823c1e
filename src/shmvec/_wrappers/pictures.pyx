"""Twins of wrappers of pictures: GrayscaleObservation and FrameStackObservation."""

cimport cython
from libc.string cimport memcpy, memmove

from collections import deque

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import stateful_observation

from shmvec._core.memory cimport data_of, has_dtype, ndim_of, new_like, shape_of
from shmvec._wrappers.chain cimport Chain, Step, Stepper, Twin
from shmvec._wrappers.numbers cimport is_plain
from shmvec._wrappers.transforms cimport TransformObservation

cdef object _box = gym.spaces.Box
cdef object _deque = deque
cdef object _uint8 = np.dtype(np.uint8)
cdef double _RED[256]  # the gray that each value of a colour adds
cdef double _GREEN[256]
cdef double _BLUE[256]
cdef int _value
for _value in range(256):
    _RED[_value], _GREEN[_value], _BLUE[_value] = (
        _value * 0.2125, _value * 0.7154, _value * 0.0721)


@cython.final
cdef class GrayscaleObservation(TransformObservation):
    cdef bint keeps_dim  # whether its pictures have an axis for their one channel

    def __init__(self, wrapper, Chain chain, inner_env, Stepper inner, method):
        TransformObservation.__init__(self, wrapper, chain, inner_env, inner, method)
        self.keeps_dim = "expand_dims" in self.func.__code__.co_names

    cdef object transform(self, object func, object observation):
        if not (func is self.func and is_plain(observation) and has_dtype(observation, _uint8)
                and ndim_of(observation) == 3 and shape_of(observation)[2] == 3):
            return func(observation)
        cdef Py_ssize_t height = shape_of(observation)[0]
        cdef Py_ssize_t width = shape_of(observation)[1]
        gray = np.empty((height, width), _uint8)
        _convert_to_gray(<unsigned char *>data_of(observation), <unsigned char *>data_of(gray),
              height * width)
        return np.expand_dims(gray, axis=-1) if self.keeps_dim else gray


@cython.final
cdef class FrameStackObservation(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        attributes = self.step_inner(action, step)
        self.get(attributes, "obs_queue").append(step.observation)
        inner_env = self.get(attributes, "env")
        if inner_env is self.inner_env:
            space = self.inner.space("observation_space", "_observation_space")
        else:
            space = inner_env.observation_space
        frames = self.get(attributes, "obs_queue")
        stacked = self.get(attributes, "stacked_obs")
        if type(space) is _box and _stack_frames(frames, stacked):
            step.observation = new_like(stacked)
            memcpy(data_of(step.observation), data_of(stacked), stacked.nbytes)
        else:
            step.observation = stateful_observation.deepcopy(
                stateful_observation.concatenate(space, frames, stacked))
        return 0


cdef void _convert_to_gray(const unsigned char *colours, unsigned char *gray,
                           Py_ssize_t count) noexcept:
    """Rounds weighted sums of red, green and blue down, adding them in this order."""
    cdef Py_ssize_t i
    for i in range(count):
        gray[i] = <unsigned char><int>(
            _RED[colours[3 * i]] + _GREEN[colours[3 * i + 1]] + _BLUE[colours[3 * i + 2]])


cdef bint _stack_frames(object frames, object stacked) except -1:
    """Copies frames into an array, one after the other; False if that is left to NumPy."""
    cdef int axis
    cdef Py_ssize_t size
    cdef char *place
    if not (type(frames) is _deque and is_plain(stacked) and ndim_of(stacked)
            and 0 < len(frames) == shape_of(stacked)[0]
            and stacked.flags.writeable and not stacked.dtype.hasobject):
        return False
    dtype = stacked.dtype
    for frame in frames:
        if not (is_plain(frame) and has_dtype(frame, dtype)
                and ndim_of(frame) == ndim_of(stacked) - 1):
            return False
        for axis in range(ndim_of(frame)):
            if shape_of(frame)[axis] != shape_of(stacked)[axis + 1]:
                return False
    size = stacked.nbytes // len(frames)
    place = <char *>data_of(stacked)
    for frame in frames:
        memmove(place, data_of(frame), size)  # a frame may be part of the stack
        place += size
    return True

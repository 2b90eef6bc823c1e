"""Twins of wrappers that make several steps at once: MaxAndSkipEnv and the like.

MaxAndSkipEnv and MaxAndSkipObservation only read the last two frames, which an env that omits
observations makes in their buffer. If an episode ends before these, the buffer has the frames of
the step before. AtariPreprocessing reads no observation: it asks the emulator for its screen.
"""

cimport cython

import numpy as np

from shmvec._core.memory cimport data_of, has_dtype, ndim_of, shape_of, size_of
from shmvec._wrappers.chain cimport Chain, Step, Stepper, Twin, attributes_of
from shmvec._wrappers.numbers cimport is_plain

cdef object _uint8 = np.dtype(np.uint8)


cdef class MaxAndSkipEnv(Twin):
    cdef bint is_gymnasium  # Gymnasium's MaxAndSkipObservation, not Stable-Baselines3's wrapper

    def __init__(self, wrapper, Chain chain, inner_env, Stepper inner, method):
        Twin.__init__(self, wrapper, chain, inner_env, inner, method)
        self.is_gymnasium = type(wrapper).__name__ == "MaxAndSkipObservation"

    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        cdef object total = 0.0
        cdef Py_ssize_t i
        skip = self.get(attributes, "_skip")
        if type(skip) is not int or not 0 < skip < 1 << 30:
            return self.step_in_python(action, step)
        for i in range(skip):
            step.may_omit = True
            attributes = _next_frame(self, attributes, action, step)
            if not self.is_gymnasium:
                ended = step.terminated or step.truncated
            last = self.get(attributes, "_skip") - 1
            if i == last - 1:
                _store_frame(step, self.get(attributes, "_obs_buffer"), 0)
            if i == last:
                _store_frame(step, self.get(attributes, "_obs_buffer"), 1)
            total = total + float(step.reward)
            if self.is_gymnasium:
                ended = step.terminated or step.truncated
            if ended:
                break
        step.may_omit, step.omitted_by = False, None
        frames = self.get(attributes, "_obs_buffer")
        step.observation = _max_of_frames(frames)
        if step.observation is None:
            step.observation = np.max(frames, axis=0) if self.is_gymnasium else frames.max(axis=0)
        step.reward = total
        return 0


@cython.final
cdef class MaxAndSkipObservation(MaxAndSkipEnv):
    pass


@cython.final
cdef class AtariPreprocessing(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        cdef object total = 0.0
        cdef Py_ssize_t i
        skip = self.get(attributes, "frame_skip")
        if type(skip) is not int or not 0 < skip < 1 << 30:
            return self.step_in_python(action, step)
        for i in range(skip):
            step.may_omit = True
            attributes = _next_frame(self, attributes, action, step)
            total += step.reward
            attributes["game_over"] = step.terminated
            if self.get(attributes, "terminal_on_life_loss"):
                lives = self.wrapper.ale.lives()
                step.terminated = step.terminated or lives < self.get(attributes, "lives")
                attributes["game_over"] = step.terminated
                attributes["lives"] = lives
            if step.terminated or step.truncated:
                break
            last = self.get(attributes, "frame_skip") - 1
            if i == last - 1:
                self.fetch(attributes, 1)
            elif i == last:
                self.fetch(attributes, 0)
        step.may_omit, step.omitted_by = False, None
        step.observation = self.wrapper._get_obs()
        step.reward = total
        return 0

    cdef int fetch(self, dict attributes, object place) except -1:
        """Has the emulator write its screen to a buffer."""
        if self.get(attributes, "grayscale_obs"):
            self.wrapper.ale.getScreenGrayscale(self.get(attributes, "obs_buffer")[place])
        else:
            self.wrapper.ale.getScreenRGB(self.get(attributes, "obs_buffer")[place])
        return 0


cdef dict _next_frame(Twin twin, dict attributes, object action, Step step):
    """Steps the wrapper's env, which the frame before may have replaced."""
    inner_env = twin.get(attributes, "env")
    if inner_env is twin.inner_env:
        return twin.step_inner(action, step)
    step.take(inner_env.step(action))
    step.unpack()
    return attributes_of(twin.wrapper)


cdef int _store_frame(Step step, object frames, object index) except -1:
    """Stores the observation as one of the last two frames."""
    if step.omitted_by is None:
        frames[index] = step.observation
        return 0
    return step.omitted_by.observe(frames, index)


cdef object _max_of_frames(object frames):
    """The maximum of two frames, byte by byte, as a new array; None if it is left to NumPy."""
    if not (is_plain(frames) and has_dtype(frames, _uint8) and ndim_of(frames) > 1
            and shape_of(frames)[0] == 2):
        return None
    largest = np.empty(frames.shape[1:], _uint8)
    cdef Py_ssize_t size = size_of(largest)
    cdef const unsigned char *first = <unsigned char *>data_of(frames)
    _max_bytes(first, first + size, <unsigned char *>data_of(largest), size)
    return largest


cdef void _max_bytes(const unsigned char *first, const unsigned char *second,
                  unsigned char *largest, Py_ssize_t size) noexcept:
    cdef Py_ssize_t i
    for i in range(size):
        largest[i] = first[i] if first[i] > second[i] else second[i]

"""Twins of wrappers that take several frames a step: MaxAndSkipEnv and its kin.

MaxAndSkipEnv and MaxAndSkipObservation look at the last two frames only, and have an env that
leaves observations out make these in their buffer. An episode that ends within the others leaves
the frames of the step before. AtariPreprocessing looks at none: it asks the emulator for its
screen.
"""

cimport cython

import numpy as np

from shmvec._core.memory cimport data_of, has_dtype, ndim_of, shape_of, size_of
from shmvec._wrappers.chain cimport Chain, Step, Stepper, Twin, attributes_of
from shmvec._wrappers.numbers cimport is_plain

cdef object _uint8 = np.dtype(np.uint8)


cdef class MaxAndSkipEnv(Twin):
    cdef bint is_gymnasiums  # it is a MaxAndSkipObservation

    def __init__(self, wrapper, Chain owner, below, Stepper inner, method):
        Twin.__init__(self, wrapper, owner, below, inner, method)
        self.is_gymnasiums = type(wrapper).__name__ == "MaxAndSkipObservation"

    cdef int step_with(self, dict own, object action, Step step) except -1:
        cdef object total = 0.0
        cdef Py_ssize_t i
        skip = self.get(own, "_skip")
        if type(skip) is not int or not 0 < skip < 1 << 30:
            return self.by_python(action, step)
        for i in range(skip):
            step.unseen = True
            own = _next_frame(self, own, action, step)
            if not self.is_gymnasiums:
                ended = step.terminated or step.truncated
            last = self.get(own, "_skip") - 1
            if i == last - 1:
                _keep(step, self.get(own, "_obs_buffer"), 0)
            if i == last:
                _keep(step, self.get(own, "_obs_buffer"), 1)
            total = total + float(step.reward)
            if self.is_gymnasiums:
                ended = step.terminated or step.truncated
            if ended:
                break
        step.unseen, step.unmade = False, None
        frames = self.get(own, "_obs_buffer")
        step.observation = _maximum(frames)
        if step.observation is None:
            step.observation = np.max(frames, axis=0) if self.is_gymnasiums else frames.max(axis=0)
        step.reward = total
        return 0


@cython.final
cdef class MaxAndSkipObservation(MaxAndSkipEnv):
    pass


@cython.final
cdef class AtariPreprocessing(Twin):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        cdef object total = 0.0
        cdef Py_ssize_t i
        skip = self.get(own, "frame_skip")
        if type(skip) is not int or not 0 < skip < 1 << 30:
            return self.by_python(action, step)
        for i in range(skip):
            step.unseen = True
            own = _next_frame(self, own, action, step)
            total += step.reward
            own["game_over"] = step.terminated
            if self.get(own, "terminal_on_life_loss"):
                lives = self.wrapper.ale.lives()
                step.terminated = step.terminated or lives < self.get(own, "lives")
                own["game_over"] = step.terminated
                own["lives"] = lives
            if step.terminated or step.truncated:
                break
            last = self.get(own, "frame_skip") - 1
            if i == last - 1:
                self.fetch(own, 1)
            elif i == last:
                self.fetch(own, 0)
        step.unseen, step.unmade = False, None
        step.observation = self.wrapper._get_obs()
        step.reward = total
        return 0

    cdef int fetch(self, dict own, object place) except -1:
        """Has the emulator write its screen into a buffer."""
        if self.get(own, "grayscale_obs"):
            self.wrapper.ale.getScreenGrayscale(self.get(own, "obs_buffer")[place])
        else:
            self.wrapper.ale.getScreenRGB(self.get(own, "obs_buffer")[place])
        return 0


cdef dict _next_frame(Twin twin, dict own, object action, Step step):
    """Steps the wrapper's env, of which the frame before may have made another one."""
    below = twin.get(own, "env")
    if below is twin.below:
        return twin.after_inner(action, step)
    step.take(below.step(action))
    step.unpack()
    return attributes_of(twin.wrapper)


cdef int _keep(Step step, object frames, object index) except -1:
    """Stores the observation among the last two frames."""
    if step.unmade is None:
        frames[index] = step.observation
        return 0
    return step.unmade.observe(frames, index)


cdef object _maximum(object frames):
    """The larger of two frames, byte by byte, as a new array; None: NumPy must make it."""
    if not (is_plain(frames) and has_dtype(frames, _uint8) and ndim_of(frames) > 1
            and shape_of(frames)[0] == 2):
        return None
    largest = np.empty(frames.shape[1:], _uint8)
    cdef Py_ssize_t size = size_of(largest)
    cdef const unsigned char *first = <unsigned char *>data_of(frames)
    _larger(first, first + size, <unsigned char *>data_of(largest), size)
    return largest


cdef void _larger(const unsigned char *first, const unsigned char *second,
                  unsigned char *largest, Py_ssize_t size) noexcept:
    cdef Py_ssize_t i
    for i in range(size):
        largest[i] = first[i] if first[i] > second[i] else second[i]

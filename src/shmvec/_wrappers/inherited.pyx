"""Twins of wrappers that inherit their step from one of Gymnasium's base classes.

They call the wrapper's own ``observation``, ``action`` or ``reward``. That alone makes no step
faster, but such a wrapper no longer splits a chain in two.
"""

cimport cython

from shmvec._wrappers.chain cimport Step, Twin


@cython.final
cdef class Wrapper(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        return self.inner.step(action, step)


@cython.final
cdef class ObservationWrapper(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        self.inner.step(action, step)
        step.unpack()
        step.observation = self.wrapper.observation(step.observation)
        return 0


@cython.final
cdef class ActionWrapper(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        return self.inner.step(self.wrapper.action(action), step)


@cython.final
cdef class RewardWrapper(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        self.inner.step(action, step)
        step.unpack()
        step.reward = self.wrapper.reward(step.reward)
        return 0

"""Twins of wrappers that inherit their step from one of Gymnasium's base classes.

Whatever their class is, their own ``observation``, ``action`` or ``reward`` is called. No step gets
faster by that alone, but a chain is not broken in two where such a wrapper lies in it.
"""

cimport cython

from shmvec._wrappers.chain cimport Step, Twin


@cython.final
cdef class Wrapper(Twin):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        return self.inner.step(action, step)


@cython.final
cdef class ObservationWrapper(Twin):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        self.inner.step(action, step)
        step.unpack()
        step.observation = self.wrapper.observation(step.observation)
        return 0


@cython.final
cdef class ActionWrapper(Twin):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        return self.inner.step(self.wrapper.action(action), step)


@cython.final
cdef class RewardWrapper(Twin):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        self.inner.step(action, step)
        step.unpack()
        step.reward = self.wrapper.reward(step.reward)
        return 0

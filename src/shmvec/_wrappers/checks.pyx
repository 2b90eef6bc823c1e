"""Twins of wrappers about an episode's course: those that ``gym.make`` adds, and their kin."""

cimport cython

from shmvec._wrappers.chain cimport Chain, Step, Stepper, Twin


@cython.final
cdef class PassiveEnvChecker(Twin):
    cdef bint checks_reuse  # since Gymnasium 1.4

    def __init__(self, wrapper, Chain owner, below, Stepper inner, method):
        Twin.__init__(self, wrapper, owner, below, inner, method)
        self.checks_reuse = "checked_data_reuse" in type(wrapper).step.__code__.co_names

    cdef int step_with(self, dict own, object action, Step step) except -1:
        if (self.get(own, "checked_step") is False
                or self.checks_reuse and self.get(own, "checked_data_reuse") is False):
            return self.by_python(action, step)
        return self.inner.step(action, step)


@cython.final
cdef class OrderEnforcing(Twin):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        if not self.get(own, "_has_reset"):
            return self.by_python(action, step)
        return self.inner.step(action, step)


@cython.final
cdef class TimeLimit(Twin):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        own = self.after_inner(action, step)
        elapsed = self.get(own, "_elapsed_steps")
        elapsed += 1
        own["_elapsed_steps"] = elapsed
        if elapsed >= self.get(own, "_max_episode_steps"):
            step.truncated = True
        return 0


@cython.final
cdef class Autoreset(Twin):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        if self.get(own, "autoreset"):
            return self.by_python(action, step)
        own = self.after_inner(action, step)
        own["autoreset"] = step.terminated or step.truncated
        return 0


@cython.final
cdef class TimeAwareObservation(Twin):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        steps = self.get(own, "timesteps")
        steps += 1
        own["timesteps"] = steps
        self.inner.step(action, step)
        step.unpack()
        step.observation = self.wrapper.observation(step.observation)
        return 0

"""Twins of wrappers that check or count the steps of an episode, such as ``gym.make`` adds."""

cimport cython

from shmvec._wrappers.chain cimport Chain, Step, Stepper, Twin


@cython.final
cdef class PassiveEnvChecker(Twin):
    cdef bint checks_reuse  # since Gymnasium 1.4

    def __init__(self, wrapper, Chain chain, inner_env, Stepper inner, method):
        Twin.__init__(self, wrapper, chain, inner_env, inner, method)
        self.checks_reuse = "checked_data_reuse" in type(wrapper).step.__code__.co_names

    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        if (self.get(attributes, "checked_step") is False
                or self.checks_reuse and self.get(attributes, "checked_data_reuse") is False):
            return self.step_in_python(action, step)
        return self.inner.step(action, step)


@cython.final
cdef class OrderEnforcing(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        if not self.get(attributes, "_has_reset"):
            return self.step_in_python(action, step)
        return self.inner.step(action, step)


@cython.final
cdef class TimeLimit(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        attributes = self.step_inner(action, step)
        elapsed = self.get(attributes, "_elapsed_steps")
        elapsed += 1
        attributes["_elapsed_steps"] = elapsed
        if elapsed >= self.get(attributes, "_max_episode_steps"):
            step.truncated = True
        return 0


@cython.final
cdef class Autoreset(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        if self.get(attributes, "autoreset"):
            return self.step_in_python(action, step)
        attributes = self.step_inner(action, step)
        attributes["autoreset"] = step.terminated or step.truncated
        return 0


@cython.final
cdef class TimeAwareObservation(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        steps = self.get(attributes, "timesteps")
        steps += 1
        attributes["timesteps"] = steps
        self.inner.step(action, step)
        step.unpack()
        step.observation = self.wrapper.observation(step.observation)
        return 0

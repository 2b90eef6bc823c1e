"""A chain of wrappers, some of which are stepped by compiled twins.

A twin does what the ``step`` of a wrapper's class does, on the wrapper's own attributes: these are
always up to date, and changing them takes effect. At each step a twin checks that the wrapper's
class, its ``env`` and its methods are those for which it was made. If they are not, it calls the
wrapper's own method, and the chain is rebuilt before the next step. Only ``step`` is compiled:
``reset``, which is rare, stays in Python.
"""

cimport cython
from cpython.dict cimport PyDict_GetItemWithError
from cpython.method cimport PyMethod_Check, PyMethod_GET_FUNCTION, PyMethod_GET_SELF
from cpython.object cimport PyObject, PyObject_GenericGetDict
from libc.stdint cimport int64_t

from shmvec._core.worker cimport add_time_in_wrappers

from time import perf_counter_ns

import gymnasium as gym

from shmvec._wrappers.results import unpack_step

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        unsigned int tp_version_tag
    object PyMethod_New(object function, object instance)

MAX_BUILDS = 100  # a chain that changes more often is left to Python
SAMPLE_INTERVAL = 64  # of the steps of a wrapper without a twin, one in this many is timed
cdef object _wrapper = gym.Wrapper
# Twins that do not read observations, and call no code of a user's that could.
cdef frozenset _PASSIVE_TWINS = frozenset({
    "EpisodicLifeEnv", "Monitor", "OrderEnforcing", "PassiveEnvChecker", "RecordEpisodeStatistics",
    "StickyActionEnv", "TimeLimit", "Wrapper"})


cdef unsigned int version_of(object kind) noexcept:
    """The version of a class, which changes with it and its bases; 0 if it has none."""
    return (<PyTypeObject *><PyObject *>kind).tp_version_tag


cdef dict attributes_of(object instance):
    """An instance's ``__dict__``."""
    return PyObject_GenericGetDict(instance, NULL)


def has_version(kind):
    """Whether a class that was used has a version, by which its changes are noticed."""
    return version_of(kind) != 0


@cython.final
@cython.freelist(8)
cdef class Step:
    cdef int take(self, object result) except -1:
        """Stores what a step has returned."""
        self.omitted_by = None
        if type(result) is tuple and len(<tuple>result) == 5:
            self.observation, self.reward, self.terminated, self.truncated, self.info = (
                <tuple>result)
            self.is_unusual = False
        else:
            self.is_unusual = True
            self.unusual = result
        return 0

    cdef int unpack(self) except -1:
        """Unpacks the result as Python does, or raises what Python raises."""
        if self.is_unusual:
            self.take(unpack_step(self.unusual))
        return 0


cdef class Stepper:
    cdef int step(self, object action, Step step) except -1:
        raise NotImplementedError

    cdef object space(self, str name, str private_name):
        """The env's space of a name; a wrapper may have its own, under a private name."""
        raise NotImplementedError

    cdef int observe(self, object places, object index) except -1:
        """Makes the observation that it has omitted, in ``places[index]``."""
        raise NotImplementedError


@cython.final
cdef class ChainState:
    cdef bint is_own_step(self, object env, PyObject *step) noexcept:
        """Whether an env's attribute ``step`` is the chain, set for the duration of a step."""
        return (PyMethod_Check(<object>step)
                and <void *>PyMethod_GET_FUNCTION(<object>step) == self.chain
                and PyMethod_GET_SELF(<object>step) == <PyObject *>env)


cdef class PythonStepper(Stepper):
    def __init__(self, env, Chain chain, inner_env=None, Chain inner_chain=None):
        self.env = env
        self.chain_state = chain.state
        self.inner_env = inner_env
        self.inner_chain = inner_chain

    @property
    def inner_env_and_chain(self):
        """The inner env and the chain that steps it, or (None, None)."""
        return self.inner_env, self.inner_chain

    cdef int step(self, object action, Step step) except -1:
        if self.inner_chain is None:
            return step.take(self.env.step(action))
        self.steps += 1
        if self.steps % SAMPLE_INTERVAL == 0:
            return self.step_timed(action, step)
        return self.step_with_chain(action, step)

    cdef int step_timed(self, object action, Step step) except -1:
        """Steps, and records the time that this takes without the inner chain."""
        cdef Chain inner_chain = self.inner_chain
        cdef int64_t begin = perf_counter_ns()
        inner_chain.is_timed, inner_chain.spent_ns = True, 0
        try:
            self.step_with_chain(action, step)
        finally:
            inner_chain.is_timed = False
        cdef int64_t spent = perf_counter_ns() - begin - inner_chain.spent_ns
        if inner_chain.spent_ns > 0 and spent > 0:  # the chain was used, and by one thread only
            add_time_in_wrappers(SAMPLE_INTERVAL * spent)
        return 0

    cdef int step_with_chain(self, object action, Step step) except -1:
        """Steps; meanwhile ``step`` of the inner env is its chain."""
        cdef dict attributes = attributes_of(self.inner_env)
        cdef PyObject *own_step = PyDict_GetItemWithError(attributes, "step")
        if own_step is NULL and self.inner_chain.state.changed:
            self.inner_chain.rebuild()
        if own_step is not NULL or not isinstance(self.inner_chain.first, Twin):
            # The inner env has a `step` of its own, or its chain has nothing compiled left.
            if own_step is NULL or not self.inner_chain.state.is_own_step(self.inner_env, own_step):
                self.chain_state.changed = True
            return step.take(self.env.step(action))
        method = PyMethod_New(self.inner_chain, self.inner_env)
        attributes["step"] = method
        try:
            return step.take(self.env.step(action))
        finally:
            if attributes.get("step") is method:
                del attributes["step"]

    cdef object space(self, str name, str private_name):
        return getattr(self.env, name)


cdef class Twin(Stepper):
    def __init__(self, wrapper, Chain chain, inner_env, Stepper inner, str method):
        self.wrapper = wrapper
        self.chain_state = chain.state
        self.inner_env = inner_env
        self.inner = inner
        self.method = method
        self.kind = type(wrapper)
        self.version = version_of(self.kind)
        self.reads_observation = type(self).__name__ not in _PASSIVE_TWINS

    cdef dict checked_attributes(self):
        """The wrapper's attributes; None if the wrapper has changed."""
        cdef PyObject *own_step
        cdef dict attributes
        if type(self.wrapper) is not self.kind or version_of(self.kind) != self.version:
            return None
        attributes = attributes_of(self.wrapper)
        if (self.inner_env is not None
                and PyDict_GetItemWithError(attributes, "env") != <PyObject *>self.inner_env):
            return None
        own_step = PyDict_GetItemWithError(attributes, "step")
        if own_step is not NULL and not self.chain_state.is_own_step(self.wrapper, own_step):
            return None
        if self.method is not None and self.method in attributes:
            return None
        return attributes

    cdef int step(self, object action, Step step) except -1:
        cdef dict attributes = self.checked_attributes()
        if attributes is None:
            self.chain_state.changed = True
            return self.step_in_python(action, step)
        if self.reads_observation:
            step.may_omit = False
        return self.step_with(attributes, action, step)

    cdef dict step_inner(self, object action, Step step):
        """Steps the inner env; returns the wrapper's attributes, or None if it has changed."""
        cdef dict attributes
        self.inner.step(action, step)
        step.unpack()
        if self.method is None:
            return attributes_of(self.wrapper)
        attributes = self.checked_attributes()
        if attributes is None:
            self.chain_state.changed = True
        return attributes

    cdef int step_in_python(self, object action, Step step) except -1:
        """Steps the wrapper by its own method."""
        cdef PyObject *own_step = PyDict_GetItemWithError(attributes_of(self.wrapper), "step")
        if own_step is not NULL and self.chain_state.is_own_step(self.wrapper, own_step):
            return step.take(type(self.wrapper).step(self.wrapper, action))
        return step.take(self.wrapper.step(action))

    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        raise NotImplementedError

    cdef object get(self, dict attributes, str name):
        """An attribute of the wrapper."""
        cdef PyObject *value = PyDict_GetItemWithError(attributes, name)
        if value is not NULL:
            return <object>value
        return getattr(self.wrapper, name)

    cdef object space(self, str name, str private_name):
        cdef dict attributes = self.checked_attributes()
        if attributes is None or getattr(self.kind, name) is not getattr(_wrapper, name):
            return getattr(self.wrapper, name)
        space = self.get(attributes, private_name)
        return self.inner.space(name, private_name) if space is None else space


def _plain_step():
    """The function of an unpickled method ``step``."""
    return step_of_class


def step_of_class(env, *args, **kwargs):
    return type(env).step(env, *args, **kwargs)


@cython.final
cdef class Chain:
    def __init__(self, env, build):
        """Builds the stepper of an env.

        Args:
            env: The env with its wrappers.
            build: Called with the env and this chain: returns a Stepper, and notes.
        """
        self.env = env
        self.build = build
        self.state = ChainState.__new__(ChainState)
        self.state.chain = <void *>self
        self.first, self.notes = build(env, self)

    def step(self, action):
        """Does what the env's ``step`` does."""
        if self.state.changed:
            self.rebuild()
        return self.run_step(action)

    @property
    def __name__(self):
        return "step"

    def __call__(self, env, *args, **kwargs):
        """Does what the method ``step`` of the env's class does."""
        cdef PyObject *own_step = PyDict_GetItemWithError(attributes_of(env), "step")
        if (env is self.env and (own_step is NULL or self.state.is_own_step(env, own_step))
                and len(args) == 1 and not kwargs):
            return self.run_step(args[0])
        # Called by a copy of the env, by another method around this one, or with other arguments.
        return step_of_class(env, *args, **kwargs)

    cdef object run_step(self, object action):
        cdef Step step = Step.__new__(Step)
        cdef Stepper first = self.first  # a reference, since the env may cause a rebuild
        if self.is_timed:
            self.step_timed(first, action, step)
        else:
            first.step(action, step)
        if step.is_unusual:
            return step.unusual
        return step.observation, step.reward, step.terminated, step.truncated, step.info

    cdef int step_timed(self, Stepper first, object action, Step step) except -1:
        """Steps, and adds the duration to ``spent_ns``, once if the call is recursive."""
        cdef int64_t begin = perf_counter_ns()
        self.is_timed = False
        try:
            first.step(action, step)
        finally:
            self.spent_ns += perf_counter_ns() - begin
            self.is_timed = True
        return 0

    def __reduce__(self):
        return _plain_step, ()  # an env may be pickled within a step

    def rebuild(self):
        self.num_builds += 1
        if self.num_builds < MAX_BUILDS:
            self.first, self.notes = self.build(self.env, self)
        else:
            self.first = PythonStepper(self.env, self)
            self.notes = [(type(self.env).__name__, "its wrappers change again and again")]
        self.state.changed = False

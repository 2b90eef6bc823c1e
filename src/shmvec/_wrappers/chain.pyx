"""A chain of wrappers, some of which are stepped by compiled twins.

A twin does what the ``step`` of a wrapper's class does, on the wrapper's own attributes: they are
true whenever somebody looks, and who changes them is obeyed. At each step a twin sees to it that
the wrapper's class, its ``env`` and its methods are those that it was made for; if not, the
wrapper's own method is called, and the chain is made anew before the next step. Only ``step`` is
compiled: ``reset``, which is rare, stays Python.
"""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from shmvec._core.worker cimport add_time_in_wrappers

from time import perf_counter_ns

import gymnasium as gym

from shmvec._wrappers.results import unpacked

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        unsigned int tp_version_tag
    object PyObject_GenericGetDict(object instance, void *context)
    bint PyMethod_Check(object found)
    PyObject *PyMethod_GET_FUNCTION(object method)
    PyObject *PyMethod_GET_SELF(object method)
    object PyMethod_New(object function, object instance)
    PyObject *PyDict_GetItemWithError(object mapping, object key) except? NULL

BUILDS_MOST = 100  # a chain that changes more often is left to Python
SAMPLED = 64  # one of so many steps of a wrapper without a twin is timed
cdef object _wrapper = gym.Wrapper
# Twins that pass observations on unseen, and call no code of a user's that could look.
cdef frozenset _BLIND = frozenset({
    "EpisodicLifeEnv", "Monitor", "OrderEnforcing", "PassiveEnvChecker", "RecordEpisodeStatistics",
    "StickyActionEnv", "TimeLimit", "Wrapper"})


cdef unsigned int version_of(object kind) noexcept:
    """The version of a class, another one after any change of it or of its bases; 0: unknown."""
    return (<PyTypeObject *><PyObject *>kind).tp_version_tag


cdef dict attributes_of(object instance):
    """An instance's ``__dict__``."""
    return PyObject_GenericGetDict(instance, NULL)


def has_version(kind):
    """Whether changes of a class are noticed; it must have been used."""
    return version_of(kind) != 0


@cython.final
@cython.freelist(8)
cdef class Step:
    cdef int take(self, object result) except -1:
        """Takes what a step returned."""
        self.unmade = None
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
            self.take(unpacked(self.unusual))
        return 0


cdef class Stepper:
    cdef int step(self, object action, Step step) except -1:
        raise NotImplementedError

    cdef object space(self, str name, str own):
        """The env's space of this name, which a wrapper keeps under its ``own`` name."""
        raise NotImplementedError

    cdef int observe(self, object places, object index) except -1:
        """Makes the observation that it has left out, as ``places[index]``."""
        raise NotImplementedError


@cython.final
cdef class Owner:
    cdef bint has_set(self, object env, PyObject *step) noexcept:
        """Whether this ``step`` of an env is the chain's, set for as long as a step takes."""
        return (PyMethod_Check(<object>step)
                and <void *>PyMethod_GET_FUNCTION(<object>step) == self.chain
                and PyMethod_GET_SELF(<object>step) == <PyObject *>env)


cdef class Python(Stepper):
    def __init__(self, env, Chain owner, below=None, Chain chain=None):
        self.env = env
        self.owner = owner.owner
        self.below = below
        self.chain = chain

    @property
    def beneath(self):
        """The env of a wrapper that is stepped by a chain, and the chain; None, None."""
        return self.below, self.chain

    cdef int step(self, object action, Step step) except -1:
        if self.chain is None:
            return step.take(self.env.step(action))
        self.steps += 1
        if self.steps % SAMPLED == 0:
            return self.timed_step(action, step)
        return self.step_with_chain(action, step)

    cdef int timed_step(self, object action, Step step) except -1:
        """Steps, and notes how long that takes without what is beneath."""
        cdef Chain chain = self.chain
        cdef int64_t begin = perf_counter_ns()
        chain.is_timed, chain.spent_ns = True, 0
        try:
            self.step_with_chain(action, step)
        finally:
            chain.is_timed = False
        cdef int64_t spent = perf_counter_ns() - begin - chain.spent_ns
        if chain.spent_ns > 0 and spent > 0:  # the chain was used, and not by threads at a time
            add_time_in_wrappers(SAMPLED * spent)
        return 0

    cdef int step_with_chain(self, object action, Step step) except -1:
        """Has the env beneath be stepped by its chain, for as long as this step takes."""
        cdef dict own = attributes_of(self.below)
        cdef PyObject *found = PyDict_GetItemWithError(own, "step")
        if found is NULL and self.chain.owner.changed:
            self.chain.make_anew()
        if found is not NULL or not isinstance(self.chain.first, Twin):
            # Either the env steps its own wrappers, or another one must step what is beneath.
            if found is NULL or not self.chain.owner.has_set(self.below, found):
                self.owner.changed = True
            return step.take(self.env.step(action))
        method = PyMethod_New(self.chain, self.below)
        own["step"] = method
        try:
            return step.take(self.env.step(action))
        finally:
            if own.get("step") is method:
                del own["step"]

    cdef object space(self, str name, str own):
        return getattr(self.env, name)


cdef class Twin(Stepper):
    def __init__(self, wrapper, Chain owner, below, Stepper inner, str method):
        self.wrapper = wrapper
        self.owner = owner.owner
        self.below = below
        self.inner = inner
        self.method = method
        self.kind = type(wrapper)
        self.tag = version_of(self.kind)
        self.looks = type(self).__name__ not in _BLIND

    cdef dict attributes(self):
        """The wrapper's attributes; None if it is not as it was."""
        cdef PyObject *found
        cdef dict own
        if type(self.wrapper) is not self.kind or version_of(self.kind) != self.tag:
            return None
        own = attributes_of(self.wrapper)
        if (self.below is not None
                and PyDict_GetItemWithError(own, "env") != <PyObject *>self.below):
            return None
        found = PyDict_GetItemWithError(own, "step")
        if found is not NULL and not self.owner.has_set(self.wrapper, found):
            return None
        if self.method is not None and self.method in own:
            return None
        return own

    cdef int step(self, object action, Step step) except -1:
        cdef dict own = self.attributes()
        if own is None:
            self.owner.changed = True
            return self.by_python(action, step)
        if self.looks:
            step.unseen = False
        return self.step_with(own, action, step)

    cdef dict after_inner(self, object action, Step step):
        """Steps what it wraps: the wrapper's attributes then; None: its ``method`` has changed."""
        cdef dict own
        self.inner.step(action, step)
        step.unpack()
        if self.method is None:
            return attributes_of(self.wrapper)
        own = self.attributes()
        if own is None:
            self.owner.changed = True
        return own

    cdef int by_python(self, object action, Step step) except -1:
        """Steps the wrapper by its own method."""
        cdef PyObject *found = PyDict_GetItemWithError(attributes_of(self.wrapper), "step")
        if found is not NULL and self.owner.has_set(self.wrapper, found):
            return step.take(type(self.wrapper).step(self.wrapper, action))
        return step.take(self.wrapper.step(action))

    cdef int step_with(self, dict own, object action, Step step) except -1:
        raise NotImplementedError

    cdef object get(self, dict own, str name):
        """An attribute of the wrapper."""
        cdef PyObject *found = PyDict_GetItemWithError(own, name)
        if found is not NULL:
            return <object>found
        return getattr(self.wrapper, name)

    cdef object space(self, str name, str own):
        cdef dict attributes = self.attributes()
        if attributes is None or getattr(self.kind, name) is not getattr(_wrapper, name):
            return getattr(self.wrapper, name)
        space = self.get(attributes, own)
        return self.inner.space(name, own) if space is None else space


def _uncompiled():
    """What a method ``step`` calls that is unpickled: what its env's class has."""
    return step_of_class


def step_of_class(env, *given, **named):
    return type(env).step(env, *given, **named)


@cython.final
cdef class Chain:
    def __init__(self, env, build):
        """Makes what steps the env.

        Args:
            env: The env with its wrappers.
            build: Called with the env and this chain: returns a Stepper, and notes.
        """
        self.env = env
        self.build = build
        self.owner = Owner.__new__(Owner)
        self.owner.chain = <void *>self
        self.first, self.notes = build(env, self)

    def step(self, action):
        """What the env's ``step`` does."""
        if self.owner.changed:
            self.make_anew()
        return self.stepped(action)

    @property
    def __name__(self):
        return "step"

    def __call__(self, env, *given, **named):
        """What the method ``step`` of the env's class does."""
        cdef PyObject *found = PyDict_GetItemWithError(attributes_of(env), "step")
        if (env is self.env and (found is NULL or self.owner.has_set(env, found))
                and len(given) == 1 and not named):
            return self.stepped(given[0])
        # Of a copy, by who has put another method around it, or with other arguments.
        return step_of_class(env, *given, **named)

    cdef object stepped(self, object action):
        cdef Step step = Step.__new__(Step)
        cdef Stepper first = self.first  # kept: the env may lead to a new one in the middle
        if self.is_timed:
            self.timed(first, action, step)
        else:
            first.step(action, step)
        if step.is_unusual:
            return step.unusual
        return step.observation, step.reward, step.terminated, step.truncated, step.info

    cdef int timed(self, Stepper first, object action, Step step) except -1:
        """Steps, and adds up how long that takes: once, if it leads here again."""
        cdef int64_t begin = perf_counter_ns()
        self.is_timed = False
        try:
            first.step(action, step)
        finally:
            self.spent_ns += perf_counter_ns() - begin
            self.is_timed = True
        return 0

    def __reduce__(self):
        return _uncompiled, ()  # of an env that is pickled within a step, with its methods

    def make_anew(self):
        self.builds += 1
        if self.builds < BUILDS_MOST:
            self.first, self.notes = self.build(self.env, self)
        else:
            self.first = Python(self.env, self)
            self.notes = [(type(self.env).__name__, "its wrappers change again and again")]
        self.owner.changed = False

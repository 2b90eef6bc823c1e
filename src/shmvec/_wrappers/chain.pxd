from cpython.object cimport PyObject
from libc.stdint cimport int64_t


cdef class Stepper


cdef class Step:
    """The result of a step on its way outwards, which twins change."""
    cdef object observation
    cdef object reward
    cdef object terminated
    cdef object truncated
    cdef object info
    cdef bint unseen      # the observation is not looked at within the step: who makes it may
    cdef Stepper unmade   # leave it out, and is here; None: it has made it
    cdef bint is_unusual  # it is not a tuple of five, but
    cdef object unusual   # this, as it was returned

    cdef int take(self, object result) except -1
    cdef int unpack(self) except -1


cdef class Stepper:
    """Steps an env with the wrappers around it."""
    cdef int step(self, object action, Step step) except -1
    cdef object space(self, str name, str own)
    cdef int observe(self, object places, object index) except -1


cdef class Owner:
    """What steppers know of their chain, which they do not keep: its env is freed without gc."""
    cdef bint changed  # a wrapper is not as it was when the chain was made
    cdef void *chain   # to compare with, never to look at

    cdef bint has_set(self, object env, PyObject *step) noexcept


cdef class Python(Stepper):
    """Steps an env, or a wrapper without a twin, by its own method."""
    cdef object env
    cdef Owner owner
    cdef object below  # the env of a wrapper, which is stepped by
    cdef Chain chain   # this; None: by itself
    cdef int64_t steps # how often it has stepped with the chain

    cdef int step_with_chain(self, object action, Step step) except -1
    cdef int timed_step(self, object action, Step step) except -1


cdef class Twin(Stepper):
    """Steps a wrapper as its class does. The wrapper keeps all state."""
    cdef object wrapper
    cdef Owner owner
    cdef object below      # the wrapper's env,
    cdef Stepper inner     # and what steps it
    cdef object kind       # the wrapper's class,
    cdef unsigned int tag  # and its version
    cdef str method        # what its step calls on itself; None: nothing
    cdef bint looks        # whether it looks at observations

    cdef dict attributes(self)
    cdef dict after_inner(self, object action, Step step)
    cdef int by_python(self, object action, Step step) except -1
    cdef int step_with(self, dict own, object action, Step step) except -1
    cdef object get(self, dict own, str name)


cdef class Chain:
    """Steps an env through its wrappers, some of which are compiled."""
    cdef readonly object env
    cdef object build         # makes what follows
    cdef Stepper first
    cdef readonly list notes  # (name of a class, why it is not compiled or ""), outermost first
    cdef Owner owner
    cdef public bint steps_env  # whether the env beneath all wrappers has a twin
    cdef int builds
    cdef bint is_timed     # whether steps add up their times
    cdef int64_t spent_ns  # in this

    cdef object stepped(self, object action)
    cdef int timed(self, Stepper first, object action, Step step) except -1


cdef unsigned int version_of(object kind) noexcept
cdef dict attributes_of(object instance)

from cpython.object cimport PyObject
from libc.stdint cimport int64_t


cdef class Stepper


cdef class Step:
    """The result of a step, which twins change on its way outwards."""
    cdef object observation
    cdef object reward
    cdef object terminated
    cdef object truncated
    cdef object info
    cdef bint may_omit        # no outer wrapper reads the observation: it need not be made
    cdef Stepper omitted_by   # the stepper that has not made it, and can; None: it was made
    cdef bint is_unusual      # the result is not a tuple of five
    cdef object unusual       # the result then, as it was returned

    cdef int take(self, object result) except -1
    cdef int unpack(self) except -1


cdef class Stepper:
    """Steps an env with the wrappers around it."""
    cdef int step(self, object action, Step step) except -1
    cdef object space(self, str name, str private_name)
    cdef int observe(self, object places, object index) except -1


cdef class ChainState:
    """What steppers know of their chain. A reference to the chain itself would be a cycle."""
    cdef bint changed  # a wrapper has changed since the chain was built
    cdef void *chain   # only compared, never dereferenced

    cdef bint is_own_step(self, object env, PyObject *step) noexcept


cdef class PythonStepper(Stepper):
    """Steps an env, or a wrapper without a twin, by its own method."""
    cdef object env
    cdef ChainState chain_state
    cdef object inner_env    # the env in a wrapper
    cdef Chain inner_chain   # steps the inner env; None: it steps itself
    cdef int64_t steps       # number of steps with the chain

    cdef int step_with_chain(self, object action, Step step) except -1
    cdef int step_timed(self, object action, Step step) except -1


cdef class Twin(Stepper):
    """Steps a wrapper as its class does. The wrapper keeps all state."""
    cdef object wrapper
    cdef ChainState chain_state
    cdef object inner_env         # the env in the wrapper
    cdef Stepper inner            # steps the inner env
    cdef object kind              # the wrapper's class
    cdef unsigned int version     # the version of the class
    cdef str method               # the method that its step calls on itself, or None
    cdef bint reads_observation

    cdef dict checked_attributes(self)
    cdef dict step_inner(self, object action, Step step)
    cdef int step_in_python(self, object action, Step step) except -1
    cdef int step_with(self, dict attributes, object action, Step step) except -1
    cdef object get(self, dict attributes, str name)


cdef class Chain:
    """Steps an env through its wrappers, some of which are compiled."""
    cdef readonly object env
    cdef object build           # builds the stepper and the notes
    cdef Stepper first          # the outermost stepper
    cdef readonly list notes    # (name of a class, why it is not compiled or ""), outermost first
    cdef ChainState state
    cdef public bint steps_env  # whether the innermost env has a twin
    cdef int num_builds
    cdef bint is_timed          # whether the durations of steps are added to spent_ns
    cdef int64_t spent_ns

    cdef object run_step(self, object action)
    cdef int step_timed(self, Stepper first, object action, Step step) except -1


cdef unsigned int version_of(object kind) noexcept
cdef dict attributes_of(object instance)

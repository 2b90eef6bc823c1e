cimport cython
from libc.stdint cimport int64_t, uint8_t

from shmvec._core.memory cimport Codec


cdef class ReplayLog:
    cdef readonly object whole    # the memory of the arrays
    cdef readonly object arrays   # of observations and of actions, nested as their spaces are
    cdef readonly object counts   # the array of `committed`
    cdef Codec observations       # of rows
    cdef Codec actions
    cdef double[::1] rewards
    cdef uint8_t[::1] kinds       # of each row: what it is, see the enum
    cdef int64_t[::1] committed   # of each env: records that the parent has accepted
    cdef int64_t[::1] written     # of each env: records that its worker has written
    cdef uint8_t[::1] interrupted # of each env: whether what precedes its next step is unknown
    cdef readonly Py_ssize_t num_envs
    cdef readonly Py_ssize_t depth
    cdef bint newest              # of stacked observations the newest frame alone is kept
    cdef object frames            # the array of these frames
    cdef Py_ssize_t frame_nbytes
    cdef bint floats              # frames may have NaN
    cdef bint zeros               # what precedes an episode in a stack is zeros

    @cython.final
    cdef Py_ssize_t row(self, Py_ssize_t env, int64_t position) noexcept nogil
    cdef int put(self, Py_ssize_t env, Py_ssize_t ahead, object observation, int kind) except -1
    cdef int check_stack(self, Py_ssize_t env, int64_t position, int kind,
                         object observation) except -1
    cdef bint is_frame(self, object frame, char *data, char *expected) except -1
    cdef int put_start(self, Py_ssize_t env, Py_ssize_t ahead, object observation) except -1
    cdef int put_step(self, Py_ssize_t env, object action, object observation, double reward,
                      bint terminated, bint truncated) except -1
    cdef int publish(self, Py_ssize_t env, Py_ssize_t count) except -1
    cdef int asked(self, const Py_ssize_t[::1] envs) except -1
    cdef int accept(self, Py_ssize_t env) except -1

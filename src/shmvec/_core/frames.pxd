from libc.stdint cimport uint8_t

from shmvec._core.arrays cimport Pool
from shmvec._core.results cimport Results


cdef class Frames:
    cdef Results home             # frames in the segment
    cdef readonly Results rollouts  # frames after these, in memory of their own; None: none
    cdef readonly Py_ssize_t away   # the frame of `rollouts` with the last results; -1: at home
    cdef Py_ssize_t[::1] ahead    # by how many frames each env is beyond that one,
    cdef bint uneven              # if some are
    cdef Py_ssize_t num_envs
    cdef Py_ssize_t[::1] everyone  # indices of all envs
    cdef Py_ssize_t[::1] rows     # where at home each env's last results are, or will be,
    cdef Py_ssize_t[::1] last_rows  # and where those before them are
    cdef bint copy
    cdef bint leasing             # views of batches are handed out; what they show is leased
    cdef bint keep_last           # new results do not overwrite the last ones
    cdef bint several             # there are several frames at home
    cdef Pool pool                # blocks where observations are written besides; None: nowhere
    cdef Py_ssize_t block         # the one that was named last, if it is still to be handed out; -1
    cdef Py_ssize_t beyond        # the number of the rollouts' first frame
    cdef Py_ssize_t free(self, const Py_ssize_t[::1] envs)
    cdef Py_ssize_t choose(self, const Py_ssize_t[::1] envs) except -1
    cdef int aim(self, const Py_ssize_t[::1] envs, Py_ssize_t frame) except -1
    cdef Py_ssize_t aim_all(self, Py_ssize_t rollout_frame) except -1
    cdef int aim_some(self, const Py_ssize_t[::1] envs, Py_ssize_t rollout_frame) except -1
    cdef Py_ssize_t frame_of(self, Py_ssize_t env)
    cpdef meet(self, Py_ssize_t frame)
    cdef object rows_away(self)
    cdef int come_home(self, Py_ssize_t asked=*) except -1
    cdef Results where(self, Py_ssize_t env, Py_ssize_t *row, Py_ssize_t *last)
    cdef Py_ssize_t first_row(self)
    cdef bint over(self, Py_ssize_t env)
    cdef bint was_over(self, Py_ssize_t env)
    cdef int check_away(self) except -1
    cdef int truncate(self, Py_ssize_t env) except -1
    cdef object last_observation(self, Py_ssize_t env, bint before)
    cdef int mark_truncated(self, Py_ssize_t env) except -1
    cdef tuple all(self, bint usual)
    cdef tuple some(self, object envs)

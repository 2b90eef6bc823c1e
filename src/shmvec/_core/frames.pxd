from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint8_t

from shmvec._core.codec cimport Codec
from shmvec._core.csrc cimport sv_area


cdef class Lender:
    cdef Py_buffer export     # of the memory in which the rows lie
    cdef uint8_t[::1] marks   # by row: whether it is lent
    cpdef bint leased(self, Py_ssize_t first, Py_ssize_t count)
    cpdef Lease lease(self, Py_ssize_t first, Py_ssize_t count)


cdef class Lease:
    cdef object __weakref__
    cdef Lender lender
    cdef Py_ssize_t first
    cdef Py_ssize_t count
    cdef bint ended
    cdef void end(self) noexcept


cdef class Results(Lender):
    cdef readonly Codec observations
    cdef readonly object rewards
    cdef readonly object terminations
    cdef readonly object truncations
    cdef readonly Py_ssize_t num_envs
    cdef readonly Py_ssize_t num_frames
    cdef double[::1] reward_of
    cdef uint8_t[::1] terminated_of
    cdef uint8_t[::1] truncated_of
    cdef tuple copies             # Pools of copies of rewards, terminations and truncations
    cdef tuple gathered           # likewise for as many rows as were gathered last; None: none were
    cdef int copy_row(self, Results source, Py_ssize_t row, Py_ssize_t target) except -1
    cdef tuple gather(self, object rows)
    cdef tuple rewards_and_flags(self, const Py_ssize_t[::1] row_of)
    cpdef tuple view(self, Lease lease, tuple lead)


cdef class Blocks(Lender):
    cdef Codec observations
    cdef Py_ssize_t num_envs
    cdef Py_ssize_t num_blocks
    cdef sv_area area         # the memory of which a fork gets a copy
    cdef bint added           # whether the area was added: csrc/pages.h
    cdef Py_ssize_t unleased(self)
    cdef object lend(self, Py_ssize_t block)


cdef class Frames:
    cdef Results home             # frames in the segment
    cdef readonly Results rollouts  # frames after these, in memory of their own; None: none
    cdef readonly Py_ssize_t away   # the frame of `rollouts` with the last results; -1: at home
    cdef Py_ssize_t[::1] ahead    # by how many frames each env is beyond `away`
    cdef bint uneven              # whether some envs are
    cdef Py_ssize_t num_envs
    cdef Py_ssize_t[::1] everyone  # indices of all envs
    cdef Py_ssize_t[::1] rows     # by env: the row at home where its last results are, or will be
    cdef Py_ssize_t[::1] last_rows  # by env: the row of the results before these
    cdef Py_ssize_t[::1] chosen   # by env: the frame for its next results; -1: one of a rollout
    cdef bint copy
    cdef bint leasing             # batches are returned as views, which are leased
    cdef bint keep_last           # new results do not overwrite the last ones
    cdef bint several             # there are several frames at home
    cdef Blocks blocks            # None: there are none
    cdef Py_ssize_t block         # the block that the last request named, until it is lent; -1
    cdef Py_ssize_t beyond        # the number of the rollouts' first frame
    cdef Py_ssize_t hold_batches  # further batches after which a lease ends; 0: it does not
    cdef object batches           # weak references to the leases of the last batches
    cdef Py_ssize_t free(self, const Py_ssize_t[::1] envs)
    cdef Py_ssize_t choose(self, const Py_ssize_t[::1] envs) except -1
    cdef int choose_for(self, const Py_ssize_t[::1] envs) except -1
    cdef int aim_chosen(self, Py_ssize_t env) except -1
    cdef int aim(self, const Py_ssize_t[::1] envs, Py_ssize_t frame) except -1
    cdef Py_ssize_t aim_all(self, Py_ssize_t rollout_frame) except -1
    cdef int aim_some(self, const Py_ssize_t[::1] envs, Py_ssize_t rollout_frame) except -1
    cdef Py_ssize_t frame_of(self, Py_ssize_t env)
    cpdef meet(self, Py_ssize_t frame)
    cdef object rows_away(self)
    cpdef int come_home(self, Py_ssize_t asked=*) except -1
    cdef Results where(self, Py_ssize_t env, Py_ssize_t *row, Py_ssize_t *last)
    cdef Py_ssize_t first_row(self)
    cdef bint over(self, Py_ssize_t env)
    cdef bint was_over(self, Py_ssize_t env)
    cdef int check_away(self) except -1
    cdef int truncate(self, Py_ssize_t env) except -1
    cdef object last_observation(self, Py_ssize_t env, bint before)
    cdef int mark_truncated(self, Py_ssize_t env) except -1
    cdef tuple all(self, bint usual, infos)
    cdef tuple some(self, object envs)
    cdef int count_batch(self, Lease lease) except -1

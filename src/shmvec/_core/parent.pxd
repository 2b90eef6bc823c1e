from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from shmvec._core.codec cimport Codec
from shmvec._core.csrc cimport sv_bell, sv_completion, sv_counts, sv_record, sv_ring, sv_waiter
from shmvec._core.infos cimport Columns
from shmvec._core.messages cimport Encoder
from shmvec._core.results cimport Results
from shmvec._core.segment cimport Segment


cdef class ParentLoop:
    cdef Segment segment
    cdef sv_ring *requests
    cdef sv_ring *completions
    cdef sv_bell *bell
    cdef sv_completion *completion
    cdef sv_waiter waiter
    cdef list decoders
    cdef list encoders            # of actions that are in no slab; None: they are
    cdef Columns columns
    cdef Results home             # frames in the segment
    cdef readonly Results rollouts  # frames after these, in memory of their own; None: none
    cdef Py_ssize_t[::1] rows     # where at home each env's last results are
    cdef readonly Py_ssize_t away          # the frame of `rollouts` in which they are instead; -1: at home
    cdef Codec actions
    cdef Py_ssize_t[::1] everyone  # indices of all envs
    cdef bint copy
    cdef bint leasing             # views of batches are handed out; what they show is leased
    cdef bint may_step_over       # False: stepping an env that is done is an error
    cdef bint keep_last           # new results do not overwrite the last ones
    cdef bint framed              # so there are several frames at home
    cdef Py_ssize_t[::1] last_rows  # where the results before the last ones are
    cdef uint8_t[::1] broken      # envs of which a step must be answered by a truncation
    cdef Py_ssize_t num_broken
    cdef uint8_t[::1] invalid     # envs whose last results were lost, or are an error
    cdef readonly Py_ssize_t num_invalid
    cdef uint32_t *outstanding    # requests to each worker that it has not answered
    cdef uint32_t operation       # that was posted last to all
    cdef bint resets              # the last command does
    cdef list saved               # [(env, info)]: of rings that are gone
    cdef list past                # counters of processes that are gone, by worker
    cdef object slabs
    cdef int64_t[::1] idle_since  # since when a worker has not begun what it was asked; 0: it has
    cdef uint64_t[::1] idle_answered  # what it had answered then
    cdef object look
    cdef public object rouse
    cdef object budgets
    cdef int64_t followed_at
    cdef int64_t step_limit       # of one env, in ns; -1: none
    cdef int64_t reset_limit
    cdef int64_t slice_ns         # between two looks around
    cdef object inline
    cdef uint32_t num_workers
    cdef uint32_t *firsts
    cdef uint32_t *counts
    cdef uint32_t *flags
    cdef uint32_t sequence
    cdef uint32_t issued
    cdef sv_counts tally          # of its waits; a wake: ringing the bell took a system call
    cdef readonly bint waiting    # a thread is in a wait
    cdef readonly bint pending    # something was posted and not collected yet
    # Single envs, asked by a PartialLoop, whose answers were not taken yet.
    cdef readonly Py_ssize_t asked
    cdef bint encode(self, uint32_t worker, Py_ssize_t env, object action,
                     uint32_t sequence) except -1
    cdef dict send_actions(self, actions)
    cdef int check_none_over(self, const Py_ssize_t[::1] envs) except -1
    cdef int follow_if_due(self) except -1
    cdef int attach(self, uint32_t worker, slabs) except -1
    cdef Encoder encoder(self, uint32_t worker)
    cdef Py_ssize_t free_frame(self, const Py_ssize_t[::1] envs)
    cdef Py_ssize_t frame_for(self, const Py_ssize_t[::1] envs) except -1
    cdef int answers_of(self, uint32_t worker) except -1
    cdef int save_infos(self, uint32_t worker) except -1
    cdef int set_invalid(self, Py_ssize_t env) except -1
    cdef Py_ssize_t first_row(self)
    cdef dict counters_of(self, uint32_t worker)
    cpdef int come_home(self) except -1
    cdef int set_rows(self, const Py_ssize_t[::1] envs, Py_ssize_t frame) except -1
    cdef int post(self, uint32_t operation, dict late, Py_ssize_t frame) except -1
    cdef Py_ssize_t frame_of_all(self, Py_ssize_t rollout_frame) except -1
    cdef int request(self, uint32_t worker, uint32_t operation, uint32_t first,
                     uint32_t count, Py_ssize_t frame) except -1
    cdef int ring_bell(self) except -1
    cpdef int remind(self) except -1
    cdef uint32_t answered(self)
    cdef uint32_t count_anew(self)
    cdef int take(self, uint32_t worker, sv_record *answer) except -1
    cdef bint wait_for(self, uint32_t target, timeout) except -1
    cpdef bint wait(self, timeout) except -1
    cdef int check_limits(self) except -1
    cdef int follow(self) except -1

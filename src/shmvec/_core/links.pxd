from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmvec._core.csrc cimport sv_bell, sv_completion, sv_counts, sv_notice, sv_record, sv_ring, sv_waiter
from shmvec._core.guard cimport Guard
from shmvec._core.segment cimport Segment
from shmvec._core.trace cimport Recorder


cdef class Alarms:
    cdef int *descriptors
    cdef uint32_t count
    cdef void close_all(self) noexcept
    cdef void rouse(self, uint32_t mask) noexcept


cdef class Links:
    cdef Segment segment
    cdef sv_ring *requests
    cdef sv_ring *completions
    cdef sv_bell *bell
    cdef sv_completion *completion
    cdef sv_notice *notice        # published for onlookers
    cdef sv_waiter waiter
    cdef uint32_t num_workers
    cdef uint32_t *firsts         # the first env of each worker
    cdef uint32_t *counts         # the number of envs of each worker
    cdef uint32_t *outstanding    # requests to each worker that it has not answered
    cdef uint32_t sequence        # the last number that was given to a request
    cdef uint32_t issued          # requests issued, in the unit of the completion count
    cdef sv_counts tally          # of the parent; a wake: ringing the bell took a system call
    cdef Recorder recorder        # records the trace of this side; None: there is no trace
    cdef readonly bint waiting    # a thread is in a wait
    cdef readonly Guard guard     # guards the calls that ask, take or wait
    cdef bint _closed             # the vector env was closed, maybe by another thread
    cdef bint lingering           # more workers than cores: the last of a batch step stay awake
    cdef bint talking             # messages have come on the channels lately, or will come
    cdef list channels
    cdef readonly object owner    # id of the process that owns the workers
    cdef object look
    cdef Alarms alarms            # wake workers that doze
    cdef object budgets
    cdef object inline            # serves the last worker's requests, in this process; or None
    cdef uint32_t num_processes   # workers that are processes: all, or all but the last
    cdef int64_t followed_at
    cdef int64_t looked_at
    cdef int64_t step_limit       # ns that a step of one env may take; -1: no limit
    cdef int64_t reset_limit      # ns that a reset of one env may take; -1: no limit
    cdef int64_t slice_ns         # ns between two calls of look_around
    cdef int64_t counted_from     # limits count from here, at the earliest
    cdef object hung
    cdef int64_t hang_ns          # ns after which a call is reported as hanging; -1: never
    cdef int64_t[::1] hang_reported  # by env: the begin of the call that was last reported
    cdef int64_t[::1] idle_since  # by worker: since when it has not begun its request; 0: it has
    cdef uint64_t[::1] idle_answered  # by worker: how many requests it had answered then
    cdef int attach(self, uint32_t worker) except -1
    cdef int request(self, uint32_t worker, uint32_t sequence, uint32_t operation,
                     uint32_t first, uint32_t count, Py_ssize_t frame) except -1
    cdef int push(self, uint32_t worker, const sv_record *request) except -1
    cdef int ring(self, uint32_t mask) except -1
    cpdef int remind(self) except -1
    cdef int pump(self) except -1
    cdef int take(self, uint32_t worker, sv_record *answer) except -1
    cdef bint is_of(self, uint32_t worker, const sv_record *answer) noexcept
    cdef uint32_t answered(self)
    cdef uint32_t count_anew(self)
    cdef void enter(self, uint32_t kind) noexcept
    cdef bint wait_for(self, uint32_t target, timeout) except -1
    cdef bint sleep_for(self, uint32_t target, timeout, int64_t begun) except -1
    cdef int publish(self) except -1
    cdef bint wait_until(self, uint32_t target, timeout) except -1
    cdef int serve_here(self) except -1
    cdef int check_open(self) except -1
    cpdef int look_if_due(self) except -1
    cpdef int look_around(self) except -1
    cdef int check_limits(self, int64_t now) except -1
    cdef object check_limit(self, uint32_t worker, uint64_t busy, int64_t now, int64_t elapsed,
                            list hanging)
    cpdef bint has_answered(self, uint32_t worker) noexcept
    cdef int64_t limit_of(self, uint64_t busy) noexcept
    cdef bint has(self, uint32_t worker, uint64_t busy)
    cdef object busy_with(self, uint32_t worker, uint64_t busy)
    cdef int follow_if_due(self) except -1
    cdef int follow(self) except -1
    cdef int renew(self, uint32_t worker) except -1

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from shmvec._core.codec cimport Codec
from shmvec._core.csrc cimport sv_record
from shmvec._core.frames cimport Frames
from shmvec._core.infos cimport Inbox
from shmvec._core.links cimport Links
from shmvec._core.replay cimport ReplayLog


cdef class Ledger:
    cdef readonly Links links
    cdef readonly Frames frames
    cdef Inbox inbox
    cdef object pack              # makes a message of actions that do not fit a ring
    cdef Codec actions
    cdef list encoders            # by worker, for actions as messages; None: actions lie in a slab
    cdef bint resets_in_step      # autoreset: by the step that ends an episode
    cdef bint resets_in_next_step # autoreset: by the step after that
    cdef bint may_step_over       # False: stepping an env that is done is an error
    cdef bint in_ranges           # one request may always name neighbours
    cdef bint ranging             # one request of the present call may name neighbours
    cdef Py_ssize_t num_envs
    cdef Py_ssize_t[::1] everyone
    # One entry for each env.
    cdef uint8_t[::1] states
    cdef uint8_t[::1] operations  # the operation of its request
    cdef uint32_t[::1] sequences  # the number of its request
    cdef uint8_t[::1] by_user     # whether its request is a reset by the caller
    cdef uint32_t[::1] flags      # the flags of its answer
    cdef uint32_t[::1] workers
    cdef uint64_t[::1] checked_by # the number of the last check that named it
    cdef uint64_t checks
    # A lockstep request to all envs, one a worker; `spread` writes it to the entries above.
    cdef bint lockstep
    cdef bint popped              # its answers are in `lock_answers`, and are not taken yet
    cdef bint awaits_messages     # some of these answers wait for a message
    cdef uint32_t lock_operation
    cdef uint32_t lock_sequence
    cdef sv_record *lock_answers
    # A circular queue of the ready envs, oldest first, from `head` on.
    cdef Py_ssize_t[::1] queue
    cdef Py_ssize_t head
    cdef readonly Py_ssize_t num_ready
    cdef Py_ssize_t num_singles   # envs in flight that were not asked in lockstep
    cdef uint32_t open_requests   # number of requests without an answer
    cdef uint32_t next_worker     # the worker whose ring is read first
    cdef bint ranges_in_flight    # some requests are for several envs
    cdef list unfinished          # by worker: answers that wait for a message, or for earlier ones
    cdef Py_ssize_t num_unfinished
    cdef readonly list failures   # what envs have raised, before the policy has decided about it
    cdef readonly list raised     # what envs have raised, for the caller
    cdef dict results    # results of commands: env: value
    cdef list unanswered # envs whose command was lost
    cdef dict reports    # env: Report of its answer
    cdef dict after               # env: (fault, whether it breaks the episode), for the next answer
    cdef Py_ssize_t num_broken
    cdef readonly object resets   # int64: how often each env was asked to reset
    cdef readonly list asked_with # (seed, options) of each env's last reset of the user's
    cdef readonly list last_seeds # the last seed that each env was given
    cdef public ReplayLog log     # of a replay; None: there is none
    cdef uint8_t[::1] lost_workers  # whether each worker is dead, without a successor
    cdef int commit(self, const Py_ssize_t[::1] envs, failures) except -1
    cdef int renew(self, uint32_t worker) except -1
    cdef int check_exists(self, Py_ssize_t env) except -1
    cdef int check_none_over(self, const Py_ssize_t[::1] envs) except -1
    cpdef int step_all(self, actions, Py_ssize_t rollout_frame=*) except -1
    cpdef tuple take_all(self, vector_env, bint arrays=*)
    cpdef int wait_ready(self, Py_ssize_t wanted, envs=*, timeout=*) except -1
    cpdef object oldest(self, Py_ssize_t count)
    cpdef tuple take(self, envs, vector_env, bint everyone, bint arrays, among)
    cdef dict write_all_actions(self, actions, uint32_t sequence, bint any_shape)
    cdef dict write_actions(self, const Py_ssize_t[::1] envs, actions, uint32_t sequence,
                            bint any_shape)
    cdef list write_rows(self, const Py_ssize_t[::1] envs, actions, bint any_shape)
    cdef bint encode(self, Py_ssize_t env, action, uint32_t sequence) except -1
    cdef int send(self, dict late, uint32_t sequence) except -1
    cdef dict last_of_broken(self, const Py_ssize_t[::1] envs)
    cdef int note_reset(self, const Py_ssize_t[::1] envs, list arguments, bint repeat) except -1
    cdef int post_all(self, uint32_t operation, uint32_t sequence, Py_ssize_t frame,
                      dict late) except -1
    cdef int post(self, const Py_ssize_t[::1] envs, uint32_t operation, uint32_t sequence,
                  dict late, dict lasts) except -1
    cdef Py_ssize_t together(self, const Py_ssize_t[::1] envs, Py_ssize_t begin)
    cdef int choose_frames(self, const Py_ssize_t[::1] envs, bint by_worker) except -1
    cdef uint32_t mask_of(self, const Py_ssize_t[::1] envs)
    cdef int enter(self, Py_ssize_t env, uint32_t operation, uint32_t sequence) except -1
    cdef int leave(self, Py_ssize_t env, int state) except -1
    cdef int make_ready(self, Py_ssize_t env) except -1
    cdef int spread(self) except -1
    cdef int settle(self, uint32_t worker, sv_record *answer) except -1
    cdef int settle_unfinished(self, uint32_t worker) except -1
    cdef int make_all_ready(self, Py_ssize_t first, Py_ssize_t count,
                            uint32_t sequence) except -1
    cdef object last_of_lost(self, Py_ssize_t env)
    cdef int cut(self, Py_ssize_t env, fault, dict lasts) except -1
    cdef int ask_reset_instead(self, Py_ssize_t env) except -1
    cdef int break_later(self, Py_ssize_t env, fault) except -1
    cdef int answer_lost(self, Py_ssize_t env, fault, dict lasts) except -1
    cdef bint wait(self, Py_ssize_t wanted, timeout, bint requests) except -1
    cdef int pop_all(self) except -1
    cdef int pop(self) except -1
    cdef int postpone_reports(self, list envs) except -1
    cdef tuple results_of(self, object which, const Py_ssize_t[::1] envs, vector_env,
                          bint everyone, bint arrays)

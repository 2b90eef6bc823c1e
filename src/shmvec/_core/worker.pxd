from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmvec._core.codec cimport Codec
from shmvec._core.csrc cimport (
    sv_activity,
    sv_bell,
    sv_completion,
    sv_counters,
    sv_counts,
    sv_record,
    sv_ring,
    sv_timings,
    sv_trace,
    sv_waiter,
)
from shmvec._core.frames cimport Blocks, Results
from shmvec._core.messages cimport Decoder, Encoder
from shmvec._core.replay cimport ReplayLog
from shmvec._core.segment cimport Segment
from shmvec._core.trace cimport Recorder


cdef void add_time_in_wrappers(int64_t ns) noexcept
cpdef int end_forks() except -1


cdef class WorkerLoop:
    cdef Segment segment
    cdef sv_ring requests
    cdef sv_ring completions
    cdef sv_bell *bell
    cdef sv_completion *completion
    cdef sv_waiter waiter
    cdef sv_counts tally          # the counts of this process
    cdef sv_counters *counters    # where these counts are published
    cdef sv_activity *activity    # where it is published what is being done
    cdef sv_timings *timings      # the histograms of its envs
    cdef int64_t made_at          # when this was made, by the clock
    cdef uint64_t made_at_ticks   # the same in ticks, from which the length of a tick follows
    cdef double ns_per_tick
    cdef int64_t began            # when the current request began, by the clock
    cdef uint64_t began_ticks
    cdef int64_t call_began
    cdef uint64_t lap             # when the current step began, in ticks
    cdef Recorder recorder        # the recorder of a trace
    cdef sv_trace *trace          # the ring of this recorder; NULL: no trace
    cdef Encoder messages
    cdef Decoder action_messages  # None: actions lie in a slab
    cdef Codec actions
    cdef Codec finals
    cdef Results home             # frames in the segment
    cdef Results rollouts         # frames after these, in memory of their own; None: there are none
    cdef ReplayLog log            # where steps are recorded for a replay; None: nowhere
    cdef Results results          # the one of both with the frame of the current request
    cdef Py_ssize_t row           # the row of env 0 in this frame
    cdef Blocks blocks            # where observations may be written as well; None: there are none
    cdef Py_ssize_t num_blocks
    cdef Py_ssize_t block_row     # the first one of the current request's block; -1: it names none
    cdef bint observation_messages
    cdef list envs
    cdef list steppers            # what is asked for an env's step: the env, or its compiled chain
    cdef object host
    cdef uint32_t index
    cdef Py_ssize_t first_env
    cdef bint resets_in_step      # autoreset: by the step that ends an episode
    cdef bint resets_in_next_step # autoreset: by the step after that
    cdef bint timed               # there are time limits: operations need their time of beginning
    cdef bint mends               # an env that has raised is reset, not given up
    cdef bytearray over           # envs that their next step resets
    cdef dict retries             # env: (seed, options) for its next reset without arguments
    cdef object operation         # what an env is doing, for messages of errors
    cdef dict given               # env: action that came as a message, not in the slab
    cdef dict undecodable         # env: error of an action that could not be unpickled
    cdef uint32_t sequence
    cdef uint32_t flags
    cdef list late                # [(kind, env, message)]: did not fit the ring
    cdef list failures
    cdef bint alone               # whether this is a process of its own

    cdef bint execute(self, sv_record *request) except -1
    cdef Py_ssize_t first_of(self, const sv_record *request) except -1
    cdef int aim(self, const sv_record *request) except -1
    cdef int answer(self, sv_record *request, object results) except -1
    cdef int begin_laps(self, int64_t now) except -1
    cdef int take_actions(self, const sv_record *request) except -1
    cdef int step_range(self, Py_ssize_t begin, Py_ssize_t end) except -1
    cdef int reset_range(self, Py_ssize_t begin, Py_ssize_t end, object seeds, object options,
                         object mask) except -1
    cdef tuple reset_arguments(self, Py_ssize_t i, object seed, object options, bint explicit)
    cdef int note_step(self, Py_ssize_t i, uint64_t now, int64_t in_reset) except -1
    cdef int64_t reset_took(self, Py_ssize_t i, int64_t *start) except -1
    cdef object carry_out(self, sv_record *request, uint32_t operation, Py_ssize_t begin,
                          Py_ssize_t end)
    cdef int64_t time_of(self, uint64_t ticks) noexcept
    cdef int send_late(self, object results) except -1
    cdef int choose_frame(self, Py_ssize_t frame) except -1
    cdef int receive_actions(self, bint late, Py_ssize_t expected) except -1
    cdef int complete(self, sv_record *request) except -1
    cdef int step_one(self, Py_ssize_t i) except -1
    cdef int end_and_reset(self, Py_ssize_t i, object observation, object info) except -1
    cdef object copied(self, Py_ssize_t env, str what, object value)
    cdef tuple reset_env(self, Py_ssize_t i, object seed, object options, bint explicit)
    cdef int reset_one(self, Py_ssize_t i, object seed, object options, bint explicit) except -1
    cdef int observe(self, Py_ssize_t env, object observation) except -1
    cdef int put_reward(self, Py_ssize_t env, object reward) except -1
    cdef int put_flag(self, Py_ssize_t env, str name, object flags, object flag) except -1
    cdef int inform(self, Py_ssize_t env, uint32_t kind, object info) except -1
    cdef int send(self, Py_ssize_t env, uint32_t kind, object message) except -1
    cdef int fail(self, Py_ssize_t i, error) except -1

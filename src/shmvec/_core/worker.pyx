"""The worker's side of a step: it waits for requests, steps its envs, and answers.

    caller: Ledger -> actions into slabs -> one request a worker into its ring -> bell
    worker: bell -> request -> env.step() -> results into slabs -> one completion into its ring
    caller: Ledger <- completions off the rings; results out of the slabs

caller.pyx is the caller's side. Commands and errors go through a channel, a socket a worker, which
host.py serves. `WorkerLoop` steps one env after the other; `OverlappedLoop` steps several at once.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from posix.unistd cimport write

from shmvec._core cimport csrc as c
from shmvec._core.memory cimport (
    Blocks,
    Codec,
    MessageCodec,
    Results,
    Seeds,
    Segment,
    StepLog,
    pack_words,
)
from shmvec._core.messages cimport Decoder, Encoder
from shmvec._core.process cimport Descriptor, Recorder
from shmvec._core.protocol cimport (
    CLOSE,
    COMMAND,
    FINAL,
    FRAME_SHIFT,
    INFO,
    LATE,
    MESSAGES,
    OBSERVATION,
    OPERATION_MASK,
    RESET,
    SETTINGS,
    STEP,
    LINGER,
    TRACE,
)

import os

import numpy as np

from shmvec._core import messages
from shmvec._pickling import new_copy


# ==== one env after the other =====================================================================
#
# Rare cases (commands, errors, messages too large for the ring) go through the ``host``, an object
# in Python with six methods: ``run_command(sequence) -> results``, ``receive_arguments(sequence) ->
# [(env, action or (seed, options))]``, ``receive_reset_settings(sequence)``, which returns the same
# for automatic resets, ``send_late(sequence, messages, failures, results)``,
# ``receive_trace(sequence)`` and ``misfit_error(env, what, value, error) -> error``.

# For error messages.
cdef dict OPERATION_NAMES = {STEP: "step", RESET: "reset", COMMAND: "call", CLOSE: "close"}
cdef str STEP_RESULT = "the tuple (observation, reward, terminated, truncated, info)"

cdef tuple NO_ARGUMENTS = (None, None)  # a reset without seed and options

cdef int64_t SLICE_NS = 50_000_000  # between two checks whether the parent lives
cdef int64_t DOZE_AFTER_NS = 500_000_000  # a worker without requests for so long dozes

FAULT_POINTS = range(1, c.SV_FAULT_POINTS + 1)

cdef bint forked = False
cdef extern from *:
    """static _Thread_local int64_t time_in_wrappers_ns; /* of this thread's step, so far */"""
    int64_t time_in_wrappers_ns


cdef void add_time_in_wrappers(int64_t ns) noexcept:
    global time_in_wrappers_ns
    time_in_wrappers_ns += ns


def _note_fork():
    global forked
    forked = True


cdef str _describe(result):
    if isinstance(result, tuple):
        return f"{len(result)} values"
    return f"only a {type(result).__name__}" if result is not None else "None"


def watch_forks():
    """Has a fork of this process end when it returns from an env: see ``end_forks``."""
    global forked
    forked = False
    os.register_at_fork(after_in_child=_note_fork)


cpdef int end_forks() except -1:
    """Ends this process if an env has forked it: it has returned from the env, and is no worker."""
    if forked:
        os.write(2, b"shmvec: a process that an env has forked returned from the env; it ends\n")
        os._exit(1)
    return 0


def die_at(int point):
    """Has this process killed when it next reaches a point of the protocol: see csrc/fault.h."""
    c.sv_fault_point = point
    messages.die_at(point)


cdef tuple cpu_times():
    """This process's SV_ON_CORES, as csrc/counters.h lists them, in ns; empty: unknown."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            ran, starved, _ = file.read().split()
            return int(ran), int(starved)
    except (OSError, ValueError):
        return ()


cdef class WorkerLoop:
    """Serves the envs ``first_env`` and up. Each worker has one."""

    cdef Segment segment
    cdef c.sv_ring requests
    cdef c.sv_ring completions
    cdef c.sv_bell *bell
    cdef c.sv_completion *completion
    cdef c.sv_waiter waiter
    cdef c.sv_counts tally             # of this process
    cdef c.sv_counters *counters       # publish the tally
    cdef c.sv_activity *activity       # publishes what is being done
    cdef c.sv_timings *timings         # the histograms of its envs
    cdef int64_t created_at            # by the clock, in ns
    cdef uint64_t created_at_ticks     # the same in ticks, whose length follows from both
    cdef double ns_per_tick
    cdef int64_t request_start         # of the current request, by the clock
    cdef uint64_t request_start_ticks
    cdef int64_t call_start
    cdef uint64_t step_start_ticks
    cdef Recorder recorder             # of a trace; None: there is no trace
    cdef c.sv_trace *trace             # its ring, or NULL
    cdef Encoder messages
    cdef Decoder action_messages       # None: actions lie in a slab
    cdef Codec actions
    cdef Seeds seeds
    cdef Seeds next_seeds              # of automatic resets
    cdef Codec finals                  # final observations; None: they travel inside infos
    cdef Results segment_frames        # the frames in the segment
    cdef Results rollouts              # frames after these, in memory of their own; None: none
    cdef StepLog log                   # of its envs' steps; None: there is none
    cdef Results results               # the one of both that has the frame of the current request
    cdef Py_ssize_t first_row          # the row of env 0 in this frame
    cdef Blocks blocks                 # further memory for observations; None: there is none
    cdef Py_ssize_t num_blocks
    cdef Py_ssize_t first_block_row    # of the current request's block; -1: it names no block
    cdef bint observation_messages     # observations lie in no slab
    cdef list envs
    cdef list steppers                 # what steps each env: the env itself, or its compiled chain
    cdef object host
    cdef uint32_t index
    cdef Py_ssize_t first_env
    cdef bint has_float_rewards        # of all results; each step looks at it
    cdef bint resets_in_step           # autoreset: by the step that ends an episode
    cdef bint resets_in_next_step      # autoreset: by the step after that
    cdef bint has_time_limits          # each operation publishes when it began
    cdef bint resets_failed_envs       # an env that has raised is reset, not given up
    cdef bytearray needs_reset         # envs that their next step resets
    cdef dict message_arguments        # {env: (seed, options) of a reset that came as a message}
    cdef dict retries                  # {index: (seed, options) for its next reset without these}
    cdef dict reset_settings           # {env: (seed that is in no slab, options)}, automatic resets
    cdef object operation              # what an env is doing, for messages of errors
    cdef dict message_actions          # {env: action that came as a message}
    cdef dict action_errors            # {env: error of unpickling its action}
    cdef uint32_t sequence             # of the current request
    cdef uint32_t flags                # of its completion
    cdef list late_messages            # [(kind, env, message)] that did not fit the ring
    cdef list failures
    cdef bint is_process               # whether this worker is a process, not the caller
    cdef Descriptor eventfd            # wakes the caller, too; None: there is none

    def __init__(self, Segment segment, index, first_env, envs, host, slabs, autoreset,
                 has_time_limits=False, resets_failed_envs=False, resets=None, steppers=None):
        cdef uint32_t capacity = segment.plan.sizes.ring_capacity
        if not 0 <= index < segment.num_workers or first_env + len(envs) > segment.num_envs:
            raise ValueError(f"worker {index} with {len(envs)} envs is not in this segment")
        self.segment = segment
        c.sv_ring_attach_consumer(
            &self.requests, c.sv_segment_requests(segment.base, &segment.plan, index), capacity)
        c.sv_ring_attach_producer(
            &self.completions, c.sv_segment_completions(segment.base, &segment.plan, index),
            capacity)
        self.bell = c.sv_segment_bell(segment.base, &segment.plan)
        self.completion = c.sv_segment_completion(segment.base, &segment.plan)
        self.counters = c.sv_segment_counters(segment.base, &segment.plan, index)
        self.activity = &self.counters.activity
        cdef const c.sv_counter_line *line = c.sv_on_cores_lines
        for ns in cpu_times():
            c.sv_counter_set(c.sv_counter_at(self.counters, line), ns)
            line += 1
        c.sv_counter_set(&self.counters.process, os.getpid())
        self.created_at, self.created_at_ticks = c.sv_now_ns(), c.sv_ticks()
        self.timings = c.sv_segment_timings(segment.base, &segment.plan, first_env)
        c.sv_waiter_follow(
            &self.waiter, c.sv_segment_policy(segment.base, &segment.plan), &self.tally)
        self.messages = Encoder(segment, index, first_env, len(envs), True)
        self.segment_frames = slabs.results
        self.has_float_rewards = self.segment_frames.reward_of is not None
        self.actions = slabs.actions
        self.seeds, self.next_seeds = slabs.seeds, slabs.next_seeds
        self.finals = slabs.finals
        self.blocks = slabs.blocks
        self.num_blocks = 0 if self.blocks is None else self.blocks.num_blocks
        self.observation_messages = isinstance(self.segment_frames.observations, MessageCodec)
        if isinstance(self.actions, MessageCodec):
            self.action_messages = Decoder(segment, index, False)
        self.envs = list(envs)
        self.steppers = self.envs if steppers is None else list(steppers)
        self.host = host
        self.index = index
        self.first_env = first_env
        self.resets_in_step = autoreset.in_step
        self.resets_in_next_step = autoreset.in_next_step
        self.has_time_limits = has_time_limits
        self.resets_failed_envs = resets_failed_envs
        self.needs_reset = bytearray(len(envs))
        self.message_arguments = {}
        self.retries = {}
        self.reset_settings = {}
        if resets is not None:  # this worker replaces another one
            self.needs_reset[:] = bytes([self.resets_in_next_step]) * len(envs)
            self.retries = {i: reset for i, reset in enumerate(resets.first) if reset is not None}
            self.reset_settings.update(resets.automatic)
        self.message_actions = {}
        self.action_errors = {}
        self.late_messages = []
        self.failures = []

    def set_rollouts(self, rollouts):
        self.rollouts = rollouts

    def set_log(self, StepLog log):
        """Begins to log the steps of its envs; None: stops it."""
        if log is not None:
            log.attach(self.first_env, len(self.envs))
        self.log = log

    def publish_words(self, words):
        cdef bytes text = pack_words(words)
        c.sv_text_publish(c.sv_segment_text(self.segment.base, &self.segment.plan, self.index),
                          text, len(text))

    def set_eventfd(self, Descriptor descriptor):
        """Wakes the caller by this eventfd, too."""
        self.eventfd = descriptor

    def record(self, Recorder recorder):
        """Starts recording a trace; None stops it."""
        self.trace = self.waiter.trace = NULL if recorder is None else &recorder.trace
        self.recorder = recorder

    def serve(self, parent_alive, doze):
        """Serves requests until CLOSE, and returns True; or until the parent is gone: False.

        After half a second without a request it calls `doze`, which sleeps until the parent sends
        one or is gone. None: it goes on sleeping in slices.
        """
        cdef int found
        cdef int64_t idle_since = c.sv_now_ns()
        cdef c.sv_affinity affinity
        affinity.count = 0
        self.is_process = True
        while True:
            with nogil:
                found = c.sv_wait_request(&self.waiter, self.bell, &self.requests, self.index,
                                          SLICE_NS)
            if found == c.SV_WAIT_CORRUPT:
                raise RuntimeError("the segment is damaged: the request ring makes no sense")
            if found == c.SV_WAIT_SLICE:
                if not parent_alive():
                    return False
                # The parent may be waiting because of a damaged tail.
                c.sv_ring_announce(&self.completions)
                if doze is not None and c.sv_now_ns() - idle_since >= DOZE_AFTER_NS:
                    c.sv_bell_doze(self.bell)
                    if self.waiter.homing:  # like a park: see wait.h
                        c.sv_affinity_narrow(&affinity, self.index)
                    try:
                        if c.sv_ring_peek(&self.requests) == 0:
                            doze()
                    finally:
                        if self.waiter.homing:
                            c.sv_affinity_widen(&affinity)
                        c.sv_bell_awake(self.bell)
            else:
                if not self.serve_pending():
                    return True
                idle_since = c.sv_now_ns()

    def current_operation(self):
        """What is being done: (env, "step", "reset" or "call", seconds), or None."""
        cdef int64_t elapsed
        cdef uint64_t busy = c.sv_busy_for(self.activity, c.sv_now_ns(), &elapsed)
        if busy == 0:
            return None
        return c.sv_busy_env(busy), c.sv_busy_name(busy).decode(), 1e-9 * elapsed

    def begin_call(self, uint32_t env):
        self.call_start = c.sv_now_ns()
        c.sv_busy_begin(self.activity, c.sv_busy(env, c.SV_IN_CALL), self.call_start)

    def end_call(self, uint32_t env):
        if self.trace is not NULL:
            c.sv_trace_add(self.trace, c.SV_TRACE_CALL, env, self.call_start, c.sv_now_ns())

    def serve_pending(self):
        """Serves the requests in the ring; returns False after CLOSE."""
        cdef c.sv_record request
        cdef uint32_t operation
        cdef Py_ssize_t begin
        cdef int found
        while True:
            found = c.sv_ring_try_pop(&self.requests, &request)
            if found == c.SV_RING_CORRUPT:
                raise RuntimeError("the segment is damaged: the request ring makes no sense")
            if found != c.SV_RING_YES:
                return True
            c.SV_FAULT(1)
            begin = self.first_index(&request)
            operation = request.operation & OPERATION_MASK
            if operation == CLOSE:
                return False
            if operation == TRACE:
                self.host.receive_trace(request.sequence)
            elif operation == SETTINGS:
                self.take_settings(request.sequence)
            else:
                self.execute(&request, operation, begin, begin + request.count)

    cdef int execute(self, c.sv_record *request, uint32_t operation, Py_ssize_t begin,
                     Py_ssize_t end) except -1:
        """Carries out a request and answers it."""
        cdef object results
        cdef Py_ssize_t i
        self.prepare_results(request)
        try:
            results = self.carry_out(request, operation, begin, end)
        except BaseException as error:
            if self.is_process:
                raise
            # Envs in the caller: the error is the answer, because Ctrl-C is for the program.
            results = None
            self.late_messages = []
            doing = OPERATION_NAMES.get(operation, "call")
            self.failures = [(self.first_env + i, doing, error) for i in range(begin, end)]
        return self.answer(request, results)

    cdef Py_ssize_t first_index(self, const c.sv_record *request) except -1:
        """The index of a request's first env among this worker's."""
        cdef Py_ssize_t begin = <Py_ssize_t>request.first - self.first_env
        if begin < 0 or begin + <Py_ssize_t>request.count > len(self.envs):
            raise RuntimeError("the segment is damaged: a request names envs of another worker")
        return begin

    cdef int prepare_results(self, const c.sv_record *request) except -1:
        if self.trace is not NULL and not c.sv_trace_is_on(self.trace):
            self.record(None)
        self.select_frame(request.operation >> FRAME_SHIFT)
        self.sequence = request.sequence
        self.flags = 0
        return 0

    cdef int answer(self, c.sv_record *request, object results) except -1:
        """Answers a request, whose results are in the slabs, or are those of a command."""
        if self.late_messages or self.failures or results is not None:
            self.flags |= LATE
        c.sv_busy_begin(self.activity, 0, 0)
        self.complete(request)
        c.SV_FAULT(9)
        # After the completion: so the parent knows of it sooner, and it reads the channel anyway.
        if self.flags & LATE:
            self.send_late(results)
        return 0

    cdef object carry_out(self, c.sv_record *request, uint32_t operation, Py_ssize_t begin,
                          Py_ssize_t end):
        """Carries out a request; returns the results of a command, or None."""
        global time_in_wrappers_ns
        cdef object results = None
        cdef int64_t start
        cdef int64_t reset_ns
        cdef int64_t wrappers_ns = time_in_wrappers_ns
        if operation == STEP:
            self.take_actions(request)
            start, reset_ns = c.sv_now_ns(), self.tally.reset_ns
            self.start_clock(start)
            self.step_range(begin, end)
            self.tally.step_ns += c.sv_now_ns() - start - (self.tally.reset_ns - reset_ns)
            self.tally.wrappers_ns += time_in_wrappers_ns - wrappers_ns
            time_in_wrappers_ns = wrappers_ns  # an env that holds a vector env counts its own alone
        elif operation == RESET:
            self.take_resets(request)
            self.reset_range(begin, end)
        elif operation == COMMAND:
            # Busy from here to the answer: its message and its results may take long, too.
            c.sv_busy_begin(self.activity, c.sv_busy(self.first_env, c.SV_IN_CALL), c.sv_now_ns())
            results = self.host.run_command(self.sequence)
        else:
            raise RuntimeError(f"the segment is damaged: operation {operation}")
        return results

    cdef int take_actions(self, const c.sv_record *request) except -1:
        """Takes the actions of a step that are messages."""
        if self.action_messages is not None:
            self.receive_actions(request.operation & LATE, request.count)
        elif request.operation & LATE:  # actions of another shape, which do not fit the slab
            self.message_actions = dict(self.host.receive_arguments(self.sequence))
            self.tally.late += len(self.message_actions)
        elif self.message_actions:
            self.message_actions.clear()
        return 0

    cdef int take_resets(self, const c.sv_record *request) except -1:
        """Takes the seeds and options that are messages, of this reset and of further ones."""
        if request.operation & LATE:
            self.message_arguments.update(self.host.receive_arguments(request.sequence))
        return 0

    cdef int take_settings(self, uint32_t sequence) except -1:
        """Takes the settings of automatic resets that are messages."""
        try:
            self.reset_settings.update(self.host.receive_reset_settings(sequence))
        except BaseException:
            if not self.is_process:  # again: Ctrl-C was for the program
                self.reset_settings.update(self.host.receive_reset_settings(sequence))
            raise
        return 0

    cdef int start_clock(self, int64_t now) except -1:
        """Notes when a request begins, and measures the length of a tick over all time so far."""
        self.request_start, self.request_start_ticks = now, c.sv_ticks()
        self.step_start_ticks = self.request_start_ticks
        if self.request_start_ticks > self.created_at_ticks:
            self.ns_per_tick = (
                <double>(now - self.created_at)
                / <double>(self.request_start_ticks - self.created_at_ticks))
        return 0

    cdef int64_t time_of(self, uint64_t ticks) noexcept:
        """The clock's time, in ns, of a count of ticks in the current request."""
        return self.request_start + <int64_t>(
            self.ns_per_tick * <double><int64_t>(ticks - self.request_start_ticks))

    cdef int send_late(self, object results) except -1:
        late_messages, self.late_messages = self.late_messages, []
        failures, self.failures = self.failures, []
        try:
            self.host.send_late(self.sequence, late_messages, failures, results)
        except BaseException:
            # Again: Ctrl-C was for the program, and the completion has announced the message.
            if not self.is_process:
                self.host.send_late(self.sequence, late_messages, failures, results)
            raise
        return 0

    cdef int select_frame(self, Py_ssize_t frame) except -1:
        cdef Py_ssize_t block = frame // self.segment_frames.num_frames - 1
        self.results, self.first_block_row = self.segment_frames, -1
        if 0 <= block < self.num_blocks:
            self.first_block_row = block * self.segment_frames.num_envs
            frame -= (1 + block) * self.segment_frames.num_frames
        elif block >= 0:
            frame -= (1 + self.num_blocks) * self.segment_frames.num_frames
            self.results = self.rollouts
            if self.rollouts is None or frame >= self.rollouts.num_frames:
                raise RuntimeError("the segment is damaged: a request names no frame")
        self.first_row = frame * self.segment_frames.num_envs
        return 0

    cdef int receive_actions(self, bint late, Py_ssize_t expected) except -1:
        """Takes all actions, from the ring and, if they did not fit that, from the channel."""
        cdef Decoder decoder = self.action_messages
        self.action_errors.clear()
        while decoder.next(self.sequence):
            expected -= 1
            try:
                self.actions.write(decoder.env, decoder.decode()[""])
            except Exception as error:  # unpickling runs the user's code
                self.action_errors[decoder.env] = error
            finally:
                decoder.release()
        if late:
            for env, action in self.host.receive_arguments(self.sequence):
                self.actions.write(env, action)
                self.tally.late += 1
                expected -= 1
        if expected != 0:
            raise RuntimeError("the segment is damaged: there is not one action for each env")
        return 0

    cdef int complete(self, c.sv_record *request) except -1:
        cdef c.sv_record answer = request[0]
        cdef uint64_t one = 1
        answer.operation = self.flags
        c.SV_FAULT(5)
        if c.sv_ring_try_push(&self.completions, &answer) != c.SV_RING_YES:
            raise RuntimeError("the segment is damaged: the completion ring is full")
        c.SV_FAULT(7)
        self.tally.requests += 1
        c.sv_counters_publish(self.counters, &self.tally)
        if c.sv_completion_add(self.completion):
            self.tally.wakes += 1
            if self.eventfd is not None:
                write(self.eventfd.number, &one, sizeof(one))
        self.waiter.answers_left = -1
        if request.operation & LINGER:
            self.waiter.answers_left = c.sv_completion_left(self.completion)
        return 0

    cdef int step_range(self, Py_ssize_t begin, Py_ssize_t end) except -1:
        cdef Py_ssize_t i
        cdef int64_t steps
        cdef int64_t reset_ns
        cdef uint64_t now
        for i in range(begin, end):
            steps, reset_ns = self.tally.steps, self.tally.reset_ns
            try:
                if self.needs_reset[i]:
                    self.reset_one(i, None, None, False)
                else:
                    self.operation = "step"
                    self.step_one(i)
            except BaseException as error:
                self.record_failure(i, error)
            if forked:
                end_forks()
            # One reading of the clock an env: the next step begins when this one ends.
            now = c.sv_ticks()
            if self.tally.steps != steps:
                self.record_step_time(i, now, self.tally.reset_ns - reset_ns)
            self.step_start_ticks = now
            c.SV_FAULT(2)
        return 0

    cdef int record_step_time(self, Py_ssize_t i, uint64_t now, int64_t in_reset) except -1:
        """Records how long the step that ends now has taken, without the reset in it."""
        c.sv_timing_add(
            &self.timings[i].step,
            <int64_t>(self.ns_per_tick * <double><int64_t>(now - self.step_start_ticks)) - in_reset)
        if self.trace is not NULL:
            c.sv_trace_add(self.trace, c.SV_TRACE_STEP, <uint32_t>(self.first_env + i),
                           self.time_of(self.step_start_ticks), self.time_of(now))
        return 0

    cdef int reset_range(self, Py_ssize_t begin, Py_ssize_t end) except -1:
        cdef Py_ssize_t i
        for i in range(begin, end):
            try:
                if self.seeds.is_automatic(self.first_env + i):
                    self.reset_one(i, None, None, False)
                else:
                    seed, options = self.requested_arguments(i)
                    self.reset_one(i, seed, options, True)
            except BaseException as error:
                self.record_failure(i, error)
            if forked:
                end_forks()
        return 0

    cpdef object action_of(self, Py_ssize_t env):
        return self.message_actions[env] if self.message_actions else self.actions.read(env)

    cdef int step_one(self, Py_ssize_t i) except -1:
        cdef Py_ssize_t env = self.first_env + i
        cdef Py_ssize_t row = self.first_row + env
        cdef Results results = self.results
        if self.action_errors and env in self.action_errors:
            raise self.action_errors.pop(env)
        self.tally.steps += 1
        c.sv_busy_begin(
            self.activity, c.sv_busy(env, c.SV_IN_STEP),
            c.sv_now_ns() if self.has_time_limits else self.time_of(self.step_start_ticks))
        result = self.steppers[i].step(self.action_of(env))
        if forked:
            end_forks()
        if type(result) is not tuple:
            if result is None:
                raise TypeError(f"env {env}: step() returned None; expected {STEP_RESULT}")
            result = tuple(result)
        if len(<tuple>result) != 5:
            raise ValueError(
                f"env {env}: step() returned {len(<tuple>result)} values; expected {STEP_RESULT}")
        observation, reward, terminated, truncated, info = <tuple>result
        if not self.resets_in_step:
            self.write_observation(env, observation)
        c.SV_FAULT(3)
        if self.has_float_rewards and isinstance(reward, float):  # np.float64 is one
            results.reward_of[row] = <double>reward
        else:
            self.write_reward(env, reward)
        if terminated is False:
            results.terminated_of[row] = 0
        else:
            self.write_flag(env, "terminated", results.terminations, terminated)
        if truncated is False:
            results.truncated_of[row] = 0
        else:
            self.write_flag(env, "truncated", results.truncations, truncated)
        cdef bint over = results.terminated_of[row] | results.truncated_of[row]
        if self.resets_in_step:
            if over:
                if self.log is not None:  # before the reset: envs may reuse their arrays
                    self.log.put_step(env, self.action_of(env), observation, results, row)
                self.end_and_reset(i, observation, info)
                return 0
            self.write_observation(env, observation)
        elif self.resets_in_next_step:
            self.needs_reset[i] = over
        self.send_info(env, INFO, info)
        if self.log is not None:
            self.log.put_step(env, self.action_of(env), observation, results, row)
            self.log.publish(env, 1)
        return 0

    cdef int end_and_reset(self, Py_ssize_t i, object observation, object info) except -1:
        """Keeps the final observation and info, then resets the env."""
        cdef Py_ssize_t env = self.first_env + i
        cdef bint is_in_slab = self.finals is not None and self.finals.keep(env, observation)
        # Copies, because an env may reuse its arrays in reset().
        cdef object final_obs = None
        if not is_in_slab:
            final_obs = self.copy_value(env, "observation", observation)
        cdef object final_info = self.copy_value(env, "info", info)
        observation, info = self.reset_env(i, None, None, False)
        self.write_observation(env, observation)
        if not isinstance(info, dict):
            self.send_info(env, INFO, info)  # it raises
        elif is_in_slab and "final_obs" not in info:
            self.send_info(env, FINAL, {"final_info": final_info, **info})
        else:
            self.send_info(env, INFO, {"final_obs": final_obs, "final_info": final_info, **info})
        if self.log is not None:
            self.log.put_start(env, 1, observation)
            self.log.publish(env, 2)
        return self.next_seeds.mark_used(env)

    cdef object copy_value(self, Py_ssize_t env, str what, object value):
        try:
            return messages.deep_copy(value)
        except Exception as error:
            raise messages.unsendable_error(env, what, value, error) from error

    cdef tuple requested_arguments(self, Py_ssize_t i):
        """The seed and options of the reset that the request asks for."""
        cdef Py_ssize_t env = self.first_env + i
        cdef tuple arguments = self.seeds.get(env)
        if arguments is None:
            arguments = self.message_arguments.get(env)
            if arguments is None:
                raise RuntimeError(f"the segment is damaged: env {env} was sent no seed")
        return arguments

    cdef dict reset_arguments(self, Py_ssize_t i, object seed, object options, bint explicit):
        """The arguments of a reset; None: it has none.

        Those of an automatic reset are its settings. What a reset lacks comes from the lost or
        failed reset that it repeats.
        """
        cdef dict arguments
        if explicit:
            arguments = {"seed": seed, "options": options}
        else:
            arguments = self.automatic_arguments(i)
        if self.retries and i in self.retries:
            arguments = arguments or {}
            for name, lost in zip(("seed", "options"), self.retries[i]):
                if lost is not None and arguments.get(name) is None:
                    arguments[name] = lost
        return arguments

    cdef dict automatic_arguments(self, Py_ssize_t i):
        """The arguments that were set for an automatic reset; None: there are none."""
        cdef Py_ssize_t env = self.first_env + i
        cdef dict arguments = None
        cdef tuple in_slab
        message_seed, options = (
            self.reset_settings.get(env, NO_ARGUMENTS) if self.reset_settings else NO_ARGUMENTS)
        if self.next_seeds.is_unused(env):
            in_slab = self.next_seeds.get(env)
            arguments = {"seed": message_seed if in_slab is None else in_slab[0]}
        if options is not None:
            arguments = arguments or {}
            arguments["options"] = options
        return arguments

    cdef int64_t record_reset_time(self, Py_ssize_t i, int64_t *start) except -1:
        """Counts the reset that began at `start`; returns how long it has taken."""
        cdef int64_t elapsed = c.sv_now_ns() - start[0]
        self.tally.reset_ns += elapsed
        return elapsed

    cdef tuple reset_env(self, Py_ssize_t i, object seed, object options, bint explicit):
        """Resets an env; returns (observation, info)."""
        cdef int64_t start = c.sv_now_ns()
        cdef int64_t elapsed
        cdef dict arguments = None
        self.operation = "reset"
        self.tally.resets += 1
        if self.retries or not explicit and (
                self.reset_settings or self.next_seeds.is_unused(self.first_env + i)):
            arguments = self.reset_arguments(i, seed, options, explicit)
        retry = self.retries.pop(i, None) if self.retries else None
        c.sv_busy_begin(self.activity, c.sv_busy(self.first_env + i, c.SV_IN_RESET), start)
        try:
            if arguments is not None:
                result = self.envs[i].reset(
                    **{name: new_copy(value) for name, value in arguments.items()})
            elif explicit:
                result = self.envs[i].reset(seed=seed, options=new_copy(options))
            else:
                result = self.envs[i].reset()
        except BaseException:
            if self.resets_failed_envs and explicit:
                self.retries[i] = (
                    (seed, options) if arguments is None
                    else (arguments["seed"], arguments["options"]))
            elif self.resets_failed_envs and retry is not None:
                self.retries[i] = retry
            raise
        finally:
            if forked:
                end_forks()
            elapsed = self.record_reset_time(i, &start)
            c.sv_timing_add(&self.timings[i].reset, elapsed)
            if self.trace is not NULL:
                c.sv_trace_add(self.trace, c.SV_TRACE_RESET, <uint32_t>(self.first_env + i), start,
                               start + elapsed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                f"env {self.first_env + i}: reset() returned {_describe(result)}; expected the "
                "tuple (observation, info)"
            )
        return result

    cdef int reset_one(self, Py_ssize_t i, object seed, object options,
                       bint explicit) except -1:
        cdef Py_ssize_t env = self.first_env + i
        cdef Py_ssize_t row = self.first_row + env
        observation, info = self.reset_env(i, seed, options, explicit)
        self.write_observation(env, observation)
        self.results.clear_reward(row)
        self.results.terminated_of[row] = 0
        self.results.truncated_of[row] = 0
        self.needs_reset[i] = 0
        self.send_info(env, INFO, info)
        if self.log is not None:
            self.log.put_start(env, 0, observation)
            self.log.publish(env, 1)
        return 0 if explicit else self.next_seeds.mark_used(env)

    cdef int write_observation(self, Py_ssize_t env, object observation) except -1:
        """Writes an observation to its slab, or sends it as a message."""
        if self.observation_messages:
            self.send_message(env, OBSERVATION, {"": observation}, "observation", observation)
        else:
            try:
                self.results.observations.write(self.first_row + env, observation)
            except Exception as error:
                raise self.host.misfit_error(env, "observation", observation, error) from error
            if self.first_block_row >= 0:
                self.blocks.observations.copy_row(
                    self.results.observations, self.first_row + env, self.first_block_row + env)
        return 0

    cdef int write_reward(self, Py_ssize_t env, object reward) except -1:
        """Writes a reward of another type than float."""
        if not self.has_float_rewards:
            try:
                return self.results.reward_rows.write(self.first_row + env, reward)
            except Exception as error:
                raise self.host.misfit_error(env, "reward", reward, error) from error
        try:
            if reward is None:  # NumPy would make it nan
                raise TypeError("it is None")
            if isinstance(reward, np.ndarray) and reward.size == 1 and reward.dtype.kind in "biuf":
                reward = reward.reshape(())
            self.results.rewards[self.first_row + env] = reward
        except (TypeError, ValueError, OverflowError) as error:
            also = ""
            if isinstance(reward, (np.ndarray, list, tuple)):
                also = ", or the env must have a reward_space"
            raise type(error)(
                f"env {env}: the reward is {reward!r}; it must be a number{also} ({error})"
            ) from error
        return 0

    cdef int write_flag(self, Py_ssize_t env, str name, object flags, object flag) except -1:
        """Writes a flag that is not False. NumPy converts it; None and text are refused."""
        if flag is None or isinstance(flag, (str, bytes)):
            raise TypeError(f"env {env}: {name} is {flag!r}; it must be a bool")
        flags[self.first_row + env] = flag
        return 0

    cdef int send_info(self, Py_ssize_t env, uint32_t kind, object info) except -1:
        if type(info) is not dict:
            if not isinstance(info, dict):
                raise TypeError(f"env {env}: the info must be a dict, got {type(info).__name__}: "
                                f"{info!r}. Return {{}} where there is nothing to say")
        elif len(<dict>info) == 0:
            return 0
        return self.send_message(env, kind, info, "info", info)

    cdef int send_message(self, Py_ssize_t env, uint32_t kind, object message, str what,
                  object value) except -1:
        """Sends a message, by the ring or later by the host; errors call its `value` `what`."""
        cdef bint sent
        try:
            sent = self.messages.encode(env, kind, message, self.sequence)
        except Exception as error:
            raise messages.unsendable_error(env, what, value, error) from error
        if sent:
            self.flags |= MESSAGES
        else:
            if kind == FINAL:
                message = {"final_obs": self.finals.read(env), **message}
            self.late_messages.append((kind, env, message))
            self.tally.late += 1
        return 0

    cdef int record_failure(self, Py_ssize_t i, error) except -1:
        cdef int64_t now
        self.failures.append((self.first_env + i, self.operation, error))
        if self.log is not None:  # the env may have made a part of the step
            self.log.interrupt(self.first_env + i)
        if self.trace is not NULL:
            now = c.sv_now_ns()
            c.sv_trace_add(self.trace, c.SV_TRACE_ERROR, <uint32_t>(self.first_env + i), now, now)
        if self.resets_failed_envs and self.resets_in_next_step:
            self.needs_reset[i] = True
        return 0


# ==== several envs at once ========================================================================
#
# The envs run in a thread each, or as coroutines. This loop takes requests, has envs begin
# (``executor.start``), and notes which have ended (``finish_env``). When all envs of a request have
# ended, it serves the request like any worker (``WorkerLoop``), with replays in place of the envs:
# a replay's ``step`` and ``reset`` return, or raise, at once what the env's have. So results, their
# order and their errors are those of a worker that steps its envs one by one, and only the loop
# writes to rings and slabs. Requests are answered in the order in which they end. In place of
# ``run_command`` it calls the host's ``receive_command(sequence) -> call`` and
# ``pack_results(call, outcome of an env)``.

cdef dict OPERATION_CODES = {"step": c.SV_IN_STEP, "reset": c.SV_IN_RESET, "call": c.SV_IN_CALL}


cdef class Request:
    """A request that is not answered yet."""

    cdef c.sv_record record
    cdef Py_ssize_t pending    # envs that have not ended
    cdef dict message_actions  # of a step, as in WorkerLoop
    cdef dict action_errors    # likewise
    cdef object call           # a command for each env; else None
    cdef list outcomes         # of the command, by env: (value, error), or None


cdef class OverlappedLoop(WorkerLoop):
    """Serves the envs ``first_env`` and up, several at once. Each worker has one."""

    cdef object executor
    cdef list env_requests              # by env: the Request that it is busy with, or None
    cdef c.sv_activity replay_activity  # not published: envs have activities of their own
    cdef readonly Py_ssize_t num_busy   # envs that are busy
    cdef int64_t uncounted_since        # when the time began that is not counted yet
    cdef int64_t env_step_ns            # the sum of all envs' steps since then
    cdef int64_t env_reset_ns           # the sum of all envs' resets since then

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.env_requests = [None] * len(self.envs)
        self.activity = &self.replay_activity
        self.is_process = True
        c.sv_counter_set(&self.counters.overlaps, 1)
        for i in range(len(self.envs)):  # a predecessor may have died in env.step()
            self.end_env(i)

    def set_executor(self, executor):
        """Sets the executor, whose `start(i, operation, argument)` has env i of the worker begin.

        It begins "step" with an action, "reset" with a dict of arguments, or "call" with a command.
        """
        self.executor = executor

    # ---- called by the executor --------------------------------------------------------------

    def announce_sleep(self):
        """Announces that this worker sleeps on its alarm; False: it must serve requests first."""
        c.sv_bell_doze(self.bell)
        return c.sv_ring_peek(&self.requests) == 0

    def end_sleep(self):
        """Announces that it is awake, also where `announce_sleep` returned False."""
        c.sv_bell_awake(self.bell)
        c.sv_ring_announce(&self.completions)  # the parent may be waiting because of a damaged tail

    def begin_env(self, Py_ssize_t i, str doing, int64_t since):
        """Publishes what env i does, and since when, by the monotonic clock in ns."""
        c.sv_busy_begin(
            &self.timings[i].activity, c.sv_busy(self.first_env + i, OPERATION_CODES[doing]), since)

    def next_reset_arguments(self, Py_ssize_t i):
        """The arguments of the automatic reset of env i that begins now."""
        return self.reset_arguments(i, None, None, False) or {}

    def end_env(self, Py_ssize_t i):
        """Publishes that env i is no longer busy."""
        c.sv_busy_begin(&self.timings[i].activity, 0, 0)

    def finish_env(self, Py_ssize_t i, outcome=None):
        """Notes that env i has ended what its request asks; answers the request after its last env.

        Args:
            i: The env's index among this worker's.
            outcome: (value, error) of a call.
        """
        cdef Request request = self.env_requests[i]
        self.env_requests[i] = None
        self.num_busy -= 1
        if request.call is not None:
            request.outcomes[i] = outcome
        self.count_down(request)

    # ---- requests ----------------------------------------------------------------------------

    cdef int execute(self, c.sv_record *record, uint32_t operation, Py_ssize_t begin,
                     Py_ssize_t end) except -1:
        """Has the envs of a request begin."""
        cdef Py_ssize_t i
        cdef Request request = Request()
        request.record = record[0]
        self.sequence = record.sequence
        if operation == STEP:
            self.take_actions(record)
            request.message_actions = dict(self.message_actions)
            request.action_errors = dict(self.action_errors)
        elif operation == COMMAND:
            if self.num_busy == 0:
                c.sv_busy_begin(&self.counters.activity, c.sv_busy(self.first_env, c.SV_IN_CALL),
                              c.sv_now_ns())
            request.call = self.host.receive_command(record.sequence)
            request.outcomes = [None] * len(self.envs)
        elif operation == RESET:
            self.take_resets(record)
        else:
            raise RuntimeError(f"the segment is damaged: operation {operation}")
        request.pending = 1  # until all have begun
        for i in range(begin, end):
            if request.call is not None:
                if request.call.includes(self.first_env + i):
                    self.start(i, request, "call", request.call)
            elif operation == RESET:
                self.start_reset(i, request, not self.seeds.is_automatic(self.first_env + i))
            elif self.first_env + i in request.action_errors and not self.needs_reset[i]:
                pass  # its replay is not stepped, either
            elif self.needs_reset[i]:
                self.start_reset(i, request, False)
            else:
                self.start(i, request, "step", self.action_of(self.first_env + i))
        return self.count_down(request)

    cdef int start_reset(self, Py_ssize_t i, Request request, bint explicit) except -1:
        seed, options = self.requested_arguments(i) if explicit else NO_ARGUMENTS
        self.start(i, request, "reset", self.reset_arguments(i, seed, options, explicit) or {})
        return 0

    cdef int start(self, Py_ssize_t i, Request request, str operation, argument) except -1:
        if self.env_requests[i] is not None:
            raise RuntimeError("the segment is damaged: a request names an env that is busy")
        self.env_requests[i] = request
        request.pending += 1
        if self.num_busy == 0:
            self.uncounted_since = c.sv_now_ns()
            c.sv_busy_begin(&self.counters.activity, c.sv_busy(self.first_env, c.SV_IN_SEVERAL),
                            self.uncounted_since)
        self.num_busy += 1
        self.executor.start(i, operation, argument)
        return 0

    cdef int count_down(self, Request request) except -1:
        """Counts the end of an env of a request, and answers that after its last env."""
        request.pending -= 1
        if request.pending == 0:
            self.answer_request(request)
        if self.num_busy == 0:
            c.sv_busy_begin(&self.counters.activity, 0, 0)
        return 0

    cdef int answer_request(self, Request request) except -1:
        cdef c.sv_record *record = &request.record
        cdef Py_ssize_t begin = self.first_index(record)
        cdef Py_ssize_t end = begin + record.count
        cdef object results = None
        self.prepare_results(record)
        if request.call is not None:
            results = self.host.pack_results(request.call, request.outcomes.__getitem__)
        elif record.operation & OPERATION_MASK == STEP:
            self.message_actions = request.message_actions
            self.action_errors = request.action_errors
            self.start_clock(c.sv_now_ns())
            self.step_range(begin, end)
        else:
            self.reset_range(begin, end)
        self.count_time()
        self.answer(record, results)
        return 0

    cdef int count_time(self) except -1:
        """Counts the time for which envs were busy, in the proportion of their steps and resets."""
        cdef int64_t now = c.sv_now_ns()
        cdef int64_t total = self.env_step_ns + self.env_reset_ns
        if total > 0:
            self.tally.step_ns += <int64_t>(
                <double>(now - self.uncounted_since) * self.env_step_ns / total)
            self.tally.reset_ns += <int64_t>(
                <double>(now - self.uncounted_since) * self.env_reset_ns / total)
            self.uncounted_since = now
        self.env_step_ns = self.env_reset_ns = 0
        return 0

    # ---- times of the envs, not of their replays ---------------------------------------------

    cdef int record_step_time(self, Py_ssize_t i, uint64_t now, int64_t in_reset) except -1:
        cdef int64_t began
        cdef int64_t ended
        began, ended = self.steppers[i].span
        c.sv_timing_add(&self.timings[i].step, ended - began)
        self.env_step_ns += ended - began
        if self.trace is not NULL:
            c.sv_trace_add(
                self.trace, c.SV_TRACE_STEP, <uint32_t>(self.first_env + i), began, ended)
        return 0

    cdef int64_t record_reset_time(self, Py_ssize_t i, int64_t *start) except -1:
        cdef int64_t began
        cdef int64_t ended
        began, ended = self.envs[i].reset_span
        start[0] = began
        self.env_reset_ns += ended - began
        return ended - began

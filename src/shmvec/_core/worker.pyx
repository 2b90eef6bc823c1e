"""A worker's side of the pipeline: it waits for a request, steps the envs of its range, answers.

`WorkerLoop` steps one env after the other; `OverlappedLoop` has several in `step` at once.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmvec._core cimport csrc as c
from shmvec._core.memory cimport (
    Blocks,
    Codec,
    MessageCodec,
    Results,
    Seeds,
    Segment,
    StepLog,
    packed_words,
)
from shmvec._core.messages cimport Decoder, Encoder
from shmvec._core.process cimport Recorder
from shmvec._core.protocol cimport (
    CLOSE,
    COMMAND,
    FINAL,
    FRAME,
    INFO,
    LATE,
    MESSAGES,
    OBSERVATION,
    OPERATION,
    RESET,
    STEP,
    TOGETHER,
    TRACE,
)

import os

import numpy as np

from shmvec._core import messages
from shmvec._pickling import copied_from


# ==== one env after the other =====================================================================
#
# Rare cases (commands, errors, messages too large for the ring) go through the ``host``, Python
# code with five methods: ``command(sequence) -> results``, ``late_arguments(sequence) ->
# [(env, action or (seed, options))]``, ``send_late(sequence, messages, failures, results)``,
# ``trace(sequence)`` and ``misfit(env, observation, error) -> error``.

# What an env was doing, for error messages.
OPERATIONS = {STEP: "step", RESET: "reset", COMMAND: "call", CLOSE: "close"}

cdef str STEPPED = "the tuple (observation, reward, terminated, truncated, info)"

cdef int64_t SLICE_NS = 50_000_000  # between two checks whether the parent lives
cdef int64_t DOZE_AFTER_NS = 500_000_000  # a worker without requests for so long dozes


FAULT_POINTS = range(1, c.SV_FAULT_POINTS + 1)

cdef bint forked = False
cdef extern from *:
    """static _Thread_local int64_t in_wrappers_ns; /* of this thread's step, so far */"""
    int64_t in_wrappers_ns


cdef void add_time_in_wrappers(int64_t ns) noexcept:
    global in_wrappers_ns
    in_wrappers_ns += ns


def _note_fork():
    global forked
    forked = True


cdef str _described(result):
    """What a reset has returned, as text."""
    if isinstance(result, tuple):
        return f"{len(result)} values"
    return f"only a {type(result).__name__}" if result is not None else "None"


def watch_forks():
    """Has forks of this process end when they return from an env: see ``end_forks``."""
    global forked
    forked = False
    os.register_at_fork(after_in_child=_note_fork)


cpdef int end_forks() except -1:
    """Ends a process that an env has forked and that returns from the env: it is no worker."""
    if forked:
        os.write(2, b"shmvec: a process that an env has forked returned from the env; it ends\n")
        os._exit(1)
    return 0


def die_at(int point):
    """Has this process killed when it next reaches a point of the protocol: see csrc/fault.h."""
    c.sv_fault_point = point
    messages.die_at(point)


cdef tuple spent():
    """This process's times in ns, as in SV_ON_CORES of csrc/counters.h; empty if unknown."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            ran, starved, _ = file.read().split()
            return int(ran), int(starved)
    except (OSError, ValueError):
        return ()


cdef class WorkerLoop:
    """Serves the envs ``first_env`` and up.  One instance a worker process."""

    cdef Segment segment
    cdef c.sv_ring requests
    cdef c.sv_ring completions
    cdef c.sv_bell *bell
    cdef c.sv_completion *completion
    cdef c.sv_waiter waiter
    cdef c.sv_counts tally        # the counts of this process
    cdef c.sv_counters *counters  # where these counts are published
    cdef c.sv_activity *activity  # where it is published what is being done
    cdef c.sv_timings *timings    # the histograms of its envs
    cdef int64_t made_at          # when this was made, by the clock
    cdef uint64_t made_at_ticks   # the same in ticks, from which the length of a tick follows
    cdef double ns_per_tick
    cdef int64_t began            # when the current request began, by the clock
    cdef uint64_t began_ticks
    cdef int64_t call_began
    cdef uint64_t lap             # when the current step began, in ticks
    cdef Recorder recorder        # the recorder of a trace
    cdef c.sv_trace *trace        # the ring of this recorder; NULL: no trace
    cdef Encoder messages
    cdef Decoder action_messages  # None: actions lie in a slab
    cdef Codec actions
    cdef Seeds seeds
    cdef Codec finals
    cdef Results home             # frames in the segment
    cdef Results rollouts         # frames after these, in memory of their own; None: there are none
    cdef StepLog log              # of its envs' steps; None: there is none
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
    cdef dict resets              # env: (seed, options) of its last reset that a message came for
    cdef dict retries             # env: (seed, options) for its next reset without arguments
    cdef object operation         # what an env is doing, for messages of errors
    cdef dict given               # env: action that came as a message, not in the slab
    cdef dict undecodable         # env: error of an action that could not be unpickled
    cdef uint32_t sequence
    cdef uint32_t flags
    cdef list late                # [(kind, env, message)]: did not fit the ring
    cdef list failures
    cdef bint alone               # whether this is a process of its own

    def __init__(self, Segment segment, index, first_env, envs, host, slabs, autoreset,
                 timed=False, mends=False, resets=None, steppers=None):
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
        for ns in spent():
            c.sv_counter_set(c.sv_counter_at(self.counters, line), ns)
            line += 1
        c.sv_counter_set(&self.counters.process, os.getpid())
        self.made_at, self.made_at_ticks = c.sv_now_ns(), c.sv_ticks()
        self.timings = c.sv_segment_timings(segment.base, &segment.plan, first_env)
        c.sv_waiter_follow(
            &self.waiter, c.sv_segment_policy(segment.base, &segment.plan), &self.tally)
        self.messages = Encoder(segment, index, first_env, len(envs), True)
        self.home = slabs.results
        self.actions = slabs.actions
        self.seeds = slabs.seeds
        self.finals = slabs.finals
        self.blocks = slabs.blocks
        self.num_blocks = 0 if self.blocks is None else self.blocks.num_blocks
        self.observation_messages = isinstance(self.home.observations, MessageCodec)
        if isinstance(self.actions, MessageCodec):
            self.action_messages = Decoder(segment, index, False)
        self.envs = list(envs)
        self.steppers = self.envs if steppers is None else list(steppers)
        self.host = host
        self.index = index
        self.first_env = first_env
        self.resets_in_step = autoreset.in_step
        self.resets_in_next_step = autoreset.in_next_step
        self.timed = timed
        self.mends = mends
        self.over = bytearray(len(envs))
        self.resets = {}
        self.retries = {}
        if resets is not None:  # this worker replaces another one
            self.over[:] = bytes([self.resets_in_next_step]) * len(envs)
            self.retries = {i: reset for i, reset in enumerate(resets) if reset is not None}
        self.given = {}
        self.undecodable = {}
        self.late = []
        self.failures = []

    def set_rollouts(self, rollouts):
        """Frames that follow those in the segment, in place of any before."""
        self.rollouts = rollouts

    def take_log(self, StepLog log):
        """Logs the steps of its envs; None: no more."""
        if log is not None:
            log.attach(self.first_env, len(self.envs))
        self.log = log

    def publish_words(self, words):
        cdef bytes text = packed_words(words)
        c.sv_text_publish(c.sv_segment_text(self.segment.base, &self.segment.plan, self.index),
                          text, len(text))

    def record(self, Recorder recorder):
        """Starts recording a trace; None stops it."""
        self.trace = self.waiter.trace = NULL if recorder is None else &recorder.trace
        self.recorder = recorder

    def serve(self, parent_alive, doze):
        """Serves requests until CLOSE (returns True) or until the parent is gone (False).

        After half a second without a request it calls `doze`, which sleeps until the parent sends
        one or is gone; None: go on sleeping in slices.
        """
        cdef int found
        cdef int64_t idle_since = c.sv_now_ns()
        cdef c.sv_affinity affinity
        affinity.count = 0
        self.alone = True
        while True:
            with nogil:
                found = c.sv_wait_request(&self.waiter, self.bell, &self.requests, self.index,
                                          SLICE_NS)
            if found == c.SV_WAIT_CORRUPT:
                raise RuntimeError("the segment is damaged: the request ring makes no sense")
            if found == c.SV_WAIT_SLICE:
                if not parent_alive():
                    return False
                # The parent may wait because of a damaged tail.
                c.sv_ring_announce(&self.completions)
                if doze is not None and c.sv_now_ns() - idle_since >= DOZE_AFTER_NS:
                    c.sv_bell_doze(self.bell)
                    if self.waiter.homing:  # as for a park: see wait.h
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

    def busy(self):
        """What is being done: (env, "step", "reset" or "call", seconds); None: nothing."""
        cdef int64_t elapsed
        cdef uint64_t busy = c.sv_busy_for(self.activity, c.sv_now_ns(), &elapsed)
        if busy == 0:
            return None
        return c.sv_busy_env(busy), c.sv_busy_name(busy).decode(), 1e-9 * elapsed

    def begin_call(self, uint32_t env):
        self.call_began = c.sv_now_ns()
        c.sv_busy_begin(self.activity, c.sv_busy(env, c.SV_IN_CALL), self.call_began)

    def end_call(self, uint32_t env):
        if self.trace is not NULL:
            c.sv_trace_add(self.trace, c.SV_TRACE_CALL, env, self.call_began, c.sv_now_ns())

    def serve_pending(self):
        """Serves what is in the request ring; False after CLOSE."""
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
            begin = self.first_of(&request)
            operation = request.operation & OPERATION
            if operation == CLOSE:
                return False
            if operation == TRACE:
                self.host.trace(request.sequence)
            else:
                self.execute(&request, operation, begin, begin + request.count)

    cdef int execute(self, c.sv_record *request, uint32_t operation, Py_ssize_t begin,
                     Py_ssize_t end) except -1:
        """Carries out a request and answers it."""
        cdef object results
        cdef Py_ssize_t i
        self.aim(request)
        try:
            results = self.carry_out(request, operation, begin, end)
        except BaseException as error:
            if self.alone:
                raise
            # Without workers, Ctrl-C is for the program: it gets the error as the answer.
            results = None
            self.late = []
            doing = OPERATIONS.get(operation, "call")
            self.failures = [(self.first_env + i, doing, error) for i in range(begin, end)]
        return self.answer(request, results)

    cdef Py_ssize_t first_of(self, const c.sv_record *request) except -1:
        """The place of a request's first env among this worker's."""
        cdef Py_ssize_t begin = <Py_ssize_t>request.first - self.first_env
        if begin < 0 or begin + <Py_ssize_t>request.count > len(self.envs):
            raise RuntimeError("the segment is damaged: a request names envs of another worker")
        return begin

    cdef int aim(self, const c.sv_record *request) except -1:
        """Prepares for the results of a request."""
        if self.trace is not NULL and not c.sv_trace_is_on(self.trace):
            self.record(None)
        self.choose_frame(request.operation >> FRAME)
        self.sequence = request.sequence
        self.flags = 0
        return 0

    cdef int answer(self, c.sv_record *request, object results) except -1:
        """Answers a request whose results, but those of a command, are in place."""
        if self.late or self.failures or results is not None:
            self.flags |= LATE
        c.sv_busy_begin(self.activity, 0, 0)
        self.complete(request)
        c.SV_FAULT(9)
        # After the completion, of which the parent then knows sooner; it reads the channel anyway.
        if self.flags & LATE:
            self.send_late(results)
        return 0

    cdef object carry_out(self, c.sv_record *request, uint32_t operation, Py_ssize_t begin,
                          Py_ssize_t end):
        """Carries out a request; returns the results of a command."""
        global in_wrappers_ns
        cdef object results = None
        cdef int64_t start
        cdef int64_t reset_ns
        cdef int64_t wrappers_ns = in_wrappers_ns
        if operation == STEP:
            self.take_actions(request)
            start, reset_ns = c.sv_now_ns(), self.tally.reset_ns
            self.begin_laps(start)
            self.step_range(begin, end)
            self.tally.step_ns += c.sv_now_ns() - start - (self.tally.reset_ns - reset_ns)
            self.tally.wrappers_ns += in_wrappers_ns - wrappers_ns
            in_wrappers_ns = wrappers_ns  # an env that holds a vector env counts its own alone
        elif operation == RESET:
            self.take_resets(request)
            self.reset_range(begin, end)
        elif operation == COMMAND:
            # From here to the answer: its message and results, too, may take long.
            c.sv_busy_begin(self.activity, c.sv_busy(self.first_env, c.SV_IN_CALL), c.sv_now_ns())
            results = self.host.command(self.sequence)
        else:
            raise RuntimeError(f"the segment is damaged: operation {operation}")
        return results

    cdef int take_actions(self, const c.sv_record *request) except -1:
        """Takes the actions of a step that are not in the slab."""
        if self.action_messages is not None:
            self.receive_actions(request.operation & LATE, request.count)
        elif request.operation & LATE:  # actions of a shape for which the slab has no room
            self.given = dict(self.host.late_arguments(self.sequence))
            self.tally.late += len(self.given)
        elif self.given:
            self.given.clear()
        return 0

    cdef int take_resets(self, const c.sv_record *request) except -1:
        """Takes the seeds and options of this and further resets that are not in the slab."""
        if request.operation & LATE:
            self.resets.update(self.host.late_arguments(request.sequence))
        return 0

    cdef int begin_laps(self, int64_t now) except -1:
        """Notes the begin of a request, and the length of a tick, measured over all time so far."""
        self.began, self.began_ticks = now, c.sv_ticks()
        self.lap = self.began_ticks
        if self.began_ticks > self.made_at_ticks:
            self.ns_per_tick = (
                <double>(now - self.made_at) / <double>(self.began_ticks - self.made_at_ticks))
        return 0

    cdef int64_t time_of(self, uint64_t ticks) noexcept:
        """Clock time of a count of ticks, from the begin of the current request on."""
        return self.began + <int64_t>(
            self.ns_per_tick * <double><int64_t>(ticks - self.began_ticks))

    cdef int send_late(self, object results) except -1:
        """Sends the messages announced, even if Ctrl-C interrupts (in the parent's process)."""
        late, self.late = self.late, []
        failures, self.failures = self.failures, []
        try:
            self.host.send_late(self.sequence, late, failures, results)
        except BaseException:
            if self.alone:
                raise
            self.host.send_late(self.sequence, late, failures, results)
            raise
        return 0

    cdef int choose_frame(self, Py_ssize_t frame) except -1:
        cdef Py_ssize_t block = frame // self.home.num_frames - 1
        self.results, self.block_row = self.home, -1
        if 0 <= block < self.num_blocks:
            self.block_row = block * self.home.num_envs
            frame -= (1 + block) * self.home.num_frames
        elif block >= 0:
            frame -= (1 + self.num_blocks) * self.home.num_frames
            self.results = self.rollouts
            if self.rollouts is None or frame >= self.rollouts.num_frames:
                raise RuntimeError("the segment is damaged: a request names no frame")
        self.row = frame * self.home.num_envs
        return 0

    cdef int receive_actions(self, bint late, Py_ssize_t expected) except -1:
        """Takes actions that come as messages; the channel has those that did not fit the ring."""
        cdef Decoder decoder = self.action_messages
        self.undecodable.clear()
        while decoder.next(self.sequence):
            expected -= 1
            try:
                self.actions.write(decoder.env, decoder.take()[""])
            except Exception as error:  # unpickling runs the user's code
                self.undecodable[decoder.env] = error
            finally:
                decoder.release()
        if late:
            for env, action in self.host.late_arguments(self.sequence):
                self.actions.write(env, action)
                self.tally.late += 1
                expected -= 1
        if expected != 0:
            raise RuntimeError("the segment is damaged: there is not one action for each env")
        return 0

    cdef int complete(self, c.sv_record *request) except -1:
        cdef c.sv_record answer = request[0]
        answer.operation = self.flags
        c.SV_FAULT(5)
        if c.sv_ring_try_push(&self.completions, &answer) != c.SV_RING_YES:
            raise RuntimeError("the segment is damaged: the completion ring is full")
        c.SV_FAULT(7)
        self.tally.requests += 1
        c.sv_counters_publish(self.counters, &self.tally)
        self.tally.wakes += c.sv_completion_add(self.completion)
        self.waiter.left = -1
        if request.operation & TOGETHER:
            self.waiter.left = c.sv_completion_left(self.completion)
        return 0

    cdef int step_range(self, Py_ssize_t begin, Py_ssize_t end) except -1:
        cdef Py_ssize_t i
        cdef int64_t steps
        cdef int64_t reset_ns
        cdef uint64_t now
        for i in range(begin, end):
            steps, reset_ns = self.tally.steps, self.tally.reset_ns
            try:
                if self.over[i]:
                    self.reset_one(i, None, None, False)
                else:
                    self.operation = "step"
                    self.step_one(i)
            except BaseException as error:
                self.fail(i, error)
            if forked:
                end_forks()
            # The clock is read once an env: the next step begins when this one ends.
            now = c.sv_ticks()
            if self.tally.steps != steps:
                self.note_step(i, now, self.tally.reset_ns - reset_ns)
            self.lap = now
            c.SV_FAULT(2)
        return 0

    cdef int note_step(self, Py_ssize_t i, uint64_t now, int64_t in_reset) except -1:
        """Records how long a step has taken that ends now, without a reset in it."""
        c.sv_timing_add(
            &self.timings[i].step,
            <int64_t>(self.ns_per_tick * <double><int64_t>(now - self.lap)) - in_reset)
        if self.trace is not NULL:
            c.sv_trace_add(self.trace, c.SV_TRACE_STEP, <uint32_t>(self.first_env + i),
                           self.time_of(self.lap), self.time_of(now))
        return 0

    cdef int reset_range(self, Py_ssize_t begin, Py_ssize_t end) except -1:
        cdef Py_ssize_t i
        for i in range(begin, end):
            try:
                seed, options = self.asked_with(i)
                self.reset_one(i, seed, options, True)
            except BaseException as error:
                self.fail(i, error)
            if forked:
                end_forks()
        return 0

    cpdef object action_of(self, Py_ssize_t env):
        """The last action of an env."""
        return self.given[env] if self.given else self.actions.read(env)

    cdef int step_one(self, Py_ssize_t i) except -1:
        cdef Py_ssize_t env = self.first_env + i
        cdef Py_ssize_t row = self.row + env
        cdef Results results = self.results
        if self.undecodable and env in self.undecodable:
            raise self.undecodable.pop(env)
        self.tally.steps += 1
        c.sv_busy_begin(
            self.activity, c.sv_busy(env, c.SV_IN_STEP),
            c.sv_now_ns() if self.timed else self.time_of(self.lap))
        result = self.steppers[i].step(self.action_of(env))
        if forked:
            end_forks()
        if type(result) is not tuple:
            if result is None:
                raise TypeError(f"env {env}: step() returned None; expected {STEPPED}")
            result = tuple(result)
        if len(<tuple>result) != 5:
            raise ValueError(
                f"env {env}: step() returned {len(<tuple>result)} values; expected {STEPPED}")
        observation, reward, terminated, truncated, info = <tuple>result
        if not self.resets_in_step:
            self.observe(env, observation)
        c.SV_FAULT(3)
        if isinstance(reward, float):  # np.float64 is one
            results.reward_of[row] = <double>reward
        else:
            self.put_reward(env, reward)
        if terminated is False:
            results.terminated_of[row] = 0
        else:
            self.put_flag(env, "terminated", results.terminations, terminated)
        if truncated is False:
            results.truncated_of[row] = 0
        else:
            self.put_flag(env, "truncated", results.truncations, truncated)
        cdef bint over = results.terminated_of[row] | results.truncated_of[row]
        if self.resets_in_step:
            if over:
                if self.log is not None:  # before the reset: envs may reuse their arrays
                    self.log.put_step(
                        env, self.action_of(env), observation, results.reward_of[row],
                        results.terminated_of[row], results.truncated_of[row])
                self.end_and_reset(i, observation, info)
                return 0
            self.observe(env, observation)
        elif self.resets_in_next_step:
            self.over[i] = over
        self.inform(env, INFO, info)
        if self.log is not None:
            self.log.put_step(env, self.action_of(env), observation, results.reward_of[row],
                              results.terminated_of[row], results.truncated_of[row])
            self.log.publish(env, 1)
        return 0

    cdef int end_and_reset(self, Py_ssize_t i, object observation, object info) except -1:
        """Keeps the final observation and info, then resets the env."""
        cdef Py_ssize_t env = self.first_env + i
        cdef bint kept = self.finals is not None and self.finals.keep(env, observation)
        # Copies: an env may reuse its arrays in reset().
        cdef object final_obs = None if kept else self.copied(env, "observation", observation)
        cdef object final_info = self.copied(env, "info", info)
        observation, info = self.reset_env(i, None, None, False)
        self.observe(env, observation)
        if not isinstance(info, dict):
            self.inform(env, INFO, info)  # which raises
        elif kept and "final_obs" not in info:
            self.inform(env, FINAL, {"final_info": final_info, **info})
        else:
            self.inform(env, INFO, {"final_obs": final_obs, "final_info": final_info, **info})
        if self.log is not None:
            self.log.put_start(env, 1, observation)
            self.log.publish(env, 2)
        return 0

    cdef object copied(self, Py_ssize_t env, str what, object value):
        try:
            return messages.copied(value)
        except Exception as error:
            raise messages.unsendable(env, what, value, error) from error

    cdef tuple asked_with(self, Py_ssize_t i):
        """Seed and options that a reset was asked with."""
        cdef Py_ssize_t env = self.first_env + i
        cdef tuple arguments = self.seeds.get(env)
        if arguments is None:
            arguments = self.resets.get(env)
            if arguments is None:
                raise RuntimeError(f"the segment is damaged: env {env} was sent no seed")
        return arguments

    cdef tuple reset_arguments(self, Py_ssize_t i, object seed, object options, bint explicit):
        """Seed and options of a reset, also after a restart or a failed one, and if it has any."""
        if self.retries and i in self.retries:
            lost_seed, lost_options = self.retries[i]
            explicit = True
            seed = lost_seed if seed is None else seed
            options = lost_options if options is None else options
        return seed, options, explicit

    cdef int64_t reset_took(self, Py_ssize_t i, int64_t *start) except -1:
        """How long the reset took that began at `start`; counts it."""
        cdef int64_t elapsed = c.sv_now_ns() - start[0]
        self.tally.reset_ns += elapsed
        return elapsed

    cdef tuple reset_env(self, Py_ssize_t i, object seed, object options, bint explicit):
        """The observation and info of a reset."""
        cdef int64_t start = c.sv_now_ns()
        cdef int64_t elapsed
        self.operation = "reset"
        self.tally.resets += 1
        if self.retries:
            seed, options, explicit = self.reset_arguments(i, seed, options, explicit)
            self.retries.pop(i, None)
        c.sv_busy_begin(self.activity, c.sv_busy(self.first_env + i, c.SV_IN_RESET), start)
        try:
            if explicit:
                result = self.envs[i].reset(seed=seed, options=copied_from(options))
            else:
                result = self.envs[i].reset()
        except BaseException:
            if self.mends and explicit:
                self.retries[i] = seed, options
            raise
        finally:
            if forked:
                end_forks()
            elapsed = self.reset_took(i, &start)
            c.sv_timing_add(&self.timings[i].reset, elapsed)
            if self.trace is not NULL:
                c.sv_trace_add(self.trace, c.SV_TRACE_RESET, <uint32_t>(self.first_env + i), start,
                               start + elapsed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                f"env {self.first_env + i}: reset() returned {_described(result)}; expected the "
                "tuple (observation, info)"
            )
        return result

    cdef int reset_one(self, Py_ssize_t i, object seed, object options,
                       bint explicit) except -1:
        cdef Py_ssize_t env = self.first_env + i
        cdef Py_ssize_t row = self.row + env
        observation, info = self.reset_env(i, seed, options, explicit)
        self.observe(env, observation)
        self.results.reward_of[row] = 0.0
        self.results.terminated_of[row] = 0
        self.results.truncated_of[row] = 0
        self.over[i] = 0
        self.inform(env, INFO, info)
        if self.log is not None:
            self.log.put_start(env, 0, observation)
            self.log.publish(env, 1)
        return 0

    cdef int observe(self, Py_ssize_t env, object observation) except -1:
        """Writes an observation to its slab, or sends it as a message."""
        if self.observation_messages:
            self.send(env, OBSERVATION, {"": observation}, "observation", observation)
        else:
            try:
                self.results.observations.write(self.row + env, observation)
            except Exception as error:
                raise self.host.misfit(env, observation, error) from error
            if self.block_row >= 0:
                self.blocks.observations.copy_row(
                    self.results.observations, self.row + env, self.block_row + env)
        return 0

    cdef int put_reward(self, Py_ssize_t env, object reward) except -1:
        """Writes a reward of another type than float."""
        try:
            if reward is None:  # which NumPy takes for nan
                raise TypeError("it is None")
            if isinstance(reward, np.ndarray) and reward.size == 1 and reward.dtype.kind in "biuf":
                reward = reward.reshape(())
            self.results.rewards[self.row + env] = reward
        except (TypeError, ValueError, OverflowError) as error:
            raise type(error)(
                f"env {env}: the reward is {reward!r}; it must be a number ({error})"
            ) from error
        return 0

    cdef int put_flag(self, Py_ssize_t env, str name, object flags, object flag) except -1:
        """Writes a flag that is not False, as NumPy takes it, but for None and text."""
        if flag is None or isinstance(flag, (str, bytes)):
            raise TypeError(f"env {env}: {name} is {flag!r}; it must be a bool")
        flags[self.row + env] = flag
        return 0

    cdef int inform(self, Py_ssize_t env, uint32_t kind, object info) except -1:
        """Sends an info."""
        if type(info) is not dict:
            if not isinstance(info, dict):
                raise TypeError(f"env {env}: the info must be a dict, got {type(info).__name__}: "
                                f"{info!r}. Return {{}} where there is nothing to say")
        elif len(<dict>info) == 0:
            return 0
        return self.send(env, kind, info, "info", info)

    cdef int send(self, Py_ssize_t env, uint32_t kind, object message, str what,
                  object value) except -1:
        """Sends a message, now or by the host; `what` is its `value`, for messages of errors."""
        cdef bint sent
        try:
            sent = self.messages.encode(env, kind, message, self.sequence)
        except Exception as error:
            raise messages.unsendable(env, what, value, error) from error
        if sent:
            self.flags |= MESSAGES
        else:
            if kind == FINAL:
                message = {"final_obs": self.finals.read(env), **message}
            self.late.append((kind, env, message))
            self.tally.late += 1
        return 0

    cdef int fail(self, Py_ssize_t i, error) except -1:
        cdef int64_t now
        self.failures.append((self.first_env + i, self.operation, error))
        if self.log is not None:  # the env may have done what it did not finish
            self.log.interrupt(self.first_env + i)
        if self.trace is not NULL:
            now = c.sv_now_ns()
            c.sv_trace_add(self.trace, c.SV_TRACE_ERROR, <uint32_t>(self.first_env + i), now, now)
        if self.mends and self.resets_in_next_step:
            self.over[i] = True
        return 0


# ==== several envs at once ========================================================================
#
# The envs run elsewhere: in a thread each, or as coroutines. This loop takes requests, has envs
# begin (``executor.start``), and notes which have come to their end (``finish``). When all envs of
# a request have, it goes through the request as any worker does (``WorkerLoop``), over replays:
# objects whose ``step`` and ``reset`` return at once what the envs have returned, or raise what
# they have raised. So results, their order and their errors are those of a worker that steps its
# envs one by one, and the loop alone writes to rings and slabs. Requests are answered in the order
# in which they come to their end. In place of ``command`` the host has ``received(sequence) ->
# call`` and ``results_of(call, outcome of an env)``.

cdef dict DOING = {"step": c.SV_IN_STEP, "reset": c.SV_IN_RESET, "call": c.SV_IN_CALL}


cdef class Request:
    """A request that is not answered yet."""

    cdef c.sv_record record
    cdef Py_ssize_t pending    # envs that have not come to their end
    cdef dict given            # of a step: as in WorkerLoop
    cdef dict undecodable
    cdef object call           # a command for each env; else None
    cdef list outcomes         # of that, by env: (value, error), or None


cdef class OverlappedLoop(WorkerLoop):
    """Serves the envs ``first_env`` and up, several at once.  One instance a worker process."""

    cdef object executor
    cdef list requests_of          # by env: the Request that it is busy with, or None
    cdef c.sv_activity unpublished   # the activity of replays
    cdef readonly Py_ssize_t in_progress  # envs that are busy
    cdef int64_t counted_from      # since when they are and it is not counted yet
    cdef int64_t in_step           # of that, the sum of all envs' steps; and of their resets
    cdef int64_t in_reset

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.requests_of = [None] * len(self.envs)
        self.activity = &self.unpublished
        self.alone = True
        c.sv_counter_set(&self.counters.overlaps, 1)
        for i in range(len(self.envs)):  # a predecessor may have died in an env
            self.end(i)

    def execute_by(self, executor):
        """Takes the executor: ``start(i, "step", action)``, or "reset" and the arguments, or "call"
        and the command, has env i of the worker begin it."""
        self.executor = executor

    # ---- called by the executor --------------------------------------------------------------

    def sleep(self):
        """Announces that this worker sleeps on its alarm; False: first it has to serve requests."""
        c.sv_bell_doze(self.bell)
        return c.sv_ring_peek(&self.requests) == 0

    def awake(self):
        """Ends what `sleep` has announced, whatever that returned."""
        c.sv_bell_awake(self.bell)
        c.sv_ring_announce(&self.completions)  # the parent may wait because of a damaged tail

    def begin(self, Py_ssize_t i, str doing, int64_t since):
        """Publishes what env i does since when, by the monotonic clock."""
        c.sv_busy_begin(
            &self.timings[i].activity, c.sv_busy(self.first_env + i, DOING[doing]), since)

    def end(self, Py_ssize_t i):
        """Publishes that env i is done."""
        c.sv_busy_begin(&self.timings[i].activity, 0, 0)

    def finish(self, Py_ssize_t i, outcome=None):
        """Notes that env i has come to its end; answers its request if it was the last one.

        Args:
            i: The env's place among this worker's.
            outcome: What a call has returned and raised.
        """
        cdef Request request = self.requests_of[i]
        self.requests_of[i] = None
        self.in_progress -= 1
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
            request.given, request.undecodable = dict(self.given), dict(self.undecodable)
        elif operation == COMMAND:
            if self.in_progress == 0:
                c.sv_busy_begin(&self.counters.activity, c.sv_busy(self.first_env, c.SV_IN_CALL),
                              c.sv_now_ns())
            request.call = self.host.received(record.sequence)
            request.outcomes = [None] * len(self.envs)
        elif operation == RESET:
            self.take_resets(record)
        else:
            raise RuntimeError(f"the segment is damaged: operation {operation}")
        request.pending = 1  # until all have begun
        for i in range(begin, end):
            if request.call is not None:
                if request.call.is_for(self.first_env + i):
                    self.start(i, request, "call", request.call)
            elif operation == RESET:
                self.start_reset(i, request, True)
            elif self.first_env + i in request.undecodable and not self.over[i]:
                pass  # its replay is not asked
            elif self.over[i]:
                self.start_reset(i, request, False)
            else:
                self.start(i, request, "step", self.action_of(self.first_env + i))
        return self.count_down(request)

    cdef int start_reset(self, Py_ssize_t i, Request request, bint explicit) except -1:
        seed, options = self.asked_with(i) if explicit else (None, None)
        seed, options, explicit = self.reset_arguments(i, seed, options, explicit)
        self.start(i, request, "reset", {"seed": seed, "options": options} if explicit else {})
        return 0

    cdef int start(self, Py_ssize_t i, Request request, str what, argument) except -1:
        if self.requests_of[i] is not None:
            raise RuntimeError("the segment is damaged: a request names an env that is busy")
        self.requests_of[i] = request
        request.pending += 1
        if self.in_progress == 0:
            self.counted_from = c.sv_now_ns()
            c.sv_busy_begin(&self.counters.activity, c.sv_busy(self.first_env, c.SV_IN_SEVERAL),
                            self.counted_from)
        self.in_progress += 1
        self.executor.start(i, what, argument)
        return 0

    cdef int count_down(self, Request request) except -1:
        """Answers a request if all of its envs have come to their end."""
        request.pending -= 1
        if request.pending == 0:
            self.close_request(request)
        if self.in_progress == 0:
            c.sv_busy_begin(&self.counters.activity, 0, 0)
        return 0

    cdef int close_request(self, Request request) except -1:
        cdef c.sv_record *record = &request.record
        cdef Py_ssize_t begin = self.first_of(record)
        cdef Py_ssize_t end = begin + record.count
        cdef object results = None
        self.aim(record)
        if request.call is not None:
            results = self.host.results_of(request.call, request.outcomes.__getitem__)
        elif record.operation & OPERATION == STEP:
            self.given, self.undecodable = request.given, request.undecodable
            self.begin_laps(c.sv_now_ns())
            self.step_range(begin, end)
        else:
            self.reset_range(begin, end)
        self.count_time()
        self.answer(record, results)
        return 0

    cdef int count_time(self) except -1:
        """Counts for how long envs have been busy, as steps and resets by what these have taken."""
        cdef int64_t now = c.sv_now_ns()
        cdef int64_t each = self.in_step + self.in_reset
        if each > 0:
            self.tally.step_ns += <int64_t>(
                <double>(now - self.counted_from) * self.in_step / each)
            self.tally.reset_ns += <int64_t>(
                <double>(now - self.counted_from) * self.in_reset / each)
            self.counted_from = now
        self.in_step = self.in_reset = 0
        return 0

    # ---- times: those of the envs, not of their replays --------------------------------------

    cdef int note_step(self, Py_ssize_t i, uint64_t now, int64_t in_reset) except -1:
        cdef int64_t began
        cdef int64_t ended
        began, ended = self.steppers[i].span
        c.sv_timing_add(&self.timings[i].step, ended - began)
        self.in_step += ended - began
        if self.trace is not NULL:
            c.sv_trace_add(
                self.trace, c.SV_TRACE_STEP, <uint32_t>(self.first_env + i), began, ended)
        return 0

    cdef int64_t reset_took(self, Py_ssize_t i, int64_t *start) except -1:
        cdef int64_t began
        cdef int64_t ended
        began, ended = self.envs[i].reset_span
        start[0] = began
        self.in_reset += ended - began
        return ended - began

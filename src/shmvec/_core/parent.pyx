"""The parent's hot loop: write the actions, post one request a worker, wait, gather.

``ParentLoop`` speaks the protocol and knows nothing of processes: whoever owns them passes
``look``, called at least every 50 ms of waiting, which raises when a worker is gone, ``rouse``,
which wakes workers that doze, and ``budgets``, called every second, which says how to wait.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from shmvec._core.codec cimport Codec, MessageCodec
from shmvec._core.csrc cimport (
    SV_EVERYONE,
    SV_RING_YES,
    SV_WAIT_READY,
    sv_bell,
    sv_bell_has_dozers,
    sv_bell_ring,
    sv_busy_for,
    sv_budget,
    sv_completion,
    sv_completion_check,
    sv_counter_get,
    sv_counters,
    sv_now_ns,
    sv_record,
    sv_policy_set,
    sv_ring,
    sv_ring_attach_consumer,
    sv_ring_attach_producer,
    sv_ring_try_pop,
    sv_ring_try_push,
    sv_segment_bell,
    sv_segment_completion,
    sv_segment_completions,
    sv_segment_counters,
    sv_segment_policy,
    sv_segment_requests,
    sv_wait_completion,
    sv_waiter,
    sv_waiter_init,
)
from shmvec._core.infos cimport Columns, InfoDecoder
from shmvec._core.messages cimport Encoder
from shmvec._core.protocol cimport (
    ACTION,
    CLOSE,
    COMMAND,
    FRAME,
    LATE,
    MESSAGES,
    OBSERVATION,
    RESET,
    STEP,
)
from shmvec._core.results cimport Results
from shmvec._core.segment cimport Segment

import gc

import numpy as np
from gymnasium.vector import VectorEnv

from shmvec.faults import EnvTimeoutError

cdef int64_t SLICE_NS = 50_000_000
cdef int64_t FOLLOW_NS = 1_000_000_000  # between two looks at the cores

cdef object _plain_add_info = VectorEnv._add_info

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1


cdef class ParentLoop:
    """The parent's ends of all rings."""

    def __cinit__(self, Segment segment, ranges, slabs, *args, **kwargs):
        cdef uint32_t worker
        cdef uint32_t capacity = segment.plan.sizes.ring_capacity
        self.num_workers = len(ranges)
        if self.num_workers != segment.plan.sizes.num_workers:
            raise ValueError("one range of envs a worker")
        self.requests = <sv_ring *>calloc(self.num_workers, sizeof(sv_ring))
        self.completions = <sv_ring *>calloc(self.num_workers, sizeof(sv_ring))
        self.firsts = <uint32_t *>calloc(self.num_workers, sizeof(uint32_t))
        self.counts = <uint32_t *>calloc(self.num_workers, sizeof(uint32_t))
        self.flags = <uint32_t *>calloc(self.num_workers, sizeof(uint32_t))
        if (self.requests is NULL or self.completions is NULL or self.firsts is NULL
                or self.counts is NULL or self.flags is NULL):
            raise MemoryError
        self.segment = segment
        self.columns = Columns()
        self.decoders = []
        for worker in range(self.num_workers):
            self.firsts[worker], self.counts[worker] = ranges[worker]
            sv_ring_attach_producer(
                &self.requests[worker],
                sv_segment_requests(segment.base, &segment.plan, worker), capacity)
            sv_ring_attach_consumer(
                &self.completions[worker],
                sv_segment_completions(segment.base, &segment.plan, worker), capacity)
            self.decoders.append(InfoDecoder(
                segment, worker, True, self.columns, slabs.results.observations,
                slabs.finals))
        self.bell = sv_segment_bell(segment.base, &segment.plan)
        self.completion = sv_segment_completion(segment.base, &segment.plan)

    def __dealloc__(self):
        free(self.requests)
        free(self.completions)
        free(self.firsts)
        free(self.counts)
        free(self.flags)

    def __init__(self, segment, ranges, slabs, look, rouse, budgets, limits=(None, None), copy=True,
                 leasing=False, may_step_over=True, inline=None):
        self.home = slabs.results
        self.actions = slabs.actions
        self.everyone = np.arange(segment.num_envs, dtype=np.intp)
        self.rows = np.arange(segment.num_envs, dtype=np.intp)
        self.away = -1
        if isinstance(self.actions, MessageCodec):
            self.encoders = [
                Encoder(segment, worker, first, count, False)
                for worker, (first, count) in enumerate(ranges)
            ]
        self.may_step_over = may_step_over
        self.look = look
        self.rouse = rouse
        self.copy = copy
        self.leasing = leasing
        self.inline = inline
        self.budgets = budgets
        step_limit, reset_limit = limits
        self.step_limit = -1 if step_limit is None else <int64_t>(step_limit * 1e9)
        self.reset_limit = -1 if reset_limit is None else <int64_t>(reset_limit * 1e9)
        # Looked at often enough that a limit is not overrun by more than a quarter.
        self.slice_ns = SLICE_NS
        for limit in (self.step_limit, self.reset_limit):
            if limit >= 0:
                self.slice_ns = min(self.slice_ns, max(1_000_000, <int64_t>limit // 4))
        cdef sv_budget budget
        budget.pause = budget.yield_ = budget.linger = budget.window = 0
        sv_waiter_init(&self.waiter, budget, False)
        self.follow()

    # ---- posting -----------------------------------------------------------------------------

    def post_step(self, actions, rollout_frame=-1):
        """Writes the actions and asks every worker to step its envs.

        Returns the actions that did not fit the rings, {worker: [(env, action)]}, to be sent over
        the pipes; None if there are none.
        """
        if self.pending:
            raise RuntimeError("collect() what was posted first: the slabs are in use")
        if not self.may_step_over:
            self.check_none_over(self.everyone)
        if self.encoders is None:
            self.actions.write_rows(self.everyone, actions)
            self.post(STEP, None, self.frame_of_all(rollout_frame))
            return None
        late = self.send_actions(actions)
        self.post(STEP, late, self.frame_of_all(rollout_frame))
        return late or None

    def post_reset(self):
        self.post(RESET, None, self.frame_of_all(-1))

    def post_command(self, resets=()):
        cdef Py_ssize_t frame = 0
        if len(resets):
            self.come_home()  # the others' results stay
            frame = self.frame_for(0, self.home.num_envs)
            for env in resets:
                self.set_rows(env, 1, frame)
        self.post(COMMAND, None, frame)

    def post_close(self):
        self.post(CLOSE, None, 0)

    cdef bint encode(self, uint32_t worker, Py_ssize_t env, object action,
                     uint32_t sequence) except -1:
        """Puts an action into the ring to its worker; False if it does not fit."""
        try:
            return (<Encoder>self.encoders[worker]).encode(env, ACTION, {"": action}, sequence)
        except Exception as error:
            raise TypeError(
                f"wrong actions: that of env {env} cannot be pickled to send it to its worker "
                f"({error}). Nothing was sent to any env."
            ) from error

    cdef dict send_actions(self, actions):
        """Puts actions into the rings to the workers; what does not fit by worker."""
        cdef dict late = {}
        cdef uint32_t worker
        cdef Py_ssize_t env
        cdef list each = (<MessageCodec>self.actions).split(actions, len(self.everyone))
        # Counted first: what a failure below leaves in the rings is of no later sequence.
        self.sequence += 1
        for worker in range(self.num_workers):
            for env in range(self.firsts[worker], self.firsts[worker] + self.counts[worker]):
                if not self.encode(worker, env, each[env], self.sequence + 1):
                    late.setdefault(worker, []).append((env, each[env]))
        return late

    cdef int check_none_over(self, const Py_ssize_t[::1] envs) except -1:
        index = np.asarray(envs)
        rows = np.asarray(self.rows)[index]
        over = index[self.home.terminations[rows] | self.home.truncations[rows]]
        if len(over):
            raise AssertionError(
                f"the episodes of envs {over.tolist()} are over, and with "
                "AutoresetMode.DISABLED nobody resets them: call "
                "reset(options={'reset_mask': terminations | truncations}) first. "
                "Nothing was sent to any env."
            )
        return 0

    cdef int post(self, uint32_t operation, dict late, Py_ssize_t frame) except -1:
        """Puts one request on every worker's ring."""
        cdef uint32_t worker
        self.sequence += 1
        self.pending = True
        for worker in range(self.num_workers):
            self.request(worker, operation | (LATE if late and worker in late else 0),
                         self.firsts[worker], self.counts[worker], frame)
        self.ring_bell()
        return 0

    cdef Py_ssize_t frame_of_all(self, Py_ssize_t rollout_frame) except -1:
        """The frame for new results of all envs: this one of the rollouts, or one at home."""
        cdef Py_ssize_t frame = self.home.num_frames + rollout_frame
        if rollout_frame < 0:
            frame = self.frame_for(0, self.home.num_envs)
            self.set_rows(0, self.home.num_envs, frame)
        self.away = rollout_frame
        return frame

    cdef Py_ssize_t frame_for(self, Py_ssize_t first, Py_ssize_t count) except -1:
        """A frame at home into which results of these envs may be written."""
        if not self.leasing:
            return 0
        cdef Py_ssize_t frame = self.home.free_frame(first, count)
        if frame < 0:
            gc.collect()  # batches that only a cycle keeps
            frame = self.home.free_frame(first, count)
        if frame < 0:
            envs = f"env {first}" if count == 1 else f"envs {first} to {first + count - 1}"
            raise BufferError(
                f"{envs}: all {self.home.num_frames} buffers are held by batches that are still in "
                "use. Drop their arrays (or copy what you keep), call release(), set hold_batches, "
                "or raise num_buffers. Nothing was sent to any env."
            )
        return frame

    cdef int set_rows(self, Py_ssize_t first, Py_ssize_t count, Py_ssize_t frame) except -1:
        """Says where the results of these envs will be."""
        cdef Py_ssize_t env
        for env in range(first, first + count):
            self.rows[env] = frame * self.home.num_envs + env
        return 0

    def take_rollouts(self, rollouts):
        """Frames that follow those at home, in place of any before."""
        self.come_home()
        self.rollouts = rollouts

    def start_rollout(self, frame):
        """Puts the last results into a frame of the rollouts."""
        source, rows = self.home, self.rows
        if self.away >= 0:
            source = self.rollouts
            rows = self.away * self.home.num_envs + np.asarray(self.everyone)
        self.rollouts.copy_rows(source, rows, frame * self.home.num_envs)
        self.away = frame

    cpdef int come_home(self) except -1:
        """Copies the last results to the frames in the segment if they are in a rollout."""
        if self.away >= 0:
            rows = self.away * self.home.num_envs + np.asarray(self.everyone)
            self.set_rows(0, self.home.num_envs, self.frame_for(0, self.home.num_envs))
            self.home.copy_rows(self.rollouts, rows, self.rows[0])
            self.away = -1
        return 0

    cdef int request(self, uint32_t worker, uint32_t operation, uint32_t first,
                     uint32_t count, Py_ssize_t frame) except -1:
        """Puts a request of this sequence on a worker's ring."""
        cdef sv_record request
        request.sequence = self.sequence
        request.operation = operation | <uint32_t>frame << FRAME
        request.first = first
        request.count = count
        if sv_ring_try_push(&self.requests[worker], &request) != SV_RING_YES:
            raise RuntimeError(f"the request ring of worker {worker} is full or damaged")
        self.issued += 1
        return 0

    cdef int ring_bell(self) except -1:
        """Calls the workers to their rings."""
        if self.inline is None:
            if sv_bell_ring(self.bell, SV_EVERYONE):
                self.wakes += 1
                if sv_bell_has_dozers(self.bell):
                    self.rouse()
        return 0

    # ---- waiting -----------------------------------------------------------------------------

    cpdef bint wait(self, timeout) except -1:
        """Waits until everything that was posted is done; False when the time is up first."""
        return self.wait_for(self.issued, timeout)

    cdef bint wait_for(self, uint32_t target, timeout) except -1:
        """Waits until so many requests are done, counted from the first one ever."""
        if self.inline is not None:
            self.inline()
        if sv_completion_check(self.completion, target):
            return True
        cdef int64_t deadline = -1 if timeout is None else sv_now_ns() + <int64_t>(timeout * 1e9)
        cdef int64_t slice_ns = self.slice_ns
        cdef int found
        while True:
            if deadline >= 0:
                slice_ns = min(self.slice_ns, deadline - sv_now_ns())
                if slice_ns <= 0:
                    return False
            with nogil:
                found = sv_wait_completion(&self.waiter, self.completion, target, slice_ns)
            if found == SV_WAIT_READY:
                return True
            PyErr_CheckSignals()
            self.look()
            if self.step_limit >= 0 or self.reset_limit >= 0:
                self.check_limits()

    cdef int check_limits(self) except -1:
        """Raises if an env takes longer than it may."""
        cdef uint32_t worker
        cdef uint64_t busy
        cdef int64_t elapsed
        cdef int64_t limit
        for worker in range(self.num_workers):
            busy = sv_busy_for(
                sv_segment_counters(self.segment.base, &self.segment.plan, worker), sv_now_ns(),
                &elapsed)
            limit = self.reset_limit if busy & 1 else self.step_limit
            if busy != 0 and 0 <= limit < elapsed:
                raise EnvTimeoutError((busy >> 1) - 1, "reset" if busy & 1 else "step",
                                      1e-9 * limit)
        return 0

    # ---- gathering ---------------------------------------------------------------------------

    def collect(self):
        """Waits for all that was posted and takes the answers.

        Returns the workers from which a late message must be read; None if there is none.
        """
        cdef sv_record answer
        cdef uint32_t worker
        cdef uint32_t flags = 0
        cdef bint answered
        cdef list late = None
        self.wait(None)
        for worker in range(self.num_workers):
            answered = False
            while sv_ring_try_pop(&self.completions[worker], &answer) == SV_RING_YES:
                if answer.operation & LATE:
                    if late is None:
                        late = []
                    late.append(worker)
                if answer.sequence == self.sequence:
                    answered = True
                    self.flags[worker] = answer.operation
                    flags |= answer.operation
            if not answered:
                raise RuntimeError(
                    f"the segment is damaged: worker {worker} counted a request as done but "
                    "its completion ring does not hold the answer"
                )
        self.pending = False
        self.follow_if_due()
        return late

    cdef int follow_if_due(self) except -1:
        """Looks at the cores again if that was long ago."""
        if self.waiter.ended - self.followed_at >= FOLLOW_NS:
            self.follow()
        return 0

    cdef int follow(self) except -1:
        """Waits from now on as suits the cores that there are now, and has the workers do so."""
        cdef sv_budget budget
        now = self.budgets()
        budget.pause, budget.yield_, budget.linger, budget.window = now.worker
        sv_policy_set(sv_segment_policy(self.segment.base, &self.segment.plan), budget, now.homing)
        budget.pause, budget.yield_, budget.linger, budget.window = now.parent
        self.waiter.budget = budget
        self.followed_at = sv_now_ns()
        return 0

    def infos(self, vector_env, late):
        """Gymnasium's dict of arrays; takes observations that came as messages, too.

        `late` are messages [(kind, env, message)] that came over the pipe.
        """
        cdef uint32_t worker
        cdef dict infos = {}
        cdef InfoDecoder decoder
        cdef list returned = []
        for kind, env, message in late or ():
            if kind == OBSERVATION:
                self.home.observations.write(env, message[""])
            else:
                returned.append((env, message))
        if not returned and type(vector_env)._add_info is _plain_add_info:
            try:
                for worker in range(self.num_workers):
                    if self.flags[worker] & MESSAGES:
                        decoder = self.decoders[worker]
                        decoder.add_to(infos, self.sequence, vector_env)
            finally:
                self.columns.finish()
            return infos
        # By env, each as the env returned it: for subclasses that gather infos their own way.
        for decoder in self.decoders:
            returned += decoder.drain(self.sequence)
        for env, info in sorted(returned, key=_env):
            infos = vector_env._add_info(infos, info, env)
        return infos

    def observe(self):
        """The observations: copies, or the live slabs, as the vector env was made."""
        if self.leasing:
            return self.home.observations.gather(self.rows)
        return self.home.observations.batch(self.copy)

    def results(self, infos):
        """What step() returns: observations, rewards, terminations, truncations, infos."""
        if self.leasing:
            return (*self.home.gather(self.rows), infos)
        return (self.home.observations.batch(self.copy), self.home.rewards.copy(),
                self.home.terminations.copy(), self.home.truncations.copy(), infos)

    def counters(self):
        """What the parent's waits were like, and what each worker has done: (dict, [dict])."""
        cdef uint32_t worker
        cdef sv_counters *counters
        cdef list workers = []
        for worker in range(self.num_workers):
            counters = sv_segment_counters(self.segment.base, &self.segment.plan, worker)
            workers.append({
                "requests": sv_counter_get(&counters.requests),
                "steps": sv_counter_get(&counters.steps),
                "resets": sv_counter_get(&counters.resets),
                "step_ns": sv_counter_get(&counters.step_ns),
                "reset_ns": sv_counter_get(&counters.reset_ns),
                "pause_ns": sv_counter_get(&counters.pause_ns),
                "yield_ns": sv_counter_get(&counters.yield_ns),
                "park_ns": sv_counter_get(&counters.park_ns),
                "waits": sv_counter_get(&counters.waits),
                "parks": sv_counter_get(&counters.parks),
                "late_wakes": sv_counter_get(&counters.late_wakes),
                "wakes": sv_counter_get(&counters.wakes),
            })
        parent = {
            "requests": self.issued,
            "pause_ns": self.waiter.pause_ns,
            "yield_ns": self.waiter.yield_ns,
            "park_ns": self.waiter.park_ns,
            "waits": self.waiter.waits,
            "parks": self.waiter.parks,
            "late_wakes": self.waiter.late_wakes,
            "wakes": self.wakes,
        }
        return parent, workers


def _env(item):
    return item[0]

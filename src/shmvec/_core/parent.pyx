"""The parent's hot loop: write the actions, post one request a worker, wait, gather.

``ParentLoop`` speaks the protocol and knows nothing of processes: whoever owns them passes
``look``, called at least every 50 ms of waiting, which raises when a worker is gone, ``rouse``,
which wakes workers that doze, and ``budgets``, called every second, which says how to wait.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from shmvec._core.codec cimport Codec, MessageCodec
from shmvec._core.counters cimport counts_of, dict_of
from shmvec._core.csrc cimport (
    SV_EVERYONE,
    SV_RING_CORRUPT,
    SV_RING_NO,
    SV_RING_YES,
    SV_WAIT_READY,
    sv_bell,
    sv_bell_has_dozers,
    sv_bell_ring,
    sv_busy,
    sv_busy_for,
    sv_budget,
    sv_completion,
    sv_completion_check,
    sv_completion_done,
    sv_completion_reached,
    sv_counter_get,
    sv_counters,
    sv_now_ns,
    sv_record,
    sv_policy_set,
    sv_ring,
    sv_ring_announce,
    sv_ring_attach_consumer,
    sv_ring_attach_producer,
    sv_ring_try_pop,
    sv_ring_try_push,
    sv_ring_waiting,
    sv_segment_bell,
    sv_segment_completion,
    sv_segment_completions,
    sv_segment_counters,
    sv_segment_policy,
    sv_segment_renew,
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
cdef int64_t BEGIN_NS = 1_000_000_000   # in which a worker should begin what it was asked
cdef int64_t FOLLOW_NS = 1_000_000_000  # between two looks at the cores

cdef object _plain_add_info = VectorEnv._add_info

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1


cdef class ParentLoop:
    """The parent's ends of all rings."""

    def __cinit__(self, Segment segment, ranges, slabs, *args, **kwargs):
        cdef uint32_t worker
        self.num_workers = len(ranges)
        if self.num_workers != segment.plan.sizes.num_workers:
            raise ValueError("one range of envs a worker")
        self.requests = <sv_ring *>calloc(self.num_workers, sizeof(sv_ring))
        self.completions = <sv_ring *>calloc(self.num_workers, sizeof(sv_ring))
        self.firsts = <uint32_t *>calloc(self.num_workers, sizeof(uint32_t))
        self.counts = <uint32_t *>calloc(self.num_workers, sizeof(uint32_t))
        self.flags = <uint32_t *>calloc(self.num_workers, sizeof(uint32_t))
        self.outstanding = <uint32_t *>calloc(self.num_workers, sizeof(uint32_t))
        if (self.requests is NULL or self.completions is NULL or self.firsts is NULL
                or self.counts is NULL or self.flags is NULL or self.outstanding is NULL):
            raise MemoryError
        self.segment = segment
        self.columns = Columns()
        self.decoders = [None] * self.num_workers
        for worker in range(self.num_workers):
            self.firsts[worker], self.counts[worker] = ranges[worker]
            self.attach(worker, slabs)
        self.bell = sv_segment_bell(segment.base, &segment.plan)
        self.completion = sv_segment_completion(segment.base, &segment.plan)

    cdef int attach(self, uint32_t worker, slabs) except -1:
        """Takes the parent's ends of a worker's rings."""
        cdef Segment segment = self.segment
        cdef uint32_t capacity = segment.plan.sizes.ring_capacity
        sv_ring_attach_producer(
            &self.requests[worker],
            sv_segment_requests(segment.base, &segment.plan, worker), capacity)
        sv_ring_attach_consumer(
            &self.completions[worker],
            sv_segment_completions(segment.base, &segment.plan, worker), capacity)
        self.decoders[worker] = InfoDecoder(
            segment, worker, True, self.columns, slabs.results.observations, slabs.finals)
        return 0

    def __dealloc__(self):
        free(self.requests)
        free(self.completions)
        free(self.firsts)
        free(self.counts)
        free(self.flags)
        free(self.outstanding)

    def __init__(self, segment, ranges, slabs, look, rouse, budgets, limits=(None, None), copy=True,
                 leasing=False, keep_last=False, may_step_over=True, inline=None):
        self.home = slabs.results
        self.actions = slabs.actions
        self.everyone = np.arange(segment.num_envs, dtype=np.intp)
        self.rows = np.arange(segment.num_envs, dtype=np.intp)
        self.away = -1
        if isinstance(self.actions, MessageCodec):
            self.encoders = [self.encoder(worker) for worker in range(self.num_workers)]
        self.may_step_over = may_step_over
        self.look = look
        self.rouse = rouse
        self.copy = copy
        self.leasing = leasing
        self.keep_last = keep_last
        self.framed = leasing or keep_last
        self.slabs = slabs
        self.last_rows = np.arange(segment.num_envs, dtype=np.intp)
        self.broken = np.zeros(segment.num_envs, np.uint8)
        self.invalid = np.zeros(segment.num_envs, np.uint8)
        self.saved = []
        self.idle_since = np.zeros(self.num_workers, np.int64)
        self.idle_answered = np.zeros(self.num_workers, np.uint64)
        self.past = [{} for _ in ranges]
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
        sv_waiter_init(&self.waiter, budget, False, &self.tally)
        self.follow()

    @property
    def sends_messages(self):
        return self.encoders is not None

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

    def post_command(self, resets=None):
        cdef Py_ssize_t frame = 0
        self.resets = resets is not None
        if resets is not None:
            self.come_home()  # the others' results stay
            frame = self.frame_for(resets)
            self.set_rows(resets, frame)
        self.post(COMMAND, None, frame)

    def post_close(self):
        self.post(CLOSE, None, 0)
        self.rouse()  # whatever the bell said: nobody waits for these answers in slices

    cdef Encoder encoder(self, uint32_t worker):
        return Encoder(self.segment, worker, self.firsts[worker], self.counts[worker], False)

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
        cdef Py_ssize_t env
        cdef Py_ssize_t first
        cdef Py_ssize_t end
        self.sequence += 1
        self.pending = True
        self.operation = operation
        for worker in range(self.num_workers):
            flag = LATE if late and worker in late else 0
            first, end = self.firsts[worker], self.firsts[worker] + self.counts[worker]
            if operation == STEP and self.num_broken > 0:  # they are not stepped
                for env in range(first, end):
                    if self.broken[env]:
                        self.set_invalid(env)
                        if env > first:
                            self.request(worker, operation | flag, first, env - first, frame)
                            flag = 0
                        first = env + 1
            if end > first:
                self.request(worker, operation | flag, first, end - first, frame)
            elif flag:
                del late[worker]  # nobody would read it
        self.ring_bell()
        if late or operation == COMMAND:
            self.rouse()  # whatever the bell said: what is sent next blocks until it is read
        return 0

    cdef Py_ssize_t frame_of_all(self, Py_ssize_t rollout_frame) except -1:
        """The frame for new results of all envs: this one of the rollouts, or one at home."""
        cdef Py_ssize_t frame = self.home.num_frames + rollout_frame
        if rollout_frame < 0:
            frame = self.frame_for(self.everyone)
            self.set_rows(self.everyone, frame)
        self.away = rollout_frame
        return frame

    cdef Py_ssize_t free_frame(self, const Py_ssize_t[::1] envs):
        """A frame in which none of these envs' rows is leased, or shows the last results."""
        cdef Py_ssize_t frame
        cdef Py_ssize_t i
        cdef Py_ssize_t row
        for frame in range(self.home.num_frames):
            for i in range(envs.shape[0]):
                row = frame * self.home.num_envs + envs[i]
                if self.home.leased_of[row] or (self.keep_last and self.rows[envs[i]] == row):
                    break
            else:
                return frame
        return -1

    cdef Py_ssize_t frame_for(self, const Py_ssize_t[::1] envs) except -1:
        """A frame at home into which results of these envs, none of which is out, may go."""
        cdef Py_ssize_t frame
        cdef Py_ssize_t i
        if not self.framed:
            return 0
        frame = self.free_frame(envs)
        if frame >= 0:
            return frame
        if not self.leasing:  # their last results are in one frame here, in another there
            for i in range(envs.shape[0]):
                if self.rows[envs[i]] != envs[i]:
                    self.home.copy_row(self.home, self.rows[envs[i]], envs[i])
                    self.rows[envs[i]] = envs[i]
            return 1
        gc.collect()  # batches that only a cycle keeps
        frame = self.free_frame(envs)
        if frame < 0:
            raise BufferError(
                f"envs {list(envs)}: all {self.home.num_frames - self.keep_last} buffers are held "
                "by batches that are still in use. Drop their arrays (or copy what you keep), call "
                "release(), set hold_batches, or raise num_buffers. Nothing was sent to any env."
            )
        return frame

    cdef int set_rows(self, const Py_ssize_t[::1] envs, Py_ssize_t frame) except -1:
        """Says where the results of these envs will be."""
        cdef Py_ssize_t i
        for i in range(envs.shape[0]):
            self.last_rows[envs[i]] = self.rows[envs[i]]
            self.rows[envs[i]] = frame * self.home.num_envs + envs[i]
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
            self.set_rows(self.everyone, self.frame_for(self.everyone))
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
        self.outstanding[worker] += 1
        return 0

    cdef int ring_bell(self) except -1:
        """Calls the workers to their rings."""
        if self.inline is None:
            if sv_bell_ring(self.bell, SV_EVERYONE):
                self.tally.wakes += 1
                if sv_bell_has_dozers(self.bell):
                    self.rouse()
        return 0

    cpdef int remind(self) except -1:
        """Calls the workers again, whatever has become of the tails and of the bell."""
        cdef uint32_t worker
        for worker in range(self.num_workers):
            sv_ring_announce(&self.requests[worker])
        self.rouse()
        return 0

    # ---- waiting -----------------------------------------------------------------------------

    cpdef bint wait(self, timeout) except -1:
        """Waits until everything that was posted is done; False when the time is up first."""
        return self.wait_for(self.issued, timeout)

    cdef bint wait_for(self, uint32_t target, timeout) except -1:
        """Waits until so many requests are done, counted from the first one ever.

        The count of those that are done says when to look at the rings; they say whether they are.
        """
        if self.waiting:
            raise RuntimeError("another thread waits for this vector env: use it in one at a time")
        if self.inline is not None:
            self.inline()
            if not sv_completion_reached(self.answered(), target):
                raise RuntimeError("the segment is damaged: a request or its answer is lost")
            return True
        if (sv_completion_check(self.completion, target)
                and sv_completion_reached(self.answered(), target)):
            return True
        cdef int64_t deadline = -1 if timeout is None else sv_now_ns() + <int64_t>(timeout * 1e9)
        cdef int64_t slice_ns = self.slice_ns
        cdef int64_t reminded = sv_now_ns()
        cdef int found
        while True:
            if deadline >= 0:
                slice_ns = min(self.slice_ns, deadline - sv_now_ns())
                if slice_ns <= 0:
                    return False
            self.waiting = True
            with nogil:
                found = sv_wait_completion(&self.waiter, self.completion, target, slice_ns)
            self.waiting = False
            if sv_completion_reached(self.answered(), target):
                if found != SV_WAIT_READY:
                    self.count_anew()
                return True
            if found == SV_WAIT_READY:
                target += self.count_anew()
            PyErr_CheckSignals()
            self.look()
            if sv_now_ns() - reminded >= SLICE_NS:
                self.remind()
                reminded = sv_now_ns()
            if self.step_limit >= 0 or self.reset_limit >= 0:
                self.check_limits()

    cdef uint32_t answered(self):
        """How many requests are done, as the rings tell, counted as `issued` is."""
        cdef uint32_t worker
        cdef uint32_t done = self.issued
        for worker in range(self.num_workers):
            done -= self.outstanding[worker]
            done += min(self.outstanding[worker], sv_ring_waiting(&self.completions[worker]))
        return done

    cdef uint32_t count_anew(self):
        """Counts from what the workers' count is now; returns by how much that differs.

        It is damaged; or a worker has answered and died before it counted that; or it has not counted
        that yet: then the next wait finds the count one too high, and counts anew.
        """
        cdef uint32_t difference = sv_completion_done(self.completion) - self.answered()
        self.issued += difference
        return difference

    cdef int check_limits(self) except -1:
        """Raises if an env takes longer than it may, or a worker does not begin (SIGSTOP)."""
        cdef uint32_t worker
        cdef uint64_t busy
        cdef int64_t elapsed
        cdef int64_t limit
        cdef int64_t now = sv_now_ns()
        cdef sv_counters *counters
        for worker in range(self.num_workers):
            counters = sv_segment_counters(self.segment.base, &self.segment.plan, worker)
            busy = sv_busy_for(counters, now, &elapsed)
            if busy != 0 or self.outstanding[worker] <= sv_ring_waiting(&self.completions[worker]):
                self.idle_since[worker] = 0
            elif (self.idle_since[worker] == 0
                  or self.idle_answered[worker] != sv_counter_get(&counters.requests)):
                self.idle_since[worker] = now
                self.idle_answered[worker] = sv_counter_get(&counters.requests)
            else:
                elapsed = now - self.idle_since[worker]
                busy = sv_busy(self.firsts[worker], False)
            limit = self.reset_limit if busy & 1 else self.step_limit
            if self.idle_since[worker] != 0:  # commands may take their time: they are of the user's
                limit = -1 if limit < 0 or self.operation == COMMAND else max(limit, BEGIN_NS)
            if busy != 0 and 0 <= limit < elapsed:
                if not self.firsts[worker] < busy >> 1 <= self.firsts[worker] + self.counts[worker]:
                    raise RuntimeError(
                        f"the segment is damaged: worker {worker} is busy with an env that it has "
                        "not")
                error = EnvTimeoutError((busy >> 1) - 1, "reset" if busy & 1 else "step",
                                        1e-9 * limit)
                error.began = now - elapsed
                raise error
        return 0

    # ---- faults ------------------------------------------------------------------------------

    def forget(self, uint32_t worker):
        """Ends what was posted to a worker that is dead, and makes its rings new.

        What it has answered holds.  Envs whose results are lost become invalid.
        """
        cdef sv_record answer
        cdef Py_ssize_t env
        cdef set valid = set()
        cdef bint lost = self.pending and self.outstanding[worker] > 0
        if lost:
            while (self.outstanding[worker] > 0
                   and sv_ring_try_pop(&self.completions[worker], &answer) == SV_RING_YES):
                self.outstanding[worker] -= 1
                if answer.operation & LATE:
                    continue  # some of what it says is lost
                valid.update(range(answer.first, answer.first + answer.count))
                if answer.operation & MESSAGES:
                    self.save_infos(worker)
        if lost:
            for env in range(self.firsts[worker], self.firsts[worker] + self.counts[worker]):
                if env not in valid:
                    self.set_invalid(env)
        self.issued -= self.outstanding[worker]
        self.outstanding[worker] = 0
        self.flags[worker] = 0
        counters = self.counters_of(worker)
        self.past[worker] = {
            name: count + self.past[worker].get(name, 0) for name, count in counters.items()}
        sv_segment_renew(self.segment.base, &self.segment.plan, worker)
        self.attach(worker, self.slabs)
        if self.encoders is not None:
            self.encoders[worker] = self.encoder(worker)

    cdef int save_infos(self, uint32_t worker) except -1:
        """Takes the infos of a worker's last answers out of its ring, which goes."""
        cdef InfoDecoder decoder = self.decoders[worker]
        self.saved += decoder.drain(self.sequence)
        return 0

    cdef int set_invalid(self, Py_ssize_t env) except -1:
        self.num_invalid += not self.invalid[env]
        self.invalid[env] = True
        return 0

    def invalidate(self, Py_ssize_t env):
        self.set_invalid(env)

    def is_invalid(self, Py_ssize_t env):
        return bool(self.invalid[env])

    @property
    def resetting(self):
        """Whether what was posted last to all resets envs."""
        return self.operation == RESET or (self.operation == COMMAND and self.resets)

    @property
    def returns_results(self):
        """Whether what was posted last to all has results of every env."""
        return self.operation == STEP or self.resetting

    def take_invalid(self):
        """The envs whose last results are not valid; they count as valid from now on."""
        envs = np.flatnonzero(self.invalid)
        self.invalid[:] = 0
        self.num_invalid = 0
        return envs

    def set_broken(self, Py_ssize_t env, bint broken):
        """Whether a step of this env must be answered by a truncation instead."""
        self.num_broken += broken - self.broken[env]
        self.broken[env] = broken

    def is_over(self, Py_ssize_t env):
        """Whether the env's last step ended an episode."""
        row, results = self.rows[env], self.home
        if self.away >= 0:
            row, results = self.away * self.home.num_envs + env, self.rollouts
        return bool(results.terminations[row] or results.truncations[row])

    def truncate(self, Py_ssize_t env):
        """Makes the env's results its last observation, reward 0 and a truncation."""
        cdef Results results = self.home
        cdef Py_ssize_t row = self.rows[env]
        cdef Py_ssize_t last = self.last_rows[env]
        if self.away >= 0:
            results = self.rollouts
            row = self.away * self.home.num_envs + env
            last = max(self.away - 1, 0) * self.home.num_envs + env
        if row != last:
            results.observations.copy_row(results.observations, last, row)
        results.reward_of[row] = 0
        results.terminated_of[row] = False
        results.truncated_of[row] = True
        return results.observations.get(row)

    def mark_truncated(self, Py_ssize_t env):
        if self.away >= 0:
            self.rollouts.truncated_of[self.away * self.home.num_envs + env] = True
        else:
            self.home.truncated_of[self.rows[env]] = True

    def put_back(self, Py_ssize_t away, envs):
        """Copies results of envs from home to a frame of the rollouts, in which they were."""
        for env in envs:
            self.rollouts.copy_row(self.home, self.rows[env], away * self.home.num_envs + env)
        self.away = away

    # ---- gathering ---------------------------------------------------------------------------

    cdef int answers_of(self, uint32_t worker) except -1:
        """Takes a worker's answers to what was posted last; how many late messages follow."""
        cdef sv_record answer
        cdef int late = 0
        self.flags[worker] = 0
        while self.outstanding[worker] > 0:
            if not self.take(worker, &answer) or answer.sequence != self.sequence:
                raise RuntimeError(
                    f"the segment is damaged: worker {worker} has answered what was not asked")
            self.flags[worker] |= answer.operation
            if answer.operation & LATE:
                late += 1
        return late

    def collect(self):
        """Waits for all that was posted and takes the answers.

        Returns the workers from which a late message must be read; None if there is none.
        """
        cdef uint32_t worker
        cdef list late = None
        cdef int messages
        self.wait(None)
        for worker in range(self.num_workers):
            messages = self.answers_of(worker)
            if messages:
                late = (late or []) + [worker] * messages
        self.pending = False
        self.follow_if_due()
        return late

    cdef int take(self, uint32_t worker, sv_record *answer) except -1:
        """Takes an answer of a worker; 0 if there is none."""
        cdef int found = sv_ring_try_pop(&self.completions[worker], answer)
        if found == SV_RING_NO:
            return 0
        if found == SV_RING_CORRUPT or self.outstanding[worker] == 0:
            raise RuntimeError(
                f"the segment is damaged: the completion ring of worker {worker} makes no sense")
        self.outstanding[worker] -= 1
        return 1

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
        returned += self.saved
        self.saved = []
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

    cdef Py_ssize_t first_row(self):
        """Where the last results lie, if in one frame; else -1."""
        cdef Py_ssize_t env
        for env in range(1, self.rows.shape[0]):
            if self.rows[env] != self.rows[0] + env:
                return -1
        return self.rows[0]

    def observe(self):
        """The observations: copies, or the live slabs, as the vector env was made."""
        cdef Py_ssize_t first = 0
        if self.framed:
            first = self.first_row()
            if self.leasing or first < 0:
                return self.home.observations.gather(self.rows)
        return self.home.observations.batch(self.copy, first, self.rows.shape[0])

    def results(self, infos):
        """What step() returns: observations, rewards, terminations, truncations, infos."""
        cdef Results home = self.home
        if not self.framed:
            return (home.observations.batch(self.copy), home.rewards.copy(),
                    home.terminations.copy(), home.truncations.copy(), infos)
        index = np.asarray(self.rows)
        return (self.observe(), home.rewards[index], home.terminations[index],
                home.truncations[index], infos)

    cdef dict counters_of(self, uint32_t worker):
        """Of the process that is this worker now."""
        cdef sv_counters *counters = sv_segment_counters(
            self.segment.base, &self.segment.plan, worker)
        return counts_of(counters)

    def is_idle(self, uint32_t worker):
        return self.outstanding[worker] == 0

    def steps_of(self, uint32_t worker):
        """Steps of envs that the process which is this worker now has made."""
        return sv_counter_get(
            &sv_segment_counters(self.segment.base, &self.segment.plan, worker).steps)

    def counters(self):
        """What the parent has counted, and what each worker has done: (dict, [dict])."""
        cdef uint32_t worker
        cdef list workers = []
        for worker in range(self.num_workers):
            workers.append({
                name: count + self.past[worker].get(name, 0)
                for name, count in self.counters_of(worker).items()})
        self.tally.requests = self.issued
        return dict_of(&self.tally), workers


def _env(item):
    return item[0]

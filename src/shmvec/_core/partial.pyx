"""Envs that are stepped one by one: who is out, who is ready, and batches of those who are.

Over the rings of a ``ParentLoop``, one request an env: each worker answers in the order in which it
was asked, so the messages in its info ring lie in the order of its answers.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from shmvec._core.codec cimport MessageCodec
from shmvec._core.csrc cimport sv_budget, sv_now_ns, sv_record
from shmvec._core.infos cimport InfoDecoder
from shmvec._core.parent cimport ParentLoop
from shmvec._core.results cimport Results
from shmvec._core.protocol cimport (
    COMMAND,
    INFO,
    LATE,
    MESSAGES,
    OBSERVATION,
    RESET,
    STEP,
)

import numpy as np

cdef enum State:
    HOME   # nothing was asked of it, or its results were taken
    OUT    # asked, and not known to have answered
    READY  # it has answered: it is in the queue


cdef class PartialLoop:
    """Requests and answers of single envs."""

    cdef ParentLoop loop
    cdef Py_ssize_t num_envs
    cdef uint8_t[::1] states
    cdef uint8_t[::1] operations  # of each env's request
    cdef uint32_t[::1] sequences  # of each env's request
    cdef uint32_t[::1] flags      # of its answer
    cdef uint32_t[::1] workers
    cdef Py_ssize_t[::1] rows     # at home, where the results of each env's next request go
    cdef Py_ssize_t[::1] queue    # those that are ready, oldest first, from `head` on; circular
    cdef Py_ssize_t head
    cdef uint64_t[::1] checked_by # the last check that named this env
    cdef uint64_t checks
    cdef int64_t looked_at
    cdef uint32_t open_requests   # those without an answer
    cdef uint32_t next_worker     # whose ring is looked at first
    cdef bint ranges_out          # some requests are for several envs
    cdef list truncated           # envs that were to be stepped, but are broken
    cdef dict held                # env: [info], of messages that are in no ring
    cdef bint in_any_order        # envs are not taken in the order of their answers
    cdef bint in_ranges           # neighbours are asked together
    cdef readonly Py_ssize_t num_ready

    @property
    def num_out(self):
        return self.loop.asked - self.num_ready

    def __init__(self, ParentLoop loop, in_any_order):
        cdef uint32_t worker
        self.loop = loop
        self.num_envs = len(loop.everyone)
        self.states = np.zeros(self.num_envs, np.uint8)
        self.operations = np.zeros(self.num_envs, np.uint8)
        self.truncated = []
        self.sequences = np.zeros(self.num_envs, np.uint32)
        self.flags = np.zeros(self.num_envs, np.uint32)
        self.workers = np.zeros(self.num_envs, np.uint32)
        self.rows = np.arange(self.num_envs, dtype=np.intp)
        self.queue = np.zeros(self.num_envs, np.intp)
        self.checked_by = np.zeros(self.num_envs, np.uint64)
        self.held = {}
        self.in_any_order = in_any_order
        for worker in range(loop.num_workers):
            for env in range(loop.firsts[worker], loop.firsts[worker] + loop.counts[worker]):
                self.workers[env] = worker

    # ---- posting -----------------------------------------------------------------------------

    def check(self, const Py_ssize_t[::1] envs):
        """Raises ValueError unless each of these is an env, once, and may be asked something."""
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        self.checks += 1
        for i in range(envs.shape[0]):
            env = envs[i]
            if not 0 <= env < self.num_envs:
                raise ValueError(f"there is no env {env}: there are {self.num_envs}")
            if self.states[env] != HOME:
                raise ValueError(
                    f"env {env} has been asked already: take its results, with recv(), before it "
                    "is asked again. Nothing was sent to any env."
                )
            if self.checked_by[env] == self.checks:
                raise ValueError(f"env {env} is named twice. Nothing was sent to any env.")
            self.checked_by[env] = self.checks

    def post_steps(self, const Py_ssize_t[::1] envs, actions):
        """Writes actions and asks each of these envs to step.

        Returns [(worker, [(env, action)])]: what did not fit the rings, to be sent over the pipes
        in this order; None if there is none.
        """
        cdef ParentLoop loop = self.loop
        cdef Py_ssize_t i
        cdef list late = None
        cdef set late_envs = None
        if not loop.may_step_over:
            loop.check_none_over(envs)
        self.choose_frames(envs)
        if loop.encoders is None:
            loop.actions.write_rows(envs, actions)
        else:
            late = self.encode(envs, (<MessageCodec>loop.actions).split(actions, len(envs)))
            late_envs = {items[0][0] for _, items in late}
        self.post_each(envs, STEP, late_envs)
        return late or None

    cdef list encode(self, const Py_ssize_t[::1] envs, list actions):
        """Puts actions into the rings to the workers; what does not fit."""
        cdef ParentLoop loop = self.loop
        cdef list late = []
        cdef Py_ssize_t i
        cdef uint32_t worker
        try:
            for i in range(envs.shape[0]):
                worker = self.workers[envs[i]]
                if not loop.encode(worker, envs[i], actions[i], loop.sequence + 1 + <uint32_t>i):
                    late.append((worker, [(envs[i], actions[i])]))
        except BaseException:
            loop.sequence += <uint32_t>len(actions)  # what is in the rings is of no later one
            raise
        return late

    def post_resets(self, const Py_ssize_t[::1] envs):
        """Asks each of these envs to reset, without seed or options."""
        self.choose_frames(envs)
        self.post_each(envs, RESET, None)

    def post_command(self, const Py_ssize_t[::1] envs):
        """Asks the workers of these envs to read a command from their pipes; returns which."""
        cdef ParentLoop loop = self.loop
        cdef Py_ssize_t i
        cdef uint32_t worker
        self.choose_frames(envs, True)
        loop.sequence += 1
        named = {}
        for i in range(envs.shape[0]):
            self.ask(envs[i], COMMAND)
            named[self.workers[envs[i]]] = self.rows[envs[i]] // self.num_envs
        for worker, frame in named.items():
            loop.request(worker, COMMAND, loop.firsts[worker], loop.counts[worker], frame)
        self.open_requests += len(named)
        self.ranges_out = True
        loop.ring_bell()
        loop.rouse()  # as in ParentLoop.post
        return list(named)

    cdef Py_ssize_t together(self, const Py_ssize_t[::1] envs, Py_ssize_t begin):
        """How many envs one request can be for: then they answer at once.

        Where frames are leased, all of a worker if they come next, so that they lie side by side in
        one frame; after `ask_in_ranges` those of a worker that come next, in order.
        """
        cdef uint32_t worker = self.workers[envs[begin]]
        cdef Py_ssize_t first = self.loop.firsts[worker]
        cdef Py_ssize_t all_of_it = self.loop.counts[worker]
        cdef Py_ssize_t count = 1
        if self.loop.encoders is not None:  # whose messages name requests of single envs
            return 1
        while (begin + count < envs.shape[0] and envs[begin + count] == envs[begin] + count
                and envs[begin + count] < first + all_of_it):
            count += 1
        if self.in_ranges:
            return count
        return all_of_it if self.loop.leasing and count == all_of_it else 1

    def ask_in_ranges(self):
        """From now on neighbours are asked together: cheaper if nobody waits for one."""
        self.in_ranges = True

    cdef int choose_frames(self, const Py_ssize_t[::1] envs, bint by_worker=False) except -1:
        """Finds room for the results of these envs; raises, with nothing sent, if there is none."""
        cdef ParentLoop loop = self.loop
        cdef Py_ssize_t i = 0
        cdef Py_ssize_t j
        cdef Py_ssize_t count
        cdef Py_ssize_t frame
        loop.come_home()
        if not loop.framed:
            return 0
        while i < envs.shape[0]:
            count = 1
            if by_worker:  # envs are in order
                while (i + count < envs.shape[0]
                       and self.workers[envs[i + count]] == self.workers[envs[i]]):
                    count += 1
            else:
                count = self.together(envs, i)
            frame = loop.frame_for(envs[i:i + count])
            for j in range(i, i + count):
                self.rows[envs[j]] = frame * self.num_envs + envs[j]
            i += count
        return 0

    cdef int post_each(self, const Py_ssize_t[::1] envs, uint32_t operation,
                       set late_envs) except -1:
        """Posts a request for each of these envs, or for all of a worker."""
        cdef ParentLoop loop = self.loop
        cdef Py_ssize_t i = 0
        cdef Py_ssize_t j
        cdef Py_ssize_t count
        while i < envs.shape[0]:
            count = 1 if late_envs or loop.num_broken > 0 else self.together(envs, i)
            loop.sequence += 1
            for j in range(i, i + count):
                self.ask(envs[j], operation)
            if operation == STEP and loop.broken[envs[i]]:
                self.truncated.append(envs[i])
            else:
                loop.request(
                    self.workers[envs[i]],
                    operation | (LATE if late_envs and envs[i] in late_envs else 0),
                    <uint32_t>envs[i], <uint32_t>count, self.rows[envs[i]] // self.num_envs)
                self.open_requests += 1
            self.ranges_out |= count > 1
            i += count
        loop.ring_bell()
        if late_envs:
            loop.rouse()  # as in ParentLoop.post
        return 0

    cdef int ask(self, Py_ssize_t env, uint32_t operation) except -1:
        """Marks an env as out for the request of this sequence."""
        self.sequences[env] = self.loop.sequence
        self.states[env] = OUT
        self.operations[env] = operation
        self.loop.last_rows[env] = self.loop.rows[env]
        self.loop.rows[env] = self.rows[env]
        self.loop.asked += 1
        if self.held:  # of answers that nobody took
            self.held.pop(env, None)
        return 0

    # ---- waiting -----------------------------------------------------------------------------

    def look_if_due(self):
        """Looks after the workers now and then, also where others leave nothing to wait for."""
        cdef int64_t now = sv_now_ns()
        if now - self.looked_at >= self.loop.slice_ns:
            self.looked_at = now
            self.loop.look()
            if self.loop.step_limit >= 0 or self.loop.reset_limit >= 0:
                self.loop.check_limits()

    def wait(self, Py_ssize_t wanted, timeout):
        """Waits until `wanted` envs may be ready: `pop`, and look.  False: the time is up first."""
        cdef Py_ssize_t missing = wanted - self.num_ready
        cdef uint32_t done = self.loop.issued - self.open_requests
        if missing <= 0 or self.truncated:
            return True
        if self.open_requests == 0:  # nothing would ever come
            raise RuntimeError("the segment is damaged: answers are lost")
        if self.ranges_out:  # one answer may be that of many
            missing = 1
        cdef sv_budget usual = self.loop.waiter.budget
        if usual.pause == 0:
            # A worker to which the core is yielded keeps it until it has answered all that it was
            # asked; a sleeper that is woken takes it back (uneven envs: 1.6 -> 1.8 times lockstep).
            self.loop.waiter.budget.yield_ = self.loop.waiter.budget.linger = 0
        try:
            return self.loop.wait_for(
                done + <uint32_t>min(missing, <Py_ssize_t>self.open_requests), timeout)
        finally:
            self.loop.waiter.budget = usual

    def pop(self):
        """Takes the answers that are there.

        Returns those that are followed by a late message, as (worker, first env, number of envs),
        in this order; None if there are none.
        """
        cdef ParentLoop loop = self.loop
        cdef sv_record answer
        cdef uint32_t turn
        cdef uint32_t worker
        cdef Py_ssize_t env
        cdef bint asked
        cdef InfoDecoder decoder
        cdef list late = None
        for turn in range(loop.num_workers):
            worker = (self.next_worker + turn) % loop.num_workers
            while loop.take(worker, &answer):
                self.open_requests -= 1
                asked = False
                if (answer.first < loop.firsts[worker] or answer.count > loop.counts[worker]
                        or answer.first - loop.firsts[worker] > loop.counts[worker] - answer.count):
                    raise RuntimeError("the segment is damaged: an answer names no env")
                if answer.operation & LATE:
                    if late is None:
                        late = []
                    late.append((worker, answer.first, answer.count))
                for env in range(answer.first, answer.first + answer.count):
                    if self.states[env] == OUT and self.sequences[env] == answer.sequence:
                        asked = True
                        self.flags[env] = answer.operation
                        self.make_ready(env)
                        if self.in_any_order and answer.operation & MESSAGES:
                            decoder = loop.decoders[worker]
                            for owner, info in decoder.hold(env, answer.sequence):
                                if owner == env:  # else of one that failed
                                    self.hold(env, INFO, info)
                            self.flags[env] &= ~<uint32_t>MESSAGES
                if not asked:
                    raise RuntimeError(
                        f"the segment is damaged: worker {worker} has answered what was not asked")
        self.next_worker = (self.next_worker + 1) % loop.num_workers
        if self.open_requests == 0:
            self.ranges_out = False
        loop.follow_if_due()
        return late

    cdef int make_ready(self, Py_ssize_t env) except -1:
        self.states[env] = READY
        self.queue[(self.head + self.num_ready) % self.num_envs] = env
        self.num_ready += 1
        return 0

    # ---- faults ------------------------------------------------------------------------------

    def forget(self, uint32_t worker):
        """Ends what was posted to a worker that is dead; its answers have been popped.

        Returns the envs whose requests were lost: [(env, operation)].
        """
        cdef ParentLoop loop = self.loop
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        for i in range(self.num_ready):  # their infos are in a ring that goes
            env = self.queue[(self.head + i) % self.num_envs]
            if self.workers[env] == worker:
                self.hold_infos(env)
        self.open_requests -= loop.outstanding[worker]
        broken = set(self.truncated)
        return [
            (env, self.operations[env])
            for env in range(loop.firsts[worker], loop.firsts[worker] + loop.counts[worker])
            if self.states[env] == OUT and env not in broken
        ]

    def take_truncated(self):
        """The envs that were asked to step but are broken: their answer is for the caller."""
        envs, self.truncated = self.truncated, []
        return envs

    def answer(self, Py_ssize_t env):
        """Answers for an env that is out: its results are in the segment."""
        self.flags[env] = 0
        self.make_ready(env)

    def again(self, Py_ssize_t env):
        """Asks an env that is out to reset, in place of what it was asked."""
        self.states[env] = HOME
        self.loop.asked -= 1
        self.post_each(np.array([env], np.intp), RESET, None)

    def was_resetting(self, Py_ssize_t env):
        """Whether the env's last request was a reset."""
        return self.operations[env] != STEP

    def hold(self, Py_ssize_t env, uint32_t kind, message):
        """Keeps a message, which is in no ring, until its env is taken."""
        if kind == OBSERVATION:
            self.loop.home.observations.write(env, message[""])
        else:
            self.held.setdefault(env, []).append(message)

    def drop(self, Py_ssize_t env):
        """Takes a ready env out of the queue: it has failed."""
        self.take_these(np.array([env], np.intp))
        self.held.pop(env, None)

    def fail(self, Py_ssize_t env):
        """The same, but it is still out: its answer is to come."""
        self.drop(env)
        self.states[env] = OUT
        self.loop.asked += 1

    # ---- taking ------------------------------------------------------------------------------

    def take(self, Py_ssize_t count):
        """The envs that have been ready for longest, at most so many."""
        count = min(count, self.num_ready)
        envs = np.empty(count, np.intp)
        cdef Py_ssize_t[::1] view = envs
        cdef Py_ssize_t i
        for i in range(count):
            view[i] = self.queue[self.head]
            self.states[view[i]] = HOME
            self.head = (self.head + 1) % self.num_envs
        self.num_ready -= count
        self.loop.asked -= count
        return envs

    def take_these(self, const Py_ssize_t[::1] envs):
        """Takes ready envs, wherever they are in the queue; False if one is not ready."""
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        cdef Py_ssize_t kept = 0
        cdef Py_ssize_t count = self.num_ready
        for i in range(envs.shape[0]):
            if self.states[envs[i]] != READY:
                return False
        for i in range(envs.shape[0]):
            self.states[envs[i]] = HOME
        for i in range(count):
            env = self.queue[(self.head + i) % self.num_envs]
            if self.states[env] == READY:
                self.queue[(self.head + kept) % self.num_envs] = env
                kept += 1
        self.num_ready = kept
        self.loop.asked -= count - kept
        return True

    def num_missing(self, const Py_ssize_t[::1] envs):
        """How many of these envs have still to answer."""
        cdef Py_ssize_t i
        cdef Py_ssize_t missing = 0
        for i in range(envs.shape[0]):
            missing += self.states[envs[i]] == OUT
        return missing

    def infos_of(self, Py_ssize_t env):
        """What an env that was taken has sent, as it returned it: [info]."""
        self.hold_infos(env)
        return self.held.pop(env, [])

    def hold_infos(self, Py_ssize_t env):
        """Takes what an env has sent out of the ring; to be called in the order of answers."""
        cdef InfoDecoder decoder = self.loop.decoders[self.workers[env]]
        if self.flags[env] & MESSAGES:
            for owner, info in decoder.hold(env, self.sequences[env]):
                if owner == env:
                    self.hold(env, INFO, info)
            self.flags[env] &= ~<uint32_t>MESSAGES

    def results(self, const Py_ssize_t[::1] envs, infos):
        """What `recv` returns for these envs, in this order, and the lease if these are views."""
        cdef Results home = self.loop.home
        cdef Py_ssize_t i
        cdef Py_ssize_t count = envs.shape[0]
        rows = np.asarray(self.loop.rows)[np.asarray(envs)]
        cdef Py_ssize_t[::1] row_of = rows
        if self.loop.leasing and count > 0:
            for i in range(1, count):
                if row_of[i] != row_of[0] + i:
                    break
            else:
                lease = home.lease(row_of[0], count)
                return (*home.view(lease, row_of[0], (count,)), infos), lease
        return (*home.gather(row_of), infos), None

    def have_infos(self, const Py_ssize_t[::1] envs):
        """Whether one of these envs, which were taken, has sent any."""
        cdef Py_ssize_t i
        for i in range(envs.shape[0]):
            if self.flags[envs[i]] & MESSAGES:
                return True
        return len(self.held) > 0

    def infos(self, const Py_ssize_t[::1] envs, const Py_ssize_t[::1] rows, vector_env):
        """Gymnasium's dict of arrays of envs that were taken.

        `rows` says where in the arrays each one is; `vector_env` how long they are.
        """
        cdef ParentLoop loop = self.loop
        cdef dict infos = {}
        cdef Py_ssize_t i
        cdef Py_ssize_t num_rows = vector_env.num_envs
        cdef InfoDecoder decoder
        try:
            for i in range(envs.shape[0]):
                if self.flags[envs[i]] & MESSAGES:
                    decoder = loop.decoders[self.workers[envs[i]]]
                    decoder.add_env(infos, envs[i], self.sequences[envs[i]], rows[i], num_rows,
                                    vector_env)
                    self.flags[envs[i]] &= ~<uint32_t>MESSAGES
                if self.held:
                    for info in self.held.pop(envs[i], ()):
                        infos = vector_env._add_info(infos, info, rows[i])
        finally:
            loop.columns.finish()
        return infos

"""The ledger of a vector env: which env was asked what, and which has answered.

No other object keeps this. Each call of the ledger has three phases. *Prepare* does everything
that may raise, be refused or run other people's Python code; it changes nothing that another call
can see. *Commit* notes what was asked or taken and puts requests on rings; it calls no Python code.
*Publish* rings the bell and returns results. So an exception at any moment, from a signal handler
for instance, leaves the ledger true: envs that were asked are in flight.

*Lockstep* is the fast path: all envs are asked at once, with one request a worker, and the ledger
does nothing for each env. An exceptional case (a fault, a message through a channel, a time limit)
first writes entries for the single envs, and continues as if they had been asked one by one.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from shmvec._core.csrc cimport (
    SV_EVERYONE,
    SV_RING_YES,
    SV_TRACE_CALLER,
    SV_TRACE_SEND,
    SV_TRACE_TAKE,
    sv_bell_mask,
    sv_budget,
    sv_completion_issue,
    sv_now_ns,
    sv_record,
    sv_ring_try_pop,
)
from shmvec._core.arrays cimport data_of
from shmvec._core.codec cimport ActionCodec, MessageCodec
from shmvec._core.infos cimport FAILED, IDLE, IN_FLIGHT, LOST, READY, Inbox, Report, report_of
from shmvec._core.messages cimport Encoder
from shmvec._core.protocol cimport ACTION, COMMAND, LATE, MESSAGES, OBSERVATION
from shmvec._core.protocol cimport RESET, STEP, TOGETHER

from pickle import PicklingError

import numpy as np
from gymnasium.vector import VectorEnv

from shmvec._core.codec import OtherShapeError
from shmvec._core.infos import Batch

cdef object _plain_add_info = VectorEnv._add_info
cdef tuple NOTHING = (None, None)  # the seed and the options of a reset that has neither

DONE, UNFINISHED, TIME_UP = range(3)

cdef double FOR_EVER_S = 1e9

cdef class Ledger:
    """The request to each env, and its answer."""

    def __cinit__(self, Links links, *args, **kwargs):
        self.lock_answers = <sv_record *>calloc(links.num_workers, sizeof(sv_record))
        if self.lock_answers is NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.lock_answers)

    def __init__(self, Links links, Frames frames, slabs, autoreset, pack, may_step_over=True,
                 in_ranges=False):
        cdef uint32_t worker
        cdef Py_ssize_t env
        self.links = links
        self.frames = frames
        self.pack = pack
        self.resets_in_step = autoreset.in_step
        self.resets_in_next_step = autoreset.in_next_step
        self.may_step_over = may_step_over
        self.in_ranges = in_ranges
        self.num_envs = frames.num_envs
        self.everyone = frames.everyone
        self.states = np.zeros(self.num_envs, np.uint8)
        self.operations = np.zeros(self.num_envs, np.uint8)
        self.sequences = np.zeros(self.num_envs, np.uint32)
        self.flags = np.zeros(self.num_envs, np.uint32)
        self.workers = np.zeros(self.num_envs, np.uint32)
        self.by_user = np.zeros(self.num_envs, np.uint8)
        self.checked_by = np.zeros(self.num_envs, np.uint64)
        self.queue = np.zeros(self.num_envs, np.intp)
        self.inbox = Inbox(
            links, slabs, self.workers, self.states, self.sequences, self.flags)
        self.actions = slabs.actions
        if isinstance(self.actions, MessageCodec):
            self.encoders = [None] * links.num_workers
        self.unfinished = [[] for _ in range(links.num_workers)]
        for worker in range(links.num_workers):
            for env in range(links.firsts[worker], links.firsts[worker] + links.counts[worker]):
                self.workers[env] = worker
            self.renew(worker)
        self.failures = []
        self.raised = []
        self.results = {}
        self.unanswered = []
        self.reports = {}
        self.after = {}
        self.resets = np.zeros(self.num_envs, np.int64)
        self.asked_with = [NOTHING] * self.num_envs
        self.last_seeds = [None] * self.num_envs
        self.lost_workers = np.zeros(links.num_workers, np.uint8)

    def catch_up(self):
        """Has the log of a replay accept what was recorded of all envs that are not in flight."""
        cdef Py_ssize_t env
        if self.log is not None and not self.lockstep:
            for env in range(self.num_envs):
                if self.states[env] == IDLE:
                    self.log.accept(env)

    cdef int renew(self, uint32_t worker) except -1:
        """Begins to read and write a worker's rings of messages from their start."""
        cdef Links links = self.links
        cdef Py_ssize_t env
        self.inbox.renew(worker)
        if self.log is not None:  # answers that are there were not lost with the worker
            for env in range(links.firsts[worker], links.firsts[worker] + links.counts[worker]):
                if self.states[env] in (IDLE, READY):
                    self.log.accept(env)
        if self.encoders is not None:
            self.encoders[worker] = Encoder(
                links.segment, worker, links.firsts[worker], links.counts[worker], False)
        return 0

    # ---- questions ---------------------------------------------------------------------------

    @property
    def num_in_flight(self):
        """The number of envs that were asked and whose answers were not taken."""
        return self.num_envs if self.lockstep else self.num_singles

    @property
    def num_unanswered(self):
        """The number of envs in flight that have not answered yet."""
        return self.num_in_flight - self.num_ready

    @property
    def incomplete(self):
        """Workers whose answers can be taken only after a message that has not come yet."""
        if self.num_unfinished == 0:
            return ()
        return [worker for worker in range(len(self.unfinished)) if self.unfinished[worker]]

    cdef int check_exists(self, Py_ssize_t env) except -1:
        if not 0 <= env < self.num_envs:
            raise ValueError(f"there is no env {env}: there are {self.num_envs}")

    def in_flight(self, Py_ssize_t env):
        self.check_exists(env)
        return self.lockstep or self.states[env] != IDLE

    def is_over(self, Py_ssize_t env):
        self.check_exists(env)
        return self.frames.over(env) or (env in self.after and self.after[env][1])

    def num_missing(self, const Py_ssize_t[::1] envs):
        """A lower bound of the requests to these envs that are pending; one may be for several."""
        cdef Py_ssize_t i
        cdef Py_ssize_t missing = 0
        cdef int64_t last = -1  # a request with this number or a lower one may have been counted
        self.spread()
        for i in range(envs.shape[0]):
            self.check_exists(envs[i])
            if self.states[envs[i]] not in (READY, IDLE) and self.sequences[envs[i]] > last:
                missing += 1
                last = self.sequences[envs[i]]
        return missing

    # ---- asking ------------------------------------------------------------------------------

    def check(self, const Py_ssize_t[::1] envs):
        """Raises ValueError unless each of these envs exists, is named once, and is idle."""
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        self.checks += 1
        for i in range(envs.shape[0]):
            env = envs[i]
            self.check_exists(env)
            if self.lockstep or self.states[env] != IDLE:
                raise ValueError(
                    f"env {env} has been asked already: take its results, with recv(), before it "
                    "is asked again. Nothing was sent to any env."
                )
            if self.checked_by[env] == self.checks:
                raise ValueError(f"env {env} is named twice. Nothing was sent to any env.")
            self.checked_by[env] = self.checks

    cdef int check_none_over(self, const Py_ssize_t[::1] envs) except -1:
        cdef Py_ssize_t i
        cdef list over = [envs[i] for i in range(envs.shape[0]) if self.frames.over(envs[i])]
        if over:
            raise AssertionError(
                f"the episodes of envs {over} are over, and with "
                "AutoresetMode.DISABLED no step resets them: call "
                "reset(options={'reset_mask': terminations | truncations}) first. "
                "Nothing was sent to any env."
            )
        return 0

    cpdef int step_all(self, actions, Py_ssize_t rollout_frame=-1) except -1:
        """Writes actions and asks every env to step, none of which may be in flight.

        Args:
            actions: Batched as their space says.
            rollout_frame: The frame for the results; -1: one at home.
        """
        cdef Py_ssize_t frame
        cdef dict late
        cdef uint32_t sequence
        self.links.enter(SV_TRACE_SEND)
        if self.lockstep or self.num_singles:
            raise RuntimeError("take the answers to what was asked first: the slabs are in use")
        if not self.may_step_over:
            self.check_none_over(self.everyone)
        if self.num_broken > 0:
            self.step(self.everyone, actions, rollout_frame)
            return 0
        if self.log is not None:
            self.log.asked(self.everyone)
        self.links.sequence += 1
        sequence = self.links.sequence
        late = self.write_all_actions(actions, sequence, rollout_frame < 0)
        self.send(late, sequence)
        frame = self.frames.aim_all(rollout_frame)
        return self.post_all(STEP, sequence, frame, late)

    # Actions are written before their requests. A call that is interrupted in between, or raises,
    # has asked for nothing: its actions are overwritten later, or discarded, as no request has
    # their number.

    cdef dict write_all_actions(self, actions, uint32_t sequence, bint any_shape):
        """Writes all envs' actions for one request number; returns what does not fit, by worker."""
        cdef Links links = self.links
        cdef uint32_t worker
        cdef Py_ssize_t env
        cdef dict left
        cdef list each = self.write_rows(self.everyone, actions, any_shape)
        if each is None:
            return None
        left = {}
        for worker in range(links.num_workers):
            for env in range(links.firsts[worker], links.firsts[worker] + links.counts[worker]):
                if self.encoders is None or not self.encode(env, each[env], sequence):
                    left.setdefault(worker, []).append((env, each[env]))
        for worker in left:
            left[worker] = self.pack(left[worker])
        return left

    cdef dict write_actions(self, const Py_ssize_t[::1] envs, actions, uint32_t sequence,
                            bint any_shape):
        """Writes envs' actions for numbers from ``sequence`` on; returns what does not fit."""
        cdef Py_ssize_t i
        cdef dict left
        cdef list each = self.write_rows(envs, actions, any_shape)
        if each is None:
            return None
        left = {}
        for i in range(envs.shape[0]):
            if self.encoders is None or not self.encode(
                    envs[i], each[i], sequence + <uint32_t>i):
                left[envs[i]] = self.pack([(envs[i], each[i])])
        return left

    cdef list write_rows(self, const Py_ssize_t[::1] envs, actions, bint any_shape):
        """Writes actions to their slab; returns them as a list if they must be messages."""
        if self.encoders is not None:
            return (<MessageCodec>self.actions).split(actions, envs.shape[0])
        try:
            self.actions.write_rows(envs, actions)
        except OtherShapeError as error:
            if not any_shape or not isinstance(self.actions, ActionCodec):
                raise
            return list(error.actions.copy())  # copied, because envs may keep their actions
        return None

    cdef bint encode(self, Py_ssize_t env, action, uint32_t sequence) except -1:
        """Puts an action into its worker's ring; False if it does not fit."""
        cdef Encoder encoder = self.encoders[self.workers[env]]
        try:
            return encoder.encode(env, ACTION, {"": action}, sequence)
        except (PicklingError, TypeError, AttributeError) as error:  # what pickle raises
            raise TypeError(
                f"wrong actions: that of env {env} cannot be pickled to send it to its worker "
                f"({error}). Nothing was sent to any env."
            ) from error

    cdef int send(self, dict late, uint32_t sequence) except -1:
        """Puts the messages of a request into channels; without a request they are discarded."""
        cdef uint32_t worker
        if late:
            for worker in late:
                self.links.channels[worker].put(sequence, late[worker])
            self.links.talking = True
        return 0

    cdef int post_all(self, uint32_t operation, uint32_t sequence, Py_ssize_t frame,
                      dict late) except -1:
        """Puts one request on every worker's ring."""
        cdef Links links = self.links
        cdef uint32_t worker
        cdef uint32_t flag
        cdef uint32_t together = 0
        if links.lingering:
            together = TOGETHER
            sv_completion_issue(links.completion, links.issued + links.num_workers)
        for worker in range(links.num_workers):
            flag = LATE | together if late and worker in late else together
            links.request(worker, sequence, operation | flag, links.firsts[worker],
                          links.counts[worker], frame)
        self.lockstep = True
        self.lock_operation = operation
        self.lock_sequence = sequence
        links.guard.note_asked()
        if self.after:
            self.spread()
        return links.ring(SV_EVERYONE)

    def step(self, const Py_ssize_t[::1] envs, actions, rollout_frame=None, together=False):
        """Writes actions and asks each of these envs, which were checked, to step."""
        cdef uint32_t base = self.links.sequence
        cdef dict late
        cdef dict lasts
        cdef Py_ssize_t i
        self.links.enter(SV_TRACE_SEND)
        self.check(envs)
        if self.log is not None:
            self.log.asked(envs)
        self.ranging = together or self.in_ranges
        if not self.may_step_over:
            self.check_none_over(envs)
        if rollout_frame is None:
            self.frames.come_home(self.num_singles)
            self.choose_frames(envs, False)
        elif envs.shape[0] < self.num_envs:
            self.frames.check_away()
        self.links.sequence += <uint32_t>envs.shape[0]  # these numbers are gone if this fails
        late = self.write_actions(
            envs, actions, base + 1, rollout_frame is None or rollout_frame < 0)
        lasts = self.last_of_broken(envs)
        if late:
            for i in range(envs.shape[0]):
                if envs[i] in late:
                    self.links.channels[self.workers[envs[i]]].put(
                        base + 1 + <uint32_t>i, late[envs[i]])
            self.links.talking = True
        if rollout_frame is not None:
            if envs.shape[0] == self.num_envs:
                self.frames.aim_all(rollout_frame)
            else:
                self.frames.aim_some(envs, rollout_frame)
            self.frames.chosen[:] = -1
        self.post(envs, STEP, base + 1, late, lasts)

    cdef dict last_of_broken(self, const Py_ssize_t[::1] envs):
        """The last observations of those of these envs whose episodes are broken."""
        cdef Py_ssize_t i
        cdef dict lasts = {}
        if self.num_broken > 0 and self.resets_in_step:
            for i in range(envs.shape[0]):
                if envs[i] in self.after and self.after[envs[i]][1]:
                    lasts[envs[i]] = self.frames.last_observation(envs[i], False)
        return lasts

    def reset(self, const Py_ssize_t[::1] envs):
        """Asks each of these envs to reset, without seed or options."""
        cdef uint32_t base = self.links.sequence
        self.links.enter(SV_TRACE_SEND)
        self.check(envs)
        if self.log is not None:
            self.log.asked(envs)
        self.ranging = self.in_ranges
        self.frames.come_home(self.num_singles)
        self.choose_frames(envs, False)
        self.links.sequence += <uint32_t>envs.shape[0]
        self.note_reset(envs, None, True)
        self.post(envs, RESET, base + 1, None, None)

    cdef int note_reset(self, const Py_ssize_t[::1] envs, list arguments, bint repeat) except -1:
        """Notes the (seed, options) of the envs' resets, so that a lost reset can be repeated.

        This is part of a commit: it uses the ledger's own memory only.
        """
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        for i in range(envs.shape[0]):
            env = envs[i]
            self.resets[env] += 1
            self.asked_with[env] = arguments[i] if repeat and arguments is not None else NOTHING
            if arguments is not None and (<tuple>arguments[i])[0] is not None:
                self.last_seeds[env] = (<tuple>arguments[i])[0]
        return 0

    cdef int post(self, const Py_ssize_t[::1] envs, uint32_t operation, uint32_t sequence,
                  dict late, dict lasts) except -1:
        """Commits a request for each of these envs, or one for neighbours, and rings the bell."""
        cdef Links links = self.links
        cdef Py_ssize_t i = 0
        cdef Py_ssize_t j
        cdef Py_ssize_t env
        cdef Py_ssize_t count
        cdef list broken = []
        cdef uint32_t mask = self.mask_of(envs)
        links.guard.note_asked()
        while i < envs.shape[0]:
            env = envs[i]
            count = 1 if late or self.num_broken > 0 else self.together(envs, i)
            for j in range(i, i + count):
                self.frames.aim_chosen(envs[j])
            if operation == STEP and env in self.after and self.after[env][1]:  # it is not asked
                broken.append(env)
                self.enter(env, operation, sequence + <uint32_t>i)
            else:
                links.request(
                    self.workers[env], sequence + <uint32_t>i,
                    operation | (LATE if late and env in late else 0), <uint32_t>env,
                    <uint32_t>count, self.frames.frame_of(env))
                self.open_requests += 1
                for j in range(i, i + count):
                    self.enter(envs[j], operation, sequence + <uint32_t>i)
                self.ranges_in_flight |= count > 1
            i += count
        for env in broken:  # last, because their requests have later numbers
            self.cut(env, self.reports[env].fault, lasts)
        return links.ring(SV_EVERYONE if broken else mask)

    cdef Py_ssize_t together(self, const Py_ssize_t[::1] envs, Py_ssize_t begin):
        """The number of these envs, from ``begin`` on, that one request can name.

        Where frames are leased: all envs of a worker, if they come next, because they must lie side
        by side in one frame. Where requests are `ranging`: the next neighbours of one worker.
        """
        cdef Links links = self.links
        cdef uint32_t worker = self.workers[envs[begin]]
        cdef Py_ssize_t first = links.firsts[worker]
        cdef Py_ssize_t all_of_it = links.counts[worker]
        cdef Py_ssize_t count = 1
        if self.encoders is not None or not (self.ranging or self.frames.leasing):
            return 1  # a message belongs to the request of a single env
        while (begin + count < envs.shape[0] and envs[begin + count] == envs[begin] + count
                and envs[begin + count] < first + all_of_it):
            count += 1
        if self.ranging:
            return count
        return all_of_it if count == all_of_it else 1

    def command(self, const Py_ssize_t[::1] envs, dict packed, list resets=None, descriptors=(),
                bint repeat=True):
        """Asks the workers of these envs to carry out a command.

        Args:
            envs: Indices of envs, ascending.
            packed: The message of each worker whose envs these are.
            resets: (seed, options) of each env, for a command that resets them; None: for others.
            descriptors: Descriptors that are sent with each message.
            repeat: Whether a reset that is lost is repeated with its seed and options.
        """
        cdef Links links = self.links
        cdef uint32_t worker
        cdef Py_ssize_t i
        cdef Py_ssize_t frame
        cdef uint32_t sequence
        links.enter(SV_TRACE_SEND)
        self.check(envs)
        if self.log is not None:
            self.log.asked(envs)
        if resets is not None:
            self.frames.come_home(self.num_singles)
            self.choose_frames(envs, True)
        links.sequence += 1
        sequence = links.sequence
        for worker in packed:  # first: without a request a message is discarded
            links.channels[worker].put(sequence, packed[worker], descriptors)
        links.talking = True
        links.guard.note_asked()
        if resets is not None:
            self.note_reset(envs, resets, repeat)
        for i in range(envs.shape[0]):
            if resets is not None:
                self.frames.aim_chosen(envs[i])
            worker = self.workers[envs[i]]
            if i + 1 == envs.shape[0] or self.workers[envs[i + 1]] != worker:
                frame = self.frames.frame_of(envs[i]) if resets is not None else 0
                links.request(worker, sequence, COMMAND, links.firsts[worker],
                              links.counts[worker], frame)
                self.open_requests += 1
        for i in range(envs.shape[0]):
            self.enter(envs[i], COMMAND if resets is None else RESET, sequence)
        self.ranges_in_flight = True
        links.ring(self.mask_of(envs))

    cdef int choose_frames(self, const Py_ssize_t[::1] envs, bint by_worker) except -1:
        """Finds room for the results of these envs, or raises; nothing is sent by then."""
        cdef Py_ssize_t i = 0
        cdef Py_ssize_t count
        if not self.frames.several:
            return self.frames.choose_for(envs)
        while i < envs.shape[0]:
            count = 1
            if by_worker:  # envs are in order
                while (i + count < envs.shape[0]
                       and self.workers[envs[i + count]] == self.workers[envs[i]]):
                    count += 1
            else:
                count = self.together(envs, i)
            self.frames.choose_for(envs[i:i + count])
            i += count
        return 0

    cdef uint32_t mask_of(self, const Py_ssize_t[::1] envs):
        """Workers to wake for these envs: their own, or all workers if these are most of them."""
        cdef Py_ssize_t i
        cdef uint32_t mask = 0
        if 2 * envs.shape[0] > <Py_ssize_t>self.links.num_workers:
            return SV_EVERYONE
        for i in range(envs.shape[0]):
            mask |= sv_bell_mask(self.workers[envs[i]])
        return mask

    cdef int enter(self, Py_ssize_t env, uint32_t operation, uint32_t sequence) except -1:
        """Notes that an env was asked."""
        self.sequences[env] = sequence
        self.states[env] = IN_FLIGHT
        self.operations[env] = operation
        self.by_user[env] = operation == RESET
        self.num_singles += 1
        if operation == COMMAND:
            return 0
        if self.after and env in self.after:
            fault, breaks = self.after.pop(env)
            self.num_broken -= breaks
            self.reports[env] = report_of(fault, False, None)
        self.inbox.discard(env)  # messages of answers that were never taken
        return 0

    cdef int leave(self, Py_ssize_t env, int state) except -1:
        """Notes that an env is no longer in flight."""
        self.states[env] = state
        if state == IDLE:
            self.num_singles -= 1
        return 0

    cdef int make_ready(self, Py_ssize_t env) except -1:
        self.leave(env, READY)
        self.queue[(self.head + self.num_ready) % self.num_envs] = env
        self.num_ready += 1
        return 0

    # ---- waiting -----------------------------------------------------------------------------

    def wait_all(self, timeout):
        """Waits until all requests are answered; False if the time is up first."""
        return self.links.wait_for(self.links.issued, timeout)

    cdef bint wait(self, Py_ssize_t wanted, timeout, bint requests) except -1:
        """Waits until ``wanted`` more envs, or requests, may be answered; False: time is up."""
        cdef Links links = self.links
        cdef uint32_t done = links.issued - self.open_requests
        cdef sv_budget usual = links.waiter.budget
        if self.lockstep:
            return self.wait_all(timeout)
        if self.open_requests == 0:  # no answer would ever come
            raise RuntimeError("the segment is damaged: answers are lost")
        if self.ranges_in_flight and not requests:  # one answer may be for many envs
            wanted = 1
        if usual.pause == 0:
            # This wait must not yield: a worker keeps a core that is yielded to it until it has
            # answered all its requests, while a sleeper that is woken takes the core back at once
            # (uneven envs: 1.6 -> 1.8 times lockstep).
            links.waiter.budget.yield_ = links.waiter.budget.linger = 0
        try:
            return links.wait_for(
                done + <uint32_t>min(wanted, <Py_ssize_t>self.open_requests), timeout)
        finally:
            links.waiter.budget = usual

    cpdef int wait_ready(self, Py_ssize_t wanted, envs=None, timeout=None) except -1:
        """Waits until enough envs are ready, and these have answered.

        Args:
            wanted: Number of ready envs, or until one has raised; -1: all that are in flight.
            envs: Envs that must have answered, whatever is ``wanted``.
            timeout: Seconds to wait. None: as long as it takes.

        Returns:
            DONE; TIME_UP; or UNFINISHED: a message must be read, or an env has raised.
        """
        cdef Py_ssize_t missing
        cdef int64_t deadline = -1
        if timeout is not None and timeout < FOR_EVER_S:
            deadline = sv_now_ns() + <int64_t>(timeout * 1e9)
        if self.links.inline is not None and self.num_unanswered:
            # First: else the caller would step its envs only when the others were not enough.
            self.links.serve_here()
        while True:
            self.pop()
            if self.num_unfinished > 0 or self.failures:
                return UNFINISHED
            if envs is not None:
                missing = self.num_missing(envs)
            elif wanted < 0:
                missing = self.num_unanswered
            elif self.raised:
                return DONE
            else:
                missing = wanted - self.num_ready
            if missing <= 0:
                return DONE
            if deadline >= 0:
                timeout = 1e-9 * max(deadline - sv_now_ns(), <int64_t>0)
            if not self.wait(missing, timeout, envs is not None):
                return TIME_UP

    # ---- answers -----------------------------------------------------------------------------

    cdef int spread(self) except -1:
        """Writes a lockstep request to the entries of the single envs."""
        cdef Links links = self.links
        cdef Py_ssize_t env
        cdef uint32_t worker
        if not self.lockstep:
            return 0
        self.lockstep = False
        for env in range(self.num_envs):
            self.enter(env, self.lock_operation, self.lock_sequence)
        for worker in range(links.num_workers):
            self.open_requests += links.outstanding[worker]
        self.ranges_in_flight = True
        if self.popped:
            self.popped = False
            self.open_requests = links.num_workers
            for worker in range(links.num_workers):
                self.settle(worker, &self.lock_answers[worker])
        return 0

    cpdef tuple take_all(self, vector_env, bint arrays=True):
        """Waits for a lockstep request and takes its answers: four arrays and infos.

        Returns None in an exceptional case, or if envs were asked one by one: for these there are
        `wait_ready` and `take`.

        Args:
            vector_env: Gathers the infos; None: one dict an env.
            arrays: Whether arrays are wanted at all.
        """
        cdef Links links = self.links
        cdef uint32_t worker
        cdef list sending = None
        if not self.lockstep:
            return None
        links.enter(SV_TRACE_TAKE)
        links.follow_if_due()
        if not self.popped:
            links.wait_for(links.issued, None)
            self.pop_all()
        for worker in range(links.num_workers):
            if self.lock_answers[worker].operation & MESSAGES:
                sending = [] if sending is None else sending
                sending.append(worker)
        if self.awaits_messages or self.after or (
                sending is not None and vector_env is not None
                and type(vector_env)._add_info is not _plain_add_info):
            self.spread()
            return None
        try:
            if vector_env is None:
                infos = [{} for _ in range(self.num_envs)]
                if sending is not None:
                    infos = self.inbox.each_of_all(sending, self.lock_sequence)
            elif sending is not None:
                infos = self.inbox.gather_all(sending, self.lock_sequence, vector_env)
            else:
                infos = {}
            if arrays:
                return self.frames.all(True, infos)
            return None, None, None, None, infos
        finally:  # also after an exception, which loses the results
            self.commit(self.everyone, ())

    cdef int pop_all(self) except -1:
        """Receives the answers to a lockstep request, all of which are on the rings."""
        cdef Links links = self.links
        cdef uint32_t worker
        self.awaits_messages = False
        for worker in range(links.num_workers):
            if (not links.take(worker, &self.lock_answers[worker])
                    or self.lock_answers[worker].sequence != self.lock_sequence):
                raise RuntimeError(
                    f"the segment is damaged: worker {worker} has answered what was not asked")
            self.awaits_messages |= (self.lock_answers[worker].operation & LATE) != 0
        self.popped = True
        return 0

    cdef int pop(self) except -1:
        """Receives the answers that are on the rings."""
        cdef Links links = self.links
        cdef sv_record answer
        cdef uint32_t i
        cdef uint32_t worker
        links.enter(SV_TRACE_TAKE)
        self.spread()
        for i in range(links.num_workers):
            worker = (self.next_worker + i) % links.num_workers
            while links.take(worker, &answer):
                self.settle(worker, &answer)
        self.next_worker = (self.next_worker + 1) % links.num_workers
        if self.open_requests == 0:
            self.ranges_in_flight = False
        return links.follow_if_due()

    cdef int settle(self, uint32_t worker, sv_record *answer) except -1:
        """Notes an answer; its envs are ready once its message and earlier answers have come."""
        cdef Py_ssize_t env
        cdef bint asked = False
        cdef list unfinished = self.unfinished[worker]
        for env in range(answer.first, answer.first + answer.count):
            if self.states[env] == IN_FLIGHT and self.sequences[env] == answer.sequence:
                asked = True
                self.flags[env] = answer.operation
        if not asked:
            raise RuntimeError(
                f"the segment is damaged: worker {worker} has answered what was not asked")
        self.open_requests -= 1
        if not unfinished and not answer.operation & LATE:  # the fast path
            return self.make_all_ready(answer.first, answer.count, answer.sequence)
        self.num_unfinished += 1
        unfinished.append((answer.sequence, answer.first, answer.count, answer.operation & LATE))
        return self.settle_unfinished(worker)

    cdef int settle_unfinished(self, uint32_t worker) except -1:
        """Makes envs ready, in the order of their answers, up to one whose message must come."""
        cdef list unfinished = self.unfinished[worker]
        while unfinished and not unfinished[0][3]:
            sequence, first, count, _ = unfinished.pop(0)
            self.num_unfinished -= 1
            self.make_all_ready(first, count, sequence)
        return 0

    cdef int make_all_ready(self, Py_ssize_t first, Py_ssize_t count,
                            uint32_t sequence) except -1:
        cdef Py_ssize_t env
        for env in range(first, first + count):
            if self.states[env] == IN_FLIGHT and self.sequences[env] == sequence:
                self.make_ready(env)
        return 0

    def sequence_awaited(self, uint32_t worker):
        """The number of the request whose message must come next from a worker."""
        return self.unfinished[worker][0][0]

    def deliver(self, uint32_t worker, list messages, list failures, results):
        """Takes the next message of a worker: (kind, env, message), failures and results."""
        cdef Py_ssize_t env
        cdef dict held = {}
        sequence, first, count, _ = self.unfinished[worker][0]
        for kind, env, message in messages:
            if self.sequences[env] != sequence:
                continue
            if kind == OBSERVATION:
                self.inbox.observations.write(env, message[""])
            else:
                held.setdefault(env, []).append(message)
        failed = {failure.env for failure in failures}
        # The commit.
        del self.unfinished[worker][0]
        self.num_unfinished -= 1
        self.inbox.held.update(held)
        for env in range(first, first + count):
            if self.states[env] == IN_FLIGHT and self.sequences[env] == sequence:
                if env in failed:
                    self.leave(env, FAILED)
                else:
                    if results is not None:
                        self.results[env] = results[env - first]
                    self.make_ready(env)
        self.failures += failures
        self.settle_unfinished(worker)

    # ---- faults ------------------------------------------------------------------------------

    def lose(self, uint32_t worker):
        """Notes that a worker is dead; its complete answers remain valid.

        A second call continues one that was interrupted.
        """
        cdef Links links = self.links
        cdef sv_record answer
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        self.spread()
        while (links.outstanding[worker] > 0
               and sv_ring_try_pop(&links.completions[worker], &answer) == SV_RING_YES
               and links.is_of(worker, &answer)):
            links.outstanding[worker] -= 1
            self.settle(worker, &answer)
        self.num_unfinished -= len(self.unfinished[worker])
        self.unfinished[worker] = [left for left in self.unfinished[worker] if not left[3]]
        self.num_unfinished += len(self.unfinished[worker])
        self.settle_unfinished(worker)
        for i in range(self.num_ready):  # their infos lie in a ring that is about to be renewed
            env = self.queue[(self.head + i) % self.num_envs]
            if self.workers[env] == worker:
                self.inbox.hold(env)
        # The commit.
        for env in range(links.firsts[worker], links.firsts[worker] + links.counts[worker]):
            if self.states[env] == IN_FLIGHT:
                self.states[env] = LOST
        self.open_requests -= links.outstanding[worker]
        links.renew(worker)
        self.renew(worker)
        self.lost_workers[worker] = True

    def is_lost(self, uint32_t worker):
        """Whether a worker is dead and has no successor."""
        return bool(self.lost_workers[worker])

    def retire(self, uint32_t worker):
        """Notes that a worker is dead and gets no successor: its envs are not waited for."""
        cdef Links links = self.links
        cdef Py_ssize_t env
        self.lose(worker)
        for env in range(links.firsts[worker], links.firsts[worker] + links.counts[worker]):
            if self.states[env] == LOST or self.states[env] == FAILED:
                self.leave(env, IDLE)

    def lost_resets(self, uint32_t worker):
        """Envs of a dead worker that were lost in a reset by the caller, or raised in it."""
        cdef Links links = self.links
        cdef Py_ssize_t env
        return [env for env in range(links.firsts[worker],
                                     links.firsts[worker] + links.counts[worker])
                if self.states[env] in (LOST, FAILED) and self.by_user[env]]

    def revive(self, uint32_t worker, fault):
        """Notes that a worker has a successor, and repeats or answers what was lost."""
        cdef Links links = self.links
        cdef Py_ssize_t env
        cdef Py_ssize_t first = links.firsts[worker]
        cdef Py_ssize_t end = first + links.counts[worker]
        cdef dict lasts = {env: self.last_of_lost(env) for env in range(first, end)}
        # The commit.
        self.lost_workers[worker] = False
        for env in range(first, end):
            if self.states[env] == LOST or self.states[env] == FAILED:
                self.answer_lost(env, fault, lasts)
            else:
                self.break_later(env, fault)
        links.ring(SV_EVERYONE)

    cdef object last_of_lost(self, Py_ssize_t env):
        """The final observation of the episode of an env whose step is lost."""
        if self.resets_in_step and self.operations[env] == STEP and (
                self.states[env] == LOST or self.states[env] == FAILED):
            return self.frames.last_observation(env, True)
        return None

    def has_failed(self, Py_ssize_t env):
        """Whether an env has raised, and the ledger has not answered in its place."""
        return self.states[env] == FAILED

    def mend(self, failure, fault):
        """Answers in place of an env that has raised, which settles its failure."""
        cdef dict lasts = {failure.env: self.last_of_lost(failure.env)}
        self.answer_lost(failure.env, fault, lasts)
        self.settle_failure(failure)
        self.links.ring(SV_EVERYONE)

    def settle_failure(self, failure):
        """Removes an env's failure from the list of those that are not decided."""
        cdef Py_ssize_t i
        for i in range(len(self.failures)):
            if self.failures[i] is failure:
                del self.failures[i]
                break

    def give_up(self, failure):
        """Leaves an env's exception to the caller."""
        if self.states[failure.env] == FAILED:
            self.leave(failure.env, IDLE)
        self.raised.append(failure)
        self.settle_failure(failure)

    cdef int answer_lost(self, Py_ssize_t env, fault, dict lasts) except -1:
        cdef Report report = self.reports.get(env)
        if self.operations[env] == COMMAND:
            self.leave(env, IDLE)
            self.unanswered.append(env)
            return self.break_later(env, fault)
        if self.operations[env] == STEP and not (
                self.resets_in_next_step and self.frames.was_over(env)):
            return self.cut(env, fault, lasts)
        if report is not None:  # the reset itself may be due to an earlier fault
            self.reports[env] = report_of(fault, report.cut_off, report.last)
        else:
            self.reports[env] = report_of(fault, False, None)
        return self.ask_reset_instead(env)

    cdef int break_later(self, Py_ssize_t env, fault) except -1:
        """Has the env's next answer report a fault, as a truncation unless the episode is over."""
        cdef bint breaks = self.resets_in_step or not self.frames.over(env)
        if env in self.after:
            self.num_broken -= self.after[env][1]
        self.after[env] = fault, breaks
        self.num_broken += breaks
        return 0

    cdef int cut(self, Py_ssize_t env, fault, dict lasts) except -1:
        """Answers in place of an env with a truncation; it is then reset as its mode says."""
        self.frames.truncate(env)
        self.flags[env] = 0
        if self.resets_in_step:
            self.reports[env] = report_of(fault, True, [lasts[env]])
            self.by_user[env] = False
            return self.ask_reset_instead(env)
        self.reports[env] = report_of(fault, True, None)
        return self.make_ready(env)

    cdef int ask_reset_instead(self, Py_ssize_t env) except -1:
        """Asks an env to reset in place of its request; the caller rings the bell."""
        cdef Links links = self.links
        links.sequence += 1
        links.request(self.workers[env], links.sequence, RESET, <uint32_t>env, 1,
                      self.frames.frame_of(env))
        self.open_requests += 1
        self.sequences[env] = links.sequence
        self.operations[env] = RESET
        self.states[env] = IN_FLIGHT
        return 0

    def discard(self):
        """Discards all answers, none of which is pending; the next answers report their faults."""
        cdef Py_ssize_t env
        self.inbox.discard_all(self.links.sequence + 1)
        for env in range(self.num_envs):
            if self.states[env] == READY:
                self.leave(env, IDLE)
        self.num_ready = 0
        self.postpone_reports(list(self.reports))
        self.results.clear()
        self.unanswered.clear()
        self.raised.clear()

    cdef int postpone_reports(self, list envs) except -1:
        """Has the next answers of these envs report the faults of the discarded answers."""
        cdef Report report
        for env in envs:
            report = self.reports.pop(env, None)
            if report is not None and env not in self.after:
                self.after[env] = report.fault, report.cut_off
                self.num_broken += report.cut_off
        return 0

    # ---- taking ------------------------------------------------------------------------------

    cpdef object oldest(self, Py_ssize_t count):
        """The envs that have been ready for longest, at most so many of them."""
        count = min(count, self.num_ready)
        cdef object envs = np.empty(count, np.intp)
        cdef Py_ssize_t *found = <Py_ssize_t *>data_of(envs)
        cdef Py_ssize_t i
        for i in range(count):
            found[i] = self.queue[(self.head + i) % self.num_envs]
        return envs

    def ready_among(self, const Py_ssize_t[::1] envs):
        """The ready ones of these envs; the others have raised or lost their command."""
        return np.array([env for env in envs if self.states[env] == READY], np.intp)

    def ready(self):
        """All ready envs, by index."""
        cdef Py_ssize_t env
        cdef Py_ssize_t count = 0
        envs = np.empty(self.num_ready, np.intp)
        cdef Py_ssize_t[::1] view = envs
        for env in range(self.num_envs):
            if self.states[env] == READY:
                view[count] = env
                count += 1
        return envs

    cdef tuple results_of(self, object which, const Py_ssize_t[::1] envs, vector_env,
                          bint everyone, bint arrays):
        """(Four arrays of these envs, or of all, and infos), and the lease of views."""
        cdef Frames frames = self.frames
        cdef Py_ssize_t i
        cdef Report report
        if self.reports:
            for i in range(envs.shape[0]):
                report = self.reports.get(envs[i])
                if report is not None and report.cut_off:  # the reset has overwritten the truncation
                    frames.mark_truncated(envs[i])
        if vector_env is None:
            if self.inbox.has_any(envs):
                self.inbox.order(self.oldest(self.num_ready), envs)
            infos = self.inbox.each(envs)
        elif self.reports or self.inbox.has_any(envs):
            self.inbox.order(self.oldest(self.num_ready), envs)
            rows = which if everyone else np.arange(envs.shape[0], dtype=np.intp)
            batch = vector_env if everyone else Batch(envs.shape[0])
            infos = self.inbox.gather(envs, rows, self.reports, batch)
        else:
            infos = {}
        # Only after the infos, with which observations come that are messages.
        if arrays and everyone:
            return frames.all(False, infos), None
        if arrays:
            results, lease = frames.some(which)
            return (*results, infos), lease
        return (None, None, None, None, infos), None

    cpdef tuple take(self, envs, vector_env, bint everyone, bint arrays, among):
        """Takes ready envs, which are idle afterwards.

        An exception while results are read loses these results: the envs are idle, and their next
        answers report their faults.

        Args:
            envs: The envs to take.
            vector_env: Gathers the infos; None: one dict an env.
            everyone: Whether the results are of all envs, each in its place.
            arrays: Whether arrays are wanted at all.
            among: Envs whose failures come with the results; None: all.

        Returns:
            The envs; their results: four arrays and infos; and the rest: {env: Report}, failures,
            results of a command, by env, and envs whose command was lost.
        """
        cdef const Py_ssize_t[::1] view = envs
        try:
            results, lease = self.results_of(envs, view, vector_env, everyone, arrays)
        except BaseException:
            self.postpone_reports(envs.tolist())
            self.commit(view, ())
            raise
        telling = {env: self.reports[env] for env in envs.tolist() if env in self.reports} \
            if self.reports else {}
        failures = [failure for failure in self.raised if among is None or failure.env in among]
        values = {env: self.results[env].open() for env in envs.tolist() if env in self.results} \
            if self.results else {}
        taken = envs, results, (telling, failures, values, self.unanswered)
        self.commit(view, failures)
        self.frames.count_batch(lease)
        return taken

    cdef int commit(self, const Py_ssize_t[::1] envs, failures) except -1:
        """Notes that these envs and failures were taken."""
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        cdef Py_ssize_t kept = 0
        self.links.guard.untaken = False
        self.links.enter(SV_TRACE_CALLER)
        if failures:
            taken = {id(failure) for failure in failures}
            self.raised = [failure for failure in self.raised if id(failure) not in taken]
        if self.inbox.has_read:
            self.inbox.give_back()
        if self.popped:
            self.popped = self.lockstep = False
            return 0
        for i in range(envs.shape[0]):
            env = envs[i]
            if self.states[env] != READY:
                continue
            self.leave(env, IDLE)
            self.flags[env] = 0
            self.inbox.discard(env)
            if self.reports:
                self.reports.pop(env, None)
            if self.results:
                self.results.pop(env, None)
        for i in range(self.num_ready):
            env = self.queue[(self.head + i) % self.num_envs]
            if self.states[env] == READY:
                self.queue[(self.head + kept) % self.num_envs] = env
                kept += 1
        self.num_ready = kept
        if self.unanswered:
            self.unanswered = []
        return 0

"""The parent's ends of all rings: it sends requests, receives answers, and waits in between.

``Links`` implements the protocol of csrc/ring.h and bell.h. It knows nothing of processes, nor of
the requests of single envs, which the ledger keeps. The owner of the processes passes ``look``,
which is called at least every 50 ms of waiting and raises when a worker has ended, ``alarms``,
which wake workers that doze, and ``budgets``, which is called every second and says how to wait.
``Links`` reads and writes the control channels while it waits, so that no side ever waits for the
other to read.
"""

cimport cython
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.unistd cimport close as close_descriptor, write

from shmvec._core.csrc cimport (
    SV_EVERYONE,
    SV_IN_RESET,
    SV_IN_SEVERAL,
    SV_IN_STEP,
    SV_RING_CORRUPT,
    SV_RING_NO,
    SV_RING_YES,
    SV_TRACE_CALLER,
    SV_TRACE_HERE,
    SV_TRACE_NOTHING,
    SV_TRACE_TAKE,
    SV_WAIT_READY,
    sv_bell_has_dozers,
    sv_bell_mask,
    sv_bell_ring,
    sv_budget,
    sv_busy,
    sv_busy_doing,
    sv_busy_env,
    sv_busy_for,
    sv_busy_name,
    sv_completion_check,
    sv_completion_done,
    sv_completion_reached,
    sv_counter,
    sv_counter_at,
    sv_counter_get,
    sv_counter_line,
    sv_counter_set,
    sv_counters,
    sv_counters_publish,
    sv_fault_lines,
    sv_notice_close,
    sv_notice_go_on,
    sv_notice_open,
    sv_notice_wait,
    sv_now_ns,
    sv_policy_set,
    sv_record,
    sv_ring,
    sv_ring_announce,
    sv_ring_attach_consumer,
    sv_ring_attach_producer,
    sv_ring_try_pop,
    sv_ring_room,
    sv_ring_try_push,
    sv_ring_waiting,
    sv_segment_bell,
    sv_segment_completion,
    sv_segment_completions,
    sv_segment_counters,
    sv_segment_notice,
    sv_segment_past,
    sv_segment_policy,
    sv_segment_renew,
    sv_segment_requests,
    sv_segment_timings,
    sv_trace_enter,
    sv_wait_completion,
    sv_waiter_init,
)
from shmvec._core.protocol cimport CLOSE, FRAME, TRACE
from shmvec._core.segment cimport Segment
from shmvec._core.trace cimport Recorder

import os
from itertools import count

import numpy as np
from gymnasium.error import ClosedEnvironmentError

from shmvec._core.segment import Insight
from shmvec.faults import EnvTimeoutError

numbers = count(1)  # the numbers of this process's vector envs

cdef double FOR_EVER_S = 1e9
cdef int64_t SLICE_NS = 50_000_000
cdef int64_t TALK_NS = 1_000_000        # the slice of a wait while channels are busy
cdef int64_t BEGIN_NS = 1_000_000_000   # for a worker to begin a request
cdef int64_t FOLLOW_NS = 1_000_000_000  # between two readings of the usable cores
cdef int64_t ABSENT_NS = 200_000_000    # a process that was away for so long may have been stopped

cdef extern from "<sys/eventfd.h>" nogil:
    enum:
        EFD_CLOEXEC
        EFD_NONBLOCK
    int eventfd(unsigned int initval, int flags)

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1


cdef class Alarms:
    """Descriptors that wake dozing workers; see csrc/bell.h."""

    def __cinit__(self, uint32_t count=0):
        cdef uint32_t index
        self.descriptors = <int *>calloc(max(count, 1), sizeof(int))
        if self.descriptors is NULL:
            raise MemoryError
        for index in range(count):
            self.descriptors[index] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
            if self.descriptors[index] < 0:
                raise OSError(errno, f"no descriptor to wake a worker by: {os.strerror(errno)}")
            self.count = index + 1

    def __dealloc__(self):
        if self.descriptors is not NULL:
            self.close_all()
            free(self.descriptors)

    def __getitem__(self, uint32_t index):
        if index >= self.count:
            raise IndexError(index)
        return self.descriptors[index]

    def close(self):
        self.close_all()

    @cython.critical_section
    cdef void close_all(self) noexcept:
        cdef uint32_t index
        for index in range(self.count):
            close_descriptor(self.descriptors[index])
        self.count = 0

    @cython.critical_section
    cdef void rouse(self, uint32_t mask) noexcept:
        """Wakes the workers of these bits of the bell."""
        cdef uint32_t index
        cdef uint64_t one = 1
        for index in range(self.count):
            if mask & sv_bell_mask(index):
                write(self.descriptors[index], &one, sizeof(one))  # may be full: wakes it too


cdef class Links:
    """The parent's ends of the rings and channels of all workers."""

    def __cinit__(self, Segment segment, ranges, *args, **kwargs):
        cdef uint32_t worker
        cdef sv_counters *past
        self.num_workers = len(ranges)
        if self.num_workers != segment.plan.sizes.num_workers:
            raise ValueError("one range of envs a worker")
        self.requests = <sv_ring *>calloc(self.num_workers, sizeof(sv_ring))
        self.completions = <sv_ring *>calloc(self.num_workers, sizeof(sv_ring))
        self.firsts = <uint32_t *>calloc(self.num_workers, sizeof(uint32_t))
        self.counts = <uint32_t *>calloc(self.num_workers, sizeof(uint32_t))
        self.outstanding = <uint32_t *>calloc(self.num_workers, sizeof(uint32_t))
        if (self.requests is NULL or self.completions is NULL or self.firsts is NULL
                or self.counts is NULL or self.outstanding is NULL):
            raise MemoryError
        self.segment = segment
        for worker in range(self.num_workers):
            self.firsts[worker] = ranges[worker].start
            self.counts[worker] = len(ranges[worker])
            self.attach(worker)
            past = sv_segment_past(segment.base, &segment.plan, worker)
            sv_counter_set(&past.first_env, self.firsts[worker])
            sv_counter_set(&past.num_envs, self.counts[worker])
        self.bell = sv_segment_bell(segment.base, &segment.plan)
        self.notice = sv_segment_notice(segment.base, &segment.plan)
        self.completion = sv_segment_completion(segment.base, &segment.plan)

    def __dealloc__(self):
        free(self.requests)
        free(self.completions)
        free(self.firsts)
        free(self.counts)
        free(self.outstanding)

    def __init__(self, segment, ranges, channels, Guard guard, look, Alarms alarms, budgets, limits=(None, None),
                 inline=None, hang_after=None, hung=None):
        self.channels = channels
        self.guard = guard
        self.look = look
        self.alarms = alarms
        self.budgets = budgets
        self.inline = inline
        self.num_processes = self.num_workers - (inline is not None)
        self.hung = hung
        self.hang_ns = -1 if hang_after is None else <int64_t>(hang_after * 1e9)
        self.hang_reported = np.zeros(segment.num_envs, np.int64)
        self.idle_since = np.zeros(self.num_workers, np.int64)
        self.idle_answered = np.zeros(self.num_workers, np.uint64)
        step_limit, reset_limit = limits
        self.step_limit = -1 if step_limit is None else <int64_t>(step_limit * 1e9)
        self.reset_limit = -1 if reset_limit is None else <int64_t>(reset_limit * 1e9)
        # So short that no time limit is overrun by more than a quarter.
        self.slice_ns = SLICE_NS
        for limit in (self.step_limit, self.reset_limit):
            if limit >= 0:
                self.slice_ns = min(self.slice_ns, max(1_000_000, <int64_t>limit // 4))
        cdef sv_budget budget
        budget.pause = budget.yield_ = budget.linger = budget.window = 0
        sv_waiter_init(&self.waiter, budget, False, &self.tally)
        self.follow()
        self.owner = os.getpid()
        sv_counter_set(&self.notice.number, next(numbers))
        sv_notice_open(self.notice, self.owner, self.num_processes)

    @property
    def closed(self):
        return self._closed

    @closed.setter
    def closed(self, bint closed):
        self._closed = closed
        if closed and os.getpid() == self.owner:  # not in a fork: the owner still uses it
            sv_notice_close(self.notice)

    cdef int attach(self, uint32_t worker) except -1:
        """Takes the parent's ends of a worker's rings."""
        cdef Segment segment = self.segment
        cdef uint32_t capacity = segment.plan.sizes.ring_capacity
        sv_ring_attach_producer(
            &self.requests[worker],
            sv_segment_requests(segment.base, &segment.plan, worker), capacity)
        sv_ring_attach_consumer(
            &self.completions[worker],
            sv_segment_completions(segment.base, &segment.plan, worker), capacity)
        return 0

    # ---- requests and answers ----------------------------------------------------------------

    cdef int request(self, uint32_t worker, uint32_t sequence, uint32_t operation,
                     uint32_t first, uint32_t count, Py_ssize_t frame) except -1:
        """Puts a request on a worker's ring."""
        cdef sv_record request
        request.sequence = sequence
        request.operation = operation | <uint32_t>frame << FRAME
        request.first = first
        request.count = count
        self.push(worker, &request)
        self.issued += 1
        self.outstanding[worker] += 1
        return 0

    cdef int push(self, uint32_t worker, const sv_record *request) except -1:
        cdef int pushed
        with cython.critical_section(self):  # one producer at a time, also without a GIL
            pushed = sv_ring_try_push(&self.requests[worker], request)
        if pushed != SV_RING_YES:
            raise RuntimeError(f"the request ring of worker {worker} is full or damaged")
        return 0

    def ask_to_close(self, workers=None):
        """Asks workers (None: all) to close their envs and end, and does not wait.

        Any thread may call it, as it changes nothing of requests and answers.
        """
        cdef sv_record request
        cdef uint32_t worker
        request.sequence = self.sequence + 1
        request.operation = CLOSE
        for worker in range(self.num_workers) if workers is None else workers:
            request.first = self.firsts[worker]
            request.count = self.counts[worker]
            self.push(worker, &request)
        if self.num_processes:
            sv_bell_ring(self.bell, SV_EVERYONE)
        self.remind()  # unconditionally, because no wait in slices repeats this call

    cdef int ring(self, uint32_t mask) except -1:
        """Rings for the workers whose bit of the bell is in the mask."""
        if self.num_processes and sv_bell_ring(self.bell, mask):
            self.tally.wakes += 1
            if sv_bell_has_dozers(self.bell):
                self.alarms.rouse(mask)
        self.enter(SV_TRACE_CALLER)
        return 0

    cpdef int remind(self) except -1:
        """Wakes all workers once more, even if tails or bell are damaged."""
        cdef uint32_t worker
        with cython.critical_section(self):
            for worker in range(self.num_workers):
                sv_ring_announce(&self.requests[worker])
        self.alarms.rouse(SV_EVERYONE)
        return 0

    cdef int take(self, uint32_t worker, sv_record *answer) except -1:
        """Takes an answer of a worker; 0 if there is none."""
        self.check_open()  # after a close the rings hold answers to the close
        cdef int found = sv_ring_try_pop(&self.completions[worker], answer)
        if found == SV_RING_NO:
            return 0
        if (found == SV_RING_CORRUPT or self.outstanding[worker] == 0
                or not self.is_of(worker, answer)):
            raise RuntimeError(
                f"the segment is damaged: the completion ring of worker {worker} makes no sense")
        self.outstanding[worker] -= 1
        return 1

    cdef bint is_of(self, uint32_t worker, const sv_record *answer) noexcept:
        """Whether the envs of an answer belong to the worker."""
        return (answer.first >= self.firsts[worker] and answer.count <= self.counts[worker]
                and answer.first - self.firsts[worker] <= self.counts[worker] - answer.count)

    # ---- waiting -----------------------------------------------------------------------------

    cdef bint wait_for(self, uint32_t target, timeout) except -1:
        """Waits until ``target`` requests are done, counted from the first one ever.

        Returns False if the time is up first.
        """
        if self.waiter.trace is NULL:
            return self.wait_until(target, timeout)
        cdef bint done = False
        self.enter(SV_TRACE_TAKE)
        try:
            done = self.wait_until(target, timeout)
        finally:
            self.enter(SV_TRACE_TAKE if done else SV_TRACE_CALLER)
        return done

    cdef bint wait_until(self, uint32_t target, timeout) except -1:
        """Waits, without recording the wait.

        The count of completions says when to read the rings; the rings say which requests are done.
        """
        if self.inline is not None:
            self.serve_here()
            if self.num_processes == 0:
                if not sv_completion_reached(self.answered(), target):
                    raise RuntimeError("the segment is damaged: a request or its answer is lost")
                self.publish()
                return True
        if (sv_completion_check(self.completion, target)
                and sv_completion_reached(self.answered(), target)):
            return True
        cdef int64_t begun = sv_now_ns()
        sv_notice_wait(self.notice, begun)
        try:
            return self.sleep_for(target, timeout, begun)
        finally:
            sv_notice_go_on(self.notice)
            self.publish()

    cdef int serve_here(self) except -1:
        """Serves the requests to envs in this process."""
        self.enter(SV_TRACE_HERE)
        self.waiting = True
        try:
            self.inline()
        finally:
            self.waiting = False
        self.check_open()
        self.enter(SV_TRACE_TAKE)
        return 0

    cdef bint sleep_for(self, uint32_t target, timeout, int64_t begun) except -1:
        """Waits, from this time on, for requests that are not done yet."""
        cdef int64_t deadline = -1  # no deadline; also if its nanoseconds do not fit
        if timeout is not None and timeout < FOR_EVER_S:
            deadline = begun + <int64_t>(timeout * 1e9)
        cdef int64_t reminded = begun
        cdef int64_t slice_ns
        cdef int64_t now
        cdef int found
        if self.talking:
            self.pump()
        while True:
            slice_ns = TALK_NS if self.talking else self.slice_ns
            if deadline >= 0:
                slice_ns = min(slice_ns, deadline - sv_now_ns())
                if slice_ns <= 0:
                    return False
            self.waiting = True
            with nogil:
                found = sv_wait_completion(&self.waiter, self.completion, target, slice_ns)
            self.waiting = False
            self.check_open()
            if sv_completion_reached(self.answered(), target):
                if found != SV_WAIT_READY:
                    self.count_anew()
                return True
            if found == SV_WAIT_READY:
                target += self.count_anew()
            self.look_around()
            now = sv_now_ns()
            if now - reminded >= SLICE_NS:
                self.remind()
                reminded = now

    cdef int pump(self) except -1:
        """Reads and writes the channels; messages wait in them until they are taken."""
        self.talking = False
        for channel in self.channels:
            if channel.pump():
                self.talking = True
        return 0

    cdef int check_open(self) except -1:
        if self._closed:
            raise ClosedEnvironmentError("The vector env was closed while this call waited for it.")
        return 0

    cpdef int look_if_due(self) except -1:
        """Calls ``look_around`` if its last call was a slice ago, even without a wait."""
        if sv_now_ns() - self.looked_at >= self.slice_ns:
            self.look_around()
        return 0

    cpdef int look_around(self) except -1:
        """Checks signals, channels, ended workers and time limits, as after a slice of waiting."""
        cdef int64_t now = sv_now_ns()
        self.publish()
        if now - self.looked_at > self.slice_ns + ABSENT_NS:
            # This process may have been stopped with its workers (Ctrl-Z, a scheduler).
            self.counted_from = now
            self.idle_since[:] = 0
        self.looked_at = now
        PyErr_CheckSignals()
        self.check_open()
        self.pump()
        self.look()
        if self.step_limit >= 0 or self.reset_limit >= 0 or self.hang_ns >= 0:
            self.check_limits(now)
        return 0

    cdef uint32_t answered(self):
        """The number of requests that are done according to the rings, in the unit of `issued`."""
        cdef uint32_t worker
        cdef uint32_t done = self.issued
        for worker in range(self.num_workers):
            done -= self.outstanding[worker]
            done += min(self.outstanding[worker], sv_ring_waiting(&self.completions[worker]))
        return done

    cdef uint32_t count_anew(self):
        """Adopts the workers' count of completions; returns by how much it differs from the rings.

        They differ if the count is damaged, if a worker has answered and died before it counted, or
        if it has not counted yet. In the last case the next wait finds the count one too high, and
        adopts it once more.
        """
        cdef uint32_t difference = sv_completion_done(self.completion) - self.answered()
        self.issued += difference
        return difference

    cdef int check_limits(self, int64_t now) except -1:
        """Raises if an env takes longer than it may, or a worker does not begin (SIGSTOP).

        A suspiciously long call is reported to `hung`, once.
        """
        cdef uint32_t worker
        cdef uint32_t env
        cdef uint64_t busy
        cdef int64_t elapsed
        cdef sv_counters *counters
        cdef list hanging = []
        error = None
        for worker in range(self.num_workers):
            counters = sv_segment_counters(self.segment.base, &self.segment.plan, worker)
            busy = sv_busy_for(&counters.activity, now, &elapsed)
            if busy != 0 or self.has_answered(worker):
                self.idle_since[worker] = 0
            elif (self.idle_since[worker] == 0
                  or self.idle_answered[worker] != sv_counter_get(&counters.requests)):
                self.idle_since[worker] = now
                self.idle_answered[worker] = sv_counter_get(&counters.requests)
            else:
                elapsed = now - self.idle_since[worker]
                busy = sv_busy(self.firsts[worker], SV_IN_STEP)
            if sv_busy_doing(busy) != SV_IN_SEVERAL:
                found = self.check_limit(worker, busy, now, elapsed, hanging)
                error = error or found
                continue
            for env in range(self.firsts[worker], self.firsts[worker] + self.counts[worker]):
                busy = sv_busy_for(
                    &sv_segment_timings(self.segment.base, &self.segment.plan, env).activity, now,
                    &elapsed)
                found = self.check_limit(worker, busy, now, elapsed, hanging)
                error = error or found
        if hanging:
            self.hung(hanging)
        if error is not None:
            raise error
        return 0

    cdef object check_limit(self, uint32_t worker, uint64_t busy, int64_t now, int64_t elapsed,
                            list hanging):
        """The error if what a worker is busy with takes longer than it may; else None.

        Something suspiciously long is added to `hanging`, the first of a worker's.
        """
        cdef int64_t began
        cdef int64_t limit
        cdef uint32_t env = <uint32_t>sv_busy_env(busy)
        if busy == 0:
            return None
        began, elapsed = now - elapsed, min(elapsed, now - self.counted_from)
        limit = self.limit_of(busy)
        if self.idle_since[worker] != 0:
            limit = -1 if limit < 0 else max(limit, BEGIN_NS)
        if not self.has(worker, busy):
            env = self.firsts[worker]
        if 0 <= self.hang_ns < elapsed and self.hang_reported[env] != began:
            self.hang_reported[env] = began
            if not hanging or hanging[len(hanging) - 1][0] != worker:
                hanging.append((worker, self.busy_with(worker, busy), 1e-9 * elapsed))
        if limit < 0 or elapsed <= limit:
            return None
        if not self.has(worker, busy):
            raise RuntimeError(
                f"the segment is damaged: worker {worker} is busy with an env that it has not")
        error = EnvTimeoutError(
            sv_busy_env(busy), sv_busy_name(busy).decode(), 1e-9 * self.limit_of(busy))
        error.began = began
        return error

    cpdef bint has_answered(self, uint32_t worker) noexcept:
        return self.outstanding[worker] <= sv_ring_waiting(&self.completions[worker])

    cdef int64_t limit_of(self, uint64_t busy) noexcept:
        """How long a call may take; -1 if there is no limit."""
        if sv_busy_doing(busy) == SV_IN_STEP:
            return self.step_limit
        return self.reset_limit if sv_busy_doing(busy) == SV_IN_RESET else -1

    cdef bint has(self, uint32_t worker, uint64_t busy):
        """Whether the env that a worker says it is busy with is its own; else there is damage."""
        return self.firsts[worker] <= sv_busy_env(busy) < self.firsts[worker] + self.counts[worker]

    cdef object busy_with(self, uint32_t worker, uint64_t busy):
        """What a worker is busy with: (env, "step", "reset" or "call"); None: none of these."""
        if self.idle_since[worker] != 0 or not self.has(worker, busy):
            return None
        return sv_busy_env(busy), sv_busy_name(busy).decode()

    cdef int follow_if_due(self) except -1:
        """Reads the usable cores, if the last reading was a second ago."""
        if self.waiter.ended - self.followed_at >= FOLLOW_NS:
            self.follow()
        return 0

    cdef int follow(self) except -1:
        """Reads the usable cores, and sets the budgets for waits of parent and workers."""
        cdef sv_budget budget
        now = self.budgets()
        budget.pause, budget.yield_, budget.linger, budget.window = now.worker
        sv_policy_set(sv_segment_policy(self.segment.base, &self.segment.plan), budget, now.homing,
                      now.cores)
        sv_counter_set(&self.notice.cores, now.usable)
        self.lingering = budget.linger > 0
        budget.pause, budget.yield_, budget.linger, budget.window = now.parent
        self.waiter.budget = budget
        self.followed_at = sv_now_ns()
        return 0

    # ---- tracing -----------------------------------------------------------------------------

    cdef void enter(self, uint32_t kind) noexcept:
        """Begins a span of the parent's trace; another thread changes nothing during a wait."""
        if self.waiter.trace is not NULL and not self.waiting:
            sv_trace_enter(self.waiter.trace, kind, sv_now_ns())

    def record(self, Recorder recorder, workers=(), packed=None, descriptor=-1):
        """Starts recording a trace; None stops it.

        Workers get a message and the memory with a request that they do not answer and that no
        count includes. So envs may be in flight, and there is no wait for workers. The request
        never takes the room on a ring that requests to envs and CLOSE may need.
        """
        cdef sv_record request
        cdef uint32_t worker
        for worker in workers:  # before the first of them gets its request
            if sv_ring_room(&self.requests[worker]) < self.counts[worker] + 2:
                raise RuntimeError(
                    f"worker {worker} has not come yet to the traces that were begun before: first "
                    "take the results of what its envs were asked")
        self.enter(SV_TRACE_NOTHING)
        self.sequence += 1
        for worker in workers:  # first: without a request a message is discarded
            self.channels[worker].put(self.sequence, packed, (descriptor,))
            self.talking = True
            request.sequence, request.operation = self.sequence, TRACE
            request.first, request.count = self.firsts[worker], 0
            self.push(worker, &request)
        if workers:
            self.ring(SV_EVERYONE)
            if (self.inline is not None and self.outstanding[self.num_processes] == 0
                    and not self.waiting):
                self.inline()  # else it would be served with the next request to envs
        self.waiter.trace = NULL if recorder is None else &recorder.trace
        self.recorder = recorder
        self.enter(SV_TRACE_CALLER)
        self.guard.record(recorder)

    # ---- workers -----------------------------------------------------------------------------

    cdef int renew(self, uint32_t worker) except -1:
        """Renews the rings of a dead worker, for its successor."""
        self.issued -= self.outstanding[worker]
        self.outstanding[worker] = 0
        sv_segment_renew(self.segment.base, &self.segment.plan, worker)
        return self.attach(worker)

    def is_idle(self, uint32_t worker):
        return self.outstanding[worker] == 0

    def steps_of(self, uint32_t worker):
        """Steps of envs made by the worker's present process."""
        return sv_counter_get(
            &sv_segment_counters(self.segment.base, &self.segment.plan, worker).steps)

    # ---- counters for onlookers ----------------------------------------------------------------

    cdef int publish(self) except -1:
        """Publishes the parent's counters."""
        self.tally.requests = self.issued
        sv_counters_publish(&self.notice.parent, &self.tally)
        return 0

    def insight(self):
        """What the segment says about the vector env now."""
        self.publish()
        return Insight(self.segment)

    def count_fault(self, name, number=1):
        """Counts faults by their name in csrc/counters.h."""
        cdef sv_counter *count
        cdef const sv_counter_line *line = sv_fault_lines
        while line.name is not NULL and line.name.decode() != name:
            line += 1
        if line.name is NULL:
            raise ValueError(f"{name} are not counted")
        count = sv_counter_at(self.notice, line)
        sv_counter_set(count, sv_counter_get(count) + <uint64_t>number)

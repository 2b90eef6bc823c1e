"""The caller's side of the pipeline: what a call asks of envs, and how it takes their answers.

    actions -> slab, one request a worker -> request ring -> worker steps its envs
            -> slab, one completion -> completion ring -> take

By section: the guard admits one call at a time; `Links` are the ends of all rings, and wait;
`Frames` knows where results lie; `Inbox` reads infos; the `Ledger` knows what each env was asked and
which has answered; `BatchSteps` are the calls of a training loop.
"""

cimport cython
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t
from libc.stdlib cimport calloc, free
from posix.unistd cimport close as close_descriptor, write

from shmvec._core cimport csrc as c
from shmvec._core.memory cimport (
    Blocks,
    Codec,
    Lease,
    MessageCodec,
    Pool,
    Results,
    Seeds,
    Segment,
    StepLog,
    address_of,
    data_of,
    has_dtype,
    is_contiguous,
    ndim_of,
    size_of,
)
from shmvec._core.messages cimport NESTED, Decoder, Encoder, Field
from shmvec._core.process cimport Recorder
from shmvec._core.protocol cimport (
    ACTION,
    CLOSE,
    COMMAND,
    FINAL,
    FRAME,
    INFO,
    LATE,
    MESSAGES,
    OBSERVATION,
    RESET,
    STEP,
    TOGETHER,
    TRACE,
)

import gc
import os
from collections import deque, namedtuple
from functools import wraps
from itertools import count
from pickle import PicklingError
from time import monotonic
from weakref import ref

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.vector import VectorEnv

from shmvec._core.memory import ActionCodec, Insight, OtherShapeError
from shmvec.faults import Report, cut_traceback


# ==== guard =======================================================================================
#
# Guard that admits one call at a time: it refuses re-entrant calls and other threads'.
#
# Calls that ask envs, take their answers or replace workers enter and leave a guard in C
# (csrc/guard.h), where no signal handler can raise in between. So a call that ends with an
# exception, whatever it is and wherever it comes from, has left the guard, and has abandoned its
# requests whose answers it did not take.

cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident()


@cython.final
cdef class Guard:
    """Refuses a call while another one is under way, in this thread or in another."""

    cdef c.sv_guard guard
    cdef c.sv_trace *trace         # NULL: nothing is recorded
    cdef Recorder recorder         # the recorder of this trace, which keeps its memory
    cdef readonly object held      # the request of the pending call, if it was not sent yet
    cdef uint64_t beginner         # the thread that has begun the pending call
    cdef readonly object pending   # a call that was begun and not finished, or a loan, or None
    cdef readonly bint abandoned   # requests in flight are of a call that has raised
    cdef uint64_t asked            # how often envs were asked
    cdef uint64_t asker            # the thread that has asked last
    cdef bint untaken              # no answer was taken since the last request
    cdef bint claimed              # the call that is under way has claimed the pending one
    cdef uint64_t asked_before     # `asked` and `pending` as the call that is under way began
    cdef object pending_before

    cdef int enter(self) except -1:
        if not c.sv_guard_enter(&self.guard, PyThread_get_thread_ident()):
            self.refuse()
        return 0

    cdef void leave(self) noexcept:
        if self.trace is not NULL:  # also if the call has raised
            c.sv_trace_enter(self.trace, c.SV_TRACE_CALLER, c.sv_now_ns())
        c.sv_guard_leave(&self.guard)

    def refuse(self):
        raise AlreadyPendingCallError(
            "another call of this vector env is under way: of another thread, or the one that this "
            "handler of a signal or of log records has interrupted. Use it in one thread at a "
            "time, when that call has returned.",
            "step",
        )

    def beside(self, function):
        """Calls a function, even within a call by this thread."""
        cdef bint entered = c.sv_guard_enter(&self.guard, PyThread_get_thread_ident())
        if not entered and not c.sv_guard_is_mine(&self.guard, PyThread_get_thread_ident()):
            self.refuse()
        try:
            return function()
        finally:
            if entered:
                self.leave()

    def record(self, Recorder recorder):
        """Has a trace note the end of each call; None stops it."""
        self.trace = NULL if recorder is None else &recorder.trace
        self.recorder = recorder

    # ---- pending and abandoned calls ---------------------------------------------------------

    cdef void note_asked(self) noexcept:
        self.asked += 1
        self.untaken = True
        self.asker = PyThread_get_thread_ident()

    cdef int abandon_own(self, uint64_t asked, pending) except -1:
        """Abandons what this thread has begun or asked, and not taken, since ``asked``."""
        cdef uint64_t me = PyThread_get_thread_ident()
        if pending is None and self.pending is not None and self.beginner == me:
            self.pending = self.held = None
        if self.untaken and self.asked != asked and self.asker == me:
            self.abandoned = True
        return 0

    cdef int enter_whole(self) except -1:
        """Begins a call that abandons what it asked if it raises; calls do not nest."""
        self.enter()
        self.asked_before = self.asked
        self.pending_before = self.pending
        self.claimed = False
        return 0

    cdef int abandon_all(self) except -1:
        """Abandons what such a call has claimed, begun or asked, and not taken."""
        if self.claimed and self.untaken:
            self.abandoned = True
        return self.abandon_own(self.asked_before, self.pending_before)

    def leave_pending(self, pending, held=None):
        """Notes what was begun, for another call to take, and its request, if that was not sent."""
        self.beginner = PyThread_get_thread_ident()
        self.held = held
        self.pending = pending

    def claim(self, pending):
        """Has the call that is under way take what is pending, or abandon it.

        Returns:
            The request that was not sent, or None, in a tuple; None: that is not pending.
        """
        if self.pending is not pending:
            return None
        held = self.held
        self.pending = self.held = None
        self.claimed = True
        return (held,)

    def disown(self):
        """In a fork: the call that is under way is the parent's."""
        c.sv_guard_leave(&self.guard)

    def abandon(self):
        """Has the next call discard what is in flight."""
        self.abandoned = True

    def settled(self):
        self.abandoned = False

    def both(self, begin, finish):
        """Calls both, one after the other; if one raises, what was asked is abandoned."""
        cdef uint64_t asked = self.asked
        cdef object pending = self.pending
        try:
            begin()
            return finish()
        except BaseException:
            self.abandon_own(asked, pending)
            raise


def exclusive(method):
    """A method that runs under its object's guard."""
    @wraps(method)
    def call(self, *args, **kwargs):
        cdef Guard guard = self.guard
        guard.enter()
        try:
            return method(self, *args, **kwargs) if kwargs else method(self, *args)
        finally:
            guard.leave()
    return call


def whole(method):
    """A method that runs under its object's guard, and abandons what it asked if it raises."""
    @wraps(method)
    def call(self, *args, **kwargs):
        cdef Guard guard = self.guard
        guard.enter_whole()
        try:
            return method(self, *args, **kwargs) if kwargs else method(self, *args)
        except BaseException as error:
            guard.abandon_all()
            raise cut_traceback(error)
        finally:
            guard.leave()
    return call


@cython.final
cdef class Loan:
    """Lends what ``begin()`` returns, in a ``with`` block."""

    cdef Guard guard
    cdef object begin    # checks whether a loan is possible, and returns what is lent
    cdef object pending  # the guard's `pending` while the loan lasts
    cdef bint keeps      # requests stay in flight at the loan's end

    def __init__(self, Guard guard, begin, pending, bint keeps):
        self.guard = guard
        self.begin = begin
        self.pending = pending
        self.keeps = keeps

    def __enter__(self):
        cdef Guard guard = self.guard
        guard.enter()
        try:
            lent = self.begin()
            guard.pending = self.pending
        finally:
            guard.leave()
        return lent

    def __exit__(self, kind, error, traceback):
        self.end(self.keeps and kind is None)

    def __del__(self):
        # After an exception between `__enter__` and the block there is no borrower.
        self.end(False)

    cdef int end(self, bint keeps) except -1:
        if self.guard.pending is self.pending:
            self.guard.pending = None
            if not keeps:
                self.guard.abandoned = True  # has the next call discard what is in flight
        return 0


# ==== links =======================================================================================
#
# The parent's ends of all rings: it sends requests, receives answers, and waits in between.
#
# ``Links`` implements the protocol of csrc/ring.h and bell.h. It knows nothing of processes, nor of
# the requests of single envs, which the ledger keeps. The owner of the processes, ``workers``, says
# at least every 50 ms of waiting which of them are dead; ``budgets`` is called every second and
# says how to wait. ``Links`` reads and writes the control channels while it waits, so that no side
# ever waits for the other to read.
#
# A wait ends with an event: it is done, its time is up, or something is to be handled first. Faults
# are read off processes and counters each time that a wait looks around. So nothing is lost with an
# event whose handling is interrupted: the next wait ends with it, too.

numbers = count(1)  # the numbers of this process's vector envs

cpdef enum:
    NO_EVENT
    DONE
    TIME_UP
    MESSAGE   # a message has come that an answer waits for
    RAISED    # an env has raised, and the policy has not decided about it
    DEAD      # of workers: `Links.dead`
    OVERDUE   # a call: `Links.overdue`
    DOWN      # a worker is being replaced, and its replacement may go on

UP = -2  # `wanted` of a wait until the workers of some envs are not down

# A call that takes longer than it may; `began` is in ns, by the monotonic clock.
Overdue = namedtuple("Overdue", "env operation limit began")

cdef double FOR_EVER_S = 1e9
cdef int64_t SLICE_NS = 50_000_000
cdef int64_t TALK_NS = 1_000_000        # the slice of a wait while channels are busy
cdef int64_t DOWN_NS = 10_000_000       # the same while workers are being replaced
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

    cdef int *descriptors
    cdef uint32_t count

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
            if mask & c.sv_bell_mask(index):
                write(self.descriptors[index], &one, sizeof(one))  # may be full: wakes it too


cdef class Links:
    """The parent's ends of the rings and channels of all workers."""

    cdef Segment segment
    cdef c.sv_ring *requests
    cdef c.sv_ring *completions
    cdef c.sv_bell *bell
    cdef c.sv_completion *completion
    cdef c.sv_notice *notice      # published for onlookers
    cdef c.sv_waiter waiter
    cdef uint32_t num_workers
    cdef uint32_t *firsts         # the first env of each worker
    cdef uint32_t *counts         # the number of envs of each worker
    cdef uint32_t *outstanding    # requests to each worker that it has not answered
    cdef uint32_t sequence        # the last number that was given to a request
    cdef uint32_t issued          # requests issued, in the unit of the completion count
    cdef c.sv_counts tally        # of the parent; a wake: ringing the bell took a system call
    cdef Recorder recorder        # records the trace of this side; None: there is no trace
    cdef readonly bint waiting    # a thread is in a wait
    cdef readonly Guard guard     # guards the calls that ask, take or wait
    cdef bint _closed             # the vector env was closed, maybe by another thread
    cdef bint lingering           # more workers than cores: the last of a batch step stay awake
    cdef bint talking             # messages have come on the channels lately, or will come
    cdef readonly object workers  # their processes
    cdef list channels
    cdef readonly object owner    # id of the process that owns the workers
    cdef readonly list dead       # the workers that the last look has found dead
    cdef readonly object overdue  # the last call that took longer than it may
    cdef readonly dict down       # the workers that are being replaced, each with what it needs
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
    cdef int64_t reminded_at
    cdef int64_t hang_ns          # ns after which a call is reported as hanging; -1: never
    cdef int64_t[::1] hang_reported  # by env: the begin of the call that was last reported
    cdef int64_t[::1] idle_since  # by worker: since when it has not begun its request; 0: it has
    cdef uint64_t[::1] idle_answered  # by worker: how many requests it had answered then

    def __cinit__(self, Segment segment, workers, *args, **kwargs):
        cdef uint32_t worker
        cdef c.sv_counters *past
        cdef list ranges = workers.ranges
        self.num_workers = len(ranges)
        if self.num_workers != segment.plan.sizes.num_workers:
            raise ValueError("one range of envs a worker")
        self.requests = <c.sv_ring *>calloc(self.num_workers, sizeof(c.sv_ring))
        self.completions = <c.sv_ring *>calloc(self.num_workers, sizeof(c.sv_ring))
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
            past = c.sv_segment_past(segment.base, &segment.plan, worker)
            c.sv_counter_set(&past.first_env, self.firsts[worker])
            c.sv_counter_set(&past.num_envs, self.counts[worker])
        self.bell = c.sv_segment_bell(segment.base, &segment.plan)
        self.notice = c.sv_segment_notice(segment.base, &segment.plan)
        self.completion = c.sv_segment_completion(segment.base, &segment.plan)

    def __dealloc__(self):
        free(self.requests)
        free(self.completions)
        free(self.firsts)
        free(self.counts)
        free(self.outstanding)

    def __init__(self, segment, workers, Guard guard, budgets, limits=(None, None),
                 hang_after=None):
        self.workers = workers
        self.channels = workers.channels
        self.guard = guard
        self.down = {}
        self.alarms = workers.alarms
        self.budgets = budgets
        self.inline = workers.inline
        self.num_processes = self.num_workers - (self.inline is not None)
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
        cdef c.sv_budget budget
        budget.pause = budget.yield_ = budget.linger = budget.window = 0
        c.sv_waiter_init(&self.waiter, budget, False, &self.tally)
        self.follow()
        self.owner = os.getpid()
        c.sv_counter_set(&self.notice.number, next(numbers))
        c.sv_notice_open(self.notice, self.owner, self.num_processes)

    @property
    def closed(self):
        return self._closed

    @closed.setter
    def closed(self, bint closed):
        self._closed = closed
        if closed and os.getpid() == self.owner:  # not in a fork: the owner still uses it
            c.sv_notice_close(self.notice)

    cdef int attach(self, uint32_t worker) except -1:
        """Takes the parent's ends of a worker's rings."""
        cdef Segment segment = self.segment
        cdef uint32_t capacity = segment.plan.sizes.ring_capacity
        c.sv_ring_attach_producer(
            &self.requests[worker],
            c.sv_segment_requests(segment.base, &segment.plan, worker), capacity)
        c.sv_ring_attach_consumer(
            &self.completions[worker],
            c.sv_segment_completions(segment.base, &segment.plan, worker), capacity)
        return 0

    # ---- requests and answers ----------------------------------------------------------------

    cdef int request(self, uint32_t worker, uint32_t sequence, uint32_t operation,
                     uint32_t first, uint32_t count, Py_ssize_t frame) except -1:
        """Puts a request on a worker's ring."""
        cdef c.sv_record request
        request.sequence = sequence
        request.operation = operation | <uint32_t>frame << FRAME
        request.first = first
        request.count = count
        self.push(worker, &request)
        self.issued += 1
        self.outstanding[worker] += 1
        return 0

    cdef int push(self, uint32_t worker, const c.sv_record *request) except -1:
        cdef int pushed
        with cython.critical_section(self):  # one producer at a time, also without a GIL
            pushed = c.sv_ring_try_push(&self.requests[worker], request)
        if pushed != c.SV_RING_YES:
            raise RuntimeError(f"the request ring of worker {worker} is full or damaged")
        return 0

    def ask_to_close(self, workers=None):
        """Asks workers (None: all) to close their envs and end, and does not wait.

        Any thread may call it, as it changes nothing of requests and answers.
        """
        cdef c.sv_record request
        cdef uint32_t worker
        request.sequence = self.sequence + 1
        request.operation = CLOSE
        for worker in range(self.num_workers) if workers is None else workers:
            request.first = self.firsts[worker]
            request.count = self.counts[worker]
            self.push(worker, &request)
        if self.num_processes:
            c.sv_bell_ring(self.bell, c.SV_EVERYONE)
        self.remind()  # unconditionally, because no wait in slices repeats this call

    cdef int ring(self, uint32_t mask) except -1:
        """Rings for the workers whose bit of the bell is in the mask."""
        if self.num_processes and c.sv_bell_ring(self.bell, mask):
            self.tally.wakes += 1
            if c.sv_bell_has_dozers(self.bell):
                self.alarms.rouse(mask)
        self.enter(c.SV_TRACE_CALLER)
        return 0

    cpdef int remind(self) except -1:
        """Wakes all workers once more, even if tails or bell are damaged."""
        cdef uint32_t worker
        with cython.critical_section(self):
            for worker in range(self.num_workers):
                c.sv_ring_announce(&self.requests[worker])
        self.alarms.rouse(c.SV_EVERYONE)
        return 0

    cdef int take(self, uint32_t worker, c.sv_record *answer) except -1:
        """Takes an answer of a worker; 0 if there is none."""
        self.check_open()  # after a close the rings hold answers to the close
        cdef int found = c.sv_ring_try_pop(&self.completions[worker], answer)
        if found == c.SV_RING_NO:
            return 0
        if (found == c.SV_RING_CORRUPT or self.outstanding[worker] == 0
                or not self.is_of(worker, answer)):
            raise RuntimeError(
                f"the segment is damaged: the completion ring of worker {worker} makes no sense")
        self.outstanding[worker] -= 1
        return 1

    cdef bint is_of(self, uint32_t worker, const c.sv_record *answer) noexcept:
        """Whether the envs of an answer belong to the worker."""
        return (answer.first >= self.firsts[worker] and answer.count <= self.counts[worker]
                and answer.first - self.firsts[worker] <= self.counts[worker] - answer.count)

    # ---- waiting -----------------------------------------------------------------------------

    cdef int wait_for(self, uint32_t target, int64_t deadline) except -1:
        """Waits until ``target`` requests are done, counted from the first one ever, or an event.

        The deadline is in ns; -1: there is none.
        """
        if self.waiter.trace is NULL:
            return self.wait_until(target, deadline)
        cdef int event = NO_EVENT
        self.enter(c.SV_TRACE_TAKE)
        try:
            event = self.wait_until(target, deadline)
        finally:
            self.enter(c.SV_TRACE_TAKE if event == DONE else c.SV_TRACE_CALLER)
        return event

    cdef int wait_until(self, uint32_t target, int64_t deadline) except -1:
        """Waits, without recording the wait.

        The count of completions says when to read the rings; the rings say which requests are done.
        """
        if self.inline is not None:
            self.serve_here()
            if self.num_processes == 0:
                if not c.sv_completion_reached(self.answered(), target):
                    raise RuntimeError("the segment is damaged: a request or its answer is lost")
                self.publish()
                return DONE
        if (c.sv_completion_check(self.completion, target)
                and c.sv_completion_reached(self.answered(), target)):
            return DONE
        c.sv_notice_wait(self.notice, c.sv_now_ns())
        try:
            return self.sleep_for(target, deadline)
        finally:
            c.sv_notice_go_on(self.notice)
            self.publish()

    cdef int serve_here(self) except -1:
        """Serves the requests to envs in this process."""
        self.enter(c.SV_TRACE_HERE)
        self.waiting = True
        try:
            self.inline()
        finally:
            self.waiting = False
        self.check_open()
        self.enter(c.SV_TRACE_TAKE)
        return 0

    cdef int sleep_for(self, uint32_t target, int64_t deadline) except -1:
        """Waits for requests that are not done yet."""
        cdef int64_t slice_ns
        cdef int found
        cdef int event
        if self.talking:
            self.pump()
        while True:
            slice_ns = TALK_NS if self.talking else self.slice_ns
            if self.down:
                slice_ns = min(slice_ns, DOWN_NS)
            if deadline >= 0:
                slice_ns = min(slice_ns, deadline - c.sv_now_ns())
                if slice_ns <= 0:
                    return TIME_UP
            self.waiting = True
            with nogil:
                found = c.sv_wait_completion(&self.waiter, self.completion, target, slice_ns)
            self.waiting = False
            self.check_open()
            if c.sv_completion_reached(self.answered(), target):
                if found != c.SV_WAIT_READY:
                    self.count_anew()
                return DONE
            if found == c.SV_WAIT_READY:
                target += self.count_anew()
            event = self.look_around()
            if event != NO_EVENT:
                return event

    cdef int listen(self, workers, int64_t deadline) except -1:
        """Waits until workers send something, for a slice at most."""
        cdef int64_t slice_ns = DOWN_NS if self.down else SLICE_NS
        if deadline >= 0:
            slice_ns = min(slice_ns, deadline - c.sv_now_ns())
            if slice_ns <= 0:
                return TIME_UP
        self.workers.listen(workers, 1e-9 * slice_ns)
        return self.look_around()

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

    cdef int look_if_due(self) except -1:
        """Looks around if the last time was a slice ago: a call may never have to wait."""
        if c.sv_now_ns() - self.looked_at >= self.slice_ns:
            return self.look_around()
        return NO_EVENT

    cdef int look_around(self) except -1:
        """Checks signals, channels, ended workers and time limits, as after a slice of waiting."""
        cdef int64_t now = c.sv_now_ns()
        self.publish()
        if now - self.looked_at > self.slice_ns + ABSENT_NS:
            # This process may have been stopped with its workers (Ctrl-Z, a scheduler).
            self.counted_from = now
            self.idle_since[:] = 0
        self.looked_at = now
        if now - self.reminded_at >= SLICE_NS:
            self.reminded_at = now
            self.remind()
        PyErr_CheckSignals()
        self.check_open()
        self.pump()
        self.dead = self.workers.dead()
        if self.dead:
            return DEAD
        if self.step_limit >= 0 or self.reset_limit >= 0 or self.hang_ns >= 0:
            self.overdue = self.find_overdue(now)
            if self.overdue is not None:
                return OVERDUE
        return DOWN if self.down else NO_EVENT

    cdef uint32_t answered(self):
        """The number of requests that are done according to the rings, in the unit of `issued`."""
        cdef uint32_t worker
        cdef uint32_t done = self.issued
        for worker in range(self.num_workers):
            done -= self.outstanding[worker]
            done += min(self.outstanding[worker], c.sv_ring_waiting(&self.completions[worker]))
        return done

    cdef uint32_t count_anew(self):
        """Adopts the workers' count of completions; returns by how much it differs from the rings.

        They differ if the count is damaged, if a worker has answered and died before it counted, or
        if it has not counted yet. In the last case the next wait finds the count one too high, and
        adopts it once more.
        """
        cdef uint32_t difference = c.sv_completion_done(self.completion) - self.answered()
        self.issued += difference
        return difference

    cdef object find_overdue(self, int64_t now):
        """A call of an env that takes longer than it may, or that a worker does not begin.

        A suspiciously long call is reported to `workers.hung`, once.
        """
        cdef uint32_t worker
        cdef uint32_t env
        cdef uint64_t busy
        cdef int64_t elapsed
        cdef c.sv_counters *counters
        cdef list hanging = []
        overdue = None
        for worker in range(self.num_workers):
            counters = c.sv_segment_counters(self.segment.base, &self.segment.plan, worker)
            busy = c.sv_busy_for(&counters.activity, now, &elapsed)
            if busy != 0 or self.has_answered(worker):
                self.idle_since[worker] = 0
            elif (self.idle_since[worker] == 0
                  or self.idle_answered[worker] != c.sv_counter_get(&counters.requests)):
                self.idle_since[worker] = now
                self.idle_answered[worker] = c.sv_counter_get(&counters.requests)
            else:
                elapsed = now - self.idle_since[worker]
                busy = c.sv_busy(self.firsts[worker], c.SV_IN_STEP)
            if c.sv_busy_doing(busy) != c.SV_IN_SEVERAL:
                found = self.check_limit(worker, busy, now, elapsed, hanging)
                overdue = overdue or found
                continue
            for env in range(self.firsts[worker], self.firsts[worker] + self.counts[worker]):
                busy = c.sv_busy_for(
                    &c.sv_segment_timings(self.segment.base, &self.segment.plan, env).activity, now,
                    &elapsed)
                found = self.check_limit(worker, busy, now, elapsed, hanging)
                overdue = overdue or found
        if hanging:
            self.workers.hung(hanging)
        return overdue

    cdef object check_limit(self, uint32_t worker, uint64_t busy, int64_t now, int64_t elapsed,
                            list hanging):
        """What a worker is busy with, if it takes longer than it may; else None.

        Something suspiciously long is added to `hanging`, the first of a worker's.
        """
        cdef int64_t began
        cdef int64_t limit
        cdef uint32_t env = <uint32_t>c.sv_busy_env(busy)
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
        return Overdue(c.sv_busy_env(busy), c.sv_busy_name(busy).decode(),
                       1e-9 * self.limit_of(busy), began)

    cpdef bint has_answered(self, uint32_t worker) noexcept:
        return self.outstanding[worker] <= c.sv_ring_waiting(&self.completions[worker])

    cdef int64_t limit_of(self, uint64_t busy) noexcept:
        """How long a call may take; -1 if there is no limit."""
        if c.sv_busy_doing(busy) == c.SV_IN_STEP:
            return self.step_limit
        return self.reset_limit if c.sv_busy_doing(busy) == c.SV_IN_RESET else -1

    cdef bint has(self, uint32_t worker, uint64_t busy):
        """Whether the env that a worker says it is busy with is its own; else there is damage."""
        cdef uint32_t first = self.firsts[worker]
        return first <= c.sv_busy_env(busy) < first + self.counts[worker]

    cdef object busy_with(self, uint32_t worker, uint64_t busy):
        """What a worker is busy with: (env, "step", "reset" or "call"); None: none of these."""
        if self.idle_since[worker] != 0 or not self.has(worker, busy):
            return None
        return c.sv_busy_env(busy), c.sv_busy_name(busy).decode()

    cdef int follow_if_due(self) except -1:
        """Reads the usable cores, if the last reading was a second ago."""
        if self.waiter.ended - self.followed_at >= FOLLOW_NS:
            self.follow()
        return 0

    cdef int follow(self) except -1:
        """Reads the usable cores, and sets the budgets for waits of parent and workers."""
        cdef c.sv_budget budget
        now = self.budgets()
        budget.pause, budget.yield_, budget.linger, budget.window = now.worker
        c.sv_policy_set(c.sv_segment_policy(self.segment.base, &self.segment.plan), budget,
                        now.homing, now.cores)
        c.sv_counter_set(&self.notice.cores, now.usable)
        self.lingering = budget.linger > 0
        budget.pause, budget.yield_, budget.linger, budget.window = now.parent
        self.waiter.budget = budget
        self.followed_at = c.sv_now_ns()
        return 0

    # ---- tracing -----------------------------------------------------------------------------

    cdef void enter(self, uint32_t kind) noexcept:
        """Begins a span of the parent's trace; another thread changes nothing during a wait."""
        if self.waiter.trace is not NULL and not self.waiting:
            c.sv_trace_enter(self.waiter.trace, kind, c.sv_now_ns())

    def record(self, Recorder recorder, workers=(), packed=None, descriptor=-1):
        """Starts recording a trace; None stops it.

        Workers get a message and the memory with a request that they do not answer and that no
        count includes. So envs may be in flight, and there is no wait for workers. The request
        never takes the room on a ring that requests to envs and CLOSE may need.
        """
        cdef c.sv_record request
        cdef uint32_t worker
        for worker in workers:  # before the first of them gets its request
            if c.sv_ring_room(&self.requests[worker]) < self.counts[worker] + 2:
                raise RuntimeError(
                    f"worker {worker} has not come yet to the traces that were begun before: first "
                    "take the results of what its envs were asked")
        self.enter(c.SV_TRACE_NOTHING)
        self.sequence += 1
        for worker in workers:  # first: without a request a message is discarded
            self.channels[worker].put(self.sequence, packed, (descriptor,))
            self.talking = True
            request.sequence, request.operation = self.sequence, TRACE
            request.first, request.count = self.firsts[worker], 0
            self.push(worker, &request)
        if workers:
            self.ring(c.SV_EVERYONE)
            if (self.inline is not None and self.outstanding[self.num_processes] == 0
                    and not self.waiting):
                self.inline()  # else it would be served with the next request to envs
        self.waiter.trace = NULL if recorder is None else &recorder.trace
        self.recorder = recorder
        self.enter(c.SV_TRACE_CALLER)
        self.guard.record(recorder)

    # ---- workers -----------------------------------------------------------------------------

    cdef int renew(self, uint32_t worker) except -1:
        """Renews the rings of a dead worker, for its successor."""
        self.issued -= self.outstanding[worker]
        self.outstanding[worker] = 0
        c.sv_segment_renew(self.segment.base, &self.segment.plan, worker)
        return self.attach(worker)

    def is_idle(self, uint32_t worker):
        return self.outstanding[worker] == 0

    def steps_of(self, uint32_t worker):
        """Steps of envs made by the worker's present process."""
        return c.sv_counter_get(
            &c.sv_segment_counters(self.segment.base, &self.segment.plan, worker).steps)

    # ---- counters for onlookers ----------------------------------------------------------------

    cdef int publish(self) except -1:
        """Publishes the parent's counters."""
        self.tally.requests = self.issued
        c.sv_counters_publish(&self.notice.parent, &self.tally)
        return 0

    def insight(self):
        """What the segment says about the vector env now."""
        self.publish()
        return Insight(self.segment)

    def count_fault(self, name, number=1):
        """Counts faults by their name in csrc/counters.h."""
        cdef c.sv_counter *count
        cdef const c.sv_counter_line *line = c.sv_fault_lines
        while line.name is not NULL and line.name.decode() != name:
            line += 1
        if line.name is NULL:
            raise ValueError(f"{name} are not counted")
        count = c.sv_counter_at(self.notice, line)
        c.sv_counter_set(count, c.sv_counter_get(count) + <uint64_t>number)


# ==== frames ======================================================================================
#
# Which frame has the results of which env, and which one a request names: memory.pyx says what rows
# and frames are, and how rows are lent.
#
#     memory               what the user gets                     overwritten
#     one frame            copies; with copy=False observations   by the next step
#                          as they lie there, without a lease
#     a frame more, where  (so that an env whose results are      by the step after the next
#     faults are handled   lost can show its last ones)
#     num_buffers frames,  views of a batch of neighbours,        after their lease
#     with copy=False      leased; copies of other batches
#     blocks, for large    the observations of a batch step,      after their lease
#     observations         leased; the other arrays are copies
#     rollouts             views of all their frames, leased      after their lease
#
# The parent itself writes results only of envs that are not in flight: `truncate`, `mark_truncated`
# and `come_home` do.
#
# The lease of a batch ends `hold_batches` batches later, if not before.
#
# With copy=True the workers write large observations to the frame and to a block. So the parent
# need not copy them, for which all workers would have to wait. Where all blocks are leased, or
# after a fault or an interrupted call, the observations are copied from the frame.
#
# The numbers in requests: first the frames at home, in the segment; then the same frames with each
# of the blocks; then the frames of rollouts, in memory of their own.

cdef class Frames:
    """Register of where each env's last results are, and where its next ones go."""

    cdef Results home             # frames in the segment
    cdef readonly Results rollouts  # frames after these, in memory of their own; None: none
    cdef readonly Py_ssize_t away   # the frame of `rollouts` with the last results; -1: at home
    cdef Py_ssize_t[::1] ahead    # by how many frames each env is beyond `away`
    cdef bint uneven              # whether some envs are
    cdef Py_ssize_t num_envs
    cdef Py_ssize_t[::1] everyone  # indices of all envs
    cdef Py_ssize_t[::1] rows     # by env: the row at home where its last results are, or will be
    cdef Py_ssize_t[::1] last_rows  # by env: the row of the results before these
    cdef Py_ssize_t[::1] chosen   # by env: the frame for its next results; -1: one of a rollout
    cdef bint copy
    cdef bint leasing             # batches are returned as views, which are leased
    cdef bint keep_last           # new results do not overwrite the last ones
    cdef bint several             # there are several frames at home
    cdef Blocks blocks            # None: there are none
    cdef Py_ssize_t block         # the block that the last request named, until it is lent; -1
    cdef Py_ssize_t beyond        # the number of the rollouts' first frame
    cdef Py_ssize_t hold_batches  # further batches after which a lease ends; 0: it does not
    cdef object batches           # weak references to the leases of the last batches

    def __init__(self, Results home, copy=True, leasing=False, keep_last=False,
                 Blocks blocks=None, hold_batches=None):
        self.home = home
        self.copy = copy
        self.leasing = leasing
        self.keep_last = keep_last
        self.several = leasing or keep_last
        self.away = -1
        self.uneven = False
        self.ahead = np.zeros(home.num_envs, np.intp)
        self.blocks = blocks
        self.block = -1
        self.beyond = home.num_frames
        if blocks is not None:
            self.beyond += home.num_frames * blocks.num_blocks
        self.hold_batches = 0 if hold_batches is None else hold_batches
        self.batches = deque()
        self.num_envs = home.num_envs
        self.everyone = np.arange(home.num_envs, dtype=np.intp)
        self.rows = np.arange(home.num_envs, dtype=np.intp)
        self.chosen = np.zeros(home.num_envs, np.intp)
        self.last_rows = np.arange(home.num_envs, dtype=np.intp)

    # ---- frames for new results --------------------------------------------------------------

    cdef Py_ssize_t free(self, const Py_ssize_t[::1] envs):
        """A frame where no row of these envs is leased or shows the last results; -1 if none."""
        cdef Py_ssize_t frame
        cdef Py_ssize_t i
        cdef Py_ssize_t row
        for frame in range(self.home.num_frames):
            for i in range(envs.shape[0]):
                row = frame * self.num_envs + envs[i]
                if c.sv_is_marked(&self.home.marks[0], row) or (
                        self.keep_last and self.rows[envs[i]] == row):
                    break
            else:
                return frame
        return -1

    cdef Py_ssize_t choose(self, const Py_ssize_t[::1] envs) except -1:
        """A frame at home for new results of these envs, none of which is in flight."""
        cdef Py_ssize_t frame
        cdef Py_ssize_t i
        if not self.several:
            return 0
        frame = self.free(envs)
        if frame >= 0:
            return frame
        if not self.leasing:  # the last results of all envs need not lie in one frame
            for i in range(envs.shape[0]):
                if self.rows[envs[i]] != envs[i]:
                    self.home.copy_row(self.home, self.rows[envs[i]], envs[i])
                    self.rows[envs[i]] = envs[i]
            return 1
        gc.collect()  # frees batches that only a reference cycle keeps
        frame = self.free(envs)
        if frame < 0:
            raise BufferError(
                f"envs {list(envs)}: all {self.home.num_frames - self.keep_last} buffers are held "
                "by batches that are still in use. Drop their arrays (or copy what you keep), call "
                "release(), set hold_batches, or raise num_buffers. Nothing was sent to any env."
            )
        return frame

    cdef int choose_for(self, const Py_ssize_t[::1] envs) except -1:
        """Chooses one frame for new results of these envs; `aim_chosen` is the commit."""
        cdef Py_ssize_t frame = self.choose(envs)
        cdef Py_ssize_t i
        for i in range(envs.shape[0]):
            self.chosen[envs[i]] = frame
        return 0

    cdef int aim_chosen(self, Py_ssize_t env) except -1:
        """Notes that the results of an env will be in the frame chosen for it, if one was."""
        if self.chosen[env] >= 0:
            self.last_rows[env] = self.rows[env]
            self.rows[env] = self.chosen[env] * self.num_envs + env
        return 0

    cdef int aim(self, const Py_ssize_t[::1] envs, Py_ssize_t frame) except -1:
        """Notes where the results of these envs will be."""
        cdef Py_ssize_t i
        for i in range(envs.shape[0]):
            self.last_rows[envs[i]] = self.rows[envs[i]]
            self.rows[envs[i]] = frame * self.num_envs + envs[i]
        return 0

    cdef Py_ssize_t aim_all(self, Py_ssize_t rollout_frame) except -1:
        """Notes the frame for new results of all envs, of the rollouts or at home; returns it."""
        cdef Py_ssize_t frame = 0
        if rollout_frame >= 0:
            self.block = -1
            self.meet(rollout_frame)
            return self.beyond + rollout_frame
        if self.away >= 0 and self.keep_last:
            self.come_home()  # the last results are needed
        if self.several:
            frame = self.choose(self.everyone)
        # Nothing from here on raises.
        self.block = -1
        self.meet(-1)
        if self.several:
            self.aim(self.everyone, frame)
        if self.blocks is not None:
            self.block = self.blocks.unleased()
            frame += (1 + self.block) * self.home.num_frames
        return frame

    cdef int check_away(self) except -1:
        """Raises unless the last results are in a rollout."""
        if self.away < 0:
            raise RuntimeError(
                "the last results are in no rollout. Nothing was sent to any env.")
        return 0

    cdef int aim_some(self, const Py_ssize_t[::1] envs, Py_ssize_t rollout_frame) except -1:
        """Notes that the results of these envs will be in a frame of a rollout."""
        cdef Py_ssize_t i
        self.block = -1
        self.uneven = True
        for i in range(envs.shape[0]):
            self.ahead[envs[i]] = rollout_frame - self.away
        return 0

    cdef Py_ssize_t frame_of(self, Py_ssize_t env):
        """The frame that an env's last request named."""
        if self.away >= 0:
            return self.beyond + self.away + self.ahead[env]
        return self.rows[env] // self.num_envs

    # ---- rollouts ----------------------------------------------------------------------------

    def take_rollouts(self, rollouts):
        """Takes the frames of rollouts, in place of any before."""
        self.come_home()
        self.rollouts = rollouts

    def start_rollout(self, frame):
        """Puts the last results into a frame of the rollouts."""
        source, rows = self.home, self.rows
        if self.away >= 0:
            source, rows = self.rollouts, self.rows_away()
        self.rollouts.copy_rows(source, rows, frame * self.num_envs)
        self.meet(frame)

    cpdef meet(self, Py_ssize_t frame):
        """Notes that the last results of all envs are, or will be, in a frame of a rollout."""
        self.away = frame
        if self.uneven:
            self.ahead[:] = 0
            self.uneven = False

    cdef object rows_away(self):
        """The row in a rollout of each env's last results."""
        frames = self.away + np.asarray(self.ahead)
        return frames * self.num_envs + np.asarray(self.everyone)

    cpdef int come_home(self, Py_ssize_t asked=0) except -1:
        """Copies the last results to the frames in the segment if they are in a rollout.

        Raises if there are `asked` envs, whose results are still pending there.
        """
        if asked > 0 and self.uneven:
            raise RuntimeError(
                "envs are in flight whose results go to a rollout: wait until they are taken, or "
                "discard them. Nothing was sent to any env.")
        if self.away >= 0:
            rows = self.rows_away()
            self.aim(self.everyone, self.choose(self.everyone))
            self.home.copy_rows(self.rollouts, rows, self.rows[0])
            self.meet(-1)
        return 0

    # ---- single envs -------------------------------------------------------------------------

    cdef Results where(self, Py_ssize_t env, Py_ssize_t *row, Py_ssize_t *last):
        """Finds an env's last results, and the results before them."""
        if self.away < 0:
            row[0] = self.rows[env]
            last[0] = self.last_rows[env]
            return self.home
        cdef Py_ssize_t frame = self.away + self.ahead[env]
        row[0] = frame * self.num_envs + env
        last[0] = max(frame - 1, 0) * self.num_envs + env
        return self.rollouts

    cdef bint over(self, Py_ssize_t env):
        """Whether the env's last results ended an episode."""
        cdef Py_ssize_t row
        cdef Py_ssize_t last
        cdef Results results = self.where(env, &row, &last)
        return results.terminated_of[row] or results.truncated_of[row]

    cdef bint was_over(self, Py_ssize_t env):
        """Whether the results before its last ones ended an episode."""
        cdef Py_ssize_t row
        cdef Py_ssize_t last
        cdef Results results = self.where(env, &row, &last)
        return row != last and (results.terminated_of[last] or results.truncated_of[last])

    cdef int truncate(self, Py_ssize_t env) except -1:
        """Makes the env's results its last observation, reward 0 and a truncation."""
        cdef Py_ssize_t row
        cdef Py_ssize_t last
        cdef Results results = self.where(env, &row, &last)
        if row != last:
            results.observations.copy_row(results.observations, last, row)
        results.reward_of[row] = 0
        results.terminated_of[row] = False
        results.truncated_of[row] = True
        return 0

    cdef object last_observation(self, Py_ssize_t env, bint before):
        """An env's last observation; with ``before``, if its step is lost, the one before that."""
        cdef Py_ssize_t row
        cdef Py_ssize_t last
        cdef Results results = self.where(env, &row, &last)
        return results.observations.get(last if before else row)

    cdef int mark_truncated(self, Py_ssize_t env) except -1:
        cdef Py_ssize_t row
        cdef Py_ssize_t last
        cdef Results results = self.where(env, &row, &last)
        results.truncated_of[row] = True
        return 0

    # ---- results -----------------------------------------------------------------------------

    cdef Py_ssize_t first_row(self):
        """The first row of the last results if they lie in one frame; else -1."""
        cdef Py_ssize_t env
        for env in range(1, self.num_envs):
            if self.rows[env] != self.rows[0] + env:
                return -1
        return self.rows[0]

    def observe(self):
        """The observations of all envs: copies, or the live slabs, as the vector env was made."""
        cdef Py_ssize_t first = 0
        if self.several:
            first = self.first_row()
            if self.leasing or first < 0:
                return self.home.observations.gather(self.rows)
        return self.home.observations.batch(self.copy, first, self.num_envs)

    cdef tuple all(self, bint usual, infos):
        """Observations, rewards, terminations and truncations of all envs, and these infos.

        `usual` says that all envs have written their results in one lockstep request, the last.
        """
        cdef Results home = self.home
        if self.away >= 0:  # no env was asked since the rollout's last step
            self.come_home()
        cdef Py_ssize_t block = self.block
        self.block = -1  # it is lent once at most
        if usual and block >= 0:
            observations = self.blocks.lend(block)
        else:
            observations = self.observe()
        if not self.several:
            return (observations, (<Pool>home.copies[0]).copy(), (<Pool>home.copies[1]).copy(),
                    (<Pool>home.copies[2]).copy(), infos)
        return (observations, *home.rewards_and_flags(self.rows), infos)

    cdef tuple some(self, object envs):
        """Results of some envs, in this order, and the lease if these are views."""
        cdef Py_ssize_t i
        cdef Py_ssize_t count = len(envs)
        cdef const Py_ssize_t[::1] row_of
        if self.away >= 0:  # who fills a rollout reads it there; other calls get copies
            return self.rollouts.gather(self.rows_away()[envs]), None
        if not self.several:
            return self.home.gather(envs), None
        rows = np.asarray(self.rows)[envs]
        row_of = rows
        if self.leasing and count > 0:
            for i in range(1, count):
                if row_of[i] != row_of[0] + i:
                    break
            else:
                lease = self.home.lease(row_of[0], count)
                return self.home.view(lease, (count,)), lease
        return self.home.gather(rows), None

    cdef int count_batch(self, Lease lease) except -1:
        """Notes a batch and its lease, if it has one; ends the lease of an older batch."""
        if self.hold_batches == 0:
            return 0
        self.batches.append(None if lease is None else ref(lease))
        if len(self.batches) > self.hold_batches:
            oldest = self.batches.popleft()
            alive = None if oldest is None else oldest()
            if alive is not None:
                alive.release()
        return 0

cdef enum State:
    IDLE       # not asked, or its answer was taken; its episode may be broken: see Ledger.after
    IN_FLIGHT  # asked, and has not answered
    READY      # it has answered: it is in the queue
    LOST       # asked, and its worker has died
    FAILED     # asked, and has raised


# ==== infos =======================================================================================
#
# Infos in the parent: reads them from rings and channels, and gathers them for a batch.
#
# A batch's infos become Gymnasium's dict of arrays (a *column* a key), or one dict for each env.
# ``VectorEnv._add_info`` defines the dict of arrays: a value that is not a plain store into a
# column of the same dtype is given to that very method, so that results equal ``SyncVectorEnv``'s.
#
# Reading runs the user's code (unpickling, ``_add_info``) and may raise. The call that takes the
# envs then ends with that exception, and their answers are discarded, so that a message which
# cannot be read raises only once. Envs that the call does not take keep their messages.

cdef object _ndarray = np.ndarray
cdef object _plain_add_info = VectorEnv._add_info


cdef object report_of(fault, bint cut_off, list last):
    return tuple.__new__(Report, (fault, cut_off, last))  # in C: the commits run no Python code


class Batch(VectorEnv):
    """Stand-in for a vector env of fewer envs, so that Gymnasium gathers their infos."""

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.closed = True


# ---- columns -----------------------------------------------------------------------------------


cdef class Columns  # see below


cdef class Column:
    """The array of one key in the dict of arrays that is being built, and its mask."""

    cdef str key
    cdef str mask_key
    cdef object array       # None: the key is not in this batch's infos yet
    cdef object mask
    cdef object dtype       # None: objects
    cdef tuple shape        # the shape of one env's value
    cdef Py_ssize_t nbytes  # the bytes of one env's value
    cdef char *data
    cdef uint8_t *flags
    cdef Columns children   # the columns of a nested dict

    def __cinit__(self, key):
        self.key = key
        self.mask_key = f"_{key}"
        self.children = Columns()

    cdef bint enter(self, Columns columns, dict infos, Field field,
                    Py_ssize_t num_envs) except -1:
        """Finds or makes the array in `infos`.  False: leave the value to `_add_info`."""
        if self.array is None:
            array = infos.get(self.key)
            mask = infos.get(self.mask_key)
            if array is None and mask is None:
                if field.dtype is None:
                    array = np.empty(num_envs, object)  # np.full is Python: Ctrl-C ends it
                else:
                    array = np.zeros((num_envs, *field.shape) if field.shape else num_envs,
                                     field.dtype)
                mask = np.zeros(num_envs, np.bool_)
                infos[self.key] = array
                infos[self.mask_key] = mask
            elif (type(array) is not _ndarray or type(mask) is not _ndarray
                  or mask.dtype != np.bool_ or mask.shape != (num_envs,)):
                return False  # a key "_key" of the user's has taken the mask's place
            self.dtype = array.dtype
            self.shape = array.shape[1:]
            self.nbytes = array.nbytes // num_envs
            if self.dtype.hasobject:
                self.dtype = None
            else:
                self.data = <char *>address_of(array)
            self.flags = <uint8_t *>address_of(mask)
            columns.entered.append(self)  # first: what raises later must find it there
            self.array = array
            self.mask = mask
        if self.dtype is field.dtype:
            return field.dtype is None or self.shape is field.shape or self.shape == field.shape
        return (self.dtype is not None and field.dtype is not None
                and self.dtype == field.dtype and self.shape == field.shape)


cdef class Columns:
    """The columns of one dict of arrays, by key; shared by the decoders of all workers."""

    cdef dict by_key
    cdef list entered       # the columns that are in this batch's infos

    def __cinit__(self):
        self.by_key = {}
        self.entered = []

    cdef int settle(self, list fields) except -1:
        """Gives every field of a schema its column."""
        cdef Field field
        for field in fields:
            if field.dtype is not None:  # NumPy's own instance, so that dtypes compare by identity
                field.dtype = np.empty(0, field.dtype.type).dtype
            if field.key not in self.by_key:
                self.by_key[field.key] = Column(field.key)
            field.column = self.by_key[field.key]
            if field.kind == NESTED:
                (<Column>field.column).children.settle(field.children)
        return 0

    def finish(self):
        """Ends a batch: the arrays are the user's from now on."""
        cdef Column column
        for column in self.entered:
            column.array = column.mask = None
        self.entered.clear()
        for column in self.by_key.values():
            if column.children.by_key:
                column.children.finish()


cdef class InfoDecoder(Decoder):
    """Decoder of one worker's messages: infos, and observations that are in no slab."""

    cdef const uint8_t[::1] states  # these three: as in Inbox
    cdef const uint32_t[::1] sequences
    cdef const uint32_t[::1] flags
    cdef bint discards  # whether no message is wanted
    cdef Columns columns
    cdef Codec observations
    cdef Codec finals
    # The row of the message's env in the dict that is being built, and the number of its rows.
    cdef Py_ssize_t row
    cdef Py_ssize_t num_rows

    def __init__(self, segment, worker, from_worker, Inbox inbox, Columns columns,
                 Codec observations, Codec finals):
        self.states, self.sequences, self.flags = inbox.states, inbox.sequences, inbox.flags
        self.columns = columns
        self.observations = observations
        self.finals = finals
        self.kinds = 1 << INFO
        if isinstance(observations, MessageCodec):
            self.kinds |= 1 << OBSERVATION
        if finals is not None:
            self.kinds |= 1 << FINAL

    cdef int learned(self, list fields) except -1:
        return self.columns.settle(fields)

    cdef bint is_wanted_later(self, uint32_t env, uint32_t sequence, uint32_t now) except -1:
        # Not by its number: a worker that is busy with several envs may answer later ones first.
        if env >= self.num_envs:
            raise self.damaged("has no env")
        return not self.discards and self.sequences[env] == sequence and (
            self.states[env] == IN_FLIGHT
            or self.states[env] == READY and self.flags[env] & MESSAGES != 0)

    cdef list drain(self, uint32_t sequence):
        """All infos of this sequence as [(env, info)], in the order in which they were sent."""
        cdef list infos = []
        while self.next(sequence):
            info = self.read(None, None)
            if info is not None:
                infos.append((self.env, info))
            self.advance()
        return infos

    cdef int add_to(self, dict infos, uint32_t sequence, object vector_env) except -1:
        """Adds the infos of this sequence, at least one, to Gymnasium's dict of arrays."""
        cdef bint found = False
        self.num_rows = self.num_envs
        while self.next(sequence):
            found = True
            self.row = self.env
            self.read(infos, vector_env)
            self.advance()
        if not found:
            raise self.damaged("was announced, and is not there")
        return 0

    cdef int add_env(self, dict infos, Py_ssize_t env, uint32_t sequence, Py_ssize_t row,
                     Py_ssize_t num_rows, object vector_env) except -1:
        """Adds the infos of one env, which come next, to a dict of arrays of another length."""
        self.row = row
        self.num_rows = num_rows
        while self.next(sequence) and self.env <= env:
            if self.env == env:  # else it is of an env that has failed
                self.read(infos, vector_env)
            self.advance()
        return 0

    cdef object read(self, dict infos, object vector_env):
        """Adds the message that `next` found; without a vector env, returns it as the env did."""
        cdef list fields
        if self.kind == OBSERVATION:  # to where the others are
            self.observations.write(self.env, self.take()[""])
        elif vector_env is None:
            info = self.take()
            return {"final_obs": self.finals.read(self.env), **info} if self.kind == FINAL else info
        else:
            if self.kind == FINAL:
                _plain_add_info(
                    vector_env, infos, {"final_obs": self.finals.read(self.env)}, self.row)
            fields = self.schema()
            if fields is None:
                _plain_add_info(vector_env, infos, self.take(), self.row)
            else:
                self.add_fields(self.columns, fields, infos, vector_env)
        return None

    cdef int add_fields(self, Columns columns, list fields, dict infos,
                        object vector_env) except -1:
        cdef Field field
        cdef Column column
        for field in fields:
            column = <Column>field.column
            if field.kind == NESTED:
                self.add_nested(field, infos, vector_env)
            elif column.enter(columns, infos, field, self.num_rows):
                column.flags[self.row] = 1
                if field.dtype is None:
                    column.array[self.row] = self.value(field)
                else:
                    self.copy(column.data + self.row * column.nbytes, field.nbytes)
            else:
                _plain_add_info(vector_env, infos, {field.key: self.value(field)}, self.row)
        return 0

    cdef int add_nested(self, Field field, dict infos, object vector_env) except -1:
        """As `_add_info` does: the nested dict first, then its place and mask in the outer one."""
        cdef Column column = <Column>field.column
        inner = infos.get(field.key)
        if inner is None:
            inner = {}
        elif type(inner) is not dict:  # a value of another env: `_add_info` knows what follows
            _plain_add_info(vector_env, infos, {field.key: self.unpack(field.children)}, self.row)
            return 0
        self.add_fields(column.children, field.children, <dict>inner, vector_env)
        mask = infos.get(column.mask_key)
        if mask is None:
            mask = np.zeros(self.num_rows, np.bool_)
        mask[self.row] = True
        infos[field.key] = inner
        infos[column.mask_key] = mask
        return 0


# ---- the messages of all workers ---------------------------------------------------------------


cdef class Inbox:
    """Messages of answers that have not been taken yet."""

    cdef Links links
    cdef object slabs
    cdef Codec observations
    cdef list decoders                 # one for each worker
    cdef object columns
    cdef dict held                     # env: [info, or (decoder, message)], moved out of the rings
    cdef bint has_read                 # messages were read whose room is not given back yet
    # The ledger's entries, one for each env.
    cdef const uint32_t[::1] workers
    cdef const uint8_t[::1] states     # a State
    cdef const uint32_t[::1] sequences # the number of its request
    cdef uint32_t[::1] flags           # the flags of its answer

    def __init__(self, Links links, slabs, const uint32_t[::1] workers,
                 const uint8_t[::1] states, const uint32_t[::1] sequences, uint32_t[::1] flags):
        self.links = links
        self.slabs = slabs
        self.observations = slabs.results.observations
        self.workers = workers
        self.states = states
        self.sequences = sequences
        self.flags = flags
        self.columns = Columns()
        self.decoders = [None] * links.num_workers
        self.held = {}

    cdef int renew(self, uint32_t worker) except -1:
        """Starts reading a worker's ring from its beginning."""
        self.decoders[worker] = InfoDecoder(
            self.links.segment, worker, True, self, self.columns, self.observations,
            self.slabs.finals)
        return 0

    # ---- messages in rings -------------------------------------------------------------------

    cdef bint has_any(self, const Py_ssize_t[::1] envs) noexcept:
        """Whether one of these envs has sent a message."""
        cdef Py_ssize_t i
        if self.held:
            return True
        for i in range(envs.shape[0]):
            if self.flags[envs[i]] & MESSAGES:
                return True
        return False

    cdef int hold(self, Py_ssize_t env) except -1:
        """Moves an env's messages, unread, from the ring to ``held``; in the order of answers."""
        cdef InfoDecoder decoder
        if not self.flags[env] & MESSAGES:
            return 0
        decoder = self.decoders[self.workers[env]]
        while decoder.next(self.sequences[env]) and decoder.env <= env:
            if decoder.env == env:  # otherwise it belongs to an env that failed
                self.held.setdefault(env, []).append((decoder, decoder.copied()))
            decoder.release()
        self.flags[env] &= ~<uint32_t>MESSAGES
        return 0

    cdef int order(self, const Py_ssize_t[::1] ready, const Py_ssize_t[::1] envs) except -1:
        """Moves infos out of the rings if their order there is not that of these envs.

        Args:
            ready: All envs that have answered, in the order of their answers.
            envs: The envs whose infos are wanted.
        """
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        cdef Py_ssize_t position
        places = np.full(self.workers.shape[0], envs.shape[0], np.intp)  # past the end: not moved
        cdef Py_ssize_t[::1] place = places
        for i in range(envs.shape[0]):
            place[envs[i]] = i
        last = np.full(self.links.num_workers, -1, np.intp)
        cdef Py_ssize_t[::1] last_of = last
        for i in range(ready.shape[0]):
            env = ready[i]
            if not self.flags[env] & MESSAGES:
                continue
            position = place[env]
            if position < last_of[self.workers[env]]:
                break
            last_of[self.workers[env]] = position
        else:
            return 0
        for i in range(ready.shape[0]):
            self.hold(ready[i])
        return 0

    # ---- infos of a batch --------------------------------------------------------------------

    cdef list read_held(self, Py_ssize_t env):
        """An env's infos that are in no ring."""
        cdef InfoDecoder decoder
        cdef list infos = []
        for held in self.held.get(env, ()):
            if type(held) is tuple:
                decoder, message = held
                decoder.restore(message)
                held = decoder.read(None, None)
            if held is not None:
                infos.append(held)
        return infos

    cdef list each_of_all(self, list workers, uint32_t sequence):
        """Infos of all envs, one dict each; only these workers have sent some."""
        cdef InfoDecoder decoder
        cdef list each = [{} for _ in range(self.workers.shape[0])]
        self.has_read = True
        for worker in workers:
            decoder = self.decoders[worker]
            for env, info in decoder.drain(sequence):
                each[env] = _merged([each[env], info]) if each[env] else info
        return each

    cdef dict gather_all(self, list workers, uint32_t sequence, vector_env):
        """Infos of all envs, as Gymnasium's dict of arrays; only these workers have sent some."""
        cdef InfoDecoder decoder
        cdef dict infos = {}
        self.has_read = True
        try:
            for worker in workers:
                decoder = self.decoders[worker]
                decoder.add_to(infos, sequence, vector_env)
        finally:
            self.columns.finish()
        return infos

    cdef list each(self, const Py_ssize_t[::1] envs):
        """Infos of these envs: one dict for each, as the env returned it."""
        cdef Py_ssize_t i
        for i in range(envs.shape[0]):
            self.hold(envs[i])
        return [_merged(self.read_held(envs[i])) for i in range(envs.shape[0])]

    cdef object gather(self, const Py_ssize_t[::1] envs, const Py_ssize_t[::1] rows, dict reports,
                       vector_env):
        """Infos of these envs, with reports of faults: Gymnasium's dict of arrays."""
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        cdef object infos = {}
        cdef InfoDecoder decoder
        cdef Py_ssize_t num_rows = vector_env.num_envs
        cdef bint plain = type(vector_env)._add_info is _plain_add_info
        self.has_read = plain
        try:
            for i in range(envs.shape[0]):
                env = envs[i]
                if not plain:
                    self.hold(env)
                elif self.flags[env] & MESSAGES:
                    decoder = self.decoders[self.workers[env]]
                    decoder.add_env(infos, env, self.sequences[env], rows[i], num_rows, vector_env)
                for info in self.read_held(env) if self.held else ():
                    infos = vector_env._add_info(infos, info, rows[i])
                if reports and env in reports:
                    infos = vector_env._add_info(infos, reports[env].info, rows[i])
        finally:
            self.columns.finish()
        return infos

    # ---- the end of a batch ------------------------------------------------------------------

    cdef int give_back(self) except -1:
        """Gives the room of messages that were read back to the rings."""
        cdef InfoDecoder decoder
        self.has_read = False
        for decoder in self.decoders:
            decoder.give_back()
        return 0

    cdef int discard(self, Py_ssize_t env) except -1:
        """Discards an env's held messages."""
        if self.held:
            self.held.pop(env, None)
        return 0

    cdef int discard_all(self, uint32_t sequence) except -1:
        """Discards all messages of answers to requests before this one."""
        cdef InfoDecoder decoder
        self.has_read = False
        self.held.clear()
        self.flags[:] = 0
        for decoder in self.decoders:
            decoder.discards = True
            try:
                decoder.next(sequence)
            finally:
                decoder.discards = False
            decoder.give_back()
        return 0


cdef object _merged(list infos):
    """Merges dicts into one; if there is only one, returns that."""
    if len(infos) == 1:
        return infos[0]
    return {key: info[key] for info in infos for key in info}


# ==== ledger ======================================================================================
#
# The ledger of a vector env: which env was asked what, and which has answered.
#
# No other object keeps this. Each call of the ledger has three phases. *Prepare* does everything
# that may raise, be refused or run other people's Python code; it changes nothing that another call
# can see. *Commit* notes what was asked or taken and puts requests on rings; it calls no Python
# code. *Publish* rings the bell and returns results. So an exception at any moment, from a signal
# handler for instance, leaves the ledger true: envs that were asked are in flight.
#
# *Lockstep* is the fast path: all envs are asked at once, with one request a worker, and the ledger
# does nothing for each env. An exceptional case (a fault, a message through a channel, a time
# limit) first writes entries for the single envs, and continues as if they had been asked one by
# one.

cdef tuple NOTHING = (None, None)  # the seed and the options of a reset that has neither

cdef class Ledger:
    """The request to each env, and its answer."""

    cdef readonly Links links
    cdef readonly Frames frames
    cdef Inbox inbox
    cdef object pack              # makes a message of actions that do not fit a ring
    cdef Codec actions
    cdef Seeds seeds
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
    cdef c.sv_record *lock_answers
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
    cdef public StepLog log       # of what envs are asked and answer; None: there is none
    cdef uint8_t[::1] lost_workers  # whether each worker is dead, without a successor

    def __cinit__(self, Links links, *args, **kwargs):
        self.lock_answers = <c.sv_record *>calloc(links.num_workers, sizeof(c.sv_record))
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
        self.seeds = slabs.seeds
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
        """Has the log accept what was logged of all envs that are not in flight."""
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
            return []
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

    def num_down(self, const Py_ssize_t[::1] envs):
        """How many of these envs have a worker that is being replaced."""
        return len([env for env in envs if self.workers[env] in self.links.down])

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
        self.links.enter(c.SV_TRACE_SEND)
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
            c.sv_completion_issue(links.completion, links.issued + links.num_workers)
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
        return links.ring(c.SV_EVERYONE)

    def step(self, const Py_ssize_t[::1] envs, actions, rollout_frame=None, together=False):
        """Writes actions and asks each of these envs, which were checked, to step."""
        cdef uint32_t base = self.links.sequence
        cdef dict late
        cdef dict lasts
        cdef Py_ssize_t i
        self.links.enter(c.SV_TRACE_SEND)
        self.check(envs)
        if self.log is not None:
            self.log.asked(envs)
        self.ranging = together or self.in_ranges
        if not self.may_step_over:
            self.check_none_over(envs)
        if rollout_frame is None:
            self.frames.come_home(self.num_singles)
            self.choose_frames(envs)
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

    def reset(self, const Py_ssize_t[::1] envs, seeds=None, options=None, *, bint together=False,
              bint repeat=True):
        """Asks each of these envs to reset.

        Args:
            envs: Indices of envs.
            seeds: A seed, or None, for each of these. None: none at all.
            options: Likewise.
            together: As for `step`.
            repeat: Whether a reset that is lost is repeated with its seed and options.
        """
        cdef uint32_t base = self.links.sequence
        cdef dict late = None
        cdef Py_ssize_t i
        cdef list arguments = None
        cdef bint fit = True
        self.links.enter(c.SV_TRACE_SEND)
        self.check(envs)
        if self.log is not None:
            self.log.asked(envs)
        if seeds is not None or options is not None:
            arguments = [(None if seeds is None else seeds[i],
                          None if options is None else options[i]) for i in range(envs.shape[0])]
            for of_env in arguments:
                fit = fit and self.seeds.fits(of_env)
        self.ranging = together or self.in_ranges
        self.frames.come_home(self.num_singles)
        self.choose_frames(envs)
        self.links.sequence += <uint32_t>envs.shape[0]
        if not fit:
            late = self.send_arguments(envs, arguments, base + 1)
        self.note_reset(envs, arguments, fit, repeat)
        self.post(envs, RESET, base + 1, late, None)

    cdef dict send_arguments(self, const Py_ssize_t[::1] envs, list arguments, uint32_t sequence):
        """Sends (seed, options) of resets, with the first request to each worker; returns its env."""
        cdef dict late = {}
        cdef dict of_workers = {}  # worker: (its first env, the request's number, the message)
        cdef Py_ssize_t i
        for i in range(envs.shape[0]):
            first = envs[i], sequence + <uint32_t>i, []
            of_workers.setdefault(self.workers[envs[i]], first)[2].append((envs[i], arguments[i]))
        for worker, (env, number, message) in of_workers.items():
            late[env] = self.pack(message)
            self.links.channels[worker].put(number, late[env])
        self.links.talking = True
        return late

    cdef int note_reset(self, const Py_ssize_t[::1] envs, list arguments, bint in_slab,
                        bint repeat) except -1:
        """Notes the (seed, options) of the envs' resets, so that a lost reset can be repeated.

        This is part of a commit: it uses the ledger's own memory and the slab only.
        """
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        cdef tuple of_env = NOTHING
        for i in range(envs.shape[0]):
            env = envs[i]
            if arguments is not None:
                of_env = <tuple>arguments[i]
            self.resets[env] += 1
            self.asked_with[env] = of_env if repeat else NOTHING
            if of_env[0] is not None:
                self.last_seeds[env] = of_env[0]
            self.seeds.put(env, of_env if in_slab else None)
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
            count = 1
            if operation == RESET or not (late or self.num_broken > 0):
                count = self.together(envs, i)
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
        return links.ring(c.SV_EVERYONE if broken else mask)

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

    def command(self, const Py_ssize_t[::1] envs, dict packed, descriptors=()):
        """Asks the workers of these envs to carry out a command.

        Args:
            envs: Indices of envs, ascending.
            packed: The message of each worker whose envs these are.
            descriptors: Descriptors that are sent with each message.
        """
        cdef Links links = self.links
        cdef uint32_t worker
        cdef Py_ssize_t i
        cdef uint32_t sequence
        links.enter(c.SV_TRACE_SEND)
        self.check(envs)
        if self.log is not None:
            self.log.asked(envs)
        links.sequence += 1
        sequence = links.sequence
        for worker in packed:  # first: without a request a message is discarded
            links.channels[worker].put(sequence, packed[worker], descriptors)
        links.talking = True
        links.guard.note_asked()
        for i in range(envs.shape[0]):
            worker = self.workers[envs[i]]
            if i + 1 == envs.shape[0] or self.workers[envs[i + 1]] != worker:
                links.request(worker, sequence, COMMAND, links.firsts[worker],
                              links.counts[worker], 0)
                self.open_requests += 1
        for i in range(envs.shape[0]):
            self.enter(envs[i], COMMAND, sequence)
        self.ranges_in_flight = True
        links.ring(self.mask_of(envs))

    cdef int choose_frames(self, const Py_ssize_t[::1] envs) except -1:
        """Finds room for the results of these envs, or raises; nothing is sent by then."""
        cdef Py_ssize_t i = 0
        cdef Py_ssize_t count
        if not self.frames.several:
            return self.frames.choose_for(envs)
        while i < envs.shape[0]:
            count = self.together(envs, i)
            self.frames.choose_for(envs[i:i + count])
            i += count
        return 0

    cdef uint32_t mask_of(self, const Py_ssize_t[::1] envs):
        """Workers to wake for these envs: their own, or all workers if these are most of them."""
        cdef Py_ssize_t i
        cdef uint32_t mask = 0
        if 2 * envs.shape[0] > <Py_ssize_t>self.links.num_workers:
            return c.SV_EVERYONE
        for i in range(envs.shape[0]):
            mask |= c.sv_bell_mask(self.workers[envs[i]])
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

    cpdef int wait(self, Py_ssize_t wanted, envs, deadline) except -1:
        """Waits until enough envs are ready, or these have answered, or for another event.

        Args:
            wanted: Number of ready envs, or until one has raised; -1: all that are in flight.
            envs: Envs that must have answered, whatever is ``wanted``; or None. With UP: those
                whose workers must not be down.
            deadline: The end of the wait, in seconds by the monotonic clock. None: there is none.

        Returns:
            The event that ends the wait. Another wait goes on with it.
        """
        cdef Links links = self.links
        cdef Py_ssize_t missing
        cdef int64_t deadline_ns = -1  # no deadline; also if its nanoseconds do not fit
        if deadline is not None and deadline < FOR_EVER_S:
            deadline_ns = <int64_t>(deadline * 1e9)
        if links.inline is not None and self.num_unanswered:
            # First: else the caller would step its envs only when the others were not enough.
            links.serve_here()
        cdef int event = links.look_if_due() if self.num_in_flight else NO_EVENT
        while event == NO_EVENT or event == DONE:
            self.pop()
            if self.failures:
                return RAISED
            if self.num_unfinished > 0:
                event = self.wait_for_message(deadline_ns)
                continue
            if wanted == UP:
                missing = self.num_down(envs)
            elif envs is not None:
                missing = self.num_missing(envs)
            elif wanted < 0:
                missing = self.num_unanswered
            elif self.raised:
                return DONE
            else:
                missing = wanted - self.num_ready
            if missing <= 0:
                return DONE
            if self.open_requests == 0 and links.down:
                event = links.listen(list(links.down), deadline_ns)
            else:
                event = self.wait_for_answers(missing, deadline_ns, envs is not None)
        return event

    cdef int wait_for_answers(self, Py_ssize_t wanted, int64_t deadline, bint requests) except -1:
        """Waits until ``wanted`` more envs, or requests, may be answered."""
        cdef Links links = self.links
        cdef uint32_t done = links.issued - self.open_requests
        cdef c.sv_budget usual = links.waiter.budget
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
                done + <uint32_t>min(wanted, <Py_ssize_t>self.open_requests), deadline)
        finally:
            links.waiter.budget = usual

    cdef int wait_for_message(self, int64_t deadline) except -1:
        """Waits for a message without which an answer cannot be taken."""
        cdef Links links = self.links
        cdef list incomplete = self.incomplete
        for worker in incomplete:
            if links.channels[worker].find(self.sequence_awaited(worker)) is not None:
                return MESSAGE
        return links.listen(incomplete, deadline)

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
        `wait` and `take`.

        Args:
            vector_env: Gathers the infos; None: one dict an env.
            arrays: Whether arrays are wanted at all.
        """
        cdef Links links = self.links
        cdef uint32_t worker
        cdef list sending = None
        if not self.lockstep:
            return None
        links.enter(c.SV_TRACE_TAKE)
        links.follow_if_due()
        if not self.popped:
            if links.wait_for(links.issued, -1) != DONE:
                self.spread()
                links.looked_at -= links.slice_ns  # the next wait looks at once
                return None
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
        cdef c.sv_record answer
        cdef uint32_t i
        cdef uint32_t worker
        links.enter(c.SV_TRACE_TAKE)
        self.spread()
        for i in range(links.num_workers):
            worker = (self.next_worker + i) % links.num_workers
            while links.take(worker, &answer):
                self.settle(worker, &answer)
        self.next_worker = (self.next_worker + 1) % links.num_workers
        if self.open_requests == 0:
            self.ranges_in_flight = False
        return links.follow_if_due()

    cdef int settle(self, uint32_t worker, c.sv_record *answer) except -1:
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
        cdef c.sv_record answer
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        self.spread()
        while (links.outstanding[worker] > 0
               and c.sv_ring_try_pop(&links.completions[worker], &answer) == c.SV_RING_YES
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
        links.down.pop(worker, None)
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
        del links.down[worker]
        for env in range(first, end):
            if self.states[env] == LOST or self.states[env] == FAILED:
                self.answer_lost(env, fault, lasts)
            else:
                self.break_later(env, fault)
        links.ring(c.SV_EVERYONE)

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
        self.links.ring(c.SV_EVERYONE)

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
        report = self.reports.get(env)
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
        """Has the env's next answer report a fault, as a truncation unless that is a reset's."""
        cdef bint breaks = not self.frames.over(env) or self.resets_in_step or (
            self.may_step_over and not self.resets_in_next_step)
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
        self.seeds.put(env, NOTHING)  # the worker knows what the lost one had
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
        self.links.enter(c.SV_TRACE_CALLER)
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


# ==== batch_step ==================================================================================
#
# The calls that a training loop makes, compiled: a batch step, and the two halves of a partial one.
#
# No Python code runs in them unless something is unusual: a fault, a message that did not fit, an
# abandoned call. That is left to the subclass.

cdef object _intp = np.dtype(np.intp)


cdef class BatchSteps:
    """Base of the Exchange, with its `step`, `ask` and `take_batch`."""

    cdef readonly Guard guard       # never None: its methods are called without a check
    cdef public Ledger _ledger      # None: the exchange is not started yet, or closed
    cdef public object _workers
    cdef public object _recovery
    cdef public set _left           # envs that `leave` has closed
    cdef public bint _recycles

    def __cinit__(self, *args, **kwargs):
        self.guard = Guard()

    def step(self, actions, gather=None, envs=None, *, Py_ssize_t frame=-1, bint last=False,
             bint arrays=True, meanwhile=None, within=None):
        """Steps all envs, or some, none of which may be in flight.

        Args:
            actions: As for :meth:`ask`.
            gather: As for :meth:`take`.
            envs: Which. None: all.
            frame: The rollout's frame for the results; -1: none.
            last: Whether that is the rollout's last frame.
            arrays: Whether results other than infos are wanted at all.
            meanwhile: Called while the envs step.
            within: The loan under which this call is made.

        Returns:
            Observations, rewards, terminations and truncations of all envs, and infos.

        Raises:
            AlreadyPendingCallError: Another call is under way, or its results are to be taken.
            Exception: As :meth:`ask` and :meth:`take`, and whatever envs raise.
        """
        cdef Guard guard = self.guard
        guard.enter_whole()
        try:
            return self.whole_step(
                guard, actions, gather, envs, frame, last, arrays, meanwhile, within)
        except BaseException as error:
            guard.abandon_all()
            raise cut_traceback(error)
        finally:
            guard.leave()

    cdef tuple whole_step(self, Guard guard, actions, gather, envs, Py_ssize_t frame, bint last,
                          bint arrays, meanwhile, within):
        cdef Ledger ledger = self._ledger  # kept: close() may take it away meanwhile
        cdef tuple results = None
        if (ledger is None or guard.pending is not within or guard.abandoned or ledger.lockstep
                or ledger.num_singles):
            self._check_pending("step_async", within, alone=True)
            ledger, _ = self._settled()
        if self._left or ledger.links.down:
            self._asked(envs)
        self._workers.doing = "step"
        if envs is None:
            ledger.step_all(actions, frame)
        elif len(envs):
            ledger.step(envs, actions)
        if meanwhile is not None:
            meanwhile()
        results = ledger.take_all(gather, arrays)
        if results is None:  # not all has been as usual
            results = self._results(ledger, gather, arrays)
        if self._recycles:
            self._recycle(None)
        if last:
            self._frames.come_home()
        return results

    # ---- partial batches ---------------------------------------------------------------------

    cdef Ledger settled(self, deadline=None):
        """The ledger, once abandoned answers are discarded."""
        cdef Ledger ledger = self._ledger
        if ledger is None or self.guard.abandoned:
            ledger, _ = self._settled(deadline)
        return ledger

    def ask(self, envs, actions, *, Py_ssize_t frame=-1, bint together=False, timeout=None):
        """Asks envs to step, and does not wait, but for workers that are being replaced.

        Args:
            envs: Which, int ``(n,)``. None: all.
            actions: One for each of these envs, batched as the action space says; lists will do.
            frame: The rollout's frame for the results; with some envs, one that has the others'
                results.
            together: Whether neighbouring envs answer together: cheaper, if no caller waits for one
                of them alone.
            timeout: Seconds to wait. None: as long as it takes.

        Raises:
            ClosedEnvironmentError: It is closed.
            AlreadyPendingCallError: Another call is under way.
            multiprocessing.TimeoutError: The time is up. Nothing was sent.
            ValueError: There is no such env, it is named twice, or is in flight; the number or
                shape of the actions is wrong. Nothing was sent.
            TypeError: The dtype of the actions or of ``envs`` is wrong. Nothing was sent.
            BufferError: All frames of an env are held. Nothing was sent.
        """
        cdef Guard guard = self.guard
        guard.enter()
        try:
            self.ask_some(envs, actions, frame, together, timeout)
        finally:
            guard.leave()

    cdef int ask_some(self, envs, actions, Py_ssize_t frame, bint together, timeout) except -1:
        deadline = None if timeout is None else monotonic() + timeout
        cdef Ledger ledger = self.settled(deadline)
        cdef bint usual = not self._left and not ledger.links.down
        self._workers.doing = "step"
        if envs is None and usual:
            return ledger.step_all(actions, frame)
        if not (usual and type(envs) is _ndarray and has_dtype(envs, _intp)
                              and ndim_of(envs) == 1 and is_contiguous(envs)):
            envs = self._asked(envs, deadline)
        if size_of(envs):
            ledger.step(envs, actions, None if frame < 0 else frame, together)
        return 0

    def take_batch(self, Py_ssize_t count, gather=None, least=None, timeout=None):
        """Takes the envs that have been ready for longest, as :meth:`take` does, in fewer steps.

        Args:
            count: As for :meth:`take`.
            gather: Likewise.
            least: Likewise.
            timeout: Likewise.

        Returns:
            Observations, rewards, terminations, truncations and infos; the envs; and what envs have
            raised.

        Raises:
            AlreadyPendingCallError: Another call is under way, or its results are to be taken.
            Exception: As :meth:`take`.
        """
        cdef Guard guard = self.guard
        guard.enter()
        try:
            if guard.pending is not None:
                self._check_pending("recv")
            if self._recycles:
                self._open()
                self._recycle(None)
            return self.take_oldest(count, gather, least, timeout)
        finally:
            guard.leave()

    cdef tuple take_oldest(self, Py_ssize_t count, gather, least, timeout):
        deadline = None if timeout is None else monotonic() + timeout
        cdef Ledger ledger = self.settled(deadline)
        cdef Py_ssize_t wanted = count if least is None else least
        cdef int event = NO_EVENT
        among = ()
        if timeout is None and not ledger.raised and ledger.num_in_flight >= wanted:
            event = ledger.wait(wanted, None, None)
            if event != DONE:
                self._handle(event)
        if event == DONE and not ledger.raised:
            envs = ledger.oldest(count)
        else:
            envs, among = self._waited_for(ledger, None, count, least, deadline)
        _, results, rest = ledger.take(envs, gather, False, True, among)
        return results, envs, rest[1]

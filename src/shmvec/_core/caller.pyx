"""The caller's side of the pipeline: what a call asks of envs, and how it takes their answers.

    actions -> slab, one request a worker -> request ring -> worker steps its envs
            -> slab, one completion -> completion ring -> take

By section: the guard admits one call at a time; `Links` are the ends of all rings, and wait;
`Frames` knows where results lie; `Inbox` reads infos; the `Ledger` knows what each env was asked
and which has answered.
"""

cimport cython
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy
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
            self.pending = None
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

    def leave_pending(self, pending):
        """Notes what was begun, for another call to take."""
        self.beginner = PyThread_get_thread_ident()
        self.pending = pending

    def claim(self, pending):
        """Has the call that is under way take what is pending, or abandon it; False: it is not."""
        if self.pending is not pending:
            return False
        self.pending = None
        self.claimed = True
        return True

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


@cython.final
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


@cython.final
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
    cdef uint32_t doing           # the last operation that was asked for
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
        self.check_open()  # a signal's handler may have closed it since the last look
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
        if self.num_processes == 0:  # all was served
            raise RuntimeError("the segment is damaged: a request or its answer is lost")
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
        self.publish()
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
        if self.doing == STEP or self.doing == RESET:
            self.workers.doing = "step" if self.doing == STEP else "reset"
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
# and `copy_back_from_rollout` do.
#
# The lease of a batch ends `hold_batches` batches later, if not before.
#
# With copy=True the workers write large observations to the frame and to a block: the block becomes
# the user's, who may write to it, and the frame keeps what later results of other envs are returned
# with. So the parent need not copy, for which all workers would have to wait (a third of a step of
# 32 envs that only return pictures). Where all blocks are leased, or after a fault or an interrupted
# call, the observations are copied from the frame.
#
# The numbers in requests: first the frames at home, in the segment; then the same frames with each
# of the blocks; then the frames of rollouts, in memory of their own. An env's row is its frame's
# number * num_envs + env. The last results of all envs lie at home, or all in rollouts.

@cython.final
cdef class Frames:
    """Register of where each env's last results are, and where its next ones go."""

    cdef Results home             # frames in the segment
    cdef readonly Results rollouts  # frames after these, in memory of their own; None: none
    cdef Py_ssize_t num_envs
    cdef Py_ssize_t[::1] everyone  # indices of all envs
    cdef Py_ssize_t[::1] rows     # by env: the row where its last results are, or will be
    cdef Py_ssize_t[::1] last_rows  # by env: the row of the results before these
    cdef Py_ssize_t[::1] chosen   # by env: the frame for its next results
    cdef bint copy
    cdef bint leasing             # batches are returned as views, which are leased
    cdef bint keep_last           # new results do not overwrite the last ones
    cdef bint several             # there are several frames at home
    cdef Blocks blocks            # None: there are none
    cdef Py_ssize_t block         # with all envs' last observations, until it is lent; -1: none
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
        self.last_rows = np.arange(home.num_envs, dtype=np.intp)
        self.chosen = np.zeros(home.num_envs, np.intp)

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

    cdef int choose_for(self, const Py_ssize_t[::1] envs, Py_ssize_t rollout_frame) except -1:
        """Chooses one frame for new results of these envs; `aim` is the commit."""
        cdef Py_ssize_t i
        cdef Py_ssize_t frame
        frame = self.choose(envs) if rollout_frame < 0 else self.beyond + rollout_frame
        for i in range(envs.shape[0]):
            self.chosen[envs[i]] = frame
        return 0

    cdef inline void aim(self, Py_ssize_t env, Py_ssize_t frame) noexcept:
        """Notes where an env's next results will be."""
        self.last_rows[env] = self.rows[env]
        self.rows[env] = frame * self.num_envs + env

    cdef Py_ssize_t aim_all(self, Py_ssize_t rollout_frame) except -1:
        """Notes the frame for new results of all envs, of the rollouts or at home; returns it."""
        cdef Py_ssize_t frame = self.beyond + rollout_frame
        cdef Py_ssize_t env
        if rollout_frame < 0:
            if self.keep_last:
                self.copy_back_from_rollout()  # the last results are needed
            frame = self.choose(self.everyone)
        # Nothing from here on raises.
        for env in range(self.num_envs):
            self.aim(env, frame)
        self.block = -1
        if self.blocks is not None and rollout_frame < 0:
            self.block = self.blocks.unleased()
            frame += (1 + self.block) * self.home.num_frames
        return frame

    cdef Py_ssize_t frame_of(self, Py_ssize_t env) noexcept:
        """The frame that an env's last request named."""
        return self.rows[env] // self.num_envs

    # ---- rollouts ----------------------------------------------------------------------------

    cdef bint in_rollout(self) noexcept:
        """Whether the last results lie in rollouts."""
        return self.frame_of(0) >= self.beyond

    cdef object rollout_rows(self):
        """The row of each env's last results among those of the rollouts."""
        return np.asarray(self.rows) - self.beyond * self.num_envs

    def in_rollout_frames(self, Results rollouts, Py_ssize_t first, Py_ssize_t last):
        """Whether the last results of all envs are in these rollouts' frames first to last."""
        cdef Py_ssize_t env
        for env in range(self.num_envs):
            if not first <= self.frame_of(env) - self.beyond <= last:
                return False
        return self.rollouts is rollouts

    def set_rollouts(self, Results rollouts):
        """Takes the frames of rollouts, in place of any before."""
        self.copy_back_from_rollout()
        self.rollouts = rollouts

    def start_rollout(self, Py_ssize_t frame):
        """Copies the last results to a frame of the rollouts."""
        cdef Py_ssize_t env
        if self.in_rollout():
            self.rollouts.copy_rows(self.rollouts, self.rollout_rows(), frame * self.num_envs)
        else:
            self.rollouts.copy_rows(self.home, self.rows, frame * self.num_envs)
        for env in range(self.num_envs):
            self.aim(env, self.beyond + frame)

    cpdef int copy_back_from_rollout(self, Py_ssize_t num_in_flight=0) except -1:
        """Copies the last results to the segment if they are in a rollout.

        Raises if envs are in flight, whose results are still pending there.
        """
        cdef Py_ssize_t env
        cdef Py_ssize_t frame
        if self.in_rollout():
            if num_in_flight > 0:
                raise RuntimeError(
                    "envs are in flight whose results go to a rollout: wait until they are taken, "
                    "or discard them. Nothing was sent to any env.")
            frame = self.choose(self.everyone)
            self.home.copy_rows(self.rollouts, self.rollout_rows(), frame * self.num_envs)
            for env in range(self.num_envs):
                self.rows[env] = self.last_rows[env] = frame * self.num_envs + env
        return 0

    # ---- single envs -------------------------------------------------------------------------

    cdef Results find(self, Py_ssize_t *row):
        """The results that have a row; the row becomes its number among theirs."""
        if row[0] < self.beyond * self.num_envs:
            return self.home
        row[0] -= self.beyond * self.num_envs
        return self.rollouts

    cdef bint ends(self, Py_ssize_t row) noexcept:
        """Whether the results in a row ended an episode."""
        cdef Results results = self.find(&row)
        return results.terminated_of[row] or results.truncated_of[row]

    cdef bint over(self, Py_ssize_t env) noexcept:
        """Whether the env's last results ended an episode."""
        return self.ends(self.rows[env])

    cdef bint was_over(self, Py_ssize_t env) noexcept:
        """Whether the results before its last ones ended an episode."""
        return self.rows[env] != self.last_rows[env] and self.ends(self.last_rows[env])

    cdef int truncate(self, Py_ssize_t env) except -1:
        """Makes the env's results its last observation, reward 0 and a truncation."""
        cdef Py_ssize_t row = self.rows[env]
        cdef Py_ssize_t last = self.last_rows[env]
        cdef Results results = self.find(&row)
        cdef Results before = self.find(&last)
        self.block = -1
        if self.rows[env] != self.last_rows[env]:
            results.observations.copy_row(before.observations, last, row)
        results.reward_of[row] = 0
        results.terminated_of[row] = False
        results.truncated_of[row] = True
        return 0

    cdef object last_observation(self, Py_ssize_t env, bint before):
        """An env's last observation; with ``before``, if its step is lost, the one before that."""
        cdef Py_ssize_t row = self.last_rows[env] if before else self.rows[env]
        cdef Results results = self.find(&row)
        return results.observations.get(row)

    cdef int mark_truncated(self, Py_ssize_t env) except -1:
        cdef Py_ssize_t row = self.rows[env]
        cdef Results results = self.find(&row)
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
        cdef Py_ssize_t first = self.first_row()
        if self.leasing or first < 0:
            return self.home.observations.gather(self.rows)
        return self.home.observations.batch(self.copy, first, self.num_envs)

    cdef tuple all(self, infos):
        """Observations, rewards, terminations and truncations of all envs, and these infos."""
        cdef Results home = self.home
        cdef Py_ssize_t block = self.block
        self.copy_back_from_rollout()  # no env was asked since the rollout's last step
        self.block = -1  # it is lent once at most
        if block >= 0:
            observations = self.blocks.lend(block)
        else:
            observations = self.observe()
        self.count_batch(None)
        if not self.several:
            return (observations, (<Pool>home.copies[0]).copy(), (<Pool>home.copies[1]).copy(),
                    (<Pool>home.copies[2]).copy(), infos)
        return (observations, *home.rewards_and_flags(self.rows), infos)

    cdef tuple some(self, object envs, infos):
        """The same of some envs, in this order; where they may be, the arrays are leased views."""
        cdef Py_ssize_t i
        cdef Py_ssize_t count = len(envs)
        cdef const Py_ssize_t[::1] row_of
        cdef Lease lease = None
        if self.in_rollout():  # who fills a rollout reads it there; other calls get copies
            results = self.rollouts.gather(self.rollout_rows()[envs])
        elif not self.several:
            results = self.home.gather(envs)
        else:
            rows = np.asarray(self.rows)[envs]
            row_of = rows
            for i in range(1, count):
                if row_of[i] != row_of[0] + i:
                    break
            else:
                if self.leasing and count > 0:
                    lease = self.home.lease(row_of[0], count)
            results = self.home.gather(rows) if lease is None else self.home.view(lease, (count,))
        self.count_batch(lease)
        return (*results, infos)

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


cdef struct Entry:          # of one env
    uint32_t worker
    uint32_t sequence       # the number of its request
    uint32_t state          # a State
    uint32_t operation      # of its request
    bint by_user            # whether its request is a reset by the caller
    uint64_t check          # the number of the last check that named it
    Py_ssize_t previous     # in the queue of ready envs, from the oldest to the newest; -1: none
    Py_ssize_t next


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


cdef struct Head:           # of a message in an env's room
    uint32_t kind
    uint32_t tag            # the number of its schema, or TAG_PICKLE
    uint32_t nbytes         # of its content, which follows

cdef struct Room:           # an env's messages, one after the other
    char *start
    size_t used
    size_t size


@cython.final
cdef class InfoDecoder(Decoder):
    """Decoder of one worker's messages: infos, and observations that are in no slab."""

    cdef const Entry *entries
    cdef Columns columns
    cdef Codec observations
    cdef Codec finals
    # The row of the message's env in the dict that is being built, and the number of its rows.
    cdef Py_ssize_t row
    cdef Py_ssize_t num_rows

    def __init__(self, segment, worker, from_worker, Columns columns, Codec observations,
                 Codec finals):
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
        return self.entries[env].state == IN_FLIGHT and self.entries[env].sequence == sequence

    cdef object read(self, dict infos, object vector_env):
        """Adds the message to a dict of arrays; without a vector env, returns it as the env did."""
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


@cython.final
cdef class Inbox:
    """Messages of answers that were not taken yet, by env."""

    cdef Segment segment
    cdef const Entry *entries
    cdef Codec observations
    cdef Codec finals
    cdef Columns columns
    cdef list decoders       # by worker
    cdef list senders        # by env: the decoder of its messages; a worker's successor has another
    cdef Room *rooms         # by env: messages that came through a ring
    cdef Py_ssize_t num_envs
    cdef Py_ssize_t num_filled  # envs with messages, those in `late` included
    cdef dict late           # env: [(kind, message, maybe pickled)]: came through a channel
    cdef object unpack       # of a pickled one

    def __cinit__(self, Segment segment, *args):
        self.num_envs = segment.num_envs
        self.rooms = <Room *>calloc(self.num_envs, sizeof(Room))
        if self.rooms is NULL:
            raise MemoryError

    def __dealloc__(self):
        cdef Py_ssize_t env
        if self.rooms is not NULL:
            for env in range(self.num_envs):
                free(self.rooms[env].start)
            free(self.rooms)

    def __init__(self, Segment segment, slabs, unpack):
        self.segment = segment
        self.observations = slabs.results.observations
        self.finals = slabs.finals
        self.columns = Columns()
        self.decoders = [None] * segment.num_workers
        self.senders = [None] * self.num_envs
        self.late = {}
        self.unpack = unpack

    cdef int renew(self, uint32_t worker) except -1:
        """Starts reading a worker's ring from its beginning."""
        cdef InfoDecoder decoder = InfoDecoder(
            self.segment, worker, True, self.columns, self.observations, self.finals)
        decoder.entries = self.entries
        self.decoders[worker] = decoder
        return 0

    # ---- arrival -----------------------------------------------------------------------------

    cdef int receive(self, uint32_t worker, const c.sv_record *answer) except -1:
        """Moves an answer's messages from the worker's ring to its envs."""
        cdef InfoDecoder decoder = self.decoders[worker]
        cdef bint found = False
        while decoder.next(answer.sequence):
            if not answer.first <= <uint32_t>decoder.env < answer.first + answer.count:
                raise decoder.damaged("is of another env")
            self.store(decoder)
            decoder.release()
            found = True
        if not found:
            raise decoder.damaged("was announced, and is not there")
        return 0

    cdef int store(self, InfoDecoder decoder) except -1:
        """Appends the message that a decoder has found to its env's."""
        cdef Room *room = &self.rooms[decoder.env]
        cdef Head head
        cdef size_t used
        cdef char *start
        head.kind, head.tag = decoder.kind, decoder.tag
        head.nbytes = <uint32_t>(decoder.end - decoder.start)
        used = room.used + sizeof(Head) + head.nbytes
        if used > room.size:
            start = <char *>realloc(room.start, 2 * used)
            if start is NULL:
                raise MemoryError(f"an info of {head.nbytes} bytes")
            room.start, room.size = start, 2 * used
        memcpy(room.start + room.used, &head, sizeof(Head))
        memcpy(room.start + room.used + sizeof(Head), decoder.start, head.nbytes)
        self.senders[decoder.env] = decoder
        self.num_filled += room.used == 0
        room.used = used
        return 0

    cdef int receive_late(self, dict messages) except -1:
        """Takes messages that came through a channel: env: [(kind, message)]."""
        for env in messages:
            self.num_filled += not self.has(env)
        self.late.update(messages)
        return 0

    cdef bint has(self, Py_ssize_t env) except -1:
        return self.rooms[env].used > 0 or (self.late and env in self.late)

    cdef int discard(self, Py_ssize_t env) except -1:
        if self.has(env):
            self.num_filled -= 1
            self.rooms[env].used = 0
            self.late.pop(env, None)
        return 0

    # ---- infos of a batch --------------------------------------------------------------------

    cdef list read(self, Py_ssize_t env, dict infos, Py_ssize_t row, Py_ssize_t num_rows,
                   object vector_env):
        """An env's infos; with a dict of arrays, those that its plain `_add_info` did not add.

        None: there are none.
        """
        cdef Room *room = &self.rooms[env]
        cdef InfoDecoder decoder = self.senders[env]
        cdef Head head
        cdef size_t at = 0
        cdef list left = None
        while at < room.used:
            memcpy(&head, room.start + at, sizeof(Head))
            at += sizeof(Head)
            decoder.open(env, head.kind, head.tag, room.start + at, head.nbytes)
            at += head.nbytes
            decoder.row, decoder.num_rows = row, num_rows
            info = decoder.read(infos, vector_env)
            if info is not None:
                left = left or []
                left.append(info)
        if self.late:
            for kind, message in self.late.get(env, ()):
                info = message if isinstance(message, dict) else self.unpack(message)
                if kind == OBSERVATION:
                    self.observations.write(env, info[""])
                else:
                    left = left or []
                    left.append(info)
        return left

    cdef list each(self, const Py_ssize_t *envs, Py_ssize_t count):
        """Infos of these envs: one dict for each, as the env returned it."""
        cdef Py_ssize_t i
        cdef list infos = []
        for i in range(count):
            infos.append(_merged(self.read(envs[i], None, 0, 0, None) or []))
        return infos

    cdef object gather(self, const Py_ssize_t *envs, Py_ssize_t count, bint everyone, dict reports,
                       vector_env):
        """Infos of these envs, with reports of faults: Gymnasium's dict of arrays.

        Args:
            envs: The envs.
            everyone: Whether the rows are those of all envs; else those of `envs`, in their order.
            reports: env: Report.
            vector_env: Its `_add_info` gathers.
        """
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        cdef Py_ssize_t row
        cdef bint plain = type(vector_env)._add_info is _plain_add_info
        cdef dict columns = {} if plain else None
        cdef list left
        cdef Py_ssize_t num_rows = vector_env.num_envs
        cdef object infos = columns if plain else {}
        try:
            for i in range(count):
                env = envs[i]
                row = env if everyone else i
                if self.has(env):
                    left = self.read(env, columns, row, num_rows, vector_env if plain else None)
                    if left is not None:
                        for info in left:
                            infos = vector_env._add_info(infos, info, row)
                if reports and env in reports:
                    infos = vector_env._add_info(infos, reports[env].info, row)
        finally:
            self.columns.finish()
        return infos


cdef object _merged(list infos):
    """Merges dicts into one; if there is only one, returns that."""
    if len(infos) == 1:
        return infos[0]
    return {key: info[key] for info in infos for key in info}


# ==== ledger ======================================================================================
#
# Which env was asked what, and which has answered: no other object keeps this.
#
# A call of the ledger has three phases. *Prepare* does everything that may raise, be refused or run
# other people's Python code; it changes nothing that another call can see. *Commit* notes what was
# asked or taken and puts requests on rings; it calls no Python code. *Publish* rings the bell and
# returns results. So an exception at any moment, from a signal handler for instance, leaves the
# ledger true: envs that were asked are in flight.
#
# A request names neighbouring envs of one worker, which answer together. If all envs are asked,
# that is one request and one completion a worker; each env has an entry in any case.

cdef tuple NOTHING = (None, None)  # the seed and the options of a reset that has neither


@cython.final
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
    cdef Py_ssize_t num_envs
    cdef readonly object all_envs # indices of all envs, an array
    cdef Py_ssize_t[::1] everyone # the same
    cdef object batch             # stands for a vector env of the envs that are taken
    cdef Entry *entries           # one for each env
    cdef uint64_t checks
    cdef readonly set gone        # envs that were closed for ever
    cdef Py_ssize_t *begins       # of requests among the envs that are asked, and their end
    cdef Py_ssize_t num_requests  # of the call that is under way
    cdef Py_ssize_t oldest        # the begin and the end of the queue of ready envs
    cdef Py_ssize_t newest
    cdef readonly Py_ssize_t num_ready
    cdef readonly Py_ssize_t num_in_flight  # envs that were asked and whose answers were not taken
    cdef uint32_t open_requests   # number of requests without an answer
    cdef uint32_t next_worker     # the worker whose ring is read first
    cdef bint ranges_in_flight    # some requests are for several envs
    cdef list unfinished          # by worker: answers that wait for a message
    cdef Py_ssize_t num_unfinished
    cdef readonly list failures   # what envs have raised, before the policy has decided about it
    cdef readonly list raised     # what envs have raised, for the caller
    cdef dict results             # results of commands: env: value
    cdef list unanswered          # envs whose command was lost
    cdef dict reports             # env: Report of its answer
    cdef dict after               # env: (fault, whether it breaks the episode), for its next answer
    cdef Py_ssize_t num_broken
    cdef readonly object resets   # int64: how often each env was asked to reset
    cdef readonly list asked_with # (seed, options) of each env's last reset of the user's
    cdef readonly list last_seeds # the last seed that each env was given
    cdef public StepLog log       # of what envs are asked and answer; None: there is none
    cdef uint8_t[::1] lost_workers  # whether each worker is dead, without a successor

    def __cinit__(self, Links links, Frames frames, *args, **kwargs):
        self.num_envs = frames.num_envs
        self.entries = <Entry *>calloc(self.num_envs, sizeof(Entry))
        self.begins = <Py_ssize_t *>calloc(self.num_envs + 1, sizeof(Py_ssize_t))
        if self.entries is NULL or self.begins is NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.entries)
        free(self.begins)

    def __init__(self, Links links, Frames frames, slabs, autoreset, pack, unpack,
                 may_step_over=True, in_ranges=False):
        cdef uint32_t worker
        cdef Py_ssize_t env
        self.links = links
        self.frames = frames
        self.pack = pack
        self.resets_in_step = autoreset.in_step
        self.resets_in_next_step = autoreset.in_next_step
        self.may_step_over = may_step_over
        self.in_ranges = in_ranges
        self.all_envs = np.arange(self.num_envs, dtype=np.intp)
        self.everyone = self.all_envs
        self.batch = Batch(self.num_envs)
        self.oldest = self.newest = -1
        self.inbox = Inbox(links.segment, slabs, unpack)
        self.inbox.entries = self.entries
        self.actions = slabs.actions
        self.seeds = slabs.seeds
        if isinstance(self.actions, MessageCodec):
            self.encoders = [None] * links.num_workers
        self.unfinished = [[] for _ in range(links.num_workers)]
        for worker in range(links.num_workers):
            for env in range(links.firsts[worker], links.firsts[worker] + links.counts[worker]):
                self.entries[env].worker = worker
            self.renew(worker)
        self.gone = set()
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
        if self.log is not None:
            for env in range(self.num_envs):
                if self.entries[env].state == IDLE:
                    self.log.accept(env)

    cdef int renew(self, uint32_t worker) except -1:
        """Begins to read and write a worker's rings of messages from their start."""
        cdef Links links = self.links
        cdef Py_ssize_t env
        self.inbox.renew(worker)
        if self.log is not None:  # answers that are there were not lost with the worker
            for env in range(links.firsts[worker], links.firsts[worker] + links.counts[worker]):
                if self.entries[env].state in (IDLE, READY):
                    self.log.accept(env)
        if self.encoders is not None:
            self.encoders[worker] = Encoder(
                links.segment, worker, links.firsts[worker], links.counts[worker], False)
        return 0

    # ---- questions ---------------------------------------------------------------------------

    cdef inline Py_ssize_t num_unanswered(self) noexcept:
        """The number of envs in flight that have not answered yet."""
        return self.num_in_flight - self.num_ready

    @property
    def incomplete(self):
        """Workers whose answers can be taken only after a message that has not come yet."""
        if self.num_unfinished == 0:
            return []
        return [worker for worker in range(len(self.unfinished)) if self.unfinished[worker]]

    cpdef bint is_free(self, within):
        """Whether nothing is in flight, abandoned, down, or pending, but for a loan."""
        cdef Guard guard = self.links.guard
        return (self.num_in_flight == 0 and not guard.abandoned and not self.links.down
                and guard.pending is within)

    cdef int check_exists(self, Py_ssize_t env) except -1:
        if not 0 <= env < self.num_envs:
            raise ValueError(f"there is no env {env}: there are {self.num_envs}")

    def in_flight(self, Py_ssize_t env):
        self.check_exists(env)
        return self.entries[env].state != IDLE

    def is_over(self, Py_ssize_t env):
        self.check_exists(env)
        return self.frames.over(env) or self.is_broken(env)

    cdef inline bint is_broken(self, Py_ssize_t env) except -1:
        """Whether an env's episode was cut by a fault that its next answer reports."""
        return self.num_broken > 0 and env in self.after and self.after[env][1]

    def num_missing(self, const Py_ssize_t[::1] envs):
        """A lower bound of the requests to these envs that are pending; one may be for several."""
        cdef Py_ssize_t i
        cdef Py_ssize_t missing = 0
        cdef int64_t last = -1  # a request with this number or a lower one may have been counted
        for i in range(envs.shape[0]):
            self.check_exists(envs[i])
            if (self.entries[envs[i]].state not in (READY, IDLE)
                    and self.entries[envs[i]].sequence > last):
                missing += 1
                last = self.entries[envs[i]].sequence
        return missing

    def num_down(self, const Py_ssize_t[::1] envs):
        """How many of these envs have a worker that is being replaced."""
        cdef Py_ssize_t i
        cdef Py_ssize_t down = 0
        for i in range(envs.shape[0]):
            self.check_exists(envs[i])
            down += self.entries[envs[i]].worker in self.links.down
        return down

    # ---- asking ------------------------------------------------------------------------------

    def check(self, const Py_ssize_t[::1] envs):
        """Raises ValueError unless each of these envs exists, is named once, and is idle."""
        if envs.shape[0] > 0:
            self.check_idle(&envs[0], envs.shape[0])

    cdef int check_idle(self, const Py_ssize_t *envs, Py_ssize_t count) except -1:
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        self.checks += 1
        for i in range(count):
            env = envs[i]
            self.check_exists(env)
            if self.entries[env].state != IDLE:
                raise ValueError(
                    f"env {env} has been asked already: take its results, with recv(), before it "
                    "is asked again. Nothing was sent to any env."
                )
            if self.entries[env].check == self.checks:
                raise ValueError(f"env {env} is named twice. Nothing was sent to any env.")
            self.entries[env].check = self.checks
        if self.gone:
            gone = self.gone.intersection([envs[i] for i in range(count)])
            if gone:
                raise ValueError(f"envs {sorted(gone)} have left: they cannot be asked")
        return 0

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

    cpdef step(self, envs, actions, Py_ssize_t rollout_frame=-1, bint together=False):
        """Writes actions and asks envs to step.

        Args:
            envs: Which, int. None: all.
            actions: One for each of them, batched as their space says.
            rollout_frame: The rollout's frame for the results; -1: one at home.
            together: Whether one request may name neighbours, which answer together.
        """
        cdef bint everyone = envs is None
        cdef const Py_ssize_t[::1] chosen
        cdef dict late
        cdef dict lasts = None
        cdef uint32_t base
        if everyone:
            chosen = self.everyone
        else:
            chosen = envs
            if chosen.shape[0] == 0:
                return
        base = self.prepare(STEP, &chosen[0], chosen.shape[0], everyone, together)
        if not self.may_step_over:
            self.check_none_over(chosen)
        everyone = everyone or rollout_frame >= 0 and chosen.shape[0] == self.num_envs
        if not everyone:
            self.choose_frames(chosen, rollout_frame)
        # Actions are written before their requests. A call that is interrupted in between, or
        # raises, has asked for nothing: its actions are overwritten later, or discarded, as no
        # request has their number.
        late = self.write_actions(chosen, actions, base, rollout_frame < 0)
        if self.num_broken > 0 and self.resets_in_step:
            lasts = self.last_of_broken(chosen)
        if late:
            for k in late:
                self.links.channels[self.entries[chosen[self.begins[<Py_ssize_t>k]]].worker].put(
                    base + <uint32_t>k, late[k])
            self.links.talking = True
        self.post(STEP, &chosen[0], base, self.frames.aim_all(rollout_frame) if everyone else -1,
                  late, lasts)

    cdef uint32_t prepare(self, uint32_t operation, const Py_ssize_t *envs, Py_ssize_t count,
                          bint everyone, bint together) except? 0:
        """Checks envs and divides them into requests; returns the number of the first of these."""
        cdef Links links = self.links
        cdef uint32_t base = links.sequence + 1
        cdef Py_ssize_t i = 0
        cdef Py_ssize_t k = 0
        links.enter(c.SV_TRACE_SEND)
        if not everyone or self.num_in_flight > 0 or self.gone:
            self.check_idle(envs, count)
        links.doing = operation
        if self.log is not None:
            self.log.asked(envs, count)
        while i < count:
            self.begins[k] = i
            if everyone and self.num_broken == 0:
                i += links.counts[k]
            else:
                i += self.span(operation, envs + i, count - i,
                               everyone or together or self.in_ranges)
            k += 1
        self.begins[k] = count
        self.num_requests = k
        links.sequence += <uint32_t>k  # these numbers are gone if what follows fails
        return base

    cdef Py_ssize_t span(self, uint32_t operation, const Py_ssize_t *envs, Py_ssize_t most,
                         bint ranging) except -1:
        """The number of these envs, the first one and up, that one request names.

        Those of a worker that a command is for. Else, where requests are `ranging`, neighbours of
        one worker. Where frames are leased: all envs of a worker, if they come next, because they
        must lie side by side in one frame.
        """
        cdef Links links = self.links
        cdef uint32_t worker = self.entries[envs[0]].worker
        cdef Py_ssize_t end = links.firsts[worker] + links.counts[worker]
        cdef Py_ssize_t count = 1
        if operation == COMMAND:
            while count < most and envs[count] < end:
                count += 1
            return count
        if not (ranging or self.frames.leasing) or self.is_broken(envs[0]):
            return 1
        while (count < most and envs[count] == envs[0] + count and envs[count] < end
                and not self.is_broken(envs[count])):
            count += 1
        return count if ranging or count == <Py_ssize_t>links.counts[worker] else 1

    cdef int choose_frames(self, const Py_ssize_t[::1] envs, Py_ssize_t rollout_frame) except -1:
        """Finds room for the results of these envs, or raises; nothing is sent by then."""
        cdef Py_ssize_t k
        if rollout_frame < 0:
            self.frames.copy_back_from_rollout(self.num_in_flight)
        elif not self.frames.in_rollout():
            raise RuntimeError("the last results are in no rollout. Nothing was sent to any env.")
        if not self.frames.several:
            return self.frames.choose_for(envs, rollout_frame)
        for k in range(self.num_requests):
            self.frames.choose_for(envs[self.begins[k]:self.begins[k + 1]], rollout_frame)
        return 0

    cdef dict write_actions(self, const Py_ssize_t[::1] envs, actions, uint32_t base,
                            bint any_shape):
        """Writes envs' actions; returns a message, by request, of those that do not fit."""
        cdef Py_ssize_t i
        cdef Py_ssize_t k
        cdef list each
        cdef dict left
        if self.encoders is not None:
            each = (<MessageCodec>self.actions).split(actions, envs.shape[0])
        else:
            try:
                self.actions.write_rows(envs, actions)
                return None
            except OtherShapeError as error:
                if not any_shape or not isinstance(self.actions, ActionCodec):
                    raise
                each = list(error.actions.copy())  # copied, because envs may keep their actions
        left = {}
        for k in range(self.num_requests):
            for i in range(self.begins[k], self.begins[k + 1]):
                if self.encoders is None or not self.encode(
                        envs[i], each[i], base + <uint32_t>k):
                    left.setdefault(k, []).append((envs[i], each[i]))
        return {k: self.pack(left[k]) for k in left}

    cdef bint encode(self, Py_ssize_t env, action, uint32_t sequence) except -1:
        """Puts an action into its worker's ring; False if it does not fit."""
        cdef Encoder encoder = self.encoders[self.entries[env].worker]
        try:
            return encoder.encode(env, ACTION, {"": action}, sequence)
        except (PicklingError, TypeError, AttributeError) as error:  # what pickle raises
            raise TypeError(
                f"wrong actions: that of env {env} cannot be pickled to send it to its worker "
                f"({error}). Nothing was sent to any env."
            ) from error

    cdef dict last_of_broken(self, const Py_ssize_t[::1] envs):
        """The last observations of those of these envs whose episodes are broken."""
        cdef Py_ssize_t i
        cdef dict lasts = {}
        for i in range(envs.shape[0]):
            if self.is_broken(envs[i]):
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
        cdef dict late = None
        cdef Py_ssize_t i
        cdef list arguments = None
        cdef bint fit = True
        cdef uint32_t base = self.prepare(RESET, &envs[0], envs.shape[0], False, together)
        if seeds is not None or options is not None:
            arguments = [(None if seeds is None else seeds[i],
                          None if options is None else options[i]) for i in range(envs.shape[0])]
            for of_env in arguments:
                fit = fit and self.seeds.fits(of_env)
        self.choose_frames(envs, -1)
        if not fit:
            late = self.send_arguments(envs, arguments, base)
        self.note_reset(envs, arguments, fit, repeat)
        self.post(RESET, &envs[0], base, -1, late, None)

    cdef dict send_arguments(self, const Py_ssize_t[::1] envs, list arguments, uint32_t base):
        """Sends (seed, options) of resets, with the first request to each worker; returns these."""
        cdef dict late = {}
        cdef dict of_workers = {}  # worker: (its first request, the message)
        cdef Py_ssize_t i
        cdef Py_ssize_t k
        for k in range(self.num_requests):
            for i in range(self.begins[k], self.begins[k + 1]):
                of_workers.setdefault(self.entries[envs[i]].worker, (k, []))[1].append(
                    (envs[i], arguments[i]))
        for worker, (k, message) in of_workers.items():
            late[k] = self.pack(message)
            self.links.channels[worker].put(base + <uint32_t>k, late[k])
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

    def command(self, const Py_ssize_t[::1] envs, dict packed, descriptors=()):
        """Asks the workers of these envs to carry out a command.

        Args:
            envs: Indices of envs, ascending.
            packed: The message of each worker whose envs these are.
            descriptors: Descriptors that are sent with each message.
        """
        cdef uint32_t base = self.prepare(COMMAND, &envs[0], envs.shape[0], False, False)
        cdef Py_ssize_t k
        cdef uint32_t worker
        for k in range(self.num_requests):  # first: without a request a message is discarded
            worker = self.entries[envs[self.begins[k]]].worker
            self.links.channels[worker].put(base + <uint32_t>k, packed[worker], descriptors)
        self.links.talking = True
        self.post(COMMAND, &envs[0], base, -1, None, None)

    cdef int post(self, uint32_t operation, const Py_ssize_t *envs, uint32_t base,
                  Py_ssize_t frame, dict late, dict lasts) except -1:
        """Commits the requests that were prepared, and rings the bell.

        Args:
            operation: What envs are asked.
            envs: The envs.
            base: The number of the first request.
            frame: The frame for all results, already noted; -1: the one chosen for each env.
            late: Requests whose message is on a channel.
            lasts: Last observations of envs whose episodes are broken.
        """
        cdef Links links = self.links
        cdef Py_ssize_t i
        cdef Py_ssize_t k
        cdef Py_ssize_t first
        cdef Py_ssize_t count
        cdef Py_ssize_t named
        cdef uint32_t worker
        cdef uint32_t flags = operation
        cdef uint32_t mask = self.mask_of(envs, self.begins[self.num_requests])
        cdef list broken = None
        links.guard.note_asked()
        if frame >= 0 and links.lingering and self.num_broken == 0:
            flags |= TOGETHER
            c.sv_completion_issue(links.completion, links.issued + <uint32_t>self.num_requests)
        if frame < 0:
            self.frames.block = -1
        for k in range(self.num_requests):
            first, count = envs[self.begins[k]], self.begins[k + 1] - self.begins[k]
            worker = self.entries[first].worker
            if frame < 0 and operation != COMMAND:
                for i in range(self.begins[k], self.begins[k + 1]):
                    self.frames.aim(envs[i], self.frames.chosen[envs[i]])
            if operation == STEP and self.is_broken(first):  # it is not asked
                broken = broken or []
                broken.append(first)
            else:
                named = frame
                if frame < 0:
                    named = 0 if operation == COMMAND else self.frames.frame_of(first)
                if operation == COMMAND:
                    first, count = links.firsts[worker], links.counts[worker]
                links.request(
                    worker, base + <uint32_t>k, flags | (LATE if late and k in late else 0),
                    <uint32_t>first, <uint32_t>count, named)
                self.open_requests += 1
                self.ranges_in_flight |= count > 1
            for i in range(self.begins[k], self.begins[k + 1]):
                self.enter(envs[i], operation, base + <uint32_t>k)
            self.num_in_flight += self.begins[k + 1] - self.begins[k]
        if self.after and operation != COMMAND:
            self.report_earlier(envs, self.begins[self.num_requests])
        if broken is not None:  # last, because their requests have later numbers
            mask = c.SV_EVERYONE
            for env in broken:
                self.cut(env, self.reports[env].fault, lasts)
        return links.ring(mask)

    cdef uint32_t mask_of(self, const Py_ssize_t *envs, Py_ssize_t count) noexcept:
        """Workers to wake for these envs: their own, or all workers if these are most of them."""
        cdef Py_ssize_t i
        cdef uint32_t mask = 0
        if 2 * count > <Py_ssize_t>self.links.num_workers:
            return c.SV_EVERYONE
        for i in range(count):
            mask |= c.sv_bell_mask(self.entries[envs[i]].worker)
        return mask

    cdef inline void enter(self, Py_ssize_t env, uint32_t operation, uint32_t sequence) noexcept:
        """Notes that an env was asked."""
        cdef Entry *entry = &self.entries[env]
        entry.sequence = sequence
        entry.state = IN_FLIGHT
        entry.operation = operation
        entry.by_user = operation == RESET

    cdef int report_earlier(self, const Py_ssize_t *envs, Py_ssize_t count) except -1:
        """Has the answers of these envs report the faults that came before their requests."""
        cdef Py_ssize_t i
        for i in range(count):
            if envs[i] in self.after:
                fault, breaks = self.after.pop(envs[i])
                self.num_broken -= breaks
                self.reports[envs[i]] = report_of(fault, False, None)
        return 0

    cdef inline int leave(self, Py_ssize_t env) except -1:
        """Notes that an env is no longer in flight."""
        self.entries[env].state = IDLE
        self.num_in_flight -= 1
        return self.inbox.discard(env) if self.inbox.num_filled > 0 else 0

    # ---- the queue of ready envs ---------------------------------------------------------------

    cdef inline int make_ready(self, Py_ssize_t env) noexcept:
        cdef Entry *entry = &self.entries[env]
        entry.state = READY
        entry.previous, entry.next = self.newest, -1
        if self.newest < 0:
            self.oldest = env
        else:
            self.entries[self.newest].next = env
        self.newest = env
        self.num_ready += 1
        return 0

    cdef int end_ready(self, Py_ssize_t env) except -1:
        """Takes an env out of the queue; it is not in flight any more."""
        cdef Entry *entry = &self.entries[env]
        if entry.previous < 0:
            self.oldest = entry.next
        else:
            self.entries[entry.previous].next = entry.next
        if entry.next < 0:
            self.newest = entry.previous
        else:
            self.entries[entry.next].previous = entry.previous
        self.num_ready -= 1
        return self.leave(env)

    cdef object ready(self, envs, Py_ssize_t count):
        """The ready ones of these envs; with None all by index, or the oldest so many of them."""
        cdef Py_ssize_t i = 0
        cdef Py_ssize_t env
        cdef object found
        cdef Py_ssize_t *place
        if envs is not None:
            return np.array([env for env in envs if self.entries[env].state == READY], np.intp)
        if count < 0 and self.num_ready == self.num_envs:
            return self.all_envs
        found = np.empty(self.num_ready if count < 0 else min(count, self.num_ready), np.intp)
        place = <Py_ssize_t *>data_of(found)
        if count < 0:
            for env in range(self.num_envs):
                if self.entries[env].state == READY:
                    place[i] = env
                    i += 1
            return found
        env = self.oldest
        for i in range(size_of(found)):
            place[i] = env
            env = self.entries[env].next
        return found

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
        if links.inline is not None and self.num_unanswered() > 0:
            # First: else the caller would step its envs only when the others were not enough.
            links.serve_here()
        cdef int event = NO_EVENT
        if self.num_in_flight or links.down:  # first: a wait whose time is up looks nowhere else
            event = links.look_if_due()
        # Answers may be there already, which costs less to see than to wait for.
        if wanted >= 0 or links.inline is not None:
            self.pop()
        while event == NO_EVENT or event == DONE:
            if self.failures:
                return RAISED
            if self.num_unfinished > 0:
                event = self.wait_for_message(deadline_ns)
            else:
                missing = self.num_wanted(wanted, envs)
                if missing <= 0:
                    return DONE
                if self.open_requests == 0 and links.down:
                    event = links.listen(list(links.down), deadline_ns)
                else:
                    event = self.wait_for_answers(missing, deadline_ns, envs is not None)
            self.pop()  # also when the time is up
        return event

    cdef Py_ssize_t num_wanted(self, Py_ssize_t wanted, envs) except? -1:
        """How many envs, or requests, a wait is for that have not answered."""
        if wanted == UP:
            return self.num_down(envs)
        if envs is not None:
            return self.num_missing(envs)
        if wanted < 0:
            return self.num_unanswered()
        return 0 if self.raised else wanted - self.num_ready

    cdef int wait_for_answers(self, Py_ssize_t wanted, int64_t deadline, bint requests) except -1:
        """Waits until ``wanted`` more envs, or requests, may be answered."""
        cdef Links links = self.links
        cdef uint32_t done = links.issued - self.open_requests
        cdef c.sv_budget usual = links.waiter.budget
        if self.open_requests == 0:  # no answer would ever come
            raise RuntimeError("the segment is damaged: answers are lost")
        if wanted >= self.num_unanswered():  # all that are in flight: usual, and as fast as can be
            return links.wait_for(links.issued, deadline)
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
            if links.workers.is_here(worker):  # it has sent what there is
                raise RuntimeError("the segment is damaged: the message of an answer is lost")
        return links.listen(incomplete, deadline)

    # ---- answers -----------------------------------------------------------------------------

    cdef int pop(self) except -1:
        """Receives the answers that are on the rings."""
        cdef Links links = self.links
        cdef c.sv_record answer
        cdef uint32_t i
        cdef uint32_t worker
        links.enter(c.SV_TRACE_TAKE)
        for i in range(links.num_workers):
            worker = (self.next_worker + i) % links.num_workers
            while links.take(worker, &answer):
                self.settle(worker, &answer)
        self.next_worker = (self.next_worker + 1) % links.num_workers
        if self.open_requests == 0:
            self.ranges_in_flight = False
        return links.follow_if_due()

    cdef int settle(self, uint32_t worker, const c.sv_record *answer) except -1:
        """Notes an answer; its envs are ready, unless a message is to come."""
        cdef uint32_t env
        cdef bint asked = False
        for env in range(answer.first, answer.first + answer.count):
            if self.is_asked(env, answer.sequence):
                asked = True
                break
        if not asked:
            raise RuntimeError(
                f"the segment is damaged: worker {worker} has answered what was not asked")
        try:
            if answer.operation & MESSAGES:
                self.inbox.receive(worker, answer)
        finally:  # a message that is damaged is said to be once
            self.open_requests -= 1
            if answer.operation & LATE:
                self.unfinished[worker].append((answer.sequence, answer.first, answer.count))
                self.num_unfinished += 1
            else:
                for env in range(answer.first, answer.first + answer.count):
                    if self.is_asked(env, answer.sequence):
                        self.make_ready(env)
        return 0

    cdef inline bint is_asked(self, uint32_t env, uint32_t sequence) noexcept:
        """Whether an env is in flight with the request of this number."""
        return self.entries[env].state == IN_FLIGHT and self.entries[env].sequence == sequence

    def sequence_awaited(self, uint32_t worker):
        """The number of the request whose message must come next from a worker."""
        return self.unfinished[worker][0][0]

    def deliver(self, uint32_t worker, list messages, list failures, results):
        """Takes the next message of a worker: (kind, env, message), failures and results."""
        cdef Py_ssize_t env
        cdef dict late = {}
        sequence, first, count = self.unfinished[worker][0]
        for kind, env, message in messages:
            if 0 <= env < self.num_envs and self.is_asked(<uint32_t>env, sequence):
                late.setdefault(env, []).append((kind, message))
        failed = {failure.env for failure in failures}
        # The commit.
        del self.unfinished[worker][0]
        self.num_unfinished -= 1
        self.inbox.receive_late(late)
        for env in range(first, first + count):
            if self.is_asked(<uint32_t>env, sequence):
                if env in failed:
                    self.lose_answer(env, FAILED)
                else:
                    if results is not None:
                        self.results[env] = results[env - first]
                    self.make_ready(env)
        self.failures += failures

    # ---- faults ------------------------------------------------------------------------------

    cdef int lose_answer(self, Py_ssize_t env, uint32_t state) except -1:
        """Notes that an env in flight has raised, or is lost."""
        self.entries[env].state = state
        self.frames.block = -1  # its row there was not written
        return self.inbox.discard(env)

    def lose(self, uint32_t worker):
        """Notes that a worker is dead; its complete answers remain valid.

        A second call continues one that was interrupted.
        """
        cdef Links links = self.links
        cdef c.sv_record answer
        cdef Py_ssize_t env
        while (links.outstanding[worker] > 0
               and c.sv_ring_try_pop(&links.completions[worker], &answer) == c.SV_RING_YES
               and links.is_of(worker, &answer)):
            links.outstanding[worker] -= 1
            self.settle(worker, &answer)
        # The commit.
        self.num_unfinished -= len(self.unfinished[worker])
        self.unfinished[worker].clear()
        for env in range(links.firsts[worker], links.firsts[worker] + links.counts[worker]):
            if self.entries[env].state == IN_FLIGHT:
                self.lose_answer(env, LOST)
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
            if self.entries[env].state == LOST or self.entries[env].state == FAILED:
                self.leave(env)

    def lost_resets(self, uint32_t worker):
        """Envs of a dead worker that were lost in a reset by the caller, or raised in it."""
        cdef Links links = self.links
        cdef Py_ssize_t env
        return [env for env in range(links.firsts[worker],
                                     links.firsts[worker] + links.counts[worker])
                if self.entries[env].state in (LOST, FAILED) and self.entries[env].by_user]

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
            if self.entries[env].state == LOST or self.entries[env].state == FAILED:
                self.answer_lost(env, fault, lasts)
            else:
                self.break_later(env, fault)
        links.ring(c.SV_EVERYONE)

    cdef object last_of_lost(self, Py_ssize_t env):
        """The final observation of the episode of an env whose step is lost."""
        if self.resets_in_step and self.entries[env].operation == STEP and (
                self.entries[env].state == LOST or self.entries[env].state == FAILED):
            return self.frames.last_observation(env, True)
        return None

    def has_failed(self, Py_ssize_t env):
        """Whether an env has raised, and the ledger has not answered in its place."""
        return self.entries[env].state == FAILED

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
        if self.entries[failure.env].state == FAILED:
            self.leave(failure.env)
        self.raised.append(failure)
        self.settle_failure(failure)

    cdef int answer_lost(self, Py_ssize_t env, fault, dict lasts) except -1:
        report = self.reports.get(env)
        cdef uint32_t operation = self.entries[env].operation
        if operation == COMMAND:
            self.leave(env)
            self.unanswered.append(env)
            return self.break_later(env, fault)
        if operation == STEP and not (self.resets_in_next_step and self.frames.was_over(env)):
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
        if self.resets_in_step:
            self.reports[env] = report_of(fault, True, [lasts[env]])
            self.entries[env].by_user = False
            return self.ask_reset_instead(env)
        self.reports[env] = report_of(fault, True, None)
        return self.make_ready(env)

    cdef int ask_reset_instead(self, Py_ssize_t env) except -1:
        """Asks an env to reset in place of its request; the caller rings the bell."""
        cdef Links links = self.links
        cdef Entry *entry = &self.entries[env]
        links.sequence += 1
        self.seeds.put(env, NOTHING)  # the worker knows what the lost one had
        links.request(entry.worker, links.sequence, RESET, <uint32_t>env, 1,
                      self.frames.frame_of(env))
        self.open_requests += 1
        entry.sequence = links.sequence
        entry.operation = RESET
        entry.state = IN_FLIGHT
        self.frames.block = -1
        return 0

    def discard(self):
        """Discards all answers, none of which is pending; the next answers report their faults."""
        while self.oldest >= 0:
            self.end_ready(self.oldest)
        self.frames.block = -1
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

    cpdef tuple take(self, envs=None, Py_ssize_t count=-1, vector_env=None, bint everyone=False,
                     bint arrays=True):
        """Takes answers, whose envs are idle afterwards.

        An exception while results are read loses these results, and what other envs have raised:
        the envs are idle, and their next answers report their faults.

        Args:
            envs: The envs to take, in this order, but for those that have raised or lost their
                command. None: all that are ready, by index.
            count: In place of envs: so many of those that have been ready for longest; none of
                them if an env has raised. -1: all.
            vector_env: Gathers the infos; True: as any would. None: one dict an env.
            everyone: Whether the results are of all envs, each in its place.
            arrays: Whether arrays are wanted at all.

        Returns:
            The envs; their results: four arrays and infos; and None, or {env: Report}, the failures
            of these envs, or of all, results of a command, by env, and envs whose command was lost.
        """
        cdef object chosen = self.ready(envs, 0 if count >= 0 and self.raised else count)
        cdef const Py_ssize_t *view = <const Py_ssize_t *>data_of(chosen)
        cdef Py_ssize_t num_taken = size_of(chosen)
        cdef list failures = self.raised
        cdef dict reports
        cdef dict values
        cdef object rest = None
        if failures and envs is not None:
            failures = [each for each in failures if each.env in envs]
        try:
            results = self.results_of(chosen, vector_env, everyone, arrays)
        except BaseException:
            self.postpone_reports(chosen.tolist())
            self.commit(view, num_taken, failures)
            raise
        if failures or self.reports or self.results or self.unanswered:
            taken = chosen.tolist()
            reports = {env: self.reports[env] for env in taken if env in self.reports}
            values = {env: self.results[env].open() for env in taken if env in self.results}
            rest = reports, failures, values, self.unanswered
        self.commit(view, num_taken, failures)
        return chosen, results, rest

    def step_and_take(self, exchange, actions, vector_env, envs, Py_ssize_t rollout_frame,
                      bint last, bint arrays, meanwhile, within):
        """The calls of a batch step in one, under the guard: `step`, `wait` and `take`.

        Args:
            exchange: Its `settle` waits for an abandoned call; its `handle` handles events; its
                `end_step` does what few steps need.
            actions: As for `step`.
            vector_env: As for `take`.
            envs: As for `step`.
            rollout_frame: Likewise.
            last: Whether that is the rollout's last frame.
            arrays: As for `take`.
            meanwhile: Called while the envs step.
            within: The loan under which this call is made.
        """
        cdef Guard guard = self.links.guard
        cdef int event
        guard.enter_whole()
        try:
            if not self.is_free(within):
                exchange.settle("step_async", envs, within)
            self.step(envs, actions, rollout_frame)
            if meanwhile is not None:
                meanwhile()
            event = self.wait(-1, None, None)
            while event != DONE:
                exchange.handle(event)
                event = self.wait(-1, None, None)
            _, results, rest = self.take(None, -1, vector_env, True, arrays)
            if last or rest is not None or exchange.recycles:
                exchange.end_step(rest, last)
            return results
        except BaseException:
            guard.abandon_all()
            raise
        finally:
            guard.leave()

    cdef tuple results_of(self, object chosen, vector_env, bint everyone, bint arrays):
        """Four arrays of these envs, or of all, and infos."""
        cdef const Py_ssize_t *envs = <const Py_ssize_t *>data_of(chosen)
        cdef Py_ssize_t count = size_of(chosen)
        cdef Py_ssize_t i
        if self.reports:
            for i in range(count):
                report = self.reports.get(envs[i])
                if report is not None and report.cut_off:  # a reset has overwritten the truncation
                    self.frames.mark_truncated(envs[i])
        if vector_env is None:
            infos = self.inbox.each(envs, count)
        elif self.reports or self.inbox.num_filled > 0:
            if vector_env is True or not everyone:
                self.batch.num_envs = self.num_envs if everyone else count
                vector_env = self.batch
            infos = self.inbox.gather(envs, count, everyone, self.reports, vector_env)
        else:
            infos = {}
        # Only after the infos, with which observations come that are messages.
        if not arrays:
            self.frames.count_batch(None)
            return None, None, None, None, infos
        return self.frames.all(infos) if everyone else self.frames.some(chosen, infos)

    cdef int commit(self, const Py_ssize_t *envs, Py_ssize_t count, list failures) except -1:
        """Notes that these envs and failures were taken."""
        cdef Py_ssize_t i
        self.links.guard.untaken = False
        self.links.enter(c.SV_TRACE_CALLER)
        if failures:
            taken = {id(failure) for failure in failures}
            self.raised = [failure for failure in self.raised if id(failure) not in taken]
        for i in range(count):
            if self.entries[envs[i]].state == READY:  # else it is named twice
                self.end_ready(envs[i])
        if self.reports or self.results:
            for i in range(count):
                self.reports.pop(envs[i], None)
                self.results.pop(envs[i], None)
        if self.unanswered:
            self.unanswered = []
        return 0

"""The caller's side of a step: it asks envs, waits for their answers, and takes the results.

    caller: Ledger -> actions into slabs -> one request a worker into its ring -> bell
    worker: bell -> request -> env.step() -> results into slabs -> one completion into its ring
    caller: Ledger <- completions off the rings; results out of the slabs

worker.pyx is the worker's side. Commands and errors go through a channel, a socket a worker. By
section: `Guard` admits one call at a time; `Links` has the caller's ends of all rings, and waits;
`Frames` says where in the slabs results lie; `Inbox` reads infos; `Ledger` knows what each env was
asked, and whether it has answered.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy
from posix.unistd cimport write

from shmvec._core cimport csrc as c
from shmvec._core.memory cimport (
    Blocks,
    Codec,
    Lease,
    MessageCodec,
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
from shmvec._core.process cimport Descriptor, Recorder
from shmvec._core.protocol cimport (
    ACTION,
    CLOSE,
    COMMAND,
    FINAL,
    FRAME_SHIFT,
    INFO,
    LATE,
    MESSAGES,
    OBSERVATION,
    RESET,
    SETTINGS,
    STEP,
    LINGER,
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
# The guard admits one call at a time: it refuses re-entrant calls and other threads' calls.
#
# A call that asks envs, takes their answers or replaces workers enters and leaves the guard in C
# (csrc/guard.h), where no signal handler can raise. So a call that ends with an exception has left
# the guard, and has abandoned the requests whose answers it did not take.


@cython.final
cdef class Guard:
    """Refuses a call while another one is under way, in this thread or in another."""

    cdef c.sv_guard guard
    cdef c.sv_trace *trace            # NULL: nothing is recorded
    cdef Recorder recorder            # keeps the memory of this trace
    cdef readonly object pending      # a call that was begun and not finished, or a loan, or None
    cdef uint64_t pending_thread      # the thread that began the pending call
    cdef public bint abandoned        # the next call discards what is in flight
    cdef uint64_t ask_count           # how often envs were asked
    cdef uint64_t asking_thread       # the thread that asked last
    cdef bint untaken                 # no answer was taken since the last request
    cdef bint claimed                 # the call that is under way has claimed the pending one
    cdef object pending_at_entry      # `pending` when the call that is under way began
    cdef uint64_t ask_count_at_entry  # `ask_count` at that time

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

    def run_reentrant(self, function):
        """Calls a function under the guard, also within a call by this thread."""
        cdef bint entered = c.sv_guard_enter(&self.guard, PyThread_get_thread_ident())
        if not entered and not c.sv_guard_is_mine(&self.guard, PyThread_get_thread_ident()):
            self.refuse()
        try:
            return function()
        finally:
            if entered:
                self.leave()

    def record(self, Recorder recorder):
        """Records the end of each call in a trace; None stops it."""
        self.trace = NULL if recorder is None else &recorder.trace
        self.recorder = recorder

    # ---- pending and abandoned calls ---------------------------------------------------------

    cdef void note_request(self) noexcept:
        self.ask_count += 1
        self.untaken = True
        self.asking_thread = PyThread_get_thread_ident()

    cdef int abandon_own(self, uint64_t ask_count, pending) except -1:
        """Abandons what this thread has begun, or asked and not taken, since these two were so."""
        cdef uint64_t me = PyThread_get_thread_ident()
        if pending is None and self.pending is not None and self.pending_thread == me:
            self.pending = None
        if self.untaken and self.ask_count != ask_count and self.asking_thread == me:
            self.abandoned = True
        return 0

    cdef int enter_round_trip(self) except -1:
        """Begins a call that abandons what it asked if it raises. Such calls do not nest."""
        self.enter()
        self.ask_count_at_entry = self.ask_count
        self.pending_at_entry = self.pending
        self.claimed = False
        return 0

    cdef int abandon_round_trip(self) except -1:
        """Abandons what such a call has claimed, begun or asked, and not taken."""
        if self.claimed and self.untaken:
            self.abandoned = True
        return self.abandon_own(self.ask_count_at_entry, self.pending_at_entry)

    def set_pending(self, pending):
        self.pending_thread = PyThread_get_thread_ident()
        self.pending = pending

    def claim(self, pending):
        """Makes the pending call this one's, to take or to abandon; False: another is pending."""
        if self.pending is not pending:
            return False
        self.pending = None
        self.claimed = True
        return True

    def disown(self):
        """Leaves the guard in a fork: the call that is under way is the parent's."""
        c.sv_guard_leave(&self.guard)

    def begin_and_finish(self, begin, finish):
        """Calls both, one after the other; if one raises, what was asked is abandoned."""
        cdef uint64_t ask_count = self.ask_count
        cdef object pending = self.pending
        try:
            begin()
            return finish()
        except BaseException:
            self.abandon_own(ask_count, pending)
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


def round_trip(method):
    """A method that asks and takes, under its object's guard; if it raises, it abandons both."""
    @wraps(method)
    def call(self, *args, **kwargs):
        cdef Guard guard = self.guard
        guard.enter_round_trip()
        try:
            return method(self, *args, **kwargs) if kwargs else method(self, *args)
        except BaseException as error:
            guard.abandon_round_trip()
            raise cut_traceback(error)
        finally:
            guard.leave()
    return call


@cython.final
cdef class Loan:
    """Lends what ``begin()`` returns, in a ``with`` block."""

    cdef Guard guard
    cdef object begin         # checks whether a loan is possible, and returns what is lent
    cdef object pending       # the guard's `pending` while the loan lasts
    cdef bint keeps_requests  # requests stay in flight at the loan's end

    def __init__(self, Guard guard, begin, pending, bint keeps_requests):
        self.guard = guard
        self.begin = begin
        self.pending = pending
        self.keeps_requests = keeps_requests

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
        self.end(self.keeps_requests and kind is None)

    def __del__(self):
        # An exception between `__enter__` and the block leaves the loan without a borrower.
        self.end(False)

    cdef int end(self, bint keeps_requests) except -1:
        if self.guard.pending is self.pending:
            self.guard.pending = None
            if not keeps_requests:
                self.guard.abandoned = True  # the next call discards what is in flight
        return 0


# ==== links =======================================================================================
#
# The caller's ends of all rings: it sends requests, receives answers, and waits in between.
#
# ``Links`` implements the protocol of csrc/ring.h and bell.h. It knows nothing of processes, nor of
# the requests of single envs, which the ledger keeps. The owner of the processes, ``workers``, says
# at least every 50 ms of waiting which of them are dead. ``budgets`` is called every second and
# says how to wait. ``Links`` reads and writes the control channels while it waits, so that neither
# side ever waits for the other to read.
#
# A wait ends with an event: it is done, its time is up, or something must be handled first. Each
# look around reads faults off processes and counters anew. So an event whose handling is
# interrupted is not lost: the next wait ends with it, too.

vector_env_numbers = count(1)  # of this process, for onlookers

cpdef enum:
    NO_EVENT
    DONE
    TIME_UP
    MESSAGE   # a message has come for which an answer waits
    RAISED    # an env has raised, and the fault policy has not decided about it
    DEAD      # workers are dead: `Links.dead`
    OVERDUE   # a call is overdue: `Links.overdue`
    DOWN      # a worker is being replaced, and its replacement may go on

WORKERS_UP = -2  # `wanted` of a wait until the workers of some envs are not down

# A call that takes longer than it may; `began` is in ns, by the monotonic clock.
OverdueCall = namedtuple("OverdueCall", "env operation limit began")

cdef double MAX_DEADLINE_S = 1e9  # later deadlines, whose ns may not fit, are none
cdef int64_t SLICE_NS = 50_000_000
cdef int64_t BUSY_SLICE_NS = 1_000_000   # the slice of a wait while channels are busy
cdef int64_t DOWN_SLICE_NS = 10_000_000  # the slice of a wait while workers are being replaced
cdef int64_t NEVER_NS = 1 << 62
cdef int64_t BEGIN_LIMIT_NS = 1_000_000_000  # within which a worker begins a request
cdef int64_t CORES_INTERVAL_NS = 1_000_000_000  # between two readings of the usable cores
cdef int64_t STOPPED_NS = 200_000_000  # a process that was suspended so long may have been stopped


@cython.final
cdef class Alarms:
    """Descriptors that wake dozing workers; see csrc/bell.h."""

    cdef list descriptors

    def __init__(self, count=0):
        self.descriptors = [Descriptor(os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                            for _ in range(count)]

    def __getitem__(self, index):
        return self.descriptors[index].number

    @cython.critical_section
    def close(self):
        self.descriptors.clear()

    @cython.critical_section
    cdef void rouse(self, uint32_t mask) noexcept:
        """Wakes the workers of these bits of the bell."""
        cdef Descriptor descriptor
        cdef uint32_t index = 0
        cdef uint64_t one = 1
        for descriptor in self.descriptors:
            if mask & c.sv_bell_mask(index):
                write(descriptor.number, &one, sizeof(one))  # may be full: wakes it too
            index += 1


@cython.final
cdef class Links:
    """The caller's ends of the rings and channels of all workers. Times are in ns."""

    cdef Segment segment
    cdef c.sv_ring *requests
    cdef c.sv_ring *completions
    cdef c.sv_bell *bell
    cdef c.sv_completion *completion
    cdef c.sv_notice *notice      # published for onlookers
    cdef c.sv_waiter waiter
    cdef uint32_t num_workers
    cdef uint32_t *first_envs     # by worker
    cdef uint32_t *env_counts     # by worker: the number of its envs
    cdef uint32_t *outstanding    # by worker: requests that it has not answered
    cdef uint32_t sequence        # of the last request
    cdef uint32_t issued          # requests issued, in the unit of the completion count
    cdef c.sv_counts tally        # of the caller; its wakes are system calls that rang the bell
    cdef Recorder recorder        # records the trace of this side; None: there is no trace
    cdef readonly bint waiting    # a thread is in a wait
    cdef readonly Guard guard     # guards the calls that ask, take or wait
    cdef bint _closed             # the vector env was closed, maybe by another thread
    cdef bint lingering           # more workers than cores: the last of a batch step stay awake
    cdef bint channels_busy       # messages have come on the channels lately, or will come
    cdef readonly object workers  # the owner of their processes
    cdef uint32_t last_operation  # the last operation that was asked for
    cdef list channels            # by worker
    cdef readonly object owner    # id of the process that owns the workers
    cdef readonly list dead       # workers that the last look has found dead
    cdef readonly object overdue  # the last OverdueCall
    cdef readonly dict down       # workers that are being replaced, each with what it needs
    cdef Alarms alarms            # wake workers that doze
    cdef object read_budgets      # a function that says how to wait
    cdef object inline_server     # a function that serves the last worker's requests here, or None
    cdef uint32_t num_processes   # workers that are processes: all, or all but the last
    cdef int64_t budgets_read_at
    cdef int64_t last_look_at
    cdef int64_t next_look_at     # when an event loop looks around, at the latest; 0: it does not
    cdef int64_t next_limit_at    # when a call may be overdue, or hang, at the earliest
    cdef int64_t shortest_limit   # of the two limits and `hang_ns`; -1: there is none
    cdef int64_t step_limit       # for a step of one env; -1: no limit
    cdef int64_t reset_limit      # for a reset of one env; -1: no limit
    cdef int64_t slice_ns         # between two calls of look_around
    cdef int64_t limits_count_from  # at the earliest
    cdef int64_t last_reminder_at
    cdef int64_t hang_ns          # after which a call is reported as hanging; -1: never
    cdef int64_t[::1] limit_begins  # by env: from when on the limit of its call counts
    cdef int64_t[::1] reported_hangs  # by env: the begin of the call that was last reported
    cdef int64_t[::1] idle_since  # by worker: since when it has not begun its request; 0: it has
    cdef uint64_t[::1] answers_at_idle  # by worker: how many requests it had answered then

    def __cinit__(self, Segment segment, workers, *args, **kwargs):
        cdef uint32_t worker
        cdef c.sv_counters *past
        cdef list ranges = workers.ranges
        self.num_workers = len(ranges)
        if self.num_workers != segment.plan.sizes.num_workers:
            raise ValueError("one range of envs a worker")
        self.requests = <c.sv_ring *>calloc(self.num_workers, sizeof(c.sv_ring))
        self.completions = <c.sv_ring *>calloc(self.num_workers, sizeof(c.sv_ring))
        self.first_envs = <uint32_t *>calloc(self.num_workers, sizeof(uint32_t))
        self.env_counts = <uint32_t *>calloc(self.num_workers, sizeof(uint32_t))
        self.outstanding = <uint32_t *>calloc(self.num_workers, sizeof(uint32_t))
        if (self.requests is NULL or self.completions is NULL or self.first_envs is NULL
                or self.env_counts is NULL or self.outstanding is NULL):
            raise MemoryError
        self.segment = segment
        for worker in range(self.num_workers):
            self.first_envs[worker] = ranges[worker].start
            self.env_counts[worker] = len(ranges[worker])
            self.attach(worker)
            past = c.sv_segment_past(segment.base, &segment.plan, worker)
            c.sv_counter_set(&past.first_env, self.first_envs[worker])
            c.sv_counter_set(&past.num_envs, self.env_counts[worker])
        self.bell = c.sv_segment_bell(segment.base, &segment.plan)
        self.notice = c.sv_segment_notice(segment.base, &segment.plan)
        self.completion = c.sv_segment_completion(segment.base, &segment.plan)

    def __dealloc__(self):
        free(self.requests)
        free(self.completions)
        free(self.first_envs)
        free(self.env_counts)
        free(self.outstanding)

    def __init__(self, segment, workers, Guard guard, budgets, limits=(None, None),
                 hang_after=None):
        self.workers = workers
        self.channels = workers.channels
        self.guard = guard
        self.down = {}
        self.alarms = workers.alarms
        self.read_budgets = budgets
        self.inline_server = workers.serve_inline
        self.num_processes = self.num_workers - (self.inline_server is not None)
        self.hang_ns = -1 if hang_after is None else <int64_t>(hang_after * 1e9)
        self.reported_hangs = np.zeros(segment.num_envs, np.int64)
        self.limit_begins = np.zeros(segment.num_envs, np.int64)
        self.idle_since = np.zeros(self.num_workers, np.int64)
        self.answers_at_idle = np.zeros(self.num_workers, np.uint64)
        step_limit, reset_limit = limits
        self.step_limit = -1 if step_limit is None else <int64_t>(step_limit * 1e9)
        self.reset_limit = -1 if reset_limit is None else <int64_t>(reset_limit * 1e9)
        # Slices are so short that no time limit is overrun by more than a quarter.
        self.slice_ns = SLICE_NS
        for limit in (self.step_limit, self.reset_limit):
            if limit >= 0:
                self.slice_ns = min(self.slice_ns, max(1_000_000, <int64_t>limit // 4))
        self.shortest_limit = min(
            [ns for ns in (self.step_limit, self.reset_limit, self.hang_ns) if ns >= 0], default=-1)
        cdef c.sv_budget budget
        budget.pause = budget.yield_ = budget.linger = budget.window = 0
        c.sv_waiter_init(&self.waiter, budget, False, &self.tally)
        self.update_budgets()
        self.owner = os.getpid()
        c.sv_counter_set(&self.notice.number, next(vector_env_numbers))
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
        """Takes the caller's ends of a worker's rings."""
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
        cdef c.sv_record request
        request.sequence = sequence
        request.operation = operation | <uint32_t>frame << FRAME_SHIFT
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
            request.first = self.first_envs[worker]
            request.count = self.env_counts[worker]
            self.push(worker, &request)
        if self.num_processes:
            c.sv_bell_ring(self.bell, c.SV_EVERYONE)
        self.remind()  # no wait in slices would repeat it

    cdef int ring(self, uint32_t mask) except -1:
        """Rings for the workers whose bits of the bell are in the mask."""
        if self.num_processes and c.sv_bell_ring(self.bell, mask):
            self.tally.wakes += 1
            if c.sv_bell_has_dozers(self.bell):
                self.alarms.rouse(mask)
        self.enter_span(c.SV_TRACE_CALLER)
        return 0

    cpdef int remind(self) except -1:
        """Wakes all workers once more, also if tails or bell are damaged."""
        cdef uint32_t worker
        with cython.critical_section(self):
            for worker in range(self.num_workers):
                c.sv_ring_announce(&self.requests[worker])
        self.alarms.rouse(c.SV_EVERYONE)
        return 0

    cdef int pop_answer(self, uint32_t worker, c.sv_record *answer) except -1:
        """Takes an answer off a worker's ring; 0: there is none."""
        self.check_open()  # a signal's handler may have closed it since the last look
        cdef int found = c.sv_ring_try_pop(&self.completions[worker], answer)
        if found == c.SV_RING_NO:
            return 0
        if (found == c.SV_RING_CORRUPT or self.outstanding[worker] == 0
                or not self.is_answer_of(worker, answer)):
            raise RuntimeError(
                f"the segment is damaged: the completion ring of worker {worker} makes no sense")
        self.outstanding[worker] -= 1
        return 1

    cdef bint is_answer_of(self, uint32_t worker, const c.sv_record *answer) noexcept:
        """Whether the envs of an answer belong to the worker."""
        cdef uint32_t first = self.first_envs[worker]
        cdef uint32_t count = self.env_counts[worker]
        return (answer.first >= first and answer.count <= count
                and answer.first - first <= count - answer.count)

    # ---- waiting -----------------------------------------------------------------------------

    cdef int wait_for(self, uint32_t target, int64_t deadline) except -1:
        """Waits until `target` requests, counted from the first ever, are done; or for an event.

        The deadline is in ns; -1: there is none.
        """
        cdef int event = NO_EVENT
        self.enter_span(c.SV_TRACE_TAKE)
        try:
            event = self.wait_untraced(target, deadline)
        finally:
            self.enter_span(c.SV_TRACE_TAKE if event == DONE else c.SV_TRACE_CALLER)
        return event

    cdef int wait_untraced(self, uint32_t target, int64_t deadline) except -1:
        # The count of completions says when to read the rings. The rings say which requests are
        # done.
        if self.num_processes == 0:  # this process has served all requests
            raise RuntimeError("the segment is damaged: a request or its answer is lost")
        if (c.sv_completion_check(self.completion, target)
                and c.sv_completion_reached(self.answered(), target)):
            return DONE
        c.sv_notice_begin_wait(self.notice, c.sv_now_ns())
        try:
            return self.wait_in_slices(target, deadline)
        finally:
            c.sv_notice_end_wait(self.notice)
            self.publish()

    cdef int serve_inline(self) except -1:
        self.enter_span(c.SV_TRACE_HERE)
        self.waiting = True
        try:
            self.inline_server()
        finally:
            self.waiting = False
        self.check_open()
        self.publish()
        self.enter_span(c.SV_TRACE_TAKE)
        return 0

    cdef int wait_in_slices(self, uint32_t target, int64_t deadline) except -1:
        cdef int64_t slice_ns
        cdef int found
        cdef int event
        if self.channels_busy:
            self.pump()
        while True:
            slice_ns = BUSY_SLICE_NS if self.channels_busy else self.slice_ns
            if self.down:
                slice_ns = min(slice_ns, DOWN_SLICE_NS)
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
                    self.resync_count()
                return DONE
            if found == c.SV_WAIT_READY:
                target += self.resync_count()
            event = self.look_around()
            if event != NO_EVENT:
                return event

    cdef int listen(self, workers, int64_t deadline) except -1:
        """Waits until one of these workers sends something, for a slice at most."""
        cdef int64_t slice_ns = DOWN_SLICE_NS if self.down else SLICE_NS
        if deadline >= 0:
            slice_ns = min(slice_ns, deadline - c.sv_now_ns())
            if slice_ns <= 0:
                return TIME_UP
        self.workers.listen(workers, 1e-9 * slice_ns)
        return self.look_around()

    cdef int pump(self) except -1:
        """Reads and writes the channels, which keep messages until they are taken."""
        self.channels_busy = False
        for channel in self.channels:
            if channel.pump():
                self.channels_busy = True
        return 0

    cdef int check_open(self) except -1:
        if self._closed:
            raise ClosedEnvironmentError("The vector env was closed while this call waited for it.")
        return 0

    cdef int look_if_due(self) except -1:
        # Calls that never have to wait look around here.
        if c.sv_now_ns() - self.last_look_at >= self.slice_ns:
            return self.look_around()
        return NO_EVENT

    cdef int look_around(self) except -1:
        """Looks at signals, channels, deaths and time limits; returns the event to handle first."""
        cdef int64_t now = c.sv_now_ns()
        self.publish()
        if now > max(self.last_look_at + self.slice_ns, self.next_look_at) + STOPPED_NS:
            # This process may have been stopped with its workers, by Ctrl-Z or a scheduler.
            self.limits_count_from = now
            self.idle_since[:] = 0
        self.last_look_at, self.next_look_at = now, 0
        if now - self.last_reminder_at >= SLICE_NS:
            self.last_reminder_at = now
            self.remind()
        PyErr_CheckSignals()
        self.check_open()
        self.pump()
        if self.last_operation == STEP or self.last_operation == RESET:
            self.workers.last_command = "step" if self.last_operation == STEP else "reset"
        self.dead = self.workers.dead_workers()
        if self.dead:
            return DEAD
        if self.step_limit >= 0 or self.reset_limit >= 0 or self.hang_ns >= 0:
            self.overdue = self.find_overdue(now)
            if self.overdue is not None:
                return OVERDUE
        return DOWN if self.down else NO_EVENT

    cdef uint32_t answered(self):
        """The requests that are done according to the rings, in the unit of `issued`."""
        cdef uint32_t worker
        cdef uint32_t done = self.issued
        for worker in range(self.num_workers):
            done -= self.outstanding[worker]
            done += min(self.outstanding[worker], c.sv_ring_waiting(&self.completions[worker]))
        return done

    cdef uint32_t resync_count(self):
        """Adopts the workers' count of completions; returns by how much it differs from the rings.

        They differ if the count is damaged, if a worker has died between its answer and its count,
        or if it is still between the two. In the last case the next wait finds the count one too
        high, and adopts it once more.
        """
        cdef uint32_t done = c.sv_completion_done(self.completion)  # first: see `Ledger.arm`
        cdef uint32_t difference = done - self.answered()
        self.issued += difference
        return difference

    cdef object find_overdue(self, int64_t now):
        """An OverdueCall: one takes longer than it may, or a worker does not begin it; or None.

        Calls that seem to hang are reported to `workers.log_hanging`, once each.
        """
        cdef uint32_t worker
        cdef uint32_t env
        cdef uint64_t busy
        cdef int64_t elapsed
        cdef c.sv_counters *counters
        cdef list hanging = []
        overdue = None
        self.next_limit_at = now + self.shortest_limit  # of calls that have not begun
        for worker in range(self.num_workers):
            counters = c.sv_segment_counters(self.segment.base, &self.segment.plan, worker)
            busy = c.sv_busy_for(&counters.activity, now, &elapsed)
            if busy != 0 or self.has_answered(worker):
                self.idle_since[worker] = 0
            elif (self.idle_since[worker] == 0
                  or self.answers_at_idle[worker] != c.sv_counter_get(&counters.requests)):
                self.idle_since[worker] = now
                self.answers_at_idle[worker] = c.sv_counter_get(&counters.requests)
            else:
                elapsed = now - self.idle_since[worker]
                busy = c.sv_busy(self.first_envs[worker], c.SV_IN_STEP)
            if c.sv_busy_doing(busy) != c.SV_IN_SEVERAL:
                found = self.check_limit(worker, busy, now, elapsed, hanging)
                overdue = overdue or found
                continue
            for env in range(self.first_envs[worker],
                             self.first_envs[worker] + self.env_counts[worker]):
                busy = c.sv_busy_for(
                    &c.sv_segment_timings(self.segment.base, &self.segment.plan, env).activity, now,
                    &elapsed)
                found = self.check_limit(worker, busy, now, elapsed, hanging)
                overdue = overdue or found
        if hanging:
            self.workers.log_hanging(hanging)
        return overdue

    cdef object check_limit(self, uint32_t worker, uint64_t busy, int64_t now, int64_t elapsed,
                            list hanging):
        """The OverdueCall that a worker is busy with, or None.

        What seems to hang is added to `hanging`, one call a worker.
        """
        cdef int64_t began
        cdef int64_t limit
        cdef uint32_t env = <uint32_t>c.sv_busy_env(busy)
        if busy == 0:
            return None
        if not self.is_busy_with_own(worker, busy):
            env = self.first_envs[worker]
        began = now - elapsed
        elapsed = min(elapsed, now - max(self.limits_count_from, self.limit_begins[env]))
        limit = self.limit_of(busy)
        if self.idle_since[worker] != 0:
            limit = -1 if limit < 0 else max(limit, BEGIN_LIMIT_NS)
        for left in (limit - elapsed, self.hang_ns - elapsed):
            if left >= 0:
                self.next_limit_at = min(self.next_limit_at, now + <int64_t>left)
        if 0 <= limit < elapsed:  # the policy may have it interrupted first
            self.next_limit_at = min(self.next_limit_at, now + SLICE_NS)
        if 0 <= self.hang_ns < elapsed and self.reported_hangs[env] != began:
            self.reported_hangs[env] = began
            if not hanging or hanging[len(hanging) - 1][0] != worker:
                hanging.append((worker, self.activity_of(worker, busy), 1e-9 * elapsed))
        if limit < 0 or elapsed <= limit:
            return None
        if not self.is_busy_with_own(worker, busy):
            raise RuntimeError(
                f"the segment is damaged: worker {worker} is busy with an env that it has not")
        return OverdueCall(c.sv_busy_env(busy), c.sv_busy_name(busy).decode(),
                       1e-9 * self.limit_of(busy), began)

    def restart_limit(self):
        """Has the limit of the overdue call count anew: the user knows of it."""
        if self.overdue is not None:
            self.limit_begins[self.overdue.env] = c.sv_now_ns()

    cpdef bint has_answered(self, uint32_t worker) noexcept:
        return self.outstanding[worker] <= c.sv_ring_waiting(&self.completions[worker])

    cdef int64_t limit_of(self, uint64_t busy) noexcept:
        """How long a call may take; -1: there is no limit."""
        if c.sv_busy_doing(busy) == c.SV_IN_STEP:
            return self.step_limit
        return self.reset_limit if c.sv_busy_doing(busy) == c.SV_IN_RESET else -1

    cdef bint is_busy_with_own(self, uint32_t worker, uint64_t busy):
        # It is, unless the segment is damaged.
        cdef uint32_t first = self.first_envs[worker]
        return first <= c.sv_busy_env(busy) < first + self.env_counts[worker]

    cdef object activity_of(self, uint32_t worker, uint64_t busy):
        """What a worker is busy with: (env, "step", "reset" or "call"), or None."""
        if self.idle_since[worker] != 0 or not self.is_busy_with_own(worker, busy):
            return None
        return c.sv_busy_env(busy), c.sv_busy_name(busy).decode()

    cdef bint is_due(self) noexcept:
        """Whether to look around at once, and not once a slice is over."""
        return self.shortest_limit >= 0 and c.sv_now_ns() > self.next_limit_at

    cdef object look_timeout(self, bint in_flight):
        """Seconds after which an event loop looks around if nothing wakes it; None: it need not.

        Limits count anew if the event loop is much later than that.
        """
        cdef int64_t now = c.sv_now_ns()
        self.next_look_at = NEVER_NS
        if self.down:
            return 1e-9 * DOWN_SLICE_NS
        if not in_flight or self.shortest_limit < 0:
            return None
        self.next_look_at = max(self.next_limit_at, now) + BUSY_SLICE_NS
        return 1e-9 * (self.next_look_at - now)

    cdef int update_budgets_if_due(self) except -1:
        if self.waiter.ended_at - self.budgets_read_at >= CORES_INTERVAL_NS:
            self.update_budgets()
        return 0

    cdef int update_budgets(self) except -1:
        """Sets the budgets for waits of caller and workers, by the cores that are usable now."""
        cdef c.sv_budget budget
        now = self.read_budgets()
        budget.pause, budget.yield_, budget.linger, budget.window = now.worker
        c.sv_policy_set(c.sv_segment_policy(self.segment.base, &self.segment.plan), budget,
                        now.homing, now.cores)
        c.sv_counter_set(&self.notice.cores, now.usable)
        self.lingering = budget.linger > 0
        budget.pause, budget.yield_, budget.linger, budget.window = now.parent
        self.waiter.budget = budget
        self.budgets_read_at = c.sv_now_ns()
        return 0

    # ---- tracing -----------------------------------------------------------------------------

    cdef void enter_span(self, uint32_t kind) noexcept:
        """Begins a span of the caller's trace, unless another thread is in a wait."""
        if self.waiter.trace is not NULL and not self.waiting:
            c.sv_trace_enter(self.waiter.trace, kind, c.sv_now_ns())

    cdef int announce_message(self, uint32_t worker, uint32_t operation,
                              uint32_t sequence) except -1:
        """Tells a worker of a message by a request that is neither answered nor counted."""
        cdef c.sv_record request
        request.sequence, request.operation = sequence, operation
        request.first, request.count = self.first_envs[worker], 0
        return self.push(worker, &request)

    def record(self, Recorder recorder, workers=(), packed=None, descriptor=-1):
        """Starts recording a trace; None stops it.

        Workers are told of the memory by a message. So envs may be in flight, and nothing waits for
        workers. The request leaves the room on a ring that requests to envs, their reset settings
        and CLOSE may need.
        """
        cdef uint32_t worker
        for worker in workers:  # before the first of them gets its request
            if c.sv_ring_room(&self.requests[worker]) < 2 * self.env_counts[worker] + 2:
                raise RuntimeError(
                    f"worker {worker} has not come yet to the traces that were begun before: first "
                    "take the results of what its envs were asked")
        self.enter_span(c.SV_TRACE_NOTHING)
        self.sequence += 1
        for worker in workers:  # first: a message without a request is discarded
            self.channels[worker].put(self.sequence, packed, (descriptor,))
            self.channels_busy = True
            self.announce_message(worker, TRACE, self.sequence)
        if workers:
            self.ring(c.SV_EVERYONE)
            if (self.inline_server is not None and self.outstanding[self.num_processes] == 0
                    and not self.waiting):
                self.inline_server()  # it would else begin with the next request to envs
        self.waiter.trace = NULL if recorder is None else &recorder.trace
        self.recorder = recorder
        self.enter_span(c.SV_TRACE_CALLER)
        self.guard.record(recorder)

    # ---- workers -----------------------------------------------------------------------------

    cdef int renew(self, uint32_t worker) except -1:
        """Makes the rings of a dead worker anew, for its successor."""
        self.issued -= self.outstanding[worker]
        self.outstanding[worker] = 0
        c.sv_segment_renew(self.segment.base, &self.segment.plan, worker)
        return self.attach(worker)

    def is_idle(self, uint32_t worker):
        return self.outstanding[worker] == 0

    cdef object envs_of(self, uint32_t worker):
        cdef Py_ssize_t first = self.first_envs[worker]
        return range(first, first + self.env_counts[worker])

    def steps_of(self, uint32_t worker):
        """Steps of envs that the worker's present process has made."""
        return c.sv_counter_get(
            &c.sv_segment_counters(self.segment.base, &self.segment.plan, worker).steps)

    # ---- counters for onlookers ----------------------------------------------------------------

    cdef int publish(self) except -1:
        self.tally.requests = self.issued
        c.sv_counters_publish(&self.notice.parent, &self.tally)
        return 0

    def insight(self):
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
# Which frame has the results of which env, and which frame a request names. memory.pyx says what
# rows and frames are, and how rows are lent.
#
#     memory               what the user gets                     overwritten
#     one frame            copies; with copy=False the            by the next step
#                          observations there, without a lease
#     a frame more, where  the same; an env whose results are     by the step after the next
#     faults are handled   lost can show its last ones
#     num_buffers frames,  views of a batch of neighbours,        after their lease
#     with copy=False      leased; copies of other batches
#     blocks, for large    the observations of a batch step,      after their lease
#     observations         leased; the other arrays are copies
#     rollouts             views of all their frames, leased      after their lease
#
# The caller writes results only of envs that are not in flight: `truncate`, `mark_truncated` and
# `copy_back_from_rollout` do.
#
# The lease of a batch ends `hold_batches` batches later, if not before.
#
# With copy=True the workers write large observations to the frame and to a block. The block becomes
# the user's, who may write to it; the frame keeps the observations for later results of other envs.
# This saves the caller a copy, for which all workers would wait (a third of a step of 32 envs that
# only return pictures). Where all blocks are leased, or after a fault or an interrupted call, the
# observations are copied from the frame.
#
# Requests number the frames: first those in the segment; then the same with each of the blocks;
# then those of rollouts, in memory of their own. An env's row is its frame's number * num_envs +
# env. The last results of all envs lie in the segment, or all in rollouts.

@cython.final
cdef class Frames:
    """Register of where each env's last results are, and where its next ones go."""

    cdef Results segment_frames         # the frames in the segment
    cdef readonly Results rollouts      # frames after these, in memory of their own; None: none
    cdef Py_ssize_t num_envs
    cdef Py_ssize_t[::1] all_envs       # indices of all envs
    cdef Py_ssize_t[::1] rows           # by env: the row where its last results are, or will be
    cdef Py_ssize_t[::1] previous_rows  # by env: the row of the results before these
    cdef Py_ssize_t[::1] next_frames    # by env: the frame for its next results
    cdef bint copy
    cdef bint leasing                   # batches are returned as views, which are leased
    cdef bint keep_last                 # new results do not overwrite the last ones
    cdef bint has_several_frames        # in the segment
    cdef Blocks blocks                  # None: there are none
    cdef Py_ssize_t unlent_block        # a block with all envs' last observations; -1: none
    cdef Py_ssize_t first_rollout_frame  # the number of the rollouts' first frame
    cdef Py_ssize_t hold_batches        # further batches after which a lease ends; 0: it does not
    cdef object recent_leases           # weak references to the leases of the last batches

    def __init__(self, Results segment_frames, copy=True, leasing=False, keep_last=False,
                 Blocks blocks=None, hold_batches=None):
        self.segment_frames = segment_frames
        self.copy = copy
        self.leasing = leasing
        self.keep_last = keep_last
        self.has_several_frames = leasing or keep_last
        self.blocks = blocks
        self.unlent_block = -1
        self.first_rollout_frame = segment_frames.num_frames
        if blocks is not None:
            self.first_rollout_frame += segment_frames.num_frames * blocks.num_blocks
        self.hold_batches = 0 if hold_batches is None else hold_batches
        self.recent_leases = deque()
        self.num_envs = segment_frames.num_envs
        self.all_envs = np.arange(segment_frames.num_envs, dtype=np.intp)
        self.rows = np.arange(segment_frames.num_envs, dtype=np.intp)
        self.previous_rows = np.arange(segment_frames.num_envs, dtype=np.intp)
        self.next_frames = np.zeros(segment_frames.num_envs, np.intp)

    # ---- frames for new results --------------------------------------------------------------

    cdef Py_ssize_t find_free(self, const Py_ssize_t[::1] envs):
        """A frame where no row of these envs is leased or shows the last results; -1: none."""
        cdef Py_ssize_t frame
        cdef Py_ssize_t i
        cdef Py_ssize_t row
        for frame in range(self.segment_frames.num_frames):
            for i in range(envs.shape[0]):
                row = frame * self.num_envs + envs[i]
                if c.sv_is_marked(&self.segment_frames.marks[0], row) or (
                        self.keep_last and self.rows[envs[i]] == row):
                    break
            else:
                return frame
        return -1

    cdef Py_ssize_t choose_in_segment(self, const Py_ssize_t[::1] envs) except -1:
        """A frame in the segment for new results of these envs, none of which is in flight."""
        cdef Py_ssize_t frame
        cdef Py_ssize_t i
        if not self.has_several_frames:
            return 0
        frame = self.find_free(envs)
        if frame >= 0:
            return frame
        if not self.leasing:  # the last results of all envs need not lie in one frame
            for i in range(envs.shape[0]):
                if self.rows[envs[i]] != envs[i]:
                    self.segment_frames.copy_row(self.segment_frames, self.rows[envs[i]], envs[i])
                    self.rows[envs[i]] = envs[i]
            return 1
        gc.collect()  # it frees batches that only a reference cycle keeps
        frame = self.find_free(envs)
        if frame < 0:
            raise BufferError(
                f"envs {list(envs)}: all {self.segment_frames.num_frames - self.keep_last} buffers "
                "are held by batches that are still in use. Drop their arrays (or copy what you "
                "keep), call release(), set hold_batches, or raise num_buffers. "
                "Nothing was sent to any env."
            )
        return frame

    cdef int choose(self, const Py_ssize_t[::1] envs, Py_ssize_t rollout_frame) except -1:
        """Chooses one frame for new results of these envs; `set_next_row` is the commit."""
        cdef Py_ssize_t i
        cdef Py_ssize_t frame = self.first_rollout_frame + rollout_frame
        if rollout_frame < 0:
            frame = self.choose_in_segment(envs)
        for i in range(envs.shape[0]):
            self.next_frames[envs[i]] = frame
        return 0

    cdef inline void set_next_row(self, Py_ssize_t env, Py_ssize_t frame) noexcept:
        self.previous_rows[env] = self.rows[env]
        self.rows[env] = frame * self.num_envs + env

    cdef Py_ssize_t set_next_rows(self, Py_ssize_t rollout_frame) except -1:
        """Sets the frame for new results of all envs; returns the number that requests name."""
        cdef Py_ssize_t frame = self.first_rollout_frame + rollout_frame
        cdef Py_ssize_t env
        if rollout_frame < 0:
            if self.keep_last:
                self.copy_back_from_rollout()  # the last results are needed
            frame = self.choose_in_segment(self.all_envs)
        # The commit.
        for env in range(self.num_envs):
            self.set_next_row(env, frame)
        self.unlent_block = -1
        if self.blocks is not None and rollout_frame < 0:
            self.unlent_block = self.blocks.find_unleased()
            frame += (1 + self.unlent_block) * self.segment_frames.num_frames
        return frame

    cdef Py_ssize_t frame_of(self, Py_ssize_t env) noexcept:
        """The frame that an env's last request named."""
        return self.rows[env] // self.num_envs

    # ---- rollouts ----------------------------------------------------------------------------

    cdef bint is_in_rollout(self) noexcept:
        return self.frame_of(0) >= self.first_rollout_frame

    cdef object rollout_rows(self):
        """The row of each env's last results, counted from the rollouts' first one."""
        return np.asarray(self.rows) - self.first_rollout_frame * self.num_envs

    def is_in_rollout_frames(self, Results rollouts, Py_ssize_t first, Py_ssize_t last):
        """Whether the last results of all envs lie in these rollouts, in frames first to last."""
        cdef Py_ssize_t env
        for env in range(self.num_envs):
            if not first <= self.frame_of(env) - self.first_rollout_frame <= last:
                return False
        return self.rollouts is rollouts

    def set_rollouts(self, Results rollouts):
        self.copy_back_from_rollout()
        self.rollouts = rollouts

    def start_rollout(self, Py_ssize_t frame):
        """Copies the last results to a frame of the rollouts."""
        cdef Py_ssize_t env
        self.copy_last(self.rollouts, frame)
        for env in range(self.num_envs):
            self.set_next_row(env, self.first_rollout_frame + frame)

    cdef int copy_last(self, Results frames, Py_ssize_t frame) except -1:
        """Copies the last results of all envs to one of these frames."""
        cdef Py_ssize_t env
        cdef Py_ssize_t row
        cdef Results results
        for env in range(self.num_envs):
            row = self.rows[env]
            results = self.resolve(&row)
            frames.copy_row(results, row, frame * self.num_envs + env)
        return 0

    cpdef int copy_back_from_rollout(self, Py_ssize_t num_in_flight=0) except -1:
        """Copies the last results to the segment if they are in a rollout.

        Raises:
            RuntimeError: Envs are in flight, whose results go to the rollout.
        """
        cdef Py_ssize_t env
        cdef Py_ssize_t frame
        if self.is_in_rollout():
            if num_in_flight > 0:
                raise RuntimeError(
                    "envs are in flight whose results go to a rollout: wait until they are taken, "
                    "or discard them. Nothing was sent to any env.")
            frame = self.choose_in_segment(self.all_envs)
            self.copy_last(self.segment_frames, frame)
            for env in range(self.num_envs):
                self.rows[env] = self.previous_rows[env] = frame * self.num_envs + env
        return 0

    # ---- single envs -------------------------------------------------------------------------

    cdef Results resolve(self, Py_ssize_t *row):
        """The Results that have a row, which becomes the number of the row among theirs."""
        if row[0] < self.first_rollout_frame * self.num_envs:
            return self.segment_frames
        row[0] -= self.first_rollout_frame * self.num_envs
        return self.rollouts

    cdef bint ends_episode(self, Py_ssize_t row) noexcept:
        cdef Results results = self.resolve(&row)
        return results.terminated_of[row] or results.truncated_of[row]

    cdef bint is_over(self, Py_ssize_t env) noexcept:
        """Whether the env's last results ended an episode."""
        return self.ends_episode(self.rows[env])

    cdef bint was_over(self, Py_ssize_t env) noexcept:
        """Whether the results before its last ones ended an episode."""
        return (self.rows[env] != self.previous_rows[env]
                and self.ends_episode(self.previous_rows[env]))

    cdef int truncate(self, Py_ssize_t env) except -1:
        """Makes the env's results its last observation, reward 0 and a truncation."""
        cdef Py_ssize_t row = self.rows[env]
        cdef Py_ssize_t last = self.previous_rows[env]
        cdef Results results = self.resolve(&row)
        cdef Results before = self.resolve(&last)
        self.unlent_block = -1
        if self.rows[env] != self.previous_rows[env]:
            results.observations.copy_row(before.observations, last, row)
        results.clear_reward(row)
        results.terminated_of[row] = False
        results.truncated_of[row] = True
        return 0

    cdef object last_observation(self, Py_ssize_t env, bint before):
        """An env's last observation; with `before`, as its step is lost, the one before that."""
        cdef Py_ssize_t row = self.previous_rows[env] if before else self.rows[env]
        cdef Results results = self.resolve(&row)
        return results.observations.get(row)

    cdef int mark_truncated(self, Py_ssize_t env) except -1:
        cdef Py_ssize_t row = self.rows[env]
        cdef Results results = self.resolve(&row)
        results.truncated_of[row] = True
        return 0

    # ---- results -----------------------------------------------------------------------------

    cdef Py_ssize_t first_row(self):
        """The first row of the last results if they lie in one frame; -1: they do not."""
        cdef Py_ssize_t env
        for env in range(1, self.num_envs):
            if self.rows[env] != self.rows[0] + env:
                return -1
        return self.rows[0]

    def observe(self):
        """The observations of all envs: copies; with copy=False the slab itself, if it has them."""
        cdef Py_ssize_t first = self.first_row()
        if self.leasing or first < 0:
            return self.segment_frames.observations.gather(self.rows)
        return self.segment_frames.observations.batch(self.copy, first, self.num_envs)

    cdef tuple results_of_all(self, infos):
        """Observations, rewards, terminations and truncations of all envs, and these infos."""
        cdef Results frames = self.segment_frames
        cdef Py_ssize_t block = self.unlent_block
        self.copy_back_from_rollout()  # no env was asked since the rollout's last step
        self.unlent_block = -1  # it is lent once at most
        if block >= 0:
            observations = self.blocks.lend(block)
        else:
            observations = self.observe()
        self.note_batch(None)
        if not self.has_several_frames:
            return (observations, frames.reward_rows.batch(True),
                    frames.terminated_rows.batch(True), frames.truncated_rows.batch(True), infos)
        return (observations, frames.reward_rows.gather(self.rows),
                frames.terminated_rows.gather(self.rows),
                frames.truncated_rows.gather(self.rows), infos)

    cdef tuple results_of(self, object envs, infos):
        """The same of some envs, in this order: leased views if they may be, else copies."""
        cdef Py_ssize_t i
        cdef Py_ssize_t count = len(envs)
        cdef const Py_ssize_t[::1] row_of
        cdef Lease lease = None
        if self.is_in_rollout():  # the user reads the rollout there; other calls get copies
            results = self.rollouts.gather(self.rollout_rows()[envs])
        elif not self.has_several_frames:
            results = self.segment_frames.gather(envs)
        else:
            rows = np.asarray(self.rows)[envs]
            row_of = rows
            for i in range(1, count):
                if row_of[i] != row_of[0] + i:
                    break
            else:
                if self.leasing and count > 0:
                    lease = self.segment_frames.lease(row_of[0], count)
            if lease is None:
                results = self.segment_frames.gather(rows)
            else:
                results = self.segment_frames.view(lease, (count,))
        self.note_batch(lease)
        return (*results, infos)

    cdef int note_batch(self, Lease lease) except -1:
        """Notes a batch and its lease, if it has one; ends the lease of an older batch."""
        if self.hold_batches == 0:
            return 0
        self.recent_leases.append(None if lease is None else ref(lease))
        if len(self.recent_leases) > self.hold_batches:
            oldest = self.recent_leases.popleft()
            alive = None if oldest is None else oldest()
            if alive is not None:
                alive.release()
        return 0

cdef enum State:
    IDLE       # not asked, or its answer was taken; Ledger.next_faults says whether it is broken
    IN_FLIGHT  # asked, and has not answered
    READY      # has answered, and is in the queue
    LOST       # asked, and its worker has died
    FAILED     # asked, and has raised


cdef struct Entry:              # of one env
    uint32_t worker
    uint32_t sequence           # of its request
    uint32_t state              # a State
    uint32_t operation          # of its request
    bint is_user_reset          # its request is a reset that the user has asked for
    uint64_t check_number       # of the last `check_idle` that named it
    Py_ssize_t previous_ready   # the next older one in the queue of ready envs; -1: none
    Py_ssize_t next_ready       # the next newer one


# ==== infos =======================================================================================
#
# Infos on the caller's side: they are read from rings and channels, and gathered for a batch.
#
# A batch's infos become Gymnasium's dict of arrays (a *column* a key), or one dict for each env.
# ``VectorEnv._add_info`` defines the dict of arrays. A value that is not a plain store into a
# column of the same dtype goes to that method, so that results equal ``SyncVectorEnv``'s.
#
# Reading runs the user's code (unpickling, ``_add_info``) and may raise. The call that takes the
# envs then ends with that exception, and their answers are discarded. So a message that cannot be
# read raises only once. Envs that the call does not take keep their messages.

cdef object _ndarray = np.ndarray
cdef object _plain_add_info = VectorEnv._add_info


cdef object make_report(fault, bint cut_off, list last):
    return tuple.__new__(Report, (fault, cut_off, last))  # in C: the commits run no Python code


class VectorEnvStub(VectorEnv):
    """Stands for a vector env of fewer envs, so that Gymnasium gathers their infos."""

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

    cdef bint bind(self, Columns columns, dict infos, Field field,
                   Py_ssize_t num_envs) except -1:
        """Finds or makes the array in `infos`. False: `_add_info` must store the value."""
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
                return False  # the user has a key "_key", the name of the mask
            self.dtype = array.dtype
            self.shape = array.shape[1:]
            self.nbytes = array.nbytes // num_envs
            if self.dtype.hasobject:
                self.dtype = None
            else:
                self.data = <char *>address_of(array)
            self.flags = <uint8_t *>address_of(mask)
            columns.bound_columns.append(self)  # first: `finish` must see it if a later line raises
            self.array = array
            self.mask = mask
        if self.dtype is field.dtype:
            return field.dtype is None or self.shape is field.shape or self.shape == field.shape
        return (self.dtype is not None and field.dtype is not None
                and self.dtype == field.dtype and self.shape == field.shape)


cdef class Columns:
    """The columns of one dict of arrays, which the decoders of all workers share."""

    cdef dict by_key
    cdef list bound_columns  # columns that are in this batch's infos

    def __cinit__(self):
        self.by_key = {}
        self.bound_columns = []

    cdef int add_columns(self, list fields) except -1:
        """Gives each field of a schema its column."""
        cdef Field field
        for field in fields:
            if field.dtype is not None:  # NumPy's own instance lets dtypes compare by identity
                field.dtype = np.empty(0, field.dtype.type).dtype
            if field.key not in self.by_key:
                self.by_key[field.key] = Column(field.key)
            field.column = self.by_key[field.key]
            if field.kind == NESTED:
                (<Column>field.column).children.add_columns(field.children)
        return 0

    def finish(self):
        """Ends a batch: the arrays are the user's from now on."""
        cdef Column column
        for column in self.bound_columns:
            column.array = column.mask = None
        self.bound_columns.clear()
        for column in self.by_key.values():
            if column.children.by_key:
                column.children.finish()


cdef struct MessageHead:    # of a message in an env's MessageBuffer
    uint32_t kind
    uint32_t tag            # the number of its schema, or TAG_PICKLE
    uint32_t nbytes         # of its content, which follows

cdef struct MessageBuffer:  # an env's messages, one after the other
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
    cdef Py_ssize_t row       # of the message's env in the dict that is being built
    cdef Py_ssize_t num_rows  # of that dict

    def __init__(self, segment, worker, from_worker, Columns columns, Codec observations,
                 Codec finals):
        self.columns = columns
        self.observations = observations
        self.finals = finals
        self.expected_kinds = 1 << INFO
        if isinstance(observations, MessageCodec):
            self.expected_kinds |= 1 << OBSERVATION
        if finals is not None:
            self.expected_kinds |= 1 << FINAL

    cdef int on_schema(self, list fields) except -1:
        return self.columns.add_columns(fields)

    cdef bint is_wanted_later(self, uint32_t env, uint32_t sequence, uint32_t now) except -1:
        # Its number does not say so: a worker that steps several envs at once may answer a later
        # request first.
        if env >= self.num_envs:
            raise self.damage_error("has no env")
        return self.entries[env].state == IN_FLIGHT and self.entries[env].sequence == sequence

    cdef object read(self, dict infos, object vector_env):
        """Adds the message to a dict of arrays; without a vector env, returns it as the env did."""
        cdef list fields
        if self.kind == OBSERVATION:
            self.observations.write(self.env, self.decode()[""])
        elif vector_env is None:
            info = self.decode()
            return {"final_obs": self.finals.read(self.env), **info} if self.kind == FINAL else info
        else:
            if self.kind == FINAL:
                _plain_add_info(
                    vector_env, infos, {"final_obs": self.finals.read(self.env)}, self.row)
            fields = self.schema()
            if fields is None:
                _plain_add_info(vector_env, infos, self.decode(), self.row)
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
            elif column.bind(columns, infos, field, self.num_rows):
                column.flags[self.row] = 1
                if field.dtype is None:
                    column.array[self.row] = self.unpack_value(field)
                else:
                    self.copy(column.data + self.row * column.nbytes, field.nbytes)
            else:
                _plain_add_info(vector_env, infos, {field.key: self.unpack_value(field)}, self.row)
        return 0

    cdef int add_nested(self, Field field, dict infos, object vector_env) except -1:
        # Like `_add_info`: the nested dict first, then its entry and mask in the outer one.
        cdef Column column = <Column>field.column
        inner = infos.get(field.key)
        if inner is None:
            inner = {}
        elif type(inner) is not dict:  # another env has a value of another type here
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
    """The messages of answers that were not taken yet, by env."""

    cdef Segment segment
    cdef const Entry *entries
    cdef Codec observations
    cdef Codec finals
    cdef Columns columns
    cdef list decoders           # by worker
    cdef list env_decoders       # by env: the decoder of its messages, maybe of a dead worker
    cdef MessageBuffer *buffers  # by env: messages that came through a ring
    cdef Py_ssize_t num_envs
    cdef Py_ssize_t num_nonempty  # envs that have messages
    cdef dict late_messages      # env: [(kind, message, maybe pickled)] that came through a channel
    cdef object unpack           # unpickles one of these

    def __cinit__(self, Segment segment, *args):
        self.num_envs = segment.num_envs
        self.buffers = <MessageBuffer *>calloc(self.num_envs, sizeof(MessageBuffer))
        if self.buffers is NULL:
            raise MemoryError

    def __dealloc__(self):
        cdef Py_ssize_t env
        if self.buffers is not NULL:
            for env in range(self.num_envs):
                free(self.buffers[env].start)
            free(self.buffers)

    def __init__(self, Segment segment, slabs, unpack):
        self.segment = segment
        self.observations = slabs.results.observations
        self.finals = slabs.finals
        self.columns = Columns()
        self.decoders = [None] * segment.num_workers
        self.env_decoders = [None] * self.num_envs
        self.late_messages = {}
        self.unpack = unpack

    cdef int renew(self, uint32_t worker) except -1:
        """Begins to read a worker's ring from its start."""
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
                raise decoder.damage_error("is of another env")
            self.store(decoder)
            decoder.release()
            found = True
        if not found:
            raise decoder.damage_error("was announced, and is not there")
        return 0

    cdef int store(self, InfoDecoder decoder) except -1:
        """Appends the message that a decoder is at to its env's messages."""
        cdef MessageBuffer *buffer = &self.buffers[decoder.env]
        cdef MessageHead head
        cdef size_t used
        cdef char *start
        head.kind, head.tag = decoder.kind, decoder.tag
        head.nbytes = <uint32_t>(decoder.end - decoder.start)
        used = buffer.used + sizeof(MessageHead) + head.nbytes
        if used > buffer.size:
            start = <char *>realloc(buffer.start, 2 * used)
            if start is NULL:
                raise MemoryError(f"an info of {head.nbytes} bytes")
            buffer.start, buffer.size = start, 2 * used
        memcpy(buffer.start + buffer.used, &head, sizeof(MessageHead))
        memcpy(buffer.start + buffer.used + sizeof(MessageHead), decoder.start, head.nbytes)
        self.env_decoders[decoder.env] = decoder
        self.num_nonempty += buffer.used == 0
        buffer.used = used
        return 0

    cdef int receive_late(self, dict messages) except -1:
        """Takes {env: [(kind, message)]}, which came through a channel."""
        for env in messages:
            self.num_nonempty += not self.has(env)
        self.late_messages.update(messages)
        return 0

    cdef bint has(self, Py_ssize_t env) except -1:
        return self.buffers[env].used > 0 or (self.late_messages and env in self.late_messages)

    cdef int discard(self, Py_ssize_t env) except -1:
        if self.has(env):
            self.num_nonempty -= 1
            self.buffers[env].used = 0
            self.late_messages.pop(env, None)
        return 0

    # ---- infos of a batch --------------------------------------------------------------------

    cdef list read(self, Py_ssize_t env, dict infos, Py_ssize_t row, Py_ssize_t num_rows,
                   object vector_env):
        """An env's infos, or None; with a vector env, those that were not added to the dict."""
        cdef MessageBuffer *buffer = &self.buffers[env]
        cdef InfoDecoder decoder = self.env_decoders[env]
        cdef MessageHead head
        cdef size_t at = 0
        cdef list left = None
        while at < buffer.used:
            memcpy(&head, buffer.start + at, sizeof(MessageHead))
            at += sizeof(MessageHead)
            decoder.open(env, head.kind, head.tag, buffer.start + at, head.nbytes)
            at += head.nbytes
            decoder.row, decoder.num_rows = row, num_rows
            info = decoder.read(infos, vector_env)
            if info is not None:
                left = left or []
                left.append(info)
        if self.late_messages:
            for kind, message in self.late_messages.get(env, ()):
                info = message if isinstance(message, dict) else self.unpack(message)
                if kind == OBSERVATION:
                    self.observations.write(env, info[""])
                else:
                    left = left or []
                    left.append(info)
        return left

    cdef list read_each(self, const Py_ssize_t *envs, Py_ssize_t count):
        """The infos of these envs: one dict for each, as the env returned it."""
        cdef Py_ssize_t i
        cdef list infos = []
        for i in range(count):
            infos.append(_merge(self.read(envs[i], None, 0, 0, None) or []))
        return infos

    cdef object gather(self, const Py_ssize_t *envs, Py_ssize_t count, bint everyone, dict reports,
                       vector_env):
        """The infos of these envs, with reports of faults, as Gymnasium's dict of arrays.

        Args:
            envs: The envs.
            everyone: Whether there is a row for each env; else for each of `envs`, in their order.
            reports: {env: Report}.
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


cdef object _merge(list infos):
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
# returns results. So an exception at any moment, also from a signal handler, leaves the ledger
# true: envs that were asked are in flight.
#
# A request names neighbouring envs of one worker, which answer together. If all envs are asked,
# there is one request and one completion a worker. Each env has an entry in any case.

cdef tuple NO_ARGUMENTS = (None, None)  # a reset without seed and options


@cython.final
cdef class Ledger:
    """The request to each env, and its answer."""

    cdef readonly Links links
    cdef readonly Frames frames
    cdef Inbox inbox
    cdef object pack                     # pickles a message of what does not fit a ring or a slab
    cdef Codec actions
    cdef Seeds seeds
    cdef Seeds next_seeds                # of automatic resets
    cdef bint has_reset_settings         # something was set for automatic resets
    cdef list reset_settings             # by env: (None or (seed,), options), as they were set
    cdef list published_settings         # by env: those that its worker knows
    cdef list encoders                   # by worker, of actions; None: actions lie in a slab
    cdef bint resets_in_step             # autoreset: by the step that ends an episode
    cdef bint resets_in_next_step        # autoreset: by the step after that
    cdef bint may_step_over              # False: stepping an env that is done is an error
    cdef bint in_ranges                  # one request may always name neighbours
    cdef Py_ssize_t num_envs
    cdef readonly object all_envs        # indices of all envs, an array
    cdef Py_ssize_t[::1] env_indices     # a view of it
    cdef object vector_env_stub          # gathers infos of the envs that are taken
    cdef Entry *entries                  # by env
    cdef uint64_t num_checks             # calls of `check_idle`
    cdef readonly set closed_envs        # envs that were closed for ever
    cdef Py_ssize_t *request_begins      # of the requests among the envs that are asked, and an end
    cdef Py_ssize_t num_requests         # of the call that is under way
    cdef Py_ssize_t oldest_ready         # the begin and the end of the queue of ready envs
    cdef Py_ssize_t newest_ready
    cdef readonly Py_ssize_t num_ready
    cdef readonly Py_ssize_t num_in_flight  # envs that were asked and whose answers were not taken
    cdef uint32_t num_open_requests      # requests without an answer
    cdef uint32_t next_worker            # the worker whose ring is read first
    cdef bint ranges_in_flight           # some requests are for several envs
    cdef list incomplete_answers         # by worker: [(sequence, first env, count)] without message
    cdef Py_ssize_t num_incomplete
    cdef readonly list pending_failures  # what envs have raised, until the policy has decided
    cdef readonly list caller_failures   # what envs have raised, for the caller
    cdef dict command_results            # {env: result of a command}
    cdef list lost_commands              # envs whose command was lost
    cdef dict reports                    # {env: Report of its answer}
    cdef dict next_faults                # {env: (fault that its next answer reports, is it broken)}
    cdef Py_ssize_t num_broken
    cdef readonly object resets          # by env: how often it was asked to reset, int64
    cdef readonly list last_reset_arguments  # by env: (seed, options) of the user's last reset
    cdef readonly list last_seeds        # by env: the last seed that it was given
    cdef public StepLog log              # of what envs are asked and answer; None: there is none
    cdef uint8_t[::1] lost_workers       # by worker: it is dead, and has no successor

    def __cinit__(self, Links links, Frames frames, *args, **kwargs):
        self.num_envs = frames.num_envs
        self.entries = <Entry *>calloc(self.num_envs, sizeof(Entry))
        self.request_begins = <Py_ssize_t *>calloc(self.num_envs + 1, sizeof(Py_ssize_t))
        if self.entries is NULL or self.request_begins is NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.entries)
        free(self.request_begins)

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
        self.env_indices = self.all_envs
        self.vector_env_stub = VectorEnvStub(self.num_envs)
        self.oldest_ready = self.newest_ready = -1
        self.inbox = Inbox(links.segment, slabs, unpack)
        self.inbox.entries = self.entries
        self.actions = slabs.actions
        self.seeds, self.next_seeds = slabs.seeds, slabs.next_seeds
        self.reset_settings = [NO_ARGUMENTS] * self.num_envs
        self.published_settings = [NO_ARGUMENTS] * self.num_envs
        if isinstance(self.actions, MessageCodec):
            self.encoders = [None] * links.num_workers
        self.incomplete_answers = [[] for _ in range(links.num_workers)]
        for worker in range(links.num_workers):
            for env in links.envs_of(worker):
                self.entries[env].worker = worker
            self.renew(worker)
        self.closed_envs = set()
        self.pending_failures = []
        self.caller_failures = []
        self.command_results = {}
        self.lost_commands = []
        self.reports = {}
        self.next_faults = {}
        self.resets = np.zeros(self.num_envs, np.int64)
        self.last_reset_arguments = [NO_ARGUMENTS] * self.num_envs
        self.last_seeds = [None] * self.num_envs
        self.lost_workers = np.zeros(links.num_workers, np.uint8)

    def catch_up(self):
        """Has the log accept the records of all idle envs."""
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
        if self.log is not None:  # answers that have come are not lost with the worker
            for env in links.envs_of(worker):
                if self.entries[env].state in (IDLE, READY):
                    self.log.accept(env)
        if self.encoders is not None:
            self.encoders[worker] = Encoder(
                links.segment, worker, links.first_envs[worker], links.env_counts[worker], False)
        return 0

    # ---- questions ---------------------------------------------------------------------------

    cdef inline Py_ssize_t num_unanswered(self) noexcept:
        return self.num_in_flight - self.num_ready

    @property
    def incomplete_workers(self):
        """Workers whose answers can be taken only after a message that has not come yet."""
        if self.num_incomplete == 0:
            return []
        return [worker for worker, answers in enumerate(self.incomplete_answers) if answers]

    cpdef bint is_free(self, loan):
        """Whether nothing is in flight, abandoned, down, or pending except for this loan."""
        cdef Guard guard = self.links.guard
        return (self.num_in_flight == 0 and not guard.abandoned and not self.links.down
                and guard.pending is loan)

    cdef int check_exists(self, Py_ssize_t env) except -1:
        if not 0 <= env < self.num_envs:
            raise ValueError(f"there is no env {env}: there are {self.num_envs}")

    def is_in_flight(self, Py_ssize_t env):
        self.check_exists(env)
        return self.entries[env].state != IDLE

    def is_over(self, Py_ssize_t env):
        self.check_exists(env)
        return self.frames.is_over(env) or self.is_broken(env)

    cdef inline bint is_broken(self, Py_ssize_t env) except -1:
        """Whether an env's episode was cut by a fault that its next answer reports."""
        return self.num_broken > 0 and env in self.next_faults and self.next_faults[env][1]

    def num_missing(self, const Py_ssize_t[::1] envs):
        """How many requests to these envs have no answer yet, at least: one may be for several."""
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
        self.num_checks += 1
        for i in range(count):
            env = envs[i]
            self.check_exists(env)
            if self.entries[env].state != IDLE:
                raise ValueError(
                    f"env {env} has been asked already: take its results, with recv(), before it "
                    "is asked again. Nothing was sent to any env."
                )
            if self.entries[env].check_number == self.num_checks:
                raise ValueError(f"env {env} is named twice. Nothing was sent to any env.")
            self.entries[env].check_number = self.num_checks
        if self.closed_envs:
            closed = self.closed_envs.intersection([envs[i] for i in range(count)])
            if closed:
                raise ValueError(f"envs {sorted(closed)} have left: they cannot be asked")
        return 0

    cdef int check_none_over(self, const Py_ssize_t[::1] envs) except -1:
        cdef Py_ssize_t i
        cdef list over = [envs[i] for i in range(envs.shape[0]) if self.frames.is_over(envs[i])]
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
            envs: Indices of envs, an array of intp. None: all.
            actions: One for each of them, batched as their space says.
            rollout_frame: The rollout's frame for the results; -1: one in the segment.
            together: Whether one request may name neighbours, which answer together.
        """
        cdef bint everyone = envs is None
        cdef const Py_ssize_t[::1] chosen
        cdef dict late_messages
        cdef dict final_observations = None
        cdef uint32_t worker
        cdef tuple settings = None
        cdef uint32_t base
        if everyone:
            chosen = self.env_indices
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
        # Actions are written before their requests. A call that raises or is interrupted in between
        # has asked for nothing: its actions are overwritten later, or discarded, since no request
        # has their number.
        late_messages = self.write_actions(chosen, actions, base, rollout_frame < 0)
        if self.num_broken > 0 and self.resets_in_step:
            final_observations = self.broken_observations(chosen)
        if self.has_reset_settings:
            settings = self.send_settings(chosen)
        if late_messages:
            for k in late_messages:
                worker = self.entries[chosen[self.request_begins[<Py_ssize_t>k]]].worker
                self.links.channels[worker].put(base + <uint32_t>k, late_messages[k])
            self.links.channels_busy = True
        self.post(STEP, &chosen[0], base,
                  self.frames.set_next_rows(rollout_frame) if everyone else -1,
                  late_messages, final_observations, settings)

    cdef uint32_t prepare(self, uint32_t operation, const Py_ssize_t *envs, Py_ssize_t count,
                          bint everyone, bint together) except? 0:
        """Checks envs and divides them into requests; returns the number of the first of these."""
        cdef Links links = self.links
        cdef uint32_t base = links.sequence + 1
        cdef Py_ssize_t i = 0
        cdef Py_ssize_t k = 0
        links.enter_span(c.SV_TRACE_SEND)
        if not everyone or self.num_in_flight > 0 or self.closed_envs:
            self.check_idle(envs, count)
        links.last_operation = operation
        if self.log is not None:
            self.log.note_request(envs, count)
        while i < count:
            self.request_begins[k] = i
            if everyone and self.num_broken == 0:
                i += links.env_counts[k]
            else:
                i += self.request_size(operation, envs + i, count - i,
                               everyone or together or self.in_ranges)
            k += 1
        self.request_begins[k] = count
        self.num_requests = k
        links.sequence += <uint32_t>k  # these numbers are skipped if a later line raises
        return base

    cdef Py_ssize_t request_size(self, uint32_t operation, const Py_ssize_t *envs, Py_ssize_t limit,
                                 bint may_range) except -1:
        """How many of these envs, the first one and up, one request names.

        A command's request: those of one worker. Another that `may_range`: neighbours of one
        worker. If it may not, one env; but where frames are leased, all envs of a worker if they
        come next, because these must lie side by side in one frame.
        """
        cdef Links links = self.links
        cdef uint32_t worker = self.entries[envs[0]].worker
        cdef Py_ssize_t end = links.first_envs[worker] + links.env_counts[worker]
        cdef Py_ssize_t count = 1
        if operation == COMMAND:
            while count < limit and envs[count] < end:
                count += 1
            return count
        if not (may_range or self.frames.leasing) or self.is_broken(envs[0]):
            return 1
        while (count < limit and envs[count] == envs[0] + count and envs[count] < end
                and not self.is_broken(envs[count])):
            count += 1
        return count if may_range or count == <Py_ssize_t>links.env_counts[worker] else 1

    cdef int choose_frames(self, const Py_ssize_t[::1] envs, Py_ssize_t rollout_frame) except -1:
        """Chooses frames for the results of these envs; raises before anything was sent."""
        cdef Py_ssize_t k
        if rollout_frame < 0:
            self.frames.copy_back_from_rollout(self.num_in_flight)
        elif not self.frames.is_in_rollout():
            raise RuntimeError("the last results are in no rollout. Nothing was sent to any env.")
        if not self.frames.has_several_frames:
            return self.frames.choose(envs, rollout_frame)
        for k in range(self.num_requests):
            self.frames.choose(
                envs[self.request_begins[k]:self.request_begins[k + 1]], rollout_frame)
        return 0

    cdef dict write_actions(self, const Py_ssize_t[::1] envs, actions, uint32_t base,
                            bint any_shape):
        """Writes the envs' actions; returns {request: message of the actions that do not fit}."""
        cdef Py_ssize_t i
        cdef Py_ssize_t k
        cdef list env_actions
        cdef dict rest
        if self.encoders is not None:
            env_actions = (<MessageCodec>self.actions).split(actions, envs.shape[0])
        else:
            try:
                self.actions.write_rows(envs, actions)
                return None
            except OtherShapeError as error:
                if not any_shape or not isinstance(self.actions, ActionCodec):
                    raise
                env_actions = list(error.actions.copy())  # envs may keep their actions
        rest = {}
        for k in range(self.num_requests):
            for i in range(self.request_begins[k], self.request_begins[k + 1]):
                if self.encoders is None or not self.encode(
                        envs[i], env_actions[i], base + <uint32_t>k):
                    rest.setdefault(k, []).append((envs[i], env_actions[i]))
        return {k: self.pack(rest[k]) for k in rest}

    cdef bint encode(self, Py_ssize_t env, action, uint32_t sequence) except -1:
        """Puts an action into its worker's ring; False: it does not fit."""
        cdef Encoder encoder = self.encoders[self.entries[env].worker]
        try:
            return encoder.encode(env, ACTION, {"": action}, sequence)
        except (PicklingError, TypeError, AttributeError) as error:  # what pickle raises
            raise TypeError(
                f"wrong actions: that of env {env} cannot be pickled to send it to its worker "
                f"({error}). Nothing was sent to any env."
            ) from error

    cdef dict broken_observations(self, const Py_ssize_t[::1] envs):
        """{env: last observation} of those of these envs whose episodes are broken."""
        cdef Py_ssize_t i
        cdef dict final_observations = {}
        for i in range(envs.shape[0]):
            if self.is_broken(envs[i]):
                final_observations[envs[i]] = self.frames.last_observation(envs[i], False)
        return final_observations

    def reset(self, const Py_ssize_t[::1] envs, seeds=None, options=None, *, bint together=False,
              bint repeat=True):
        """Asks each of these envs to reset.

        Args:
            envs: Indices of envs.
            seeds: A seed, or None, for each of them. None: none at all.
            options: Likewise.
            together: As for `step`.
            repeat: Whether a reset that is lost is repeated with its seed and options.
        """
        cdef dict late_messages = None
        cdef tuple settings = None
        cdef Py_ssize_t i
        cdef list arguments = None
        cdef bint fit = True
        cdef uint32_t base = self.prepare(RESET, &envs[0], envs.shape[0], False, together)
        if seeds is not None or options is not None:
            arguments = [(None if seeds is None else seeds[i],
                          None if options is None else options[i]) for i in range(envs.shape[0])]
            for each in arguments:
                fit = fit and self.seeds.fits(each)
        self.choose_frames(envs, -1)
        if self.has_reset_settings:
            settings = self.send_settings(envs)
        if not fit:
            late_messages = self.send_arguments(envs, arguments, base)
        self.note_reset(envs, arguments, fit, repeat)
        self.post(RESET, &envs[0], base, -1, late_messages, None, settings)

    cdef dict send_arguments(self, const Py_ssize_t[::1] envs, list arguments, uint32_t base):
        """Sends (seed, options) of resets, one message a worker; returns {its request: message}."""
        cdef dict late_messages = {}
        cdef dict first_requests = {}  # worker: (its first request, the message)
        cdef Py_ssize_t i
        cdef Py_ssize_t k
        for k in range(self.num_requests):
            for i in range(self.request_begins[k], self.request_begins[k + 1]):
                first_requests.setdefault(self.entries[envs[i]].worker, (k, []))[1].append(
                    (envs[i], arguments[i]))
        for worker, (k, message) in first_requests.items():
            late_messages[k] = self.pack(message)
            self.links.channels[worker].put(base + <uint32_t>k, late_messages[k])
        self.links.channels_busy = True
        return late_messages

    cdef int note_reset(self, const Py_ssize_t[::1] envs, list arguments, bint in_slab,
                        bint repeat) except -1:
        """Notes the (seed, options) of the envs' resets, so that a lost reset can be repeated.

        It is part of a commit, and uses only the ledger's own memory and the slab.
        """
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        cdef tuple env_arguments = NO_ARGUMENTS
        for i in range(envs.shape[0]):
            env = envs[i]
            if arguments is not None:
                env_arguments = <tuple>arguments[i]
            self.resets[env] += 1
            self.last_reset_arguments[env] = env_arguments if repeat else NO_ARGUMENTS
            if env_arguments[0] is not None:
                self.last_seeds[env] = env_arguments[0]
            self.seeds.put(env, env_arguments if in_slab else None)
        return 0

    def command(self, const Py_ssize_t[::1] envs, dict messages, descriptors=()):
        """Asks the workers of these envs to carry out a command.

        Args:
            envs: Indices of envs, ascending.
            messages: {worker of these envs: pickled message}.
            descriptors: Descriptors that are sent with each message.
        """
        cdef uint32_t base = self.prepare(COMMAND, &envs[0], envs.shape[0], False, False)
        cdef Py_ssize_t k
        cdef uint32_t worker
        for k in range(self.num_requests):  # first: a message without a request is discarded
            worker = self.entries[envs[self.request_begins[k]]].worker
            self.links.channels[worker].put(base + <uint32_t>k, messages[worker], descriptors)
        self.links.channels_busy = True
        self.post(COMMAND, &envs[0], base, -1, None, None, None)

    # ---- settings of automatic resets ----------------------------------------------------------
    #
    # An env's worker is told of its settings with the env's next step or reset: of the seed by a
    # slab, of the rest by a message that comes before the request. An env's settings are one
    # object, which is compared with the one last published. So another thread may set them at any
    # time.

    @cython.critical_section
    def set_automatic(self, list envs, list seeds=None, list options=None):
        """Sets the seed (or None), or the options, of each of these envs; None: leaves them."""
        for i, env in enumerate(envs):
            seed, env_options = self.reset_settings[env]
            if seeds is not None:
                seed = None if seeds[i] is None else (seeds[i],)
            if options is not None:
                env_options = options[i]
            self.reset_settings[env] = seed, env_options
        self.has_reset_settings = True

    cdef tuple message_part(self, tuple settings):
        """The part of settings that needs a message: a seed that does not fit the slab; options."""
        seed, options = settings
        return None if seed is None or self.next_seeds.fits((seed[0], None)) else seed[0], options

    cdef tuple send_settings(self, const Py_ssize_t[::1] envs):
        """Sends the settings of these envs that are new.

        Returns:
            [(env, settings, arguments for the slab)] and {worker: number of its message}; None:
            nothing is new.
        """
        cdef list changes = []
        cdef dict messages = {}
        cdef dict numbers = {}
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        for i in range(envs.shape[0]):
            env = envs[i]
            self.next_seeds.remove_used(env)
            settings, published = self.reset_settings[env], self.published_settings[env]
            if settings is published:
                continue
            seed, options = message = self.message_part(settings)
            if seed is not None or options is not published[1]:
                messages.setdefault(self.entries[env].worker, []).append((env, message))
            in_slab = NO_ARGUMENTS if settings[0] is None else (settings[0][0], None)
            changes.append((env, settings, in_slab if seed is None else None))
        if not changes:
            return None
        for worker, message in messages.items():
            self.links.sequence += 1
            self.links.channels[worker].put(self.links.sequence, self.pack(message))
            self.links.channels_busy = True
            numbers[worker] = self.links.sequence
        return changes, numbers

    cdef int publish_settings(self, list changes, dict numbers) except -1:
        # Part of a commit: writes seeds, and tells workers of their messages.
        cdef Py_ssize_t env
        cdef tuple settings
        for env, settings, in_slab in changes:
            if settings[0] is not (<tuple>self.published_settings[env])[0]:
                self.next_seeds.put(env, in_slab)
            self.published_settings[env] = settings
        for worker in numbers:
            self.links.announce_message(worker, SETTINGS, numbers[worker])
        return 0

    def settings_of(self, uint32_t worker):
        """The settings that a worker was told by messages, for its successor."""
        cdef Py_ssize_t env
        return [(env, self.message_part(self.published_settings[env]))
                for env in self.links.envs_of(worker)
                if self.published_settings[env] is not NO_ARGUMENTS]

    # ---- requests ----------------------------------------------------------------------------

    cdef int post(self, uint32_t operation, const Py_ssize_t *envs, uint32_t base,
                  Py_ssize_t frame, dict late_messages, dict final_observations,
                  tuple settings) except -1:
        """Commits the requests that were prepared, and rings the bell.

        Args:
            operation: What envs are asked.
            envs: The envs.
            base: The number of the first request.
            frame: The frame for all results, already set; -1: the one chosen for each env.
            late_messages: {request: message that is on a channel}, or None.
            final_observations: {env with a broken episode: its last observation}, or None.
            settings: What `send_settings` has returned.
        """
        cdef Links links = self.links
        cdef Py_ssize_t i
        cdef Py_ssize_t k
        cdef Py_ssize_t first
        cdef Py_ssize_t count
        cdef Py_ssize_t request_frame
        cdef uint32_t worker
        cdef uint32_t flags = operation
        cdef uint32_t mask = self.mask_of(envs, self.request_begins[self.num_requests])
        cdef list broken = None
        links.guard.note_request()
        if settings is not None:
            self.publish_settings(settings[0], settings[1])
        if frame >= 0 and links.lingering and self.num_broken == 0:
            flags |= LINGER
            c.sv_completion_issue(links.completion, links.issued + <uint32_t>self.num_requests)
        if frame < 0:
            self.frames.unlent_block = -1
        for k in range(self.num_requests):
            first = envs[self.request_begins[k]]
            count = self.request_begins[k + 1] - self.request_begins[k]
            worker = self.entries[first].worker
            if frame < 0 and operation != COMMAND:
                for i in range(self.request_begins[k], self.request_begins[k + 1]):
                    self.frames.set_next_row(envs[i], self.frames.next_frames[envs[i]])
            if operation == STEP and self.is_broken(first):  # it is not asked
                broken = broken or []
                broken.append(first)
            else:
                request_frame = frame
                if frame < 0:
                    request_frame = 0 if operation == COMMAND else self.frames.frame_of(first)
                if operation == COMMAND:
                    first, count = links.first_envs[worker], links.env_counts[worker]
                links.request(
                    worker, base + <uint32_t>k,
                    flags | (LATE if late_messages and k in late_messages else 0),
                    <uint32_t>first, <uint32_t>count, request_frame)
                self.num_open_requests += 1
                self.ranges_in_flight |= count > 1
            for i in range(self.request_begins[k], self.request_begins[k + 1]):
                self.mark_asked(envs[i], operation, base + <uint32_t>k)
            self.num_in_flight += self.request_begins[k + 1] - self.request_begins[k]
        if self.next_faults and operation != COMMAND:
            self.report_earlier_faults(envs, self.request_begins[self.num_requests])
        if broken is not None:  # last, because their requests have later numbers
            mask = c.SV_EVERYONE
            for env in broken:
                self.answer_by_truncation(env, self.reports[env].fault, final_observations)
        return links.ring(mask)

    cdef uint32_t mask_of(self, const Py_ssize_t *envs, Py_ssize_t count) noexcept:
        """The bits of the workers to wake for these envs: all, if these are half of the workers."""
        cdef Py_ssize_t i
        cdef uint32_t mask = 0
        if 2 * count > <Py_ssize_t>self.links.num_workers:
            return c.SV_EVERYONE
        for i in range(count):
            mask |= c.sv_bell_mask(self.entries[envs[i]].worker)
        return mask

    cdef inline void mark_asked(self, Py_ssize_t env, uint32_t operation,
                                uint32_t sequence) noexcept:
        cdef Entry *entry = &self.entries[env]
        entry.sequence = sequence
        entry.state = IN_FLIGHT
        entry.operation = operation
        entry.is_user_reset = operation == RESET

    cdef int report_earlier_faults(self, const Py_ssize_t *envs, Py_ssize_t count) except -1:
        """Has the answers of these envs report the faults that came before their requests."""
        cdef Py_ssize_t i
        for i in range(count):
            if envs[i] in self.next_faults:
                fault, breaks = self.next_faults.pop(envs[i])
                self.num_broken -= breaks
                self.reports[envs[i]] = make_report(fault, False, None)
        return 0

    cdef inline int mark_idle(self, Py_ssize_t env) except -1:
        self.entries[env].state = IDLE
        self.num_in_flight -= 1
        return self.inbox.discard(env) if self.inbox.num_nonempty > 0 else 0

    # ---- the queue of ready envs ---------------------------------------------------------------

    cdef inline int make_ready(self, Py_ssize_t env) noexcept:
        cdef Entry *entry = &self.entries[env]
        entry.state = READY
        entry.previous_ready, entry.next_ready = self.newest_ready, -1
        if self.newest_ready < 0:
            self.oldest_ready = env
        else:
            self.entries[self.newest_ready].next_ready = env
        self.newest_ready = env
        self.num_ready += 1
        return 0

    cdef int take_ready(self, Py_ssize_t env) except -1:
        """Takes an env out of the queue; it is idle then."""
        cdef Entry *entry = &self.entries[env]
        if entry.previous_ready < 0:
            self.oldest_ready = entry.next_ready
        else:
            self.entries[entry.previous_ready].next_ready = entry.next_ready
        if entry.next_ready < 0:
            self.newest_ready = entry.previous_ready
        else:
            self.entries[entry.next_ready].previous_ready = entry.previous_ready
        self.num_ready -= 1
        return self.mark_idle(env)

    cdef object ready_envs(self, envs, Py_ssize_t count):
        """The ready ones of these envs; None: the `count` oldest ones, or with -1 all, by index."""
        cdef Py_ssize_t i = 0
        cdef Py_ssize_t env
        cdef object indices
        cdef Py_ssize_t *index_at
        if envs is not None:
            return np.array([env for env in envs if self.entries[env].state == READY], np.intp)
        if count < 0 and self.num_ready == self.num_envs:
            return self.all_envs
        indices = np.empty(self.num_ready if count < 0 else min(count, self.num_ready), np.intp)
        index_at = <Py_ssize_t *>data_of(indices)
        if count < 0:
            for env in range(self.num_envs):
                if self.entries[env].state == READY:
                    index_at[i] = env
                    i += 1
            return indices
        env = self.oldest_ready
        for i in range(size_of(indices)):
            index_at[i] = env
            env = self.entries[env].next_ready
        return indices

    # ---- waiting -----------------------------------------------------------------------------

    cpdef int wait(self, Py_ssize_t wanted, envs, deadline) except -1:
        """Waits until enough envs are ready, or these have answered, or for another event.

        Args:
            wanted: How many envs must be ready, unless one has raised; -1: all that are in flight.
            envs: Envs that must have answered, in place of `wanted`; or None. With WORKERS_UP: envs
                whose workers must not be down.
            deadline: The end of the wait, in seconds by the monotonic clock. None: there is none.

        Returns:
            The event that ends the wait. Another call goes on with the wait.
        """
        cdef Links links = self.links
        cdef Py_ssize_t missing
        cdef int64_t deadline_ns = -1  # no deadline; also if its nanoseconds do not fit
        if deadline is not None and deadline < MAX_DEADLINE_S:
            deadline_ns = <int64_t>(deadline * 1e9)
        if links.inline_server is not None and self.num_unanswered() > 0:
            # First: else the caller would step its envs only where the other workers' are not
            # enough.
            links.serve_inline()
        cdef int event = NO_EVENT
        if self.num_in_flight or links.down:  # here: a wait whose time is up does not look around
            event = links.look_if_due()
        # Answers may be there already, and to see them costs less than to wait.
        if wanted >= 0 or links.inline_server is not None:
            self.pop()
        while event == NO_EVENT or event == DONE:
            if self.pending_failures:
                return RAISED
            if self.num_incomplete > 0:
                event = self.wait_for_message(deadline_ns)
            else:
                missing = self.num_wanted(wanted, envs)
                if missing <= 0:
                    return DONE
                if self.num_open_requests == 0 and links.down:
                    event = links.listen(list(links.down), deadline_ns)
                else:
                    event = self.wait_for_answers(missing, deadline_ns, envs is not None)
            self.pop()  # also if the time is up
        return event

    # ---- waking an event loop ----------------------------------------------------------------

    cpdef int poll(self, bint woken) except -1:
        """The event to handle, without a wait; DONE and TIME_UP: there is none.

        Args:
            woken: Whether something has happened, so that it must look around at once.
        """
        cdef Links links = self.links
        cdef int event = NO_EVENT
        if woken or links.down or links.is_due():
            event = links.look_around()
        return self.wait(0, None, 0.0) if event == NO_EVENT else event

    def arm(self):
        """Has the next answer wake this process by the descriptor that its workers have.

        Returns:
            Seconds after which to look around if nothing wakes it; 0: there is an answer; None: it
            need not look.
        """
        cdef Links links = self.links
        # This reads the count, and then the rings: an answer that is not in the rings is counted
        # later. If a worker has died in between, the count is one too low until this is done again.
        links.resync_count()
        if (links.num_processes > 0 and not c.sv_completion_arm(
                links.completion, links.issued - self.num_open_requests + 1)):
            return 0.0
        return links.look_timeout(self.num_in_flight > 0)

    cdef Py_ssize_t num_wanted(self, Py_ssize_t wanted, envs) except? -1:
        """How many envs, or requests, a wait still lacks."""
        if wanted == WORKERS_UP:
            return self.num_down(envs)
        if envs is not None:
            return self.num_missing(envs)
        if wanted < 0:
            return self.num_unanswered()
        return 0 if self.caller_failures else wanted - self.num_ready

    cdef int wait_for_answers(self, Py_ssize_t wanted, int64_t deadline, bint requests) except -1:
        """Waits until ``wanted`` more envs, or requests, may be answered."""
        cdef Links links = self.links
        cdef uint32_t done = links.issued - self.num_open_requests
        cdef c.sv_budget usual = links.waiter.budget
        if self.num_open_requests == 0:  # no answer would ever come
            raise RuntimeError("the segment is damaged: answers are lost")
        if wanted >= self.num_unanswered():  # the fast path: all that are in flight
            return links.wait_for(links.issued, deadline)
        if self.ranges_in_flight and not requests:  # one answer may be for many envs
            wanted = 1
        if usual.pause == 0:
            # This wait must not yield. A worker to which a core is yielded keeps it until it has
            # answered all its requests; a sleeper that is woken takes the core back at once
            # (uneven envs: 1.6 -> 1.8 times lockstep).
            links.waiter.budget.yield_ = links.waiter.budget.linger = 0
        try:
            return links.wait_for(
                done + <uint32_t>min(wanted, <Py_ssize_t>self.num_open_requests), deadline)
        finally:
            links.waiter.budget = usual

    cdef int wait_for_message(self, int64_t deadline) except -1:
        """Waits for a message without which an answer cannot be taken."""
        cdef Links links = self.links
        cdef list incomplete = self.incomplete_workers
        for worker in incomplete:
            if links.channels[worker].find(self.sequence_awaited(worker)) is not None:
                return MESSAGE
            if links.workers.is_inline(worker):  # it has sent all of its messages
                raise RuntimeError("the segment is damaged: the message of an answer is lost")
        return links.listen(incomplete, deadline)

    # ---- answers -----------------------------------------------------------------------------

    cdef int pop(self) except -1:
        """Takes the answers off the rings."""
        cdef Links links = self.links
        cdef c.sv_record answer
        cdef uint32_t i
        cdef uint32_t worker
        links.enter_span(c.SV_TRACE_TAKE)
        for i in range(links.num_workers):
            worker = (self.next_worker + i) % links.num_workers
            while links.pop_answer(worker, &answer):
                self.record_answer(worker, &answer)
        self.next_worker = (self.next_worker + 1) % links.num_workers
        if self.num_open_requests == 0:
            self.ranges_in_flight = False
        return links.update_budgets_if_due()

    cdef int record_answer(self, uint32_t worker, const c.sv_record *answer) except -1:
        """Its envs become ready, unless a message is still to come."""
        cdef uint32_t env
        for env in range(answer.first, answer.first + answer.count):
            if self.is_asked_with(env, answer.sequence):
                break
        else:
            raise RuntimeError(
                f"the segment is damaged: worker {worker} has answered what was not asked")
        try:
            if answer.operation & MESSAGES:
                self.inbox.receive(worker, answer)
        finally:  # so a damaged message raises only once
            self.num_open_requests -= 1
            if answer.operation & LATE:
                self.incomplete_answers[worker].append(
                    (answer.sequence, answer.first, answer.count))
                self.num_incomplete += 1
            else:
                for env in range(answer.first, answer.first + answer.count):
                    if self.is_asked_with(env, answer.sequence):
                        self.make_ready(env)
        return 0

    cdef inline bint is_asked_with(self, uint32_t env, uint32_t sequence) noexcept:
        return self.entries[env].state == IN_FLIGHT and self.entries[env].sequence == sequence

    def sequence_awaited(self, uint32_t worker):
        """The number of the request whose message a worker must send next."""
        return self.incomplete_answers[worker][0][0]

    def deliver(self, uint32_t worker, list messages, list failures, results):
        """Takes a worker's next message: [(kind, env, message)], failures, results or None."""
        cdef Py_ssize_t env
        cdef dict late_messages = {}
        sequence, first, count = self.incomplete_answers[worker][0]
        for kind, env, message in messages:
            if 0 <= env < self.num_envs and self.is_asked_with(<uint32_t>env, sequence):
                late_messages.setdefault(env, []).append((kind, message))
        failed = {failure.env for failure in failures}
        # The commit.
        del self.incomplete_answers[worker][0]
        self.num_incomplete -= 1
        self.inbox.receive_late(late_messages)
        for env in range(first, first + count):
            if self.is_asked_with(<uint32_t>env, sequence):
                if env in failed:
                    self.lose_answer(env, FAILED)
                else:
                    if results is not None:
                        self.command_results[env] = results[env - first]
                    self.make_ready(env)
        self.pending_failures += failures

    # ---- faults ------------------------------------------------------------------------------

    cdef int lose_answer(self, Py_ssize_t env, uint32_t state) except -1:
        """Notes that an env in flight has FAILED, or is LOST."""
        self.entries[env].state = state
        if self.entries[env].operation != COMMAND:
            self.next_seeds.unmark_used(env)
        self.frames.unlent_block = -1  # the env's row there was not written
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
               and links.is_answer_of(worker, &answer)):
            links.outstanding[worker] -= 1
            self.record_answer(worker, &answer)
        # The commit.
        self.num_incomplete -= len(self.incomplete_answers[worker])
        self.incomplete_answers[worker].clear()
        for env in links.envs_of(worker):
            if self.entries[env].state == IN_FLIGHT:
                self.lose_answer(env, LOST)
        self.num_open_requests -= links.outstanding[worker]
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
        for env in links.envs_of(worker):
            if self.entries[env].state == LOST or self.entries[env].state == FAILED:
                self.mark_idle(env)

    def lost_resets(self, uint32_t worker):
        """Envs of a dead worker that were lost, or have raised, in a reset by the user."""
        cdef Py_ssize_t env
        return [env for env in self.links.envs_of(worker)
                if self.entries[env].state in (LOST, FAILED) and self.entries[env].is_user_reset]

    def revive(self, uint32_t worker, fault):
        """Notes that a worker has a successor, and repeats or answers what was lost."""
        cdef Links links = self.links
        cdef Py_ssize_t env
        cdef object envs = links.envs_of(worker)
        cdef dict final_observations = {env: self.lost_observation(env) for env in envs}
        # The commit.
        self.lost_workers[worker] = False
        del links.down[worker]
        for env in envs:
            if self.entries[env].state == LOST or self.entries[env].state == FAILED:
                self.answer_lost(env, fault, final_observations)
            else:
                self.report_later(env, fault)
        links.ring(c.SV_EVERYONE)

    cdef object lost_observation(self, Py_ssize_t env):
        """The final observation of an episode that ends because its env's step is lost; or None."""
        if self.resets_in_step and self.entries[env].operation == STEP and (
                self.entries[env].state == LOST or self.entries[env].state == FAILED):
            return self.frames.last_observation(env, True)
        return None

    def has_failed(self, Py_ssize_t env):
        """Whether an env has raised, and was neither answered for nor taken."""
        return self.entries[env].state == FAILED

    def answer_failed(self, failure, fault):
        """Answers in place of an env that has raised."""
        cdef dict final_observations = {failure.env: self.lost_observation(failure.env)}
        self.answer_lost(failure.env, fault, final_observations)
        self.remove_failure(failure)
        self.links.ring(c.SV_EVERYONE)

    def remove_failure(self, failure):
        """Removes a failure from the pending ones."""
        self.pending_failures = [each for each in self.pending_failures if each is not failure]

    def leave_to_caller(self, failure):
        """Leaves an env's exception to the caller."""
        if self.entries[failure.env].state == FAILED:
            self.mark_idle(failure.env)
        self.caller_failures.append(failure)
        self.remove_failure(failure)

    cdef int answer_lost(self, Py_ssize_t env, fault, dict final_observations) except -1:
        report = self.reports.get(env)
        cdef uint32_t operation = self.entries[env].operation
        if operation == COMMAND:
            self.mark_idle(env)
            self.lost_commands.append(env)
            return self.report_later(env, fault)
        if operation == STEP and not (self.resets_in_next_step and self.frames.was_over(env)):
            return self.answer_by_truncation(env, fault, final_observations)
        # The reset itself may answer for an earlier fault.
        self.reports[env] = (make_report(fault, False, None) if report is None
                             else make_report(fault, report.cut_off, report.last))
        return self.ask_reset_instead(env)

    cdef int report_later(self, Py_ssize_t env, fault) except -1:
        """Has the env's next answer report a fault: as a truncation, unless it answers a reset."""
        cdef bint breaks = not self.frames.is_over(env) or self.resets_in_step or (
            self.may_step_over and not self.resets_in_next_step)
        if env in self.next_faults:
            self.num_broken -= self.next_faults[env][1]
        self.next_faults[env] = fault, breaks
        self.num_broken += breaks
        return 0

    cdef int answer_by_truncation(self, Py_ssize_t env, fault, dict final_observations) except -1:
        """Answers in place of an env with a truncation; the env is then reset as its mode says."""
        self.frames.truncate(env)
        if self.resets_in_step:
            self.reports[env] = make_report(fault, True, [final_observations[env]])
            self.entries[env].is_user_reset = False
            return self.ask_reset_instead(env)
        self.reports[env] = make_report(fault, True, None)
        return self.make_ready(env)

    cdef int ask_reset_instead(self, Py_ssize_t env) except -1:
        """Asks an env to reset in place of its request. The caller rings the bell."""
        cdef Links links = self.links
        cdef Entry *entry = &self.entries[env]
        links.sequence += 1
        self.seeds.put(env, NO_ARGUMENTS)  # the worker knows those of the lost reset
        if not entry.is_user_reset:
            self.seeds.mark_automatic(env)
        links.request(entry.worker, links.sequence, RESET, <uint32_t>env, 1,
                      self.frames.frame_of(env))
        self.num_open_requests += 1
        entry.sequence = links.sequence
        entry.operation = RESET
        entry.state = IN_FLIGHT
        self.frames.unlent_block = -1
        return 0

    def discard(self):
        """Discards all answers, which have all come; the next answers report their faults."""
        while self.oldest_ready >= 0:
            self.take_ready(self.oldest_ready)
        self.frames.unlent_block = -1
        self.postpone_reports(list(self.reports))
        self.command_results.clear()
        self.lost_commands.clear()
        self.caller_failures.clear()

    cdef int postpone_reports(self, list envs) except -1:
        """Has the next answers of these envs report the faults of the discarded answers."""
        for env in envs:
            report = self.reports.pop(env, None)
            if report is not None and env not in self.next_faults:
                self.next_faults[env] = report.fault, report.cut_off
                self.num_broken += report.cut_off
        return 0

    # ---- taking ------------------------------------------------------------------------------

    cpdef tuple take(self, envs=None, Py_ssize_t count=-1, vector_env=None, bint everyone=False,
                     bint arrays=True):
        """Takes answers, whose envs are idle afterwards.

        An exception while results are read loses these results, and what other envs have raised:
        the envs are idle, and their next answers report their faults.

        Args:
            envs: The envs to take, in this order; those that have raised or lost their command are
                left out. None: all that are ready, by index.
            count: In place of `envs`: take so many, those first that have been ready for longest;
                none if an env has raised. -1: all.
            vector_env: Gathers the infos; True: as any would. None: one dict an env.
            everyone: Whether the results have a row for each env; else for each env that is taken.
            arrays: Whether arrays are wanted at all.

        Returns:
            The envs; their results, which are four arrays and infos; and None, or a tuple: {env:
            Report}, failures (of `envs`, or all), {env: parcel with a command's result}, and envs
            whose command was lost.
        """
        cdef object chosen = self.ready_envs(
            envs, 0 if count >= 0 and self.caller_failures else count)
        cdef const Py_ssize_t *view = <const Py_ssize_t *>data_of(chosen)
        cdef Py_ssize_t num_taken = size_of(chosen)
        cdef list failures = self.caller_failures
        cdef dict reports
        cdef dict values
        cdef object rest = None
        if failures and envs is not None:
            failures = [each for each in failures if each.env in envs]
        try:
            results = self.collect_results(chosen, vector_env, everyone, arrays)
        except BaseException:
            self.postpone_reports(chosen.tolist())
            self.commit(view, num_taken, failures)
            raise
        if failures or self.reports or self.command_results or self.lost_commands:
            taken = chosen.tolist()
            reports = {env: self.reports[env] for env in taken if env in self.reports}
            values = {
                env: self.command_results[env] for env in taken if env in self.command_results}
            rest = reports, failures, values, self.lost_commands
        self.commit(view, num_taken, failures)
        return chosen, results, rest

    def step_and_take(self, exchange, actions, vector_env, envs, Py_ssize_t rollout_frame,
                      bint is_last, bint arrays, during_step, loan):
        """Steps a batch: `step`, `wait` and `take` in one call, under the guard.

        Args:
            exchange: Its `settle` waits for an abandoned call; its `handle` handles events; its
                `end_step` does what few steps need.
            actions: As for `step`.
            vector_env: As for `take`.
            envs: As for `step`.
            rollout_frame: Likewise.
            is_last: Whether it is the rollout's last frame.
            arrays: As for `take`.
            during_step: Called while the envs step.
            loan: The loan under which this call is made.
        """
        cdef Guard guard = self.links.guard
        cdef int event
        guard.enter_round_trip()
        try:
            if not self.is_free(loan):
                exchange.settle("step_async", envs, loan)
            self.step(envs, actions, rollout_frame)
            if during_step is not None:
                during_step()
            event = self.wait(-1, None, None)
            while event != DONE:
                exchange.handle(event)
                event = self.wait(-1, None, None)
            _, results, rest = self.take(None, -1, vector_env, True, arrays)
            if is_last or rest is not None or exchange.recycles:
                exchange.end_step(rest, is_last)
            return results
        except BaseException:
            guard.abandon_round_trip()
            raise
        finally:
            guard.leave()

    cdef tuple collect_results(self, object chosen, vector_env, bint everyone, bint arrays):
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
            infos = self.inbox.read_each(envs, count)
        elif self.reports or self.inbox.num_nonempty > 0:
            if vector_env is True or not everyone:
                self.vector_env_stub.num_envs = self.num_envs if everyone else count
                vector_env = self.vector_env_stub
            infos = self.inbox.gather(envs, count, everyone, self.reports, vector_env)
        else:
            infos = {}
        # After the infos: observations that are messages come with them.
        if not arrays:
            self.frames.note_batch(None)
            return None, None, None, None, infos
        if everyone:
            return self.frames.results_of_all(infos)
        return self.frames.results_of(chosen, infos)

    cdef int commit(self, const Py_ssize_t *envs, Py_ssize_t count, list failures) except -1:
        """Marks these envs and failures as taken."""
        cdef Py_ssize_t i
        self.links.guard.untaken = False
        self.links.enter_span(c.SV_TRACE_CALLER)
        if failures:
            taken = {id(failure) for failure in failures}
            self.caller_failures = [
                failure for failure in self.caller_failures if id(failure) not in taken]
        for i in range(count):
            if self.entries[envs[i]].state == READY:  # an env may be named twice
                self.take_ready(envs[i])
        if self.reports or self.command_results:
            for i in range(count):
                self.reports.pop(envs[i], None)
                self.command_results.pop(envs[i], None)
        if self.lost_commands:
            self.lost_commands = []
        return 0

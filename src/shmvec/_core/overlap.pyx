"""A worker's loop where several of its envs are in ``step`` or ``reset`` at once.

The envs run elsewhere: in a thread each, or as coroutines. This loop takes requests, has envs begin
(``executor.start``), and notes which have come to their end (``finish``). When all envs of a request
have, it goes through the request as any worker does (``WorkerLoop``), over replays: objects whose
``step`` and ``reset`` return at once what the envs have returned, or raise what they have raised. So
results, their order and their errors are those of a worker that steps its envs one by one, and the
loop alone writes to rings and slabs. Requests are answered in the order in which they come to their
end. In place of ``command`` the host has ``received(sequence) -> (reset arguments or None, call)``
and ``results_of(call, outcome of an env)``.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmvec._core.csrc cimport (
    SV_FAULT,
    SV_IN_CALL,
    SV_IN_RESET,
    SV_IN_SEVERAL,
    SV_IN_STEP,
    SV_TRACE_RESET,
    SV_TRACE_STEP,
    sv_activity,
    sv_bell_awake,
    sv_bell_doze,
    sv_busy,
    sv_busy_begin,
    sv_counter_set,
    sv_now_ns,
    sv_record,
    sv_ring_announce,
    sv_ring_peek,
    sv_timing_add,
    sv_trace_add,
)
from shmvec._core.protocol cimport CLOSE, COMMAND, OPERATION, RESET, STEP, TRACE
from shmvec._core.worker cimport WorkerLoop

cdef dict DOING = {"step": SV_IN_STEP, "reset": SV_IN_RESET, "call": SV_IN_CALL}


cdef class Request:
    """A request that is not answered yet."""

    cdef sv_record record
    cdef Py_ssize_t pending    # envs that have not come to their end
    cdef dict given            # of a step: as in WorkerLoop
    cdef dict undecodable
    cdef object seeds          # of a reset
    cdef object options
    cdef object mask
    cdef object call           # a command for each env; else None
    cdef list outcomes         # of that, by env: (value, error), or None


cdef class OverlappedLoop(WorkerLoop):
    """Serves the envs ``first_env`` and up, several at once.  One instance a worker process."""

    cdef object executor
    cdef list requests_of          # by env: the Request that it is busy with, or None
    cdef sv_activity unpublished   # the activity of replays
    cdef Request closing           # the request to close
    cdef readonly Py_ssize_t in_progress  # envs that are busy
    cdef int64_t counted_from      # since when they are and it is not counted yet
    cdef int64_t in_step           # of that, the sum of all envs' steps; and of their resets
    cdef int64_t in_reset

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.requests_of = [None] * len(self.envs)
        self.activity = &self.unpublished
        self.alone = True
        sv_counter_set(&self.counters.overlaps, 1)
        for i in range(len(self.envs)):  # a predecessor may have died in an env
            sv_busy_begin(&self.timings[i].activity, 0, 0)

    def execute_by(self, executor):
        """Takes the executor: ``start(i, "step", action)``, or "reset" and the arguments, or "call"
        and the command, has env i of the worker begin it."""
        self.executor = executor

    # ---- called by the executor --------------------------------------------------------------

    def sleep(self):
        """Announces that this worker sleeps on its alarm; False: first it has to serve requests."""
        sv_bell_doze(self.bell)
        return sv_ring_peek(&self.requests) == 0

    def awake(self):
        """Ends what `sleep` has announced, whatever that returned."""
        sv_bell_awake(self.bell)
        sv_ring_announce(&self.completions)  # the parent may wait because of a damaged tail

    def begin(self, Py_ssize_t i, str doing, int64_t since):
        """Publishes what env i does since when, by the monotonic clock."""
        sv_busy_begin(&self.timings[i].activity, sv_busy(self.first_env + i, DOING[doing]), since)

    def end(self, Py_ssize_t i):
        """Publishes that env i is done."""
        sv_busy_begin(&self.timings[i].activity, 0, 0)

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
        request.pending -= 1
        if request.pending == 0:
            self.close_request(request)
        if self.in_progress == 0:
            sv_busy_begin(&self.counters.activity, 0, 0)

    def close(self):
        """Answers the request to close; all other requests are answered."""
        self.answer(&self.closing.record, None)

    # ---- requests ----------------------------------------------------------------------------

    cdef bint execute(self, sv_record *record) except -1:
        """Has the envs of a request begin; False after CLOSE."""
        cdef Py_ssize_t i
        cdef Py_ssize_t begin = self.first_of(record)
        cdef Py_ssize_t end = begin + record.count
        cdef uint32_t operation = record.operation & OPERATION
        cdef Request request = Request()
        SV_FAULT(1)
        if operation == TRACE:
            self.host.trace(record.sequence)
            return True
        request.record = record[0]
        if operation == CLOSE:
            self.closing = request
            return False
        self.sequence = record.sequence
        if operation == STEP:
            self.take_actions(record)
            request.given, request.undecodable = dict(self.given), dict(self.undecodable)
        elif operation == COMMAND:
            if self.in_progress == 0:
                sv_busy_begin(&self.counters.activity, sv_busy(self.first_env, SV_IN_CALL),
                              sv_now_ns())
            arguments, request.call = self.host.received(record.sequence)
            if arguments is not None:
                request.seeds, request.options, request.mask = arguments
            else:
                request.outcomes = [None] * len(self.envs)
        elif operation != RESET:
            raise RuntimeError(f"the segment is damaged: operation {operation}")
        request.pending = 1  # until all have begun
        for i in range(begin, end):
            if request.call is not None:
                if request.call.is_for(self.first_env + i):
                    self.start(i, request, "call", request.call)
            elif request.mask is not None and not request.mask[i]:
                continue
            elif operation != STEP:
                self.start_reset(i, request, True)
            elif self.first_env + i in request.undecodable and not self.over[i]:
                pass  # its replay is not asked
            elif self.over[i]:
                self.start_reset(i, request, False)
            else:
                self.start(i, request, "step", self.action_of(self.first_env + i))
        request.pending -= 1
        if request.pending == 0:
            self.close_request(request)
        if self.in_progress == 0:
            sv_busy_begin(&self.counters.activity, 0, 0)
        return True

    cdef int start_reset(self, Py_ssize_t i, Request request, bint explicit) except -1:
        seed, options, explicit = self.reset_arguments(
            i, None if request.seeds is None else request.seeds[i],
            None if request.options is None else request.options[i], explicit)
        self.start(i, request, "reset", {"seed": seed, "options": options} if explicit else {})
        return 0

    cdef int start(self, Py_ssize_t i, Request request, str what, argument) except -1:
        if self.requests_of[i] is not None:
            raise RuntimeError("the segment is damaged: a request names an env that is busy")
        self.requests_of[i] = request
        request.pending += 1
        if self.in_progress == 0:
            self.counted_from = sv_now_ns()
            sv_busy_begin(&self.counters.activity, sv_busy(self.first_env, SV_IN_SEVERAL),
                          self.counted_from)
        self.in_progress += 1
        self.executor.start(i, what, argument)
        return 0

    cdef int close_request(self, Request request) except -1:
        """Answers a request all of whose envs have come to their end."""
        cdef sv_record *record = &request.record
        cdef Py_ssize_t begin = self.first_of(record)
        cdef Py_ssize_t end = begin + record.count
        cdef object results = None
        self.aim(record)
        if request.call is not None:
            results = self.host.results_of(request.call, request.outcomes.__getitem__)
        elif record.operation & OPERATION == STEP:
            self.given, self.undecodable = request.given, request.undecodable
            self.begin_laps(sv_now_ns())
            self.step_range(begin, end)
        else:
            self.reset_range(begin, end, request.seeds, request.options, request.mask)
        self.count_time()
        self.answer(record, results)
        return 0

    cdef int count_time(self) except -1:
        """Counts the time since when envs are busy, as steps and resets by what these have taken."""
        cdef int64_t now = sv_now_ns()
        cdef int64_t each = self.in_step + self.in_reset
        if each > 0:
            self.tally.step_ns += <int64_t>(
                <double>(now - self.counted_from) * self.in_step / each)
            self.tally.reset_ns += <int64_t>(
                <double>(now - self.counted_from) * self.in_reset / each)
            self.counted_from = now
        self.in_step = self.in_reset = 0
        return 0

    # ---- times: those of the envs, not of their replays ----------------------------------------

    cdef int note_step(self, Py_ssize_t i, uint64_t now, int64_t in_reset) except -1:
        cdef int64_t began
        cdef int64_t ended
        began, ended = self.steppers[i].span
        sv_timing_add(&self.timings[i].step, ended - began)
        self.in_step += ended - began
        if self.trace is not NULL:
            sv_trace_add(self.trace, SV_TRACE_STEP, <uint32_t>(self.first_env + i), began, ended)
        return 0

    cdef int64_t reset_took(self, Py_ssize_t i, int64_t *start) except -1:
        cdef int64_t began
        cdef int64_t ended
        began, ended = self.envs[i].reset_span
        start[0] = began
        self.in_reset += ended - began
        return ended - began

"""A worker's hot loop: wait for a request, step the envs of its range, answer.

What is rare (commands, errors, infos too large for the ring) goes through the ``host``, Python
code with two methods: ``command() -> (reset arguments or None, results)`` and
``send_late(infos, failures, results)``.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t

from shmvec._core.codec cimport Codec
from shmvec._core.csrc cimport (
    SV_RING_YES,
    SV_WAIT_CORRUPT,
    SV_WAIT_SLICE,
    sv_bell,
    sv_budget,
    sv_completion,
    sv_completion_add,
    sv_record,
    sv_ring,
    sv_ring_attach_consumer,
    sv_ring_attach_producer,
    sv_ring_try_pop,
    sv_ring_try_push,
    sv_segment_bell,
    sv_segment_completion,
    sv_segment_completions,
    sv_segment_requests,
    sv_wait_request,
    sv_waiter,
    sv_waiter_init,
)
from shmvec._core.infos cimport InfoEncoder
from shmvec._core.protocol cimport CLOSE, COMMAND, INFOS, LATE, RESET, STEP
from shmvec._core.segment cimport Segment

cdef int64_t SLICE_NS = 50_000_000  # between two looks at the parent


cdef class WorkerLoop:
    """Serves the envs ``first_env`` and up.  One instance a worker process."""

    cdef Segment segment
    cdef sv_ring requests
    cdef sv_ring completions
    cdef sv_bell *bell
    cdef sv_completion *completion
    cdef sv_waiter waiter
    cdef InfoEncoder infos
    cdef Codec observations
    cdef Codec actions
    cdef object rewards
    cdef object terminations
    cdef object truncations
    cdef double[::1] reward_of
    cdef uint8_t[::1] terminated_of
    cdef uint8_t[::1] truncated_of
    cdef list envs
    cdef object host
    cdef uint32_t index
    cdef Py_ssize_t first_env
    cdef bytearray autoreset      # envs whose episode is over: the next step resets
    cdef uint32_t sequence
    cdef uint32_t flags
    cdef list late_infos
    cdef list failures

    def __init__(self, Segment segment, index, first_env, envs, host, Codec observations,
                 Codec actions, rewards, terminations, truncations, waiting, homing):
        cdef uint32_t capacity = segment.plan.sizes.ring_capacity
        if not 0 <= index < segment.num_workers or first_env + len(envs) > segment.num_envs:
            raise ValueError(f"worker {index} with {len(envs)} envs is not in this segment")
        self.segment = segment
        sv_ring_attach_consumer(
            &self.requests, sv_segment_requests(segment.base, &segment.plan, index), capacity)
        sv_ring_attach_producer(
            &self.completions, sv_segment_completions(segment.base, &segment.plan, index),
            capacity)
        self.bell = sv_segment_bell(segment.base, &segment.plan)
        self.completion = sv_segment_completion(segment.base, &segment.plan)
        cdef sv_budget budget
        budget.pause, budget.yield_, budget.linger = waiting
        sv_waiter_init(&self.waiter, budget, homing)
        self.infos = InfoEncoder(segment, index, first_env, len(envs))
        self.observations = observations
        self.actions = actions
        self.rewards = rewards
        self.terminations = terminations
        self.truncations = truncations
        self.reward_of = rewards
        self.terminated_of = terminations.view("u1")
        self.truncated_of = truncations.view("u1")
        self.envs = list(envs)
        self.host = host
        self.index = index
        self.first_env = first_env
        self.autoreset = bytearray(len(envs))
        self.late_infos = []
        self.failures = []

    def serve(self, parent_alive):
        """Serves requests until CLOSE (returns True) or until the parent is gone (False)."""
        cdef int found
        while True:
            with nogil:
                found = sv_wait_request(&self.waiter, self.bell, &self.requests, self.index,
                                        SLICE_NS)
            if found == SV_WAIT_CORRUPT:
                raise RuntimeError("the segment is damaged: the request ring makes no sense")
            if found == SV_WAIT_SLICE:
                if not parent_alive():
                    return False
            elif not self.serve_pending():
                return True

    def serve_pending(self):
        """Serves what is in the request ring; False after CLOSE."""
        cdef sv_record request
        while sv_ring_try_pop(&self.requests, &request) == SV_RING_YES:
            if not self.execute(&request):
                return False
        return True

    cdef bint execute(self, sv_record *request) except -1:
        cdef object results = None
        cdef object arguments
        cdef Py_ssize_t begin = <Py_ssize_t>request.first - self.first_env
        cdef Py_ssize_t end = begin + request.count
        if begin < 0 or end > len(self.envs):
            raise RuntimeError("the segment is damaged: a request names envs of another worker")
        cdef uint32_t operation = request.operation
        self.sequence = request.sequence
        self.flags = 0
        if operation == STEP:
            self.step_range(begin, end)
        elif operation == RESET:
            self.reset_range(begin, end, None, None, None)
        elif operation == COMMAND:
            arguments, results = self.host.command()
            if arguments is not None:
                seeds, options, mask = arguments
                self.reset_range(begin, end, seeds, options, mask)
        elif operation != CLOSE:
            raise RuntimeError(f"the segment is damaged: operation {operation}")
        if self.late_infos or self.failures or results is not None:
            self.flags |= LATE
        self.complete(request)
        # After the completion: the parent reads the pipe only then, and a full pipe would block.
        if self.flags & LATE:
            self.host.send_late(self.late_infos, self.failures, results)
            self.late_infos = []
            self.failures = []
        return operation != CLOSE

    cdef int complete(self, sv_record *request) except -1:
        cdef sv_record answer = request[0]
        answer.operation = self.flags
        if sv_ring_try_push(&self.completions, &answer) != SV_RING_YES:
            raise RuntimeError("the segment is damaged: the completion ring is full")
        sv_completion_add(self.completion)
        return 0

    cdef int step_range(self, Py_ssize_t begin, Py_ssize_t end) except -1:
        cdef Py_ssize_t i
        for i in range(begin, end):
            try:
                if self.autoreset[i]:
                    self.reset_one(i, None, None, False)
                else:
                    self.step_one(i)
            except BaseException as error:
                self.fail(i, "reset" if self.autoreset[i] else "step", error)
        return 0

    cdef int reset_range(self, Py_ssize_t begin, Py_ssize_t end, object seeds, object options,
                         object mask) except -1:
        cdef Py_ssize_t i
        for i in range(begin, end):
            if mask is not None and not mask[i]:
                continue
            try:
                self.reset_one(i, None if seeds is None else seeds[i], options, True)
            except BaseException as error:
                self.fail(i, "reset", error)
        return 0

    cdef int step_one(self, Py_ssize_t i) except -1:
        cdef Py_ssize_t env = self.first_env + i
        result = self.envs[i].step(self.actions.read(env))
        if type(result) is not tuple:
            result = tuple(result)
        if len(<tuple>result) != 5:
            raise ValueError(
                f"step() returned {len(<tuple>result)} values; expected (observation, reward, "
                "terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, info = <tuple>result
        self.observations.write(env, observation)
        if type(reward) is float:
            self.reward_of[env] = <double>reward
        else:
            self.rewards[env] = reward
        if terminated is False:
            self.terminated_of[env] = 0
        else:
            self.terminations[env] = terminated
        if truncated is False:
            self.truncated_of[env] = 0
        else:
            self.truncations[env] = truncated
        self.autoreset[i] = self.terminated_of[env] | self.truncated_of[env]
        self.send_info(env, info)
        return 0

    cdef int reset_one(self, Py_ssize_t i, object seed, object options,
                       bint explicit) except -1:
        cdef Py_ssize_t env = self.first_env + i
        if explicit:
            result = self.envs[i].reset(seed=seed, options=options)
        else:
            result = self.envs[i].reset()
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                f"reset() returned {type(result).__name__}; expected the tuple "
                "(observation, info)"
            )
        observation, info = result
        self.observations.write(env, observation)
        self.reward_of[env] = 0.0
        self.terminated_of[env] = 0
        self.truncated_of[env] = 0
        self.autoreset[i] = 0
        self.send_info(env, info)
        return 0

    cdef int send_info(self, Py_ssize_t env, object info) except -1:
        if type(info) is dict and len(<dict>info) == 0:
            return 0
        if self.infos.encode(env, info, self.sequence):
            self.flags |= INFOS
        else:
            self.late_infos.append((env, info))
        return 0

    cdef int fail(self, Py_ssize_t i, operation, error) except -1:
        self.failures.append((self.first_env + i, operation, error))
        return 0

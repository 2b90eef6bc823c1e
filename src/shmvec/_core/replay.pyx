"""The log of a replay: workers record what their envs do, the caller draws batches of transitions.

Each env has a log of *records*, which its worker writes in order. A START is an observation that
begins an episode. A STEP is an action, its reward and flags, and the observation after it, also an
episode's last one. So a STEP whose predecessor is there is a transition, and no transition reaches
across an episode, in any autoreset mode. A step that is not finished is not recorded: its record is
published when all of its results, also its info, are written.

A log is circular: the record at a position is in row (position % depth) * num_envs + env. So rows
fill from the first to the last, and memory can be reserved meanwhile.

    written      the worker's count. It needs no atomic store: the completion of the request, which
                 the caller acquires, publishes it and the rows.
    committed    the caller's count. It becomes `written` when the caller has taken the env's
                 answer. A worker that replaces another begins there; its predecessor is
                 known to be dead.
    interrupted  the env's next step has no known predecessor: the log began in the middle of an
                 episode, or somebody has set the env's state.

The caller does not trust shared memory: it copies each index, count and loop's end when it accepts
a record, and a count that no request can have left is an error.

A request writes at most two records, at the positions from `committed` on, and overwrites those
`depth` before. The caller draws none of these, nor of a few newer ones (`spare`). So a batch can be
put together while the envs go on, by threads in C that never take the GIL (csrc/parallel.h).
"""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcmp, memcpy, memset
from posix.types cimport pid_t
from posix.unistd cimport getpid

from shmvec._core cimport csrc as c
from shmvec._core.memory cimport Codec, Pool, Results, StepLog, data_of

import numpy as np

cdef extern from *:
    """
    static inline void sv_prefetch(const char *at, size_t bytes)
    {
        for (size_t i = 0; i < bytes && i < 512; i += 64)
            __builtin_prefetch(at + i);
    }
    """
    void sv_prefetch(const char *at, size_t bytes) noexcept nogil

cdef enum:
    START = 1
    STEP = 2
    BROKEN = 4       # a STEP without a known predecessor
    TERMINATED = 8
    TRUNCATED = 16

cdef Py_ssize_t MAX_REQUEST_RECORDS = 2  # that a request writes for an env
cdef Py_ssize_t CHUNK_ROWS = 8  # of a batch that a thread takes at a time
cdef Py_ssize_t MIN_PARALLEL_BYTES = 1 << 18  # to fill fewer is faster than to wake a thread
cdef Py_ssize_t PREFETCH_ROWS = 12  # between the row that is fetched and the one that is filled
cdef int MAX_ROUNDS = 1000  # of draws without enough transitions, before an error


cdef class ReplayLog(StepLog):
    """The records of all envs, in memory that the caller and the workers have."""

    cdef readonly object memory    # of the arrays
    cdef readonly object arrays    # of observations and of actions, nested like their spaces
    cdef readonly object counts    # the array of `committed`
    cdef Codec observations        # by row
    cdef Codec actions             # by row
    cdef double[::1] rewards       # by row, `num_rewards` numbers each
    cdef object reward_array
    cdef Py_ssize_t num_rewards    # numbers of a row's reward
    cdef uint8_t[::1] kinds        # by row: what it is, see the enum
    cdef int64_t[::1] committed    # by env: records that the caller has accepted
    cdef int64_t[::1] written      # by env: records that its worker has written
    cdef uint8_t[::1] interrupted  # by env: its next step has no known predecessor
    cdef readonly Py_ssize_t num_envs
    cdef readonly Py_ssize_t depth
    cdef bint keeps_newest_frame   # of each stack of frames, and no other
    cdef object frames             # the array of these frames
    cdef Py_ssize_t frame_nbytes
    cdef bint may_have_nan         # in frames
    cdef bint pads_with_zeros      # before an episode's first frame, not with copies of that

    def __init__(self, memory, counts, interrupted, kinds, rewards, arrays, codecs, newest, zeros):
        """Takes what `LogLayout.arrays` has placed."""
        self.memory = memory
        self.counts, self.written = counts
        self.committed = self.counts
        self.interrupted = interrupted
        self.kinds = kinds
        self.rewards = rewards.reshape(-1)
        self.reward_array = rewards
        self.num_rewards = len(self.rewards) // len(rewards)
        self.arrays = arrays
        self.observations, self.actions = codecs
        self.num_envs = len(interrupted)
        self.depth = len(kinds) // self.num_envs
        self.keeps_newest_frame, self.pads_with_zeros = newest, zeros
        if newest:
            self.frames = arrays[0]
            self.frame_nbytes = self.frames.nbytes // len(self.frames)
            self.may_have_nan = self.frames.dtype.kind in "fc"

    @cython.final
    cdef Py_ssize_t row(self, Py_ssize_t env, int64_t position) noexcept nogil:
        return <Py_ssize_t>(position % self.depth) * self.num_envs + env

    # ---- a worker ----------------------------------------------------------------------------

    cpdef int attach(self, Py_ssize_t first, Py_ssize_t count) except -1:
        """Begins to write records of these envs, after the committed ones."""
        cdef Py_ssize_t env
        for env in range(first, first + count):
            self.written[env] = self.committed[env]
            self.interrupted[env] = 1
        return 0

    cpdef int interrupt(self, Py_ssize_t env) except -1:
        self.interrupted[env] = 1
        return 0

    cdef int put(self, Py_ssize_t env, Py_ssize_t num_unpublished, object observation,
                 int kind) except -1:
        """Writes the observation and the kind of a record, which is published later."""
        cdef int64_t position = self.written[env] + num_unpublished
        cdef Py_ssize_t row = self.row(env, position)
        if self.keeps_newest_frame:
            observation = np.asarray(observation)
            self.check_stack(env, position, kind, observation)
            observation = observation[len(observation) - 1]
        self.observations.write(row, observation)
        self.kinds[row] = kind
        return 0

    cdef int check_stack(self, Py_ssize_t env, int64_t position, int kind,
                         object observation) except -1:
        """Raises ValueError unless `Sampler.fill_stack` would put this stack together again.

        Args:
            env: The env.
            position: The position of the stack's record, which is not written yet.
            kind: The kind of this record.
            observation: The stack.
        """
        cdef object stack = np.ascontiguousarray(observation, self.frames.dtype)
        cdef Py_ssize_t index = len(stack) - 1
        cdef char *frame = <char *>data_of(stack) + index * self.frame_nbytes
        cdef char *expected = frame
        cdef Py_ssize_t row
        cdef bint same = stack.nbytes == len(stack) * self.frame_nbytes
        while same and index > 0 and not kind & BROKEN:  # earlier frames are not known
            index -= 1
            frame -= self.frame_nbytes
            if not kind & START:
                position -= 1
                row = self.row(env, position)
                kind = self.kinds[row]
                expected = <char *>data_of(self.frames) + row * self.frame_nbytes
            elif self.pads_with_zeros:
                expected = NULL
            same = self.is_frame(stack[index], frame, expected)
        if not same:
            padding = "zeros" if self.pads_with_zeros else "its first frame"
            raise ValueError(
                "the replay cannot put this observation together again: it is no stack of the "
                f"episode's frames with {padding} before them. A wrapper above the stack may have "
                "changed it, or stepped in reset(): put that below the stack. Or make the replay "
                "with another padding=, or with frame_stack=1")
        return 0

    cdef bint is_frame(self, object frame, char *data, char *expected) except -1:
        """Whether a frame, whose elements are at `data`, equals the expected one; NULL: zeros."""
        cdef Py_ssize_t nbytes = self.frame_nbytes
        if expected is NULL:
            return not frame.any()
        if memcmp(data, expected, nbytes) == 0:
            return True
        if not self.may_have_nan:
            return False
        other = np.frombuffer(expected[:nbytes], frame.dtype).reshape(frame.shape)
        return np.array_equal(frame, other, equal_nan=True)

    cdef int put_start(self, Py_ssize_t env, Py_ssize_t num_unpublished,
                       object observation) except -1:
        return self.put(env, num_unpublished, observation, START)

    cdef int put_step(self, Py_ssize_t env, object action, object observation, Results results,
                      Py_ssize_t from_row) except -1:
        cdef Py_ssize_t row = self.row(env, self.written[env])
        cdef int kind = STEP
        if results.terminated_of[from_row]:
            kind |= TERMINATED
        if results.truncated_of[from_row]:
            kind |= TRUNCATED
        if self.interrupted[env]:
            kind |= BROKEN
        try:
            self.actions.write(row, action)
        except (TypeError, ValueError):  # the env may accept an action of another shape
            kind |= BROKEN
        if results.reward_of is not None:
            self.rewards[row] = results.reward_of[from_row]
        else:
            self.reward_array[row] = results.rewards[from_row]
        return self.put(env, 0, observation, kind)

    cdef int publish(self, Py_ssize_t env, Py_ssize_t count) except -1:
        self.interrupted[env] = 0
        self.written[env] += count
        return 0


cdef struct Part:          # of observations or of actions
    char *rows             # its array of the log
    Py_ssize_t nbytes      # of a row
    char *target           # where a batch's observations, or actions, go
    char *next_target      # where its next observations go; NULL: it is of actions


@cython.no_gc_clear  # clearing would take arrays from threads that write there
cdef class Sampler(ReplayLog):
    """The caller's side of a log: what can be drawn, and the batch that is being put together."""

    cdef readonly int64_t num_transitions
    cdef readonly Py_ssize_t spare  # records of an env that are neither drawn nor overwritten
    cdef object reserve             # a function that reserves memory for rows up to a position
    cdef int64_t reserved           # up to this position
    cdef int64_t[::1] published_counts  # `committed` in shared memory; the caller's own is private
    cdef uint8_t[::1] shared_kinds  # `kinds` in shared memory; likewise
    cdef Py_ssize_t damaged_env     # whose count was damaged, until that is reported; -1: none
    cdef int64_t[::1] oldest        # by env: the oldest position that may be used
    cdef int64_t[::1] candidate_ends  # by env: candidates of all envs up to this one
    cdef Py_ssize_t n_step
    cdef double[::1] discounts      # the powers of the discount, up to n_step
    cdef Py_ssize_t frame_stack     # frames of an observation; 1: it is no stack
    cdef double[::1] priority_tree  # sums of priorities, a binary tree; None: no priorities
    cdef Py_ssize_t first_leaf      # where the rows' priorities begin in the tree
    cdef readonly double largest    # the priority of new transitions
    cdef Part *parts                # observations, then actions
    cdef Py_ssize_t num_parts
    cdef Py_ssize_t num_observations
    cdef c.sv_parallel *threads
    cdef dict pools                 # of arrays for batches
    cdef object batch               # arrays that are being filled; None: there are none
    cdef Py_ssize_t num_requests    # since the last draw
    cdef public bint ended          # closed while a call waited, which workers cannot know
    cdef pid_t owner                # a fork has not its threads, but maybe their locks
    # The batch that was drawn last:
    cdef Py_ssize_t batch_size
    cdef Py_ssize_t[::1] envs
    cdef int64_t[::1] first_positions   # of each transition's first STEP
    cdef int64_t[::1] last_positions    # of its last STEP
    cdef float[::1] reward_sums         # `num_rewards` numbers each
    cdef float[::1] discount_factors    # of the value of the next observation
    cdef uint8_t[::1] terminated
    cdef uint8_t[::1] truncated

    def __cinit__(self, *args, **kwargs):
        self.threads = NULL
        self.parts = NULL

    def __dealloc__(self):
        c.sv_parallel_free(self.threads)
        PyMem_Free(self.parts)

    def prepare(self, observations, actions, reserve, *, n_step, discount, stack, prioritized,
                threads, spare):
        """Prepares for sampling.

        Args:
            observations: The arrays of rows of observations, one for each part.
            actions: Likewise, of actions.
            reserve: A function that reserves memory for rows up to a position.
            n_step: Steps whose rewards are summed, at most.
            discount: The factor of a reward that comes a step later.
            stack: Frames of an observation.
            prioritized: Whether transitions have priorities.
            threads: Number of threads besides the caller's.
            spare: Records of each env that are not drawn, besides those of a request.
        """
        cdef Py_ssize_t i
        self.reserve = reserve
        self.n_step = n_step
        self.discounts = discount ** np.arange(n_step + 1, dtype=np.float64)
        self.frame_stack, self.spare = stack, spare
        self.published_counts, self.shared_kinds = self.committed, self.kinds
        self.counts = np.array(self.counts)
        self.committed, self.kinds = self.counts, np.zeros(self.num_envs * self.depth, np.uint8)
        self.damaged_env = -1
        self.oldest = np.zeros(self.num_envs, np.int64)
        self.candidate_ends = np.zeros(self.num_envs, np.int64)
        self.largest = 1.0
        self.priority_tree = None
        if prioritized:
            self.first_leaf = 1 << (self.num_envs * self.depth - 1).bit_length()
            self.priority_tree = np.zeros(2 * self.first_leaf)
        self.owner = getpid()
        self.pools = {}
        self.num_observations = len(observations)
        self.num_parts = len(observations) + len(actions)
        self.parts = <Part *>PyMem_Malloc(self.num_parts * sizeof(Part))
        if self.parts is NULL:
            raise MemoryError
        for i, array in enumerate([*observations, *actions]):
            self.parts[i].rows = <char *>data_of(array)
            self.parts[i].nbytes = array.nbytes // len(array)
        self.threads = c.sv_parallel_new(threads)
        if self.threads is NULL:
            raise MemoryError("threads of a replay cannot be started")
        for i in range(self.num_envs):  # the log may have been loaded
            self.recount(i)

    cdef int recount(self, Py_ssize_t env) except -1:
        cdef int64_t position
        cdef int64_t count = self.committed[env]
        self.written[env] = count
        self.oldest[env] = self.oldest_of(count)
        cdef Py_ssize_t row = self.row(env, self.oldest[env])
        self.kinds[row] = self.shared_kinds[row]
        for position in range(self.oldest[env] + 1, count):
            self.count_record(env, position)
        return 0

    cdef inline int64_t oldest_of(self, int64_t count) noexcept nogil:
        """The oldest position that may be used, of an env with so many records."""
        cdef int64_t oldest = count - self.depth + MAX_REQUEST_RECORDS + self.spare
        return oldest if oldest > 0 else 0

    cdef inline bint is_transition(self, Py_ssize_t row) noexcept nogil:
        return self.kinds[row] & (STEP | BROKEN) == STEP

    cdef int count_record(self, Py_ssize_t env, int64_t position) except -1:
        """Counts a record that can be drawn from now on."""
        cdef Py_ssize_t row = self.row(env, position)
        self.kinds[row] = self.shared_kinds[row]
        if position > 0 and self.is_transition(row):
            self.num_transitions += 1
            self.prioritize(row, self.largest)
        return 0

    cdef int prioritize(self, Py_ssize_t row, double priority) except -1:
        """Sets the priority of a row, and the sums above it."""
        cdef Py_ssize_t node
        if self.priority_tree is None:
            return 0
        node = self.first_leaf + row
        self.priority_tree[node] = priority
        node >>= 1
        while node >= 1:  # sums, because differences would accumulate errors
            self.priority_tree[node] = (
                self.priority_tree[2 * node] + self.priority_tree[2 * node + 1])
            node >>= 1
        return 0

    cdef int note_request(self, const Py_ssize_t *envs, Py_ssize_t count) except -1:
        cdef Py_ssize_t i
        cdef int64_t most = 0
        for i in range(count):
            self.accept(envs[i])
            most = max(most, self.committed[envs[i]])
        self.check_damage()
        most = min(most + MAX_REQUEST_RECORDS, <int64_t>self.depth)
        if most > self.reserved:
            self.reserved = self.reserve(most)
        self.num_requests += 1
        if self.batch is not None and self.is_outdated():
            self.finish()
        return 0

    cdef inline bint is_outdated(self) noexcept nogil:
        """Whether requests since the last draw may overwrite what was drawn."""
        return MAX_REQUEST_RECORDS * self.num_requests > self.spare

    cdef int accept(self, Py_ssize_t env) except -1:
        cdef int64_t count = self.written[env]
        cdef int64_t position
        cdef int64_t oldest
        cdef Py_ssize_t row
        if count == self.committed[env]:
            return 0
        if not self.committed[env] < count <= self.committed[env] + MAX_REQUEST_RECORDS:
            self.damaged_env = env
            self.written[env] = self.committed[env]
            self.interrupted[env] = 1
            return 0
        for position in range(self.committed[env], count):
            self.count_record(env, position)
        self.committed[env] = self.published_counts[env] = count
        oldest = self.oldest_of(count)
        for position in range(self.oldest[env] + 1, oldest + 1):
            row = self.row(env, position)
            if self.is_transition(row):
                self.num_transitions -= 1
                self.prioritize(row, 0.0)
        self.oldest[env] = oldest
        return 0

    cdef int check_damage(self) except -1:
        """Raises RuntimeError, once, if a count of records was damaged. Its env goes on."""
        cdef Py_ssize_t env = self.damaged_env
        if env >= 0:
            self.damaged_env = -1
            raise RuntimeError(
                f"the segment is damaged: the number of records of env {env} in the replay makes "
                "no sense. Its last step is not recorded. Nothing was sent to any env")
        return 0

    # ---- saving and loading ------------------------------------------------------------------

    def snapshot(self):
        """The counts of records, the priorities of all rows (or None) and the largest priority.

        All are of one moment, because another thread may be stepping envs.
        """
        counts = np.empty(self.num_envs, np.int64)
        priorities = None if self.priority_tree is None else np.empty(self.num_envs * self.depth)
        memcpy(data_of(counts), &self.committed[0], counts.nbytes)
        if priorities is not None:
            memcpy(data_of(priorities), &self.priority_tree[self.first_leaf], priorities.nbytes)
        return counts, priorities, self.largest

    def mark_overwritten(self, uint8_t[::1] kinds, const int64_t[::1] counts):
        """Marks saved records that may have been overwritten while they were being saved.

        Args:
            kinds: The kinds of the saved rows. Overwritten records, and the one after them, become
                broken steps.
            counts: The number of each env's records when saving began.
        """
        cdef Py_ssize_t env
        cdef Py_ssize_t row
        cdef int64_t position
        cdef int64_t last
        for env in range(self.num_envs):
            last = self.committed[env] + MAX_REQUEST_RECORDS - self.depth
            for position in range(max(counts[env] - self.depth, 0), min(last + 1, counts[env])):
                row = self.row(env, position)
                if position < last or not kinds[row] & START:
                    kinds[row] = STEP | BROKEN

    def set_priorities(self, const double[::1] priorities, const int64_t[::1] counts, largest):
        """Sets the priorities of all rows that hold transitions, as `snapshot` has returned them.

        The log may have gone on since, in its file: new transitions get the largest priority.
        """
        cdef Py_ssize_t row
        self.largest = largest
        for row in range(self.num_envs * self.depth):
            if self.priority_tree[self.first_leaf + row] > 0:
                if self.position_of_row(row) < counts[row % self.num_envs] and priorities[row] > 0:
                    self.prioritize(row, priorities[row])
                else:
                    self.prioritize(row, largest)

    # ---- drawing -----------------------------------------------------------------------------

    cdef int64_t last_position(self, Py_ssize_t env, int64_t position) noexcept nogil:
        """The last position of the n-step transition that begins at a position; -1: there is none.
        """
        cdef Py_ssize_t row = self.row(env, position)
        cdef int64_t at
        cdef int64_t frame
        cdef Py_ssize_t i
        if position <= self.oldest[env] or position >= self.committed[env]:
            return -1
        if not self.is_transition(row):
            return -1
        frame = position - 1
        for i in range(1, self.frame_stack):  # all frames of its observation must be there
            if self.kinds[self.row(env, frame)] & START:
                break
            if self.kinds[self.row(env, frame)] & BROKEN or frame == self.oldest[env]:
                return -1
            frame -= 1
        at = position
        for i in range(1, self.n_step):
            if self.kinds[row] & (TERMINATED | TRUNCATED):
                break
            if at + 1 == self.committed[env]:  # the next step is still to come
                return -1
            row = self.row(env, at + 1)
            if not self.is_transition(row):
                break
            at += 1
        return at

    cdef void add_rewards(self, Py_ssize_t i, Py_ssize_t row, int64_t count) noexcept nogil:
        """Sums the rewards of `count` steps, from the one in a row on, for row `i` of the batch."""
        cdef Py_ssize_t n = self.num_rewards
        cdef Py_ssize_t depth = self.depth * self.num_envs
        cdef Py_ssize_t j
        cdef int64_t step
        cdef Py_ssize_t at
        cdef double total
        for j in range(n):
            at = row
            total = self.rewards[at * n + j]
            for step in range(1, count):
                at += self.num_envs
                if at >= depth:
                    at -= depth
                total += self.discounts[step] * self.rewards[at * n + j]
            self.reward_sums[i * n + j] = <float>total

    cdef int64_t count_candidates(self) noexcept nogil:
        """The number of records that may be drawn, transitions or not; fills `candidate_ends`."""
        cdef int64_t total = 0
        cdef int64_t some
        cdef Py_ssize_t env
        for env in range(self.num_envs):
            some = self.committed[env] - self.oldest[env] - 1
            if some > 0:
                total += some
            self.candidate_ends[env] = total
        return total

    cdef Py_ssize_t env_of(self, int64_t number) noexcept nogil:
        """The env of a candidate, by its number."""
        cdef Py_ssize_t low = 0
        cdef Py_ssize_t high = self.num_envs - 1
        cdef Py_ssize_t middle
        while low < high:
            middle = (low + high) // 2
            if number < self.candidate_ends[middle]:
                high = middle
            else:
                low = middle + 1
        return low

    cdef Py_ssize_t row_at_sum(self, double share) noexcept nogil:
        """The row at which the sum of the priorities reaches `share`."""
        cdef Py_ssize_t node = 1
        while node < self.first_leaf:
            node *= 2
            if share >= self.priority_tree[node] and self.priority_tree[node + 1] > 0:
                share -= self.priority_tree[node]
                node += 1
        return node - self.first_leaf

    cdef int64_t position_of_row(self, Py_ssize_t row) noexcept nogil:
        """The position of the record in a row."""
        cdef Py_ssize_t env = row % self.num_envs
        cdef int64_t newest = self.committed[env] - 1
        cdef int64_t place = row // self.num_envs
        return newest - (newest - place) % self.depth if newest >= place else -1

    cdef int add_transition(self, Py_ssize_t i, Py_ssize_t env, int64_t position) except -1:
        """Makes a transition row `i` of the batch; returns 0 if the record is none."""
        cdef Py_ssize_t row
        cdef int64_t last = self.last_position(env, position)
        if last < 0:
            return 0
        row = self.row(env, last)
        self.envs[i], self.first_positions[i], self.last_positions[i] = env, position, last
        self.add_rewards(i, self.row(env, position), last - position + 1)
        self.terminated[i] = self.kinds[row] & TERMINATED != 0
        self.truncated[i] = self.kinds[row] & TRUNCATED != 0
        self.discount_factors[i] = (
            0 if self.terminated[i] else <float>self.discounts[last - position + 1])
        return 1

    cdef tuple start_batch(self, Py_ssize_t size):
        """Begins a batch; returns arrays for its rewards, discounts, terminations, truncations."""
        if self.owner != getpid():
            raise RuntimeError("this replay is another process's: a fork cannot draw from it")
        self.check_damage()
        self.finish()
        self.num_requests = 0
        self.batch_size = size
        self.envs = np.empty(size, np.intp)
        self.first_positions = np.empty(size, np.int64)
        self.last_positions = np.empty(size, np.int64)
        arrays = (np.empty((size, *self.reward_array.shape[1:]), np.float32),
                  np.empty(size, np.float32), np.empty(size, np.bool_), np.empty(size, np.bool_))
        self.reward_sums, self.discount_factors = arrays[0].reshape(-1), arrays[1]
        self.terminated, self.truncated = arrays[2].view(np.uint8), arrays[3].view(np.uint8)
        return arrays

    def draw(self, rng, Py_ssize_t size):
        """Draws transitions. It fills the small arrays of a batch; `begin` fills the large ones.

        Returns:
            Rewards, discounts, terminations, truncations, indices and probabilities (None: all are
            equal).
        """
        cdef int64_t[::1] numbers
        cdef double[::1] shares
        cdef Py_ssize_t filled = 0
        cdef Py_ssize_t i
        cdef Py_ssize_t row
        cdef Py_ssize_t env
        cdef int64_t total
        cdef double priority_sum
        cdef int rounds = 0
        cdef tuple arrays = self.start_batch(size)
        cdef double[::1] probabilities = None if self.priority_tree is None else np.empty(size)
        total = self.count_candidates()
        while filled < size:
            rounds += 1
            if self.num_transitions == 0 or rounds > MAX_ROUNDS:
                raise RuntimeError(
                    f"there is nothing to sample yet: {total:,} records, {self.num_transitions:,} "
                    f"of them steps, and none that is followed by {self.n_step - 1} more or by its "
                    "episode's end. Step the envs first")
            if self.priority_tree is None:
                numbers = rng.integers(total, size=max(size - filled, 16))
                for i in range(numbers.shape[0]):  # rows first: their memory is fetched meanwhile
                    env = self.env_of(numbers[i])
                    numbers[i] += self.committed[env] - self.candidate_ends[env]
                    row = self.row(env, numbers[i])
                    numbers[i] = numbers[i] * self.num_envs + env
                    sv_prefetch(<char *>&self.kinds[row], 1)
                    sv_prefetch(<char *>&self.rewards[row * self.num_rewards], 1)
                for i in range(numbers.shape[0]):
                    filled += self.add_transition(
                        filled, numbers[i] % self.num_envs, numbers[i] // self.num_envs)
                    if filled == size:
                        break
            else:
                shares = rng.random(size - filled)
                priority_sum = self.priority_tree[1]
                for i in range(shares.shape[0]):
                    if rounds == 1:  # one from each equal part of the sum: less variance
                        shares[i] = (i + shares[i]) / size
                    row = self.row_at_sum(shares[i] * priority_sum)
                    if self.add_transition(filled, row % self.num_envs, self.position_of_row(row)):
                        # Here: another thread may step envs as soon as Python code runs.
                        probabilities[filled] = (
                            self.priority_tree[self.first_leaf + row] / priority_sum)
                        filled += 1
        indices = np.asarray(self.first_positions) * self.num_envs + np.asarray(self.envs)
        return *arrays, indices, None if self.priority_tree is None else np.asarray(probabilities)

    def choose(self, const int64_t[::1] indices):
        """Like `draw`, for transitions that are given by their indices.

        Raises:
            IndexError: One of them is no transition, or was overwritten.
        """
        cdef Py_ssize_t i
        cdef tuple arrays = self.start_batch(indices.shape[0])
        for i in range(indices.shape[0]):
            if indices[i] < 0 or not self.add_transition(
                    i, indices[i] % self.num_envs, indices[i] // self.num_envs):
                raise IndexError(f"there is no transition {indices[i]} (any more)")
        return *arrays, np.array(indices), None

    def holds(self, const int64_t[::1] indices):
        """Which of these indices are transitions that are there."""
        cdef Py_ssize_t i
        present = np.empty(indices.shape[0], np.bool_)
        cdef uint8_t[::1] results = present.view(np.uint8)
        for i in range(indices.shape[0]):
            results[i] = indices[i] >= 0 and self.last_position(
                indices[i] % self.num_envs, indices[i] // self.num_envs) >= 0
        return present

    def latest(self):
        """The index of each env's last step, a reset after it aside; -1: it is no transition."""
        cdef Py_ssize_t env
        cdef int64_t position
        indices = np.full(self.num_envs, -1, np.int64)
        cdef int64_t[::1] results = indices
        for env in range(self.num_envs):
            position = self.committed[env] - 1
            if position > 0 and self.kinds[self.row(env, position)] & START:
                position -= 1
            if position > self.oldest[env] and self.is_transition(self.row(env, position)):
                results[env] = position * self.num_envs + env
        return indices

    def update(self, const int64_t[::1] indices, const double[::1] priorities):
        """Sets priorities, which are positive. Overwritten transitions are left out."""
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        cdef Py_ssize_t row
        cdef int64_t position
        for i in range(indices.shape[0]):
            env, position = indices[i] % self.num_envs, indices[i] // self.num_envs
            if not self.oldest[env] < position < self.committed[env]:
                continue
            row = self.row(env, position)
            if self.is_transition(row):
                self.prioritize(row, priorities[i])
                self.largest = max(self.largest, priorities[i])

    # ---- putting a batch together ------------------------------------------------------------

    def output_array(self, key, tuple shape, dtype):
        """An array for a part of a batch, maybe one that nobody holds any more."""
        cdef Pool pool = self.pools.get(key)
        if pool is None or pool.template.shape != shape:
            pool = self.pools[key] = Pool(np.empty(shape, dtype), pools_large=True)
        return pool.new()

    def begin(self, observations, next_observations, actions):
        """Begins to fill the large arrays of the batch that was drawn last; `finish` ends it.

        Returns False if another thread has stepped the envs so often since then that the batch must
        be drawn again.

        Args:
            observations: An array for each part of its observations.
            next_observations: Likewise, of the next observations.
            actions: Likewise, of the actions.
        """
        cdef Py_ssize_t i
        cdef Py_ssize_t nbytes = 0
        self.finish()
        for i in range(self.num_observations):
            nbytes += 2 * self.frame_stack * self.parts[i].nbytes
            self.parts[i].target = <char *>data_of(observations[i])
            self.parts[i].next_target = <char *>data_of(next_observations[i])
        for i in range(len(actions)):
            self.parts[self.num_observations + i].target = <char *>data_of(actions[i])
            self.parts[self.num_observations + i].next_target = NULL
        if self.is_outdated():
            return False
        if nbytes * self.batch_size < MIN_PARALLEL_BYTES:
            # With the GIL, so that nobody asks envs meanwhile.
            for i in range(min(PREFETCH_ROWS, self.batch_size)):
                self.prefetch_row(i)
            for i in range(self.batch_size):
                if i + PREFETCH_ROWS < self.batch_size:
                    self.prefetch_row(i + PREFETCH_ROWS)
                self.fill_row(i)
            return True
        self.batch = observations, next_observations, actions
        c.sv_parallel_begin(self.threads, fill_chunk, <void *>self,
                            (self.batch_size + CHUNK_ROWS - 1) // CHUNK_ROWS)
        return True

    cpdef int finish(self) except -1:
        """Waits until the batch is complete, and helps."""
        cdef object batch = self.batch
        if batch is None:
            return 0
        if self.owner == getpid():
            with nogil:
                c.sv_parallel_finish(self.threads)
        if self.batch is batch:  # another thread may have finished it, and begun the next one
            self.batch = None
        return 0

    cdef void prefetch_row(self, Py_ssize_t i) noexcept nogil:
        """Prefetches what a row of a batch is made of: rows lie anywhere in memory."""
        cdef Py_ssize_t j
        cdef Py_ssize_t row = self.row(self.envs[i], self.first_positions[i])
        cdef Py_ssize_t before = self.row(self.envs[i], self.first_positions[i] - 1)
        sv_prefetch(<char *>&self.kinds[before], 1)
        for j in range(self.num_parts):
            sv_prefetch(self.parts[j].rows + row * self.parts[j].nbytes, self.parts[j].nbytes)
            if self.parts[j].next_target is not NULL:
                sv_prefetch(
                    self.parts[j].rows + before * self.parts[j].nbytes, self.parts[j].nbytes)

    cdef void fill_row(self, Py_ssize_t i) noexcept nogil:
        cdef Py_ssize_t j
        cdef Part *part
        cdef Py_ssize_t row = self.row(self.envs[i], self.first_positions[i])
        for j in range(self.num_parts):
            part = &self.parts[j]
            if part.next_target is NULL:
                memcpy(part.target + i * part.nbytes, part.rows + row * part.nbytes, part.nbytes)
            else:
                self.fill_stack(part, part.target, i, self.first_positions[i] - 1)
                self.fill_stack(part, part.next_target, i, self.last_positions[i])

    cdef void fill_stack(self, Part *part, char *target, Py_ssize_t i,
                         int64_t position) noexcept nogil:
        """Puts an observation together: the frame at a position, and those before it."""
        cdef Py_ssize_t nbytes = part.nbytes
        cdef Py_ssize_t frame
        cdef Py_ssize_t row
        cdef char *first = target + i * self.frame_stack * nbytes
        for frame in range(self.frame_stack - 1, -1, -1):
            row = self.row(self.envs[i], position)
            memcpy(first + frame * nbytes, part.rows + row * nbytes, nbytes)
            if self.kinds[row] & START:
                break
            position -= 1
        else:
            return
        if self.pads_with_zeros:
            memset(first, 0, frame * nbytes)
            return
        while frame > 0:
            frame -= 1
            memcpy(first + frame * nbytes, part.rows + row * nbytes, nbytes)


cdef void fill_chunk(void *argument, size_t index) noexcept nogil:
    cdef Py_ssize_t i
    cdef Py_ssize_t begin = <Py_ssize_t>index * CHUNK_ROWS
    for i in range(begin, min(begin + CHUNK_ROWS, (<Sampler>argument).batch_size)):
        (<Sampler>argument).fill_row(i)

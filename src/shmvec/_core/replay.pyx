"""The log of a replay: workers write what their envs do, the parent draws batches of transitions.

Each env has a log of *records*, which its worker writes in order: a START is an observation that
begins an episode; a STEP is an action, what it has earned, and the observation after it, an
episode's last one included. So a STEP whose predecessor is there is a transition, and no transition
reaches across an episode, in any autoreset mode. What was not finished is not written: the record
of a step is published when all of it, infos included, has been accepted.

A log is circular: the record at a position is in row (position % depth) * num_envs + env, so that
rows fill from the first to the last, and memory can be reserved as they do.

    written      the worker's count. Plain stores: the completion of the request, which the parent
                 acquires, orders them and the rows before it.
    committed    the parent's count: it takes over `written` when it has taken the env's answer. A
                 worker that replaces another begins there; its predecessor is known to be dead.
    interrupted  the env's next step has no known predecessor: the log began in the middle of an
                 episode, or somebody has set the env's state.

The parent believes nothing of this: what it reads as an index, a count or a loop's end it has
copied when it accepted a record, and a count that a request cannot have left is an error.

A request writes two records at most, at the positions from `committed` on, and overwrites those
`depth` before. A few older ones are left alone beyond that, so that a batch can be put together
while the envs go on: by threads of C's, which take the GIL never (csrc/parallel.h).
"""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcmp, memcpy, memset
from posix.types cimport pid_t
from posix.unistd cimport getpid

from shmvec._core cimport csrc as c
from shmvec._core.memory cimport Codec, Pool, StepLog, data_of

import numpy as np

cdef extern from *:
    """
    static inline void sv_fetch(const char *at, size_t bytes)
    {
        for (size_t i = 0; i < bytes && i < 512; i += 64)
            __builtin_prefetch(at + i);
    }
    """
    void sv_fetch(const char *at, size_t bytes) noexcept nogil

cdef enum:
    START = 1
    STEP = 2
    BROKEN = 4       # a STEP whose predecessor is not known
    TERMINATED = 8
    TRUNCATED = 16

cdef Py_ssize_t RECORDS_MOST = 2  # of a request
cdef Py_ssize_t CHUNK = 8         # rows of a batch that a thread takes at a time
cdef Py_ssize_t SHARED_BYTES = 1 << 18  # a batch of fewer takes less than to wake a thread
cdef Py_ssize_t AHEAD = 12        # rows of a small batch that are fetched ahead
cdef int ROUNDS_MOST = 1000       # draws without a transition, after which there is none


cdef class ReplayLog(StepLog):
    """The records of all envs, in memory that the parent and the workers have."""

    cdef readonly object whole    # the memory of the arrays
    cdef readonly object arrays   # of observations and of actions, nested as their spaces are
    cdef readonly object counts   # the array of `committed`
    cdef Codec observations       # of rows
    cdef Codec actions
    cdef double[::1] rewards
    cdef uint8_t[::1] kinds       # of each row: what it is, see the enum
    cdef int64_t[::1] committed   # of each env: records that the parent has accepted
    cdef int64_t[::1] written     # of each env: records that its worker has written
    cdef uint8_t[::1] interrupted # of each env: whether what precedes its next step is unknown
    cdef readonly Py_ssize_t num_envs
    cdef readonly Py_ssize_t depth
    cdef bint newest              # of stacked observations the newest frame alone is kept
    cdef object frames            # the array of these frames
    cdef Py_ssize_t frame_nbytes
    cdef bint floats              # frames may have NaN
    cdef bint zeros               # what precedes an episode in a stack is zeros

    def __init__(self, memory, counts, interrupted, kinds, rewards, arrays, codecs, newest, zeros):
        """Takes what `LogLayout.arrays` has placed."""
        self.whole = memory
        self.counts, self.written = counts
        self.committed = self.counts
        self.interrupted = interrupted
        self.kinds = kinds
        self.rewards = rewards
        self.arrays = arrays
        self.observations, self.actions = codecs
        self.num_envs = len(interrupted)
        self.depth = len(kinds) // self.num_envs
        self.newest, self.zeros = newest, zeros
        if newest:
            self.frames = arrays[0]
            self.frame_nbytes = self.frames.nbytes // len(self.frames)
            self.floats = self.frames.dtype.kind in "fc"

    @cython.final
    cdef Py_ssize_t row(self, Py_ssize_t env, int64_t position) noexcept nogil:
        """The row of an env's record."""
        return <Py_ssize_t>(position % self.depth) * self.num_envs + env

    # ---- a worker ----------------------------------------------------------------------------

    cpdef int attach(self, Py_ssize_t first, Py_ssize_t count) except -1:
        """Begins to write records of these envs, after what was committed."""
        cdef Py_ssize_t env
        for env in range(first, first + count):
            self.written[env] = self.committed[env]
            self.interrupted[env] = 1
        return 0

    cpdef int interrupt(self, Py_ssize_t env) except -1:
        """Notes that what precedes the next step of an env is unknown."""
        self.interrupted[env] = 1
        return 0

    cdef int put(self, Py_ssize_t env, Py_ssize_t ahead, object observation, int kind) except -1:
        """Writes the observation and the kind of a record that is published later."""
        cdef int64_t position = self.written[env] + ahead
        cdef Py_ssize_t row = self.row(env, position)
        if self.newest:
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
            position: That of the record whose observation it is, and which is not written yet.
            kind: Of this record.
            observation: The stack.
        """
        cdef object stack = np.ascontiguousarray(observation, self.frames.dtype)
        cdef Py_ssize_t index = len(stack) - 1
        cdef char *frame = <char *>data_of(stack) + index * self.frame_nbytes
        cdef char *expected = frame
        cdef Py_ssize_t row
        cdef bint same = stack.nbytes == len(stack) * self.frame_nbytes
        while same and index > 0 and not kind & BROKEN:  # what precedes that is not known
            index -= 1
            frame -= self.frame_nbytes
            if not kind & START:
                position -= 1
                row = self.row(env, position)
                kind = self.kinds[row]
                expected = <char *>data_of(self.frames) + row * self.frame_nbytes
            elif self.zeros:
                expected = NULL
            same = self.is_frame(stack[index], frame, expected)
        if not same:
            padding = "zeros" if self.zeros else "its first frame"
            raise ValueError(
                "the replay cannot put this observation together again: it is no stack of the "
                f"episode's frames with {padding} before them. A wrapper above the stack may have "
                "changed it, or stepped in reset(): put that below the stack. Or make the replay "
                "with another padding=, or with frame_stack=1")
        return 0

    cdef bint is_frame(self, object frame, char *data, char *expected) except -1:
        """Whether a frame, whose elements are at `data`, equals another; NULL: zeros."""
        cdef Py_ssize_t nbytes = self.frame_nbytes
        if expected is NULL:
            return not frame.any()
        if memcmp(data, expected, nbytes) == 0:
            return True
        if not self.floats:
            return False
        other = np.frombuffer(expected[:nbytes], frame.dtype).reshape(frame.shape)
        return np.array_equal(frame, other, equal_nan=True)

    cdef int put_start(self, Py_ssize_t env, Py_ssize_t ahead, object observation) except -1:
        return self.put(env, ahead, observation, START)

    cdef int put_step(self, Py_ssize_t env, object action, object observation, double reward,
                      bint terminated, bint truncated) except -1:
        cdef Py_ssize_t row = self.row(env, self.written[env])
        cdef int kind = STEP | (TERMINATED if terminated else 0) | (TRUNCATED if truncated else 0)
        if self.interrupted[env]:
            kind |= BROKEN
        try:
            self.actions.write(row, action)
        except (TypeError, ValueError):  # the env may know what to do with another shape
            kind |= BROKEN
        self.rewards[row] = reward
        return self.put(env, 0, observation, kind)

    cdef int publish(self, Py_ssize_t env, Py_ssize_t count) except -1:
        """Publishes the records that were put: from now on they precede the next one."""
        self.interrupted[env] = 0
        self.written[env] += count
        return 0


cdef struct Part:
    char *rows             # an array of the log
    Py_ssize_t nbytes      # of a row
    char *before           # where a batch's observations, or actions, go
    char *after            # where its next observations go; NULL: nowhere


@cython.no_gc_clear  # clearing would take arrays from threads that write there
cdef class Sampler(ReplayLog):
    """The parent's side of a log: what can be drawn, and the batch that is being put together."""

    cdef readonly int64_t num_transitions
    cdef readonly Py_ssize_t spare    # records of an env that are not drawn, nor overwritten
    cdef object reserve               # called with a position up to which rows must have memory
    cdef int64_t reserved
    cdef int64_t[::1] told            # `committed` as workers see it; the parent's own is private
    cdef uint8_t[::1] recorded        # `kinds` as workers write them; likewise
    cdef Py_ssize_t damaged           # an env whose count was damaged, until that is told; -1: none
    cdef int64_t[::1] oldest          # of each env: the oldest position that may be used
    cdef int64_t[::1] ends            # of each env: candidates up to and with it
    cdef Py_ssize_t n_step
    cdef double[::1] discounts        # the powers of the discount, up to n_step
    cdef Py_ssize_t stack             # frames of an observation; 1: it is no stack
    cdef double[::1] tree             # sums of priorities, a binary heap; None: no priorities
    cdef Py_ssize_t leaves            # where the rows' priorities begin in it
    cdef readonly double largest      # the priority of new transitions
    cdef Part *parts                  # observations, then actions
    cdef Py_ssize_t num_parts
    cdef Py_ssize_t num_observations
    cdef c.sv_parallel *threads
    cdef dict pools                   # of arrays for batches
    cdef object batch                 # what is being put together; None: nothing
    cdef Py_ssize_t requests          # asked since the last draw
    cdef public bint ended            # closed while a call waited: workers could not be told
    cdef pid_t owner                  # a fork has no threads, and maybe their locks
    # The batch: of each of its rows
    cdef Py_ssize_t size
    cdef Py_ssize_t[::1] envs
    cdef int64_t[::1] steps           # the position of its first STEP
    cdef int64_t[::1] lasts           # the position of its last one
    cdef float[::1] sums              # of rewards
    cdef float[::1] factors           # what the value of its next observation counts
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
            threads: Number of threads beside the caller.
            spare: Records of each env that are not drawn, besides those of a request.
        """
        cdef Py_ssize_t i
        self.reserve = reserve
        self.n_step = n_step
        self.discounts = discount ** np.arange(n_step + 1, dtype=np.float64)
        self.stack, self.spare = stack, spare
        self.told, self.recorded = self.committed, self.kinds
        self.counts = np.array(self.counts)
        self.committed, self.kinds = self.counts, np.zeros(self.num_envs * self.depth, np.uint8)
        self.damaged = -1
        self.oldest = np.zeros(self.num_envs, np.int64)
        self.ends = np.zeros(self.num_envs, np.int64)
        self.largest = 1.0
        self.tree = None
        if prioritized:
            self.leaves = 1 << (self.num_envs * self.depth - 1).bit_length()
            self.tree = np.zeros(2 * self.leaves)
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
        for i in range(self.num_envs):  # of a log that was loaded
            self.recount(i)

    cdef int recount(self, Py_ssize_t env) except -1:
        cdef int64_t position
        cdef int64_t count = self.committed[env]
        self.written[env] = count
        self.oldest[env] = self.oldest_of(count)
        self.kinds[self.row(env, self.oldest[env])] = self.recorded[self.row(env, self.oldest[env])]
        for position in range(self.oldest[env] + 1, count):
            self.enter(env, position)
        return 0

    cdef inline int64_t oldest_of(self, int64_t count) noexcept nogil:
        """The oldest position that no request overwrites soon, of an env with so many records."""
        cdef int64_t oldest = count - self.depth + RECORDS_MOST + self.spare
        return oldest if oldest > 0 else 0

    cdef inline bint is_transition(self, Py_ssize_t row) noexcept nogil:
        return self.kinds[row] & (STEP | BROKEN) == STEP

    cdef int enter(self, Py_ssize_t env, int64_t position) except -1:
        """Counts a record that can be drawn from now on."""
        cdef Py_ssize_t row = self.row(env, position)
        self.kinds[row] = self.recorded[row]
        if position > 0 and self.is_transition(row):
            self.num_transitions += 1
            self.prioritize(row, self.largest)
        return 0

    cdef int prioritize(self, Py_ssize_t row, double priority) except -1:
        """Sets the priority of a row, and the sums above it."""
        cdef Py_ssize_t node
        if self.tree is None:
            return 0
        node = self.leaves + row
        self.tree[node] = priority
        node >>= 1
        while node >= 1:  # sums are made anew: differences would add up errors
            self.tree[node] = self.tree[2 * node] + self.tree[2 * node + 1]
            node >>= 1
        return 0

    cdef int asked(self, const Py_ssize_t *envs, Py_ssize_t count) except -1:
        cdef Py_ssize_t i
        cdef int64_t most = 0
        for i in range(count):
            self.accept(envs[i])
            most = max(most, self.committed[envs[i]])
        self.check_damage()
        most = min(most + RECORDS_MOST, <int64_t>self.depth)
        if most > self.reserved:
            self.reserved = self.reserve(most)
        self.requests += 1
        if self.batch is not None and self.outdated():
            self.finish()
        return 0

    cdef inline bint outdated(self) noexcept nogil:
        """Whether what was drawn last may be overwritten by what envs were asked since."""
        return RECORDS_MOST * self.requests > self.spare

    cdef int accept(self, Py_ssize_t env) except -1:
        cdef int64_t count = self.written[env]
        cdef int64_t position
        cdef int64_t oldest
        cdef Py_ssize_t row
        if count == self.committed[env]:
            return 0
        if not self.committed[env] < count <= self.committed[env] + RECORDS_MOST:
            self.damaged = env
            self.written[env] = self.committed[env]
            self.interrupted[env] = 1
            return 0
        for position in range(self.committed[env], count):
            self.enter(env, position)
        self.committed[env] = self.told[env] = count
        oldest = self.oldest_of(count)
        for position in range(self.oldest[env] + 1, oldest + 1):
            row = self.row(env, position)
            if self.is_transition(row):
                self.num_transitions -= 1
                self.prioritize(row, 0.0)
        self.oldest[env] = oldest
        return 0

    cdef int check_damage(self) except -1:
        """Raises RuntimeError, once, if a count of records was damaged since; its env goes on."""
        cdef Py_ssize_t env = self.damaged
        if env >= 0:
            self.damaged = -1
            raise RuntimeError(
                f"the segment is damaged: the number of records of env {env} in the replay makes "
                "no sense. Its last step is not recorded. Nothing was sent to any env")
        return 0

    # ---- saving and loading ------------------------------------------------------------------

    def moment(self):
        """The counts of records, the priorities of all rows, if there are any, and the largest
        priority, of one moment: envs may be stepped by another thread."""
        counts = np.empty(self.num_envs, np.int64)
        priorities = None if self.tree is None else np.empty(self.num_envs * self.depth)
        memcpy(data_of(counts), &self.committed[0], counts.nbytes)
        if priorities is not None:
            memcpy(data_of(priorities), &self.tree[self.leaves], priorities.nbytes)
        return counts, priorities, self.largest

    def break_overwritten(self, uint8_t[::1] kinds, const int64_t[::1] counts):
        """Marks what may have been overwritten since envs had so many records, while it was saved.

        Args:
            kinds: Of the rows that were saved. The record after those that were overwritten follows
                none.
            counts: The records of each env as that began.
        """
        cdef Py_ssize_t env
        cdef Py_ssize_t row
        cdef int64_t position
        cdef int64_t last
        for env in range(self.num_envs):
            last = self.committed[env] + RECORDS_MOST - self.depth
            for position in range(max(counts[env] - self.depth, 0), min(last + 1, counts[env])):
                row = self.row(env, position)
                if position < last or not kinds[row] & START:
                    kinds[row] = STEP | BROKEN

    def set_priorities(self, const double[::1] priorities, const int64_t[::1] counts, largest):
        """Sets the priorities of all rows that hold transitions, as `moment` has returned all this.

        The log may have gone on since, in its file: new transitions have the largest priority.
        """
        cdef Py_ssize_t row
        self.largest = largest
        for row in range(self.num_envs * self.depth):
            if self.tree[self.leaves + row] > 0:
                if self.position_in(row) < counts[row % self.num_envs] and priorities[row] > 0:
                    self.prioritize(row, priorities[row])
                else:
                    self.prioritize(row, largest)

    # ---- drawing -----------------------------------------------------------------------------

    cdef int64_t last_of(self, Py_ssize_t env, int64_t position, double *total) noexcept nogil:
        """The last step of the transition of n steps that begins at a position; -1: there is none.

        Its rewards are summed in `total`.
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
        for i in range(1, self.stack):  # are all frames of its observation there?
            if self.kinds[self.row(env, frame)] & START:
                break
            if self.kinds[self.row(env, frame)] & BROKEN or frame == self.oldest[env]:
                return -1
            frame -= 1
        at = position
        total[0] = self.rewards[row]
        for i in range(1, self.n_step):
            if self.kinds[row] & (TERMINATED | TRUNCATED):
                break
            if at + 1 == self.committed[env]:  # the next one is still to come
                return -1
            row = self.row(env, at + 1)
            if not self.is_transition(row):
                break
            at += 1
            total[0] += self.discounts[i] * self.rewards[row]
        return at

    cdef int64_t count_candidates(self) noexcept nogil:
        """The number of records that may be drawn, transitions or not; fills `ends`."""
        cdef int64_t total = 0
        cdef int64_t some
        cdef Py_ssize_t env
        for env in range(self.num_envs):
            some = self.committed[env] - self.oldest[env] - 1
            if some > 0:
                total += some
            self.ends[env] = total
        return total

    cdef Py_ssize_t env_of(self, int64_t number) noexcept nogil:
        """The env of a candidate, by its number."""
        cdef Py_ssize_t low = 0
        cdef Py_ssize_t high = self.num_envs - 1
        cdef Py_ssize_t middle
        while low < high:
            middle = (low + high) // 2
            if number < self.ends[middle]:
                high = middle
            else:
                low = middle + 1
        return low

    cdef Py_ssize_t row_at(self, double share) noexcept nogil:
        """The row at which the sum of the priorities reaches `share`."""
        cdef Py_ssize_t node = 1
        while node < self.leaves:
            node *= 2
            if share >= self.tree[node] and self.tree[node + 1] > 0:
                share -= self.tree[node]
                node += 1
        return node - self.leaves

    cdef int64_t position_in(self, Py_ssize_t row) noexcept nogil:
        """The position of the record in a row."""
        cdef Py_ssize_t env = row % self.num_envs
        cdef int64_t newest = self.committed[env] - 1
        cdef int64_t place = row // self.num_envs
        return newest - (newest - place) % self.depth if newest >= place else -1

    cdef int take_row(self, Py_ssize_t i, Py_ssize_t env, int64_t position) except -1:
        """Makes a transition row `i` of the batch; 0: it is none."""
        cdef double total
        cdef Py_ssize_t row
        cdef int64_t last = self.last_of(env, position, &total)
        if last < 0:
            return 0
        row = self.row(env, last)
        self.envs[i], self.steps[i], self.lasts[i] = env, position, last
        self.sums[i] = <float>total
        self.terminated[i] = self.kinds[row] & TERMINATED != 0
        self.truncated[i] = self.kinds[row] & TRUNCATED != 0
        self.factors[i] = 0 if self.terminated[i] else <float>self.discounts[last - position + 1]
        return 1

    cdef tuple start_batch(self, Py_ssize_t size):
        """Makes room for a batch of another size: its rewards, discounts and flags."""
        if self.owner != getpid():
            raise RuntimeError("this replay is another process's: a fork cannot draw from it")
        self.check_damage()
        self.finish()
        self.requests = 0
        self.size = size
        self.envs = np.empty(size, np.intp)
        self.steps = np.empty(size, np.int64)
        self.lasts = np.empty(size, np.int64)
        arrays = (np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.bool_),
                  np.empty(size, np.bool_))
        self.sums, self.factors = arrays[0], arrays[1]
        self.terminated, self.truncated = arrays[2].view(np.uint8), arrays[3].view(np.uint8)
        return arrays

    def draw(self, rng, Py_ssize_t size):
        """Draws transitions: the small arrays of a batch, whose large ones `begin` fills.

        Returns:
            Rewards, discounts, terminations, truncations, indices and probabilities (None where all
            are alike).
        """
        cdef int64_t[::1] numbers
        cdef double[::1] shares
        cdef Py_ssize_t filled = 0
        cdef Py_ssize_t i
        cdef Py_ssize_t row
        cdef Py_ssize_t env
        cdef int64_t total
        cdef double weight
        cdef int rounds = 0
        cdef tuple arrays = self.start_batch(size)
        cdef double[::1] chances = None if self.tree is None else np.empty(size)
        total = self.count_candidates()
        while filled < size:
            rounds += 1
            if self.num_transitions == 0 or rounds > ROUNDS_MOST:
                raise RuntimeError(
                    f"there is nothing to sample yet: {total:,} records, {self.num_transitions:,} "
                    f"of them steps, and none that is followed by {self.n_step - 1} more or by its "
                    "episode's end. Step the envs first")
            if self.tree is None:
                numbers = rng.integers(total, size=max(size - filled, 16))
                for i in range(numbers.shape[0]):  # rows, first of all: memory is fetched meanwhile
                    env = self.env_of(numbers[i])
                    numbers[i] += self.committed[env] - self.ends[env]
                    row = self.row(env, numbers[i])
                    numbers[i] = numbers[i] * self.num_envs + env
                    sv_fetch(<char *>&self.kinds[row], 1)
                    sv_fetch(<char *>&self.rewards[row], 1)
                for i in range(numbers.shape[0]):
                    filled += self.take_row(
                        filled, numbers[i] % self.num_envs, numbers[i] // self.num_envs)
                    if filled == size:
                        break
            else:
                shares = rng.random(size - filled)
                weight = self.tree[1]
                for i in range(shares.shape[0]):
                    if rounds == 1:  # from equal parts of the sum: the batch has less variance
                        shares[i] = (i + shares[i]) / size
                    row = self.row_at(shares[i] * weight)
                    if self.take_row(filled, row % self.num_envs, self.position_in(row)):
                        # Here, for another thread may step envs as soon as Python runs.
                        chances[filled] = self.tree[self.leaves + row] / weight
                        filled += 1
        indices = np.asarray(self.steps) * self.num_envs + np.asarray(self.envs)
        return *arrays, indices, None if self.tree is None else np.asarray(chances)

    def choose(self, const int64_t[::1] indices):
        """As `draw`, of given transitions.

        Raises:
            IndexError: One of them is no transition, or was overwritten.
        """
        cdef Py_ssize_t i
        cdef tuple arrays = self.start_batch(indices.shape[0])
        for i in range(indices.shape[0]):
            if indices[i] < 0 or not self.take_row(
                    i, indices[i] % self.num_envs, indices[i] // self.num_envs):
                raise IndexError(f"there is no transition {indices[i]} (any more)")
        return *arrays, np.array(indices), None

    def holds(self, const int64_t[::1] indices):
        """Whether each of these transitions is there."""
        cdef double total
        cdef Py_ssize_t i
        held = np.empty(indices.shape[0], np.bool_)
        cdef uint8_t[::1] results = held.view(np.uint8)
        for i in range(indices.shape[0]):
            results[i] = indices[i] >= 0 and self.last_of(
                indices[i] % self.num_envs, indices[i] // self.num_envs, &total) >= 0
        return held

    def latest(self):
        """The index of each env's last step, before a reset that came after it; -1: it is no
        transition, or there is none."""
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
        """Sets priorities, which are positive; transitions that are gone are passed over."""
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

    def room(self, key, tuple shape, dtype):
        """An array for a part of a batch; one that nobody holds any more is handed out again."""
        cdef Pool pool = self.pools.get(key)
        if pool is None or pool.like.shape != shape:
            pool = self.pools[key] = Pool(np.empty(shape, dtype), large=True)
        return pool.new()

    def begin(self, observations, after, actions):
        """Begins to fill the large arrays of the batch that was drawn last; `finish` ends it.

        Envs may have been stepped since, by another thread: False: so often that it is to be drawn
        again.

        Args:
            observations: An array for each part of its observations.
            after: Likewise, of the next observations.
            actions: Likewise, of the actions.
        """
        cdef Py_ssize_t i
        cdef Py_ssize_t nbytes = 0
        self.finish()
        for i in range(self.num_observations):
            nbytes += 2 * self.stack * self.parts[i].nbytes
            self.parts[i].before = <char *>data_of(observations[i])
            self.parts[i].after = <char *>data_of(after[i])
        for i in range(len(actions)):
            self.parts[self.num_observations + i].before = <char *>data_of(actions[i])
            self.parts[self.num_observations + i].after = NULL
        if self.outdated():
            return False
        if nbytes * self.size < SHARED_BYTES:
            for i in range(min(AHEAD, self.size)):  # with the GIL: nobody asks envs meanwhile
                self.fetch_row(i)
            for i in range(self.size):
                if i + AHEAD < self.size:
                    self.fetch_row(i + AHEAD)
                self.fill_row(i)
            return True
        self.batch = observations, after, actions
        c.sv_parallel_begin(self.threads, fill, <void *>self, (self.size + CHUNK - 1) // CHUNK)
        return True

    cpdef int finish(self) except -1:
        """Waits until the batch is complete, and helps."""
        cdef object batch = self.batch
        if batch is None:
            return 0
        if self.owner == getpid():
            with nogil:
                c.sv_parallel_finish(self.threads)
        if self.batch is batch:  # else another thread has finished it, and begun the next one
            self.batch = None
        return 0

    cdef void fetch_row(self, Py_ssize_t i) noexcept nogil:
        """Has the caches fetch what a row of a batch is made of: rows lie anywhere in memory."""
        cdef Py_ssize_t j
        cdef Py_ssize_t row = self.row(self.envs[i], self.steps[i])
        cdef Py_ssize_t before = self.row(self.envs[i], self.steps[i] - 1)
        sv_fetch(<char *>&self.kinds[before], 1)
        for j in range(self.num_parts):
            sv_fetch(self.parts[j].rows + row * self.parts[j].nbytes, self.parts[j].nbytes)
            if self.parts[j].after is not NULL:
                sv_fetch(self.parts[j].rows + before * self.parts[j].nbytes, self.parts[j].nbytes)

    cdef void fill_row(self, Py_ssize_t i) noexcept nogil:
        cdef Py_ssize_t j
        cdef Part *part
        cdef Py_ssize_t row = self.row(self.envs[i], self.steps[i])
        for j in range(self.num_parts):
            part = &self.parts[j]
            if part.after is NULL:
                memcpy(part.before + i * part.nbytes, part.rows + row * part.nbytes, part.nbytes)
            else:
                self.fill_stack(part, part.before, i, self.steps[i] - 1)
                self.fill_stack(part, part.after, i, self.lasts[i])

    cdef void fill_stack(self, Part *part, char *target, Py_ssize_t i,
                         int64_t position) noexcept nogil:
        """Puts an observation together: the frame at a position, and those before it."""
        cdef Py_ssize_t nbytes = part.nbytes
        cdef Py_ssize_t frame
        cdef Py_ssize_t row
        cdef char *first = target + i * self.stack * nbytes
        for frame in range(self.stack - 1, -1, -1):
            row = self.row(self.envs[i], position)
            memcpy(first + frame * nbytes, part.rows + row * nbytes, nbytes)
            if self.kinds[row] & START:
                break
            position -= 1
        else:
            return
        if self.zeros:
            memset(first, 0, frame * nbytes)
            return
        while frame > 0:
            frame -= 1
            memcpy(first + frame * nbytes, part.rows + row * nbytes, nbytes)


cdef void fill(void *argument, size_t index) noexcept nogil:
    """A turn: some rows of a batch."""
    cdef Py_ssize_t i
    cdef Py_ssize_t begin = <Py_ssize_t>index * CHUNK
    for i in range(begin, min(begin + CHUNK, (<Sampler>argument).size)):
        (<Sampler>argument).fill_row(i)

"""Frames of results: where results lie, when they are overwritten, and how they are lent.

The result of an env is a *row*: observation, reward and two flags. A *frame* has a row for each
env: row = frame * num_envs + env. Each request names the frame for its results, and the env's worker
writes there. Only `Frames` chooses it:

    memory               what the user gets                     overwritten
    one frame            copies; with copy=False observations   by the next step
                         as they lie there, without a lease
    a frame more, where  (so that an env whose results are      by the step after the next
    faults are handled   lost can show its last ones)
    num_buffers frames,  views of a batch of neighbours,        after their lease
    with copy=False      leased; copies of other batches
    blocks, for large    the observations of a batch step,      after their lease
    observations         leased; the other arrays are copies
    rollouts             views of all their frames, leased      after their lease

The parent itself writes results only of envs that are not in flight: `truncate`, `mark_truncated`
and `come_home` do.

A `Lender` lends rows: it marks them, and no request names a marked row. A `Lease` clears the marks:
when its last array is gone, when its owner releases it, or `hold_batches` batches later.

A *block* has room for the observations of all envs. With copy=True the workers write observations
to the frame and to a block, and the block becomes the user's own array. So the parent need not copy
them, for which all workers would have to wait. Where all blocks are leased, or after a fault or an
interrupted call, the observations are copied from the frame. Arrays that a user holds when the
process forks are copied for the fork: csrc/pages.h.

The numbers in requests: first the frames at home, in the segment; then the same frames with each of
the blocks; then the frames of rollouts, in memory of their own.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_GetBuffer,
)

from shmvec._core.arrays cimport Pool, array_over, data_of, shape_of
from shmvec._core.codec cimport Codec
from shmvec._core.csrc cimport (
    sv_area_add,
    sv_area_is_common,
    sv_area_remove,
    sv_is_marked,
    sv_marks_clear,
    sv_marks_set,
)

import gc
from collections import deque
from weakref import ref

import numpy as np


@cython.no_gc_clear  # clearing would discard the exporter without releasing its buffer
cdef class Lender:
    """Rows in shared memory, and which of them are lent."""

    def __cinit__(self, memory, *args, **kwargs):
        PyObject_GetBuffer(memory, &self.export, PyBUF_WRITABLE)

    def __dealloc__(self):
        PyBuffer_Release(&self.export)

    def __init__(self, memory, num_rows):
        self.marks = np.zeros(num_rows, np.uint8)

    cpdef bint leased(self, Py_ssize_t first, Py_ssize_t count):
        cdef Py_ssize_t row
        for row in range(first, first + count):
            if sv_is_marked(&self.marks[0], row):
                return True
        return False

    cpdef Lease lease(self, Py_ssize_t first, Py_ssize_t count):
        return Lease(self, first, count)


@cython.no_gc  # it is in no cycle, and its lender must exist when it is freed
cdef class Lease:
    """Marks rows as lent while it lives; the arrays that show them have it as their base."""

    def __cinit__(self, Lender lender not None, Py_ssize_t first, Py_ssize_t count):
        self.lender = lender
        self.first = first
        self.count = count
        sv_marks_set(&lender.marks[0], first, count)

    def __dealloc__(self):
        self.end()

    def release(self):
        with cython.critical_section(self):  # only once: later these marks may be another lease's
            self.end()

    cdef void end(self) noexcept:
        if not self.ended:
            self.ended = True
            sv_marks_clear(&self.lender.marks[0], self.first, self.count)

    @property
    def released(self):
        return self.ended

    def __getbuffer__(self, Py_buffer *view, int flags):
        cdef Py_buffer *export = &self.lender.export
        PyBuffer_FillInfo(view, self, export.buf, export.len, False, flags)


def release(array):
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"release() takes an array of a batch, such as its rewards, got {type(array).__name__}"
        )
    owner = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    # Other arrays are the user's own, without a lease, or with one that he need not release.
    if isinstance(owner, Lease) and not isinstance((<Lease>owner).lender, Blocks):
        owner.release()


cdef class Results(Lender):
    """Frames of results."""

    def __init__(self, memory, Codec observations, rewards, terminations, truncations,
                 Py_ssize_t num_envs):
        super().__init__(memory, len(rewards))
        self.observations = observations
        self.rewards = rewards
        self.terminations = terminations
        self.truncations = truncations
        self.reward_of = rewards
        self.terminated_of = terminations.view("u1")
        self.truncated_of = truncations.view("u1")
        self.copies = tuple([Pool(array) for array in (rewards, terminations, truncations)])
        self.num_envs = num_envs
        self.num_frames = len(rewards) // num_envs

    cdef tuple gather(self, object rows):
        """Copies of rows, an array of their numbers."""
        cdef const Py_ssize_t[::1] row_of = rows
        return (self.observations.gather(row_of), *self.rewards_and_flags(row_of))

    cdef tuple rewards_and_flags(self, const Py_ssize_t[::1] row_of):
        """Copies of the rewards, terminations and truncations of rows."""
        cdef Py_ssize_t count = row_of.shape[0]
        cdef Py_ssize_t i
        if self.gathered is None or shape_of((<Pool>self.gathered[0]).like)[0] != count:
            self.gathered = tuple([
                Pool(np.empty(count, array.dtype))
                for array in (self.rewards, self.terminations, self.truncations)
            ])
        cdef object rewards = (<Pool>self.gathered[0]).new()
        cdef object terminations = (<Pool>self.gathered[1]).new()
        cdef object truncations = (<Pool>self.gathered[2]).new()
        for i in range(count):
            (<double *>data_of(rewards))[i] = self.reward_of[row_of[i]]
            (<uint8_t *>data_of(terminations))[i] = self.terminated_of[row_of[i]]
            (<uint8_t *>data_of(truncations))[i] = self.truncated_of[row_of[i]]
        return rewards, terminations, truncations

    cpdef tuple view(self, Lease lease, tuple lead):
        return (
            self.observations.view(lease, lease.first, lead),
            array_over(lease, <char *>&self.reward_of[lease.first], lead, self.rewards.dtype),
            array_over(lease, <char *>&self.terminated_of[lease.first], lead,
                       self.terminations.dtype),
            array_over(lease, <char *>&self.truncated_of[lease.first], lead,
                       self.truncations.dtype),
        )

    def copy_rows(self, Results source, const Py_ssize_t[::1] rows, Py_ssize_t first):
        cdef Py_ssize_t count = len(rows)
        observations, rewards, terminations, truncations = source.gather(np.asarray(rows))
        self.observations.put_many(first, observations)
        self.rewards[first:first + count] = rewards
        self.terminations[first:first + count] = terminations
        self.truncations[first:first + count] = truncations

    cdef int copy_row(self, Results source, Py_ssize_t row, Py_ssize_t target) except -1:
        """Copies one row of other frames, or of these frames, to a row of these."""
        self.observations.copy_row(source.observations, row, target)
        self.reward_of[target] = source.reward_of[row]
        self.terminated_of[target] = source.terminated_of[row]
        self.truncated_of[target] = source.truncated_of[row]
        return 0


cdef class Blocks(Lender):
    """Blocks for the observations of all envs; each of them becomes an array of the user's."""

    def __init__(self, memory, Codec observations, Py_ssize_t num_envs, Py_ssize_t num_blocks):
        super().__init__(memory, num_blocks * num_envs)
        self.observations = observations
        self.num_envs = num_envs
        self.num_blocks = num_blocks
        if not sv_area_add(&self.area, self.export.buf, self.export.len, &self.marks[0],
                           num_blocks * num_envs):
            raise MemoryError
        self.added = True

    def __dealloc__(self):
        if self.added:
            sv_area_remove(&self.area)

    cdef Py_ssize_t unleased(self):
        """A block that is not lent; -1: there is none."""
        cdef Py_ssize_t block
        if not sv_area_is_common(&self.area):
            for block in range(self.num_blocks):
                if not self.leased(block * self.num_envs, self.num_envs):
                    return block
        return -1

    cdef object lend(self, Py_ssize_t block):
        """The observations in a block, leased."""
        cdef Lease lease = self.lease(block * self.num_envs, self.num_envs)
        return self.observations.view(lease, lease.first, (self.num_envs,))


cdef class Frames:
    """Register of where each env's last results are, and where its next ones go."""

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
                if sv_is_marked(&self.home.marks[0], row) or (
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

"""Where each env's results are: in frames of the segment, or in those of a rollout.

Each request names the frame for its results. There is one frame, unless batches are handed out as
borrowed views (*leasing*: a frame that is held is not written), or faults are handled (*keep_last*:
an env whose results are lost keeps its last ones). A frame's number may also name a block of the
pool, where workers write observations as well: first come the frames at home without a block, then
the same frames with each of the blocks, then the frames of rollouts.
"""

cimport cython

from shmvec._core.arrays cimport Lease, Pool
from shmvec._core.codec cimport Codec, copied
from shmvec._core.csrc cimport sv_is_marked
from shmvec._core.results cimport Results

import gc

import numpy as np


cdef class Frames:
    def __init__(self, Results home, copy=True, leasing=False, keep_last=False, Pool pool=None):
        self.home = home
        self.copy = copy
        self.leasing = leasing
        self.keep_last = keep_last
        self.several = leasing or keep_last
        self.away = -1
        self.uneven = False
        self.ahead = np.zeros(home.num_envs, np.intp)
        self.pool = pool
        self.block = -1
        self.beyond = home.num_frames
        if pool is not None:
            self.beyond += home.num_frames * <Py_ssize_t>len(pool.codecs)
        self.num_envs = home.num_envs
        self.everyone = np.arange(home.num_envs, dtype=np.intp)
        self.rows = np.arange(home.num_envs, dtype=np.intp)
        self.last_rows = np.arange(home.num_envs, dtype=np.intp)

    # ---- where new results go ----------------------------------------------------------------

    cdef Py_ssize_t free(self, const Py_ssize_t[::1] envs):
        """A frame where no row of these envs is leased or shows the last results; -1 if none."""
        cdef Py_ssize_t frame
        cdef Py_ssize_t i
        cdef Py_ssize_t row
        for frame in range(self.home.num_frames):
            for i in range(envs.shape[0]):
                row = frame * self.num_envs + envs[i]
                if sv_is_marked(&self.home.leased_of[0], row) or (
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
        if not self.leasing:  # their last results are not all in one frame
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

    cdef int aim(self, const Py_ssize_t[::1] envs, Py_ssize_t frame) except -1:
        """Notes where the results of these envs will be."""
        cdef Py_ssize_t i
        for i in range(envs.shape[0]):
            self.last_rows[envs[i]] = self.rows[envs[i]]
            self.rows[envs[i]] = frame * self.num_envs + envs[i]
        return 0

    cdef Py_ssize_t aim_all(self, Py_ssize_t rollout_frame) except -1:
        """The frame for new results of all envs: this one of the rollouts, or one at home."""
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
        if self.pool is not None:
            self.block = self.pool.unheld()
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
        """Where in a rollout each env's last results are."""
        frames = self.away + np.asarray(self.ahead)
        return frames * self.num_envs + np.asarray(self.everyone)

    def end_rollout(self):
        """Brings the last results home: their frame is the user's from now on."""
        self.come_home()

    cdef int come_home(self, Py_ssize_t asked=0) except -1:
        """Copies the last results to the frames in the segment if they are in a rollout.

        Raises while results of the `asked` are still pending there.
        """
        if asked > 0 and self.uneven:
            raise RuntimeError(
                "envs are out whose results go to a rollout: wait until they are taken, or drop "
                "them. Nothing was sent to any env.")
        if self.away >= 0:
            rows = self.rows_away()
            self.aim(self.everyone, self.choose(self.everyone))
            self.home.copy_rows(self.rollouts, rows, self.rows[0])
            self.meet(-1)
        return 0

    def end(self):
        """Releases memory that is no longer in use, as the vector env is closed."""
        with cython.critical_section(self):
            self.block = -1
            if self.pool is not None:
                self.pool.end()

    # ---- single envs -------------------------------------------------------------------------

    cdef Results where(self, Py_ssize_t env, Py_ssize_t *row, Py_ssize_t *last):
        """Where an env's last results are, and the ones before them."""
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
        """An env's last observation; with ``before``, the one before it, as the step is lost."""
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

    cdef tuple all(self, bint usual):
        """Observations, rewards, terminations and truncations of all envs.

        `usual` says that all envs have written their results in one lockstep request, the last.
        """
        cdef Results home = self.home
        if self.away >= 0:  # no env was asked since
            self.come_home()
        cdef Py_ssize_t block
        observations = None
        with cython.critical_section(self):  # another thread may call `end`
            block = self.block
            self.block = -1  # it is handed out once at most
            if usual and block >= 0:
                observations = (<Codec>self.pool.codecs[block]).lend(self.pool)
        if observations is None:
            observations = self.observe()
        if not self.several:
            return (observations, copied(home.rewards, sizeof(double)),
                    copied(home.terminations, 1), copied(home.truncations, 1))
        index = np.asarray(self.rows)
        return observations, home.rewards[index], home.terminations[index], home.truncations[index]

    cdef tuple some(self, object envs):
        """Results of some envs, in this order, and the lease if these are views."""
        cdef Py_ssize_t i
        cdef Py_ssize_t count = len(envs)
        cdef const Py_ssize_t[::1] row_of
        if self.away >= 0:  # the filler of a rollout reads it there; others get copies
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
                return self.home.view(lease, row_of[0], (count,)), lease
        return self.home.gather(rows), None

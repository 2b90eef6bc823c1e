"""Results of steps: observations, rewards and flags, in frames.

A frame has a row for each env: row = frame * num_envs + env. Each request names the frame for its
results. So a batch that was handed out as borrowed views does not change while the envs go on in
other frames, and the steps of a rollout lie one after the other.
"""

from shmvec._core.csrc cimport sv_is_marked

import numpy as np


cdef class Results:
    """The arrays of some frames, and which rows are leased."""

    def __init__(self, memory, Codec observations, rewards, terminations, truncations,
                 Py_ssize_t num_envs):
        self.memory = memory
        self.observations = observations
        self.rewards = rewards
        self.terminations = terminations
        self.truncations = truncations
        self.reward_of = rewards
        self.terminated_of = terminations.view("u1")
        self.truncated_of = truncations.view("u1")
        self.num_envs = num_envs
        self.num_frames = len(rewards) // num_envs
        self.leases = np.zeros(len(rewards), np.uint8)
        self.leased_of = self.leases

    def leased(self, Py_ssize_t first, Py_ssize_t count):
        cdef Py_ssize_t row
        for row in range(first, first + count):
            if sv_is_marked(&self.leased_of[0], row):
                return True
        return False

    def lease(self, Py_ssize_t first, Py_ssize_t count):
        return Lease(self.memory, self.leases, first, count)

    cdef tuple gather(self, object rows):
        """Copies of rows, an array of their numbers."""
        return (self.observations.gather(rows), self.rewards[rows], self.terminations[rows],
                self.truncations[rows])

    cpdef tuple view(self, Lease lease, Py_ssize_t first, tuple lead):
        return (
            self.observations.view(lease, first, lead),
            lease.show(<char *>&self.reward_of[first], lead, self.rewards.dtype),
            lease.show(<char *>&self.terminated_of[first], lead, self.terminations.dtype),
            lease.show(<char *>&self.truncated_of[first], lead, self.truncations.dtype),
        )

    def copy_rows(self, Results source, const Py_ssize_t[::1] rows, Py_ssize_t first):
        cdef Py_ssize_t count = len(rows)
        observations, rewards, terminations, truncations = source.gather(np.asarray(rows))
        self.observations.put_many(first, observations)
        self.rewards[first:first + count] = rewards
        self.terminations[first:first + count] = terminations
        self.truncations[first:first + count] = truncations

    cdef int copy_row(self, Results source, Py_ssize_t row, Py_ssize_t target) except -1:
        """Copies one row of other frames, or of these."""
        self.observations.copy_row(source.observations, row, target)
        self.reward_of[target] = source.reward_of[row]
        self.terminated_of[target] = source.terminated_of[row]
        self.truncated_of[target] = source.truncated_of[row]
        return 0

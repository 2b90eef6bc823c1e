"""The twin of RecordEpisodeStatistics."""

cimport cython

import time

from shmvec._wrappers.chain cimport Step, Twin


@cython.final
cdef class RecordEpisodeStatistics(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        attributes = self.step_inner(action, step)
        returns = self.get(attributes, "episode_returns")
        returns += step.reward
        attributes["episode_returns"] = returns
        lengths = self.get(attributes, "episode_lengths")
        lengths += 1
        attributes["episode_lengths"] = lengths
        if step.terminated or step.truncated:
            self.end(attributes, step)
        return 0

    cdef int end(self, dict attributes, Step step) except -1:
        """Records the episode."""
        wrapper = self.wrapper
        info = step.info
        assert wrapper._stats_key not in info
        took = round(time.perf_counter() - wrapper.episode_start_time, 6)
        info[wrapper._stats_key] = {
            "r": wrapper.episode_returns, "l": wrapper.episode_lengths, "t": took}
        wrapper.time_queue.append(took)
        wrapper.return_queue.append(wrapper.episode_returns)
        wrapper.length_queue.append(wrapper.episode_lengths)
        wrapper.episode_count += 1
        wrapper.episode_start_time = time.perf_counter()
        return 0

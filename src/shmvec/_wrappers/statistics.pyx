"""The twin of RecordEpisodeStatistics."""

cimport cython

import time

from shmvec._wrappers.chain cimport Step, Twin


@cython.final
cdef class RecordEpisodeStatistics(Twin):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        own = self.after_inner(action, step)
        returns = self.get(own, "episode_returns")
        returns += step.reward
        own["episode_returns"] = returns
        lengths = self.get(own, "episode_lengths")
        lengths += 1
        own["episode_lengths"] = lengths
        if step.terminated or step.truncated:
            self.end(own, step)
        return 0

    cdef int end(self, dict own, Step step) except -1:
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

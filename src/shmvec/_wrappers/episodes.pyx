"""Twins of wrappers that check, count or record the steps of an episode."""

cimport cython

import time

from shmvec._wrappers.chain cimport Chain, Step, Stepper, Twin


@cython.final
cdef class PassiveEnvChecker(Twin):
    cdef bint checks_reuse  # since Gymnasium 1.4

    def __init__(self, wrapper, Chain chain, inner_env, Stepper inner, method):
        Twin.__init__(self, wrapper, chain, inner_env, inner, method)
        self.checks_reuse = "checked_data_reuse" in type(wrapper).step.__code__.co_names

    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        if (self.get(attributes, "checked_step") is False
                or self.checks_reuse and self.get(attributes, "checked_data_reuse") is False):
            return self.step_in_python(action, step)
        return self.inner.step(action, step)


@cython.final
cdef class OrderEnforcing(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        if not self.get(attributes, "_has_reset"):
            return self.step_in_python(action, step)
        return self.inner.step(action, step)


@cython.final
cdef class TimeLimit(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        attributes = self.step_inner(action, step)
        elapsed = self.get(attributes, "_elapsed_steps")
        elapsed += 1
        attributes["_elapsed_steps"] = elapsed
        if elapsed >= self.get(attributes, "_max_episode_steps"):
            step.truncated = True
        return 0


@cython.final
cdef class Autoreset(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        if self.get(attributes, "autoreset"):
            return self.step_in_python(action, step)
        attributes = self.step_inner(action, step)
        attributes["autoreset"] = step.terminated or step.truncated
        return 0


@cython.final
cdef class TimeAwareObservation(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        steps = self.get(attributes, "timesteps")
        steps += 1
        attributes["timesteps"] = steps
        self.inner.step(action, step)
        step.unpack()
        step.observation = self.wrapper.observation(step.observation)
        return 0


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


@cython.final
cdef class Monitor(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        if self.get(attributes, "needs_reset"):
            return self.step_in_python(action, step)
        attributes = self.step_inner(action, step)
        rewards = self.get(attributes, "rewards")
        rewards.append(float(step.reward))
        if step.terminated or step.truncated:
            self.end(step.info)
        steps = self.get(attributes, "total_steps")
        steps += 1
        attributes["total_steps"] = steps
        return 0

    cdef int end(self, object info) except -1:
        """Records the episode."""
        wrapper = self.wrapper
        wrapper.needs_reset = True
        episode_return, length = sum(wrapper.rewards), len(wrapper.rewards)
        took = round(time.time() - wrapper.t_start, 6)
        episode = {"r": round(episode_return, 6), "l": length, "t": took}
        for name in wrapper.info_keywords:
            episode[name] = info[name]
        wrapper.episode_returns.append(episode_return)
        wrapper.episode_lengths.append(length)
        wrapper.episode_times.append(time.time() - wrapper.t_start)
        episode.update(wrapper.current_reset_info)
        if wrapper.results_writer:
            wrapper.results_writer.write_row(episode)
        info["episode"] = episode
        return 0

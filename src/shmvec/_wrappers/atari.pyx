"""Twins of Stable-Baselines3's StickyActionEnv, EpisodicLifeEnv and Monitor."""

cimport cython

import time

from shmvec._wrappers.chain cimport Step, Twin


@cython.final
cdef class StickyActionEnv(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        if self.wrapper.np_random.random() >= self.get(attributes, "action_repeat_probability"):
            attributes["_sticky_action"] = action
        return self.inner.step(self.get(attributes, "_sticky_action"), step)


@cython.final
cdef class EpisodicLifeEnv(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        attributes = self.step_inner(action, step)
        attributes["was_real_done"] = step.terminated or step.truncated
        lives = self.get(attributes, "env").unwrapped.ale.lives()
        if 0 < lives < self.get(attributes, "lives"):
            step.terminated = True
        attributes["lives"] = lives
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

"""Twins of Stable-Baselines3's wrappers for Atari that have a step of their own, and of Monitor."""

cimport cython

import time

import numpy as np

from shmvec._core.arrays cimport data_of, has_dtype, ndim_of, shape_of, size_of
from shmvec._wrappers.chain cimport Step, Twin
from shmvec._wrappers.numbers cimport is_plain

cdef object _uint8 = np.dtype(np.uint8)


@cython.final
cdef class StickyActionEnv(Twin):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        if self.wrapper.np_random.random() >= self.get(own, "action_repeat_probability"):
            own["_sticky_action"] = action
        return self.inner.step(self.get(own, "_sticky_action"), step)


@cython.final
cdef class EpisodicLifeEnv(Twin):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        self.inner.step(action, step)
        step.unpack()
        own["was_real_done"] = step.terminated or step.truncated
        lives = self.below.unwrapped.ale.lives()
        if 0 < lives < self.get(own, "lives"):
            step.terminated = True
        own["lives"] = lives
        return 0


@cython.final
cdef class MaxAndSkipEnv(Twin):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        cdef object total = 0.0
        cdef Py_ssize_t i
        skip = self.get(own, "_skip")
        if type(skip) is not int or not 0 < skip < 1 << 30:
            return self.by_python(action, step)
        for i in range(skip):
            self.inner.step(action, step)
            step.unpack()
            ended = step.terminated or step.truncated
            if i >= skip - 2:
                self.get(own, "_obs_buffer")[i - (skip - 2)] = step.observation
            total = total + float(step.reward)
            if ended:
                break
        frames = self.get(own, "_obs_buffer")
        largest = _maximum(frames)
        step.observation = frames.max(axis=0) if largest is None else largest
        step.reward = total
        return 0


@cython.final
cdef class Monitor(Twin):
    cdef int step_with(self, dict own, object action, Step step) except -1:
        if self.get(own, "needs_reset"):
            return self.by_python(action, step)
        self.inner.step(action, step)
        step.unpack()
        rewards = self.get(own, "rewards")
        rewards.append(float(step.reward))
        if step.terminated or step.truncated:
            self.end(step.info)
        steps = self.get(own, "total_steps")
        steps += 1
        own["total_steps"] = steps
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


cdef object _maximum(object frames):
    """The larger of two frames, byte by byte, as a new array; None: NumPy must make it."""
    if not (is_plain(frames) and has_dtype(frames, _uint8) and ndim_of(frames) > 1
            and shape_of(frames)[0] == 2):
        return None
    largest = np.empty(frames.shape[1:], _uint8)
    cdef Py_ssize_t size = size_of(largest)
    cdef const unsigned char *first = <unsigned char *>data_of(frames)
    _larger(first, first + size, <unsigned char *>data_of(largest), size)
    return largest


cdef void _larger(const unsigned char *first, const unsigned char *second,
                  unsigned char *largest, Py_ssize_t size) noexcept:
    cdef Py_ssize_t i
    for i in range(size):
        largest[i] = first[i] if first[i] > second[i] else second[i]

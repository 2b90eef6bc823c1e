"""Gymnasium's code for which there are twins: what a class must do for a twin to take its place.

A method of a wrapper is recognised if it has compiled to the same code as the one here, which
Python compiles as well: so it is what runs that is compared, not a file or a version, on any
Python. None of it is ever called.

Copied from Gymnasium (MIT license, Copyright (c) 2016 OpenAI, 2022 Farama Foundation), without
comments and annotations. Where its versions differ, a class with a version in its name has the
other code.
"""

# mypy: ignore-errors
# ruff: noqa: D100, D101, D102, D103, D104, D400, D415, D419, E731

from __future__ import annotations

import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils.passive_env_checker import env_step_passive_checker
from gymnasium.wrappers import utils
from gymnasium.wrappers.utils import update_mean_var_count_from_moments

try:
    from gymnasium.utils.passive_env_checker import env_data_reuse_passive_checker
except ImportError:  # before 1.4
    env_data_reuse_passive_checker = None

__all__ = [
    "HELPERS",
    "ClipAction",
    "ClipReward",
    "FlattenObservation",
    "NormalizeObservation",
    "NormalizeReward",
    "OrderEnforcing",
    "PassiveEnvChecker",
    "PassiveEnvChecker13",
    "RecordEpisodeStatistics",
    "RunningMeanStd",
    "TimeLimit",
    "TransformAction",
    "TransformObservation",
    "TransformReward",
    "Wrapper",
    "unpacked",
]


# ---- gymnasium/core.py ---------------------------------------------------------------------------


class Wrapper:
    def step(self, action):
        """."""
        return self.env.step(action)

    @property
    def action_space(self):
        """."""
        if self._action_space is None:
            return self.env.action_space
        return self._action_space

    @property
    def observation_space(self):
        """."""
        if self._observation_space is None:
            return self.env.observation_space
        return self._observation_space


class ObservationWrapper(Wrapper):
    def step(self, action):
        """."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self.observation(observation), reward, terminated, truncated, info


class RewardWrapper(Wrapper):
    def step(self, action):
        """."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, self.reward(reward), terminated, truncated, info


class ActionWrapper(Wrapper):
    def step(self, action):
        """."""
        return self.env.step(self.action(action))


# ---- gymnasium/wrappers/common.py ----------------------------------------------------------------


class TimeLimit(Wrapper):
    def step(self, action):
        """."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._elapsed_steps += 1

        if self._elapsed_steps >= self._max_episode_steps:
            truncated = True

        return observation, reward, terminated, truncated, info


class PassiveEnvChecker(Wrapper):  # 1.4
    def step(self, action):
        """."""
        if self.checked_step is False:
            self.checked_step = True
            result = env_step_passive_checker(self.env, action)

            obs, reward, terminated, truncated, info = result
            env_data_reuse_passive_checker(self._previous_data, (obs, info), "reset", "step")
            self._previous_data = (obs, info)

            return result
        else:
            result = self.env.step(action)

            if self.checked_data_reuse is False:
                obs, reward, terminated, truncated, info = result
                env_data_reuse_passive_checker(self._previous_data, (obs, info), "step", "step")
                self._previous_data = None
                self.checked_data_reuse = True

            return result


class PassiveEnvChecker13(Wrapper):  # 1.0 to 1.3
    def step(self, action):
        """."""
        if self.checked_step is False:
            self.checked_step = True
            return env_step_passive_checker(self.env, action)
        else:
            return self.env.step(action)


class OrderEnforcing(Wrapper):
    def step(self, action):
        """."""
        if not self._has_reset:
            raise ResetNeeded("Cannot call env.step() before calling env.reset()")
        return super().step(action)


class RecordEpisodeStatistics(Wrapper):
    def step(self, action):
        """."""
        obs, reward, terminated, truncated, info = super().step(action)

        self.episode_returns += reward
        self.episode_lengths += 1

        if terminated or truncated:
            assert self._stats_key not in info

            episode_time_length = round(time.perf_counter() - self.episode_start_time, 6)
            info[self._stats_key] = {
                "r": self.episode_returns,
                "l": self.episode_lengths,
                "t": episode_time_length,
            }

            self.time_queue.append(episode_time_length)
            self.return_queue.append(self.episode_returns)
            self.length_queue.append(self.episode_lengths)

            self.episode_count += 1
            self.episode_start_time = time.perf_counter()

        return obs, reward, terminated, truncated, info


# ---- gymnasium/wrappers/transform_*.py -----------------------------------------------------------


class TransformObservation(ObservationWrapper):
    def observation(self, observation):
        """."""
        return self.func(observation)


class FlattenObservation(TransformObservation):
    @staticmethod
    def made_func(env):
        return lambda obs: spaces.utils.flatten(env.observation_space, obs)


class TransformAction(ActionWrapper):
    def action(self, action):
        """."""
        return self.func(action)


class ClipAction(TransformAction):
    @staticmethod
    def made_func(env):
        return lambda action: np.clip(action, env.action_space.low, env.action_space.high)


class TransformReward(RewardWrapper):
    def reward(self, reward):
        """."""
        return self.func(reward)


class ClipReward(TransformReward):
    @staticmethod
    def made_func(min_reward, max_reward):
        return lambda x: np.clip(x, a_min=min_reward, a_max=max_reward)


# ---- gymnasium/wrappers/stateful_*.py ------------------------------------------------------------


class NormalizeObservation(ObservationWrapper):
    def observation(self, observation):
        """."""
        if self._update_running_mean:
            self.obs_rms.update(np.array([observation]))
        return np.float32(
            (observation - self.obs_rms.mean) / np.sqrt(self.obs_rms.var + self.epsilon)
        )


class NormalizeReward(Wrapper):
    def step(self, action):
        """."""
        obs, reward, terminated, truncated, info = super().step(action)

        self.discounted_reward = self.discounted_reward * self.gamma * (1 - terminated) + float(
            reward
        )
        if self._update_running_mean:
            self.return_rms.update(self.discounted_reward)

        normalized_reward = reward / np.sqrt(self.return_rms.var + self.epsilon)
        return obs, normalized_reward, terminated, truncated, info


# ---- gymnasium/wrappers/utils.py, gymnasium/spaces/utils.py --------------------------------------


class RunningMeanStd:
    def update(self, x):
        """."""
        batch_mean = np.mean(x, axis=0)
        batch_var = np.var(x, axis=0)
        batch_count = x.shape[0]
        self.update_from_moments(batch_mean, batch_var, batch_count)

    def update_from_moments(self, batch_mean, batch_var, batch_count):
        """."""
        self.mean, self.var, self.count = update_mean_var_count_from_moments(
            self.mean, self.var, self.count, batch_mean, batch_var, batch_count
        )


def _update_mean_var_count_from_moments(mean, var, count, batch_mean, batch_var, batch_count):
    """."""
    delta = batch_mean - mean
    tot_count = count + batch_count

    new_mean = mean + delta * batch_count / tot_count
    m_a = var * count
    m_b = batch_var * batch_count
    M2 = m_a + m_b + np.square(delta) * count * batch_count / tot_count
    new_var = M2 / tot_count
    new_count = tot_count

    return new_mean, new_var, new_count


def _flatten_box_multibinary(space, x):
    return np.asarray(x, dtype=space.dtype).flatten()


HELPERS = {  # of which twin: (a function that its code calls, its original)
    "NormalizeObservation": (
        lambda: utils.update_mean_var_count_from_moments,
        _update_mean_var_count_from_moments,
    ),
    "FlattenObservation": (
        lambda: spaces.utils.flatten.dispatch(gym.spaces.Box),
        _flatten_box_multibinary,
    ),
}
HELPERS["NormalizeReward"] = HELPERS["NormalizeObservation"]


def unpacked(result):
    """Five values, or the error that wrappers raise where a step returns something else."""
    observation, reward, terminated, truncated, info = result
    return observation, reward, terminated, truncated, info

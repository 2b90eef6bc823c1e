"""Time limits of single envs: the one that hangs is named, and nothing is lost."""

import multiprocessing
import time
from contextlib import contextmanager

import gymnasium as gym
import numpy as np
import pytest

from shmvec import EnvTimeoutError, ShmVectorEnv

DEADLINE = 100.0
LIMIT = 1.0  # what a loaded machine may take for a step that does nothing
HANG = 7  # this action, or seed, makes an env wait for its gate


class Gated(gym.Env):
    observation_space = gym.spaces.Box(0, 1000, (1,), np.float64)
    action_space = gym.spaces.Discrete(10)

    def __init__(self, gate):
        self.gate = gate
        self.count = 0

    def reset(self, *, seed=None, options=None):
        if seed == HANG:
            assert self.gate.wait(DEADLINE)
        self.count = 0
        return np.zeros(1), {}

    def step(self, action):
        if action == HANG:
            assert self.gate.wait(DEADLINE)
        self.count += 1
        return np.array([float(self.count)]), 0.0, action == 9, False, {}


@contextmanager
def gated(**options):
    gate = multiprocessing.get_context("fork").Event()
    envs = ShmVectorEnv([lambda: Gated(gate)] * 4, context="fork", num_workers=2, **options)
    try:
        yield envs, gate
    finally:
        gate.set()
        envs.close()


def patiently(call):
    """The results of a call, made again while an env is over its limit."""
    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            return call()
        except EnvTimeoutError:
            assert time.monotonic() < deadline


def test_a_step_that_hangs():
    with gated(step_timeout=LIMIT, reset_timeout=DEADLINE) as (envs, gate):
        envs.reset(seed=0)
        for _ in range(3):
            envs.step([1, 1, 1, 1])
        with pytest.raises(EnvTimeoutError, match=r"env 2 has been in step\(\)") as caught:
            envs.step([1, 1, HANG, 1])
        assert (caught.value.env, caught.value.operation) == (2, "step")
        assert caught.value.limit == pytest.approx(LIMIT)
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, multiprocessing.TimeoutError)
        with pytest.raises(EnvTimeoutError, match="env 2"):  # still
            envs.step([1, 1, 1, 1])
        gate.set()
        # The step that hung is finished; that of the failed call was never sent.
        observations = patiently(lambda: envs.step([1, 1, 1, 1]))[0]
        assert observations[:, 0].tolist() == [5, 5, 5, 5]


@pytest.mark.deep
def test_a_reset_that_hangs():
    with gated(reset_timeout=LIMIT) as (envs, gate):
        with pytest.raises(EnvTimeoutError, match=r"env 1 has been in reset\(\)"):
            envs.reset(seed=[0, HANG, 0, 0])
        gate.set()
        assert patiently(lambda: envs.reset(seed=0))[0].tolist() == [[0]] * 4
        envs.step([1, 1, 1, 9])
        envs.step([1, 1, 1, HANG])  # a reset, which does not look at the action


def test_partial_batches_go_on_without_it():
    with gated(step_timeout=LIMIT, batch_size=2) as (envs, gate):
        envs.async_reset()
        envs.recv(min_envs=2, timeout=DEADLINE)
        envs.recv(min_envs=2, timeout=DEADLINE)
        envs.send([HANG, 1, 1, 1])  # env 0 is first in its worker: env 1 waits for it
        assert sorted(patiently(envs.recv)[-1]["env_id"]) == [2, 3]
        with pytest.raises(EnvTimeoutError, match="env 0"):
            envs.recv()
        envs.send([1, 1], [2, 3])
        assert sorted(patiently(envs.recv)[-1]["env_id"]) == [2, 3]
        gate.set()
        assert sorted(patiently(envs.recv)[-1]["env_id"]) == [0, 1]


@pytest.mark.deep
@pytest.mark.parametrize("limit", [float("inf"), 1e300])
def test_limits_that_are_none(limit):
    with gated(step_timeout=limit, reset_timeout=limit) as (envs, _):
        envs.reset()
        assert envs.step([1] * 4)[0].tolist() == [[1]] * 4
        envs.step_async([1] * 4)
        assert envs.step_wait(timeout=limit)[0].tolist() == [[2]] * 4
        envs.send([1, 1], [0, 1])
        assert len(envs.recv(min_envs=1, timeout=limit)[0]) in (1, 2)


def test_bad_limits():
    for limit, options, error, message in (
        (0, {}, ValueError, "must be positive"),
        (-1.0, {}, ValueError, "must be positive"),
        (float("nan"), {}, ValueError, "must be positive"),
        ("soon", {}, TypeError, "must be seconds or None"),
        (1.0, {"num_workers": 0}, ValueError, "needs worker processes"),
    ):
        for name in ("step_timeout", "reset_timeout"):
            with pytest.raises(error, match=f"{name} {message}"):
                ShmVectorEnv([lambda: gym.make("CartPole-v1")], **{name: limit}, **options)

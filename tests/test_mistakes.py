"""What an exception says of a frequent mistake: env, part, what is needed, and what to do."""

import os
from contextlib import suppress

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter
from tables import deep

import shmvec
from shmvec import ShmVectorEnv, WorkerCrashError

WORKERS = pytest.mark.parametrize("num_workers", [0, 2, *deep(1)])


def make_counter():
    return Counter(9)


class Crashes(Counter):
    def step(self, action):
        os._exit(3)


def one_argument(observations):
    return np.zeros(len(observations), int)


MADE = []


@pytest.fixture(autouse=True)
def closed():
    yield
    while MADE:
        MADE.pop().close(terminate=True)


def made(make_env=make_counter, **options):
    envs = ShmVectorEnv([make_env] * 4, **options)
    MADE.append(envs)
    envs.reset(seed=1)
    return envs


def after_a_crash(num_workers):
    envs = made(lambda: Crashes(9), num_workers=max(1, num_workers))
    with suppress(WorkerCrashError):
        envs.step([0] * 4)
    envs.step([0] * 4)


# What is done, the exception, and the words that are in its message or its notes.
MISTAKES = {
    "one function": (
        lambda n: ShmVectorEnv(make_counter, num_workers=n),
        TypeError,
        ["env_fns must be a list", "[make_counter] * 8", "one function"],
    ),
    "one env": (
        lambda n: ShmVectorEnv(Counter(9), num_workers=n),
        TypeError,
        ["env_fns must be a list", "[make_env] * 8", "Counter"],
    ),
    "one id": (
        lambda n: ShmVectorEnv("CartPole-v1", num_workers=n),
        TypeError,
        ["env_fns must be a list", "shmvec.make_vec('CartPole-v1', num_envs=8)"],
    ),
    "autoreset mode": (
        lambda n: made(num_workers=n, autoreset_mode="same-step"),
        ValueError,
        ["autoreset_mode", "'NextStep'", "'same-step'", "Did you mean 'SameStep'?"],
    ),
    "seed is a word": (
        lambda n: made(num_workers=n).reset(seed="abc"),
        ValueError,
        ["seed must be an int", "list of 4", "'abc'"],
    ),
    "seed is a float": (
        lambda n: made(num_workers=n).reset(seed=1.5),
        TypeError,
        ["seed must be an int", "list of 4", "1.5"],
    ),
    "actions are None": (
        lambda n: made(num_workers=n).step([None] * 4),
        ValueError,
        ["wrong actions: all 4 are None", "Nothing was sent"],
    ),
    "an attribute of the envs": (
        lambda n: made(num_workers=n).gravity,
        AttributeError,
        ["has no attribute 'gravity'", "get_attr('gravity')"],
    ),
    "policy of one argument": (
        lambda n: shmvec.evaluate("CartPole-v1", one_argument, 2, num_workers=n),
        TypeError,
        ["policy(observations, env_ids)", "takes (observations)", "lambda"],
    ),
    "policy of one argument of a pipeline": (
        lambda n: shmvec.Pipeline(made(num_workers=n), one_argument),
        TypeError,
        ["policy(observations, env_ids)", "takes (observations)", "lambda"],
    ),
    "step after a crash": (
        after_a_crash,
        gym.error.ClosedEnvironmentError,
        ["A crash has closed it", "exit code 3", "in 'step'", "on_crash='restart'"],
    ),
}


@WORKERS
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake, num_workers):
    do, error, words = MISTAKES[mistake]
    with pytest.raises(error) as caught:
        do(num_workers)
    assert type(caught.value) is error
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    for each in words:
        assert each in said, said


def test_a_property_that_raises_says_what_it_lacks():
    class Derived(ShmVectorEnv):
        @property
        def broken(self):
            return self.get_attr("gravity")

    envs = Derived([make_counter], num_workers=0)
    with pytest.raises(AttributeError, match="'Counter' object has no attribute 'gravity'"):
        _ = envs.broken
    envs.close()

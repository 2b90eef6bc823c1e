"""What an exception says of a frequent mistake: env, part, what is needed, and what to do."""

import os
from contextlib import suppress
from threading import Lock

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from processes import output_of
from tables import deep

import shmvec
from shmvec import FaultPolicy, ShmVectorEnv, WorkerCrashError


def make_counter():
    return Counter(9)


class Crashes(Counter):
    def step(self, action):
        os._exit(3)


class Strict(Counter):
    """Its space has three actions, and it looks them up."""

    def __init__(self):
        super().__init__(9)
        self.action_space = gym.spaces.Discrete(3)

    def step(self, action):
        if np.ndim(action):
            raise IndexError("one at a time")
        [0, 1, 2][action]
        return super().step(action)


class Informs(Counter):
    def __init__(self, make_info):
        super().__init__(9)
        self.make_info = make_info

    def step(self, action):
        return *super().step(action)[:4], self.make_info()


class OldReset(Counter):
    def reset(self):
        return super().reset()[0]


class Returns(Counter):
    def __init__(self, of_reset=None, of_step=None):
        super().__init__(9)
        self.of_reset, self.of_step = of_reset, of_step

    def reset(self, *, seed=None, options=None):
        return super().reset() if self.of_reset is None else self.of_reset

    def step(self, action):
        return self.of_step


class Ends(Counter):
    def __init__(self, *ends):
        super().__init__(9)
        self.ends = ends

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, *self.ends, info


class InfoOnce(Counter):
    """Its second reset, of a step that ends an episode, has no info."""

    def __init__(self):
        super().__init__(1)
        self.infos = [{}]

    def reset(self, *, seed=None, options=None):
        return super().reset()[0], self.infos.pop() if self.infos else None


class Sized(Counter):
    def __init__(self, size):
        super().__init__(9, size=size)


class Tensor:
    """As torch's that requires gradients."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


def iter_(count):
    yield from range(count)


def one_argument(observations):
    return np.zeros(len(observations), int)


MADE = []


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


def after_close(num_workers):
    envs = made(num_workers=num_workers)
    envs.close()
    return envs


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
    "a class for an id": (
        lambda n: shmvec.make_vec(Counter, num_envs=4, num_workers=n),
        gym.error.Error,
        ["Invalid id type", "ShmVectorEnv([make_env] * 8)"],
    ),
    "an argument of make_vec": (
        lambda n: shmvec.make_vec("CartPole-v1", nun_envs=4, num_workers=min(n, 1)),
        TypeError,
        ["nun_envs", "Did you mean 'num_envs'?"],
    ),
    "an id and num_envs": (
        lambda n: ShmVectorEnv("CartPole-v1", num_envs=4, num_workers=n),
        TypeError,
        ["env_fns must be a list", "shmvec.make_vec('CartPole-v1', num_envs=8)"],
    ),
    "num_envs of functions": (
        lambda n: ShmVectorEnv([make_counter], num_envs=4, num_workers=n),
        TypeError,
        ["has no option 'num_envs'", "each function in env_fns, [make_env] * 8"],
    ),
    "a function that returns a class": (
        lambda n: ShmVectorEnv([lambda: Counter], num_workers=min(n, 1)),
        TypeError,
        ["env_fns[0]() returned a class, Counter, not an env: give Counter itself"],
    ),
    "a vectorization_mode": (
        lambda n: shmvec.make_vec("CartPole-v1", 2, vectorization_mode="async", num_workers=n),
        TypeError,
        ["make_vec has no vectorization_mode", "it always makes a ShmVectorEnv. Leave it out"],
    ),
    "one wrapper": (
        lambda n: shmvec.make_vec("CartPole-v1", 2, wrappers=iter_, num_workers=n),
        TypeError,
        ["wrappers must be a list of functions", "iter_"],
    ),
    "num_envs is text": (
        lambda n: shmvec.make_vec("CartPole-v1", num_envs="2", num_workers=n),
        TypeError,
        ["num_envs must be an int, got '2'"],
    ),
    "terminated is text": (
        lambda n: made(lambda: Ends("no", False), num_workers=n).step([0] * 4),
        TypeError,
        ["env 0: terminated is 'no'; it must be a bool"],
    ),
    "truncated is None": (
        lambda n: made(lambda: Ends(np.False_, None), num_workers=n).step([0] * 4),
        TypeError,
        ["env 0: truncated is None; it must be a bool"],
    ),
    "a mask in a list of options": (
        lambda n: made(num_workers=n).reset(options=[{"reset_mask": np.ones(4, bool)}] * 4),
        ValueError,
        ["options['reset_mask'] is in a list of options", "async_reset", "Nothing was sent"],
    ),
    "a mask beside env_id": (
        lambda n: made(num_workers=n).async_reset(options={"reset_mask": True}, env_id=[1]),
        ValueError,
        ["options['reset_mask'] was given together with env_id"],
    ),
    "a wrapper of batches of some envs": (
        lambda n: RecordEpisodeStatistics(made(num_workers=n, batch_size=2)).step([0, 1]),
        ValueError,
        ["with batch_size=2", "Wrappers of vector envs", "Nothing was sent"],
    ),
    "a second reset of batches": (
        lambda n: made(num_workers=n, batch_size=2).reset(),
        ValueError,
        ["with batch_size=2", "recv()", "Nothing was sent"],
    ),
    "an argument of evaluate": (
        lambda n: shmvec.evaluate("CartPole-v1", np.zeros_like, num_env=2, num_workers=n),
        TypeError,
        ["evaluate has no option 'num_env'. Did you mean 'num_envs'?"],
    ),
    "an argument of FaultPolicy": (
        lambda n: FaultPolicy(on_crsh="restart"),
        TypeError,
        ["FaultPolicy has no option 'on_crsh'. Did you mean 'on_crash'?"],
    ),
    "an argument of Pipeline": (
        lambda n: shmvec.Pipeline(made(num_workers=n), np.zeros_like, grops=2),
        TypeError,
        ["Pipeline has no option 'grops'. Did you mean 'groups'?"],
    ),
    "stats after close": (
        lambda n: after_close(n).stats(),
        gym.error.ClosedEnvironmentError,
        ["after a call to `close()`", "call stats() before it"],
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
    "actions of shape (4, 1)": (
        lambda n: made(Strict, num_workers=n).step(np.zeros((4, 1), int)),
        IndexError,
        ["Env 0", "array([0])", "Discrete(3)", "(1,)", "needs ()", "(num_envs,)", "squeeze(-1)"],
    ),
    "an action out of range": (
        lambda n: made(Strict, num_workers=n).step([0, 1, 7, 0]),
        IndexError,
        ["Env 2 was given the action", "7", "not in its space, Discrete(3)"],
    ),
    "info is None": (
        lambda n: made(lambda: Informs(lambda: None), num_workers=n).step([0] * 4),
        TypeError,
        ["env 0: the info must be a dict", "None", "Return {}"],
    ),
    "a reset that returns an observation": (
        lambda n: made(lambda: Returns(np.zeros(4)), num_workers=n),
        ValueError,
        ["env 0: reset() returned only a ndarray", "expected the tuple (observation, info)"],
    ),
    "a reset that returns three values": (
        lambda n: made(lambda: Returns((1, 2, 3)), num_workers=n),
        ValueError,
        ["env 0: reset() returned 3 values", "expected the tuple (observation, info)"],
    ),
    "a step that returns nothing": (
        lambda n: made(Returns, num_workers=n).step([0] * 4),
        TypeError,
        ["env 0: step() returned None", "terminated, truncated, info)"],
    ),
    "a step that returns four values": (
        lambda n: made(lambda: Returns(of_step=(0, 0.0, False, {})), num_workers=n).step([0] * 4),
        ValueError,
        ["env 0: step() returned 4 values", "terminated, truncated, info)"],
    ),
    "a reward that is None": (
        lambda n: made(
            lambda: Returns(of_step=(np.zeros(4), None, False, False, {})), num_workers=n
        ).step([0] * 4),
        TypeError,
        ["env 0: the reward is None", "must be a number"],
    ),
    "an option given twice": (
        lambda n: shmvec.make_vec("CartPole-v1", vector_kwargs={"copy": True}, copy=n > 0),
        TypeError,
        ["'copy' is also in vector_kwargs; this one is passed to the env"],
    ),
    "an id to check": (
        lambda n: shmvec.testing.check_env_fn("CartPole-v1"),
        TypeError,
        ["env_fn must be a function that makes an env", "lambda", "'CartPole-v1'"],
    ),
    "no info of a reset within a step": (
        lambda n: made(InfoOnce, num_workers=n, autoreset_mode="SameStep").step([0] * 4),
        TypeError,
        ["env 0: the info must be a dict", "None", "Return {}"],
    ),
    "a lock in an info": (
        lambda n: made(lambda: Informs(lambda: {"a": 1, "b": {"c": Lock()}}), num_workers=n).step(
            [0] * 4
        ),
        TypeError,
        ["env 0", "info['b']['c']", "lock"],
    ),
    "a generator in an info": (
        lambda n: made(lambda: Informs(lambda: {"g": iter_(9)}), num_workers=n).step([0] * 4),
        TypeError,
        ["env 0", "info['g']", "generator"],
    ),
    "reset of old gym": (
        lambda n: made(lambda: OldReset(9), num_workers=n),
        TypeError,
        ["env 0", "OldReset.reset()", "seed=None, options=None", "shimmy"],
    ),
    "an env that needs arguments": (
        lambda n: made(Sized, num_workers=n),
        TypeError,
        ["env_fns[0]", "Sized takes (size)", "`lambda: Sized(...)`"],
    ),
    "tensors that require gradients": (
        lambda n: made(num_workers=n).step(Tensor()),
        RuntimeError,
        ["wrong actions: NumPy cannot read them", "requires grad", "Nothing was sent"],
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


def said_of(do, num_workers):
    """What is raised, and what it says."""
    try:
        do(num_workers)
    except Exception as error:
        return type(error), "\n".join([str(error), *getattr(error, "__notes__", ())])
    finally:
        while MADE:
            MADE.pop().close(terminate=True)
    return None, "nothing was raised"


@pytest.mark.parametrize("num_workers", [0, *deep(2)])
def test_mistakes_are_named(num_workers):
    wrong = {}
    for mistake, (do, error, words) in MISTAKES.items():
        kind, said = said_of(do, num_workers)
        if kind is not error or not all(each in said for each in words):
            wrong[mistake] = kind, said
    assert not wrong


@pytest.mark.deep
def test_a_property_that_raises_says_what_it_lacks():
    class Derived(ShmVectorEnv):
        @property
        def broken(self):
            return self.get_attr("gravity")

    envs = Derived([make_counter], num_workers=0)
    with pytest.raises(AttributeError, match="'Counter' object has no attribute 'gravity'"):
        _ = envs.broken
    envs.close()


@pytest.mark.deep
def test_an_id_of_ale_without_its_import():
    program = """
import gymnasium as gym
import shmvec
from gymnasium.error import NamespaceNotFound
from shmvec._named import find_env

def make_env():
    return gym.make("ALE/Pong-v5")

for make, kind in (
    (lambda: shmvec.make_vec("ALE/Pong-v5", 2), NamespaceNotFound),
    (lambda: shmvec.evaluate("ALE/Pong-v5", lambda seen, envs: [0] * len(envs)), NamespaceNotFound),
    (lambda: shmvec.ShmVectorEnv([make_env], num_workers=1), NamespaceNotFound),
    (lambda: find_env("ALE/Pong-v5", {}), ValueError),
):
    try:
        make()
    except kind as error:
        found = type(error), "".join([str(error), *getattr(error, "__notes__", ())])
    assert found[0] is kind, found
    assert "`import ale_py`" in found[1] and '"ale_py:ALE/...' in found[1], found
    found = None, ""
"""
    output_of("-c", program)

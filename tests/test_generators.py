"""Envs that draw from global generators, and what is promised of their results."""

import importlib.util
import random
import threading
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from processes import output_of
from tables import deep

from shmvec import FaultPolicy, ShmVectorEnv


class Draws(gym.Env):
    """Shows what `random` and `np.random` have given it."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def _drawn(self):
        return np.array([random.random(), np.random.random()])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._drawn(), {}

    def step(self, action):
        return self._drawn(), 0.0, False, False, {}


def drawn(envs):
    """Of a reset and two steps: (times, envs, generators)."""
    with closing(envs):
        actions = [0] * envs.num_envs
        found = [envs.reset(seed=0)[0], envs.step(actions)[0], envs.step(actions)[0]]
        return np.array(found)


def seeded(seed, make):
    random.seed(seed)
    np.random.seed(seed)
    return drawn(make())


@pytest.mark.parametrize("context", ["fork", *deep("spawn")])
def test_each_worker_has_its_own_and_seeds_of_the_program_repeat_them(context):
    def make():
        return ShmVectorEnv([Draws] * 4, num_workers=2, context=context)

    first = seeded(1, make)
    assert len(np.unique(first)) == first.size
    assert np.array_equal(first, seeded(1, make))
    assert not np.isin(first, seeded(2, make)).any()


def test_the_programs_own_are_left_alone():
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    drawn(ShmVectorEnv([Draws] * 2, num_workers=2))
    assert (random.random(), np.random.random()) == expected


@pytest.mark.deep
def test_a_process_for_each_env_is_a_generator_for_each_env():
    """Whatever the others do."""
    some = seeded(3, lambda: ShmVectorEnv([Draws] * 2, num_workers=2))
    more = seeded(3, lambda: ShmVectorEnv([Draws] * 4, num_workers=4))
    assert np.array_equal(some, more[:, :2])


@pytest.mark.deep
def test_a_fork_does_not_wait_for_one_that_a_thread_draws_from():
    """The thread has its lock at the fork, and in the fork nobody releases that."""
    begun, end = threading.Event(), threading.Event()

    def draw():
        with np.random.get_bit_generator().lock:
            begun.set()
            end.wait(60)

    thread = threading.Thread(target=draw)
    with closing(ShmVectorEnv([Draws] * 2, num_workers=2, context="fork")) as envs:
        envs.reset()
        thread.start()
        begun.wait(60)
        try:
            envs.restart([0])
        finally:
            end.set()
            thread.join()
        assert len(np.unique(envs.step([0, 0])[0])) == 4


@pytest.mark.deep
def test_without_workers_they_are_those_of_sync():
    ours = seeded(4, lambda: ShmVectorEnv([Draws] * 3, num_workers=0))
    assert np.array_equal(ours, seeded(4, lambda: SyncVectorEnv([Draws] * 3)))


@pytest.mark.deep
def test_a_worker_that_is_restarted_does_not_repeat_itself():
    def run():
        random.seed(6)
        np.random.seed(6)
        envs = ShmVectorEnv([Draws] * 2, num_workers=2, faults=FaultPolicy(on_crash="restart"))
        with closing(envs):
            found = [envs.reset(seed=0)[0]]
            envs.restart([1])
            for _ in range(3):
                found.append(envs.step([0, 0])[0])
            return np.array(found)

    first = run()
    assert len(np.unique(first[[0, 2, 3]])) == 3 * 2 * 2  # in the step between it is not stepped
    assert np.array_equal(first, run())


@pytest.mark.deep
def test_another_kind_of_generator_stays():
    """Which NumPy's seed() refuses."""
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        assert drawn(ShmVectorEnv([Draws] * 2, num_workers=1)).shape == (3, 2, 2)
    finally:
        np.random.set_bit_generator(before)


TORCH = """
import gymnasium as gym
import numpy as np
import torch
from shmvec import ShmVectorEnv

class Env(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.own = torch.Generator().manual_seed(int(self.np_random.integers(2**31)))
        return self.step(0)[0], {}

    def step(self, action):
        own = torch.randn(300_000, generator=self.own).sum()
        return np.array([float(own), float(torch.rand(()))]), 0.0, False, False, {}

def run(envs):
    observations = [envs.reset(seed=1)[0], *(envs.step([0] * 4)[0] for _ in range(3))]
    envs.close()
    return np.array(observations)

torch.set_num_threads(1)
expected = run(gym.vector.SyncVectorEnv([Env] * 4))
for num_workers in (0, 1, 2, 4):
    torch.manual_seed(1)
    found = run(ShmVectorEnv([Env] * 4, num_workers=num_workers, threads_per_worker=1))
    assert np.array_equal(found[..., 0], expected[..., 0]), num_workers
    assert len(np.unique(found[..., 1])) == 16, num_workers
    torch.manual_seed(1)
    again = run(ShmVectorEnv([Env] * 4, num_workers=num_workers, threads_per_worker=1))
    assert np.array_equal(found, again), num_workers
"""


TORCH_IN_A_THREAD = """
import threading
import gymnasium as gym
import torch
from shmvec import ShmVectorEnv

def draw():
    while drawing:
        torch.empty(50_000_000).normal_()  # has the generator's lock nearly always
        draws.set()

drawing, draws = [True], threading.Event()
thread = threading.Thread(target=draw)
thread.start()
draws.wait()
try:
    ShmVectorEnv([lambda: gym.make("CartPole-v1")] * 8, num_workers=8, context="fork").close()
except RuntimeError as error:
    assert "context='forkserver'" in str(error), error
else:
    raise AssertionError("no worker has noticed")
finally:
    drawing.clear()
    thread.join()
"""


@pytest.mark.deep
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@pytest.mark.parametrize("script", [TORCH, TORCH_IN_A_THREAD], ids=["alone", "in a thread"])
def test_torch(script):
    """The same for any number of workers; its global generator is seeded, or is in use."""
    output_of("-c", script)

"""Damage to the segment ends in a clear error: no crash, no endless wait, no huge array."""

import multiprocessing
from contextlib import closing

import pytest
from envs import Counter
from segment_map import MAPPED, Map, keep_mappings

from shmvec import ShmVectorEnv, WorkerCrashError

LATE = 16  # see protocol.pxd
COMMAND = 3
MANY = 20.0  # seconds that nothing here takes


@pytest.fixture(autouse=True)
def mappings(monkeypatch):
    keep_mappings(monkeypatch.setattr)
    yield
    MAPPED.clear()


class Damaging(Counter):
    """Damages the segment in its steps, as an env's own C code may."""

    def __init__(self, damage):
        super().__init__(length=1000)
        self.damage = damage

    def step(self, action):
        self.damage(Map())
        return super().step(action)


def vector_env(num_workers, make=Counter, num_envs=2, **arguments):
    """A vector env that was reset, in whose segment one can write."""
    envs = ShmVectorEnv([make] * num_envs, num_workers=num_workers, context="fork", **arguments)
    envs.reset() if envs.batch_size is None else envs.async_reset()
    return closing(envs)


def answered(envs, actions):
    """Asks for a step and waits until the answers are in the segment."""
    envs.step_async(actions)
    assert envs._loop.wait(MANY)
    return Map()


# ---- rings of records ---------------------------------------------------------------------------


@pytest.mark.parametrize("word", range(5))
def test_a_damaged_answer(word):
    with vector_env(1) as envs:
        found = answered(envs, [0, 0])
        slot = found.slot(found.completions(0)) + 4 * word
        found.put(slot, found.get(slot) ^ LATE)  # of the flags: a message is on the pipe
        with pytest.raises(RuntimeError, match="the segment is damaged"):
            envs.step_wait()


@pytest.mark.parametrize("word", range(5))
def test_a_damaged_request(word):
    def damage(found):
        slot = found.slot(found.requests(0)) + 4 * word
        found.put(slot, found.get(slot) ^ (1 ^ COMMAND))  # the operation: read the pipe

    makers = [lambda: Damaging(damage), Counter]
    with closing(ShmVectorEnv(makers, num_workers=1, context="fork", batch_size=1)) as envs:
        envs.async_reset()
        envs.recv(), envs.recv()
        envs.send([0, 0])
        envs.recv()
        with pytest.raises(WorkerCrashError):
            envs.recv(timeout=MANY)
    assert not multiprocessing.active_children()


def test_a_damaged_request_to_this_process():
    with vector_env(0) as envs:
        envs.step_async([0, 0])
        found = Map()
        found.put(found.slot(found.requests(0)) + 8, COMMAND)
        with pytest.raises(RuntimeError, match="the segment is damaged: the request ring"):
            envs.step_wait()

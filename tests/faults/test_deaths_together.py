"""Workers that die at the same moment, or while another is being replaced: all come back."""

import os
import signal
import time

import numpy as np
import pytest
from envs import Counter
from stepping import kill, lockstep, partial, told

from shmvec import FaultPolicy, ShmVectorEnv

BUILDS_S = 0.3
RESTART = FaultPolicy(on_crash="restart", max_restarts=3, backoff_s=0)


class Slow(Counter):
    """Takes its time to be built; says which process it is in, and kills others from there."""

    def __init__(self, folder, index, kills=()):
        super().__init__(99, offset=10 * index)
        mine = folder / str(index)
        again = mine.exists()
        mine.write_text(str(os.getpid()))
        time.sleep(BUILDS_S / 2)
        for other in kills if again else ():
            os.kill(int((folder / str(other)).read_text()), signal.SIGKILL)
        time.sleep(BUILDS_S / 2)


def check(envs, steps):
    """Every env, which has made one step, is truncated by the next or the one after it, once."""
    lost = np.zeros(envs.num_envs, bool)
    counts = np.ones(envs.num_envs)
    over = np.zeros(envs.num_envs, bool)
    for _ in range(4):
        observations, rewards, terminations, truncations, infos = steps(envs, [1] * envs.num_envs)
        truncated = told(infos, envs.num_envs)
        assert truncations.tolist() == truncated.tolist() and not terminations.any()
        assert not (lost & truncated).any()
        counts = np.where(truncated, counts, np.where(over, 0, counts + 1))
        assert observations[:, 0].tolist() == counts.tolist()
        offsets = 10 * np.arange(envs.num_envs)
        stepped = ~(truncated | over)
        assert rewards.tolist() == np.where(stepped, counts + offsets, 0).tolist()
        over = truncated
        lost |= truncated
    assert lost.all() and envs.stats().faults.crashes == envs.num_workers


WAYS = [("fork", lockstep), ("fork", partial), ("spawn", lockstep), ("forkserver", lockstep)]


@pytest.mark.parametrize("context, steps", WAYS)
def test_workers_that_die_at_the_same_moment(context, steps, tmp_path):
    fns = [lambda i=i: Slow(tmp_path, i) for i in range(3)]
    envs = ShmVectorEnv(fns, num_workers=3, context=context, faults=RESTART)
    try:
        envs.reset(seed=1)
        envs.step([1] * 3)
        kill(envs, [0, 1, 2])
        check(envs, steps)
    finally:
        envs.close()


@pytest.mark.parametrize("context, steps", WAYS)
def test_workers_that_die_while_another_is_being_replaced(context, steps, tmp_path):
    fns = [lambda i=i: Slow(tmp_path, i, kills=[0, 2] if i == 1 else ()) for i in range(3)]
    envs = ShmVectorEnv(fns, num_workers=3, context=context, faults=RESTART)
    try:
        envs.reset(seed=1)
        envs.step([1] * 3)
        kill(envs, [1])
        check(envs, steps)
    finally:
        envs.close()

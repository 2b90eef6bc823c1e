"""Workers without work sleep without waking up, and wake for whatever comes."""

import os
import sys
from contextlib import closing

import pytest
from envs import Counter
from processes import wait_until_envs_doze
from tables import paired

from shmvec import ShmVectorEnv, WorkerCrashError

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(os, "eventfd"), reason="sleeps in slices elsewhere"
)


def step(envs):
    assert envs.step([0, 1, 2])[0][:, :2].tolist() == [[1, 0], [1, 1], [1, 2]]


def reset(envs):
    assert envs.reset()[1]["reset"].tolist() == [2, 2, 2]
    for count in range(1, 4):
        assert envs.step([0, 0, 0])[0][:, 0].tolist() == [count] * 3


def get_attr(envs):
    assert envs.get_attr("count") == (0, 0, 0)


def close(envs):
    envs.close()
    assert not any(process.is_alive() for process in envs.processes)


@pytest.mark.parametrize(
    "policy, call",
    paired(["adaptive", "spin", "park"], [step, reset, get_attr, close]),
)
def test_every_kind_of_call_wakes_them(policy, call):
    with closing(ShmVectorEnv([Counter] * 3, num_workers=3, wait_policy=policy)) as envs:
        envs.reset()
        wait_until_envs_doze(envs)
        call(envs)


@pytest.mark.deep
def test_before_the_first_reset():
    with closing(ShmVectorEnv([Counter] * 2, num_workers=2)) as envs:
        wait_until_envs_doze(envs)
        envs.reset()


@pytest.mark.deep
def test_the_death_of_one_that_dozes_is_noticed():
    envs = ShmVectorEnv([Counter] * 2, num_workers=2)
    envs.reset()
    wait_until_envs_doze(envs)
    envs.processes[0].kill()
    with pytest.raises(WorkerCrashError, match="worker 0"):
        envs.step([0, 0])

"""A worker is killed at each numbered point of the protocol: nothing hangs, nothing is made up."""

import os
import select
import time
from dataclasses import replace
from multiprocessing.connection import wait

import numpy as np
import pytest
from tables import crossed, deep, first
from test_fault_policy import DEADLINE, MODES, RAISE, RESET, RESTART, Frail, Replay, one, row_of

from shmvec import ShmVectorEnv, WorkerCrashError
from shmvec._core import FAULT_POINTS, die_at
from shmvec.exchange import AutoresetMode, Exchange

ARM = 200  # and the number of a point: an action
LATE = 9  # the point that only a late message leads to
SOME_POINTS = pytest.mark.parametrize(
    "point", [2, LATE, *deep(*(set(FAULT_POINTS) - {2, LATE}))], ids=str
)


class Mined(Frail):
    """Arms a point of the protocol for some actions; sends infos that no ring can hold for one."""

    def step(self, action):
        if action > ARM and not self.replayed:
            die_at(action - ARM)
        observation, reward, terminated, truncated, info = super().step(
            5 if action > ARM else action
        )
        if action == ARM + LATE:
            info["bulk"] = "x" * 100_000
        return observation, reward, terminated, truncated, info


def mined(policy, mode=AutoresetMode.NEXT_STEP, **options):
    if policy is not None:
        # No env hangs here, but on a machine with other work a step may take long.
        options["faults"] = replace(policy, step_timeout=DEADLINE)
    fns = [lambda i=i: Mined(i) for i in range(4)]
    return ShmVectorEnv(fns, autoreset_mode=mode, **{"num_workers": 2, **options})


class MinedReplay(Replay):
    def __init__(self, index, mode, seed):
        super().__init__(index, mode, seed)
        self.env = Mined(index, replayed=True)

    def _fail(self, action, fault):
        super()._fail(action, fault)
        self.env = Mined(self.index, replayed=True)


def watched(envs, mode):
    replays = [MinedReplay(i, mode, 100 + i) for i in range(4)]
    observations, infos = envs.reset(seed=100)
    for i, replay in enumerate(replays):
        replay.reset((observations[i], row_of(infos, i)), 100 + i)
    return replays


@pytest.mark.parametrize(
    "point, waiting, mode",
    crossed(
        FAULT_POINTS,
        [True, False],
        MODES[:2],
        shown=[(1, True, MODES[0]), (5, False, MODES[1]), (LATE, True, MODES[0])],
    ),
)
def test_restarted(point, waiting, mode):
    envs = mined(RESTART, mode)
    try:
        replays = watched(envs, mode)
        doomed = envs.processes[0]
        actions = [1, ARM + point, 2, 3]
        for _ in range(8):
            envs.step_async(actions)
            if not waiting and actions[1] > ARM and 1 < point < 10:
                doomed.join(DEADLINE)  # or it stops at the next request
            results = envs.step_wait()
            for i, replay in enumerate(replays):
                replay.step(actions[i], one(results, i))
            actions = [4, 5, 6, 7]
            doomed.join(DEADLINE if point >= 10 else 0)  # it dies when it has nothing to do
        assert doomed.exitcode == -9
        assert [replay.restarts for replay in replays] == [1, 1, 0, 0]
    finally:
        envs.close()


@pytest.mark.parametrize("point", first(FAULT_POINTS))
def test_restarted_in_partial_batches(point):
    envs = mined(RESTART, batch_size=2)
    try:
        replays = [MinedReplay(i, AutoresetMode.NEXT_STEP, 100 + i) for i in range(4)]
        envs.async_reset(seed=100)
        given = {}
        armed = False
        turn, until = 0, time.monotonic() + DEADLINE
        while turn < 40 or replays[0].restarts == 0:  # it is noticed in 50 ms, of many turns
            assert time.monotonic() < until
            turn += 1
            results = envs.recv(timeout=DEADLINE)
            ids = results[-1]["env_id"].tolist()
            for row, i in enumerate(ids):
                result = one(results, row)
                if i in given:
                    replays[i].step(given[i], result)
                else:
                    replays[i].reset((result[0], result[4]), 100 + i)
            given.update(dict.fromkeys(ids, 5))
            if turn > 3 and 1 in ids and not armed:
                given[1], armed = ARM + point, True
            envs.send([given[i] for i in ids], ids)
        assert replays[0].restarts >= 1 and replays[2].restarts == 0
    finally:
        envs.close()


@SOME_POINTS
def test_raised(point):
    envs = mined(None)
    try:
        envs.reset(seed=0)
        with pytest.raises(WorkerCrashError, match=r"worker 0 \(envs 0 to 1\) killed by SIGKILL"):
            envs.step([1, ARM + point, 2, 3])
            for _ in range(1000):
                wait([envs.processes[0].sentinel], 0.05)  # it may die only when it waits
                envs.step([1, 1, 2, 3])
    finally:
        envs.close()


@pytest.mark.deep
@SOME_POINTS
def test_while_another_env_raises(point):
    """Both at once, under the policy that resets what raises."""
    envs = mined(RESET)
    try:
        envs.reset(seed=0)
        infos = [envs.step([1, ARM + point, RAISE, 3])[-1]]
        assert row_of(infos[0], 2)["fault"]["type"] == "LookupError"
        until = 1000
        while not any("fault" in row_of(info, 0) for info in infos[-2:]):
            wait([envs.processes[0].sentinel], 0.05)  # it may die only when it waits
            infos = [infos[-1], envs.step([1, 1, 2, 3])[-1]]
            until -= 1
            assert until
        assert np.isfinite(envs.step([1, 1, 2, 3])[0]).all()
        assert envs.stats().faults.restarts == 1
    finally:
        envs.close()


@pytest.mark.deep
@SOME_POINTS
def test_more_workers_than_cores(point):
    """The last of a batch step stay awake, and none waits for one of them that is dead."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        envs = mined(RESTART, num_workers=4)
        try:
            replays = watched(envs, AutoresetMode.NEXT_STEP)
            doomed = envs.processes[1]
            actions = [1, ARM + point, 2, 3]
            for _ in range(8):
                results = envs.step(actions)
                for i, replay in enumerate(replays):
                    replay.step(actions[i], one(results, i))
                actions = [4, 5, 6, 7]
                doomed.join(DEADLINE if point >= 10 else 0)
            assert doomed.exitcode == -9
            assert [replay.restarts for replay in replays] == [0, 1, 0, 0]
        finally:
            envs.close()
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("point", first([7, *(set(FAULT_POINTS) - {7})]))
def test_no_wake_is_lost_wherever_a_worker_dies(point):
    """Nothing but the descriptor ends these waits: no time limit, no slice."""
    fns = [lambda i=i: Mined(i) for i in range(4)]
    exchange = Exchange(
        fns,
        num_workers=2,
        faults=replace(RESTART, on_timeout="raise", step_timeout=None),
        autoreset_mode=AutoresetMode.SAME_STEP,
        hang_warning_s=None,
    )
    try:
        descriptor = exchange.fileno()
        exchange.ask_reset(seeds=[1, 2, 3, 4])
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        turns, alone = np.zeros(4, int), 0
        while alone < 5:
            seconds = exchange.poll()
            answers = exchange.take(count=4, least=0, timeout=0.0)
            for env in answers.envs.tolist():
                turns[env] += 1
                if env == 3:  # in the end it is in flight alone: no other answer makes up for it
                    alone += exchange.num_in_flight == 0
                elif turns[env] >= 25 and exchange.restarts(1) == 1:
                    continue
                doomed = env == 1 and turns[1] == 10 and exchange.restarts(1) == 0
                exchange.ask([env], [ARM + point if doomed else 5])
            if not len(answers.envs):
                assert seconds is None or seconds <= 0.01, "there are no time limits"
                woken = poll.poll(1000 * (DEADLINE if seconds is None else seconds))
                assert woken or seconds is not None, f"a wake was lost after {turns} answers"
        assert exchange.restarts(1) == 1 and exchange.restarts(3) == 0
    finally:
        exchange.close(terminate=True)

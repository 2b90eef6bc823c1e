"""close() while another thread replaces a worker, and close() that is broken off itself."""

import logging
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from echoing import Moments
from gymnasium.error import ClosedEnvironmentError
from processes import gone
from tables import deep

from shmvec import ShmVectorEnv
from shmvec._memory.segment import SharedDescriptors
from shmvec._processes import supervisor
from shmvec.faults import FaultPolicy

DEADLINE_S = 60


class Dying(gym.Env):
    """Action 1 kills it; action 2 takes for ever."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(3)
    large = "x" * 300_000

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if action == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while action == 2:
            time.sleep(DEADLINE_S)
        return np.zeros(1, np.float32), 0.0, False, False, {}


def restarting(num_envs, num_workers=None):
    policy = FaultPolicy(on_crash="restart", max_restarts=1000, backoff_s=0)
    num_workers = num_envs if num_workers is None else num_workers
    envs = ShmVectorEnv([Dying] * num_envs, num_workers=num_workers, context="fork", faults=policy)
    envs.reset()
    return envs


def stepping(envs, actions):
    """A thread that steps until that raises something; what."""
    raised = []

    def step():
        try:
            while True:
                envs.step(actions)
        except BaseException as error:
            raised.append(error.with_traceback(None))

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    return thread, raised


def closed(envs, within_s=DEADLINE_S):
    """In a thread, as it may hang."""
    closer = threading.Thread(target=envs.close, daemon=True)
    closer.start()
    closer.join(within_s)
    assert not closer.is_alive()


FORKING = {}  # what is called before a fork, and after it in the process that forks
os.register_at_fork(
    before=lambda: FORKING.get("before", bool)(),
    after_in_parent=lambda: FORKING.get("after", bool)(),
)


@pytest.mark.deep
def test_whenever_it_comes(caplog):
    caplog.set_level(logging.CRITICAL, "shmvec")
    rng = np.random.default_rng(1)
    for _ in range(5):
        envs = restarting(2)
        pids = [process.pid for process in envs.processes]
        thread, raised = stepping(envs, [1, int(rng.integers(2))])
        time.sleep(rng.random() * 0.06)  # whenever
        closed(envs)
        thread.join(DEADLINE_S)
        assert not thread.is_alive() and gone(pids, DEADLINE_S)
        (error,) = raised
        assert type(error) is ClosedEnvironmentError, error


@pytest.mark.deep
def test_a_worker_that_is_begun_after_the_others_were_closed(monkeypatch):
    """It waits for a segment that it is not handed any more."""
    envs = restarting(1)
    forking = threading.Event()

    def until_closed():
        forking.set()
        until = time.monotonic() + DEADLINE_S
        while not envs.closed and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.05)  # close() goes on

    monkeypatch.setitem(FORKING, "before", until_closed)
    thread, raised = stepping(envs, [1])
    assert forking.wait(DEADLINE_S)
    closed(envs)
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and type(raised[0]) is ClosedEnvironmentError


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.*Calling `close` while waiting:UserWarning")
@pytest.mark.parametrize("terminate", [True, False])
def test_what_is_broken_off_the_next_one_ends(terminate):
    """At any moment; a worker may hang, so that only the end of its process ends it."""
    moments, went_on = Moments(stride=23), True
    while went_on:
        envs = restarting(2)
        if terminate:
            envs.step_async([0, 2])
        pids = [process.pid for process in envs.processes]
        went_on = moments.interrupt(lambda: envs.close(terminate=terminate))  # noqa: B023
        envs.close(terminate=terminate)
        assert envs.closed and gone(pids, DEADLINE_S)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_what_is_broken_off_ends_when_it_is_forgotten():
    moments, went_on = Moments(stride=29), True
    while went_on:
        envs = restarting(1)
        pids = [process.pid for process in envs.processes]
        went_on = moments.interrupt(lambda: envs.close(terminate=True))  # noqa: B023
        del envs
        assert gone(pids, DEADLINE_S)


@pytest.mark.parametrize("terminate", [True, *deep(False)])
@pytest.mark.parametrize("when", ["before", *deep("after")])
def test_a_handler_closes_it_while_workers_are_being_started(when, terminate, monkeypatch):
    """The fixture finds a worker that is begun, and that close() did not know of."""
    envs = restarting(3)
    pids = [each.pid for each in envs.processes]
    monkeypatch.setitem(FORKING, when, lambda: envs.close(terminate=terminate))
    with pytest.raises(ClosedEnvironmentError):
        envs.restart()
    assert gone(pids, DEADLINE_S)


class SlowClose(Dying):
    def close(self):
        time.sleep(DEADLINE_S)


@pytest.mark.deep
def test_a_handler_closes_it_while_a_replacement_is_handed_the_segment(monkeypatch):
    envs = restarting(1)

    def replace_once_closed(*arguments, **changes):  # a handler can run there
        envs.close()
        return replace(*arguments, **changes)

    monkeypatch.setattr(supervisor, "replace", replace_once_closed)
    with pytest.raises(ClosedEnvironmentError, match="closed during this call"):
        envs.restart()
    assert envs.closed


def test_memory_that_is_kept_after_all_was_closed_goes_with_its_owner():
    kept = SharedDescriptors()
    with open(os.devnull) as file:
        kept.clear()  # by a handler, in the middle of a call that goes on
        kept.put("rollout", (1,), file.fileno())
    (number,) = kept.descriptors
    del kept
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


@pytest.mark.deep
def test_a_handler_closes_it_while_it_is_being_closed():
    class Closing(logging.Handler):
        def emit(self, record):
            envs.close(terminate=True)

    handler, logger = Closing(), logging.getLogger("shmvec")
    envs = ShmVectorEnv([SlowClose] * 2, num_workers=2, hang_warning_s=0.05, context="fork")
    envs.reset()
    pids = [process.pid for process in envs.processes]
    logger.addHandler(handler)
    try:
        envs.close()
    finally:
        logger.removeHandler(handler)
    assert gone(pids, DEADLINE_S)


@pytest.mark.deep
@pytest.mark.parametrize("workers, stride", [(1, 7), (0, 5)])
def test_a_handler_closes_it_at_any_moment_of_a_call(workers, stride):
    """Of large results, too: the depot through which they come is closed."""
    came = {"closed": 0, "whole": 0}

    def call():
        try:
            assert envs.get_attr("large") == (Dying.large,)
            came["whole"] += 1
        except ClosedEnvironmentError:
            came["closed"] += 1

    moments = Moments(stride, by=lambda: envs.close(terminate=True))
    while True:
        envs = restarting(1, workers)
        if not moments.interrupt(call):
            break
        assert envs.closed
    envs.close()
    assert came["closed"] > 50 / stride and came["whole"], came


@pytest.mark.deep
def test_a_handler_closes_it_while_envs_are_built_in_this_process():
    made, ended = [], []

    class Inline(Dying):
        def __init__(self):
            made.append(self)
            if len(made) == 4:
                envs.close()

        def close(self):
            ended.append(self)

    envs = ShmVectorEnv([Inline] * 3, num_workers=0)
    envs.reset()
    with pytest.raises(ClosedEnvironmentError):
        envs.restart()
    envs.close()
    assert len(made) == 6 and set(made) == set(ended)


class Rebuilt(Dying):
    """Once more it is not built before there is a file, or not at all."""

    def __init__(self, folder, dies):
        here = folder / str(os.getpid())
        here.touch()
        while len(list(folder.iterdir())) > 2:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)


def rebuilding(folder, dies):
    policy = FaultPolicy(on_crash="restart", max_restarts=1000, backoff_s=1000)
    make = partial(Rebuilt, folder, dies)
    envs = ShmVectorEnv([make] * 2, num_workers=2, context="fork", faults=policy)
    envs.reset()
    thread, raised = stepping(envs, [1, 1])
    until = time.monotonic() + DEADLINE_S
    while len(list(folder.iterdir())) < 4:
        assert time.monotonic() < until
        time.sleep(0.001)
    return envs, thread, raised


@pytest.mark.deep
@pytest.mark.parametrize("dies", [False, True])
def test_neither_builds_nor_pauses_are_waited_for(dies, tmp_path, caplog):
    envs, thread, raised = rebuilding(tmp_path, dies)
    closed(envs, within_s=20)  # a pause has 30 s
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and type(raised[0]) is ClosedEnvironmentError


class Noting(ShmVectorEnv):
    def close_extras(self, note=None, **kwargs):
        super().close_extras(**kwargs)


@pytest.mark.deep
def test_a_subclass_may_take_more_when_it_is_closed():
    envs = Noting([Dying], num_workers=1)
    for _ in range(2):
        envs.close(note="done", timeout=DEADLINE_S)

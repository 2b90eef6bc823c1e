"""close() while another thread replaces a worker, and close() that is broken off itself."""

import logging
import os
import signal
import threading
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from echoing import Moments
from gymnasium.error import ClosedEnvironmentError
from processes import gone

import shmvec.exchange
from shmvec import ShmVectorEnv
from shmvec._processes import launcher, recovery
from shmvec._processes.output import WorkerStderr
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


def restarting(num_envs):
    policy = FaultPolicy(on_crash="restart", max_restarts=1000, backoff_s=0)
    envs = ShmVectorEnv([Dying] * num_envs, num_workers=num_envs, context="fork", faults=policy)
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


def closed(envs):
    """In a thread, as it may hang."""
    closer = threading.Thread(target=envs.close, daemon=True)
    closer.start()
    closer.join(DEADLINE_S)
    assert not closer.is_alive()


def test_whenever_it_comes(caplog):
    caplog.set_level(logging.CRITICAL, "shmvec")
    rng = np.random.default_rng(1)
    for _ in range(40):
        envs = restarting(2)
        pids = [process.pid for process in envs.processes]
        thread, raised = stepping(envs, [1, int(rng.integers(2))])
        time.sleep(rng.random() * 0.06)  # whenever
        closed(envs)
        thread.join(DEADLINE_S)
        assert not thread.is_alive() and gone(pids, DEADLINE_S)
        (error,) = raised
        assert type(error) is ClosedEnvironmentError, error


def test_a_worker_that_is_begun_after_the_others_were_told():
    """It waits for a segment that nobody hands to it any more."""
    envs = restarting(1)
    workers = envs.exchange._workers
    dismiss, begin = workers.dismiss, workers.begin
    dismissed, begun = threading.Event(), threading.Event()

    def dismiss_first():
        dismiss()
        dismissed.set()
        begun.wait(DEADLINE_S)

    def begin_then(index):
        assert dismissed.wait(DEADLINE_S)
        begin(index)
        begun.set()

    workers.dismiss, workers.begin = dismiss_first, begin_then
    thread, raised = stepping(envs, [1])
    closed(envs)
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and type(raised[0]) is ClosedEnvironmentError
    del workers.dismiss, workers.begin


def test_two_threads_end_what_a_worker_has_written():
    class Mute:
        def put(self, *arguments):
            pass

    for _ in range(300):
        stderr = WorkerStderr(Mute())
        threads = [threading.Thread(target=stderr.close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        assert stderr.reader == -1 and stderr.text() == ""


@pytest.mark.filterwarnings("ignore:.*Calling `close` while waiting:UserWarning")
@pytest.mark.parametrize("terminate", [True, False])
def test_what_is_broken_off_the_next_one_ends(terminate):
    """At any moment; a worker may hang, so that only the end of its process ends it."""
    moments, went_on = Moments(stride=3), True
    while went_on:
        envs = restarting(2)
        if terminate:
            envs.step_async([0, 2])
        pids = [process.pid for process in envs.processes]
        went_on = moments.interrupt(lambda: envs.close(terminate=terminate))  # noqa: B023
        envs.close(terminate=terminate)
        assert envs.closed and gone(pids, DEADLINE_S)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_what_is_broken_off_ends_when_it_is_forgotten():
    moments, went_on = Moments(stride=11), True
    while went_on:
        envs = restarting(1)
        pids = [process.pid for process in envs.processes]
        went_on = moments.interrupt(lambda: envs.close(terminate=True))  # noqa: B023
        del envs
        assert gone(pids, DEADLINE_S)


@pytest.mark.parametrize("terminate", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_handler_closes_it_while_workers_are_being_started(first, terminate, monkeypatch):
    """Of those that are begun after that nobody else knows; that one waits for who begins it."""
    envs = restarting(3)
    workers = envs.exchange._workers
    launch, pids, handled = workers._launch, [each.pid for each in envs.processes], []

    def handler():
        if not handled:
            handled.append(True)
            envs.close(terminate=terminate)

    def launch_and_handle(index, keep):
        if first:
            handler()
        launch(index, keep)
        pids.append(envs.processes[index].pid)
        handler()

    monkeypatch.setattr(workers, "_launch", launch_and_handle)
    with pytest.raises(ClosedEnvironmentError):
        envs.restart()
    assert len(pids) > 3 and gone(pids, DEADLINE_S)
    assert workers.ended


class SlowClose(Dying):
    def close(self):
        time.sleep(DEADLINE_S)


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


def test_a_handler_closes_it_while_late_messages_are_read(monkeypatch):
    envs = restarting(1)

    def closing_first(*arguments):
        envs.close(terminate=True)
        return read_late(*arguments)

    read_late = shmvec.exchange.read_late
    monkeypatch.setattr(shmvec.exchange, "read_late", closing_first)
    with pytest.raises(ClosedEnvironmentError):
        envs.get_attr("large")  # in the depot, which is closed, too


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


@pytest.mark.parametrize("dies", [False, True])
def test_neither_builds_nor_pauses_are_waited_for(dies, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recovery, "_BACKOFF_MOST_S", 1000)
    envs, thread, raised = rebuilding(tmp_path, dies)
    closed(envs)
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and type(raised[0]) is ClosedEnvironmentError


class Noting(ShmVectorEnv):
    def close_extras(self, note=None, **kwargs):
        super().close_extras(**kwargs)


def test_a_subclass_may_take_more_when_it_is_closed():
    envs = Noting([Dying], num_workers=1)
    for _ in range(2):
        envs.close(note="done", timeout=DEADLINE_S)


def test_ctrl_c_while_standard_streams_are_looked_at():
    """What is opened there is never closed again (the fixture counts)."""
    moments = Moments()
    while moments.interrupt(launcher._occupy_streams):
        pass

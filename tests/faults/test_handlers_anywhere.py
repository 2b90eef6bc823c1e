"""A signal's handler uses a vector env at a chosen moment of a call, not only in its waits."""

import functools
import os
import signal
import time
from contextlib import closing, contextmanager
from functools import partial

import numpy as np
import pytest
from envs import Counter
from gymnasium.error import AlreadyPendingCallError
from tables import paired

from shmvec import ShmVectorEnv
from shmvec.faults import FaultPolicy

DEADLINE_S = 100


@contextmanager
def handled(handler):
    """SIGUSR1 runs this, once; what came of it."""
    became = []

    def run(*_):
        if became:
            return
        try:
            became.append(handler())
        except Exception as error:
            became.append(error.with_traceback(None))

    before = signal.signal(signal.SIGUSR1, run)
    try:
        yield became
    finally:
        signal.signal(signal.SIGUSR1, before)


class Rebuilt(Counter):
    """Where it is built once more, a signal comes to the caller, and it waits for the handler."""

    def __init__(self, folder, caller):
        super().__init__(99)
        if (folder / "built").exists() and not (folder / "sent").exists():
            (folder / "sent").touch()
            os.kill(caller, signal.SIGUSR1)
            until = time.monotonic() + DEADLINE_S
            while not (folder / "handled").exists() and time.monotonic() < until:
                time.sleep(0.001)
        (folder / "built").touch()

    def step(self, action):
        if action == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def recv(envs):
    envs.send([3, 0])
    (at,) = np.flatnonzero(envs.recv()[-1]["env_id"] == 0)
    assert at in (0, 1)


OUTER = {
    "restart": ({}, lambda envs: envs.restart([0])),
    "recv": ({"faults": FaultPolicy(on_crash="restart", backoff_s=0)}, recv),
    "step": (
        {"faults": FaultPolicy(on_crash="restart", backoff_s=0)},
        lambda envs: envs.step([3, 0]),
    ),
    # The step begins it, and the next call waits for it.
    "recycle": ({"recycle_after": 1}, lambda envs: (envs.step([0, 0]), envs.get_attr("spec"))),
}
INNER = {
    "step": lambda envs: envs.step([0, 0]),
    "get_attr": lambda envs: envs.get_attr("count"),
    "send": lambda envs: envs.send([0, 0]),
    "recv": lambda envs: envs.recv(),
    "restart": lambda envs: envs.restart(),
    "discard": lambda envs: envs.exchange.discard(),
    "first_ready": lambda envs: envs.exchange.first_ready([np.array([0])]),
}


@pytest.mark.parametrize("inner, outer", paired(INNER, OUTER))
def test_while_a_worker_is_replaced(outer, inner, tmp_path):
    """It would wait for the new worker, too, and take what that says first."""
    options, use = OUTER[outer]

    def handler():
        try:
            return INNER[inner](envs)
        finally:
            (tmp_path / "handled").touch()

    env_fns = [partial(Rebuilt, tmp_path, os.getpid()), partial(Counter, 99)]
    with handled(handler) as became:
        envs = ShmVectorEnv(env_fns, num_workers=2, context="fork", **options)
        with closing(envs):
            envs.reset(seed=1)
            use(envs)
            (refused,) = became
            assert isinstance(refused, AlreadyPendingCallError), refused
            assert envs.stats().faults.restarts == (2 if outer == "recycle" else 1)
            envs.reset(seed=1)
            assert envs.step([0, 0])[0][:, 0].tolist() == [1, 1]


class Signalling(Counter):
    """Sends a signal to the caller as it is asked something, and waits for the handler."""

    def __init__(self, folder, caller):
        super().__init__(99)
        self.folder, self.caller = folder, caller

    def signal_the_caller(self):
        if not (self.folder / "handled").exists():
            os.kill(self.caller, signal.SIGUSR1)
            until = time.monotonic() + DEADLINE_S
            while not (self.folder / "handled").exists() and time.monotonic() < until:
                time.sleep(0.001)

    def reset(self, **arguments):
        self.signal_the_caller()
        return super().reset(**arguments)


@pytest.mark.deep
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("outer", ["reset", "call"])
def test_a_refusal_that_comes_up_through_a_call_leaves_nothing_pending(
    outer, num_workers, tmp_path
):
    def handler(*_):
        (tmp_path / "handled").touch()
        envs.step([0, 1])

    env_fns = [partial(Signalling, tmp_path, os.getpid()), partial(Counter, 99)]
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with closing(ShmVectorEnv(env_fns, num_workers=num_workers, context="fork")) as envs:
            with pytest.raises(AlreadyPendingCallError):
                envs.reset() if outer == "reset" else envs.call_some([0], "signal_the_caller")
            assert envs.reset(seed=1)[0][:, 0].tolist() == [0, 0]
            assert envs.step([0, 1])[0][:, 0].tolist() == [1, 1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def decorated(method):
    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)

    return wrapper


class Hooked(ShmVectorEnv):
    """Does something in step_wait and reset_wait, after the results, through others' functions."""

    hook = None

    @decorated
    def step_wait(self, timeout=None):
        results = super().step_wait(timeout)
        self.hook(self)
        return results

    def reset_wait(self, timeout=None):
        results = super().reset_wait(timeout)
        if self.hook is not None:
            self.hook(self)
        return results


def send_and_recv(envs):
    envs.send([0, 0])
    envs.recv()


@pytest.mark.deep
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "use",
    [lambda envs: envs.restart([0]), send_and_recv, lambda envs: envs.get_attr("length")],
    ids=["restart", "send", "get_attr"],
)
def test_what_a_subclass_does_in_its_halves_is_not_refused(use, num_workers):
    with closing(Hooked([partial(Counter, 99)] * 2, num_workers=num_workers)) as envs:
        envs.reset()
        envs.hook = use
        envs.step([0, 0])
        envs.reset()

"""Answers that raise as they are taken: once; the envs that were to be taken are idle then."""

import contextlib
import contextvars
import os
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest
from echoing import is_lost
from envs import Counter
from stepping import in_order, lockstep
from tables import paired

from shmvec import ShmVectorEnv
from shmvec.exchange import Exchange
from shmvec.faults import Failure


class Disturbed(Exception):
    """What a handler raises."""


@contextlib.contextmanager
def handler_every(seconds, times):
    """Has a signal's handler raise, so many times, each once what is given says it is caught."""
    left = [times]
    caught = []

    def handler(number, frame):
        if left[0] == 0 or not caught or is_lost(frame):
            return
        left[0] -= 1
        caught.clear()
        raise Disturbed

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield caught
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _read_slowly():
    until = time.monotonic() + 0.02
    while time.monotonic() < until:
        pass
    return "read"


class _Slow:
    def __reduce__(self):
        return _read_slowly, ()


class SlowToRead(Counter):
    """Puts into its infos what takes 20 ms to unpickle."""

    def step(self, action):
        *results, info = super().step(action)
        return (*results, {**info, "slow": _Slow()})


def counters(count):
    return [lambda: Counter(99)] * count


@pytest.mark.deep
def test_ctrl_c_while_the_cores_are_looked_at(monkeypatch):
    envs = ShmVectorEnv(counters(2), num_workers=2)
    try:
        envs.reset(seed=1)
        real = os.sched_getaffinity

        def once(pid):
            monkeypatch.setattr(os, "sched_getaffinity", real)
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "sched_getaffinity", once)
        until = time.monotonic() + 60
        with pytest.raises(KeyboardInterrupt):
            while time.monotonic() < until:
                envs.step([0, 0])
        envs.reset(seed=1)
        assert envs.step([1, 1])[0][:, 0].tolist() == [1, 1]
    finally:
        envs.close()


_RAISED = []


@pytest.fixture(autouse=True)
def nothing_was_raised():
    _RAISED.clear()


def _read(error):
    """What an info is unpickled by: it raises the first time, as a signal's handler may."""
    if error not in _RAISED:
        _RAISED.append(error)
        raise error
    return "read"


class Unread:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return _read, (self.error,)


STRICT = contextvars.ContextVar("STRICT", default=False)


def _read_in_context():
    if STRICT.get():
        raise ArithmeticError
    return "read"


class Contextual:
    """Cannot be read in some contexts: np.errstate(all="raise"), warnings that are errors."""

    def __reduce__(self):
        return _read_in_context, ()


# By name: what the envs' first step returns, as an observation and in an info, and what it raises.
TROUBLES = {
    "Ctrl-C as an info is read": (
        lambda env, seen: (seen, Unread(KeyboardInterrupt) if env else "read"),
        KeyboardInterrupt,
    ),
    "an info that cannot be read": (
        lambda env, seen: (seen, Unread(LookupError) if env else "read"),
        LookupError,
    ),
    "infos that cannot be read in this context": (
        lambda env, seen: (seen, Contextual()),
        ArithmeticError,
    ),
    "infos that cannot be gathered": (  # env 1's is large, too
        lambda env, seen: (seen, np.zeros(2 + env * 10**6)),
        ValueError,
    ),
    "observations that do not fit together": (
        lambda env, seen: (seen[:-1] if env else seen, "read"),
        ValueError,
    ),
}


class Troubled(Counter):
    def __init__(self, env, trouble):
        super().__init__(99, offset=env)
        self.trouble = trouble

    def step(self, action):
        observation, *results, info = super().step(action)
        info["x"] = "read"
        if self.count == 1:
            observation, info["x"] = self.trouble(self.offset, observation)
        return (observation, *results, info)


def troubled(trouble, count=2):
    return [partial(Troubled, env, TROUBLES[trouble][0]) for env in range(count)]


def recv(envs, actions):
    envs.send(actions)
    return in_order(envs.recv(timeout=60))


@pytest.mark.parametrize(
    "trouble, workers, take, order",
    paired(TROUBLES, [2, 0, 1], [recv, lockstep, recv], [None, None, [[1, 0], [0, 1], [1, 0]]]),
)
def test_what_cannot_be_taken_raises_once(trouble, workers, take, order):
    error = TROUBLES[trouble][1]
    order = order if take is recv else None
    shared = "observations" not in trouble
    envs = ShmVectorEnv(
        troubled(trouble), num_workers=workers, shared_memory=shared, replay_order=order
    )
    try:
        envs.reset(seed=1)
        strict = STRICT.set(True)
        with pytest.raises(error) as raised:
            take(envs, [1, 2])
        assert shared or "env 1: the observation has shape" in str(raised.value)
        STRICT.reset(strict)
        if take is recv:
            assert not any(map(envs.exchange.in_flight, range(2)))
        for count in (2, 3):
            observations, *_, infos = take(envs, [3, 0])
            assert [each[0] for each in observations] == [count] * 2
            assert infos["action"].tolist() == [3, 0] and infos["x"].tolist() == ["read"] * 2
    finally:
        envs.close()


@pytest.mark.parametrize("workers", [1, 0])
def test_what_other_envs_have_raised_is_lost_with_results_that_cannot_be_read(workers):
    fns = [lambda: Fails(99), *troubled("an info that cannot be read")[1:]]
    envs = ShmVectorEnv(fns, num_workers=workers, log_errors=False)
    try:
        envs.reset(seed=1)
        with pytest.raises(LookupError) as raised:
            envs.step([1, 1])
        assert "as asked" not in str(raised.value)
        assert envs.step([0, 0])[0][:, 0].tolist() == [1, 2]
    finally:
        envs.close()


@pytest.mark.deep
@pytest.mark.parametrize("gather", [True, None])
@pytest.mark.parametrize("trouble", ["Ctrl-C as an info is read", "an info that cannot be read"])
def test_a_take_that_is_broken_off_leaves_other_envs_their_answers(trouble, gather):
    exchange = Exchange(troubled(trouble, 3), num_workers=1)
    try:
        exchange.ask_reset()
        exchange.take()
        exchange.ask([2, 1, 0], [1, 2, 3])
        with pytest.raises(TROUBLES[trouble][1]):
            exchange.take([0, 1], gather=gather)
        assert list(map(exchange.in_flight, range(3))) == [False, False, True]
        (info,) = exchange.take([2], gather=None).infos
        assert info["action"] == 1
        exchange.ask([1, 0], [3, 1])
        infos = exchange.take([0, 1], gather=None).infos
        assert [(info["action"], info["x"]) for info in infos] == [(1, "read"), (3, "read")]
    finally:
        exchange.close()


@pytest.mark.deep
def test_failures_are_raised_once_though_ctrl_c_comes_as_they_are_compared(monkeypatch):
    envs = ShmVectorEnv([lambda: Fails(99)] * 2, num_workers=2)
    try:
        envs.reset(seed=1)

        def interrupted(self, other):
            raise KeyboardInterrupt

        monkeypatch.setattr(Failure, "__eq__", interrupted)
        envs.send([1, 1])
        envs.exchange.first_ready([np.arange(2)])
        with pytest.raises(LookupError):
            envs.recv()
        monkeypatch.undo()
        assert envs.exchange.num_in_flight == 0  # both were received
        envs.reset(seed=1)
        envs.send([0, 0])
        assert envs.recv()[0][:, 0].tolist() == [1, 1]
    finally:
        envs.close()


class Fails(Counter):
    """Raises if its action is 1."""

    def step(self, action):
        if action == 1:
            raise LookupError("as asked")
        return super().step(action)


@pytest.mark.deep
@pytest.mark.parametrize("threads", [0, 1])
def test_a_handler_raises_as_infos_are_read(threads):
    """A signal that one thread blocks is delivered to another, and handled in the first."""
    end = threading.Event()
    others = [threading.Thread(target=end.wait) for _ in range(threads)]
    for other in others:
        other.start()
    envs = ShmVectorEnv([lambda: SlowToRead(99)] * 2, num_workers=1)
    try:
        envs.reset(seed=1)
        infos, raised = None, 0
        with handler_every(0.005, times=3) as caught:
            until = time.monotonic() + 60
            while infos is None and time.monotonic() < until:
                if not envs.exchange.in_flight(0):
                    envs.send([1, 2])
                try:
                    caught.append(True)
                    infos = envs.recv()[-1]
                    caught.clear()
                except Disturbed:
                    raised += 1
        assert raised
        assert infos["slow"].tolist() == ["read", "read"]
        assert infos["action"].tolist() == [1, 2]
    finally:
        envs.close()
        end.set()
        for other in others:
            other.join()

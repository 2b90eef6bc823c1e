"""Answers that raise as they are taken: once; the envs that were to be taken are idle then."""

import contextlib
import contextvars
import os
import signal
import threading
import time

import numpy as np
import pytest
from echoing import is_lost
from envs import Counter

from shmvec import ShmVectorEnv
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


WORKERS = pytest.mark.parametrize("workers", [0, 1])


def counters(count):
    return [lambda: Counter(99)] * count


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


class Large(Counter):
    """Puts an array into its infos of which env 1's has another shape, and is large."""

    def step(self, action):
        *results, info = super().step(action)
        info["x"] = np.zeros(2 + self.offset * 10**6)
        return (*results, info)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("order", [None, [[1, 0], [0, 1], [1, 0]]])
def test_infos_that_cannot_be_gathered_raise_once(workers, order):
    envs = ShmVectorEnv(
        [lambda i=i: Large(99, i) for i in range(2)], num_workers=workers, replay_order=order
    )
    try:
        envs.reset(seed=1)
        for _ in range(2):
            envs.send([3, 4])
            with pytest.raises(ValueError):
                envs.recv()
            assert not any(map(envs.exchange.in_flight, range(2)))
        envs.exchange.ask(None, [3, 4])
        answers = envs.exchange.take()
        assert answers.observations[:, 0].tolist() == [3, 3]
        assert [len(info["x"]) for info in answers.infos] == [2, 2 + 10**6]
    finally:
        envs.close()


STRICT = contextvars.ContextVar("STRICT", default=False)


def _read_in_context():
    if STRICT.get():
        raise ArithmeticError
    return "read"


class _Contextual:
    def __reduce__(self):
        return _read_in_context, ()


class Contextual(Counter):
    """Puts into its infos what cannot be read in some contexts."""

    def step(self, action):
        *results, info = super().step(action)
        return (*results, {**info, "x": _Contextual()})


@WORKERS
def test_infos_that_cannot_be_read_in_the_callers_context_raise_once(workers):
    """As with np.errstate(all="raise"), or warnings that are errors."""
    envs = ShmVectorEnv([lambda: Contextual(99)] * 2, num_workers=workers)
    try:
        envs.reset(seed=1)
        envs.send([3, 4])
        strict = STRICT.set(True)
        with pytest.raises(ArithmeticError):
            envs.recv()
        STRICT.reset(strict)
        envs.send([3, 4])
        observations, *_, infos = envs.recv()
        assert observations[:, 0].tolist() == [2, 2]
        assert infos["x"].tolist() == ["read", "read"]
    finally:
        envs.close()


class Odd(Counter):
    """Returns an observation of another shape in its second step, if it is env 1."""

    def step(self, action):
        observation, *results = super().step(action)
        odd = self.offset == 1 and self.count == 2
        return (observation[:-1] if odd else observation, *results)


@WORKERS
def test_observations_that_do_not_fit_together_raise_once(workers):
    envs = ShmVectorEnv(
        [lambda i=i: Odd(99, i) for i in range(2)], num_workers=workers, shared_memory=False
    )
    try:
        envs.reset(seed=1)
        for step in range(1, 4):
            envs.send([3, 3])
            if step == 2:
                with pytest.raises(ValueError, match=r"env 1: the observation has shape \(\d+,\)"):
                    envs.recv()
                continue
            assert envs.recv()[0][:, 0].tolist() == [step, step]
    finally:
        envs.close()


def test_failures_are_told_once_though_ctrl_c_comes_as_they_are_compared(monkeypatch):
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
        assert envs.exchange.num_in_flight == 0  # both were told
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

"""The public seam: what it refuses, and for whom it waits."""

import gc
import itertools
import multiprocessing
import sys
import threading
import time
import weakref
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from envs import Counter, Failing, Gated, Story
from gymnasium.error import ClosedEnvironmentError
from tables import deep

from shmvec.exchange import Exchange


@pytest.mark.parametrize("env", [3, *deep(-1, 10**9)])
def test_envs_that_there_are_not(env):
    with closing(Exchange([Counter] * 3, num_workers=0)) as exchange:
        exchange.ask_reset()
        for ask in (
            lambda: exchange.take([env]),
            lambda: exchange.take(np.array([env], np.intp)),
            lambda: exchange.in_flight(env),
            lambda: exchange.over(env),
        ):
            with pytest.raises(ValueError, match=f"there is no env {env}: there are 3"):
                ask()
        with pytest.raises(ValueError, match="env_id must be in 0 to 2"):
            exchange.restart(np.array([env], np.intp))
        exchange.restart([])
        assert exchange.restarts(2) == 0
        assert len(exchange.take().envs) == 3


@pytest.mark.parametrize("workers", [2, *deep(0)])
def test_the_first_of_several_groups(workers):
    exchange = Exchange([lambda i=i: Story(i) for i in range(4)], num_workers=workers)
    try:
        exchange.ask_reset(None)
        exchange.take()
        groups = [np.array([0, 1]), np.array([2, 3])]
        exchange.ask([2, 3], [1, 2], together=True)
        exchange.ask([0], [3])
        assert exchange.first_ready(groups[1:]) == 0
        assert exchange.first_ready([np.array([0]), groups[1]]) in (0, 1)
        assert exchange.take([3, 2]).rewards.tolist() == [2, 1]
        assert exchange.first_ready([groups[0]]) == 0  # env 1 was asked nothing
        assert exchange.take([0]).rewards.tolist() == [3]
    finally:
        exchange.close()


@pytest.mark.deep
def test_an_order_of_ones_own_is_waited_for_and_nobody_else(tmp_path):
    """Where a request for several envs has another one's answer between theirs."""

    class Waits(Story):
        def reset(self, *, seed=None, options=None):
            self.wait(options)
            return super().reset(seed=seed)

        def step(self, action):
            self.wait(action)
            return super().step(action)

        def wait(self, waits):
            deadline = time.monotonic() + 100
            while waits and not (tmp_path / "go").exists() and time.monotonic() < deadline:
                time.sleep(0.01)

    exchange = Exchange([lambda i=i: Waits(i) for i in range(6)], num_workers=2)
    with closing(exchange):
        exchange.ask_reset(None)
        exchange.take()
        for order, asks in (
            ([0, 2, 1], [([3], [1]), ([0, 1], [0, 0]), ([2], [0])]),
            ([0, 1, 2], [([3], 1), ([0, 2], 0), ([1], 0)]),
        ):
            for envs, action in asks:
                if isinstance(action, list):
                    exchange.ask(envs, action, together=True)
                else:
                    exchange.ask_reset(envs, options=[{"wait": True} if action else {}] * len(envs))
            assert exchange.take(order, arrays=False).envs.tolist() == order
            with pytest.raises(multiprocessing.TimeoutError):  # the slow env has not answered
                exchange.take(timeout=0.0)
            (tmp_path / "go").touch()
            assert exchange.take(arrays=False).envs.tolist() == [3]
            (tmp_path / "go").unlink()


class Waiting(Gated):
    """Its step with action 7 waits; its method raises."""

    def __init__(self, gate):
        super().__init__(gate, action=7)

    def fails(self):
        raise LookupError("as asked")


@pytest.mark.deep
def test_what_a_call_raises_leaves_others_in_flight(tmp_path):
    gate = tmp_path / "gate"
    with closing(Exchange([lambda: Waiting(gate)] * 2, num_workers=2)) as exchange:
        exchange.ask_reset()
        exchange.take()
        exchange.ask([0], [7])
        with pytest.raises(LookupError):
            exchange.call("fails", envs=[1])
        assert exchange.in_flight(0) and not exchange.in_flight(1)
        exchange.ask([1], [3])
        assert exchange.take([1]).observations[:, :2].tolist() == [[1, 3]]
        gate.touch()
        assert exchange.take([0]).observations[:, :2].tolist() == [[1, 7]]


@pytest.mark.deep
@pytest.mark.parametrize(
    "ask", [lambda exchange: exchange.call("fails"), lambda exchange: exchange.call("nothing")]
)
def test_an_exception_that_was_caught_keeps_nothing(ask, tmp_path):
    """Not even until garbage is collected: an exchange may have gigabytes."""
    gc.collect()
    gc.disable()
    try:
        with closing(Exchange([lambda: Waiting(tmp_path)] * 2, num_workers=2)) as exchange:
            with pytest.raises((LookupError, AttributeError)):
                ask(exchange)
        kept = weakref.ref(exchange)
        del exchange
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.deep
def test_what_is_discarded_is_waited_for_by_the_next_call_if_need_be(tmp_path):
    gate = tmp_path / "gate"
    with closing(Exchange([lambda: Waiting(gate)] * 2, num_workers=2)) as exchange:
        assert exchange.discard()  # nothing is in flight
        exchange.ask_reset()
        exchange.take()
        for timeout in (0.0, 0.01):
            exchange.ask(None, [7, 0])
            assert not exchange.discard(timeout)
            assert exchange.num_in_flight == 2
            gate.touch()
            exchange.ask([1], [3])  # waits for both
            assert not exchange.in_flight(0)
            assert len(exchange.take().envs) == 1
            gate.unlink()
        exchange.ask(None, [0, 0])
        assert exchange.discard()
        assert exchange.num_in_flight == 0


def test_a_call_that_takes_too_long_is_abandoned(tmp_path):
    gate = tmp_path / "gate"
    with closing(Exchange([lambda: Waiting(gate)] * 2, num_workers=2)) as exchange:
        exchange.ask_reset()
        exchange.take()
        with pytest.raises(multiprocessing.TimeoutError):
            exchange.call("step", (7,), timeout=0.01)
        gate.touch()
        assert exchange.step([0, 0])[0][:, 0].tolist() == [2, 2]


@pytest.mark.deep
@pytest.mark.parametrize("workers", [1, 2])
def test_envs_that_leave_are_closed_and_who_does_not_close_is_ended(workers, tmp_path):
    class Leaves(Counter):
        def __init__(self, env):
            super().__init__(99)
            self.env = env

        def close(self):
            (tmp_path / f"{self.env} closed").touch()
            time.sleep(60 * self.env)

    exchange = Exchange([lambda i=i: Leaves(i) for i in range(2)], num_workers=workers)
    try:
        exchange.ask_reset()
        exchange.take()
        exchange.leave([1], timeout=0.01)
        for ask in (
            lambda: exchange.ask([1], [0]),
            lambda: exchange.ask(None, [0, 0]),
            lambda: exchange.ask_reset([0, 1]),
            lambda: exchange.call("env", envs=[1]),
            lambda: exchange.leave([1]),
        ):
            with pytest.raises(ValueError, match=r"envs \[1\] have left"):
                ask()
        assert exchange.call("env", envs=[0]) == [0]
        assert exchange.restarts(0) == (workers == 1)
        exchange.ask([0], [0])
        assert exchange.take().truncations.tolist() == [workers == 1]
        exchange.leave([0])
        assert (tmp_path / "0 closed").exists()
    finally:
        exchange.close(terminate=True)


def test_beside_an_env_that_has_raised_a_wait_does_not_spin(tmp_path):
    gate, calls = tmp_path / "gate", itertools.count()
    env_fns = [partial(Failing, "step", ValueError("here"), at=1), partial(Gated, gate)]
    with closing(Exchange(env_fns, num_workers=2)) as exchange:
        exchange.ask_reset()
        exchange.take()
        exchange.ask(None, [0, 0])
        assert exchange.first_ready([np.array([0]), np.array([1])]) == 0
        timer = threading.Timer(0.2, gate.touch)
        timer.start()
        sys.setprofile(lambda *_: next(calls))
        try:
            assert exchange.first_ready([np.array([1])]) == 0
        finally:
            sys.setprofile(None)
            timer.join()
        assert next(calls) < 20_000  # 109; a wait that spins makes 100,000


@pytest.mark.deep
def test_the_first_of_several_groups_of_a_step_of_all(tmp_path):
    gate = tmp_path / "gate"
    with closing(Exchange([lambda: Waiting(gate)] * 2, num_workers=2)) as exchange:
        exchange.ask_reset()
        exchange.take()
        exchange.ask(None, [7, 0])
        assert exchange.first_ready([np.array([0]), np.array([1])]) == 1
        gate.touch()
        assert exchange.first_ready([np.array([0])]) == 0
        assert exchange.take().envs.tolist() == [0, 1]


@pytest.mark.deep
@pytest.mark.parametrize("call", ["step", "ask", "take"])
def test_a_call_before_the_exchange_is_made(call):
    arguments = {"step": ([0],), "ask": (None, [0]), "take": ()}[call]
    with pytest.raises(AttributeError):
        getattr(Exchange.__new__(Exchange), call)(*arguments)


def test_an_env_that_is_taken_twice_is_taken_once():
    with closing(Exchange([Counter] * 2, num_workers=0)) as exchange:
        exchange.ask_reset()
        exchange.take()
        exchange.ask(None, [1, 2])
        assert exchange.take(np.array([0, 0])).envs.tolist() == [0, 0]
        assert exchange.num_in_flight == 1
        assert exchange.take().envs.tolist() == [1]


@pytest.mark.deep
@pytest.mark.parametrize("recycle_after", [None, 10**6])
def test_a_batch_is_asked_for_too_early_or_too_late(recycle_after):
    exchange = Exchange([Counter], wait=False, recycle_after=recycle_after)
    with pytest.raises(RuntimeError, match="initialize"):
        exchange.take(count=1)
    exchange.initialize()
    exchange.close()
    with pytest.raises(ClosedEnvironmentError, match="after a call to `close"):
        exchange.take(count=1)


def test_poll_needs_a_descriptor():
    with closing(Exchange([Counter], num_workers=1)) as exchange:
        with pytest.raises(RuntimeError, match="call fileno"):
            exchange.poll()
        exchange.ask_reset()
        with pytest.raises(ValueError, match="env 0 has been asked"):
            exchange.fileno()

"""The public seam: what it refuses, and for whom it waits."""

import time
from contextlib import closing

import numpy as np
import pytest
from envs import Counter
from test_partial import Story

from shmvec.exchange import Exchange


@pytest.mark.parametrize("env", [-1, 3, 10**9])
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
        assert len(exchange.take().envs) == 3


@pytest.mark.parametrize("workers", [0, 2])
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


def test_an_order_of_ones_own_is_waited_for_and_nobody_else(tmp_path):
    """Where a request for several envs has another one's answer between theirs."""

    class Waits(Story):
        def step(self, action):
            deadline = time.monotonic() + 10
            while action and not (tmp_path / "go").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            return super().step(action)

        def wait(self, action):
            self.step(action)

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
                    exchange.command("call", ("wait", (action,), {}), envs)
            assert exchange.take(order, arrays=False).envs.tolist() == order
            assert not exchange.wait(0.0)  # who is slow has not answered
            (tmp_path / "go").touch()
            assert exchange.take(arrays=False).envs.tolist() == [3]
            (tmp_path / "go").unlink()


class Gated(Counter):
    """Its step waits for a file; its method raises."""

    def __init__(self, gate):
        super().__init__(99)
        self.gate = gate

    def step(self, action):
        until = time.monotonic() + 60
        while action == 7 and not self.gate.exists() and time.monotonic() < until:
            time.sleep(0.001)
        return super().step(action)

    def fails(self):
        raise LookupError("as asked")


def test_what_a_call_raises_leaves_others_in_flight(tmp_path):
    gate = tmp_path / "gate"
    with closing(Exchange([lambda: Gated(gate)] * 2, num_workers=2)) as exchange:
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

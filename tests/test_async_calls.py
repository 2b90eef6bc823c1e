"""reset, step and call in two parts: the order they may come in, time limits, late results."""

import multiprocessing
import threading
import time
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from envs import Counter
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector.async_vector_env import AsyncState
from tables import deep, paired

from shmvec import ShmVectorEnv

WORKERS = pytest.mark.parametrize("num_workers", [3, *deep(0, 1)])


class Gated(Counter):
    """Waits in `step` and `reset` for a gate in shared memory to open."""

    def __init__(self, gate):
        super().__init__(length=100)
        self.gate = gate

    def reset(self, **kwargs):
        assert self.gate.wait(60)
        return super().reset(**kwargs)

    def step(self, action):
        assert self.gate.wait(60)
        return super().step(action)

    def slow(self, value):
        assert self.gate.wait(60)
        return value


def gated(gate, **kwargs):
    return ShmVectorEnv([lambda: Gated(gate)] * 3, context="fork", **kwargs)


@pytest.fixture
def gate():
    event = multiprocessing.get_context("fork").Event()
    event.set()
    return event


@WORKERS
def test_two_parts_make_a_whole(num_workers):
    whole = ShmVectorEnv([Counter] * 3, num_workers=num_workers)
    parts = ShmVectorEnv([Counter] * 3, num_workers=num_workers)
    with closing(whole), closing(parts):
        parts.reset_async(seed=3)
        assert parts._state is AsyncState.WAITING_RESET
        np.testing.assert_equal(parts.reset_wait(), whole.reset(seed=3))
        for action in range(4):
            parts.step_async([action] * 3)
            np.testing.assert_equal(parts.step_wait(timeout=60), whole.step([action] * 3))
        parts.call_async("get_wrapper_attr", "count")
        assert parts.call_wait(timeout=60) == (4, 4, 4)
        assert parts._state is AsyncState.DEFAULT


PENDING = {
    "reset": lambda envs: envs.reset_async(),
    "step": lambda envs: envs.step_async([0, 0, 0]),
    "call": lambda envs: envs.call_async("count"),
}
CALLS = {
    "reset_async": lambda envs: envs.reset(),
    "step_async": lambda envs: envs.step([0, 0, 0]),
    "call_async": lambda envs: envs.call("count"),
    "set_attr": lambda envs: envs.set_attr("offset", 1),
}


@pytest.mark.parametrize("num_workers, pending", paired([3, 0, 1], PENDING))
def test_one_call_at_a_time(num_workers, pending):
    envs = ShmVectorEnv([Counter] * 3, num_workers=num_workers)
    with closing(envs):
        envs.reset()
        PENDING[pending](envs)
        for name, call in CALLS.items():
            message = (
                f"Calling `{name}` while waiting for a pending call to `{pending}` to complete"
            )
            with pytest.raises(AlreadyPendingCallError, match=message) as caught:
                call(envs)
            assert caught.value.name == pending
        for other in {"reset", "step", "call"} - {pending}:
            with pytest.raises(
                NoAsyncCallError, match=f"without any prior call to `{other}_async`"
            ):
                getattr(envs, f"{other}_wait")()
        getattr(envs, f"{pending}_wait")()  # none of it did any harm
        envs.step([0, 0, 0])


@pytest.mark.deep
def test_no_wait_without_a_call():
    envs = ShmVectorEnv([Counter])
    with closing(envs):
        for name in ("reset", "step", "call"):
            message = f"Calling `{name}_wait` without any prior call to `{name}_async`."
            with pytest.raises(NoAsyncCallError, match=message) as caught:
                getattr(envs, f"{name}_wait")()
            assert caught.value.name == name
    for use in (
        envs.reset_async,
        envs.reset_wait,
        envs.step_wait,
        envs.call_wait,
        lambda: envs.step_async([0]),
        lambda: envs.call_async("count"),
        lambda: envs.set_attr("offset", 1),
    ):
        with pytest.raises(ClosedEnvironmentError, match="Trying to operate on `ShmVectorEnv`"):
            use()


@pytest.mark.parametrize("num_workers", [3, *deep(1)])
@pytest.mark.parametrize("shared_memory", [True, *deep(False)])
def test_late_results_are_dropped(gate, num_workers, shared_memory):
    envs = gated(gate, num_workers=num_workers, shared_memory=shared_memory)
    with closing(envs):
        envs.reset(seed=0)
        gate.clear()
        envs.step_async([1, 1, 1])
        message = r"The call to `step_wait` has timed out after 0.01 second\(s\)."
        with pytest.raises(multiprocessing.TimeoutError, match=message):
            envs.step_wait(timeout=0.01)
        # Nothing is lost: the next call waits for these results, and drops them.
        opener = threading.Timer(0.05, gate.set)
        opener.start()
        envs.step_async([0, 1, 3])
        opener.join()
        observations, _, _, _, infos = envs.step_wait(timeout=60)
        assert observations[:, :2].tolist() == [[2, 0], [2, 1], [2, 3]]
        assert infos["count"].tolist() == [2, 2, 2]
        assert envs.call("slow", 5) == (5, 5, 5)


@pytest.mark.deep
def test_what_a_late_call_raised_is_dropped_with_it(gate):
    class Raising(Gated):
        def step(self, action):
            super().step(action)
            raise ValueError("late")

    with closing(ShmVectorEnv([lambda: Raising(gate)], context="fork")) as envs:
        envs.reset()
        gate.clear()
        envs.step_async([0])
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0)
        gate.set()
        assert envs.call("slow", 1) == (1,)


@pytest.mark.parametrize("terminate, pending", paired([False, True], ["step", "reset", "call"]))
def test_close_with_a_call_pending_warns(pending, terminate):
    envs = ShmVectorEnv([Counter] * 3, num_workers=2)
    envs.reset()
    PENDING[pending](envs)
    message = f"Calling `close` while waiting for a pending call to `{pending}` to complete."
    with pytest.warns(UserWarning, match=message):
        envs.close(terminate=terminate)
    assert envs.closed
    envs.close()


@pytest.mark.deep
def test_close_drops_what_the_pending_call_raised():
    class Raising(Counter):
        def step(self, action):
            raise ValueError("never seen")

    envs = ShmVectorEnv([Raising] * 2, num_workers=2)
    envs.reset()
    envs.step_async([0, 0])
    with pytest.warns(UserWarning, match="pending call to `step`"):
        envs.close()


@pytest.mark.deep
def test_close_with_a_call_pending_closes_even_if_warnings_are_errors():
    envs = ShmVectorEnv([Counter] * 3, num_workers=2)
    envs.reset_async()
    with pytest.raises(UserWarning, match="pending call to `reset`"):
        envs.close()
    assert not any(process.is_alive() for process in envs.processes)


@pytest.mark.deep
def test_close_after_a_late_call_takes_no_longer_than_its_timeout(gate):
    envs = gated(gate, num_workers=3)
    gate.clear()
    envs.reset_async()
    with pytest.raises(multiprocessing.TimeoutError, match="`reset_wait` has timed out after 0"):
        envs.reset_wait(timeout=0)
    envs.close(timeout=0.1)
    assert not any(process.is_alive() for process in envs.processes)


@pytest.mark.deep
def test_a_subclass_may_override_either_half():
    class Doubling(ShmVectorEnv):
        def step_async(self, actions):
            super().step_async(np.asarray(actions) * 2)

        def step_wait(self, timeout=None):
            observations, *rest = super().step_wait(timeout)
            return observations[:, 1], *rest

    with closing(Doubling([Counter] * 2)) as envs:
        envs.reset()
        assert envs.step([0, 1])[0].tolist() == [0, 2]


@pytest.mark.deep
def test_del_closes():
    envs = ShmVectorEnv([Counter] * 2, num_workers=2)
    envs.reset_async()
    with (
        pytest.warns(ResourceWarning, match="unclosed"),
        pytest.warns(UserWarning, match="pending"),
    ):
        envs.__del__()
    assert envs.closed
    envs.__del__()
    ShmVectorEnv.__new__(ShmVectorEnv).__del__()  # construction failed at its very beginning


@pytest.mark.deep
def test_a_restart_does_not_wait_for_what_it_ends(tmp_path):
    class Stuck(Counter):
        def step(self, action):
            while not (tmp_path / "go").exists():
                time.sleep(0.005)
            return super().step(action)

    with closing(ShmVectorEnv([Stuck] * 3, num_workers=3)) as envs:
        envs.reset()
        envs.step_async([1, 2, 3])
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.05)
        envs.restart()
        (tmp_path / "go").touch()
        truncations, infos = envs.step([1, 2, 3])[3:]
        assert truncations.all() and infos["_fault"].all()


@pytest.mark.deep
def test_the_exchange_is_lent():
    def meanwhile():
        with pytest.raises(AlreadyPendingCallError), envs.lend("another loop"):
            pass
        refused.set()

    refused = threading.Event()
    with closing(ShmVectorEnv([Counter] * 3, num_workers=2)) as envs:
        envs.reset()
        with envs.lend("a loop") as exchange:
            exchange.ask([1, 2], [5, 6])
            exchange.take(count=1)
            for call in (envs.reset, partial(envs.step, [0] * 3), partial(envs.call, "render")):
                with pytest.raises(AlreadyPendingCallError, match="pending call to `a loop`"):
                    call()
            thread = threading.Thread(target=meanwhile)
            thread.start()
            assert refused.wait(60)
            thread.join()
        observations, rewards, *_ = envs.step([7, 8, 9])  # what was not taken is discarded
        assert observations[:, 1].tolist() == [7, 8, 9] and rewards.tolist() == [1, 2, 2]
        envs.send([1], [1])
        loan = envs.lend("a loop")
        with pytest.raises(AlreadyPendingCallError, match="Calling `a loop`"), loan:
            pass
        envs.recv(min_envs=1)


@pytest.mark.deep
def test_a_start_that_is_broken_off_late_is_no_forgotten_env(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("shmvec.vector_env.Rollouts", interrupted)  # the constructor's last
    with pytest.raises(KeyboardInterrupt):  # without a ResourceWarning, which is an error here
        ShmVectorEnv([Counter] * 2, num_workers=1)


class Interrupted(ShmVectorEnv):
    """Its step_async raises for action 4, once it has asked."""

    def step_async(self, actions):
        super().step_async(actions)
        if actions[0] == 4:
            raise KeyboardInterrupt


@pytest.mark.deep
def test_what_was_asked_by_a_call_that_then_raises_is_dropped():
    with closing(Interrupted([lambda: Counter(99)] * 2, num_workers=1)) as envs:
        envs.reset()
        with pytest.raises(KeyboardInterrupt):
            envs.step([4, 4])
        assert envs.step([5, 5])[0][:, :2].tolist() == [[2, 5]] * 2

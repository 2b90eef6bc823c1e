"""Ctrl-C in the middle of what follows a fault, and faults that come together."""

import sys

import numpy as np
import pytest
from envs import Counter
from scripts import succeeds
from stepping import STEPS, told
from tables import crossed

from shmvec import FaultPolicy, ShmVectorEnv, TooManyFaultsError
from shmvec.exchange import Exchange

RESTART = FaultPolicy(on_crash="restart", on_error="restart", backoff_s=0)


def test_close_after_ctrl_c_while_two_workers_are_being_replaced():
    succeeds("""
        import signal, tempfile, threading, time
        from envs import Counter
        from shmvec import FaultPolicy, ShmVectorEnv, TooManyFaultsError

        slow = os.path.join(tempfile.mkdtemp(), "slow")

        def make():
            if os.path.exists(slow):
                time.sleep(1)
            return Counter(99)

        policy = FaultPolicy(on_crash="restart", backoff_s=0)
        envs = ShmVectorEnv([make] * 3, num_workers=3, faults=policy)
        envs.reset(seed=1)
        open(slow, "w").close()
        for process in envs.processes[:2]:
            os.kill(process.pid, signal.SIGKILL)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            envs.step([1] * 3)
        except KeyboardInterrupt:
            envs.close()
        else:
            raise AssertionError("it was not interrupted")
    """)


@pytest.mark.parametrize("hook, which", [("before", 1), ("after_in_parent", 2)])
def test_ctrl_c_in_a_hook_that_runs_around_a_fork_is_raised(hook, which):
    """Python drops what such hooks raise; logging has some."""
    succeeds(f"""
        import signal
        from envs import Counter
        from shmvec import FaultPolicy, ShmVectorEnv

        forks = []

        def interrupt():
            if armed and not forks.append(1) and len(forks) == {which}:
                os.kill(os.getpid(), signal.SIGINT)

        armed = False
        os.register_at_fork({hook}=interrupt)
        policy = FaultPolicy(on_crash="restart", backoff_s=0)
        envs = ShmVectorEnv(
            [lambda: Counter(99)] * 3, num_workers=3, context="fork", faults=policy
        )
        envs.reset(seed=1)
        for process in envs.processes[:2]:
            os.kill(process.pid, signal.SIGKILL)
        armed = True
        try:
            envs.step([1] * 3)
        except KeyboardInterrupt:
            armed = False
        else:
            raise AssertionError("it was not interrupted")
        envs.step([1] * 3)
        envs.close()
    """)


def test_a_rollout_is_not_gone_on_with_after_another_that_was_broken_off(monkeypatch):
    envs = ShmVectorEnv([lambda: Counter(99)] * 3, num_workers=2)
    try:
        envs.reset(seed=1)
        rollout = envs.rollout(8)
        rollout.step([1] * 3)

        def interrupted(*memory):
            share(*memory)
            raise KeyboardInterrupt

        share = envs.exchange.share_rollouts
        with monkeypatch.context() as patch:
            patch.setattr(envs.exchange, "share_rollouts", interrupted)
            with pytest.raises(KeyboardInterrupt):
                envs.rollout(4)  # the workers have its memory by now
        with pytest.raises(RuntimeError, match="cannot be gone on with"):
            rollout.step([1] * 3)
        assert envs.step([1] * 3)[0][:, 0].tolist() == [2] * 3
    finally:
        envs.close()


def test_ctrl_c_in_an_env_that_is_built_again_is_raised():
    built = []

    def make():
        built.append(1)
        if len(built) == 3:
            raise KeyboardInterrupt
        return Clumsy()

    envs = ShmVectorEnv([make] * 2, num_workers=0, faults=RESTART)
    try:
        envs.reset(seed=1)
        with pytest.raises(KeyboardInterrupt):
            envs.step([3, 1])
        assert envs.stats().faults.restarts == 1
        assert told(envs.step([1, 1])[-1], 2).all()  # not by the step that was broken off
        envs.step([1, 1])
        assert envs.step([1, 1])[0][:, 0].tolist() == [1, 1]
    finally:
        envs.close()


class Clumsy(Counter):
    """Raises where its action is 3."""

    def __init__(self):
        super().__init__(99)

    def step(self, action):
        if action == 3:
            raise LookupError("no luck")
        return super().step(action)


@pytest.mark.parametrize("workers", [0, 1])
def test_envs_of_one_worker_that_raise_together_are_one_restart(workers):
    envs = ShmVectorEnv([Clumsy] * 12, num_workers=workers, faults=RESTART)
    try:
        envs.reset(seed=1)
        infos = envs.step([3] * 12)[-1]
        assert infos["fault"]["restarts"].tolist() == [1] * 12
        faults = envs.stats().faults
        assert (faults.errors, faults.restarts, faults.resets) == (12, 1, 0)
        assert "fault" not in envs.step([1] * 12)[-1]
        assert envs.step([1] * 12)[0][:, 0].tolist() == [1] * 12
    finally:
        envs.close()


@pytest.mark.parametrize("workers, cure, step", crossed([0, 2], ["reset", "restart"], STEPS))
def test_too_many_errors_are_told_as_such(workers, cure, step):
    policy = FaultPolicy(on_error=cure, max_restarts=0)
    envs = ShmVectorEnv([Clumsy] * 3, num_workers=workers, faults=policy)
    try:
        envs.reset(seed=1)
        with pytest.raises(TooManyFaultsError, match="no luck") as caught:
            step(envs, [1, 3, 1])
        assert len(caught.value.history) == 1
        assert envs.closed
    finally:
        envs.close()


_RAISED = []


def _read(error, times):
    if _RAISED.count(error) < times:
        _RAISED.append(error)
        raise error
    return "read"


class _Unread:
    """What raises when it is unpickled, so many times: as a signal's handler may, at any moment."""

    def __init__(self, *error_and_times):
        self.error_and_times = error_and_times

    def __reduce__(self):
        return _read, self.error_and_times


class Telling(Counter):
    """Counter that, as env 2, puts into its infos what is not read at once."""

    def __init__(self, offset, error, times):
        super().__init__(99, offset)
        self.unread = _Unread(error, times)

    def step(self, action):
        *results, info = super().step(action)
        if self.offset == 2:
            info["late"] = self.unread
        return (*results, info)


@pytest.fixture(params=[KeyboardInterrupt, ArithmeticError], ids=["Ctrl-C", "Exception"])
def interruption(request):
    yield request.param
    _RAISED.clear()


def _telling(error, times=1):
    return [lambda i=i: Telling(i, error, times) for i in range(4)]


def _each(infos):
    """Infos of four envs, of which each was told its action, as one list of dicts."""
    if isinstance(infos, dict):
        assert infos["_action"].all()
        infos = [
            {key: infos[key][row] for key in ("action", "late")}
            for row in range(len(infos["action"]))
        ]
    return [(info["action"], info.get("late")) for info in infos]


def test_a_recv_that_is_broken_off_leaves_its_envs_idle(interruption):
    envs = ShmVectorEnv(_telling(interruption), num_workers=1)
    try:
        envs.reset(seed=1)
        envs.send([1, 2, 3, 0])
        with pytest.raises(interruption):
            envs.recv()
        assert not any(map(envs.exchange.in_flight, range(4)))
        envs.send([1, 2, 3, 0])
        observations, *_, infos = envs.recv(timeout=20)
        assert observations[:, 0].tolist() == [2] * 4  # each has made both steps
        assert infos["env_id"].tolist() == [0, 1, 2, 3]
        assert _each(infos) == [(1, None), (2, None), (3, "read"), (0, None)]
    finally:
        envs.close()


@pytest.mark.parametrize("gather", [True, None])
def test_a_take_of_all_that_is_broken_off_leaves_the_envs_idle(interruption, gather):
    exchange = Exchange(_telling(interruption), num_workers=2)
    try:
        exchange.ask_reset()
        exchange.take()
        exchange.ask(None, [1, 2, 3, 0])
        with pytest.raises(interruption):
            exchange.take(gather=gather)
        assert not any(map(exchange.in_flight, range(4)))
        exchange.ask(None, [0, 1, 2, 3])
        answers = exchange.take(gather=gather, timeout=20)
        assert _each(answers.infos) == [(0, None), (1, None), (2, "read"), (3, None)]
    finally:
        exchange.close()


@pytest.mark.parametrize("gather", [True, None])
def test_a_take_that_is_broken_off_leaves_other_envs_their_answers(interruption, gather):
    exchange = Exchange(_telling(interruption), num_workers=1)
    try:
        exchange.ask_reset()
        exchange.take()
        exchange.ask([3, 2, 1, 0], [1, 2, 3, 0])
        with pytest.raises(interruption):
            exchange.take([0, 2], gather=gather)
        assert list(map(exchange.in_flight, range(4))) == [False, True, False, True]
        assert _each(exchange.take([1, 3], gather=None).infos) == [(3, None), (1, None)]
        exchange.ask([2, 0], [3, 1])
        assert _each(exchange.take([0, 2], gather=None).infos) == [(1, None), (3, "read")]
    finally:
        exchange.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_infos_that_cannot_be_read_raise_once(workers):
    envs = ShmVectorEnv(_telling(ArithmeticError, 10**9), num_workers=workers)
    try:
        envs.reset(seed=1)
        envs.send([1, 2, 3, 0])
        with pytest.raises(ArithmeticError):
            envs.recv()
        envs.send([1, 3, 0], [0, 1, 3])
        infos = envs.recv(min_envs=3, timeout=20)[-1]
        assert sorted(infos["action"].tolist()) == [0, 1, 3]
        with pytest.raises(ArithmeticError):
            envs.step([1, 2, 3, 0])
        envs.reset(seed=1)  # what was sent is gone from the ring
        assert envs.step([0] * 4, mask=np.arange(4) != 2)[1].tolist() == [1, 2, 0, 4]
    finally:
        envs.close()
        _RAISED.clear()


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="it looks for signals before the block")
def test_a_lent_exchange_is_back_while_the_exception_is_kept_that_broke_it_off():
    succeeds("""
        from echoing import Interrupted, Moments
        from envs import Counter
        from shmvec import ShmVectorEnv

        class Lending(Moments):
            def _enter(self, frame, event, arg):
                if os.path.basename(frame.f_code.co_filename) in ("vector_env.py", "contextlib.py"):
                    return super()._enter(frame, event, arg)

        def kept():
            try:
                envs.set_attr("length", 99)
            except Interrupted:  # as long as this is handled, frames stay as they were
                sys.settrace(None)
                envs.step([1, 1])

        if __name__ == "__main__":
            envs = ShmVectorEnv([lambda: Counter(99)] * 2, num_workers=1)
            envs.reset()
            moments = Lending()
            while moments.interrupt(kept):
                envs.step([1, 1])
            envs.close()
    """)

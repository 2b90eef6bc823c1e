"""Ctrl-C in the middle of what follows a fault, and faults that come together."""

import pytest
from envs import Counter
from scripts import succeeds
from stepping import STEPS, faulty
from tables import paired

from shmvec import FaultPolicy, ShmVectorEnv, TooManyFaultsError

pytestmark = pytest.mark.deep

RESTART = FaultPolicy(on_crash="restart", on_error="restart", backoff_s=0)


def test_close_after_ctrl_c_while_two_workers_are_being_replaced():
    succeeds("""
        import signal, tempfile, threading, time
        from envs import Counter
        from shmvec import FaultPolicy, ShmVectorEnv, TooManyFaultsError

        folder = tempfile.mkdtemp()
        slow, broken_off = (os.path.join(folder, name) for name in ("slow", "broken off"))
        begun, begin = os.pipe()

        def make():
            if os.path.exists(slow):
                os.write(begin, b"x")
                while not os.path.exists(broken_off):
                    time.sleep(0.01)
                time.sleep(1)
            return Counter(99)

        def interrupt():
            for _ in range(2):  # both are being built
                os.read(begun, 1)
            os.kill(os.getpid(), signal.SIGINT)

        policy = FaultPolicy(on_crash="restart", backoff_s=0)
        envs = ShmVectorEnv([make] * 3, num_workers=3, context="fork", faults=policy)
        envs.reset(seed=1)
        open(slow, "w").close()
        for process in envs.processes[:2]:
            os.kill(process.pid, signal.SIGKILL)
        try:
            threading.Thread(target=interrupt, daemon=True).start()
            envs.step([1] * 3)
        except KeyboardInterrupt:
            open(broken_off, "w").close()
            envs.close()
        else:
            raise AssertionError("it was not interrupted")
    """)


@pytest.mark.parametrize("hook, which", [("before", 1), ("after_in_parent", 2)])
def test_ctrl_c_in_a_hook_that_runs_around_a_fork_is_raised(hook, which):
    """Python discards what such hooks raise; logging has some."""
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

        share = envs.exchange.share
        with monkeypatch.context() as patch:
            patch.setattr(envs.exchange, "share", interrupted)
            with pytest.raises(KeyboardInterrupt):
                envs.rollout(4)  # the workers have its memory by now
        with pytest.raises(RuntimeError, match="cannot be continued"):
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
        assert faulty(envs.step([1, 1])[-1], 2).all()  # not by the step that was broken off
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


@pytest.mark.parametrize("workers, cure, step", paired([0, 2], ["reset", "restart"], STEPS))
def test_too_many_errors_are_raised_as_such(workers, cure, step):
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

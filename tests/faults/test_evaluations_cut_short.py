"""Evaluations that end early: in time, with the error that was the reason, the envs usable."""

import multiprocessing
import os
import threading
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError
from scripts import succeeds
from short_walks import Walk, act, one_after_the_other, rows

import shmvec
from shmvec import ShmVectorEnv, evaluate
from shmvec.exchange import AutoresetMode

pytestmark = pytest.mark.deep


class Stuck(Walk):
    """Stands still in the second step of the episode of seed 1, until the file is there."""

    def __init__(self, mark):
        super().__init__()
        self.mark = mark

    def step(self, action):
        while self.seed == 1 and not os.path.exists(self.mark):
            time.sleep(0.005)
        return super().step(action)


@contextmanager
def stuck_envs(mark, **options):
    options = {"num_workers": 3, "autoreset_mode": AutoresetMode.DISABLED, **options}
    envs = ShmVectorEnv([lambda: Stuck(mark)] * 3, **options)
    try:
        yield envs
    finally:
        envs.close(timeout=0.0)


def check(envs):
    """It can be used: these are the results of an evaluation, of a reset and a step."""
    assert rows(evaluate(envs, act, 9, seeds=3)) == [
        one[:4] for one in one_after_the_other(Walk, range(3, 12))
    ]
    observations, _ = envs.reset(seed=[5, 6, 7])
    alone = Walk()
    for env, seed in enumerate([5, 6, 7]):
        np.testing.assert_array_equal(observations[env], alone.reset(seed=seed)[0])
    envs.step([0] * 3)


@pytest.mark.parametrize("cure", ["it goes on", "restart"])
def test_a_time_limit_does_not_wait_for_an_env_that_is_stuck(tmp_path, cure):
    mark = str(tmp_path / "go")
    with stuck_envs(mark) as envs:
        result = evaluate(envs, act, 9, seeds=0, hard_time_limit=3.0)  # for ever, if it waited
        assert not result.complete and len(result) == 1
        # Its answer is still in flight, and the next call would wait for it.
        assert sum(map(envs.exchange.in_flight, range(3))) == 1
        again = evaluate(envs, act, 9, seeds=3, hard_time_limit=0.2)
        assert len(again) == 0 and again.steps == 0
        if cure == "restart":
            envs.restart([1])
        open(mark, "w").close()
        check(envs)


def test_answers_to_a_call_that_timed_out_are_dropped(tmp_path):
    mark = str(tmp_path / "go")
    with stuck_envs(mark) as envs:
        envs.reset(seed=0)
        envs.step_async([0] * 3)
        with pytest.raises(AlreadyPendingCallError, match="`evaluate` while .* `step`"):
            evaluate(envs, act, 9, seeds=3)
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.1)
        threading.Timer(0.2, lambda: open(mark, "w").close()).start()
        check(envs)
        envs.send([0], [1])
        with pytest.raises(AlreadyPendingCallError, match="take their results"):
            evaluate(envs, act, 9, seeds=3)


def test_a_policy_that_raises_does_not_wait_for_an_env_that_is_stuck(tmp_path):
    def policy(observations, env_ids):
        if 1 not in env_ids:
            raise ZeroDivisionError("no idea")
        return act(observations, env_ids)

    mark = str(tmp_path / "go")
    with stuck_envs(mark) as envs:
        with pytest.raises(ZeroDivisionError, match="no idea"):
            evaluate(envs, policy, 9, seeds=0)
        open(mark, "w").close()
        check(envs)


def test_a_time_limit_of_an_env_is_no_time_limit_of_the_evaluation(tmp_path):
    with stuck_envs(str(tmp_path / "go"), step_timeout=1.0) as envs:
        with pytest.raises(shmvec.EnvTimeoutError):
            evaluate(envs, act, 9, seeds=0, time_limit=30)


# ---- by whom it is used meanwhile ----------------------------------------------------------------


def test_using_the_envs_meanwhile_is_refused():
    def policy(observations, env_ids):
        for use in (
            lambda: envs.reset(seed=1),
            lambda: envs.step([0] * 3),
            lambda: evaluate(envs, act, 2),
            lambda: envs.set_attr("left", 3),
        ):
            with pytest.raises(AlreadyPendingCallError, match="`evaluate`"):
                use()
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
        return act(observations, env_ids)

    def in_a_thread():
        try:
            evaluate(envs, act, 2)
        except AlreadyPendingCallError as error:
            refused.append(str(error))

    refused = []
    with closing(ShmVectorEnv([Walk] * 3, num_workers=2)) as envs:
        result = evaluate(envs, policy, 9, seeds=0)
        assert rows(result) == [one[:4] for one in one_after_the_other(Walk, range(9))]
        assert len(refused) > 3 and set(refused) == {refused[0]} and "`evaluate`" in refused[0]
        check(envs)


# ---- closing -------------------------------------------------------------------------------------


class Unclosable(Walk):
    def close(self):
        raise OSError("the simulator has gone")


def test_what_closing_an_env_raises_does_not_hide_why_it_was_closed():
    def policy(observations, env_ids):
        raise ZeroDivisionError("no idea")

    with pytest.raises(ZeroDivisionError, match="no idea") as caught:
        evaluate(Unclosable, policy, 3, num_envs=2)
    assert "the simulator has gone" in caught.value.__notes__[-1]


def test_what_closing_an_env_raises_does_not_cost_the_result():
    with pytest.warns(UserWarning, match="OSError: the simulator has gone"):
        result = evaluate(Unclosable, act, 5, seeds=0, num_envs=2)
    assert rows(result) == [one[:4] for one in one_after_the_other(Walk, range(5))]


def test_a_time_limit_holds_for_closing_too():
    class Unending(Walk):
        def close(self):
            threading.Event().wait(600)

    assert len(evaluate(Unending, act, 3, seeds=0, num_envs=1, hard_time_limit=60)) == 3


# ---- Ctrl-C --------------------------------------------------------------------------------------


OURS = """
    import os, sys
    from echoing import Moments
    from short_walks import Walk, act
    from shmvec import ShmVectorEnv, evaluate

    class Ours(Moments):
        def _enter(self, frame, event, arg):
            if os.path.basename(frame.f_code.co_filename) in FILES:
                return super()._enter(frame, event, arg)

    def interrupted(*arguments, **options):
        try:
            evaluate(*arguments, seeds=1, **options)
        except TypeError as error:  # NumPy was interrupted
            assert "NumPy cannot read them" in str(error)
"""


def test_after_an_exception_at_any_moment_the_envs_can_be_used():
    body = """
        FILES = "call.py", "player.py", "_policy.py", "vector_env.py", "exchange.py"
        envs = ShmVectorEnv([Walk] * 3, num_workers=2)
        expected = evaluate(envs, act, 3, seeds=3).returns.tolist()
        moments, n = Ours(23), 0
        while moments.interrupt(lambda: interrupted(envs, act, 2)):
            assert evaluate(envs, act, 3, seeds=3).returns.tolist() == expected
            envs.reset(seed=1)
            n += 1
        assert n > 4, n
        envs.close()
    """
    succeeds(OURS, body)


@pytest.mark.parametrize(("workers", "stride"), [(0, 17), (1, 29)])
def test_after_an_exception_at_any_moment_nothing_was_left_open(workers, stride):
    body = f"""
        FILES = "call.py", "vector_env.py"  # others' moments are more, the longer they wait
        unraisable = []
        sys.unraisablehook = lambda args: unraisable.append(str(args.exc_value))
        moments, n = Ours({stride}), 0
        while moments.interrupt(lambda: interrupted(Walk, act, 1, num_workers={workers})):
            assert not any("unclosed" in each for each in unraisable), (n, unraisable)
            n += 1
        assert n > 25 / {stride}, n
    """
    succeeds(OURS, body)

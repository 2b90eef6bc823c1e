"""actorcritic's MultiEnv and SubprocessEnv: deaths, hangs, exceptions, and their end."""

import multiprocessing
import time
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from actorcritic_envs import (
    AGAIN,
    DEADLINE_S,
    Chatty,
    Mortal,
    counters,
    kill,
    multi_env,
    process_of,
    started,
)
from envs import Counter, Failing
from processes import run_script

from shmvec import FaultPolicy, TooManyFaultsError
from shmvec.adapters.actorcritic import MultiEnv, SubprocessEnv, create_subprocess_envs

pytestmark = pytest.mark.deep

# ---- dead subprocess recreated ---------------------------------------------------------------


@pytest.mark.parametrize("killed", ["before", "within"])
def test_a_dead_subprocess_is_recreated_and_a_reset_repeated(killed, tmp_path):
    operation = "reset" if killed == "within" else ""
    with started(partial(Mortal, operation, tmp_path / "died")) as env:  # also by default
        if killed == "before":
            env.reset()
            kill(env)
        observation, info = env.reset(seed=3, options={"level": 5})
        alone = Counter()
        np.testing.assert_array_equal(observation, alone.reset(seed=3)[0])
        assert info["reset"] == 1 and info["fault"]["restarts"] == 1
        assert env.group.exchange.call("received") == [[{"level": 5}]]


@pytest.mark.parametrize("killed", ["before", "within"])
def test_a_dead_subprocess_is_recreated_reset_and_a_call_repeated(killed, tmp_path):
    operation = "render" if killed == "within" else ""
    envs = create_subprocess_envs(
        [Counter, partial(Mortal, operation, tmp_path / "died")], faults=AGAIN
    )
    with closing(MultiEnv(envs)):
        for env in envs:
            env.reset(options={"level": 5})
            env.step(1)
        if killed == "before":
            kill(envs[1])
        assert envs[1].render() == 0
        assert envs[1].group.exchange.call("received", envs=[1]) == [[{"level": 5}]]
        info = envs[1].step(1)[4]
        assert info["count"] == 1 and info["fault"]["restarts"] == 1
        assert "fault" not in envs[1].step(1)[4]
        assert envs[0].step(1)[4] == {"count": 2, "action": 1}


def test_a_dead_subprocess_of_a_multi_env_is_recreated_and_the_break_is_visible():
    with multi_env(counters(3), faults=AGAIN) as envs:
        envs.reset(seed=0)
        envs.step([1, 1, 1])
        kill(envs.envs[1])
        observations, rewards, terminals, infos = envs.step([2, 2, 2])
        assert [observation[0] for observation in observations] == [2, 1, 2]
        assert rewards == [2, 11, 22] and terminals == [False] * 3
        assert ["fault" in info for info in infos] == [False, True, False]
        kill(envs.envs[0])
        kill(envs.envs[2])
        assert [observation[0] for observation in envs.reset()] == [0, 0, 0]
        assert ["fault" in info for info in envs.reset_infos] == [True, False, True]


def test_a_death_after_the_end_of_an_episode_loses_nothing_but_is_visible():
    with multi_env([partial(Counter, length=2)] * 2, faults=AGAIN) as envs:
        envs.reset()
        envs.step([1, 1])
        assert envs.step([1, 1])[2] == [True, True]
        kill(envs.envs[0])
        observations, _, _, infos = envs.step([2, 2])
        assert [observation[0] for observation in observations] == [1, 1]
        assert ["fault" in info for info in infos] == [True, False]
        assert infos[0]["reset_observation"][0] == 0


def test_restarts_are_limited():
    policy = FaultPolicy(on_crash="restart", max_restarts=2, backoff_s=0)
    with started(partial(Failing, "step", "kill", at=1), faults=policy) as env:
        env.reset()
        with pytest.raises(TooManyFaultsError, match="max_restarts=2"):
            env.step(0)
        with pytest.raises(ValueError, match="has ended by an earlier fault"):
            env.step(0)


def test_an_envs_exception_is_no_death():
    env_fns = [Counter, partial(Failing, "step", LookupError("lost"))]
    envs = create_subprocess_envs(env_fns)
    pids = [process_of(env).pid for env in envs]
    with closing(MultiEnv(envs)) as together:
        together.reset()
        together.step([1, 1])
        with pytest.raises(LookupError, match="lost") as raised:
            together.step([1, 1])
        assert "env 1" in str(raised.value.__cause__)
        assert [process_of(env).pid for env in envs] == pids
        assert envs[0].step(1)[4]["count"] == 3  # the other one has made its step
        envs[1].reset()
        envs[1].step(1)
        with pytest.raises(LookupError):
            envs[1].step(1)


def test_nothing_is_recreated_on_ctrl_c():
    script = run_script("""
        import os, signal, threading, time
        import gymnasium as gym
        from envs import Counter
        from shmvec.adapters.actorcritic import MultiEnv, create_subprocess_envs

        class Sleepy(Counter):
            def step(self, action):
                if action == 3:
                    os.killpg(program, signal.SIGINT)
                    time.sleep(0.5)
                return super().step(action)

        os.setpgrp()
        program = os.getpid()
        envs = create_subprocess_envs([Sleepy] * 2)
        exchange = envs[0].group.exchange
        envs = MultiEnv([gym.wrappers.FrameStackObservation(env, 2) for env in envs])
        envs.reset()
        before = [process.pid for process in exchange.processes]
        try:
            envs.step([3, 1])
        except KeyboardInterrupt:
            infos = envs.step([1, 1])[3]
            print([info["count"] for info in infos], ["fault" in info for info in infos])
            print([process.pid for process in exchange.processes] == before)
        envs.close()
        until = time.monotonic() + 50
        while threading.active_count() > 1 and time.monotonic() < until:
            time.sleep(0.001)  # the thread that copies stderr is about to end
        print(threading.active_count())
    """)
    out, err = script.communicate(timeout=250)
    assert (script.returncode, out, err) == (0, "[2, 2] [False, False]\nTrue\n1\n", "")


# ---- close -----------------------------------------------------------------------------------


def test_envs_of_several_groups_are_closed_in_parallel():
    class Late(Counter):
        def __init__(self, barrier):
            super().__init__()
            self.barrier = barrier

        def close(self):
            self.barrier.wait(DEADLINE_S)

    barrier = multiprocessing.Barrier(3)
    envs = [SubprocessEnv(partial(Late, barrier)) for _ in range(3)]
    for env in envs:
        env.start()
    for env in envs:
        env.initialize()
    MultiEnv(envs).close()
    assert not multiprocessing.active_children()


def test_one_handle_may_be_closed_and_the_others_go_on(tmp_path):
    log = tmp_path / "log"
    envs = create_subprocess_envs([partial(Chatty, log), Counter])
    envs[0].close()
    assert log.read_text() == "closed\n"
    with closing(envs[1]):
        envs[1].reset()
        assert envs[1].step(1)[1] == 1
        with pytest.raises(ValueError, match="closed already"):
            envs[0].reset()
    assert not multiprocessing.active_children()


def test_a_handle_that_hangs_in_close_does_not_stop_others_of_its_process(tmp_path):
    env_fns = [partial(Chatty, tmp_path / "log", close_s=60), Counter]
    envs = create_subprocess_envs(env_fns, num_workers=1)
    envs[1].reset()
    envs[0].close(timeout=0.1)
    assert envs[1].step(1)[4]["fault"]["restarts"] == 1
    envs[1].close(timeout=0.1)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("began", ["nothing", "start", "initialize"])
def test_close_never_hangs_whatever_env_fn_and_close_do(began, tmp_path):
    def hangs():
        if began == "start":
            time.sleep(60)
        return Chatty(tmp_path / "log", close_s=60)

    env = SubprocessEnv(hangs)
    if began != "nothing":
        env.start()
    if began == "initialize":
        env.initialize()
    start = time.monotonic()
    env.close(timeout=0.1)
    env.close()
    assert time.monotonic() - start < DEADLINE_S
    assert not multiprocessing.active_children()


def test_close_raises_what_an_env_raises_after_all_are_closed(tmp_path):
    envs = MultiEnv(
        create_subprocess_envs(
            [partial(Failing, "close", LookupError("lost")), partial(Chatty, tmp_path / "log")]
        )
    )
    with pytest.raises(LookupError, match="lost"):
        envs.close()
    assert (tmp_path / "log").read_text() == "closed\n"
    assert not multiprocessing.active_children()

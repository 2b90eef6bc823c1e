"""``caller_steps=True``: the caller is a worker, with the same results, and faults handled."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from envs import Counter, Unreadable
from tables import deep

import shmvec
from shmvec import FaultPolicy, ShmVectorEnv
from shmvec.exchange import Exchange

RESTART = FaultPolicy(on_crash="restart", on_error="restart", backoff_s=0, max_restarts=100)


class Where(Counter):
    """Tells its process; dies, raises or interrupts where its action says so."""

    def pid(self):
        return os.getpid()

    def step(self, action):
        if action == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 2:
            raise LookupError("as asked")
        return super().step(action)


class Interrupted(Counter):
    def step(self, action):
        if action == 3:
            signal.raise_signal(signal.SIGINT)
        return super().step(action)


def made(fns, num_workers=2, **options):
    return ShmVectorEnv(fns, num_workers=num_workers, caller_steps=True, **options)


@pytest.mark.deep
def test_where_envs_are_and_what_is_asked_of_them():
    with closing(made([Where] * 5)) as envs:
        pids = envs.call("pid")
        assert pids[:3] == (envs.processes[0].pid,) * 3 and pids[3:] == (os.getpid(),) * 2
        envs.set_attr("length", list(range(5)))
        assert envs.get_attr("length") == tuple(range(5))
        received = envs.get_attr("received")  # a copy, of the caller's envs as well
        received[4].append("not the env's")
        assert envs.get_attr("received")[4] == []
        assert envs.call_some([4, 0], "pid") == (os.getpid(), pids[0])


def test_partial_batches_masks_and_rollouts():
    with closing(made([lambda: Counter(99)] * 4)) as envs:
        envs.reset(seed=0)
        envs.send([1, 1], [3, 0])
        found = envs.exchange.take([3, 0])
        assert found.envs.tolist() == [3, 0] and found.rewards.tolist() == [1, 1]
        envs.send([1], [3])
        assert envs.recv(min_envs=1)[1].tolist() == [2]
        assert envs.step([0, 0, 0, 0], mask=np.arange(4) % 2 == 1)[1].tolist() == [1, 1, 0, 3]
        rollout = envs.rollout(3)
        for _ in range(3):
            rollout.step([1, 2, 3, 0])
        assert rollout.rewards[1:].tolist() == [[2, 2, 1, 4], [3, 3, 2, 5], [4, 4, 3, 6]]


@pytest.mark.deep
def test_one_worker_is_the_caller():
    with closing(made([Where] * 2, num_workers=1)) as envs:
        assert envs.num_workers == 0 and envs.processes == []
        assert envs.call("pid") == (os.getpid(),) * 2


@pytest.mark.parametrize(
    "options", [{"step_timeout": 1.0}, *deep({"worker_init": print}, {"worker_environ": {}})]
)
def test_options_of_processes_are_refused(options):
    with pytest.raises(ValueError, match="caller_steps=True.*leave one of them out"):
        made([Counter] * 2, **options)


@pytest.mark.deep
def test_batches_of_what_is_ready_first_are_refused():
    with pytest.raises(ValueError, match="batch_size.*caller_steps=True"):
        made([Counter] * 2, batch_size=1)


@pytest.mark.parametrize(
    "env, action, kind",
    [(3, 2, "LookupError"), *deep((0, 3, "WorkerCrashError"), (0, 2, "LookupError"))],
)
def test_a_fault_on_either_side_is_survived(env, action, kind):
    actions = np.zeros(4, int)
    actions[env] = action
    with closing(made([lambda: Where(99)] * 4, faults=RESTART)) as envs:
        envs.reset(seed=1)
        for round_ in range(3):
            *_, truncations, infos = envs.step(actions)
            assert truncations[env] and infos["fault"]["type"][env] == kind
            other = 3 - env
            assert not truncations[other]
            envs.step(np.zeros(4, int))
            assert envs.step(np.zeros(4, int))[1][other] == 3 * (round_ + 1)
        assert envs.exchange.restarts(env) == 3 and envs.exchange.restarts(3 - env) == 0


@pytest.mark.deep
def test_ctrl_c_in_an_env_of_the_callers():
    with closing(made([lambda: Interrupted(99)] * 4)) as envs:
        envs.reset()
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                envs.step([0, 0, 0, 3])
            before = envs.step([0] * 4)[1]
            assert envs.step([0] * 4)[1].tolist() == (before + 1).tolist()


@pytest.mark.deep
def test_restart_and_recycling_reach_the_callers_envs():
    with closing(made([lambda: Where(99)] * 4, recycle_after=5)) as envs:
        envs.reset(seed=1)
        first = envs.processes[0].pid
        truncated = np.zeros(4, int)
        for _ in range(14):
            truncated += envs.step([0] * 4)[3]
        assert truncated.tolist() == [2] * 4 and envs.processes[0].pid != first
        envs.restart([3])
        assert envs.step([0] * 4)[3].tolist() == [False, False, True, True]


@pytest.mark.deep
def test_a_fork_does_not_touch_it():
    with closing(made([Counter] * 4)) as envs:
        envs.reset()
        child = multiprocessing.get_context("fork").Process(target=envs.close)
        child.start()
        child.join()
        assert child.exitcode == 0
        assert envs.step([0] * 4)[1].tolist() == [1] * 4


@pytest.mark.deep
def test_close_reports_what_envs_of_both_sides_raise():
    class Clinging(Counter):
        def close(self):
            raise LookupError("it stays open")

    envs = made([Clinging, Counter, Counter, Clinging])
    with pytest.raises(LookupError, match="stays open"):
        envs.close()
    assert envs.closed


@pytest.mark.deep
def test_stats_count_both_sides():
    with closing(made([lambda: Counter(99)] * 4)) as envs:
        envs.reset()
        for _ in range(50):
            envs.step([0] * 4)
        stats = envs.stats()
        assert [worker.steps for worker in stats.workers] == [100, 100]
        assert stats.caller_steps and stats.num_workers == 2 and stats.workers[1].cpu_s is None
        assert "2 workers" in str(stats)


@pytest.mark.deep
def test_an_exchange_and_an_evaluation_take_it():
    exchange = Exchange([Counter] * 3, num_workers=3, caller_steps=True)
    exchange.ask_reset(None, seeds=[1, 2, 3])
    assert exchange.take().observations.shape == (3, 4)
    exchange.ask([2, 1], [0, 0])
    assert exchange.take([2, 1]).rewards.tolist() == [1, 1]
    exchange.close()

    def policy(observations, env_ids):
        return np.zeros(len(observations), int)

    results = [
        shmvec.evaluate(Counter, policy, episodes=7, seeds=1, num_envs=3, num_workers=3, **options)
        for options in ({}, {"caller_steps": True})
    ]
    assert results[0].returns.tolist() == results[1].returns.tolist()


@pytest.mark.deep
def test_a_trace_has_both_sides(tmp_path):
    with closing(made([Counter] * 2)) as envs:
        with envs.trace(tmp_path / "run.json"):
            envs.reset(seed=0)
            for _ in range(100):
                envs.step([0, 0])
        text = (tmp_path / "run.json").read_text()
        assert '"step' in text and str(os.getpid()) in text


class Hostile(Where):
    """Has attributes that cannot be pickled, or cannot be unpickled."""

    lock = threading.Lock()
    unreadable = Unreadable()


@pytest.mark.deep
@pytest.mark.parametrize(
    "name, error", [("lock", TypeError), ("unreadable", LookupError)], ids=["pickle", "unpickle"]
)
@pytest.mark.parametrize("env", [0, 3])
def test_a_result_that_cannot_be_sent_is_an_error_of_its_env(name, error, env):
    with closing(made([lambda: Hostile(99)] * 4)) as envs:
        envs.reset()
        with pytest.raises(error):
            envs.get_attr(name, [env])
        with pytest.raises(error):
            envs.get_attr(name)
        assert envs.step([0] * 4)[1].tolist() == [1] * 4


@pytest.mark.deep
def test_no_env_is_left_behind_by_batches_of_what_is_ready():
    with closing(made([lambda: Counter(9999)] * 4)) as envs:
        envs.async_reset(seed=0)
        asked, rounds = np.zeros(4, int), 0
        while asked.min() < 20:  # of 40 rounds, unless the worker has to wait for a core
            rounds += 1
            assert rounds < 4000, asked
            ids = envs.recv(min_envs=1)[4]["env_id"]
            time.sleep(0.005)  # a policy, meanwhile the process's envs get ready
            envs.send([0] * len(ids), ids)
            asked[ids] += 1


@pytest.mark.deep
def test_envs_of_the_callers_that_have_left_stay_so():
    class Clinging(Counter):
        def close(self):
            time.sleep(30 * (self.offset == 0))

    fns = [lambda offset=offset: Clinging(99, offset) for offset in (0, 1, 2)]
    exchange = Exchange(fns, num_workers=3, caller_steps=True)
    exchange.reset()
    exchange.leave([2])
    exchange.leave([0], timeout=0.1)
    exchange.ask([1], [0])
    assert exchange.take([1]).rewards.tolist() == [2]
    exchange.close()


@pytest.mark.deep
@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_others_are_not_waited_for_where_the_callers_env_cannot_be_built(error, tmp_path):
    def fail():
        raise error("cannot be built")

    def wait():
        while not (tmp_path / "never").exists():
            time.sleep(0.01)

    with pytest.raises(error, match="cannot be built"):
        made([wait, fail])


@pytest.mark.deep
def test_defaults_from_outside_give_way(monkeypatch):
    monkeypatch.setenv("SHMVEC_STEP_TIMEOUT", "3")
    made([Counter] * 2).close()
    monkeypatch.setenv("SHMVEC_FAULTS", "on_crash=restart,step_timeout=3")
    with closing(made([Counter] * 2)) as envs:
        assert envs.faults == FaultPolicy()
    monkeypatch.setenv("SHMVEC_FAULTS", "on_crash=restart")
    with closing(made([Counter] * 2)) as envs:
        assert envs.faults == FaultPolicy(on_crash="restart")
    monkeypatch.delenv("SHMVEC_STEP_TIMEOUT")
    monkeypatch.delenv("SHMVEC_FAULTS")
    shmvec.install(caller_steps=True)
    try:
        for refused in (
            {"step_timeout": 3.0},
            {"batch_size": 1},
            {"worker_init": print},
            {"faults": FaultPolicy(step_timeout=3.0)},
        ):
            with closing(ShmVectorEnv([Counter] * 2, num_workers=2, **refused)) as envs:
                assert len(envs.processes) == 2
        with closing(ShmVectorEnv([Counter] * 2, num_workers=2)) as envs:
            assert len(envs.processes) == 1
    finally:
        shmvec.uninstall()

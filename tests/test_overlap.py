"""``overlap=``, and envs of coroutines: several envs of a worker at once, with equal results."""

import asyncio
import itertools
import json
import logging
import multiprocessing
import threading
import time
from contextlib import closing, suppress
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter, Unreadable
from equality import same
from overlapping import (
    DEADLINE,
    DIE,
    HANG,
    RAISE,
    AsyncCounter,
    AsyncMeets,
    AsyncWaiter,
    Meets,
    TalksAtItsEnd,
    UsesSignals,
    Waiter,
)
from tables import deep, first

import shmvec
from shmvec import EnvTimeoutError, FaultPolicy, Pipeline, ShmVectorEnv, WorkerCrashError
from shmvec._autoreset import Autoreset
from shmvec._processes.overlap import OverlappingExecutor

KINDS = pytest.mark.parametrize("kind", ["threads", "coroutines"])
OF = {Counter: AsyncCounter, Waiter: AsyncWaiter}


def made(kind, fns, overlap=16, num_workers=2, **options):
    """A vector env of these classes with their arguments, of threads or of coroutines."""
    if kind == "coroutines":
        fns = [partial(OF[fn.func], *fn.args, **fn.keywords) for fn in map(partial, fns)]
        overlap = None if overlap == 16 else overlap
    return ShmVectorEnv(fns, overlap=overlap, num_workers=num_workers, **options)


# ---- equal results -----------------------------------------------------------------------------


@pytest.mark.deep
@KINDS
def test_large_results_of_calls(kind):
    with closing(made(kind, [Counter] * 4)) as envs:
        envs.set_attr("large", [np.full(400_000, n) for n in range(4)])
        assert [each.sum() for each in envs.get_attr("large")] == [0, 4e5, 8e5, 12e5]


@pytest.mark.deep
@KINDS
def test_rollouts_evaluation_and_pipeline(kind):
    fns = [partial(Counter, n) for n in (2, 5, 3, 4)]
    found = []
    for make in (partial(made, kind, fns), partial(ShmVectorEnv, fns, num_workers=2)):
        with closing(make()) as envs:
            envs.reset(seed=0)
            rollout = envs.rollout(6)
            for _ in range(6):
                rollout.step([1, 2, 3, 0])
            record = [rollout.observations.copy(), rollout.rewards.copy()]
            policy = lambda observations, env_ids: np.zeros(len(env_ids), int)  # noqa: E731
            evaluated = shmvec.evaluate(envs, policy, episodes=4, seeds=1, batch="fixed")
            pipeline = Pipeline(envs, policy)
            pipeline.reset(seed=0)
            record += [each.rewards for each in itertools.islice(pipeline, 10)]
            pipeline.drop()
            found.append((record, evaluated.returns, evaluated.lengths))
    assert same(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1]) and np.array_equal(found[0][2], found[1][2])


# ---- at once ------------------------------------------------------------------------------------


@KINDS
def test_envs_of_a_worker_step_at_once(kind):
    with closing(made(kind, [Waiter] * 8)) as envs:
        envs.reset(seed=0)
        assert envs.step([1] * 8)[1].tolist() == [1.0] * 8  # each waits for another one
        envs.send([1, 1], [4, 5])
        assert sorted(envs.recv(min_envs=2)[4]["env_id"].tolist()) == [4, 5]


@pytest.mark.deep
@KINDS
def test_no_more_at_once_than_said(kind):
    with closing(made(kind, [Waiter] * 4, overlap=1, num_workers=1, step_timeout=1.0)) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvTimeoutError, match=r"env 0 has been in step\(\)"):
            envs.step([1] * 4)
        envs.close(terminate=True)


@pytest.mark.deep
@KINDS
def test_answers_come_in_the_order_in_which_envs_are_done(kind, tmp_path):
    files = [tmp_path / str(n) for n in range(4)]
    with closing(made(kind, [partial(Waiter, str(f)) for f in files], num_workers=1)) as envs:
        envs.reset(seed=0)
        envs.send([2] * 4, [0, 1, 2, 3])
        for n in (2, 0, 3, 1):
            files[n].touch()
            _, rewards, _, _, infos = envs.recv(min_envs=1)
            assert infos["env_id"].tolist() == [n] and infos["count"].tolist() == [1]
            envs.send([0], [n])
            assert envs.recv(min_envs=1)[4]["count"].tolist() == [2]


@pytest.mark.deep
@KINDS
def test_an_env_that_fails_takes_nothing_with_it(kind, tmp_path):
    """Its messages lie in front of those of an earlier request, in the ring."""
    files = [tmp_path / str(n) for n in range(2)]
    faults = FaultPolicy(on_error="reset")
    with closing(
        made(kind, [partial(Waiter, str(f)) for f in files], num_workers=1, faults=faults)
    ) as envs:
        envs.reset(seed=0)
        envs.send([2], [0])
        envs.send([RAISE], [1])
        answer = envs.recv(min_envs=1)
        assert answer[4]["env_id"].tolist() == [1] and answer[3].tolist() == [True]
        files[0].touch()
        assert envs.recv(min_envs=1)[4]["count"].tolist() == [1]


@pytest.mark.deep
@KINDS
@pytest.mark.parametrize("overlap", [16, 2])
def test_an_env_lives_in_one_thread(kind, overlap):
    with closing(made(kind, [Waiter] * 4, overlap)) as envs:
        envs.reset(seed=0)
        envs.step([0, 0, 0, 0])
        where = envs.call("where")
        threads = envs.get_attr("threads")
        assert [set(each) for each in threads] == [{each} for each in where]
        assert len(set(where[:2])) == (2 if kind == "threads" else 1)
        assert envs.call_some([3, 0], "where") == (where[3], where[0])


@pytest.mark.deep
@KINDS
def test_resets_while_others_step(kind, tmp_path):
    file = tmp_path / "go"
    with closing(made(kind, [partial(Waiter, str(file))] * 4, num_workers=1)) as envs:
        envs.reset(seed=0)
        envs.send([2, 2], [0, 2])
        envs.async_reset([5, 6], env_id=[1, 3])
        assert sorted(envs.recv(min_envs=2)[4]["env_id"].tolist()) == [1, 3]
        file.touch()
        assert envs.recv(min_envs=2)[4]["count"].tolist() == [1, 1]


# ---- built and closed at once --------------------------------------------------------------------


MAKERS = {"threads": Meets.made, "coroutines": AsyncMeets.awaited}


def built(kind, arguments, overlap=16, **options):
    """A vector env, in one worker, of envs with these arguments."""
    fns = [partial(MAKERS[kind], *each) for each in arguments]
    overlap = None if kind == "coroutines" and overlap == 16 else overlap
    return ShmVectorEnv(fns, num_workers=1, context="fork", overlap=overlap, **options)


@KINDS
def test_envs_are_built_and_closed_at_once(kind):
    envs = built(kind, [()] * 9)
    assert len(envs.reset(seed=0)[0]) == 9
    envs.close(timeout=2 * DEADLINE)  # each waits for another one


@pytest.mark.deep
@KINDS
def test_no_more_are_built_at_once_than_may_be_busy(kind):
    with closing(built(kind, [()] * 9, overlap=2)) as envs:
        assert envs.call("together_at_most") == (2,) * 9
        envs.close(terminate=True)  # which would wait for pairs


@KINDS
def test_the_first_that_could_not_be_built_is_reported_and_the_others_are_closed(kind, tmp_path):
    file = str(tmp_path / "closed")
    builds = ["well", "well", "well", "late", "well", "soon", "well"]
    with pytest.raises(LookupError, match="late") as caught:
        built(kind, [(file, each) for each in builds])
    assert "env 3" in str(caught.value.__cause__) + "".join(caught.value.__notes__)
    assert (tmp_path / "closed").read_text().split() == ["closed"] * 5


@pytest.mark.deep
@KINDS
def test_a_failure_is_reported_though_another_env_hangs_as_it_is_built(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("shmvec._processes.host.BUILD_TIMEOUT_S", 2.0)
    file = str(tmp_path / "closed")
    with pytest.raises(LookupError, match="soon"):
        built(kind, [(file, each) for each in ("well", "hang", "soon", "well", "well")])
    assert (tmp_path / "closed").read_text().split() == ["closed"] * 3


@pytest.mark.deep
@KINDS
def test_what_closing_raises_names_its_env(kind, tmp_path):
    file = str(tmp_path / "closed")
    envs = built(
        kind, [(file, "well", each) for each in ("well", "well", "raise", "raise", "well")]
    )
    with pytest.raises(LookupError, match="as it was closed") as caught:
        envs.close()
    notes = str(caught.value.__cause__) + "".join(caught.value.__notes__)
    assert "env 2" in notes and "env 3" in notes
    assert (tmp_path / "closed").read_text().split() == ["closed"] * 3


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["threads", "coroutines"])
def test_copies_are_built_at_once(kind):
    with closing(built(kind, [()] * 3, spare_envs=2)) as envs:
        envs.reset(seed=0)
        assert envs.call("together_at_most")[0] > 1
        envs.close(terminate=True)


@pytest.mark.deep
def test_a_coroutine_in_place_of_an_env():
    with pytest.raises(TypeError, match=r"env_fns\[0\]\(\) returned a coroutine.* not a lambda"):
        ShmVectorEnv([lambda: AsyncMeets.awaited()] * 2, num_workers=1)


# ---- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", first(["threads", "coroutines"]))
@pytest.mark.parametrize("cure", first(["reset", "restart"]))
def test_faults_are_cured(kind, cure):
    faults = FaultPolicy(on_error=cure, on_crash="restart", backoff_s=0, max_restarts=100)
    with closing(made(kind, [Waiter] * 4, faults=faults)) as envs:
        envs.reset(seed=0)
        assert envs.step([0, RAISE, 0, 0])[3].tolist() in ([0, 1, 0, 0], [1, 1, 0, 0])
        for _ in range(2):
            envs.step([0] * 4)
        assert envs.step([0, 0, 0, DIE])[3].tolist() == [False, False, True, True]
        for _ in range(6):
            envs.step([0] * 4)
        envs.reset(seed=0)
        assert envs.step([1] * 4)[1].tolist() == [1.0] * 4


@pytest.mark.deep
@pytest.mark.parametrize("overlap", [None, 2])
def test_a_wrapper_that_passes_coroutines_on(overlap):
    with closing(ShmVectorEnv([lambda: gym.Wrapper(AsyncWaiter())] * 4, overlap=overlap)) as envs:
        envs.reset(seed=0)
        assert envs.step([0] * 4)[4]["count"].tolist() == [1] * 4


class HalfAsync(Counter):
    async def later(self):
        await asyncio.sleep(0)


@pytest.mark.deep
def test_a_thread_has_no_event_loop():
    with closing(ShmVectorEnv([HalfAsync] * 4, overlap=4, num_workers=2)) as envs:
        envs.reset(seed=0)
        with pytest.raises(TypeError, match="returned something to be awaited"):
            envs.call("later")
        envs.step([0] * 4)


@pytest.mark.deep
@KINDS
def test_a_worker_that_breaks_does_not_wait_for_its_envs(kind):
    with closing(made(kind, [Waiter] * 4)) as envs:
        envs.reset(seed=0)
        envs.send([HANG], [0])
        with pytest.raises(WorkerCrashError):
            envs.exchange.call(Unreadable("where"), envs=[1])


class BackgroundExit(AsyncCounter):
    async def step(self, action):
        if action == 3:
            self.task = asyncio.create_task(self._exit())
            await asyncio.sleep(DEADLINE)
        return await super().step(action)

    async def _exit(self):
        raise SystemExit(5)


@pytest.mark.deep
def test_a_task_that_exits_is_a_crash():
    faults = FaultPolicy(on_error="reset", on_crash="restart", backoff_s=0)
    with closing(ShmVectorEnv([BackgroundExit] * 3, num_workers=1, faults=faults)) as envs:
        envs.reset(seed=0)
        assert envs.step([0, 3, 0])[3].all()
        counts = envs.stats().faults
        assert (counts.crashes, counts.errors) == (1, 0)


class HeedsNothing(AsyncWaiter):
    """Returns as usual, once it is cancelled."""

    async def step(self, action):
        try:
            return await super().step(action)
        except asyncio.CancelledError:
            return self._end(action)


@pytest.mark.deep
def test_an_env_that_was_cancelled_is_over_its_limit_whatever_it_returns():
    faults = FaultPolicy(on_timeout="reset", step_timeout=1.0)
    with closing(ShmVectorEnv([HeedsNothing] * 2, num_workers=1, faults=faults)) as envs:
        envs.reset(seed=0)
        assert envs.step([HANG, 0])[3].tolist() == [True, False]
        assert envs.stats().faults.timeouts == 1


@pytest.mark.deep
def test_a_coroutine_that_hangs_is_cancelled_and_reset_alone(tmp_path):
    file = tmp_path / "go"
    faults = FaultPolicy(on_timeout="reset", step_timeout=1.0)
    fns = [partial(Waiter, str(file))] * 4
    with closing(made("coroutines", fns, num_workers=1, faults=faults)) as envs:
        envs.reset(seed=0)
        pid = envs.processes[0].pid
        assert envs.step([0, HANG, 0, 0])[3].tolist() == [False, True, False, False]
        assert envs.step([0] * 4)[0][:, 0].tolist() == [2, 0, 2, 2]
        assert envs.get_attr("cancelled") == (0, 1, 0, 0)
        assert envs.get_attr("resets") == (1, 2, 1, 1)
        assert envs.processes[0].pid == pid and envs.stats().faults.timeouts == 1


class Computes(AsyncWaiter):
    """Of what hangs it gives up nothing."""

    async def step(self, action):
        return Waiter.step(self, action)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("policy", "kind", "env"),
    [
        ("reset", "threads", Waiter),
        ("restart", "threads", Waiter),
        ("reset", "coroutines", Computes),
    ],
)
def test_a_thread_or_a_coroutine_that_computes_costs_its_worker(policy, kind, env):
    faults = FaultPolicy(on_timeout=policy, step_timeout=1.0, backoff_s=0, max_restarts=100)
    overlap = 16 if kind == "threads" else None
    with closing(ShmVectorEnv([env] * 4, num_workers=2, overlap=overlap, faults=faults)) as envs:
        envs.reset(seed=0)
        pids = [process.pid for process in envs.processes]
        assert envs.step([0, HANG, 0, 0])[3].tolist()[1:] == [True, False, False]
        assert envs.processes[0].pid != pids[0] and envs.processes[1].pid == pids[1]
        for _ in range(3):
            envs.step([0] * 4)


@pytest.mark.deep
@KINDS
def test_a_hang_is_reported_with_its_env(kind, caplog, tmp_path):
    file = tmp_path / "go"
    with (
        caplog.at_level(logging.WARNING, "shmvec"),
        closing(made(kind, [partial(Waiter, str(file))] * 4, hang_warning_s=0.2)) as envs,
    ):
        envs.reset(seed=0)
        envs.send([2], [3])
        until = time.monotonic() + DEADLINE
        while "env 3 of worker 1 has been in step()" not in caplog.text:
            assert time.monotonic() < until, caplog.text
            with suppress(multiprocessing.TimeoutError):
                envs.recv(min_envs=1, timeout=0.3)
        file.touch()
        envs.recv(min_envs=1)


@pytest.mark.deep
@KINDS
def test_closing_waits_for_steps_and_closes_envs_where_they_live(kind, tmp_path):
    file = tmp_path / "go"
    envs = made(kind, [partial(Waiter, str(file))] * 4, num_workers=1)
    envs.reset(seed=0)
    envs.send([2, 2], [0, 2])
    process = envs.processes[0]
    stop = threading.Timer(0.2, file.mkdir)  # a folder: close() looks at the threads
    stop.start()
    envs.close()
    stop.join()
    assert process.exitcode == 0


@pytest.mark.deep
def test_an_env_may_use_sockets_as_it_is_closed():
    """Their numbers may be those of what the worker has closed before."""
    envs = ShmVectorEnv([TalksAtItsEnd] * 8, num_workers=2)
    envs.reset(seed=0)
    envs.close()


class CancelsAll(AsyncCounter):
    async def close(self):
        for task in asyncio.all_tasks():
            task.cancel()


@pytest.mark.deep
def test_an_env_that_cancels_all_tasks_as_it_is_closed():
    envs = ShmVectorEnv([CancelsAll] * 2, num_workers=1)
    envs.reset(seed=0)
    with pytest.raises(asyncio.CancelledError):
        envs.close()
    assert envs.closed


@pytest.mark.deep
@KINDS
def test_closing_while_an_env_hangs(kind):
    envs = made(kind, [Waiter] * 4)
    envs.reset(seed=0)
    envs.send([HANG], [2])
    envs.close(timeout=0.2)
    assert envs.closed


@pytest.mark.deep
def test_an_env_that_uses_signals_is_told_so():
    with closing(made("threads", [UsesSignals] * 4)) as envs:
        envs.reset(seed=0)
        with pytest.raises(ValueError, match="signal only works in main thread") as caught:
            envs.step([0] * 4)
        assert "leave both out" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"overlap": 2, "num_workers": 0}, ValueError, "num_workers=0 has none"),
        *deep(
            ({"overlap": 2, "caller_steps": True, "num_workers": 2}, ValueError, "caller_steps"),
            ({"overlap": 0}, ValueError, 'overlap must be .*; or "auto"'),
            ({"overlap": "all"}, TypeError, 'overlap must be .*; or "auto"'),
            ({"overlap": 2, "worker": lambda *a: None}, (ValueError, TypeError), "worker"),
        ),
    ],
)
def test_what_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        ShmVectorEnv([Counter] * 4, **options)


@pytest.mark.deep
@pytest.mark.parametrize("options", [{"num_workers": 0}, {"caller_steps": True, "num_workers": 2}])
def test_coroutines_need_worker_processes(options):
    needs = "it needs a worker process"
    with pytest.raises(TypeError, match=f"AsyncCounter whose step or reset is a .*: {needs}"):
        ShmVectorEnv([AsyncCounter] * 4, **options)
    with pytest.raises(TypeError, match=f"returned a coroutine, not an env: {needs}"):
        ShmVectorEnv([AsyncMeets.awaited] * 4, **options)


# ---- what is known of it ------------------------------------------------------------------------


@pytest.mark.deep
@KINDS
def test_stats_say_what_all_of_them_do(kind, tmp_path):
    file = tmp_path / "go"
    with closing(made(kind, [partial(Waiter, str(file))] * 4, num_workers=1)) as envs:
        envs.reset(seed=0)
        envs.step([0] * 4)
        envs.send([2] * 4, [0, 1, 2, 3])
        while True:
            stats = envs.stats()
            if stats.doing[0] is not None and stats.doing[0].others == 3:
                break
        assert stats.doing[0].operation == "step" and "3 others" in str(stats.doing[0])
        file.touch()
        envs.recv(min_envs=4)
        stats = envs.stats()
        assert stats.workers[0].steps == 8 and {env.step.count for env in stats.envs} == {2}
        total = sum(env.step.total_s for env in stats.envs)
        assert 0 < stats.workers[0].step_s < total  # they overlap
        assert stats.workers[0].busy_s <= stats.elapsed_s


@pytest.mark.deep
@KINDS
def test_a_trace_shows_them(kind, tmp_path):
    path = tmp_path / "trace.json"
    with closing(made(kind, [Waiter] * 4)) as envs:
        envs.reset(seed=0)
        with envs.trace(str(path)):
            envs.step([1] * 4)
            envs.step([0] * 4)
        events = json.loads(path.read_text())["traceEvents"]
        tracks = {each["tid"] for each in events if each["name"].startswith("step env")}
        assert len(tracks) == 4


@pytest.mark.deep
def test_auto_learns_from_what_envs_leave_of_a_core(monkeypatch):
    clocks = {"now": 0, "used": 0}
    monkeypatch.setattr("shmvec._processes.overlap.monotonic_ns", lambda: clocks["now"])
    monkeypatch.setattr("shmvec._processes.overlap.process_time_ns", lambda: clocks["used"])
    running = []

    class Noted(OverlappingExecutor):
        def launch(self, work):
            running.append(work)

    class Loop:
        def __init__(self, **arguments):
            pass

        def finish_env(self, i, outcome):
            pass

        def set_executor(self, executor):
            pass

        def begin_env(self, i, doing, since):
            pass

        def end_env(self, i):
            pass

    monkeypatch.setattr("shmvec._processes.overlap.OverlappedLoop", Loop)
    envs = [Counter() for _ in range(16)]
    for share, most in ((1.0, 1), (0.1, 16)):
        executor = Noted("auto")
        executor.make_loop(envs, envs, first_env=0, autoreset=Autoreset(False, True))
        seen = 0
        for _ in range(8):
            for i in range(16):
                executor.start(i, "step", 0)
            while running:
                seen = max(seen, len(running))
                clocks["now"] += 1000
                clocks["used"] += int(1000 * share)
                executor.finish_work(running.pop(0), (None, None, (0, 0)))
        assert seen == most

"""Faults that the policy deals with: up to them, transitions are those of envs stepped alone."""

import gc
import itertools
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from functools import partial
from textwrap import indent

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter
from equality import same
from gymnasium.error import ClosedEnvironmentError
from processes import send_signal
from tables import deep, paired

from shmvec import FaultPolicy, ShmVectorEnv, TooManyFaultsError, WorkerCrashError
from shmvec._processes import supervisor
from shmvec.exchange import AutoresetMode
from shmvec.faults import restart_seed

DEADLINE = 30.0
KILL, EXIT, RAISE, SLEEP, DEAF = range(90, 95)  # actions
MODES = list(AutoresetMode)
RESTART = FaultPolicy(
    on_crash="restart", on_error="restart", on_timeout="restart", step_timeout=1.0,
    max_restarts=10_000, backoff_s=0,
)  # fmt: skip
RESET = FaultPolicy(
    on_crash="restart", on_error="reset", on_timeout="reset", step_timeout=1.0,
    max_restarts=10_000, backoff_s=0,
)  # fmt: skip
# Each with the faults that it mends.
POLICIES = [(RESTART, [KILL, EXIT, RAISE]), (RESET, [KILL, RAISE])]


class Broken(Exception):
    """What a replayed env raises where the real one failed."""


class Frail(gym.Env):
    """Draws numbers, ends now and then, and fails where its action says so."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gym.spaces.Discrete(100)

    def __init__(self, index, replayed=False):
        self.index, self.replayed = index, replayed
        self.asked = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level = (options or {}).get("level", 0)
        self.count = 0
        return self._observation(), {"level": self.level, "name": f"env {self.index}"}

    def step(self, action):
        self.asked += 1
        if KILL <= action < 100:
            if self.replayed:
                raise Broken
            self._fail(action)
        self.count += 1
        over = self.count >= 9 + self.index
        return self._observation(), float(action), over, self.count % 13 == 12, {"n": self.count}

    def _fail(self, action):
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == EXIT:
            os._exit(7)
        elif action == RAISE:
            raise LookupError("as asked", self.index)
        if action == DEAF:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM])
        time.sleep(DEADLINE)

    def _observation(self):
        draw = float(self.np_random.random())
        return np.array([self.index, self.count, self.level, draw])


def frail(num_envs, **options):
    return ShmVectorEnv([lambda i=i: Frail(i) for i in range(num_envs)], **options)


class Replay:
    """One env, stepped alone beside the real one: says what its results must be."""

    def __init__(self, index, mode, seed):
        self.index, self.mode, self.seed = index, mode, seed
        self.env = Frail(index, replayed=True)
        self.restarts = 0
        self.over = False
        self.last = None  # what its results were
        self.next_seed = None

    def reset(self, result, seed=None, options=None):
        observation, info = result
        if "fault" in info:
            self._fail(RAISE, info.pop("fault"))
        if seed is None and self.next_seed is not None:
            seed = self.next_seed
        self.next_seed = None
        expected = self.env.reset(seed=seed, options=options)
        self.over = False
        self.last = expected[0]
        assert same(observation, expected[0])
        assert plain(info) == expected[1]

    def step(self, action, result):
        """Compares a step's result, and follows the env through it."""
        observation, reward, terminated, truncated, info = result
        fault = info.pop("fault", None)
        if fault is not None and not truncated:  # its episode was over: it was to be reset anyway
            assert self.over and self.mode is not AutoresetMode.SAME_STEP
            self._fail(action, fault)
        elif fault is not None:
            assert (reward, terminated, truncated) == (0, False, True)
            if self.mode is AutoresetMode.SAME_STEP:
                assert same(info.pop("final_obs"), self.last)
                assert info.pop("final_info")["fault"] == fault
            else:
                assert same(observation, self.last) and not info
            self._fail(action, fault)
            if self.mode is AutoresetMode.SAME_STEP:
                self.reset((observation, info))
            else:
                self.over = True
            return
        if self.over and self.mode is AutoresetMode.NEXT_STEP:
            assert (reward, terminated, truncated) == (0, False, False)
            self.reset((observation, info))
            return
        expected = self.env.step(action)
        over = expected[2] or expected[3]
        if over and self.mode is AutoresetMode.SAME_STEP:
            assert same(info.pop("final_obs"), expected[0])
            assert plain(info.pop("final_info")) == expected[4]
            assert (reward, terminated, truncated) == expected[1:4]
            self.reset((observation, info))
            return
        self.last = expected[0]
        self.over = over
        assert same(observation, expected[0])
        assert (reward, terminated, truncated) == expected[1:4]
        assert plain(info) == expected[4]

    def _fail(self, action, fault):
        if fault["restarts"] > self.restarts:  # another process, another env
            self.restarts = int(fault["restarts"])
            self.env = Frail(self.index, replayed=True)
            self.next_seed = restart_seed(self.seed, self.restarts)
        else:  # it raised, and is reset
            with pytest.raises(Broken):
                self.env.step(action)


def plain(info):
    return {key: value.item() if hasattr(value, "item") else value for key, value in info.items()}


def row_of(infos, row):
    """The info of one env, out of Gymnasium's dict of arrays."""
    found = {}
    for key, value in infos.items():
        if not key.startswith("_") and key != "env_id" and infos[f"_{key}"][row]:
            found[key] = row_of(value, row) if isinstance(value, dict) else value[row]
    return found


def one(results, row):
    *arrays, infos = results
    return (*[array[row] for array in arrays], row_of(infos, row))


def some_action(rng, faults, likely=0.04):
    return int(rng.choice(faults)) if rng.random() < likely else int(rng.integers(90))


STEPPED = [
    (mode, how)
    for mode in MODES
    for how in ("step", "rollout", "mask", "messages")
    if mode is not AutoresetMode.DISABLED or how != "rollout"
]


@pytest.mark.parametrize("stepped, policy, workers", paired(STEPPED, POLICIES[::-1], [2, 2, 1]))
def test_transitions_of_steps(stepped, policy, workers):
    mode, how = stepped
    policy, faults = policy
    rng = np.random.default_rng(workers)
    envs = frail(
        5, num_workers=workers, autoreset_mode=mode, faults=policy, shared_memory=how != "messages"
    )
    replays = [Replay(i, mode, 100 + i) for i in range(5)]
    try:
        observations, infos = envs.reset(seed=100, options={"level": 3})
        for i, replay in enumerate(replays):
            replay.reset((observations[i], row_of(infos, i)), 100 + i, {"level": 3})
        rollout = None
        for turn in range(150):
            if mode is AutoresetMode.DISABLED and any(replay.over for replay in replays):
                mask = np.array([replay.over for replay in replays])
                observations, infos = envs.reset(options={"reset_mask": mask})
                for i in np.flatnonzero(mask):
                    replays[i].reset((observations[i], row_of(infos, i)))
            actions = [some_action(rng, faults) for _ in replays]
            stepped = range(5)
            if how == "rollout":
                if rollout is None or rollout.steps == rollout.length:
                    rollout = envs.rollout(7)
                infos = rollout.step(actions)
                at = rollout.steps
                parts = (rollout.observations, rollout.rewards, rollout.terminations,
                         rollout.truncations)  # fmt: skip
                results = (*(part[at] for part in parts), infos)
            elif how == "mask" and turn % 3:
                mask = rng.random(5) < 0.5
                mask[rng.integers(5)] = True
                stepped = np.flatnonzero(mask)
                results = envs.step(actions, mask=mask)
            else:
                results = envs.step(actions)
            for i in stepped:
                replays[i].step(actions[i], one(results, i))
        assert envs.stats().faults.restarts > 2
    finally:
        envs.close()


@pytest.mark.parametrize(
    "mode, policy, workers, copy",
    paired(MODES[1::-1], [POLICIES[1], *POLICIES, POLICIES[0]], [2, 1, 1, 2], [False, True]),
)
def test_transitions_of_partial_batches(mode, policy, workers, copy):
    policy, faults = policy
    rng = np.random.default_rng(workers)
    envs = frail(
        5, num_workers=workers, autoreset_mode=mode, faults=policy, batch_size=2, copy=copy,
        num_buffers=3,
    )  # fmt: skip
    replays = [Replay(i, mode, 100 + i) for i in range(5)]
    given = {}
    try:
        envs.async_reset(seed=100, options={"level": 3})
        for _ in range(300):
            results = envs.recv(timeout=DEADLINE)
            ids = results[-1]["env_id"]
            for row, i in enumerate(ids.tolist()):
                result = one(results, row)
                if i in given:
                    replays[i].step(given[i], result)
                else:
                    replays[i].reset((result[0], result[4]), 100 + i, {"level": 3})
            actions = [some_action(rng, faults) for _ in ids]
            given.update(zip(ids.tolist(), actions, strict=True))
            envs.send(actions, ids)
        assert envs.stats().faults.restarts > 2
    finally:
        envs.close()


@pytest.mark.parametrize(
    "policy, action, mode",
    paired([RESTART, RESET], [DEAF, SLEEP, SLEEP, DEAF], [*MODES[:2], *MODES[1::-1]]),
)
def test_an_env_that_hangs(policy, action, mode):
    envs = frail(3, num_workers=3, autoreset_mode=mode, faults=policy)
    replays = [Replay(i, mode, 100 + i) for i in range(3)]
    try:
        observations, infos = envs.reset(seed=100)
        for i, replay in enumerate(replays):
            replay.reset((observations[i], row_of(infos, i)), 100 + i)
        for actions in ([1, 1, 1], [2, action, 2], [3, 3, 3], [4, 4, 4]):
            results = envs.step(actions)
            for i, replay in enumerate(replays):
                replay.step(actions[i], one(results, i))
        faults = envs.stats().faults
        heeded = policy is RESET and action == SLEEP
        assert (faults.timeouts, faults.restarts, faults.resets) == (1, not heeded, heeded)
    finally:
        envs.close()


@pytest.mark.deep
def test_a_worker_that_is_stopped():
    envs = frail(2, num_workers=2, faults=RESTART)
    try:
        envs.reset(seed=0)
        send_signal(envs.processes[1], signal.SIGSTOP)
        infos = envs.step([1, 1])[-1]
        assert row_of(infos, 1)["fault"]["type"] == "EnvTimeoutError"
        assert "fault" not in row_of(infos, 0)
    finally:
        envs.close()


def test_a_worker_that_dies_in_a_call():
    envs = frail(4, num_workers=2, faults=RESTART)
    try:
        envs.reset(seed=0)
        envs.step([1] * 4)
        with pytest.raises(WorkerCrashError, match=r"worker of envs \[0, 1\] died in 'set_attr'"):
            envs.set_attr("last_will", Suicide())
        results = envs.step([1] * 4)
        assert results[3].tolist() == [True, True, False, False]
        assert envs.step([1] * 4)[0][:, 1].tolist() == [0, 0, 3, 3]
    finally:
        envs.close()


class Suicide:
    """Kills the process that unpickles it, if it is the first worker."""

    def __reduce__(self):
        return _kill_first_worker, ()


def _kill_first_worker():
    if multiprocessing.current_process().name.endswith("-0"):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("at", ["reset", *deep("first reset")])
def test_a_reset_that_fails_is_repeated_as_it_was(at, tmp_path):
    marker = tmp_path / "once"

    class FailsOnce(Frail):
        def reset(self, *, seed=None, options=None):
            if self.index == 1 and (options or {}).get("level") == 5 and not marker.exists():
                marker.write_text("")
                (self._fail)(KILL if at == "reset" else RAISE)
            return super().reset(seed=seed, options=options)

    envs = ShmVectorEnv([lambda i=i: FailsOnce(i) for i in range(3)], num_workers=2, faults=RESET)
    try:
        if at == "reset":
            envs.reset(seed=0)
            envs.step([1, 1, 1])
        observations, infos = envs.reset(seed=7, options={"level": 5})
        for i in range(3):
            expected = Frail(i).reset(seed=7 + i, options={"level": 5})
            assert same(observations[i], expected[0])
        assert row_of(infos, 1)["fault"]["restarts"] == (at == "reset")
        assert not envs.step([1, 1, 1])[3].any()
    finally:
        envs.close()


def test_restart_on_demand(caplog):
    caplog.set_level("INFO", "shmvec")
    envs = frail(4, num_workers=2)
    try:
        envs.reset(seed=0)
        last = envs.step([1] * 4)[0]
        pids = [process.pid for process in envs.processes]
        envs.restart([3])
        assert envs.processes[0].pid == pids[0] and envs.processes[1].pid != pids[1]
        observations, rewards, _, truncations, infos = envs.step([1] * 4)
        assert truncations.tolist() == [False, False, True, True]
        assert same(observations[2:], last[2:]) and rewards.tolist() == [1, 1, 0, 0]
        assert row_of(infos, 2)["fault"]["message"] == "asked for by restart()"
        logged = [each for each in caplog.records if "asked for by restart()" in each.message]
        assert [each.levelname for each in logged] == ["INFO"]  # no warning
        observations, *_, infos = envs.step([1] * 4)
        assert observations[:, 1].tolist() == [3, 3, 0, 0] and "fault" not in infos
        for i in (2, 3):
            assert same(observations[i], Frail(i).reset(seed=restart_seed(i, 1))[0])
        envs.restart()
        observations, infos = envs.reset(seed=4)  # the fault is not reported after it
        assert not envs.step([1] * 4)[3].any()
        with pytest.raises(ValueError, match="env_id must be in 0 to 3"):
            envs.restart([4])
        assert envs.stats().faults.restarts == 3 and envs.stats().faults.crashes == 0
        assert sum(worker.steps for worker in envs.stats().workers) == 4 + 2 + 2 + 4
    finally:
        envs.close()


def meanwhile(monkeypatch, where, name, call, then):
    """Has ``then`` run once, at a call of a function of what starts the workers."""
    go_on, calls = getattr(where, name), itertools.count(1)

    def counted(*args):
        if next(calls) == call:
            monkeypatch.undo()
            then()
        return go_on(*args)

    monkeypatch.setattr(where, name, counted)


def interrupted():
    raise KeyboardInterrupt


@pytest.mark.deep
@pytest.mark.parametrize("dies", [False, True])
def test_a_restart_that_was_interrupted_is_gone_on_with_by_the_next(dies, monkeypatch):
    with frail(2, num_workers=2) as envs:
        envs.reset(seed=1)
        before = [process.pid for process in envs.exchange.processes]
        meanwhile(
            monkeypatch, supervisor.Supervisor, "continue_start", 1 if dies else 2, interrupted
        )
        with pytest.raises(KeyboardInterrupt):
            envs.restart()
        if dies:  # what it has started already
            before.append(envs.exchange.processes[0].pid)
            envs.exchange.processes[0].kill()
            assert envs.exchange.processes[0].has_ended(DEADLINE)
        before_that = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it never returns"))
        signal.setitimer(signal.ITIMER_REAL, DEADLINE)
        try:
            envs.restart()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before_that)
        assert not set(before) & {process.pid for process in envs.exchange.processes}
        envs.step([0, 0])


def test_a_restart_that_was_interrupted_as_its_worker_had_closed_is_gone_on_with(monkeypatch):
    with frail(2, num_workers=2) as envs:
        envs.reset(seed=1)
        wait_for_exits = supervisor.Supervisor.wait_for_exits

        def then_interrupted(*args):
            wait_for_exits(*args)
            raise KeyboardInterrupt

        envs.send([1], [1])
        monkeypatch.setattr(supervisor.Supervisor, "wait_for_exits", then_interrupted)
        with pytest.raises(KeyboardInterrupt):
            envs.restart([0])
        monkeypatch.undo()
        assert envs.recv(min_envs=1)[-1]["env_id"].tolist() == [1]
        assert envs.step([1, 1])[3].tolist() == [True, False]


@pytest.mark.parametrize("workers", [2, *deep(0)])
def test_a_restart_that_was_interrupted_as_its_worker_was_up_is_gone_on_with(workers, monkeypatch):
    with frail(2, num_workers=workers) as envs:
        envs.reset(seed=1)
        go_on, built = supervisor.Supervisor.continue_start, itertools.count()

        def interrupted_once(self, index):
            cause = go_on(self, index)
            if self.is_up(index) and next(built) == 0:
                raise KeyboardInterrupt
            return cause

        monkeypatch.setattr(supervisor.Supervisor, "continue_start", interrupted_once)
        with pytest.raises(KeyboardInterrupt):
            envs.restart([0])
        assert envs.step([1, 1])[3][0]
        assert next(built) == 1  # it is not started again
        assert not envs.step([1, 1])[3].any()


OPENING = {"detach", "dup", "fork", "fork_exec", "open", "pidfd_open", "pipe", "socketpair"}


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:unclosed (<socket|file <_io):ResourceWarning")  # by Python
def test_a_restart_loses_nothing_that_it_has_opened_when_it_is_interrupted():
    """Wherever a builtin function has opened something, or started a process.

    A fork server's answer opens nothing in such a function.
    """
    program, before = os.getpid(), []
    with frail(2, num_workers=2, context="fork") as envs:
        envs.reset(seed=1)
        expected = len(os.listdir("/proc/self/fd"))

        def wait_until_closed():  # a worker's stderr is closed once its end was read
            until = time.monotonic() + DEADLINE
            while len(descriptors := sorted(os.listdir("/proc/self/fd"))) != expected:
                assert time.monotonic() < until, (descriptors, before)
                time.sleep(0.01)
            before.append(descriptors)

        envs.restart([1])
        for last in itertools.count():
            wait_until_closed()
            left = last

            def interrupt(frame, event, function):
                nonlocal left
                if event == "c_return" and os.getpid() == program and function.__name__ in OPENING:
                    left -= 1
                    if left < 0:
                        sys.setprofile(None)
                        raise KeyboardInterrupt

            sys.setprofile(interrupt)
            try:
                envs.restart([1])
                break
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            envs.step([0, 0])
            gc.collect()
        assert last > 0


@pytest.mark.deep
def test_a_fork_made_while_a_worker_is_restarted_leaves_it_alone(monkeypatch):
    children = []

    def fork():
        child = os.fork()
        if child == 0:
            raise SystemExit
        children.append(child)

    with frail(2, num_workers=2) as envs:
        envs.reset(seed=1)
        # As it waits for the worker.
        meanwhile(monkeypatch, supervisor.Supervisor, "continue_start", 1, fork)
        try:
            envs.restart([1])
        except BaseException as error:
            if children:
                raise
            os._exit(7 if isinstance(error, SystemExit) else 8)
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
        envs.step([0, 0])
        assert envs.stats().faults.restarts == 1


@pytest.mark.deep
def test_recycled_where_episodes_end_and_one_worker_after_the_other():
    with ShmVectorEnv([partial(Counter, 4)] * 2, num_workers=2, recycle_after=10) as envs:
        envs.reset(seed=0)
        first = [process.pid for process in envs.processes]
        steps = []
        for step in range(1, 12):
            assert not envs.step([1, 1])[3].any()
            for worker, process in enumerate(envs.processes):
                if process.pid != first[worker]:
                    first[worker] = process.pid
                    steps.append((worker, step))
        assert steps == [(0, 4), (1, 9)]


class Holding(Counter):
    """Holds something that stays when its process is killed: a file."""

    def __init__(self, folder, close_s=0.0):
        super().__init__(99)
        descriptor, self.path = tempfile.mkstemp(dir=folder)
        os.close(descriptor)
        self.close_s = close_s

    def close(self):
        time.sleep(self.close_s)
        os.unlink(self.path)


@pytest.mark.deep
@pytest.mark.parametrize("how", ["restart", "recycle"])
def test_envs_of_a_worker_that_is_well_are_closed_before_it_is_replaced(how, tmp_path):
    options = {"recycle_after": 2} if how == "recycle" else {}
    with ShmVectorEnv([partial(Holding, tmp_path)] * 4, num_workers=2, **options) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step([1] * 4)
            if how == "restart":
                envs.restart()
        assert envs.stats().faults.restarts >= 2
        envs.get_attr("spec")  # which waits for workers that are being replaced
        assert len(os.listdir(tmp_path)) == 4
    assert os.listdir(tmp_path) == []


@pytest.mark.deep
def test_an_env_that_does_not_close_does_not_stop_a_restart(tmp_path):
    with ShmVectorEnv([partial(Holding, tmp_path, 60.0)], num_workers=1) as envs:
        envs.reset(seed=0)
        began = time.monotonic()
        envs.restart()
        assert 5 <= time.monotonic() - began < 50
        envs.step([1])
        envs.close(terminate=True)


@pytest.mark.parametrize("batch_size", [None, *deep(2)])
def test_too_many_faults(batch_size):
    policy = FaultPolicy(on_crash="restart", on_error="reset", max_restarts=2, backoff_s=0.01)
    envs = frail(2, num_workers=1, faults=policy, batch_size=batch_size)
    try:
        envs.reset(seed=0)
        for action in (KILL, RAISE):
            envs.step([1, action], env_id=None if batch_size is None else [0, 1])
            envs.step([1, 1], env_id=None if batch_size is None else [0, 1])
        with pytest.raises(TooManyFaultsError, match="3 faults of worker 0 within 600 s") as caught:
            envs.step([1, KILL], env_id=None if batch_size is None else [0, 1])
        assert [fault.type for fault in caught.value.history] == [
            "WorkerCrashError", "LookupError", "WorkerCrashError",
        ]  # fmt: skip
        assert "as asked" in str(caught.value)
        assert isinstance(caught.value.__cause__, WorkerCrashError)
        with pytest.raises(ClosedEnvironmentError):
            envs.step([1, 1])
    finally:
        envs.close()


@pytest.mark.deep
def test_an_env_that_cannot_be_built_again(tmp_path):
    marker = tmp_path / "built"

    def make():
        if marker.exists():
            raise OSError("no display")
        marker.write_text("")
        return Frail(0)

    policy = FaultPolicy(on_crash="restart", max_restarts=3, backoff_s=0)
    envs = ShmVectorEnv([make], num_workers=1, faults=policy)
    try:
        envs.reset()
        with pytest.raises(TooManyFaultsError, match="no display") as caught:
            envs.step([KILL])
        assert len(caught.value.history) == 4
    finally:
        envs.close()


def test_what_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "shmvec"):
        envs = frail(2, num_workers=1, faults=RESET)
        try:
            envs.reset()
            (_, stack) = envs.step([1, RAISE])[-1]["fault"]["stack"]
            envs.step([KILL, 1])
        finally:
            envs.close()
    lines = [record.getMessage() for record in caplog.records if record.name == "shmvec"]
    assert "in _fail" in stack
    assert lines == [
        "env 1 of worker 0: LookupError: ('as asked', 1); reset\n" + indent(stack.rstrip(), "    "),
        "env 0 of worker 0: WorkerCrashError: worker 0 (envs 0 to 1) killed by SIGKILL, in 'step'; "
        "restart",
    ]


@pytest.mark.deep
def test_workers_that_die_together_are_one_line(caplog):
    with caplog.at_level(logging.WARNING, "shmvec"):
        envs = frail(6, num_workers=3, faults=RESTART)
        try:
            envs.reset()
            for process in envs.processes:
                process.kill()
            for process in envs.processes:
                process.join(DEADLINE)
            infos = envs.step([1] * 6)[-1]
        finally:
            envs.close()
    lines = [record.getMessage() for record in caplog.records if record.name == "shmvec"]
    ended = "(envs 0 to 5) killed by SIGKILL, in 'step'"
    assert lines == [f"WorkerCrashError: workers 0 to 2 {ended}; restart"]
    messages = [row_of(infos, env)["fault"]["message"] for env in range(0, 6, 2)]
    assert messages == [
        f"worker {worker} (envs {2 * worker} to {2 * worker + 1}) killed by SIGKILL, in 'step'"
        for worker in range(3)
    ]


def test_bad_policies():
    for options, message in (
        ({"on_crash": "reset"}, "on_crash must be one of 'raise', 'restart'"),
        ({"on_error": "ignore"}, "on_error must be one of"),
        ({"on_timeout": "restart"}, "needs a limit"),
        ({"max_restarts": -1}, "must not be negative"),
        ({"window_s": 0}, "window_s must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            FaultPolicy(**options)


def test_bad_arguments():
    with pytest.raises(TypeError, match="faults must be a shmvec.FaultPolicy"):
        frail(1, faults="restart")
    with pytest.raises(ValueError, match="step_timeout is given twice"):
        frail(1, faults=RESTART, step_timeout=3)
    with pytest.raises(ValueError, match="recycle_after must be at least 1"):
        frail(1, recycle_after=0)


class FrailCartPole(gym.Wrapper):
    """CartPole that now and then raises or hangs before a step, as its own dice say."""

    def __init__(self, env, dice):
        super().__init__(env)
        self.dice = random.Random(dice + os.getpid())

    def step(self, action):
        fate = self.dice.random()
        if fate < 0.002:
            raise LookupError("bad luck")
        if fate < 0.0022:
            time.sleep(DEADLINE)
        return super().step(action)


@pytest.mark.deep
def test_cartpole_under_fire():
    """Workers are killed and stopped, envs raise and hang, for SHMVEC_FIRE_SECONDS or longer."""
    seconds = float(os.environ.get("SHMVEC_FIRE_SECONDS", 3))
    rng = np.random.default_rng(1)
    envs = ShmVectorEnv(
        [lambda i=i: FrailCartPole(gym.make("CartPole-v1"), i) for i in range(6)],
        num_workers=3,
        faults=RESET,
    )
    alone = [gym.make("CartPole-v1") for _ in range(6)]
    seeds: list = [50 + i for i in range(6)]
    restarts, over = [0] * 6, [False] * 6
    steps = faults = in_resets = 0
    try:
        observations, _ = envs.reset(seed=50)
        last = [env.reset(seed=seed)[0] for env, seed in zip(alone, seeds, strict=True)]
        assert same(observations, np.array(last))
        seeds = [None] * 6  # used
        end = time.monotonic() + seconds
        while time.monotonic() < end or steps < 100 * seconds or faults < seconds:
            fate = rng.random()
            if fate < 0.004:
                number = signal.SIGKILL if fate < 0.003 else signal.SIGSTOP
                send_signal(envs.processes[rng.integers(3)], number)
            actions = rng.integers(2, size=6)
            observations, rewards, terminations, truncations, infos = envs.step(actions)
            for i in range(6):
                fault = row_of(infos, i).get("fault")
                faults += fault is not None
                restarted = fault is not None and fault["restarts"] > restarts[i]
                if restarted:
                    restarts[i] = int(fault["restarts"])
                    alone[i].close()
                    alone[i] = gym.make("CartPole-v1")
                    seeds[i] = restart_seed(50 + i, restarts[i])
                expected = 0, False, fault is not None and not over[i]
                if over[i]:  # a fault that comes now has cost the env no step: see docs
                    assert restarted or fault is None
                    in_resets += restarted
                    last[i], _ = alone[i].reset(seed=seeds[i])
                    seeds[i] = None  # used
                    over[i] = False
                elif fault is not None:
                    over[i] = True
                else:
                    last[i], reward, terminated, truncated, _ = alone[i].step(actions[i])
                    expected = reward, terminated, truncated
                    over[i] = terminated or truncated
                    steps += 1
                assert same(observations[i], last[i])
                assert (rewards[i], terminations[i], truncations[i]) == expected
    finally:
        envs.close()
        for env in alone:
            env.close()
    print(f"{steps:,} steps checked, {faults} faults, {in_resets} of them reported in a reset")


@pytest.mark.deep
def test_an_overridden_add_info_receives_faults():
    class Listing(ShmVectorEnv):
        def _add_info(self, vector_infos, env_info, env_num):
            vector_infos.setdefault(env_num, {}).update(env_info)
            return vector_infos

    envs = Listing([lambda: Frail(0), lambda: Frail(5)], num_workers=2, context="fork")
    try:
        envs.reset(seed=0)
        while not envs.step([1, 1])[2][0]:
            pass
        for _ in range(2):  # its episode is over, so the fault is only reported; then it truncates
            envs.restart([0])
            infos = envs.step([1, 1])[4]
            assert set(infos) == {0, 1} and infos[0]["fault"]["type"] == "Restart"
    finally:
        envs.close()


@pytest.mark.deep
@pytest.mark.parametrize("masked", [False, True])
def test_an_env_that_raises_while_the_worker_of_another_one_dies(masked):
    """Recovering from the death takes the answer of the one that has raised: nothing is out."""

    class Slow(Frail):
        def step(self, action):
            if action in (RAISE, KILL):
                time.sleep(0.1 if action == RAISE else 0.4)  # the parent waits by then
            return super().step(action)

    fns = [lambda: Slow(0), lambda: Slow(1)]
    faults = FaultPolicy(on_crash="restart")
    envs = ShmVectorEnv(fns, num_workers=2, faults=faults, autoreset_mode=AutoresetMode.DISABLED)
    try:
        envs.reset(seed=1)
        with pytest.raises(LookupError):
            if masked:
                envs.step([RAISE, KILL], mask=np.ones(2, bool))
            else:
                envs.send([RAISE, KILL], [0, 1])
                envs.recv()
        if not masked:
            _, _, _, truncations, infos = envs.recv(min_envs=1)
            assert infos["env_id"].tolist() == [1] and truncations.all()
            assert infos["fault"]["type"][0] == "WorkerCrashError"
        envs.reset(seed=2)
        envs.step([1, 1])
    finally:
        envs.close()

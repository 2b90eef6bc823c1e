"""What a worker that is replaced has lost: repeated or truncated as it must be, reported once."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter
from stepping import DEADLINE_S, STEPS, faulty, in_order, kill
from tables import deep, first, paired

import shmvec
from shmvec import EnvTimeoutError, FaultPolicy, ShmVectorEnv, WorkerCrashError
from shmvec.exchange import AutoresetMode, Exchange
from shmvec.faults import restart_seed

RESTART = FaultPolicy(on_crash="restart", max_restarts=5, backoff_s=0)


def first_draw(seed):
    """What a counter draws first when it is reset with a seed; its observations show it."""
    return Counter().reset(seed=seed)[0][2]


class Leveled(Counter):
    """A counter whose observations show the level that it was reset with, too."""

    def reset(self, *, seed=None, options=None):
        self.level = (options or {}).get("level", 0)
        return super().reset(seed=seed, options=options)

    def _observation(self, action=-1):
        observation = super()._observation(action)
        observation[3] = self.level
        return observation


class DiesOnce(Leveled):
    """Its process is killed in one of its resets (1 is the first one), and never again."""

    def __init__(self, path, at, length=99):
        super().__init__(length)
        self.path, self.at = path, at

    def reset(self, *, seed=None, options=None):
        if self.resets + 1 == self.at and not self.path.exists():
            self.path.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(seed=seed, options=options)


# ---- seeds -------------------------------------------------------------------------------------


def reset_all(envs, **arguments):
    return envs.reset(**arguments)


def reset_some(envs, **arguments):
    options = {**arguments.pop("options", {}), "reset_mask": np.array([True, True, False])}
    return envs.reset(**arguments, options=options)


def reset_one_by_one(envs, **arguments):
    envs.async_reset(**arguments)
    observations, *_, infos = in_order(envs.recv(timeout=DEADLINE_S))
    return observations, infos


RESETS = [reset_all, reset_some, reset_one_by_one]


@pytest.mark.deep
@pytest.mark.parametrize("reset, options", paired(RESETS, [{}, {"level": 5}]))
def test_a_reset_without_a_seed_that_was_lost_gets_one_of_its_own(reset, options, tmp_path):
    fns = [lambda: DiesOnce(tmp_path / "died", at=3), Leveled, Leveled]
    envs = ShmVectorEnv(fns, num_workers=2, faults=RESTART)
    try:
        envs.reset(seed=7)
        envs.reset()
        arguments = {"options": options} if options else {}
        observations, infos = reset(envs, **arguments)
        draws = [first_draw(restart_seed(7 + env, 1)) for env in range(2)]
        assert observations[:2, 2].tolist() == draws
        assert observations[:2, 3].tolist() == [options.get("level", 0)] * 2
        assert faulty(infos, 3).tolist() == [True, True, False]
        assert not envs.step([1] * 3)[3].any()
    finally:
        envs.close()


@pytest.mark.parametrize("reset", first(RESETS))
def test_a_reset_with_a_seed_that_was_lost_is_repeated_with_it(reset, tmp_path):
    fns = [lambda: DiesOnce(tmp_path / "died", at=3), Leveled, Leveled]
    envs = ShmVectorEnv(fns, num_workers=2, faults=RESTART)
    try:
        envs.reset(seed=7)
        envs.reset()
        observations, infos = reset(envs, seed=[20, None, None])
        draws = [first_draw(20), first_draw(restart_seed(8, 1))]
        assert observations[:2, 2].tolist() == draws
        assert faulty(infos, 3).tolist() == [True, True, False]
    finally:
        envs.close()


class RaisesThen(DiesOnce):
    """The first reset in the process that follows raises."""

    def reset(self, *, seed=None, options=None):
        raised = self.path.with_name("raised")
        if self.path.exists() and not raised.exists():
            raised.write_text("")
            raise LookupError("no luck")
        return super().reset(seed=seed, options=options)


@pytest.mark.deep
@pytest.mark.parametrize("lost", ["reset", "step"])
def test_what_a_repeated_reset_raises_is_raised(lost, tmp_path):
    fns = [lambda: RaisesThen(tmp_path / "died", at=2, length=1), Leveled, Leveled]
    mode = AutoresetMode.SAME_STEP if lost == "step" else AutoresetMode.NEXT_STEP
    envs = ShmVectorEnv(fns, num_workers=2, faults=RESTART, autoreset_mode=mode)
    try:
        envs.reset(seed=7)
        with pytest.raises(LookupError, match="no luck"):
            envs.step([1] * 3) if lost == "step" else envs.reset(seed=3)
        observations, _ = envs.reset(seed=20)
        assert observations[:, 2].tolist() == [first_draw(20 + env) for env in range(3)]
        assert envs.step([1] * 3)[1].tolist() == [1] * 3
    finally:
        envs.close()


# ---- autoresets --------------------------------------------------------------------------------


@pytest.mark.parametrize("step, died", paired(STEPS, ["before", "in it"]))
def test_an_autoreset_that_was_lost_is_repeated(step, died, tmp_path):
    """There is no episode of length 0: it is reported, and the env goes on."""
    fns = [
        lambda: DiesOnce(tmp_path / "died", at=2 if died == "in it" else 0, length=3),
        lambda: Leveled(99),
        lambda: Leveled(99),
    ]
    envs = ShmVectorEnv(fns, num_workers=2, faults=RESTART)
    try:
        envs.reset(seed=7, options={"level": 5})
        for _ in range(3):
            last = envs.step([1] * 3)
        assert last[2].tolist() == [True, False, False]
        if died == "before":
            kill(envs, [0])
        observations, rewards, terminations, truncations, infos = step(envs, [1] * 3)
        assert (rewards[0], terminations[0], truncations[0]) == (0, False, False)
        assert observations[0].tolist() == [0, -1, first_draw(restart_seed(7, 1)), 0]
        # Its neighbour's episode is broken; it is truncated, and reset by the next step.
        assert (rewards[1], terminations[1], truncations[1]) == (0, False, True)
        assert observations[1].tolist() == last[0][1].tolist()
        assert rewards[2] == 4 and not truncations[2]
        assert faulty(infos, 3).tolist() == [True, True, False]
        observations, rewards, terminations, truncations, infos = step(envs, [1] * 3)
        assert observations[:, 0].tolist() == [1, 0, 5] and rewards.tolist() == [1, 0, 5]
        assert observations[1, 2] == first_draw(restart_seed(8, 1))
        assert not truncations.any() and not terminations.any()
        assert not faulty(infos, 3).any()
    finally:
        envs.close()


@pytest.mark.deep
def test_an_autoreset_in_a_rollout_that_was_lost_is_repeated(tmp_path):
    fns = [lambda: DiesOnce(tmp_path / "died", at=2, length=3), lambda: Leveled(99)]
    envs = ShmVectorEnv(fns, num_workers=2, faults=RESTART)
    try:
        envs.reset(seed=7)
        rollout = envs.rollout(6)
        faults = [faulty(rollout.step([1, 1]), 2) for _ in range(6)]
        assert rollout.observations[:, :, 0].T.tolist() == [[0, 1, 2, 3, 0, 1, 2], [*range(7)]]
        assert rollout.rewards[1:, 0].tolist() == [1, 2, 3, 0, 1, 2]
        assert np.flatnonzero(rollout.terminations[:, 0]).tolist() == [3]
        assert not rollout.truncations.any()
        assert np.argwhere(faults).tolist() == [[3, 0]]
        assert rollout.observations[4, 0, 2] == first_draw(restart_seed(7, 1))
        assert envs.step([1] * 2)[1].tolist() == [3, 7]
    finally:
        envs.close()


# ---- reported ----------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize("reset, lost", paired(RESETS, ["by restart()", "in a call"]))
def test_a_reset_tells_of_the_restart_that_it_makes_good(reset, lost):
    envs = ShmVectorEnv([Leveled] * 3, num_workers=2, faults=RESTART)
    try:
        envs.reset(seed=7)
        envs.step([1] * 3)
        if lost == "by restart()":
            envs.restart([0])
        else:
            kill(envs, [0])
            with pytest.raises(WorkerCrashError, match="set_attr"):
                envs.set_attr("mark", 1)
        observations, infos = reset(envs, seed=3)
        assert observations[:2, 2].tolist() == [first_draw(3), first_draw(4)]
        assert faulty(infos, 3).tolist() == [True, True, False]
        *_, truncations, infos = envs.step([1] * 3)
        assert not truncations.any() and "fault" not in infos
    finally:
        envs.close()


# ---- messages ----------------------------------------------------------------------------------


class Listening(Counter):
    """Its actions are sequences; what it counts is how long they were."""

    def __init__(self, length):
        super().__init__(length)
        self.action_space = gym.spaces.Sequence(gym.spaces.Discrete(2))

    def step(self, action):
        return super().step(len(action))


@pytest.mark.deep
@pytest.mark.parametrize(
    "size, lengths", paired([3, 100_000], [(3, 99), (99, 3), (3, 99, 3), (99, 3, 99)])
)
def test_a_worker_with_some_envs_between_episodes_and_actions_as_messages(lengths, size):
    ended = np.array([length == 3 for length in lengths])
    fns = [lambda length=length: Listening(length) for length in (*lengths, *[99] * len(lengths))]
    envs = ShmVectorEnv(fns, num_workers=2, shared_memory=False)
    actions = ((1,) * size,) * len(fns)
    try:
        envs.reset(seed=7)
        for _ in range(3):
            last = envs.step(actions)
        envs.restart([0])
        observations, rewards, terminations, truncations, infos = envs.step(actions)
        mine, others = slice(len(lengths)), slice(len(lengths), None)
        assert observations[mine, 0].tolist() == np.where(ended, 0, 3).tolist()
        assert np.array_equal(observations[mine][~ended], last[0][mine][~ended])
        assert observations[others, 1].tolist() == [size] * len(lengths)
        assert truncations[mine].tolist() == (~ended).tolist() and not rewards[mine].any()
        assert rewards[others].tolist() == [4] * len(lengths) and not truncations[others].any()
        assert not terminations.any()
        assert faulty(infos, len(fns)).tolist() == [True] * len(lengths) + [False] * len(lengths)
        observations, rewards, terminations, truncations, infos = envs.step(actions)
        assert observations[mine, 0].tolist() == ended.tolist() == rewards[mine].tolist()
        assert rewards[others].tolist() == [5] * len(lengths)
        assert not (terminations | truncations).any()
        assert envs.stats().faults.restarts == 1
    finally:
        envs.close()


# ---- while a replacement is built ----------------------------------------------------------------

RELEASE_S = 50.0  # after which the test has the build go on
IN_TIME_S = 25.0


class Rebuilt(Counter):
    """It dies of action 2; the env in its place is built as `how` says, until it is released."""

    def __init__(self, folder, how):
        super().__init__(99)
        self.folder = folder
        if (folder / "died").exists():
            getattr(self, how)()

    def step(self, action):
        if action == 2:
            (self.folder / "died").touch()
            os._exit(1)
        return super().step(action)

    def slowly(self):
        until = time.monotonic() + DEADLINE_S
        while not (self.folder / "released").exists() and time.monotonic() < until:
            time.sleep(0.01)

    def hangs_once(self):
        (self.folder / "died").unlink()
        self.slowly()

    def is_stopped_once(self):
        (self.folder / "died").unlink()
        (self.folder / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    def crashes(self):
        if not (self.folder / "released").exists():
            os._exit(3)


def release(folder):
    (folder / "released").touch()
    if (folder / "stopped").exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((folder / "stopped").read_text()), signal.SIGCONT)


def step_wait(envs, folder):
    envs.step_async([1, 2])
    with pytest.raises(multiprocessing.TimeoutError):
        envs.step_wait(timeout=0.3)


def recv(envs, folder):
    envs.send([2], [1])
    with pytest.raises(multiprocessing.TimeoutError):
        envs.recv(min_envs=1, timeout=0.3)


def call_wait(envs, folder):
    (folder / "died").touch()
    kill(envs, [1])
    envs.call_async("count")
    with pytest.raises((multiprocessing.TimeoutError, WorkerCrashError)):
        envs.call_wait(timeout=0.3)


def step_within_limits(envs, folder):
    with contextlib.suppress(WorkerCrashError, EnvTimeoutError):
        envs.step([1, 2])


def evaluate_with_hard_limit(envs, folder):
    shmvec.evaluate(envs, lambda seen, env_ids: [2] * len(env_ids), 9, hard_time_limit=0.3)


@pytest.mark.parametrize(
    ("use", "how"),
    [
        (step_wait, "slowly"),
        *deep(
            (step_within_limits, "is_stopped_once"),
            (evaluate_with_hard_limit, "slowly"),
            (recv, "slowly"),
            (call_wait, "slowly"),
            (step_within_limits, "hangs_once"),
            (evaluate_with_hard_limit, "crashes"),
        ),
    ],
)
def test_a_wait_ends_though_a_replacement_is_not_built(use, how, tmp_path):
    limited = use is step_within_limits
    limits = {"step_timeout": 0.3, "reset_timeout": 0.3, "on_timeout": "restart"} if limited else {}
    policy = FaultPolicy("restart", "reset", backoff_s=0, max_restarts=10**6, **limits)
    fns = [partial(Rebuilt, tmp_path, how)] * 2
    with ShmVectorEnv(fns, num_workers=2, faults=policy, hang_warning_s=0) as envs:
        envs.reset(seed=1)
        timer = threading.Timer(RELEASE_S, release, [tmp_path])
        timer.start()
        began = time.monotonic()
        try:
            use(envs, tmp_path)
            assert time.monotonic() - began < IN_TIME_S
        finally:
            timer.cancel()
            release(tmp_path)
            envs.close(terminate=True)


def rebuilt_slowly(folder, number):
    policy = FaultPolicy("restart", backoff_s=0)
    fns = [partial(Rebuilt, folder, "slowly")] * number
    return ShmVectorEnv(fns, num_workers=number, faults=policy)


def test_other_envs_are_stepped_while_a_replacement_is_built(tmp_path):
    with rebuilt_slowly(tmp_path, 3) as envs:
        envs.reset(seed=1)
        envs.send([2, 1, 1], [0, 1, 2])
        seen = []
        while len(seen) < 20:
            *_, infos = envs.recv(min_envs=1)
            seen += infos["env_id"].tolist()
            envs.send([1] * len(infos["env_id"]), infos["env_id"])
        assert 0 not in seen
        release(tmp_path)
        assert envs.exchange.discard(DEADLINE_S)
        assert envs.step([1] * 3)[-1]["fault"]["type"][0] == "WorkerCrashError"


@pytest.mark.deep
def test_what_asks_an_env_that_is_being_built_again_waits_for_it(tmp_path):
    with rebuilt_slowly(tmp_path, 2) as envs:
        envs.reset(seed=1)
        (tmp_path / "died").touch()
        kill(envs, [1])
        envs.step_async([1, 1])
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.2)
        began = time.monotonic()
        timer = threading.Timer(1.0, release, [tmp_path])
        timer.start()
        assert len(envs.get_attr("spec")) == 2
        assert time.monotonic() - began > 0.9
        timer.join()
        assert envs.stats().faults.restarts == 1


@pytest.mark.deep
def test_a_timeout_for_what_asks_an_env_that_is_being_built_again(tmp_path):
    with rebuilt_slowly(tmp_path, 2) as envs:
        envs.reset(seed=1)
        (tmp_path / "died").touch()
        kill(envs, [1])
        while not envs.stats().faults.restarts:
            envs.send([1], [0])
            envs.recv(min_envs=1)
        with pytest.raises(multiprocessing.TimeoutError):
            envs.exchange.ask([1], [1], timeout=0.1)
        with pytest.raises(multiprocessing.TimeoutError):
            envs.exchange.ask_reset([1], timeout=0.1)
        with pytest.raises(ValueError, match="there is no env 5"):
            envs.exchange.ask(np.array([5]), [1])
        assert envs.exchange.num_in_flight == 0
        release(tmp_path)
        envs.exchange.ask([1], [1], timeout=DEADLINE_S)
        assert envs.exchange.take([1]).reports[1].fault.type == "WorkerCrashError"


def test_who_waits_for_no_time_at_all_gets_a_replacement_in_the_end(tmp_path):
    with rebuilt_slowly(tmp_path, 2) as envs:
        exchange = envs.exchange
        exchange.reset()
        (tmp_path / "died").touch()
        kill(envs, [1])
        while not envs.stats().faults.restarts:
            exchange.step([1], envs=np.array([0]))
        release(tmp_path)
        until = time.monotonic() + DEADLINE_S
        while not exchange.num_in_flight and time.monotonic() < until:
            with contextlib.suppress(multiprocessing.TimeoutError):
                exchange.ask([1], [1], timeout=0)
            time.sleep(0.01)
        assert exchange.take([1]).reports[1].fault.type == "WorkerCrashError"


def test_an_env_that_may_be_stepped_over_its_end_is_not_stepped_before_its_first_reset():
    options = {"autoreset_mode": AutoresetMode.DISABLED, "may_step_over": True}
    exchange = Exchange([partial(Counter, 1)] * 2, num_workers=2, faults=RESTART, **options)
    try:
        exchange.reset(seeds=[1, 2])
        assert exchange.step([1, 1])[2].all()
        exchange.restart([1])
        exchange.ask(None, [1, 1])
        answers = exchange.take()
        assert answers.truncations.tolist() == [False, True]
        assert answers.reports[1].cut_off
    finally:
        exchange.close()

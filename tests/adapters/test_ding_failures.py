"""DI-engine's env managers: retries, time limits, abnormal timesteps, and faults that are gone."""

import itertools
import time

import ding_envs
import numpy as np
import pytest
from ding_envs import (
    ABNORMAL,
    END,
    HANG,
    KILL,
    KINDS,
    KINDS_AND_WORKERS,
    NO_INFO,
    RAISE,
    TRUNCATE,
    UNPICKLABLE,
    UNREADABLE,
    Obedient,
    OnDemand,
)
from equality import same
from tables import deep

from shmvec import EnvTimeoutError, FaultPolicy, TooManyFaultsError, WorkerCrashError
from shmvec.adapters.ding import (
    EnvState,
    EnvStateError,
    SubprocessEnvManagerV2,
)
from shmvec.faults import RemoteTraceback, restart_seed

RUN, RESET, DONE, ERROR = EnvState.RUN, EnvState.RESET, EnvState.DONE, EnvState.ERROR


def manager(*args, **cfg):
    return ding_envs.manager(*args, **{"retry_waiting_time": 0, **cfg})


def usable(envs):
    """All envs can be reset and stepped, each its own."""
    envs.reset(dict.fromkeys(range(envs.env_num), {}))
    steps = envs.step({env: env for env in envs.ready_obs})
    while len(steps) < envs.env_num:
        steps.update(envs.step({}))
    return all(step.obs[0] == step.reward == env for env, step in steps.items())


# ---- retries ---------------------------------------------------------------------------------


@pytest.mark.deep
def test_renewing_replaces_the_process_of_that_env_alone():
    with manager(max_retry=3, retry_type="renew") as envs:
        envs.launch()
        pids = envs.pid
        assert len(set(pids)) == 4
        with pytest.raises(RuntimeError):
            envs.reset({1: {"stat": "error"}})
        envs.reset({1: {}})
        assert [pid == old for pid, old in zip(envs.pid, pids, strict=True)] == [
            True, False, True, True,
        ]  # fmt: skip
        assert envs.resets == [1, 2, 1, 1]  # the last try, and then ours


@pytest.mark.parametrize(
    "num_workers, retry_type",
    [(2, "reset"), *deep((0, "reset"), (2, "renew"))],
)
def test_retries_end_in_a_runtime_error_with_the_last_cause(retry_type, num_workers):
    with manager(num_workers=num_workers, max_retry=3, retry_type=retry_type) as envs:
        envs.launch()
        with pytest.raises(RuntimeError) as caught:
            envs.reset({0: {"stat": "error"}, 1: {}, 3: {"stat": "error"}})
        assert str(caught.value).startswith("Env 0 reset has exceeded max retries(3), and the")
        assert isinstance(caught.value.__cause__, OnDemand) and caught.value.__cause__.env == 0
        assert isinstance(caught.value.__cause__.__cause__, RemoteTraceback)
        if hasattr(caught.value, "__notes__"):
            assert "env 3" in caught.value.__notes__[0]
        assert (envs.env_states[0], envs.env_states[3]) == (ERROR, ERROR)
        if retry_type == "reset":
            assert envs.resets == [4, 2, 1, 4]
        with pytest.raises(EnvStateError, match="0: ERROR"):
            envs.step({0: 0})
        assert usable(envs)
        if retry_type == "reset":  # and by the same process
            pids = envs.pid
            envs.reset({1: {"stat": "error once"}, 2: {}})
            assert envs.stats[1][-2:] == ["error once", "error once"] and envs.pid == pids


@pytest.mark.deep
@pytest.mark.parametrize("failing", [RAISE, KILL, "reset"])
def test_launch_after_a_step_or_reset_that_has_failed_starts_anew(failing):
    """Programs of DI-engine recover so: its managers close when an env fails."""
    with manager(num_envs=2, num_workers=2) as envs:
        envs.launch()
        pids = envs.pid
        with pytest.raises(EnvStateError, match="launched already"):
            envs.launch()
        assert envs.pid == pids
        with pytest.raises((OnDemand, RuntimeError, WorkerCrashError)):
            if failing == "reset":
                envs.reset({0: {"stat": "error"}})
            else:
                envs.step({0: failing, 1: END})
        with pytest.raises(ValueError, match="all 2 envs"):
            envs.launch({0: {}})
        assert not envs.closed
        envs.launch({0: {"stat": "again"}, 1: {}})
        assert not set(envs.pid) & set(pids)
        assert envs.stats == [["again"], [None]] and envs.episode_count == {0: 0, 1: 0}
        assert usable(envs)


@pytest.mark.deep
def test_retries_wait_retry_waiting_time():
    with manager(num_envs=2, max_retry=3, retry_waiting_time=0.1) as envs:
        begin = time.monotonic()
        with pytest.raises(RuntimeError):
            envs.launch({0: {"stat": "error"}, 1: {}})
        assert time.monotonic() - begin >= 0.2


@pytest.mark.deep
def test_retries_of_an_automatic_reset_in_the_background():
    with manager(num_envs=2, max_retry=2) as envs:
        envs.launch({0: {"stat": "error later"}, 1: {}})
        steps = envs.step({0: END, 1: 0})
        assert steps[0].done and not steps[1].done
        while 0 not in envs.ready_obs:
            envs.step({1: TRUNCATE} if 1 in envs.ready_obs else {})
        assert envs.resets[0] == 3


@pytest.mark.deep
def test_an_automatic_reset_that_fails_for_good_is_raised_once():
    with manager(num_envs=2) as envs:
        envs.launch({0: {"stat": "error later"}, 1: {}})
        envs.step({0: END, 1: 0})
        with pytest.raises(RuntimeError, match="Env 0 reset"):
            while True:
                envs.step({env: 0 for env in envs.ready_obs})
        assert envs.env_states[0] is ERROR
        assert list(envs.ready_obs) == [1] or envs.env_states[1] is RESET
        assert usable(envs)


@pytest.mark.deep
def test_a_process_that_dies_in_a_reset_is_revived():
    with manager(num_workers=2, max_retry=3) as envs:
        envs.seed(3)
        envs.launch()
        with pytest.raises(RuntimeError, match="Env 1 .*exit code 5") as caught:
            envs.reset({1: {"stat": "kill"}})
        assert isinstance(caught.value.__cause__, WorkerCrashError)
        assert usable(envs)


@pytest.mark.deep
def test_env_fns_that_fail_on_renewal_end_after_some_tries(tmp_path):
    made = tmp_path / "made"

    def once():
        if made.exists():
            raise OSError("no second simulator")
        made.touch()
        return Obedient()

    with manager(env_fns=[once, lambda: Obedient(1)], max_retry=2, retry_type="renew") as envs:
        envs.launch()
        with pytest.raises(TooManyFaultsError, match="no second simulator"):
            envs.reset({0: {"stat": "error"}})
        assert envs.closed and set(envs.env_states.values()) == {EnvState.VOID}
        made.unlink()
        envs.launch()
        assert usable(envs)


# ---- a failing step follows the fault policy -------------------------------------------------


@pytest.mark.deep
@KINDS_AND_WORKERS
def test_a_step_that_raises_is_raised_and_the_others_have_stepped(kind, num_workers):
    with manager(kind, num_workers=num_workers, wait_num=4, step_wait_timeout=None) as envs:
        envs.launch()
        with pytest.raises(OnDemand, match="env 1 in step") as caught:
            envs.step({0: 0, 1: RAISE, 2: 2, 3: END})
        assert isinstance(caught.value.__cause__, RemoteTraceback) and caught.value.env == 1
        steps = caught.value.timesteps
        assert {env: (step.reward, step.done) for env, step in steps.items()} == {
            0: (0, False), 2: (2, False), 3: (END, True),
        }  # fmt: skip
        assert envs.env_states[1] is ERROR
        assert same(envs.ready_obs[2], steps[2].obs)
        assert usable(envs)


@pytest.mark.deep
def test_a_process_that_dies_in_a_step_is_raised_and_revived_by_reset():
    with manager(num_workers=2) as envs:
        envs.seed(0)
        envs.launch()
        with pytest.raises(WorkerCrashError, match="env 3: .*exit code 3.*replaced") as caught:
            envs.step({0: 0, 3: KILL})
        assert caught.value.envs == (3,)
        assert "is closed" not in str(caught.value)  # the core's advice
        assert list(caught.value.timesteps) == [0]
        assert envs.env_states[3] is ERROR and envs.env_states[0] is RUN
        assert usable(envs)


@pytest.mark.deep
@pytest.mark.parametrize("cure", ["reset", "restart"])
def test_fault_policy_on_error(cure):
    with manager(num_workers=2, faults=FaultPolicy(on_error=cure)) as envs:
        envs.launch()
        before = envs.ready_obs[1]
        generation = envs.exchange.restarts(1)
        step = envs.step(dict.fromkeys(range(4), 0) | {1: RAISE})[1]
        assert same(step.obs, before) and step.reward == 0 and step.done
        assert step.info["TimeLimit.truncated"] is True
        assert step.info["fault"]["type"] == "OnDemand"
        assert "env 1 in step" in step.info["fault"]["message"]
        assert envs.exchange.restarts(1) == generation + (cure == "restart")
        while 1 not in envs.ready_obs:
            pass
        assert envs.exchange.stats().faults.errors == 1
        assert usable(envs)


@pytest.mark.deep
def test_fault_policy_on_crash():
    with manager(num_workers=2, faults=FaultPolicy(on_crash="restart")) as envs:
        envs.launch({env: {"stat": f"level {env}"} for env in range(4)})
        steps = envs.step({0: 0, 1: 1, 2: 2, 3: KILL})
        assert steps[3].done and steps[3].info["fault"]["type"] == "WorkerCrashError"
        while len(envs.ready_obs) < 4:
            pass
        assert envs.stats[3] == ["level 3"]  # how to reset has reached the new process
        assert usable(envs)


@pytest.mark.deep
def test_siblings_of_an_env_that_hangs_are_truncated_not_blamed():
    with manager(num_workers=2, step_timeout=1.0) as envs:
        envs.seed(4)
        envs.launch()
        with pytest.raises(EnvTimeoutError, match="env 3"):
            envs.step({3: HANG})
        assert [envs.env_states[env] for env in range(4)] == [RUN, RUN, RUN, ERROR]
        step = envs.step({2: 1})[2]
        assert step.done and step.info["fault"]["type"] == "EnvTimeoutError"
        while 2 not in envs.ready_obs:
            pass
        assert envs.seeds[2] == [restart_seed(6, 1)]
        assert usable(envs)


# ---- timeouts --------------------------------------------------------------------------------


def test_step_timeout_may_be_a_float():
    with manager(num_envs=2, step_timeout=1.0) as envs:
        envs.launch()
        pids = envs.pid
        with pytest.raises(EnvTimeoutError, match="env 1.*replaced") as caught:
            envs.step({0: 0, 1: HANG})
        assert (caught.value.env, caught.value.operation) == (1, "step")
        assert caught.value.limit == 1.0 and list(caught.value.timesteps) == [0]
        assert isinstance(caught.value, TimeoutError)
        assert envs.env_states == {0: RUN, 1: ERROR}
        assert usable(envs)
        assert envs.pid[0] == pids[0] and envs.pid[1] != pids[1]


@pytest.mark.deep
def test_reset_timeout_is_tried_again(tmp_path):
    stat = {"stat": "hang once", "options": str(tmp_path / "been there")}
    with manager(num_envs=2, max_retry=2, reset_timeout=1.0) as envs:
        envs.seed(5)
        envs.launch({0: stat, 1: {}})
        assert envs.env_states == {0: RUN, 1: RUN}
        assert envs.seeds == [[5], [6]]  # the new process's too: renewal keeps the seed


@pytest.mark.deep
def test_connect_timeout_in_the_parent(tmp_path):
    stat = {"stat": "hang once", "options": str(tmp_path / "been there")}
    with manager(num_envs=2, max_retry=2, connect_timeout=1.0, num_workers=2) as envs:
        envs.launch()
        envs.reset({1: stat})
        assert set(envs.env_states.values()) == {RUN}
        with pytest.raises(RuntimeError, match="connect_timeout=1 s") as caught:
            envs.reset({1: {"stat": "hang"}})
        assert isinstance(caught.value.__cause__, ConnectionError)
        assert usable(envs)


@pytest.mark.deep
def test_timeouts_need_processes_and_one_value():
    with manager(num_workers=0, step_timeout=1) as envs, pytest.raises(ValueError, match="worker"):
        envs.launch()
    policy = FaultPolicy(on_timeout="restart", step_timeout=2)
    with manager(faults=policy, step_timeout=1) as envs, pytest.raises(ValueError, match="twice"):
        envs.launch()


# ---- abnormal timesteps ----------------------------------------------------------------------


@KINDS_AND_WORKERS
def test_abnormal_timestep_puts_that_env_in_error_and_the_others_go_on(kind, num_workers):
    with manager(kind, num_workers=num_workers, wait_num=4, step_wait_timeout=None) as envs:
        envs.launch()
        steps = envs.step(dict.fromkeys(range(4), 1) | {0: ABNORMAL})
        assert tuple(steps[0]) == (None, None, True, {"abnormal": True, "why": "on demand"})
        assert all("abnormal" not in steps[env].info for env in (1, 2, 3))
        assert [envs.env_states[env] for env in range(4)] == [ERROR, RUN, RUN, RUN]
        assert list(envs.ready_obs) == [1, 2, 3]
        assert envs.episode_count[0] == 0
        envs.step(dict.fromkeys([1, 2, 3], 0))
        assert usable(envs)


@pytest.mark.deep
@pytest.mark.parametrize("action", [UNREADABLE, NO_INFO, UNPICKLABLE])
def test_a_timestep_that_cannot_be_read_is_abnormal(action):
    with manager(num_workers=2) as envs:
        envs.launch()
        steps = envs.step(dict.fromkeys(range(4), 1) | {2: action})
        assert steps[2].obs is None and steps[2].reward is None
        assert steps[2].info["abnormal"] is True and steps[2].info["error"]
        assert [envs.env_states[env] for env in range(4)] == [RUN, RUN, ERROR, RUN]
        assert usable(envs)


class Unfit(Obedient):
    """Its second reset returns what its space does not hold."""

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return (np.zeros(9) if self.resets == 2 else observation), info


@pytest.mark.deep
@pytest.mark.parametrize("max_retry", [1, 2])
def test_a_reset_that_cannot_be_read_has_failed(max_retry):
    with manager(env_fns=[Unfit, Obedient], max_retry=max_retry) as envs:
        envs.launch()
        if max_retry == 1:
            with pytest.raises(RuntimeError, match="Env 0"):
                envs.reset()
            envs.reset()
        else:
            envs.reset()
        assert envs.ready_env == [0, 1] and envs.resets[0] == 3


@pytest.mark.deep
def test_v2_abnormal_and_faults():
    with manager(SubprocessEnvManagerV2, faults=FaultPolicy(on_error="reset")) as envs:
        envs.launch()
        records = envs.step([ABNORMAL, RAISE, UNREADABLE, 3])
        assert ["abnormal" in record.info for record in records] == [True, False, False, False]
        assert ["fault" in record.info for record in records] == [False, True, True, False]
        assert records[1].info.fault["type"] == "OnDemand"
        envs.reset({0: {}})
        while len(envs.ready_obs) < 4:
            pass
        assert len(envs.step([0] * 4)) == 4


# ---- faults of the original, which are not here ----------------------------------------------


@pytest.mark.deep
def test_fault_ready_obs_returns_when_all_are_in_error_or_need_a_reset():
    with manager(num_envs=2, auto_reset=False) as envs:
        envs.launch()
        envs.step({0: END, 1: ABNORMAL})
        assert envs.ready_obs == {}


@pytest.mark.deep
@pytest.mark.parametrize("retry_type", ["reset", "renew"])
def test_fault_renewing_does_not_lose_the_seed(retry_type):
    """Neither one that waits for its use, nor one that was used: another run is the same one."""

    def play():
        found = []
        with manager(num_envs=2, num_workers=2, max_retry=2, retry_type=retry_type) as envs:
            envs.seed(8)
            envs.launch()
            with pytest.raises(WorkerCrashError):
                envs.step({0: KILL, 1: 0})
            envs.reset({0: {}})
            found += envs.seeds
            with pytest.raises(RuntimeError):
                envs.reset({0: {"stat": "kill"}})
            envs.seed({0: 40})
            envs.reset({0: {}})
            found += envs.seeds
            found.append(envs.ready_obs[0].tolist())
        return found

    first = play()
    assert first[:4] == [[restart_seed(8, 1)], [9], [40], [9]]
    assert play() == first


@pytest.mark.deep
def test_an_automatic_reset_that_is_lost_with_its_process_is_seeded_as_a_restart():
    with manager(num_envs=2, num_workers=2, max_retry=2) as envs:
        envs.seed(8)
        envs.launch({0: {"stat": "kill later"}, 1: {}})
        envs.step({0: END, 1: 0})
        while 0 not in envs.ready_obs:
            envs.step({})
        assert envs.seeds == [[restart_seed(8, 1)], [9]]


class OwnAbnormal(Obedient):
    def step(self, action):
        observation, reward, over, cut, info = super().step(action)
        return observation, reward, over, cut, {**info, "abnormal": True}


@pytest.mark.deep
def test_fault_abnormal_steps_return_the_observation_that_the_env_gave():
    with manager(env_fns=[OwnAbnormal]) as envs:
        envs.launch()
        step = envs.step({0: 7})[0]
        assert step.obs[:3].tolist() == [0, 1, 1] and step.reward == 7 and step.done is False
        assert envs.env_states[0] is ERROR


# ---- everything at once ----------------------------------------------------------------------


@pytest.mark.deep
@KINDS
def test_under_fire_every_episode_is_whole_or_marked(kind):
    """Actions that fail in every way: each env's count of steps goes up by one, or is marked."""
    random = np.random.default_rng(2)
    bad = [RAISE, KILL, ABNORMAL, UNREADABLE, END, TRUNCATE]
    policy = FaultPolicy(on_error="reset", on_crash="restart", max_restarts=10**6, backoff_s=0)
    counts = dict.fromkeys(range(4), 0)
    with manager(kind, num_workers=2, faults=policy, max_retry=3) as envs:
        envs.seed(1)
        envs.launch()
        for _ in itertools.repeat(None, 80):
            ready = envs.ready_obs
            for env, observation in ready.items():
                assert (observation[0], observation[2]) == (env, counts[env])
            actions = {env: random.choice(bad) if random.random() < 0.1 else 0 for env in ready}
            for env, step in envs.step(actions).items():
                counts[env] += 1
                if step.info.get("abnormal"):
                    counts[env] = 0
                    envs.reset({env: None})
                elif "fault" in step.info:
                    assert step.done
                    counts[env] = 0
                else:
                    assert step.obs[2] == counts[env]
                    counts[env] = 0 if step.done else counts[env]
        assert usable(envs)

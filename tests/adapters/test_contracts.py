"""What all classes that stand on the Exchange promise alike: each test runs on every one of them.

The other tests of a class show what is its own.

A ``System`` says how one is made, reset and stepped; all of them step two envs or three, each with
an action of its own, and what comes back is a list with a row for each env.
"""

import copy
import multiprocessing
import os
import pickle
import signal
import threading
import time
from contextlib import closing
from functools import partial

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from echoing import interrupted
from envs import Coroutines, Counter, Failing
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import SyncVectorEnv
from processes import gone
from sb3_stand_in import AgentVecEnv, ShmVecEnv
from tables import deep
from tianshou_or_stand_in import TianshouVectorEnv

from shmvec import EnvTimeoutError, FaultPolicy, ShmVectorEnv, WorkerCrashError
from shmvec.adapters.actorcritic import MultiEnv, create_subprocess_envs
from shmvec.adapters.baselines import SubprocVecEnv
from shmvec.adapters.ding import (
    AsyncSubprocessEnvManager,
    SubprocessEnvManagerV2,
    SyncSubprocessEnvManager,
)
from shmvec.adapters.pettingzoo import ParallelVectorEnv
from shmvec.cluster import ClusterVectorEnv
from shmvec.planning import PlanningVectorEnv

DEADLINE_S = 60.0
SLEEP = 3  # the action of a step that takes a while


class Sleepy(Counter):
    """Counts, and takes its time for one of its actions."""

    spec = None

    def __init__(self, length=99, offset=0, sleep_s=0.5):
        super().__init__(length, offset)
        self.sleep_s = sleep_s

    def step(self, action):
        if action == SLEEP:
            time.sleep(self.sleep_s)
        return super().step(action)


class Gated(Counter):
    """Counts, and waits in one of its actions until a gate is open: a file in a folder."""

    spec = None

    def __init__(self, folder):
        super().__init__(99)
        self.folder = folder

    def step(self, action):
        if action == SLEEP:
            (self.folder / str(os.getpid())).touch()
            wait_until((self.folder / "open").exists)
        return super().step(action)


def wait_until(condition):
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def wait_for_two(folder):
    """Until two envs wait, each in a process of its own."""
    wait_until(lambda: len(list(folder.iterdir())) == 2)


class Process(gym.Env):
    """Goes on and on, and observes how far it has come, in which process."""

    observation_space = gym.spaces.Box(0, np.inf, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)
    spec = None

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        return self.observe(), 1.0, False, False, {}

    def observe(self):
        return np.array([self.count, os.getpid()], np.float64)


class Alone:
    """An env as the only agent of a parallel env."""

    possible_agents = ("me",)
    render_mode = None

    def __init__(self, env_fn):
        self.env, self.agents = env_fn(), ["me"]
        self.unwrapped = self

    def observation_space(self, agent):
        return self.env.observation_space

    def action_space(self, agent):
        return self.env.action_space

    def reset(self, seed=None, options=None):
        observation, info = self.env.reset(seed=seed, options=options)
        return {"me": observation}, {"me": info}

    def step(self, actions):
        return tuple({"me": value} for value in self.env.step(actions["me"]))

    def close(self):
        self.env.close()


def rows_of(infos, count):
    """One dict for each env, of Gymnasium's dict of arrays."""
    return [
        {key: infos[key][row] for key in infos if f"_{key}" in infos and infos[f"_{key}"][row]}
        if not any(isinstance(value, dict) for value in infos.values())
        else {key: True for key in infos if f"_{key}" in infos and infos[f"_{key}"][row]}
        for row in range(count)
    ]


class System:
    """A class, as this suite uses it: here, one whose steps return Gymnasium's five values."""

    seeded = True  # whether envs can be given seeds
    recycles = True  # whether it takes recycle_after=
    refuses_threads = True  # whether another thread is refused; else nothing is said of threads
    survives_ctrl_c = True  # whether it goes on after Ctrl-C
    survives_errors = True  # whether it goes on after an env has raised
    warns = True  # whether one that was forgotten says so
    any_count = False  # whether a step may be of any number of actions
    context = "context"  # the option that says how processes are started
    limits = True  # whether it takes step_timeout=
    checks_actions = True  # whether it knows wrong actions before it sends them
    here = 0  # of its workers, how many are this process

    def make(self, env_fns, **options):
        options.setdefault("autoreset_mode", "SameStep")
        return ShmVectorEnv(env_fns, **options)

    def reset(self, envs, seed=None):
        return list(envs.reset(seed=seed)[0])

    def step(self, envs, actions):
        observations, rewards, terminated, truncated, infos = envs.step(actions)
        count = len(actions)
        infos = infos if isinstance(infos, (list, tuple)) else rows_of(infos, count)
        return list(zip(observations, rewards, terminated | truncated, infos, strict=True))

    def pids(self, envs):
        return [process.pid for process in envs.processes]

    def settle(self, envs):
        """Whatever the system wants done after a step that was broken off."""


class With(System):
    """The same with an option, which there is where there are workers."""

    def __init__(self, wrapper=None, **option):
        self.wrapper, self.option = wrapper, option

    def make(self, env_fns, **options):
        if options.get("num_workers") == 0:
            return super().make(env_fns, **options)
        if self.wrapper is not None:
            env_fns = [lambda env_fn=env_fn: self.wrapper(env_fn()) for env_fn in env_fns]
        return super().make(env_fns, **self.option, **options)


class CallerSteps(With):
    recycles = survives_ctrl_c = limits = False
    here = 1

    def __init__(self):
        super().__init__(caller_steps=True)


class Messages(With):
    checks_actions = False

    def __init__(self):
        super().__init__(shared_memory=False)


class Rollouts(System):
    """Each step is a rollout of one."""

    def step(self, envs, actions):
        rollout = envs.rollout(1)
        infos = rows_of(rollout.step(actions), len(actions))
        arrays = rollout.observations, rollout.rewards, rollout.terminations | rollout.truncations
        return list(zip(*(array[1].copy() for array in arrays), infos, strict=True))


class SB3(System):
    context = "start_method"

    def make(self, env_fns, **options):
        return ShmVecEnv(env_fns, **{"start_method": "fork", **options})

    def reset(self, envs, seed=None):
        if seed is not None:
            envs.seed(seed)
        return list(envs.reset())

    def step(self, envs, actions):
        return list(zip(*envs.step(actions), strict=True))


class Baselines(System):
    def make(self, env_fns, **options):
        return SubprocVecEnv(env_fns, **{"context": "fork", **options})

    def reset(self, envs, seed=None):
        return list(envs.reset(seed=seed))

    step = SB3.step

    def pids(self, envs):
        return [process.pid for process in envs.vector_env.processes]


class Tianshou(System):
    def __init__(self, **options):
        self.options = options

    def make(self, env_fns, **options):
        return TianshouVectorEnv(env_fns, **self.options, **options)

    def reset(self, envs, seed=None):
        return list(
            envs.reset(seed=None if seed is None else [seed + i for i in range(len(envs))])[0]
        )

    def step(self, envs, actions):
        observations, rewards, terminated, truncated, infos = envs.step(actions)
        dones = terminated | truncated
        if dones.any():
            observations[dones] = envs.reset(np.flatnonzero(dones))[0]
        order = np.argsort([info["env_id"] for info in infos])
        rows = list(zip(observations, rewards, dones, infos, strict=True))
        return [rows[i] for i in order]

    def pids(self, envs):
        return [process.pid for process in envs.envs.processes]


class PettingZoo(System):
    def make(self, env_fns, **options):
        options.setdefault("autoreset_mode", "SameStep")
        return ParallelVectorEnv([partial(Alone, env_fn) for env_fn in env_fns], **options)

    def reset(self, envs, seed=None):
        return list(envs.reset(seed=seed)[0]["me"])

    def step(self, envs, actions):
        observations, rewards, terminated, truncated, infos = envs.step({"me": actions})
        others = {key: value for key, value in infos.items() if key != "me"}
        row_infos = rows_of({**others, **infos["me"]}, len(actions))
        dones = terminated["me"] | truncated["me"]
        return list(zip(observations["me"].copy(), rewards["me"], dones, row_infos, strict=True))


class Rows(System):
    def make(self, env_fns, **options):
        return PettingZoo().make(env_fns, **options).as_rows()

    def pids(self, envs):
        return [process.pid for process in envs.parallel.processes]


class SB3Rows(SB3):
    context = "context"

    def make(self, env_fns, **options):
        return AgentVecEnv(Rows().make(env_fns, **options))

    def pids(self, envs):
        return Rows().pids(envs.rows)


class ActorCritic(System):
    def make(self, env_fns, **options):
        options.setdefault("faults", FaultPolicy())
        return MultiEnv(create_subprocess_envs(env_fns, **options))

    def reset(self, envs, seed=None):
        return envs.reset(seed=seed)

    step = SB3.step

    def pids(self, envs):
        return [process.pid for process in envs.envs[0].group.exchange.processes]


class Ding(System):
    recycles = False
    any_count = True

    def __init__(self, kind):
        self.kind = kind

    def make(self, env_fns, **options):
        envs = self.kind(env_fns, options)
        envs.launch()
        return envs

    def reset(self, envs, seed=None):
        if seed is not None:
            envs.seed(seed)
        envs.reset()
        return [envs.ready_obs[env] for env in range(envs.env_num)]

    def step(self, envs, actions):
        found = {}
        asked = dict(enumerate(actions))
        while asked or len(found) < len(actions):
            found.update(envs.step(asked))
            asked = {}
        return [tuple(found[env]) for env in range(len(actions))]

    def pids(self, envs):
        return [process.pid for process in envs.exchange.processes]

    def settle(self, envs):
        while len(envs.ready_env) < envs.env_num:
            envs.step({})


class DingV2(Ding):
    any_count = False

    def reset(self, envs, seed=None):
        if seed is not None:
            envs.seed(seed)
        envs.reset()
        return list(envs.ready_obs)

    def step(self, envs, actions):
        envs.ready_obs_id  # noqa: B018
        return [(each.obs, each.reward, each.done, each.info) for each in envs.step(actions)]

    def settle(self, envs):
        super(SubprocessEnvManagerV2, envs).step({})


class Planning(System):
    seeded = recycles = False
    any_count = True

    def make(self, env_fns, num_workers=2, **options):
        count = len(env_fns)
        if num_workers == 0:  # one env for all rows
            return PlanningVectorEnv(env_fns[0], 0, rows=count, **options)
        return PlanningVectorEnv(env_fns, count, rows=count, **options)

    def reset(self, envs, seed=None):
        return list(envs.reset(False, range(max(1, envs.n_workers)))[0])

    def step(self, envs, actions):
        observations, rewards, ends, truncated, infos = envs.step_batch(actions)
        row_infos = rows_of(infos, len(actions))
        return list(zip(observations, rewards, ends | truncated, row_infos, strict=True))


class Cluster(System):
    recycles = refuses_threads = survives_ctrl_c = survives_errors = warns = False

    def make(self, env_fns, **options):
        return ClusterVectorEnv(env_fns, local=True, num_hosts=1, **options)

    def pids(self, envs):
        return sorted(process.pid for process in multiprocessing.active_children())


SYSTEMS = {
    "gymnasium": System(),
    "caller steps": CallerSteps(),
    "messages": Messages(),
    "threads": With(overlap=2),
    "coroutines": With(Coroutines),
    "spare envs": With(spare_envs=1),
    "rollouts": Rollouts(),
    "sb3": SB3(),
    "baselines": Baselines(),
    "tianshou": Tianshou(),
    "tianshou async": Tianshou(wait_num=2),
    "pettingzoo": PettingZoo(),
    "rows": Rows(),
    "sb3 rows": SB3Rows(),
    "actorcritic": ActorCritic(),
    "ding": Ding(SyncSubprocessEnvManager),
    "ding async": Ding(AsyncSubprocessEnvManager),
    "ding v2": DingV2(SubprocessEnvManagerV2),
    "planning": Planning(),
    "cluster": Cluster(),
}
# Of those that share nearly all of their code with another one here, one is shown by default.
LIKE_ANOTHER = {"caller steps", "messages", "threads", "coroutines", "spare envs", "rollouts"}
LIKE_ANOTHER |= {"tianshou async", "rows", "sb3 rows", "ding async", "ding v2"}


def each(which=lambda system: True, slow=()):
    """Runs a test on each of the systems that promise what it shows, by default on no slow one."""
    return pytest.mark.parametrize(
        "system",
        [
            pytest.param(
                system, id=name, marks=pytest.mark.deep if name in {*LIKE_ANOTHER, *slow} else ()
            )
            for name, system in SYSTEMS.items()
            if which(system)
        ],
    )


def fns(*makes, count=2):
    return [*makes, *[Sleepy] * (count - len(makes))]


# ---- results -----------------------------------------------------------------------------------


@each()
@pytest.mark.parametrize("num_workers", [*deep(0), 2])
def test_results_and_infos_are_those_of_sync_vector_env(system, num_workers):
    makes = [partial(Sleepy, offset=10), partial(Sleepy, offset=20)]
    if num_workers == 0 and isinstance(system, Planning):
        pytest.skip("one env for all rows")
    ours, theirs = system.make(makes, num_workers=num_workers), SyncVectorEnv(makes)
    with closing(ours), closing(theirs):
        columns = slice(None) if system.seeded else slice(2)  # the third one is random
        seed = 3 if system.seeded else None
        expected = theirs.reset(seed=seed)[0]
        np.testing.assert_array_equal(
            np.array(system.reset(ours, seed))[:, columns], expected[:, columns]
        )
        for actions in ([0, 1], [2, 0], [1, 1]):
            expected, rewards, *_ = theirs.step(actions)
            rows = system.step(ours, actions)
            for row, (observation, reward, done, info) in enumerate(rows):
                np.testing.assert_array_equal(observation[columns], expected[row, columns])
                assert reward == rewards[row] and not done
                assert info["action"] == actions[row] and "fault" not in info


@pytest.mark.deep
@each(lambda system: isinstance(system, (PettingZoo, ActorCritic, DingV2, Planning, Cluster)))
def test_spawned_workers_do_the_same(system):  # of the others, their own tests show it
    with closing(system.make([Sleepy] * 2, num_workers=1, **{system.context: "spawn"})) as envs:
        system.reset(envs)
        assert [row[0][:2].tolist() for row in system.step(envs, [0, 1])] == [[1, 0], [1, 1]]
        assert os.getpid() not in system.pids(envs)


# ---- bad input ---------------------------------------------------------------------------------


@each(lambda system: system.checks_actions)
def test_bad_actions_are_refused_before_anything_is_sent(system):
    wrong = [["a", "b"], [0.5, 0.5], [None, "a"]]
    if not system.any_count:
        wrong += [[1], [1, 1, 1]]
    with closing(system.make([Sleepy] * 2, num_workers=2)) as envs:
        system.reset(envs)
        for actions in wrong:
            with pytest.raises((TypeError, ValueError), match="Nothing was sent"):
                system.step(envs, actions)
        assert [row[0][:2].tolist() for row in system.step(envs, [0, 1])] == [[1, 0], [1, 1]]


@each()
def test_an_env_fn_that_raises_does_so_here_and_leaves_nothing(system):
    def broken():
        raise LookupError("no such level")

    with pytest.raises(LookupError, match="no such level") as raised:
        system.make(fns(Sleepy, broken), num_workers=2)
    assert "env 1" in str(raised.value.__cause__) or isinstance(system, (Planning, Cluster))


@pytest.mark.deep
@each(lambda system: not isinstance(system, Planning))  # which takes one function, too
def test_what_are_no_env_fns_is_refused(system):
    with pytest.raises(ValueError, match="empty|wait_num must be between 1 and 0"):
        system.make([])
    with pytest.raises(TypeError, match=r"env_fns\[1\]|not callable"):
        system.make([Sleepy, Sleepy()])


@each()
def test_it_is_not_pickled(system):
    with closing(system.make([Sleepy] * 2, num_workers=2)) as envs:
        for send in (pickle.dumps, cloudpickle.dumps, copy.copy):
            with pytest.raises(TypeError, match=f"a {type(envs).__name__} cannot be pickled or"):
                send(envs)


# ---- faults ------------------------------------------------------------------------------------


@each()
def test_what_an_env_raises_is_raised_as_itself(system):
    with closing(system.make(fns(Sleepy, partial(Failing, "step", LookupError("lost"))))) as envs:
        system.reset(envs)
        system.step(envs, [0, 0])
        with pytest.raises(LookupError, match="lost") as raised:
            system.step(envs, [0, 0])
        assert "Traceback" in str(raised.value.__cause__)
        if system.survives_errors:
            system.reset(envs)
            assert [row[0][0] for row in system.step(envs, [0, 0])] == [1, 1]


@each()
def test_a_worker_that_dies_is_reported_as_that_one(system):
    with closing(system.make([Sleepy] * 2, num_workers=2)) as envs:
        system.reset(envs)
        pids = system.pids(envs)
        last = len(pids) - 1
        os.kill(pids[last], signal.SIGKILL)
        with pytest.raises(WorkerCrashError, match="SIGKILL") as raised:
            system.step(envs, [0, 0])
        assert raised.value.workers == raised.value.envs == (last,)
    assert gone(pids, DEADLINE_S)


@each(lambda system: system.limits, slow=["cluster"])
def test_an_env_that_hangs_is_named_where_there_is_a_limit(system, tmp_path):
    makes = [Sleepy, partial(Gated, tmp_path)]
    with closing(system.make(makes, num_workers=2, step_timeout=1.0)) as envs:
        system.reset(envs)
        opening = threading.Timer(10.0, (tmp_path / "open").touch)
        opening.start()  # the cluster's closes its envs before it raises, and waits for them
        try:
            # Until then it hangs: a caller that had no core for a while counts from its return.
            with pytest.raises(EnvTimeoutError, match=r"env 1\b"):
                system.step(envs, [0, SLEEP])
        finally:
            opening.cancel()
            (tmp_path / "open").touch()


@each(lambda system: system.recycles)
def test_workers_are_replaced_after_so_many_steps(system):
    options = {"num_workers": 1, "recycle_after": 5}
    if isinstance(system, ActorCritic):
        options["faults"] = None
    with closing(system.make([Process] * 2, **options)) as envs:
        system.reset(envs)
        seen = [system.step(envs, [1, 1]) for _ in range(20)]
        pids = [int(rows[0][0][1]) for rows in seen]
        replaced = [i for i in range(1, 20) if pids[i] != pids[i - 1]]
        assert len(replaced) == 3
        # The first step of a new worker says that the episode was broken off.
        assert [
            i for i, rows in enumerate(seen) if any("fault" in row[3] for row in rows)
        ] == replaced
        assert max(rows[0][0][0] for rows in seen) == 5


# ---- Ctrl-C and threads ------------------------------------------------------------------------


def break_off_a_step(system, envs, folder):
    """Ctrl-C while both envs are in their steps, in which they stay until the gate is open."""

    def ctrl_c():
        wait_for_two(folder)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.01)

    thread = threading.Thread(target=ctrl_c)
    thread.start()
    with interrupted(2 * DEADLINE_S):
        system.step(envs, [SLEEP, SLEEP])
    thread.join()


@each(lambda system: system.survives_ctrl_c)
def test_after_ctrl_c_the_next_call_returns_its_own_results(system, tmp_path):
    with closing(system.make([partial(Gated, tmp_path)] * 2, num_workers=2)) as envs:
        system.reset(envs)
        system.step(envs, [0, 0])
        break_off_a_step(system, envs, tmp_path)
        (tmp_path / "open").touch()
        system.settle(envs)
        assert [row[0][:2].tolist() for row in system.step(envs, [1, 2])] == [[3, 1], [3, 2]]
        system.reset(envs)
        assert [row[0][:2].tolist() for row in system.step(envs, [1, 2])] == [[1, 1], [1, 2]]


@each(lambda system: system.refuses_threads)
def test_another_threads_step_is_refused_and_this_one_gets_its_own(system, tmp_path):
    with closing(system.make([partial(Gated, tmp_path)] * 2, num_workers=2)) as envs:
        system.reset(envs)
        found = []
        thread = threading.Thread(target=lambda: found.append(system.step(envs, [SLEEP, SLEEP])))
        thread.start()
        wait_for_two(tmp_path)
        with pytest.raises((AlreadyPendingCallError, RuntimeError)):
            system.step(envs, [1, 1])
        (tmp_path / "open").touch()
        thread.join(DEADLINE_S)
        assert [row[0][:2].tolist() for row in found[0]] == [[1, SLEEP]] * 2
        assert [row[0][:2].tolist() for row in system.step(envs, [1, 2])] == [[2, 1], [2, 2]]


# ---- the end -----------------------------------------------------------------------------------


@each()
@pytest.mark.parametrize("num_workers", [*deep(0), 2])
def test_close_ends_all_and_a_second_one_is_harmless(system, num_workers):
    envs = system.make([Sleepy] * 2, num_workers=num_workers)
    system.reset(envs)
    pids = system.pids(envs)
    assert len(pids) == (num_workers - system.here if num_workers else 0)
    envs.close()
    envs.close()
    assert gone(pids, DEADLINE_S)
    for use in (system.reset, partial(system.step, actions=[0, 0])):
        with pytest.raises(Exception, match=r"(?i)close"):
            use(envs)


@each(lambda system: system.survives_ctrl_c, slow=SYSTEMS.keys() - {"gymnasium"})
def test_close_ends_envs_that_are_in_a_step(system, tmp_path):
    envs = system.make([partial(Gated, tmp_path)] * 2, num_workers=2)
    system.reset(envs)
    pids = system.pids(envs)
    break_off_a_step(system, envs, tmp_path)
    (tmp_path / "open").touch()
    envs.close()
    assert gone(pids, DEADLINE_S)


@each(lambda system: system.warns)
def test_one_that_is_forgotten_says_so(system):
    envs = system.make([Sleepy] * 2, num_workers=2)
    system.reset(envs)
    pids = system.pids(envs)
    with pytest.warns(ResourceWarning, match=r"unclosed .*, made at .*test_contracts"):
        del envs
    assert gone(pids, DEADLINE_S)

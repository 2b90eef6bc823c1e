"""``ClusterVectorEnv(local=True)``: the results of ``SyncVectorEnv``, however envs are spread."""

import threading
import time
from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import unplugged
from envs import Infos
from equality import assert_same_steps, same, sync_env
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import SyncVectorEnv
from tables import deep

from shmvec.cluster import ClusterVectorEnv
from shmvec.cluster.backend import LocalBackend
from shmvec.cluster.fragments import pickle_object
from shmvec.cluster.hosts import Host, Request
from shmvec.exchange import AutoresetMode
from shmvec.faults import FaultPolicy, TooManyFaultsError, WorkerCrashError, restart_seed


def cartpoles(count=5):
    return [lambda: gym.make("CartPole-v1")] * count


def vector_env(env_fns=None, num_hosts=2, **options):
    env_fns = env_fns or cartpoles()
    options = {"num_workers": 0, **options}
    return ClusterVectorEnv(env_fns, num_hosts=num_hosts, local=True, **options)


INFOS = [
    {},
    {"a": 1},
    {"b": 2.5, "a": 3},
    {"nested": {"x": np.arange(2), "word": "yes"}, "flag": True},
    {"object": [1], "a": 4},
]


def telling(env):
    """An env whose infos come in an order of its own."""
    return Infos(INFOS[env:] + INFOS[:env])


@pytest.mark.parametrize(
    "env_fns, num_hosts, mode",
    [
        ([partial(telling, env) for env in range(5)], 2, AutoresetMode.NEXT_STEP),
        *deep((cartpoles(), 5, AutoresetMode.DISABLED)),
    ],
    ids=["infos", "masked resets"],
)
def test_results_are_those_of_one_process(env_fns, num_hosts, mode):
    theirs = sync_env(env_fns, mode)
    ours = vector_env(env_fns, num_hosts, autoreset_mode=mode)
    with closing(ours), closing(theirs):
        assert ours.single_observation_space == theirs.single_observation_space
        assert ours.action_space == theirs.action_space
        assert_same_steps(ours, theirs, 60)
        assert sum(map(len, ours.nodes.values())) == 5


def test_partial_batches():
    """Every env's own results are those of lockstep; every env comes back as often as asked."""
    ours = vector_env(batch_size=2)
    alone = SyncVectorEnv(cartpoles())
    rows = [[] for _ in range(5)]
    observations, infos = ours.reset(seed=3)
    taken = [(observations, np.zeros(2), infos["env_id"])]
    for _ in range(50):
        ids = taken[-1][2]
        observations, rewards, _, _, infos = ours.step(np.ones(len(ids), int), ids)
        taken.append((observations, rewards, infos["env_id"]))
    for observations, rewards, ids in taken:
        for row, env in enumerate(ids.tolist()):
            rows[env].append((observations[row], rewards[row]))
    assert sum(map(len, rows)) == 51 * 2
    first, _ = alone.reset(seed=3)
    expected = [(first, np.zeros(5)), *(alone.step([1] * 5)[:2] for _ in range(50))]
    for env in range(5):
        for (observation, reward), (many, rewards) in zip(rows[env], expected, strict=False):
            np.testing.assert_array_equal(observation, many[env])
            assert reward == rewards[env]
    ours.close()
    alone.close()


@pytest.mark.deep
@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Dict(
            x=gym.spaces.Discrete(3), y=gym.spaces.Tuple([gym.spaces.Box(-1, 1, (2,))])
        ),
        gym.spaces.Tuple([gym.spaces.Discrete(5), gym.spaces.Discrete(5)]),
    ],
)
def test_actions_of_several_parts(space):
    class Env(gym.Env):
        observation_space = gym.spaces.Discrete(1)
        action_space = space

        def reset(self, *, seed=None, options=None):
            return 0, {}

        def step(self, action):
            return 0, 0.0, False, False, {"action": repr(action)}

    theirs, ours = (make([Env] * 5) for make in (SyncVectorEnv, vector_env))
    with closing(ours), closing(theirs):
        assert_same_steps(ours, theirs, 3)


@pytest.mark.deep
def test_what_is_sent_is_begun_before_it_is_waited_for(monkeypatch):
    """What a learner does between ``send`` and ``recv``, it does while envs step."""
    ours, asked, ask = vector_env(), [], LocalBackend.ask
    ours.reset(seed=3)
    monkeypatch.setattr(LocalBackend, "ask", lambda *args: (asked.append(args[2]), ask(*args))[1])
    ours.send([1, 1], [0, 4])
    assert asked == ["send", "send"]
    ours.send([1, 1, 1], [3, 2, 1])
    assert asked == ["send"] * 4
    assert ours.recv()[1].tolist() == [1] * 5
    assert asked[4:] == ["send_and_receive", "send_and_receive"]
    ours.send([0], [0])
    with pytest.raises(ValueError, match="are in flight"):
        ours.send([0], [0])
    ours.send([7], [1])  # what is wrong with it, its env says
    ours.send([0] * 3, [2, 3, 4])
    with pytest.raises(AssertionError, match="invalid"):
        ours.recv()
    assert ours.closed


@pytest.mark.deep
def test_calls():
    ours = vector_env()
    ours.set_attr("gravity", [1.0, 2.0, 3.0, 4.0, 5.0])
    assert ours.get_attr("gravity") == (1.0, 2.0, 3.0, 4.0, 5.0)
    ours.set_attr("gravity", 7.0)
    assert ours.call("get_wrapper_attr", "gravity") == (7.0,) * 5
    with pytest.raises(AttributeError, match="no_such_name"):
        ours.get_attr("no_such_name")
    assert ours.get_attr("gravity") == (7.0,) * 5
    ours.close()


def lose_next(monkeypatch):
    """The next answer of a host is lost, with the host."""
    result = LocalBackend.result

    def lost(backend, call):
        monkeypatch.setattr(LocalBackend, "result", result)
        unplugged.lost(backend, call)

    monkeypatch.setattr(LocalBackend, "result", lost)


def test_a_lost_node_is_a_fault_of_its_envs(monkeypatch):
    ours = vector_env(faults=FaultPolicy(on_crash="restart", max_restarts=1), num_workers=1)
    before, _ = ours.reset(seed=3)
    lose_next(monkeypatch)
    observations, rewards, terminations, truncations, infos = ours.step([1] * 5)
    lost = np.array([True, True, False, False, False])  # those of the first host
    np.testing.assert_array_equal(truncations, lost)
    np.testing.assert_array_equal(infos["_fault"], lost)
    np.testing.assert_array_equal(observations[lost], before[lost])
    np.testing.assert_array_equal(rewards, ~lost)
    assert "it was unplugged" in infos["fault"]["message"][0] and ours.restarts == 1
    observations, rewards, terminations, truncations, infos = ours.step([1] * 5)
    assert not truncations.any() and rewards.tolist() == [0, 0, 1, 1, 1]
    for env in range(2):
        alone = gym.make("CartPole-v1")
        expected, _ = alone.reset(seed=restart_seed(3 + env, 1))
        np.testing.assert_array_equal(observations[env], expected)
    assert ours.step([1] * 5)[1].tolist() == [1] * 5
    lose_next(monkeypatch)
    with pytest.raises(TooManyFaultsError, match="allows 1 restarts"):
        ours.step([1] * 5)
    assert ours.closed


@pytest.mark.deep
def test_a_lost_node_is_no_fault_of_an_env_whose_episode_was_over(monkeypatch):
    """Nothing of it was lost: its next step begins an episode, as it would have."""
    envs = [partial(gym.make, "CartPole-v1", max_episode_steps=steps) for steps in (1, 9, 9)]
    ours = vector_env(envs, 1, faults=FaultPolicy(on_crash="restart"), num_workers=1)
    ours.reset(seed=3)
    assert ours.step([1] * 3)[3].tolist() == [True, False, False]
    lose_next(monkeypatch)
    observations, rewards, _, truncations, infos = ours.step([1] * 3)
    assert (rewards.tolist(), truncations.tolist()) == ([0] * 3, [False, True, True])
    assert infos["_fault"].tolist() == [False, True, True]
    expected, _ = gym.make("CartPole-v1").reset(seed=restart_seed(3, 1))
    np.testing.assert_array_equal(observations[0], expected)
    ours.close()


@pytest.mark.deep
def test_a_node_that_is_lost_in_a_reset_begins_with_another_seed(monkeypatch):
    ours = vector_env(faults=FaultPolicy(on_crash="restart"), num_workers=1)
    lose_next(monkeypatch)
    observations, _ = ours.reset(seed=3)
    alone = gym.make("CartPole-v1")
    for env in range(5):
        expected, _ = alone.reset(seed=restart_seed(3 + env, 1) if env < 2 else 3 + env)
        np.testing.assert_array_equal(observations[env], expected)
    ours.close()


@pytest.mark.deep
def test_hosts_that_are_lost_as_they_start_are_started_elsewhere(monkeypatch):
    monkeypatch.setattr("shmvec.cluster.actor_pool.RayBackend", unplugged.Nodes)
    env_fns = cartpoles(4)
    ours, theirs = ClusterVectorEnv(env_fns, num_workers=0), SyncVectorEnv(env_fns)
    assert unplugged.TRIED == [*"abbba"]
    assert same(ours.reset(seed=3), theirs.reset(seed=3))
    ours.close()
    theirs.close()
    with pytest.raises(
        RuntimeError,
        match=r"3 hosts were lost one after the other, the last one on a node .*: it was unplugged",
    ):
        ClusterVectorEnv(env_fns, num_workers=0, num_hosts=2)


@pytest.mark.deep
def test_a_host_does_not_wait_for_an_env_that_hangs_as_it_is_closed(monkeypatch):
    class Hanging(gym.Wrapper):
        def step(self, action):
            time.sleep(600)

    monkeypatch.setattr("shmvec.cluster.hosts.CLOSE_TIMEOUT_S", 0.2)
    functions = pickle_object("env_fns", [lambda: Hanging(gym.make("CartPole-v1"))])
    host = Host(functions, range(1), {"num_workers": 1})
    host.send_and_receive([Request(0, True)], 1)
    host.send([Request(0, False, 1)])
    host.close()


@pytest.mark.deep
def test_without_a_policy_a_lost_node_is_an_error(monkeypatch):
    ours = vector_env()
    ours.reset(seed=3)
    lose_next(monkeypatch)
    with pytest.raises(WorkerCrashError, match="it was unplugged"):
        ours.step([1] * 5)
    assert ours.closed


@pytest.mark.deep
def test_a_lost_node_without_room_for_another_is_an_error(monkeypatch):
    ours = vector_env(
        num_hosts=1, num_workers=1, start_timeout=1, faults=FaultPolicy(on_crash="restart")
    )
    ours.reset(seed=3)
    lose_next(monkeypatch)
    ours.step([1] * 5)
    monkeypatch.setattr(LocalBackend, "ready", lambda backend, tickets, timeout: [])
    with pytest.raises(RuntimeError, match=r"for 1 of 1 hosts, each of which needs 1 CPUs: there"):
        ours.step([1] * 5)
    assert ours.closed


@pytest.mark.deep
@pytest.mark.parametrize("on_crash", ["raise", "restart"])
def test_a_node_is_lost_in_a_call(monkeypatch, on_crash):
    ours = vector_env(
        num_hosts=1, num_workers=1, start_timeout=1, faults=FaultPolicy(on_crash=on_crash)
    )
    ours.reset(seed=3)
    lose_next(monkeypatch)
    with pytest.raises(WorkerCrashError, match="it was unplugged"):
        ours.get_attr("gravity")
    assert ours.closed == (on_crash == "raise")
    if not ours.closed:
        monkeypatch.setattr(LocalBackend, "ready", lambda backend, tickets, timeout: [])
        with pytest.raises(RuntimeError, match=r"for 1 of 1 hosts, each of which needs 1 CPUs"):
            ours.get_attr("gravity")
        assert ours.closed


@pytest.mark.deep
def test_shares_of_nodes(monkeypatch):
    class Counting(LocalBackend):
        hosts = 0

        def __init__(self, options):
            pass

        def start(self, *args, **where):
            Counting.hosts += 1
            return super().start(*args, **where)

    monkeypatch.setattr("shmvec.cluster.actor_pool.RayBackend", Counting)
    ours = ClusterVectorEnv(
        [lambda: gym.make("CartPole-v1")] * 10, cpus_per_host=0.1, num_workers=0
    )
    assert Counting.hosts == 10
    ours.close()


@pytest.mark.deep
def test_ctrl_c_while_it_waits_and_while_it_notes_answers(monkeypatch):
    ours, theirs = vector_env(), SyncVectorEnv(cartpoles())
    assert same(ours.reset(seed=3), theirs.reset(seed=3))

    def interrupt(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalBackend, "ready", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ours.step([1] * 5)
    with pytest.raises(AlreadyPendingCallError):
        ours.step([1] * 5)
    observations, *_, infos = ours.recv()
    np.testing.assert_array_equal(observations, theirs.step([1] * 5)[0][infos["env_id"]])
    assert same(ours.step([0] * 5), theirs.step([0] * 5))
    monkeypatch.setattr(LocalBackend, "result", interrupt)  # the answer is lost
    with pytest.raises(KeyboardInterrupt):
        ours.step([1] * 5)
    assert ours.closed
    theirs.close()


@pytest.mark.deep
def test_what_is_closed_in_the_middle_of_a_call_says_so(monkeypatch):
    ours = vector_env()
    ours.reset(seed=3)

    def close(*_):
        monkeypatch.undo()
        ours.close()  # as a signal's handler, or another thread, does
        return []

    monkeypatch.setattr(LocalBackend, "ready", close)
    with pytest.raises(ClosedEnvironmentError):
        ours.step([1] * 5)


@pytest.mark.deep
def test_what_cannot_be_pickled_is_named_before_a_cluster_is_needed(monkeypatch):
    monkeypatch.setattr("shmvec.cluster.actor_pool.RayBackend", pytest.fail)
    lock = threading.Lock()
    with pytest.raises(TypeError, match="env_fns cannot be pickled"):
        ClusterVectorEnv([lambda: lock])


def test_bad_input():
    with pytest.raises(ValueError, match="use NEXT_STEP"):
        vector_env(autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match="cpus_per_host must be positive"):
        vector_env(cpus_per_host=0)
    with pytest.raises(ValueError, match="batch_size must be between 1 and"):
        vector_env(batch_size=6)
    with pytest.raises(RuntimeError, match="have the spaces"):
        vector_env([lambda: gym.make("CartPole-v1"), lambda: gym.make("Acrobot-v1")])
    ours = vector_env()
    with pytest.raises(NoAsyncCallError):
        ours.recv()
    ours.reset(seed=1)
    ours.send([0, 1], [0, 3])
    with pytest.raises(ValueError, match=r"envs \[3\] are in flight"):
        ours.send([0], [3])
    with pytest.raises(AlreadyPendingCallError, match="envs are in flight"):
        ours.step([0] * 5)
    ours.close()
    with pytest.raises(ClosedEnvironmentError):
        ours.step([0] * 5)

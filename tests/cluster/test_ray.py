"""``Collector`` on Ray: nodes of one CPU on this machine, of which some join and some die.

The head and one more node are started once for all tests, and end with them. Ray is in few
environments (the extra ``cluster`` brings it); without it these tests are skipped.
"""

import importlib
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import cloudpickle
import gymnasium as gym
import learning_loop
import numpy as np
import pytest
from equality import same
from gymnasium.error import ClosedEnvironmentError
from learning_loop import Policy, digest, learn, make_envs
from processes import output_of

import shmvec
from shmvec.cluster import ClusterVectorEnv, Collector
from shmvec.faults import FaultPolicy

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed (the cluster extra has it)", allow_module_level=True)

pytestmark = pytest.mark.deep
EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 60


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one CPU each, which notice within a second that another one is dead."""
    folder = tempfile.mkdtemp(prefix="shmvec-ray-", dir="/tmp")  # paths of sockets must be short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.syspath_prepend(EXAMPLES)
        path = os.pathsep.join(filter(None, sys.path))
        patch.setenv("PYTHONPATH", path)  # of the nodes' processes
        import ray
        from ray.cluster_utils import Cluster

        nodes = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "include_dashboard": False,
                "_system_config": {
                    "health_check_initial_delay_ms": 200,
                    "health_check_period_ms": 200,
                    "health_check_timeout_ms": 1000,
                    "health_check_failure_threshold": 3,
                },
            },
        )
        nodes.add_node(num_cpus=1)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
        cloudpickle.register_pickle_by_value(learning_loop)
        yield nodes
        cloudpickle.unregister_pickle_by_value(learning_loop)
        ray.shutdown()
        nodes.shutdown()
    shutil.rmtree(folder)


def spare(nodes):
    """A third node, which a test may kill: what another has left, or a new one."""
    there = nodes.list_all_nodes()
    return there[2] if len(there) > 2 else nodes.add_node(num_cpus=1)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(cluster):
    """No actor is left, nor what it has started; Ray's own descriptors come and go."""
    yield
    until = time.monotonic() + PATIENCE_S
    while actors() and time.monotonic() < until:
        time.sleep(0.02)
    assert not actors()


def actors():
    """Processes of actors on the nodes of these tests, and processes that they have started."""
    found = {}
    folder = os.environ["RAY_TMPDIR"].encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes()
            if b"ray::RayActor" in command and folder in (path / "environ").read_bytes():
                found[path.name] = command
        except OSError:
            pass  # it has gone meanwhile
    return found


def collector(make_envs=make_envs, make_policy=Policy, **options):
    options = {"fragment_length": 16, "start_timeout": PATIENCE_S, **options}
    return Collector(make_envs, make_policy, **options)


def test_ordered_equals_local_bit_for_bit(cluster):
    with collector(ordered=True) as made:
        nodes = {runner.node for runner in made.stats().runners}
        on_nodes = learn(made, 8)
    assert len(nodes) == len(cluster.list_all_nodes())  # one runner on each
    with collector(local=True, num_runners=len(nodes)) as made:
        assert learn(made, 8) == on_nodes


def make_env():
    return gym.make("CartPole-v1")


def node_of_this():
    import ray

    return ray.get_runtime_context().get_node_id()


def alive(node):
    import ray

    return any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())


def until(true):
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        yield


def check_streams(fragments):
    """Each of a runner's fragments once, in order, whole, each where the one before has ended."""
    last = {}
    for fragment in fragments:
        before = last.get(fragment.runner)
        assert fragment.index == (before.index + 1 if before else 0)
        if before:
            np.testing.assert_array_equal(fragment.observations[0], before.observations[-1])
            assert fragment.seed == before.seed
        assert len(fragment.infos) == 16
        last[fragment.runner] = fragment
    assert len({fragment.seed for fragment in last.values()}) == len(last)


def with_load(make_policy):
    """The same with 400 kB a fragment besides: these stay in their nodes' object stores."""

    def make(seed):
        policy = make_policy(seed)

        def tell(observations, env_ids):
            actions, extras = policy(observations, env_ids)
            load = np.tile(observations.view(np.uint8)[:, :1], (1, 1 << 13))
            return actions, {**extras, "load": load}

        tell.reset, tell.set_weights = policy.reset, policy.set_weights
        return tell

    return make


def test_nodes_join_and_nodes_die(cluster, caplog):
    """In order of arrival: a runner makes what it makes alone, whichever others come and go."""
    with collector(make_policy=with_load(Policy)) as made:
        fragments = []
        for _ in until(lambda: {0, 1} == {fragment.runner for fragment in fragments}):
            fragments.append(next(made))
        joined = cluster.add_node(num_cpus=1)
        try:
            for _ in until(lambda: fragments[-1].runner == 2):
                fragments.append(next(made))
            assert len(made.stats().runners) == 3
        finally:
            cluster.remove_node(joined, allow_graceful=False)
        for _ in until(lambda: made.stats().lost == 1 and len(made.stats().runners) == 2):
            fragments.append(next(made))
        stats = made.stats()
        assert {runner.runner for runner in stats.runners} == {0, 1}
        assert stats.fragments == len(fragments)
        assert "runner 2, on " in caplog.text and "is lost" in caplog.text
    check_streams(fragments)
    assert not any(each.rewards.flags.writeable for each in fragments)
    # The same fragments, by a collector in this process.
    theirs = {(each.runner, each.index): digest(each) for each in fragments if each.index < 4}
    with collector(make_policy=with_load(Policy), local=True, num_runners=3) as alone:
        for _ in range(12):
            fragment = next(alone)
            key = fragment.runner, fragment.index
            assert theirs.pop(key, digest(fragment)) == digest(fragment)
    assert not theirs


def collected(**options):
    with collector(**options) as made:
        next(made)
        return {runner.node for runner in made.stats().runners}


def stepped(**options):
    envs = ClusterVectorEnv([make_env] * 6, num_workers=1, start_timeout=PATIENCE_S, **options)
    with closing(envs):
        envs.reset(seed=3)
        assert envs.step([1] * 6)[1].tolist() == [1] * 6
        return set(envs.nodes)


@pytest.mark.parametrize(
    "start",
    [partial(collected, ordered=True), partial(stepped, num_hosts=2)],
    ids=["Collector", "ClusterVectorEnv"],
)
def test_what_is_made_before_a_death_is_noticed_starts_elsewhere(cluster, start):
    """Ray still has the dead node among those that are alive."""
    doomed = cluster.add_node(num_cpus=1)
    for _ in until(lambda: alive(doomed.node_id)):
        time.sleep(0.02)
    cluster.remove_node(doomed, allow_graceful=False)
    assert alive(doomed.node_id)
    nodes = start()
    assert nodes and not any(doomed.node_id[:8] in node for node in nodes)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_runner_that_is_killed_is_replaced(cluster, ordered):
    def make_policy(seed):
        policy = Policy(seed)
        pid = os.getpid()

        def tell(observations, env_ids):
            actions, extras = policy(observations, env_ids)
            return actions, {**extras, "pid": np.full(len(env_ids), pid)}

        tell.reset = policy.reset
        return tell

    with collector(make_policy=make_policy, num_runners=2, ordered=ordered) as made:
        fragments = [next(made) for _ in range(4)]
        victim = fragments[-1]
        os.kill(victim.extras["pid"][0, 0], signal.SIGKILL)
        for _ in until(lambda: fragments[-1].runner == 2):
            fragments.append(next(made))
        stats = made.stats()
        assert (stats.lost, stats.started) == (1, 3)
        assert {runner.runner for runner in stats.runners} == {2, 1 - victim.runner}
    check_streams(fragments)
    if ordered:
        places = {0: 0, 1: 1, 2: victim.runner}
        assert [places[each.runner] for each in fragments] == [
            turn % 2 for turn in range(len(fragments))
        ]


def test_what_goes_wrong_on_one_node_names_it(cluster):
    bad = cluster.list_all_nodes()[1].node_id

    def make_envs_here():
        if node_of_this() == bad:
            raise LookupError("no simulator here")
        return make_envs()

    with pytest.raises(LookupError, match="no simulator here") as caught:
        collector(make_envs_here)
    assert f"({bad[:8]})" in str(caught.value.__cause__)

    def make_policy(seed):
        def policy(observations, env_ids):
            if node_of_this() == bad:
                raise ArithmeticError("no idea")
            return np.zeros(len(env_ids), int)

        return policy

    with collector(make_policy=make_policy) as made:
        with pytest.raises(ArithmeticError, match="no idea") as caught:
            while True:
                next(made)
    assert re.search(rf"In runner \d+, collect, .* \({bad[:8]}\)", str(caught.value.__cause__))


def test_a_bad_node_that_joins_gets_no_runner(cluster, caplog):
    good = [node.node_id for node in cluster.list_all_nodes()]

    def make_envs_here():
        if node_of_this() not in good:
            raise LookupError("no simulator here")
        return make_envs()

    with collector(make_envs_here) as made:
        next(made)
        cluster.add_node(num_cpus=1)
        for _ in until(lambda: "no runner is started on" in caplog.text):
            next(made)
        assert "no simulator here" in caplog.text
        assert {runner.runner for runner in made.stats().runners} == set(range(len(good)))


def test_no_room(cluster):
    with pytest.raises(RuntimeError, match=r"has no room for a runner, which needs 64 "):
        collector(cpus_per_runner=64)
    with pytest.raises(RuntimeError, match=r"for \d of 9 runners, each of which needs 1 CPUs: "):
        collector(num_runners=9, start_timeout=1)


def test_what_cannot_be_unpickled_there(cluster):
    class Here:
        def __reduce__(self):
            return __import__, ("no_such_module",)

    here = Here()
    with pytest.raises(RuntimeError, match=r"make_policy cannot be unpickled here \(ModuleNotF"):
        collector(make_policy=lambda seed: here, num_runners=1)


def test_weights_are_fetched_once_a_node_and_runners_are_bound_to_cores(cluster):
    """Arrays of weights are where the object store has them: they were not copied."""

    def make_policy(seed):
        policy = Policy(seed)

        def tell(observations, env_ids):
            cores = np.tile([*os.sched_getaffinity(0)], (len(env_ids), 1))
            owned = np.full(len(env_ids), policy.weights.flags.writeable)
            return policy(observations, env_ids)[0], {"own": owned, "cores": cores}

        tell.reset, tell.set_weights = policy.reset, policy.set_weights
        return tell

    with collector(make_policy=make_policy, in_flight=1, pin_runners=True) as made:
        fragments = [next(made)]
        assert fragments[0].extras["own"].all()
        made.set_weights({"layer": np.ones((4, 2)), "large": np.zeros(1 << 20)})
        for _ in until(lambda: fragments[-1].version == 1):
            fragments.append(next(made))
        assert not fragments[-1].extras["own"].any()
        assert (
            fragments[-1].extras["cores"] == min(os.sched_getaffinity(0))
        ).all()  # a node has one


def balance(observations, env_ids):
    return (observations[:, 2] > 0).astype(int)


def columns(result):
    return {name: values.tolist() for name, values in result.columns().items()}


def test_evaluation_on_all_nodes_equals_that_on_one(cluster):
    played = []
    options = {"episodes": 50, "seeds": 7, "num_envs": 3}
    here = shmvec.evaluate("CartPole-v1", balance, **options)
    there = shmvec.evaluate("CartPole-v1", balance, **options, cluster=True, progress=played.append)
    assert columns(there) == columns(here)
    assert (there.steps, there.repeats, len(played)) == (here.steps, 0, 50)


def test_an_evaluation_goes_on_without_a_node_that_dies(cluster, tmp_path):
    joined = spare(cluster)
    doomed, begun, gone = joined.node_id, tmp_path / "begun", []

    def policy(observations, env_ids):
        if node_of_this() == doomed:
            begun.touch()
            time.sleep(0.05)
        end = time.monotonic() + PATIENCE_S
        while not begun.exists():  # the others wait for it
            assert time.monotonic() < end
            time.sleep(0.01)
        return balance(observations, env_ids)

    def kill(episode):
        if not gone:
            gone.append(episode)
            cluster.remove_node(joined, allow_graceful=False)

    result = shmvec.evaluate(
        "CartPole-v1", policy, 60, seeds=7, num_envs=2, cluster=True, progress=kill
    )
    assert columns(result) == columns(shmvec.evaluate("CartPole-v1", balance, 60, seeds=7))
    assert result.repeats > 0


def test_actor_options_reach_the_actors_of_an_evaluation(cluster):
    """A resource that one node has, an environment variable, and CPUs."""
    special = cluster.add_node(num_cpus=2, resources={"simulator": 1})
    where = special.node_id

    def policy(observations, env_ids):
        assert node_of_this() == where and os.environ["LICENCE"] == "mine"
        return balance(observations, env_ids)

    try:
        options = {
            "resources": {"simulator": 1},
            "runtime_env": {"env_vars": {"LICENCE": "mine"}},
            "num_cpus": 1,
        }
        with collector(actor_options=options) as made:  # which leaves a CPU, but no simulator
            assert len(made.stats().runners) == 1
        result = shmvec.evaluate(
            "CartPole-v1", policy, 10, seeds=7, cluster=True, actor_options=options
        )
        assert columns(result) == columns(shmvec.evaluate("CartPole-v1", balance, 10, seeds=7))
    finally:
        cluster.remove_node(special)


def test_a_placement_groups_bundles_count_as_nodes(cluster):
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    special = cluster.add_node(num_cpus=3, resources={"simulator": 1})
    where = special.node_id
    group = ray.util.placement_group([{"CPU": 1, "simulator": 0.5}, {"CPU": 2, "simulator": 0.5}])
    try:
        ray.get(group.ready(), timeout=PATIENCE_S)
        options = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group)}

        def policy(observations, env_ids):
            assert node_of_this() == where
            return balance(observations, env_ids)

        assert shmvec.evaluate("CartPole-v1", policy, 4, cluster=True, actor_options=options).steps
        with collector(actor_options=options) as made:
            runners = made.stats().runners
            assert len(runners) == 2
            assert all(where[:8] in runner.node for runner in runners)
        envs = ClusterVectorEnv([make_env] * 6, actor_options=options)
        with closing(envs):
            assert [*envs.nodes.values()] == [[*range(6)]]
        one = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, 1)}
        with collector(actor_options=one) as made:
            assert len(made.stats().runners) == 1
    finally:
        ray.util.remove_placement_group(group)
        cluster.remove_node(special)


def test_ppo_learns_the_same_on_the_cluster_and_without(cluster):
    pytest.importorskip("torch")
    main = importlib.import_module("cluster_ppo").main
    options = "--env-id CartPole-v1 --num-envs 4 --num-steps 64 --total-steps 4000".split()
    on_nodes = main([*options, "--ordered"])
    alone = main([*options, "--local", "--num-runners", str(len(cluster.list_all_nodes()))])
    assert on_nodes.digest == alone.digest
    assert on_nodes.episodes == alone.episodes > 3


def test_rllib_steps_its_envs_by_shmvec(cluster):
    pytest.importorskip("ray.rllib.algorithms.ppo", exc_type=ImportError)
    address = {"RAY_ADDRESS": cluster.address}
    said = output_of(EXAMPLES / "rllib_ppo.py", "--iterations", 1, environ=address)
    assert said.splitlines()[0] == "the EnvRunners' envs are of ShmVectorEnv"
    assert "iteration 0: mean return " in said


def slow_env():
    """No episode ends by itself: a loss between two episodes would be no env's fault."""
    env = gym.make("MountainCar-v0", max_episode_steps=10**9)
    step = env.step

    def slow(action):
        time.sleep(0.005)
        return step(action)

    env.step = slow
    return env


def test_a_vector_env_on_nodes_equals_that_in_one_process(cluster):
    ours = ClusterVectorEnv([make_env] * 5)
    theirs = gym.vector.SyncVectorEnv([make_env] * 5)
    assert len(ours.nodes) == len(cluster.list_all_nodes())
    assert same(ours.reset(seed=3), theirs.reset(seed=3))
    for t in range(40):
        actions = np.full(5, t % 3 > 0, np.int64)
        assert same(ours.step(actions), theirs.step(actions))
    ours.close()
    theirs.close()


def test_a_vector_env_goes_on_without_a_node_that_dies(cluster):
    spare(cluster)
    head = cluster.head_node.node_id[:8]
    ours = ClusterVectorEnv(
        [slow_env] * 6,
        batch_size=2,
        num_hosts=2,
        num_workers=1,
        faults=FaultPolicy(on_crash="restart"),
    )
    with closing(ours):
        where, lost = next(each for each in ours.nodes.items() if head not in each[0])
        (doomed,) = (each for each in cluster.list_all_nodes() if each.node_id[:8] in where)
        ours.async_reset(seed=3)
        faults, steps = {}, np.zeros(6, int)
        for _ in range(6):
            ours.send(np.zeros(2, int), ours.recv()[-1]["env_id"])
        cluster.remove_node(doomed, allow_graceful=False)
        for _ in until(lambda: len(faults) == len(lost) and steps[lost].min() > 5):
            _, rewards, _, truncations, infos = ours.recv()
            for row, env in enumerate(infos["env_id"].tolist()):
                if "fault" in infos and infos["_fault"][row]:
                    assert truncations[row] and rewards[row] == 0
                    faults[env] = infos["fault"]["message"][row]
                    steps[env] = 0
                steps[env] += rewards[row] < 0
            ours.send(np.zeros(2, int), infos["env_id"])
        assert sorted(faults) == lost
        assert all(doomed.node_id[:8] in message for message in faults.values())
        assert ours.restarts == 1


def test_ray_is_shut_down_before_all_is_closed(cluster):
    """The last test: what follows would need Ray."""
    import ray

    envs = ClusterVectorEnv([make_env], num_hosts=1)
    with closing(envs), collector(num_runners=1) as made:
        kept = next(made)
        ray.shutdown()
        for call in (lambda: made.set_weights({}), lambda: next(made), lambda: envs.reset(seed=1)):
            with pytest.raises(RuntimeError, match="Ray was shut down"):
                call()
    assert not ray.is_initialized()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    made.close()
    with pytest.raises(ClosedEnvironmentError):
        envs.reset()
    assert kept.rewards[1].all()

"""``Collector(local=True)``: no cluster, no Ray, and nothing left to chance."""

import gc
import sys
import threading

import gymnasium as gym
import numpy as np
import pytest
import unplugged
from equality import sync_env
from learning_loop import Learner, Policy, learn, make_envs
from tables import deep

import shmvec
from shmvec.cluster import Collector
from shmvec.cluster.actor_pool import ActorPool
from shmvec.cluster.backend import LocalBackend, Node
from shmvec.cluster.fragments import share_cores
from shmvec.exchange import AutoresetMode


def collector(make_envs=make_envs, make_policy=Policy, **options):
    options = {"fragment_length": 16, "local": True, **options}
    return Collector(make_envs, make_policy, **options)


def by_hand(count, length, num_envs, seed, weights, mode):
    """Fragments of a runner, made with Gymnasium's class and copies of everything."""
    envs = sync_env([lambda: gym.make("CartPole-v1")] * num_envs, mode)
    policy = Policy(seed)
    observations, _ = envs.reset(seed=seed)
    none = np.zeros(num_envs, bool)
    last = observations, np.zeros(num_envs), none, none
    over, first = none, ~none
    for index in range(count):
        if index in weights:
            policy.set_weights({"layer": weights[index]})
        rows, said = [last], []
        for _ in range(length):
            if first.any():
                policy.reset(np.flatnonzero(first))
            actions, extras = policy(last[0], np.arange(num_envs))
            *last, infos = envs.step(actions)
            first = over
            over = last[2] | last[3]
            if mode is AutoresetMode.SAME_STEP:
                first = over
            rows.append(last)
            said.append((actions, extras, infos))
        yield rows, said
    envs.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, *deep(AutoresetMode.SAME_STEP)])
def test_a_fragment_is_what_a_loop_over_step_sees(mode):
    weights = {1: np.array([[0.5, 0.1], [1.0, 0.0], [2.0, -1.0], [0.3, 0.2]])}
    with collector(lambda: make_envs(autoreset_mode=mode), in_flight=1, fragment_length=40) as made:
        fragments = [next(made)]
        made.set_weights({"layer": weights[1]})
        fragments += [next(made), next(made)]
    seed = fragments[0].seed
    for index, (fragment, (rows, said)) in enumerate(
        zip(fragments, by_hand(3, 40, 3, seed, weights, mode), strict=True)
    ):
        kept = (
            fragment.observations,
            fragment.rewards,
            fragment.terminations,
            fragment.truncations,
        )
        for ours, theirs in zip(kept, zip(*rows, strict=True), strict=True):
            assert ours.dtype == np.stack(theirs).dtype
            np.testing.assert_array_equal(ours, theirs)
        actions, extras, infos = zip(*said, strict=True)
        np.testing.assert_array_equal(fragment.actions, actions)
        assert list(fragment.extras) == ["logits", "episode"]
        for key, values in fragment.extras.items():
            np.testing.assert_array_equal(values, [each[key] for each in extras])
        assert [list(info) for info in fragment.infos] == [list(info) for info in infos]
        assert (fragment.runner, fragment.index, fragment.seed) == (0, index, seed)
        assert fragment.version == min(index, 1)
        ended = np.count_nonzero((fragment.terminations | fragment.truncations)[:-1])
        resets = ended if mode is AutoresetMode.NEXT_STEP else 0
        assert ended > 0
        assert fragment.steps == fragment.valid.sum() == 40 * 3 - resets


@pytest.mark.deep
def test_fragments_of_dicts_and_tuples():
    class Nested(gym.Env):
        observation_space = gym.spaces.Dict(
            x=gym.spaces.Box(0, 9, (2,), np.float32), y=gym.spaces.Tuple([gym.spaces.Discrete(9)])
        )
        action_space = gym.spaces.Tuple([gym.spaces.Discrete(9)])

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return {"x": np.zeros(2, np.float32), "y": (0,)}, {}

        def step(self, action):
            value = int(action[0])
            return {"x": np.full(2, value, np.float32), "y": (value,)}, 1.0, False, False, {}

    def make():
        return shmvec.ShmVectorEnv([Nested] * 2, num_workers=1)

    def make_policy(seed):
        return lambda observations, env_ids: ((observations["y"][0] + 1 + env_ids,), {})

    with collector(make, make_policy, fragment_length=3) as made:
        fragment = next(made)
    assert fragment.observations["x"][:, 1, 0].tolist() == [0, 2, 4, 6]
    assert fragment.observations["y"][0].tolist() == [[0, 0], [1, 2], [2, 4], [3, 6]]
    assert fragment.actions[0].tolist() == [[1, 2], [2, 4], [3, 6]]
    assert fragment.nbytes == 4 * 2 * (8 + 8) + 3 * 2 * 8 + 4 * 2 * (8 + 1 + 1)


def test_turns_and_versions():
    """Each turn is made with the weights that were set when it was asked for."""
    with collector(num_runners=2, in_flight=2, fragment_length=4) as made:
        seen = []
        for _ in range(10):
            fragment = next(made)
            seen.append((fragment.runner, fragment.index, fragment.version))
            made.set_weights(Learner().weights)
        stats = made.stats()
    asked = [0, 0, 2, 4, 6]  # before the first, and whenever a turn of two was over
    assert seen == [(runner, turn, asked[turn]) for turn in range(5) for runner in range(2)]
    assert (stats.fragments, stats.version, stats.started, stats.lost) == (10, 10, 2, 0)
    assert stats.lag == np.mean([0, 1, 2, 3, 2, 3, 2, 3, 2, 3])
    assert [runner.fragments for runner in stats.runners] == [5, 5]
    assert sum(runner.steps for runner in stats.runners) == stats.steps
    assert stats.runners[0].steps_per_second > 0


def test_a_run_is_the_same_each_time_whatever_the_workers():
    def run(num_workers, seed=1):
        make = lambda: make_envs(num_workers=num_workers)  # noqa: E731
        with collector(make, num_runners=2, seed=seed) as made:
            return learn(made, 6)

    assert run(0) == run(2)
    assert run(0) != run(0, seed=2)


@pytest.mark.deep
def test_each_runner_has_seeds_of_its_own():
    with collector(num_runners=3, fragment_length=1) as made:
        seeds = [next(made).seed for _ in range(3)]
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**31 - 2**16 for seed in seeds)
    apart = abs(np.subtract.outer(seeds, seeds)) + 2**16 * np.eye(3, dtype=int)
    assert apart.min() >= 2**16


@pytest.mark.deep
def test_fragments_can_only_be_read_and_outlive_all():
    with collector() as made:
        first = next(made)
        before = first.observations.copy()
        for _ in range(4):
            next(made)
    np.testing.assert_array_equal(first.observations, before)
    with pytest.raises(ValueError, match="read-only"):
        first.rewards[0] = 1


@pytest.mark.deep
def test_weights_are_taken_as_they_are_when_they_are_set():
    weights = Learner().weights
    with collector(in_flight=1) as made:
        made.set_weights(weights)
        weights["layer"] += 1
        assert not next(made).extras["logits"].any()


@pytest.mark.deep
def test_what_is_closed_is_closed():
    with collector() as made:
        next(made)
    made.close()
    for call in (lambda: next(made), lambda: made.set_weights({})):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.deep
def test_what_is_closed_in_the_middle_of_a_call_says_so(monkeypatch):
    made = collector()
    next(made)
    ready, wait = LocalBackend.ready, ActorPool.wait
    closed, places = [], []

    def noted(pool, waiting):
        places.extend(waiting)
        return wait(pool, waiting)

    def close_first(backend, calls, timeout):
        if not closed:  # else it is close() that waits
            closed.append(True)
            made.close()  # as a signal's handler, or another thread, does
        return ready(backend, calls, timeout)

    def lose(backend, calls):
        for place in places:
            place.actor = None

    monkeypatch.setattr(ActorPool, "wait", noted)
    monkeypatch.setattr(LocalBackend, "ready", close_first)
    monkeypatch.setattr(LocalBackend, "cancel", lose)
    with pytest.raises(RuntimeError, match="this collector is closed"):
        next(made)


@pytest.mark.deep
def test_the_log_says_what_has_started(caplog):
    with caplog.at_level("INFO", "shmvec.cluster"), collector() as made:
        next(made)
    assert "runner 0, on this process, has started" in caplog.text


@pytest.mark.deep
def test_what_ends_the_block_is_not_hidden_by_what_an_env_raises_then(caplog):
    class Env(gym.Wrapper):
        def close(self):
            raise ArithmeticError("no end")

    def make():
        return shmvec.ShmVectorEnv([lambda: Env(gym.make("CartPole-v1"))], num_workers=1)

    with pytest.raises(LookupError, match="the learner's"), collector(make):
        raise LookupError("the learner's")
    assert "no end" in caplog.text
    with pytest.raises(ArithmeticError, match="no end"), collector(make):
        pass


@pytest.mark.deep
def test_a_fragment_that_is_broken_off_is_lost_with_its_runner(caplog):
    """What follows would not begin where the last one ended: another runner goes on."""

    def make_policy(seed):
        calls = iter(range(99))

        def policy(observations, env_ids):
            if seed == first and next(calls) == 6:
                raise KeyboardInterrupt
            return np.zeros(3, int)

        return policy

    with collector(num_runners=1) as made:
        first = next(made).seed
    with collector(make_policy=make_policy, fragment_length=4) as made:
        assert next(made).runner == 0
        with pytest.raises(KeyboardInterrupt):
            next(made)
        fragments = [next(made) for _ in range(2)]
    assert [(each.runner, each.index) for each in fragments] == [(1, 0), (1, 1)]
    assert "Ctrl-C has interrupted" in caplog.text


@pytest.mark.deep
def test_a_node_where_no_runner_lives_ends_what_is_ordered(monkeypatch):
    """What comes by turns would not be the same without it."""

    class Nodes(LocalBackend):
        def __init__(self, options):
            pass

        def nodes(self):
            return [Node(name, name, 1.0, 0.0) for name in "ab"]

    result = LocalBackend.result

    def lost(backend, call):
        if call.args[0].name != "runner 0":
            unplugged.lost(backend, call)
        return result(backend, call)

    monkeypatch.setattr("shmvec.cluster.actor_pool.RayBackend", Nodes)
    with collector(local=False, ordered=True) as made:
        next(made)
        monkeypatch.setattr(LocalBackend, "result", lost)
        with pytest.raises(RuntimeError, match=r"lost one after the other, .*: it was unplugged"):
            next(made)


@pytest.mark.deep
@pytest.mark.parametrize("ordered", [False, True])
def test_runners_that_are_lost_as_they_start_are_started_elsewhere(monkeypatch, caplog, ordered):
    monkeypatch.setattr("shmvec.cluster.actor_pool.RayBackend", unplugged.Nodes)
    with collector(local=False, ordered=ordered) as made:
        assert unplugged.TRIED == [*"abbb"]
        assert [next(made).runner for _ in range(2)] == [0, 0]
    assert "no runner is started on node b again" in caplog.text
    with pytest.raises(
        RuntimeError, match=r"3 runners were lost one .*, the last one on a node .*: it was unpl"
    ):
        collector(local=False, num_runners=1)


@pytest.mark.deep
@pytest.mark.parametrize("ordered", [False, True])
def test_ctrl_c_as_a_runner_is_lost_leaves_its_place_to_another(monkeypatch, ordered):
    def ends(backend, actor):
        monkeypatch.undo()
        backend.end(actor)
        raise KeyboardInterrupt

    monkeypatch.setattr("shmvec.cluster.actor_pool.RayBackend", lambda options: LocalBackend())
    with collector(local=False, ordered=ordered) as made:
        next(made)
        monkeypatch.setattr(LocalBackend, "result", unplugged.lost)
        monkeypatch.setattr(LocalBackend, "end", ends)
        with pytest.raises(KeyboardInterrupt):
            next(made)
        assert next(made).runner == 1


@pytest.mark.deep
def test_what_is_dropped_ends_at_once(monkeypatch):
    """Else an idle process of Ray's would keep runners, and their CPUs, until it ends."""
    ended, end = [], LocalBackend.end
    monkeypatch.setattr(LocalBackend, "end", lambda *args: (ended.append(args[1]), end(*args)))
    gc.disable()
    try:
        made = collector(num_runners=2)
        next(made)
        del made
        assert len(ended) == 2
    finally:
        gc.enable()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("options", "cpus"),
    [
        ({}, [8, 3]),
        ({"cpus_per_runner": 3}, [3, 3, 3]),
        ({"cpus_per_runner": 0.1}, [0.1] * 110),
        ({"gpus_per_runner": 0.5}, [2, 2, 2, 2]),
        ({"gpus_per_runner": 2}, [8]),
        ({"cpus_per_runner": 3, "gpus_per_runner": 1}, [3, 3]),
    ],
)
def test_shares_of_nodes(monkeypatch, options, cpus):
    asked = []

    class Enough(Exception):
        """All were begun."""

    class Nodes(LocalBackend):
        def __init__(self, options):
            pass

        def nodes(self):
            return [Node("a", "a", 8.0, 2.0), Node("b", "b", 3.0, 0.0)]

        def start(self, name, node, cpus, gpus):
            asked.append(cpus)
            return super().start(name, node, cpus, gpus)

        def ready(self, tickets, timeout):
            raise Enough

    monkeypatch.setattr("shmvec.cluster.actor_pool.RayBackend", Nodes)
    with pytest.raises(Enough):
        collector(local=False, **options)
    assert asked == cpus


# ---- bad input -------------------------------------------------------------------------------


def unpicklable():
    file = open("/dev/null")  # noqa: SIM115
    try:
        return lambda seed=None, env_ids=None: file
    finally:
        file.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fragment_length": 0}, ValueError, "fragment_length"),
        *deep(
            ({"make_envs": "CartPole-v1"}, TypeError, "make_envs must be callable"),
            ({"make_policy": None}, TypeError, "make_policy must be callable"),
            ({"make_policy": unpicklable()}, TypeError, "make_policy cannot be pickled"),
            ({"make_envs": lambda: 1}, TypeError, r"make_envs\(\) must return a ShmVectorEnv, and"),
            ({"make_policy": lambda seed: 1}, TypeError, r"make_policy\(seed\) must return a "),
            ({"num_runners": 0}, ValueError, "num_runners"),
            ({"in_flight": 0}, ValueError, "in_flight"),
            ({"cpus_per_runner": 0}, ValueError, "cpus_per_runner must be positive"),
            ({"pin_runners": True}, ValueError, "pin_runners needs runners that stay on "),
            ({"gpus_per_runner": -1}, ValueError, "gpus_per_runner must not be negative"),
        ),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        collector(**options)


@pytest.mark.deep
def test_spaces_that_differ():
    made = iter(["CartPole-v1", "Acrobot-v1"])

    def make():
        return make_envs(env_id=next(made))

    # One function for both: a runner in this process gets a copy, so the iterator is outside.
    import builtins

    builtins.made_by_test = make
    try:
        with pytest.raises(RuntimeError, match="runner 1, on this process, have the spaces"):
            collector(lambda: __import__("builtins").made_by_test(), num_runners=2)
    finally:
        del builtins.made_by_test


@pytest.mark.deep
@pytest.mark.parametrize(
    ("extras", "message"),
    [
        (lambda t: {"value": np.zeros(2)}, r"the extra 'value' has shape \(2,\)"),
        (
            lambda t: {"value": np.zeros((3, 1 + t))},
            r"'value' of float64 \(2,\) for an env, and of ",
        ),
        (
            lambda t: {"value": np.zeros(3)} if t else {},
            r"has returned extras \['value'\], and \[\] ",
        ),
    ],
)
def test_bad_extras(extras, message):
    def make_policy(seed):
        calls = iter(range(99))
        return lambda observations, env_ids: (np.zeros(3, int), extras(next(calls)))

    with collector(make_policy=make_policy) as made, pytest.raises(ValueError, match=message):
        next(made)


@pytest.mark.deep
def test_what_a_policy_raises_ends_the_collector():
    def make_policy(seed):
        def policy(observations, env_ids):
            raise ArithmeticError("no idea")

        return policy

    with collector(make_policy=make_policy) as made:
        with pytest.raises(ArithmeticError, match="no idea"):
            next(made)
        with pytest.raises(RuntimeError, match="closed"):
            next(made)


@pytest.mark.deep
def test_weights_that_nobody_takes():
    def make_policy(seed):
        return lambda observations, env_ids: np.zeros(3, int)

    with collector(make_policy=make_policy) as made:
        with pytest.raises(TypeError, match=r"no method set_weights\(weights\)"):
            made.set_weights({})
        assert next(made).extras == {}


@pytest.mark.deep
def test_weights_that_cannot_be_pickled():
    with collector() as made:
        with pytest.raises(TypeError, match="the weights cannot be pickled"):
            made.set_weights({"layer": threading.Lock()})
        assert (next(made).version, made.version) == (0, 0)


@pytest.mark.deep
def test_disabled_autoreset_is_refused():
    with pytest.raises(ValueError, match="NEXT_STEP"):
        next(collector(lambda: make_envs(autoreset_mode=AutoresetMode.DISABLED)))


def test_ray_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ImportError, match=r"pip install 'shmvec\[cluster\]'. local=True needs none"
    ):
        collector(local=False)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"time_limit": 1.0}, ValueError, "on a cluster there is no time_limit"),
        ({"video_folder": "videos"}, ValueError, "on a cluster there is no video_folder"),
        ({"time_limit": 1.0, "retries": 1}, ValueError, "on a cluster there is no time_limit"),
        ({"policy": unpicklable()}, TypeError, "policy cannot be pickled"),
        ({"cluster": False, "actor_options": {}}, ValueError, "they need cluster=True"),
    ],
)
def test_bad_arguments_of_an_evaluation_on_a_cluster(options, error, message):
    options = {"policy": lambda observations, env_ids: 0, "cluster": True, **options}
    with pytest.raises(error, match=message):
        shmvec.evaluate("CartPole-v1", episodes=1, **options)


@pytest.mark.deep
def test_a_vector_env_is_not_sent():
    envs = make_envs(num_workers=0)
    with pytest.raises(ValueError, match="a vector env cannot be sent to other nodes"):
        shmvec.evaluate(envs, lambda observations, env_ids: 0, cluster=True)
    envs.close()


@pytest.mark.deep
def test_shares_of_a_machine_are_of_one_numa_node_if_they_fit(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(11)))
    for node, cores in enumerate(["0-2,6-8", "3-5,9-11"]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    shares = [share_cores(share, 2, tmp_path) for share in range(5)]
    assert shares == [{0, 1}, {2, 6}, {7, 8}, {3, 4}, {5, 9}]
    assert [share_cores(share, 4, tmp_path) for share in range(2)] == [
        {0, 1, 2, 6},
        {3, 4, 5, 9},
    ]
    for share, count in ((5, 2), (2, 4)):
        with pytest.raises(ValueError, match=f"{count} cores for share {share} .* has 11 usable"):
            share_cores(share, count, tmp_path)
    assert share_cores(0, 1, tmp_path / "none") == {0}

"""Tianshou's vector env: each row of its interface. Tianshou need not be installed."""

import inspect
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import gymnasium as gym
import numpy as np
import pytest
from equality import same
from gymnasium import spaces
from gymnasium.error import NoAsyncCallError
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_script
from tables import deep
from tianshou_or_stand_in import ShmemVectorEnv, SubprocVectorEnv, TianshouVectorEnv, tianshou
from walks import GATED, LEFT, RIGHT, Gate, Thing, Walk, walks

from shmvec import FaultPolicy

WORKERS = pytest.mark.parametrize("num_workers", [2, *deep(0)])


def vector_env(env_fns, **options):
    return closing(TianshouVectorEnv(env_fns, **options))


@contextmanager
def gated(sizes=(100,) * 4, **options):
    """A vector env of which each env has a gate, and the gates; each env is a process."""
    gates = [Gate() for _ in sizes]
    fns = [lambda size=size, gate=gate: Walk(size, gate=gate)
           for size, gate in zip(sizes, gates, strict=True)]  # fmt: skip
    envs = TianshouVectorEnv(fns, context="fork", **options)
    try:
        yield envs, gates
    finally:
        for gate in gates:
            gate.set()
        envs.close()


def ids_of(infos):
    return [info["env_id"] for info in infos]


# ---- the interface, row by row -----------------------------------------------------------------


@pytest.mark.parametrize("num_workers, wait_num", [(2, None), *deep((2, 2), (0, None))])
def test_reset_seed_options_and_other_arguments(num_workers, wait_num):
    options = {"num_workers": num_workers, "wait_num": wait_num}
    with vector_env(walks(kind="dict"), **options) as envs:
        alone = Walk(5, "dict").reset(seed=7)[0]["rand"]
        observations, _ = envs.reset(seed=7)  # every env's, as in Tianshou
        assert [one["rand"] for one in observations] == [alone] * 4
        observations, _ = envs.reset([3, 1], seed=[7, 8], options={"start": 1})
        assert observations[0]["rand"] == alone and observations[1]["rand"] != alone
        assert [one["index"].item() for one in observations] == [1, 1]
        envs.reset([0], speed=3)
        envs.reset(env_id=[0], seed=5, options={"start": 0}, speed=4)
        assert envs.get_env_attr("received", 0)[0][1:] == [
            (None, None, {"speed": 3}),
            (5, {"start": 0}, {"speed": 4}),
        ]


class Bare(Walk):
    def reset(self):
        return super().reset()


@pytest.mark.deep
def test_reset_passes_nothing_that_was_not_given():
    with vector_env([lambda: Bare(3)] * 2) as envs:
        assert envs.reset()[0].shape == (2, 1)
        assert envs.reset([1])[0].shape == (1, 1)


@WORKERS
def test_step_action_id(num_workers):
    with vector_env(walks(), num_workers=num_workers) as envs:
        for ids in (None, [0, 1, 2, 3], [2, 0, 1], np.array([3]), 1):
            envs.reset()
            envs.step([RIGHT] * 4)
            chosen = np.atleast_1d(range(4) if ids is None else ids).tolist()
            actions = [LEFT if env == 3 else RIGHT for env in chosen]
            observations, rewards, terminated, truncated, infos = envs.step(actions, ids)
            assert observations[:, 0].tolist() == [0 if env == 3 else 2 for env in chosen]
            assert rewards.dtype == np.float64 and terminated.dtype == truncated.dtype == np.bool_
            assert rewards.tolist() == [float(env == 0) for env in chosen]
            assert terminated.tolist() == [env == 0 for env in chosen]
            assert not truncated.any()
            assert ids_of(infos) == chosen


@pytest.mark.deep
@WORKERS
def test_actions_of_many_types(num_workers):
    with vector_env(walks((99,) * 4), num_workers=num_workers) as envs:
        envs.reset()
        for actions in (
            np.ones(4, np.int64),
            np.ones(4, np.int8),
            np.ones(4),  # as policies for Tianshou return them
            [1, 1, 1, 1],
            (1, 1, 1, 1),
            [np.int64(1)] * 4,
            [np.float32(1)] * 4,
        ):
            envs.step(actions)
            envs.step(actions[:2], [3, 1])
        received = envs.get_env_attr("received")
        assert [len(one) for one in received] == [8, 15, 8, 15]
        assert all(action == RIGHT for one in received for action in one[1:])


class Echo(gym.Env):
    """Its info is the action."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(9)})

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {"action": [action["a"], action["b"]]}


@pytest.mark.deep
@pytest.mark.parametrize("share_memory", [True, False])
def test_actions_that_are_dicts(share_memory):
    with vector_env([Echo] * 3, share_memory=share_memory) as envs:
        envs.reset()
        actions = [{"a": np.full(2, 0.1 * env, np.float32), "b": env} for env in range(3)]
        infos = envs.step(actions)[4]
        assert [info["action"][1] for info in infos] == [0, 1, 2]
        np.testing.assert_array_equal(infos[2]["action"][0], actions[2]["a"])


class Seeded(Walk):
    def seed(self, seed):
        self.given = seed
        return [seed, 0]


@WORKERS
def test_seed(num_workers):
    with vector_env(walks(kind="dict"), num_workers=num_workers) as envs:
        assert envs.seed(5) == [[5], [6], [7], [8]]
        first = [space.sample() for space in envs.action_space]
        random = envs.get_env_attr("np_random")
        assert envs.seed([5, 6, 7, 8]) == [[5], [6], [7], [8]]
        assert [space.sample() for space in envs.action_space] == first
        alone = Walk(3, "dict")
        alone.reset(seed=6)
        assert random[1].random() == alone.np_random.random()
        assert envs.seed() == [None] * 4
        with pytest.raises(ValueError, match="length must match"):
            envs.seed([1, 2, 3])
    with vector_env([lambda: Seeded(3)] * 2, num_workers=min(num_workers, 2)) as envs:
        assert envs.seed(1) == [[1, 0], [2, 0]]
        assert envs.get_env_attr("given") == [1, 2]
        assert envs.get_env_attr("received") == [[], []]  # not reset


@WORKERS
def test_get_env_attr_and_set_env_attr(num_workers):
    with vector_env(walks(), num_workers=num_workers) as envs:
        assert envs.get_env_attr("size") == [2, 3, 4, 5]
        assert envs.get_env_attr("size", id=0) == [2]
        assert envs.get_env_attr("size", id=[2, 0, 1]) == [4, 2, 3]
        envs.set_env_attr("size", 0)
        assert envs.get_env_attr("size") == [0] * 4
        envs.set_env_attr("size", 1, 0)
        envs.set_env_attr("size", [2, 2], [1, 3])  # a list is a value as any other
        assert envs.get_env_attr("size") == [1, [2, 2], 0, [2, 2]]
        with pytest.raises(AttributeError, match="nothing"):
            envs.get_env_attr("nothing")
        assert envs.get_env_attr("size", 2) == [0]


@pytest.mark.deep
def test_attributes_are_found_in_wrappers_and_set_in_the_innermost_env():
    def make():
        return gym.wrappers.OrderEnforcing(gym.wrappers.TimeLimit(Walk(3), 7))

    with vector_env([make, make], num_workers=0) as envs:
        assert envs.get_env_attr("_max_episode_steps") == [7, 7]
        envs.set_env_attr("gift", 5)
        assert envs.get_env_attr("gift") == [5, 5]
        assert [env.gift for env in envs.get_env_attr("unwrapped")] == [5, 5]


@pytest.mark.deep
def test_spaces_metadata_and_spec_are_lists():
    with vector_env(walks()) as envs:
        assert envs.action_space == [spaces.Discrete(3)] * 4
        assert [space.high.item() for space in envs.observation_space] == [2, 3, 4, 5]
        assert [one["name"] for one in envs.metadata] == ["walk"] * 4
        assert envs.spec == [None] * 4
        assert envs.action_space[0] is envs.action_space[0]


@pytest.mark.deep
@WORKERS
def test_render(num_workers):
    with vector_env(walks(), num_workers=num_workers) as envs:
        envs.reset()
        frames = envs.render()
        assert isinstance(frames, list)
        assert [frame[0, 0, 0] for frame in frames] == [2, 3, 4, 5]
        assert [frame[0, 0, 0] for frame in envs.render(scale=2)] == [4, 6, 8, 10]


@pytest.mark.deep
def test_what_is_closed_answers_nothing():
    envs = TianshouVectorEnv(walks(), num_workers=0)
    envs.close()
    assert envs.is_closed
    for call in (
        envs.reset,
        envs.render,
        envs.seed,
        lambda: envs.get_env_attr("size"),
        lambda: envs.set_env_attr("size", 1),
    ):
        with pytest.raises(AssertionError, match="after close"):
            call()


def test_infos_are_object_arrays_of_what_the_envs_returned():
    with vector_env(walks()) as envs:
        _, infos = envs.reset()
        assert infos.dtype == object and infos.shape == (4,)
        assert [same(info, {"size": size}) for info, size in zip(infos, (2, 3, 4, 5), strict=True)]
        envs.step([RIGHT] * 4)
        for ids in (None, [1, 3]):  # an int beside a float stays an int
            infos = envs.step([RIGHT] * (2 if ids else 4), ids)[4]
            assert infos.dtype == object and infos.shape == (2 if ids else 4,)
            for info in infos:
                over = info["env_id"] == (1 if ids else 0)
                value = 1 if over else 0.5
                size = info["env_id"] + 2
                expected = {"size": size, "flag": np.bool_(over), "value": value}
                assert same(info, {**expected, "env_id": info["env_id"]})
            envs.reset([0] if ids is None else [1])


@pytest.mark.deep
def test_workers_that_are_not_forked_load_neither_tianshou_nor_torch():
    """In a program of its own: a fork server that is kept has what it was asked for before."""
    program = run_script(f"""
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from contextlib import closing
        from tianshou_or_stand_in import TianshouVectorEnv
        from walks import RIGHT, walks

        with closing(TianshouVectorEnv(walks((3, 3)), context="forkserver", num_workers=2)) as envs:
            envs.reset(seed=1)
            assert envs.step([RIGHT] * 2)[0].tolist() == [[1], [1]]
            assert envs.get_env_attr("loaded") == [[], []], envs.get_env_attr("loaded")
    """)
    said = program.communicate()[1]
    assert program.returncode == 0, said


# ---- observations and rewards of many kinds ----------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize("wait_num", [None, 3])
def test_observations_of_different_shapes_and_objects(wait_num):
    options = {"wait_num": wait_num, "share_memory": False}
    with vector_env(walks(kind="growing"), **options) as envs:
        observations, _ = envs.reset()
        assert observations.dtype == object
        assert [one.shape for one in observations] == [(2, 0), (3, 0), (4, 0), (5, 0)]
        observations, *_, infos = envs.step(np.ones(4, np.int64))
        assert [one.shape for one in observations] == [(env + 2, 1) for env in ids_of(infos)]
    with vector_env(walks((5, 5), kind="growing"), share_memory=False) as envs:
        envs.reset(seed=1)
        assert envs.step([RIGHT], [1])[0].shape == (1, 5, 1)
        assert [one.shape for one in envs.step([RIGHT] * 2)[0]] == [(5, 1), (5, 2)]
    with vector_env(walks(kind="object"), **options) as envs:
        assert list(envs.reset()[0]) == [Thing(size, 0) for size in (2, 3, 4, 5)]
        observations, *_, infos = envs.step([RIGHT] * 4)
        assert list(observations) == [Thing(env + 2, 1) for env in ids_of(infos)]


@pytest.mark.deep
def test_spaces_that_do_not_fit_together_need_messages():
    fns = [lambda: Walk(2), lambda: Walk(2, "image")]
    with pytest.raises((AssertionError, ValueError), match="dtypes to be equal") as raised:
        TianshouVectorEnv(fns)
    assert "share_memory=False" in "".join(raised.value.__notes__)
    with vector_env(fns, share_memory=False) as envs:
        assert [one.shape for one in envs.reset()[0]] == [(1,), (2, 3, 3)]
        assert [one.shape for one in envs.observation_space] == [(1,), (2, 3, 3)]


@pytest.mark.deep
@pytest.mark.parametrize("cls", [SubprocVectorEnv, ShmemVectorEnv])
def test_tianshous_names_have_its_defaults(cls):
    if tianshou is not None:
        theirs = inspect.signature(getattr(tianshou.env, cls.__name__)).parameters
        ours = inspect.signature(cls).parameters
        assert {name: one.default for name, one in theirs.items()} == {
            name: ours[name].default for name in theirs
        }
    shared = cls is ShmemVectorEnv
    fns = walks((3, 5), kind="growing")
    if shared:
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            cls(fns)
        fns = walks((3, 5))
    with closing(cls(fns, wait_num=1, num_workers=2)) as envs:
        assert isinstance(envs, TianshouVectorEnv) and envs.is_async
        assert envs.envs.shared_memory is shared
        assert len(envs.reset()[0]) == 2


@pytest.mark.deep
def test_tuples_are_refused_as_observations():
    with pytest.raises(TypeError, match="arrays or dicts"):
        TianshouVectorEnv(walks(kind="tuple"))


class Shared(Walk):
    """A reward for each of several agents."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, [reward, 2 * reward, 0.5], *rest


@pytest.mark.deep
@pytest.mark.parametrize("wait_num", [None, 2])
def test_rewards_of_many_agents(wait_num):
    fns = [lambda: Shared(1), lambda: Shared(3)]
    with vector_env(fns, wait_num=wait_num) as envs:
        envs.reset()
        _, rewards, terminated, _, infos = envs.step([RIGHT] * 2)
        assert terminated.tolist() == [True, False]
        np.testing.assert_array_equal(rewards, [[1, 2, 0.5], [0, 0, 0.5]])
        assert "shmvec.reward" not in infos[0]
        np.testing.assert_array_equal(envs.step([RIGHT], [1])[1], [[0, 0, 0.5]])


# ---- asynchronous ------------------------------------------------------------------------------


@pytest.mark.deep
def test_is_async():
    for options, expected in (
        ({}, False),
        ({"wait_num": 4}, False),
        ({"wait_num": 3}, True),
        ({"timeout": 1.0}, True),
        ({"wait_num": 4, "timeout": 1}, True),
    ):
        with vector_env(walks(), num_workers=0, **options) as envs:
            assert envs.is_async is expected
            assert envs.wait_num == options.get("wait_num", 4)
            assert envs.timeout == options.get("timeout")


def test_wait_num():
    with gated(wait_num=2) as (envs, gates):
        assert envs.envs.num_workers == 4  # none waits for another's step
        assert envs.ready_id == [0, 1, 2, 3] and envs.waiting_id == []
        envs.reset()
        observations, *_, infos = envs.step([RIGHT, GATED, RIGHT, GATED])
        assert sorted(ids_of(infos)) == [0, 2]
        assert observations.shape == (2, 1)
        assert envs.waiting_id == [1, 3] and sorted(envs.ready_id) == [0, 2]
        gates[3].set()
        observations, *_, infos = envs.step([RIGHT], [0])  # two of the three that step now
        assert sorted(ids_of(infos)) == [0, 3]
        assert envs.waiting_id == [1]
        assert sorted(observations[:, 0].tolist()) == [1, 2]
        gates[1].set()
        *_, infos = envs.step(None)
        assert ids_of(infos) == [1]
        assert sorted(envs.ready_id) == [0, 1, 2, 3]


def test_timeout():
    with gated(timeout=0.2) as (envs, gates):
        envs.reset()
        *_, infos = envs.step([RIGHT, GATED, GATED, RIGHT])
        found = ids_of(infos)
        while len(found) < 2:  # on a busy machine
            *_, infos = envs.step(None)
            found += ids_of(infos)
        assert sorted(found) == [0, 3]
        gates[2].set()
        *_, infos = envs.step(None)
        assert ids_of(infos) == [2]


@pytest.mark.deep
def test_the_envs_of_which_results_are_waited_for_can_be_named():
    """Without that an AsyncCollector could not reset envs while two of them are stepping."""
    with gated(wait_num=1) as (envs, gates):
        envs.reset()
        envs.step([RIGHT, GATED, GATED, GATED])
        assert envs.waiting_id == [1, 2, 3]
        for gate in gates:
            gate.set()
        *_, infos = envs.step(None, [3, 1])
        assert ids_of(infos) == [3, 1]
        assert envs.waiting_id == [2]
        *_, infos = envs.step(None, envs.waiting_id)
        assert ids_of(infos) == [2]
        with pytest.raises(ValueError, match="not all stepping"):
            envs.step(None, [2])
        with pytest.raises(NoAsyncCallError):
            envs.step(None)
        assert envs.reset()[0].shape == (4, 1)


@pytest.mark.deep
def test_envs_that_are_stepping_cannot_be_asked():
    with gated(wait_num=1) as (envs, _):
        envs.reset()
        envs.step([RIGHT, GATED, GATED, GATED])
        for call in (
            lambda: envs.reset(),
            lambda: envs.reset([1]),
            lambda: envs.step([RIGHT], [2]),
            lambda: envs.step([RIGHT] * 4),
            lambda: envs.get_env_attr("size"),
            lambda: envs.set_env_attr("size", 1, 3),
            lambda: envs.seed(1),
        ):
            with pytest.raises(AssertionError, match="stepping now"):
                call()
        with pytest.raises(RuntimeError, match="cannot be rendered"):
            envs.render()
        assert len(envs.action_space) == 4  # which are known


@pytest.mark.deep
def test_others_can_be_reset_and_asked_meanwhile():
    with gated(wait_num=2) as (envs, gates):
        envs.reset()
        envs.step([RIGHT, GATED, RIGHT, GATED])
        observations, infos = envs.reset([2, 0])
        assert observations.shape == (2, 1) and [info["size"] for info in infos] == [100, 100]
        gates[1].set()
        gates[3].set()
        assert envs.get_env_attr("index", [2, 0]) == [0, 0]
        envs.set_env_attr("index", 7, [0])
        assert envs.waiting_id == [1, 3]  # their results are kept
        observations, *_, infos = envs.step([GATED], [0])
        assert sorted(ids_of(infos)) == [1, 3]
        assert observations[:, 0].tolist() == [1, 1]
        gates[0].set()
        observations, *_, infos = envs.step(None)
        assert ids_of(infos) == [0] and observations.tolist() == [[8]]


def test_an_env_that_raises_can_be_reset_while_others_step():
    with gated((1, 100, 100, 100), wait_num=1) as (envs, gates):
        envs.reset()
        envs.set_env_attr("index", 1, 0)  # its next step is one after the end
        with pytest.raises(AssertionError, match="after the end"):
            envs.step([RIGHT, GATED], [0, 1])
        assert envs.waiting_id == [1] and 0 in envs.ready_id
        gates[1].set()
        *_, infos = envs.step(None)
        assert ids_of(infos) == [1]
        assert envs.reset([0])[0].tolist() == [[0]]


# ---- faults of the original --------------------------------------------------------------------


@pytest.mark.deep
def test_a_hung_env_is_restarted_if_the_policy_says_so():
    policy = FaultPolicy(on_timeout="restart", step_timeout=1.0)
    with gated((100, 100), faults=policy, num_workers=2) as (envs, _):
        envs.reset(seed=5)
        observations, _, terminated, truncated, infos = envs.step([RIGHT, GATED])
        assert truncated.tolist() == [False, True] and not terminated.any()
        assert infos[1]["fault"]["type"] == "EnvTimeoutError"
        assert "fault" not in infos[0]
        assert envs.reset([1])[0].tolist() == [[0]]
        _, _, _, truncated, infos = envs.step([GATED], [1])
        assert truncated.tolist() == [True] and infos[0]["fault"]["restarts"] == 2


@pytest.mark.parametrize(
    "num_workers, wait_num, kind",
    [(2, 2, "array"), *deep((2, None, "array"), (0, None, "dict"))],
)
def test_arrays_are_not_overwritten(kind, wait_num, num_workers):
    options = {"wait_num": wait_num, "num_workers": num_workers}
    with vector_env(walks((9,) * 4, kind=kind), **options) as envs:
        kept = [envs.reset(seed=1)[0], envs.reset([1, 2])[0]]
        kept += [envs.step([RIGHT] * 2, [1, 2])[:4]]
        before = str(kept)
        envs.step([LEFT], [1])
        envs.reset([1, 2] if wait_num is None else [1])
        if wait_num is not None:
            envs.step([RIGHT] * 2, [0, 3])
        assert str(kept) == before
    assert str(kept) == before


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize("num_workers, wait_num", [(0, None), (2, 2)])
def test_bad_input_is_refused_before_anything_is_sent(num_workers, wait_num):
    with vector_env(walks(), num_workers=num_workers, wait_num=wait_num) as envs:
        envs.reset()
        before = envs.get_env_attr("received")
        for call, error, message in (
            (lambda: envs.step([RIGHT] * 3), ValueError, "3 actions for 4"),
            (lambda: envs.step([RIGHT] * 4, [0, 1]), ValueError, "4 actions for 2"),
            (lambda: envs.step([RIGHT], [4]), ValueError, "0 to 3"),
            (lambda: envs.step([RIGHT], [-1]), ValueError, "0 to 3"),
            (lambda: envs.step([RIGHT] * 2, [1, 1]), ValueError, "twice"),
            (lambda: envs.step([RIGHT], [0.5]), TypeError, "integers"),
            (lambda: envs.step([0.5] * 4), TypeError, "dtype float64"),
            (lambda: envs.reset([7]), ValueError, "0 to 3"),
            (lambda: envs.reset([1, 2], seed=[1]), ValueError, "length"),
            (lambda: envs.reset(seed="a"), TypeError, "seed"),
            (lambda: envs.get_env_attr("size", [9]), ValueError, "0 to 3"),
            (lambda: envs.set_env_attr("size", 1, [1, 1]), ValueError, "twice"),
        ):
            with pytest.raises(error, match=message):
                call()
        assert envs.get_env_attr("received") == before
        assert envs.waiting_id == []
        if wait_num is None:
            with pytest.raises(ValueError, match="must not be None"):
                envs.step(None)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"wait_num": 0}, ValueError, "wait_num must be between 1 and 4"),
        *deep(
            ({"wait_num": 5}, ValueError, "wait_num"),
            ({"timeout": 0}, ValueError, "timeout"),
            ({"timeout": -1.0}, ValueError, "timeout"),
            ({"autoreset_mode": "NextStep"}, TypeError, "autoreset_mode"),
            ({"batch_size": 2, "copy": False}, TypeError, "batch_size, copy"),
            ({"num_workers": 9}, ValueError, "num_workers"),
            ({"nonsense": 9}, TypeError, "nonsense"),
        ),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        TianshouVectorEnv(walks(), **options)


# ---- against envs that are stepped alone -------------------------------------------------------


@pytest.mark.deep
def test_an_env_whose_episode_is_over_must_be_reset():
    with vector_env(walks((1, 2))) as envs:
        envs.reset()
        envs.step([RIGHT, RIGHT])
        for call in (lambda: envs.step([RIGHT, RIGHT]), lambda: envs.step([RIGHT], [0])):
            with pytest.raises(AssertionError):
                call()
        assert envs.get_env_attr("index") == [1, 1]
        envs.reset([0])
        assert envs.step([RIGHT, RIGHT])[2].tolist() == [True, True]


@pytest.mark.deep
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.sampled_from(["array", "dict", "nested"]),
    st.booleans(),
    st.integers(0, 5),
    st.none() | st.integers(1, 5),
    st.integers(0, 999),
)
def test_every_env_is_as_if_it_were_alone(
    sizes, kind, share_memory, num_workers, wait_num, random_seed
):
    num_envs = len(sizes)
    num_workers = min(num_workers, num_envs)
    wait_num = wait_num and min(wait_num, num_envs)
    random = Random(random_seed)  # which envs are ready, of which it chooses, is a matter of time
    options = {"share_memory": share_memory, "num_workers": num_workers, "wait_num": wait_num}
    alone = [make() for make in walks(sizes, kind=kind)]
    with vector_env(walks(sizes, kind=kind), **options) as envs:
        observations, infos = envs.reset(seed=3)
        for env, observation, info in zip(alone, observations, infos, strict=True):
            assert str((observation, info)) == str(env.reset(seed=3))
        actions = {}
        for _ in range(8):
            chosen = random.sample(envs.ready_id, random.randint(1, len(envs.ready_id)))
            given = random.choices([LEFT, RIGHT], k=len(chosen))
            actions.update(zip(chosen, given, strict=True))
            *results, infos = envs.step(given, chosen)
            returned = ids_of(infos)
            if wait_num is None:
                assert returned == chosen
            over = []
            for row, env in enumerate(returned):
                expected = alone[env].step(actions.pop(env))
                info = dict(infos[row])
                assert info.pop("env_id") == env
                assert str((*(part[row] for part in results), info)) == str(
                    (expected[0], np.float64(expected[1]), *map(np.bool_, expected[2:4]),
                     expected[4])
                )  # fmt: skip
                if expected[2]:
                    over.append(env)
            for env, observation, info in zip(over, *envs.reset(over), strict=True):
                assert str((observation, info)) == str(alone[env].reset())
        assert sorted(actions) == sorted(envs.waiting_id)


@pytest.mark.deep
def test_without_tianshou_the_error_says_what_to_install():
    code = """
        sys.modules["tianshou"] = None
        import shmvec
        assert not any(name.startswith("shmvec.adapters") for name in sys.modules)
        import shmvec.adapters.tianshou
    """
    errors = run_script(code).communicate()[1]
    assert "ImportError: shmvec.adapters.tianshou needs Tianshou: pip install tianshou" in errors

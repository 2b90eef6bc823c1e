"""Tianshou's own collectors and wrappers run on ours, and fill the same buffers."""

import warnings
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from equality import same
from gymnasium import spaces
from tianshou_or_stand_in import TianshouVectorEnv, tianshou
from walks import LEFT, RIGHT, walks

if tianshou is None:
    pytest.skip("Tianshou is not installed", allow_module_level=True)

pytestmark = pytest.mark.deep


def vector_env(env_fns, **options):
    return closing(TianshouVectorEnv(env_fns, **options))


def policy(need_state=False, random_actions=False):
    """A policy that looks at its observations, with or without a state."""
    import torch
    from tianshou.algorithm.algorithm_base import Policy
    from tianshou.data import Batch

    class Rights(Policy):
        def forward(self, batch, state=None, **kwargs):
            if need_state:
                state = np.zeros((len(batch.obs), 2)) if state is None else state + 1
            obs = batch.obs["index"] if isinstance(batch.obs, Batch) else batch.obs
            right = np.asarray(obs).reshape(len(obs), -1)[:, 0] * 7 % 3 < 2.5
            return Batch(act=right.astype(np.int64), state=state)

    rights = Rights(action_space=spaces.Discrete(3))
    assert isinstance(rights, torch.nn.Module)
    return rights


def buffer_of(envs, collector, **collect):
    """What a collector collects in two calls, as text."""
    from tianshou.data import VectorReplayBuffer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Tianshou
        buffer = VectorReplayBuffer(400, len(envs))
        collecting = collector(policy(collector.__name__.startswith("Async")), envs, buffer)
        collecting.reset()
        for _ in range(2):
            collecting.collect(**collect)
    return buffer


def contents(buffer):
    """Everything in a buffer: keys, dtypes and values."""
    batch = buffer[:]

    def tell(part):
        if hasattr(part, "get_keys"):
            return {key: tell(part[key]) for key in sorted(part.get_keys())}
        return part.dtype, part.shape, part.tolist()

    return tell(batch)


@pytest.mark.parametrize("kind", ["array", "dict"])
@pytest.mark.parametrize(
    "collect", [{"n_step": 20}, {"n_episode": 6}, {"n_episode": 3}, {"n_step": 20, "random": True}]
)
def test_the_collector_fills_the_same_buffers(kind, collect):
    from tianshou.data import Collector

    fns = walks(kind=kind)
    buffers = []
    for make in (
        tianshou.env.DummyVectorEnv,
        TianshouVectorEnv,
        lambda fns: TianshouVectorEnv(fns, num_workers=0),
        lambda fns: TianshouVectorEnv(fns, share_memory=False, num_workers=4),
    ):
        with closing(make(fns)) as envs:
            envs.seed(11)
            buffers.append(buffer_of(envs, Collector, **collect, gym_reset_kwargs={"seed": 4}))
    expected = contents(buffers[0])
    assert len(buffers[0]) >= 12
    for buffer in buffers[1:]:
        assert contents(buffer) == expected


def test_the_same_buffers_as_with_its_own_processes():
    from tianshou.data import Collector

    made = []
    for kind in (tianshou.env.SubprocVectorEnv, tianshou.env.ShmemVectorEnv, TianshouVectorEnv):
        with closing(kind([lambda: gym.make("CartPole-v1")] * 3)) as envs:
            envs.seed(3)
            made.append(contents(buffer_of(envs, Collector, n_step=60)))
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("options", [{"wait_num": 1}, {"wait_num": 3}, {"timeout": 0.01}])
@pytest.mark.parametrize("collect", [{"n_step": 30}, {"n_episode": 8}])
def test_the_async_collector_fills_each_envs_buffer_as_the_collector_does(options, collect):
    """How many steps each env makes is a matter of time; which, is not."""
    from tianshou.data import AsyncCollector, Collector

    with closing(tianshou.env.DummyVectorEnv(walks(kind="array"))) as envs:
        expected = buffer_of(envs, Collector, n_step=200)
    with vector_env(walks(kind="array"), **options) as envs:
        buffer = buffer_of(envs, AsyncCollector, **collect)
    assert len(buffer) >= 8
    for ours, theirs in zip(buffer.buffers, expected.buffers, strict=True):
        count = min(len(ours), len(theirs))
        for key in ("obs", "act", "rew", "terminated", "truncated", "obs_next"):
            parts = [getattr(one[:], key)[:count] for one in (ours, theirs)]
            np.testing.assert_array_equal(*parts, err_msg=key)


def test_the_async_collector_can_be_reset_while_several_envs_step():
    """With the original that is an AssertionError unless wait_num is one less than the envs."""
    from tianshou.data import AsyncCollector, VectorReplayBuffer

    with warnings.catch_warnings(), vector_env(walks((50,) * 4), wait_num=1) as envs:
        warnings.simplefilter("ignore")
        collector = AsyncCollector(policy(True), envs, VectorReplayBuffer(400, 4))
        collector.reset()
        for _ in range(5):
            collector.collect(n_step=7)
            collector.reset_env()
            assert envs.waiting_id == []


@pytest.mark.parametrize("wait_num", [None, 2])
def test_the_wrapper_that_normalises_observations(wait_num):
    from tianshou.env import VectorEnvNormObs

    actions = [RIGHT] * 4
    results = []
    for make in (tianshou.env.DummyVectorEnv, TianshouVectorEnv):
        with closing(VectorEnvNormObs(make(walks((20,) * 4)))) as envs:
            assert len(envs) == 4 and envs.action_space == [spaces.Discrete(3)] * 4
            results.append([envs.reset(seed=1)[0], *(envs.step(actions)[0] for _ in range(5))])
            results.append(envs.get_obs_rms().mean)
    assert same([part.tolist() for part in results[0]], [part.tolist() for part in results[2]])
    assert same(results[1].tolist(), results[3].tolist())


@pytest.mark.parametrize("kind", ["array", "dict", "nested"])
def test_step_for_step_as_the_dummy(kind):
    fns = walks(kind=kind)
    with closing(tianshou.env.DummyVectorEnv(fns)) as theirs, vector_env(fns) as ours:
        for envs in (theirs, ours):
            envs.seed(2)
        assert ours.spec == theirs.spec and ours.observation_space == theirs.observation_space
        results = [theirs.reset(), ours.reset()]
        for action in [RIGHT] * 3 + [LEFT] * 2 + [RIGHT] * 4:
            assert str(results[0]) == str(results[1])
            results = [envs.step([action] * 4) for envs in (theirs, ours)]
            assert [part.dtype for part in results[0]] == [part.dtype for part in results[1]]
            over = np.flatnonzero(results[0][2])
            if len(over):
                assert str(theirs.reset(over)) == str(ours.reset(over))


def test_it_is_what_collectors_look_for():
    assert issubclass(TianshouVectorEnv, tianshou.env.BaseVectorEnv)
    missing = [
        name
        for name, value in vars(tianshou.env.BaseVectorEnv).items()
        if not name.startswith("_") and name not in vars(TianshouVectorEnv)
    ]
    assert not missing

"""A pipeline whose envs fail, or are used by others as well: nobody takes what is another's."""

from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from test_partial import Story, stories
from test_pipeline import Chooser

from shmvec import Pipeline, ShmVectorEnv, evaluate


class Raises(Story):
    """Raises an exception of a kind that is also raised for wrong actions."""

    def __init__(self, index, kind):
        super().__init__(index)
        self.kind = kind

    def step(self, action):
        if self.index == 1 and self.asked == 2:
            raise self.kind("mine")
        return super().step(action)


@pytest.mark.parametrize("kind", [TypeError, ValueError, KeyError])
@pytest.mark.parametrize("groups", [1, 2])
def test_what_an_env_raises_is_not_the_policys(kind, groups):
    with closing(
        ShmVectorEnv([lambda i=i: Raises(i, kind) for i in range(2)], num_workers=0)
    ) as envs:
        pipeline = Pipeline(envs, Chooser(), groups=groups)
        pipeline.reset(seed=0)
        with pytest.raises(kind) as raised:
            pipeline.collect(4)
        assert raised.value.args == ("mine",)


class Anyhow(gym.Space):
    """A space of one's own, of dicts."""

    def __init__(self):
        super().__init__()


DISCRETE, BOX = gym.spaces.Discrete(1000), gym.spaces.Box(-9, 9, (2,))
DICT = gym.spaces.Dict(a=DISCRETE)
SPACES = {
    "of an array and a dict": (
        gym.spaces.Tuple([DISCRETE, DICT]),
        lambda n: (np.full(n, 7), {"a": np.full(n, 3)}),
    ),
    "of dicts": (gym.spaces.Tuple([DICT, DICT]), lambda n: ({"a": [7] * n}, {"a": [7] * n})),
    "nested": (
        gym.spaces.Tuple([gym.spaces.Tuple([BOX, DICT]), DICT]),
        lambda n: ((np.ones((n, 2), np.float32), {"a": [7] * n}), {"a": [7] * n}),
    ),
    "anyhow": (Anyhow(), lambda n: ({"a": 7},) * n),
}


@pytest.mark.parametrize("which", SPACES)
def test_actions_that_end_with_a_dict(which):
    space, actions = SPACES[which]

    class Takes(Story):
        action_space = space

        def step(self, action):
            assert which == "anyhow" or space.contains(action)
            return super().step(7)

    def policy(observations, env_ids):
        return actions(len(env_ids))

    fns = [lambda i=i: Takes(i) for i in range(2)]
    assert evaluate(fns, policy, 3, seeds=0, num_workers=0).returns.min() > 0
    with closing(ShmVectorEnv(fns, num_workers=0)) as envs:
        for said in ({}, {"a": np.ones(2)}, {"b": np.ones(2)}):

            def saying(observations, env_ids, said=said):
                given = policy(observations, env_ids)
                return (given, said) if said else given

            pipeline = Pipeline(envs, saying, groups=1)
            pipeline.reset(seed=0)
            found = next(pipeline)
            assert found.extras.keys() == said.keys() and found.rewards.tolist() == [7, 7]
            pipeline.drop()


def test_extras_that_only_later_groups_have():
    calls = 0

    def policy(observations, env_ids):
        nonlocal calls
        calls += 1
        actions = np.zeros(len(env_ids), int)
        return actions if calls == 1 else (actions, {"value": actions})

    with closing(ShmVectorEnv(stories(4), num_workers=0)) as envs:
        pipeline = Pipeline(envs, policy, groups=2)
        pipeline.reset(seed=0)
        with pytest.raises(ValueError, match="extras"):
            pipeline.collect(1)
        pipeline.collect(1)

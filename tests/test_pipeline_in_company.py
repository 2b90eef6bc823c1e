"""A pipeline whose envs fail, or are used by others as well: nobody takes what is another's."""

from contextlib import closing

import pytest
from test_partial import Story
from test_pipeline import Chooser

from shmvec import Pipeline, ShmVectorEnv


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

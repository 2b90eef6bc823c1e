"""A pipeline that Ctrl-C breaks off, at any moment: the next call returns its own results."""

from contextlib import closing
from functools import partial

import numpy as np
import pytest
from echoing import Moments
from envs import stories
from test_pipeline import Chooser

from shmvec import Pipeline, ShmVectorEnv

pytestmark = pytest.mark.deep


def interrupted(call):
    try:
        call()
    except TypeError as error:  # it came while NumPy read the actions
        assert "NumPy cannot read" in str(error) or "cannot be read" in str(error)


@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_broken_off_at_any_moment(groups):
    envs = ShmVectorEnv(stories(4), num_workers=1)
    with closing(envs):
        pipeline = Pipeline(envs, Chooser(4), groups=groups)
        pipeline.reset(seed=0)
        pipeline.collect(2)  # whose memory is used again
        for call in (lambda: pipeline.collect(2), lambda: next(pipeline), pipeline.drop):
            moments = Moments(stride=35)
            while moments.interrupt(partial(interrupted, call)):
                rollout = pipeline.collect(2)
                assert envs.exchange.num_in_flight == 0
                for t in range(2):
                    ended = rollout.terminations[t] | rollout.truncations[t]
                    actions = np.where(ended, 0, rollout.actions[t])
                    assert (rollout.rewards[t + 1] == actions).all()
                next(pipeline)
        found = [next(pipeline) for _ in range(5)]
        assert all((each.rewards == each.actions).all() for each in found)
        pipeline.drop()
        assert (envs.step([2] * 4)[1] % 2 == 0).all()

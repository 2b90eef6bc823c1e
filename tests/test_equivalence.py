"""The whole step path equals SyncVectorEnv's: random spaces, lengths, seeds, splits, infos."""

import gymnasium as gym
from envs import Counter, Spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import SyncVectorEnv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import spaces

from shmvec import ShmVectorEnv


def compare(make, num_workers, steps, seed, copy=True):
    ours = ShmVectorEnv(make, num_workers=num_workers, copy=copy)
    theirs = SyncVectorEnv(make)
    try:
        assert data_equivalence(ours.reset(seed=seed), theirs.reset(seed=seed))
        theirs.action_space.seed(seed)
        for _ in range(steps):
            actions = theirs.action_space.sample()
            mine, reference = ours.step(actions), theirs.step(actions)
            assert data_equivalence(mine, reference), (mine, reference)
        seen, expected = ours.get_attr("actions"), theirs.get_attr("actions")
        assert data_equivalence(seen, expected)
    finally:
        ours.close()
        theirs.close()


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    spaces(),
    spaces(),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(0, 100),
    st.booleans(),
)
def test_any_spaces_in_this_process(observation_space, action_space, lengths, seed, copy):
    make = [lambda n=n: Spaces(_copy(observation_space), action_space, n) for n in lengths]
    compare(make, 0, 8, seed, copy)


@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    spaces(),
    spaces(),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(0, 100),
    st.data(),
)
def test_any_spaces_in_workers(observation_space, action_space, lengths, seed, data):
    num_workers = data.draw(st.integers(1, len(lengths)))
    make = [lambda n=n: Spaces(_copy(observation_space), action_space, n) for n in lengths]
    compare(make, num_workers, 8, seed)


def _copy(space):
    """Each env samples from a space of its own."""
    from copy import deepcopy

    return deepcopy(space)


@settings(deadline=None, max_examples=10, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(0, 100), st.data())
def test_any_split(lengths, seed, data):
    class Recording(Counter):
        def step(self, action):
            self.actions = [*getattr(self, "actions", []), action]
            return super().step(action)

    num_workers = data.draw(st.integers(0, len(lengths)))
    compare([lambda n=n: Recording(n) for n in lengths], num_workers, 20, seed)


def test_structured_spaces_one_by_one():
    for space in (
        gym.spaces.Box(-1, 1, ()),
        gym.spaces.Box(-1, 1, (0, 3)),
        gym.spaces.Box(-1, 1, (2, 3, 4), dtype="f2"),
        gym.spaces.Discrete(3, start=-2),
        gym.spaces.MultiDiscrete([[2, 3], [4, 5]]),
        gym.spaces.MultiBinary((2, 2)),
        gym.spaces.Text(4),
        gym.spaces.Dict(b=gym.spaces.Text(2), a=gym.spaces.Tuple([gym.spaces.Discrete(2)])),
    ):
        make = [lambda space=space: Spaces(_copy(space), _copy(space))] * 3
        compare(make, 2, 8, 3)

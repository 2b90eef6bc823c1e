"""The whole step path equals SyncVectorEnv's: random spaces, infos, lengths, splits and modes."""

from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter, Scripted
from equality import MODES, same, sync_env
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from strategies import infos, spaces, unsized_leaves

from shmvec import ShmVectorEnv
from shmvec.exchange import AutoresetMode

modes = st.sampled_from(MODES)
lengths = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=5)


def compare(make, steps, seed, mode=AutoresetMode.NEXT_STEP, **ours_only):
    """Steps both side by side; every result is the same."""
    theirs = sync_env(make, mode)
    ours = ShmVectorEnv(make, autoreset_mode=mode, **ours_only)
    with closing(theirs), closing(ours):
        assert ours.single_observation_space == theirs.single_observation_space
        assert ours.observation_space == theirs.observation_space
        reference = gathered(lambda: theirs.reset(seed=seed))
        assert_same(ours.reset(seed=seed), reference)
        theirs.action_space.seed(seed)
        over = np.zeros(len(make), bool)
        for _ in range(steps):
            if mode is AutoresetMode.DISABLED and over.any():
                # Two dicts: Gymnasium removes the mask from the caller's.
                results = [env.reset(options={"reset_mask": over.copy()}) for env in (ours, theirs)]
                assert_same(*results)
                over[:] = False
            actions = theirs.action_space.sample()
            reference = gathered(lambda actions=actions: theirs.step(actions))
            mine = ours.step(actions)
            assert_same(mine, reference)
            over = mine[2] | mine[3]
        assert_same(ours.get_attr("actions"), theirs.get_attr("actions"))


def gathered(call):
    """What Gymnasium makes of these infos; some it cannot gather (an array under "_a")."""
    try:
        return call()
    except ValueError as error:
        if "array element with a sequence" not in str(error):
            raise
        reject()


def assert_same(mine, reference):
    assert same(mine, reference), f"\n{mine}\n{reference}"


def scripts(observation_space, action_space, lengths, per_env_infos):
    return [
        lambda n=n, i=i: Scripted(
            observation_space, action_space, n, per_env_infos[i % len(per_env_infos)]
        )
        for i, n in enumerate(lengths)
    ]


# Infos of one env; one type a key, as Gymnasium wants it.
several_infos = st.lists(st.lists(infos(), min_size=1, max_size=3), min_size=1, max_size=3)


def plain(found):
    """Whether Gymnasium itself can gather these infos in any order."""
    types = {}
    for env in found:
        for info in env:
            for key, value in info.items():
                kind = (type(value), getattr(value, "dtype", None), getattr(value, "shape", None))
                if isinstance(value, dict) or types.setdefault(key, kind) != kind:
                    return False
    return True


common = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.deep
@settings(common, max_examples=80)
@given(
    spaces(),
    spaces(),
    lengths,
    several_infos.filter(plain),
    st.integers(0, 99),
    modes,
    st.booleans(),
)
def test_any_env_in_this_process(observations, actions, lengths, infos, seed, mode, copy):
    make = scripts(observations, actions, lengths, infos)
    compare(make, 8, seed, mode, num_workers=0, copy=copy)


@pytest.mark.deep
@settings(common, max_examples=25)
@given(
    spaces(), spaces(), lengths, several_infos.filter(plain), st.integers(0, 99), modes, st.data()
)
def test_any_env_in_workers(observations, actions, lengths, infos, seed, mode, data):
    num_workers = data.draw(st.integers(1, len(lengths)))
    make = scripts(observations, actions, lengths, infos)
    compare(make, 8, seed, mode, num_workers=num_workers)


@pytest.mark.deep
@settings(common, max_examples=80)
@given(
    spaces(unsized_leaves),
    spaces(unsized_leaves),
    lengths,
    st.integers(0, 99),
    modes,
    st.booleans(),
)
def test_any_space_as_messages_in_this_process(observations, actions, lengths, seed, mode, copy):
    make = scripts(observations, actions, lengths, [[{}]])
    compare(make, 8, seed, mode, num_workers=0, copy=copy, shared_memory=False)


@pytest.mark.deep
@settings(common, max_examples=20)
@given(
    spaces(unsized_leaves), spaces(unsized_leaves), lengths, st.integers(0, 99), modes, st.data()
)
def test_any_space_as_messages_in_workers(observations, actions, lengths, seed, mode, data):
    num_workers = data.draw(st.integers(1, len(lengths)))
    make = scripts(observations, actions, lengths, [[{}]])
    compare(make, 8, seed, mode, num_workers=num_workers, shared_memory=False)


@settings(common, max_examples=10)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(0, 100), st.data())
def test_any_split(lengths, seed, data):
    class Recording(Counter):
        actions = ()

        def step(self, action):
            self.actions = [*self.actions, action]
            return super().step(action)

    num_workers = data.draw(st.integers(0, len(lengths)))
    compare([lambda n=n: Recording(n) for n in lengths], 20, seed, num_workers=num_workers)


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
        for mode in MODES:
            make = scripts(space, space, [[3, 2]] * 3, [[{}]])
            compare(make, 8, 3, mode, num_workers=2)

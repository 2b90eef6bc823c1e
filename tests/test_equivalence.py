"""The whole step path equals SyncVectorEnv's: random spaces, infos, lengths, splits and modes."""

from contextlib import closing

import numpy as np
import pytest
from envs import Scripted
from equality import MODES, same, sync_env
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from strategies import infos, leaves, spaces, unsized_leaves

from shmvec import ShmVectorEnv
from shmvec.exchange import AutoresetMode

modes = st.sampled_from(MODES)
lengths = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=7)


def compare(make, steps, seed, mode=AutoresetMode.NEXT_STEP, parts=None, **ours_only):
    """Steps both side by side, ours in these parts; every result is the same."""
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
            if parts is None:
                assert_same(ours.step(actions), reference)
            else:
                parts(ours, actions, np.arange(len(make)) % 2 == 0, reference)
            over = reference[2] | reference[3]
        assert_same(ours.get_attr("actions"), theirs.get_attr("actions"))


def by_masks(envs, actions, mask, reference):
    """Envs that are left out keep their results, so that the second call shows all."""
    envs.step(actions, mask=mask)
    assert_same(envs.step(actions, mask=~mask)[:4], reference[:4])


def by_batches(envs, actions, mask, reference):
    """Two requests, and one batch with the envs in the order in which they are done."""
    single = envs.single_action_space
    given = list(iterate(envs.action_space, actions))
    for ids in (np.flatnonzero(mask), np.flatnonzero(~mask)):
        some = [given[i] for i in ids]
        envs.send(concatenate(single, some, create_empty_array(single, len(ids))), ids)
    observations, *arrays, infos = envs.recv(min_envs=len(mask))
    rows = zip(iterate(envs.observation_space, observations), *arrays, strict=True)
    found = dict(zip(infos["env_id"].tolist(), rows, strict=True))
    expected = zip(iterate(envs.observation_space, reference[0]), *reference[1:4], strict=True)
    for env, row in enumerate(expected):
        assert_same(found[env], row)


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


@settings(common, max_examples=20)
@given(lengths, st.integers(0, 99), modes, st.booleans(), st.data())
def test_any_env(lengths, seed, mode, shared_memory, data):
    """All at once, in few examples; the others have more of each."""
    leaf = leaves if shared_memory else unsized_leaves
    observations, actions = data.draw(spaces(leaf)), data.draw(spaces(leaf))
    ways = [None, by_masks] + [by_batches] * shared_memory
    make = scripts(observations, actions, lengths, [[{"a": 1}, {}], [{"b": "text"}]])
    options = {
        "parts": data.draw(st.sampled_from(ways)) if len(make) > 1 else None,
        "num_workers": data.draw(st.integers(0, len(make))),
        "copy": data.draw(st.booleans()),
        "caller_steps": data.draw(st.booleans()),
    }
    compare(make, 8, seed, mode, shared_memory=shared_memory, **options)

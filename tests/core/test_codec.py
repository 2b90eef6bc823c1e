"""Codecs: every value that fits a space travels unchanged; what does not fit is refused."""

import re

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import spaces

from shmvec._core import Segment
from shmvec._memory.layout import Layout


def slabs_for(observation_space, action_space, n):
    layout = Layout(observation_space, action_space, n)
    memory = bytearray(layout.nbytes + 100_000)
    segment = Segment.create(memory, 1, n, 64, 4096, 64, layout.nbytes)
    return layout.attach(segment)


@settings(deadline=None, max_examples=100)
@given(spaces(), st.integers(1, 4), st.integers(0, 1000))
def test_observations_batch_as_gymnasium_does(space, n, seed):
    slabs = slabs_for(space, gym.spaces.Discrete(2), n)
    space.seed(seed)
    for _ in range(3):
        values = [space.sample() for _ in range(n)]
        for env, value in enumerate(values):
            slabs.results.observations.put(env, value)
        expected = concatenate(space, values, create_empty_array(space, n))
        assert data_equivalence(slabs.results.observations.batch(True), expected)
        assert data_equivalence(slabs.results.observations.batch(False), expected)


@settings(deadline=None, max_examples=100)
@given(spaces(), st.integers(1, 4), st.integers(0, 1000))
def test_actions_arrive_as_they_were_sent(space, n, seed):
    from gymnasium.vector.utils import iterate

    slabs = slabs_for(gym.spaces.Discrete(2), space, n)
    batch = batch_space(space, n)
    batch.seed(seed)
    for _ in range(3):
        actions = batch.sample()
        slabs.actions.put_rows(np.arange(n), actions)
        got = [slabs.actions.get(env) for env in range(n)]
        assert data_equivalence(got, list(iterate(batch, actions)))
        some = np.random.default_rng(seed).permutation(n)[: 1 + n // 2]
        fewer = batch_space(space, len(some))
        fewer.seed(seed)
        actions = fewer.sample()
        slabs.actions.put_rows(some, actions)
        for env, action in zip(some, iterate(fewer, actions), strict=True):
            got[env] = action
        assert data_equivalence([slabs.actions.get(env) for env in range(n)], got)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "longdouble"])
def test_observation_dtypes(dtype):
    space = gym.spaces.Box(0, 1, (2, 3), np.dtype(dtype))
    slabs = slabs_for(space, space, 3)
    for value in (
        np.ones((2, 3), dtype),
        np.asfortranarray(np.ones((2, 3), dtype)),
        np.ones((4, 6), dtype)[::2, ::2],
        np.ones((2, 1, 3), dtype),
        np.ones((2, 3), bool),
        [[True, True, True], [True, True, True]],
    ):
        slabs.results.observations.put(1, np.zeros((2, 3), dtype))
        slabs.results.observations.put(1, value)
        batch = slabs.results.observations.batch(True)
        assert batch.dtype == np.dtype(dtype) and batch.sum() == 6 and batch[1].all()
    for shape in ((2, 2), (6,), (3, 2)):
        with pytest.raises(ValueError, match=re.escape(f"shape {shape}")):
            slabs.results.observations.put(0, np.ones(shape, dtype))
    with pytest.raises(TypeError, match="Cannot cast .* according to the rule 'same_kind'"):
        slabs.results.observations.put(0, np.ones((2, 3), complex))


@pytest.mark.deep
def test_a_byte_swapped_observation_is_not_copied_raw():
    slabs = slabs_for(gym.spaces.Box(0, 1, (2,), np.float32), gym.spaces.Discrete(2), 1)
    slabs.results.observations.put(0, np.array([1, 2], ">f4"))
    assert slabs.results.observations.batch(True).tolist() == [[1, 2]]


@pytest.mark.deep
@pytest.mark.parametrize("text", ["", "a", "héllo", "日本語", "😀" * 5, "\ud800"])
def test_texts(text):
    space = gym.spaces.Text(5, charset="ab")
    slabs = slabs_for(space, space, 2)
    slabs.results.observations.put(1, text)
    assert slabs.results.observations.batch(True) == ("", text)
    slabs.actions.put_rows(np.arange(2), (text, "b"))
    assert slabs.actions.get(0) == text
    for bad, error in (("toolong", ValueError), (3, TypeError), (b"a", TypeError)):
        with pytest.raises(error, match="Text space"):
            slabs.results.observations.put(0, bad)


@pytest.mark.deep
def test_scalar_observations():
    space = gym.spaces.Discrete(3, start=-1)
    slabs = slabs_for(space, space, 2)
    for value in (1, np.int64(1), np.int8(1), np.array(1), True):
        slabs.results.observations.put(0, -1)
        slabs.results.observations.put(0, value)
        assert slabs.results.observations.batch(True).tolist() == [1, 0]


def test_nested_observations_that_lack_a_part():
    space = gym.spaces.Dict(a=gym.spaces.Discrete(2), b=gym.spaces.Tuple([gym.spaces.Discrete(2)]))
    slabs = slabs_for(space, gym.spaces.Discrete(2), 1)
    with pytest.raises(KeyError, match="b"):
        slabs.results.observations.put(0, {"a": 1})
    with pytest.raises(IndexError, match="Tuple space of 1 parts got 0"):
        slabs.results.observations.put(0, {"a": 1, "b": ()})

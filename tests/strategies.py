"""Hypothesis strategies: spaces, those that can be laid out and others, and infos."""

import gymnasium as gym
import numpy as np
from envs import Words
from hypothesis import strategies as st

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
dtypes = st.sampled_from(["?", "i1", "u1", "i2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"])


@st.composite
def boxes(draw):
    dtype = np.dtype(draw(dtypes))
    shape = draw(shapes)
    return gym.spaces.Box(0, 1 if dtype.kind == "b" else 100, shape, dtype)


leaves = st.one_of(
    boxes(),
    st.builds(
        lambda n, start: gym.spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5)
    ),
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(gym.spaces.MultiDiscrete),
    st.integers(1, 4).map(gym.spaces.MultiBinary),
    st.builds(
        lambda most, least: gym.spaces.Text(most, min_length=min(most, least)),
        st.integers(1, 6),
        st.integers(0, 6),
    ),
)

names = st.text("abc", min_size=1, max_size=2)


small_boxes = st.builds(lambda n: gym.spaces.Box(-1, 1, (n,)), st.integers(1, 3))

unsized_leaves = st.one_of(
    leaves,
    st.builds(
        lambda space, stack: gym.spaces.Sequence(space, stack=stack),
        st.one_of(small_boxes, st.builds(gym.spaces.Discrete, st.integers(1, 4))),
        st.booleans(),
    ),
    st.builds(lambda n, e: gym.spaces.Graph(n, e), small_boxes, st.none() | small_boxes),
    st.lists(leaves, min_size=1, max_size=3).map(gym.spaces.OneOf),
    st.builds(Words),
)


def spaces(leaf=leaves):
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.dictionaries(names, inner, min_size=1, max_size=3).map(gym.spaces.Dict),
            st.lists(inner, min_size=1, max_size=3).map(gym.spaces.Tuple),
        ),
        max_leaves=4,
    )


def _scalars():
    return st.one_of(
        st.integers(-(2**63), 2**63 - 1),
        st.floats(),
        st.booleans(),
        st.none(),
        st.text(max_size=5),
        st.integers(-100, 100).map(np.int32),
        st.integers(0, 100).map(np.uint8),
        st.floats(width=32).map(np.float32),
        st.floats().map(np.float64),
        st.floats(width=16).map(np.float16),
        st.booleans().map(np.bool_),
        st.builds(complex, st.integers(0, 3), st.integers(0, 3)),
        st.just(np.complex64(1 + 2j)),
        st.lists(st.integers(0, 3), max_size=2),
        st.tuples(st.integers(0, 3)),
        st.binary(max_size=3),
    )


def values():
    """Values of infos, one type at a time: the types of a key rarely change."""
    arrays = st.builds(
        lambda dtype, shape, fill: np.full(shape, fill).astype(dtype),
        dtypes,
        shapes,
        st.integers(0, 3),
    )
    return st.one_of(_scalars(), arrays)


def infos():
    keys = st.sampled_from(["a", "b", "c", "long key", "_a", "final_obs", "episode"])
    return st.recursive(
        st.dictionaries(keys, values(), max_size=4),
        lambda inner: st.dictionaries(keys, st.one_of(values(), inner), max_size=4),
        max_leaves=3,
    ).filter(lambda info: isinstance(info, dict))

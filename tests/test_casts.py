"""What an env returns is what SyncVectorEnv makes of it, or an error where that raises one.

One table, of cases by paths: each runs in a SyncVectorEnv as well, whose results, or the type of
whose exception, are the expected ones.
"""

import threading
import warnings
from collections import OrderedDict
from contextlib import closing
from functools import partial, reduce

import gymnasium as gym
import numpy as np
import pytest
from equality import same, sync_env
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import SyncVectorEnv
from tables import deep, paired

from shmvec import ShmVectorEnv
from shmvec.exchange import AutoresetMode

ERRORS = (TypeError, ValueError, LookupError, RecursionError, OverflowError)

BYTES, FLOATS, INTS = (Box(0, 255, (3,), np.uint8), Box(-9, 9, (3,)), Box(-9, 9, (3,), np.int64))
NESTED = Dict(a=Discrete(3), b=Tuple([Discrete(2), BYTES]))

OBSERVATIONS = {
    # refused by SyncVectorEnv, NumPy's rule being same_kind
    "floats for bytes": (BYTES, np.array([0.5, 300, -1])),
    "integers for bytes": (BYTES, np.array([300, 1, 2])),
    "a list of integers for bytes": (BYTES, [1, 2, 3]),
    "nan for bytes": (BYTES, np.full(3, np.nan)),
    "float32 for bytes": (BYTES, np.ones(3, np.float32)),
    "complex": (FLOATS, np.full(3, 1 + 2j)),
    "a list of complex": (FLOATS, [1j, 2, 3]),
    "datetimes": (FLOATS, np.array(["2020"] * 3, "M8[D]")),
    "time spans": (INTS, np.array([1, 2, 3], "m8[s]")),
    "a structured array": (FLOATS, np.zeros(3, [("a", float)])),
    "words": (FLOATS, np.array(["1", "2", "3"])),
    "objects": (FLOATS, np.array([1, 2, 3], object)),
    "bytes of text": (FLOATS, np.array([b"1"] * 3)),
    "a list of large integers": (INTS, [2**70, 1, 2]),
    "a word for a number": (Discrete(5), "3"),
    "a fraction for an integer": (Discrete(5), 1.5),
    "a whole float for an integer": (Discrete(5), np.float64(1)),
    "an array of a float for an integer": (Discrete(5), np.array(1.0)),
    "nan for an integer": (Discrete(5), float("nan")),
    "None for an integer": (Discrete(5), None),
    "a date for an integer": (Discrete(5), np.datetime64("2020")),
    "a masked integer": (Discrete(5), np.ma.masked),
    "an integer for a byte": (Box(0, 9, (), np.uint8), 300),
    "floats for a MultiBinary": (MultiBinary(3), np.array([0.0, 1, 1])),
    "floats for a MultiDiscrete": (MultiDiscrete([3, 3]), np.array([1.0, 2])),
    "nested": (NESTED, {"a": 1, "b": (1, np.array([0.5, 300, -1]))}),
    # refused for the shape
    "transposed": (Box(-9, 99, (3, 4)), np.arange(12.0).reshape(4, 3)),
    "transposed, of its dtype": (Box(-9, 99, (3, 4)), np.ones((4, 3), np.float32)),
    "flat": (Box(-9, 99, (3, 4)), np.arange(12.0)),
    "None": (FLOATS, None),
    "empty, transposed": (Box(0, 1, (5, 0)), np.zeros((0, 5))),
    "ragged": (FLOATS, [1, [2], 3]),
    "a part missing": (NESTED, {"a": 1, "b": (1,)}),
    "a key missing": (NESTED, {"a": 1}),
    # taken, and cast as SyncVectorEnv casts
    "float64 for float32": (FLOATS, np.array([1e300, 2, 3])),
    "integers for floats": (FLOATS, np.arange(3)),
    "another order of bytes": (FLOATS, np.ones(3, ">f8")),
    "a masked array": (FLOATS, np.ma.array([1.0, 2, 3], mask=[0, 1, 0])),
    "a masked number": (Box(0, 9, ()), np.ma.masked),
    "uint16 for bytes": (BYTES, np.array([300, 1, 2], np.uint16)),
    "bools for bytes": (BYTES, np.ones(3, bool)),
    "large unsigned integers": (INTS, np.full(3, 2**64 - 1, np.uint64)),
    "a large unsigned integer": (Discrete(5), np.uint64(2**63 + 1)),
    "a large integer": (Discrete(5), 2**63),
    "True for an integer": (Discrete(5), True),
    "an array of an integer": (Discrete(5), np.array(1)),
    "a float for a float32": (Box(0, 9, ()), 0.1),
    "an integer for a float32": (Box(0, 9, ()), 2**53 + 1),
    "wide integers for a MultiBinary": (MultiBinary(3), [300, 1, 1]),
    "a longer tuple": (NESTED, {"a": 1, "b": [1, np.ones(3, np.uint8), 5]}),
    "strided": (BYTES, np.arange(6, dtype=np.uint8)[::2]),
}  # fmt: skip

REWARDS = {
    "masked": np.ma.masked,
    "a masked array": np.ma.array(2.5, mask=True),
    "a masked array, not masked": np.ma.array(2.5),
    "complex": 1j,
    "complex of NumPy": np.complex128(1 + 2j),
    "an array": np.array(2.5),
    "an array of words": np.array("3"),
    "a word": "3",
    "no number": "much",
    "a list": [2.5],
    "an array of complex": np.array([1j]),
    "an array of objects": np.array([None]),
    "an array of time spans": np.array([3], "m8[s]"),
    "two": np.zeros(2),
    "too large": 10**400,
    "float32": np.float32(0.1),
    "a dict": {},
}


class Returns(gym.Env):
    """Returns what fits, but in one place, or all, what it was made with."""

    action_space = Discrete(3)

    def __init__(self, space, observation, where="", reward=1.0, info=None):
        self.observation_space, self.where, self.count, self.resets = space, where, 0, 0
        self.good = space.sample()
        self.observation, self.reward, self.info = observation, reward, info or (lambda: {})

    def _observation(self, here):
        return self.observation if here == self.where else self.good

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        return self._observation("reset" if self.resets == 1 else "second reset"), {}

    def step(self, action):
        self.count += 1
        here = ("", "step", "last step")[self.count]
        reward = self.reward if self.count == 2 else 1.0
        return self._observation(here), reward, here == "last step", False, self.info()


def functions(space, observation, where="", **others):
    good = space.sample()

    def make(which):
        env = Returns(space, observation, where if which else "", **(others if which else {}))
        env.good = good
        return env

    return [partial(make, which) for which in range(2)]


def outcome(run):
    """What a function returns; or the exception that it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run()
        except ERRORS as error:
            return error


def stepped(envs):
    """All that a reset and two steps return."""
    with closing(envs):
        return [envs.reset(), *(envs.step([0, 0]) for _ in range(2))]


def in_parts(envs):
    """The same by requests of single envs."""
    with closing(envs):
        results = [envs.reset()]
        for _ in range(2):
            envs.send([0], [0])
            envs.send([0], [1])
            *arrays, infos = envs.recv(min_envs=2)
            order = np.argsort(infos.pop("env_id"))
            results.append((*arrays, infos))
            if list(order) != [0, 1]:
                results[-1] = mapped(partial(in_order, order), results[-1])
        return results


def in_order(order, part):
    return part[order] if isinstance(part, np.ndarray) else part


def in_a_rollout(envs):
    """The same out of a rollout."""
    with closing(envs):
        results = [envs.reset()]
        rollout = envs.rollout(2)
        for index in (1, 2):
            infos = rollout.step([0, 0])
            arrays = rollout.observations, rollout.rewards
            arrays = (*arrays, rollout.terminations, rollout.truncations)
            results.append(
                (*(mapped(lambda part: part[index].copy(), each) for each in arrays), infos)  # noqa: B023
            )
        return results


def mapped(function, value):
    if isinstance(value, dict):
        return {key: mapped(function, part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(mapped(function, part) for part in value)
    return function(value)


PATHS = [
    (stepped, 0, True),
    (stepped, 0, False),
    (stepped, 1, True),
    (stepped, 1, False),
    (in_parts, 1, True),
    (in_a_rollout, 1, True),
    (in_parts, 0, True),
    (in_parts, 1, False),
    (in_a_rollout, 0, True),
]
RESETTING = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
PLACES = [
    ("step", AutoresetMode.NEXT_STEP),
    ("reset", AutoresetMode.NEXT_STEP),
    ("second reset", AutoresetMode.SAME_STEP),
    ("last step", AutoresetMode.SAME_STEP),
]


def compare(path, made, what, autoreset_mode=AutoresetMode.NEXT_STEP):
    """Compares what a path gives with what SyncVectorEnv gives, or raises."""
    run, num_workers, shared_memory = path
    options = {"num_workers": num_workers, "shared_memory": shared_memory}
    options["autoreset_mode"] = autoreset_mode
    theirs = outcome(lambda: stepped(sync_env(made, autoreset_mode)))
    ours = outcome(lambda: run(ShmVectorEnv(made, **options)))
    if isinstance(theirs, Exception):
        assert type(ours) is type(theirs), ours
        assert f"env 1: the {what}" in str(ours)
    elif isinstance(ours, Exception):
        raise ours
    else:
        assert same(ours, theirs)


# Each case at the step by three paths, and by one of the others, at one of the other places.
@pytest.mark.parametrize("path", [PATHS[0], *deep(*((path,) for path in PATHS[1:3]), (None,))])
def test_observations(path):
    for number, (case, (space, observation)) in enumerate(OBSERVATIONS.items()):
        at, place = path, PLACES[0]
        if path is None:
            at, place = PATHS[3 + number % 6], PLACES[(number + number // 6) % 4]
            if isinstance(observation, np.ma.MaskedArray):
                place = PLACES[0]  # a final observation that is masked is equal to nothing
        try:
            compare(at, functions(space, observation, place[0]), "observation", place[1])
        except Exception as error:
            raise AssertionError(f"{case}, {place[0]}: {error!r}") from error


@pytest.mark.parametrize("path", [PATHS[0], *deep(*((PATHS[i],) for i in (2, 6, 5)))])
def test_rewards(path):
    for case, reward in REWARDS.items():
        try:
            compare(path, functions(Discrete(3), 1, reward=reward), "reward")
        except Exception as error:
            raise AssertionError(f"{case}: {error!r}") from error


@pytest.mark.parametrize("num_workers", [2, *deep(0)])
def test_an_error_names_env_part_dtypes_and_value(num_workers):
    made = functions(NESTED, {"a": 1, "b": (1, np.array([0.5, 300, -1]))}, "step")
    error = outcome(lambda: stepped(ShmVectorEnv(made, num_workers=num_workers)))
    assert "env 1: the observation['b'][1] has shape (3,) and dtype float64; " in str(error)
    assert "needs shape (3,) and dtype uint8, to which float64 does not cast" in str(error)
    assert "300" in str(error)


@pytest.mark.deep
@pytest.mark.parametrize("num_workers", [0, 2])
def test_only_axes_of_length_1_may_differ(num_workers):
    space = Box(-9, 99, (3, 4))
    values = np.arange(12.0).reshape(3, 1, 4)
    with closing(ShmVectorEnv(functions(space, values, "step"), num_workers=num_workers)) as envs:
        envs.reset()
        assert (envs.step([0, 0])[0][1] == values[:, 0]).all()


@pytest.mark.deep
def test_large_observations_that_lie_in_blocks():
    space = Box(0, 255, (256, 256, 3), np.uint8)
    for observation in (np.full(space.shape, 300), np.zeros((3, 256, 256), np.uint8)):
        made = functions(space, observation, "step")
        with closing(ShmVectorEnv(made, num_workers=2)) as envs:
            assert envs.exchange.layout.num_blocks > 0
            envs.reset()
            with pytest.raises((TypeError, ValueError), match="env 1: the observation has shape"):
                envs.step([0, 0])


class Keeps(gym.Env):
    """Keeps its last action."""

    observation_space = Discrete(2)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        self.action = action
        return 0, 0.0, False, False, {}


@pytest.mark.deep
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("partial_batch", [False, True])
def test_masked_actions_are_given_to_the_envs_as_they_are(num_workers, partial_batch):
    for space, actions in (
        (Discrete(5), np.ma.array([1, 4], mask=[False, True])),
        (Box(-9, 9, (2,)), np.ma.array(np.ones((2, 2), np.float32), mask=[[0, 0], [0, 1]])),
    ):
        made = [partial(Keeps, space)] * 2
        with (
            closing(ShmVectorEnv(made, num_workers=num_workers)) as envs,
            closing(SyncVectorEnv(made)) as theirs,
        ):
            envs.reset()
            theirs.reset()
            theirs.step(actions)
            if partial_batch:
                envs.send(actions, [0, 1])
                envs.recv(min_envs=2)
            else:
                envs.step(actions)
            pairs = zip(envs.get_attr("action"), theirs.get_attr("action"), strict=True)
            for mine, other in pairs:
                assert type(mine) is type(other)
                assert np.array_equal(np.ma.getmaskarray(mine), np.ma.getmaskarray(other))
                assert np.array_equal(np.ma.getdata(mine), np.ma.getdata(other))


# ---- infos -------------------------------------------------------------------------------------


def nested(levels, value=1.0):
    return reduce(lambda inner, _: {"v": inner}, range(levels), value)


def contains_itself(kind=dict):
    info = kind(a=1.0, b={})
    info["b"]["c"] = info
    return info


INFOS = {
    "contains itself": (contains_itself, "['b']['c'] contains itself"),
    "in an OrderedDict": (partial(contains_itself, OrderedDict), "['b']['c'] contains itself"),
    "300 deep": (partial(nested, 300), None),
    "900 deep": (partial(nested, 900), None),
    "900 deep, of arrays": (partial(nested, 900, np.ones(3)), None),
    "5000 deep": (partial(nested, 5000), "['v']...['v']['v']['v']['v'] is nested"),
}
UNSENDABLE = {
    "a lock": (lambda: {"a": {"lock": threading.Lock()}}, "['a']['lock'], a lock, cannot be sent"),
    "a generator": (lambda: {"a": 1, "g": (i for i in "")}, "['g'], a generator, cannot be sent"),
}


@pytest.mark.deep
@pytest.mark.parametrize("path, mode", paired([PATHS[i] for i in (0, 2, 3, 6)], RESETTING))
def test_infos(mode, path):
    for make, message in INFOS.values():
        compare_infos(path, functions(Discrete(3), 1, info=make), mode, message)


def compare_infos(path, made, mode, message):
    run, num_workers, shared_memory = path
    options = {"num_workers": num_workers, "shared_memory": shared_memory, "autoreset_mode": mode}
    theirs = outcome(lambda: stepped(sync_env(made, mode)))
    ours = outcome(lambda: run(ShmVectorEnv(made, **options)))
    if message is None:
        if isinstance(ours, Exception):
            raise ours
        for (*_, mine), (*_, other) in zip(ours, theirs, strict=True):
            while isinstance(other, dict) and "v" in other:
                assert list(mine) == list(other) and same(mine["_v"], other["_v"])
                mine, other = mine["v"], other["v"]
            assert isinstance(mine, dict) or same(mine, other)
    else:
        assert type(theirs) is RecursionError
        assert type(ours) is RecursionError and "env 1: the info" in str(ours)
        assert message in str(ours)


@pytest.mark.deep
@pytest.mark.parametrize("path, mode", paired([PATHS[i] for i in (0, 2, 3, 6)], RESETTING))
def test_what_cannot_be_sent_is_named(mode, path):
    run, num_workers, shared_memory = path
    options = {"num_workers": num_workers, "shared_memory": shared_memory, "autoreset_mode": mode}
    for make, message in UNSENDABLE.values():
        made = functions(Discrete(3), 1, info=make)
        with pytest.raises(TypeError, match="env 1: the info") as caught:
            run(ShmVectorEnv(made, **options))
        assert message in str(caught.value)

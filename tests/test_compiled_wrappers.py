"""Compiled wrappers do as the Python ones: results, attributes, errors, warnings, bit for bit."""

import ast
import copy
import gc
import importlib.util
import inspect
import json
import os
import pickle
import re
import struct
import sys
import time
import warnings
from collections import deque
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.wrappers.utils import RunningMeanStd
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tables import deep

from shmvec import ShmVectorEnv
from shmvec.__main__ import main
from shmvec._wrappers import TWINS, classes_of, code_of, notes_of
from shmvec._wrappers import compile_env as compiled_if_it_pays
from shmvec._wrappers.sources import is_known

compile_env = partial(compiled_if_it_pays, always=True)  # where Python is as fast, too
CLOCKS = {"time_queue", "episode_start_time", "episode_times", "t_start"}
INF, NAN = float("inf"), float("nan")
ODD = [0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, 1e200, 1e-200, 0.1, INF, -INF, NAN]


class Broken(Exception):
    pass


class Drawn(gym.Env):
    """An env whose observations and rewards are drawn from a seed; now and then odd ones."""

    scale = 3

    def __init__(self, dtype="float32", shape=(3,), oddness=0.0, length=5, script=0):
        low, high = (-np.inf, np.inf) if np.dtype(dtype).kind == "f" else (0, 9)
        box = gym.spaces.Box(low, high, shape or (3,), dtype)
        self.observation_space = box if shape else gym.spaces.Dict(a=box, b=gym.spaces.Discrete(3))
        self.action_space = gym.spaces.Box(-0.5, np.array([0.5, 0.0], np.float32), (2,), np.float32)
        self.dtype, self.shape, self.oddness, self.length = np.dtype(dtype), shape, oddness, length
        self.draw = np.random.default_rng(script)
        self.taken = []
        self.count = 0

    def observed(self):
        values = self.draw.normal(size=self.shape or (3,)) * self.scale
        if self.draw.random() < self.oddness:
            values.flat[0] = self.draw.choice(ODD)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            values = np.abs(values) if self.dtype.kind == "u" else values
            found = values.astype(self.dtype)
        if self.draw.random() < self.oddness:
            found = [found[::-1], found.astype(np.float64), np.asfortranarray(found)][
                self.draw.integers(3)
            ]
        return found if self.shape else {"a": found, "b": np.int64(1)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observed(), {}

    def step(self, action):
        self.taken.append(copy.deepcopy(action))
        self.count += 1
        reward = float(self.draw.normal())
        ended = self.count >= self.length
        if self.draw.random() < self.oddness:
            odd = self.draw.integers(10)
            if odd == 0:
                raise Broken("as it was drawn")
            if odd == 1:
                return self.observed(), reward, ended
            if odd == 2:
                return [self.observed(), reward, ended, False, {}]
            reward = [
                np.float32(reward), np.float64(reward), 1, True, np.array(reward), INF, NAN, -0.0
            ][self.draw.integers(8)]  # fmt: skip
            ended = [np.bool_(ended), int(ended)][self.draw.integers(2)]
        return self.observed(), reward, ended, False, {"count": self.count}


class Mine(gym.Wrapper):
    """A wrapper of a user's, which overrides what Gymnasium's does."""

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, reward + 1, *rest


class Slow(gym.Wrapper):
    """A wrapper that takes its time."""

    def __init__(self, env, seconds):
        super().__init__(env)
        self.seconds = seconds

    def step(self, action):
        time.sleep(self.seconds)
        return self.env.step(action)


def named(name):
    """An env in a wrapper of a class of this name, and in one that is compiled."""
    return WRAPPERS["normal"](type(name, (Mine,), {})(Drawn()))


class Sub(wrappers.NormalizeReward):
    pass


class OwnObservation(gym.ObservationWrapper):
    def observation(self, observation):
        return observation[::-1]


class OwnAction(gym.ActionWrapper):
    def action(self, action):
        return action * self.np_random.random()


class OwnReward(gym.RewardWrapper):
    def reward(self, reward):
        return reward / 4


class OwnReset(gym.Wrapper):
    def reset(self, **arguments):
        self.env.reset(**arguments)
        observation, *_, info = self.env.step(np.zeros(2, np.float32))
        return observation, info


def timed(env, **arguments):
    """An env with its time, of which Gymnasium 1.0 asks the spec how long it is."""
    env.unwrapped.spec = gym.envs.registration.EnvSpec("Drawn-v0", max_episode_steps=6)
    made = wrappers.TimeAwareObservation(env, **arguments)
    del env.unwrapped.spec
    for each in list(chain_of(made))[:-1]:
        vars(each)["_cached_spec"] = None
    return made


def double(value):
    return value * 2


def clipped(value):
    return np.clip(value, -1.5, 1.5)


WRAPPERS = {
    "checker": wrappers.PassiveEnvChecker,
    "order": wrappers.OrderEnforcing,
    "limit": partial(wrappers.TimeLimit, max_episode_steps=4),
    "statistics": partial(wrappers.RecordEpisodeStatistics, buffer_length=2),
    "other statistics": partial(wrappers.RecordEpisodeStatistics, stats_key="mine"),
    "flatten": wrappers.FlattenObservation,
    "clip action": wrappers.ClipAction,
    "action": lambda env: wrappers.TransformAction(env, double, env.action_space),
    "normal": wrappers.NormalizeObservation,
    "large": partial(wrappers.NormalizeObservation, epsilon=1),
    "observation": lambda env: wrappers.TransformObservation(env, clipped, None),
    "normal reward": wrappers.NormalizeReward,
    "discounted": partial(wrappers.NormalizeReward, gamma=0.5, epsilon=1e-3),
    "undiscounted": partial(wrappers.NormalizeReward, gamma=1),
    "reward": partial(wrappers.TransformReward, func=double),
    "clip reward": partial(wrappers.ClipReward, min_reward=-0.5, max_reward=0.25),
    "clip to signs": partial(wrappers.ClipReward, min_reward=-1, max_reward=1),
    "positive": partial(wrappers.ClipReward, min_reward=0.0),
    "autoreset": wrappers.Autoreset,
    "rescale action": partial(
        wrappers.RescaleAction,
        min_action=np.float32(-1),
        max_action=np.arange(2, dtype=np.float32),
    ),
    "rescale observation": partial(
        wrappers.RescaleObservation, min_obs=np.float32(-INF), max_obs=np.float32(INF)
    ),
    "dtype": partial(wrappers.DtypeObservation, dtype=np.float64),
    "reshape": partial(wrappers.ReshapeObservation, shape=(3, 1)),
    "delay": partial(wrappers.DelayObservation, delay=2),
    "sticky": partial(wrappers.StickyAction, repeat_action_probability=0.4),
    "time": lambda env: timed(env),
    "part of time": lambda env: timed(env, normalize_time=True),
    "time apart": lambda env: timed(env, flatten=False),
    "own observation": OwnObservation,
    "own action": OwnAction,
    "own reward": OwnReward,
    "own reset": OwnReset,
    "mine": Mine,
    "subclass": Sub,
}
EVERY_STEP = ["flatten", "statistics", "clip action", "normal", "observation", "normal reward"]
CHANGES = [
    None,
    ("reset",),
    ("_elapsed_steps", 2),
    ("_has_reset", False),
    ("update_running_mean", False),
    ("update_running_mean", True),
    ("epsilon", 0.5),
    ("gamma", 0.9),
    ("gamma", np.float32(0.5)),
    ("episode_returns", np.float64(2)),
    ("func", double),
    ("checked_step", False),
    ("timesteps", 2.5),
    ("max_timesteps", 0),
    ("autoreset", True),
    ("last_action", np.ones(2, np.float32)),
    ("action", double),
    ("obs_rms", RunningMeanStd(shape=(3,), dtype=np.float64)),
    ("return_rms", RunningMeanStd(shape=())),
    ("discounted_reward", np.array([3.0, 4.0])),
    ("action_space", gym.spaces.Box(-1, 1, (2,), np.float32)),
    ("observation_space", gym.spaces.Box(-1, 1, (3,), np.float64)),
    ("deleted", "_elapsed_steps"),
    ("step", None),
    ("reward", double),
    ("observation", double),
    ("shorter", None),
]


def chain_of(env):
    yield env
    while isinstance(env, gym.Wrapper):
        env = env.env
        yield env


def seen(value):
    """A value as something that is equal only if types, dtypes and bits are."""
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return "objects", [seen(each) for each in value.tolist()]
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return type(value).__name__, value.tobytes()
    if type(value) is float:
        return "float", struct.pack("d", value)
    if isinstance(value, dict):
        return "dict", [(key, seen(each)) for key, each in value.items() if key != "t"]
    if isinstance(value, (tuple, list, deque)):
        return type(value).__name__, [seen(each) for each in value]
    if isinstance(value, RunningMeanStd):
        return "moments", seen(vars(value))
    if callable(value) or isinstance(value, np.random.Generator):
        return "something"
    return type(value).__name__, repr(value)


def attributes(env):
    return [
        {name: seen(value) for name, value in vars(each).items() if name not in CLOCKS | {"env"}}
        for each in chain_of(env)
    ]


def change(env, what):
    name, *values = what
    places = [each for each in chain_of(env) if name in vars(each) or hasattr(type(each), name)]
    if name == "deleted":
        for each in chain_of(env):
            vars(each).pop(values[0], None)
    elif name == "shorter":
        if isinstance(env, gym.Wrapper) and isinstance(env.env, gym.Wrapper):
            env.env = env.env.env
    elif name == "step":
        for each in list(chain_of(env))[1:2]:
            each.step = lambda action, step=each.step: step(action)
    else:
        for each in places[:1]:
            setattr(each, name, copy.deepcopy(values[0]))


def happens(do):
    """What a call returns or raises, and how it warns."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = seen(do())
        except Exception as error:
            result = type(error), str(error)
    return result, [(each.category, str(each.message)) for each in warned]


def follow(make, script):
    """Steps an env in Python and compiled, and compares all that can be seen."""
    python, env = make(), make()
    stepper = compile_env(env)
    for what, action in script:
        if what == ("reset",):
            assert happens(partial(env.reset, seed=1)) == happens(partial(python.reset, seed=1))
        elif what is not None:
            assert happens(partial(change, env, what)) == happens(partial(change, python, what))
        action = np.array(action, np.float32)
        mine, expected = (happens(partial(each.step, action)) for each in (stepper, python))
        assert mine == expected
        assert attributes(env) == attributes(python)
    assert seen(env.unwrapped.taken) == seen(python.unwrapped.taken)
    return stepper


def steps_of_both(make, steps, action):
    """What steps do, and all attributes after each: in Python, and the same compiled."""
    found = []
    for stepped_by in (lambda env: env, compile_env):
        env = make()
        stepper = stepped_by(env)
        env.reset()
        found.append(
            [(happens(partial(stepper.step, action)), attributes(env)) for _ in range(steps)]
        )
    assert found[0] == found[1]
    return found[1]


def wrapped(names, **arguments):
    env = Drawn(**arguments)
    for name in names:
        env = WRAPPERS[name](env)
    return env


ACTIONS = st.lists(st.sampled_from([0.0, -0.0, 0.25, 0.5, -0.5, 9.0, -9.0, NAN, INF]),
                   min_size=2, max_size=2)  # fmt: skip
CHANGED = st.one_of(st.none(), st.none(), st.none(), st.sampled_from(CHANGES))


@pytest.mark.deep
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=8),
    dtype=st.sampled_from(["float32", "float64", "float16", "uint8"]),
    shape=st.sampled_from([(3,), (3,), (1,), (2, 3)]),
    oddness=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    script=st.integers(0, 1000),
    steps=st.lists(st.tuples(CHANGED, ACTIONS), min_size=1, max_size=25),
)
@example(EVERY_STEP, "float64", (3,), 0.0, 1, [(("reset",), [0.1, 9.0])] * 3)
def test_any_chain(names, dtype, shape, oddness, script, steps):
    make = partial(wrapped, names, dtype=dtype, shape=shape, oddness=oddness, script=script)
    try:
        make()
    except Exception:  # this wrapper cannot wrap that
        return
    follow(make, [(("reset",), [0.0, 0.0]), *steps])


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("oddness", [0.0, 0.05])
def test_the_chain_of_training_scripts_for_long(dtype, oddness):
    names = ["checker", "order", "limit", *EVERY_STEP, "reward"]
    draw = np.random.default_rng(5)
    script = [(("reset",) if i % 9 == 0 else None, draw.normal(size=2)) for i in range(150)]
    make = partial(wrapped, names, dtype=dtype, oddness=oddness, length=7)
    stepper = follow(make, script)
    assert all(not why for _, why in notes_of(stepper))


@pytest.mark.deep
def test_a_dict_is_flattened_and_normalized():
    names = ["checker", "flatten", "normal", "statistics"]
    make = partial(wrapped, names, dtype="float64", shape=())
    follow(make, [(("reset",), [0.0, 0.0]), *[(None, [0.1, 0.2])] * 30])


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["warn", "raise", "ignore"])
def test_floating_point_errors_are_numpys(kind):
    names = ["normal", "normal reward"]
    with np.errstate(all=kind):
        for odd in ODD:
            make = partial(wrapped, names, dtype="float64")

            def odd_one(env, value=odd):
                env.unwrapped.observed = lambda: np.array([value, 1.0, -value])
                return env

            follow(lambda make=make, odd_one=odd_one: odd_one(make()), [(("reset",), [0, 0])] * 2)
            follow(lambda make=make, odd_one=odd_one: odd_one(make()), [(None, [0, 0])] * 4)


def names_of(stepper):
    return [name for name, why in notes_of(stepper) if not why]


def why_not(env):
    return next(filter(None, whys(env)))


def whys(env):
    return [why for _, why in notes_of(compile_env(env))]


@pytest.mark.deep
def test_a_wrapper_of_ones_own_stays_python_between_twins():
    names = ["normal", "clip action", "mine", "normal reward", "subclass", "statistics"]
    make = partial(wrapped, names)
    stepper = follow(make, [(("reset",), [0, 0]), *[(None, [9, 9])] * 20])
    assert names_of(stepper) == [
        "RecordEpisodeStatistics", "NormalizeReward", "ClipAction", "NormalizeObservation"
    ]  # fmt: skip
    assert why_not(make()) == "it has no twin"


def function_of(found):
    return found.fget if isinstance(found, property) else found


def altered(function, folder):
    """The code of a function of which the source has one more statement."""
    code = function.__code__
    lines = Path(code.co_filename).read_text().splitlines(keepends=True)
    tree = ast.parse("".join(lines))
    defined = next(
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef)
        and code.co_firstlineno == min([each.lineno, *(d.lineno for d in each.decorator_list)])
    )
    last = defined.body[-1]
    lines.insert(last.lineno - 1, " " * last.col_offset + "altered = True\n")
    module = module_of("".join(lines), folder)
    found = module
    for part in function.__qualname__.split("."):
        found = inspect.getattr_static(found, part)
    return function_of(found).__code__


def module_of(source, folder):
    """A module that is imported from this source."""
    path = folder / f"m{len(list(folder.iterdir()))}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.deep
@pytest.mark.parametrize("name", TWINS)
def test_the_installed_source_is_recognised_and_another_is_not(name, monkeypatch, tmp_path):
    kinds = classes_of(name)
    if not kinds:
        pytest.skip("its library is not imported")
    wrap = next((each for each in WRAPPERS.values() if type(each(Drawn())) in kinds), None)
    if wrap is None:
        pytest.skip("another file's")
    check_sources(name, lambda: wrap(Drawn()), monkeypatch, tmp_path)


def check_sources(name, make, monkeypatch, folder):
    assert names_of(compile_env(make()))[0] == name
    for called, found in code_of(classes_of(name)[0]):
        function = function_of(found)
        with monkeypatch.context() as patch:
            patch.setattr(function, "__code__", altered(function, folder))
            assert f"{called} is not the one that its twin is for" in whys(make())
    assert names_of(compile_env(make()))[0] == name


@pytest.mark.deep
def test_code_is_recognised_only_by_the_source_that_it_has_been_compiled_from(tmp_path):
    source = Path(inspect.getfile(wrappers.TimeLimit)).read_text()
    function = module_of(source, tmp_path).TimeLimit.step
    assert is_known(function, "TimeLimit.step")
    assert not is_known(function, "OrderEnforcing.step")
    function.__defaults__ = ([],)
    assert not is_known(function, "TimeLimit.step")

    function = module_of(source, tmp_path).TimeLimit.step  # another comment in it, since its import
    Path(function.__code__.co_filename).write_text(
        source.replace("_elapsed_steps += 1", "_elapsed_steps += 1  #")
    )
    assert not is_known(function, "TimeLimit.step")

    function = module_of(source, tmp_path).TimeLimit.step
    Path(function.__code__.co_filename).write_text("\n" + source)
    assert not is_known(function, "TimeLimit.step")

    function = module_of(source.replace("_steps += 1", "_steps += 2"), tmp_path).TimeLimit.step
    Path(function.__code__.co_filename).write_text(source)
    assert not is_known(function, "TimeLimit.step")

    function = module_of(source, tmp_path).TimeLimit.step
    Path(function.__code__.co_filename).unlink()
    assert not is_known(function, "TimeLimit.step")

    made = {}
    exec(source, made)
    assert not is_known(made["TimeLimit"].step, "TimeLimit.step")


@pytest.mark.deep
def test_another_numpy_makes_the_twin_step_aside(monkeypatch):
    module = sys.modules[wrappers.NormalizeObservation.__module__]
    monkeypatch.setattr(module, "np", SimpleNamespace(**vars(np)))
    why = "NormalizeObservation.observation is not the one that its twin is for"
    assert why_not(wrapped(["normal"])) == why


@pytest.mark.deep
def test_a_func_of_ones_own_is_called(monkeypatch):
    env = wrapped(["flatten", "clip action", "clip reward"])
    env.env.env.func = double
    env.env.func = double
    env.func = double
    follow(lambda: copy.deepcopy(env), [(("reset",), [0, 0]), (None, [9, 9])])
    assert all(not why for _, why in notes_of(compile_env(env)))


@pytest.mark.deep
def test_a_dict_passes_through():
    names = ["autoreset", "own reward", "own reset", "delay", "time apart", "limit", "sticky"]
    make = partial(wrapped, [*names, "rescale action", "normal reward"], shape=(), length=4)
    stepper = follow(make, [(("reset",), [0, 0]), *[(None, [0.1, 0.2])] * 30])
    assert len(names_of(stepper)) == len(names) + 2


@pytest.mark.deep
def test_a_wrapper_that_inherits_its_step_breaks_no_chain():
    names = ["normal", "own observation", "own action", "own reward", "own reset", "normal reward"]
    make = partial(wrapped, names)
    stepper = follow(make, [(("reset",), [0, 0]), *[(None, [9, 9])] * 20])
    assert len(names_of(stepper)) == len(names)


@pytest.mark.deep
def test_a_space_of_a_wrappers_own_class_is_asked():
    class Narrow(gym.Wrapper):
        @property
        def action_space(self):
            return gym.spaces.Box(-0.25, 0.25, (2,), np.float32)

    stepper = follow(lambda: wrappers.ClipAction(Narrow(Drawn())), [(None, [9, -9])])
    assert names_of(stepper) == ["ClipAction", "Narrow"]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["__getattribute__", "env", "step"])
def test_a_wrapper_of_which_not_all_can_be_seen_stays_python(name):
    odd = {
        "__getattribute__": lambda self, name: object.__getattribute__(self, name),
        "env": property(lambda self: self.other, lambda self, env: vars(self).update(env=env)),
        "step": lambda self, action: self.env.step(action),
    }
    kind = type("Odd", (OwnReset,), {name: odd[name]})
    assert why_not(kind(Drawn()))


def bounded(make, dtype, shape, script):
    env = Drawn(dtype=dtype, shape=shape, script=script, oddness=0.1)
    low = -np.arange(1, 1 + np.prod(shape)).reshape(shape)
    env.observation_space = gym.spaces.Box(low.astype(dtype), np.full(shape, 3, dtype), dtype=dtype)
    env.action_space = gym.spaces.Box(low.astype(dtype), np.full(shape, 3, dtype), dtype=dtype)
    return make(env)


@pytest.mark.deep
@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([wrappers.RescaleAction, wrappers.RescaleObservation]),
    dtype=st.sampled_from(["float32", "float64"]),
    acted=st.sampled_from(["float32", "float64", "int64", "float16"]),
    shape=st.sampled_from([(1,), (3,), (2, 2)]),
    bounds=st.sampled_from([(-1.0, 1.0), (-1, 1), (0, 1e-30), (-1e38, 1e38), (-0.0, 1e-3), (1, 9)]),
    values=st.lists(st.sampled_from([0.0, -0.0, 0.3, -7.0, 1e-40, 3e38, NAN, INF, -INF]),
                    min_size=1, max_size=4),
    script=st.integers(0, 1000),
    swapped=st.booleans(),
)  # fmt: skip
def test_rescaling(kind, dtype, acted, shape, bounds, values, script, swapped):
    def make():
        try:
            env = bounded(lambda env: kind(env, *bounds), dtype, shape, script)
        except (ValueError, AssertionError, FloatingPointError):
            return None
        if swapped:  # for the other of the two functions
            _, forward, back = wrappers.utils.rescale_box(env.env.action_space, *bounds)
            env.func = forward if env.func.__name__ == "backward" else back
        return env

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        python, env = make(), make()
        if env is None:
            return
        stepper = compile_env(env)
        action = np.resize(np.array(values), shape).astype(acted)
    assert happens(python.reset) == happens(env.reset)
    for _ in range(3):
        assert happens(lambda: stepper.step(action)) == happens(lambda: python.step(action))
    assert seen(env.unwrapped.taken) == seen(python.unwrapped.taken)
    assert names_of(stepper) == [kind.__name__]


@pytest.mark.deep
def test_another_source_makes_the_twin_step_aside(monkeypatch):
    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._elapsed_steps += 2
        return observation, reward, terminated, self._elapsed_steps > 4, info

    env = wrapped(["limit"])
    before = compile_env(env)
    assert names_of(before) == ["TimeLimit"]
    monkeypatch.setattr(wrappers.TimeLimit, "step", step)
    assert why_not(wrapped(["limit"])) == "TimeLimit.step is not the one that its twin is for"
    env.reset()
    ends = [before.step([0, 0])[3] for _ in range(3)]  # patched after it was compiled
    assert ends == [False, False, True]
    assert names_of(before) == []


@pytest.mark.deep
@pytest.mark.parametrize("name", ["update", "update_from_moments"])
def test_another_helper_makes_the_twin_step_aside(monkeypatch, name):
    env = wrapped(["normal", "normal reward"])
    stepper = compile_env(env)
    env.reset()
    monkeypatch.setattr(RunningMeanStd, name, lambda self, *_: None)
    why = f"RunningMeanStd.{name} is not the one that its twin is for"
    assert why_not(wrapped(["normal"])) == why_not(wrapped(["normal reward"])) == why
    mean = env.env.obs_rms.mean
    stepper.step(np.zeros(2, np.float32))
    assert env.env.obs_rms.mean is mean


@pytest.mark.deep
def test_a_patched_base_is_noticed(monkeypatch):
    env = wrapped(["order"])
    stepper = compile_env(env)
    env.reset()
    monkeypatch.setattr(gym.Wrapper, "step", lambda self, action: "patched")
    assert stepper.step([0, 0]) == "patched"
    assert why_not(env) == "Wrapper.step is not the one that its twin is for"


@pytest.mark.deep
def test_an_env_that_is_copied_or_pickled_between_steps_is_whole():
    env = wrapped(["statistics", "normal", "observation", "normal reward", "mine", "limit"])
    stepper = compile_env(env)
    env.reset()
    action = np.zeros(2, np.float32)
    for _ in range(3):
        stepper.step(action)
    for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert all("step" not in vars(each) for each in chain_of(other))
        twin = compile_env(copy.deepcopy(other))
        assert happens(lambda other=other: other.step(action)) == happens(
            lambda twin=twin: twin.step(action)
        )


@pytest.mark.parametrize("mode", ["NextStep", *deep("SameStep")])
@pytest.mark.parametrize("num_workers", [1, *deep(0)])
def test_vector_envs_are_equal_with_it_and_without(num_workers, mode):
    names = ["checker", "order", "limit", *EVERY_STEP, "mine", "clip reward"]

    def made(on):
        makes = [partial(wrapped, names, dtype="float64", script=i) for i in range(3)]
        return ShmVectorEnv(
            makes, num_workers=num_workers, autoreset_mode=mode, compile_wrappers=on
        )

    with closing(made(True)) as mine, closing(made(False)) as python:
        assert seen(mine.reset(seed=1)) == seen(python.reset(seed=1))
        actions = np.random.default_rng(1).normal(size=(40, 3, 2)).astype(np.float32)
        for i, each in enumerate(actions):
            found, expected = mine.step(each), python.step(each)
            assert seen(found[:4]) == seen(expected[:4])
            assert sorted(found[4]) == sorted(expected[4])
            if i == 20:
                mine.set_attr("gamma", 0.5)
                python.set_attr("gamma", 0.5)
        for name in ("obs_rms", "return_rms", "episode_count", "_elapsed_steps"):
            assert seen(mine.get_attr(name)) == seen(python.get_attr(name))


@pytest.mark.parametrize("num_workers", [2, *deep(0)])
def test_stats_say_what_is_compiled_and_what_stops_it(num_workers, tmp_path):
    marker = tmp_path / "marker"

    def make(*names):
        return wrapped([*names, *["mine"] * marker.exists()])

    makes = [partial(make, "limit", "normal", "mine", "normal reward")] * 2
    makes += [partial(make, "limit"), make]
    stopped = "Mine between NormalizeObservation and NormalizeReward: it has no twin"
    expected = f"3 of 4 compiled; {stopped}"
    with closing(ShmVectorEnv(makes, num_workers=num_workers)) as envs:
        stats = envs.stats()
        fast = "0 of 1 compiled (Python is as fast)"
        assert (stats - stats).wrappers == stats.wrappers == (expected, expected, fast, "")
        lines = str(stats).splitlines()
        assert (
            f"wrappers of envs 0-1: {expected}" in lines and f"wrappers of env 2: {fast}" in lines
        )
        assert len([line for line in lines if "wrappers" in line]) == 2
        marker.touch()
        envs.restart([3])
        *others, last = envs.stats().wrappers
        assert last == fast
        if num_workers:
            assert others[:2] == [expected, expected]
    with closing(ShmVectorEnv(makes[:2], num_workers=num_workers)) as envs:
        alike = "wrappers: 3 of 5 compiled; Mine between NormalizeReward and the caller: "
        assert alike in str(envs.stats())
    with closing(ShmVectorEnv(makes, num_workers=num_workers, compile_wrappers=False)) as envs:
        assert "wrappers" not in str(envs.stats())


@pytest.mark.deep
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_what_wrappers_without_a_twin_cost(num_workers, capsys):
    def make():
        slow = Slow(Mine(wrapped(["limit", "normal"])), 0.001)
        return WRAPPERS["normal reward"](slow)

    with closing(ShmVectorEnv([make] * 2, num_workers=num_workers)) as envs:
        envs.reset(seed=1)
        before = envs.stats()
        assert "around those that are" not in str(before)
        for _ in range(640):
            envs.step(envs.action_space.sample())
        stats = envs.stats()
        assert main(["top", str(os.getpid()), "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["vector_envs"]
    spent = sum(worker.wrappers_s for worker in stats.workers)
    steps = sum(worker.steps for worker in stats.workers)
    assert spent >= 0.9e-3 * 64 * (steps // 64 - 2)  # one step in 64 of each env is timed
    assert re.search(r"not compiled, around those that are: [\d.]+ [mµ]s a step", str(stats))
    assert stats.wrappers[0].startswith("3 of 5 compiled; Slow between Mine and NormalizeReward: ")
    assert tuple(row["stats"]["wrappers"]) == stats.wrappers
    assert sum(worker["wrappers_s"] for worker in row["stats"]["workers"]) == spent


class Recursive(Drawn):
    def step(self, action):
        if self.again:
            self.again = False
            self.outermost.step(action)
        self.again = True
        return super().step(action)


@pytest.mark.deep
def test_the_cost_of_a_wrapper_in_an_env_that_steps_it_again():
    def make():
        env = Recursive(length=10**6)
        env.again = True
        env.outermost = WRAPPERS["normal reward"](env)
        return Mine(env.outermost)

    with closing(ShmVectorEnv([make], num_workers=0)) as envs:
        envs.reset(seed=1)
        for _ in range(200):
            envs.step(envs.action_space.sample())
        assert envs.stats().workers[0].wrappers_s < 10


class HoldsEnvs(Drawn):
    """An env that steps a vector env of its own."""

    def __init__(self):
        super().__init__(length=10**6)
        self.inside = ShmVectorEnv([lambda: Mine(wrapped(["normal"]))], num_workers=0)
        self.inside.reset(seed=1)

    def step(self, action):
        self.inside.step(self.inside.action_space.sample())
        return super().step(action)

    def close(self):
        self.inside.close()


@pytest.mark.deep
def test_the_cost_of_wrappers_of_another_vector_env_does_not_count():
    with closing(ShmVectorEnv([HoldsEnvs], num_workers=0)) as envs:
        envs.reset(seed=1)
        for _ in range(200):
            envs.step(envs.action_space.sample())
        (inside,) = envs.get_attr("inside")
        assert inside.stats().workers[0].wrappers_s > 0 == envs.stats().workers[0].wrappers_s


@pytest.mark.deep
def test_words_of_many_kinds_of_envs_are_cut_off_and_belong_to_their_envs():
    names = [f"Wrapper{number:02}" * 6 + "\n\x1b" for number in range(40)]
    makes = [partial(named, name) for name in names]
    with closing(ShmVectorEnv(makes, num_workers=1)) as envs:
        words = envs.stats().wrappers
        assert len(words) == 40 and words[0].startswith("1 of 2 compiled; Wrapper00")
        assert all(f"Wrapper{number:02}" in words[number] for number in range(3))
        assert words[39] == "" and all(each.isprintable() for each in words)


@pytest.mark.deep
def test_looking_at_an_env_makes_its_attributes_no_slower():
    def kinds(env):
        return [type(each) for each in gc.get_referents(env)]

    for names in ([], ["order", "limit"], ["normal"]):
        env = wrapped(names)
        levels = [each for each in chain_of(env) if names != ["normal"] or each is env.unwrapped]
        before = list(map(kinds, levels))
        notes_of(compiled_if_it_pays(env))
        assert list(map(kinds, levels)) == before


@pytest.mark.deep
def test_where_python_is_as_fast_it_steps():
    env = wrapped(["checker", "order", "limit"])
    assert compiled_if_it_pays(env) is env
    assert {why for _, why in notes_of(env)} == {"Python is as fast"}
    env = WRAPPERS["normal"](env)
    assert [why for _, why in notes_of(compiled_if_it_pays(env))] == [""] * 4


class Odd(gym.Env):
    """An env that wraps itself, or raises when it is looked at."""

    def __init__(self, raises):
        self.env = self
        self.raises = raises

    def __getattribute__(self, name):
        if name == "__dict__" and super().__getattribute__("raises"):
            raise Broken("looked at")
        return super().__getattribute__(name)


@pytest.mark.deep
@pytest.mark.parametrize("raises", [False, True])
def test_an_odd_env_is_stepped_as_it_is(raises):
    env = Odd(raises)
    assert compiled_if_it_pays(env) is env
    assert all(why for _, why in notes_of(env))
    assert names_of(compile_env(env)) == []


@pytest.mark.deep
def test_cart_pole_as_gym_makes_it():
    def makes():
        return wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))

    python, env = makes(), makes()
    stepper = compile_env(env)
    assert all(not why for _, why in notes_of(stepper))
    for episode in range(5):
        assert seen(env.reset(seed=episode)) == seen(python.reset(seed=episode))
        ended = False
        while not ended:
            found, expected = stepper.step(1), python.step(1)
            assert seen(found) == seen(expected)
            ended = expected[2] or expected[3]
        assert attributes(env)[0] == attributes(python)[0]


@pytest.mark.deep
def test_half_cheetah_as_cleanrl_wraps_it():
    pytest.importorskip("mujoco")

    def makes():
        env = wrappers.FlattenObservation(gym.make("HalfCheetah-v5", max_episode_steps=50))
        env = wrappers.ClipAction(wrappers.RecordEpisodeStatistics(env))
        env = wrappers.NormalizeObservation(env)
        env = wrappers.TransformObservation(env, clipped, env.observation_space)
        return wrappers.TransformReward(wrappers.NormalizeReward(env, gamma=0.99), clipped)

    python, env = makes(), makes()
    stepper = compile_env(env)
    assert all(not why for _, why in notes_of(stepper))
    draw = np.random.default_rng(1)
    for step in range(400):
        if step % 50 == 0:
            assert seen(env.reset(seed=step)) == seen(python.reset(seed=step))
        action = draw.normal(size=6).astype(np.float32)
        assert seen(stepper.step(action)) == seen(python.step(action))
    assert seen(env.get_wrapper_attr("obs_rms")) == seen(python.get_wrapper_attr("obs_rms"))
    assert seen(env.get_wrapper_attr("return_rms")) == seen(python.get_wrapper_attr("return_rms"))

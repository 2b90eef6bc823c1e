"""Compiled MuJoCo envs do as Gymnasium's: results, states, errors, warnings, bit for bit."""

import pickle
import re
import sys
import warnings
from contextlib import closing
from functools import cache, partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compiled_wrappers import altered, function_of, happens, names_of, seen

from shmvec import FaultPolicy, ShmVectorEnv
from shmvec._wrappers import code_of_env, compile_env, summary_of

pytest.importorskip("mujoco")
pytestmark = pytest.mark.deep
pytestmark = [
    pytestmark,
    pytest.mark.filterwarnings("ignore:.*out of date", "ignore:.*settotalmass"),
]

KINDS = ("HalfCheetah", "Hopper", "Walker2d", "Swimmer", "Ant")
NAMES = [f"{name}-v{n}" for name in KINDS for n in (4, 5)]
NAN, INF = float("nan"), float("inf")


@cache
def pair(name):
    """Two envs that are alike, which are used again and again: to make one takes long."""
    return gym.make(name, disable_env_checker=True), gym.make(name, disable_env_checker=True)


def state(env):
    """The state of an env's simulation, and its attributes."""
    env = env.unwrapped
    names = ("qpos", "qvel", "ctrl", "qacc", "cfrc_ext", "time")
    own = {name: each for name, each in vars(env).items() if name not in ("model", "data")}
    return [seen(getattr(env.data, name)) for name in names], sorted(own)


def same(python, env, stepper, action):
    """Steps both, and compares all that can be seen."""
    mine, expected = happens(lambda: stepper.step(action)), happens(lambda: python.step(action))
    assert re.sub("0x[0-9a-f]+", "", str(mine)) == re.sub("0x[0-9a-f]+", "", str(expected))
    assert state(env) == state(python)
    return expected


def action_of(draw, size, kind):
    action = draw.normal(size=size) * draw.choice([0.1, 1, 1e3])
    if kind == "list":
        return action.tolist()
    if kind == "longer":
        return np.zeros(size + 1)
    if kind == "flat":
        return np.zeros((1, size), np.float32)
    if kind == "odd":
        action[draw.integers(size)] = draw.choice([NAN, INF, 1e200, 1e-200, -0.0])
        return action
    if kind == "strided":
        return np.repeat(action, 2)[::2]
    return action.astype(kind)


def velocities(value):
    def change(env):
        env = env.unwrapped
        env.set_state(env.init_qpos, np.full_like(env.init_qvel, value))

    return change


def at(value):
    """A position in which no simulation leaves an env."""

    def change(env):
        env.unwrapped.data.qpos[:3] = value

    return change


def replaced_data(env):
    import mujoco

    env.unwrapped.data = mujoco.MjData(env.unwrapped.model)


def replaced(name):
    """One more method of this name, of the env itself, which does the same."""

    def change(env):
        own = getattr(env.unwrapped, name)
        setattr(env.unwrapped, name, lambda *arguments: own(*arguments))

    return change


SETTINGS = {
    "_exclude_current_positions_from_observation": [False, True, 2, []],
    "_forward_reward_weight": [1.0, 2, np.float32(0.5), 1e308, NAN],
    "_ctrl_cost_weight": [0.1, 1e-3, 3, np.float64(0.3), np.float32(0.7)],
    "_reset_noise_scale": [0.5, 0.1],
    "_healthy_reward": [1.0, 2, np.float32(1)],
    "_contact_cost_weight": [5e-4, 2, np.float32(0.5), 1e308, NAN],
    "_contact_force_range": [(-1.0, 1.0), (-1e-3, INF), (0.0, 1.0), (-1e-200, 1e-200), (2.0, -2.0),
                             (NAN, 1.0), (-1e300, 1e300), (-1, 1), [-0.5, 0.5]],
    "_include_cfrc_ext_in_observation": [True, False, np.True_],
    "_use_contact_forces": [True, False, 1],
    "_main_body": [1, 2, "torso", -1, 1.0, "none", 99],
    "_healthy_z_range": [(0.8, 2.0), (1, 2), (0.0, INF), [0.8, 2.0], (NAN, 3.0), (0.75, 0.75)],
    "_healthy_angle_range": [(-1.0, 1.0), (-INF, INF), (-0.1, 0.1)],
    "_healthy_state_range": [(-100.0, 100.0), (-1.0, 1.0), (-10, 10)],
    "_terminate_when_unhealthy": [True, False, 0],
    "frame_skip": [1, 4, 5, 2.5, 0],
    "render_mode": ["human", None],
}  # fmt: skip
CHANGES = [
    lambda env: env.reset(seed=3),
    velocities(0.5),
    velocities(1e12),
    velocities(NAN),
    at(1e200),
    at(-INF),
    at([1.0, 1.0, 0.0]),
    replaced_data,
    *map(replaced, ["do_simulation", "_get_obs", "control_cost", "get_body_com", "step"]),
]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 1000),
    steps=st.lists(
        st.tuples(
            st.one_of(
                st.none(),
                st.none(),
                st.none(),
                st.sampled_from(CHANGES),
                st.sampled_from([(key, each) for key in SETTINGS for each in SETTINGS[key]]),
            ),
            st.sampled_from(
                ["float32", "float32", "float64", "int64", "list", "longer", "flat", "odd",
                 "strided"]
            ),
        ),
        max_size=25,
    ),
)  # fmt: skip
def test_any_step(name, seed, steps):
    envs = pair(name)
    before = [(vars(each.unwrapped).copy(), vars(each).copy()) for each in envs]
    for each in envs:
        each.unwrapped.render = lambda: warnings.warn("rendered", stacklevel=1)
    python, env = envs
    stepper = compile_env(env)
    draw = np.random.default_rng(seed)
    try:
        assert seen(env.reset(seed=seed)) == seen(python.reset(seed=seed))
        for change, kind in steps:
            for each in envs:
                if callable(change):
                    happens(partial(change, each))
                elif change and change[0] in vars(each.unwrapped):
                    setattr(each.unwrapped, *change)
            same(python, env, stepper, action_of(draw, env.action_space.shape[0], kind))
    finally:
        for each, (inner, outer) in zip(envs, before, strict=True):
            vars(each.unwrapped).clear()
            vars(each.unwrapped).update(inner)
            vars(each).update(outer)


@pytest.mark.parametrize("name", NAMES)
def test_many_steps(name):
    python, env = pair(name)
    stepper = compile_env(env)
    assert stepper is not env
    draw = np.random.default_rng(1)
    ended = 0
    for episode in range(8):
        assert seen(env.reset(seed=episode)) == seen(python.reset(seed=episode))
        for _ in range(50):
            action = draw.uniform(-1, 1, env.action_space.shape)
            _, result = same(python, env, stepper, action.astype(np.float32))[0]
            ended += result[2] != seen(False)
    assert bool(ended) is not name.startswith(("HalfCheetah", "Swimmer"))


@pytest.mark.parametrize("kind", ["warn", "raise", "ignore"])
@pytest.mark.parametrize("name", NAMES)
def test_floating_point_errors_are_numpys(name, kind):
    python, env = pair(name)
    stepper = compile_env(env)
    size = env.action_space.shape[0]
    with np.errstate(all=kind):
        for value in (1e200, 1e-200, 1e-30, INF, -INF, NAN, 3e38, -0.0, 1.0):
            for dtype in (np.float32, np.float64):
                for each in (python, env):
                    each.reset(seed=1)
                with np.errstate(all="ignore"):
                    action = np.full(size, value).astype(dtype)
                same(python, env, stepper, action)
            for change in (velocities(value), at(value)):
                for each in (python, env):
                    with np.errstate(all="ignore"):
                        happens(partial(change, each))
                same(python, env, stepper, np.zeros(size, np.float32))


def made(name, **own):
    """An env; if anything of it is its own, it is of a subclass that has this."""
    base = type(pair(name)[0].unwrapped)
    kind = type("Own", (base,), {}) if own else base
    env = kind()
    for attribute, value in own.items():
        setattr(kind, attribute, value)
    return env


def own_reward(self, velocity, action):
    return 2 * velocity, {"own": len(action)}


def own_observation(self):
    return self.data.qpos[:3] * 2


OWN = {
    "_get_rew": own_reward,
    "_get_obs": own_observation,
    "control_cost": lambda self, action: 0.5,
    "contact_forces": property(lambda self: self.data.cfrc_ext * 2),
    "contact_cost": property(lambda self: 0.25),
    "get_body_com": lambda self, name: self.data.qpos,
    "is_healthy": property(lambda self: self.data.qpos[1] > 1),
    "healthy_reward": property(lambda self: 3),
    "terminated": property(lambda self: self.data.qpos[1] < 1),
    "dt": property(lambda self: 0.1),
    "do_simulation": lambda self, action, frames: self._step_mujoco_simulation(action, 1),
    "_step_mujoco_simulation": lambda self, action, frames: None,
    "state_vector": lambda self: np.zeros(5),
}


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("name", NAMES)
def test_what_a_subclass_overrides_is_called(name, own):
    python, env = (made(name, **{own: OWN[own]}) for _ in range(2))
    stepper = compile_env(env)
    assert stepper is not env and stepper.notes == []
    for each in (python, env):
        each.reset(seed=1)
    for _ in range(5):
        same(python, env, stepper, np.full(env.action_space.shape, 0.3, np.float32))


@pytest.mark.parametrize("own", ["step", "__getattribute__"])
def test_a_subclass_with_a_step_of_its_own_stays_python(own):
    def step(self, action):
        return (*super(type(self), self).step(action)[:4], {"mine": True})

    odd = {"step": step, "__getattribute__": lambda self, name: object.__getattribute__(self, name)}
    env = made("HalfCheetah-v5", **{own: odd[own]})
    assert compile_env(env) is env


def test_an_env_as_it_is_made_is_compiled():
    env = gym.make("HalfCheetah-v5")
    assert names_of(compile_env(env)) == ["TimeLimit", "OrderEnforcing", "PassiveEnvChecker"]
    assert summary_of(compile_env(env)) == "3 of 3 compiled"
    assert summary_of(compile_env(env.unwrapped)) == ""


ODD_REWARDS = [[1.0, {"own": 1}], None, (1.0,), (1, 2, 3), 5, "xy", (1.0, None), (1.0, [1])]


@pytest.mark.parametrize("rewards", ODD_REWARDS, ids=repr)
@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Walker2d-v5"])
def test_what_an_own_reward_returns_is_unpacked_as_python_does(name, rewards):
    python, env = (made(name, _get_rew=lambda self, *_: rewards) for _ in range(2))
    for each in (python, env):
        each.reset(seed=1)
    same(python, env, compile_env(env), np.full(6, 0.3, np.float32))


def read_only_controls(env):
    env.data.ctrl.flags.writeable = False


def list_as_reward(env):
    vars(env)["_healthy_reward"] = [0.5, 1.5]


@pytest.mark.parametrize("change", [read_only_controls, list_as_reward])
@pytest.mark.parametrize("name", NAMES)
def test_what_raises_in_python_raises(name, change):
    python, env = (made(name) for _ in range(2))
    for each in (python, env):
        each.reset(seed=1)
        change(each)
    same(python, env, compile_env(env), np.full(env.action_space.shape, 0.3, np.float32))


@pytest.mark.parametrize("kind", ["warn", "raise"])
def test_numpy_warns_of_signalling_nans(kind):
    python, env = (made("HalfCheetah-v5") for _ in range(2))
    for each in (python, env):
        each.reset(seed=1)
    action = np.full(6, 0x7F800001, np.uint32).view(np.float32)
    with np.errstate(all=kind):
        same(python, env, compile_env(env), action)


def warns(name, value):
    """A property that warns whenever it is read."""
    return property(
        lambda self: (warnings.warn(name, stacklevel=1), value)[1], lambda self, value: None
    )


@pytest.mark.parametrize("name", ["Hopper-v4", "Hopper-v5", "Walker2d-v5"])
def test_ranges_are_read_in_the_same_order(name):
    ranges = [f"_healthy_{each}_range" for each in ("state", "z", "angle")]
    own = {each: warns(each, (-5.0, 5.0)) for each in ranges}
    python, env = (made(name, **own) for _ in range(2))
    for each in (python, env):
        each.reset(seed=1)
    same(python, env, compile_env(env), np.zeros(env.action_space.shape, np.float32))


def test_the_way_is_computed_before_the_time():
    own = {"do_simulation": lambda *_: None, "dt": property(lambda self: 1 / 0)}
    python, env = (made("HalfCheetah-v5", **own) for _ in range(2))
    for each in (python, env):
        each.data.qpos[0] = INF
    with np.errstate(all="raise"):
        same(python, env, compile_env(env), np.zeros(6, np.float32))


@pytest.mark.parametrize("module", [True, False])
def test_what_is_replaced_in_mujoco_is_called(module, monkeypatch):
    import mujoco
    from gymnasium.envs.mujoco import mujoco_env

    python, env = (made("HalfCheetah-v5") for _ in range(2))
    stepper = compile_env(env)
    action = np.zeros(6, np.float32)
    for each in (python, env):
        each.reset(seed=1)
    same(python, env, stepper, action)

    class Other:
        def __getattr__(self, name):
            return getattr(mujoco, name)

        def mj_step(self, model, data, nstep):
            for each in (python, env):
                if each.data is data:
                    each.data = mujoco.MjData(model)

        def mj_rnePostConstraint(self, model, data):
            data.time = 5

    other = Other()
    if module:
        monkeypatch.setattr(mujoco_env, "mujoco", other)
    else:
        monkeypatch.setattr(mujoco, "mj_step", other.mj_step)
        monkeypatch.setattr(mujoco, "mj_rnePostConstraint", other.mj_rnePostConstraint)
    same(python, env, stepper, action)
    assert env.data.time == 5


def test_a_property_of_another_class_is_not_recognised(monkeypatch):
    class Other(property):
        def __get__(self, instance, owner=None):
            return self if instance is None else 3.0

    python, env = (made("Hopper-v5") for _ in range(2))
    kind = type(env)
    monkeypatch.setattr(kind, "healthy_reward", Other(kind.healthy_reward.fget))
    for each in (python, env):
        each.reset(seed=1)
    same(python, env, compile_env(env), np.zeros(3, np.float32))


class Mine(gym.Wrapper):
    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, reward + 1, *rest


@pytest.mark.parametrize("wrap", [Mine, lambda env: wrappers.ClipAction(Mine(env))])
def test_an_env_beneath_a_wrapper_of_ones_own(wrap):
    python, env = (wrap(made("Hopper-v5")) for _ in range(2))
    stepper = compile_env(env)
    for each in (python, env):
        each.reset(seed=1)
    called = set()
    for _ in range(5):
        same(python, env, stepper, np.full(3, 0.3, np.float32))
        sys.setprofile(lambda frame, *_: called.add(frame.f_code))
        stepper.step(np.zeros(3, np.float32))
        sys.setprofile(None)
        python.step(np.zeros(3, np.float32))
    assert "step" not in vars(env.unwrapped)
    assert Mine.step.__code__ in called
    assert type(env.unwrapped).step.__code__ not in called


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_source_is_recognised_and_another_is_not(name, monkeypatch, tmp_path):
    env = made(name)
    kind = type(env)
    assert compile_env(env) is not env
    for called, found in code_of_env(kind):
        function = function_of(found)
        with monkeypatch.context() as patch:
            patch.setattr(function, "__code__", altered(function, tmp_path))
            stepper = compile_env(env)
            assert (stepper is env) == called.endswith(".step")


def test_a_class_that_is_changed_afterwards_is_obeyed(monkeypatch):
    env = made("HalfCheetah-v5")
    stepper = compile_env(env)
    env.reset(seed=1)
    action = np.zeros(6, np.float32)
    assert len(stepper.step(action)[0]) == 17
    monkeypatch.setattr(type(env), "control_cost", lambda self, action: 2.0)
    assert stepper.step(action)[4]["reward_ctrl"] == -2
    monkeypatch.setattr(type(env), "step", lambda self, action: "patched")
    assert stepper.step(action) == "patched"


def test_an_env_that_is_copied_or_pickled_between_steps_is_whole():
    env = made("Walker2d-v5")
    stepper = compile_env(env)
    env.reset(seed=1)
    before = set(vars(env))
    stepper.step(np.zeros(6))
    assert set(vars(env)) == before
    other = pickle.loads(pickle.dumps(env))  # Gymnasium's own: it is made anew
    assert seen(other.reset(seed=1)) == seen(env.reset(seed=1))
    same(other, env, stepper, np.full(6, 0.3))


@pytest.mark.parametrize("compile_wrappers", [False, True])
def test_a_simulation_that_takes_too_long_is_interrupted(compile_wrappers):
    makes = [lambda: gym.make("HalfCheetah-v5")] * 2
    faults = FaultPolicy(on_timeout="reset", step_timeout=1.0)
    with closing(
        ShmVectorEnv(makes, num_workers=2, faults=faults, compile_wrappers=compile_wrappers)
    ) as envs:
        envs.reset(seed=1)
        actions = np.zeros((2, 6), np.float32)
        envs.step(actions)
        envs.set_attr("frame_skip", [300_000, 5])  # seconds
        *_, truncations, infos = envs.step(actions)
        assert truncations.tolist() == [True, False]
        assert infos["fault"]["type"][0] == "EnvTimeoutError"

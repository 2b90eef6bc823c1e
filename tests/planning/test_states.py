"""States: an env that is set to one goes on exactly as the env from which it was taken."""

import copy
import threading
import warnings

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter
from equality import same
from gymnasium import wrappers
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import output_of
from tables import deep

from shmvec.planning import StateAccess
from shmvec.spaces import Anything

CLASSIC = [
    "CartPole-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Pendulum-v1",
    "Acrobot-v1",
    "FrozenLake-v1",
    "CliffWalking-v1" if "CliffWalking-v1" in gym.registry else "CliffWalking-v0",
    "Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3",
    "Blackjack-v1",
]
MUJOCO = [
    "Ant-v5",
    "HalfCheetah-v5",
    "Humanoid-v5",
    "Reacher-v5",
]


def make(id, **options):
    """An env, without the warnings of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if id.startswith("ALE/"):
            pytest.importorskip("ale_py")
        if id in MUJOCO:
            mujoco = pytest.importorskip("mujoco")
            mujoco.set_mju_user_warning(lambda message: None)
        return gym.make(id, **options)


def kept(state):
    return state.copy() if isinstance(state, np.ndarray) else copy.deepcopy(state)


def goes_on_as(one, other, steps=40, include_rng=True):
    """Takes the state of one before each step, sets it in the other, which was elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one.reset(seed=1)
        other.reset(seed=2)
        here, there = StateAccess(one, include_rng), StateAccess(other, include_rng)
        assert here.space == there.space
        arrays = isinstance(here.space, gym.spaces.Box)  # equal states need not be equal pickles
        one.action_space.seed(0)
        other.action_space.seed(1)
        for _ in range(steps):
            action = one.action_space.sample()
            state = kept(here.get())
            for _ in range(2):
                _, _, terminated, truncated, _ = other.step(other.action_space.sample())
                if terminated or truncated:
                    other.reset()
            there.set(state)
            assert not arrays or same(kept(there.get()), state)
            result = one.step(action)
            assert same(result, other.step(action))
            assert not arrays or same(kept(here.get()), kept(there.get()))
            if result[2] or result[3]:
                one.reset()
    one.close()
    other.close()


@pytest.mark.deep
@pytest.mark.parametrize("id", CLASSIC)
def test_classic_control_and_toy_text(id):
    one, other = make(id), make(id)
    state = StateAccess(one, True) if one.reset(seed=0) else None
    assert isinstance(state.space, gym.spaces.Box) and state.space.dtype == np.float64
    goes_on_as(one, other)


@pytest.mark.deep
@pytest.mark.parametrize("id", MUJOCO)
def test_mujoco(id):
    one = make(id)
    one.reset(seed=0)
    assert StateAccess(one, True).space.dtype == np.float64
    goes_on_as(one, make(id), 15)


def atari(game="Pong", **options):
    return make(f"ALE/{game}-v5", repeat_action_probability=0, **options)


@pytest.mark.deep
def test_atari():
    one = atari()
    one.reset(seed=0)
    assert StateAccess(one, True).space.dtype == np.uint8
    goes_on_as(one, atari(), 10)


@pytest.mark.deep
@pytest.mark.parametrize("set_first", [0, 1], ids=["of a reset", "of a step"])
def test_a_game_whose_reset_ends_in_the_middle_of_a_frame(set_first):
    """Which ale-py's state does not say."""
    one, other = (atari("Qbert", obs_type="ram", frameskip=1) for _ in range(2))
    one.reset(seed=1)
    here, states, results = StateAccess(one, True), [], []
    for _ in range(3):
        states.append(kept(here.get()))
        results.append(one.step(0))
    other.reset(seed=2)
    there = StateAccess(other, True)
    for i in (set_first, 0, 0, 2):
        there.set(states[i])
        assert same(results[i], other.step(0))


@pytest.mark.deep
def test_atari_as_it_is_learned_from():
    pytest.importorskip("cv2")

    def stacked():
        return wrappers.FrameStackObservation(
            wrappers.AtariPreprocessing(atari(frameskip=1), noop_max=3), 4
        )

    one = stacked()
    one.reset(seed=0)
    assert isinstance(StateAccess(one, True).space, gym.spaces.Box)  # of fixed size, all of it
    goes_on_as(one, stacked(), 10)


@pytest.mark.deep
def test_wrappers_of_gymnasium_that_change_nothing_leave_states_arrays():
    def wrapped():
        env = wrappers.ClipReward(make("Pendulum-v1"), -1, 1)
        return wrappers.RescaleAction(env, np.float32(-1), np.float32(1))

    goes_on_as(wrapped(), wrapped())
    env = wrapped()
    env.reset()
    assert isinstance(StateAccess(env, True).space, gym.spaces.Box)


@pytest.mark.deep
def test_wrappers_with_a_memory():
    """They are pickled; the env inside is as before."""

    def wrapped():
        env = wrappers.StickyAction(make("CartPole-v1"), 0.5)
        env = wrappers.RecordEpisodeStatistics(env)
        return wrappers.FrameStackObservation(wrappers.NormalizeObservation(env), 2)

    one, other = wrapped(), wrapped()
    one.reset(seed=1)
    other.reset(seed=2)
    here, there = StateAccess(one, True), StateAccess(other, True)
    assert isinstance(here.space, Anything)
    for _ in range(20):
        state = kept(here.get())
        if other.step(0)[2]:
            other.reset()
        there.set(state)
        result, again = one.step(1), other.step(1)
        assert same(result[:4], again[:4])
        assert one.get_wrapper_attr("episode_lengths") == other.get_wrapper_attr("episode_lengths")
        if result[2]:
            one.reset()
            other.reset()


@pytest.mark.deep
def test_any_other_env_is_pickled():
    one, other = Counter(length=30), Counter(length=30)
    goes_on_as(one, other)


class Stateful(Counter):
    """Says itself what its state is."""

    def __init__(self, kind):
        super().__init__(length=50)
        self.kind = kind

    def get_state(self):
        state = [self.count, self.noise, *_words(self.np_random)]
        return {"float": np.array(state), "bytes": np.array(state).tobytes(), "object": state}[
            self.kind
        ]

    def set_state(self, state):
        if self.kind == "bytes":
            state = np.frombuffer(state)
        self.count, self.noise = int(state[0]), float(state[1])
        _set_words(self.np_random, state[2:])


def _words(generator):
    state = generator.bit_generator.state["state"]
    return [float(state[key] >> 16 * i & 0xFFFF) for key in ("state", "inc") for i in range(8)]


def _set_words(generator, words):
    numbers = [sum(int(word) << 16 * i for i, word in enumerate(words[b : b + 8])) for b in (0, 8)]
    whole = generator.bit_generator.state
    whole["state"] = dict(zip(("state", "inc"), numbers, strict=True))
    generator.bit_generator.state = whole


@pytest.mark.deep
@pytest.mark.parametrize(
    "kind, limited", [("float", False), ("bytes", False), ("object", False), ("float", True)]
)
def test_an_env_that_says_itself_what_its_state_is(kind, limited):
    def stateful():
        env = Stateful(kind)
        return wrappers.TimeLimit(env, 40) if limited else env

    goes_on_as(stateful(), stateful())
    env = stateful()
    env.reset(seed=0)
    state = StateAccess(env, True)
    assert isinstance(state.space, gym.spaces.Box) == (kind == "float")
    if not limited:  # its own state, as it is
        assert same(kept(state.get()), env.get_state())


class Growing(Stateful):
    def get_state(self):
        return np.zeros(2 + self.count)


@pytest.mark.deep
def test_an_array_of_changing_size_is_refused():
    env = Growing("float")
    env.reset()
    state = StateAccess(env, True)
    env.step(0)
    with pytest.raises(RuntimeError, match="states of changing size must not be arrays"):
        state.get()


class Unpicklable(Counter):
    def reset(self, **kwargs):
        self.handle = threading.Lock()
        return super().reset(**kwargs)


@pytest.mark.deep
def test_an_env_that_cannot_be_pickled_is_named():
    env = Unpicklable()
    env.reset()
    with pytest.raises(TypeError, match="Unpicklable cannot be taken: .*set_state"):
        StateAccess(env, True).get()


@pytest.mark.deep
def test_a_state_of_another_env_is_refused():
    env = make("CartPole-v1")
    env.reset()
    state = StateAccess(env, True)
    with pytest.raises(ValueError, match="float64"):
        state.set(np.zeros(3))
    with pytest.raises(ValueError, match="float64"):
        state.set(np.zeros(state.space.shape, np.float32))
    with pytest.raises(ValueError, match="no state of a CartPoleEnv"):
        state.set(np.full(state.space.shape, 99.0))


@pytest.mark.deep
@pytest.mark.parametrize("include_rng", [False, True])
@pytest.mark.parametrize("id", ["FrozenLake-v1", "counter"])
def test_dice_are_in_the_state_or_not(id, include_rng):
    env = Counter(length=1000) if id == "counter" else make(id)
    env.reset(seed=0)
    state = StateAccess(env, include_rng)
    first = kept(state.get())
    seen = set()
    for _ in range(40):
        state.set(first)
        observation, *_ = env.step(1)
        seen.add(float(np.max(observation)) if id != "counter" else float(observation[2]))
    assert (len(seen) == 1) == include_rng


@pytest.mark.deep
@given(steps=st.lists(st.integers(0, 1), max_size=30), seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_a_state_keeps_types_and_values(steps, seed):
    env = make("CartPole-v1")
    env.reset(seed=seed)
    state = StateAccess(env, True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps beyond the end
        for action in steps:
            env.step(action)
    before = {key: copy.deepcopy(value) for key, value in vars(env.unwrapped).items()}
    taken = kept(state.get())
    env.reset(seed=seed + 1)
    state.set(taken)
    for key in ("state", "steps_beyond_terminated"):
        assert type(getattr(env.unwrapped, key)) is type(before[key])
        np.testing.assert_array_equal(getattr(env.unwrapped, key), before[key])


class Noise(gym.ObservationWrapper):
    """Rolls the dice of the env inside, as wrappers do: they have no others."""

    def observation(self, observation):
        return observation + self.np_random.normal(size=observation.shape)


def drawn(env):
    return wrappers.TransformObservation(env, lambda o: o + env.np_random.normal(), None)


@pytest.mark.parametrize(
    "wrap, id",
    [
        (drawn, "CartPole-v1"),
        *deep(
            (Noise, "HalfCheetah-v5"),
            (lambda env: wrappers.StickyAction(env, 0.5), "CartPole-v1"),
        ),
    ],
)
def test_dice_of_wrappers(id, wrap):
    goes_on_as(wrap(make(id)), wrap(make(id)), 20)


class Draws(gym.Wrapper):
    """Draws parameters of the physics at each reset; rewards what MuJoCo has derived before."""

    def reset(self, **kwargs):
        self.factor = 1 + np.random.default_rng(kwargs.get("seed")).random()
        env = self.unwrapped
        if hasattr(env, "model"):
            env.model.body_mass[1] = self.factor
            env.model.opt.gravity[2] = -9 * self.factor
            env.model.opt.viscosity = self.factor
        else:
            env.gravity = 9 * self.factor
        return self.env.reset(**kwargs)

    def step(self, action):
        data = getattr(self.unwrapped, "data", None)
        before = 0.0 if data is None else data.geom_xpos[1, 0] + data.cfrc_ext.sum()
        observation, reward, *rest = self.env.step(action)
        return observation, reward + before, *rest


@pytest.mark.deep
@pytest.mark.parametrize("id", ["CartPole-v1", "HalfCheetah-v5"])
def test_physics_that_a_wrapper_draws_and_reads(id):
    goes_on_as(Draws(make(id)), Draws(make(id)), 20)


class Named(gym.Env):
    """Its attributes have names that other envs use for what is no state; some are in slots."""

    __slots__ = ("__hidden", "slot")
    observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.data = self.model = self.other = self.slot = self.__hidden = 0
        return self.seen(), {}

    def seen(self):
        return np.array([self.data, self.model, self.other, self.slot, self.__hidden], float)

    def step(self, action):
        self.data += int(action)
        self.model -= int(action)
        self.slot += 1
        self.__hidden += 2
        return self.seen(), 0.0, False, False, {}


class Holds(gym.Env):
    """Holds an env, and is no gym.Wrapper."""

    observation_space, action_space = Named.observation_space, Named.action_space

    def __init__(self):
        self.env = Named()

    def reset(self, *, seed=None, options=None):
        return self.env.reset()

    def step(self, action):
        return self.env.step(action)


@pytest.mark.deep
@pytest.mark.parametrize("env_fn", [Named, Holds])
def test_attributes_are_state_whatever_their_name_and_place(env_fn):
    goes_on_as(env_fn(), env_fn())


@pytest.mark.deep
def test_a_simulation_of_an_env_of_ones_own_is_state():
    mujoco = pytest.importorskip("mujoco")

    class Slider(gym.Env):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
        action_space = gym.spaces.Box(-1, 1, (1,))

        def __init__(self):
            self.model = mujoco.MjModel.from_xml_string(
                "<mujoco><worldbody><body><joint name='j' type='slide'/><geom size='.1'/></body>"
                "</worldbody><actuator><motor joint='j'/></actuator></mujoco>"
            )
            self.data = mujoco.MjData(self.model)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            mujoco.mj_resetData(self.model, self.data)
            self.data.qvel[0] = self.np_random.normal()
            return self.data.qpos.copy(), {}

        def step(self, action):
            self.data.ctrl[:] = action
            mujoco.mj_step(self.model, self.data)
            return self.data.qpos.copy(), 0.0, False, False, {}

    goes_on_as(Slider(), Slider())


SCRIPT = """
import enum, sys
import gymnasium as gym
from shmvec.planning import PlanningVectorEnv

class Color(enum.Enum):
    RED = 1

class Lamp(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.color = Color.RED
        return 0, {}

    def step(self, action):
        return int(self.color is Color.RED), 0.0, False, False, {}

if __name__ == "__main__":
    env = PlanningVectorEnv(Lamp, 2, context=sys.argv[1])
    state, *_ = env.reset(seed=0)
    for _ in range(2):
        states, observations, *_ = env.step_batch([0] * 4, [state] * 4)
        assert observations.tolist() == [1] * 4, observations
        state = states[0]
    assert env.step(0, state)[1] == 1
    assert env.step_batch([0] * 4, [env.step(0, state)[0]] * 4)[1].tolist() == [1] * 4
    env.close()
"""


@pytest.mark.deep
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_classes_of_a_script_stay_the_same_in_all_workers(context, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    output_of(script, context)

"""PlanningVectorEnv: every row of "plangym" in what people must find, and plangym's faults."""

import multiprocessing
import os
import signal
import threading
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter, Spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import deep

from shmvec.planning import PlanningVectorEnv, Promise, StateAccess
from shmvec.spaces import Anything

WORKERS = pytest.mark.parametrize("n_workers", [2, *deep(0)])


def cartpole():
    return gym.make("CartPole-v1")


def counter():
    return gym.wrappers.TimeLimit(Counter(length=6), 50)


class Raises(Counter):
    def __init__(self, error=None, die=False):
        super().__init__(length=1000)
        self.error, self.die = error, die

    def step(self, action):
        if action == 3:
            if self.die:
                os.kill(os.getpid(), signal.SIGKILL)
            raise self.error()
        return super().step(action)


def planning(env_fn=cartpole, n_workers=2, rows=8, **options):
    """With few rows, which are quick to make."""
    return closing(PlanningVectorEnv(env_fn, n_workers, rows=rows, **options))


def states_and_actions(env, count, seed=0):
    """So many different states, along an episode, and random actions."""
    env.action_space.seed(seed)
    state, *_ = env.reset(seed=seed)
    states, actions = [], []
    for _ in range(count):
        states.append(state)
        action = env.action_space.sample()
        actions.append(action)
        state, _, _, end, truncated, _ = env.step(action, state)
        if end or truncated:
            state, *_ = env.reset()
    return states, actions


def alone(env_fn, states, actions, dt):
    """What step_batch should return: one env, set to each state."""
    env = env_fn()
    env.reset(seed=123)
    access = StateAccess(env, True)
    for state, action, times in zip(states, actions, dt, strict=True):
        access.set(state)
        total = 0.0
        for _ in range(times):
            observation, reward, end, truncated, info = env.step(action)
            total += reward
            if end or truncated:
                break
        after = access.get()
        yield (
            after.copy() if isinstance(after, np.ndarray) else after,
            observation,
            total,
            end,
            truncated,
        )
    env.close()


# ---- step_batch ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n_workers, count, rows",
    [
        (2, 40, 5),
        *deep((0, 7, 5), (1, 7, None), (3, 1, None)),
    ],
)
def test_step_batch(n_workers, count, rows):
    with planning(n_workers=n_workers, rows=rows) as env:
        states, actions = states_and_actions(env, count)
        dt = 1 + np.arange(count) % 4
        new, observations, rewards, ends, truncateds, infos = env.step_batch(actions, states, dt)
        assert new.shape == (count, *env.state_space.shape)
        assert observations.shape == (count, 4) and observations.dtype == np.float32
        assert rewards.dtype == np.float64 and ends.dtype == truncateds.dtype == bool
        for row, expected in enumerate(alone(cartpole, states, actions, dt)):
            np.testing.assert_array_equal(new[row], expected[0])
            np.testing.assert_array_equal(observations[row], expected[1])
            assert (rewards[row], ends[row], truncateds[row]) == expected[2:]
        assert infos == {}


@pytest.mark.deep
@given(data=st.data(), count=st.integers(0, 60), rows=st.integers(2, 9))
@settings(max_examples=6, deadline=None)
def test_step_batch_of_any_size(data, count, rows):
    with planning(counter, rows=rows) as env:
        assert isinstance(env.state_space, Anything)
        states, actions = states_and_actions(env, 8)
        which = data.draw(st.lists(st.integers(0, 7), min_size=count, max_size=count))
        dt = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
        states, actions = [states[i] for i in which], [actions[i] for i in which]
        new, observations, rewards, ends, truncateds, infos = env.step_batch(
            actions, states, np.array(dt, int)
        )
        assert len(new) == len(observations) == len(rewards) == count
        for row, expected in enumerate(alone(counter, states, actions, dt)):
            np.testing.assert_array_equal(observations[row], expected[1])
            assert (rewards[row], ends[row], truncateds[row]) == expected[2:]
            assert infos["count"][row] == observations[row][0]


@pytest.mark.deep
@pytest.mark.parametrize("n_workers, rows", [(0, None), (2, 5)])
def test_infos_as_a_list_are_those_that_envs_return(n_workers, rows):
    class Tells(Counter):
        def step(self, action):
            *result, info = super().step(action)
            info = {"count": info["count"], "of": {"x": 1.5}, "even": self.count % 2 == 0}
            return *result, info if action else {}

    with planning(Tells, n_workers, rows=rows, list_infos=True) as env:
        state, *_ = env.reset()
        actions = [0, 1] * 6
        *_, infos = env.step_batch(actions, [state] * 12)
        assert infos == [{}, {"count": 1, "of": {"x": 1.5}, "even": False}] * 6
        assert type(infos[1]["count"]) is int and type(infos[1]["even"]) is bool
        assert env.step_batch([])[-1] == []
        if n_workers:
            *_, infos = env.reset(indices=range(n_workers))
            assert [set(info) for info in infos] == [{"reset"}] * n_workers


@pytest.mark.deep
def test_stepping_from_a_state_and_stepping_on_are_bit_identical():
    """MuJoCo, whose positions are one substep behind: a planner's path, and the env's own."""
    pytest.importorskip("mujoco")
    with planning(lambda: gym.make("Ant-v5"), include_rng=True) as env:
        state, *_ = env.reset(seed=3)
        real = gym.make("Ant-v5")
        real.reset(seed=3)
        for _ in range(12):
            action = env.sample_action()
            state, observations, rewards, *_ = env.step_batch([action] * 5, [state] * 5)
            observation, reward, *_ = real.step(action)
            for row in range(5):
                np.testing.assert_array_equal(observations[row], observation)
                np.testing.assert_array_equal(state[row], state[0])
                assert rewards[row] == reward
            state = state[0]
        real.close()


@pytest.mark.deep
def test_ten_actions_use_all_workers():
    """plangym's chunks of two left three of eight workers idle."""
    with planning(Identified, 8, rows=None) as env:
        *_, infos = env.step_batch([0] * 10)
        found = np.bincount(np.unique(infos["pid"], return_inverse=True)[1])
        assert len(found) == 8 and found.max() - found.min() <= 1


class Identified(Counter):
    def __init__(self):
        super().__init__(length=1000)

    def step(self, action):
        *result, info = super().step(action)
        return *result, {"pid": os.getpid()}


@pytest.mark.deep
@pytest.mark.parametrize("env_fn", [cartpole, counter])
def test_an_empty_batch(env_fn):
    with planning(env_fn) as env:
        new, observations, rewards, ends, truncateds, infos = env.step_batch([], [])
        assert len(new) == len(observations) == len(rewards) == len(ends) == len(truncateds) == 0
        assert observations.shape == (0, *env.observation_space.shape) and infos == {}
        assert len(env.step_batch([])) == 5


@pytest.mark.deep
def test_return_state():
    with planning() as env:
        state, *_ = env.reset(seed=0)
        assert len(env.step_batch([0], [state])) == 6
        assert len(env.step_batch([0], [state], return_state=False)) == 5
        assert len(env.step_batch([0])) == 5
        new, *rest = env.step_batch([0], return_state=True)
        assert new.shape == (1, len(state)) and len(rest) == 5


@pytest.mark.deep
@WORKERS
def test_without_states_each_workers_env_goes_on(n_workers):
    with planning(counter, n_workers) as env:
        env.reset(seed=0)
        workers = max(1, n_workers)
        for count in (1, 2, 3):
            observations, *_ = env.step_batch([1] * workers)
            assert observations[:, 0].tolist() == [count] * workers


@pytest.mark.deep
def test_frameskip_and_dt_multiply_and_the_end_of_an_episode_ends_both():
    with planning(counter, frameskip=2) as env:
        state, *_ = env.reset(seed=0)
        _, observations, rewards, ends, _, _ = env.step_batch([0, 0, 0], [state] * 3, [1, 2, 9])
        assert observations[:, 0].tolist() == [2, 4, 6]
        assert rewards.tolist() == [1 + 2, 1 + 2 + 3 + 4, 1 + 2 + 3 + 4 + 5 + 6]
        assert ends.tolist() == [False, False, True]
        assert env.step(0, state, dt=2)[1][0] == 4


@pytest.mark.deep
def test_spaces_of_any_kind():
    observation = gym.spaces.Dict(a=gym.spaces.Box(0, 1, (2,)), b=gym.spaces.Discrete(3))
    action = gym.spaces.Dict(x=gym.spaces.Box(-1, 1, (2,)), y=gym.spaces.Discrete(2))
    with planning(lambda: Spaces(observation, action, length=100), rows=4) as env:
        state, first, _ = env.reset(seed=0)
        assert set(first) == {"a", "b"}
        actions = [env.sample_action() for _ in range(9)]
        new, observations, *_ = env.step_batch(actions, [state] * 9)
        assert observations["a"].shape == (9, 2) and observations["b"].shape == (9,)
        batched = {key: np.stack([one[key] for one in actions]) for key in ("x", "y")}
        again = env.step_batch(batched, [state] * 9)
        np.testing.assert_array_equal(again[1]["a"], observations["a"])
        expected, here, *_ = env.step(actions[0], state)
        np.testing.assert_array_equal(here["a"], observations["a"][0])


# ---- single-env forms, states of all ---------------------------------------------------------


@pytest.mark.deep
def test_reset():
    with planning() as env:
        state, observation, info = env.reset(seed=4)
        expected, _ = cartpole().reset(seed=4)
        np.testing.assert_array_equal(observation, expected)
        assert info == {}
        assert len(env.reset(return_state=False)) == 2
        np.testing.assert_array_equal(env.get_state(), env.get_state())


def test_reset_of_indices():
    with planning(n_workers=3) as env:
        env.reset(seed=0)
        states, observations, infos = env.reset(indices=[2, 0], seed=10)
        for row, worker in enumerate((2, 0)):
            np.testing.assert_array_equal(observations[row], cartpole().reset(seed=10 + worker)[0])
        assert states.shape == (2, len(env.get_state()))
        for wrong, error in (([3], ValueError), ([0, 0], ValueError), ([0.5], TypeError)):
            with pytest.raises(error):
                env.reset(indices=wrong)


@pytest.mark.parametrize("env_fn", [counter, *deep(cartpole)])
def test_get_state_and_set_state(env_fn):
    with planning(env_fn, n_workers=2) as env:
        state, *_ = env.reset(seed=0)
        for _ in range(3):
            env.step(1)
        later = env.get_state()
        env.set_state(state)
        first = env.step(0)[0]
        np.testing.assert_array_equal(first, env.step_batch([0, 0])[0][1])
        env.set_state(later)
        np.testing.assert_array_equal(env.step(0)[0], env.step_batch([0, 0])[0][1])


@WORKERS
def test_sync_states(n_workers):
    with planning(n_workers=n_workers) as env:
        env.reset(seed=0)
        state = env.step(1, env.get_state())[0]
        workers = max(1, n_workers)
        env.sync_states(state)
        one = env.step_batch([0] * workers, return_state=True)
        env.step_batch([1] * workers)
        env.sync_states(None)  # the local env's, which has made the same step
        other = env.step_batch([0] * workers, return_state=True)
        for row in range(workers):
            np.testing.assert_array_equal(one[0][row], other[0][row])


# ---- promises --------------------------------------------------------------------------------


def test_promises_in_any_order():
    """plangym's gave each other's results, and hung when called twice."""
    with planning(counter) as env:
        state, *_ = env.reset(seed=0)
        promises = [
            env.step_batch([i % 4] * (i + 1), [state] * (i + 1), blocking=False) for i in range(6)
        ]
        assert all(isinstance(promise, Promise) for promise in promises)
        for i in (3, 0, 5, 5, 1, 2, 4):
            new, observations, *_ = promises[i]()
            assert observations[:, 1].tolist() == [i % 4] * (i + 1)
        assert all(promise.done for promise in promises)


@pytest.mark.deep
def test_every_call_gives_a_promise():
    with planning() as env:
        reset = env.reset(seed=0, blocking=False)
        state = reset()[0]
        assert env.set_state(state, blocking=False)() is None
        assert env.sync_states(state, blocking=False)() is None
        assert len(env.reset(indices=[0], blocking=False)()) == 3
        assert len(env.step_batch([0], blocking=False)()) == 5


class Gate(Counter):
    """Waits in its second step until a file exists; each step is a look."""

    path = ""

    def __init__(self, path=""):
        super().__init__(length=1000)
        self.path = path
        self.event = threading.Event()

    def get_state(self):
        return np.zeros(1)

    def set_state(self, state):
        if state[0] == 1:
            while not os.path.exists(self.path):
                self.event.wait(0.001)


def test_a_promise_with_a_timeout(tmp_path):
    path = str(tmp_path / "open")
    with planning(lambda: Gate(path)) as env:
        promise = env.step_batch([0, 0], np.ones((2, 1)), blocking=False)
        following = env.step_batch([1, 1], np.zeros((2, 1)), blocking=False)
        with pytest.raises(multiprocessing.TimeoutError):
            promise(timeout=0.05)
        with pytest.raises(multiprocessing.TimeoutError):
            following(timeout=0.0)
        assert not promise.done and not following.done
        (tmp_path / "open").touch()
        assert following()[1][:, 1].tolist() == [1, 1]
        assert promise()[1][:, 1].tolist() == [0, 0]


@pytest.mark.deep
def test_a_promise_raises_what_the_env_raised_each_time_it_is_called():
    with planning(lambda: Raises(lambda: ValueError("no"))) as env:
        env.reset(seed=0)
        good = env.step_batch([0] * 4, blocking=False)
        bad = env.step_batch([3] * 4, blocking=False)
        after = env.step_batch([0] * 4, blocking=False)
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                bad()
        assert len(good()[1]) == len(after()[1]) == 4


# ---- the local env ---------------------------------------------------------------------------


def test_the_local_env_is_built_only_when_asked_for():
    with planning(lambda: Counts.make(os.getpid())) as env:
        Counts.made.clear()
        env.reset(seed=0)
        env.step_batch([0, 0])
        env.get_state()
        assert Counts.made == []
        env.step(0)
        assert Counts.made == [os.getpid()]


class Counts:
    made: list = []  # noqa: RUF012

    @staticmethod
    def make(parent):
        if os.getpid() == parent:
            Counts.made.append(parent)
        return Counter()


def test_any_attribute_or_method_of_the_env():
    with planning() as env:
        assert env.spec.id == "CartPole-v1"
        assert env.unwrapped.gravity == 9.8
        assert not hasattr(env, "x")  # plangym's killed a worker
        with pytest.raises(AttributeError):
            env.call("x")
        assert env.call("gravity") == (9.8, 9.8)
        assert env.call("has_wrapper_attr", "gravity") == (True, True)
        assert len(env.step_batch([0, 1])[0]) == 2


@pytest.mark.deep
def test_get_image_and_render():
    pytest.importorskip("pygame")
    with planning(lambda: gym.make("CartPole-v1", render_mode="rgb_array")) as env:
        state, *_ = env.reset(seed=0)
        image = env.get_image()
        assert image.ndim == 3 and image.dtype == np.uint8
        env.set_state(env.step(1, state, dt=5)[0])
        assert (env.render() != image).any()
    with planning() as env, pytest.raises(RuntimeError, match="render_mode='rgb_array'"):
        env.get_image()


class ShowsGeometries(gym.Wrapper):
    def render(self):
        return self.unwrapped.data.geom_xpos.copy()


@pytest.mark.deep
def test_what_is_rendered_is_the_state_that_was_set():
    mujoco = pytest.importorskip("mujoco")
    with planning(lambda: ShowsGeometries(gym.make("HalfCheetah-v5"))) as env:
        state, *_ = env.reset(seed=0)
        later = env.step(env.sample_action(), state, dt=5)[0]
        env.set_state(state)
        seen = env.render()
        env.set_state(later)
        moved = env.render()
        data = env.unwrapped.data
        mujoco.mj_forward(env.unwrapped.model, data)
        np.testing.assert_array_equal(moved, data.geom_xpos)
        assert (seen != moved).any()
        action = env.sample_action()
        env.set_state(later)
        env.render()  # and the state is what it was
        np.testing.assert_array_equal(env.step(action)[0], env.step_batch([action], [later])[1][0])


def test_clone():
    with planning(frameskip=3) as env, closing(env.clone(n_workers=1, autoreset=False)) as other:
        assert (other.n_workers, other.frameskip, other.autoreset) == (1, 3, False)
        assert env.n_workers == 2
        state, *_ = env.reset(seed=0)
        np.testing.assert_array_equal(
            env.step_batch([0], [state])[0], other.step_batch([0], [state])[0]
        )


def test_delay_setup():
    made = multiprocessing.get_context("fork").Value("i", 0)

    def make():
        with made.get_lock():
            made.value += 1
        return cartpole()

    with planning(make, delay_setup=True, context="fork") as env:
        assert made.value == 0
        env.setup()
        assert made.value == 2
        env.setup()
        assert made.value == 2
    with planning(make, delay_setup=True, context="fork") as env:
        assert env.action_space.n == 2  # the first use sets up
    with planning(make, delay_setup=True):
        pass


@pytest.mark.deep
@pytest.mark.parametrize("autoreset", [True, False])
def test_autoreset_is_visible(autoreset):
    """plangym returned the last state, and reset silently."""
    with planning(counter, 1, autoreset=autoreset) as env:
        env.reset(seed=0)
        for _ in range(5):
            env.step_batch([0])
        last, observations, _, ends, *_ = env.step_batch([0], return_state=True)
        assert ends[0] and observations[0, 0] == 6
        *_, infos = result = env.step_batch([0])
        assert result[0][0, 0] == (1 if autoreset else 7)
        assert bool(infos.get("autoreset", [False])[0]) == autoreset


@pytest.mark.deep
def test_a_function_for_each_worker():
    with planning([Counter, lambda: Counter(offset=10)], None) as env:
        assert env.n_workers == 2
        assert env.step_batch([0, 0])[1].tolist() == [1, 11]

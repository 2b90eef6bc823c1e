"""PlanningVectorEnv: every row of "plangym" in what people must find, and plangym's faults."""

import copy
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter, Spaces, TwoArguments
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import given, settings
from hypothesis import strategies as st

from shmvec import FaultPolicy
from shmvec.planning import EnvState, PlanningVectorEnv, Promise
from shmvec.planning.pieces import fill
from shmvec.spaces import Anything

WORKERS = pytest.mark.parametrize("n_workers", [0, 1, 2, 3])


def cartpole():
    return gym.make("CartPole-v1")


def counter():
    return gym.wrappers.TimeLimit(Counter(length=6), 50)


def planning(env_fn=cartpole, n_workers=2, **options):
    return closing(PlanningVectorEnv(env_fn, n_workers, **options))


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
    access = EnvState(env, True)
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


@WORKERS
@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize("rows", [None, 5])
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


@given(data=st.data(), count=st.integers(0, 60), rows=st.integers(2, 9))
@settings(max_examples=10, deadline=None)
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


@pytest.mark.parametrize("n_workers", [1, 2, 8])
def test_ten_actions_use_all_workers(n_workers):
    """plangym's chunks of two left three of eight workers idle."""
    with planning(Identified, n_workers) as env:
        *_, infos = env.step_batch([0] * 10)
        found = np.bincount(np.unique(infos["pid"], return_inverse=True)[1])
        assert len(found) == n_workers and found.max() - found.min() <= 1


class Identified(Counter):
    def __init__(self):
        super().__init__(length=1000)

    def step(self, action):
        *result, info = super().step(action)
        return *result, {"pid": os.getpid()}


def test_a_batch_smaller_than_the_workers():
    with planning(n_workers=3) as env:
        state, *_ = env.reset(seed=0)
        assert env.step_batch([1], [state])[1].shape == (1, 4)
        assert env.step_batch([1, 0], [state, state])[1].shape == (2, 4)


@pytest.mark.parametrize("env_fn", [cartpole, counter])
def test_an_empty_batch(env_fn):
    with planning(env_fn) as env:
        new, observations, rewards, ends, truncateds, infos = env.step_batch([], [])
        assert len(new) == len(observations) == len(rewards) == len(ends) == len(truncateds) == 0
        assert observations.shape == (0, *env.observation_space.shape) and infos == {}
        assert len(env.step_batch([])) == 5


def test_return_state():
    with planning() as env:
        state, *_ = env.reset(seed=0)
        assert len(env.step_batch([0], [state])) == 6
        assert len(env.step_batch([0], [state], return_state=False)) == 5
        assert len(env.step_batch([0])) == 5
        new, *rest = env.step_batch([0], return_state=True)
        assert new.shape == (1, len(state)) and len(rest) == 5


@WORKERS
def test_without_states_each_workers_env_goes_on(n_workers):
    with planning(counter, n_workers) as env:
        env.reset(seed=0)
        workers = max(1, n_workers)
        for count in (1, 2, 3):
            observations, *_ = env.step_batch([1] * workers)
            assert observations[:, 0].tolist() == [count] * workers


def test_frameskip_and_dt_multiply_and_the_end_of_an_episode_ends_both():
    with planning(counter, frameskip=2) as env:
        state, *_ = env.reset(seed=0)
        _, observations, rewards, ends, _, _ = env.step_batch([0, 0, 0], [state] * 3, [1, 2, 9])
        assert observations[:, 0].tolist() == [2, 4, 6]
        assert rewards.tolist() == [1 + 2, 1 + 2 + 3 + 4, 1 + 2 + 3 + 4 + 5 + 6]
        assert ends.tolist() == [False, False, True]
        assert env.step(0, state, dt=2)[1][0] == 4


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


def test_step():
    with planning() as env:
        state, *_ = env.reset(seed=0)
        new, observation, reward, end, truncated, info = env.step(1, state)
        batch = env.step_batch([1], [state])
        np.testing.assert_array_equal(new, batch[0][0])
        np.testing.assert_array_equal(observation, batch[1][0])
        assert (reward, end, truncated) == (1.0, False, False)
        on = env.step(1)
        assert len(on) == 5
        np.testing.assert_array_equal(on[0], env.step_batch([1], [new])[1][0])


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


@pytest.mark.parametrize("env_fn", [cartpole, counter])
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


def test_many_promises_that_fail():
    with planning(lambda: Raises(lambda: ValueError("no"))) as env:
        promises = [env.step_batch([3], blocking=False) for _ in range(1200)]
        last = env.step_batch([0], blocking=False)
        assert len(last()[1]) == 1
        for promise in promises:
            with pytest.raises(ValueError, match="no"):
                promise()


def test_ctrl_c_while_waiting_loses_nothing(tmp_path):
    path = str(tmp_path / "open")
    with planning(lambda: Gate(path)) as env:
        promise = env.step_batch([2, 2], np.ones((2, 1)), blocking=False)
        timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            promise()
        timer.join()
        (tmp_path / "open").touch()
        assert promise()[1][:, 1].tolist() == [2, 2]


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


def test_sample_action():
    with planning() as env:
        assert env.action_space.contains(env.sample_action())


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

    with planning(make, delay_setup=True) as env:
        assert made.value == 0
        env.setup()
        assert made.value == 2
        env.setup()
        assert made.value == 2
    with planning(make, delay_setup=True) as env:
        assert env.action_space.n == 2  # the first use sets up
    with planning(make, delay_setup=True):
        pass


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


def test_a_function_for_each_worker():
    with planning([Counter, lambda: Counter(offset=10)], None) as env:
        assert env.n_workers == 2
        assert env.step_batch([0, 0])[1].tolist() == [1, 11]


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_start_methods(context):
    """plangym's, spawned, started itself for ever."""
    with planning(context=context) as env:
        state, *_ = env.reset(seed=0)
        assert env.step_batch([0] * 5, [state] * 5)[1].shape == (5, 4)


# ---- what goes wrong -------------------------------------------------------------------------


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


@pytest.mark.parametrize("n_workers", [0, 2])
def test_exceptions_keep_type_and_traceback_and_name_the_row(n_workers):
    with planning(lambda: Raises(lambda: TwoArguments(7, "why")), n_workers) as env:
        state, *_ = env.reset(seed=0)
        with pytest.raises(TwoArguments) as raised:
            env.step_batch([0, 1, 2, 3, 1], [state] * 5)
        assert raised.value.code == 7
        assert "in step" in str(raised.value.__cause__).lower()
        assert any("row 3 of the batch" in note for note in raised.value.__notes__)
        assert env.step_batch([1] * 5, [state] * 5)[1][:, 1].tolist() == [1] * 5


def test_an_env_fn_that_raises():
    def make():
        raise LookupError("no such game")

    with pytest.raises(LookupError, match="no such game"):
        PlanningVectorEnv(make, 2)


def test_a_worker_that_dies_is_replaced_and_its_rows_are_stepped_again():
    class Once(Counter):
        """Dies in its first step with action 3, in the first of its processes."""

        def __init__(self, flag):
            super().__init__(length=1000)
            self.flag = flag

        def step(self, action):
            if action == 3:
                with self.flag.get_lock():
                    first, self.flag.value = self.flag.value == 0, 1
                if first:
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().step(action)

        def get_state(self):
            return np.array([self.count, self.noise])

        def set_state(self, state):
            self.count, self.noise = int(state[0]), state[1]

    flag = multiprocessing.get_context("fork").Value("i", 0)
    policy = FaultPolicy(on_crash="restart", backoff_s=0)
    with planning(lambda: Once(flag), rows=8, faults=policy, context="fork") as env:
        states = np.array([[i, 0.5] for i in range(20)], float)
        actions = [0] * 11 + [3] + [0] * 8
        new, observations, rewards, ends, truncateds, infos = env.step_batch(actions, states)
        assert observations[:, 0].tolist() == list(range(1, 21))
        assert observations[:, 1].tolist() == actions
        assert not truncateds.any()
        assert infos["fault"]["type"][11] == "WorkerCrashError"
        assert flag.value == 1


@pytest.mark.parametrize(
    ("env", "policy", "kind"),
    [
        (lambda: Raises(lambda: ValueError("no")), FaultPolicy(on_error="reset"), "ValueError"),
        (lambda: Raises(die=True), FaultPolicy(on_crash="restart"), "WorkerCrashError"),
    ],
)
def test_a_row_that_always_fails_is_truncated_alone(env, policy, kind):
    policy = replace(policy, backoff_s=0)
    with planning(env, rows=8, faults=policy) as planner:
        state, *_ = planner.reset(seed=0)
        actions = [0] * 4 + [3] + [1] * 7
        _, observations, _, ends, truncateds, infos = planner.step_batch(actions, [state] * 12)
        assert truncateds.tolist() == [action == 3 for action in actions]
        assert infos["fault"]["type"][4] == kind and not ends.any()
        good = np.array(actions) != 3
        assert observations[good, 1].tolist() == [0] * 4 + [1] * 7
        assert observations[good, 0].tolist() == [1] * 11
        assert planner.step_batch([2] * 3, [state] * 3)[1][:, 1].tolist() == [2] * 3


def test_a_worker_that_dies_without_a_policy_is_an_error():
    from shmvec import WorkerCrashError

    with planning(lambda: Raises(die=True)) as env:
        env.reset(seed=0)
        with pytest.raises(WorkerCrashError):
            env.step_batch([0, 3, 0, 0])
        with pytest.raises(ClosedEnvironmentError):
            env.step_batch([0])


@pytest.mark.parametrize("n_workers", [0, 2])
def test_close_closes_the_envs(n_workers, tmp_path):
    """plangym never called env.close()."""

    class Closes(Counter):
        def close(self):
            (tmp_path / f"{os.getpid()}-{id(self)}").touch()

    env = PlanningVectorEnv(Closes, n_workers)
    env.step(0)
    env.close()
    env.close()
    assert len(list(tmp_path.iterdir())) == max(1, n_workers) + 1
    for call in (
        lambda: env.step_batch([0]),
        lambda: env.reset(),
        lambda: env.step(0),
        lambda: env.get_state(),
        lambda: env.action_space,
        lambda: env.setup(),
    ):
        with pytest.raises(ClosedEnvironmentError):
            call()


def test_close_while_promises_are_out():
    env = PlanningVectorEnv(cartpole, 2)
    state, *_ = env.reset(seed=0)
    promises = [env.step_batch([0] * 5, [state] * 5, blocking=False) for _ in range(3)]
    env.close()
    for promise in promises:
        with pytest.raises(ClosedEnvironmentError):
            promise()


def test_an_env_that_is_open_at_exit_is_ended():
    script = (
        "import gymnasium as gym\n"
        "from shmvec.planning import PlanningVectorEnv\n"
        "env = PlanningVectorEnv(lambda: gym.make('CartPole-v1'), 2)\n"
        "env.step_batch([0, 1])\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"actions": [0], "states": "two"}, ValueError, "one for each of 1 actions"),
        ({"actions": [0, 1], "states": "wide"}, ValueError, "wrong states"),
        ({"actions": [0, 1], "states": "float32"}, TypeError, "float32"),
        ({"actions": [[0, 1]]}, ValueError, "wrong actions"),
        ({"actions": 1}, ValueError, "wrong actions"),
        ({"actions": ["left"]}, TypeError, "wrong actions"),
        ({"actions": [0], "dt": 0}, ValueError, "at least 1"),
        ({"actions": [0], "dt": [1, 2]}, ValueError, "one for each action"),
        ({"actions": [0], "dt": 1.5}, TypeError, "dt must be"),
    ],
)
def test_bad_batches_are_refused_before_anything_is_sent(arguments, error, message):
    with planning() as env:
        state, *_ = env.reset(seed=0)
        states = {
            "two": [state, state],
            "wide": np.zeros((2, 99)),
            "float32": np.stack([state] * 2).astype(np.float32),
        }
        given = arguments.get("states")
        with pytest.raises(error, match=message):
            env.step_batch(**{**arguments, "states": states.get(given)})
        np.testing.assert_array_equal(
            env.step_batch([1, 1])[0][0], env.step_batch([1], [state])[1][0]
        )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"env_fns": []}, TypeError),
        ({"env_fns": [3]}, TypeError),
        ({"env_fns": [Counter] * 2, "n_workers": 3}, ValueError),
        ({"env_fns": Counter, "n_workers": -1}, ValueError),
        ({"env_fns": Counter, "n_workers": 1.5}, TypeError),
        ({"env_fns": Counter, "frameskip": 0}, ValueError),
        ({"env_fns": Counter, "n_workers": 3, "rows": 2}, ValueError),
        ({"env_fns": Counter, "batch_size": 2}, TypeError),
        ({"env_fns": Counter, "recycle_after": 2}, TypeError),
    ],
)
def test_bad_arguments(arguments, error):
    with pytest.raises(error):
        PlanningVectorEnv(**arguments)


def test_states_of_no_fixed_size_are_counted():
    with planning(counter) as env:
        state, *_ = env.reset(seed=0)
        with pytest.raises(ValueError, match="wrong states"):
            env.step_batch([0, 1], [state])


BOX = gym.spaces.Box(0, 1, (2,))
NESTED = {
    "tuples": gym.spaces.Tuple((gym.spaces.Tuple((BOX, gym.spaces.Discrete(3))), BOX)),
    "sequence": gym.spaces.Sequence(BOX),
    "stacked": gym.spaces.Sequence(BOX, stack=True),
    "graph": gym.spaces.Graph(BOX, gym.spaces.Discrete(3)),
    "text": gym.spaces.Text(5),
    "inside": gym.spaces.Dict(a=gym.spaces.Sequence(BOX), b=BOX),
}


class Shows(gym.Env):
    """Shows a value of a space that its action names, and takes actions of that space."""

    def __init__(self, space, as_actions):
        space = copy.deepcopy(space)
        space.seed(7)
        self.values = [space.sample() for _ in range(20)]
        numbers = gym.spaces.Discrete(20)
        self.action_space = space if as_actions else numbers
        self.observation_space = numbers if as_actions else space
        self.as_actions = as_actions

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return (0 if self.as_actions else self.values[0]), {}

    def step(self, action):
        if self.as_actions:
            found = [i for i, value in enumerate(self.values) if equal(value, action)]
            return found[0], 0.0, False, False, {}
        return self.values[int(action)], 0.0, False, False, {}

    def get_state(self):
        return np.zeros(1)

    def set_state(self, state):
        pass


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return np.array_equal(one, other)


@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize("name", NESTED)
def test_tuples_are_what_their_space_says(name, rows):
    """A batch of a Tuple space is a tuple of parts, that of a Sequence space one of values."""
    space = NESTED[name]
    values = Shows(space, False).values
    with planning(lambda: Shows(space, False), rows=rows, shared_memory=False) as env:
        state, first, _ = env.reset(seed=0)
        assert equal(first, values[0])
        batch = env.step_batch(np.arange(20), [state] * 20)[1]
        assert equal(tuple(iterate(batch_space(space, 20), batch)), tuple(values))
    with planning(lambda: Shows(space, True), rows=rows, shared_memory=False) as env:
        state, *_ = env.reset(seed=0)
        for actions in (values, concatenate(space, values, create_empty_array(space, 20))):
            assert env.step_batch(actions, [state] * 20)[1].tolist() == list(range(20))


def test_parts_of_actions_of_different_length_are_refused_before_anything_is_sent():
    space = gym.spaces.Dict(a=gym.spaces.Discrete(3), b=gym.spaces.Discrete(3))
    with planning(lambda: Spaces(BOX, space), rows=4) as env:
        for actions in ({"a": np.zeros(9, int), "b": np.zeros(8, int)}, {"a": np.zeros(9, int)}):
            with pytest.raises(ValueError, match="wrong actions: .*Nothing was sent"):
                env.step_batch(actions)


def test_an_env_that_raises_what_stands_for_a_timeout():
    with planning(lambda: Raises(lambda: multiprocessing.TimeoutError("mine"))) as env:
        promise = env.step_batch([0, 3, 0, 0], blocking=False)
        for _ in range(2):
            with pytest.raises(multiprocessing.TimeoutError, match="mine"):
                promise()
        assert env.step_batch([1] * 4)[0][:, 1].tolist() == [1] * 4


@pytest.mark.parametrize("n_workers", [0, 2])
def test_ctrl_c_between_waits_loses_nothing(n_workers, monkeypatch):
    """It is for waits: what is sent or put together in between is brought to its end."""

    def interrupted(*arguments):
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGINT)
        fill(*arguments)

    with planning(counter, n_workers, rows=8) as env:
        state, *_ = env.reset(seed=0)
        promises = [env.step_batch([i] * 30, [state] * 30, blocking=False) for i in range(3)]
        monkeypatch.setattr("shmvec.planning.vector_env.fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            promises[0]()
        for i in (1, 0, 2):
            assert promises[i]()[1][:, 1].tolist() == [i] * 30


def test_a_batch_whose_rows_all_raise():
    """What they raise does not fit the pipes: it is taken while the others are waited for."""
    with planning(lambda: Raises(lambda: ValueError("no" * 5000)), 1) as env:
        with pytest.raises(ValueError, match="no"):
            env.step_batch([3] * 300)
        assert len(env.step_batch([0] * 300)[0]) == 300


def test_what_a_promise_was_given_may_be_used_again():
    with planning(counter, rows=4) as env:
        state, *_ = env.reset(seed=0)
        actions = np.ones(40, int)
        promise = env.step_batch(actions, [state] * 40, blocking=False)
        actions[:] = 2
        assert promise()[1][:, 1].tolist() == [1] * 40
    with planning() as env:
        state, *_ = env.reset(seed=0)
        busy = env.step_batch([0] * 5, [state] * 5, blocking=False)
        expected, given = state.copy(), state
        set_ = env.set_state(given, blocking=False)
        given[:] = 99
        busy(), set_()
        np.testing.assert_array_equal(
            env.step_batch([0], return_state=True)[0][0], env.step_batch([0], [expected])[0][0]
        )


def test_the_state_that_was_set_last_is_the_state():
    with planning() as env:
        state, *_ = env.reset(seed=0)
        reset = env.reset(seed=5, blocking=False)
        env.set_state(state)
        reset()
        np.testing.assert_array_equal(env.get_state(), state)
        np.testing.assert_array_equal(env.step(0)[0], env.step_batch([0])[0][0])


class Lends(Counter):
    """Its state is an object of its own, which it goes on changing."""

    def reset(self, **options):
        self.box = [0]
        return super().reset(**options)

    def step(self, action):
        self.box[0] += 1
        return super().step(action)

    def get_state(self):
        return self.box

    def set_state(self, state):
        self.box = state


def test_the_local_env_does_not_change_the_state_that_it_was_given():
    with planning(Lends) as env:
        state, *_ = env.reset(seed=0)
        assert env.step(0, state)[0] == [1] and state == [0]
        env.set_state(state)
        env.step(0)
        assert state == [0] and env.get_state() == [1]


class Dies(Counter):
    def __init__(self):
        super().__init__(length=10**6)

    def step(self, action):
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 3:
            raise ValueError("three")
        return super().step(action)

    def pid(self):
        return os.getpid()

    def get_state(self):
        return np.array([self.count])

    def set_state(self, state):
        if state[0] < 0:
            raise ValueError("negative")
        self.count, self.noise = int(state[0]), 0.0


RESTART = FaultPolicy(on_crash="restart", backoff_s=0, max_restarts=99)


def kill(env, worker):
    """Kills a worker that has nothing to do."""
    pid = env.call("pid")[worker]
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        pass


def test_a_new_worker_gets_the_state_that_is_set():
    with planning(Dies, faults=RESTART) as env:
        env.reset(seed=0)
        kill(env, 1)
        env.set_state(np.array([50]))
        for count in (51, 52):
            assert env.step_batch([0, 0])[0][:, 0].tolist() == [count] * 2
        kill(env, 1)
        env.reset(seed=3)
        assert env.step_batch([0, 0])[0][:, 0].tolist() == [1, 1]


def test_a_state_that_cannot_be_set_is_an_error_whatever_the_policy():
    with planning(Dies, faults=FaultPolicy(on_error="reset", max_restarts=99)) as env:
        env.reset(seed=0)
        with pytest.raises(RuntimeError, match=r"could not be set in 2 of 2 workers: .*negative"):
            env.sync_states(np.array([-1]))
        assert len(env.step_batch([0, 0])[0]) == 2


def test_a_fault_is_told_when_all_rows_were_lost():
    with planning(Dies, 1, faults=RESTART) as env:
        env.reset(seed=0)
        kill(env, 0)
        _, observations, *_, infos = env.step_batch([0] * 4, np.full((4, 1), 7))
        assert observations[:, 0].tolist() == [8] * 4
        assert infos["fault"]["type"].tolist() == ["WorkerCrashError"] * 4


@pytest.mark.parametrize("count", [10, 300])
def test_rows_behind_one_that_kills_its_worker_are_not_lost(count):
    with planning(Dies, faults=RESTART) as env:
        state, *_ = env.reset(seed=0)
        actions = np.zeros(count, int)
        actions[1] = 2
        _, observations, _, _, truncateds, _ = env.step_batch(actions, [state] * count)
        assert np.flatnonzero(truncateds).tolist() == [1]
        assert (observations[~truncateds, 0] == 1).all()


@pytest.mark.parametrize("actions", [[3, 2], [2, 3], [0, 3, 0, 2]])
def test_a_batch_that_fails_leaves_no_fault_to_others(actions):
    with planning(Dies, faults=RESTART) as env:
        state, *_ = env.reset(seed=0)
        for given in (None, [state] * len(actions)):
            with pytest.raises(ValueError, match="three"):
                env.step_batch(actions, given)
            _, observations, _, _, truncateds, _ = env.step_batch([0] * 6, [state] * 6)
            assert observations[:, 0].tolist() == [1] * 6 and not truncateds.any()


def test_rows_of_a_worker_that_was_restarted_for_a_timeout_are_stepped_again():
    class Slow(Dies):
        def step(self, action):
            while action == 1:
                with suppress(Exception):
                    threading.Event().wait(60)
            return super().step(action)

    policy = FaultPolicy(on_timeout="restart", step_timeout=0.2, backoff_s=0, max_restarts=99)
    with planning(Slow, faults=policy) as env:
        state, *_ = env.reset(seed=0)
        assert env.step_batch([0, 0, 1, 0], [state] * 4)[4].sum() == 1
        _, observations, _, _, truncateds, _ = env.step_batch([0] * 6, [state] * 6)
        assert observations[:, 0].tolist() == [1] * 6 and not truncateds.any()


def test_an_attribute_error_of_an_env_fn_is_raised_as_it_is():
    """Of a property, Python takes it for a missing attribute: it was built a thousand times."""
    here, made = os.getpid(), []

    def make():
        if os.getpid() == here:
            made.append(1)
            raise AttributeError("a typo")
        return cartpole()

    with planning(make) as env:
        for call in (lambda: env.env, lambda: env.step(0), lambda: env.gravity):
            with pytest.raises(AttributeError, match="a typo"):
                call()
        assert len(made) < 10
    with planning(lambda: None.nothing, delay_setup=True) as env:
        with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'nothing'"):
            _ = env.action_space


def test_nested_infos_of_a_reset():
    class Nested(Counter):
        def reset(self, **options):
            return super().reset(**options)[0], {"stats": {"a": 1, "b": np.arange(3)}, "s": "x"}

    with planning(Nested) as env:
        info = env.reset(seed=0)[2]
        assert info["stats"]["a"] == 1 and info["s"] == "x" and len(info["stats"]) == 2
        assert info["stats"]["b"].tolist() == [0, 1, 2]


def test_lists_that_make_no_array_are_named():
    with planning() as env:
        state, *_ = env.reset(seed=0)
        assert len(env.step_batch([], [], dt=[])) == 6
        with pytest.raises(ValueError, match="wrong states"):
            env.step_batch([0, 0], [state, state[:2]])
        with pytest.raises(ValueError, match="wrong actions"):
            env.step_batch([[0], [1, 2]])
    with planning(counter) as env, pytest.raises(TypeError, match="wrong states"):
        env.step_batch([0], 5)

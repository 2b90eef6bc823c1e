"""PlanningVectorEnv: what goes wrong in envs, workers and arguments, and what then happens."""

import copy
import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from echoing import Moments
from envs import Counter, TwoArguments
from equality import equal
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from processes import gone
from tables import deep
from test_planning import Raises, cartpole, counter, planning

from shmvec import FaultPolicy
from shmvec.planning import PlanningVectorEnv


@pytest.mark.parametrize("n_workers", [2, *deep(0)])
def test_exceptions_keep_type_and_traceback_and_name_the_row(n_workers):
    with planning(lambda: Raises(lambda: TwoArguments(7, "why")), n_workers) as env:
        state, *_ = env.reset(seed=0)
        with pytest.raises(TwoArguments) as raised:
            env.step_batch([0, 1, 2, 3, 1], [state] * 5)
        assert raised.value.code == 7
        assert "in step" in str(raised.value.__cause__).lower()
        assert any("row 3 of the batch" in note for note in raised.value.__notes__)
        assert env.step_batch([1] * 5, [state] * 5)[1][:, 1].tolist() == [1] * 5


@pytest.mark.deep
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
    with planning(lambda: Once(flag), faults=policy, context="fork") as env:
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
        *deep((lambda: Raises(die=True), FaultPolicy(on_crash="restart"), "WorkerCrashError")),
    ],
)
def test_a_row_that_always_fails_is_truncated_alone(env, policy, kind):
    policy = replace(policy, backoff_s=0)
    with planning(env, faults=policy) as planner:
        state, *_ = planner.reset(seed=0)
        actions = [0] * 4 + [3] + [1] * 7
        _, observations, _, ends, truncateds, infos = planner.step_batch(actions, [state] * 12)
        assert truncateds.tolist() == [action == 3 for action in actions]
        assert infos["fault"]["type"][4] == kind and not ends.any()
        good = np.array(actions) != 3
        assert observations[good, 1].tolist() == [0] * 4 + [1] * 7
        assert observations[good, 0].tolist() == [1] * 11
        assert planner.step_batch([2] * 3, [state] * 3)[1][:, 1].tolist() == [2] * 3


@pytest.mark.deep
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


@pytest.mark.deep
def test_close_while_promises_are_out():
    env = PlanningVectorEnv(cartpole, 2)
    state, *_ = env.reset(seed=0)
    promises = [env.step_batch([0] * 5, [state] * 5, blocking=False) for _ in range(3)]
    env.close()
    for promise in promises:
        with pytest.raises(ClosedEnvironmentError):
            promise()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"actions": [0, 1], "states": "wide"}, ValueError, "wrong states"),
        ({"actions": [0], "states": "two"}, ValueError, "one for each of 1 actions"),
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


@pytest.mark.deep
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


@pytest.mark.deep
@pytest.mark.parametrize("name", NESTED)
def test_tuples_are_what_their_space_says(name):
    """A batch of a Tuple space is a tuple of parts, that of a Sequence space one of values."""
    space = NESTED[name]
    values = Shows(space, False).values
    with planning(lambda: Shows(space, False), rows=4, shared_memory=False) as env:
        state, first, _ = env.reset(seed=0)
        assert equal(first, values[0])
        batch = env.step_batch(np.arange(20), [state] * 20)[1]
        assert equal(tuple(iterate(batch_space(space, 20), batch)), tuple(values))
    with planning(lambda: Shows(space, True), rows=4, shared_memory=False) as env:
        state, *_ = env.reset(seed=0)
        for actions in (values, concatenate(space, values, create_empty_array(space, 20))):
            assert env.step_batch(actions, [state] * 20)[1].tolist() == list(range(20))


@pytest.mark.deep
@pytest.mark.parametrize("n_workers, stride", [(0, 907), (2, 23)])
def test_ctrl_c_at_any_moment(n_workers, stride):
    """It costs at most one result; the other promises keep theirs."""
    moments = Moments(stride, by=partial(signal.raise_signal, signal.SIGINT))
    interrupted = True
    with planning(counter, n_workers) as env:
        state, *_ = env.reset(seed=0)
        while interrupted:
            promises = [env.step_batch([i] * 10, [state] * 10, blocking=False) for i in range(3)]
            interrupted = moments.interrupt(promises[0])
            lost = []
            for i in (2, 1, 0):
                try:
                    assert promises[i]()[1][:, 1].tolist() == [i] * 10
                except (KeyboardInterrupt, RuntimeError) as error:
                    lost.append(error)
            assert len(lost) <= 1


@pytest.mark.deep
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


@pytest.mark.deep
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
    assert gone([pid], 60)


@pytest.mark.deep
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


@pytest.mark.deep
def test_a_state_that_cannot_be_set_is_an_error_whatever_the_policy():
    policy = FaultPolicy(on_error="reset", max_restarts=99)
    with planning(Dies, faults=policy) as env:
        env.reset(seed=0)
        with pytest.raises(RuntimeError, match=r"could not be set in 2 of 2 workers: .*negative"):
            env.sync_states(np.array([-1]))
        assert len(env.step_batch([0, 0])[0]) == 2


@pytest.mark.deep
def test_a_fault_is_reported_when_all_rows_were_lost():
    with planning(Dies, 1, faults=RESTART) as env:
        env.reset(seed=0)
        kill(env, 0)
        _, observations, *_, infos = env.step_batch([0] * 4, np.full((4, 1), 7))
        assert observations[:, 0].tolist() == [8] * 4
        assert infos["fault"]["type"].tolist() == ["WorkerCrashError"] * 4


@pytest.mark.deep
@pytest.mark.parametrize(("count", "rows"), [(10, None), (300, 8)])
def test_rows_behind_one_that_kills_its_worker_are_not_lost(count, rows):
    """Nor were they asked again beside a later round of the same rows, which was refused."""
    with planning(Dies, rows=rows, faults=RESTART) as env:
        state, *_ = env.reset(seed=0)
        actions = np.zeros(count, int)
        actions[1] = 2
        _, observations, _, _, truncateds, _ = env.step_batch(actions, [state] * count)
        assert np.flatnonzero(truncateds).tolist() == [1]
        assert (observations[~truncateds, 0] == 1).all()


@pytest.mark.deep
@pytest.mark.parametrize("actions", [[3, 2], [0, 3, 0, 2]])
def test_a_batch_that_fails_leaves_no_fault_to_others(actions):
    with planning(Dies, faults=RESTART) as env:
        state, *_ = env.reset(seed=0)
        for given in (None, [state] * len(actions)):
            with pytest.raises(ValueError, match="three"):
                env.step_batch(actions, given)
            _, observations, _, _, truncateds, _ = env.step_batch([0] * 6, [state] * 6)
            assert observations[:, 0].tolist() == [1] * 6 and not truncateds.any()


@pytest.mark.deep
def test_rows_of_a_worker_that_was_restarted_for_a_timeout_are_stepped_again():
    class Slow(Dies):
        def step(self, action):
            while action == 1:
                with suppress(Exception):
                    threading.Event().wait(60)
            return super().step(action)

    policy = FaultPolicy(on_timeout="restart", step_timeout=1.0, backoff_s=0, max_restarts=99)
    with planning(Slow, faults=policy) as env:
        state, *_ = env.reset(seed=0)
        assert env.step_batch([0, 0, 1, 0], [state] * 4)[4].sum() == 1
        _, observations, _, _, truncateds, _ = env.step_batch([0] * 6, [state] * 6)
        assert observations[:, 0].tolist() == [1] * 6 and not truncateds.any()


@pytest.mark.deep
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

"""Compiled wrappers in odd hands: envs and wrappers that look at, change or call one another."""

import copy
import gc
import pickle
import threading
import weakref

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.wrappers.utils import RunningMeanStd
from test_compiled_wrappers import (
    Drawn,
    Mine,
    attributes,
    compile_env,
    names_of,
    seen,
    steps_of_both,
)

from shmvec import ShmVectorEnv
from shmvec.states import StateAccess

pytestmark = pytest.mark.deep

ACTION = np.zeros(2, np.float32)


def normal(**arguments):
    return wrappers.NormalizeObservation(Drawn(dtype="float64", **arguments))


def test_a_step_around_which_another_one_is_put_in_the_middle():
    class Counting(gym.Wrapper):
        steps = 0

        def step(self, action):
            if not self.steps:
                own = self.env.step

                def counted(action):
                    self.steps += 1
                    return own(action)

                self.env.step = counted
            return self.env.step(action)

    *_, (_, last) = steps_of_both(lambda: Counting(normal()), 4, ACTION)
    assert last[0]["steps"] == seen(4)


@pytest.mark.parametrize(
    ("given", "named"), [((), {}), ((ACTION, 1), {}), ((), {"act": 1}), ((), {"action": ACTION})]
)
def test_a_step_that_is_called_with_other_arguments(given, named):
    class Calling(gym.Wrapper):
        def step(self, action):
            return self.env.step(*given, **named)

    steps_of_both(lambda: Calling(normal()), 2, ACTION)


def test_the_step_beneath_looks_like_a_method():
    class Looking(gym.Wrapper):
        def step(self, action):
            step = self.env.step
            assert (step.__name__, step.__self__) == ("step", self.env)
            return step(action=action)

    steps_of_both(lambda: Looking(normal()), 4, ACTION)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_that_is_made_within_a_step_is_stepped_alone(copied):
    class Copying(gym.Wrapper):
        def step(self, action):
            copies.append(copied(self.env))
            return self.env.step(action)

    found = []
    for stepped_by in (lambda env: env, compile_env):
        copies = []
        env = Copying(normal())
        stepper = stepped_by(env)
        env.reset()
        results = [seen(stepper.step(ACTION)) for _ in range(3)]
        results += [seen(each.step(ACTION)) for each in copies]
        found.append((results, seen(env.env.obs_rms), [seen(each.obs_rms) for each in copies]))
    assert found[0] == found[1]


@pytest.mark.parametrize("wrapper", ["observation", "func", "reward"])
def test_what_the_env_changes_in_its_step_counts_in_this_step(wrapper):
    class Changing(Drawn):
        def step(self, action):
            if self.count == 2:
                setattr(self.outer, wrapper, lambda value: value * 0 + 7)
            return super().step(action)

    def make():
        base = Changing(dtype="float64")
        if wrapper == "observation":
            env = wrappers.NormalizeObservation(base)
        elif wrapper == "func":
            env = wrappers.FlattenObservation(base)
        else:
            env = wrappers.ClipReward(base, -1.0, 1.0)
        base.outer = env
        return env

    steps_of_both(make, 5, ACTION)


def test_a_wrapper_that_gets_another_dict_in_the_middle_keeps_its_count():
    class Changing(Drawn):
        def step(self, action):
            self.outer.__dict__ = dict(self.outer.__dict__)
            return super().step(action)

    def make():
        base = Changing()
        base.outer = wrappers.TimeLimit(base, 10)
        return base.outer

    *_, (_, last) = steps_of_both(make, 3, ACTION)
    assert last[0]["_elapsed_steps"] == seen(3)


@pytest.mark.parametrize("on", [False, True])
def test_a_closed_env_is_freed_without_gc(on):
    envs = []

    def make():
        env = wrappers.NormalizeReward(Mine(normal()))
        envs.append(weakref.ref(env.unwrapped))
        return env

    gc.collect()
    gc.disable()
    try:
        vector = ShmVectorEnv([make], num_workers=0, compile_wrappers=on)
        vector.reset()
        vector.step(ACTION[None])
        vector.close()
        del vector
        assert envs[0]() is None
    finally:
        gc.enable()


def test_a_chain_that_is_made_anew_within_its_own_step():
    class Calling(Drawn):
        """Changes a wrapper, and steps what is around itself: so its chain is made anew."""

        depth = 0

        def step(self, action):
            if self.depth < 3:
                Calling.depth += 1
                try:
                    self.inner.observation = lambda value: value
                    self.outer.step(action)
                    vars(self.inner).pop("observation", None)
                    self.outer.step(action)
                finally:
                    Calling.depth -= 1
            return super().step(action)

    def make():
        base = Calling(dtype="float64")
        base.inner = wrappers.NormalizeObservation(base)
        base.outer = Mine(wrappers.NormalizeObservation(Mine(base.inner)))
        return wrappers.NormalizeReward(base.outer)

    steps_of_both(make, 40, ACTION)


def test_one_wrapper_in_two_chains():
    found = []
    for stepped_by in (lambda env: env, compile_env):
        shared = normal()
        steppers = [stepped_by(each) for each in (shared, wrappers.NormalizeReward(Mine(shared)))]
        shared.reset()
        steps = [seen(each.step(ACTION)) for _ in range(20) for each in steppers]
        found.append((steps, attributes(shared)))
    assert found[0] == found[1]


def test_a_wrapper_that_steps_in_another_thread():
    class Threaded(gym.Wrapper):
        def step(self, action):
            results = []
            thread = threading.Thread(target=lambda: results.append(self.env.step(action)))
            thread.start()
            thread.join(30)
            return results[0]

    steps_of_both(lambda: wrappers.NormalizeReward(Threaded(normal())), 4, ACTION)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, SystemExit, ValueError])
def test_what_an_env_raises_leaves_all_as_in_python(error):
    class Raising(Drawn):
        def step(self, action):
            result = super().step(action)
            if self.count % 3 == 0:
                raise error("now")
            return result

    found = []
    for stepped_by in (lambda env: env, compile_env):
        env = wrappers.NormalizeObservation(Raising(dtype="float64"))
        env = wrappers.RecordEpisodeStatistics(wrappers.TimeLimit(env, 7))
        env = wrappers.NormalizeReward(Mine(env))
        stepper = stepped_by(env)
        env.reset()
        seen_now = []
        for _ in range(9):
            try:
                seen_now.append(seen(stepper.step(ACTION)))
            except error as raised:
                seen_now.append(repr(raised))
            seen_now.append(attributes(env))
        found.append(seen_now)
    assert found[0] == found[1]


def test_results_are_new_arrays_that_nothing_changes():
    base = Drawn(dtype="float32", shape=(2, 3))
    env = wrappers.NormalizeObservation(wrappers.FlattenObservation(base))
    stepper = compile_env(env)
    assert len(names_of(stepper)) == 2
    env.reset()
    kept = [(stepper.step(ACTION)[0], env.obs_rms.mean, env.obs_rms.var) for _ in range(6)]
    was = [seen(each) for each in kept]
    for _ in range(6):
        stepper.step(ACTION)
    assert [seen(each) for each in kept] == was
    arrays = [array for each in kept for array in each]
    assert len({each.__array_interface__["data"][0] for each in arrays}) == len(arrays)
    assert all(each.flags.owndata and each.flags.writeable for each in arrays)


@pytest.mark.parametrize("low", [0.0, -0.0])
@pytest.mark.parametrize("high", [0.0, -0.0])
def test_bounds_that_are_zeros_of_different_signs(low, high):
    found = []
    for stepped_by in (lambda env: env, compile_env):
        base = Drawn()
        base.action_space = gym.spaces.Box(low, high, (2,), np.float32)
        base.action_space.low[:], base.action_space.high[:] = low, high
        stepper = stepped_by(wrappers.ClipAction(base))
        for action in ([1, -1], [0.0, -0.0], [-0.0, 0.0]):
            stepper.step(np.array(action, np.float32))
        found.append(seen(base.taken))
    assert found[0] == found[1]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [wrappers.NormalizeObservation, wrappers.NormalizeReward])
def test_what_a_running_mean_does_when_attributes_are_set_is_done(monkeypatch, kind, when):
    seen_names = []

    def noted(self, name, value):
        seen_names.append(name)
        object.__setattr__(self, name, value)

    def patch():
        monkeypatch.setattr(RunningMeanStd, "__setattr__", noted, raising=False)

    if when == "before":
        patch()
    env = kind(gym.make("Pendulum-v1"))
    stepper = compile_env(env)
    env.reset(seed=1)
    if when == "after":
        stepper.step(np.zeros(1, np.float32))
        patch()
    seen_names.clear()
    for _ in range(3):
        stepper.step(np.zeros(1, np.float32))
    assert seen_names == ["mean", "var", "count"] * 3


def test_a_property_of_a_running_mean_is_obeyed(monkeypatch):
    raw = []
    seen_raw = wrappers.TransformObservation(
        gym.make("Pendulum-v1"), lambda each: raw.append(each) or each, None
    )
    env = wrappers.NormalizeObservation(seen_raw)
    stepper = compile_env(env)
    env.reset(seed=1)
    stepper.step(np.zeros(1, np.float32))
    fixed = property(lambda self: np.zeros(3, np.float32), lambda self, value: None)
    monkeypatch.setattr(RunningMeanStd, "mean", fixed, raising=False)
    before = vars(env.obs_rms)["mean"]
    for _ in range(3):
        found = stepper.step(np.zeros(1, np.float32))[0]
        expected = raw[-1] / np.sqrt(env.obs_rms.var + env.epsilon)
        assert np.array_equal(found, np.float32(expected))
    assert vars(env.obs_rms)["mean"] is before


class LookingAhead(gym.Wrapper):
    def step(self, action):
        copied = cloudpickle.loads(cloudpickle.dumps(self.env))
        observation, *rest = self.env.step(action)
        assert np.array_equal(copied.step(action)[0], observation)
        again = cloudpickle.loads(cloudpickle.dumps(copied))
        assert again.obs_rms.count == copied.obs_rms.count
        return observation, *rest


class TryingTwice(gym.Wrapper):
    def step(self, action):
        access = StateAccess(self.env, include_rng=True)
        before = access.get()
        first = self.env.step(action)
        access.set(before)
        second = self.env.step(action)
        assert np.array_equal(first[0], second[0])
        return second


@pytest.mark.parametrize("kind", [LookingAhead, TryingTwice])
def test_an_env_is_pickled_whole_within_a_step(kind):
    env = kind(wrappers.NormalizeObservation(gym.make("Pendulum-v1")))
    stepper = compile_env(env)
    env.reset(seed=1)
    for _ in range(4):
        stepper.step(np.zeros(1, np.float32))
    assert env.get_wrapper_attr("obs_rms").count == pytest.approx(5, abs=0.1)

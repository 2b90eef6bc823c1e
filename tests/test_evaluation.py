"""Evaluation: the episodes that were asked for, each once, as if played one after the other."""

import importlib.util
import json
import os
import sys
import threading
import time
import types
import warnings
from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.spaces import Box, Dict, Discrete, Text
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.async_vector_env import _async_worker
from hypothesis import given, settings
from hypothesis import strategies as st
from short_walks import Deadly, Walk, act, one_after_the_other, rows
from tables import deep

import shmvec.__main__
from shmvec import Evaluation, ShmVectorEnv, evaluate
from shmvec.evaluation.statistics import confidence_interval, standard_error, statistic_of
from shmvec.exchange import AutoresetMode

here = partial(evaluate, num_workers=0)  # in this process, which is soon done


@pytest.mark.deep
@settings(max_examples=10, deadline=None)
@given(
    episodes=st.integers(1, 20),
    num_envs=st.integers(1, 7),
    num_workers=st.integers(0, 3),
    batch_size=st.integers(1, 7),
    batch=st.sampled_from(["ready", "fixed"]),
    seed=st.integers(0, 1000),
    more=st.lists(st.integers(0, 9), min_size=20, max_size=20),
)
def test_as_one_after_the_other(episodes, num_envs, num_workers, batch_size, batch, seed, more):
    options = [{"more": each} if each else None for each in more[:episodes]]
    result = evaluate(
        Walk,
        act,
        episodes,
        num_envs=num_envs,
        num_workers=min(num_workers, num_envs, episodes),
        batch_size=min(batch_size, num_envs, episodes),
        batch=batch,
        seeds=seed,
        options=options,
        info_keys=["left"],
    )
    assert rows(result, "left") == one_after_the_other(Walk, range(seed, seed + episodes), options)
    assert result.seeds.tolist() == list(range(seed, seed + episodes))
    assert result.complete and len(result) == result.asked == episodes
    assert result.steps == result.lengths.sum() and result.repeats == 0


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, *deep(AutoresetMode.DISABLED)])
def test_a_vector_env_that_exists(mode):
    with closing(ShmVectorEnv([Walk] * 4, num_workers=2, autoreset_mode=mode)) as envs:
        result = evaluate(envs, act, 9, seeds=3)
        assert rows(result) == [one[:4] for one in one_after_the_other(Walk, range(3, 12))]
        # No step and no reset of no env.
        assert sum(envs.get_attr("steps_made")) == result.lengths.sum()
        assert sum(envs.get_attr("resets_made")) == 9
        assert evaluate(envs, act, 2, seeds=3).returns.tolist() == result.returns[:2].tolist()
        envs.reset(seed=1)
        envs.step([0] * 4)


@pytest.mark.deep
def test_a_registered_id_and_env_fns():
    def lean(observations, env_ids):
        return (observations[:, 2] > 0).astype(int)

    by_id = evaluate("CartPole-v1", lean, 5, seeds=1)
    by_spec = evaluate(gym.spec("CartPole-v1"), lean, 5, seeds=[1, 2, 3, 4, 5], num_envs=1)
    by_fns = evaluate([lambda: gym.make("CartPole-v1")] * 8, lean, 5, seeds=np.arange(1, 6))
    assert by_id.returns.tolist() == by_spec.returns.tolist() == by_fns.returns.tolist()
    assert by_id.lengths.tolist() == by_id.returns.tolist()


@pytest.mark.deep
def test_an_id_that_names_its_module(tmp_path, monkeypatch):
    (tmp_path / "module_of_envs.py").write_text(
        "from gymnasium import register\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "register('OfItsModule-v0', CartPoleEnv, max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = here(
        "module_of_envs:OfItsModule-v0", lambda seen, _: np.arange(len(seen)) % 2, 3, seeds=0
    )
    assert result.lengths.tolist() == [5, 5, 5]
    gym.registry.pop("OfItsModule-v0")


def test_seeds_that_were_drawn_play_the_same_again():
    first = here(Walk, act, 6)
    assert len(set(first.seeds.tolist())) == 6
    again = here(Walk, act, 6, seeds=first.seeds, num_envs=2)
    assert again.returns.tolist() == first.returns.tolist()


@pytest.mark.parametrize("num_workers", [3, *deep(1)])
def test_an_episode_whose_worker_dies_is_played_again(tmp_path, num_workers):
    mark = str(tmp_path / "died")
    result = evaluate(
        lambda: Deadly(mark, 7), act, 12, seeds=0, num_envs=3, num_workers=num_workers
    )
    assert os.path.exists(mark)
    assert rows(result) == [one[:4] for one in one_after_the_other(Walk, range(12))]
    assert result.repeats >= 1
    assert result.steps >= result.lengths.sum()
    assert "repeated" in str(result)


@pytest.mark.deep
def test_workers_that_are_killed_between_any_two_batches():
    expected = [one[:4] for one in one_after_the_other(Walk, range(20))]
    envs = ShmVectorEnv(
        [Walk] * 5,
        num_workers=3,
        faults=shmvec.FaultPolicy(on_crash="restart", max_restarts=1000, backoff_s=0),
        autoreset_mode=AutoresetMode.DISABLED,
    )
    with closing(envs):
        kills = 0

        def policy(observations, env_ids):
            nonlocal kills
            kills += 1
            if kills % 5 == 0 and kills < 60:
                for process in envs.processes[kills // 5 % 3 :][: 1 + kills // 5 % 2]:
                    process.kill()
            return act(observations, env_ids)

        result = evaluate(envs, policy, 20, seeds=0)
    assert rows(result) == expected
    assert result.repeats > 0


@pytest.mark.deep
@pytest.mark.parametrize("cure", ["reset", "restart"])
@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_episode_in_which_an_env_raises_is_played_again(tmp_path, cure, where):
    class Raising(Walk):
        def fail(self, now):
            if now and not (tmp_path / "raised").exists():
                (tmp_path / "raised").touch()
                raise ArithmeticError("once")

        def reset(self, *, seed=None, options=None):
            self.fail(where == "reset" and seed == 3)
            return super().reset(seed=seed, options=options)

        def step(self, action):
            self.fail(where == "step" and self.seed == 3)
            return super().step(action)

    faults = shmvec.FaultPolicy(on_error=cure)
    result = evaluate(Raising, act, 9, seeds=0, num_envs=2, num_workers=2, faults=faults)
    assert (tmp_path / "raised").exists()
    assert rows(result) == [one[:4] for one in one_after_the_other(Walk, range(9))]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("num_workers", "batch_size"),
    [(0, None), (2, 1)],
)
def test_workers_are_recycled_between_episodes(num_workers, batch_size):
    envs = ShmVectorEnv([Walk] * 4, num_workers=num_workers, recycle_after=3)
    with closing(envs):
        result = evaluate(envs, act, 20, seeds=0, batch_size=batch_size, time_limit=60)
        assert rows(result) == [one[:4] for one in one_after_the_other(Walk, range(20))]
        assert result.repeats == 0
        assert envs.stats().faults.restarts > 2


@pytest.mark.deep
def test_options_are_handed_on_as_they_are():
    class Telling(Walk):
        def step(self, action):
            *results, info = super().step(action)
            return *results, {**info, "given": self.given}

        def reset(self, *, seed=None, options=None):
            self.given = options
            return super().reset(seed=seed, options=options)

    options = [None, {"more": 2}, {}]
    result = here(Telling, act, 3, seeds=0, options=options, info_keys=["given", "word"])
    assert result.infos["given"].tolist() == options
    assert result.infos["word"].dtype == object


@pytest.mark.deep
def test_options_that_envs_change():
    class Taking(Walk):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed, options={"more": options.pop("more")})

    options = {"more": 5}
    result = evaluate(Taking, act, 6, seeds=0, num_envs=3, num_workers=0, options=options)
    expected = one_after_the_other(Walk, range(6), [{"more": 5}] * 6)
    assert rows(result) == [one[:4] for one in expected]
    suite = evaluate({"a": Taking}, act, 6, seeds=0, max_envs=2, options=options)
    assert rows(suite["a"]) == rows(result)
    assert options == {"more": 5}


@pytest.mark.deep
def test_infos_that_not_all_say():
    class Some(Walk):
        def step(self, action):
            *results, info = super().step(action)
            if self.seed % 2:
                info = {"score": self.seed}
            return *results, info

    with pytest.warns(UserWarning, match="no episode's last info has 'nothing'"):
        result = here(Some, act, 4, seeds=0, info_keys=["score", "nothing"])
    assert np.isnan(result.infos["score"]).tolist() == [True, False, True, False]
    assert result.infos["score"][1::2].tolist() == [1.0, 3.0]
    assert np.isnan(result.infos["is_success"]).tolist() == [False, True, False, True]
    assert "nothing" not in result.infos
    successes = result.infos["is_success"][::2]
    assert result.success_rate == successes.mean()  # of those that say


class Stateful:
    """Counts in each env; actions depend on that, so that a reset forgotten is seen."""

    def __init__(self, num_envs):
        self.count = np.full(num_envs, 1000)
        self.resets = []
        self.sizes = []

    def reset(self, env_ids):
        assert env_ids.dtype == np.int64
        self.count[env_ids] = 0
        self.resets += env_ids.tolist()

    def __call__(self, observations, env_ids):
        self.sizes.append(len(env_ids))
        assert len(observations) == len(env_ids)
        mine = env_ids[env_ids >= 0]
        assert len(set(mine.tolist())) == len(mine) > 0
        self.count[mine] += 1
        assert (self.count[mine] < 100).all()
        actions = np.full(len(env_ids), 77)  # out of range where no env is
        actions[env_ids >= 0] = self.count[mine] % 5
        return actions


@pytest.mark.parametrize("batch", ["ready", *deep("fixed")])
def test_a_policy_with_a_state(batch):
    alone = Stateful(1)
    expected = evaluate(Walk, alone, 9, seeds=5, num_envs=1)
    policy = Stateful(4)
    result = evaluate(Walk, policy, 9, seeds=5, num_envs=4, batch=batch, batch_size=3)
    assert result.returns.tolist() == expected.returns.tolist()
    assert len(policy.resets) == 9 and alone.resets == [0] * 9
    assert set(policy.sizes) == {3} if batch == "fixed" else max(policy.sizes) <= 3


@pytest.mark.deep
def test_a_state_is_reset_when_an_episode_is_played_again(tmp_path):
    expected = evaluate(Walk, Stateful(1), 9, seeds=0, num_envs=1)
    mark = str(tmp_path / "died")
    policy = Stateful(3)
    result = evaluate(lambda: Deadly(mark, 4), policy, 9, seeds=0, num_envs=3, num_workers=1)
    assert result.repeats > 0
    assert result.returns.tolist() == expected.returns.tolist()
    assert len(policy.resets) >= 10


class Sampling:
    """Draws its actions, from a generator of each episode's seed."""

    def __init__(self):
        self.generators = {}

    def reset(self, env_ids, seeds):
        for env, seed in zip(env_ids.tolist(), seeds, strict=True):
            self.generators[env] = np.random.default_rng(seed)

    def __call__(self, observations, env_ids):
        drawn = {env: self.generators[env].integers(5) for env in set(env_ids.tolist()) - {-1}}
        return np.array([drawn.get(env, 0) for env in env_ids.tolist()])


@pytest.mark.deep
def test_a_policy_that_samples_by_the_seeds_of_episodes(tmp_path):
    """It does the same in any number of envs, in a suite, and where episodes are repeated."""
    alone = evaluate(Walk, Sampling(), 12, seeds=3, num_envs=1, num_workers=0)
    assert len(set(alone.returns.tolist())) > 6  # actions differ by episode
    beside = evaluate(Walk, Sampling(), 12, seeds=3, num_envs=5, num_workers=2)
    suite = evaluate({"a": Walk, "b": Walk}, Sampling(), 12, seeds=3, max_envs=3, batch="fixed")
    mark = str(tmp_path / "died")
    lost = evaluate(lambda: Deadly(mark, 7), Sampling(), 12, seeds=3, num_envs=4, num_workers=2)
    assert lost.repeats
    for each in (beside, suite["a"], suite["b"], lost):
        assert each.returns.tolist() == alone.returns.tolist()


def as_given(function):
    """A decorator that hides what its function takes, as calls of torch's modules do."""
    return lambda *args, **kwargs: function(*args, **kwargs)


class Decorated:
    reset = as_given(lambda self, env_ids: None)
    __call__ = as_given(lambda self, observations, env_ids: np.ones(len(env_ids), np.int64))


@pytest.mark.deep
@pytest.mark.parametrize("suite", [False, True])
def test_a_policy_gets_by_name_what_it_names(suite):
    found = evaluate({"a": Walk} if suite else Walk, Decorated(), 3, seeds=1)
    assert len((found["a"] if suite else found).returns) == 3


class Resets(Decorated):
    def reset(self):
        raise AssertionError("it does not take envs")


class ByName(Sampling):
    """Its reset needs all that suites give by name; once it is one of several arguments."""

    def reset(self, env_ids, seeds, task):
        assert [each.name for each in task] == ["a"] * len(env_ids)
        super().reset(env_ids, seeds)

    def __call__(self, observations, env_ids, task):
        assert len(task) == len(env_ids)
        return super().__call__(observations, env_ids)


@pytest.mark.deep
def test_a_policy_may_need_all_that_it_gets_by_name():
    expected = here(Walk, Sampling(), 3, seeds=1)
    found = evaluate({"a": Walk}, ByName(), 3, seeds=1)["a"]
    assert found.returns.tolist() == expected.returns.tolist()


class Model:
    """Has a ``predict`` as Stable-Baselines3's models."""

    def __init__(self, state=None):
        self.state = state

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        assert deterministic and state is None and episode_start is None
        return act(observation, None), self.state


@pytest.mark.deep
def test_a_model_with_predict():
    expected = here(Walk, act, 3, seeds=1).returns.tolist()
    bare = types.SimpleNamespace(predict=lambda observations: act(observations, None))
    for model in (Model(), bare):
        assert here(Walk, model, 3, seeds=1, batch="fixed").returns.tolist() == expected
    assert evaluate({"a": Walk}, Model(), 3, seeds=1)["a"].returns.tolist() == expected
    with pytest.raises(TypeError, match="evaluate_sb3"):
        here(Walk, Model(state=(np.zeros((1, 2, 3)),)), 3)
    told = []  # a model that does have a reset has a state of its own
    bare.reset = lambda env_ids: told.extend(env_ids.tolist())
    here(Walk, bare, 3, seeds=1, num_envs=3)
    assert sorted(told) == [0, 1, 2]
    bare.predict = lambda observations: (act(observations, None), None, 3)
    with pytest.raises((TypeError, ValueError), match="the policy's actions"):
        here(Walk, bare, 3)


@pytest.mark.deep
def test_there_are_as_many_episodes_as_seeds_or_options():
    assert here(Walk, act, seeds=[5, 6]).seeds.tolist() == [5, 6]
    assert len(here(Walk, act, seeds=3, options=[None, {"more": 3}, None])) == 3
    assert len(evaluate({"a": Walk}, act, seeds=np.arange(2))["a"]) == 2
    assert len(here(Walk, act, seeds=5)) == 100
    with pytest.raises(ValueError, match="options has 3 options, for 2 episodes"):
        here(Walk, act, seeds=[5, 6], options=[None] * 3)


class Nested(gym.Env):
    observation_space = Dict(x=Box(0, 1, (2,)), y=gym.spaces.Tuple([Discrete(9), Text(3)]))
    action_space = Dict(a=Discrete(3), b=Box(-1, 1, (2,)))

    def _observation(self):
        return {"x": np.full(2, self.left / 9, np.float32), "y": (self.left, "abc"[: self.left])}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 1 + seed % 6
        return self._observation(), {}

    def step(self, action):
        self.left -= 1
        reward = float(action["a"] + 10 * action["b"][0])
        return self._observation(), reward, self.left == 0, False, {}


@pytest.mark.deep
def test_nested_spaces():
    def policy(observations, env_ids):
        numbers, words = observations["y"]
        assert [len(word) for word in words] == np.minimum(numbers, 3).tolist()
        assert len(observations["x"]) == len(env_ids) == len(numbers)
        actions = np.stack([numbers / 10, numbers / 10], axis=1).astype(np.float32)
        return {"a": numbers % 3, "b": actions}

    result = evaluate(Nested, policy, 8, seeds=0, num_envs=3, batch="fixed", batch_size=2)
    lefts = [list(range(1 + seed % 6, 0, -1)) for seed in range(8)]
    expected = [sum(n % 3 + 10 * float(np.float32(n / 10)) for n in left) for left in lefts]
    assert result.lengths.tolist() == list(map(len, lefts))
    np.testing.assert_allclose(result.returns, expected)


class OnAnotherDevice:
    """As a tensor of a GPU: it refuses to become an array."""

    def __len__(self):
        return 2

    def __array__(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __getitem__(self, _):
        return self


class Requiring(OnAnotherDevice):
    def __array__(self, *_, **__):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


WRONG_ACTIONS = [
    (lambda n: np.zeros(n + 1, int), ValueError, "and must have ("),
    (lambda n: np.zeros((n, 2), int), ValueError, "shape"),
    (lambda n: np.full(n, "up"), TypeError, ""),
    (lambda n: ["up"] * n, TypeError, ""),
    (lambda n: None, ValueError, "shape ()"),
    (lambda n: OnAnotherDevice(), TypeError, "cuda:0"),
    (lambda n: Requiring(), TypeError, "requires grad"),
]


@pytest.mark.deep
@pytest.mark.parametrize("batch", ["ready", "fixed"])
def test_actions_that_are_none(batch):
    with closing(ShmVectorEnv([Walk] * 4, num_workers=2)) as envs:
        for answer, kind, says in WRONG_ACTIONS:
            batches = []

            def policy(observations, env_ids, answer=answer, batches=batches):
                batches.append(env_ids)
                return act(observations, env_ids) if len(batches) < 3 else answer(len(env_ids))

            with pytest.raises(kind, match=r"the policy's actions for batch 2, of env") as caught:
                evaluate(envs, policy, 20, seeds=0, batch=batch)
            assert says in str(caught.value)
            assert str(batches[2][batches[2] >= 0].tolist()) in str(caught.value)
            result = evaluate(envs, act, 3, seeds=0)  # usable after it
            assert rows(result) == [one[:4] for one in one_after_the_other(Walk, range(3))]


@pytest.mark.deep
def test_a_policy_that_raises():
    def policy(observations, env_ids):
        raise ZeroDivisionError("no idea")

    with closing(ShmVectorEnv([Walk] * 4, num_workers=2)) as envs:
        with pytest.raises(ZeroDivisionError, match="no idea") as caught:
            evaluate(envs, policy, 20, seeds=0)
        if hasattr(caught.value, "__notes__"):
            assert "in batch 0, of envs [" in caught.value.__notes__[0]
        assert len(evaluate(envs, act, 3, seeds=0)) == 3
    with pytest.raises(ZeroDivisionError, match="no idea"):
        evaluate(Walk, policy)


@pytest.mark.deep
def test_an_env_that_raises():
    class Raising(Walk):
        def step(self, action):
            if self.seed == 3:
                raise ArithmeticError("at three")
            return super().step(action)

    with pytest.raises(ArithmeticError, match="at three"):
        evaluate(Raising, act, 9, seeds=0)


@pytest.mark.deep
@pytest.mark.parametrize("given", ["installed", "with a policy"])
def test_defaults_of_the_environment_and_of_install_hold(monkeypatch, given):
    class Stuck(Walk):
        def step(self, action):
            threading.Event().wait(0.8)

    installed = {"step_timeout": 0.2} if given == "installed" else {}
    with shmvec.install(**installed):
        if given == "with a policy":
            monkeypatch.setenv("SHMVEC_FAULTS", "on_crash=restart")
            monkeypatch.setenv("SHMVEC_STEP_TIMEOUT", "0.2")
        with pytest.raises(shmvec.EnvTimeoutError):
            evaluate(Stuck, act, 1, num_workers=1, hard_time_limit=30, context="fork")
        assert len(evaluate(Walk, act, 2, num_workers=0)) == 2


@pytest.mark.deep
def test_dead_workers_are_restarted_where_the_policy_of_the_environment_is_dropped(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SHMVEC_FAULTS", "on_crash=restart,step_timeout=30")
    deadly = partial(Deadly, str(tmp_path / "died"), 7)
    result = evaluate(deadly, act, 9, seeds=0, num_workers=1, step_timeout=60)
    assert result.repeats and len(result) == 9


def test_when_the_time_is_up_what_has_begun_is_played_to_its_end_and_counts():
    limit_s, asked = 0.8, []

    def slow(observations, env_ids):
        if not asked:  # the time is up before any episode is over
            time.sleep(limit_s)
        asked.append(len(env_ids))
        return act(observations, env_ids)

    with closing(ShmVectorEnv([Walk] * 3, num_workers=2)) as envs:
        result = evaluate(envs, slow, 9, seeds=0, time_limit=limit_s)
        assert (len(result), result.asked, result.complete) == (3, 9, False)
        assert rows(result) == [one[:4] for one in one_after_the_other(Walk, range(3))]
        late = evaluate(envs, act, 9, seeds=0, time_limit=1e-9)
        assert (len(late), late.steps) == (0, 0)


@pytest.mark.deep
def test_when_the_hard_time_limit_is_over_no_episode_counts_before_which_one_is_missing():
    class Slow(Walk):
        """The episode of seed 2 never ends."""

        def step(self, action):
            observation, reward, *_, info = super().step(action)
            return observation, reward, self.seed != 2, False, info

    seen = []
    options = {"hard_time_limit": 5.0, "context": "fork"}  # which imports nothing meanwhile
    result = evaluate(Slow, act, 9, seeds=0, num_envs=3, progress=seen.append, **options)
    assert not result.complete and (len(result), result.asked) == (2, 9)
    assert result.seeds.tolist() == [0, 1] and result.lengths.tolist() == [1, 1]
    assert sorted(one.number for one in seen) == [0, 1, 3, 4, 5, 6, 7, 8]
    assert "2 episodes of 9" in str(result)


@pytest.mark.deep
def test_an_env_that_is_slower_than_the_time_limit():
    class Stuck(Walk):
        def step(self, action):
            threading.Event().wait(1.5)

    result = evaluate(Stuck, act, 1, num_workers=1, hard_time_limit=0.5)
    assert len(result) == 0 and np.isnan(result.mean) and np.isnan(result.interquartile_mean)
    assert "0 episodes of 1" in str(result)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"episodes": 0}, ValueError, "episodes must be at least 1"),
        *deep(
            ({"episodes": 1.5}, TypeError, "episodes must be an int"),
            ({"num_envs": 0}, ValueError, "num_envs must be at least 1"),
            ({"seeds": [1, 2]}, ValueError, "seeds has 2 seeds, for 3 episodes"),
            ({"seeds": [1, 2, "x"]}, TypeError, "a seed must be an int, got 'x'"),
            ({"seeds": -1}, ValueError, "a seed must not be negative"),
            ({"seeds": 2**63 - 2}, ValueError, "a seed must be less than 2"),
            ({"seeds": [1, 2, 2**100]}, ValueError, "a seed must be less than 2"),
            ({"seeds": (i for i in range(3))}, TypeError, "a seed must be an int"),
            ({"options": [None]}, ValueError, "options has 1 options, for 3 episodes"),
            ({"options": "hard"}, TypeError, "options must be dicts or None"),
            ({"info_keys": "left"}, TypeError, r"info_keys must be several, as \['left'\]"),
            ({"batch": "full"}, ValueError, "batch must be 'ready' or 'fixed'"),
            ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
            ({"time_limit": 0}, ValueError, "^time_limit must be positive"),
            ({"hard_time_limit": 0}, ValueError, "hard_time_limit must be positive"),
            ({"policy": 3}, TypeError, "policy must be callable"),
            ({"policy": Sampling}, TypeError, "policy is the class Sampling: give an object of it"),
            ({"policy": lambda a, b, c: a}, TypeError, r"takes \(a, b, c\)$"),
            ({"policy": ByName()}, TypeError, r"takes \(observations, env_ids, task\)$"),
            (
                {"policy": Resets()},
                TypeError,
                r"reset\(env_ids\), and seeds by name; it takes \(\)",
            ),
            (
                {"envs": [Walk] * 2, "retries": 1},
                TypeError,
                "not a list of 2: give it, and max_envs=2",
            ),
            ({"envs": [Walk] * 3, "num_envs": 2}, ValueError, "there are 3 env_fns"),
            ({"envs": "No-v0"}, gym.error.Error, "No"),
            ({"autoreset_mode": "SameStep"}, ValueError, "autoreset_mode=AutoresetMode.DISABLED"),
            ({"envs": SyncVectorEnv([Walk])}, TypeError, "got SyncVectorEnv"),
        ),
    ],
)
def test_bad_arguments(arguments, error, says):
    given = {"envs": Walk, "policy": act, "episodes": 3, "num_envs": 2, **arguments}
    with pytest.raises(error, match=says):
        evaluate(**given)


@pytest.mark.deep
@pytest.mark.skipif(
    not hasattr(gym.vector, "AutoresetMode"), reason="Gymnasium 1.0's worker has one mode"
)
def test_worker_functions_reset_by_rules_of_their_own():
    result = evaluate(lambda: Walk(-1), act, 7, seeds=0, num_envs=3, worker=_async_worker)
    assert rows(result) == [one[:4] for one in one_after_the_other(Walk, range(7))]
    with closing(ShmVectorEnv([Walk] * 3, worker=_async_worker)) as envs:
        with pytest.raises(ValueError, match="autoreset_mode=AutoresetMode.DISABLED"):
            evaluate(envs, act, 7, seeds=0)


@pytest.mark.deep
def test_vector_envs_that_cannot_be_used():
    with closing(ShmVectorEnv([Walk], autoreset_mode=AutoresetMode.SAME_STEP)) as envs:
        with pytest.raises(ValueError, match="autoreset_mode=AutoresetMode.DISABLED"):
            evaluate(envs, act)
    with closing(ShmVectorEnv([Walk])) as envs:
        with pytest.raises(ValueError, match="cannot be set for .*: .*num_envs.*num_workers"):
            evaluate(envs, act, num_envs=1, num_workers=1)
        envs.async_reset()
        with pytest.raises(AlreadyPendingCallError):
            evaluate(envs, act)
        envs.recv()
    with pytest.raises(ClosedEnvironmentError):
        evaluate(envs, act)


# ---- what is said of the results ---------------------------------------------------------------


def result_of(returns):
    count = len(returns)
    return Evaluation(
        returns=np.array(returns, float),
        lengths=np.full(count, 3),
        terminated=np.ones(count, bool),
        seeds=np.arange(count),
        infos={"is_success": np.arange(count) % 2 == 0},
        steps=3 * count,
        repeats=0,
        asked=count,
        seconds=1.0,
    )


@pytest.mark.deep
@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_statistics(returns):
    from scipy import stats  # whose import takes a second and a half, of each process

    result = result_of(returns)
    assert result.interquartile_mean == pytest.approx(stats.trim_mean(returns, 0.25), abs=1e-6)
    assert result.mean == pytest.approx(np.mean(returns))
    if len(returns) > 1:
        assert result.standard_error == pytest.approx(stats.sem(returns), abs=1e-6)
    else:
        assert np.isnan(result.standard_error)
    low, high = result.confidence_interval(samples=50)
    assert min(returns) - 1e-6 <= low <= high <= max(returns) + 1e-6


@pytest.mark.deep
@pytest.mark.parametrize("statistic", ["mean", "interquartile_mean"])
def test_intervals_hold_what_they_promise(statistic):
    random = np.random.default_rng(0)
    held = 0
    for trial in range(300):
        values = random.normal(size=50)
        low, high = confidence_interval([values], statistic, 0.9, 400, trial)
        held += low <= 0 <= high
    assert 0.83 <= held / 300 <= 0.96


@pytest.mark.deep
def test_intervals_are_the_same_each_time_and_wider_for_more_confidence():
    values = [np.random.default_rng(0).normal(size=30)]
    low, high = confidence_interval(values, "mean", 0.95, 2000, 0)
    assert (low, high) == confidence_interval(values, "mean", 0.95, 2000, 0)
    wider = confidence_interval(values, "mean", 0.99, 2000, 0)
    assert wider[0] < low < high < wider[1]
    assert np.isnan(confidence_interval([np.array([])], "mean", 0.95, 10, 0)).all()
    for wrong in (("median", 0.95, 10), ("mean", 1.0, 10), ("mean", 0.9, 0)):
        with pytest.raises(ValueError, match="must"):
            confidence_interval(values, *wrong, 0)
    for statistic in ("mean", "interquartile_mean"):
        assert np.isnan(statistic_of([np.array([])], statistic))
    assert np.isnan(standard_error(np.array([])))


def test_its_table():
    result = result_of([1, 2, 3, 4])
    low, high = result.confidence_interval("mean", samples=1000)
    text = str(result)
    assert text.startswith("4 episodes of 4, 12 steps, 1.0 s\n") and low < high
    assert f"| return | 2.50 | 0.65 | {low:.2f} to {high:.2f} | 2.50 | " in text
    assert "| success | 0.500 |" in text


@pytest.mark.deep
def test_to_pandas():
    result = result_of([1.0, 2.0])
    if importlib.util.find_spec("pandas") is None:
        with pytest.raises(ImportError, match="pip install pandas"):
            result.to_pandas()
        return
    frame = result.to_pandas()
    assert frame["return"].tolist() == [1.0, 2.0] and frame["is_success"].tolist() == [True, False]


@pytest.mark.deep
def test_progress(capfd):
    here(Walk, act, 3, progress=True)
    shown = capfd.readouterr().err
    assert ("3/3" in shown) == (importlib.util.find_spec("tqdm") is not None)


class Drawn(Walk):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    render_mode = "rgb_array"

    def render(self):
        return np.full((16, 16, 3), self.left, np.uint8)


@pytest.mark.deep
def test_videos(tmp_path):
    if importlib.util.find_spec("moviepy") is None:
        with pytest.raises(gym.error.DependencyNotInstalled, match="MoviePy"):
            evaluate(Drawn, act, 3, video_folder=tmp_path)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # moviepy's own
        result = evaluate(
            Drawn,
            act,
            9,
            seeds=0,
            num_envs=4,
            options={"more": 3},
            info_keys=["left"],
            video_folder=tmp_path / "videos",
            video_episodes=[0, 7],
        )
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == [
        "evaluation-episode-0.mp4",
        "evaluation-episode-7.mp4",
    ]
    expected = one_after_the_other(Walk, range(9), [{"more": 3}] * 9)
    assert rows(result, "left") == expected


# ---- the command -------------------------------------------------------------------------------

SCRIPT = """
import gymnasium as gym
import numpy as np


class Policy:
    def reset(self, env_ids):
        self.begun = True

    def __call__(self, observations, env_ids):
        assert self.begun
        return (observations[:, 2] > 0).astype(int)


def lean(observations, env_ids):
    return (observations[:, 2] > 0).astype(int)


def make_env(length=None):
    return gym.make("CartPole-v1", max_episode_steps=length)


class Idle:
    pass


class Needy(Policy):
    def __init__(self, path):
        pass


class Resets(Policy):
    def reset(self):
        pass


class Model:
    def predict(self, observations):
        return lean(observations, None), None


model = Model()


def wrong(observations, env_ids):
    return np.zeros(len(observations) + 1, int)


def alone(observations):
    return np.zeros(len(observations), int)


def lost(observations, env_ids):
    raise ValueError("no idea")


NUMBER = 3
"""


@pytest.mark.parametrize(
    "env, policy",
    [
        ("script.py:make_env", "Policy"),
        *deep(("CartPole-v1", "lean"), ("script:make_env", "Model"), ("CartPole-v1", "model")),
    ],
)
def test_the_command(tmp_path, monkeypatch, capsys, env, policy):
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "script", raising=False)
    arguments = f"evaluate {env} --policy script.py:{policy} --episodes 4 --seeds 1 --num-envs 3"
    arguments += " --progress --json results.json"
    assert shmvec.__main__.main(arguments.split()) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("4 episodes of 4, 147 steps, ")
    assert shown.err.splitlines()[-1] == "4 of 4 episodes, mean return 36.75"
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["return"] == [51.0, 35.0, 36.0, 25.0]
    assert results["seed"] == [1, 2, 3, 4] and results["terminated"] == [True] * 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("CartPole-v1 --policy lean", "names no function"),
        *deep(
            ("CartPole-v1 --policy nothing.py:lean", "there is no file nothing.py"),
            ("CartPole-v1 --policy no_module_of_this_name:lean", "cannot import"),
            ("CartPole-v1 --policy script.py:lien", "has no function 'lien'"),
            ("CartPole-v1 --policy script.py:NUMBER", "has no function 'NUMBER'"),
            ("CartPole-v99 --policy script.py:lean", "CartPole"),
            ("CartPole-v1 --policy script.py:lean --episodes 0", "must be positive"),
            ("CartPole-v1", "--policy"),
            ("CartPole-v1 --policy script.py:lean --seed -1", "a seed must not be negative"),
            ("CartPole-v1 --policy script.py:lean --json .", "is a folder"),
            ("CartPole-v1 --policy script.py:Idle", "cannot be called"),
            ("CartPole-v1 --policy script.py:Needy", "class script.py:Needy needs arguments"),
            (
                "CartPole-v1 --policy script.py:Resets",
                "--policy script.py:Resets: a policy's reset",
            ),
            (
                "CartPole-v1 --policy script.py:alone",
                "--policy script.py:alone: policy must take two",
            ),
            ("CartPole-v1 --policy script.py:wrong", "the policy's actions for batch"),
        ),
    ],
)
def test_the_command_explains(tmp_path, monkeypatch, capsys, arguments, says):
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "script", raising=False)
    with pytest.raises(SystemExit) as ended:
        shmvec.__main__.main(["evaluate", *arguments.split(), "--num-envs", "2"])
    assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.deep
def test_the_command_records_an_env_that_is_made_by_its_id(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "script", raising=False)
    arguments = "evaluate CartPole-v1 --policy script.py:lean --episodes 2 --videos videos"
    if importlib.util.find_spec("moviepy") is None:
        with pytest.raises(gym.error.DependencyNotInstalled, match="MoviePy"):
            shmvec.__main__.main(arguments.split())
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # moviepy's own
        assert shmvec.__main__.main(arguments.split()) == 0
    assert [path.name for path in tmp_path.glob("videos/*")] == ["evaluation-episode-0.mp4"]


@pytest.mark.deep
def test_the_command_keeps_the_traceback_of_what_a_policy_raises(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "script", raising=False)
    with pytest.raises(ValueError, match="no idea"):
        shmvec.__main__.main("evaluate CartPole-v1 --policy script.py:lost --num-envs 1".split())

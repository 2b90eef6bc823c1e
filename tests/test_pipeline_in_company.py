"""A pipeline whose envs fail, or are used by others as well: none takes results of another."""

import time
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from envs import Story, stories
from gymnasium.error import AlreadyPendingCallError
from test_pipeline import Chooser

from shmvec import EnvTimeoutError, FaultPolicy, Pipeline, ShmVectorEnv, evaluate
from shmvec.exchange import AutoresetMode

pytestmark = pytest.mark.deep


class Raises(Story):
    """Raises an exception of a kind that is also raised for wrong actions."""

    def __init__(self, index, kind):
        super().__init__(index)
        self.kind = kind

    def step(self, action):
        if self.index == 1 and self.asked == 2:
            raise self.kind("mine")
        return super().step(action)


@pytest.mark.parametrize("kind", [TypeError, ValueError, KeyError])
@pytest.mark.parametrize("groups", [1, 2])
def test_what_an_env_raises_is_not_the_policys(kind, groups):
    with closing(
        ShmVectorEnv([lambda i=i: Raises(i, kind) for i in range(2)], num_workers=0)
    ) as envs:
        pipeline = Pipeline(envs, Chooser(), groups=groups)
        pipeline.reset(seed=0)
        with pytest.raises(kind) as raised:
            pipeline.collect(4)
        assert raised.value.args == ("mine",)


class Anyhow(gym.Space):
    """A space of one's own, of dicts."""

    def __init__(self):
        super().__init__()


DISCRETE, BOX = gym.spaces.Discrete(1000), gym.spaces.Box(-9, 9, (2,))
DICT = gym.spaces.Dict(a=DISCRETE)
SPACES = {
    "of an array and a dict": (
        gym.spaces.Tuple([DISCRETE, DICT]),
        lambda n: (np.full(n, 7), {"a": np.full(n, 3)}),
    ),
    "of dicts": (gym.spaces.Tuple([DICT, DICT]), lambda n: ({"a": [7] * n}, {"a": [7] * n})),
    "nested": (
        gym.spaces.Tuple([gym.spaces.Tuple([BOX, DICT]), DICT]),
        lambda n: ((np.ones((n, 2), np.float32), {"a": [7] * n}), {"a": [7] * n}),
    ),
    "anyhow": (Anyhow(), lambda n: ({"a": 7},) * n),
}


@pytest.mark.parametrize("which", SPACES)
def test_actions_that_end_with_a_dict(which):
    space, actions = SPACES[which]

    class Takes(Story):
        action_space = space

        def step(self, action):
            assert which == "anyhow" or space.contains(action)
            return super().step(7)

    def policy(observations, env_ids):
        return actions(len(env_ids))

    fns = [lambda i=i: Takes(i) for i in range(2)]
    assert evaluate(fns, policy, 3, seeds=0, num_workers=0).returns.min() > 0
    with closing(ShmVectorEnv(fns, num_workers=0)) as envs:
        for said in ({}, {"a": np.ones(2)}, {"b": np.ones(2)}):

            def saying(observations, env_ids, said=said):
                given = policy(observations, env_ids)
                return (given, said) if said else given

            pipeline = Pipeline(envs, saying, groups=1)
            pipeline.reset(seed=0)
            found = next(pipeline)
            assert found.extras.keys() == said.keys() and found.rewards.tolist() == [7, 7]
            pipeline.drop()


class Sleeps(gym.Env):
    """An action is how many ms a step takes."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(1000)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1), {}

    def step(self, action):
        time.sleep(action / 1000)
        return np.ones(1), 1.0, False, False, {}


def test_a_group_that_waits_for_its_worker_to_be_recycled_as_another_one_ends():
    asked = [0, 0]

    def policy(observations, env_ids):
        (env,) = env_ids.tolist()
        asked[env] += 1
        # Of the second rollout: one env comes to its 2nd step when the other one makes its last.
        return [{(0, 5): 200, (1, 7): 400}.get((env, asked[env]), 0)]

    envs = ShmVectorEnv([Sleeps] * 2, num_workers=2, recycle_after=10)
    with closing(envs):
        pipeline = Pipeline(envs, policy, groups=2)
        pipeline.reset(seed=0)
        pipeline.collect(3)
        # The first worker is worn after five steps, the other after ten.
        rollout = pipeline.collect(4)
        assert asked == [7, 7] and rollout.infos[3]["_fault"].tolist() == [True, False]


def seven(observations, env_ids):
    return np.full(len(env_ids), 7)


def test_what_a_left_loop_has_asked_is_not_dropped_for_a_step_that_failed_before():
    with closing(ShmVectorEnv(stories(4), num_workers=1)) as envs:
        pipeline = Pipeline(envs, seven)
        pipeline.reset(seed=0)
        with pytest.raises(TypeError, match="dtype"):
            envs.step(np.zeros(4))
        next(pipeline)
        with pytest.raises(AlreadyPendingCallError, match=r"`drop\(\)` of the Pipeline"):
            envs.step([1] * 4)
        assert next(pipeline).rewards.tolist() == [7, 7]


@pytest.mark.parametrize("count", [4, 1])
@pytest.mark.parametrize("go_on", ["next", "collect"])
def test_others_have_taken_what_a_left_loop_has_asked(count, go_on):
    with closing(ShmVectorEnv(stories(4), num_workers=1)) as envs:
        pipeline = Pipeline(envs, seven)
        pipeline.reset(seed=0)
        next(pipeline)
        envs.recv(min_envs=count, timeout=60)
        if go_on == "next":
            assert next(pipeline).rewards.tolist() == [7, 7]
        else:
            assert (pipeline.collect(1).rewards == 7).all()
        pipeline.drop()
        assert envs.step([1] * 4)[1].tolist() == [1] * 4


def test_a_pipeline_is_forgotten_whose_loop_was_left():
    with closing(ShmVectorEnv(stories(4), num_workers=1)) as envs:
        envs.reset(seed=0)
        for _ in Pipeline(envs, seven):
            break
        assert envs.step([1] * 4)[1].tolist() == [1] * 4
        pipeline = Pipeline(envs, seven)
        next(pipeline)
        assert Pipeline(envs, seven) is not None  # which has asked for nothing
        with pytest.raises(AlreadyPendingCallError):
            envs.step([1] * 4)
        del pipeline
        assert envs.exchange.num_in_flight == 4
    for _ in range(2):
        with closing(ShmVectorEnv(stories(4), num_workers=1)) as envs:
            pipeline = Pipeline(envs, seven)
            pipeline.reset(seed=0)
            next(pipeline)
        del pipeline


@pytest.mark.parametrize("groups", [1, 2])
def test_a_step_that_takes_too_long_is_waited_for_by_the_next_call(groups, tmp_path):
    class Waits(Story):
        def step(self, action):
            if (self.index, self.asked) == (1, 2):
                self.asked += 1
                while not (tmp_path / "go").exists():
                    time.sleep(0.01)
                (tmp_path / "gone").touch()
            return super().step(action)

    envs = ShmVectorEnv(
        [lambda i=i: Waits(i, length=99) for i in range(2)], num_workers=2, step_timeout=1.0
    )
    with closing(envs):
        pipeline = Pipeline(envs, seven, groups=groups)
        pipeline.reset(seed=0)
        with pytest.raises(EnvTimeoutError):
            pipeline.collect(5)
        for call in (lambda: envs.step([1] * 2), lambda: pipeline.collect(2)):
            with pytest.raises(EnvTimeoutError):
                call()
        (tmp_path / "go").touch()
        while not (tmp_path / "gone").exists():
            time.sleep(0.01)
        assert envs.step([1] * 2)[1].tolist() == [1, 1]
        assert pipeline.collect(2).rewards[1:].tolist() == [[7, 7]] * 2


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_policy_learns_which_envs_others_have_used(workers):
    class Remembers:
        def __init__(self):
            self.seen = set()

        def reset(self, env_ids):
            self.seen.update(env_ids.tolist())

        def __call__(self, observations, env_ids):
            return np.zeros(len(env_ids), int)

    def reset_in(use):
        policy.seen.clear()
        use()
        return sorted(policy.seen)

    policy = Remembers()
    with closing(ShmVectorEnv([Sleeps] * 4, num_workers=workers)) as envs:
        pipeline = Pipeline(envs, policy)
        envs.reset(seed=0)
        everyone = [0, 1, 2, 3]
        for use in (lambda: pipeline.collect(1), lambda: [next(pipeline), next(pipeline)]):
            pipeline.drop()
            pipeline.collect(1)
            assert reset_in(use) == []
            pipeline.collect(1)
            envs.get_attr("metadata")
            assert reset_in(use) == []
            pipeline.collect(1)
            envs.reset(seed=1)
            assert reset_in(use) == everyone
            pipeline.collect(1)
            envs.reset(options={"reset_mask": np.array([False, True, False, False])})
            assert reset_in(use) == [1]
            pipeline.collect(1)
            envs.step([0] * 4, mask=np.array([True, False, False, False]))
            assert reset_in(use) == (everyone if workers < 2 else [0, 1])
        # Nothing is out for others to use: it goes on.
        pipeline.collect(1)
        assert reset_in(lambda: pipeline.collect(3)) == []


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_the_policy_learns_of_an_episode_that_a_step_of_others_has_begun(mode):
    begun = []

    def policy(observations, env_ids):
        return np.ones(len(env_ids), int)

    policy.reset = lambda env_ids: begun.extend(env_ids.tolist())
    fns = [lambda i=i: Story(i, length=2 + 8 * i) for i in range(2)]
    with closing(ShmVectorEnv(fns, num_workers=2, autoreset_mode=mode)) as envs:
        pipeline = Pipeline(envs, policy)
        pipeline.reset(seed=0)
        next_step = mode is AutoresetMode.NEXT_STEP
        pipeline.collect(2 if next_step else 1)  # the first env's next step begins an episode
        begun.clear()
        seen = envs.step([1, 1], mask=np.array([True, False]))[0]
        assert seen[0, 3] == -1  # its first observation
        pipeline.collect(1)
        assert begun == [0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("go_on", ["next", "collect", "drop"])
def test_an_env_raises_that_is_not_waited_for_yet(workers, go_on):
    fns = [lambda i=i: Raises(i, OSError) for i in range(2)]
    with closing(ShmVectorEnv(fns, num_workers=workers)) as envs:
        pipeline = Pipeline(envs, seven, groups=2, deterministic=True)
        pipeline.reset(seed=0)
        for _ in range(4):
            next(pipeline)
        next(pipeline)  # of the first env; the other one raises
        envs.exchange.first_ready([np.arange(2)])
        if go_on == "drop":
            pipeline.drop()
        else:
            with pytest.raises(OSError, match="mine"):
                next(pipeline) if go_on == "next" else pipeline.collect(1)
        envs.reset(seed=0)


@pytest.mark.parametrize("how", ["next", "collect"])
def test_ctrl_c_waits_for_no_env(how, tmp_path):
    class Waits(Sleeps):
        def step(self, action):
            deadline = time.monotonic() + 30
            while action and not (tmp_path / "go").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            return super().step(0)

    calls = 0

    def policy(observations, env_ids):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return [1]

    with closing(ShmVectorEnv([Waits] * 2, num_workers=2)) as envs:
        pipeline = Pipeline(envs, policy, groups=2, deterministic=True)
        pipeline.reset(seed=0)
        with pytest.raises(KeyboardInterrupt):
            next(pipeline) if how == "next" else pipeline.collect(3)
        assert envs.exchange.num_in_flight == 1
        (tmp_path / "go").touch()
        pipeline.drop()
        assert pipeline.collect(2).rewards[1:].tolist() == [[1, 1]] * 2
        assert envs.step([0] * 2)[1].tolist() == [1, 1]


class Lasts(Story):
    """Has one episode, so that each step counts."""

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, False, info


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize(("workers", "faults"), [(0, None), (1, "restart"), (2, None)])
def test_groups_that_are_apart_when_it_is_broken_off(workers, faults, mode):
    faults = FaultPolicy(on_crash=faults) if faults else FaultPolicy()  # keeping last results
    fns = [lambda i=i: Lasts(i) for i in range(4)]
    envs = ShmVectorEnv(fns, num_workers=workers, faults=faults, autoreset_mode=mode)
    errors, asked = [], np.zeros(4)

    def policy(seen, ids):
        if len(called) == number:
            raise LookupError(number)
        called.append(ids)
        assert (seen[:, 1] == asked[ids]).all()
        asked[ids] += 1
        return ids

    with closing(envs):
        pipeline = Pipeline(envs, policy, deterministic=True)
        for number, length in [(0, 4), (1, 4), (4, 4), (5, 2), (7, 4)]:
            called = []
            pipeline.reset(seed=0)  # which brings home what is in frames of a rollout
            with pytest.raises(LookupError) as raised:
                pipeline.collect(4)
            errors.append(raised.value)  # with the frames of all that was called
            number = -1
            rollout = pipeline.collect(length)  # of another length: in other memory
            assert (rollout.observations[1:, :, 1] - rollout.observations[:-1, :, 1] == 1).all()
            assert (rollout.observations[-1, :, 1] == asked).all()
            assert (envs.step([5] * 4)[0][:, 1] == asked + 1).all()
            asked += 1
        assert not any(map(envs.exchange.in_flight, range(4)))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_policy_that_steps_the_envs_itself(groups):
    with closing(ShmVectorEnv(stories(4), num_workers=1)) as envs:

        def policy(seen, ids):
            envs.step([1] * 4)
            return ids

        pipeline = Pipeline(envs, policy, groups=groups)
        pipeline.reset(seed=0)
        with pytest.raises(AlreadyPendingCallError, match="pending call to `Pipeline`"):
            pipeline.collect(3)
        assert envs.step([1] * 4)[0][:, 1].tolist() == [1] * 4


def test_frames_of_a_rollout_are_for_envs_whose_company_is_there():
    with closing(ShmVectorEnv(stories(4), num_workers=1)) as envs:
        envs.reset(seed=0)
        rollout = envs.rollout(2)
        rollout.step([1] * 4)
        rollout.step([1] * 4)
        with pytest.raises(RuntimeError, match="in no rollout"):
            envs.exchange.ask([0, 1], [1, 1], frame=1)
        assert envs.step([1] * 4)[0][:, 1].tolist() == [3] * 4


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("use", ["recv", "take", "send", "async_reset", "ask"])
def test_a_policy_that_uses_some_envs_while_others_step_into_a_rollout(workers, use):
    """What it takes is true, and what it asks for is refused: the last results stay true."""
    calls = 0

    def policy(seen, ids):
        nonlocal calls
        calls += 1
        if calls != 4:  # then envs 0 and 1 are out for their second step
            return ids
        if use == "recv":
            taken.append(envs.recv(min_envs=2)[0])
        elif use == "take":
            taken.append(envs.exchange.take([0, 1]).observations)
        elif use == "send":
            envs.send([9, 9], [2, 3])
        elif use == "async_reset":
            envs.async_reset(env_id=[2, 3])
        else:
            envs.exchange.ask([2, 3], [9, 9])
        return ids

    taken = []
    fns = [lambda i=i: Lasts(i) for i in range(4)]
    with closing(ShmVectorEnv(fns, num_workers=workers)) as envs:
        pipeline = Pipeline(envs, policy, groups=2, deterministic=True)
        pipeline.reset(seed=0)
        taking = use == "take"
        error, match = RuntimeError, "other code has" if taking else "to a rollout"
        if use not in ("take", "ask"):  # of the vector env, which is lent
            error, match = AlreadyPendingCallError, "pending call to `Pipeline`"
        with pytest.raises(error, match=match):
            pipeline.collect(4)
        assert [seen[:, 1].tolist() for seen in taken] == [[2, 2]] * taking
        asked = envs.get_attr("asked")
        assert asked == ((2, 2, 2, 2) if taking else (2, 2, 1, 1))
        assert pipeline.collect(1).observations[0, :, 1].tolist() == list(asked)


@pytest.mark.parametrize("go_on", ["next", "collect"])
def test_an_interrupt_before_an_error_is_cleared_up_after(monkeypatch, go_on):
    """One group is out then, and the other one was not asked: both are stepped by the next call."""

    def policy(seen, ids):
        asked.append(ids)
        if len(asked) == 4:
            raise LookupError
        return ids

    def interrupt(self):
        raise KeyboardInterrupt

    asked, fns = [], [lambda i=i: Lasts(i) for i in range(4)]
    with closing(ShmVectorEnv(fns, num_workers=1)) as envs:
        pipeline = Pipeline(envs, policy, groups=2, deterministic=True)
        pipeline.reset(seed=0)
        with monkeypatch.context() as patch:
            patch.setattr("shmvec.pipeline.Collected.release", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pipeline.collect(4)
        if go_on == "collect":
            assert pipeline.collect(1).observations[:, :, 1].tolist() == [
                [2, 2, 1, 1],
                [3, 3, 2, 2],
            ]
        else:
            found = [next(pipeline), next(pipeline)]
            assert [each.env_ids.tolist() for each in found] == [[0, 1], [2, 3]]
            assert [each.observations[:, 1].tolist() for each in found] == [[2, 2], [1, 1]]
            pipeline.drop()

"""Rewards of more than one number, as a ``reward_space`` says: equal to those of the envs alone."""

import asyncio
import os
import re
import signal
from contextlib import closing
from functools import partial

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from equality import MODES, assert_same_steps, by_batches, by_masks, same, sync_env
from gymnasium.wrappers import NormalizeReward, TransformReward
from tables import first, paired, row

from shmvec import FaultPolicy, Pipeline, Replay, ShmVectorEnv, evaluate
from shmvec.adapters.actorcritic import SubprocessEnv
from shmvec.adapters.baselines import SubprocVecEnv
from shmvec.cluster.hosts import Host
from shmvec.exchange import AutoresetMode, Exchange, HostedEnv
from shmvec.planning import PlanningVectorEnv
from shmvec.spaces import reward_space_of

DTYPES = [np.float32, np.float64, np.int64]
KILL = 99  # an action, none of the space


class Objectives(gym.Env):
    """Rewards of k numbers that say which env, step and objective they are; episodes end."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(10)

    def __init__(self, index=0, k=2, dtype=np.float32):
        self.reward_space = gym.spaces.Box(0, 100, (k,), dtype)
        self.index, self.count = index, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.np_random.random(3, np.float32), {}

    def step(self, action):
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1
        k = self.reward_space.shape[0]
        noise = self.np_random.integers(100, size=k)
        reward = (noise + self.index + np.arange(k) / 4 + action).astype(self.reward_space.dtype)
        observation = self.np_random.random(3, np.float32)
        return observation, reward, self.count >= 3 + self.index, False, {"count": self.count}


class AsyncObjectives(Objectives):
    """Steps take turns in an event loop, so results are put in any order."""

    async def reset(self, **kwargs):
        await asyncio.sleep(0)
        return super().reset(**kwargs)

    async def step(self, action):
        await asyncio.sleep(0.001 if self.index == 0 else 0)
        return super().step(action)


def objectives(num_envs, kind=Objectives, **options):
    return [partial(kind, index, **options) for index in range(num_envs)]


def reference(fns, mode):
    """Gymnasium's SyncVectorEnv with room for such rewards: the rest of it is as it is."""
    envs = sync_env(fns, mode)
    space = envs.envs[0].unwrapped.reward_space
    vars(envs).update(_rewards=np.zeros((len(fns), *space.shape), space.dtype))
    return envs


HOSTS = {
    "workers": dict(num_workers=2),
    "the caller": dict(num_workers=0),
    "the caller, too": dict(num_workers=2, caller_steps=True),
    "threads": dict(num_workers=1, overlap=2),
    "an event loop": dict(num_workers=1, overlap=2, kind=AsyncObjectives),
    "messages": dict(num_workers=2, shared_memory=False),
    "views": dict(num_workers=2, copy=False),
    "restarts": dict(num_workers=2, faults=FaultPolicy(on_crash="restart")),
}


@pytest.mark.parametrize(("mode", "host"), paired(MODES, HOSTS))
def test_steps_are_those_of_the_envs(mode, host):
    options = dict(HOSTS[host])
    kind = options.pop("kind", Objectives)
    for dtype, k in zip(DTYPES, (2, 3, 5), strict=True):
        theirs = reference(objectives(3, k=k, dtype=dtype), mode)
        fns = objectives(3, kind, k=k, dtype=dtype)
        with closing(theirs), ShmVectorEnv(fns, autoreset_mode=mode, **options) as ours:
            assert ours.reward_space == Objectives(k=k, dtype=dtype).reward_space
            assert_same_steps(ours, theirs, 12)


@pytest.mark.parametrize(("mode", "parts"), paired(MODES, [by_batches, by_masks]))
def test_parts_of_steps_are_those_of_the_envs(mode, parts):
    fns = objectives(4)
    faults = FaultPolicy(on_crash="restart") if parts is by_masks else FaultPolicy()
    theirs = reference(fns, mode)
    with closing(theirs):
        with ShmVectorEnv(fns, autoreset_mode=mode, num_workers=2, faults=faults) as ours:
            assert_same_steps(ours, theirs, 12, parts=parts)


class Copy(Objectives):
    """Earns its index, how often it was reset, and its step."""

    resets = 0

    async def reset(self, **kwargs):
        self.resets += 1
        return super().reset(**kwargs)

    async def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, [self.index, self.resets, self.count], *rest


class ThreadedCopy(Copy):
    def reset(self, **kwargs):
        return asyncio.run(super().reset(**kwargs))

    def step(self, action):
        return asyncio.run(super().step(action))


@pytest.mark.parametrize(
    ("kind", "mode", "overlap"), paired([Copy, ThreadedCopy], MODES[:2], [None, 4])
)
def test_copies_of_an_env_earn_in_turn(kind, mode, overlap):
    options = {"autoreset_mode": mode, "overlap": overlap, "num_workers": 1, "spare_envs": 1}
    with ShmVectorEnv(objectives(2, kind, k=3), **options) as envs:
        envs.reset(seed=3)
        episodes, counts = [0, 0], [0, 0]
        for _ in range(20):
            _, rewards, ends, _, _ = envs.step([1, 1])
            for env in range(2):
                counts[env] += 1
                expected = env, episodes[env] // 2 + 1, counts[env]
                if counts[env] == 0:  # a reset
                    expected = 0, 0, 0
                assert rewards[env].tolist() == list(expected)
                if ends[env]:
                    episodes[env] += 1
                    counts[env] = 0 if mode is AutoresetMode.SAME_STEP else -1


def test_batches_of_those_that_are_ready():
    """Also as views, which are leased."""
    for options in ({}, {"copy": False, "num_buffers": 3}):
        with ShmVectorEnv(objectives(4), num_workers=2, batch_size=2, **options) as envs:
            envs.async_reset(seed=3)
            alone = [Objectives(index) for index in range(4)]
            for index, env in enumerate(alone):
                env.reset(seed=3 + index)
            expected = {index: (np.zeros(2, np.float32), False) for index in range(4)}
            for _ in range(12):
                _, rewards, terminations, _, infos = envs.recv()
                assert rewards.shape == (2, 2)
                ids = infos["env_id"].tolist()
                for index, *found in zip(ids, rewards, terminations.tolist(), strict=True):
                    assert same(found, list(expected[index]))
                    if found[1]:
                        alone[index].reset()
                        expected[index] = np.zeros(2, np.float32), False
                    else:
                        _, *expected[index], _, _ = alone[index].step(1)
                envs.send([1, 1], infos["env_id"])


def test_a_rollout_and_a_pipeline_have_them():
    fns = objectives(4)
    theirs = reference(fns, AutoresetMode.NEXT_STEP)
    with closing(theirs), ShmVectorEnv(fns, num_workers=2) as envs:
        theirs.reset(seed=3)
        expected = np.stack([theirs.step(np.full(4, 2))[1] for _ in range(18)])
        envs.reset(seed=3)
        rollout = envs.rollout(6)
        for _ in range(6):
            rollout.step(np.full(4, 2))
        assert same(rollout.rewards[1:], expected[:6]) and not rollout.rewards[0].any()
        assert "4 envs" in repr(rollout)
        pipeline = Pipeline(envs, lambda seen, env_ids: np.full(len(env_ids), 2), groups=2)
        collected = pipeline.collect(6)
        assert same(collected.rewards, expected[5:12])
        made = {env: [] for env in range(4)}
        for transitions in pipeline:
            for env, reward in zip(transitions.env_ids.tolist(), transitions.rewards, strict=True):
                made[env].append(reward)
            if min(map(len, made.values())) >= 3:
                break
        for env, rewards in made.items():
            left = [reward for reward in expected[12:, env] if reward.any()]
            assert same(np.stack(rewards[:3]), np.stack(left[:3]))


@pytest.mark.parametrize("mode", MODES[:2])
def test_a_replay_sums_each_of_them(mode, tmp_path):
    discount = 0.5
    with ShmVectorEnv(objectives(2, k=3), num_workers=1, autoreset_mode=mode) as envs:
        replay = Replay(envs, 400, n_step=2, discount=discount, seed=0)
        observations, _ = envs.reset(seed=3)
        seen = {0: [], 1: []}  # of each env: observation, reward and whether it is an episode's end
        for _ in range(30):
            before, over = observations, [bool(part and part[-1][2]) for part in seen.values()]
            observations, rewards, ends, _, _ = envs.step([1, 2])
            for env in seen:
                if mode is AutoresetMode.SAME_STEP or not over[env]:
                    seen[env].append((before[env].copy(), rewards[env].copy(), ends[env]))
                else:
                    seen[env].append((None, None, False))
        expected = {}
        for steps in seen.values():
            for at, (start, reward, end) in enumerate(steps):
                if start is not None and (end or at + 1 < len(steps)):
                    following = 0.0 if end else discount * steps[at + 1][1]
                    expected[start.tobytes()] = np.float32(reward.astype(float) + following)
        batch = replay.sample(500)
        assert batch.rewards.shape == (500, 3) and batch.rewards.dtype == np.float32
        for observation, reward in zip(batch.observations, batch.rewards, strict=True):
            assert same(reward, expected[observation.tobytes()])
        assert same(replay.at(batch.indices).rewards, batch.rewards)
        replay.save(tmp_path)
        replay.close()
        loaded = Replay.load(tmp_path, envs)
        assert same(loaded.at(batch.indices).rewards, batch.rewards)
        loaded.close()
    with ShmVectorEnv(objectives(2, k=2), num_workers=1) as envs:
        with pytest.raises(ValueError, match="other observations, actions or rewards"):
            Replay.load(tmp_path, envs)


def test_a_lost_step_earns_zeros():
    faults = FaultPolicy(on_crash="restart", backoff_s=0)
    with ShmVectorEnv(objectives(4), num_workers=2, faults=faults) as envs:
        envs.reset(seed=3)
        first = envs.step([1, 1, 1, 1])[1]
        assert first.all()
        _, rewards, _, truncations, _ = envs.step([1, 1, 1, KILL])
        assert truncations.tolist() == [False, False, True, True]
        assert rewards[:2].all() and not rewards[2:].any()
        envs.step([1, 1, 1, 1])  # resets what was lost
        rollout = envs.rollout(2)
        rollout.step([1, 1, 1, KILL])
        rollout.step([1, 1, 1, 1])
        assert not rollout.rewards[1, 2:].any() and rollout.rewards[1, 1].all()


class Wrong(Objectives):
    def __init__(self, reward):
        super().__init__()
        self.reward = reward

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, self.reward, *rest


WRONG = [
    (0.5, ValueError, "the reward has shape \\(\\) .*needs shape \\(2,\\) and .*. It is 0.5"),
    ([1.0, 2.0, 3.0], ValueError, "the reward has shape \\(3,\\)"),
    (None, ValueError, "the reward is None; its space .* needs shape"),
    ("good", ValueError, "the reward has shape \\(\\)"),
    (np.ones(2, complex), TypeError, "the reward .* complex128 does not cast"),
]


def test_a_reward_that_does_not_fit_is_named():
    for reward, kind, message in WRONG:
        with row(reward), ShmVectorEnv([partial(Wrong, reward)], num_workers=0) as envs:
            envs.reset(seed=0)
            with pytest.raises(kind, match=f"env 0: {message}") as raised:
                envs.step([1])
            notes = "".join(getattr(raised.value, "__notes__", ()))
            assert ("`reward_space = None`" in notes) is isinstance(reward, float)
    for fits in ([1, 2], (1.5, 2.5), np.ones(2, np.float64), np.ones((1, 2), np.int8)):
        with row(fits), ShmVectorEnv([partial(Wrong, fits)], num_workers=0) as envs:
            envs.reset(seed=0)
            assert same(envs.step([1])[1], np.array(fits, np.float32).reshape(1, 2))


def test_the_envs_have_one_reward_space():
    """Bounds may differ, shape and dtype may not."""

    def other():
        env = Objectives()
        env.reward_space = gym.spaces.Box(-7, 7, (2,))
        return env

    with ShmVectorEnv([Objectives, other], num_workers=2) as envs:
        assert envs.reward_space == Objectives().reward_space
    odd = partial(Objectives, k=3), partial(Objectives, dtype=np.float64), Number
    for fn in odd:
        for workers in (1, 3):
            with row(fn, workers), pytest.raises(RuntimeError, match="The reward space of env 2"):
                ShmVectorEnv([Objectives, Objectives, fn], num_workers=workers)


class Wrapped(gym.Wrapper):
    reward_space = gym.spaces.Box(0, 100)


class Number(TransformReward):
    """Makes a number of several, and says so."""

    reward_space = None

    def __init__(self):
        super().__init__(Objectives(), lambda reward: float(sum(reward)))


def test_a_wrapper_says_that_rewards_are_numbers():
    with ShmVectorEnv([Number] * 2, num_workers=1) as envs:
        assert envs.reward_space is None
        envs.reset(seed=0)
        rewards = envs.step([1, 1])[1]
        assert rewards.shape == (2,) and rewards.dtype == np.float64 and rewards.all()


def test_other_reward_spaces_are_passed_over():
    """An env may mean something else by the name."""

    class Raises(Objectives):
        @property
        def reward_space(self):
            raise RuntimeError("not yet")

        @reward_space.setter
        def reward_space(self, space):
            pass

    for space in (None, "IrInstructionCount", gym.spaces.Discrete(2)):
        env = Objectives()
        env.reward_space = space
        assert reward_space_of(env) is None
    for shape in ((), (2, 2), (1,), (0,)):
        env = Objectives()
        env.reward_space = gym.spaces.Box(0, 1, shape)
        assert reward_space_of(env) is None
    assert reward_space_of(Raises()) is None
    assert reward_space_of(gym.Wrapper(Objectives())) == Objectives().reward_space
    assert reward_space_of(object()) is None
    assert HostedEnv(Objectives()).reward_space == Objectives().reward_space


def test_one_number_is_a_number():
    """Box(0, 1) has shape (1,), and rewards of that shape are numbers without a space, too."""
    for reward in (7, 7.0, np.float32(7), np.array(7), np.array([7]), np.array([[7.0]])):
        env = Wrong(reward)
        env.reward_space = gym.spaces.Box(0, 100)
        with row(reward), ShmVectorEnv([lambda env=env: env], num_workers=0) as envs:
            envs.reset(seed=0)
            assert envs.reward_space is None
            assert same(envs.step([1])[1], np.array([7.0]))
    played = evaluate(
        [lambda: Wrapped(Wrong(7.0))], lambda seen, ids: np.ones(len(ids), int), 1, num_workers=0
    )
    assert played.returns.tolist() == [21.0]


def test_what_needs_numbers_refuses_them_by_name():
    def wrapper():
        ShmVectorEnv([lambda: NormalizeReward(gym.Wrapper(Objectives()))], num_workers=0)

    def evaluation():
        evaluate([Objectives], lambda seen, env_ids: np.ones(len(env_ids), int), 1, num_workers=0)

    def evaluation_of_a_vector_env():
        with ShmVectorEnv([Objectives], num_workers=0, autoreset_mode="Disabled") as envs:
            evaluate(envs, lambda seen, env_ids: np.ones(len(env_ids), int), 1)

    def cluster():
        Host(cloudpickle.dumps([Objectives]), range(1), {"num_workers": 0})

    def actorcritic():
        env = SubprocessEnv(Objectives)
        env.start()
        env.initialize()

    for name, refused in {
        "my adapter": lambda: Exchange([Objectives], name="my adapter", num_workers=0),
        "a NormalizeReward, which": wrapper,
        "evaluate()": evaluation,
        "evaluate() ": evaluation_of_a_vector_env,
        "a ClusterVectorEnv": cluster,
        "PlanningVectorEnv": lambda: PlanningVectorEnv(Objectives, n_workers=1),
        "SubprocVecEnv": lambda: SubprocVecEnv([Objectives]),
        "SubprocessEnv": actorcritic,
    }.items():
        message = f"{re.escape(name.strip())} needs rewards that are numbers"
        with row(name), pytest.raises(TypeError, match=message):
            refused()


def test_stable_baselines_refuses_them_by_name():
    pytest.importorskip("stable_baselines3")
    from shmvec.adapters.sb3 import ShmVecEnv

    with pytest.raises(TypeError, match="ShmVecEnv needs rewards that are numbers"):
        ShmVecEnv([Objectives])


def test_tianshou_has_them_as_ever():
    """Its envs return rewards of any shape."""
    pytest.importorskip("tianshou")
    from shmvec.adapters.tianshou import SubprocVectorEnv

    with closing(SubprocVectorEnv(objectives(2), num_workers=1)) as envs:
        envs.reset(seed=3)
        assert envs.step(np.array([1, 1]))[1].shape == (2, 2)


def test_the_caller_of_an_exchange_may_take_them():
    with closing(Exchange([Objectives] * 2, num_workers=1, vector_rewards=True)) as exchange:
        exchange.ask_reset(None, seeds=[1, 2])
        assert not exchange.take().rewards.any()
        exchange.ask([1, 0], [1, 1])
        answers = exchange.take([0, 1])
        assert answers.rewards.shape == (2, 2)
        rewards = [reward for _, _, reward, *_ in answers.by_env(exchange.single_observation_space)]
        assert same(np.stack(rewards), answers.rewards)
        assert exchange.reward_space == Objectives().reward_space


# ==== MO-Gymnasium ================================================================================

IDS = ["deep-sea-treasure-v0", "fruit-tree-v0", "four-room-v0", "mo-mountaincar-v0"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("id", first(IDS))
def test_equals_mo_gymnasium(id):
    mo = pytest.importorskip("mo_gymnasium")
    from mo_gymnasium.wrappers.vector import MORecordEpisodeStatistics, MOSyncVectorEnv

    fns = [partial(mo.make, id)] * 4
    theirs, ours = MOSyncVectorEnv(fns), ShmVectorEnv(fns, num_workers=2)
    with closing(theirs), ours:
        assert ours.reward_space == theirs.reward_space
        assert_same_steps(ours, theirs, 60)
        wrapped = [MORecordEpisodeStatistics(each, gamma=0.9) for each in (ours, theirs)]
        for each in wrapped:
            each.reset(seed=5)
        for _ in range(60):
            actions = theirs.action_space.sample()
            *results, (infos, expected) = zip(
                *(each.step(actions) for each in wrapped), strict=True
            )
            for key in ("r", "dr", "l"):
                if "episode" in expected:
                    assert same(infos["episode"][key], expected["episode"][key])
            for mine, reference in results:
                assert same(mine, reference)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_linear_reward_is_a_number():
    mo = pytest.importorskip("mo_gymnasium")
    from mo_gymnasium.wrappers import LinearReward

    fns = [lambda: LinearReward(mo.make(IDS[0]), weight=np.array([0.5, 0.5]))] * 2
    theirs = sync_env(fns)
    with closing(theirs), ShmVectorEnv(fns, num_workers=1) as ours:
        assert ours.reward_space is None
        assert_same_steps(ours, theirs, 20)

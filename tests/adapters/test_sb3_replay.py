"""Stable-Baselines3's off-policy algorithms on ``ShmReplayBuffer``: as on SB3's own buffer."""

import copy
import io
import warnings
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("stable_baselines3")

import torch
from equality import same
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecExtractDictObs,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from shmvec import FaultPolicy
from shmvec.adapters.sb3 import ShmReplayBuffer, ShmVecEnv

NUM_ENVS = 3
RESTART = FaultPolicy(on_crash="restart", backoff_s=0)

torch.set_num_threads(1)
pytestmark = pytest.mark.deep
pytestmark = [pytestmark, pytest.mark.usefixtures("gpu_in_use")]  # SB3 seeds it


class Walk(gym.Env):
    """Episodes of a few steps that terminate, or are truncated, or both."""

    def __init__(self, observations, actions):
        self.observation_space, self.action_space = copy.deepcopy(observations), actions

    def observation(self):
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(1 << 30)))
        self.left = self.np_random.integers(1, 10)
        return self.observation(), {}

    def step(self, action):
        self.left -= 1
        ends = self.np_random.random(2) < 0.6 if self.left == 0 else (False, False)
        self.left = max(self.left, 1)
        reward = float(np.sum(action)) + self.np_random.random()
        return self.observation(), reward, bool(ends[0]), bool(ends[1]), {}


class Asked:
    """A buffer that is asked for rows."""

    def rows(self, rows, env):
        np.random.seed(1)
        return self._get_samples(rows, env)


class Ours(Asked, ShmReplayBuffer):
    pass


class Theirs(Asked, ReplayBuffer):
    pass


class TheirDicts(Asked, DictReplayBuffer):
    pass


VECTORS = gym.spaces.Box(-2, 2, (3,), np.float32)
IMAGES = gym.spaces.Box(0, 255, (40, 36, 3), np.uint8)
DISCRETE = gym.spaces.Discrete(4)
DRIVE = gym.spaces.Box(np.float32([-1, -3]), np.float32([2, 0.5]))
DICTS = gym.spaces.Dict(image=IMAGES, number=gym.spaces.Discrete(5), vector=VECTORS)
CASES = {
    "discrete": (VECTORS, DISCRETE, []),
    "continuous": (VECTORS, DRIVE, []),
    "doubles": (gym.spaces.Box(-1, 1, (2, 2), np.float64), gym.spaces.Box(-2, 2, (1,), float), []),
    "normalised": (VECTORS, DRIVE, [VecMonitor, VecNormalize]),
    "images": (IMAGES, DISCRETE, []),
    "dicts": (DICTS, DISCRETE, []),
    "dicts of arrays": (gym.spaces.Dict(image=IMAGES, vector=VECTORS), DISCRETE, []),
    "stack": (VECTORS, DISCRETE, [lambda env: VecFrameStack(env, 4)]),
    "stack of images": (IMAGES, DISCRETE, [lambda env: VecFrameStack(env, 4)]),
    "transposed, then a stack": (
        IMAGES,
        DISCRETE,
        [VecTransposeImage, lambda env: VecFrameStack(env, 2)],
    ),
    "stack, normalised": (VECTORS, DRIVE, [lambda env: VecFrameStack(env, 3), VecNormalize]),
    "stack in the envs": (VECTORS, DISCRETE, []),
}


def made(name, num_workers=2):
    """The envs of a case, in their wrappers."""
    observations, actions, wrappers = CASES[name]

    def make():
        env = Walk(observations, actions)
        if "in the envs" in name:
            return gym.wrappers.FrameStackObservation(env, 4)
        return env

    env = ShmVecEnv([make] * NUM_ENVS, "fork", num_workers=num_workers)
    env.seed(5)
    for wrap in wrappers:
        env = wrap(env)
    return env


def algorithm(env, buffer_size=90, **options):
    """One that stores as all of them do; it is not asked to learn."""
    kind = SAC if isinstance(env.action_space, gym.spaces.Box) else DQN
    dicts = isinstance(env.observation_space, gym.spaces.Dict)
    policy = "MultiInputPolicy" if dicts else "MlpPolicy"
    return kind(
        policy,
        env,
        buffer_size=buffer_size,
        learning_starts=10_000,
        device="cpu",
        seed=2,
        **options,
    )


def both(model, theirs):
    """Stores what the model stores in both buffers."""
    ours = model.replay_buffer
    original = ours.add

    def add(*args):
        theirs.add(*args)
        original(*args)

    ours.add = add


def theirs_of(model, **options):
    ours = model.replay_buffer
    kind = TheirDicts if isinstance(ours.observation_space, gym.spaces.Dict) else Theirs
    return kind(
        ours.buffer_size * NUM_ENVS,
        ours.observation_space,
        ours.action_space,
        device="cpu",
        n_envs=NUM_ENVS,
        **options,
    )


def drawn(buffer, size, env, seed=0):
    np.random.seed(seed)
    return buffer.sample(size, env=env)


def check(mine, reference, inexact=False):
    """Equal samples: values, dtypes and memory's order."""
    assert type(mine) is type(reference)
    for a, b in zip(mine, reference, strict=True):
        for ours, theirs in zip(
            *(list(part.values()) if isinstance(part, dict) else [part] for part in (a, b)),
            strict=True,
        ):
            if theirs is None:
                assert ours is None
                continue
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert ours.is_contiguous()
            exact = not (inexact and a is mine.next_observations)
            torch.testing.assert_close(
                ours, theirs, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-3
            )


@pytest.mark.parametrize(
    "name, timeouts", [*((name, True) for name in CASES), ("continuous", False)]
)
def test_samples_are_those_of_sb3(name, timeouts):
    options = {"handle_timeout_termination": timeouts}
    with closing(made(name)) as env:
        model = algorithm(
            env, replay_buffer_class=Ours, replay_buffer_kwargs=Ours.of(env, **options)
        )
        theirs = theirs_of(model, **options)
        both(model, theirs)
        normalise = model.get_vec_normalize_env()
        for steps in (9, 60, 300):  # the last one goes round
            model.learn(steps)
            inexact = normalise is not None
            for seed in range(3):
                check(
                    drawn(model.replay_buffer, 64, normalise, seed),
                    drawn(theirs, 64, normalise, seed),
                    inexact,
                )
            rows = np.arange(model.replay_buffer.pos)
            mine = model.replay_buffer.rows(rows, normalise)
            check(mine, theirs.rows(rows, normalise), inexact)
        assert model.replay_buffer.full and theirs.size() == model.replay_buffer.size()
        assert not hasattr(model.replay_buffer, "observations")


def test_frames_are_stored_once():
    for name in ("stack of images", "stack in the envs"):
        with closing(made(name)) as env:
            model = algorithm(
                env,
                replay_buffer_class=ShmReplayBuffer,
                replay_buffer_kwargs=ShmReplayBuffer.of(env),
            )
            frame = int(np.prod(CASES[name][0].shape)) * CASES[name][0].dtype.itemsize
            replay = model.replay_buffer.replay
            assert replay.frame_stack == 4
            assert replay.stats().nbytes < (frame + 100) * replay.capacity


# ---- learning --------------------------------------------------------------------------------


def short_cartpole():
    return gym.make("CartPole-v1", max_episode_steps=7)


LEARNERS = {
    "DQN": (DQN, "MlpPolicy", short_cartpole, {"train_freq": 2}),
    "DQN, images": (DQN, "CnnPolicy", lambda: Walk(IMAGES, DISCRETE), {"train_freq": 20}),
    "SAC": (SAC, "MlpPolicy", lambda: gym.make("Pendulum-v1", max_episode_steps=9), {}),
    "TD3": (TD3, "MlpPolicy", lambda: gym.make("Pendulum-v1", max_episode_steps=9), {}),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_learning_is_the_same(name):
    learner, policy, make, options = LEARNERS[name]

    def learn(**buffer):
        env = make_vec_env(
            make, NUM_ENVS, seed=1, vec_env_cls=ShmVecEnv, vec_env_kwargs={"start_method": "fork"}
        )
        buffer = buffer and {**buffer, "replay_buffer_kwargs": ShmReplayBuffer.of(env)}
        with closing(env):
            model = learner(
                policy,
                env,
                buffer_size=120,
                batch_size=8,
                learning_starts=30,
                seed=3,
                device="cpu",
                **options,
                **buffer,
            )
            model.learn(90)
            model.learn(90)
        return {key: value.numpy() for key, value in model.policy.state_dict().items()}

    assert same(learn(replay_buffer_class=ShmReplayBuffer), learn())


def dqn(env, **options):
    kwargs = ShmReplayBuffer.of(env, **options)
    return DQN(
        "MlpPolicy",
        env,
        buffer_size=90,
        learning_starts=20,
        replay_buffer_class=ShmReplayBuffer,
        replay_buffer_kwargs=kwargs,
        device="cpu",
        seed=0,
    )


def test_a_model_and_its_buffer_are_saved_and_go_on(tmp_path):
    with closing(made("discrete")) as env:
        model = dqn(env)
        model.learn(120)
        model.save(tmp_path / "model")
        model.replay_buffer.save(tmp_path / "buffer")
        before = drawn(model.replay_buffer, 20, None)
        with pytest.raises(TypeError, match=r"replay_buffer\.save"):
            model.save_replay_buffer(io.BytesIO())
    with closing(made("discrete", num_workers=1)) as env:
        with pytest.raises(ValueError, match="needs the envs"):
            DQN.load(tmp_path / "model", env, device="cpu")
        kwargs = ShmReplayBuffer.of(env, saved=tmp_path / "buffer")
        model = DQN.load(tmp_path / "model", env, device="cpu", replay_buffer_kwargs=kwargs)
        check(drawn(model.replay_buffer, 20, None), before)
        model.learn(60)
        assert model.replay_buffer.full


def test_a_step_that_was_lost_is_not_sampled():
    fns = [lambda: Walk(VECTORS, DISCRETE)] * NUM_ENVS
    env = ShmVecEnv(fns, "fork", num_workers=NUM_ENVS, faults=RESTART)
    with closing(env), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = dqn(env)
        model.learn(30)
        env.processes[1].kill()
        model.learn(30, reset_num_timesteps=False)
        buffer = model.replay_buffer
        assert (buffer.indices[:20] < 0).sum() == 1
        assert buffer.sample(500).observations.shape == (500, 3)


# ---- what is refused -------------------------------------------------------------------------


def test_short_episodes_leave_fewer_steps():
    class Brief(Walk):
        def step(self, action):
            return self.observation(), 0.0, True, False, {}

    with closing(ShmVecEnv([lambda: Brief(VECTORS, DISCRETE)] * NUM_ENVS, "fork")) as env:
        model = DQN(
            "MlpPolicy",
            env,
            buffer_size=1500,
            replay_buffer_class=ShmReplayBuffer,
            replay_buffer_kwargs=ShmReplayBuffer.of(env),
            device="cpu",
        )
        model.learn(1600)
        buffer = model.replay_buffer
        held = buffer.replay.holds(buffer.indices.ravel())
        assert 0 < held.sum() < held.size
        assert (buffer.sample(500).dones == 1).all()


def test_what_is_refused():
    def refused(error, match, wrap=lambda env: env, name="discrete", of=None, **options):
        with closing(wrap(made(name))) as env, pytest.raises(error, match=match):
            kwargs = ShmReplayBuffer.of(env if of is None else of)
            algorithm(
                env,
                replay_buffer_class=ShmReplayBuffer,
                replay_buffer_kwargs=kwargs,
                **options,
            )

    refused(TypeError, "VecExtractDictObs", lambda env: VecExtractDictObs(env, "vector"), "dicts")
    refused(TypeError, "VecNormalize outside", lambda env: VecFrameStack(VecNormalize(env), 2))
    refused(TypeError, "FrameStackObservation", lambda env: VecFrameStack(env, 2), "doubles")
    refused(TypeError, "Box space", lambda env: VecFrameStack(env, 2), "dicts of arrays")
    refused(ValueError, "optimize_memory_usage", optimize_memory_usage=True)
    with closing(made("images")) as other:
        refused(ValueError, "not the envs", of=other)
    with closing(DummyVecEnv([lambda: Walk(VECTORS, DISCRETE)] * NUM_ENVS)) as other:
        refused(TypeError, "DummyVecEnv", of=other)
    refused(TypeError, "got Walk", of=Walk(VECTORS, DISCRETE))


def test_a_second_model_takes_over_the_envs():
    with closing(made("discrete")) as env:
        first = dqn(env)
        first.learn(40)
        model = dqn(env)  # while the first one is there, as where a notebook's cell runs again
        model.learn(40)
        assert len(model.replay_buffer.replay) >= 40 - NUM_ENVS
        with pytest.raises(RuntimeError, match="another model's buffer records them"):
            first.learn(10)


def test_steps_of_other_envs_are_refused():
    with closing(made("discrete")) as env, closing(made("discrete")) as other:
        model = dqn(env)
        with pytest.raises(RuntimeError, match="nothing to sample"):
            model.replay_buffer.sample(3)
        model.set_env(other)
        with pytest.raises(RuntimeError, match="no step of the envs"):
            model.learn(10)

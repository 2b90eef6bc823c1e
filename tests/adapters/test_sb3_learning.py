"""Stable-Baselines3 itself on ``ShmVecEnv``: what it learns there is what it learns elsewhere."""

import sys
import tempfile
import types
import warnings
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("stable_baselines3")

import torch
from envs import Counter, Scripted
from equality import same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sb3_stand_in import ShmVecEnv
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecCheckNan,
    VecExtractDictObs,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
    VecVideoRecorder,
)
from stable_baselines3.common.vec_env.base_vec_env import tile_images
from strategies import infos, leaves, names

NUM_ENVS = 3

torch.set_num_threads(1)
pytestmark = pytest.mark.deep
pytestmark = [pytestmark, pytest.mark.usefixtures("gpu_in_use")]  # SB3 seeds it


def made(env_id, cls=ShmVecEnv, seed=1, num_workers=2, **kwargs):
    """A few monitored envs."""
    options = {}
    if cls is not DummyVecEnv:
        options["start_method"] = "fork"  # the quickest
    if cls is ShmVecEnv:
        options["num_workers"] = num_workers
    return make_vec_env(
        env_id, NUM_ENVS, seed=seed, vec_env_cls=cls, vec_env_kwargs=options, **kwargs
    )


def short_cartpole():
    """Episodes are cut off soon, so that values are bootstrapped from the terminal observation."""
    return gym.make("CartPole-v1", max_episode_steps=7)


# ---- learning --------------------------------------------------------------------------------

SMALL = {"buffer_size": 150, "batch_size": 8}
LEARNERS = {
    "PPO": (PPO, short_cartpole, {"n_steps": 16, "batch_size": 16, "n_epochs": 2}, 2 * 48),
    "PPO, continuous": (PPO, "Pendulum-v1", {"n_steps": 16, "batch_size": 16, "n_epochs": 1}, 48),
    "A2C": (A2C, short_cartpole, {}, 90),
    "DQN": (DQN, short_cartpole, {"learning_starts": 30, "train_freq": 2, **SMALL}, 90),
    "SAC": (SAC, "Pendulum-v1", {"learning_starts": 12, **SMALL}, 30),
}


def learnt(name, cls):
    """What a learner has made of its envs: parameters, buffer, episodes."""
    learner, env_id, options, steps = LEARNERS[name]
    with closing(made(env_id, cls)) as env:
        model = learner("MlpPolicy", env, seed=3, device="cpu", **options)
        model.learn(steps)
    buffer = getattr(model, "rollout_buffer", None) or model.replay_buffer
    arrays = {k: v for k, v in vars(buffer).items() if isinstance(v, np.ndarray)}
    episodes = [(episode["r"], episode["l"]) for episode in model.ep_info_buffer]
    parameters = {k: v.numpy() for k, v in model.policy.state_dict().items()}
    assert episodes or env_id == "Pendulum-v1"
    return parameters, arrays, episodes


@pytest.mark.parametrize("name", LEARNERS)
def test_learning_is_the_same_as_with_dummy_vec_env(name):
    assert same(learnt(name, ShmVecEnv), learnt(name, DummyVecEnv))


def test_learning_is_the_same_as_with_subproc_vec_env():
    """Up to where that returns rewards as float64, which DummyVecEnv does not."""
    mine, reference = learnt("PPO", ShmVecEnv), learnt("PPO", SubprocVecEnv)
    for ours, theirs in zip(mine[:2], reference[:2], strict=True):
        for key in theirs:
            np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-4, atol=1e-5)
    assert mine[2] == reference[2]


def test_a_model_is_saved_and_goes_on(tmp_path):
    with closing(made("CartPole-v1")) as env:
        model = PPO("MlpPolicy", env, n_steps=8, batch_size=8, n_epochs=1, device="cpu")
        model.learn(24)
        model.save(tmp_path / "model")
        PPO.load(tmp_path / "model", env=env, device="cpu").learn(24)


def test_no_folder_is_left_in_tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with closing(made("CartPole-v1")) as env:
        PPO("MlpPolicy", env, n_steps=8, batch_size=8, n_epochs=1, device="cpu").learn(24)
    assert not list(tmp_path.glob("SB3-*"))


def test_hindsight_replay_calls_compute_reward():
    from stable_baselines3 import HerReplayBuffer

    def learn(cls):
        with closing(made(lambda: BitFlippingEnv(n_bits=3), cls)) as env:
            model = DQN(
                "MultiInputPolicy",
                env,
                replay_buffer_class=HerReplayBuffer,
                learning_starts=30,
                seed=0,
                device="cpu",
                **SMALL,
            )
            model.learn(60)
        return {k: v.numpy() for k, v in model.policy.state_dict().items()}

    assert same(learn(ShmVecEnv), learn(DummyVecEnv))


class Masked(Counter):
    def action_masks(self):
        return np.arange(4) != self.count % 4


def test_maskable_ppo_asks_for_action_masks():
    contrib = pytest.importorskip("sb3_contrib", exc_type=ImportError)
    from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported

    def learn(cls):
        with closing(made(Masked, cls)) as env:
            env.reset()
            assert is_masking_supported(env) and get_action_masks(env).shape == (NUM_ENVS, 4)
            model = contrib.MaskablePPO(
                "MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, seed=0, device="cpu"
            )
            model.learn(48)
        return {k: v.numpy() for k, v in model.policy.state_dict().items()}

    assert same(learn(ShmVecEnv), learn(DummyVecEnv))
    with closing(made("CartPole-v1")) as env:
        assert not is_masking_supported(env)


# ---- transitions -----------------------------------------------------------------------------


class Fresh(Scripted):
    """DummyVecEnv writes into the infos that envs return: these are new ones each time."""

    def _info(self):
        return {key: value for key, value in super()._info().items() if key != "final_obs"}


# What DummyVecEnv has arrays for.
arrays = leaves.filter(lambda space: not isinstance(space, gym.spaces.Text))
flat = st.one_of(
    arrays,
    st.dictionaries(names, arrays, min_size=1, max_size=3).map(gym.spaces.Dict),
    st.lists(arrays, min_size=1, max_size=3).map(gym.spaces.Tuple),
)


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=40)
@given(
    flat,
    arrays,
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4),
    st.lists(st.lists(infos(), min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 99),
    st.data(),
)
def test_transitions_are_those_of_dummy_vec_env(observations, actions, lengths, dicts, seed, data):
    num_workers = data.draw(st.sampled_from([0, 0, 0, len(lengths)]))
    fns = [
        lambda n=n, i=i: Fresh(observations, actions, n, dicts[i % len(dicts)])
        for i, n in enumerate(lengths)
    ]
    with (
        closing(DummyVecEnv(fns)) as theirs,
        closing(ShmVecEnv(fns, "fork", num_workers=num_workers)) as ours,
    ):
        assert list(ours.seed(seed)) == list(theirs.seed(seed))
        assert same(ours.reset(), plain(theirs.reset()))
        assert same(ours.reset_infos, theirs.reset_infos)
        batched = gym.vector.utils.batch_space(actions, len(fns))
        batched.seed(seed)
        for _ in range(8):
            batch = batched.sample()
            mine, reference = ours.step(batch), theirs.step(batch)
            assert same(mine, (plain(reference[0]), *reference[1:])), f"\n{mine}\n{reference}"
            assert same(ours.reset_infos, theirs.reset_infos)


def plain(observations):
    """DummyVecEnv returns OrderedDicts, SubprocVecEnv dicts."""
    return dict(observations) if isinstance(observations, dict) else observations


def test_monitor_infos_are_what_ppo_reads():
    with closing(made(short_cartpole)) as env:
        assert env.env_is_wrapped(Monitor) == [True] * NUM_ENVS
        env.reset()
        found = []
        while len(found) < 4:
            _, _, dones, infos = env.step(np.zeros(NUM_ENVS, int))
            assert [bool(done) for done in dones] == ["episode" in info for info in infos]
            found += [info["episode"] for info in infos if "episode" in info]
        for episode in found:
            assert list(episode) == ["r", "l", "t"]
            assert [type(value) for value in episode.values()] == [float, int, float]
            assert episode["r"] == episode["l"] <= 7


# ---- wrappers --------------------------------------------------------------------------------


class Image(gym.Env):
    action_space = gym.spaces.Discrete(2)

    def __init__(self, keys=False):
        self.observation_space = gym.spaces.Box(0, 255, (40, 36, 3), np.uint8)
        self.keys = keys
        if keys:
            vector = gym.spaces.Box(-1, 1, (2,))
            self.observation_space = gym.spaces.Dict(img=self.observation_space, vec=vector)

    def observation(self):
        image = self.np_random.integers(0, 256, (40, 36, 3), np.uint8)
        return {"img": image, "vec": self.np_random.random(2, "f")} if self.keys else image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observation(), {}

    def step(self, action):
        self.count += 1
        return self.observation(), self.np_random.random(), self.count % 3 == 0, False, {}


WRAPPERS = {
    "VecNormalize": (short_cartpole, VecNormalize),
    "VecMonitor": (short_cartpole, VecMonitor),
    "VecFrameStack": (short_cartpole, lambda env: VecFrameStack(env, 3)),
    "VecCheckNan": (short_cartpole, lambda env: VecCheckNan(env, raise_exception=True)),
    "VecFrameStack, images": (Image, lambda env: VecFrameStack(VecTransposeImage(env), 2)),
    "VecExtractDictObs": (lambda: Image(True), lambda env: VecExtractDictObs(env, "vec")),
    "VecNormalize, dicts": (
        lambda: Image(True),
        lambda env: VecNormalize(env, norm_obs_keys=["vec"]),
    ),
}


@pytest.mark.filterwarnings("ignore:The environment is already wrapped with a `Monitor`")
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapper(name):
    """Results through SB3's wrappers are those over DummyVecEnv."""
    make, wrap = WRAPPERS[name]
    with closing(wrap(made(make, DummyVecEnv))) as theirs, closing(wrap(made(make))) as ours:
        assert same(plain(ours.reset()), plain(theirs.reset()))
        for step in range(16):
            actions = np.full(NUM_ENVS, step % 2)
            (mine, *rest), (reference, *expected) = ours.step(actions), theirs.step(actions)
            for info in (*rest[2], *expected[2]):
                info.get("episode", {}).pop("t", None)  # the time
            assert same([plain(mine), *rest], [plain(reference), *expected])


@pytest.mark.parametrize("wrap", [None, VecNormalize, lambda env: VecFrameStack(env, 2)])
def test_vecenv_custom_calls_through_wrappers(wrap):
    env = made(Counter)
    with closing(env if wrap is None else wrap(env)) as env:
        env.seed(0)
        env.reset()
        assert len(env.env_method("_observation", action=2, indices=[0, 2])) == 2
        env.set_attr("offset", 12, indices=[0, -1])
        assert env.get_attr("offset") == [12, 0, 12]
        assert env.has_attr("offset") and not env.has_attr("nothing")
        assert env.unwrapped.num_workers == 2
        if wrap is not None:
            assert env.num_workers == 2  # found by the wrapper
            with pytest.raises(AttributeError):
                _ = env.nonexistent_attribute


def test_evaluate_policy():
    with closing(made(short_cartpole)) as env, warnings.catch_warnings():
        warnings.simplefilter("error")
        model = PPO("MlpPolicy", env, seed=0, device="cpu")
        returns, lengths = evaluate_policy(model, env, 5, return_episode_rewards=True)
        assert len(returns) == 5 and returns == lengths
    with (
        closing(ShmVecEnv([short_cartpole] * NUM_ENVS, "fork")) as env,
        pytest.warns(UserWarning, match="not wrapped with a ``Monitor``"),
    ):
        evaluate_policy(model, env, 3)


def test_make_vec_env(tmp_path):
    with closing(made("CartPole-v1", num_workers=1, monitor_dir=str(tmp_path))) as env:
        assert type(env) is ShmVecEnv and env.num_workers == 1
        env.reset()
        assert env.get_attr("np_random_seed") == [1, 2, 3]
    assert len(list(tmp_path.glob("*.monitor.csv"))) == NUM_ENVS


def test_an_env_of_no_gym_is_refused_as_by_sb3():
    with pytest.raises(ValueError, match="not a Gymnasium"):
        ShmVecEnv([dict], "fork")


# ---- rendering -------------------------------------------------------------------------------


class Painted(Counter):
    def __init__(self, render_mode="rgb_array"):
        super().__init__()
        self.render_mode = render_mode
        self.rendered = 0

    def render(self):
        self.rendered += 1
        if self.render_mode == "rgb_array":
            return np.full((4, 6, 3), self.count * 10, np.uint8)
        return None


def test_render(monkeypatch):
    with closing(ShmVecEnv([Painted] * NUM_ENVS, "fork", num_workers=2)) as env:
        env.reset()
        env.step([0] * NUM_ENVS)
        frame = env.render()
        assert frame.shape == (8, 12, 3)
        np.testing.assert_array_equal(frame, tile_images(env.get_images()))
        np.testing.assert_array_equal(frame, env.render(mode="rgb_array"))
        with pytest.warns(UserWarning, match="render mode"):
            assert env.render(mode="something_else") is None
        shown = []
        window = types.ModuleType("cv2")  # OpenCV without a display has none
        window.imshow = lambda name, image: shown.append(image)
        window.waitKey = lambda wait: None
        monkeypatch.setitem(sys.modules, "cv2", window)
        env.render("human")
        np.testing.assert_array_equal(shown[0][:, :, ::-1], frame)


def test_render_for_humans_is_left_to_the_envs():
    fns = [lambda: Painted("human")] * NUM_ENVS
    with closing(ShmVecEnv(fns, "fork")) as env:
        env.reset()
        assert env.render() is None
        assert env.get_attr("rendered") == [1] * NUM_ENVS
        with pytest.warns(UserWarning):
            assert env.render("rgb_array") is None
    with closing(made(Counter)) as env, pytest.warns(UserWarning, match="no `render_mode`"):
        assert env.render() is None


@pytest.mark.filterwarnings("ignore")  # of moviepy
def test_vec_video_recorder(tmp_path):
    pytest.importorskip("moviepy")

    class Filmed(Painted):
        metadata = {"render_modes": ["rgb_array"], "render_fps": 5}

        def render(self):
            return np.full((16, 16, 3), self.count * 10, np.uint8)

    env = ShmVecEnv([Filmed] * NUM_ENVS, "fork")
    with closing(VecVideoRecorder(env, str(tmp_path), lambda step: step == 0, 4)) as env:
        assert env.frames_per_sec == 5
        env.reset()
        for _ in range(6):
            env.step([0] * NUM_ENVS)
    assert [path.suffix for path in tmp_path.iterdir()] == [".mp4"]

"""Ours in the place of AsyncVectorEnv: install, ids with a prefix, vector entry points."""

import subprocess
import sys
import types
from contextlib import closing

import gymnasium as gym
import pytest
from gymnasium.envs.registration import EnvSpec

import shmvec
from shmvec import ShmVectorEnv

ORIGINAL = gym.vector.AsyncVectorEnv


@pytest.fixture(autouse=True)
def nothing_stays_installed():
    yield
    shmvec.uninstall()
    assert gym.vector.AsyncVectorEnv is ORIGINAL


def test_make_vec_makes_ours():
    with shmvec.install():
        envs = gym.make_vec(
            "CartPole-v1",
            3,
            "async",
            vector_kwargs={"num_workers": 2, "autoreset_mode": "SameStep"},
            wrappers=[gym.wrappers.TimeAwareObservation],
        )
        with closing(envs):
            assert type(envs) is ShmVectorEnv and envs.num_workers == 2
            assert isinstance(envs, gym.vector.AsyncVectorEnv)
            assert envs.single_observation_space.shape == (5,)
            assert envs.spec.kwargs["vectorization_mode"] == "async"
            assert envs.metadata["autoreset_mode"] is gym.vector.AutoresetMode.SAME_STEP
            envs.reset()
            envs.step(envs.action_space.sample())
        with closing(gym.make_vec(envs.spec)) as again:
            assert type(again) is ShmVectorEnv and again.num_envs == 3
    assert gym.vector.AsyncVectorEnv is ORIGINAL


def test_modules_that_imported_the_name_before(monkeypatch):
    early = types.ModuleType("early")
    early.AsyncVectorEnv = ORIGINAL
    early.other_name = ORIGINAL
    monkeypatch.setitem(sys.modules, "early", early)
    shmvec.install()
    assert early.AsyncVectorEnv is ShmVectorEnv and early.other_name is ORIGINAL
    assert gym.vector.async_vector_env.AsyncVectorEnv is ShmVectorEnv
    late = types.ModuleType("late")
    exec("from gymnasium.vector import AsyncVectorEnv", late.__dict__)
    monkeypatch.setitem(sys.modules, "late", late)
    shmvec.uninstall()
    assert early.AsyncVectorEnv is late.AsyncVectorEnv is ORIGINAL
    assert gym.vector.async_vector_env.AsyncVectorEnv is ORIGINAL


def test_installing_twice_and_nested():
    shmvec.install()
    with shmvec.install():
        pass
    assert gym.vector.AsyncVectorEnv is ShmVectorEnv  # the outer one still holds
    shmvec.uninstall()
    shmvec.uninstall()
    assert gym.vector.AsyncVectorEnv is ORIGINAL


def test_an_error_in_the_block_uninstalls():
    with pytest.raises(KeyError):
        with shmvec.install():
            raise KeyError
    assert gym.vector.AsyncVectorEnv is ORIGINAL


def test_the_original_still_works_while_installed():
    with shmvec.install():
        envs = ORIGINAL([lambda: gym.make("CartPole-v1")])
        envs.reset()
        envs.close()


def test_an_id_with_our_module_before_it():
    program = (
        "import gymnasium as gym\n"
        "envs = gym.make_vec('shmvec.auto:CartPole-v1', num_envs=2, vectorization_mode='async')\n"
        "print(type(envs).__name__, envs.reset()[0].shape); envs.close()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "ShmVectorEnv (2, 4)\n", done.stderr


@pytest.fixture
def fast_cartpole():
    kwargs = {"num_workers": 1, "render_mode": "rgb_array"}
    gym.register(
        "Fast/CartPole-v1",
        vector_entry_point="shmvec.entry:CartPole-v1",
        max_episode_steps=3,
        kwargs=kwargs,
    )
    yield "Fast/CartPole-v1"
    del gym.registry["Fast/CartPole-v1"]


def test_a_vector_entry_point(fast_cartpole):
    spec = EnvSpec.from_json(gym.spec(fast_cartpole).to_json())
    for made_of in (fast_cartpole, spec):
        envs = gym.make_vec(made_of, num_envs=2, vectorization_mode="vector_entry_point")
        with closing(envs):
            assert type(envs) is ShmVectorEnv and envs.num_workers == 1
            assert envs.render_mode == "rgb_array"
            assert envs.spec.id == fast_cartpole
            envs.reset(seed=0)
            ends = [bool(envs.step([0, 1])[3].all()) for _ in range(3)]
            assert ends == [False, False, True]  # the spec's max_episode_steps
    envs = gym.make_vec(fast_cartpole, num_envs=2, num_workers=2)  # the mode is the default now
    with closing(envs):
        assert envs.num_workers == 2


def test_entry_points_of_no_env():
    import shmvec.entry

    with pytest.raises(gym.error.NameNotFound):
        getattr(shmvec.entry, "NoSuchEnv-v0")(num_envs=2)
    with pytest.raises(AttributeError, match="no attribute '__path__'"):
        shmvec.entry.__path__  # noqa: B018

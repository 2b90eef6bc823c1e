"""Ours in the place of AsyncVectorEnv: install, ids with a prefix, vector entry points."""

import importlib.util
import os
import re
import sys
import types
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from processes import output_of

import shmvec.exchange
from shmvec import ShmVectorEnv
from shmvec._cores import usable_cores
from shmvec.exchange import AutoresetMode, Exchange

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
            assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
            envs.reset()
            envs.step(envs.action_space.sample())
        with closing(gym.make_vec(envs.spec)) as again:
            assert type(again) is ShmVectorEnv and again.num_envs == 3
    assert gym.vector.AsyncVectorEnv is ORIGINAL


@pytest.mark.deep
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


@pytest.mark.deep
def test_a_module_that_is_loaded_lazily_is_left_alone(monkeypatch, tmp_path):
    (tmp_path / "lazy.py").write_text("raise ImportError('no GPU')")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("lazy")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    with shmvec.install():
        assert gym.vector.AsyncVectorEnv is ShmVectorEnv
    with pytest.raises(ImportError, match="no GPU"):
        lazy.anything  # noqa: B018


@pytest.mark.deep
def test_installing_twice_and_nested():
    shmvec.install()
    with shmvec.install():
        pass
    assert gym.vector.AsyncVectorEnv is ShmVectorEnv  # the outer one still holds
    shmvec.uninstall()
    shmvec.uninstall()
    assert gym.vector.AsyncVectorEnv is ORIGINAL


@pytest.mark.deep
def test_an_error_in_the_block_uninstalls():
    with pytest.raises(KeyError):
        with shmvec.install():
            raise KeyError
    assert gym.vector.AsyncVectorEnv is ORIGINAL


def made(num_envs=3, **vector_kwargs):
    """What a program gets that cannot be changed."""
    return closing(gym.make_vec("CartPole-v1", num_envs, "async", vector_kwargs=vector_kwargs))


@pytest.mark.deep
def test_options_for_those_that_are_not_given_any():
    policy = shmvec.FaultPolicy(on_crash="restart")
    options = {"num_workers": 2, "wait_policy": "park", "faults": policy, "batch_size": 1}
    with shmvec.install(**options), made() as envs, made(num_workers=1, faults=None) as other:
        assert (envs.num_workers, envs.wait_policy, envs.batch_size) == (2, "park", 1)
        assert envs.faults is other.faults is policy
        assert other.num_workers == 1
    with shmvec.install(context="spawn", shared_memory=False), made(context="fork") as envs:
        assert (envs.context, envs.shared_memory) == ("fork", False)
    with shmvec.install(), made() as envs:
        assert (envs.wait_policy, envs.faults) == ("adaptive", shmvec.FaultPolicy())


@pytest.mark.deep
def test_a_default_number_of_workers_is_at_most_that_of_envs():
    with shmvec.install(num_workers=100), made(1) as one, made(3) as three:
        assert (one.num_workers, three.num_workers) == (1, 3)
        with made(3, max_concurrency=2) as envs:
            assert envs.num_workers == 2
        with pytest.raises(ValueError, match="between 0 .* got 4"):
            made(3, num_workers=4)
    with shmvec.install(num_workers=0), made() as envs:
        assert envs.processes == []


class OnlyOne(gym.Env):
    """As an emulator of which a process may have one."""

    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    made = 0

    def __init__(self):
        type(self).made += 1
        if self.made > 1:
            raise RuntimeError("Cannot create multiple emulator instances per process")


@pytest.mark.deep
def test_a_process_for_each_env_by_a_large_number():
    with shmvec.install(num_workers=1), pytest.raises(RuntimeError, match="multiple emulator"):
        gym.vector.AsyncVectorEnv([OnlyOne] * 3)
    with shmvec.install(num_workers=1000):
        with closing(gym.vector.AsyncVectorEnv([OnlyOne] * 3)) as envs:
            assert envs.num_workers == 3


@pytest.mark.deep
def test_options_add_up_and_end_with_their_block():
    with shmvec.install(num_workers=2):
        with shmvec.install(wait_policy="park"):
            shmvec.install()  # as shmvec.auto does
            with made() as envs:
                assert (envs.num_workers, envs.wait_policy) == (2, "park")
        with made() as envs:
            assert (envs.num_workers, envs.wait_policy) == (2, "adaptive")
    shmvec.install(num_workers=3)
    shmvec.uninstall()
    shmvec.install(wait_policy="park")
    with made() as envs:
        assert envs.num_workers == min(3, usable_cores())


def test_options_that_need_each_other_stay_though_another_does_not_fit():
    options = {"batch_size": (1, 2), "batch_timeout": 0.5, "step_timeout": 3.0}
    with shmvec.install(**options), made(num_workers=0) as envs:
        assert envs.batch_size == 2


@pytest.mark.deep
def test_installations_that_do_not_end_in_order():
    first = shmvec.install(num_workers=1)
    second = shmvec.install(wait_policy="park")
    first.__exit__(None, None, None)
    assert gym.vector.AsyncVectorEnv is ORIGINAL
    second.__exit__(None, None, None)
    with shmvec.install(), made() as envs:
        cores = usable_cores()
        assert (envs.num_workers, envs.wait_policy) == (min(3, cores), "adaptive")


@pytest.mark.deep
def test_the_page_that_says_so():
    page = (Path(__file__).parents[1] / "docs" / "settings.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    assert output_of("-c", code) == "8\n"


@pytest.mark.deep
def test_options_that_there_are_not():
    with pytest.raises(TypeError, match="no option 'env_fns', 'workers'"):
        shmvec.install(workers=3, env_fns=[])
    with pytest.raises(TypeError, match="num_workers must be an int or None, got 1.5"):
        shmvec.install(num_workers=1.5)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        shmvec.install(num_workers=-1)
    with pytest.raises(ValueError, match="one of 'adaptive', 'spin', 'park', got 'fast'"):
        shmvec.install(wait_policy="fast")
    with pytest.raises(ValueError, match="step_timeout needs worker processes"):
        shmvec.install(step_timeout=3, num_workers=0)
    assert gym.vector.AsyncVectorEnv is ORIGINAL


@pytest.fixture
def given(monkeypatch):
    """The settings that vector envs have been given so far."""
    kept = []

    class Noting(Exchange):
        def __init__(self, *arguments, settings, **options):
            kept.append(settings)
            super().__init__(*arguments, settings=settings, **options)

    monkeypatch.setattr("shmvec.vector_env.Exchange", Noting)
    return kept


@pytest.fixture
def environment(monkeypatch):
    def set_variables(**variables):
        for name in [name for name in os.environ if name.startswith("SHMVEC_")]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(f"SHMVEC_{name}", value)

    set_variables()
    shmvec.install()
    return set_variables


def test_options_by_environment_variables(environment, given):
    environment(
        NUM_WORKERS="100",
        THREADS_PER_WORKER="3",
        WAIT_POLICY=" park ",
        PIN_WORKERS="1",
        CONTEXT="fork",
        SHARED_MEMORY="0",
        STEP_TIMEOUT="7.5",
        RESET_TIMEOUT="60",
        FAULTS="on_crash=restart, on_error = reset,max_restarts=3,window_s=1.5,backoff_s=.5,",
        RECYCLE_AFTER="9",
        UNKNOWN="1",
    )
    with made() as envs:
        settings = given[-1]
        assert (envs.num_workers, envs.wait_policy, envs.context) == (3, "park", "fork")
        assert (settings.threads_per_worker, settings.pin_workers) == (3, True)
        assert settings.recycle_after == 9
        assert (envs.shared_memory, settings.limits) == (False, (7.5, 60.0))
        assert envs.faults == shmvec.FaultPolicy(
            "restart", "reset", max_restarts=3, window_s=1.5, backoff_s=0.5
        )


@pytest.mark.deep
def test_what_a_program_gives_is_not_made_an_error_by_defaults(environment, given):
    environment(STEP_TIMEOUT="60", FAULTS="on_timeout=restart,reset_timeout=5", NUM_WORKERS="2")
    with made(num_workers=0) as envs:
        assert given[-1].limits == (None, None)
    with made(faults=shmvec.FaultPolicy(step_timeout=2)) as envs:
        assert given[-1].limits == (2, None)
    with made(caller_steps=True, num_workers=2) as envs:
        assert given[-1].limits == (None, None)
    environment(NUM_WORKERS="0")
    with made(step_timeout=2) as envs:
        assert envs.num_workers == min(3, usable_cores())
    environment(FAULTS="on_timeout=restart,step_timeout=5", NUM_WORKERS="2")
    with made(step_timeout=2) as envs:
        assert given[-1].limits == (2, None)
        assert envs.faults == shmvec.FaultPolicy()


@pytest.mark.deep
def test_what_install_is_given_goes_before_the_environment(environment, given):
    environment(STEP_TIMEOUT="60", FAULTS="on_timeout=restart,reset_timeout=5", NUM_WORKERS="2")
    with shmvec.install(num_workers=1), made() as envs:
        assert envs.num_workers == 1
    with shmvec.install(faults=shmvec.FaultPolicy(step_timeout=3)), made() as envs:
        assert given[-1].limits == (3, None)
    with shmvec.install(reset_timeout=6), made() as envs:
        assert given[-1].limits == (60, 6)
        with shmvec.install(num_workers=0), made() as others:  # and the last call before others
            assert given[-1].limits == (None, None)
            assert others.faults == shmvec.FaultPolicy()


def test_variables_that_make_no_sense(environment):
    for variable, value, why in (
        ("NUM_WORKERS", "x", "invalid literal"),
        ("NUM_WORKERS", "-1", "must not be negative"),
        ("THREADS_PER_WORKER", "-1", "must not be negative"),
        ("WAIT_POLICY", "fast", "must be one of 'adaptive'"),
        ("CONTEXT", "forks", "cannot find context"),
        ("PIN_WORKERS", "yes", "0 or 1"),
        ("FAULTS", "on_cash=restart", "no option 'on_cash'\\. Did you mean 'on_crash'"),
        ("FAULTS", "on_crash=explode", "one of 'raise', 'restart'"),
        ("FAULTS", "max_restarts=3x", "invalid literal"),
        ("FAULTS", "max_restarts=-1", "must not be negative"),
        ("FAULTS", "on_timeout=restart,step_timeout=-.5", "must be positive"),
        ("STEP_TIMEOUT", "long", "could not convert"),
        ("STEP_TIMEOUT", "-1", "must be positive"),
        ("RESET_TIMEOUT", "nan", "must be positive"),
        ("RECYCLE_AFTER", "0", "at least 1"),
    ):
        environment(**{variable: value})
        where = f"SHMVEC_{variable}='{value}' in the environment: "
        with pytest.raises(ValueError, match=f"{where}.*{why}"):
            made()


@pytest.mark.deep
def test_how_workers_run_holds_for_all_that_stands_on_an_exchange(environment):
    environment(NUM_WORKERS="100", FAULTS="on_crash=restart", SHARED_MEMORY="0")
    exchange = shmvec.exchange.Exchange([lambda: gym.make("CartPole-v1")] * 2, num_workers=None)
    with closing(exchange):
        assert exchange.num_workers == 2
        assert exchange.policy == shmvec.FaultPolicy()


@pytest.mark.deep
def test_the_original_still_works_while_installed():
    with shmvec.install():
        envs = ORIGINAL([lambda: gym.make("CartPole-v1")])
        envs.reset()
        envs.close()


@pytest.mark.deep
def test_an_id_with_our_module_before_it():
    program = (
        "import gymnasium as gym\n"
        "envs = gym.make_vec('shmvec.auto:CartPole-v1', num_envs=2, vectorization_mode='async')\n"
        "print(type(envs).__name__, envs.reset()[0].shape); envs.close()"
    )
    assert output_of("-W", "error", "-c", program) == "ShmVectorEnv (2, 4)\n"


@pytest.mark.deep
def test_a_package_for_programs_that_import_packages():
    """LeRobot's --env.discover_packages_path imports one, and the modules in its folders."""
    program = (
        "import importlib, pkgutil, gymnasium as gym\n"
        "package = importlib.import_module('shmvec.auto')\n"
        "print(list(pkgutil.iter_modules(package.__path__)), gym.vector.AsyncVectorEnv.__name__)"
    )
    assert output_of("-c", program) == "[] ShmVectorEnv\n"


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


@pytest.mark.deep
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


@pytest.mark.deep
def test_entry_points_of_no_env():
    import shmvec.entry

    with pytest.raises(gym.error.NameNotFound):
        getattr(shmvec.entry, "NoSuchEnv-v0")(num_envs=2)
    with pytest.raises(AttributeError, match="no attribute '__path__'"):
        shmvec.entry.__path__  # noqa: B018

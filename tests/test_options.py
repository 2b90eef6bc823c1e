"""The table of options: what follows from an entry, and where it must be mentioned by hand."""

import inspect
import re
import typing
from contextlib import closing
from functools import partial
from pathlib import Path

import gymnasium as gym
import pytest
from envs import Counter
from gymnasium.vector.async_vector_env import _async_worker
from tables import deep

from shmvec import FaultPolicy, ShmVectorEnv, exchange
from shmvec._options import OPTIONS, environment_variable
from shmvec.cluster import ClusterVectorEnv
from shmvec.planning import PlanningVectorEnv

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"


def test_the_first_arguments_are_gymnasiums_in_its_order():
    def positional(of):
        return [each.name for each in inspect.signature(of).parameters.values() if each.kind == 1]

    theirs = positional(gym.vector.AsyncVectorEnv)
    assert positional(ShmVectorEnv)[: len(theirs)] == theirs


def test_signature_types_and_docstring_have_every_option():
    parameters = inspect.signature(ShmVectorEnv).parameters
    assert list(parameters) == ["env_fns", *OPTIONS]
    assert {name: parameters[name].default for name in OPTIONS} == {
        name: option.default for name, option in OPTIONS.items()
    }
    assert parameters.keys() <= typing.get_type_hints(ShmVectorEnv.__init__).keys()
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(ShmVectorEnv.__init__), re.M)
    assert [name for name in documented if name in parameters] == list(parameters)


def test_the_page_names_every_variable():
    named = set(re.findall(r"`(SHMVEC_\w+)`", PAGE.read_text()))
    assert named == {environment_variable(name) for name, option in OPTIONS.items() if option.parse}


@pytest.mark.parametrize("name", ["workers", *deep("env_fns", "batch_size", "worker")])
def test_an_exchange_refuses_what_is_no_option_of_its(name):
    with pytest.raises(TypeError, match=name):
        exchange.Exchange([lambda: gym.make("CartPole-v1")], **{name: None, "num_workers": 0})


@pytest.mark.parametrize("kind", [PlanningVectorEnv, ClusterVectorEnv])
def test_classes_on_an_exchange_name_the_options_that_they_take_and_refuse_others(kind):
    taken = set(re.findall(r"``(\w+)``", inspect.getdoc(kind.__init__)))
    own = inspect.signature(kind).parameters.keys()
    assert {"context", "step_timeout", "worker_init"} <= taken
    for name in OPTIONS.keys() - taken - own | {"workers"}:
        with pytest.raises(
            TypeError, match=rf"{kind.__name__}\(\) takes no {name}: .*step_timeout"
        ):
            kind([lambda: gym.make("CartPole-v1")], **{name: None})
    with pytest.raises(TypeError, match="Did you mean 'worker_init'"):
        kind([lambda: gym.make("CartPole-v1")], worker_int=None)


ANY = object()  # of options for which each value is one
BATCHES = {"batch_size": 1}
PROCESS = {"num_workers": 1}
# Of each option a value that it takes, one that it refuses, and what else is given with both.
VALUES = {
    "shared_memory": (False, ANY, {}),
    "copy": (False, ANY, {}),
    "context": ("fork", "thread", {}),
    "daemon": (False, ANY, {}),
    "worker": (_async_worker, 3, {}),
    "observation_mode": ("different", "neither", {}),
    "autoreset_mode": ("SameStep", "Sometimes", {}),
    "max_concurrency": (1, 0, {}),
    "num_workers": (2, 3, {}),
    "caller_steps": (True, ANY, {}),
    "overlap": (2, 0, PROCESS),
    "spare_envs": (1, -1, PROCESS),
    "wait_policy": ("park", "sleep", {}),
    "threads_per_worker": (1, -1, {}),
    "pin_workers": (True, ANY, {}),
    "faults": (FaultPolicy(on_crash="restart"), "restart", PROCESS),
    "step_timeout": (9.0, -1.0, PROCESS),
    "reset_timeout": (9.0, 0, PROCESS),
    "recycle_after": (9, 0, {}),
    "hang_warning_s": (9.0, -1.0, {}),
    "log_errors": (False, ANY, {}),
    "preload": (["json"], [3], {}),
    "compile_wrappers": (False, ANY, {}),
    "worker_environ": ({"A_NAME": "1"}, {"A_NAME": 1}, PROCESS),
    "worker_init": (id, 3, PROCESS),
    "batch_size": (1, 3, {}),
    "batch_timeout": (1.0, -1.0, {"batch_size": (1, 2)}),
    "num_buffers": (2, 0, BATCHES),
    "hold_batches": (1, 0, BATCHES),
    "record_order": ([], ANY, BATCHES),
    "replay_order": ([[0], [1]], ANY, BATCHES),
}


def test_each_option_takes_a_good_value_and_refuses_a_bad_one():
    assert VALUES.keys() == OPTIONS.keys()
    for name, (good, bad, others) in VALUES.items():
        make = partial(ShmVectorEnv, [Counter] * 2, **{"num_workers": 0, **others})
        make(**{name: good}).close()
        if bad is not ANY:
            with pytest.raises((TypeError, ValueError), match=f"{name}|callable"):
                make(**{name: bad})


def test_an_option_that_there_is_not():
    with pytest.raises(TypeError, match="has no option 'num_worker'. Did you mean 'num_workers'"):
        ShmVectorEnv([lambda: gym.make("CartPole-v1")], num_worker=1)
    with pytest.raises(TypeError, match="missing a required argument: 'env_fns'"):
        ShmVectorEnv(num_workers=1)


def test_all_defaults_go_that_each_have_a_given_limit_refused(monkeypatch):
    monkeypatch.setenv("SHMVEC_NUM_WORKERS", "0")
    monkeypatch.setenv("SHMVEC_FAULTS", "on_crash=restart,step_timeout=2")
    with closing(ShmVectorEnv([Counter] * 2, step_timeout=3.0)) as envs:
        assert envs.num_workers and envs.faults == FaultPolicy()

"""The table of options: what follows from an entry, and where it must be mentioned by hand."""

import importlib.util
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import gymnasium as gym
import pytest

from shmvec import ShmVectorEnv, exchange
from shmvec._options import OPTIONS, variable
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
    assert named == {variable(name) for name, option in OPTIONS.items() if option.parse}


@pytest.mark.parametrize("name", ["workers", "env_fns", "batch_size", "worker"])
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


def test_an_option_that_there_is_not():
    with pytest.raises(TypeError, match="has no option 'num_worker'. Did you mean 'num_workers'"):
        ShmVectorEnv([lambda: gym.make("CartPole-v1")], num_worker=1)
    with pytest.raises(TypeError, match="missing a required argument: 'env_fns'"):
        ShmVectorEnv(num_workers=1)


def test_type_checkers_see_the_options(tmp_path):
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed (the dev extra has it)")
    program = tmp_path / "program.py"
    program.write_text(
        "import shmvec\n"
        "shmvec.ShmVectorEnv([], True, context='fork', num_workers=2)\n"
        "shmvec.ShmVectorEnv([], num_workers='2')\n"
        "shmvec.ShmVectorEnv([], workers=2)\n"
        "print(shmvec.evaluate('CartPole-v1', print).returns)\n"
        "print(shmvec.evaluate(shmvec.Task('CartPole-v1'), print).returns)\n"
        "print(shmvec.evaluate({'a': 'CartPole-v1'}, print)['a'].returns)\n"
        "print(shmvec.evaluate(['CartPole-v1'], print).compared_with)\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=PAGE.parents[1])
    errors = re.findall(r"program.py:(\d+): error: .*\[(.*)\]", done.stdout)
    assert errors == [("3", "arg-type"), ("4", "call-arg")], done.stdout + done.stderr

"""What env_fns will import is seen without running them, and imported once, before forks."""

import functools
import gc
import importlib
import os
import sys
import textwrap
import types
import warnings
from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter
from gymnasium.envs.registration import EnvSpec, WrapperSpec

import shmvec
from shmvec import ShmVectorEnv
from shmvec._processes.preloading import needed_modules, ready_to_fork
from shmvec.adapters.pettingzoo import Team
from shmvec.exchange import HostedEnv
from shmvec.planning import PlanningVectorEnv


def needs(env_fn):
    return set(needed_modules([env_fn]))


# ---- what is seen -------------------------------------------------------------------------------


def imports_at_once():
    import wave  # noqa: F401
    from xml import dom, sax  # noqa: F401


def imports_inside():
    def inner():
        import wave

        return [(lambda: __import__ and importlib)() for _ in wave.__all__]

    return inner


class Made:
    attribute = "CartPole-v1"

    def __init__(self):
        self._load()

    @staticmethod
    def _load():
        import wave  # noqa: F401

    def render(self):
        import chunked_pictures  # noqa: F401

    def bound(self):
        return imports_at_once()


class Callable:
    __slots__ = ("held", "__dict__")

    def __init__(self, held):
        self.held = held
        self.more = {"id": "Acrobot-v1"}

    def __call__(self):
        import wave  # noqa: F401


def test_imports_in_code():
    assert {"wave", "xml", "xml.dom", "xml.sax", "test_needs"} <= needs(imports_at_once)
    assert {"wave", "importlib"} <= needs(imports_inside)
    assert "wave" in needs(lambda: [imports_at_once() for _ in range(2)])  # a global name


def test_imports_that_are_relative():
    namespace = {"__name__": "some.package.module", "__package__": "some.package"}
    exec("def make():\n    from . import near\n    from ..far import thing", namespace)
    found = needs(namespace["make"])
    assert {"some.package", "some.package.near", "some.far", "some.far.thing"} <= found
    exec("def make():\n    from ..... import beyond", namespace)
    assert needs(namespace["make"]) == {"some.package.module"}


@pytest.mark.parametrize(
    "env_fn",
    [
        Made,
        partial(Made),
        partial(partial, Made),
        Made.bound,
        Made.__new__(Made).bound,
        partial(map, Made),
        Callable(None),
        partial(int, [{"key": (Callable(None),)}]),
        lambda made=Made: made(),
        functools.lru_cache(lambda: Made()),
        staticmethod(imports_at_once),
    ],
)
def test_whatever_it_consists_of(env_fn):
    found = needs(env_fn)
    assert "wave" in found
    assert "chunked_pictures" not in found  # only drawn with
    assert not found & {"__main__", "builtins"}


def in_a_closure(value):
    return lambda: value


CARTPOLE = "gymnasium.envs.classic_control.cartpole"


@pytest.mark.parametrize(
    "env_fn",
    [
        lambda: gym.make("CartPole-v1"),
        lambda: gym.make("CartPole"),
        lambda: gym.make("gymnasium:CartPole-v1"),
        lambda: shmvec.make_vec(id="CartPole-v1"),
        partial(gym.make, "CartPole-v1"),
        partial(gym.make, id="CartPole-v1"),
        partial(gym.make, gym.spec("CartPole-v1")),
        in_a_closure("CartPole-v1"),
        in_a_closure({"env": ["CartPole-v1"]}),
        in_a_closure(gym.spec("CartPole-v1")),
        in_a_closure(EnvSpec("New-v0", f"{CARTPOLE}:CartPoleEnv")),
        in_a_closure(EnvSpec("New-v0", vector_entry_point=f"{CARTPOLE}:CartPoleVectorEnv")),
        in_a_closure(
            EnvSpec("New-v0", Made, additional_wrappers=(WrapperSpec("W", f"{CARTPOLE}:W", {}),))
        ),
        in_a_closure(EnvSpec("New-v0", in_a_closure("CartPole-v1"))),
        in_a_closure(EnvSpec("New-v0", Made, kwargs={"inner": "CartPole-v1"})),
        Callable("CartPole-v1"),
    ],
)
def test_ids_of_the_registry(env_fn):
    assert CARTPOLE in needs(env_fn)


def test_a_module_that_registers_when_it_is_imported():
    assert "some.games" in needs(lambda: gym.make("some.games:ns/Pong-v0"))
    for text in ("http://some.games", "os:name", "a: b-v0", "12:x-v0", "x" * 10_000 + ":y-v0"):
        assert needs(in_a_closure(text)) == {"test_needs"}


def test_adapters_are_seen_through():
    make = in_a_closure("CartPole-v1")
    for env_fn in (
        partial(HostedEnv, make),
        partial(HostedEnv.made_by, make, mode=1),
        partial(Team, 0, make),
    ):
        assert CARTPOLE in needs(env_fn)


def given_env_fns(monkeypatch, make):
    """What an exchange is given by whatever stands on it."""
    given = []

    class Stop(Exception):
        pass

    def stop(env_fns, *args, **kwargs):
        given.extend(env_fns)
        raise Stop

    monkeypatch.setattr("shmvec._processes.staff.Launcher", stop)
    with pytest.raises(Stop):
        make()
    return given


@pytest.mark.parametrize(
    "make",
    [
        lambda: shmvec.make_vec("CartPole-v1", 2),
        lambda: gym.make_vec("CartPole-v1", 2, "async"),
        lambda: ShmVectorEnv([in_a_closure("CartPole-v1")], worker=lambda *args: None),
        lambda: PlanningVectorEnv(in_a_closure("CartPole-v1"), 2),
    ],
)
def test_all_ways_in_are_seen_through(monkeypatch, make):
    with shmvec.install():
        assert CARTPOLE in needed_modules(given_env_fns(monkeypatch, make))


def test_torch_is_needed_by_those_who_name_it_only():
    def names_it():
        import torch

        return torch

    assert "torch" in needs(names_it)
    assert "torch" not in needs(lambda: gym.make("CartPole-v1"))
    assert "torch" not in needs(lambda: gym.wrappers.TimeLimit(gym.make("CartPole-v1"), 3))


def sets_a_variable():
    os.environ["SDL_VIDEODRIVER"] = "dummy"
    return gym.make("CartPole-v1")


def test_nothing_is_needed_before_variables_are_set():
    """Modules are meant to see them, and this process has others."""
    assert needed_modules([lambda: gym.make("CartPole-v1"), sets_a_variable]) == []
    assert needs(lambda: os.environ.setdefault("A", "B")) == set()
    assert needs(lambda: os.putenv("A", "B")) == set()
    assert needs(lambda: os.environ.get("A")) != set()


# ---- what it costs, and does not do -------------------------------------------------------------


class Hostile:
    """Whatever is asked of it fails."""

    def __init__(self):
        object.__setattr__(self, "held", "CartPole-v1")

    def fail(self, *args):
        raise AssertionError("something of the user's was called")

    __getattribute__ = __getattr__ = __eq__ = __hash__ = __iter__ = __len__ = __bool__ = fail
    __repr__ = __reduce_ex__ = __getstate__ = __call__ = __instancecheck__ = __contains__ = fail
    __class__ = property(fail)


class HostileType(type):
    def fail(cls, *args):
        raise AssertionError("something of the user's was called")

    __getattribute__ = __eq__ = __hash__ = __instancecheck__ = __subclasscheck__ = fail


def test_nothing_of_the_users_is_called():
    class Kept(metaclass=HostileType):
        pass

    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = lambda name: pytest.fail("a lazy attribute was asked for")
    namespace = {"lazy": lazy, "__name__": "lazily", "Kept": Kept}
    exec("def make():\n    return lazy.gym.make, Kept.attribute", namespace)
    assert {"lazy", "lazily"} <= needs(namespace["make"])
    assert CARTPOLE in needs(in_a_closure(Hostile()))
    assert CARTPOLE in needs(partial(int, Hostile(), [Hostile()], {"key": Hostile()}))
    with ready_to_fork([in_a_closure(Hostile())]):
        pass


class Huge(list):
    def __iter__(self):
        raise AssertionError("it was looked through")


def test_data_costs_nothing():
    many = [*range(1000), "Acrobot-v1", *range(10**6)]
    cycle = [many, Huge([1])]
    cycle.append(cycle)
    deep = nested = []
    for _ in range(10_000):
        nested.append([])
        nested = nested[0]
    env_fn = partial(in_a_closure("CartPole-v1"), cycle, deep, np.empty(1 << 33, np.uint8))
    found = needs(env_fn)
    assert CARTPOLE in found
    assert "gymnasium.envs.classic_control.acrobot" not in found  # not looked through
    # However many there are: the first ones are looked at in whole.
    env_fns = [partial(in_a_closure("CartPole-v1"), str(i)) for i in range(10_000)]
    assert CARTPOLE in needed_modules(env_fns)


# ---- imports before forks -----------------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that can be imported, and is not."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name, body):
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(body))
        importlib.invalidate_caches()
        written.append(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)


ENV = """
    import os
    from envs import Counter

    PID = os.getpid()

    class Env(Counter):
        def imported_by(self):
            return PID
"""


def test_workers_share_what_is_imported(module):
    module("needed_by_code", ENV)

    def make():
        import needed_by_code

        return needed_by_code.Env()

    with closing(ShmVectorEnv([make] * 2, context="fork", num_workers=2)) as envs:
        assert envs.call("imported_by") == (os.getpid(),) * 2
    assert "needed_by_code" in sys.modules


def test_workers_share_what_an_id_stands_for(module):
    """Of ids, too, that exist only after an import."""
    module("registers_it", "import gymnasium as gym\ngym.register('Late-v0', 'holds_it:Env')")
    module("holds_it", ENV)
    try:
        make = partial(gym.make, "registers_it:Late-v0", disable_env_checker=True)
        with closing(ShmVectorEnv([make], context="fork", num_workers=1)) as envs:
            assert envs.call("imported_by") == (os.getpid(),)
    finally:
        gym.registry.pop("Late-v0", None)


def test_what_cannot_be_imported_is_left_to_the_worker(module, capfd):
    module("fails_halfway", "import warnings\nwarnings.warn('once')\nraise KeyError('halfway')")

    def make():
        import fails_halfway  # noqa: F401

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # faulthandler's, which waits to end a test that hangs; from Python 3.12 on.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        with pytest.raises(KeyError, match="halfway"):
            ShmVectorEnv([make], context="fork", num_workers=1)
    assert caught == []  # it is the worker's
    assert "fails_halfway" not in sys.modules


def test_an_env_may_do_without_a_module(module):
    module("leaves", "import sys\nsys.exit(3)")

    def make():
        try:
            import leaves  # noqa: F401
        except SystemExit:
            pass
        try:
            import nowhere_to_be_found  # noqa: F401
        except ImportError:
            return Counter()

    with closing(ShmVectorEnv([make], context="fork", num_workers=1)) as envs:
        assert envs.reset()[0].shape == (1, 4)


def test_warnings_are_shown_once(module, capfd):
    module("warns", "import warnings\nwarnings.warn('said at import')\n" + textwrap.dedent(ENV))

    def make():
        import warns

        return warns.Env()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # faulthandler's, which waits to end a test that hangs; from Python 3.12 on.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        with closing(ShmVectorEnv([make], context="fork", num_workers=1)):
            pass
    assert [str(each.message) for each in caught] == ["said at import"]
    assert "said at import" not in capfd.readouterr().err


def test_generators_of_the_program_are_left_alone(module):
    module("seeds", "import random\nimport numpy as np\nnp.random.seed(1)\nrandom.seed(1)\n")
    np.random.seed(7)
    expected = np.random.random()
    np.random.seed(7)

    def make():
        import seeds  # noqa: F401

        return Counter()

    with closing(ShmVectorEnv([make], context="fork", num_workers=1)):
        assert "seeds" in sys.modules
        assert np.random.random() == expected


class Collects(Counter):
    def collect(self):
        before = gc.get_freeze_count()
        gc.collect()
        return before


def test_workers_leave_shared_objects_shared():
    """A collection would write to all of them, and so copy them."""
    objects, frozen = len(gc.get_objects()), gc.get_freeze_count()
    with closing(ShmVectorEnv([Collects], context="fork", num_workers=1)) as envs:
        assert envs.call("collect")[0] >= 0.9 * (objects + frozen)
    assert gc.get_freeze_count() <= frozen  # of this process nothing is frozen


def test_nothing_is_imported_if_workers_must_come_first(module):
    module("not_yet", ENV)

    def make():
        import not_yet

        return not_yet.Env()

    def begin(worker):
        os.environ["NOT_YET"] = "set"

    for options in ({"worker_environ": {"NOT_YET": "set"}}, {"worker_init": begin}):
        with closing(ShmVectorEnv([make], context="fork", num_workers=1, **options)) as envs:
            assert "not_yet" not in sys.modules
            assert envs.call("imported_by") != (os.getpid(),)
    with closing(ShmVectorEnv([make], context="fork", num_workers=1)):
        assert "not_yet" in sys.modules

"""What the first worker imports is imported once for those that are forked after it."""

import gc
import importlib
import os
import sys
import textwrap
import threading
import warnings
from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter
from tables import deep

from shmvec import ShmVectorEnv
from shmvec._cores import usable_cores
from shmvec._processes.preloading import ImportRecorder

ALL_CORES = os.sched_getaffinity(0)


@pytest.fixture(autouse=True)
def one_core():
    """With a core for each worker, none would wait for the first one's report."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


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


@pytest.fixture(params=["fork", *deep("forkserver")])
def start(request, module):
    """Starts two workers; the fork server knows nothing of the modules of the tests before."""
    return partial(ShmVectorEnv, num_workers=2, context=request.param)


def importers(envs):
    """Which of the workers have found imported what imported_by() is about."""
    found = envs.call("imported_by")
    return [pid == process.pid for pid, process in zip(found, envs.processes, strict=True)]


def test_workers_share_what_the_first_has_imported(start, module):
    module("needed_by_code", ENV)

    def make():
        import needed_by_code

        return needed_by_code.Env()

    with closing(start([make] * 2)) as envs:
        assert importers(envs) == [True, False]
        envs.restart([0])
        envs.reset()
        assert importers(envs) == [False, False]
    assert ("needed_by_code" in sys.modules) == (start.keywords["context"] == "fork")
    with closing(start([make] * 2)) as envs:
        assert importers(envs) == [False, False]


@pytest.mark.deep
@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_workers_that_have_a_core_each_do_not_wait(start, module):
    module("needed_at_once", ENV)

    def make():
        import needed_at_once

        return needed_at_once.Env()

    os.sched_setaffinity(0, ALL_CORES)
    with closing(start([make] * 2)) as envs:
        assert importers(envs) == [True, True]
        assert "needed_at_once" not in sys.modules
        envs.restart()
        envs.reset()
        assert importers(envs) == [False, False]


@pytest.mark.deep
def test_workers_share_what_an_id_stands_for(start, module):
    """Of ids, too, that exist only after an import."""
    module("registers_it", "import gymnasium as gym\ngym.register('Late-v0', 'holds_it:Env')")
    module("holds_it", ENV)
    try:
        make = partial(gym.make, "registers_it:Late-v0", disable_env_checker=True)
        with closing(start([make] * 2)) as envs:
            assert importers(envs) == [True, False]
    finally:
        gym.registry.pop("Late-v0", None)


@pytest.mark.deep
def test_envs_of_the_first_worker_may_wait_for_those_of_others(start, module, tmp_path):
    """Workers are started though it has not said anything."""
    module("needed_by_all", ENV)
    there = tmp_path / "there"

    def first():
        import time

        import needed_by_all

        while not there.exists():
            time.sleep(0.01)
        return needed_by_all.Env()

    def second():
        import needed_by_all

        there.touch()
        return needed_by_all.Env()

    with closing(start([first, second])) as envs:
        assert importers(envs) == [True, True]
        envs.restart([1])
        envs.reset()
        assert importers(envs) == [True, False]


@pytest.mark.deep
def test_what_cannot_be_imported_is_left_to_the_workers(start, module):
    module("fails_elsewhere", "import os\nif 'MINE' not in os.environ:\n    raise KeyError")
    module("leaves", "import sys\nsys.exit(3)")

    def make():
        try:
            import leaves  # noqa: F401
        except SystemExit:
            pass
        try:
            import fails_elsewhere  # noqa: F401
        except KeyError:
            return Counter()

    with closing(start([make] * 2)) as envs:
        assert envs.reset()[0].shape == (2, 4)
    assert not {"fails_elsewhere", "leaves"} & set(sys.modules)


@pytest.mark.deep
def test_warnings_are_shown_by_the_first_worker_alone(start, module, capfd):
    text = "import warnings\nwarnings.warn('said at import')\nprint('printed at import')\n"
    module("warns", text + textwrap.dedent(ENV))

    def make():
        import warns

        return warns.Env()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # faulthandler's, which waits to end a test that hangs; from Python 3.12 on.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        with closing(start([make] * 2)) as envs:
            assert importers(envs) == [True, False]
    assert caught == []
    if start.keywords["context"] == "forkserver":  # a fork has pytest's own ideas of warnings
        said = capfd.readouterr()
        assert said.err.count("UserWarning: said at import") == 1
        assert said.out.count("printed at import") == 1


@pytest.mark.deep
def test_generators_of_the_program_are_left_alone(module):
    module("seeds", "import random\nimport numpy as np\nnp.random.seed(1)\nrandom.seed(1)\n")
    np.random.seed(7)
    expected = np.random.random()
    np.random.seed(7)

    def make():
        import seeds  # noqa: F401

        return Counter()

    with closing(ShmVectorEnv([make] * 2, context="fork", num_workers=2)):
        assert "seeds" in sys.modules
        assert np.random.random() == expected


class Collects(Counter):
    def collect(self):
        before = gc.get_freeze_count()
        gc.collect()
        return before


@pytest.mark.deep
def test_workers_leave_shared_objects_shared():
    """A collection would write to all of them, and so copy them."""
    objects, frozen = len(gc.get_objects()), gc.get_freeze_count()
    with closing(ShmVectorEnv([Collects], context="fork", num_workers=1)) as envs:
        assert envs.call("collect")[0] >= 0.9 * (objects + frozen)
    assert gc.get_freeze_count() <= frozen  # of this process nothing is frozen


# ---- what is not imported ahead ------------------------------------------------------------------


@pytest.mark.deep
def test_modules_that_are_to_see_variables(start, module, monkeypatch):
    monkeypatch.setenv("OTHER", "x")  # what is undone
    module("not_yet", ENV)

    def make():
        import not_yet

        return not_yet.Env()

    def begin(worker):
        os.environ["NOT_YET"] = "set"

    def sets():
        begin(0)
        return make()

    for env_fn, options in (
        (make, {"worker_environ": {"NOT_YET": "set"}}),
        (make, {"worker_init": begin}),
        (sets, {}),
    ):
        with closing(start([env_fn] * 2, **options)) as envs:
            assert importers(envs) == [True, True]
    assert "not_yet" not in sys.modules
    with closing(start([make] * 2)) as envs:
        assert importers(envs) == [True, False]


@pytest.mark.deep
def test_modules_that_start_threads(start, module):
    waits = "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    module("starts_threads", "import threading\n" + waits + textwrap.dedent(ENV))

    def make():
        import starts_threads

        return starts_threads.Env()

    with closing(start([make] * 2)) as envs:
        assert importers(envs) == [True, True]
    assert "starts_threads" not in sys.modules


def noted(work):
    with ImportRecorder() as imports:
        work()
        return imports.modules()


@pytest.mark.deep
def test_what_is_noted(module, monkeypatch):
    monkeypatch.setenv("OURS", "")
    monkeypatch.setenv("THEIRS", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = os.putenv, os.unsetenv
    module("plain", "import sys\nsys.modules['plain_alias'] = sys.modules['plain']")
    module("sets", "import os\nos.environ['THEIRS'] = 'set'\nimport plain")
    module("jax", "")

    def import_again(*names):
        for name in ("plain", "plain_alias", "sets", "jax"):
            sys.modules.pop(name, None)
        for name in names:
            importlib.import_module(name)

    assert noted(lambda: import_again("sets")) == ["sets", "plain"]  # in order
    assert noted(lambda: import_again("plain", "jax")) == []
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    for change in (
        lambda: os.environ.update(OURS="set"),
        lambda: os.environ.pop("OURS"),
        lambda: os.putenv("OURS", "set"),
        lambda: sys.path.append("/nowhere"),
        thread.start,
    ):
        assert noted(lambda change=change: [change(), import_again("plain")]) == []
        assert noted(lambda: import_again("plain")) == ["plain"]
    ended.set()
    thread.join()
    assert (os.putenv, os.unsetenv) == before
    sys.modules.pop("plain_alias")

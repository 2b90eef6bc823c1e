"""A vector env starts wherever Python code runs, and no script is run a second time."""

import atexit
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import pytest
from envs import Counter
from processes import output_of
from tables import deep, paired

from shmvec import ShmVectorEnv
from shmvec._processes import fork_server

DEADLINE_S = 60
CONTEXTS = ["fork", "spawn", "forkserver", None]

# A script as people write them: nothing is guarded, all is defined where it is used.
SCRIPT = """
    import os, pickle, sys
    import gymnasium as gym
    import numpy as np
    from gymnasium.spaces import Box, Discrete
    from shmvec import ShmVectorEnv

    print("the script runs", flush=True)

    class Answer(dict):
        pass

    class Mine(gym.Env):
        observation_space, action_space = Box(0, 99, (3,)), Discrete(2)

        def __init__(self, start=1.0):
            self.count = self.start = start

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.count = self.start
            return np.full(3, self.count, np.float32), {}

        def step(self, action):
            self.count += action
            return np.full(3, self.count, np.float32), 1.0, False, False, {"answer": Answer(a=1)}

        def sent(self):
            return Answer(b=2)

        def pickled(self):
            return pickle.dumps([Answer(b=3), Mine, helper])

        def spec_of(self, name):
            return gym.spec(name).entry_point

    def helper():
        pass

    gym.register("Mine-v0", Mine)
    gym.register("space/Named-v3", "__main__:Mine", kwargs=dict(start=7.0), max_episode_steps=9)
    gym.register("Fast-v0", Mine, vector_entry_point=Mine)

    made = [lambda: gym.make("Mine-v0"), lambda: gym.make("space/Named-v3"), Mine]
    envs = ShmVectorEnv(made * 2, num_workers=3, context=CONTEXT)
    observations, _ = envs.reset(seed=1)
    assert observations[:, 0].tolist() == [1, 7, 1] * 2, observations
    observations, _, _, _, infos = envs.step(np.ones(6, int))
    assert observations[:, 0].tolist() == [2, 8, 2] * 2, observations
    assert all(type(each) is Answer for each in envs.call("sent"))
    assert envs.call("spec_of", "space/Named-v3") == ("__main__:Mine",) * 6
    for pickled in envs.call("pickled"):
        assert pickle.loads(pickled) == [Answer(b=3), Mine, helper], pickled
    envs.close()
    print("all is well", flush=True)
"""
SAID = "the script runs\nall is well\n"
# multiprocessing's resource tracker, which ends so in an inspected Python 3.14.
TRACKER = re.compile(r"Traceback .*\n.*\n.*resource_tracker import main(.*\n)+?SystemExit: 0\n")


def script(context):
    return textwrap.dedent(SCRIPT).replace("CONTEXT", repr(context))


def said(*command, stdin=None, input=None, cwd=None, **variables):
    done = subprocess.run(
        [sys.executable, *command],
        stdin=stdin,
        input=input,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONWARNINGS": "error::ResourceWarning", **variables},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in TRACKER.sub("", done.stderr), done.stderr
    return done.stdout


# ---- where the script runs: each returns what it has printed -------------------------------------


def without_a_main_guard(text, folder):
    (folder / "script.py").write_text(text)
    return said(folder / "script.py")


def as_a_command(text, folder):
    return said("-c", text)


def on_standard_input(text, folder):
    return said("-", input=text)


def as_a_module(text, folder):
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("start = 1.0")
    text = text.replace("import os,", "from . import other\nimport os,")
    text = text.replace("def sent", "def other(self):\n        return other.start\n\n    def sent")
    (package / "run.py").write_text(text)
    return said("-m", "package.run", cwd=folder)


def as_a_zipped_app(text, folder):
    with zipfile.ZipFile(folder / "app.zip", "w") as app:
        app.writestr("beside.py", "start = 5.0\n")
        text = text.replace("import os,", "import beside, os,")
        app.writestr("__main__.py", text.replace("start=1.0", "start=beside.start - 4"))
    return said(folder / "app.zip", cwd="/")


def in_a_thread(text, folder):
    text = textwrap.indent(text, "    ").replace(
        "class Answer", "global Mine, Answer, helper\n    class Answer"
    )
    run = "import threading\nthread = threading.Thread(target=everything)\n"
    return said("-c", f"def everything():\n{text}\n{run}thread.start()\nthread.join()\n")


def in_a_spawned_process(text, folder):
    """There the script is __mp_main__, which no worker knows."""
    define, _, use = text.replace('print("the script runs", flush=True)', "").partition("made = ")
    text = (
        define
        + "def everything():\n"
        + "    print('the script runs', flush=True)\n"
        + textwrap.indent("made = " + use, "    ")
        + "\nif __name__ == '__main__':\n"
        + "    import multiprocessing\n"
        + "    process = multiprocessing.get_context('spawn').Process(target=everything)\n"
        + "    process.start(); process.join(); sys.exit(process.exitcode)\n"
    )
    return without_a_main_guard(text.replace("__main__:Mine", "__mp_main__:Mine"), folder)


def inspected_when_it_ends(text, folder):
    """Workers are not: they would wait for what somebody types."""
    typed, keyboard = os.pipe()
    try:
        return said("-c", text + "os._exit(0)", stdin=typed, PYTHONINSPECT="1")
    finally:
        os.close(typed)
        os.close(keyboard)


PLACES = [
    without_a_main_guard,
    as_a_command,
    on_standard_input,
    as_a_module,
    as_a_zipped_app,
    in_a_thread,
    in_a_spawned_process,
    inspected_when_it_ends,
]


@pytest.mark.parametrize("place, context", paired(PLACES, ["spawn", "forkserver", None, "fork"]))
def test_a_script_runs_once(place, context, tmp_path):
    assert place(script(context), tmp_path) == SAID


@pytest.mark.deep
def test_what_is_loaded_in_the_program_is_not_loaded_in_workers(tmp_path):
    (tmp_path / "heavy.py").write_text("import os; os.write(1, b'loaded\\n')")
    (tmp_path / "script.py").write_text("import heavy\n" + script("spawn"))
    assert said(tmp_path / "script.py") == "loaded\n" + SAID


@pytest.mark.deep
@pytest.mark.parametrize(
    "option, context",
    paired(["pycache_prefix=/tmp", "int_max_str_digits=700", "mine"], ["forkserver", "spawn"]),
)
def test_options_of_the_interpreter(option, context):
    body = f"""
        import sys
        from envs import Counter
        from shmvec import ShmVectorEnv

        class Asked(Counter):
            def options(self):
                return sys._xoptions

        envs = ShmVectorEnv([Asked], context={context!r})
        assert envs.call("options") == (sys._xoptions,), envs.call("options")
        envs.close()
    """
    where = str(Path(__file__).parent)
    text = f"import sys; sys.path.append({where!r})\n" + textwrap.dedent(body)
    assert said("-X", option, "-c", text) == ""


@pytest.mark.deep
def test_a_notebook(tmp_path):
    pytest.importorskip("ipykernel")
    pytest.importorskip("nbclient")
    define, _, use = textwrap.dedent(SCRIPT).partition("made = ")
    cells = [define]
    cells += [f"made = {use}".replace("CONTEXT", repr(context)) for context in CONTEXTS]
    run = f"""if True:
        import nbclient, nbformat
        notebook = nbformat.v4.new_notebook()
        notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in {cells!r}]
        nbclient.NotebookClient(notebook, timeout={DEADLINE_S}).execute()
        for cell in notebook.cells[1:]:
            assert "all is well" in str(cell["outputs"]), cell
    """
    assert said("-c", run, cwd=tmp_path) == ""


@pytest.mark.deep
def test_pytest_xdist(tmp_path):
    pytest.importorskip("xdist")
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent(
            """
            import gymnasium as gym, pytest
            from shmvec import ShmVectorEnv

            class Mine(gym.Env):
                observation_space = action_space = gym.spaces.Discrete(3)
                def reset(self, *, seed=None, options=None): return 1, {}
                def step(self, action): return action, 0.0, False, False, {}

            @pytest.mark.parametrize("context", ["fork", "spawn", "forkserver", None])
            def test_it(context):
                envs = ShmVectorEnv([Mine, lambda: Mine()], num_workers=2, context=context)
                envs.reset()
                assert envs.step([2, 1])[0].tolist() == [2, 1]
                envs.close()
            """
        )
    )
    out = said("-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", cwd=tmp_path)
    assert "4 passed" in out


@pytest.mark.deep
def test_an_actor_of_ray(tmp_path):
    pytest.importorskip("ray")
    code = """if True:
        import gymnasium as gym
        import ray
        from shmvec import ShmVectorEnv

        @ray.remote(num_cpus=2)
        class Actor:
            def rewards(self, context):
                made = [lambda: gym.make("CartPole-v1")] * 2
                envs = ShmVectorEnv(made, num_workers=2, context=context)
                envs.reset(seed=1)
                rewards = envs.step([0, 1])[1].tolist()
                envs.close()
                return rewards

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        actor = Actor.remote()
        for context in ("fork", "spawn", "forkserver", None):
            assert ray.get(actor.rewards.remote(context)) == [1.0, 1.0], context
        ray.shutdown()
    """
    output_of("-c", code, cwd=tmp_path)


# ---- what is given for context=, and Python's default ------------------------------------------


@pytest.mark.deep
def test_a_context_object():
    context = multiprocessing.get_context("spawn")
    with closing(ShmVectorEnv([lambda: Counter(9)] * 2, context=context)) as envs:
        assert envs.context is context
        envs.reset()
        assert envs.step([1, 1])[0][:, 0].tolist() == [1, 1]


def test_no_such_context():
    for context, error in (("thread", ValueError), (3, TypeError), (object(), TypeError)):
        with pytest.raises(error, match="context"):
            ShmVectorEnv([lambda: Counter(9)], context=context)


class Hook:
    """Is held by the program's exit hooks alone, and belongs to the program's process."""

    def __init__(self):
        self.pid = os.getpid()

    def __call__(self):
        pass

    def __eq__(self, other):
        return isinstance(other, Hook)

    def __del__(self):
        if os.getpid() != self.pid:
            os.abort()  # as clients of Ray's do, which are freed after a fork


@pytest.mark.deep
def test_a_fork_frees_nothing_that_exit_hooks_hold(tmp_path):
    class Env(Counter):
        def close(self):
            atexit.register((tmp_path / "an env's hook").touch)
            super().close()

    atexit.register(Hook())
    try:
        with closing(ShmVectorEnv([Env] * 2, num_workers=2, context="fork")) as envs:
            envs.reset(seed=1)
    finally:
        atexit.unregister(Hook())
    assert (tmp_path / "an env's hook").exists()


@pytest.mark.deep
def test_the_programs_own_start_method_is_not_fixed():
    body = """
        import multiprocessing
        from shmvec import ShmVectorEnv
        import gymnasium as gym
        ShmVectorEnv([lambda: gym.make("CartPole-v1")]).close()
        multiprocessing.set_start_method("spawn")  # an error, had one been chosen
        envs = ShmVectorEnv([lambda: gym.make("CartPole-v1")])
        print(envs.call("get_wrapper_attr", "spec")[0].id)
        envs.close()
    """
    assert said("-c", textwrap.dedent(body)) == "CartPole-v1\n"


# ---- the registry ------------------------------------------------------------------------------


class Registering(Counter):
    def spec_of(self, name):
        return gym.spec(name)


@pytest.fixture
def registered():
    """Registers; what was there is put back."""
    before = dict(gym.registry)
    yield gym.register
    gym.registry.clear()
    gym.registry.update(before)


@pytest.mark.deep
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_know_what_the_parent_has_registered(context, registered):
    registered("space/Mine-v2", Registering, kwargs={"length": 3}, max_episode_steps=5)
    registered("Theirs-v0", vector_entry_point=lambda **kwargs: None)
    gym.registry["CartPole-v1"].max_episode_steps = 3
    try:
        made = [lambda: gym.make("space/Mine-v2"), lambda: gym.make("space/Mine-v2", length=4)]
        with closing(ShmVectorEnv(made, context=context)) as envs:
            assert envs.call("spec_of", "space/Mine-v2")[0].max_episode_steps == 5
            assert envs.call("spec_of", "CartPole-v1")[1].max_episode_steps == 3
            assert callable(envs.call("spec_of", "Theirs-v0")[0].vector_entry_point)
    finally:
        gym.registry["CartPole-v1"].max_episode_steps = 500


@pytest.mark.deep
def test_an_id_that_cannot_be_sent_is_named_when_it_is_needed(registered):
    unpicklable = threading.Lock()
    registered("Stuck-v0", lambda: unpicklable)
    registered("Fine-v0", Registering, kwargs={"length": 3})
    with closing(ShmVectorEnv([lambda: gym.make("Fine-v0")], context="spawn")) as envs:
        envs.reset()
    with pytest.raises(RuntimeError, match="'Stuck-v0' .* cannot be pickled.*context='fork'"):
        ShmVectorEnv([lambda: gym.make("Stuck-v0")], context="spawn")


@pytest.mark.deep
def test_a_module_that_registers_again_replaces_nothing(tmp_path, monkeypatch, registered):
    """The parent has changed what the module registered; a worker imports it, and knows."""
    (tmp_path / "registers_it.py").write_text(
        "import gymnasium\n"
        "from envs import Counter\n"
        "gymnasium.register('Again-v0', 'envs:Counter', kwargs=dict(length=3))\n"
        "def make():\n"
        "    return gymnasium.make('Again-v0')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import registers_it

    gym.registry["Again-v0"].kwargs["length"] = 8
    with closing(ShmVectorEnv([registers_it.make], context="spawn")) as envs:
        assert envs.get_attr("length") == (8,)
    del sys.modules["registers_it"]


# ---- options of workers ------------------------------------------------------------------------


class Asked(Counter):
    """Says what its process has."""

    variables = {name: os.environ.get(name) for name in ("MINE", "OTHER")}

    def variable(self, name):
        return os.environ.get(name)

    def imported_with(self):
        import environ_reader

        return environ_reader.found


@pytest.mark.parametrize("context", ["fork", *deep("spawn", "forkserver")])
def test_variables_of_workers(context, monkeypatch, tmp_path):
    (tmp_path / "environ_reader.py").write_text("import os\nfound = os.environ.get('MINE')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OTHER", "theirs")

    def of(worker):
        return {"MINE": f"of {worker}"}

    made = [lambda: Asked(9)] * 3
    with closing(ShmVectorEnv(made, num_workers=3, context=context, worker_environ=of)) as envs:
        assert envs.call("variable", "MINE") == ("of 0", "of 1", "of 2")
        assert envs.call("imported_with") == ("of 0", "of 1", "of 2")
        assert envs.call("variable", "OTHER") == ("theirs",) * 3
        assert "MINE" not in os.environ
        monkeypatch.setenv("OTHER", "changed")
        envs.restart([1])  # with its own, and what the parent has now
        envs.reset()
        assert envs.call("variable", "MINE") == ("of 0", "of 1", "of 2")
        assert envs.call("variable", "OTHER") == ("theirs", "changed", "theirs")
    with closing(ShmVectorEnv(made, context=context, worker_environ={"MINE": "all"})) as envs:
        assert envs.call("variable", "MINE") == ("all",) * 3


@pytest.mark.deep
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_variables_that_are_too_large_to_start_a_program_with(context, monkeypatch):
    large = "x" * 300_000
    monkeypatch.setenv("OTHER", large)
    made = [lambda: Asked(9)]
    with closing(ShmVectorEnv(made, context=context, worker_environ={"MINE": large})) as envs:
        assert envs.call("variable", "MINE") == envs.call("variable", "OTHER") == (large,)
    with closing(ShmVectorEnv(made, context=context, worker_environ={"OTHER": "y"})) as envs:
        assert envs.call("variable", "OTHER") == ("y",)


@pytest.mark.parametrize("context", ["fork", *deep("spawn")])
def test_a_function_that_is_called_first(context):
    def init(worker):
        os.environ["MINE"] = f"first {worker}"

    def make():
        assert os.environ["MINE"].startswith("first")
        return Asked(9)

    with closing(
        ShmVectorEnv([make] * 2, context=context, num_workers=2, worker_init=init)
    ) as envs:
        assert envs.call("variable", "MINE") == ("first 0", "first 1")
    assert "MINE" not in os.environ


@pytest.mark.deep
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_what_that_function_raises(context):
    def init(worker):
        raise KeyError("not today")

    with pytest.raises(KeyError, match="not today") as caught:
        ShmVectorEnv([lambda: Counter(9)] * 2, context=context, num_workers=2, worker_init=init)
    assert "worker_init" in str(caught.value.__cause__)


def test_bad_options():
    for options, error in (
        ({"worker_environ": {"MINE": 3}}, TypeError),
        ({"worker_environ": ["MINE"]}, TypeError),
        ({"worker_environ": lambda worker: None}, TypeError),
        ({"worker_environ": {"MINE": "x"}, "num_workers": 0}, ValueError),
        ({"worker_init": 3}, TypeError),
        ({"worker_init": print, "num_workers": 0}, ValueError),
        ({"preload": "no_such_module"}, ModuleNotFoundError),
        ({"preload": ["numpy", 3]}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(options))):
            ShmVectorEnv([lambda: Counter(9)], **options)


@pytest.mark.deep
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_env_fns_that_hold_what_multiprocessing_shares(context):
    """Queues and locks travel only while a process is started."""
    shared = multiprocessing.get_context(context)
    queue, value = shared.SimpleQueue(), shared.Value("i", 0)
    queue.put("from the parent")

    class Sharing(Counter):
        def exchange(self):
            with value.get_lock():
                value.value += 1
            got = queue.get()
            queue.put("from the env")
            return got

    with closing(ShmVectorEnv([lambda: Sharing(9)] * 2, num_workers=2, context=context)) as envs:
        assert envs.call_some([0], "exchange") == ("from the parent",)
        assert envs.call_some([1], "exchange") == ("from the env",)
        assert (queue.get(), value.value) == ("from the env", 2)
        envs.restart([0])
        envs.reset()
        queue.put("again")
        assert envs.call_some([0], "exchange") == ("again",)
        assert queue.get() == "from the env"
    queue.close()


class Versioned(Counter):
    def version(self, module):
        return __import__(module).version


@pytest.mark.deep
def test_preloaded_modules_are_imported_once(tmp_path, monkeypatch):
    (tmp_path / "slow_to_load.py").write_text("import os\nloaded_by = os.getpid()\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    class Loading(Counter):
        def loaded_by(self):
            import slow_to_load

            return slow_to_load.loaded_by, os.getpid()

    def loaders(**options):
        with closing(ShmVectorEnv([lambda: Loading(9)] * 3, num_workers=3, **options)) as envs:
            return [list(each) for each in zip(*envs.call("loaded_by"), strict=True)]

    by, pids = loaders(context="forkserver")
    assert by == pids  # each for itself
    by, pids = loaders(context="forkserver", preload=["slow_to_load"])
    assert len(set(by)) == 1 and by[0] not in pids and by[0] != os.getpid()
    again, _ = loaders(context="forkserver", preload=["slow_to_load"])
    assert again == by  # the server is kept
    (tmp_path / "slow_to_load.py").write_text("import os\nloaded_by = -os.getpid()\n")
    changed, _ = loaders(context="forkserver", preload=["slow_to_load"])
    assert len(set(changed)) == 1 and changed[0] < 0  # and not when its files have changed
    by, pids = loaders(context="spawn", preload=["slow_to_load"])
    assert [-pid for pid in by] == pids
    by, pids = loaders(context="fork", preload=["slow_to_load"])
    assert by == [-os.getpid()] * 3
    del sys.modules["slow_to_load"]


@pytest.mark.deep
def test_a_module_that_is_another_one_since_the_path_has_changed(tmp_path, monkeypatch):
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "of_a_folder.py").write_text(f"version = {number}\n")
    made = [lambda: Versioned(9)] * 2
    for number in (1, 2, 1):
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / str(number)))
            preload = ["of_a_folder"]
            with closing(ShmVectorEnv(made, context="forkserver", preload=preload)) as envs:
                assert envs.call("version", "of_a_folder") == (number, number)


@pytest.mark.deep
def test_a_fork_server_keeps_what_it_has_imported(tmp_path, monkeypatch):
    text = "import os\nfrom envs import Counter\nloaded_by = os.getpid()\n"
    text += "class Its(Counter):\n    def loaded_by(self): return loaded_by\n"
    (tmp_path / "its_module.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make():
        from its_module import Its

        return Its(9)

    def loaded_by(**options):
        options = {"num_workers": 2, "context": "forkserver", **options}
        with closing(ShmVectorEnv([make] * 2, **options)) as envs:
            return envs.call("loaded_by"), tuple(process.pid for process in envs.processes)

    loaded_by()  # the first worker reports the module
    (server, other), pids = loaded_by()
    assert server == other and server not in (*pids, os.getpid())
    # What an env imports is to see the variables of its worker.
    by, pids = loaded_by(worker_environ={"MINE": "x"})
    assert by == pids
    assert "its_module" not in sys.modules


@pytest.mark.deep
def test_streams_and_cores_are_the_parents_of_now(capfd):
    """And not those that it had when the fork server began."""

    class Saying(Counter):
        def say(self, words):
            os.write(1, words)
            return sorted(os.sched_getaffinity(0)), os.getcwd()

    cores = sorted(os.sched_getaffinity(0))
    for turn in range(2):
        if turn:
            os.sched_setaffinity(0, cores[-1:])
        try:
            made = [lambda: Saying(9)]
            with closing(ShmVectorEnv(made, context="forkserver")) as envs:
                expected = cores[-1:] if turn else cores
                assert envs.call("say", b"hear me\n") == ((expected, os.getcwd()),)
        finally:
            os.sched_setaffinity(0, cores)
        assert capfd.readouterr().out == "hear me\n"


@pytest.mark.deep
def test_threads_that_start_vector_envs_at_once_share_a_fork_server(monkeypatch):
    monkeypatch.setenv("SHMVEC_TEST", "of its own")  # so no server that is kept fits
    began = fork_server.ForkServer.__init__

    def slowly(server, *arguments):
        time.sleep(0.1)
        began(server, *arguments)

    monkeypatch.setattr(fork_server.ForkServer, "__init__", slowly)
    before = {server.pid for server in fork_server.servers()}
    with ThreadPoolExecutor(4) as pool:
        options = {"num_workers": 1, "context": "forkserver", "threads_per_worker": 1}
        made = list(pool.map(lambda _: ShmVectorEnv([Counter], **options), range(4)))
    for envs in made:
        envs.close()
    assert len({server.pid for server in fork_server.servers()} - before) == 1

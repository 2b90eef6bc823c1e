"""What goes wrong while workers start: the error says what, and nothing is left."""

import contextlib
import errno
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from envs import Counter
from scripts import succeeds
from tables import first, paired

from shmvec import ShmVectorEnv, WorkerCrashError
from shmvec._processes import supervisor
from shmvec._processes.fork_server import servers

DEADLINE_S = 60
METHODS = ["fork", "forkserver", "spawn"]


def dies(code=4):
    os._exit(code)


def refuses():
    raise ValueError("no such ROM")


# ---- several at once -----------------------------------------------------------------------------


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize("make", first([[dies, refuses], [refuses, dies]]))
def test_one_dies_and_another_raises(make):
    with pytest.raises(WorkerCrashError, match="exit code 4") as caught:
        ShmVectorEnv(make, num_workers=2, context="fork")
    assert caught.value.envs == (make.index(dies),)
    assert "ValueError: no such ROM" in caught.value.__notes__[0]


@pytest.mark.deep
def test_a_worker_that_may_open_no_more_files_says_so():
    """What its program sends it does not come whole."""

    def limit(worker):
        if worker == 0:  # which reads what it has imported
            return
        most = os.open(os.devnull, os.O_RDONLY)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        os.close(most)

    with pytest.raises(WorkerCrashError, match="too many open files in this worker, at most"):
        ShmVectorEnv([Counter] * 2, num_workers=2, context="fork", worker_init=limit)


@pytest.mark.deep
@pytest.mark.parametrize("context", METHODS)
def test_all_that_die_are_named(context):
    with pytest.raises(WorkerCrashError, match=r"exit code 5.*exit code 6") as caught:
        ShmVectorEnv([Counter, partial(dies, 5), partial(dies, 6)], num_workers=3, context=context)
    assert caught.value.workers == (1, 2)
    assert sorted(caught.value.each) == [1, 2] and "exit code 6" in caught.value.each[2]
    assert "FaultPolicy" not in str(caught.value)  # which is for workers that have started


@pytest.mark.deep
def test_a_death_is_reported_though_another_waits_for_ever():
    with pytest.raises(WorkerCrashError, match="worker 1"):
        ShmVectorEnv([threading.Event().wait, dies], num_workers=2, context="fork")


@pytest.mark.deep
@pytest.mark.parametrize("context", METHODS)
def test_ctrl_c_does_not_wait_for_envs_that_are_built(context, monkeypatch):
    """Others that are built already may close theirs."""
    waits = []
    stop = supervisor.Supervisor.stop

    def noted(self, timeout, remind=None):
        waits.append(timeout != 0.0 and not all(each.has_ended() for each in self.processes))
        return stop(self, timeout, remind)

    def build():
        os.kill(owner, signal.SIGUSR2)
        threading.Event().wait()

    def interrupt(number, frame):
        raise KeyboardInterrupt

    owner = os.getpid()
    monkeypatch.setattr(supervisor.Supervisor, "stop", noted)
    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            ShmVectorEnv([build], num_workers=1, context=context)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert waits and not any(waits)


def meet(barrier, data):
    barrier.wait(DEADLINE_S)
    return Counter()


@pytest.mark.deep
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_all_build_at_once_however_much_they_are_sent(context):
    barrier = multiprocessing.get_context(context).Barrier(3)
    make = [partial(meet, barrier, bytes([number]) * 3_000_000) for number in range(3)]
    with closing(ShmVectorEnv(make, num_workers=3, context=context)) as envs:
        envs.reset()


# ---- a signal's handler raises -------------------------------------------------------------------


class Break(BaseException):
    pass


STARTING = (
    "launcher.py", "worker_process.py", "fork_server.py", "supervisor.py", "assembly.py",
    "exchange.py",
)  # fmt: skip


class Breaking:
    """Raises at the given bytecode of those that start workers; counts them."""

    def __init__(self, at):
        self.at, self.count, self.owner = at, 0, os.getpid()

    def __enter__(self):
        # Python 3.12 traces opcodes only if some frame has asked for them before settrace.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self.trace)
        return self

    def __exit__(self, *details):
        sys.settrace(None)

    def trace(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if path.name not in STARTING or "shmvec" not in path.parts:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and os.getpid() == self.owner:
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)  # what is broken off while it tidies up is another matter
                raise Break
        return self.trace


def start(context):
    return ShmVectorEnv([Counter] * 2, num_workers=2, context=context)


@pytest.mark.deep
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_broken_off_at_any_bytecode(context):
    """In a process of its own: a descriptor may be lost with the bytecode that opened it."""
    succeeds(f"import test_start_faults as it; it.break_off({context!r}, turns=12)")


def break_off(context, turns):
    start(context).close()  # the server is there, all is imported
    with Breaking(0) as counting:
        envs = start(context)
    envs.close()
    whole = counting.count
    assert whole > 10 * turns
    kept_servers = set(servers())
    parents = [os.getpid(), *(server.pid for server in kept_servers if context == "forkserver")]
    kept = children(parents)
    broken_off = 0
    for turn in range(turns):
        breaking = Breaking(1 + turn * whole // turns)
        try:
            with breaking:
                envs = start(context)
        except Break:
            broken_off += 1
        else:
            envs.close()  # it had less to wait for, and was through before
            whole = breaking.count
        end = time.monotonic() + DEADLINE_S
        while (left := children(parents) - kept) and time.monotonic() < end:
            time.sleep(0.01)
        assert not left, f"turn {turn}: processes run: {left}"
    assert broken_off > turns / 2
    assert set(servers()) == kept_servers  # no second one was started beside it
    with closing(start(context)) as envs:
        envs.reset()


def children(parents):
    """Those that run: a zombie may stay where the bytecode of the fork itself was broken off."""
    found = set()
    for parent in parents:
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.add(child)
    return found


@pytest.mark.deep
def test_a_fork_that_is_interrupted_does_not_go_on_as_the_program():
    """In whichever call: the first ones are of hooks, after which Python goes on."""
    owner, ends = os.getpid(), []
    for at in range(0, 100, 8):
        calls = 0
        if len(ends) == 3:
            break

        def trace(frame, event, argument, at=at):
            nonlocal calls
            if os.getpid() != owner and "shmvec" in Path(frame.f_code.co_filename).parts:
                calls += 1
                if calls > at:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return None

        sys.settrace(trace)
        try:
            ShmVectorEnv([Counter], num_workers=1, context="fork").close()
        except WorkerCrashError as error:
            ends.append(str(error))
        finally:
            if os.getpid() != owner:
                os._exit(77)
            sys.settrace(None)
    assert ends and all("exit code 1" in each for each in ends), ends


# ---- what the program is like --------------------------------------------------------------------

ODD = """
    from envs import Counter
    from shmvec import ShmVectorEnv

    envs = ShmVectorEnv([Counter] * 2, num_workers=2, context=CONTEXT)
    envs.reset()
    envs.step([1, 1])
    envs.close()
"""


ODDITIES = [
    "import pathlib; sys.path += [pathlib.Path('/nowhere'), b'/nowhere', None]",
    "os.close(1); os.close(2)",
    "os.close(0); os.close(1); os.close(2)",
    "import mmap; number = os.memfd_create(os.fsdecode(b'\\xff')); os.ftruncate(number, 9)\n"
    "held = mmap.mmap(number, 9)",
]


@pytest.mark.deep
@pytest.mark.parametrize("context, before", paired(METHODS, ODDITIES))
def test_odd_programs(context, before):
    succeeds(f"import os, sys; {before}\n", ODD.replace("CONTEXT", repr(context)))


@pytest.mark.deep
def test_no_encoding_is_left_to_the_locale(monkeypatch):
    monkeypatch.setenv("PYTHONWARNDEFAULTENCODING", "1")
    errors = "import warnings; warnings.filterwarnings('error', '', EncodingWarning, 'shmvec')\n"
    succeeds(errors, ODD.replace("CONTEXT", "'fork'"), fresh=True)


@pytest.mark.deep
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
@pytest.mark.parametrize("name", ["", None])
def test_python_does_not_know_its_interpreter(context, name):
    known = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(name)
    try:
        with pytest.raises(OSError, match=r"sys.executable is empty.*set_executable"):
            ShmVectorEnv([Counter], context=context, preload=["colorsys"], num_workers=1)
    finally:
        multiprocessing.set_executable(known)


@pytest.mark.deep
@pytest.mark.parametrize(
    "context, expected",
    [
        ("forkserver", "exit code 7"),
        ("fork", "exit code is unknown, because the program ignores SIGCHLD"),
        ("spawn", "exit code is unknown, because the program ignores SIGCHLD"),
    ],
)
def test_a_program_that_ignores_the_end_of_children(context, expected):
    succeeds(
        f"""
        import signal
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        import os
        from functools import partial
        from shmvec import ShmVectorEnv, WorkerCrashError

        try:
            ShmVectorEnv([partial(os._exit, 7)], num_workers=1, context={context!r})
        except WorkerCrashError as error:
            assert {expected!r} in str(error), error
        else:
            raise AssertionError("it was not noticed")
        """
    )


@pytest.mark.deep
def test_threads_that_start_by_the_same_server():
    def run():
        try:
            for _ in range(3):
                start("forkserver").close()
        except BaseException as error:
            errors.append(error)

    errors = []
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.deep
def test_workers_have_the_limits_and_umask_that_the_program_has_now():
    """Also where a fork server is kept from before."""
    succeeds("""
        import resource
        from envs import Counter
        from shmvec import ShmVectorEnv

        class Asking(Counter):
            def inherited(self):
                import os, resource
                umask = os.umask(0)
                os.umask(umask)
                return umask, resource.getrlimit(resource.RLIMIT_CORE), os.getuid()

        def of_a_worker():
            envs = ShmVectorEnv([Asking], num_workers=1, context="forkserver")
            (found,) = envs.call("inherited")
            envs.close()
            return found

        os.umask(0o022)
        resource.setrlimit(resource.RLIMIT_CORE, (4096, 8192))
        assert of_a_worker() == (0o022, (4096, 8192), os.getuid())
        os.umask(0o077)
        assert of_a_worker() == (0o077, (4096, 8192), os.getuid())
        resource.setrlimit(resource.RLIMIT_CORE, (1024, 8192))
        assert of_a_worker() == (0o077, (1024, 8192), os.getuid())
    """)


@pytest.mark.deep
@pytest.mark.parametrize("context, step", [("fork", 3), ("forkserver", 5)])
def test_too_many_open_files_are_called_so(context, step):
    """At each limit, whatever is opened last; and with a fork server from before."""
    succeeds(f"""
        import errno, resource
        from envs import Counter
        from shmvec import ShmVectorEnv

        def start():
            ShmVectorEnv([Counter] * 2, num_workers=2, context={context!r}).close()

        start()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        for limit in range(len(os.listdir("/proc/self/fd")) + 1, 60, {step}):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
            try:
                start()
            except OSError as error:
                assert error.errno == errno.EMFILE, (limit, error)
                notes = "".join(getattr(error, "__notes__", ["ulimit -n"]))  # before Python 3.11
                assert notes.count("ulimit -n") == 1, (limit, notes)
            else:
                break
        else:
            raise AssertionError("no limit was enough")
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        start()
    """)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_an_env_raises_as_it_is_built_gets_no_advice_on_limits(num_workers):
    class Unready(Counter):
        def __init__(self):
            raise BlockingIOError(errno.EAGAIN, "the simulator's socket has nothing yet")

    with pytest.raises(BlockingIOError) as caught:
        ShmVectorEnv([Unready], num_workers=num_workers)
    assert not hasattr(caught.value, "__notes__")

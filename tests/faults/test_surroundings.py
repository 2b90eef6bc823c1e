"""What surrounds a vector env: exit hooks, handlers, a terminal, limits, no pidfds."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import gone
from scripts import succeeds
from tables import deep, paired

ENVS = """
import gymnasium as gym, numpy as np, signal, time
from echoing import Echo

class Stubborn(Echo):
    def step(self, action):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().step(action)

"""


@pytest.mark.deep
@pytest.mark.parametrize("error", ["ENOSYS", "EMFILE"])
def test_a_process_that_cannot_be_watched_over_is_not_left(error):
    succeeds(
        ENVS,
        f"""
        import errno
        from multiprocessing import active_children
        from shmvec import ShmVectorEnv

        opened, parent = [], os.getpid()
        real = os.pidfd_open

        def pidfd_open(pid):
            if os.getpid() == parent:
                if len(opened) == 2:
                    raise OSError(errno.{error}, "no more of them")
                opened.append(pid)
            return real(pid)

        os.pidfd_open = pidfd_open
        before = os.listdir("/proc/self/fd")
        try:
            ShmVectorEnv([Echo] * 4, num_workers=4, context="fork")
        except OSError as raised:
            assert raised.errno == errno.{error}, raised
            assert raised.errno != errno.ENOSYS or "pidfd_open" in str(raised), raised
        else:
            raise AssertionError("nothing was raised")
        assert not active_children()
        try:
            left = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            pass
        else:
            raise AssertionError(f"a child is left: {{left}}")
        deadline = time.monotonic() + 60  # the thread that copies stderr closes its own
        while os.listdir("/proc/self/fd") != before:
            assert time.monotonic() < deadline, os.listdir("/proc/self/fd")
            time.sleep(0.001)
        """,
    )


@pytest.mark.deep
@pytest.mark.parametrize(
    "first, daemon", paired(["import weakref", "weakref.finalize(A(), print)"], [True, False])
)
def test_a_program_ends_with_an_open_vector_env_whatever_its_exit_hooks(first, daemon):
    succeeds(
        f"""
        import weakref
        class A: pass
        {first}
        """,
        ENVS,
        f"""
        from shmvec import ShmVectorEnv

        envs = ShmVectorEnv([Stubborn] * 2, num_workers=2, context="fork", daemon={daemon})
        envs.reset()
        envs.step([1, 1])
        """,
        fresh=True,
    )


@pytest.mark.deep
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_process_of_multiprocessing_ends_with_an_open_vector_env(context):
    succeeds(
        ENVS,
        f"""
        import multiprocessing
        from shmvec import ShmVectorEnv

        def work():
            global envs
            envs = ShmVectorEnv([Echo] * 2, num_workers=2, context="{context}", daemon=False)
            envs.reset()

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join()
        assert process.exitcode == 0, process.exitcode
        """,
    )


@pytest.mark.deep
def test_workers_do_not_inherit_the_programs_handler_of_sigterm():
    out = succeeds(
        ENVS,
        """
        from shmvec import ShmVectorEnv

        signal.signal(signal.SIGTERM, lambda *_: print("saved", os.getpid(), flush=True))
        envs = ShmVectorEnv([Echo] * 2, num_workers=2, context="fork")
        envs.reset()
        envs.close(terminate=True)
        """,
    )
    assert out == ""


@pytest.mark.deep
@pytest.mark.parametrize(
    "last, workers", paired(["close()", "close(terminate=True)", "step([0, 0])"], [2, 0])
)
def test_what_runs_after_the_exit_hooks_finds_it_closed(last, workers):
    out = succeeds(
        ENVS,
        f"""
        import tempfile
        from shmvec import ShmVectorEnv

        class Collector:  # closes its envs when it goes, as DI-engine's
            def __init__(self, envs):
                self.envs = envs

            def __del__(self, opened=tempfile.TemporaryFile, stat=os.stat, say=print):
                files = [opened() for _ in range(9)]  # which take the numbers of what is closed
                say(self.envs.closed)
                try:
                    self.envs.{last}
                except Exception as error:
                    say(type(error).__name__)
                say([stat(file.fileno()).st_size for file in files] == [0] * 9, flush=True)
                for file in files:
                    file.close()

        collector = Collector(ShmVectorEnv([Echo] * 2, num_workers={workers}, context="fork"))
        collector.envs.reset()
        """,
    )
    expected = ["True"] + ["ClosedEnvironmentError"] * last.startswith("step") + ["True"]
    assert out.split() == expected


# ---- a terminal ----------------------------------------------------------------------------------

TERMINAL = """
import sys, termios
sys.path.insert(0, {folder!r})
from echoing import Echo
from shmvec import ShmVectorEnv

class Telling(Echo):
    def step(self, action):
        with open("/dev/tty", "w") as terminal:
            termios.tcsetattr(terminal, termios.TCSANOW, termios.tcgetattr(terminal))
            terminal.write("stepped ")
        return super().step(action)

envs = ShmVectorEnv([Telling] * 2, num_workers=2)
envs.reset(seed=0)
envs.step([1, 1])
envs.close()
print("all is well")
"""


@pytest.mark.deep
def test_an_env_may_set_and_write_to_the_terminal():
    body = TERMINAL.format(folder=str(Path(__file__).parents[1]))
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", body])
    said, until = b"", time.monotonic() + 120
    try:
        while b"all is well" not in said:
            assert time.monotonic() < until, said
            if select.select([terminal], [], [], 0.1)[0]:
                said += os.read(terminal, 1000)
        assert said.count(b"stepped") == 2
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


# ---- a limit of memory ---------------------------------------------------------------------------


def unshared(command):
    """A shell's command in which mounts are its own."""
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", command]


def may_mount():
    try:
        return subprocess.run(
            unshared("mount -t tmpfs none /sys/fs/cgroup"), capture_output=True, timeout=20
        )
    except OSError:
        return None


@pytest.fixture
def limited():
    """Mounts of one's own in which all cgroups have a limit."""
    done = may_mount()
    if done is None or done.returncode != 0:
        pytest.skip("there are no mounts of one's own here")


def test_memory_beyond_the_cgroups_limit_is_an_error_with_the_numbers(limited):
    succeeds(
        """
        import os, subprocess
        if "inside" not in os.environ:
            limit = "echo 5000000 > max && echo 3000000 > current"
            mount = "mount -t tmpfs none /sys/fs/cgroup && cd /sys/fs/cgroup"
            names = "mv max memory.max && mv current memory.current"
            again = 'exec "$@"'
            command = f"{mount} && {limit} && {names} && cd / && {again}"
            with open("/proc/self/cmdline") as line:
                arguments = line.read().split("\\0")[:-1]
            done = subprocess.run(
                ["unshare", "--map-root-user", "--mount", "sh", "-c", command, "sh", *arguments],
                env={**os.environ, "inside": "yes"},
            )
            sys.exit(done.returncode)

        from echoing import Echo
        from shmvec import ShmVectorEnv

        ShmVectorEnv([Echo] * 2, num_workers=2).close()
        try:
            ShmVectorEnv([lambda: Echo(size=200_000)] * 2, num_workers=2)
        except OSError as error:
            assert "2,000,000" in str(error), error
        else:
            raise AssertionError("it would be killed")
        """,
        fresh=True,
    )


@pytest.mark.deep
def test_workers_without_proc_are_refused_and_envs_here_are_not(limited):
    code = """
from echoing import Echo
from shmvec import ShmVectorEnv
ShmVectorEnv([Echo] * 2, num_workers=0).close()
ShmVectorEnv([Echo] * 2, num_workers=2)
"""
    command = unshared('mount -t tmpfs none /proc && exec "$@"')
    done = subprocess.run(
        [*command, "sh", sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "workers need /proc, which is not mounted here" in done.stderr, done.stderr


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.deep
def test_a_limit_of_processes_is_named():
    """It binds no administrator."""
    succeeds(
        ENVS,
        """
        import multiprocessing.shared_memory, resource
        from shmvec import ShmVectorEnv

        if os.geteuid() == 0:
            ShmVectorEnv([Echo], num_workers=1, context="fork").close()  # imports all it needs
            os.setuid(54321)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        try:
            ShmVectorEnv([Echo] * 2, num_workers=2, context="fork")
        except (BlockingIOError, RuntimeError) as error:
            said = "".join(error.__notes__)
        assert "1 (RLIMIT_NPROC, `ulimit -u`)" in said and "num_workers" in said, said
        """,
    )


# ---- a program that gives up root ----------------------------------------------------------------

NOBODY = """
def become_nobody(envs):
    os.setgid(65534)
    os.setuid(65534)
    return [process.pid for process in envs.processes]
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("context", ["fork", *deep("forkserver", "spawn")])
@pytest.mark.parametrize("terminate", [False, *deep(True)])
def test_a_program_that_gives_up_root_closes_its_vector_env(context, terminate):
    succeeds(
        ENVS,
        NOBODY,
        f"""
        from shmvec import ShmVectorEnv

        envs = ShmVectorEnv([Echo] * 2, num_workers=2, context={context!r})
        envs.reset()
        pids = become_nobody(envs)
        envs.step_async(envs.action_space.sample())
        envs.close(terminate={terminate})
        assert not [pid for pid in pids if os.path.exists(f"/proc/{{pid}}")]
        """,
    )


@pytest.mark.deep
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_worker_that_may_not_be_killed_is_named_and_ends_with_its_program():
    printed = succeeds(
        ENVS,
        NOBODY,
        """
        import logging
        from shmvec import ShmVectorEnv

        class Hanging(Echo):
            def step(self, action):
                time.sleep(1000)

        envs = ShmVectorEnv([Hanging, Echo], num_workers=2, context="fork")
        envs.reset()
        pids = become_nobody(envs)
        envs.step_async(envs.action_space.sample())
        lines = []
        logging.getLogger("shmvec").addFilter(lambda record: lines.append(record.getMessage()))
        envs.close(timeout=4)
        assert f"worker 0 (process {pids[0]}) has not ended" in lines[0], lines
        assert "This process may not kill it" in lines[0], lines
        assert not os.path.exists(f"/proc/{pids[1]}")
        envs.close()
        print(pids[0])
        """,
    )
    assert gone([int(printed)], 60)

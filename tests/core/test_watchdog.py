"""The watchdog from Python: it needs no GIL, and stays out of the way of forks."""

import os
import signal
import subprocess
import sys

import pytest
from processes import gone, run_script

from shmvec._core import start_watchdog, stop_watchdog

MARK = 2**62 + 1  # no process has it


@pytest.fixture
def parent():
    """A pidfd of a process that lives until the test ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        descriptor = os.pidfd_open(process.pid)
        yield descriptor
        stop_watchdog()
        os.close(descriptor)


@pytest.mark.deep
def test_start_and_stop(parent):
    def threads():  # others may be about to end, as that which copies stderr in a test before
        return {*os.listdir("/proc/self/task")} - before

    before = {*os.listdir("/proc/self/task")}
    for _ in range(3):
        start_watchdog(parent, MARK)
        assert len(threads()) == 1
        with pytest.raises(OSError, match="cannot watch over the parent: Device or resource busy"):
            start_watchdog(parent, MARK)
        stop_watchdog()
        assert not threads()
    stop_watchdog()


@pytest.mark.deep
def test_what_is_no_pidfd():
    with pytest.raises(OSError, match="cannot watch over the parent: Bad file descriptor"):
        start_watchdog(-1, MARK)
    with open(os.devnull) as file, pytest.raises(OSError, match="Bad file descriptor"):
        start_watchdog(file.fileno(), MARK)


@pytest.mark.deep
def test_a_fork_sees_the_threads_of_the_env_alone():
    """In a process without other threads: those of libraries may come and go at a fork."""
    script = run_script(
        """
        import os, signal, sys, warnings

        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        from shmvec._core import start_watchdog, stop_watchdog

        if sys.version_info[:2] == (3, 13):  # which counts once the hooks have run, and warns
            warnings.filterwarnings("ignore", "This process .* is multi-threaded")

        def say(when):
            print(when, len(os.listdir("/proc/self/task")), flush=True)

        signal.alarm(240)
        os.register_at_fork(before=lambda: say("before"))  # the last registered is run first
        start_watchdog(os.pidfd_open(os.getppid()), 2**62)
        say("watched")
        for _ in range(20):  # the thread may have ended in time by chance
            child = os.fork()
            if child == 0:
                say("child")
                grandchild = os.fork()
                if grandchild:
                    os.waitpid(grandchild, 0)
                    say("child")  # no watchdog was started after its fork
                os._exit(0)
            os.waitpid(child, 0)
            say("watched")
        """
    )
    try:
        out, err = script.communicate(timeout=250)
    finally:
        script.kill()
    assert not err
    each = ["before 1", "child 1", "before 1", "child 1", "watched 2"]
    assert out.splitlines() == ["watched 2", *each * 20]


def test_a_worker_that_keeps_the_gil_goes_with_its_parent():
    """And the process that it has started, too."""
    script = run_script(
        """
        import os, signal, subprocess, sys, time
        from shmvec._core import start_watchdog, stop_watchdog

        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.alarm(240)
            os.setpgid(0, 0)
            start_watchdog(os.pidfd_open(os.getppid()), 2**62)
            helper = subprocess.Popen(["sleep", "240"])
            print(os.getpid(), helper.pid, flush=True)
            sum(range(10**12))  # one call: the GIL is not given up
        time.sleep(240)
        """
    )
    try:
        pids = [int(word) for word in script.stdout.readline().split()]
        assert len(pids) == 2
        script.send_signal(signal.SIGKILL)
        script.communicate(timeout=250)
        assert gone(pids, 100)
    finally:
        script.kill()
        script.wait()

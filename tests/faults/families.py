"""What envs start, in all the ways in which it may get away from its worker."""

import ctypes
import multiprocessing
import os
import resource
import signal
import subprocess
import time

from echoing import Echo
from processes import gone

RLIMIT_LOCKS = 10


LIFETIME_S = 300  # of what is to be ended sooner


def sleep_and_exit():
    time.sleep(LIFETIME_S)
    os._exit(0)


def forked():
    """A fork."""
    pid = os.fork()
    if pid == 0:
        sleep_and_exit()
    return pid


def in_another_session():
    return subprocess.Popen(["sleep", str(LIFETIME_S)], start_new_session=True).pid


def with_no_environment():
    return subprocess.Popen(["/bin/sleep", str(LIFETIME_S)], env={}, start_new_session=True).pid


def number_from(pipe):
    """The number that a process has written."""
    number = os.read(pipe, 20)
    os.close(pipe)
    return int(number)


def daemon(become=sleep_and_exit):
    """A fork of a fork, in a session of its own, without a parent."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(theirs, str(os.getpid()).encode())
            become()
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(theirs)
    return number_from(ours)


def daemon_with_no_environment():
    return daemon(lambda: os.execve("/bin/sleep", ["sleep", str(LIFETIME_S)], {}))


def background():
    """As shells do."""
    return int(subprocess.check_output(f"sleep {LIFETIME_S} >/dev/null & echo $!", shell=True))


def deaf_daemon():
    def be_deaf():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sleep_and_exit()

    return daemon(be_deaf)


def of_multiprocessing():
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(LIFETIME_S,))
    process.start()
    return process.pid


WAYS = [
    forked,
    in_another_session,
    with_no_environment,
    daemon,
    daemon_with_no_environment,
    background,
    deaf_daemon,
    of_multiprocessing,
]


def outliving():
    """What is to live on says so."""

    def reset():
        resource.setrlimit(RLIMIT_LOCKS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    command = ["sleep", str(LIFETIME_S)]
    return subprocess.Popen(command, start_new_session=True, preexec_fn=reset).pid


class Starting(Echo):
    """Starts something in each way; `started` tells what."""

    ways = WAYS

    def __init__(self, *arguments):
        super().__init__()
        self.pids = [way() for way in self.ways]

    def started(self):
        return [os.getpid(), *self.pids]

    def step(self, action):
        if action == 9:
            time.sleep(60)
        if action == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 7:
            ctypes.string_at(0)
        return super().step(action)


class Failing(Starting):
    """Tells what it has started, and is not made."""

    def __init__(self):
        super().__init__()
        raise RuntimeError(*self.pids)


def started_by(envs):
    """What the envs have started, and their workers."""
    return [pid for pids in envs.call("started") for pid in pids]


def check_lives(pids):
    for pid in pids:
        assert not gone([pid], 0.0), f"{pid} has ended: {pids}"


def check_gone(pids):
    left = [pid for pid in pids if not gone([pid], 60)]  # for LIFETIME_S at most
    assert not left, f"{left} are left of {pids}"

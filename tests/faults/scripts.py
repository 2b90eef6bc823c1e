"""Scripts that may hang or leave processes behind: each in a session of its own, ended whole."""

import contextlib
import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path

DEADLINE_S = 120

FORKER = []  # see conftest.py

_PREAMBLE = f"""
import faulthandler, os, sys
faulthandler.enable()
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
"""


@contextlib.contextmanager
def running(*parts, fresh=False):
    """A script, in parts, that runs; whatever it has started is gone at the end.

    It is in a fork of a process that has imported most things, unless it is to be fresh.
    """
    code = "".join(map(textwrap.dedent, (_PREAMBLE, *parts)))
    process = FORKER[0].begin(code, fresh)
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        end_session(process.pid)
        process.communicate()


def succeeds(*parts, lasting=0.0, fresh=False):
    """Runs a script that lasts so many seconds, and must then end; returns what it has printed."""
    with running(*parts, fresh=fresh) as process:
        # Not by communicate(): the pipes stay open as long as a process that is left has them.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DEADLINE_S + lasting)
        hangs = process.poll() is None
        if hangs:
            process.send_signal(signal.SIGABRT)  # it says where
            time.sleep(0.5)
            process.kill()
            process.wait()
        end_session(process.pid)
        out, err = process.communicate()
        how = "hangs" if hangs else "has failed"
        assert process.returncode == 0, f"the script {how}:\n{out}\n{err}"
        return out


def end_session(session):
    """Kills every process of a session, whatever group it is in and whatever its parent."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        pids = session_of(session)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError), _opened(pid) as process:
                if session_of(session, [pid]):  # it is no other that has its id by now
                    signal.pidfd_send_signal(process, signal.SIGKILL)
        time.sleep(0.01)
    raise AssertionError(f"processes are left: {session_of(session)}")


@contextlib.contextmanager
def _opened(pid):
    process = os.pidfd_open(pid)
    try:
        yield process
    finally:
        os.close(process)


def session_of(session, pids=None):
    """The processes of a session that have not ended, of these or of all."""
    found = []
    for pid in pids or filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ends meanwhile
            stat = Path("/proc", str(pid), "stat").read_text()
            state, _, _, its_session = stat.rpartition(")")[2].split()[:4]
            if int(its_session) == session and state not in "ZX":
                found.append(int(pid))
    return found

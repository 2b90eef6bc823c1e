"""A worker's process: a process of ``multiprocessing`` that this package starts and watches."""

from __future__ import annotations

import atexit
import errno
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import process
from typing import Any, NoReturn

from shmvec._core import Descriptor, fork
from shmvec._processes.output import flush_output

__all__ = ["WorkerProcess", "reap_child"]

SIGKILL_TIMEOUT_S = 10.0  # for a killed process to end; one that hangs in the kernel does not
_POLL_INTERVAL_S = 0.001
_UNKNOWN_EXIT_CODE = 255  # multiprocessing's exit code where it is unknown


Reap = Callable[[int, bool], int | None]  # reap_child, here or in a fork server


def reap_child(pid: int, kills_group: bool = False) -> int | None:
    """Waits for a child that has ended or was killed; returns its exit code.

    Args:
        pid: Its process id.
        kills_group: Whether what is left of its process group is killed first. Afterwards, another
            process may have its id.

    Returns:
        The exit code; None: it was waited for before, or hangs in the kernel.
    """
    deadline = time.monotonic() + SIGKILL_TIMEOUT_S
    with suppress(ChildProcessError):
        if kills_group and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_INTERVAL_S)
    return None


class ProcessHandle:
    """A running process, as the ``_popen`` that ``multiprocessing`` expects.

    Attributes:
        pid: Its process id.
        returncode: Its exit code; None while it runs.
        is_exit_code_known: Whether its exit code is known.
    """

    def __init__(self, pid: int, reap: Reap) -> None:
        """Opens the pidfd of a process.

        Args:
            pid: Its process id.
            reap: Reaps it; called in the process whose child it is: this one, or a fork server.

        Raises:
            OSError: This system has no pidfds, or forbids them.
        """
        self.pid = pid
        self.returncode: int | None = None
        self.is_exit_code_known = True
        self._reap = reap
        try:
            self._descriptor = Descriptor(os.pidfd_open, pid)
        except OSError as error:
            raise _explain_pidfd_error(error) from error

    @property
    def sentinel(self) -> int:
        """Its pidfd, which is readable once it has ended; -1 once released."""
        number: int = self._descriptor.number
        return number

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code, if the process has ended."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None, kills_group: bool = False) -> int | None:
        """Waits for the process to end; returns its exit code, None after ``timeout`` seconds."""
        if self.returncode is None and self.has_ended(timeout):
            code = self._reap(self.pid, kills_group)
            if self.returncode is None:  # another thread may have set it
                self.is_exit_code_known = code is not None
                self.returncode = code if code is not None else _UNKNOWN_EXIT_CODE
        return self.returncode

    def has_ended(self, timeout: float | None) -> bool:
        """Whether it ends within so many seconds. It is not reaped, so its id stays in use."""
        sentinel = self.sentinel  # read once, because another thread may release it
        if sentinel < 0:
            return True
        poll = select.poll()
        poll.register(sentinel, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))

    def send_signal(self, number: int) -> bool:
        """Sends the process a signal, if it runs.

        Returns:
            Whether this process may send it signals, which a change of its user forbids.
        """
        if self.returncode is None and self.sentinel >= 0:
            try:
                signal.pidfd_send_signal(self.sentinel, number)
            except ProcessLookupError:
                pass
            except PermissionError:
                return False
        return True

    def interrupt(self) -> None:
        """Sends SIGINT."""
        self.send_signal(signal.SIGINT)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Closes the pidfd; the exit code of an ended process is kept."""
        self._descriptor.close()


class WorkerProcess(process.BaseProcess):
    """A process of multiprocessing that is started in another way.

    A daemonic process may start it, and it may start processes itself. It ends with its parent by
    means of its own, which work even when the parent is killed.
    """

    _popen: ProcessHandle | None
    _config: dict[str, Any]
    _parent_pid: int
    _target: Any
    _args: Any
    _kwargs: Any

    def start_by(self, begin: Callable[[list[int]], object], reap: Reap = reap_child) -> bool:
        """Starts the process; ends it if a signal's handler interrupts this.

        Args:
            begin: Starts the process, and appends its id to a list. A process that was started and
                whose id was not appended must end by itself when its channel is closed.
            reap: Reaps the process.

        Returns:
            Whether it was started: whether ``begin`` has appended something.
        """
        pids: list[int] = []
        try:
            begin(pids)
            if pids:
                process._cleanup()  # type: ignore[attr-defined]
                self._popen = ProcessHandle(pids[0], reap)
                self._sentinel = self._popen.sentinel  # as BaseProcess.close() expects
                del self._target, self._args, self._kwargs
                process._children.add(self)  # type: ignore[attr-defined]
        except BaseException:
            if pids and self._popen is None:
                os.kill(pids[0], signal.SIGKILL)
                reap(pids[0], False)
            raise
        return bool(pids)

    def fork(self) -> None:
        """Starts the process by a fork of this one."""
        flush_output()  # else the fork would write it, too
        self.start_by(partial(fork, self.run_and_exit))

    def run_and_exit(self) -> NoReturn:
        """Runs the process in the fork that is to become it, and ends that fork."""
        code = 1

        def end() -> NoReturn:
            flush_output()
            os._exit(code)

        # Hooks run in reverse order: those of envs, then this one, which ends the process, so that
        # the parent's never run. The parent's are not cleared, since that would free what only they
        # refer to, such as clients of Ray.
        atexit.register(end)
        try:
            code = self.run_here()
        finally:
            atexit._run_exitfuncs()
            end()

    def run_here(self) -> int:
        """Runs the process in this one, which becomes it; returns its exit code."""
        # multiprocessing.parent_process() uses the descriptor.
        parent = os.pidfd_open(self._parent_pid)
        code: int = self._bootstrap(parent_sentinel=parent)  # type: ignore[attr-defined]
        return code

    @property
    def sentinel(self) -> int:
        """Its pidfd, readable once it has ended; -1 before its start and after its release."""
        return self._popen.sentinel if self._popen is not None else -1

    def has_ended(self, timeout: float | None = 0.0) -> bool:
        """Whether the process ends within so many seconds, or never ran. It is not reaped."""
        return self._popen is None or self._popen.has_ended(timeout)

    def reap_with_group(self) -> None:
        """Reaps the process if it has ended, and first kills what is left of its process group."""
        if self._popen is not None:
            self._popen.wait(0.0, kills_group=True)

    @property
    def known_exitcode(self) -> int | None:
        """The exit code of an ended process; None: unknown."""
        code: int | None = self.exitcode
        return code if self._popen is not None and self._popen.is_exit_code_known else None

    def send_signal(self, number: int) -> bool:
        """Sends it a signal, if it runs; returns whether this process may."""
        return self._popen is None or self._popen.send_signal(number)

    def release(self) -> None:
        """Reaps the process if it has ended, and gives it up."""
        if self._popen is not None:
            self._popen.poll()
        self.abandon()

    def abandon(self) -> None:
        """Closes its pidfd; when this process ends, multiprocessing does not wait for it."""
        process._children.discard(self)  # type: ignore[attr-defined]
        if self._popen is not None:
            self._popen.close()

    def run(self) -> None:
        """Runs in the new process."""
        self._config["daemon"] = False
        super().run()


def _explain_pidfd_error(error: OSError) -> OSError:
    if error.errno in (errno.ENOSYS, errno.EPERM):
        return OSError(
            error.errno,
            "workers need pidfd_open, which this system lacks (Linux 5.3 and newer have it) or "
            "forbids (a sandbox's seccomp filter). num_workers=0 steps the envs in this process",
        )
    return error

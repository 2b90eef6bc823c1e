"""A worker's process, as ``multiprocessing`` shows its processes, but started by us."""

from __future__ import annotations

import atexit
import errno
import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from itertools import starmap
from multiprocessing import process, util
from typing import Any, NoReturn, Protocol

from shmvec._processes.signals import close_all, uninterrupted

__all__ = ["WorkerProcess", "at_once", "child_status", "end_child_group"]

_UNKNOWN = 255  # what multiprocessing says is the exit code where nobody knows it


def child_status(pid: int) -> int | None:
    """The exit code of a child that has ended; it is waited for. None: it was already."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def end_child_group(pid: int) -> None:
    """Kills what is left of the process group of a child that has ended.

    If somebody has waited for it, its number, and so the group's, may be somebody else's: nothing.
    """
    with suppress(ChildProcessError, ProcessLookupError, PermissionError):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            os.killpg(pid, signal.SIGKILL)


class Keeper(Protocol):
    """Whose child a process is, as the system sees it: ours, or a fork server's."""

    def status(self, pid: int) -> int | None:
        """Waits for it once it has ended, and says its exit code; None: nobody knows."""

    def end_group(self, pid: int) -> None:
        """Kills what is left of its process group, if it has ended and was not waited for."""


class _Ours:
    status = staticmethod(child_status)
    end_group = staticmethod(end_child_group)


def at_once(function: Callable[..., Any], *arguments: Any) -> None:
    """Calls a function, and appends what it returns to the last argument, a list.

    Both in one bytecode: what a signal's handler raises comes before or after that.
    """
    *given, found = arguments
    found.extend(starmap(function, [given]))


class Handle:
    """What ``multiprocessing`` asks about a process: its ``_popen``.

    Attributes:
        pid: Its number.
        sentinel: Its pidfd, which tells of its end; -1 once released.
        returncode: Its exit code; None while it runs.
        known: Whether that is known.
    """

    def __init__(self, pid: int, keeper: Keeper) -> None:
        """Watches over a process.

        Args:
            pid: Its number.
            keeper: Whose child it is.

        Raises:
            OSError: This system has no pidfds, or forbids them.
        """
        self.pid = pid
        self.returncode: int | None = None
        self.known = True
        self._keeper = keeper
        self._unclosed: list[int] = []
        try:
            at_once(os.pidfd_open, pid, self._unclosed)
            self.sentinel = self._unclosed[0]
        except OSError as error:
            raise _explained(error) from error

    def __del__(self) -> None:
        self.release()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Its exit code, if it has ended."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for its end, and says its exit code; None after ``timeout`` seconds."""
        if self.returncode is None and self.has_ended(timeout):
            code = self._keeper.status(self.pid)
            if self.returncode is None:  # another thread has asked, too
                self.known = code is not None
                self.returncode = code if code is not None else _UNKNOWN
        return self.returncode

    def has_ended(self, timeout: float | None) -> bool:
        """Whether it ends within so many seconds. It is not waited for: its number stays its."""
        sentinel = self.sentinel  # once: another thread may release it meanwhile
        if sentinel < 0:
            return True
        poll = select.poll()
        poll.register(sentinel, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))

    def send_signal(self, number: int) -> None:
        """Sends it a signal, if it runs."""
        if self.returncode is None and self.sentinel >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.sentinel, number)

    def end_group(self) -> None:
        """Kills what is left of its process group, if it has ended and was not waited for."""
        if self.returncode is None:
            self._keeper.end_group(self.pid)

    def interrupt(self) -> None:
        """Sends SIGINT."""
        self.send_signal(signal.SIGINT)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def release(self) -> None:
        """Closes the descriptor; of what has ended the exit code is kept."""
        self.sentinel = -1
        close_all(self._unclosed)

    close = release


class WorkerProcess(process.BaseProcess):
    """A process of multiprocessing's in all that it shows and does, but for how it is started.

    It may be started by a daemonic process, and may start processes itself: it ends with its
    parent by other means than multiprocessing's, which work also when the parent is killed.
    """

    _popen: Handle | None
    _config: dict[str, Any]
    _parent_pid: int
    _target: Any
    _args: Any
    _kwargs: Any

    def start_by(self, begin: Callable[[list[int]], object], keeper: Keeper | None = None) -> bool:
        """Starts it; if that is broken off, by what a signal's handler raises, it is no more.

        Args:
            begin: Appends its number to a list; 0 in the process itself, which then runs.
            keeper: Whose child it is then; None: ours.

        Returns:
            Whether it was started: ``begin`` has appended something.
        """
        numbers: list[int] = []
        keeper = keeper or _Ours()
        try:
            begin(numbers)
            if numbers == [0]:
                self.run_and_exit()
            if numbers:
                self.started(numbers[0], keeper)
        except BaseException:
            if numbers == [0]:
                os._exit(1)  # or it would go on as the program does
            if numbers and self._popen is None:
                os.kill(numbers[0], signal.SIGKILL)
                keeper.status(numbers[0])
            raise
        return bool(numbers)

    def fork(self) -> None:
        """Starts it by a fork of this process."""
        util._flush_std_streams()  # type: ignore[attr-defined]

        def begin(numbers: list[int]) -> None:
            with uninterrupted():  # Python drops what is raised in hooks that run around a fork
                at_once(os.fork, numbers)

        self.start_by(begin)

    def run_and_exit(self) -> NoReturn:
        """Runs, in a fork that becomes this process."""
        code = 1

        def end() -> NoReturn:
            util._flush_std_streams()  # type: ignore[attr-defined]
            os._exit(code)

        # An env's hooks are run, before this one; and after it none of the parent's, which are not
        # cleared: that would free here what only they hold, clients of Ray's for example.
        atexit.register(end)
        try:
            code = self.run_here()
        finally:
            atexit._run_exitfuncs()
            end()

    def run_here(self) -> int:
        """Runs in this process, which becomes it; returns its exit code."""
        # The descriptor is for multiprocessing.parent_process().
        parent = os.pidfd_open(self._parent_pid)
        code: int = self._bootstrap(parent_sentinel=parent)  # type: ignore[attr-defined]
        return code

    def started(self, pid: int, keeper: Keeper) -> None:
        """Notes that it runs; the arguments are those of ``Handle``."""
        process._cleanup()  # type: ignore[attr-defined]
        self._popen = Handle(pid, keeper)
        self._sentinel = self._popen.sentinel  # as close() expects
        del self._target, self._args, self._kwargs
        process._children.add(self)  # type: ignore[attr-defined]

    @property
    def sentinel(self) -> int:
        """Ready when the process has ended; -1 after the vector env has closed it."""
        return self._popen.sentinel if self._popen is not None else -1

    def has_ended(self, timeout: float | None = 0.0) -> bool:
        """Whether it ends within so many seconds, or never ran. It is not waited for."""
        return self._popen is None or self._popen.has_ended(timeout)

    def end_group(self) -> None:
        """Kills what is left of its process group, if it has ended and was not waited for."""
        if self._popen is not None:
            self._popen.end_group()

    @property
    def known_exitcode(self) -> int | None:
        """The exit code of one that has ended; None: nobody knows it."""
        code: int | None = self.exitcode
        return code if self._popen is not None and self._popen.known else None

    def send_signal(self, number: int) -> None:
        """Sends it a signal, if it runs."""
        if self._popen is not None:
            self._popen.send_signal(number)

    def release(self) -> None:
        """Waits for it, which has ended if it ever ran, and closes its descriptor."""
        if self._popen is not None:
            self.join()
        self.close_here()

    def close_here(self) -> None:
        """Closes this process's descriptor of it."""
        if self._popen is not None:
            self._popen.release()

    def run(self) -> None:
        """Runs in the new process."""
        self._config["daemon"] = False
        super().run()


def _explained(error: OSError) -> OSError:
    if error.errno in (errno.ENOSYS, errno.EPERM):
        return OSError(
            error.errno,
            "workers are watched over by pidfd_open, which this system lacks (it is there from "
            "Linux 5.3) or forbids (a sandbox's seccomp filter). num_workers=0 steps the envs in "
            "this process",
        )
    return error

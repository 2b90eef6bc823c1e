"""A worker's process: a process of ``multiprocessing`` that this package starts and watches."""

from __future__ import annotations

import atexit
import errno
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import starmap
from multiprocessing import process, util
from typing import Any, NoReturn, Protocol

from shmvec._core import Descriptor

__all__ = ["WorkerProcess", "at_once", "child_status", "end_child_group"]

_KILLED_S = 10.0  # for a killed process to end; one that hangs in the kernel does not
_PAUSE_S = 0.001
_UNKNOWN = 255  # multiprocessing's exit code where it is unknown


def child_status(pid: int) -> int | None:
    """Waits for a child that has ended or was killed; returns its exit code.

    None: it was waited for before, or it hangs in the kernel.
    """
    hangs = time.monotonic() + _KILLED_S
    with suppress(ChildProcessError):
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > hangs:
                break
            time.sleep(_PAUSE_S)
    return None


def end_child_group(pid: int) -> None:
    """Kills what is left of the process group of a child that has ended.

    Does nothing if the child was waited for before: its id may be another process's by now.
    """
    with suppress(ChildProcessError, ProcessLookupError, PermissionError):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            os.killpg(pid, signal.SIGKILL)


class Keeper(Protocol):
    """The owner of a process, whose child it is: this process, or a fork server."""

    def status(self, pid: int) -> int | None:
        """Waits for an ended process; returns its exit code, or None if it is unknown."""

    def end_group(self, pid: int) -> None:
        """Kills what is left of its process group, if it has ended and was not waited for yet."""


class _Ours:
    status = staticmethod(child_status)
    end_group = staticmethod(end_child_group)


def at_once(function: Callable[..., Any], *arguments: Any) -> None:
    """Calls a function, and appends what it returns to the last argument, a list.

    Both happen in one bytecode, so that a signal's handler runs before or after both.
    """
    *given, found = arguments
    found.extend(starmap(function, [given]))


class Handle:
    """A running process, as the ``_popen`` that ``multiprocessing`` expects.

    Attributes:
        pid: Its process id.
        returncode: Its exit code; None while it runs.
        known: Whether its exit code is known.
    """

    def __init__(self, pid: int, keeper: Keeper) -> None:
        """Opens the pidfd of a process.

        Args:
            pid: Its process id.
            keeper: The owner whose child it is.

        Raises:
            OSError: This system has no pidfds, or forbids them.
        """
        self.pid = pid
        self.returncode: int | None = None
        self.known = True
        self._keeper = keeper
        try:
            self._descriptor = Descriptor(os.pidfd_open, pid)
        except OSError as error:
            raise _explained(error) from error

    @property
    def sentinel(self) -> int:
        """Its pidfd, which is readable once it has ended; -1 once released."""
        number: int = self._descriptor.number
        return number

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code, if the process has ended."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for the process to end; returns its exit code, None after ``timeout`` seconds."""
        if self.returncode is None and self.has_ended(timeout):
            code = self._keeper.status(self.pid)
            if self.returncode is None:  # else another thread has set it
                self.known = code is not None
                self.returncode = code if code is not None else _UNKNOWN
        return self.returncode

    def has_ended(self, timeout: float | None) -> bool:
        """Whether it ends within so many seconds. It is not reaped: its id stays taken."""
        sentinel = self.sentinel  # once: another thread may release it meanwhile
        if sentinel < 0:
            return True
        poll = select.poll()
        poll.register(sentinel, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))

    def send_signal(self, number: int) -> bool:
        """Sends the process a signal, if it runs.

        Returns:
            Whether this process may send it one: not if it has changed its user since the start.
        """
        if self.returncode is None and self.sentinel >= 0:
            try:
                signal.pidfd_send_signal(self.sentinel, number)
            except ProcessLookupError:
                pass
            except PermissionError:
                return False
        return True

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
        """Closes the pidfd; the exit code of an ended process is kept."""
        self._descriptor.close()

    close = release


class WorkerProcess(process.BaseProcess):
    """A process of multiprocessing that is started in another way.

    A daemonic process may start it, and it may start processes itself: it ends with its parent by
    other means than multiprocessing's, which work even when the parent is killed.
    """

    _popen: Handle | None
    _config: dict[str, Any]
    _parent_pid: int
    _target: Any
    _args: Any
    _kwargs: Any

    def start_by(self, begin: Callable[[list[int]], object], keeper: Keeper | None = None) -> bool:
        """Starts the process; kills it if a signal's handler interrupts this.

        Args:
            begin: Appends its process id to a list; 0 in the process itself, which then runs.
            keeper: The owner whose child it becomes; None: this process.

        Returns:
            Whether it was started: whether ``begin`` has appended something.
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
                os._exit(1)  # a fork must never go on with the program's code
            if numbers and self._popen is None:
                os.kill(numbers[0], signal.SIGKILL)
                keeper.status(numbers[0])
            raise
        return bool(numbers)

    def fork(self) -> None:
        """Starts the process by a fork of this one."""
        util._flush_std_streams()  # type: ignore[attr-defined]
        self.start_by(_fork)

    def run_and_exit(self) -> NoReturn:
        """Runs the process in the fork that is to become it, and ends that fork."""
        code = 1

        def end() -> NoReturn:
            util._flush_std_streams()  # type: ignore[attr-defined]
            os._exit(code)

        # Exit hooks of envs run before this one, which ends the process: the parent's never run.
        # They are not cleared: that would free what only they hold, clients of Ray for example.
        atexit.register(end)
        try:
            code = self.run_here()
        finally:
            atexit._run_exitfuncs()
            end()

    def run_here(self) -> int:
        """Runs the process in this one, which becomes it; returns its exit code."""
        # The descriptor is for multiprocessing.parent_process().
        parent = os.pidfd_open(self._parent_pid)
        code: int = self._bootstrap(parent_sentinel=parent)  # type: ignore[attr-defined]
        return code

    def started(self, pid: int, keeper: Keeper) -> None:
        """Notes that the process runs; the arguments are those of ``Handle``."""
        process._cleanup()  # type: ignore[attr-defined]
        self._popen = Handle(pid, keeper)
        self._sentinel = self._popen.sentinel  # as close() expects
        del self._target, self._args, self._kwargs
        process._children.add(self)  # type: ignore[attr-defined]

    @property
    def sentinel(self) -> int:
        """Its pidfd, readable once it has ended; -1 before its start and after its release."""
        return self._popen.sentinel if self._popen is not None else -1

    def has_ended(self, timeout: float | None = 0.0) -> bool:
        """Whether the process ends within so many seconds, or never ran. It is not reaped."""
        return self._popen is None or self._popen.has_ended(timeout)

    def end_group(self) -> None:
        """Kills what is left of its process group, if it has ended and was not waited for."""
        if self._popen is not None:
            self._popen.end_group()

    @property
    def known_exitcode(self) -> int | None:
        """The exit code of an ended process; None: unknown."""
        code: int | None = self.exitcode
        return code if self._popen is not None and self._popen.known else None

    def send_signal(self, number: int) -> bool:
        """Sends it a signal, if it runs; returns whether this process may."""
        return self._popen is None or self._popen.send_signal(number)

    def release(self) -> None:
        """Reaps the process, which has ended if it ever ran, and closes its pidfd."""
        if self._popen is not None:
            self.join()
        self.close_here()

    def close_here(self) -> None:
        """Closes this process's pidfd of it."""
        if self._popen is not None:
            self._popen.release()

    def run(self) -> None:
        """Runs in the new process."""
        self._config["daemon"] = False
        super().run()


def _fork(numbers: list[int]) -> None:
    """Forks, and appends the process id; Ctrl-C comes later.

    Python runs hooks around a fork, and discards what a signal's handler raises in them.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        at_once(os.fork, numbers)
        return
    forking, held = [True], list[tuple[int, Any]]()

    # Another signal's exception may leave this handler in place; after the fork it does no harm.
    def later(*arguments: Any) -> None:
        if forking:
            held.append(arguments)
        else:
            before(*arguments)

    try:
        signal.signal(signal.SIGINT, later)
        at_once(os.fork, numbers)
    finally:
        forking.clear()
        signal.signal(signal.SIGINT, before)
    if held:
        before(*held[0])


def _explained(error: OSError) -> OSError:
    if error.errno in (errno.ENOSYS, errno.EPERM):
        return OSError(
            error.errno,
            "workers need pidfd_open, which this system lacks (Linux 5.3 and newer have it) or "
            "forbids (a sandbox's seccomp filter). num_workers=0 steps the envs in this process",
        )
    return error

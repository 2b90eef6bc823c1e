"""Fork servers, as their parent sees them: interpreters that have imported what workers need.

A worker of theirs costs a fork of a small process without threads, whatever the parent has imported
and started. There is one for each set of modules, environment variables and places where modules
are, kept for the next vector env that needs the same.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from socket import AF_UNIX, SOCK_SEQPACKET, send_fds, socket, socketpair

from shmvec._processes.interpreter import (
    FORK,
    GROUP,
    IMPORT,
    MOST_REQUESTED,
    REAP,
    STALE,
    start_interpreter,
)
from shmvec._processes.worker_process import at_once

__all__ = ["ForkServer", "fork_server", "servers"]

_MOST_SERVERS = 4
_VOLATILE = ("PYTEST_CURRENT_TEST",)  # says nothing to what is imported
_STOP_S = 1.0
_SLOW_S = 1.0  # without an answer: it imports, or was stopped
_LONGEST = 64  # bytes of an answer

_servers: list[ForkServer] = []  # those that are kept, the one that was used last at the end
_running: weakref.WeakSet[ForkServer] = weakref.WeakSet()


class ForkServer:
    """One of them. It ends when nothing refers to it, or with this process.

    Attributes:
        pid: Its process's number.
        modules: What it has imported.
        environ: Environment variables that it began with, and has.
        path: Where it looks for modules.
        usable: Whether it may be asked for workers.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts it; it imports the modules meanwhile."""
        mine, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        with theirs:
            try:
                number = theirs.fileno()
                arguments = (number, os.getpid(), list(modules))
                server = start_interpreter("serve", arguments, [number], environ)
            except BaseException:
                mine.close()
                raise
        self._socket = mine
        self._server = server
        self.pid = server.pid
        self.usable = True
        self.modules, self.environ, self.path = set(modules), dict(environ), list(sys.path)
        # After the workers of vector envs that are open at exit have ended.
        Finalize(self, _stop, (mine, server), exitpriority=-100)
        _running.add(self)

    def fork(self, channel: int, numbers: list[int]) -> None:
        """Has it fork a worker.

        Args:
            channel: The worker's end of its control channel.
            numbers: The worker's number is appended. If none is, this server will fork no more: it
                has ended, or files that it has imported have changed since.
        """
        answer = self._ask(FORK, [channel, 0, 1, 2])
        self.usable = answer not in (b"", STALE)
        if not self.usable:
            _drop(self)  # it goes with the last of its workers
        else:
            numbers.append(int(answer))

    def learn(self, modules: Sequence[str]) -> None:
        """Has it import modules before it forks once more; this does not wait."""
        names = " ".join(modules).encode()[: MOST_REQUESTED - len(IMPORT)]
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended
            self._socket.sendall(IMPORT + names)
        self.modules.update(modules)

    def status(self, pid: int) -> int | None:
        """The exit code of a worker that has ended; its number is free then. None: unknown."""
        answer = self._ask(REAP + str(pid).encode(), [])
        return int(answer) if answer else None

    def end_group(self, pid: int) -> None:
        """Kills what is left of the process group of a worker that has ended."""
        self._ask(GROUP + str(pid).encode(), [])

    def fileno(self) -> int:
        """The descriptor of the socket to it."""
        return self._socket.fileno()

    def disown(self) -> None:
        """Lets go of it: this process is a fork of the one whose it is."""
        self._socket.close()
        self._server.returncode = 0  # it is no child of this process
        self.usable = False

    def _ask(self, request: bytes, descriptors: Sequence[int]) -> bytes:
        """Its answer; empty if it has ended."""
        # A pipe for each answer: one that nobody waits for any more is not taken for another's.
        found: list[bytes] = []
        answer, reply = os.pipe()
        try:
            try:
                send_fds(self._socket, [request], [reply, *descriptors])
            except (BrokenPipeError, ConnectionResetError):
                return b""
            finally:
                os.close(reply)
            self._wait_for(answer)
            at_once(os.read, answer, _LONGEST, found)
        except BaseException:
            # Broken off when the number was there: nobody else will hear of that worker.
            if request == FORK and found and found[0].isdigit():
                os.kill(int(found[0]), signal.SIGKILL)
                self._ask(REAP + found[0], [])
            raise
        finally:
            os.close(answer)
        return found[0]

    def _wait_for(self, answer: int) -> None:
        """Waits for an answer, or the server's end. If somebody has stopped it, it goes on."""
        poll = select.poll()
        poll.register(answer, select.POLLIN)
        while not poll.poll(1000 * _SLOW_S):
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)


def fork_server(modules: Sequence[str], environ: Mapping[str, str], no_others: bool) -> ForkServer:
    """A server that is kept, or a new one.

    Args:
        modules: What it has imported.
        environ: What it had as environment variables when it began.
        no_others: Whether it must have been asked for no other modules.
    """
    fixed = _lasting(environ)
    for server in reversed(_servers):
        enough = server.modules == set(modules) if no_others else server.modules >= set(modules)
        # What was appended since hides nothing that it has found.
        same = _lasting(server.environ) == fixed and server.path == sys.path[: len(server.path)]
        if server.usable and enough and same:
            # To the end. In this order, lest a signal in between leaves it out: it would run on
            # beside the one that takes its place.
            _servers.append(server)
            _drop(server)
            break
    else:
        server = ForkServer(modules, environ)
        _servers.append(server)
    del _servers[:-_MOST_SERVERS]
    return server


def _lasting(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that may matter to what is imported."""
    return {name: value for name, value in environ.items() if name not in _VOLATILE}


def servers() -> list[ForkServer]:
    """Those that are kept."""
    return list(_servers)


def _drop(server: ForkServer) -> None:
    with suppress(ValueError):  # another thread has done so
        _servers.remove(server)


def _stop(mine: socket, server: subprocess.Popen[bytes]) -> None:
    mine.close()
    try:
        server.wait(_STOP_S)
    except subprocess.TimeoutExpired:  # it is importing
        server.kill()
        server.wait()


def _disown_all() -> None:
    for server in list(_running):
        server.disown()
    _running.clear()
    _servers.clear()


os.register_at_fork(after_in_child=_disown_all)

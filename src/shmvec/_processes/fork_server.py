"""Fork servers: interpreters that have imported what workers need, and fork workers.

A worker then costs a fork of a small process without threads, whatever the parent has imported and
started. A server is kept for the next vector env that needs the same modules, environment variables
and module search path, while the program has the same user, limits and umask, which workers inherit
from the server.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import subprocess
import sys
import sysconfig
import traceback
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from multiprocessing import util
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET, recv_fds, send_fds, socket, socketpair
from threading import RLock
from typing import Any

from shmvec._core import opened_pipe
from shmvec._processes.interpreter import become_worker, start_interpreter
from shmvec._processes.libraries import fresh_openmp, loaded_openmp
from shmvec._processes.preloading import import_ahead, num_threads
from shmvec._processes.worker import Orphaned
from shmvec._processes.worker_process import at_once, child_status, end_child_group

__all__ = ["ForkServer", "fork_server", "serve", "servers"]

_MOST_SERVERS = 4
_VOLATILE = ("PYTEST_CURRENT_TEST",)  # has no effect on imports
_STOP_S = 1.0
_SLOW_S = 1.0  # without an answer for so long, the server imports, or was stopped
_LONGEST = 64  # bytes of an answer

_FORK, _IMPORT, _REAP, _GROUP, _STALE = b"fork", b"import", b"reap", b"group", b"stale"
_MOST_REQUESTED = 100_000  # bytes of a request; a packet of 200 KiB is too large
_MOST_DESCRIPTORS = 5  # of a request: the pipe for the answer, the channel, the standard streams

_choosing = RLock()  # held while a server is chosen, or started: threads that come at once share it
_servers: list[ForkServer] = []  # the servers that are kept, the most recently used last
_running: weakref.WeakSet[ForkServer] = weakref.WeakSet()


class ForkServer:
    """A fork server. It ends when nothing refers to this object, or with this process.

    Attributes:
        pid: Its process id.
        modules: The modules that it has imported.
        environ: The environment variables that it was started with.
        path: Its module search path.
        surroundings: The user, limits and umask that it has inherited; see ``_surroundings``.
        usable: Whether it can fork more workers.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts the server; does not wait until it has imported the modules."""
        mine, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        with theirs:
            try:
                number = theirs.fileno()
                arguments = (number, os.getpid(), list(modules))
                server = start_interpreter(serve, arguments, [number], environ)
            except BaseException:
                mine.close()
                raise
        self.surroundings = _surroundings()
        self._socket = mine
        self._server = server
        self.pid = server.pid
        self.usable = True
        self.modules, self.environ, self.path = set(modules), dict(environ), list(sys.path)
        # At exit, servers end after the workers of vector envs that are still open.
        util.Finalize(self, _stop, (mine, server), exitpriority=-100)
        _running.add(self)

    def fork(self, channel: int, numbers: list[int]) -> None:
        """Has the server fork a worker.

        Args:
            channel: The worker's end of its control channel.
            numbers: The list to which the worker's process id is appended. If none is, this server
                cannot be used any more: it has ended, or files that it has imported have changed.
        """
        answer = self._ask(_FORK, [channel, 0, 1, 2])
        self.usable = answer not in (b"", _STALE)
        if not self.usable:
            _drop(self)  # the server ends with the last of its workers
        else:
            numbers.append(int(answer))

    def learn(self, modules: Sequence[str]) -> None:
        """Has the server import modules before its next fork; does not wait."""
        names = " ".join(modules).encode()[: _MOST_REQUESTED - len(_IMPORT)]
        with suppress(BrokenPipeError, ConnectionResetError):  # the server has ended
            self._socket.sendall(_IMPORT + names)
        self.modules.update(modules)

    def status(self, pid: int) -> int | None:
        """The exit code of an ended worker, which frees its process id; None: unknown."""
        answer = self._ask(_REAP + str(pid).encode(), [])
        return int(answer) if answer else None

    def end_group(self, pid: int) -> None:
        """Kills what is left of an ended worker's process group."""
        self._ask(_GROUP + str(pid).encode(), [])

    def fileno(self) -> int:
        """The descriptor of the socket to the server."""
        return self._socket.fileno()

    def disown(self) -> None:
        """Gives up the server, in a process that is a fork of its owner."""
        self._socket.close()
        self._server.returncode = 0  # the server is no child of this process
        self.usable = False

    def _ask(self, request: bytes, descriptors: Sequence[int]) -> bytes:
        """The server's answer to a request; empty if the server has ended."""
        # A pipe for each answer: an answer to an interrupted request is not taken for another's.
        found: list[bytes] = []
        answer, reply = opened_pipe()
        try:
            try:
                send_fds(self._socket, [request], [reply.number, *descriptors])
            except (BrokenPipeError, ConnectionResetError):
                return b""
            finally:
                reply.close()
            self._wait_for(answer.number)
            at_once(os.read, answer.number, _LONGEST, found)
        except BaseException:
            # Interrupted after the id had come: only this code knows of the worker, and ends it.
            if request == _FORK and found and found[0].isdigit():
                os.kill(int(found[0]), signal.SIGKILL)
                self._ask(_REAP + found[0], [])
            raise
        finally:
            answer.close()
        return found[0]

    def _wait_for(self, answer: int) -> None:
        """Waits for an answer, or the server's end; has a stopped server go on."""
        poll = select.poll()
        poll.register(answer, select.POLLIN)
        while not poll.poll(1000 * _SLOW_S):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGCONT)


def fork_server(modules: Sequence[str], environ: Mapping[str, str], no_others: bool) -> ForkServer:
    """A kept server that fits, or a new one.

    Args:
        modules: The modules that it must have imported.
        environ: The environment variables that it must have been started with.
        no_others: Whether it must have no other modules.
    """
    fixed, surroundings = _lasting(environ), _surroundings()
    with _choosing:
        for server in reversed(_servers):
            enough = server.modules == set(modules) if no_others else server.modules >= set(modules)
            # Entries appended to sys.path since then hide no module that it has found.
            same = _lasting(server.environ) == fixed and server.path == sys.path[: len(server.path)]
            if server.usable and enough and same and server.surroundings == surroundings:
                # Moved to the end: appended first, lest an exception in between lose it.
                _servers.append(server)
                _drop(server)
                break
        else:
            server = ForkServer(modules, environ)
            _servers.append(server)
        del _servers[:-_MOST_SERVERS]
        return server


def _lasting(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that may affect imports."""
    return {name: value for name, value in environ.items() if name not in _VOLATILE}


def _surroundings() -> tuple[object, ...]:
    """What child processes inherit: user and groups, limits and umask."""
    limits = [
        resource.getrlimit(number)
        for name, number in sorted(vars(resource).items())
        if name.startswith("RLIMIT_")
    ]
    status = Path("/proc/self/status").read_text("utf-8", "replace").splitlines()
    umask = [line for line in status if line.startswith("Umask:")]  # os.umask would change it
    return os.getresuid(), os.getresgid(), sorted(os.getgroups()), limits, umask


def servers() -> list[ForkServer]:
    """The servers that are kept."""
    return list(_servers)


def _drop(server: ForkServer) -> None:
    with suppress(ValueError):  # another thread has removed it
        _servers.remove(server)


def _stop(mine: socket, server: subprocess.Popen[bytes]) -> None:
    mine.close()
    try:
        server.wait(_STOP_S)
    except subprocess.TimeoutExpired:  # it is importing
        # This process may have changed its user, and the server ends itself; or it hangs in the
        # kernel.
        with suppress(PermissionError, subprocess.TimeoutExpired):
            server.kill()
            server.wait(_STOP_S)


def _disown_all() -> None:
    global _choosing
    _choosing = RLock()  # another thread may have held it
    for server in list(_running):
        server.disown()
    _running.clear()
    _servers.clear()


os.register_at_fork(after_in_child=_disown_all)


# ---- in the server ----------------------------------------------------------------------------


def serve(descriptor: int, parent: int, modules: Collection[str]) -> None:
    """Imports modules once, and forks workers that have them until the parent is gone.

    A request is a packet with descriptors, the first of which is a pipe for the answer. Modules
    that cannot be imported are left to the workers; so are those that start threads, which no fork
    survives.

    Args:
        descriptor: A socket of packets.
        parent: Process id of the parent.
        modules: The names of the modules.
    """
    os.set_inheritable(descriptor, False)  # programs that modules execute must not inherit it
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    # A program that ignores SIGCHLD passes that on, which would lose the workers' exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with fresh_openmp():
        files = _imported(modules, descriptor, quiet=False)
        # Output of later imports is discarded: a worker that has imported them has printed it.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.close(nothing)
        _serve(descriptor, parent, files)


def _serve(descriptor: int, parent: int, files: dict[str, int]) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    with suppress(ProcessLookupError):
        poll.register(os.pidfd_open(parent), select.POLLIN)
    with socket(fileno=descriptor) as connection:
        while [number for number, _ in poll.poll()] == [descriptor]:
            request, descriptors, _, _ = recv_fds(connection, _MOST_REQUESTED, _MOST_DESCRIPTORS)
            if not request:
                return
            if request.startswith(_IMPORT):
                files |= _imported(request[len(_IMPORT) :].decode().split(), descriptor)
                continue
            if len(descriptors) < (_MOST_DESCRIPTORS if request == _FORK else 1):
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                message = f"shmvec's fork server ends: too many open files, at most {limit}\n"
                os.write(2, message.encode())
                return
            reply, *others = descriptors
            forked = 0
            if request == _FORK and files == {name: _changed(name) for name in files}:
                forked = _forked(reply, others, connection, parent)
                answer = b"%d" % forked
            elif request == _FORK:
                answer = _STALE
            elif request.startswith(_REAP):
                status = child_status(int(request[len(_REAP) :]))
                answer = b"" if status is None else b"%d" % status
            else:
                end_child_group(int(request[len(_GROUP) :]))
                answer = _GROUP
            try:
                os.write(reply, answer)
            except BrokenPipeError:  # the parent has stopped waiting
                if forked:  # and will never ask for the exit code of this worker
                    os.kill(forked, signal.SIGKILL)
                    child_status(forked)
            for number in descriptors:
                os.close(number)


def _imported(modules: Collection[str], descriptor: int, quiet: bool = True) -> dict[str, int]:
    """Imports modules; returns the files of all loaded modules, and when they were edited.

    If a module starts threads, this process replaces itself by a new interpreter, without that
    module and without those that it was asked for after its start.
    """
    refused = sys.argv[1:]
    before = num_threads()
    with _noting_sources() as read:
        for name in modules:
            if name in refused:
                continue
            import_ahead([name], quiet)
            if num_threads() > before:
                os.set_inheritable(descriptor, True)
                os.execv(sys.executable, [*sys.orig_argv, name])
    loaded_openmp()
    util._flush_std_streams()  # type: ignore[attr-defined]  # else each worker would do so
    gc.collect()
    gc.freeze()  # collections in workers must not touch, and so copy, the pages
    return {name: read.get(name, changed) for name, changed in _sources()}


@contextmanager
def _noting_sources() -> Iterator[Mapping[str, int]]:
    """A context that notes the files of modules imported inside, and when they were edited."""
    read: dict[str, int] = {}
    original = SourceFileLoader.path_stats

    def path_stats(self: SourceFileLoader, path: str) -> Mapping[str, Any]:
        read[path] = _changed(path)
        return original(self, path)

    SourceFileLoader.path_stats = path_stats  # type: ignore[method-assign]
    try:
        yield read
    finally:
        SourceFileLoader.path_stats = original  # type: ignore[method-assign]


def _sources() -> Iterator[tuple[str, int]]:
    """Files of modules that may be edited while this process runs, and their last edits."""
    paths = sysconfig.get_paths()
    fixed = tuple(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    for module in list(sys.modules.values()):
        name = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(name, str) and not name.startswith(fixed):
            yield name, _changed(name)


def _changed(name: str) -> int:
    try:
        return os.stat(name).st_mtime_ns
    except OSError:
        return 0


def _forked(reply: int, descriptors: Sequence[int], connection: socket, parent: int) -> int:
    """Forks a worker; returns its process id."""
    pid = os.fork()
    if pid > 0:
        return pid
    try:
        connection.close()
        os.close(reply)
        channel, *streams = descriptors
        for stream, number in enumerate(streams):
            os.dup2(number, stream)
            os.close(number)
        become_worker(channel, parent).run_and_exit()
    except Orphaned:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)

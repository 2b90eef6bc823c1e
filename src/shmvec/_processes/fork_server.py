"""Fork servers: interpreters that have imported what workers need, and fork workers.

So a worker costs a fork of a small process without threads, whatever the parent has imported and
started. A server is kept for the next vector env that needs the same modules, environment variables
and module search path. Workers inherit user, limits and umask from the server, so a program that
changes these gets another server.
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
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import util
from socket import AF_UNIX, SOCK_SEQPACKET, recv_fds, send_fds, socket, socketpair
from threading import RLock

from shmvec._core import fork, open_pipe
from shmvec._cores import process_status
from shmvec._processes.interpreter import become_worker, start_interpreter
from shmvec._processes.output import flush_output
from shmvec._processes.preloading import preimport
from shmvec._processes.worker import Orphaned
from shmvec._processes.worker_process import reap_child

__all__ = ["ForkServer", "fork_server", "serve", "servers"]

_MAX_SERVERS = 4
_IGNORED_VARIABLES = ("PYTEST_CURRENT_TEST",)  # they have no effect on imports
_STOP_TIMEOUT_S = 1.0
_CONTINUE_INTERVAL_S = 1.0  # between two SIGCONT to a server that may have been stopped
_MAX_ANSWER_BYTES = 64

_FORK, _IMPORT, _REAP, _STALE = b"fork", b"import", b"reap", b"stale"
_MAX_REQUEST_BYTES = 100_000  # a packet of 200 KiB is too large
_MAX_DESCRIPTORS = 5  # of a request: the pipe for the answer, the channel, the standard streams

# Held while a server is chosen or started, so that threads that need one at once share it.
_servers_lock = RLock()
_servers: dict[tuple[object, ...], ForkServer] = {}  # those kept for other vector envs
_live_servers: weakref.WeakSet[ForkServer] = weakref.WeakSet()


class ForkServer:
    """A fork server. It ends when nothing refers to this object, or when this process ends.

    Attributes:
        pid: Its process id.
        environ: The environment variables that it was started with.
        usable: Whether it can fork more workers.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts the server, without waiting until it has imported the modules."""
        parent_end, server_end = socketpair(AF_UNIX, SOCK_SEQPACKET)
        with server_end:
            try:
                number = server_end.fileno()
                arguments = (number, os.getpid(), list(modules))
                server = start_interpreter(serve, arguments, [number], environ)
            except BaseException:
                parent_end.close()
                raise
        self._socket = parent_end
        self._server = server
        self.pid, self.environ = server.pid, dict(environ)
        self.usable = True
        # At exit, the workers of vector envs that are still open end before their servers.
        util.Finalize(self, _stop_server, (parent_end, server), exitpriority=-100)
        _live_servers.add(self)

    def fork(self, channel: int, pids: list[int]) -> None:
        """Has the server fork a worker.

        Args:
            channel: The worker's end of its control channel.
            pids: The list to which the worker's process id is appended. If none is, this server
                is no longer usable: it has ended, or files that it has imported have changed.
        """
        answer = self._ask(_FORK, [channel, 0, 1, 2])
        self.usable = answer not in (b"", _STALE)
        if self.usable:
            pids.append(int(answer))

    def import_modules(self, modules: Sequence[str]) -> None:
        """Has the server import modules before its next fork, without waiting for that."""
        names = " ".join(modules).encode()[: _MAX_REQUEST_BYTES - len(_IMPORT)]
        with suppress(BrokenPipeError, ConnectionResetError):  # the server has ended
            self._socket.sendall(_IMPORT + names)

    def reap(self, pid: int, kills_group: bool) -> int | None:
        """Reaps an ended worker; see ``reap_child``."""
        answer = self._ask(_REAP + b"%d %d" % (pid, kills_group), [])
        return int(answer) if answer else None

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
        # Each answer has a pipe of its own, so that the answer to an interrupted request is not
        # taken for the answer to another one.
        answer, reply = open_pipe()
        try:
            try:
                send_fds(self._socket, [request], [reply.number, *descriptors])
            except (BrokenPipeError, ConnectionResetError):
                return b""
            finally:
                reply.close()
            self._wait_for_answer(answer.number)
            return os.read(answer.number, _MAX_ANSWER_BYTES)
        finally:
            answer.close()

    def _wait_for_answer(self, answer: int) -> None:
        """Waits for an answer or the server's end, and continues a stopped server."""
        poll = select.poll()
        poll.register(answer, select.POLLIN)
        while not poll.poll(1000 * _CONTINUE_INTERVAL_S):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGCONT)


def fork_server(
    preload: Sequence[str], environ: Mapping[str, str], shares_imports: bool
) -> ForkServer:
    """A kept server that fits, or a new one.

    Args:
        preload: The modules that it imports first.
        environ: The environment variables that it is started with.
        shares_imports: Whether it may have imported what first workers have reported.
    """
    variables = frozenset(
        (name, value) for name, value in environ.items() if name not in _IGNORED_VARIABLES
    )
    key = tuple(preload), variables, shares_imports, tuple(sys.path), *_inherited_settings()
    with _servers_lock:
        server = _servers.get(key)
        if server is None or not server.usable:
            _servers[key] = server = ForkServer(preload, environ)
            for oldest in list(_servers)[:-_MAX_SERVERS]:
                del _servers[oldest]  # that server ends after its last worker
        return server


def _inherited_settings() -> tuple[object, ...]:
    """User, groups, limits and umask of this process, which child processes inherit."""
    limits = tuple(
        resource.getrlimit(number)
        for name, number in sorted(vars(resource).items())
        if name.startswith("RLIMIT_")
    )
    umask = process_status("self").get("Umask")  # os.umask would change it
    return os.getresuid(), os.getresgid(), frozenset(os.getgroups()), limits, umask


def servers() -> list[ForkServer]:
    """The servers that are kept."""
    return list(_servers.values())


def _stop_server(parent_end: socket, server: subprocess.Popen[bytes]) -> None:
    parent_end.close()
    try:
        server.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # the server is importing
        # If this process has changed its user, it may not kill the server, which then ends itself.
        # A server that hangs in the kernel does not end either.
        with suppress(PermissionError, subprocess.TimeoutExpired):
            server.kill()
            server.wait(_STOP_TIMEOUT_S)


def _disown_all() -> None:
    global _servers_lock
    _servers_lock = RLock()  # another thread may have held the old one at the fork
    for server in list(_live_servers):
        server.disown()
    _live_servers.clear()
    _servers.clear()


os.register_at_fork(after_in_child=_disown_all)


# ---- in the server ----------------------------------------------------------------------------


def serve(descriptor: int, parent: int, modules: Collection[str]) -> None:
    """Imports modules once, and forks workers until the parent is gone.

    A request is a packet with descriptors, the first of which is a pipe for the answer. Modules
    that cannot be imported are left to the workers.

    Args:
        descriptor: A socket of packets.
        parent: Process id of the parent.
        modules: The names of the modules.
    """
    os.set_inheritable(descriptor, False)  # programs that modules execute must not inherit it
    # This would be inherited from a program that ignores SIGCHLD, and lose the workers' exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    files = _import_modules(modules, quiet=False)
    # Output of later imports is discarded, because the worker that reported them has printed it.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)
    _serve(descriptor, parent, files)


def _serve(descriptor: int, parent: int, files: dict[str, int]) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    with suppress(ProcessLookupError):
        poll.register(os.pidfd_open(parent), select.POLLIN)
    with socket(fileno=descriptor) as connection:
        while [number for number, _ in poll.poll()] == [descriptor]:
            request, descriptors, _, _ = recv_fds(connection, _MAX_REQUEST_BYTES, _MAX_DESCRIPTORS)
            if not request:
                return
            if request.startswith(_IMPORT):
                files = _import_modules(request[len(_IMPORT) :].decode().split()) | files
                continue
            if len(descriptors) < (_MAX_DESCRIPTORS if request == _FORK else 1):
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                message = f"shmvec's fork server ends: too many open files, at most {limit}\n"
                os.write(2, message.encode())
                return
            reply, *worker_descriptors = descriptors
            worker = 0
            if request == _FORK and files == {name: _modified_ns(name) for name in files}:
                worker = _fork_worker(reply, worker_descriptors, connection, parent)
                answer = b"%d" % worker
            elif request == _FORK:
                answer = _STALE
            else:
                pid, kills_group = map(int, request[len(_REAP) :].split())
                status = reap_child(pid, bool(kills_group))
                answer = b"" if status is None else b"%d" % status
            try:
                os.write(reply, answer)
            except BrokenPipeError:  # the parent has stopped waiting
                if worker:  # so it will never ask for this worker's exit code
                    os.kill(worker, signal.SIGKILL)
                    reap_child(worker)
            for number in descriptors:
                os.close(number)


def _import_modules(modules: Collection[str], quiet: bool = True) -> dict[str, int]:
    """Imports modules; returns the files of all loaded modules, and when they were edited."""
    preimport(modules, quiet)
    flush_output()  # else each worker would write it, too
    gc.collect()
    gc.freeze()  # a collection in a worker would write to the pages, and so copy them
    return dict(_editable_files())


def _editable_files() -> Iterator[tuple[str, int]]:
    """Files of modules that may be edited while this process runs, and when they last were."""
    paths = sysconfig.get_paths()
    fixed = tuple(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    for module in list(sys.modules.values()):
        name = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(name, str) and not name.startswith(fixed):
            yield name, _modified_ns(name)


def _modified_ns(name: str) -> int:
    try:
        return os.stat(name).st_mtime_ns
    except OSError:
        return 0


def _fork_worker(reply: int, descriptors: Sequence[int], connection: socket, parent: int) -> int:
    """Forks a worker; returns its process id."""

    def run() -> None:
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

    children: list[int] = []
    fork(run, children)
    return children[0]

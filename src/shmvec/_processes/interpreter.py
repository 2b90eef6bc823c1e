"""Fresh Python interpreters: one becomes a worker (spawn), or a server that forks workers.

Unlike ``multiprocessing``'s they never run the program's script again: what is defined there
travels by value. So a script needs no ``if __name__ == "__main__"``, and a notebook, ``python -c``
or standard input will do.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from multiprocessing import process, resource_tracker, spawn, util
from pickle import loads
from socket import recv_fds, socket
from typing import Any

from shmvec._core import Channel
from shmvec._processes.libraries import fresh_openmp, loaded_openmp
from shmvec._processes.preloading import import_ahead, num_threads
from shmvec._processes.worker import Orphaned, Parent, Task, run_worker, take_environ
from shmvec._processes.worker_process import WorkerProcess, child_status, end_child_group

__all__ = [
    "FORK",
    "GROUP",
    "IMPORT",
    "MOST_REQUESTED",
    "REAP",
    "STALE",
    "Start",
    "heritable",
    "inherited",
    "preparation",
    "serve",
    "start_interpreter",
    "work",
]

FORK, IMPORT, REAP, GROUP, STALE = b"fork", b"import", b"reap", b"group", b"stale"
MOST_REQUESTED = 100_000  # bytes of a request; a packet of 200 KiB is too large

# Descriptors that came with what was pickled for this worker; see ``_Carried`` in launcher.py.
inherited: list[int] = []
_LONGEST_VARIABLE = 100_000  # bytes; Linux lets no program start with one of 128 KiB
_MOST_VARIABLES = 1_000_000  # bytes of all: likewise, of two million
_MOST_DESCRIPTORS = 5  # that come with one: for the answer, of the channel, standard streams


@dataclass
class Start:
    """What a fresh interpreter, or a fork of the server, needs to become a worker.

    Attributes:
        task: What it does then.
        name: The process's.
        identity: Attributes that ``multiprocessing`` gives a process in the parent.
        preparation: For ``multiprocessing.spawn.prepare``.
        cores: Those that the parent may use.
    """

    task: Task
    name: str
    identity: dict[str, Any]
    preparation: dict[str, Any]
    cores: set[int]


def heritable(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with which an interpreter can be started: the others are too large."""
    room = _MOST_VARIABLES
    found = {}
    for name, value in environ.items():
        size = len(os.fsencode(name)) + len(os.fsencode(value))
        if size <= min(room, _LONGEST_VARIABLE):
            found[name] = value
            room -= size
    return found


def start_interpreter(
    function: str, arguments: Sequence[Any], descriptors: Sequence[int], environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts an interpreter that runs a function of this module.

    Args:
        function: Its name.
        arguments: With a ``repr`` that makes them again.
        descriptors: What it inherits, by the same numbers.
        environ: Its environment, heritable.
    """
    # What is no string there (people append a Path) is passed over by imports.
    entries = [entry for entry in sys.path if isinstance(entry, str)]
    path = [entry or process.ORIGINAL_DIR or os.getcwd() for entry in entries]  # type: ignore[attr-defined]
    call = ", ".join(map(repr, arguments))
    # A group of its own: Ctrl-C is for the parent. Some send its signal to all processes.
    code = (
        f"import os, sys; os.setpgid(0, 0); sys.path[:] = {path!r}; "
        "import signal; signal.signal(signal.SIGINT, lambda *_: None); del os, signal, sys; "
        f"import {__name__} as it; it.{function}({call})"
    )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # Of -X it knows some options only.
    flags += [
        f"-X{name}" if value is True else f"-X{name}={value}"
        for name, value in sys._xoptions.items()
    ]
    executable = spawn.get_executable()
    if not executable:  # Python is embedded in a program
        raise OSError(
            "workers cannot be started: Python does not know its interpreter (sys.executable is "
            "empty). Name it with multiprocessing.set_executable(), or use context='fork'."
        )
    command = [executable, *flags, "-c", code]
    # Here as well, where it can be said: the interpreter needs a while until it runs any code.
    group: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {}
    return subprocess.Popen(command, pass_fds=descriptors, env=dict(environ), **group)


def preparation(name: str) -> dict[str, Any]:
    """What a fresh interpreter should know of this process, for ``multiprocessing.spawn``."""
    found = {
        "name": name,
        "authkey": bytes(process.current_process().authkey),
        "log_to_stderr": vars(util)["_log_to_stderr"],
        "sys_path": [entry or process.ORIGINAL_DIR for entry in sys.path],  # type: ignore[attr-defined]
        "sys_argv": sys.argv,
        "orig_dir": process.ORIGINAL_DIR,  # type: ignore[attr-defined]
    }
    if vars(util)["_logger"] is not None:
        found["log_level"] = util.get_logger().getEffectiveLevel()
    with contextlib.suppress(FileNotFoundError):  # it was removed
        found["dir"] = os.getcwd()
    return found


def work(descriptor: int, parent: int) -> None:
    """Becomes a worker.

    Args:
        descriptor: The worker's end of its control channel.
        parent: Process id of the parent.
    """
    with contextlib.suppress(Orphaned):
        sys.exit(_told(descriptor, parent).run_here())


def _told(descriptor: int, parent_pid: int) -> WorkerProcess:
    """Waits for the parent to say which process this one is to become."""
    parent = Parent(parent_pid, Channel(descriptor))
    packed, descriptors = parent.receive(0)
    start: Start = loads(packed)
    take_environ(start.task.environ)
    os.sched_setaffinity(0, start.cores)
    spawn.prepare(start.preparation)
    # One for the whole program: one of its own would remove what others still use.
    resource_tracker._resource_tracker._fd = descriptors[0]  # type: ignore[attr-defined]
    inherited[:] = descriptors[1:]
    told = WorkerProcess(target=run_worker, args=(start.task, parent), name=start.name)
    told.__dict__.update(start.identity)
    return told


# ---- the fork server ---------------------------------------------------------------------------


def serve(descriptor: int, parent: int, modules: Collection[str]) -> None:
    """Imports modules, once, and forks workers that have them until the parent is gone.

    A request is a packet with descriptors: a pipe for the answer first. What cannot be imported is
    left to the workers; so is what starts threads, which no fork survives.

    Args:
        descriptor: A socket of packets.
        parent: Process id of the parent.
        modules: Their names.
    """
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    # The program may ignore it, and that is inherited: nobody would learn how a worker has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with fresh_openmp():
        files = _imported(modules, descriptor, quiet=False)
        # What else it imports a worker has imported already, and said what is to be said.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.close(nothing)
        _serve(descriptor, parent, files)


def _serve(descriptor: int, parent: int, files: dict[str, int]) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    with contextlib.suppress(ProcessLookupError):
        poll.register(os.pidfd_open(parent), select.POLLIN)
    with socket(fileno=descriptor) as connection:
        while [number for number, _ in poll.poll()] == [descriptor]:
            request, descriptors, _, _ = recv_fds(connection, MOST_REQUESTED, _MOST_DESCRIPTORS)
            if not request:
                return
            if request.startswith(IMPORT):
                files |= _imported(request[len(IMPORT) :].decode().split(), descriptor)
                continue
            reply, *others = descriptors
            forked = 0
            if request == FORK and files == {name: _changed(name) for name in files}:
                forked = _forked(reply, others, connection, parent)
                answer = b"%d" % forked
            elif request == FORK:
                answer = STALE
            elif request.startswith(REAP):
                status = child_status(int(request[len(REAP) :]))
                answer = b"" if status is None else b"%d" % status
            else:
                end_child_group(int(request[len(GROUP) :]))
                answer = GROUP
            try:
                os.write(reply, answer)
            except BrokenPipeError:  # nobody waits any more
                if forked:  # nor will ask for its exit code
                    os.kill(forked, signal.SIGKILL)
                    child_status(forked)
            for number in descriptors:
                os.close(number)


def _imported(modules: Collection[str], descriptor: int, quiet: bool = True) -> dict[str, int]:
    """Imports modules; returns the files of all that there are, and when they were edited.

    If one starts threads this process begins anew, without that one and without what it has been
    asked for since it began.
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
    util._flush_std_streams()  # type: ignore[attr-defined]  # or each worker would do so
    gc.collect()
    gc.freeze()  # collections in the workers must not touch, and so copy, the pages
    return {name: read.get(name, changed) for name, changed in _sources()}


@contextlib.contextmanager
def _noting_sources() -> Iterator[Mapping[str, int]]:
    """Files of modules that are imported inside, and when they had been edited before that."""
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
    """Files of modules that may be edited while this process runs, and when that was."""
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
    """Forks a worker; its number."""
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
        _told(channel, parent).run_and_exit()
    except Orphaned:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)

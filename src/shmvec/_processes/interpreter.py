"""Starts fresh Python interpreters, each of which becomes a worker (spawn) or a fork server.

Unlike those of ``multiprocessing`` they never run the program's script: functions and classes that
it defines travel by value. So a script needs no ``if __name__ == "__main__"``, and a program may be
a notebook, ``python -c`` or standard input.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import process, resource_tracker, spawn, util
from pickle import loads
from typing import Any

from shmvec._processes.worker import SCHEDULER_SIGNALS, Orphaned, Parent, Task, run_worker
from shmvec._processes.worker_process import WorkerProcess

__all__ = [
    "StartMessage",
    "become_worker",
    "heritable_environ",
    "received_descriptors",
    "spawn_preparation",
    "start_interpreter",
    "run_as_worker",
]

# The descriptors that came with this worker's pickles; see ``_PicklingContext`` in launcher.py.
received_descriptors: list[int] = []
_MAX_VARIABLE_BYTES = 100_000  # Linux starts no program with a variable of 128 KiB
_MAX_ENVIRON_BYTES = 1_000_000  # of all variables; with two million Linux starts no program


@dataclass
class StartMessage:
    """Everything that a fresh interpreter, or a fork of a server, needs to become a worker.

    Attributes:
        task: Its instructions as a worker.
        identity: Attributes that ``multiprocessing`` gives a process in the parent.
        preparation: The argument for ``multiprocessing.spawn.prepare``.
        cores: The cores that the parent may use.
    """

    task: Task
    identity: dict[str, Any]
    preparation: dict[str, Any]
    cores: set[int]


def heritable_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Those environment variables with which the system can start an interpreter."""
    room = _MAX_ENVIRON_BYTES
    variables = {}
    for name, value in environ.items():
        size = len(os.fsencode(name)) + len(os.fsencode(value))
        if size <= min(room, _MAX_VARIABLE_BYTES):
            variables[name] = value
            room -= size
    return variables


def start_interpreter(
    function: Callable[..., object],
    arguments: Sequence[Any],
    descriptors: Sequence[int],
    environ: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Starts an interpreter that runs a function of this package.

    Args:
        function: The function, which must be importable.
        arguments: Its arguments; their ``repr`` must be Python code for them.
        descriptors: The descriptors that the interpreter inherits, with the same numbers.
        environ: The interpreter's environment, from ``heritable_environ``.
    """
    # Imports ignore entries of sys.path that are not strings (some programs append a Path).
    entries = [entry for entry in sys.path if isinstance(entry, str)]
    path = [entry or process.ORIGINAL_DIR or os.getcwd() for entry in entries]  # type: ignore[attr-defined]
    call = ", ".join(map(repr, arguments))
    # The interpreter has a process group of its own, which Ctrl-C does not reach, and ignores the
    # signals of job schedulers.
    code = (
        f"import os, signal, sys; os.setpgid(0, 0); sys.path[:] = {path!r}\n"
        f"for number in {tuple(map(int, SCHEDULER_SIGNALS))}:\n"
        "    if signal.getsignal(number) != signal.SIG_IGN:\n"
        "        signal.signal(number, lambda *_: None)\n"
        "del number, os, signal, sys\n"
        f"import {function.__module__} as it; it.{function.__name__}({call})"
    )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # That function omits some -X options.
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
    # Where Python can, it sets the group before the interpreter runs any code.
    group: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {}
    return subprocess.Popen(command, pass_fds=descriptors, env=dict(environ), **group)


def spawn_preparation() -> dict[str, Any]:
    """The state of this process that ``multiprocessing.spawn`` sets up in a fresh interpreter."""
    state = {
        "authkey": bytes(process.current_process().authkey),
        "log_to_stderr": vars(util)["_log_to_stderr"],
        "sys_path": [entry or process.ORIGINAL_DIR for entry in sys.path],  # type: ignore[attr-defined]
        "sys_argv": sys.argv,
        "orig_dir": process.ORIGINAL_DIR,  # type: ignore[attr-defined]
    }
    if vars(util)["_logger"] is not None:
        state["log_level"] = util.get_logger().getEffectiveLevel()
    with contextlib.suppress(FileNotFoundError):  # the folder was removed
        state["dir"] = os.getcwd()
    return state


def run_as_worker(descriptor: int, parent: int) -> None:
    """Becomes a worker.

    Args:
        descriptor: The worker's end of its control channel.
        parent: Process id of the parent.
    """
    with contextlib.suppress(Orphaned):
        sys.exit(become_worker(descriptor, parent).run_here())


def become_worker(descriptor: int, parent_pid: int) -> WorkerProcess:
    """Receives from the parent what this process needs to become a worker."""
    parent = Parent(parent_pid, descriptor)
    packed, descriptors = parent.receive(0)
    start: StartMessage = loads(packed)
    os.sched_setaffinity(0, start.cores)
    spawn.prepare(start.preparation)
    # The whole program has one resource tracker. A worker's own would remove what others still use.
    resource_tracker._resource_tracker._fd = descriptors[0]  # type: ignore[attr-defined]
    received_descriptors[:] = descriptors[1:]
    worker = WorkerProcess(target=run_worker, args=(start.task, lambda: parent))
    worker.__dict__.update(start.identity)
    return worker

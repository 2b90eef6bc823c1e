"""Starts worker processes: by fork, through a fork server, or in a fresh interpreter."""

from __future__ import annotations

import os
import signal
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pickle import dumps
from typing import Any

import cloudpickle

from shmvec import _pickling
from shmvec._core import Channel, Descriptor, open_channel
from shmvec._options import Settings
from shmvec._processes import interpreter
from shmvec._processes.fork_server import ForkServer, fork_server
from shmvec._processes.generators import generators_state, worker_seeds
from shmvec._processes.host import EnvFn
from shmvec._processes.interpreter import (
    StartMessage,
    heritable_environ,
    run_as_worker,
    spawn_preparation,
    start_interpreter,
)
from shmvec._processes.libraries import end_opencv_threads, note_libraries, thread_variables
from shmvec._processes.preloading import prepare_to_fork, reported_modules
from shmvec._processes.registry import pack_registry
from shmvec._processes.worker import Parent, Task, run_worker
from shmvec._processes.worker_process import WorkerProcess

__all__ = ["Launcher"]

# Prefixes of variables that workers do not get. MPI's are only for its ranks, and PYTHONINSPECT
# makes an interpreter prompt the user at its end.
_EXCLUDED_PREFIXES = ("OMPI_", "PMI_", "PYTHONINSPECT")
# Attributes that multiprocessing gives a process.
_IDENTITY = ("_name", "_identity", "_parent_pid", "_parent_name", "_start_method")
_STDERR_FD = 2
_SERVER_ATTEMPTS = 3  # to find a live fork server
_ENV_FN_ADVICE = (
    "Make the env inside the function instead of capturing it, and open its files and connections "
    "in the env. context='fork' pickles nothing, but workers then share the offset of an open file."
)
_INIT_ADVICE = "Use a function of a module or script, or context='fork'."


class Launcher:
    """Starts, and restarts, the worker processes of one vector env.

    Attributes:
        shares_imports: Whether later workers share the modules that the first one has imported.
        forks: Whether workers are forks of this process.
    """

    def __init__(
        self, env_fns: Sequence[EnvFn], ranges: Sequence[range], settings: Settings, name: str
    ) -> None:
        """Prepares to start a process for each range of envs.

        Args:
            env_fns: One function for each env.
            ranges: The envs of each worker.
            settings: How the workers run.
            name: Part of the processes' names.

        Raises:
            TypeError: An env_fn, or ``worker_init``, cannot be pickled (spawn and forkserver).
        """
        self._ranges = ranges
        self._settings = settings
        self._method = settings.method
        self.forks = settings.method == "fork"
        self._name = name
        # A worker with variables of its own must not inherit imports made before these were set.
        self.shares_imports = settings.method != "spawn" and not any(settings.worker_environ)
        self._generators_state = generators_state()
        self._start_counts = [0] * len(ranges)
        self._registry: bytes | None = None
        self._server: ForkServer | None = None
        self._init: Any = settings.worker_init
        self._pickling_context = _PicklingContext()
        loads = [list(env_fns[envs.start : envs.stop]) for envs in ranges]
        self._env_fns: list[Any] = loads
        if self._method != "fork":
            with self._pickling_context:
                self._env_fns = list(map(_pickle_env_fns, loads, ranges))
                if self._init is not None:
                    self._init = _pickle(self._init, "worker_init", _INIT_ADVICE)
            self._registry = pack_registry()

    def prepare(self) -> None:
        """Prepares this process for forks, before the first worker is started."""
        if self._method == "fork":
            prepare_to_fork(self._settings.preload)

    def share_imports(self, modules: Sequence[str]) -> None:
        """Has the process that forks workers import these modules before its next fork."""
        if self._method == "fork":
            reported_modules.extend(modules)
        elif modules and self._server is not None:
            self._server.import_modules(modules)

    def start(
        self, index: int, mark: int, register: Callable[[WorkerProcess, Channel], None]
    ) -> None:
        """Starts the process of a worker.

        Args:
            index: The worker's index.
            mark: Identifies the processes that the worker starts.
            register: Takes the process, before it runs, and the parent's end of its channel. So the
                process has an owner that ends it, whatever a signal's handler raises meanwhile.
        """
        envs, starts = self._ranges[index], self._start_counts[index]
        if self._method == "fork":
            if reported_modules:
                prepare_to_fork()
            elif starts:  # other libraries may have been loaded since the start
                note_libraries()
        task = Task(
            index=index,
            envs=envs,
            env_fns=self._env_fns[index],
            init=self._init,
            registry=self._registry,
            environ={},
            threads=self._settings.threads_per_worker,
            pinned=self._settings.pin_workers,
            seeds=worker_seeds(self._generators_state, envs.start, starts),
            method=self._method,
            mark=mark,
            reports_imports=self.shares_imports and index == starts == 0,
            overlap=self._settings.overlap,
            spare_envs=self._settings.spare_envs,
        )
        _fill_closed_streams()
        channel, worker_end = open_channel()
        try:
            process = WorkerProcess(
                target=run_worker,
                name=f"Worker<{self._name}>-{index}",
                args=(task, partial(Parent, os.getpid(), worker_end.fileno())),
                daemon=self._settings.daemon,
            )
            vars(process)["_start_method"] = self._method  # also that of what envs start
            register(process, channel)
            environ = {**self._shared_environ(), **self._settings.worker_environ[index]}
            if self._method == "fork":
                task.environ = _environ_changes(os.environ, environ)
                end_opencv_threads()
                process.fork()
            else:
                if self._method == "spawn":
                    passed = heritable_environ(environ)
                    process.start_by(partial(_spawn, worker_end.fileno(), passed))
                else:
                    passed = self._fork_by_server(process, worker_end.fileno())
                task.environ = _environ_changes(passed, environ)
                self._send_start_message(channel, process, task)
            self._start_counts[index] += 1
        except BaseException:
            channel.close()
            raise
        finally:
            worker_end.close()

    def _shared_environ(self) -> dict[str, str]:
        """The environment variables that all workers share."""
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_EXCLUDED_PREFIXES)
        }
        return {**thread_variables(self._settings.threads_per_worker), **environ}

    def _send_start_message(self, channel: Channel, process: WorkerProcess, task: Task) -> None:
        start = StartMessage(
            task=task,
            identity={name: vars(process)[name] for name in _IDENTITY},
            preparation=spawn_preparation(),
            cores=os.sched_getaffinity(0),
        )
        tracker = _resource_tracker_fd()
        descriptors = [each.number for each in self._pickling_context.descriptors]
        channel.put(0, dumps(start), [tracker, *descriptors])

    def _fork_by_server(self, process: WorkerProcess, descriptor: int) -> dict[str, str]:
        """Has a server fork a process; returns the environment variables of that process."""
        for _ in range(_SERVER_ATTEMPTS):
            if self._server is None or not self._server.usable:
                environ = heritable_environ(self._shared_environ())
                self._server = fork_server(self._settings.preload, environ, self.shares_imports)
            if process.start_by(partial(self._server.fork, descriptor), self._server.reap):
                return self._server.environ
        raise OSError(
            "no fork server could be started: each ended before it had forked a worker. Its output "
            "is on stderr. context='spawn' needs none."
        )


def _environ_changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """The variables to set, and with the value None those to remove."""
    changed: dict[str, str | None] = dict(after.items() - before.items())
    return {**changed, **dict.fromkeys(before.keys() - after.keys())}


def _fill_closed_streams() -> None:
    """Opens /dev/null in place of each standard stream that the program has closed.

    Otherwise the next file to be opened would get its number, and prints would go into that file.
    """
    for number in range(_STDERR_FD + 1):
        try:
            os.fstat(number)
        except OSError:  # open() takes the lowest free number, which is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _resource_tracker_fd() -> int:
    """The descriptor of the program's resource tracker, which is started again if it has ended.

    Python writes to the tracker to find that out. SIGPIPE is blocked, because it would end a
    program that does not ignore it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
    try:
        descriptor = resource_tracker.getfd()
        assert descriptor is not None
        return descriptor
    finally:
        signal.sigtimedwait([signal.SIGPIPE], 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawn(descriptor: int, environ: Mapping[str, str], pids: list[int]) -> None:
    spawned = start_interpreter(run_as_worker, (descriptor, os.getpid()), [descriptor], environ)
    spawned.returncode = 0  # subprocess need not wait for the process: WorkerProcess does
    pids.append(spawned.pid)


class _ReceivedDescriptor:
    """A descriptor that was sent with a pickle."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """Returns a copy of the descriptor, in the worker."""
        return os.dup(interpreter.received_descriptors[self._index])


class _PicklingContext:
    """A context in which queues, locks and pipes of multiprocessing can be pickled.

    They pass their descriptors to the process that is being started. This context stands in for
    that process.
    """

    DupFd = _ReceivedDescriptor  # is called with the index of a copy

    def __init__(self) -> None:
        self.descriptors: list[Descriptor] = []

    def __enter__(self) -> None:
        self._before = get_spawning_popen()
        set_spawning_popen(self)  # type: ignore[arg-type]

    def __exit__(self, *details: object) -> None:
        set_spawning_popen(self._before)

    def duplicate_for_child(self, descriptor: int) -> int:
        """Copies a descriptor that is to be sent; returns its index."""
        self.descriptors.append(Descriptor(os.dup, descriptor))
        return len(self.descriptors) - 1


def _pickle_env_fns(env_fns: Sequence[EnvFn], envs: range) -> bytes:
    try:
        return _pickle_by_value(env_fns)
    except Exception:
        for index, env_fn in zip(envs, env_fns, strict=True):
            _pickle(env_fn, f"env_fns[{index}]", _ENV_FN_ADVICE)
        raise  # each one can be pickled: a signal's handler has raised this


def _pickle(value: object, name: str, advice: str) -> bytes:
    try:
        return _pickle_by_value(value)
    except Exception as error:
        raise TypeError(
            f"{name} cannot be pickled to send it to a worker: {error}. {advice}"
        ) from error


class _Pickler(_pickling.Pickler):
    """A pickler that also pickles multiprocessing's connections, shared values and the like."""

    dispatch_table = ChainMap(
        cloudpickle.Pickler.dispatch_table,
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
    )


def _pickle_by_value(payload: Any) -> bytes:
    """Pickles a payload, with what the program's main module defines by value: no worker has it."""
    # In a process that multiprocessing has spawned, the main module has another name.
    alias = sys.modules.get("__mp_main__")
    if alias is not None and getattr(alias, "__name__", None) == "__mp_main__":
        cloudpickle.register_pickle_by_value(alias)
    return _pickling.dumps_for_main(payload, _Pickler)

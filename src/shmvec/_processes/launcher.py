"""Starts worker processes: by fork, through a fork server, or in a fresh interpreter."""

from __future__ import annotations

import _socket
import os
import signal
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.process import current_process
from multiprocessing.reduction import ForkingPickler
from pickle import dumps
from typing import Any

import cloudpickle

from shmvec import _pickling as _classes
from shmvec._core import Channel, Descriptor
from shmvec._options import Settings
from shmvec._processes import interpreter
from shmvec._processes.fork_server import ForkServer, fork_server
from shmvec._processes.host import EnvFn
from shmvec._processes.interpreter import Start, heritable, preparation, start_interpreter, work
from shmvec._processes.libraries import (
    end_opencv_threads,
    packed_registry,
    state_of_generators,
    thread_variables,
    worker_seeds,
)
from shmvec._processes.preloading import import_reported, ready_to_fork, reported
from shmvec._processes.worker import Task, run_forked
from shmvec._processes.worker_process import WorkerProcess

__all__ = ["Launcher", "occupy_streams"]

# Variables that workers do not get: those of MPI, which are for its ranks only, and one that makes
# an interpreter prompt the user at its end.
_NOT_FOR_WORKERS = ("OMPI_", "PMI_", "PYTHONINSPECT")
_STDERR = 2
_TRIES = 3  # to find a live fork server


class Launcher:
    """Starts, and restarts, the worker processes of one vector env.

    Attributes:
        may_learn: Whether the first worker reports what it imports, for those started after it.
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
        # A worker with variables of its own must not inherit imports made before these are set.
        self.may_learn = settings.method != "spawn" and not any(settings.worker_environ)
        self._state = state_of_generators()
        self._starts = [0] * len(ranges)
        self._registry: bytes | None = None
        self._server: ForkServer | None = None
        self._init: Any = settings.worker_init
        self._carried = _Carried()
        loads = [list(env_fns[envs.start : envs.stop]) for envs in ranges]
        self._loads: list[Any] = loads
        if self._method != "fork":
            with self._carried:
                self._loads = [_pickled(fns, envs) for fns, envs in zip(loads, ranges, strict=True)]
                if self._init is not None:
                    self._init = _pickled_init(self._init)
            self._registry = packed_registry()

    def ready(self) -> AbstractContextManager[None]:
        """The context in which all processes are started."""
        if self._method == "fork":
            return ready_to_fork(self._settings.preload)
        return nullcontext()

    def learn(self, modules: Sequence[str]) -> None:
        """Has the process that forks workers import modules before its next fork."""
        if self._method == "fork":
            reported.extend(modules)
        elif modules and self._server is not None:
            self._server.learn(modules)

    def start(self, index: int, mark: int, keep: Callable[[WorkerProcess, Channel], None]) -> None:
        """Starts the process of a worker.

        Args:
            index: The worker's index.
            mark: Identifies the processes that it starts.
            keep: Takes the process, before it runs, and the parent's end of its channel, so that
                an owner ends the process, whatever a signal's handler raises meanwhile.
        """
        if self._method == "fork":
            import_reported()
        task = Task(
            index=index,
            envs=self._ranges[index],
            env_fns=self._loads[index],
            init=self._init,
            registry=self._registry,
            environ={},
            threads=self._settings.threads_per_worker,
            pinned=self._settings.pin_workers,
            seeds=worker_seeds(self._state, self._ranges[index].start, self._starts[index]),
            forked=self._method != "spawn",
            mark=mark,
            first=self.may_learn and index == 0 and not self._starts[0],
            overlap=self._settings.overlap,
            spare_envs=self._settings.spare_envs,
        )
        occupy_streams()
        mine, theirs = _socket.socketpair()  # socket's own may lose one to a signal's handler
        channels: list[Channel] = []
        # In one bytecode: no handler's exception comes while nobody owns the descriptor.
        channels.extend(map(Channel, map(_socket.socket.detach, [mine])))
        channel = channels[0]
        try:
            process = WorkerProcess(
                target=run_forked,
                name=f"Worker<{self._name}>-{index}",
                args=(task, theirs.fileno(), os.getpid()),
                daemon=self._settings.daemon,
            )
            vars(process)["_start_method"] = self._method  # processes that envs start use it, too
            keep(process, channel)
            environ = {**self._environ(), **self._settings.worker_environ[index]}
            if self._method == "fork":
                task.environ = _changes(os.environ, environ)
                end_opencv_threads()
                process.fork()
            elif self._method == "spawn":
                passed = heritable(environ)
                task.environ = _changes(passed, environ)
                process.start_by(partial(_spawn, theirs.fileno(), passed))
            else:
                task.environ = _changes(self._serve(process, theirs.fileno()), environ)
            if self._method != "fork":
                self._send_start(channel, process, task)
            self._starts[index] += 1
        except BaseException:
            channel.close()
            raise
        finally:
            theirs.close()

    def _environ(self) -> dict[str, str]:
        """The environment variables that all workers share."""
        mine = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_NOT_FOR_WORKERS)
        }
        return {**thread_variables(self._settings.threads_per_worker), **mine}

    def _send_start(self, channel: Channel, process: WorkerProcess, task: Task) -> None:
        """Sends a new process what it needs to become a worker."""
        start = Start(
            task=task,
            name=process.name,
            identity={
                "_identity": process._identity,
                "_parent_pid": os.getpid(),
                "_parent_name": current_process().name,
                "_start_method": self._method,
            },
            preparation=preparation(process.name),
            cores=os.sched_getaffinity(0),
        )
        tracker = _tracker()
        carried = [descriptor.number for descriptor in self._carried.descriptors]
        channel.put(0, dumps(start), [tracker, *carried])

    def _serve(self, process: WorkerProcess, descriptor: int) -> Mapping[str, str]:
        """Has a server fork a process; returns the environment variables of that process."""
        for _ in range(_TRIES):
            if self._server is None or not self._server.usable:
                environ = heritable(self._environ())
                self._server = fork_server(self._settings.preload, environ, not self.may_learn)
            if process.start_by(partial(self._server.fork, descriptor), self._server):
                return self._server.environ
        raise OSError(
            "no fork server could be started: each ended before it had forked a worker. Its output "
            "is on stderr. context='spawn' needs none."
        )


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """The variables to set, and (None) those to remove."""
    changed: dict[str, str | None] = dict(after.items() - before.items())
    return {**changed, **dict.fromkeys(before.keys() - after.keys())}


def occupy_streams() -> None:
    """Opens /dev/null in place of each standard stream that the program has closed.

    Otherwise the next file to be opened would get its number, and prints would go into that file.
    """
    for number in range(_STDERR + 1):
        try:
            os.fstat(number)
        except OSError:  # open() then takes this very number: no descriptor is left to close
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _tracker() -> int:
    """The descriptor of the program's resource tracker, which is started again if it has ended.

    Python finds that out by a write to it, which must not end a program that lets SIGPIPE end it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
    try:
        descriptor = resource_tracker.getfd()
        assert descriptor is not None
        return descriptor
    finally:
        signal.sigtimedwait([signal.SIGPIPE], 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawn(descriptor: int, environ: Mapping[str, str], numbers: list[int]) -> None:
    spawned = start_interpreter(work, (descriptor, os.getpid()), [descriptor], environ)
    spawned.returncode = 0  # WorkerProcess waits for the process
    numbers.append(spawned.pid)


class _Carried:
    """A context in which objects of multiprocessing can be pickled: queues, locks, pipes.

    These objects pass their descriptors to the process that is being started, for which this
    context stands in.
    """

    def __init__(self) -> None:
        self.descriptors: list[Descriptor] = []

    def __enter__(self) -> None:
        self._before = get_spawning_popen()
        set_spawning_popen(self)  # type: ignore[arg-type]

    def __exit__(self, *details: object) -> None:
        set_spawning_popen(self._before)

    def duplicate_for_child(self, descriptor: int) -> int:
        """Notes a descriptor to send; returns its index among these."""
        self.descriptors.append(Descriptor(os.dup, descriptor))
        return len(self.descriptors) - 1

    def DupFd(self, place: int) -> _Inherited:  # noqa: N802
        """A handle by which the worker finds the descriptor."""
        return _Inherited(place)


class _Inherited:
    """A descriptor that was sent with a pickle."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """Returns a copy of the descriptor, in the worker."""
        return os.dup(interpreter.inherited[self._place])


def _pickled(env_fns: Sequence[EnvFn], envs: range) -> bytes:
    try:
        return _by_value(env_fns)
    except Exception as error:
        for index, env_fn in zip(envs, env_fns, strict=True):
            try:
                _by_value(env_fn)
            except Exception as cause:
                raise TypeError(
                    f"env_fns[{index}] cannot be pickled to send it to a worker: {cause}. Make "
                    "the env inside the function instead of capturing it, and open its files and "
                    "connections in the env; what is neither, context='fork' takes along, where "
                    "workers would share the offset of an open file."
                ) from cause
        raise TypeError(f"env_fns cannot be pickled to send them to a worker: {error}") from error


def _pickled_init(init: Callable[[int], object]) -> bytes:
    try:
        return _by_value(init)
    except Exception as error:
        raise TypeError(
            f"worker_init cannot be pickled to send it to workers: {error}. Use a function of a "
            "module or script, or context='fork'."
        ) from error


class _Pickler(_classes.Pickler):
    """A pickler that also pickles connections, shared values and the like of multiprocessing's."""

    dispatch_table = ChainMap(
        cloudpickle.Pickler.dispatch_table,
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
    )


def _by_value(payload: Any) -> bytes:
    """Pickles a payload, by value where it uses the program's main module, which no worker has."""
    # In a process that multiprocessing has spawned the main module has another name.
    alias = sys.modules.get("__mp_main__")
    if alias is not None and getattr(alias, "__name__", None) == "__mp_main__":
        cloudpickle.register_pickle_by_value(alias)
    return _classes.dumps_for_main(payload, _Pickler)

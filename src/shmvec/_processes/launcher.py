"""Starts worker processes: by a fork, by a fork of a server's, or in a fresh interpreter."""

from __future__ import annotations

import os
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
from socket import socketpair
from typing import Any

import cloudpickle

from shmvec import _pickling as _classes
from shmvec._core import Channel
from shmvec._options import Settings
from shmvec._processes import interpreter
from shmvec._processes.fork_server import ForkServer, fork_server
from shmvec._processes.host import EnvFn
from shmvec._processes.interpreter import Start, heritable, preparation, start_interpreter, work
from shmvec._processes.libraries import (
    packed_registry,
    state_of_generators,
    thread_variables,
    worker_seeds,
)
from shmvec._processes.preloading import import_here, ready_to_fork
from shmvec._processes.signals import close_all
from shmvec._processes.worker import Task, run_forked
from shmvec._processes.worker_process import WorkerProcess

__all__ = ["Launcher"]

# MPI's, which a process that is none of its ranks must not see; and what would have an interpreter
# ask the user for more, in place of its end.
_NOT_FOR_WORKERS = ("OMPI_", "PMI_", "PYTHONINSPECT")
_STDERR = 2
_TRIES = 3  # to find a fork server that lives


class Launcher:
    """What it takes to start the worker processes of one vector env, also once more.

    Attributes:
        may_learn: Whether the first worker says what it imports, for those started after it.
    """

    def __init__(
        self, env_fns: Sequence[EnvFn], ranges: Sequence[range], settings: Settings, name: str
    ) -> None:
        """Prepares to start a process for each range of envs.

        Args:
            env_fns: One for each env.
            ranges: The envs of each worker.
            settings: How workers are to run.
            name: Part of the processes' names.

        Raises:
            TypeError: An env_fn, or ``worker_init``, cannot be pickled (spawn and forkserver).
        """
        self._ranges = ranges
        self._settings = settings
        self._method = settings.method
        self._name = name
        # What is to see a worker's own variables must not be imported before these are set.
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
        """To start all processes in."""
        if self._method == "fork":
            return ready_to_fork(self._settings.preload)
        return nullcontext()

    def learn(self, modules: Sequence[str]) -> None:
        """Has modules imported by what forks workers."""
        if not modules:
            return
        if self._method == "fork":
            import_here(modules)
        elif self._server is not None:
            self._server.learn(modules)

    def start(self, index: int, mark: int, keep: Callable[[WorkerProcess, Channel], None]) -> None:
        """Starts the process of a worker.

        Args:
            index: The worker's.
            mark: By which what it starts is known.
            keep: Takes the process, before it runs, and the parent's end of its channel.
        """
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
        )
        _occupy_streams()
        mine, theirs = socketpair()
        channel = Channel(mine.detach())
        try:
            process = WorkerProcess(
                target=run_forked,
                name=f"Worker<{self._name}>-{index}",
                args=(task, theirs.fileno(), os.getpid()),
                daemon=self._settings.daemon,
            )
            vars(process)["_start_method"] = self._method  # what env's own processes are started by
            keep(process, channel)
            environ = {**self._environ(), **self._settings.worker_environ[index]}
            if self._method == "fork":
                task.environ = _changes(os.environ, environ)
                process.fork()
            elif self._method == "spawn":
                passed = heritable(environ)
                task.environ = _changes(passed, environ)
                process.start_by(partial(_spawn, theirs.fileno(), passed))
            else:
                task.environ = _changes(self._serve(process, theirs.fileno()), environ)
            if self._method != "fork":
                self._tell(channel, process, task)
            self._starts[index] += 1
        except BaseException:
            channel.close()
            raise
        finally:
            theirs.close()

    def _environ(self) -> dict[str, str]:
        """The environment variables of workers, but for their own."""
        mine = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_NOT_FOR_WORKERS)
        }
        return {**thread_variables(self._settings.threads_per_worker), **mine}

    def _tell(self, channel: Channel, process: WorkerProcess, task: Task) -> None:
        """Sends what becomes a worker what it needs for that."""
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
        tracker = resource_tracker.getfd()
        assert tracker is not None
        channel.put(0, dumps(start), [tracker, *self._carried.descriptors])

    def _serve(self, process: WorkerProcess, descriptor: int) -> Mapping[str, str]:
        """Has a server fork a process; returns the environment variables that it has."""
        for _ in range(_TRIES):
            if self._server is None or not self._server.usable:
                environ = heritable(self._environ())
                self._server = fork_server(self._settings.preload, environ, not self.may_learn)
            if process.start_by(partial(self._server.fork, descriptor), self._server):
                return self._server.environ
        raise OSError(
            "no fork server could be started: each ended before it had forked a worker; what it "
            "said is on stderr. context='spawn' does without."
        )


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """What to set, and (None) what to remove."""
    changed: dict[str, str | None] = dict(after.items() - before.items())
    return {**changed, **dict.fromkeys(before.keys() - after.keys())}


def _occupy_streams() -> None:
    """Where the program has closed a standard stream, its number is not for what is opened here.

    What is printed would be written into that. So it is /dev/null's, as with any daemon.
    """
    for number in range(_STDERR + 1):
        try:
            os.fstat(number)
        except OSError:  # none is opened that would have to be closed: Ctrl-C could come before
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _spawn(descriptor: int, environ: Mapping[str, str], numbers: list[int]) -> None:
    spawned = start_interpreter(work, (descriptor, os.getpid()), [descriptor], environ)
    spawned.returncode = 0  # it is waited for here, not there
    numbers.append(spawned.pid)


class _Carried:
    """What is pickled inside may be multiprocessing's: queues, locks, pipes.

    It stands for the process that is started, whom they ask to take their descriptors along.
    """

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def __enter__(self) -> None:
        self._before = get_spawning_popen()
        set_spawning_popen(self)  # type: ignore[arg-type]

    def __exit__(self, *details: object) -> None:
        set_spawning_popen(self._before)

    def __del__(self) -> None:
        close_all(self.descriptors)

    def duplicate_for_child(self, descriptor: int) -> int:
        """Takes a descriptor along; its place among those."""
        self.descriptors.append(os.dup(descriptor))
        return len(self.descriptors) - 1

    def DupFd(self, place: int) -> _Inherited:  # noqa: N802
        """Finds it in the worker."""
        return _Inherited(place)


class _Inherited:
    """A descriptor that came with what was pickled."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """The descriptor, in the worker."""
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
                    "the env inside the function instead of capturing it, or use "
                    "context='fork'."
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
    """Knows what multiprocessing's own pickler knows: connections, shared values."""

    dispatch_table = ChainMap(
        cloudpickle.Pickler.dispatch_table,
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
    )


def _by_value(payload: Any) -> bytes:
    """Pickles it, and with it what it uses of the program's main module, which no worker has."""
    # The name of that module in a process that multiprocessing has spawned.
    alias = sys.modules.get("__mp_main__")
    if alias is not None and getattr(alias, "__name__", None) == "__mp_main__":
        cloudpickle.register_pickle_by_value(alias)
    return _classes.dumps_for_main(payload, _Pickler)

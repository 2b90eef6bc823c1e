"""A worker process: builds its envs, serves the parent, and ends with the parent."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pickle import loads
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import registry

from shmvec._core import (
    Channel,
    MappedMemory,
    Segment,
    is_unhandled,
    mark_process,
    pickle_value,
    start_watchdog,
    watch_forks,
)
from shmvec._hints import explain_process_limits
from shmvec._memory.parcels import Depot, Parcel
from shmvec._pickling import loads_in_main
from shmvec._processes.control import ImportReport, Report
from shmvec._processes.descendants import end_own_family
from shmvec._processes.generators import free_generator_locks, seed_generators
from shmvec._processes.host import EnvFn, EnvHost
from shmvec._processes.libraries import limit_threads
from shmvec._processes.output import flush_output, redirect_output
from shmvec._processes.overlap import Alarm, Overlap
from shmvec._processes.preloading import ImportRecorder
from shmvec._processes.registry import merge_registry
from shmvec._processes.stacks import offer_stacks
from shmvec.faults import Failure

__all__ = [
    "SCHEDULER_SIGNALS",
    "Orphaned",
    "Parent",
    "Task",
    "run_worker",
]

_SLICE_MS = 50
_WATCHDOG_TIMEOUT_MS = 5_000  # more than the watchdog takes to end this process
SCHEDULER_SIGNALS = signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP
_PARENT_SIGNALS = signal.SIGTERM, signal.SIGUSR1  # what the parent sends to a worker
# Their handlers stay: only timers cause these, and an env that sets one may rely on the program's.
_TIMER_SIGNALS = signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF
_FAMILY_SIGTERM_TIMEOUT_S = 1.0  # for processes that envs have left behind to obey SIGTERM


class Orphaned(BaseException):
    """The parent is gone."""


@dataclass
class Task:
    """A worker's instructions.

    Attributes:
        index: The worker's index.
        envs: Indices of its envs.
        env_fns: The functions that make its envs; cloudpickled unless inherited by a fork.
        init: A function called first with the worker's index, cloudpickled likewise; or None.
        registry: The parent's registry of envs, packed; None: inherited by a fork.
        environ: Changes to the process's environment variables; None removes a variable.
        threads: Threads that libraries may start in its process; 0: no limit.
        pinned: Whether the process stays on one core.
        seeds: The argument of ``seed_generators``.
        method: Its start method.
        mark: Identifies the processes that it starts.
        reports_imports: Whether it reports what it imports, for workers that are forked after it.
        overlap: The option of this name.
        spare_envs: Likewise.
    """

    index: int
    envs: range
    env_fns: Sequence[EnvFn] | bytes
    init: Callable[[int], object] | bytes | None
    registry: bytes | None
    environ: Mapping[str, str | None]
    threads: int
    pinned: bool
    seeds: npt.NDArray[np.uint32]
    method: str
    mark: int
    reports_imports: bool
    overlap: Overlap
    spare_envs: int


class Parent:
    """The worker's connection to its parent: messages, and whether the parent lives."""

    # These are bound here because an env may patch the modules.
    pack = staticmethod(pickle_value)
    unpack = staticmethod(loads)

    def __init__(self, pid: int, descriptor: int) -> None:
        """Takes the parent's process id, and the worker's end of the control channel."""
        self.pid = pid
        self._channel = channel = Channel(descriptor)
        # Programs that envs execute must not keep the channel open beyond this process's death.
        os.set_inheritable(channel.fileno(), False)
        self.depot: Depot | None = None
        try:
            # With every start method this is the vector env's process; getppid() could be the fork
            # server.
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise Orphaned from None
        # The end of the channel is reported though no event of it is asked for.
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._poll.register(channel, 0)

    def start_watchdog(self, mark: int) -> None:
        """Starts the watchdog, which ends this process and those of the mark after the parent."""
        with explain_process_limits():
            start_watchdog(self._descriptor, mark)

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def is_alive(self) -> bool:
        """Whether the parent lives, and has not closed the channel."""
        return not self._poll.poll(0)

    def wait_for_watchdog(self) -> None:
        """If the parent is gone, waits for the watchdog to end this process and its family.

        Anything else that this process did would be interrupted in the middle.
        """
        if any(descriptor == self._descriptor for descriptor, _ in self._poll.poll(0)):
            select.poll().poll(_WATCHDOG_TIMEOUT_MS)

    def packer(self, uses_depot: bool) -> Callable[[Any], Parcel]:
        """A function that packs the results of a request.

        Args:
            uses_depot: Whether the parent has lent the depot for them.
        """
        assert self.depot is not None
        self.depot.lend(uses_depot)
        return self.depot.pack

    def receive(self, sequence: int) -> tuple[bytes, list[int]]:
        """Waits for the message of a request and the descriptors that come with it.

        Raises:
            OSError: This process may not open so many files.
        """
        while True:
            message = self._channel.take(sequence)
            if message is not None:
                if not message.has_all_descriptors:
                    raise _too_many_files_error()
                return message.content, message.descriptors
            self._wait_for_events(select.POLLIN)

    def send(self, sequence: int, packed: bytes, goodbye: bool = False) -> None:
        """Sends a message, and waits until it is written; the parent reads whenever it waits."""
        self._channel.put(sequence, packed, (), goodbye)
        while self._channel.has_unsent:
            self._wait_for_events(select.POLLIN | select.POLLOUT)
            self._channel.pump()

    def _wait_for_events(self, events: int) -> None:
        if self._channel.broken is not None:
            raise Orphaned
        poll = select.poll()
        poll.register(self._channel, events)
        poll.register(self._descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(_SLICE_MS):
            if descriptor == self._descriptor:
                raise Orphaned

    def new_alarm(self, descriptor: int) -> Alarm:
        """An alarm of this descriptor, which also rings when the parent is gone."""
        return Alarm(self.is_alive, descriptor, self._descriptor, self._channel)


def _too_many_files_error() -> OSError:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return OSError(
        errno.EMFILE,
        f"too many open files in this worker, at most {limit} (RLIMIT_NOFILE, `ulimit -n`): its "
        "program could not send it another one",
    )


def run_worker(task: Task, connect: Callable[[], Parent]) -> None:
    """The main function of a worker process; it ends silently if its parent is gone."""
    with contextlib.suppress(Orphaned):
        _run(task, connect())


def _run(task: Task, parent: Parent) -> None:
    _apply_environ(task.environ)
    _ignore_program_signals()
    mark_process(task.mark)
    parent.start_watchdog(task.mark)
    # In a process group of its own the worker is not reached by Ctrl-C, Ctrl-Z and the like. The
    # parent decides what they do to a worker and to what its envs start.
    os.setpgid(0, 0)
    if task.method != "spawn":
        gc.freeze()  # a collection would write to the parent's pages, and so copy them
    watch_forks()
    redirect_output(*parent.receive(0)[1])
    offer_stacks(parent.pid, task.index, task.envs)
    if task.pinned:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[task.index % len(cores)]})

    def limit_libraries() -> None:
        if task.method == "fork":
            limit_threads(task.threads)

    limit_libraries()
    host = EnvHost(
        task.index,
        task.envs.start,
        parent,
        task.overlap,
        task.spare_envs,
        limit_libraries=limit_libraries,
    )
    try:
        _serve(host, parent, task)
    finally:
        parent.wait_for_watchdog()
        failures = host.close()
        end_own_family(task.mark, _FAMILY_SIGTERM_TIMEOUT_S)
        parent.send(0, parent.pack(failures), goodbye=True)
        flush_output()
    parent.close()


def _ignore_program_signals() -> None:
    """Has this process, a worker, ignore the signals that are for its program, except SIGTERM.

    A program's handler, which may save its work, must not run in a fork of the program, and a job
    scheduler sends its signals to every process of a job.
    """
    signal.set_wakeup_fd(-1)  # a write to it would run handlers in the program's event loop
    inherited = {number for number in signal.valid_signals() if callable(signal.getsignal(number))}
    fatal = set(filter(is_unhandled, SCHEDULER_SIGNALS))
    for number in (inherited | fatal) - {signal.SIGTERM, *_TIMER_SIGNALS}:
        # This is a handler because programs that an env executes would inherit SIG_IGN.
        signal.signal(number, lambda number, frame: None)
        signal.siginterrupt(number, False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # With its own group it is a background process, which SIGTTOU stops if it sets the terminal.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENT_SIGNALS)


def _apply_environ(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _serve(host: EnvHost, parent: Parent, task: Task) -> None:
    with ImportRecorder() if task.reports_imports else contextlib.nullcontext() as imports:
        report = _build_envs(host, parent, task, imports)
    parent.send(0, parent.pack(report))
    if isinstance(report, Failure):
        return
    packed, descriptors = parent.receive(0)
    attachment = parent.unpack(packed)
    if attachment is None:  # another worker failed
        return
    descriptor, alarm, depot, *shared = descriptors
    parent.depot = Depot(depot)
    try:
        memory = MappedMemory(descriptor, attachment.nbytes)
    finally:
        os.close(descriptor)
    host.make_loop(Segment.open(memory), attachment, shared)
    if attachment.mends:
        # The parent sends this signal to interrupt a step that takes too long.
        signal.signal(
            signal.SIGUSR1, lambda number, frame: host.executor.interrupt(attachment.limits)
        )
    parent.send(0, parent.pack(None))
    host.executor.serve(parent.new_alarm(alarm))


def _build_envs(
    host: EnvHost, parent: Parent, task: Task, imports: ImportRecorder | None
) -> Report | Failure:
    def first_built() -> None:
        if imports is not None:
            parent.send(0, parent.pack(ImportReport(imports.modules())))

    doing = "start"
    try:
        if task.method != "spawn":
            free_generator_locks()
        doing = "worker_init"
        if task.registry is not None:
            merge_registry(task.registry)
        init = loads_in_main(task.init) if isinstance(task.init, bytes) else task.init
        if init is not None:
            init(task.index)
        doing = "unpickle env_fns"  # this imports the user's modules
        env_fns = task.env_fns
        if isinstance(env_fns, bytes):
            specs = dict(registry)
            env_fns = loads_in_main(env_fns)
            registry.update(specs)  # the modules may have registered the program's ids again
        # This comes after the imports, because the user's modules may seed the generators, too.
        seed_generators(task.seeds)
        return host.build(env_fns, first_built)
    except BaseException as error:
        return Failure.of(error, host.first_env, host.index, doing)

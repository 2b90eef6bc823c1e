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
from functools import partial
from pickle import loads
from typing import Any

import numpy as np
import numpy.typing as npt

from shmvec._core import (
    Channel,
    MappedMemory,
    Segment,
    is_unhandled,
    pickle_value,
    start_watchdog,
    watch_forks,
)
from shmvec._hints import naming_limits
from shmvec._memory.parcels import Depot, Parcel
from shmvec._pickling import loads_in_main
from shmvec._processes.control import Imported, Report
from shmvec._processes.descendants import end_own_family, lead_family
from shmvec._processes.host import EnvFn, EnvHost
from shmvec._processes.libraries import (
    free_generators,
    inherited_openmp,
    join_registry,
    kept_registry,
    limit_threads,
    pin_to_core,
    seed_generators,
)
from shmvec._processes.output import finish_output, take_output
from shmvec._processes.overlap import Overlap
from shmvec._processes.preloading import Imports
from shmvec._processes.stacks import offer_stacks
from shmvec.faults import Failure

__all__ = [
    "SCHEDULER_SIGNALS",
    "Orphaned",
    "Parent",
    "Task",
    "run_forked",
    "run_worker",
    "take_environ",
]

_SLICE_MS = 50
_WATCHDOG_MS = 5_000  # longer than the watchdog takes to end this process
_RING = (1).to_bytes(8, "little")  # what an eventfd takes
SCHEDULER_SIGNALS = signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP
_PARENT_SIGNALS = signal.SIGTERM, signal.SIGUSR1  # what the parent sends to a worker
# No other process causes these: an env that sets a timer may rely on the program's handler.
_TIMER_SIGNALS = signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF
_PATIENCE_S = 1.0  # for processes that envs have left behind to obey SIGTERM


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
        forked: Whether its process is a fork.
        mark: Identifies the processes that it starts.
        first: Whether it reports what it imports, for workers that are forked after it.
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
    forked: bool
    mark: int
    first: bool
    overlap: Overlap
    spare_envs: int


class Parent:
    """The worker's connection to its parent: messages, and whether the parent lives."""

    # Bound here, because an env may patch the modules.
    pack = staticmethod(pickle_value)
    unpack = staticmethod(loads)

    def __init__(self, pid: int, channel: Channel) -> None:
        """Takes the worker's end of the control channel."""
        self.pid = pid
        self._channel = channel
        # Programs that envs execute must not keep the channel open beyond this process's death.
        os.set_inheritable(channel.fileno(), False)
        self.depot: Depot | None = None
        try:
            # This is the vector env's process with every start method; getppid() could be the fork
            # server.
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise Orphaned from None
        # No event of the channel is asked for, and its end is reported all the same.
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._poll.register(channel, 0)

    def watch(self, mark: int) -> None:
        """Has this process, and all processes with the mark, end with the parent."""
        with naming_limits():
            start_watchdog(self._descriptor, mark)

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def alive(self) -> bool:
        """Whether the parent lives, and has not closed the channel."""
        return not self._poll.poll(0)

    def end_with_it(self) -> None:
        """If the parent is gone, waits for the watchdog, which ends this process and its family.

        Whatever this process did meanwhile would be interrupted in the middle.
        """
        if any(descriptor == self._descriptor for descriptor, _ in self._poll.poll(0)):
            select.poll().poll(_WATCHDOG_MS)

    def packer(self, lent: bool) -> Callable[[Any], Parcel]:
        """A function that packs the results of a request.

        Args:
            lent: Whether the parent has lent the depot for them.
        """
        assert self.depot is not None
        self.depot.lend(lent)
        return self.depot.pack

    def receive(self, sequence: int) -> tuple[bytes, list[int]]:
        """Waits for the message of a request and the descriptors that come with it.

        Raises:
            OSError: This process may not open so many files.
        """
        while True:
            message = self._channel.take(sequence)
            if message is not None:
                if not message.whole:
                    raise _too_many_files()
                return message.content, message.descriptors
            self._wait(select.POLLIN)

    def send(self, sequence: int, packed: bytes, goodbye: bool = False) -> None:
        """Sends a message, and waits until it is written: the parent reads whenever it waits."""
        self._channel.put(sequence, packed, (), goodbye)
        while self._channel.unsent:
            self._wait(select.POLLIN | select.POLLOUT)
            self._channel.pump()

    def _wait(self, events: int) -> None:
        if self._channel.broken is not None:
            raise Orphaned
        poll = select.poll()
        poll.register(self._channel, events)
        poll.register(self._descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(_SLICE_MS):
            if descriptor == self._descriptor:
                raise Orphaned

    def alarm(self, descriptor: int) -> Alarm:
        """The alarm with this descriptor, which the parent's end rings, too."""
        return Alarm(self, descriptor, (self._descriptor, self._channel))


def _too_many_files() -> OSError:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return OSError(
        errno.EMFILE,
        f"too many open files in this worker, at most {limit} (RLIMIT_NOFILE, `ulimit -n`): its "
        "program could not send it another one",
    )


class Alarm:
    """Wakes a worker that sleeps: a descriptor that others write to, and the parent's end."""

    def __init__(self, parent: Parent, descriptor: int, ends: tuple[int, Channel]) -> None:
        """Takes the alarm's descriptor, and what shows that the parent or the channel is gone."""
        self.parent_alive = parent.alive
        self._descriptor = descriptor
        process, channel = ends
        self._events = (process, select.POLLIN), (channel, 0), (descriptor, select.POLLIN)
        self._poll = select.poll()
        for each, events in self._events:
            self._poll.register(each, events)
        self._epoll: select.epoll | None = None

    def ring(self) -> None:
        """Wakes the worker; any thread may call it."""
        os.write(self._descriptor, _RING)

    def doze(self) -> None:
        """Sleeps until it rings, or the parent or the channel is gone."""
        self._poll.poll()
        self.silence()

    def silence(self) -> None:
        """Has it not rung."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 8)

    def fileno(self) -> int:
        """A descriptor that is readable from when ``doze`` would return."""
        if self._epoll is None:
            self._epoll = select.epoll()
            for each, events in self._events:  # which have the same numbers for poll
                self._epoll.register(each, events)
        return self._epoll.fileno()


def run_forked(task: Task, descriptor: int, parent_pid: int) -> None:
    """The main function of a worker that the parent has forked; ``descriptor`` is its channel."""
    with contextlib.suppress(Orphaned):
        take_environ(task.environ)
        run_worker(task, Parent(parent_pid, Channel(descriptor)))


def run_worker(task: Task, parent: Parent) -> None:
    """The main function of a worker process; it ends silently if its parent is gone."""
    with contextlib.suppress(Orphaned):
        _run(task, parent)


def _run(task: Task, parent: Parent) -> None:
    _leave_signals_to_program()
    lead_family(task.mark)
    parent.watch(task.mark)
    # A process group of its own keeps Ctrl-C, Ctrl-Z and the like away: they are for the parent,
    # which decides what happens to a worker and to the processes that its envs start.
    os.setpgid(0, 0)
    if task.forked:
        gc.freeze()  # collections must not write to, and so copy, the parent's pages
    watch_forks()
    take_output(task.forked, parent.receive(0)[1])
    offer_stacks(parent.pid, task.index, task.envs)
    if task.pinned:
        pin_to_core(task.index)
    inherited = inherited_openmp() if task.forked else []
    limit = partial(limit_threads, task.threads, inherited)
    limit()
    host = EnvHost(task.index, task.envs.start, parent, task.overlap, task.spare_envs, limit=limit)
    try:
        _serve(host, parent, task, limit)
    finally:
        parent.end_with_it()
        failures = host.close()
        end_own_family(task.mark, _PATIENCE_S)
        parent.send(0, parent.pack(failures), goodbye=True)
        finish_output()
    parent.close()


def _leave_signals_to_program() -> None:
    """Has this process, a worker, act on no signal that its program is sent, except SIGTERM.

    A program's handler (it saves its work, say) must not run in a fork of the program, and a job
    scheduler sends its signals to every process of a job.
    """
    signal.set_wakeup_fd(-1)  # what is written to it runs handlers in the program's event loop
    inherited = {number for number in signal.valid_signals() if callable(signal.getsignal(number))}
    fatal = set(filter(is_unhandled, SCHEDULER_SIGNALS))
    for number in (inherited | fatal) - {signal.SIGTERM, *_TIMER_SIGNALS}:
        # A handler, because programs that an env executes would inherit SIG_IGN.
        signal.signal(number, lambda number, frame: None)
        signal.siginterrupt(number, False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # In its own group it runs in the background, where an env that sets the terminal is stopped.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENT_SIGNALS)


def take_environ(changes: Mapping[str, str | None]) -> None:
    """Changes environment variables; None removes one."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _serve(host: EnvHost, parent: Parent, task: Task, limit: Callable[[], None]) -> None:
    with Imports() if task.first else contextlib.nullcontext() as imports:
        report = _built(host, parent, task, limit, imports)
    parent.send(0, parent.pack(report))
    if isinstance(report, Failure):
        return
    packed, descriptors = parent.receive(0)
    attachment = parent.unpack(packed)
    if attachment is None:  # another worker failed
        return
    descriptor, alarm, depot, *kept = descriptors
    parent.depot = Depot(depot)
    try:
        memory = MappedMemory(descriptor, attachment.nbytes)
    finally:
        os.close(descriptor)
    host.loop(Segment.open(memory), attachment, kept)
    if attachment.mends:
        # By this signal the parent interrupts a step that takes too long.
        signal.signal(signal.SIGUSR1, lambda number, frame: host.interrupt(attachment.limits))
    parent.send(0, parent.pack(None))
    host.serve(parent.alarm(alarm))


def _built(
    host: EnvHost,
    parent: Parent,
    task: Task,
    limit: Callable[[], None],
    imports: Imports | None,
) -> Report | Failure:
    """Builds the envs, and reports what the first one has imported."""

    def first_built() -> None:
        if imports is not None:
            parent.send(0, parent.pack(Imported(imports.modules())))

    doing = "start"
    try:
        if task.forked:
            free_generators()
        doing = "worker_init"
        if task.registry is not None:
            join_registry(task.registry)
        init = loads_in_main(task.init) if isinstance(task.init, bytes) else task.init
        if init is not None:
            init(task.index)
        doing = "unpickle env_fns"  # this imports the user's modules
        env_fns = task.env_fns
        if isinstance(env_fns, bytes):
            with kept_registry():
                env_fns = loads_in_main(env_fns)
        # After the imports, because modules of the user's may seed the generators, too.
        seed_generators(task.seeds)
        report = host.build(env_fns, first_built)
        limit()  # once more, for libraries that the envs have loaded
        return report
    except BaseException as error:
        return Failure.of(error, host.first_env, host.index, doing)

"""Traces: a timeline of parent and workers, recorded while a block runs, written at its end."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from gymnasium.error import ClosedEnvironmentError

from shmvec._core.links import Links
from shmvec._core.trace import Recorder, Switch, read, trace_bytes
from shmvec._core.turn import Turn
from shmvec._parent import timeline
from shmvec._parent.arguments import checked_count
from shmvec._parent.recovery import Recovery
from shmvec._parent.supervisor import Workers
from shmvec._shared.memory import map_memory, reserve_memory
from shmvec._shared.signals import uninterrupted
from shmvec.faults import Fault

if TYPE_CHECKING:
    from shmvec.exchange import Exchange

__all__ = ["Trace", "Tracing", "trace"]

_SIZE_LEAST = 16
_SIZE_MOST = 1 << 26
_MESSAGE_MOST = 500  # characters of an error's that are written


class Tracing:
    """Those parts of an exchange that are traced, and the trace that is being recorded, if any."""

    def __init__(self, turn: Turn, workers: Workers, links: Links, recovery: Recovery) -> None:
        """Takes the parts."""
        self.turn = turn
        self.workers = workers
        self.links = links
        self.recovery = recovery
        self._current: weakref.ref[Trace] | None = None

    @property
    def current(self) -> Trace | None:
        """The trace that is being recorded.

        One that was forgotten, as Ctrl-C came where nobody could end it, is in nobody's way: its
        switch is gone, too.
        """
        return None if self._current is None else self._current()

    @current.setter
    def current(self, trace: Trace | None) -> None:
        self._current = None if trace is None else weakref.ref(trace)

    def pids(self) -> list[int]:
        """The process of each worker; this one where there are none."""
        pids = [process.pid for process in self.workers.processes]
        return pids or [os.getpid()]


class Trace:
    """What parent and workers do, from ``start()`` to ``stop()`` or in a ``with`` block.

    Attributes:
        path: Where the timeline is written.
        size: How many entries there is room for, of each worker and of the parent.
        overwritten: Once written: how many there was no room for, the oldest ones, of each worker
            and, last, of the parent.
    """

    def __init__(self, tracing: Tracing, path: str | os.PathLike[str], size: Any) -> None:
        """Made by ``ShmVectorEnv.trace``."""
        self.path = os.path.abspath(os.fsdecode(path))
        size = checked_count("size", size)
        self.size = 1 << (min(max(size, _SIZE_LEAST), _SIZE_MOST) - 1).bit_length()
        self.overwritten: list[int] = []
        self._tracing = tracing
        self._owner = os.getpid()
        self._memory: Any = None
        self._switch: Switch | None = None

    def start(self) -> None:
        """Begins to record.

        Raises:
            ClosedEnvironmentError: The vector env is closed.
            OSError: The file cannot be written, or there is not enough shared memory.
            RuntimeError: Another trace is being recorded; a worker has not even come to many that
                were begun before; another thread is in a call of the vector env.
        """
        tracing = self._tracing
        with tracing.turn.aside():
            if tracing.links.closed:
                raise ClosedEnvironmentError("Trying to begin a trace after a call to `close()`.")
            if tracing.current is not None:
                raise RuntimeError(
                    f"a trace is being recorded already, to {tracing.current.path}: one at a time"
                )
            try:
                with uninterrupted():
                    self._begin()
            except BaseException:  # also Ctrl-C, by which the caller never learns that it has begun
                self._drop()
                raise

    def _begin(self) -> None:
        """Has everyone record."""
        tracing, workers = self._tracing, self._tracing.workers
        rings = len(workers.ranges) + 1
        nbytes = trace_bytes(rings, self.size)
        with contextlib.closing(_Memory(nbytes)) as memory:
            _check_writable(self.path)
            self._memory = memory.mapped
            self._switch = Switch(memory.mapped)
            self._began = time.monotonic_ns()
            self._pids = [[pid] for pid in tracing.pids()]
            self._told: list[tuple[int, str, dict[str, Any]]] = []
            tracing.current = self
            tracing.recovery.heard = partial(_note, self._told, self._pids, workers)
            size = nbytes, rings, self.size
            workers.kept.put("trace", size, memory.descriptor)
            up = [index for index in range(rings - 1) if workers.is_up(index)]
            recorder = Recorder(self._memory, rings, self.size, rings - 1, os.getpid(), takes=True)
            tracing.links.record(recorder, up, workers.pack(size), memory.descriptor)

    def stop(self) -> None:
        """Ends the trace, and writes it; where there is none, does nothing.

        Raises:
            OSError: It cannot be written.
            RuntimeError: Another thread is in a call of the vector env.
        """
        if self._memory is None or self._owner != os.getpid():  # a fork, whose parent goes on
            return
        recorded = None
        try:
            with self._tracing.turn.aside(), uninterrupted():
                recorded = self._end()
        finally:
            if recorded is not None:
                _save(self.path, recorded)

    def _end(self) -> timeline.Recorded:
        """Has nobody record any more; returns what there is."""
        tracing, memory = self._tracing, self._memory
        if self._switch is not None:
            self._switch.off()
        tracing.links.record(None)
        tracing.workers.kept.drop("trace")
        tracing.recovery.heard = None
        tracing.current = self._memory = self._switch = None
        return self._recorded(memory)

    def _drop(self) -> None:
        """Ends what was begun in part, or in vain."""
        if self._tracing.current is self:
            self._end()
        self._memory = self._switch = None

    def _recorded(self, memory: Any) -> timeline.Recorded:
        """What there is in the rings."""
        tracing, ranges = self._tracing, self._tracing.workers.ranges
        rings = len(ranges) + 1
        read_in = [read(memory, rings, self.size, index) for index in range(rings)]
        self.overwritten = [lost for _, lost in read_in]
        now = time.monotonic_ns()  # after that: what is in the rings had ended by then
        doing = tracing.links.insight().doing(now)
        for index in range(len(ranges)):
            _know(self._pids, tracing.workers, index)
        busy = [
            None if each is None else (each[0], each[1], now - round(1e9 * each[2]))
            for each in doing
        ]
        up = map(tracing.workers.is_up, range(len(ranges)))
        idle = [each and tracing.links.has_answered(index) for index, each in enumerate(up)]
        return timeline.Recorded(
            [entries for entries, _ in read_in],
            self.overwritten,
            ranges,
            (self._began, now),
            self._pids,
            os.getpid(),
            busy,
            idle,
            self._told,
        )

    def __enter__(self) -> Trace:
        """Begins to record."""
        self.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Ends the trace, and writes it, whatever was raised meanwhile."""
        if error is not None and self._memory is not None:
            name, message = type(error).__name__, ""
            with contextlib.suppress(Exception):  # whatever its own code does
                message = str(error)[:_MESSAGE_MOST]
            told = {"type": name, "message": message}
            self._told.append((time.monotonic_ns(), f"raised: {name}", told))
        self.stop()


class _Memory:
    """Shared memory to be handed to workers; its descriptor is open until ``close``."""

    def __init__(self, nbytes: int) -> None:
        """Reserves it."""
        self.descriptor = reserve_memory(nbytes)
        try:
            self.mapped = map_memory(self.descriptor, nbytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the descriptor; what is mapped stays."""
        os.close(self.descriptor)


def _check_writable(path: str) -> None:
    """Raises OSError if a file cannot be written; what is in it stays; where is none, is none."""
    # Without O_NONBLOCK a pipe that nobody reads would have us wait.
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags))
    except FileNotFoundError:
        path = os.path.realpath(path)
        os.close(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666))
        os.unlink(path)


def _save(path: str, recorded: timeline.Recorded) -> None:
    """Writes a trace beside its file, whose place that then takes: it is whole, or as it was.

    What is no file is written to as it is; and so is one in somebody else's folder.
    """
    mode = None
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode  # of an open pipe in /proc no other path can be told
    if mode is None or stat.S_ISREG(mode):
        path = os.path.realpath(path)
    folder = os.path.dirname(path)
    if not (mode is None or stat.S_ISREG(mode)) or not os.access(folder, os.W_OK | os.X_OK):
        with open(path, "w", encoding="utf-8") as file:
            timeline.write(file, recorded)
        return
    beside = os.path.join(folder, f".shmvec-{secrets.token_hex(8)}.json")
    try:
        with open(beside, "x", encoding="utf-8") as file:
            timeline.write(file, recorded)
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
        try:
            os.replace(beside, path)
        except OSError:  # it is mounted there by itself, or somebody else's
            shutil.copyfile(beside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def _know(pids: list[list[int]], workers: Workers, index: int) -> None:
    """Notes which process a worker is, if it is one, and it has got so far as to record."""
    if workers.inline is None and (workers.is_up(index) or workers.stopped):
        pid = workers.processes[index].pid
        if pids[index][-1] != pid:
            pids[index].append(pid)


def _note(
    told: list[tuple[int, str, dict[str, Any]]],
    pids: list[list[int]],
    workers: Workers,
    fault: Fault,
) -> None:
    """Notes a fault, and the process that it may be the end of."""
    _know(pids, workers, fault.worker)
    what = "restart" if fault.done == "restart" else "fault"
    message = fault.message[:_MESSAGE_MOST]
    more = {"env": fault.env, "type": fault.type, "message": message, "done": fault.done}
    told.append((time.monotonic_ns(), f"{what} of worker {fault.worker}", more))


def trace(self: Any, path: str | os.PathLike[str], *, size: int = 65_536) -> Trace:  # noqa: D417
    """Records a timeline of parent and workers, env by env, while a ``with`` block runs.

    Args:
        path: A file that is written at the end, also if the block raises: JSON in Chrome's
            trace-event format, which https://ui.perfetto.dev and chrome://tracing open.
        size: Of how many entries of each worker the last ones are kept; rounded up to a power of
            two. A step is an entry, and so is a reset and each phase of a wait; of 24 bytes.

    Returns:
        What the block is ``with``: a :class:`Trace`, which has ``start()`` and ``stop()``, too.

    Raises:
        ClosedEnvironmentError: After ``close``.
        OSError: As the block begins: the file cannot be written, or there is not enough shared
            memory.
        RuntimeError: Then: another trace is being recorded; or a worker has not even come to many
            that were begun before.

    Example:
        >>> import os, tempfile
        >>> import shmvec
        >>> envs = shmvec.make_vec("CartPole-v1", 4)
        >>> path = os.path.join(tempfile.mkdtemp(), "run.json")
        >>> with envs.trace(path):
        ...     _ = envs.reset(seed=0)
        ...     _ = envs.step([0, 1, 1, 0])
        >>> envs.close()
    """
    exchange: Exchange = self.exchange
    exchange.check_open()
    return Trace(exchange.tracing, path, size)

"""Traces: a timeline of parent and workers, recorded while a block runs, written at its end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from gymnasium.error import ClosedEnvironmentError

from shmvec._arguments import checked_count
from shmvec._core import MappedMemory, Recorder
from shmvec._core.trace import TRACE_KINDS, TraceSwitch, read_trace, trace_bytes
from shmvec._memory.segment import reserve_memory
from shmvec._processes.inline import Workers
from shmvec.exchange import Exchange
from shmvec.faults import Fault, envs_in_words

__all__ = ["Trace"]


_SIZE_LEAST = 16
_SIZE_MOST = 1 << 26
_MESSAGE_MOST = 500  # characters of an error's message that are written


class Trace:
    """What parent and workers do, from ``start()`` to ``stop()`` or in a ``with`` block.

    Attributes:
        path: Where the timeline is written.
        size: Number of entries kept for each worker, and for the parent.
        overwritten: Once the trace is written: how many of the oldest entries were lost for want of
            room, of each worker and, last, of the parent.
    """

    def __init__(self, exchange: Exchange, path: str | os.PathLike[str], size: Any) -> None:
        """Prepares a trace; ``ShmVectorEnv.trace`` calls this."""
        exchange.check_open()
        self.path = os.path.abspath(os.fsdecode(path))
        size = checked_count("size", size)
        self.size = 1 << (min(max(size, _SIZE_LEAST), _SIZE_MOST) - 1).bit_length()
        self.overwritten: list[int] = []
        self._tracing = exchange.tracing
        self._owner = os.getpid()
        self._memory: Any = None
        self._switch: TraceSwitch | None = None

    def start(self) -> None:
        """Begins to record.

        Raises:
            ClosedEnvironmentError: The vector env is closed.
            OSError: The file cannot be written, or there is not enough shared memory.
            RuntimeError: Another trace is being recorded; a worker has not yet come to many traces
                that were begun before; another thread is in a call of the vector env.
        """
        self._tracing.guard.beside(self._start)

    def _start(self) -> None:
        tracing = self._tracing
        if tracing.links.closed:
            raise ClosedEnvironmentError("Trying to begin a trace after a call to `close()`.")
        current = tracing.trace()
        if current is not None:
            raise RuntimeError(
                f"a trace is being recorded already, to {current.path}: one at a time"
            )
        try:
            self._begin()
        except BaseException:  # also Ctrl-C: the caller never learns that the trace has begun
            self._stop_recording()
            raise

    def _begin(self) -> None:
        """Has workers and parent record from now on."""
        tracing, workers = self._tracing, self._tracing.workers
        rings = len(workers.ranges) + 1
        nbytes = trace_bytes(rings, self.size)
        descriptor = reserve_memory(nbytes)
        try:
            _check_writable(self.path)
            self._memory = MappedMemory(descriptor, nbytes)
            self._switch = TraceSwitch(self._memory)
            self._began = time.monotonic_ns()
            self._pids = [
                [os.getpid() if workers.is_here(index) else workers.processes[index].pid]
                for index in range(rings - 1)
            ]
            self._events: list[tuple[int, str, dict[str, Any]]] = []
            # Weak: freeing a trace frees its switch, which ends the recording where Ctrl-C came
            # before any code could.
            tracing.trace = weakref.ref(self)
            tracing.recovery.on_fault = partial(_note, self._events, self._pids, workers)
            size = nbytes, rings, self.size
            workers.kept.put("trace", size, descriptor)
            up = [index for index in range(rings - 1) if workers.is_up(index)]
            recorder = Recorder(self._memory, rings, self.size, rings - 1, os.getpid(), takes=True)
            tracing.links.record(recorder, up, workers.pack(size), descriptor)
        finally:
            os.close(descriptor)

    def stop(self) -> None:
        """Ends the trace, and writes it; does nothing if none is being recorded.

        Raises:
            OSError: The trace cannot be written.
            RuntimeError: Another thread is in a call of the vector env.
        """
        if self._memory is None or self._owner != os.getpid():  # in a fork, whose parent records on
            return
        recorded = self._tracing.guard.beside(self._end)
        _save(self.path, recorded)

    def _end(self) -> Recorded:
        """Stops the recording; returns what was recorded."""
        memory = self._memory
        try:
            self._stop_recording()
        except BaseException:  # Ctrl-C in the middle: the rest is done now
            self._stop_recording()
            raise
        return self._recorded(memory)

    def _stop_recording(self) -> None:
        """Has parent and workers stop recording; may be repeated."""
        tracing = self._tracing
        if self._switch is not None:
            self._switch.off()
        if tracing.trace() is self:
            tracing.links.record(None)
            tracing.workers.kept.drop("trace")
            tracing.recovery.on_fault = None
            tracing.trace = _none
        self._memory = self._switch = None

    def _recorded(self, memory: Any) -> Recorded:
        """The contents of the rings."""
        tracing, ranges = self._tracing, self._tracing.workers.ranges
        rings = len(ranges) + 1
        read_in = [read_trace(memory, rings, self.size, index) for index in range(rings)]
        self.overwritten = [lost for _, lost in read_in]
        now = time.monotonic_ns()  # read last: all that the rings hold has ended by then
        insight = tracing.links.insight()
        doing = insight.doing(now)
        for index in range(len(ranges)):
            _know(self._pids, tracing.workers, index)
        busy = [
            None if each is None else (each[0], each[1], now - round(1e9 * each[2]))
            for each in doing
        ]
        up = map(tracing.workers.is_up, range(len(ranges)))
        idle = [each and tracing.links.has_answered(index) for index, each in enumerate(up)]
        return Recorded(
            [entries for entries, _ in read_in],
            self.overwritten,
            ranges,
            (self._began, now),
            self._pids,
            os.getpid(),
            busy,
            idle,
            self._events,
            insight.overlaps,
        )

    def __enter__(self) -> Trace:
        """Begins to record."""
        self.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Ends the trace, and writes it, whatever was raised meanwhile."""
        if error is not None and self._memory is not None:
            name, message = type(error).__name__, ""
            with contextlib.suppress(Exception):  # an exception's `__str__` may raise
                message = str(error)[:_MESSAGE_MOST]
            details = {"type": name, "message": message}
            self._events.append((time.monotonic_ns(), f"raised: {name}", details))
        self.stop()


def _none() -> None:
    """In place of a weak reference to a trace."""


def _check_writable(path: str) -> None:
    """Raises OSError if a file cannot be written; changes no file, and leaves none behind."""
    # O_NONBLOCK, because opening a pipe that has no reader would block.
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags))
    except FileNotFoundError:
        path = os.path.realpath(path)
        os.close(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666))
        os.unlink(path)


def _save(path: str, recorded: Recorded) -> None:
    """Writes a trace to a new file, which then replaces ``path``: never half of a trace.

    What is not an ordinary file (a pipe, a device) is written in place, and so is a file in a
    folder that cannot be written to.
    """
    mode = None
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode  # before realpath, which has no path for a pipe in /proc
    if mode is None or stat.S_ISREG(mode):
        path = os.path.realpath(path)
    folder = os.path.dirname(path)
    if not (mode is None or stat.S_ISREG(mode)) or not os.access(folder, os.W_OK | os.X_OK):
        with open(path, "w", encoding="utf-8") as file:
            write(file, recorded)
        return
    beside = os.path.join(folder, f".shmvec-{secrets.token_hex(8)}.json")
    try:
        with open(beside, "x", encoding="utf-8") as file:
            write(file, recorded)
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
        try:
            os.replace(beside, path)
        except OSError:  # the file is a mount point, or belongs to another user
            shutil.copyfile(beside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def _know(pids: list[list[int]], workers: Workers, index: int) -> None:
    """Notes the process id of a worker, if its process has begun to record."""
    if not workers.is_here(index) and (workers.is_up(index) or workers.stopped):
        pid = workers.processes[index].pid
        if pids[index][-1] != pid:
            pids[index].append(pid)


def _note(
    events: list[tuple[int, str, dict[str, Any]]],
    pids: list[list[int]],
    workers: Workers,
    fault: Fault,
) -> None:
    """Notes a fault, and the process that it may have ended."""
    _know(pids, workers, fault.worker)
    what = "restart" if fault.done == "restart" else "fault"
    message = fault.message[:_MESSAGE_MOST]
    more = {"env": fault.env, "type": fault.type, "message": message, "done": fault.done}
    events.append((time.monotonic_ns(), f"{what} of worker {fault.worker}", more))


_OF_AN_ENV = ("step", "reset", "call", "error")
_AT_A_MOMENT = ("error", "attach")


@dataclass
class Recorded:
    """What was recorded.

    Attributes:
        entries: The entries of each worker and, last, of the parent, oldest first. Those of a
            damaged ring make no sense; the ones that cannot be true are left out.
        overwritten: How many older entries were overwritten.
        ranges: The envs of each worker.
        span: When the trace began and ended, in ns of the monotonic clock.
        pids: For each worker, the ids of its processes, one after the other.
        parent: The parent's process id.
        busy: What each worker is in the middle of: (env, "step", "reset" or "call", since when).
        idle: Whether each worker waits for a request.
        events: Other events, faults for example: (when, what, details).
        overlaps: Whether workers are busy with several envs at once: each env has a track then.
    """

    entries: Sequence[npt.NDArray[np.void]]
    overwritten: Sequence[int]
    ranges: Sequence[range]
    span: tuple[int, int]
    pids: Sequence[Sequence[int]]
    parent: int
    busy: Sequence[tuple[int, str, int] | None]
    idle: Sequence[bool]
    events: Sequence[tuple[int, str, dict[str, Any]]]
    overlaps: bool = False


@dataclass
class _Span:
    """A span of time on the timeline: what a worker or the parent did, and with which env."""

    kind: str
    env: int
    begin: int
    end: int


def write(file: IO[str], recorded: Recorded) -> None:
    """Writes the trace as JSON in Chrome's trace event format."""
    names = [f"worker {index}" for index in range(len(recorded.ranges))]
    overwritten = dict(zip([*names, "parent"], map(int, recorded.overwritten), strict=True))
    head = {"displayTimeUnit": "ns", "otherData": {"overwritten": overwritten}}
    file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
    before = ""
    for event in _events(recorded):
        file.write(before + event)
        before = ",\n"
    file.write("\n]}\n")


def _events(recorded: Recorded) -> Iterator[str]:
    """The events of the trace, each as JSON."""
    parent = recorded.parent
    yield from _named(parent, parent, "parent", 0)
    for when, name, more in recorded.events:
        at = _us(when - recorded.span[0])
        yield json.dumps(
            {"ph": "i", "s": "g", "ts": float(at), "pid": parent, "tid": parent, "name": name}
            | {"args": more}
        )
    own = len(recorded.ranges)
    yield from _spans_of(recorded, recorded.entries[own], own, parent, parent, True)
    for index, envs in enumerate(recorded.ranges):
        entries = recorded.entries[index]
        # The first entry of a process says that it attaches: entries before it are another's.
        begins = np.flatnonzero(entries["kind"] == _ATTACH).tolist()
        pids = [int(entries["env"][begin]) for begin in begins]
        if not begins or begins[0] > 0:
            begins, pids = [0, *begins], [_before(pids, recorded.pids[index]), *pids]
        name = f"worker {index}: {envs_in_words(envs)}"
        ends = [*begins[1:], len(entries)]
        for pid, begin, end in zip(pids, begins, ends, strict=True):
            here = pid == parent
            # A track of its own among the parent's; a small number could be the parent's own pid.
            tid = parent + index + 1 if here else pid
            yield from _named(pid, tid, name, index + 1, here)
            doing = _doing(recorded, index) if end == len(entries) else None
            now = entries[begin:end]
            if not recorded.overlaps:
                yield from _spans_of(recorded, now, index, pid, tid, begin == 0, doing)
                continue
            now = now[np.isin(now["kind"], _OF_ENVS)]
            for env in envs:
                own_doing = doing if doing is not None and doing.env == env else None
                of_env, tid = now[now["env"] == env], pid + 1 + env
                yield from _named(pid, tid, f"env {env}", index + 1, True)
                yield from _spans_of(recorded, of_env, index, pid, tid, begin == 0, own_doing)


def _before(pids: Sequence[int], known: Sequence[int]) -> int:
    """The known process that wrote before the given ones."""
    if pids and pids[0] in known:
        return known[max(0, known.index(pids[0]) - 1)]
    return known[-1]


def _named(pid: int, tid: int, name: str, place: int, within: bool = False) -> Iterator[str]:
    """The events that name a track and set its place."""
    about = {"ph": "M", "ts": 0, "pid": pid, "tid": tid}
    if not within:
        yield json.dumps(about | {"name": "process_name", "args": {"name": name}})
        yield json.dumps(about | {"name": "process_sort_index", "args": {"sort_index": place}})
    yield json.dumps(about | {"name": "thread_name", "args": {"name": name}})


def _spans_of(
    recorded: Recorded,
    entries: npt.NDArray[np.void],
    index: int,
    pid: int,
    tid: int,
    oldest: bool,
    doing: _Span | None = None,
) -> Iterator[str]:
    """The events for a ring's entries by one process, and for what it is in the middle of.

    ``oldest``: these are the oldest entries that the ring still has.
    """
    began, lost = recorded.span[0], recorded.overwritten[index] if oldest else 0
    envs = None if index == len(recorded.ranges) else recorded.ranges[index]
    # Perfetto discards what begins before 0, as the step of an env that hung before the trace.
    last, same = began, None
    for span in _in_order(entries, recorded.span, envs):
        last = max(last, span.end)
        if doing is not None and (span.kind, span.env) == (doing.kind, doing.env):
            same = span
        if lost > 0:
            at = {"ph": "i", "s": "t", "ts": float(_us(span.begin - began)), "pid": pid, "tid": tid}
            yield json.dumps(at | {"name": f"{lost} older entries were overwritten"})
            lost = 0
        yield _shown(span, began, pid, tid)
    # What just ended may be in the ring already: then that entry began at the same time.
    if doing is not None and (same is None or 2 * doing.begin > same.begin + same.end):
        _after(doing, last)
        yield _shown(doing, began, pid, tid, True)


def _doing(recorded: Recorded, index: int) -> _Span | None:
    """What a worker is in the middle of, as far as that is known."""
    began, now = recorded.span
    busy = recorded.busy[index]
    if busy is not None:
        env, operation, since = busy
        return _Span(operation, env, since, now)
    return _Span("wait", 0, began, now) if recorded.idle[index] else None


def _in_order(
    entries: npt.NDArray[np.void], span: tuple[int, int], envs: range | None
) -> Iterator[_Span]:
    """The spans of one process's entries: each follows the one before, or lies within the next.

    Entries were written as they ended. The two clocks of a worker may differ by a little
    (csrc/trace.h): then the span that began first ends first. An entry of unknown kind, of another
    worker's env, or of another time is damaged, and left out.
    """
    began, ended = span
    last = began
    inner: list[_Span] = []  # a reset that a step has made is written before the step
    for begin, end, env, number in _rows(entries):
        kind = TRACE_KINDS.get(number)
        if kind is None or not began - _ASTRAY_NS <= begin <= end <= ended + _ASTRAY_NS:
            continue
        if kind in _OF_AN_ENV and (envs is None or env not in envs):
            continue
        found = _Span(kind, env, min(begin, ended), min(end, ended))
        if kind in _AT_A_MOMENT:
            inner.append(found)
            continue
        within = kind == "step" and all(
            each.env == env and 2 * begin <= each.begin + each.end for each in inner
        )
        if inner and not within:
            for each in inner:
                last = _after(each, last)
                yield each
            inner = []
        if kind == "reset":
            inner.append(found)
            continue
        found.begin = min([found.begin, *(each.begin for each in inner)])
        last = _after(found, last)
        yield found
        before = found.begin
        for each in inner:
            before = _after(each, before)
            each.begin, each.end = min(each.begin, found.end), min(each.end, found.end)
            yield each
        inner = []
    for each in inner:
        last = _after(each, last)
        yield each


def _rows(entries: npt.NDArray[np.void]) -> Iterator[tuple[int, int, int, int]]:
    """Entries as tuples, made some at a time: tuples take ten times the memory of entries."""
    for first in range(0, len(entries), _AT_ONCE):
        yield from entries[first : first + _AT_ONCE].tolist()


def _after(span: _Span, last: int) -> int:
    """Has a span begin no earlier than ``last``; returns its end."""
    span.begin = max(span.begin, last)
    span.end = max(span.end, span.begin)
    return span.end


def _shown(span: _Span, began: int, pid: int, tid: int, unfinished: bool = False) -> str:
    """A span as JSON, formatted by hand: there are many, and nothing in them needs escapes."""
    name, kind = span.kind, span.kind.partition(":")[0]
    if kind in _OF_AN_ENV:
        name = f"{name} env {span.env}"
    at = f'"ts":{_us(span.begin - began)},"pid":{pid},"tid":{tid},"name":"{name}","cat":"{kind}"'
    if kind in _AT_A_MOMENT:
        return f'{{"ph":"i","s":"t",{at}}}'
    more = ',"args":{"unfinished":true}' if unfinished else ""
    return f'{{"ph":"X","dur":{_us(span.end - span.begin)},{at}{more}}}'


def _us(ns: int) -> str:
    """Nanoseconds as a text in microseconds."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


_OF_ENVS = [number for number, name in TRACE_KINDS.items() if name in _OF_AN_ENV]
_ATTACH = next(number for number, name in TRACE_KINDS.items() if name == "attach")
_AT_ONCE = 512
_ASTRAY_NS = 1_000_000_000  # by which the two clocks of a worker may differ

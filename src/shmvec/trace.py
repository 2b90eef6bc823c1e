"""Traces: timelines of parent and workers, recorded during a block and written at its end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
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
from shmvec._processes.supervisor import Supervisor
from shmvec.exchange import Exchange
from shmvec.faults import Fault, envs_in_words

__all__ = ["Trace"]

_MIN_SIZE = 16
_MAX_SIZE = 1 << 26
_MAX_MESSAGE_LENGTH = 500  # characters of an error's message that are written


class Trace:
    """A timeline of what parent and workers do, from ``start()`` to ``stop()`` or in a ``with``.

    Attributes:
        path: The file to which the timeline is written.
        size: Number of entries kept for each worker, and for the parent.
        overwritten: Once the trace is written, the number of oldest entries that newer ones have
            overwritten, of each worker and, last, of the parent.
    """

    def __init__(self, exchange: Exchange, path: str | os.PathLike[str], size: Any) -> None:
        """Prepares a trace; ``ShmVectorEnv.trace`` calls this."""
        exchange.check_open()
        self.path = os.path.abspath(os.fsdecode(path))
        size = checked_count("size", size)
        self.size = 1 << (min(max(size, _MIN_SIZE), _MAX_SIZE) - 1).bit_length()
        self.overwritten: list[int] = []
        self._tracing = exchange.tracing
        self._owner_pid = os.getpid()
        self._memory: Any = None
        self._switch: TraceSwitch | None = None

    def start(self) -> None:
        """Begins to record.

        Raises:
            ClosedEnvironmentError: The vector env is closed.
            OSError: The file cannot be written, or there is not enough shared memory.
            RuntimeError: Another trace is being recorded; a worker has yet to begin many earlier
                traces; another thread is in a call of the vector env.
        """
        self._tracing.guard.run_reentrant(self._start)

    def _start(self) -> None:
        tracing = self._tracing
        if tracing.links.closed:
            raise ClosedEnvironmentError("Trying to begin a trace after a call to `close()`.")
        current = tracing.trace()
        if current is not None:
            raise RuntimeError(
                f"a trace is being recorded already, to {current.path}: stop() it first"
            )
        try:
            self._start_recording()
        except BaseException:  # also Ctrl-C: the caller does not know that the trace has begun
            self._stop_recording()
            raise

    def _start_recording(self) -> None:
        """Has workers and parent begin to record."""
        tracing, workers = self._tracing, self._tracing.workers
        rings = len(workers.ranges) + 1
        nbytes = trace_bytes(rings, self.size)
        descriptor = reserve_memory(nbytes)
        try:
            _check_writable(self.path)
            self._memory = MappedMemory(descriptor, nbytes)
            self._switch = TraceSwitch(self._memory)
            self._begin_ns = time.monotonic_ns()
            self._pids = [
                [os.getpid() if workers.is_inline(index) else workers.processes[index].pid]
                for index in range(rings - 1)
            ]
            self._events: list[tuple[int, str, dict[str, Any]]] = []
            # A weak reference, so that a trace that is lost to Ctrl-C is freed: freeing its switch
            # ends the recording.
            tracing.trace = weakref.ref(self)
            tracing.recovery.on_fault = partial(_note_fault, self._events, self._pids, workers)
            size = nbytes, rings, self.size
            workers.shared_descriptors.put("trace", size, descriptor)
            up = [index for index in range(rings - 1) if workers.is_up(index)]
            ring, pid = rings - 1, os.getpid()
            recorder = Recorder(self._memory, rings, self.size, ring, pid, is_caller=True)
            tracing.links.record(recorder, up, workers.pack(size), descriptor)
        finally:
            os.close(descriptor)

    def stop(self) -> None:
        """Ends the trace, and writes it; does nothing if it is not being recorded.

        Raises:
            OSError: The trace cannot be written.
            RuntimeError: Another thread is in a call of the vector env.
        """
        if self._memory is None or self._owner_pid != os.getpid():  # a fork's parent goes on
            return
        recording = self._tracing.guard.run_reentrant(self._finish)
        _save(self.path, recording)

    def _finish(self) -> Recording:
        memory = self._memory
        try:
            self._stop_recording()
        except BaseException:  # Ctrl-C in the middle: do the rest
            self._stop_recording()
            raise
        return self._recording(memory)

    def _stop_recording(self) -> None:
        """Has parent and workers stop recording; may be repeated."""
        tracing = self._tracing
        if self._switch is not None:
            self._switch.turn_off()
        if tracing.trace() is self:
            tracing.links.record(None)
            tracing.workers.shared_descriptors.pop("trace", None)
            tracing.recovery.on_fault = None
            tracing.trace = _no_trace
        self._memory = self._switch = None

    def _recording(self, memory: Any) -> Recording:
        """The contents of the rings."""
        tracing, ranges = self._tracing, self._tracing.workers.ranges
        rings = len(ranges) + 1
        contents = [read_trace(memory, rings, self.size, index) for index in range(rings)]
        self.overwritten = [lost for _, lost in contents]
        now = time.monotonic_ns()  # after the rings were read: all their entries have ended
        insight = tracing.links.insight()
        unfinished: list[tuple[str, int, int] | None] = [None] * len(ranges)
        for index, doing in enumerate(insight.doing(now)):
            _note_pid(self._pids, tracing.workers, index)
            if doing is not None:
                env, operation, for_s, _ = doing
                unfinished[index] = operation, env, now - round(1e9 * for_s)
            elif tracing.workers.is_up(index) and tracing.links.has_answered(index):
                unfinished[index] = "wait", 0, self._begin_ns
        return Recording(
            [entries for entries, _ in contents],
            self.overwritten,
            ranges,
            (self._begin_ns, now),
            self._pids,
            os.getpid(),
            unfinished,
            self._events,
            insight.overlaps,
        )

    def __enter__(self) -> Trace:
        """Begins to record."""
        self.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Ends the trace, and writes it, also if the block has raised."""
        if error is not None and self._memory is not None:
            name, message = type(error).__name__, ""
            with contextlib.suppress(Exception):  # an exception's `__str__` may raise
                message = str(error)[:_MAX_MESSAGE_LENGTH]
            details = {"type": name, "message": message}
            self._events.append((time.monotonic_ns(), f"raised: {name}", details))
        self.stop()


def _no_trace() -> None:
    """Stands for a weak reference while no trace is recorded."""


def _check_writable(path: str) -> None:
    """Raises OSError if a file cannot be written; changes and creates no file."""
    # O_NONBLOCK, because opening a pipe without a reader would block.
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags))
    except FileNotFoundError:
        path = os.path.realpath(path)
        os.close(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666))
        os.unlink(path)


def _save(path: str, recording: Recording) -> None:
    """Writes a trace to a new file, which then replaces ``path`` at once.

    If ``path`` is a pipe or a device, or in a folder that cannot be written to, it is written in
    place.
    """
    is_file = os.path.isfile(path) or not os.path.exists(path)
    if is_file:
        path = os.path.realpath(path)  # which cannot resolve a pipe in /proc
    folder = os.path.dirname(path)
    if not is_file or not os.access(folder, os.W_OK | os.X_OK):
        with open(path, "w", encoding="utf-8") as file:
            write(file, recording)
        return
    temporary = os.path.join(folder, f".shmvec-{secrets.token_hex(8)}.json")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            write(file, recording)
        if os.path.exists(path):
            shutil.copymode(path, temporary)
        try:
            os.replace(temporary, path)
        except OSError:  # the file is a mount point, or belongs to another user
            shutil.copyfile(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _note_pid(pids: list[list[int]], workers: Supervisor, index: int) -> None:
    """Notes the process id of a worker, if its process has begun to record."""
    if not workers.is_inline(index) and (workers.is_up(index) or workers.stopped):
        pid = workers.processes[index].pid
        if pids[index][-1] != pid:
            pids[index].append(pid)


def _note_fault(
    events: list[tuple[int, str, dict[str, Any]]],
    pids: list[list[int]],
    workers: Supervisor,
    fault: Fault,
) -> None:
    """Notes a fault, and the process that it may have ended."""
    _note_pid(pids, workers, fault.worker)
    kind = "restart" if fault.done == "restart" else "fault"
    message = fault.message[:_MAX_MESSAGE_LENGTH]
    details = {"env": fault.env, "type": fault.type, "message": message, "done": fault.done}
    events.append((time.monotonic_ns(), f"{kind} of worker {fault.worker}", details))


_ENV_KINDS = ("step", "reset", "call", "error")
_INSTANT_KINDS = ("error", "attach")
_ENV_KIND_NUMBERS = [number for number, name in TRACE_KINDS.items() if name in _ENV_KINDS]
_ATTACH_NUMBER = next(number for number, name in TRACE_KINDS.items() if name == "attach")
_CHUNK_SIZE = 512
_MAX_SKEW_NS = 1_000_000_000  # between the two clocks of a worker


@dataclass
class Recording:
    """The entries of a trace, and what is needed to draw its timeline.

    Attributes:
        entries: The entries of each worker and, last, of the parent, oldest first. A damaged ring
            may hold entries that cannot be true: they are left out.
        overwritten: Number of older entries that were overwritten, by ring.
        ranges: The envs of each worker.
        span: When the trace began and ended, in ns of the monotonic clock.
        pids: For each worker, the ids of its processes, one after the other.
        parent: The parent's process id.
        unfinished: What each worker is doing: (kind, env, since when); None: it is not known.
        events: Other events, faults for example: (time, name, details).
        overlaps: Whether workers step several envs at once: then each env has a track.
    """

    entries: Sequence[npt.NDArray[np.void]]
    overwritten: Sequence[int]
    ranges: Sequence[range]
    span: tuple[int, int]
    pids: Sequence[Sequence[int]]
    parent: int
    unfinished: Sequence[tuple[str, int, int] | None]
    events: Sequence[tuple[int, str, dict[str, Any]]]
    overlaps: bool = False


@dataclass
class _Span:
    """A span on the timeline: what a worker or the parent did, with which env, and when."""

    kind: str
    env: int
    begin: int
    end: int


def write(file: IO[str], recording: Recording) -> None:
    """Writes the trace as JSON in Chrome's trace event format."""
    names = [f"worker {index}" for index in range(len(recording.ranges))]
    overwritten = dict(zip([*names, "parent"], map(int, recording.overwritten), strict=True))
    head = {"displayTimeUnit": "ns", "otherData": {"overwritten": overwritten}}
    file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
    before = ""
    for event in _events(recording):
        file.write(before + event)
        before = ",\n"
    file.write("\n]}\n")


def _events(recording: Recording) -> Iterator[str]:
    """The events of a trace, each as JSON."""
    parent = recording.parent
    yield from _track_names(parent, parent, "parent", 0)
    for when, name, more in recording.events:
        at = _us(when - recording.span[0])
        yield json.dumps(
            {"ph": "i", "s": "g", "ts": float(at), "pid": parent, "tid": parent, "name": name}
            | {"args": more}
        )
    own = len(recording.ranges)
    yield from _span_events(recording, recording.entries[own], own, parent, parent, True)
    for index, envs in enumerate(recording.ranges):
        entries = recording.entries[index]
        # The first entry of a process says that it attaches: the ones before are of another one.
        begins = np.flatnonzero(entries["kind"] == _ATTACH_NUMBER).tolist()
        pids = [int(entries["env"][begin]) for begin in begins]
        if not begins or begins[0] > 0:
            begins, pids = [0, *begins], [_earlier_pid(pids, recording.pids[index]), *pids]
        name = f"worker {index}: {envs_in_words(envs)}"
        ends = [*begins[1:], len(entries)]
        for pid, begin, end in zip(pids, begins, ends, strict=True):
            here = pid == parent
            # A track among the parent's; a small number could be the parent's own pid.
            tid = parent + index + 1 if here else pid
            yield from _track_names(pid, tid, name, index + 1, here)
            unfinished = recording.unfinished[index] if end == len(entries) else None
            doing = unfinished and _Span(*unfinished, recording.span[1])
            now = entries[begin:end]
            if not recording.overlaps:
                yield from _span_events(recording, now, index, pid, tid, begin == 0, doing)
                continue
            now = now[np.isin(now["kind"], _ENV_KIND_NUMBERS)]
            for env in envs:
                own_doing = doing if doing is not None and doing.env == env else None
                of_env, tid = now[now["env"] == env], pid + 1 + env
                yield from _track_names(pid, tid, f"env {env}", index + 1, True)
                yield from _span_events(recording, of_env, index, pid, tid, begin == 0, own_doing)


def _earlier_pid(pids: Sequence[int], known: Sequence[int]) -> int:
    """The process that wrote before the first of ``pids``, out of the ``known`` ones."""
    if pids and pids[0] in known:
        return known[max(0, known.index(pids[0]) - 1)]
    return known[-1]


def _track_names(pid: int, tid: int, name: str, place: int, nested: bool = False) -> Iterator[str]:
    """The events that name a track, and its process unless ``nested``, and set its place."""
    about = {"ph": "M", "ts": 0, "pid": pid, "tid": tid}
    if not nested:
        yield json.dumps(about | {"name": "process_name", "args": {"name": name}})
        yield json.dumps(about | {"name": "process_sort_index", "args": {"sort_index": place}})
    yield json.dumps(about | {"name": "thread_name", "args": {"name": name}})


def _span_events(
    recording: Recording,
    entries: npt.NDArray[np.void],
    index: int,
    pid: int,
    tid: int,
    oldest: bool,
    doing: _Span | None = None,
) -> Iterator[str]:
    """The events for a process's entries in ring ``index``, and for ``doing``, which has not ended.

    ``oldest``: these are the oldest entries that the ring still has.
    """
    began, lost = recording.span[0], recording.overwritten[index] if oldest else 0
    envs = None if index == len(recording.ranges) else recording.ranges[index]
    # Perfetto discards spans that begin before 0, such as the step of an env that hung before.
    last, same = began, None
    for span in _ordered_spans(entries, recording.span, envs):
        last = max(last, span.end)
        if doing is not None and (span.kind, span.env) == (doing.kind, doing.env):
            same = span
        if lost > 0:
            at = {"ph": "i", "s": "t", "ts": float(_us(span.begin - began)), "pid": pid, "tid": tid}
            yield json.dumps(at | {"name": f"{lost} older entries were overwritten"})
            lost = 0
        yield _span_json(span, began, pid, tid)
    # The span may just have ended: then the ring has an entry that began at the same time.
    if doing is not None and (same is None or 2 * doing.begin > same.begin + same.end):
        _begin_after(doing, last)
        yield _span_json(doing, began, pid, tid, True)


def _ordered_spans(
    entries: npt.NDArray[np.void], span: tuple[int, int], envs: range | None
) -> Iterator[_Span]:
    """The spans of a process's entries, each of which follows the one before or lies within it.

    Entries were written as they ended. The two clocks of a worker may differ a little
    (csrc/trace.h): if spans overlap by that, the later one is made to begin later. An entry of
    unknown kind, of another worker's env, or of another time is damaged, and left out.
    """
    began, ended = span
    last = began
    inner: list[_Span] = []  # resets within a step, which are written before the step
    for begin, end, env, number in _entry_tuples(entries):
        kind = TRACE_KINDS.get(number)
        if kind is None or not began - _MAX_SKEW_NS <= begin <= end <= ended + _MAX_SKEW_NS:
            continue
        if kind in _ENV_KINDS and (envs is None or env not in envs):
            continue
        entry = _Span(kind, env, min(begin, ended), min(end, ended))
        if kind in _INSTANT_KINDS:
            inner.append(entry)
            continue
        is_outer = kind == "step" and all(
            each.env == env and 2 * begin <= each.begin + each.end for each in inner
        )
        if inner and not is_outer:
            for each in inner:
                last = _begin_after(each, last)
                yield each
            inner = []
        if kind == "reset":
            inner.append(entry)
            continue
        entry.begin = min([entry.begin, *(each.begin for each in inner)])
        last = _begin_after(entry, last)
        yield entry
        before = entry.begin
        for each in inner:
            before = _begin_after(each, before)
            each.begin, each.end = min(each.begin, entry.end), min(each.end, entry.end)
            yield each
        inner = []
    for each in inner:
        last = _begin_after(each, last)
        yield each


def _entry_tuples(entries: npt.NDArray[np.void]) -> Iterator[tuple[int, int, int, int]]:
    """Entries as tuples, a chunk at a time: tuples take ten times the memory of entries."""
    for first in range(0, len(entries), _CHUNK_SIZE):
        yield from entries[first : first + _CHUNK_SIZE].tolist()


def _begin_after(span: _Span, last: int) -> int:
    """Has a span begin no earlier than ``last``; returns its end."""
    span.begin = max(span.begin, last)
    span.end = max(span.end, span.begin)
    return span.end


def _span_json(span: _Span, began: int, pid: int, tid: int, unfinished: bool = False) -> str:
    """A span as JSON, formatted by hand because there are many; nothing in it needs escapes."""
    name, kind = span.kind, span.kind.partition(":")[0]
    if kind in _ENV_KINDS:
        name = f"{name} env {span.env}"
    at = f'"ts":{_us(span.begin - began)},"pid":{pid},"tid":{tid},"name":"{name}","cat":"{kind}"'
    if kind in _INSTANT_KINDS:
        return f'{{"ph":"i","s":"t",{at}}}'
    more = ',"args":{"unfinished":true}' if unfinished else ""
    return f'{{"ph":"X","dur":{_us(span.end - span.begin)},{at}{more}}}'


def _us(ns: int) -> str:
    """Nanoseconds as a text in microseconds."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"

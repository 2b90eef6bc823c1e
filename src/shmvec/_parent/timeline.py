"""What a trace has recorded, as JSON in Chrome's trace-event format.

Perfetto reads it, too. Each process is a track, whose spans follow each other or lie within each
other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from shmvec._core.trace import KINDS

__all__ = ["Recorded", "write"]

_OF_AN_ENV = ("step", "reset", "call", "error")
_AT_A_MOMENT = ("error", "attach")


@dataclass
class Recorded:
    """What was recorded.

    Attributes:
        entries: Of each worker and, last, of the parent: oldest first. Of a damaged ring they make
            no sense, and are left out as far as that is to be seen.
        overwritten: How many before these are gone.
        ranges: The envs of each worker.
        span: When the trace began and ended, in ns of the monotonic clock.
        pids: Of each worker: the processes that it was, one after the other.
        parent: The parent's process.
        busy: What each worker is in the middle of: (env, "step", "reset" or "call", since when).
        idle: Whether each worker has been asked nothing: it waits.
        told: What happened besides: (when, what, more of it).
    """

    entries: Sequence[npt.NDArray[np.void]]
    overwritten: Sequence[int]
    ranges: Sequence[range]
    span: tuple[int, int]
    pids: Sequence[Sequence[int]]
    parent: int
    busy: Sequence[tuple[int, str, int] | None]
    idle: Sequence[bool]
    told: Sequence[tuple[int, str, dict[str, Any]]]


@dataclass
class _Span:
    """Something that somebody did."""

    kind: str
    env: int
    begin: int
    end: int


def write(file: IO[str], recorded: Recorded) -> None:
    """Writes it all."""
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
    """Each event."""
    parent = recorded.parent
    yield from _named(parent, parent, "parent", 0)
    for when, name, more in recorded.told:
        at = _us(when - recorded.span[0])
        yield json.dumps(
            {"ph": "i", "s": "g", "ts": float(at), "pid": parent, "tid": parent, "name": name}
            | {"args": more}
        )
    own = len(recorded.ranges)
    yield from _spans_of(recorded, recorded.entries[own], own, parent, parent, True)
    for index, envs in enumerate(recorded.ranges):
        entries = recorded.entries[index]
        # Who attaches writes that first: what comes before was written by others.
        begins = np.flatnonzero(entries["kind"] == _ATTACH).tolist()
        pids = [int(entries["env"][begin]) for begin in begins]
        if not begins or begins[0] > 0:
            begins, pids = [0, *begins], [_before(pids, recorded.pids[index]), *pids]
        name = f"worker {index}: envs {envs.start} to {envs.stop - 1}"
        ends = [*begins[1:], len(entries)]
        for pid, begin, end in zip(pids, begins, ends, strict=True):
            here = pid == parent
            # Its own track among the parent's, whose number may be as small as 1 is.
            tid = parent + index + 1 if here else pid
            yield from _named(pid, tid, name, index + 1, here)
            doing = _doing(recorded, index) if end == len(entries) else None
            yield from _spans_of(recorded, entries[begin:end], index, pid, tid, begin == 0, doing)


def _before(pids: Sequence[int], known: Sequence[int]) -> int:
    """The process that wrote before these, of those that are known to have."""
    if pids and pids[0] in known:
        return known[max(0, known.index(pids[0]) - 1)]
    return known[-1]


def _named(pid: int, tid: int, name: str, place: int, within: bool = False) -> Iterator[str]:
    """Says how a track is called, and where it is shown."""
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
    """Entries of a ring that one process has written, and what it is in the middle of.

    ``oldest``: they are the first ones that are left.
    """
    began, lost = recorded.span[0], recorded.overwritten[index] if oldest else 0
    envs = None if index == len(recorded.ranges) else recorded.ranges[index]
    # Perfetto drops what begins before 0: an env that hung before the trace, say.
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
    # What has just ended may be in its ring already: it began when that did.
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
    """What entries of one process say: spans that follow each other, or lie in the next one.

    They were written as they ended. Two clocks may differ by a little (csrc/trace.h): then what
    began first ends first. What is of no known kind, of an env of another's, or of another time is
    damage.
    """
    began, ended = span
    last = began
    inner: list[_Span] = []  # a reset that a step has made is written before the step
    for begin, end, env, number in _rows(entries):
        kind = KINDS.get(number)
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
    """Entries as tuples, some at a time: those of a long trace take ten times their memory."""
    for first in range(0, len(entries), _AT_ONCE):
        yield from entries[first : first + _AT_ONCE].tolist()


def _after(span: _Span, last: int) -> int:
    """Has a span not begin before the last one has ended; returns when it ends."""
    span.begin = max(span.begin, last)
    span.end = max(span.end, span.begin)
    return span.end


def _shown(span: _Span, began: int, pid: int, tid: int, unfinished: bool = False) -> str:
    """An event; written by hand, as there are many, and what is in them needs no escapes."""
    name, kind = span.kind, span.kind.partition(":")[0]
    if kind in _OF_AN_ENV:
        name = f"{name} env {span.env}"
    at = f'"ts":{_us(span.begin - began)},"pid":{pid},"tid":{tid},"name":"{name}","cat":"{kind}"'
    if kind in _AT_A_MOMENT:
        return f'{{"ph":"i","s":"t",{at}}}'
    more = ',"args":{"unfinished":true}' if unfinished else ""
    return f'{{"ph":"X","dur":{_us(span.end - span.begin)},{at}{more}}}'


def _us(ns: int) -> str:
    """In microseconds."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


_ATTACH = next(number for number, name in KINDS.items() if name == "attach")
_AT_ONCE = 512
_ASTRAY_NS = 1_000_000_000  # by which the two clocks of a worker may differ

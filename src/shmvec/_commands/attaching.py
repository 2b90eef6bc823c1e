"""Running vector envs, found and looked at from outside: read-only, without their help.

The segment of a vector env has no name: the process that steps it has it open, as ``/proc/PID/fd``
shows, and its workers have it mapped, as ``/proc/PID/maps`` does. The kernel decides which
processes may look there, as for ptrace: those of the same user. The file is opened for reading
alone. What is in it may be damaged, or not be shmvec's at all: so it is believed no more than the
parent believes it, and a mapping of it must not be cut short under the reader.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from shmvec._core import Insight, Segment
from shmvec._cores import descendants, identity, processes, time_on_cores
from shmvec._memory.segment import SEGMENT
from shmvec.stats import Process, Stats

__all__ = ["Look", "Seen", "UnfitError", "Watch", "find", "printable"]

_NAME = re.compile(rf"(/dev/shm/{SEGMENT}-[0-9a-f]+|/memfd:{SEGMENT}) \(deleted\)")
_HEAD_BYTES = 4096  # more than a header has
_FIND_S = 5.0  # between two searches for others
_MEMORY_S = 5.0  # between two looks at what memory a process has, which takes the kernel a while

_File = tuple[int, int]  # device and inode


class UnfitError(ValueError):
    """A file is no segment, or a damaged one."""


class _View:
    """The front of a segment."""

    def __init__(self, path: str) -> None:
        """Opens it.

        Raises:
            UnfitError: It is none.
            OSError: It is gone, or may not be read.
        """
        # A pipe of that name must not block the reader that opens it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            self._nbytes = status.st_size
            if not stat.S_ISREG(status.st_mode) or 512 * status.st_blocks < self._nbytes:
                raise UnfitError("its memory is not all there")
            try:
                front = Segment.look(os.pread(descriptor, _HEAD_BYTES, 0), self._nbytes).front
            except ValueError as error:
                raise UnfitError(str(error)) from None
            self._read: Callable[[], mmap.mmap | bytes]
            if _is_sealed(descriptor):
                mapped = mmap.mmap(descriptor, front, prot=mmap.PROT_READ)
                self._read = lambda: mapped
                os.close(descriptor)
            else:  # a look at what was cut off would be the end of this process: SIGBUS
                self._read = lambda: os.pread(descriptor, front, 0)
                self._descriptor = descriptor
        except BaseException:
            os.close(descriptor)
            raise

    _descriptor = -1

    def insight(self) -> Insight:
        """What the segment says now.

        Raises:
            UnfitError: It has been damaged.
        """
        try:
            return Insight(Segment.look(self._read(), self._nbytes))
        except ValueError as error:
            raise UnfitError(str(error)) from None

    def __del__(self) -> None:
        """Closes it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _is_sealed(descriptor: int) -> bool:
    """Whether no process can make the file shorter."""
    with contextlib.suppress(OSError):
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    return False


class Seen:
    """A vector env of a running process.

    Attributes:
        pid: The process that steps it.
        command: What that was started as.
        number: Which of that one's it is.
        file: The segment's.
        began: When it was made ready, by this system's monotonic clock.
    """

    def __init__(self, pid: int, file: _File, view: _View) -> None:
        """Takes what was found."""
        self.pid = pid
        self.command = _command(pid)
        self.file = file
        self._view = view
        self._pids: dict[int, tuple[int, str]] = {}
        self._memory: dict[int, tuple[float, Process]] = {}
        insight = view.insight()
        self.number = insight.number
        self.began = time.monotonic() - insight.elapsed_s

    @property
    def in_use(self) -> bool:
        """Whether its process lives, and has not closed it.

        Raises:
            UnfitError: The segment has been damaged.
        """
        with contextlib.suppress(OSError):
            return self.file in _segments_of(self.pid) and _is_in_use(self._view.insight())
        return False

    def stats(self) -> Stats:
        """What ``envs.stats()`` would say there, and the workers' processes.

        Raises:
            UnfitError: The segment has been damaged.
        """
        insight = self._view.insight()
        pids = [self._outside(inside) for inside in insight.processes]
        return Stats.of(
            insight,
            list(map(time_on_cores, pids)),
            list(map(self._process, pids)),
            self._process(self.pid),
        )

    def _outside(self, inside: int) -> int | None:
        """The id of a worker, as it is called here; None: there is no such worker."""
        pid, born = self._pids.get(inside, (None, None))
        if pid is None or _birth(pid) != born:
            self._pids.pop(inside, None)
            pid = _outside(inside, self.pid)
            with contextlib.suppress(OSError):
                # Whatever the segment says.
                if pid is not None and (born := _birth(pid)) and self.file in _mapped_in(pid):
                    self._pids[inside] = pid, born
                    return pid
            return None
        return pid

    def _process(self, pid: int | None) -> Process | None:
        """What a process has in memory, as of late."""
        if pid is None:
            return None
        looked_at, process = self._memory.get(pid, (-_MEMORY_S, None))
        if process is None or looked_at + _MEMORY_S <= time.monotonic():
            process = Process(pid, *_memory(pid))
            self._memory[pid] = time.monotonic(), process
        return process


@dataclass
class Look:
    """What a look at one vector env has shown.

    Attributes:
        seen: Which.
        name: What it is called here: its process, and which of that one's it is.
        total: Since it was made.
        recent: Since the last look; the same, if there was none.
        seconds: How long ago that was.
    """

    seen: Seen
    name: tuple[int, int]
    total: Stats
    recent: Stats
    seconds: float | None

    def heading(self) -> list[str]:
        """Lines that say which vector env it is, and what it has done in all."""
        pid, number = self.name
        which = f", vector env {number}" if number > 1 else ""
        told = [f"process {pid}{which}: {self.seen.command}"]
        if self.seconds is not None:
            total, counts = self.total, self.total.faults
            steps = sum(worker.steps for worker in total.workers)
            faults = counts.crashes + counts.errors + counts.timeouts
            told.append(
                f"ready for {_clock(total.elapsed_s)}: {steps:,} steps, {counts.restarts} "
                f"restarts, {faults} faults; of that the last"
            )
        return told


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


class Watch:
    """Looks at vector envs repeatedly."""

    def __init__(self, pid: int | None) -> None:
        """Prepares to look at the vector envs of a process; None: at all."""
        self.problems: list[str] = []
        self._pid = pid
        self._seen: list[Seen] = []
        self._sought = -_FIND_S
        self._last: dict[Seen, Stats] = {}

    def look(self) -> list[Look]:
        """Looks at the vector envs that there are now.

        Raises:
            OSError: The process is gone, or may not be looked at.
        """
        if time.monotonic() - self._sought >= _FIND_S or not self._seen:
            self._search()
        looks: list[Look] = []
        for seen in self._seen:
            try:
                if not seen.in_use:
                    continue
                total = seen.stats()
            except UnfitError as error:
                self.problems.append(f"a vector env of process {seen.pid}: {error}")
                continue
            before = self._last.get(seen)
            number = seen.number
            while (seen.pid, number) in [each.name for each in looks]:  # one of them is damaged
                number += 1
            recent = total if before is None else total - before
            seconds = None if before is None else recent.elapsed_s
            looks.append(Look(seen, (seen.pid, number), total, recent, seconds))
        self._last = {look.seen: look.total for look in looks}
        self._seen = list(self._last)
        return looks

    def _search(self) -> None:
        """Searches for vector envs; those already known keep their object."""
        found, self.problems = find(self._pid)
        known = {(seen.pid, seen.file): seen for seen in self._seen}
        self._seen = [known.get((seen.pid, seen.file), seen) for seen in found]
        self._sought = time.monotonic()


def find(pid: int | None = None) -> tuple[list[Seen], list[str]]:
    """Vector envs that are in use.

    Args:
        pid: Those of this process; or the one whose worker or fork it is; or, if there is none,
            those of processes that it has started (it is a wrapper: timeout, srun, a shell). None:
            all that this user may look at.

    Returns:
        The vector envs, and a message for each that cannot be looked at.

    Raises:
        OSError: There is no such process, or it may not be looked at.
    """
    files: dict[_File, list[tuple[int, str]]] = {}
    wanted = None if pid is None else _mapped_in(pid).union(_segments_of(pid))
    if pid is not None and not wanted:
        wanted = set()
        for each in descendants(pid):
            with contextlib.suppress(OSError):  # another user's, or it has gone
                wanted.update(_segments_of(each))
    for each in processes():
        with contextlib.suppress(OSError):  # another user's, or it has gone
            for file, path in _segments_of(each).items():
                if wanted is None or file in wanted:
                    files.setdefault(file, []).append((each, path))
    found, problems = [], []
    for file, holders in files.items():
        try:
            seen = _seen(file, holders)
        except (UnfitError, OSError) as error:
            pids = ", ".join(str(holder) for holder, _ in holders)
            problems.append(f"a segment that is open in process {pids} cannot be read: {error}")
        else:
            found += [seen] if seen is not None else []
    return sorted(found, key=lambda each: (each.pid, each.began)), problems


def _seen(file: _File, holders: list[tuple[int, str]]) -> Seen | None:
    """The vector env of a segment, if it is in use."""
    view = _View(holders[0][1])
    insight = view.insight()
    if not _is_in_use(insight):
        return None
    # What the program has started may have inherited it, too.
    owner = _outside(insight.process, holders[0][0])
    if owner is None or owner not in dict(holders):
        raise UnfitError(f"process {insight.process}, whose it was, has gone")
    if not _has_our_clock(owner):
        raise UnfitError(f"process {owner} has a clock of its own (a time namespace)")
    return Seen(owner, file, view)


def _is_in_use(insight: Insight) -> bool:
    try:
        return insight.in_use
    except ValueError as error:
        raise UnfitError(str(error)) from None


def _segments_of(pid: int) -> dict[_File, str]:
    """The segments that a process has open, as one that steps envs, and their paths."""
    found = {}
    for number in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError):  # closed meanwhile
            if _NAME.fullmatch(os.readlink(path)):
                status = os.stat(path)
                found[status.st_dev, status.st_ino] = path
    return found


def _mapped_in(pid: int) -> set[_File]:
    """The segments that a process has mapped, as workers and forks have, too."""
    found = set()
    for line in _lines(pid, "maps"):
        _, _, _, device, inode, *name = line.split(maxsplit=5)
        if name and _NAME.fullmatch(name[0]):
            major, minor = device.split(":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found


def _outside(inside: int, beside: int) -> int | None:
    """The process with this id in the namespace of another (in its container)."""
    with contextlib.suppress(OSError):
        namespace = os.readlink(f"/proc/{beside}/ns/pid")
        if namespace == os.readlink("/proc/self/ns/pid"):
            return inside
        return next(
            (pid for pid in processes() if identity(pid) == (namespace, inside)),
            None,
        )
    return None


def _has_our_clock(pid: int) -> bool:
    """Whether the process has the same clock as this one."""
    with contextlib.suppress(OSError):  # a system without such namespaces
        return os.readlink(f"/proc/{pid}/ns/time") == os.readlink("/proc/self/ns/time")
    return True


def _birth(pid: int) -> str | None:
    """When a process was started, in the kernel's words; None: it has ended."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None


def _memory(pid: int) -> tuple[int | None, int | None]:
    """Bytes that a process has in memory: all, and with only its part of what is shared."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _lines(pid, "smaps_rollup"):
            if line.startswith(("Rss:", "Pss:")):
                found[line[:3]] = 1024 * int(line.split()[1])
    return found.get("Rss"), found.get("Pss")


def _lines(pid: int, name: str) -> Iterable[str]:
    return Path(f"/proc/{pid}/{name}").read_text("utf-8", "replace").splitlines()


def _command(pid: int) -> str:
    """A process's command line, as far as it can be shown."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return printable(" ".join(word.decode("utf-8", "replace") for word in words))
    return "?"


def printable(said: str) -> str:
    """Text of another process, with "?" for what could steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in said)

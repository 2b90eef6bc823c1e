"""Finds running vector envs of other processes, and reads their statistics without their help.

The segment of a vector env has no name: the process that steps it has it open, as ``/proc/PID/fd``
shows, and its workers have it mapped, as ``/proc/PID/maps`` does. The kernel decides which
processes may look there, as for ptrace: those of the same user, and to root all. The file is opened
read-only. It may be damaged, or not be a segment at all, so it is checked as the parent checks it.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from shmvec._core import Insight, Segment
from shmvec._cores import descendants, identity, processes, time_on_cores
from shmvec._memory.segment import SEGMENT, shared_memory_of
from shmvec.stats import Process, Stats

__all__ = ["Look", "Seen", "UnfitError", "Watch", "find", "printable"]

_NAME = re.compile(rf"(/dev/shm/{SEGMENT}-[0-9a-f]+|/memfd:{SEGMENT}) \(deleted\)")
_HEAD_BYTES = 4096  # more than a header has
_FIND_S = 5.0  # between two searches for others
_MEMORY_S = 5.0  # between two looks at what memory a process has, which takes the kernel a while

_File = tuple[int, int]  # device and inode


class UnfitError(ValueError):
    """The file is not a segment, or is a damaged one."""


class _View:
    """A read-only view of a segment's front: its header and all counters, without results."""

    _descriptor = -1

    def __init__(self, pid: int, descriptor: int) -> None:
        """Opens the segment that a process has open.

        Raises:
            UnfitError: The file is not a segment.
            OSError: The file is gone, or may not be read.
        """
        self._descriptor = shared_memory_of(pid, descriptor, _NAME)
        status = os.fstat(self._descriptor)
        self._nbytes = status.st_size
        if 512 * status.st_blocks < self._nbytes:
            raise UnfitError("its memory is not all there")
        try:
            self._front = self._read(_HEAD_BYTES).front
        except ValueError as error:
            raise UnfitError(str(error)) from None

    def _read(self, nbytes: int) -> Segment:
        # Not mapped: a file that is shortened would end this process by SIGBUS.
        return Segment.look(os.pread(self._descriptor, nbytes, 0), self._nbytes)

    def insight(self) -> Insight:
        """The segment's present contents.

        Raises:
            UnfitError: The segment has been damaged.
        """
        try:
            return Insight(self._read(self._front))
        except ValueError as error:
            raise UnfitError(str(error)) from None

    def __del__(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)


class Seen:
    """A vector env of a running process.

    Attributes:
        pid: The process that steps it.
        command: The command line of that process.
        number: Its number among the vector envs of that process.
        file: Device and inode of its segment.
        began: When it was ready, by this system's monotonic clock.
    """

    def __init__(self, pid: int, file: _File, view: _View) -> None:
        """Describes the vector env of a segment that process ``pid`` steps."""
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
        """Whether its process lives and has not closed the vector env.

        Raises:
            UnfitError: The segment has been damaged.
        """
        with contextlib.suppress(OSError):
            return self.file in _segments_of(self.pid) and _is_in_use(self._view.insight())
        return False

    def stats(self) -> Stats:
        """The result of ``envs.stats()`` there, with the memory of its processes.

        Raises:
            UnfitError: The segment has been damaged.
        """
        insight = self._view.insight()
        pids = [self._worker_pid(inside) for inside in insight.processes]
        if insight.caller_steps:
            pids[-1] = None  # the caller, which is shown as such
        return Stats.of(
            insight,
            list(map(time_on_cores, pids)),
            list(map(self._process, pids)),
            self._process(self.pid),
        )

    def _worker_pid(self, inside: int) -> int | None:
        """The id here of the worker with the id ``inside`` there; None if there is none."""
        pid, born = self._pids.get(inside, (None, None))
        if pid is not None and _birth(pid) == born:
            return pid
        self._pids.pop(inside, None)
        pid = _pid_here(inside, self.pid)
        with contextlib.suppress(OSError):
            # The segment may name any process: only one that has it mapped is a worker.
            if pid is not None and (born := _birth(pid)) and self.file in _mapped_in(pid):
                self._pids[inside] = pid, born
                return pid
        return None

    def _process(self, pid: int | None) -> Process | None:
        """The memory of a process, at most ``_MEMORY_S`` old."""
        if pid is None:
            return None
        looked_at, process = self._memory.get(pid, (-_MEMORY_S, None))
        if process is None or looked_at + _MEMORY_S <= time.monotonic():
            process = Process(pid, *_memory(pid))
            self._memory[pid] = time.monotonic(), process
        return process


@dataclass
class Look:
    """The statistics of one vector env at one time.

    Attributes:
        seen: The vector env.
        name: Its process, and its number among the vector envs of that process.
        total: Statistics since it was made.
        recent: Statistics since the last look; ``total`` at the first one.
        seconds: Seconds since the last look; None at the first one.
    """

    seen: Seen
    name: tuple[int, int]
    total: Stats
    recent: Stats
    seconds: float | None

    def heading(self) -> list[str]:
        """Lines that name the vector env and sum up what it has done since it was made."""
        pid, number = self.name
        which = f", vector env {number}" if number > 1 else ""
        lines = [f"process {pid}{which}: {self.seen.command}"]
        if self.seconds is not None:
            total, counts = self.total, self.total.faults
            steps = sum(worker.steps for worker in total.workers)
            faults = counts.crashes + counts.errors + counts.timeouts
            lines.append(
                f"ready for {timedelta(seconds=int(total.elapsed_s))}: {steps:,} steps, "
                f"{counts.restarts} restarts, {faults} faults; of that the last"
            )
        return lines


class Watch:
    """Repeated looks at vector envs, those of one process or all.

    Attributes:
        problems: Messages on segments that could not be read at the last look.
    """

    def __init__(self, pid: int | None) -> None:
        """Prepares to look at the vector envs of a process; None: those of all processes."""
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
            while (seen.pid, number) in [each.name for each in looks]:  # a damaged one lies
                number += 1
            recent = total if before is None else total - before
            seconds = None if before is None else recent.elapsed_s
            looks.append(Look(seen, (seen.pid, number), total, recent, seconds))
        self._last = {look.seen: look.total for look in looks}
        self._seen = list(self._last)
        return looks

    def _search(self) -> None:
        """Searches for vector envs; known ones keep their object, for the next difference."""
        found, self.problems = find(self._pid)
        known = {(seen.pid, seen.file): seen for seen in self._seen}
        self._seen = [known.get((seen.pid, seen.file), seen) for seen in found]
        self._sought = time.monotonic()


def find(pid: int | None = None) -> tuple[list[Seen], list[str]]:
    """Finds vector envs that are in use.

    Args:
        pid: A process that steps vector envs, or a worker or fork of one; if it is neither, the
            vector envs of the processes below it are meant (it may be timeout, srun, a shell).
            None: all that this user may read.

    Returns:
        The vector envs, and a message for each that cannot be read.

    Raises:
        OSError: There is no such process, or it may not be read.
    """
    files: dict[_File, list[tuple[int, int]]] = {}
    wanted = None if pid is None else _mapped_in(pid).union(_segments_of(pid))
    if pid is not None and not wanted:
        wanted = set()
        for each in descendants(pid):
            with contextlib.suppress(OSError):  # another user's, or it is gone
                wanted.update(_segments_of(each))
    for each in processes():
        with contextlib.suppress(OSError):  # another user's, or it is gone
            for file, descriptor in _segments_of(each).items():
                if wanted is None or file in wanted:
                    files.setdefault(file, []).append((each, descriptor))
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


def _seen(file: _File, holders: list[tuple[int, int]]) -> Seen | None:
    """The vector env of a segment, if it is in use."""
    view = _View(*holders[0])
    insight = view.insight()
    if not _is_in_use(insight):
        return None
    # Programs that the owner has started may have inherited the open file.
    owner = _pid_here(insight.process, holders[0][0])
    if owner is None or owner not in dict(holders):
        raise UnfitError(f"process {insight.process}, its owner, is gone")
    if not _has_our_clock(owner):
        raise UnfitError(f"process {owner} has a clock of its own (a time namespace)")
    return Seen(owner, file, view)


def _is_in_use(insight: Insight) -> bool:
    try:
        in_use: bool = insight.in_use
    except ValueError as error:
        raise UnfitError(str(error)) from None
    return in_use


def _segments_of(pid: int) -> dict[_File, int]:
    """The segments that a process has open, with their descriptors: it steps their envs.

    What only looks at them, as this module does, has them open for reading alone.
    """
    found = {}
    for number in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError):  # closed meanwhile
            writes = os.lstat(path).st_mode & stat.S_IWUSR  # as the kernel shows its mode
            if writes and _NAME.fullmatch(os.readlink(path)):
                status = os.stat(path)
                found[status.st_dev, status.st_ino] = int(number)
    return found


def _mapped_in(pid: int) -> set[_File]:
    """The segments that a process has mapped; workers and forks have, too."""
    found = set()
    for line in _lines(pid, "maps"):
        _, _, _, device, inode, *name = line.split(maxsplit=5)
        if name and _NAME.fullmatch(name[0]):
            major, minor = device.split(":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found


def _pid_here(inside: int, beside: int) -> int | None:
    """The id here of the process with the id ``inside`` in the container of ``beside``."""
    with contextlib.suppress(OSError):
        namespace = os.readlink(f"/proc/{beside}/ns/pid")
        if namespace == os.readlink("/proc/self/ns/pid"):
            return inside
        return next((pid for pid in processes() if identity(pid) == (namespace, inside)), None)
    return None


def _has_our_clock(pid: int) -> bool:
    """Whether the process has the same clock as this one."""
    with contextlib.suppress(OSError):  # a system without such namespaces
        return os.readlink(f"/proc/{pid}/ns/time") == os.readlink("/proc/self/ns/time")
    return True


def _birth(pid: int) -> str | None:
    """The start time of a process, in the kernel's ticks; None if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None


def _memory(pid: int) -> tuple[int | None, int | None]:
    """Resident bytes of a process (Rss), and with shared pages counted in part (Pss)."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _lines(pid, "smaps_rollup"):
            if line.startswith(("Rss:", "Pss:")):
                found[line[:3]] = 1024 * int(line.split()[1])
    return found.get("Rss"), found.get("Pss")


def _lines(pid: int, name: str) -> Iterable[str]:
    return Path(f"/proc/{pid}/{name}").read_text("utf-8", "replace").splitlines()


def _command(pid: int) -> str:
    """The command line of a process; "?" if it cannot be read."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return printable(" ".join(word.decode("utf-8", "replace") for word in words))
    return "?"


def printable(text: str) -> str:
    """Replaces what could steer the terminal, in text of another process, by "?"."""
    return "".join(c if c.isprintable() else "?" for c in text)

"""Finds running vector envs of other processes, and reads their statistics without their help.

The segment of a vector env has no name, but its owner has it open (``/proc/PID/fd``), and the
workers have it mapped (``/proc/PID/maps``). The kernel lets a user look at their own processes
there, as for ptrace, and root at all. The file is opened read-only. It may be damaged, or not be a
segment at all, so it is checked as the parent checks it.
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

from shmvec._core import Descriptor, Insight, Segment
from shmvec._cores import descendant_ids, process_identity, process_ids, time_on_cores
from shmvec._memory.segment import SEGMENT_NAME, open_shared_memory
from shmvec.stats import Process, Stats

__all__ = ["RunningVectorEnv", "Snapshot", "Watcher", "find", "printable"]

_PATH = re.compile(rf"(/dev/shm/{SEGMENT_NAME}-[0-9a-f]+|/memfd:{SEGMENT_NAME}) \(deleted\)")
_MAX_HEADER_BYTES = 4096  # more than a header has
_SEARCH_INTERVAL_S = 5.0  # between two searches for vector envs
_MEMORY_INTERVAL_S = 5.0  # the kernel takes a while to count a process's memory

_FileId = tuple[int, int]  # device and inode


class _SegmentView:
    """A read-only view of a segment's header and counters; ValueError: there is none, or damage."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self._file = Descriptor(int, open_shared_memory(pid, descriptor, _PATH))
        status = os.fstat(self._file.number)
        self._nbytes = status.st_size
        if 512 * status.st_blocks < self._nbytes:
            raise ValueError("a part of its memory is missing")
        self._front_nbytes = self._read(_MAX_HEADER_BYTES).front

    def _read(self, nbytes: int) -> Segment:
        # It is not mapped, because SIGBUS would end this process if the file became shorter.
        return Segment.look(os.pread(self._file.number, nbytes, 0), self._nbytes)

    def insight(self) -> Insight:
        return Insight(self._read(self._front_nbytes))


class RunningVectorEnv:
    """A vector env of a running process.

    Its methods raise ValueError if the segment is damaged.

    Attributes:
        pid: The process that steps it.
        command: The command line of that process.
        number: Its number among the vector envs of that process.
        file: Device and inode of its segment.
        ready_at: When it was ready, by this system's monotonic clock.
    """

    def __init__(self, pid: int, file: _FileId, view: _SegmentView) -> None:
        """Describes the vector env of a segment that process ``pid`` steps."""
        self.pid = pid
        self.command = _command_line(pid)
        self.file = file
        self._view = view
        self._pids: dict[int, tuple[int, str]] = {}
        self._memory_usage: dict[int, tuple[float, Process]] = {}
        insight = view.insight()
        self.number = insight.number
        self.ready_at = time.monotonic() - insight.elapsed_s

    @property
    def in_use(self) -> bool:
        """Whether its process lives and has not closed the vector env."""
        with contextlib.suppress(OSError):
            return self.file in _segments_of(self.pid) and bool(self._view.insight().in_use)
        return False

    def stats(self) -> Stats:
        """The result of ``envs.stats()``, with the memory of its processes."""
        insight = self._view.insight()
        pids = [self._worker_pid(inner_pid) for inner_pid in insight.processes]
        if insight.caller_steps:
            pids[-1] = None  # the caller steps these envs, and has its own place in the stats
        return Stats.of(
            insight,
            list(map(time_on_cores, pids)),
            list(map(self._process, pids)),
            self._process(self.pid),
        )

    def _worker_pid(self, inner_pid: int) -> int | None:
        """A worker's id in our namespace, from its id in its own; None if there is none."""
        pid, start_time = self._pids.get(inner_pid, (None, None))
        if pid is not None and _start_time(pid) == start_time:
            return pid
        self._pids.pop(inner_pid, None)
        pid = _outer_pid(inner_pid, self.pid)
        with contextlib.suppress(OSError):
            # A damaged segment may name any process; workers have it mapped.
            if pid is not None and (start := _start_time(pid)) and self.file in _mapped_in(pid):
                self._pids[inner_pid] = pid, start
                return pid
        return None

    def _process(self, pid: int | None) -> Process | None:
        """The memory of a process, at most ``_MEMORY_INTERVAL_S`` old."""
        if pid is None:
            return None
        measured_at, process = self._memory_usage.get(pid, (-_MEMORY_INTERVAL_S, None))
        if process is None or measured_at + _MEMORY_INTERVAL_S <= time.monotonic():
            process = Process(pid, *_memory_usage(pid))
            self._memory_usage[pid] = time.monotonic(), process
        return process


@dataclass
class Snapshot:
    """The statistics of one vector env at one time.

    Attributes:
        vector_env: The vector env.
        name: Its process, and its number among the vector envs of that process.
        total: Statistics since it was made.
        recent: Statistics since the last snapshot; ``total`` in the first one.
        seconds: Seconds since the last snapshot; None in the first one.
    """

    vector_env: RunningVectorEnv
    name: tuple[int, int]
    total: Stats
    recent: Stats
    seconds: float | None

    def heading(self) -> list[str]:
        """Lines that name the vector env, and sum up its work since it was made."""
        pid, number = self.name
        which = f", vector env {number}" if number > 1 else ""
        lines = [f"process {pid}{which}: {self.vector_env.command}"]
        if self.seconds is not None:
            total, counts = self.total, self.total.faults
            steps = sum(worker.steps for worker in total.workers)
            faults = counts.crashes + counts.errors + counts.timeouts
            lines.append(
                f"ready for {timedelta(seconds=int(total.elapsed_s))}: {steps:,} steps, "
                f"{counts.restarts} restarts, {faults} faults; of that the last"
            )
        return lines


class Watcher:
    """Takes snapshots of the vector envs of one process, or of all.

    Attributes:
        problems: Messages on segments that could not be read for the last snapshots.
    """

    def __init__(self, pid: int | None) -> None:
        """Watches the vector envs of a process; None: of all processes."""
        self.problems: list[str] = []
        self._pid = pid
        self._vector_envs: list[RunningVectorEnv] = []
        self._searched_at = -_SEARCH_INTERVAL_S
        self._last_stats: dict[RunningVectorEnv, Stats] = {}

    def take_snapshots(self) -> list[Snapshot]:
        """Takes a snapshot of each present vector env.

        Raises:
            OSError: The process is gone, or may not be read.
        """
        if time.monotonic() - self._searched_at >= _SEARCH_INTERVAL_S or not self._vector_envs:
            self._search()
        snapshots: list[Snapshot] = []
        for vector_env in self._vector_envs:
            try:
                if not vector_env.in_use:
                    continue
                total = vector_env.stats()
            except ValueError as error:
                self.problems.append(f"a vector env of process {vector_env.pid}: {error}")
                continue
            previous = self._last_stats.get(vector_env)
            number = vector_env.number
            names = [each.name for each in snapshots]
            while (vector_env.pid, number) in names:  # a damaged one lies
                number += 1
            recent = total if previous is None else total - previous
            seconds = None if previous is None else recent.elapsed_s
            snapshots.append(Snapshot(vector_env, (vector_env.pid, number), total, recent, seconds))
        self._last_stats = {snapshot.vector_env: snapshot.total for snapshot in snapshots}
        self._vector_envs = list(self._last_stats)
        return snapshots

    def _search(self) -> None:
        """Searches for vector envs; known ones keep their objects, and so their last stats."""
        vector_envs, self.problems = find(self._pid)
        known = {(each.pid, each.file): each for each in self._vector_envs}
        self._vector_envs = [known.get((each.pid, each.file), each) for each in vector_envs]
        self._searched_at = time.monotonic()


def find(pid: int | None = None) -> tuple[list[RunningVectorEnv], list[str]]:
    """Finds vector envs in use; returns them, and a message for each unreadable one.

    Args:
        pid: A process that steps vector envs, or one of its workers or forks. Any other process,
            such as timeout, srun or a shell, stands for the processes below it. None: all that this
            user may read.

    Raises:
        OSError: There is no such process, or it may not be read.
    """
    files: dict[_FileId, list[tuple[int, int]]] = {}
    wanted_files = None if pid is None else _mapped_in(pid).union(_segments_of(pid))
    if pid is not None and not wanted_files:
        wanted_files = set()
        for candidate in descendant_ids(pid):
            with contextlib.suppress(OSError):  # another user's, or it is gone
                wanted_files.update(_segments_of(candidate))
    for candidate in process_ids():
        with contextlib.suppress(OSError):  # another user's, or it is gone
            for file, descriptor in _segments_of(candidate).items():
                if wanted_files is None or file in wanted_files:
                    files.setdefault(file, []).append((candidate, descriptor))
    vector_envs, problems = [], []
    for file, holders in files.items():
        try:
            vector_env = _open_vector_env(file, holders)
        except (ValueError, OSError) as error:
            pids = ", ".join(str(holder) for holder, _ in holders)
            problems.append(f"a segment that is open in process {pids} cannot be read: {error}")
        else:
            vector_envs += [vector_env] if vector_env is not None else []
    return sorted(vector_envs, key=lambda each: (each.pid, each.ready_at)), problems


def _open_vector_env(file: _FileId, holders: list[tuple[int, int]]) -> RunningVectorEnv | None:
    """The vector env of a segment, if it is in use."""
    view = _SegmentView(*holders[0])
    insight = view.insight()
    if not insight.in_use:
        return None
    # Programs that the owner has started may have inherited the open file.
    owner = _outer_pid(insight.process, holders[0][0])
    if owner is None or owner not in dict(holders):
        raise ValueError(f"process {insight.process}, its owner, is gone")
    if not _shares_our_clock(owner):
        raise ValueError(f"process {owner} has a clock of its own (a time namespace)")
    return RunningVectorEnv(owner, file, view)


def _segments_of(pid: int) -> dict[_FileId, int]:
    """The segments whose envs a process steps, with their descriptors.

    Another process of this module has segments open, too, but only for reading.
    """
    segments = {}
    for number in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError):  # closed meanwhile
            writes = os.lstat(path).st_mode & stat.S_IWUSR  # the mode of the descriptor
            if writes and _PATH.fullmatch(os.readlink(path)):
                status = os.stat(path)
                segments[status.st_dev, status.st_ino] = int(number)
    return segments


def _mapped_in(pid: int) -> set[_FileId]:
    """The segments that a process has mapped, as owners, workers and forks have."""
    segments = set()
    for line in _lines(pid, "maps"):
        _, _, _, device, inode, *name = line.split(maxsplit=5)
        if name and _PATH.fullmatch(name[0]):
            major, minor = device.split(":")
            segments.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return segments


def _outer_pid(inner_pid: int, neighbour: int) -> int | None:
    """A process's id in our namespace, from its id in the namespace of ``neighbour``."""
    with contextlib.suppress(OSError):
        namespace = os.readlink(f"/proc/{neighbour}/ns/pid")
        if namespace == os.readlink("/proc/self/ns/pid"):
            return inner_pid
        identity = namespace, inner_pid
        return next((pid for pid in process_ids() if process_identity(pid) == identity), None)
    return None


def _shares_our_clock(pid: int) -> bool:
    with contextlib.suppress(OSError):  # a system without such namespaces
        return os.readlink(f"/proc/{pid}/ns/time") == os.readlink("/proc/self/ns/time")
    return True


def _start_time(pid: int) -> str | None:
    """The start time of a process, in the kernel's ticks; None if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None


def _memory_usage(pid: int) -> tuple[int | None, int | None]:
    """Resident bytes of a process (Rss), and with shared pages counted in part (Pss)."""
    usage: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _lines(pid, "smaps_rollup"):
            if line.startswith(("Rss:", "Pss:")):
                usage[line[:3]] = 1024 * int(line.split()[1])
    return usage.get("Rss"), usage.get("Pss")


def _lines(pid: int, name: str) -> Iterable[str]:
    return Path(f"/proc/{pid}/{name}").read_text("utf-8", "replace").splitlines()


def _command_line(pid: int) -> str:
    """A process's command line; "?" if it cannot be read."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return printable(" ".join(word.decode("utf-8", "replace") for word in words))
    return "?"


def printable(text: str) -> str:
    """Text of another process, with "?" for characters that could control the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)

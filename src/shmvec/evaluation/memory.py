"""Measures the memory that the processes of envs use, and limits it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from shmvec._cores import process_status

__all__ = ["Budget", "MemoryMeter", "parse_bytes"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{unit}IB": 1 << 10 * power for power, unit in enumerate("KMGT", 1)
}
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(name: str, size: int | float | str) -> int:
    """The number of bytes of a size: a number, or a text as "20 GiB" or "500 MB".

    Raises:
        ValueError: The size is not positive, or a text of another form.
        TypeError: It is neither a number nor a text.
    """
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise TypeError(f"{name} must be a number of bytes or a text as '20 GiB', got {size!r}")
    match = _SIZE.fullmatch(str(size)) if isinstance(size, str) else None
    if isinstance(size, str):
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"{name} must be a size as '20 GiB' or '500 MB', got {size!r}")
        size = float(match[1]) * _UNITS[match[2].upper()]
    if not 0 < size < float("inf"):
        raise ValueError(f"{name} must be positive, got {size!r}")
    return int(size)


class MemoryMeter:
    """Measures the memory of processes; pages that n processes share count as one nth."""

    def __init__(self) -> None:
        """Prepares to measure."""
        self._last: dict[int, tuple[int, int]] = {}  # by process: its pages and bytes

    def __call__(self, pid: int) -> int:
        """The bytes of a process and its descendants."""
        return sum(map(self._process_bytes, _process_tree(pid)))

    def _process_bytes(self, pid: int) -> int:
        """The bytes of one process; 0 if it has ended.

        Reading the proportional size takes some ms, so it is only read again once the process has
        grown or shrunk by a tenth. Until then all changes count as its own.
        """
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/statm", "rb") as file:
                pages = int(file.read().split()[1])
            last_pages, size = self._last.get(pid, (0, 0))
            if abs(pages - last_pages) > last_pages // 10:
                last_pages, size = self._last[pid] = pages, _proportional_bytes(pid)
            return size + (pages - last_pages) * _PAGE
        return 0


def _proportional_bytes(pid: int) -> int:
    """The bytes of a process, of which shared pages count in part."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith(b"Pss:"))
    except (FileNotFoundError, StopIteration):  # the kernel lacks that file
        return 1024 * int(process_status(pid).get("RssAnon", "0").split()[0])


def _process_tree(pid: int) -> list[int]:
    """A process and its descendants, found without listing all processes of the machine."""
    pids = [pid]
    for each in pids:  # the list grows meanwhile
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{each}/task"):
                with suppress(OSError), open(f"/proc/{each}/task/{thread}/children") as file:
                    pids += map(int, file.read().split())
    return pids


class Budget:
    """A limit to the memory of all envs, in bytes, and the peak of each task's envs."""

    def __init__(self, limit: int, measure: Callable[[int], int] | None = None) -> None:
        """Sets a limit; ``measure`` returns the bytes of a process and its descendants."""
        self._limit = limit
        self._measure = MemoryMeter() if measure is None else measure
        self._peaks: dict[str, int] = {}  # by task
        self._current: dict[Any, int] = {}  # by env

    def check(self, envs: Iterable[tuple[Any, str, int | None, bool]]) -> bool:
        """Measures all envs; returns whether they keep to the limit.

        Args:
            envs: For each env: the env, its task, its process if it has one, and whether it plays.
                While it is still being built, its size says nothing about its task.
        """
        self._current = {}
        for env, task, pid, plays in envs:
            self._current[env] = 0 if pid is None else self._measure(pid)
            if plays:
                self._peaks[task] = max(self._peaks.get(task, 0), self._current[env])
        return sum(self._current.values()) <= self._limit

    def has_room(self, task: str, running: Iterable[tuple[Any, str]]) -> bool:
        """Whether there is room for one more env of a task.

        An env counts as much as the peak of its task, or, if that has none yet, as the highest peak
        of all. Until there is a peak, only one env may run.

        Args:
            task: The task.
            running: The envs that run, and their tasks.
        """
        others = list(running)
        peak = max(self._peaks.values(), default=self._limit)
        needed = sum(max(self._peaks.get(t, peak), self._current.get(env, 0)) for env, t in others)
        return not others or needed + self._peaks.get(task, peak) <= self._limit

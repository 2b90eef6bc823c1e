"""The memory that the processes of envs use, and a limit to it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Budget", "Resident", "parsed_bytes"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{unit}IB": 1 << 10 * power for power, unit in enumerate("KMGT", 1)
}
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")


def parsed_bytes(name: str, size: int | float | str) -> int:
    """A number of bytes: "20 GiB", "500 MB" or a number.

    Raises:
        ValueError: It is not positive, or no such text.
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


class Resident:
    """Measures the memory of processes; what they share counts in equal parts."""

    def __init__(self) -> None:
        """Nothing is known of any process yet."""
        self._known: dict[int, tuple[int, int]] = {}  # by process: pages then, and bytes

    def __call__(self, pid: int) -> int:
        """The bytes of a process and all below it."""
        return sum(map(self._of, _family(pid)))

    def _of(self, pid: int) -> int:
        """The bytes of one process; 0: it has ended.

        To ask for its part of what is shared takes some ms, so that is done again only once the
        process has grown or shrunk by a tenth; meanwhile all changes count as its own.
        """
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/statm", "rb") as file:
                pages = int(file.read().split()[1])
            then, size = self._known.get(pid, (0, 0))
            if abs(pages - then) > then // 10:
                then, size = self._known[pid] = pages, _proportional(pid)
            return size + (pages - then) * _PAGE
        return 0


def _proportional(pid: int) -> int:
    """The bytes of a process, with its part of what it shares with others."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith(b"Pss:"))
    except (FileNotFoundError, StopIteration):  # a kernel without that file
        text = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
        sizes = [1024 * int(each.split()[1]) for each in text.splitlines() if "RssAnon" in each]
        return sum(sizes)


def _family(pid: int) -> list[int]:
    """A process and all below it, by what each of them alone knows: others may be many."""
    found = [pid]
    for each in found:  # which grows
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{each}/task"):
                with suppress(OSError), open(f"/proc/{each}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
    return found


class Budget:
    """A limit to memory, in bytes, and what the envs of each task have needed of it at most."""

    def __init__(self, limit: int, measure: Callable[[int], int] | None = None) -> None:
        """Sets a limit; ``measure`` returns the bytes of a process and all below it."""
        self._limit = limit
        self._measure = Resident() if measure is None else measure
        self._most: dict[str, int] = {}  # by task
        self._now: dict[Any, int] = {}  # by env

    def look(self, envs: Iterable[tuple[Any, str, int | None, bool]]) -> bool:
        """Measures all envs that run; whether they fit.

        Args:
            envs: Each env, its task, its process if it has one yet, and whether it plays: what is
                still being built needs more later.
        """
        self._now = {}
        for env, task, pid, plays in envs:
            self._now[env] = 0 if pid is None else self._measure(pid)
            if plays:
                self._most[task] = max(self._most.get(task, 0), self._now[env])
        return sum(self._now.values()) <= self._limit

    def has_room(self, task: str, running: Iterable[tuple[Any, str]]) -> bool:
        """Whether one more env of a task fits beside those that run.

        An env counts with the most that one of its task has needed; of a task that has not been
        seen yet, with the most of any. Until one has been seen, only one may run.

        Args:
            task: The task.
            running: The envs that run, and their tasks.
        """
        others = list(running)
        most = max(self._most.values(), default=self._limit)
        needed = sum(max(self._most.get(of, most), self._now.get(env, 0)) for env, of in others)
        return not others or needed + self._most.get(task, most) <= self._limit

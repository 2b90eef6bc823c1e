"""What the benchmarks read of processes in /proc: whom they have started, memory and CPU time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Memory", "cpu_s", "descendants", "memory"]


class Memory(NamedTuple):
    """Memory of a process, in MB.

    Attributes:
        pss: Its pages, each divided by the number of those that have it.
        private: Pages that no other process has.
    """

    pss: float
    private: float


def descendants(pid: int | str = "self") -> set[int]:
    """Living processes that one has started, and that those have."""
    found: set[int] = set()
    parents = [str(pid)]
    while parents:
        for path in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
            try:
                pids = {int(pid) for pid in path.read_text().split()}
            except OSError:
                continue
            parents += [str(pid) for pid in pids - found]
            found |= pids
    return found


def memory(pid: int) -> Memory:
    """What a process has; nothing if it has ended."""
    kb = dict.fromkeys(("Pss:", "Private_Clean:", "Private_Dirty:", "Private_Hugetlb:"), 0)
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return Memory(0.0, 0.0)
    for line in lines:
        name, *values = line.split()
        if name in kb:
            kb[name] = int(values[0])
    pss, *private = kb.values()
    return Memory(pss / 1024, sum(private) / 1024)


def cpu_s(pids: Iterable[int]) -> float:
    """What processes have used so far, those of their threads that have ended excepted."""
    total = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                total += int(path.read_text().split()[0])
            except OSError:
                continue
    return 1e-9 * total

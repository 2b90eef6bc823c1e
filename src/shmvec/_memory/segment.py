"""The memory of a segment: reserved whole, without a name, handed over as a descriptor.

A memfd, sealed: nobody can shrink it, which would end everybody who looks at it. Where the system
makes none, a ``multiprocessing.shared_memory`` block, whose name is removed before anybody else
sees it. Workers get the descriptor, so nothing can stay behind, whoever crashes when.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from shmvec._core import reserve_pages
from shmvec._cores import MEMBERSHIP, ROOT, own_cgroups

__all__ = ["SEGMENT", "Kept", "free_memory", "free_shm", "map_memory", "reserve_memory"]

SEGMENT = "shmvec-segment"  # what a segment's memfd is called, in /proc

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Each version's names of a cgroup's limit and of what of it is used.
_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def reserve_memory(nbytes: int, name: str = "shmvec") -> int:
    """Reserves shared memory, every page of it, so that no later access can fail.

    Args:
        nbytes: How much.
        name: What it is called in /proc, where it is a memfd.

    Returns:
        A descriptor to map and to pass on; the caller closes it.

    Raises:
        OSError: There is not that much memory; the message has the numbers.
    """
    # Before anything is written: what goes beyond a limit is not refused but ended by the kernel.
    if free_memory() < nbytes:
        raise _no_room(nbytes)
    try:
        descriptor = _memfd(name)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        descriptor = _shared_memory(nbytes)
    try:
        reserve_pages(descriptor, nbytes)
        # A block's file takes no seals.
        with contextlib.suppress(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise _no_room(nbytes) from error
        raise
    return descriptor


def map_memory(descriptor: int, nbytes: int) -> mmap.mmap:
    """Maps shared memory; the mapping lasts as long as anything refers to it."""
    return mmap.mmap(descriptor, nbytes)


class Kept:
    """Memory that was handed to workers, and is for those that are started later, too."""

    def __init__(self) -> None:
        """Keeps nothing yet."""
        self._by_name: dict[str, tuple[tuple[int, ...], int]] = {}

    def put(self, name: str, size: tuple[int, ...], descriptor: int) -> None:
        """Keeps memory, in place of any that is kept by this name; the descriptor is copied."""
        copy = os.dup(descriptor)
        self.drop(name)
        self._by_name[name] = size, copy

    def drop(self, name: str) -> None:
        """Keeps it no more."""
        if name in self._by_name:
            os.close(self._by_name.pop(name)[1])

    def clear(self) -> None:
        """Keeps nothing any more."""
        for name in list(self._by_name):
            self.drop(name)

    @property
    def sizes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and size of each: of its bytes, first, and of what lies in it."""
        return tuple((name, size) for name, (size, _) in self._by_name.items())

    @property
    def descriptors(self) -> list[int]:
        """Their descriptors, in the same order."""
        return [descriptor for _, descriptor in self._by_name.values()]


def _memfd(name: str) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _shared_memory(nbytes: int) -> int:
    if free_shm() < nbytes:
        raise _no_room(nbytes)
    untracked: dict[str, Any] = {"track": False} if sys.version_info >= (3, 13) else {}
    block = SharedMemory(create=True, size=nbytes, **untracked)
    try:
        return os.dup(block._fd)  # type: ignore[attr-defined]
    finally:
        block.close()
        block.unlink()


def _no_room(nbytes: int) -> OSError:
    return OSError(
        errno.ENOSPC,
        f"shmvec needs {nbytes:,} bytes of shared memory; there are {free_memory():,} bytes "
        "free for this process (of the machine's, or by a cgroup's limit) and "
        f"{free_shm():,} in /dev/shm. Use fewer envs or smaller observations, or give the "
        "container more memory (docker run --memory=...)",
    )


def free_shm() -> int:
    """Bytes free in /dev/shm."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def free_memory(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int:
    """Bytes that this process can still have: the machine's, or fewer by a cgroup's limit."""
    rooms = []
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                rooms.append(int(line.split()[1]) * 1024)
    for folder in own_cgroups("memory", root, membership):
        for limit, used in _LIMITS:
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                room = int((folder / limit).read_text("utf-8")) - int(
                    (folder / used).read_text("utf-8")
                )
                rooms.append(max(0, room + _file_cache(folder)))
    return min(rooms, default=sys.maxsize)


def _file_cache(folder: Path) -> int:
    """Bytes of a cgroup's that hold files: counted as used, and given back where they are needed.

    A job that has read much data has always filled its limit with them.
    """
    with contextlib.suppress(OSError, ValueError):
        numbers = dict(
            line.split() for line in (folder / "memory.stat").read_text("utf-8").splitlines()
        )
        return sum(
            int(numbers.get(f"total_{name}", numbers.get(name, 0)))
            for name in ("inactive_file", "active_file")
        )
    return 0

"""Reserves shared memory, all of its pages at once, without a name.

A segment is a block of ``multiprocessing.shared_memory`` whose name is removed at once. If that
fails, or would take too much of /dev/shm, it is a sealed memfd. Memory for rollouts and traces is a
memfd, or a block if the system has no memfds. Processes get descriptors, so nothing can stay
behind, whichever process crashes when.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import contextlib
import errno
import fcntl
import os
import re
import stat
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from secrets import token_hex

from shmvec._core import Descriptor, reserve_pages
from shmvec._cores import CGROUP_FILE, CGROUP_ROOT, own_cgroups

__all__ = [
    "SEGMENT_NAME",
    "SharedDescriptors",
    "free_memory",
    "free_shm",
    "memory_file",
    "reserve_memory",
    "reserve_segment",
    "seal_size",
    "open_shared_memory",
]

SEGMENT_NAME = "shmvec-segment"  # the name of segments in /proc

_MEMORY_NAME = "shmvec"
_SHM_FOLDER = "/dev/shm"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# The files of a cgroup's limit and of its use, of v2 and v1.
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def reserve_segment(nbytes: int) -> int:
    """Reserves the memory of a segment; see :func:`reserve_memory`."""
    total, free = _shm_size()
    leaves_half = free - nbytes >= total // 2
    makers = partial(memory_file, SEGMENT_NAME), partial(_make_block, SEGMENT_NAME, nbytes)
    return _reserve(nbytes, makers[::-1] if leaves_half else makers)


def reserve_memory(nbytes: int) -> int:
    """Reserves shared memory, every page of it, so that no later access can fail.

    Args:
        nbytes: The size.

    Returns:
        A descriptor to map and to pass on; the caller closes it.

    Raises:
        OSError: There is not that much memory; the message has the numbers.
    """
    make_block = partial(_make_block, _MEMORY_NAME, nbytes)
    return _reserve(nbytes, (memory_file, make_block))


def seal_size(descriptor: int) -> None:
    """Seals memory against a change of its size; does nothing to a block, which takes no seals."""
    with contextlib.suppress(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)


def open_shared_memory(pid: int, descriptor: int, name: re.Pattern[str]) -> int:
    """Opens shared memory of another process, only for reading.

    In a mount namespace of its own a process can give the name to any file, and this process may be
    root's. So only memory is opened, since opening a device may have effects, and nothing is ever
    written.

    Args:
        pid: The process.
        descriptor: Its descriptor of the memory.
        name: The name that the memory has in /proc.

    Raises:
        OSError: It is gone, may not be read, or is something else.
    """
    handle = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_PATH | os.O_CLOEXEC)
    try:
        path = f"/proc/self/fd/{handle}"
        if name.fullmatch(os.readlink(path)) and stat.S_ISREG(os.fstat(handle).st_mode):
            memory = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.fcntl(memory, fcntl.F_GET_SEALS)
                return memory
            except OSError:  # it is a file on a disk
                os.close(memory)
    finally:
        os.close(handle)
    raise OSError(errno.EINVAL, "it is not shared memory of shmvec's")


def _reserve(nbytes: int, makers: Sequence[Callable[[], int]]) -> int:
    """Reserves memory by the first maker that works."""
    # This is checked first because beyond a cgroup's limit the kernel refuses no memory, but kills.
    if free_memory() < nbytes:
        raise _no_room_error(nbytes)
    reason: OSError | None = None
    for make in makers:
        try:
            descriptor = make()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            continue
        try:
            reserve_pages(descriptor, nbytes)
            seal_size(descriptor)
        except BaseException as error:
            os.close(descriptor)
            if not (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM)):
                raise
            reason = error
        else:
            return descriptor
    raise _no_room_error(nbytes) from reason


def memory_file(name: str = _MEMORY_NAME) -> int:
    """A memfd without any pages yet, whose size can be set."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _make_block(name: str, nbytes: int) -> int:
    """A block of multiprocessing.shared_memory without a name.

    A process that is killed before it removes the name leaves an empty file. Nobody removes that
    later, because other files of such names may belong to somebody.
    """
    if free_shm() < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    name = f"{name}-{token_hex(8)}"
    try:
        if sys.version_info >= (3, 13):
            block = SharedMemory(name, create=True, size=nbytes, track=False)
            with contextlib.closing(block):
                return os.dup(block._fd)  # type: ignore[attr-defined]
        # Before Python 3.13 SharedMemory would start a process, the resource tracker, to remove a
        # name that no longer exists by then. This does the same without it.
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
        descriptor: int = _posixshmem.shm_open(f"/{name}", flags, mode=0o600)
        return descriptor
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{_SHM_FOLDER}/{name}")


class SharedDescriptors(dict[str, tuple[tuple[int, ...], Descriptor]]):
    """What was shared with the workers, by name, for workers that are started later."""

    def put(self, name: str, size: tuple[int, ...], descriptor: int) -> None:
        """Keeps a copy of a descriptor under a name, in place of any earlier one."""
        self[name] = size, Descriptor(os.dup, descriptor)

    @property
    def sizes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The name and size of each; a size is its bytes, then the sizes of its content."""
        return tuple((name, size) for name, (size, _) in self.items())

    @property
    def descriptors(self) -> list[int]:
        """The descriptors, in the same order."""
        return [descriptor.number for _, descriptor in self.values()]


def _no_room_error(nbytes: int) -> OSError:
    return OSError(
        errno.ENOSPC,
        f"shmvec needs {nbytes:,} bytes of shared memory; there are {free_memory():,} bytes "
        "free for this process (of the machine's, or by a cgroup's limit) and "
        f"{free_shm():,} in /dev/shm. Use fewer envs or smaller observations, or give the "
        "container more memory (docker run --memory=...)",
    )


def free_shm() -> int:
    """Bytes free in /dev/shm."""
    return _shm_size()[1]


def _shm_size() -> tuple[int, int]:
    """The bytes of /dev/shm, and how many of them are free."""
    if not os.path.ismount(_SHM_FOLDER):  # a folder on a disk, or none
        return 0, 0
    status = os.statvfs(_SHM_FOLDER)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def free_memory(root: Path = CGROUP_ROOT, membership: Path = CGROUP_FILE) -> int:
    """Bytes that this process can still use: the machine's, or fewer by a cgroup's limit."""
    free = []
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    for folder in own_cgroups("memory", root, membership):
        for limit, used in _CGROUP_FILES:
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                unused = int((folder / limit).read_text("utf-8")) - int(
                    (folder / used).read_text("utf-8")
                )
                free.append(max(0, unused + _file_cache_bytes(folder)))
    return min(free, default=sys.maxsize)


def _file_cache_bytes(folder: Path) -> int:
    """Bytes of a cgroup that cache files; they count as used, but are freed when needed.

    A job that has read much data fills its limit with them.
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

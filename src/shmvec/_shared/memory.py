"""The memory of a segment: reserved whole, without a name, handed over as a descriptor.

A ``multiprocessing.shared_memory`` block where /dev/shm has room, else a memfd (Docker gives
/dev/shm 64 MB). Its name is removed before anybody else sees it: workers get the descriptor, so
nothing can stay behind, whoever crashes when, and the resource tracker has nothing to track.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from shmvec._core.segment import reserve

__all__ = ["map_memory", "reserve_memory"]

# The errors of a /dev/shm that is full, missing or read-only.
_NO_ROOM = {errno.ENOSPC, errno.ENOMEM, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS}


def reserve_memory(nbytes: int) -> int:
    """Reserves shared memory, every page of it, so that no later access can fail.

    Args:
        nbytes: How much.

    Returns:
        A descriptor to map and to pass on; the caller closes it.

    Raises:
        OSError: There is not that much memory; the message has the numbers.
    """
    for make in (_shared_memory, _memfd):
        try:
            descriptor = make(nbytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            continue
        if descriptor is not None:
            return descriptor
    raise OSError(
        errno.ENOSPC,
        f"shmvec needs {nbytes:,} bytes of shared memory; /dev/shm has {_free_shm():,} bytes "
        f"free and the machine {_free_memory():,}. Use fewer envs or smaller observations, or "
        "give the container more memory (docker run --shm-size=...)",
    )


def map_memory(descriptor: int, nbytes: int) -> mmap.mmap:
    """Maps shared memory; the mapping lasts as long as anything refers to it."""
    return mmap.mmap(descriptor, nbytes)


def _shared_memory(nbytes: int) -> int | None:
    if _free_shm() < nbytes:
        return None
    untracked: dict[str, Any] = {"track": False} if sys.version_info >= (3, 13) else {}
    block = SharedMemory(create=True, size=nbytes, **untracked)
    try:
        descriptor = os.dup(block._fd)  # type: ignore[attr-defined]
    finally:
        block.close()
        block.unlink()
    return _reserved(descriptor, nbytes)


def _memfd(nbytes: int) -> int | None:
    # A memfd has no size limit of its own: reserving more than there is would wake the OOM killer.
    if not hasattr(os, "memfd_create") or _free_memory() < nbytes:
        return None
    return _reserved(os.memfd_create("shmvec", os.MFD_CLOEXEC), nbytes)


def _reserved(descriptor: int, nbytes: int) -> int:
    try:
        reserve(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _free_shm() -> int:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return 0 if sys.platform == "linux" else sys.maxsize
    return status.f_bavail * status.f_frsize


def _free_memory() -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0

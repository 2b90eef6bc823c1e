"""Sends results of commands to the parent: pickled once, with large parts in shared memory.

A worker has a *depot*, memory that it shares with the parent. With a request the parent lends the
depot to the worker, unless unread results lie in it. The worker writes the large parts of each
result there as soon as the env returns it, and the parent copies them before it notes the answer. A
result that does not fit the depot travels through the channel like any message.
csrc/model/channel.pml models this.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pickle import PickleBuffer, dumps, loads
from sys import getrefcount
from typing import Any
from zlib import adler32

from shmvec._memory.segment import memory_file
from shmvec._pickling import dumps as dumps_by_value

__all__ = ["Depot", "Parcel"]

_LARGE_BYTES = 1 << 14  # smaller parts cost less in the message itself
_MAX_BYTES = 1 << 26  # of a depot, which never shrinks; the images of a worker's envs fit
_MIN_BYTES = 1 << 20  # of a depot

# The second pickles by value what the first cannot import. They are bound here because an env may
# patch the modules.
_PICKLERS = dumps, dumps_by_value

Span = tuple[int, int]  # offset in the depot, and number of bytes


@dataclass(frozen=True)
class Parcel:
    """A pickled result and its out-of-band buffers; a span stands for a buffer in the depot.

    A pickle in the depot has a checksum, because stray writes of an env may have changed it.
    """

    pickled: bytes | Span
    buffers: list[Any]
    checksum: int = 0

    def open(self) -> Any:
        """Unpickles the result; exceptions of the user's classes pass through."""
        return loads(self.pickled, buffers=self.buffers)  # type: ignore[arg-type]


class Depot:
    """A worker's depot, as one side maps it.

    Attributes:
        descriptor: The descriptor of the memory.
    """

    @classmethod
    def create(cls) -> Depot:
        """Makes the memory, which is empty at first and grows with use."""
        try:
            descriptor = memory_file()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            # A sandbox may forbid memfds.
            with tempfile.TemporaryFile() as file:
                return cls(os.dup(file.fileno()))
        with suppress(OSError):
            # It is sealed because a process is killed if it reads pages that were cut off.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(descriptor)

    def __init__(self, descriptor: int) -> None:
        """Takes over a descriptor."""
        self.descriptor = descriptor
        self._memory = memoryview(b"")
        self._used = 0
        self._blocks: deque[bytearray] = deque()

    def close(self) -> None:
        """Closes the descriptor, and releases all memory."""
        self._memory = memoryview(b"")
        self._blocks.clear()
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # ---- the worker's side -------------------------------------------------------------------

    def lend(self, lent: bool) -> None:
        """Begins a request, whose results may use the whole depot if it is lent."""
        self._used = 0 if lent else _MAX_BYTES

    def pack(self, result: Any) -> Parcel:
        """Packs a result as it is now; raises if it cannot be pickled."""
        begin = self._used
        spans: list[Any] = []

        def put_buffer(buffer: PickleBuffer) -> bool:
            """Puts a buffer into the depot; returns True if it must stay in the pickle."""
            span = self._put(buffer.raw())
            if span is not None:
                spans.append(span)
            return span is None

        for pickle in _PICKLERS:
            try:
                pickled = pickle(result, protocol=5, buffer_callback=put_buffer)
                break
            except BaseException as error:
                self._used = begin
                spans.clear()
                if pickle is _PICKLERS[-1] or not isinstance(error, Exception):
                    raise
        span = self._put(memoryview(pickled))
        if span is None:
            return Parcel(pickled, spans)
        return Parcel(span, spans, adler32(pickled))

    def _put(self, content: memoryview) -> Span | None:
        """Writes content to the depot; returns None if it is small or does not fit."""
        begin, nbytes = self._used, content.nbytes
        end = begin + nbytes
        if nbytes < _LARGE_BYTES or end > _MAX_BYTES or not self._ensure_size(end):
            return None
        self._memory[begin:end] = content
        self._used = begin + nbytes
        return begin, nbytes

    def _ensure_size(self, end: int) -> bool:
        """Maps the depot up to ``end``, and enlarges it if necessary; False if memory is short."""
        if end > len(self._memory):
            size = os.fstat(self.descriptor).st_size
            try:
                if size < end:
                    size = min(_MAX_BYTES, max(_MIN_BYTES, 2 * len(self._memory), end))
                    # It is reserved because a write for which there is no page would be fatal.
                    os.posix_fallocate(self.descriptor, 0, size)
                self._memory = memoryview(mmap.mmap(self.descriptor, size))
            except OSError:  # no memory, or no free descriptor, which a mapping needs
                return False
        return True

    # ---- the parent's side -------------------------------------------------------------------

    def collect(self, parcels: Sequence[Parcel | None]) -> list[Parcel | None]:
        """Copies the parcels of a message out of the depot, whose memory is free afterwards.

        Copies go to the memory of earlier results that nobody refers to any more. New memory comes
        from the system page by page, which takes longer than the copy.

        Raises:
            ValueError: A span lies outside the depot.
            RuntimeError: A pickle there was damaged.
        """
        user_blocks: list[bytearray] = []
        used: list[bytearray] = []

        def copied(span: Span) -> bytearray:
            content = self._view(span)
            while self._blocks:
                block, references = _pop_oldest(self._blocks)
                if references > _UNUSED_REFERENCES:
                    user_blocks.append(block)
                elif len(block) == content.nbytes:
                    memoryview(block)[:] = content
                    break
            else:
                block = bytearray(content)
            used.append(block)
            return block

        collected: list[Parcel | None] = []
        for parcel in parcels:
            if parcel is not None:
                pickled = parcel.pickled
                if not isinstance(pickled, bytes):
                    pickled = bytes(self._view(pickled))
                    if adler32(pickled) != parcel.checksum:
                        raise RuntimeError("the segment is damaged: a large result was overwritten")
                parcel = Parcel(pickled, [copied(span) for span in parcel.buffers])
            collected.append(parcel)
        if used:  # two of each, because the caller keeps the last results until it has the next
            self._blocks = deque([*user_blocks, *self._blocks, *used][-2 * len(used) :])
        return collected

    def _view(self, span: Span) -> memoryview:
        """The content of a span."""
        begin, nbytes = span
        end = begin + nbytes
        if end > len(self._memory):
            self._memory = memoryview(mmap.mmap(self.descriptor, 0))  # 0: the whole depot
        if not 0 <= begin <= end <= len(self._memory):
            raise ValueError(f"there are no {nbytes} bytes at {begin} of the memory for results")
        return self._memory[begin:end]


def _pop_oldest(blocks: deque[bytearray]) -> tuple[bytearray, int]:
    """Removes and returns the oldest block, and the number of references to it."""
    block = blocks.popleft()
    return block, getrefcount(block)


_UNUSED_REFERENCES = _pop_oldest(deque([bytearray()]))[1]  # references to a block that no user has

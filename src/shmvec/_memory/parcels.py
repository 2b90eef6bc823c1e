"""Sends results of commands to the parent: pickled once, with large parts in shared memory.

A worker has a *depot*, memory that it shares with the parent. With a request the parent lends the
depot to the worker, unless unread results lie in it. The worker writes the large parts of each
result there as soon as the env returns it, and the parent copies them before it notes the answer. A
result that does not fit the depot travels through the channel like any message.
csrc/model/channel.pml models the lending.
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

_LARGE = 1 << 14  # bytes; smaller parts cost less in the message itself
_MOST = 1 << 26  # bytes of a depot, which never shrinks: envs' images fit, larger results need not
_LEAST = 1 << 20

# The second pickles by value what the first cannot import. Bound here, because an env may patch the
# modules.
_PICKLES = dumps, dumps_by_value

Span = tuple[int, int]  # offset in the depot, and number of bytes


@dataclass(frozen=True)
class Parcel:
    """A pickled result and its out-of-band buffers; a span stands for a buffer in the depot.

    What is unpickled from the depot has a checksum: stray writes of an env's may have changed it.
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
        """Makes the memory, which starts empty and grows with use."""
        try:
            descriptor = memory_file()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            # A sandbox forbids it.
            with tempfile.TemporaryFile() as file:
                return cls(os.dup(file.fileno()))
        with suppress(OSError):
            # Sealed, because a process that reads pages which were cut off is killed.
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
        """Begins a request, with the whole depot to write to if ``lent``, else with none of it."""
        self._used = 0 if lent else _MOST

    def pack(self, result: Any) -> Parcel:
        """Packs a result as it is now; raises if it cannot be pickled."""
        begin = self._used
        spans: list[Any] = []

        def keep(buffer: PickleBuffer) -> bool:
            """Puts a buffer into the depot; returns True if it must stay in the pickle."""
            span = self._put(buffer.raw())
            if span is not None:
                spans.append(span)
            return span is None

        for pickle in _PICKLES:
            try:
                pickled = pickle(result, protocol=5, buffer_callback=keep)
                break
            except BaseException as error:
                self._used = begin
                spans.clear()
                if pickle is _PICKLES[-1] or not isinstance(error, Exception):
                    raise
        span = self._put(memoryview(pickled))
        if span is None:
            return Parcel(pickled, spans)
        return Parcel(span, spans, adler32(pickled))

    def _put(self, content: memoryview) -> Span | None:
        """Writes large content to the depot; returns None if it is small or does not fit."""
        begin, nbytes = self._used, content.nbytes
        if nbytes < _LARGE or begin + nbytes > _MOST or not self._reach(begin + nbytes):
            return None
        self._memory[begin : begin + nbytes] = content
        self._used = begin + nbytes
        return begin, nbytes

    def _reach(self, end: int) -> bool:
        """Maps the depot up to ``end``, and enlarges it if necessary; False: there is no memory."""
        if end > len(self._memory):
            size = os.fstat(self.descriptor).st_size
            try:
                if size < end:
                    size = min(_MOST, max(_LEAST, 2 * len(self._memory), end))
                    # Reserved, because a write for which there is no page would be fatal.
                    os.posix_fallocate(self.descriptor, 0, size)
                self._memory = memoryview(mmap.mmap(self.descriptor, size))
            except OSError:  # no memory, or no free descriptor, which a mapping needs
                return False
        return True

    # ---- the parent's side -------------------------------------------------------------------

    def collect(self, parcels: Sequence[Parcel | None]) -> list[Parcel | None]:
        """Copies the parcels of a message out of the depot, whose memory is free afterwards.

        Copies are made in the memory of earlier results that have no other reference: new memory
        comes from the system page by page, which takes longer than the copy.

        Raises:
            ValueError: A span lies outside the depot.
            RuntimeError: A pickle there was damaged.
        """
        held: list[bytearray] = []
        used: list[bytearray] = []

        def copied(span: Span) -> bytearray:
            content = self._at(span)
            while self._blocks:
                block, references = _oldest(self._blocks)
                if references > _ONLY_HERE:
                    held.append(block)
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
                    pickled = bytes(self._at(pickled))
                    if adler32(pickled) != parcel.checksum:
                        raise RuntimeError("the segment is damaged: a large result is another one")
                parcel = Parcel(pickled, [copied(span) for span in parcel.buffers])
            collected.append(parcel)
        if used:  # two of each, because the caller holds the last results until it has the next
            self._blocks = deque([*held, *self._blocks, *used][-2 * len(used) :])
        return collected

    def _at(self, span: Span) -> memoryview:
        """The content of a span."""
        begin, nbytes = span
        end = begin + nbytes
        if end > len(self._memory):
            self._memory = memoryview(mmap.mmap(self.descriptor, 0))  # all of it
        if not 0 <= begin <= end <= len(self._memory):
            raise ValueError(f"there are no {nbytes} bytes at {begin} of the memory for results")
        return self._memory[begin:end]


def _oldest(blocks: deque[bytearray]) -> tuple[bytearray, int]:
    """Removes and returns the oldest block, and the number of references to it."""
    block = blocks.popleft()
    return block, getrefcount(block)


_ONLY_HERE = _oldest(deque([bytearray()]))[1]  # references to a block that no user has

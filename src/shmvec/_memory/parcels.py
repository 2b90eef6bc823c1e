"""Results of commands on their way to the parent: pickled once, and what is large goes by memory.

A worker has a *depot*, memory that it shares with the parent. With a request the parent lends it to
the worker, if nothing lies in it that is still to be read; the worker puts the large parts of each
result there as the env returns it, and the parent takes copies before it notes the answer. A result
that has no room there travels through the channel like any message. csrc/model/channel.pml models
the lending.
"""

from __future__ import annotations

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

from shmvec._pickling import dumps as dumps_by_value

__all__ = ["Depot", "Parcel"]

_LARGE = 1 << 14  # what is smaller costs less in the message itself
_MOST = 1 << 26  # bytes of a depot, which it keeps: envs' pictures fit, a rare giant need not
_LEAST = 1 << 20

# The second makes by value what the first does not find by its name. Bound here: an env may patch
# the modules.
_PICKLES = dumps, dumps_by_value

Span = tuple[int, int]  # where in the depot something lies, and how many bytes it has


@dataclass(frozen=True)
class Parcel:
    """A result: pickled, and the buffers that were left out of that; or spans of these."""

    pickled: bytes | Span
    buffers: list[Any]

    def open(self) -> Any:
        """The result. What the user's classes raise is raised."""
        return loads(self.pickled, buffers=self.buffers)  # type: ignore[arg-type]


class Depot:
    """One side's view of the depot of a worker.

    Attributes:
        descriptor: Of the memory.
    """

    @classmethod
    def create(cls) -> Depot:
        """Makes the memory, which is empty and grows with use."""
        try:
            descriptor = os.memfd_create("shmvec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:  # a sandbox forbids it
            with tempfile.TemporaryFile() as file:
                return cls(os.dup(file.fileno()))
        with suppress(OSError):
            # Or whoever has mapped it would be killed for a look at what is not there any more.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(descriptor)

    def __init__(self, descriptor: int) -> None:
        """Takes over a descriptor."""
        self.descriptor = descriptor
        self._memory = memoryview(b"")
        self._used = 0
        self._blocks: deque[bytearray] = deque()

    def close(self) -> None:
        """Closes the descriptor, and lets go of all memory."""
        self._memory = memoryview(b"")
        self._blocks.clear()
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # ---- the worker's side -------------------------------------------------------------------

    def lend(self, lent: bool) -> None:
        """Begins a request: everything may be written again, or nothing at all."""
        self._used = 0 if lent else _MOST

    def pack(self, result: Any) -> Parcel:
        """Packs a result, as it is now; what cannot be pickled raises here."""
        begin = self._used
        spans: list[Any] = []

        def keep(buffer: PickleBuffer) -> bool:
            """Puts a buffer into the depot; True: it goes with the rest, as there is no room."""
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
        return Parcel(self._put(memoryview(pickled)) or pickled, spans)

    def _put(self, content: memoryview) -> Span | None:
        """Writes something large; None: it is not large, or does not fit."""
        begin, nbytes = self._used, content.nbytes
        if nbytes < _LARGE or begin + nbytes > _MOST or not self._reach(begin + nbytes):
            return None
        self._memory[begin : begin + nbytes] = content
        self._used = begin + nbytes
        return begin, nbytes

    def _reach(self, end: int) -> bool:
        """Maps the depot so far, and makes it larger if it must be; False: there is no memory."""
        if end > len(self._memory):
            size = os.fstat(self.descriptor).st_size
            try:
                if size < end:
                    size = min(_MOST, max(_LEAST, 2 * len(self._memory), end))
                    # Reserved: to write where the kernel has no page would be fatal.
                    os.posix_fallocate(self.descriptor, 0, size)
                self._memory = memoryview(mmap.mmap(self.descriptor, size))
            except OSError:  # or no descriptor, of which a mapping takes one
                return False
        return True

    # ---- the parent's side -------------------------------------------------------------------

    def collect(self, parcels: Sequence[Parcel | None]) -> list[Parcel | None]:
        """The parcels of a message with copies in place of spans, which may be written again.

        Copies are made in the memory of earlier results that nobody has any more: other memory
        comes from the system page by page, which takes longer than the copy.

        Raises:
            ValueError: They are not what a worker's :meth:`pack` makes.
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
                parcel = Parcel(pickled, [copied(span) for span in parcel.buffers])
            collected.append(parcel)
        if used:  # the last ones are held until they are replaced: so two of each
            self._blocks = deque([*held, *self._blocks, *used][-2 * len(used) :])
        return collected

    def _at(self, span: Span) -> memoryview:
        """What lies in the depot."""
        begin, nbytes = span
        end = begin + nbytes
        if end > len(self._memory):
            self._memory = memoryview(mmap.mmap(self.descriptor, 0))  # as large as it is
        if not 0 <= begin <= end <= len(self._memory):
            raise ValueError(f"there are no {nbytes} bytes at {begin} of the memory for results")
        return self._memory[begin:end]


def _oldest(blocks: deque[bytearray]) -> tuple[bytearray, int]:
    """Takes the oldest block; the second is how many refer to it."""
    block = blocks.popleft()
    return block, getrefcount(block)


_ONLY_HERE = _oldest(deque([bytearray()]))[1]  # if nobody else does

"""Control pipes: pickled messages, a shared-memory descriptor, and never a wait without an end.

The step path does not come here. Commands, their results, errors and infos too large for the ring
do.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

__all__ = ["InlinePipe", "Pipe"]

_SLICE_S = 0.05  # between two looks at the other side
_FITS = 32768  # bytes that a pipe takes at once, whether or not somebody reads


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back while a request and the message that it announces are sent.

    A worker that was told to read its pipe would wait for ever for a message that never comes. A
    second Ctrl-C is not held back.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:
        held.append((number, frame))
        if len(held) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        before(*held[0])


class Pipe:
    """One end of a pipe to another process."""

    def __init__(self, connection: Connection) -> None:
        """Takes over one end of ``multiprocessing.Pipe()``."""
        self.connection = connection
        self._received: deque[bytes] = deque()

    @staticmethod
    def pack(message: Any) -> Any:
        """The message ready to send: what cannot be pickled raises here, before it is sent."""
        return cloudpickle.dumps(message)

    @staticmethod
    def unpack(packed: Any) -> Any:
        """The message that was packed."""
        return pickle.loads(packed)

    def send(self, packed: Any, look: Callable[[], object] | None = None) -> None:
        """Sends what ``pack`` returned; blocks while the pipe is full.

        Args:
            packed: What to send.
            look: Called every 50 ms; raises when it is no use to wait any longer. With it, what
                the other side sends is taken meanwhile: it may read ours only after that.
        """
        if look is None or len(packed) <= _FITS:
            self.connection.send_bytes(packed)
            return
        writer = threading.Thread(target=self._write, args=(packed,), daemon=True)
        writer.start()
        while writer.is_alive():
            if self.connection.poll(0):
                self._received.append(self.connection.recv_bytes())
            writer.join(0.001)
            look()

    def _write(self, packed: Any) -> None:
        with contextlib.suppress(OSError):  # the other side is gone: whoever reads next is told
            self.connection.send_bytes(packed)

    def receive(self, look: Callable[[], object]) -> Any:
        """Waits for a message and unpacks it.

        Args:
            look: Called every 50 ms; raises when it is no use to wait any longer.
        """
        if self._received:
            return self.unpack(self._received.popleft())
        while not self.connection.poll(_SLICE_S):
            look()
        return self.unpack(self.connection.recv_bytes())

    def send_descriptor(self, descriptor: int, pid: int) -> None:
        """Gives the other process a duplicate of a file descriptor."""
        reduction.send_handle(self.connection, descriptor, pid)

    def receive_descriptor(self) -> int:
        """Takes a descriptor; the caller closes it."""
        return reduction.recv_handle(self.connection)

    def close(self) -> None:
        """Closes this end. May be called twice."""
        self.connection.close()


class InlinePipe:
    """Stands in for a pipe, both ends, where the envs live in the calling process."""

    def __init__(self) -> None:
        """Makes an empty one."""
        self._messages: deque[Any] = deque()

    @staticmethod
    def pack(message: Any) -> Any:
        """The message itself: nothing crosses a boundary."""
        return message

    @staticmethod
    def unpack(packed: Any) -> Any:
        """The message itself."""
        return packed

    def send(self, packed: Any) -> None:
        """Queues a message."""
        self._messages.append(packed)

    def receive(self, look: Callable[[], object]) -> Any:
        """Takes the oldest message."""
        return self._messages.popleft()

    def send_descriptor(self, descriptor: int) -> None:
        """Queues a duplicate of a file descriptor."""
        self._messages.append(os.dup(descriptor))

    def receive_descriptor(self) -> int:
        """Takes a descriptor; the caller closes it."""
        descriptor: int = self._messages.popleft()
        return descriptor

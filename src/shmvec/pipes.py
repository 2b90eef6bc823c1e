"""Control pipes: pickled messages, a shared-memory descriptor, and never a wait without an end.

The step path does not come here. Commands, their results, errors and infos too large for the ring
do.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

__all__ = ["InlinePipe", "Pipe"]

_SLICE_S = 0.05  # between two looks at the other side


class Pipe:
    """One end of a pipe to another process."""

    def __init__(self, connection: Connection) -> None:
        """Takes over one end of ``multiprocessing.Pipe()``."""
        self.connection = connection

    @staticmethod
    def pack(message: Any) -> Any:
        """The message ready to send: what cannot be pickled raises here, before it is sent."""
        return cloudpickle.dumps(message)

    @staticmethod
    def unpack(packed: Any) -> Any:
        """The message that was packed."""
        return pickle.loads(packed)

    def send(self, packed: Any) -> None:
        """Sends what ``pack`` returned; blocks while the pipe is full."""
        self.connection.send_bytes(packed)

    def receive(self, look: Callable[[], object]) -> Any:
        """Waits for a message and unpacks it.

        Args:
            look: Called every 50 ms; raises when it is no use to wait any longer.
        """
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

"""One descriptor for an event loop: readable when workers have answered, written or ended.

It is an epoll of the workers' pidfds and channels, and of an eventfd. The worker whose answer wakes
the caller writes to that (csrc/completion.h). Each event is reported once, so that a worker that
has ended wakes the loop only once, even if it is replaced later or never.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from shmvec._core import Descriptor

__all__ = ["WakeEvents"]

_READ = select.EPOLLIN | select.EPOLLET
_READ_OR_WRITE = _READ | select.EPOLLOUT  # EPOLLOUT: a full channel has room again


class WakeEvents:
    """What wakes an event loop.

    Attributes:
        eventfd: What workers write to.
    """

    def __init__(self) -> None:
        """Watches the eventfd; ``watch`` adds workers."""
        self.eventfd = Descriptor(os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self.eventfd.number, _READ)
        self._channels: dict[int, Any] = {}  # those that are watched, by worker
        self._has_unseen_events = False  # whether events came after the last complete look

    def fileno(self) -> int:
        """The descriptor."""
        return self._epoll.fileno()

    def watch(self, processes: Sequence[Any], channels: Sequence[Any]) -> None:
        """Watches these workers, too; called after a complete look at all workers."""
        self._has_unseen_events = False
        for index, (process, channel) in enumerate(zip(processes, channels, strict=False)):
            if process.sentinel < 0 or self._channels.get(index) is channel:
                continue
            for descriptor, events in (process.sentinel, _READ), (channel.fileno(), _READ_OR_WRITE):
                if descriptor >= 0:
                    with suppress(FileExistsError):  # Ctrl-C has interrupted an earlier call here
                        self._epoll.register(descriptor, events)
            self._channels[index] = channel

    def clear(self) -> bool:
        """Makes the descriptor unreadable; returns whether more than answers has come."""
        unseen, self._has_unseen_events = self._has_unseen_events, True
        self._has_unseen_events = unseen or any(
            descriptor != self.eventfd.number for descriptor, _ in self._epoll.poll(0)
        )
        return self._has_unseen_events

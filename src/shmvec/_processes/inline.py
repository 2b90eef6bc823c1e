"""The caller as a worker: the only one, or with ``caller_steps`` the last one."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gymnasium.error import ClosedEnvironmentError

from shmvec._core import Segment, WorkerLoop
from shmvec._memory.segment import SharedDescriptors
from shmvec._processes.control import Attachment, Report, Resets
from shmvec._processes.host import EnvFn, EnvHost
from shmvec.faults import Failure

__all__ = ["InlineWorker"]


@dataclass
class _Message:
    """A message, with the attributes of a channel's."""

    sequence: int
    content: Any
    descriptors: list[int] = field(default_factory=list)


@dataclass
class _Result:
    """A packed result, with a parcel's interface."""

    content: Any
    unpack: Callable[[Any], Any]

    def open(self) -> Any:
        """The result."""
        return self.unpack(self.content)


class _InlineChannel:
    """A control channel, and the mailbox at its other end, without a process between them."""

    broken = None

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        """Makes a channel whose messages these functions pack and unpack."""
        self.pack, self.unpack = pack, unpack
        self._to_worker: deque[_Message] = deque()
        self._to_parent: deque[_Message] = deque()

    def put(self, sequence: int, content: Any, descriptors: Sequence[int] = ()) -> None:
        """Queues a message for the host."""
        self._to_worker.append(_Message(sequence, content, [os.dup(d) for d in descriptors]))

    def pump(self) -> bool:
        """Does nothing, since there is nothing to read or write."""
        return False

    def find(self, sequence: int) -> _Message | None:
        """Finds the host's message of a request; discards older ones."""
        return self._find_message(self._to_parent, sequence)

    def take(self, sequence: int) -> _Message | None:
        """Finds the host's message of a request, and removes it."""
        message = self.find(sequence)
        if message is not None:
            self._to_parent.popleft()
        return message

    def send(self, sequence: int, packed: Any) -> None:
        """Queues a message for the parent."""
        self._to_parent.append(_Message(sequence, packed))

    def receive(self, sequence: int) -> tuple[Any, list[int]]:
        """Receives the parent's message of a request, which must have come; discards older ones."""
        message = self._find_message(self._to_worker, sequence)
        if message is None:
            raise RuntimeError(f"the message of request {sequence} is lost")
        # It stays until the next one is received, because Ctrl-C may interrupt the receiver.
        descriptors, message.descriptors = message.descriptors, []
        return message.content, descriptors

    def drop(self) -> None:
        """Discards messages that the host has not received."""
        for message in self._to_worker:
            for descriptor in message.descriptors:
                os.close(descriptor)
        self._to_worker.clear()

    def packer(self, uses_depot: bool) -> Callable[[Any], _Result]:
        """A function that packs each result on its own, as some cannot be pickled."""
        return lambda result: _Result(self.pack(result), self.unpack)

    def _find_message(self, queue: deque[_Message], sequence: int) -> _Message | None:
        while queue and queue[0].sequence != sequence:
            for descriptor in queue.popleft().descriptors:
                os.close(descriptor)
        return queue[0] if queue else None


class InlineWorker:
    """The caller as a worker.

    Attributes:
        channel: Its control channel, and the mailbox at the other end.
    """

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        index: int,
        first_env: int,
        pack: Callable[[Any], Any],
        unpack: Callable[[Any], Any],
    ) -> None:
        """Prepares for the envs, which ``build`` makes.

        Args:
            env_fns: The functions that make them.
            index: The worker's index.
            first_env: Index of its first env.
            pack: Packs its messages.
            unpack: Unpacks them.
        """
        self.channel = _InlineChannel(pack, unpack)
        self._env_fns, self._index, self._first_env = env_fns, index, first_env
        self._host = self._new_host()
        self._loop: WorkerLoop | None = None
        self._stopped = False

    def _new_host(self) -> EnvHost:
        return EnvHost(self._index, self._first_env, self.channel, in_caller=True)

    @property
    def is_up(self) -> bool:
        """Whether it is attached, and was not ended."""
        return self._loop is not None

    def build(self) -> Report | Failure:
        """Builds the envs."""
        return self._host.build(self._env_fns)

    def attach(self, attachment: Attachment, segment: Segment) -> None:
        """Makes the worker's loop over the parent's mapping."""
        self._attachment, self._segment = attachment, segment
        self._loop = self._host.make_loop(segment, attachment)

    def serve(self) -> None:
        """Serves the pending requests; envs that are being replaced have none."""
        if self._stopped:
            raise ClosedEnvironmentError("The vector env was closed during this call.")
        if self._loop is not None:
            self._loop.serve_pending()

    def replace(self, resets: Resets, shared: SharedDescriptors) -> Failure | None:
        """Builds the envs again, in place of those that ``end`` has closed.

        Args:
            resets: Seeds and options for their resets.
            shared: Memory, besides the segment, that they need.

        Returns:
            What building them raised; None: nothing.
        """
        host = self._new_host()
        try:
            report = host.build(self._env_fns)
        except BaseException:
            host.close()
            raise
        self._host = host  # set only now: a signal's handler may close it during the build
        if isinstance(report, Failure):
            return report
        if self._stopped:  # by a signal's handler
            host.close()
            raise ClosedEnvironmentError("The vector env was closed during this call.")
        attachment = replace(self._attachment, resets=resets, shared=shared.sizes)
        descriptors = [os.dup(descriptor) for descriptor in shared.descriptors]
        self._loop = self._host.make_loop(self._segment, attachment, descriptors)
        return None

    def end(self) -> list[Failure]:
        """Closes the envs."""
        self._loop = None
        return self._host.close()

    def stop(self) -> list[Failure]:
        """Closes the envs, which cannot be replaced any more."""
        self._stopped = True
        self.channel.drop()
        return self.end()

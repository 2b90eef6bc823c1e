"""``num_workers=0``: envs in the calling process, behind the interface of worker processes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from gymnasium.error import ClosedEnvironmentError

from shmvec._core import Alarms, Segment, WorkerLoop
from shmvec._memory.segment import Kept
from shmvec._processes.control import Attachment, Report, Resets
from shmvec._processes.host import EnvFn, EnvHost
from shmvec._processes.supervisor import Supervisor
from shmvec.faults import Failure

__all__ = ["InlineWorker", "Workers"]


@dataclass
class _Message:
    """A message, like those of a channel."""

    sequence: int
    content: Any
    descriptors: list[int] = field(default_factory=list)


@dataclass
class _Given:
    """A result that is not pickled, with a parcel's interface."""

    result: Any

    def open(self) -> Any:
        """The result itself."""
        return self.result


class _InlineChannel:
    """A control channel, and the mailbox at its other end, without a process between them."""

    broken = None

    def __init__(self) -> None:
        """Makes a channel without messages."""
        self._to_worker: deque[_Message] = deque()
        self._to_parent: deque[_Message] = deque()

    def put(self, sequence: int, content: Any, descriptors: Sequence[int] = ()) -> None:
        """Queues a message for the host."""
        self._to_worker.append(_Message(sequence, content, [os.dup(d) for d in descriptors]))

    def pump(self) -> bool:
        """Does nothing: there is nothing to read or write."""
        return False

    def find(self, sequence: int) -> _Message | None:
        """Finds the host's message of a request; discards older ones."""
        return self._from(self._to_parent, sequence)

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
        """Takes the parent's message of a request, which has come; discards older ones."""
        message = self._from(self._to_worker, sequence)
        if message is None:
            raise RuntimeError(f"the message of request {sequence} is lost")
        self._to_worker.popleft()
        return message.content, message.descriptors

    def drop(self) -> None:
        """Discards messages that the host has not received."""
        for message in self._to_worker:
            for descriptor in message.descriptors:
                os.close(descriptor)
        self._to_worker.clear()

    def pack(self, message: Any) -> Any:
        """Returns the message itself: it stays in this process."""
        return message

    unpack = pack

    def packer(self, lent: bool) -> Callable[[Any], _Given]:
        """A function that packs a result; there is no depot."""
        return _Given

    def _from(self, queue: deque[_Message], sequence: int) -> _Message | None:
        while queue and queue[0].sequence != sequence:
            for descriptor in queue.popleft().descriptors:
                os.close(descriptor)
        return queue[0] if queue else None


class InlineWorker:
    """The one worker of a vector env without processes, with the interface of ``Supervisor``.

    Attributes:
        generation: A new object after each replacement.
    """

    def __init__(self, env_fns: Sequence[EnvFn]) -> None:
        """Prepares for the envs; ``reports`` builds them."""
        self.ranges = [range(len(env_fns))]
        self.processes: list[Any] = []
        self.doing = "start"  # the last command, for messages
        self.stopped = self.ended = False
        self.changing = nullcontext()
        self._channel = _InlineChannel()
        self.channels: list[Any] = [self._channel]
        self._env_fns = env_fns
        self._host = EnvHost(0, 0, self._channel)
        self.generation: Any = self._host
        self._loop: WorkerLoop | None = None
        self._attached: tuple[Segment, Attachment] | None = None
        self._descriptor = -1
        self.kept = Kept()
        self.alarms = Alarms()

    pack = staticmethod(_InlineChannel().pack)
    unpack = pack

    def start(self) -> None:
        """Does nothing: there is no process to start."""

    def reports(self) -> list[Report | Failure]:
        """Builds the envs."""
        return [self._host.build(self._env_fns)]

    def attach(self, attachment: Attachment, descriptor: int, segment: Segment) -> None:
        """Makes the worker's loop over the parent's mapping."""
        self._attached = segment, attachment
        self._descriptor = os.dup(descriptor)  # kept open, so that `top` finds the segment
        self._loop = self._host.loop(segment, attachment)

    def collect(self, index: int, results: Sequence[Any]) -> Sequence[Any]:
        """Returns the results, which lie in no depot."""
        return results

    def end(self, index: int) -> None:
        """Closes the envs, best effort."""
        self._loop = None
        self._host.close()

    def begin(self, index: int) -> None:
        """Prepares for envs in place of the closed ones."""
        self._host = EnvHost(0, 0, self._channel)
        self.generation = self._host

    def finish(self, index: int, resets: Resets) -> Failure | None:
        """Builds the envs once more; returns what that raised, or None."""
        assert self._attached is not None
        segment, attachment = self._attached
        report = self._host.build(self._env_fns)
        if isinstance(report, Failure):
            return report
        if self.stopped:  # a signal's handler has stopped the worker while envs were built
            self._host.close()
            raise ClosedEnvironmentError("The vector env was closed during this call.")
        attachment = replace(attachment, resets=resets, kept=self.kept.sizes)
        descriptors = [os.dup(descriptor) for descriptor in self.kept.descriptors]
        self._loop = self._host.loop(segment, attachment, descriptors)
        return None

    def is_up(self, index: int) -> bool:
        """Whether there is a loop to serve requests."""
        return self._loop is not None

    def last_words(self, index: int) -> str:
        """Empty: envs write to the calling process's stderr."""
        return ""

    def stack(self, index: int) -> str:
        """Empty: the stack is the calling process's."""
        return ""

    def hung(self, hanging: Sequence[Any]) -> None:
        """Does nothing: the caller does not wait for another process."""

    def interrupt(self, index: int) -> None:
        """Does nothing: there are no time limits here."""

    def inline(self) -> None:
        """Serves the pending requests."""
        if self._loop is None:
            raise ClosedEnvironmentError("The vector env was closed during this call.")
        self._loop.serve_pending()

    def look(self) -> None:
        """Does nothing: there is no process that can have died."""

    def listen(self, indices: Sequence[int], timeout: float) -> None:
        """Raises RuntimeError: without a process, a message that has not come is lost."""
        raise RuntimeError("the message of an answer is lost")

    def dismiss(self) -> None:
        """Does nothing: no worker waits."""

    def stop(
        self, timeout: float | None, remind: Callable[[], object] | None = None
    ) -> list[Failure]:
        """Closes the envs."""
        self.stopped = self.ended = True
        self._loop = None
        self._channel.drop()
        self._close_descriptors()
        return self._host.close()

    def disown(self) -> None:
        """Closes descriptors; the copies of the envs in a fork are the program's."""
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self.kept.clear()


# The workers of one vector env: processes, or a stand-in in this process.
Workers: TypeAlias = Supervisor | InlineWorker

"""Envs in the calling process, behind the interface of worker processes.

All of them with ``num_workers=0``; with ``caller_steps=True`` those of the last worker.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from gymnasium.error import ClosedEnvironmentError

from shmvec._core import Alarms, Segment, WorkerLoop
from shmvec._memory.segment import Kept
from shmvec._processes.control import Attachment, Report, Resets
from shmvec._processes.host import EnvFn, EnvHost
from shmvec._processes.launcher import Launcher
from shmvec._processes.supervisor import Supervisor
from shmvec.faults import Failure, WorkerCrashError

__all__ = ["InlineWorker", "Workers", "WorkersAndCaller"]


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


@dataclass
class _Packed:
    """A result that is pickled, with a parcel's interface."""

    content: Any
    unpack: Callable[[Any], Any]

    def open(self) -> Any:
        """A copy of the result."""
        return self.unpack(self.content)


def _itself(message: Any) -> Any:
    """Returns a message that stays in this process."""
    return message


class _InlineChannel:
    """A control channel, and the mailbox at its other end, without a process between them."""

    broken = None

    def __init__(
        self, pack: Callable[[Any], Any] = _itself, unpack: Callable[[Any], Any] = _itself
    ) -> None:
        """Makes a channel without messages, for what is packed and unpacked so."""
        self.pack, self.unpack = pack, unpack
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

    def packer(self, lent: bool) -> Callable[[Any], _Given | _Packed]:
        """A function that packs a result, each on its own, as some cannot be pickled."""
        if self.pack is _itself:
            return _Given
        return lambda result: _Packed(self.pack(result), self.unpack)

    def _from(self, queue: deque[_Message], sequence: int) -> _Message | None:
        while queue and queue[0].sequence != sequence:
            for descriptor in queue.popleft().descriptors:
                os.close(descriptor)
        return queue[0] if queue else None


class InlineWorker:
    """The one worker of a vector env without processes, with the interface of ``Supervisor``."""

    start_s = 0.0

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        index: int = 0,
        first_env: int = 0,
        channel: _InlineChannel | None = None,
    ) -> None:
        """Prepares for the envs; ``reports`` builds them.

        Args:
            env_fns: The functions that make them.
            index: The worker's index.
            first_env: Index of its first env.
            channel: For its messages.
        """
        self.index = index
        self.first_env = first_env
        self.ranges = [range(len(env_fns))]
        self.processes: list[Any] = []
        self.doing = "start"  # the last command, for messages
        self.stopped = self.ended = False
        self.changing = nullcontext()
        self._channel = _InlineChannel() if channel is None else channel
        self.channels: list[Any] = [self._channel]
        self._env_fns = env_fns
        self._host = EnvHost(index, first_env, self._channel, in_caller=True)
        self._loop: WorkerLoop | None = None
        self._attached: tuple[Segment, Attachment] | None = None
        self._descriptor = -1
        self.kept = Kept()
        self.alarms = Alarms()

    pack = staticmethod(_itself)
    unpack = pack

    def is_here(self, index: int) -> bool:
        """Whether a worker's envs are in this process."""
        return True

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

    def begin(self, index: int, resets: Resets) -> None:
        """Prepares for envs in place of the closed ones."""
        self._host = EnvHost(self.index, self.first_env, self._channel, in_caller=True)
        self._resets = resets

    def is_starting(self, index: int) -> bool:
        """False: what has begun is done at once, or begun anew."""
        return False

    def go_on(self, index: int) -> Failure | None:
        """Builds the envs once more; returns what that raised, or None."""
        assert self._attached is not None
        segment, attachment = self._attached
        report = self._host.build(self._env_fns)
        if isinstance(report, Failure):
            return report
        if self.stopped:  # a signal's handler has stopped the worker while envs were built
            self._host.close()
            raise ClosedEnvironmentError("The vector env was closed during this call.")
        attachment = replace(attachment, resets=self._resets, kept=self.kept.sizes)
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
        """Serves the pending requests; there are none for envs that are being replaced."""
        if self.stopped:
            raise ClosedEnvironmentError("The vector env was closed during this call.")
        if self._loop is not None:
            self._loop.serve_pending()

    def dead(self) -> list[int]:
        """Empty: there is no process that can have died."""
        return []

    def crash(self, indices: Sequence[int]) -> Exception:
        """Raises RuntimeError: there is no process that can have died."""
        raise RuntimeError("there is no process that can have died")

    def listen(self, indices: Sequence[int], timeout: float) -> None:
        """Waits for what is to be built."""
        time.sleep(timeout)

    def dismiss(self) -> None:
        """Does nothing: no worker waits."""

    def wait_for_ends(self, *arguments: object) -> list[Failure]:
        """Does nothing: no process ends."""
        return []

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


class WorkersAndCaller(Supervisor):
    """Worker processes, and a last worker, which is the caller: it steps envs while the others do.

    OpenMP's master thread does so. Where there are few cores, the caller does not hand its core to
    a worker and get it back in each batch step.
    """

    def __init__(
        self,
        launcher: Launcher,
        ranges: Sequence[range],
        hang_warning_s: float | None,
        env_fns: Sequence[EnvFn],
    ) -> None:
        """Prepares a process for each range of envs but the last, whose functions are given."""
        super().__init__(launcher, ranges[:-1], hang_warning_s)
        self.ranges = list(ranges)
        self._here = len(ranges) - 1
        # Messages are pickled as others are: envs get copies, and so does the caller.
        channel = _InlineChannel(self.pack, self.unpack)
        self._own = InlineWorker(env_fns, self._here, ranges[-1].start, channel)
        self._own.kept = self.kept

    def is_here(self, index: int) -> bool:
        """Whether a worker's envs are in this process."""
        return index == self._here

    def start(self) -> None:
        """Starts the processes. If that fails, the caller must stop them."""
        super().start()
        self.channels += self._own.channels

    def reports(self, own: Mapping[int, Report | Failure] | None = None) -> list[Report | Failure]:
        """Builds the caller's envs while the processes build theirs; one report a worker."""
        return super().reports({self._here: self._own.reports()[0]})

    def attach(self, attachment: Attachment, descriptor: int, segment: Segment) -> None:
        """Hands the segment to all workers and waits until they have attached."""
        self._own.attach(attachment, descriptor, segment)
        super().attach(attachment, descriptor, segment)

    def collect(self, index: int, results: Sequence[Any]) -> Sequence[Any]:
        """The results of a command, of which those of a process may lie in its depot."""
        return results if self.is_here(index) else super().collect(index, results)

    def begin(self, index: int, resets: Resets) -> None:
        """Begins to start a worker in place of an ended one."""
        which: Any = self._own if self.is_here(index) else super()
        which.begin(index, resets)

    def go_on(self, index: int) -> Failure | WorkerCrashError | None:
        """Goes on with that; returns what building its envs raised, or its crash."""
        return self._own.go_on(index) if self.is_here(index) else super().go_on(index)

    def is_up(self, index: int) -> bool:
        """Whether the worker is attached, and was not ended."""
        return self._own.is_up(index) if self.is_here(index) else super().is_up(index)

    def listen(self, indices: Sequence[int], timeout: float) -> None:
        """Waits until one of these workers has sent something or has ended."""
        super().listen([index for index in indices if index != self._here], timeout)

    def last_words(self, index: int) -> str:
        """The last lines that a process has written to stderr."""
        return "" if self.is_here(index) else super().last_words(index)

    def stack(self, index: int) -> str:
        """The Python stack of a process."""
        return "" if self.is_here(index) else super().stack(index)

    def inline(self) -> None:
        """Serves the pending requests to the caller's envs."""
        self._own.inline()

    def end(self, index: int) -> None:
        """Ends a worker, whatever it is doing, and confirms its death."""
        return self._own.end(index) if self.is_here(index) else super().end(index)

    def stop(
        self, timeout: float | None, remind: Callable[[], object] | None = None
    ) -> list[Failure]:
        """Ends all processes, which were asked to close before, and closes the caller's envs."""
        failures: list[Failure] = []
        try:
            failures += super().stop(timeout, remind)
        finally:
            failures += self._own.stop(timeout)
        return failures

    def disown(self) -> None:
        """Gives up the workers, in a process that is a fork of their owner."""
        super().disown()
        self._own.disown()


# The workers of one vector env: processes, or a stand-in in this process.
Workers: TypeAlias = Supervisor | InlineWorker

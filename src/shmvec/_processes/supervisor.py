"""Starts, watches and ends worker processes, and exchanges with them all messages except steps.

Whether a process lives is known by its pidfd alone: other code may use SIGCHLD and ``waitpid``, and
other processes may hold the end of a pipe. Whatever happens, ``stop`` leaves no process and no
descriptor behind.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import process as mp_process
from pickle import loads
from threading import RLock
from typing import Any

from gymnasium.error import ClosedEnvironmentError

from shmvec import _pickling as _classes
from shmvec._core import Alarms, Channel, Segment, reap_marked
from shmvec._cores import time_on_cores, usable_cores
from shmvec._hints import naming_limits
from shmvec._memory.parcels import Depot, Parcel
from shmvec._memory.segment import Kept
from shmvec._processes.control import Attachment, Imported, Report, Resets
from shmvec._processes.descendants import end_families, new_mark
from shmvec._processes.launcher import Launcher
from shmvec._processes.output import WorkerStderr, copy_stderr
from shmvec._processes.stacks import Busy, Hangs, Watch, stack_of, waits_for_lock
from shmvec.faults import (
    Failure,
    WorkerCrashError,
    crash,
    ends,
    note_failures,
    stack_text,
    stderr_text,
)

__all__ = ["Supervisor"]

log = logging.getLogger("shmvec")

_KILL_AFTER_S = 2.0  # for a process to obey SIGTERM
_KILLED_S = 10.0  # for a killed process to end; one that hangs in the kernel does not
_LAST_WORDS_S = 1.0  # for a process to end after its channel broke
_ORPHANS_PATIENCE_S = 0.1  # for processes that a dead worker has started to obey SIGTERM
_OTHERS_FAIL_S = 5.0  # for the other workers to report, once one could not build its envs
_SLICE_S = 0.05  # between two checks or reminders
_FIRST_S = 10.0  # for the first worker to build an env before the others are started
_LOOK_S = 0.25  # between two checks whether the first worker is busy
_BUSY = 0.1  # of a core: a process that uses less is asleep
_CLOSED = "The vector env was closed during this call."
_LOCK_OF_FORK = (
    "(it waits for a lock or a thread. If another thread of the program held that lock as this "
    "worker was forked, it stays locked; context='forkserver' starts workers without that)"
)
_CHANGING_S = 10.0  # for a thread that replaces workers to notice that they are being ended


class Supervisor:
    """The worker processes of one vector env.

    Attributes:
        ranges: The envs of each worker.
        processes: The processes.
        channels: The control channels to them.
        doing: The last command, for messages.
        stopped: Whether the workers were stopped, or are about to be.
        ended: Whether nothing of them is left.
        start_s: Seconds until all had built their envs.
        changing: The lock held while workers are replaced.
        kept: Memory, besides the segment, that workers which are started later also need.
        alarms: Descriptors that wake workers which doze.
    """

    inline: Callable[[], None] | None = None  # see InlineWorker
    # Bound here, because other code may patch the modules.
    pack = staticmethod(_classes.dumps)
    unpack = staticmethod(loads)

    def __init__(
        self, launcher: Launcher, ranges: Sequence[range], hang_warning_s: float | None
    ) -> None:
        """Prepares a process for each range of envs; the last argument is that of ``Hangs``."""
        self.ranges = list(ranges)
        self._indices = range(len(self.ranges))  # the workers that are processes
        self.doing = "start"
        self.stopped = False
        self.processes: list[Any] = []
        self.channels: list[Any] = []
        self._hangs = Hangs(hang_warning_s, self.ranges)
        self._launcher = launcher
        self._owner = os.getpid()
        self._ending = RLock()  # held while workers are ended; reentrant: retried after Ctrl-C
        self.ended = False
        self.start_s = 0.0
        self.changing = RLock()  # reentrant: a signal's handler may end them in the middle
        self._begun = -1  # the worker whose process is being started in place of another
        # The workers of which this was done and that are not attached, with what they then need.
        self._starting: dict[int, tuple[Resets, Watch]] = {}
        self._stderrs: list[WorkerStderr] = []
        self._marks = [0] * len(self.ranges)  # of what each worker has started
        self._parents: set[int] = set()  # workers whose families were not ended yet
        self._up = [False] * len(self.ranges)
        self.alarms = Alarms()
        # A worker that is started later needs these as well.
        self._depots: list[Depot] = []
        self._attachment: Attachment | None = None
        self._descriptor = -1
        self.kept = Kept()

    def is_here(self, index: int) -> bool:
        """Whether a worker's envs are in this process."""
        return False

    # ---- starting ----------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the processes. If that fails, the caller must stop them.

        Raises:
            OSError: There is no /proc, by which processes and their threads are found.
        """
        if not os.path.exists("/proc/self/status"):
            raise OSError(
                errno.ENOENT,
                "workers need /proc, which is not mounted here (mount -t proc proc /proc); "
                "num_workers=0 does not",
            )
        self.start_s = -time.monotonic()
        with naming_limits(), self._not_stopped():
            self._start()

    @contextlib.contextmanager
    def _not_stopped(self) -> Iterator[None]:
        """Has ``stop`` of another thread wait until all that the block makes is known.

        Raises:
            ClosedEnvironmentError: It was stopped before.
        """
        with self.changing:
            if self.stopped:
                raise ClosedEnvironmentError(_CLOSED)
            yield

    def _start(self) -> None:
        # With a core for each worker, it is faster if all of them import at the same time.
        learns = self._launcher.may_learn and len(self._indices) > usable_cores()
        with self._launcher.ready():
            for index in self._indices:
                self._launch(index, self._keep)
                self._stderrs.append(WorkerStderr(self.channels[index], (id(self), index)))
                if index == 0 and learns:
                    copy_stderr()
                    self._learn_from_first()
        copy_stderr()  # after the forks, which must not see a second thread

    def _keep(self, process: Any, channel: Channel) -> None:
        self.channels.append(channel)
        self.processes.append(process)

    def _learn_from_first(self) -> None:
        """Waits until the first worker reports what it has imported to build an env.

        The wait ends if that worker sleeps: its env may wait for another env, or for a program.
        """
        process, channel = self.processes[0], self.channels[0]
        end = time.monotonic() + _FIRST_S
        wanted, look = -1.0, 0.0  # CPU seconds by which it is busy; when they are read next
        while channel.find(0) is None and not process.has_ended() and channel.broken is None:
            now = time.monotonic()
            if now > look:
                before, wanted = wanted, sum(filter(None, time_on_cores(process.pid)))
                if now > end or wanted < before + _BUSY * _LOOK_S:
                    return
                look = now + _LOOK_S
            self.listen([0], _SLICE_S)
        message = channel.find(0)
        if message is not None and isinstance(content := self.unpack(message.content), Imported):
            channel.take(0)
            self._launcher.learn(content.modules)

    def reports(self, own: Mapping[int, Report | Failure] | None = None) -> list[Report | Failure]:
        """Waits until every worker has built its envs; one report a worker.

        Once a worker has failed, the others get a few seconds to report their failures, too; they
        may be waiting for the failed one. Workers that have not reported by then, or when this wait
        is interrupted, are ended.

        Args:
            own: Reports that are known already, of workers that are no processes.

        Raises:
            WorkerCrashError: Workers have died instead; it names what the envs of others raised.
        """
        reports: dict[int, Report | Failure] = dict(own or {})
        dead: list[int] = []
        waiting = list(self._indices)
        end = math.inf
        for failure in reports.values():
            if isinstance(failure, Failure):
                broken_off = failure.type in ("KeyboardInterrupt", "SystemExit")
                end = time.monotonic() + (0.0 if broken_off else _OTHERS_FAIL_S)
        building = Watch(self._hangs, "has been building its envs")
        try:
            while waiting and time.monotonic() < end:
                self.listen(waiting, _SLICE_S)
                building.look(waiting, self._where)
                for index in list(waiting):
                    message, lost = self._next_message(index)
                    if message is not None:
                        content = self.unpack(message.content)
                        self.channels[index].take(0)
                        if isinstance(content, Imported):
                            self._launcher.learn(content.modules)
                            continue
                        reports[index] = content
                    elif lost:
                        dead.append(index)
                    else:
                        continue
                    waiting.remove(index)
                    if index not in reports or isinstance(reports[index], Failure):
                        end = min(end, time.monotonic() + _OTHERS_FAIL_S)
        finally:
            # These workers still build envs, and their reports are not needed any more.
            self._check_ended(self._end(waiting))
        if dead:
            error = self.crash(sorted(dead))
            note_failures(error, [each for each in reports.values() if isinstance(each, Failure)])
            raise error
        self.start_s += time.monotonic()
        return [report for _, report in sorted(reports.items())]

    def attach(self, attachment: Attachment, descriptor: int, segment: Segment) -> None:
        """Hands the segment to the workers and waits until all have attached."""
        with self._not_stopped():
            self._attach(attachment, descriptor)

    def _attach(self, attachment: Attachment, descriptor: int) -> None:
        self._attachment = attachment
        self._descriptor = os.dup(descriptor)
        self.alarms = Alarms(len(self._indices))
        for _ in self._indices:
            self._depots.append(Depot.create())
        for index in self._indices:
            self._hand_over(index, attachment)
        for index in self._indices:
            self._receive(index)
            self._up[index] = True

    def _hand_over(self, index: int, attachment: Attachment) -> None:
        """Sends a worker what it needs to attach."""
        descriptors = [self._descriptor, self.alarms[index], self._depots[index].descriptor]
        attachment = replace(attachment, kept=self.kept.sizes)
        self.channels[index].put(0, self.pack(attachment), [*descriptors, *self.kept.descriptors])

    def collect(self, index: int, results: Sequence[Parcel | None]) -> Sequence[Parcel | None]:
        """Takes a worker's results (None: there is none) into the parent's own memory."""
        return self._depots[index].collect(results)

    def begin(self, index: int, resets: Resets) -> None:
        """Begins to start a worker in place of an ended one; :meth:`go_on` does the rest.

        Args:
            index: The worker.
            resets: Seeds and options for the first resets of its envs.
        """

        def keep(process: Any, channel: Channel) -> None:
            self.channels[index], self.processes[index] = channel, process

        self._begun = index
        try:
            with naming_limits():
                self._launch(index, keep)
                self._stderrs[index] = WorkerStderr(self.channels[index], (id(self), index))
                copy_stderr()
        finally:
            self._begun = -1
        if self.stopped:  # by a signal's handler, meanwhile: `stop` may not have seen this worker
            self.end(index)
            raise ClosedEnvironmentError(_CLOSED)
        self._starting[index] = resets, Watch(self._hangs, "has been starting")

    def _launch(self, index: int, keep: Callable[[Any, Channel], None]) -> None:
        """Starts a process, whose family is known by a new mark."""
        self._marks[index] = new_mark()
        self._parents.add(index)
        self._launcher.start(index, self._marks[index], keep)

    def is_starting(self, index: int) -> bool:
        """Whether a worker was begun, and is not attached."""
        return index in self._starting

    def go_on(self, index: int) -> Failure | WorkerCrashError | None:
        """Hands the segment to a worker that was begun and is built, or notes that it has attached.

        Returns:
            What building its envs raised, or its crash; None: neither. A second call returns it
            again, until the worker is ended.
        """
        assert self._attachment is not None
        resets, starting = self._starting[index]
        message, lost = self._next_message(index)
        if message is None:
            starting.look([index], self._where)
            return self.crash([index]) if lost else None
        report = self.unpack(message.content)
        if isinstance(report, Failure):
            return report
        if report is None:
            del self._starting[index]
            self.channels[index].take(0)
            self._up[index] = True  # last: interrupted before, it is begun anew
            return None
        self._hand_over(index, replace(self._attachment, resets=resets))
        self.channels[index].take(0)
        return None

    def is_up(self, index: int) -> bool:
        """Whether the worker is attached, and was not ended."""
        return self._up[index]

    def _receive(self, index: int) -> Any:
        """Waits for the message of a worker that starts, whatever happens to the others.

        Raises:
            WorkerCrashError: The worker has died without a message.
        """
        starting = Watch(self._hangs, "has been starting")
        while True:
            if self.stopped:
                raise ClosedEnvironmentError(_CLOSED)
            message, lost = self._next_message(index)
            if message is not None:
                self.channels[index].take(0)
                return self.unpack(message.content)
            if lost:
                raise self.crash([index])
            self.listen([index], _SLICE_S)
            starting.look([index], self._where)

    def _next_message(self, index: int) -> tuple[Any, bool]:
        """The message of a worker that starts, or None; and whether no more can come."""
        # The check comes first, so that messages that were sent before a death are read.
        dead: bool = self.processes[index].has_ended()
        channel = self.channels[index]
        message = channel.find(0)
        channel.pump()
        return message, dead or channel.broken is not None

    # ---- watching ----------------------------------------------------------------------------

    def dead(self) -> list[int]:
        """The workers that have ended, or whose channel is broken; not those being replaced."""
        poll = select.poll()
        pidfds = [
            -1 if index in self._starting else process.sentinel
            for index, process in enumerate(self.processes)
        ]
        for pidfd in pidfds:
            if pidfd >= 0:
                poll.register(pidfd, select.POLLIN)
        ended = poll.poll(0)
        if not ended and all(channel.broken is None for channel in self.channels):
            return []
        dead = {pidfd for pidfd, _ in ended}
        return [
            index
            for index, pidfd, channel in zip(self._indices, pidfds, self.channels, strict=False)
            if pidfd >= 0 and (pidfd in dead or channel.broken is not None)
        ]

    def listen(self, indices: Sequence[int], timeout: float) -> None:
        """Waits until one of these workers has sent something or has ended."""
        poll = select.poll()
        for index in indices:
            sentinel, channel = self.processes[index].sentinel, self.channels[index]
            if sentinel < 0:  # it was ended
                continue
            if channel.broken is None:
                poll.register(channel, select.POLLIN | (select.POLLOUT if channel.unsent else 0))
            poll.register(sentinel, select.POLLIN)
        poll.poll(1000 * min(timeout, _SLICE_S))

    def crash(self, indices: Iterable[int]) -> WorkerCrashError:
        """The error for workers that have ended, or whose channel is broken."""
        reasons = {}
        for index in indices:
            reasons[index] = ""
            process = self.processes[index]
            if not process.has_ended(_LAST_WORDS_S):
                broken = self.channels[index].broken
                reasons[index] = f"its control channel: {broken}; it was killed"
                process.send_signal(signal.SIGKILL)
                process.has_ended(_KILL_AFTER_S)
        self._end_families(reasons)
        found = []
        for index, why in reasons.items():
            how = why or self.processes[index].known_exitcode
            found.append((index, self.ranges[index], how, self.last_words(index)))
        return crash(found, self.doing)

    def last_words(self, index: int) -> str:
        """The last lines that a worker has written to stderr."""
        return self._stderrs[index].text()

    def stack(self, index: int) -> str:
        """The Python stack of a worker; see ``stack_of``. A last line tells of a lock of a fork."""
        pid = self.processes[index].pid
        # Read first: the request for the stack wakes the process.
        locked = self._launcher.forks and waits_for_lock(pid)
        stack = stack_of(pid)
        return f"{stack}\n{_LOCK_OF_FORK}" if locked else stack

    def hung(self, hanging: Sequence[Busy]) -> None:
        """Logs where workers are that take long to answer."""
        self._hangs.log_busy(hanging, self.doing, self._where)

    def _where(self, index: int) -> str:
        return stack_text(self.stack(index)) + stderr_text({None: self.last_words(index)})

    def interrupt(self, index: int) -> None:
        """Raises EnvTimeoutError in a worker's env that takes too long, if signals reach it."""
        self.processes[index].send_signal(signal.SIGUSR1)

    # ---- ending ------------------------------------------------------------------------------

    def end(self, index: int) -> None:
        """Ends a worker, whatever it is doing, and confirms its death."""
        self._up[index] = False
        self._starting.pop(index, None)
        self._check_ended(self._end([index]))

    def _end(self, indices: Sequence[int]) -> list[int]:
        """Terminates processes and what they have started; kills those that do not obey.

        One that this process may not send signals, because its user has changed, ends by itself
        when its channel is closed: at once if it is idle, else after its step. One that hangs in
        the kernel ends when that lets go of it.

        Returns:
            Those that run on.
        """
        if self._owner != os.getpid():  # a fork of it, in which an exception leads here
            return []
        others, killed = list[int](), list[int]()
        for index in indices:
            self._up[index] = False
            if not self.processes[index].send_signal(signal.SIGTERM):
                self.channels[index].close()  # now: it has as long to end
            self.processes[index].send_signal(signal.SIGCONT)  # a stopped one obeys once it goes on
        stubborn = time.monotonic() + _KILL_AFTER_S
        for index in indices:
            process = self.processes[index]
            if not process.has_ended(max(0.0, stubborn - time.monotonic())):
                (killed if process.send_signal(signal.SIGKILL) else others).append(index)
        hanging = time.monotonic() + _KILLED_S
        self._end_families(index for index in indices if index not in others)
        for index in killed:
            if not self.processes[index].has_ended(max(0.0, hanging - time.monotonic())):
                others.append(index)
        ended = [index for index in indices if index not in others]
        for index in ended:
            self._release(index)
        for index in others:
            self.channels[index].close()
        reap_marked([self._marks[index] for index in ended])  # what they have left as zombies
        return others

    def _check_ended(self, others: Sequence[int]) -> None:
        """Raises an OSError if there are processes that this one could not end."""
        if others:
            forbidden = not self.processes[others[0]].send_signal(0)
            number = errno.EPERM if forbidden else errno.ETIMEDOUT
            raise OSError(number, self._not_ended(others))

    def _not_ended(self, others: Sequence[int]) -> str:
        """What is said of processes that this one could not end."""
        which = ", ".join(
            f"worker {index} (process {self.processes[index].pid})" for index in others
        )
        if self.processes[others[0]].send_signal(0):
            return (
                f"{which} was killed, and has not ended within {_KILLED_S:g} s: it hangs in the "
                "kernel, in a driver or a file system that does not answer, and ends with that"
            )
        return (
            f"{which} may not be ended by this process, whose user has changed since it started "
            "the workers, and has not ended within 2 s of being asked to. It ends after its "
            "step, or with this process. Close the vector env before the user is changed"
        )

    def _end_families(self, indices: Iterable[int]) -> None:
        """Ends the processes that dead workers have started and not ended themselves."""
        parents = self._parents.intersection(indices)
        if parents:
            end_families([self._marks[index] for index in parents], _ORPHANS_PATIENCE_S)
        for index in parents:
            self.processes[index].end_group()
        self._parents -= parents

    def _release(self, index: int) -> None:
        """Closes what belongs to a process that has ended."""
        self.channels[index].close()
        for stderr in self._stderrs[index : index + 1]:  # there is none if its pipe has failed
            stderr.close()
        self.processes[index].release()

    def dismiss(self) -> None:
        """Lets workers that wait for the segment know that there will be none."""
        # Workers that are being started are left out: they expect other messages first.
        if self.changing.acquire(blocking=False):
            try:
                for index, channel in zip(self._indices, self.channels, strict=False):
                    if not self._up[index] and index != self._begun:
                        channel.put(0, self.pack(None))
            finally:
                self.changing.release()

    def stop(
        self, timeout: float | None, remind: Callable[[], object] | None = None
    ) -> list[Failure]:
        """Ends all processes, which were asked to close before.

        Args:
            timeout: Seconds for them to close their envs; None: no limit. After that they are
                terminated, and killed if they do not obey.
            remind: Asks them to close once more; called every 50 ms.

        Returns:
            What closing the envs has raised.
        """
        # A fork of the parent must not end its workers, nor may two threads do so at once.
        if self._owner != os.getpid() or self.ended or not self._ending.acquire(blocking=False):
            return []
        changing = False
        try:
            self.stopped = True
            # A thread that is replacing workers sees `stopped`, and gives up.
            changing = self.changing.acquire(timeout=_CHANGING_S)
            return self._stop(timeout, remind)
        finally:
            if changing:
                self.changing.release()
            self._ending.release()

    def _stop(self, timeout: float | None, remind: Callable[[], object] | None) -> list[Failure]:
        self.dismiss()
        waiting = [  # not for those that `end` has given up
            index
            for index, process in enumerate(self.processes)
            if process.sentinel >= 0 and self.channels[index].fileno() >= 0
            # Nor for those that are started in place of others.
            if index not in self._starting and index != self._begun
        ]
        died: list[int] = []
        try:
            return self.wait_for_ends(waiting, timeout, died, remind)
        finally:
            said = stderr_text({index: self.last_words(index) for index in sorted(died)})
            others = self._end(range(len(self.processes)))
            if died:
                log.warning("before all envs were closed: %s%s", self._fates(sorted(died)), said)
            if others:
                log.warning("%s", self._not_ended(others))
            for index in others:
                self._abandon(index)
            self._close_descriptors()
            self.ended = True

    def wait_for_ends(
        self,
        indices: Sequence[int],
        timeout: float | None,
        died: list[int],
        remind: Callable[[], object] | None = None,
    ) -> list[Failure]:
        """Waits until workers have ended that were asked to close, or until all are being stopped.

        Args:
            indices: The workers.
            timeout: Seconds to wait; None: no limit.
            died: Takes those that have ended without having closed their envs.
            remind: Asks them to close once more; called every 50 ms.

        Returns:
            What closing the envs has raised.
        """
        failures: list[Failure] = []
        waiting, stopped = list(indices), self.stopped
        deadline = None if timeout is None else time.monotonic() + timeout
        closing = Watch(self._hangs, "has been closing its envs")
        ending = Watch(self._hangs, "has closed its envs, but a thread or an exit hook has run on")
        for index in waiting:  # a stopped one closes its envs once it goes on
            self.processes[index].send_signal(signal.SIGCONT)
        while waiting:
            left = _SLICE_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                break
            self.listen(waiting, left)
            if self.ended or self.stopped != stopped:  # by another thread or a signal's handler
                break
            for index in list(waiting):
                ended = self.processes[index].has_ended()
                self.channels[index].pump()  # a worker must not block on a full socket
                farewell = self.channels[index].farewell
                if ended:
                    waiting.remove(index)
                    if farewell is None:
                        if self._up[index]:
                            died.append(index)
                        continue
                    self._parents.discard(index)  # it has ended what it started
                    with contextlib.suppress(Exception):
                        failures += self.unpack(farewell)
            closed = [each for each in waiting if self.channels[each].farewell is not None]
            ending.look(closed, self._where)
            closing.look([each for each in waiting if each not in closed], self._where)
            if remind is not None:
                remind()
        return failures

    def _fates(self, indices: Iterable[int]) -> str:
        """How processes have ended, in words."""
        return ends(
            (index, self.ranges[index], self.processes[index].known_exitcode) for index in indices
        )

    def _abandon(self, index: int) -> None:
        """Closes what belongs to a process that runs on until this one ends."""
        self.channels[index].close()
        for stderr in self._stderrs[index : index + 1]:
            stderr.close()
        # Otherwise multiprocessing would wait for it when this process ends.
        mp_process._children.discard(self.processes[index])  # type: ignore[attr-defined]
        self.processes[index].close_here()

    def _close_descriptors(self) -> None:
        self.alarms.close()
        for depot in self._depots:
            depot.close()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self.kept.clear()

    def disown(self) -> None:
        """Gives up the workers, in a process that is a fork of their owner."""
        self.stopped = self.ended = True
        for _, channel in zip(self._indices, self.channels, strict=False):
            channel.close()
        self._close_descriptors()
        # Otherwise multiprocessing would terminate daemonic processes when this one ends.
        mp_process._children.difference_update(self.processes)  # type: ignore[attr-defined]
        for process in self.processes:
            process.close_here()

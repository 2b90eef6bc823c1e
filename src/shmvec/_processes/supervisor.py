"""Starts, watches and ends worker processes, and exchanges with them all messages except steps.

Only its pidfd tells whether a process lives: other code may use SIGCHLD and ``waitpid``, and other
processes may hold the end of a pipe. Whatever happens, ``stop`` leaves no process and no descriptor
behind.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pickle import loads
from threading import RLock
from typing import Any, cast

from gymnasium.error import ClosedEnvironmentError

from shmvec import _pickling
from shmvec._core import Alarms, Channel, Descriptor, Segment, reap_marked
from shmvec._cores import time_on_cores, usable_cores
from shmvec._hints import explain_process_limits
from shmvec._memory.parcels import Depot, Parcel
from shmvec._memory.segment import SharedDescriptors
from shmvec._processes.control import Attachment, ImportReport, Report, Resets
from shmvec._processes.descendants import end_families, new_mark
from shmvec._processes.host import EnvFn
from shmvec._processes.inline import InlineWorker
from shmvec._processes.launcher import Launcher
from shmvec._processes.output import WorkerStderr, copy_stderr, finish_copying, pause_copying
from shmvec._processes.stacks import read_stack, waits_for_lock
from shmvec._processes.worker_process import SIGKILL_TIMEOUT_S
from shmvec.faults import (
    Failure,
    WorkerCrashError,
    crash_error,
    describe_exits,
    envs_in_words,
    note_failures,
    stack_section,
    stderr_section,
)

__all__ = ["Supervisor"]

log = logging.getLogger("shmvec")

_SIGTERM_TIMEOUT_S = 2.0  # for a process to obey SIGTERM
_EXIT_TIMEOUT_S = 1.0  # for a process to end after its channel broke
_FAMILY_SIGTERM_TIMEOUT_S = 0.1  # for what a dead worker has started to obey SIGTERM
_OTHER_REPORTS_TIMEOUT_S = 5.0  # for the other workers to report, once one could not build its envs
_SLICE_S = 0.05  # between two checks or reminders
_FIRST_WORKER_TIMEOUT_S = 10.0  # for the first worker to build an env before others are started
_CPU_CHECK_INTERVAL_S = 0.25  # between two checks whether the first worker is busy
_BUSY_CPU_SHARE = 0.1  # of a core; a process that uses less is asleep
_FORK_LOCK_HINT = (
    "(it waits for a lock or a thread. If another thread of the program held that lock as this "
    "worker was forked, it stays locked; context='forkserver' starts workers without that)"
)
_MAX_LOGGED_HANGS = 4  # workers whose stacks are logged at once; the others are only named
_REPLACEMENT_TIMEOUT_S = 10.0  # for a thread that replaces workers to notice their end


def _identity(message: Any) -> Any:
    return message


class Supervisor:
    """The workers of one vector env: processes, and perhaps the caller as the last worker.

    The caller steps envs like OpenMP's master thread. Where there are few cores, it then need not
    hand its core to a worker, and get it back, in each batch step.

    Attributes:
        ranges: The envs of each worker.
        processes: The processes.
        channels: The control channels to them.
        last_command: The last command, for messages.
        stopped: Whether the workers were stopped, or are about to be.
        ended: Whether nothing of them is left.
        start_s: Seconds until all had built their envs.
        replacement_lock: The lock held while workers are replaced.
        shared_descriptors: Memory besides the segment, for workers that are started later.
        alarms: Descriptors by which sleeping workers are woken.
        serve_inline: Serves the pending requests to the caller's envs; None: it has none.
    """

    # These are bound here because other code may patch the modules.
    pack: Callable[[Any], Any] = staticmethod(_pickling.dumps)
    unpack: Callable[[Any], Any] = staticmethod(loads)

    def __init__(
        self,
        launcher: Launcher | None,
        ranges: Sequence[range],
        hang_warning_s: float | None,
        caller_env_fns: Sequence[EnvFn] | None = None,
    ) -> None:
        """Prepares a worker for each range of envs.

        Args:
            launcher: Starts the processes; None: there are none.
            ranges: The envs of each worker.
            hang_warning_s: Seconds after which a worker that is waited for is logged as hanging.
            caller_env_fns: The functions that make the caller's envs, if the caller is the last
                worker; None: all workers are processes.
        """
        self.ranges = list(ranges)
        # The workers that are processes.
        self._process_indices = range(len(self.ranges) - (caller_env_fns is not None))
        self._inline_worker: InlineWorker | None = None
        self.serve_inline: Callable[[], None] | None = None
        if not self._process_indices:
            self.pack = self.unpack = _identity
        if caller_env_fns is not None:
            # If there are processes, messages to the caller's envs are pickled, too: all envs get
            # copies of what they are sent.
            index, first_env = len(self._process_indices), self.ranges[-1].start
            self._inline_worker = InlineWorker(
                caller_env_fns, index, first_env, self.pack, self.unpack
            )
            self.serve_inline = self._inline_worker.serve
        self._inline_resets = Resets((), [])  # for the caller's envs when they are replaced
        self.last_command = "start"
        self.stopped = False
        self.processes: list[Any] = []
        self.channels: list[Any] = []
        self._hang_warning_s = hang_warning_s
        self._launcher = cast(Launcher, launcher)  # only used if there are processes
        self._owner_pid = os.getpid()
        # Both locks are reentrant: after Ctrl-C the call is retried, and a signal's handler may end
        # the workers in the middle of a replacement.
        self._end_lock = RLock()  # held while workers are ended
        self.ended = False
        self.start_s = 0.0
        self.replacement_lock = RLock()
        self._launching = -1  # the worker whose process is being started in place of another
        # Of workers that are not attached yet: what they reset their envs with, and since when they
        # are waited for.
        self._pending_starts: dict[int, tuple[Resets | None, dict[int, float]]] = {}
        self._stderrs: list[WorkerStderr] = []
        self._marks = [0] * len(self.ranges)  # of each worker's family
        self._unended_families: set[int] = set()  # workers whose families were not ended yet
        self._attached = [False] * len(self.ranges)
        self.alarms = Alarms()
        # Workers that are started later need these as well.
        self._depots: list[Depot] = []
        self._attachment: Attachment
        self._segment_descriptor = Descriptor(int, -1)
        self.shared_descriptors = SharedDescriptors()

    def is_inline(self, index: int) -> bool:
        """Whether a worker is the caller, whose envs are in this process."""
        return index >= len(self._process_indices)

    def check_open(self) -> None:
        """Raises ClosedEnvironmentError if the workers were stopped, or are about to be."""
        if self.stopped:
            raise ClosedEnvironmentError("The vector env was closed during this call.")

    # ---- starting ----------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the processes. If this raises, call ``stop``.

        Raises:
            OSError: There is no /proc, where processes and their threads are found.
        """
        if self._process_indices and not os.path.exists("/proc/self/status"):
            raise OSError(
                errno.ENOENT,
                "workers need /proc, which is not mounted here (mount -t proc proc /proc); "
                "num_workers=0 does not",
            )
        self.start_s = -time.monotonic()
        with explain_process_limits(), self._hold_off_stop():
            if self._process_indices:
                self._start_processes()
            if self._inline_worker is not None:
                self.channels.append(self._inline_worker.channel)

    @contextlib.contextmanager
    def _hold_off_stop(self) -> Iterator[None]:
        """Lets another thread's ``stop`` begin only after the block, which starts processes.

        Raises:
            ClosedEnvironmentError: It was stopped before.
        """
        with self.replacement_lock:
            self.check_open()
            yield

    def _start_processes(self) -> None:
        # With a core for each worker, it is faster if all of them import at the same time.
        few_cores = len(self._process_indices) > usable_cores()
        shares_imports = self._launcher.shares_imports and few_cores
        first_lines: dict[bytes, int] = {}
        self._launcher.prepare()
        # The thread that copies stderr is ended before each fork. Pausing it ends it only once.
        pause_copying()
        for index in self._process_indices:
            self._launch(index, first_lines)
            if index == 0 and shares_imports:
                copy_stderr()
                self._wait_for_first_imports()
                pause_copying()
        copy_stderr()

    def _launch(self, index: int, first_lines: dict[bytes, int] | None = None) -> None:
        """Starts the process of a worker: the next one, or in place of an ended one."""
        here = slice(index, index + 1)

        def register(process: Any, channel: Channel) -> None:
            self.channels[here], self.processes[here] = [channel], [process]

        self._marks[index] = new_mark()
        self._unended_families.add(index)
        self._launcher.start(index, self._marks[index], register)
        self._stderrs[here] = [WorkerStderr(self.channels[index], index, first_lines)]

    def _wait_for_first_imports(self) -> None:
        """Waits until the first worker reports what it has imported to build an env.

        The wait ends if that worker sleeps, since its env may wait for another env or a program.
        """
        process, channel = self.processes[0], self.channels[0]
        end = time.monotonic() + _FIRST_WORKER_TIMEOUT_S
        cpu_s, next_check = -1.0, 0.0  # CPU seconds at the last check; when the next one is due
        while channel.find(0) is None and not process.has_ended() and channel.broken is None:
            now = time.monotonic()
            if now > next_check:
                before, cpu_s = cpu_s, sum(filter(None, time_on_cores(process.pid)))
                if now > end or cpu_s < before + _BUSY_CPU_SHARE * _CPU_CHECK_INTERVAL_S:
                    return
                next_check = now + _CPU_CHECK_INTERVAL_S
            self.listen([0], _SLICE_S)
        message = channel.find(0)
        content = None if message is None else self.unpack(message.content)
        if isinstance(content, ImportReport):
            channel.take(0)
            self._launcher.share_imports(content.modules)

    def collect_reports(self) -> list[Report | Failure]:
        """Builds the caller's envs, and waits until all are built; returns one report a worker.

        Once a worker has failed, the others get a few seconds to report their failures, too; they
        may be waiting for the failed one. Workers that have not reported by then, or when this wait
        is interrupted, are ended.

        Raises:
            WorkerCrashError: Workers have died. The error also tells what other envs have raised.
        """
        reports: dict[int, Report | Failure] = {}
        dead: list[int] = []
        waiting = list(self._process_indices)
        end = math.inf
        if self._inline_worker is not None:
            reports[len(self._process_indices)] = own = self._inline_worker.build()
            if isinstance(own, Failure):
                is_interrupt = own.type in ("KeyboardInterrupt", "SystemExit")
                end = time.monotonic() + (0.0 if is_interrupt else _OTHER_REPORTS_TIMEOUT_S)
        since: dict[int, float] = {}
        try:
            while waiting and time.monotonic() < end:
                self.listen(waiting, _SLICE_S)
                self._log_late(waiting, since, "has been building its envs")
                for index in list(waiting):
                    message, lost = self._find_start_message(index)
                    if message is not None:
                        content = self.unpack(message.content)
                        self.channels[index].take(0)
                        if isinstance(content, ImportReport):
                            self._launcher.share_imports(content.modules)
                            continue
                        reports[index] = content
                    elif lost:
                        dead.append(index)
                    else:
                        continue
                    waiting.remove(index)
                    if index not in reports or isinstance(reports[index], Failure):
                        end = min(end, time.monotonic() + _OTHER_REPORTS_TIMEOUT_S)
        finally:
            # These workers are still building envs, and their reports are no longer needed.
            self._raise_survivors(self._terminate(waiting))
        if dead:
            error = self.crash_error(sorted(dead))
            note_failures(error, [each for each in reports.values() if isinstance(each, Failure)])
            raise error
        self.start_s += time.monotonic()
        return [report for _, report in sorted(reports.items())]

    def attach(self, attachment: Attachment, descriptor: int, segment: Segment) -> None:
        """Hands the segment to the workers and waits until all have attached."""
        with self._hold_off_stop():
            # `shmvec top` finds the segment by it.
            self._segment_descriptor = Descriptor(os.dup, descriptor)
            self._attachment = attachment
            if self._inline_worker is not None:
                self._inline_worker.attach(attachment, segment)
            self.alarms = Alarms(len(self._process_indices))
            for index in self._process_indices:
                self._depots.append(Depot.create())
                self._send_attachment(index, attachment)
                self._pending_starts[index] = None, {}
            for index in self._process_indices:
                while not self._attached[index]:
                    self.listen([index], _SLICE_S)
                    self.check_open()
                    error = self.continue_start(index)
                    if isinstance(error, WorkerCrashError):
                        raise error
            for stderr in self._stderrs:
                stderr.end_deduplication()

    def _send_attachment(self, index: int, attachment: Attachment) -> None:
        descriptors = [
            self._segment_descriptor.number,
            self.alarms[index],
            self._depots[index].descriptor,
            *self.shared_descriptors.descriptors,
        ]
        attachment = replace(attachment, shared=self.shared_descriptors.sizes)
        self.channels[index].put(0, self.pack(attachment), descriptors)

    def collect(self, index: int, results: Sequence[Parcel | None]) -> Sequence[Parcel | None]:
        """Copies a worker's results out of its depot; None stands for an env without a result."""
        return results if self.is_inline(index) else self._depots[index].collect(results)

    def begin_replacement(self, index: int, resets: Resets) -> None:
        """Begins to start a worker in place of an ended one; `continue_start` does the rest.

        Args:
            index: The worker.
            resets: What it resets its envs with.
        """
        if self.is_inline(index):
            self._inline_resets = resets
            return
        self._launching = index
        try:
            with explain_process_limits():
                self._launch(index)
                copy_stderr()
        finally:
            self._launching = -1
        if self.stopped:  # by a signal's handler, whose `stop` may not have seen this worker
            self.end(index)
        self.check_open()
        self._pending_starts[index] = resets, {}

    def is_starting(self, index: int) -> bool:
        """Whether a worker was started, and is not attached yet."""
        return index in self._pending_starts

    def continue_start(self, index: int) -> Failure | WorkerCrashError | None:
        """Takes the next step of a worker's start, if it can be taken, and waits for nothing.

        Once the worker has built its envs, it is sent the segment; once it has attached, it is up.

        Returns:
            What building its envs raised, or its crash; None: neither. Further calls return the
            same, until the worker is ended.
        """
        if self._inline_worker is not None and self.is_inline(index):
            return self._inline_worker.replace(self._inline_resets, self.shared_descriptors)
        resets, since = self._pending_starts[index]
        message, lost = self._find_start_message(index)
        if message is None:
            self._log_late([index], since, "has been starting")
            return self.crash_error([index]) if lost else None
        report = self.unpack(message.content)
        if isinstance(report, Failure):
            return report
        if report is None:
            del self._pending_starts[index]
            self.channels[index].take(0)
            self._attached[index] = True  # last: if interrupted before, the start is repeated
            return None
        self._send_attachment(index, replace(self._attachment, resets=resets))
        self.channels[index].take(0)
        return None

    def is_up(self, index: int) -> bool:
        """Whether the worker is attached, and was not ended."""
        if self._inline_worker is not None and self.is_inline(index):
            return self._inline_worker.is_up
        return self._attached[index]

    def _find_start_message(self, index: int) -> tuple[Any, bool]:
        """The next message of a starting worker, or None; and whether no more can come."""
        # Death is checked first, so that messages that were sent before it are read.
        dead: bool = self.processes[index].has_ended()
        channel = self.channels[index]
        message = channel.find(0)
        channel.pump()
        return message, dead or channel.broken is not None

    # ---- watching ----------------------------------------------------------------------------

    def dead_workers(self) -> list[int]:
        """Workers that have ended, or whose channel is broken, except those being replaced."""
        poll, workers = select.poll(), dict[int, int]()  # by pidfd
        for index, process in enumerate(self.processes):
            pidfd = process.sentinel
            if pidfd >= 0 and index not in self._pending_starts:
                poll.register(pidfd, select.POLLIN)
                workers[pidfd] = index
        ended = {pidfd for pidfd, _ in poll.poll(0)}
        return [
            index
            for pidfd, index in workers.items()
            if pidfd in ended or self.channels[index].broken is not None
        ]

    def listen(self, indices: Sequence[int], timeout: float) -> None:
        """Waits until one of these workers has sent something or ended; at most ``timeout`` s."""
        poll = select.poll()
        for index in indices:
            if self.is_inline(index):
                continue
            sentinel, channel = self.processes[index].sentinel, self.channels[index]
            if sentinel < 0:  # the worker was ended
                continue
            if channel.broken is None:
                poll.register(
                    channel, select.POLLIN | (select.POLLOUT if channel.has_unsent else 0)
                )
            poll.register(sentinel, select.POLLIN)
        poll.poll(1000 * min(timeout, _SLICE_S))

    def crash_error(self, indices: Iterable[int]) -> WorkerCrashError:
        """The error for workers that have ended, or whose channel is broken."""
        reasons = {}
        for index in indices:
            reasons[index] = ""
            process = self.processes[index]
            if not process.has_ended(_EXIT_TIMEOUT_S):
                broken = self.channels[index].broken
                reasons[index] = f"its control channel: {broken}; it was killed"
                process.send_signal(signal.SIGKILL)
                process.has_ended(_SIGTERM_TIMEOUT_S)
        self._end_families(reasons)
        crashes = []
        for index, reason in reasons.items():
            end = reason or self.processes[index].known_exitcode
            crashes.append((index, self.ranges[index], end, self.stderr_tail(index)))
        return crash_error(crashes, self.last_command)

    def stderr_tail(self, index: int) -> str:
        """The last lines that a worker has written to stderr; empty for the caller."""
        return "" if self.is_inline(index) else self._stderrs[index].tail()

    def stack(self, index: int) -> str:
        """The Python stack of a worker, and a hint where it waits for a lock of its fork."""
        if self.is_inline(index):
            return ""
        pid = self.processes[index].pid
        # This is read first, because the request for the stack wakes the process.
        is_locked = self._launcher.forks and waits_for_lock(pid)
        stack = read_stack(pid)
        return f"{stack}\n{_FORK_LOCK_HINT}" if is_locked else stack

    def log_hanging(self, hanging: Sequence[tuple[int, tuple[int, str] | None, float]]) -> None:
        """Logs where workers are that take long to answer.

        Args:
            hanging: Each worker; its env that is busy and the operation, or None; and the seconds.
        """
        lines = []
        for index, at, seconds in hanging:
            if at is None:
                doing = f"{self._name(index)} has not answered to {self.last_command!r}"
            else:
                doing = f"env {at[0]} of worker {index} has been in {at[1]}()"
            lines.append((index, doing, seconds))
        self._log_hangs(lines)

    def _log_late(self, waiting: Iterable[int], since: dict[int, float], doing: str) -> None:
        """Logs workers that a wait has taken too long for, each once.

        Args:
            waiting: The workers that are waited for.
            since: When the wait for each began, which is noted here; inf: it was logged.
            doing: What they have been doing.
        """
        if self._hang_warning_s is None:
            return
        now, late = time.monotonic(), []
        for index in waiting:
            seconds = now - since.setdefault(index, now)
            if seconds > self._hang_warning_s:
                late.append((index, f"{self._name(index)} {doing}", seconds))
                since[index] = math.inf
        if late:
            self._log_hangs(late)

    def _log_hangs(self, hanging: Sequence[tuple[int, str, float]]) -> None:
        """Logs what workers have been doing, for how many seconds, and where they are."""
        lines = [
            f"{doing} for {seconds:.3g} s.{self._describe(index)}\n"
            for index, doing, seconds in hanging[:_MAX_LOGGED_HANGS]
        ]
        others = ", ".join(str(index) for index, *_ in hanging[_MAX_LOGGED_HANGS:])
        if others:
            lines.append(f"Workers {others} as well: python -m shmvec stacks PID says where.\n")
        log.warning(
            "%sThe wait goes on. hang_warning_s=%g sets when this is logged; 0: never.",
            "".join(lines),
            self._hang_warning_s,
        )

    def _name(self, index: int) -> str:
        return f"worker {index} ({envs_in_words(self.ranges[index])})"

    def _describe(self, index: int) -> str:
        return stack_section(self.stack(index)) + stderr_section({None: self.stderr_tail(index)})

    def interrupt(self, index: int) -> None:
        """Raises EnvTimeoutError in a worker's env that takes too long, if signals reach it."""
        self.processes[index].send_signal(signal.SIGUSR1)

    # ---- ending ------------------------------------------------------------------------------

    def end(self, index: int) -> None:
        """Ends a worker, whatever it is doing, and confirms its death; closes the caller's envs.

        Raises:
            OSError: The worker did not end.
        """
        if self._inline_worker is not None and self.is_inline(index):
            self._inline_worker.end()
            return
        self._attached[index] = False
        self._pending_starts.pop(index, None)
        self._raise_survivors(self._terminate([index]))

    def _terminate(self, indices: Sequence[int]) -> list[int]:
        """Terminates processes and what they have started; kills those that do not obey.

        This process may not send signals to workers if its user has changed. Then a worker ends by
        itself once its channel is closed: at once if it is idle, else after its step.

        Returns:
            The workers that run on.
        """
        if self._owner_pid != os.getpid():  # an exception can lead here in a fork of the owner
            return []
        survivors, killed = list[int](), list[int]()
        for index in indices:
            self._attached[index] = False
            if not self.processes[index].send_signal(signal.SIGTERM):
                self.channels[index].close()  # so it has as much time to end as the others
            self.processes[index].send_signal(signal.SIGCONT)  # a stopped process must run to obey
        sigterm_deadline = time.monotonic() + _SIGTERM_TIMEOUT_S
        for index in indices:
            process = self.processes[index]
            if not process.has_ended(max(0.0, sigterm_deadline - time.monotonic())):
                (killed if process.send_signal(signal.SIGKILL) else survivors).append(index)
        sigkill_deadline = time.monotonic() + SIGKILL_TIMEOUT_S
        self._end_families(index for index in indices if index not in survivors)
        for index in killed:
            if not self.processes[index].has_ended(max(0.0, sigkill_deadline - time.monotonic())):
                survivors.append(index)
        ended = [index for index in indices if index not in survivors]
        for index in ended:
            self._release(index)
        for index in survivors:
            self.channels[index].close()
        reap_marked([self._marks[index] for index in ended])  # zombies that they have left
        return survivors

    def _raise_survivors(self, survivors: Sequence[int]) -> None:
        if survivors:
            raise self._survivors_error(survivors)

    def _survivors_error(self, survivors: Sequence[int]) -> OSError:
        which = ", ".join(
            f"worker {index} (process {self.processes[index].pid})" for index in survivors
        )
        if self.processes[survivors[0]].send_signal(0):
            return OSError(
                errno.ETIMEDOUT,
                f"{which} was killed and has not ended within {SIGKILL_TIMEOUT_S:g} s: it hangs in "
                "the kernel, in a driver or a file system, and ends when that answers",
            )
        return OSError(
            errno.EPERM,
            f"{which} has not ended within 2 s of being asked to. This process may not kill it, "
            "because its user has changed since it started the workers. The worker ends after its "
            "step, or with this process. Close the vector env before the user is changed",
        )

    def _end_families(self, indices: Iterable[int]) -> None:
        """Ends what dead workers have started, unless they have ended it themselves."""
        parents = self._unended_families.intersection(indices)
        if parents:
            end_families([self._marks[index] for index in parents], _FAMILY_SIGTERM_TIMEOUT_S)
        for index in parents:
            self.processes[index].reap_with_group()
        self._unended_families -= parents

    def _release(self, index: int) -> None:
        """Closes what belongs to a process that has ended, or runs on until this one ends."""
        self.channels[index].close()
        for stderr in self._stderrs[index : index + 1]:  # it may be missing: its pipe has failed
            stderr.close()
        self.processes[index].release()

    def dismiss(self) -> None:
        """Tells workers that wait for the segment that there will be none."""
        # Workers that are being launched are left out, because they expect other messages first.
        if self.replacement_lock.acquire(blocking=False):
            try:
                for index, channel in zip(self._process_indices, self.channels, strict=False):
                    if not self._attached[index] and index != self._launching:
                        channel.put(0, self.pack(None))
            finally:
                self.replacement_lock.release()

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
        if self._owner_pid != os.getpid() or self.ended:
            return []
        if not self._end_lock.acquire(blocking=False):
            return []
        is_locked = False
        try:
            self.stopped = True
            # A thread that is replacing workers sees `stopped`, and gives up.
            is_locked = self.replacement_lock.acquire(timeout=_REPLACEMENT_TIMEOUT_S)
            return self._stop_processes(timeout, remind)
        finally:
            if is_locked:
                self.replacement_lock.release()
            self._end_lock.release()

    def _stop_processes(
        self, timeout: float | None, remind: Callable[[], object] | None
    ) -> list[Failure]:
        self.dismiss()
        waiting = [
            index
            for index, process in enumerate(self.processes)
            # Not those that `end` has given up, nor those that are started in place of others.
            if process.sentinel >= 0 and self.channels[index].fileno() >= 0
            if index not in self._pending_starts and index != self._launching
        ]
        crashed: list[int] = []
        failures: list[Failure] = []
        try:
            failures += self.wait_for_exits(waiting, timeout, crashed, remind)
        finally:
            crashed.sort()
            output = stderr_section({index: self.stderr_tail(index) for index in crashed})
            survivors = self._terminate(range(len(self.processes)))
            finish_copying()
            if crashed:
                exits = describe_exits(
                    (index, self.ranges[index], self.processes[index].known_exitcode)
                    for index in crashed
                )
                log.warning("before all envs were closed: %s%s", exits, output)
            if survivors:
                log.warning("%s", self._survivors_error(survivors).strerror)
            for index in survivors:
                self._release(index)
            self._close_descriptors()
            self.ended = True
            if self._inline_worker is not None:
                failures += self._inline_worker.stop()
        return failures

    def wait_for_exits(
        self,
        indices: Sequence[int],
        timeout: float | None,
        crashed: list[int],
        remind: Callable[[], object] | None = None,
    ) -> list[Failure]:
        """Waits until workers that were asked to close have ended, or until all are being stopped.

        Args:
            indices: The workers.
            timeout: Seconds to wait; None: no limit.
            crashed: A list to which workers are appended that end without closing their envs.
            remind: Asks them to close once more; called every 50 ms.

        Returns:
            What closing the envs has raised.
        """
        failures: list[Failure] = []
        waiting, stopped = list(indices), self.stopped
        deadline = None if timeout is None else time.monotonic() + timeout
        closing_since, ending_since = dict[int, float](), dict[int, float]()
        for index in waiting:  # a stopped process must run to close its envs
            self.processes[index].send_signal(signal.SIGCONT)
        while waiting:
            left = _SLICE_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                break
            self.listen(waiting, left)
            if self.ended or self.stopped != stopped:  # by another thread or a signal's handler
                break
            for index in list(waiting):
                has_ended = self.processes[index].has_ended()
                self.channels[index].pump()  # a worker must not block on a full socket
                goodbye = self.channels[index].goodbye_content
                if has_ended:
                    waiting.remove(index)
                    if goodbye is None:
                        if self._attached[index]:
                            crashed.append(index)
                        continue
                    self._unended_families.discard(index)  # the worker has ended what it started
                    with contextlib.suppress(Exception):
                        failures += self.unpack(goodbye)
            closed = [each for each in waiting if self.channels[each].goodbye_content is not None]
            running = "has closed its envs, but a thread or an exit hook has run on"
            self._log_late(closed, ending_since, running)
            closing = [each for each in waiting if each not in closed]
            self._log_late(closing, closing_since, "has been closing its envs")
            if remind is not None:
                remind()
        return failures

    def _close_descriptors(self) -> None:
        self.alarms.close()
        for depot in self._depots:
            depot.close()
        self._segment_descriptor.close()
        self.shared_descriptors.clear()

    def disown(self) -> None:
        """Gives up the workers, in a process that is a fork of their owner."""
        self.stopped = self.ended = True
        for _, channel in zip(self._process_indices, self.channels, strict=False):
            channel.close()
        self._close_descriptors()
        for process in self.processes:
            process.abandon()

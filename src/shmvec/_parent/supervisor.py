"""Starts, watches and ends worker processes, and carries control messages to and from them.

``Supervisor`` owns processes; ``InlineWorker`` looks the same and runs the envs in the calling
process. Whatever happens, ``stop`` leaves no process and no pipe behind.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import BaseContext
from typing import Any

import cloudpickle
from gymnasium.vector.utils import clear_mpi_env_vars

from shmvec._core.segment import Segment
from shmvec._core.worker import WorkerLoop
from shmvec._shared.pipes import InlinePipe, Pipe
from shmvec._shared.threads import thread_variables
from shmvec._worker.process import Attachment, EnvFn, EnvHost, Report, run_worker
from shmvec.faults import Failure, crash

__all__ = ["InlineWorker", "Supervisor"]

Resets = Sequence[tuple[int | None, Any] | None]

_KILL_AFTER_S = 2.0  # what a process gets to obey SIGTERM
_SLICE_S = 0.05  # between two reminders


class Supervisor:
    """The worker processes of one vector env."""

    inline = None
    has_alarms = hasattr(os, "eventfd")  # Linux, Python 3.10
    pack = staticmethod(Pipe.pack)
    unpack = staticmethod(Pipe.unpack)

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        ranges: Sequence[range],
        context: BaseContext,
        daemon: bool,
        name: str,
        threads: int,
        pinned: bool,
    ) -> None:
        """Starts one process for each range of envs.

        Args:
            env_fns: One for each env.
            ranges: The envs of each worker.
            context: How processes are started.
            daemon: Whether they are daemonic.
            name: Part of the processes' names.
            threads: Threads that libraries may start in each process; 0: as many as they like.
            pinned: Whether each process stays on one core.

        Raises:
            TypeError: An env_fn cannot be pickled (spawn and forkserver); nothing was started.
        """
        self.ranges = list(ranges)
        self.processes: list[Any] = []
        self.doing = "start"  # the last command, for messages
        self._pipes: list[Pipe] = []
        self._alarms: list[int] = []  # written to when workers doze; see csrc/bell.h
        self._owner = os.getpid()
        self._stopped = False
        self._context = context
        self._daemon = daemon
        self._name = name
        self._threads = threads
        self._pinned = pinned
        # What a worker that is started later needs, too.
        self._attachment: Attachment | None = None
        self._descriptor = -1
        self._rollouts: tuple[Any, int] | None = None
        self._fork = context.get_start_method() == "fork"
        loads = [list(env_fns[envs.start : envs.stop]) for envs in self.ranges]
        self._loads: list[Any] = (
            loads
            if self._fork
            else [_pickled(fns, envs) for fns, envs in zip(loads, ranges, strict=True)]
        )
        try:
            for index in range(len(self.ranges)):
                pipe, process = self._start(index)
                self._pipes.append(pipe)
                self.processes.append(process)
        except BaseException:
            self.stop(timeout=0.0)
            raise

    def _start(self, index: int) -> tuple[Pipe, Any]:
        """Starts a process for a range of envs."""
        mine, theirs = self._context.Pipe(duplex=True)
        inherited = [pipe.connection for pipe in self._pipes] + [mine] if self._fork else []
        process = self._context.Process(  # type: ignore[attr-defined]
            target=run_worker,
            name=f"Worker<{self._name}>-{index}",
            args=(
                index,
                self.ranges[index].start,
                self._loads[index],
                theirs,
                self._owner,
                inherited,
                self._threads,
                self._pinned,
            ),
            daemon=self._daemon,
        )
        try:
            with clear_mpi_env_vars(), thread_variables(self._threads):
                process.start()
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
        return Pipe(mine), process

    def reports(self) -> list[Report | Failure]:
        """Waits until every worker has built its envs; one report a worker."""
        return [self.receive(index) for index in range(len(self._pipes))]

    def attach(self, attachment: Attachment, descriptor: int, segment: Segment) -> None:
        """Hands the segment to the workers and waits until all have attached."""
        self._attachment = attachment
        self._descriptor = os.dup(descriptor)
        if self.has_alarms:
            for _ in self.ranges:
                self._alarms.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        for index in range(len(self._pipes)):
            self._hand_over(index, attachment)
        for index in range(len(self._pipes)):
            self.receive(index)

    def _hand_over(self, index: int, attachment: Attachment) -> None:
        """Sends a worker what it needs to attach."""
        self.send(index, Pipe.pack(attachment))
        self._send_descriptor(index, self._descriptor)
        if self.has_alarms:
            self._send_descriptor(index, self._alarms[index])

    def share_rollouts(self, packed: Any, descriptor: int) -> None:
        """Hands the memory of rollouts to the workers, which have been told to read a command."""
        if self._rollouts is not None:
            os.close(self._rollouts[1])
        self._rollouts = packed, os.dup(descriptor)
        for index in range(len(self._pipes)):
            self.send(index, packed)
            self._send_descriptor(index, descriptor)

    def end(self, index: int) -> int | None:
        """Ends a worker, whatever it is doing, and confirms its death; returns its exit code."""
        process = self.processes[index]
        self._pipes[index].close()
        _end([process], _KILL_AFTER_S)
        code: int | None = process.exitcode
        return code

    def restart(self, index: int, resets: Resets) -> Failure | None:
        """Starts a process in place of one that has ended.

        Args:
            index: The worker's index.
            resets: For each of its envs: seed and options of its first reset, or None.

        Returns:
            What building its envs raised; None if all is well.

        Raises:
            WorkerCrashError: It died, too.
        """
        assert self._attachment is not None
        self._pipes[index].close()
        pipe, process = self._start(index)
        self._pipes[index], self.processes[index] = pipe, process
        try:
            report = self.receive(index)
            if isinstance(report, Failure):
                process.join(_KILL_AFTER_S)
                return report
            rollouts = self._rollouts is not None
            self._hand_over(index, replace(self._attachment, resets=resets, rollouts=rollouts))
            if self._rollouts is not None:
                self.send(index, self._rollouts[0])
                self._send_descriptor(index, self._rollouts[1])
            self.receive(index)
        except BaseException:
            self.end(index)
            raise
        return None

    def interrupt(self, index: int) -> None:
        """Has a worker raise EnvTimeoutError in an env that takes too long, if it heeds signals."""
        process = self.processes[index]
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)

    def rouse(self) -> None:
        """Wakes workers that have dozed off."""
        for alarm in self._alarms:
            with suppress(BlockingIOError):  # full: it has not even looked at the last ones
                os.eventfd_write(alarm, 1)

    def send(self, index: int, packed: Any) -> None:
        """Sends a worker what ``Pipe.pack`` returned. One that is dead gets nothing."""

        def look() -> None:
            if not self.processes[index].is_alive():
                raise BrokenPipeError

        with suppress(EOFError, BrokenPipeError, ConnectionResetError):
            self._pipes[index].send(packed, look)

    def _send_descriptor(self, index: int, descriptor: int) -> None:
        """Gives a worker a duplicate of a file descriptor."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._pipes[index].send_descriptor(descriptor, self.processes[index].pid)

    def receive(self, index: int) -> Any:
        """Waits for a message of a worker.

        Raises:
            WorkerCrashError: It died instead.
        """
        try:
            message = self._pipes[index].receive(self.look)
            if not isinstance(message, list):
                return message
            raise EOFError("it has said goodbye")  # failures in close(): it ends
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            self.processes[index].join(_KILL_AFTER_S)
            self.look()
            process = self.processes[index]
            ended = [(index, self.ranges[index], process.exitcode)]
            raise crash(ended, self.doing) from error

    def look(self) -> None:
        """Raises WorkerCrashError if a worker process has ended."""
        if not wait_for_any([process.sentinel for process in self.processes], 0):
            return
        ended = [
            (index, envs, process.exitcode)
            for index, (envs, process) in enumerate(zip(self.ranges, self.processes, strict=True))
            if not process.is_alive()
        ]
        if ended:
            raise crash(ended, self.doing)

    def dismiss(self) -> None:
        """Tells workers that wait for the segment that there will be none."""
        for pipe in self._pipes:
            try:
                pipe.send(Pipe.pack(None))
            except OSError:
                pass  # it has ended already

    def stop(
        self, timeout: float | None, remind: Callable[[], object] | None = None
    ) -> list[Failure]:
        """Ends all processes, which were asked to close before.

        Args:
            timeout: Seconds they get to close their envs; None: as long as it takes. After that
                they are terminated, and killed if they do not obey.
            remind: Called every 50 ms; asks them again.

        Returns:
            What closing the envs raised.
        """
        if self._stopped or self._owner != os.getpid():
            return []  # a fork of the parent must not end the parent's workers
        self._stopped = True
        failures: list[Failure] = []
        deadline = None if timeout is None else time.monotonic() + timeout
        sentinels = {process.sentinel for process in self.processes}
        open_pipes: dict[Any, Pipe] = {
            pipe.connection: pipe for pipe in self._pipes if not pipe.connection.closed
        }
        while sentinels and (deadline is None or time.monotonic() < deadline):
            left = _SLICE_S if deadline is None else max(0.0, deadline - time.monotonic())
            for ready in wait_for_any([*sentinels, *open_pipes], min(left, _SLICE_S)):
                if ready in sentinels:
                    sentinels.remove(ready)
                    continue
                try:  # read, whatever it is: a worker must not block on a full pipe
                    message = open_pipes[ready].receive(self.look)
                    if isinstance(message, list):
                        failures += message
                except (EOFError, OSError):
                    del open_pipes[ready]
            if remind is not None:
                remind()
        _end(self.processes, _KILL_AFTER_S)
        for pipe in self._pipes:
            pipe.close()
        for alarm in self._alarms:
            os.close(alarm)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        if self._rollouts is not None:
            os.close(self._rollouts[1])
        return failures


class InlineWorker:
    """Stands in for a worker process: the envs live in the calling process."""

    has_alarms = False
    pack = staticmethod(InlinePipe.pack)
    unpack = staticmethod(InlinePipe.unpack)

    def __init__(self, env_fns: Sequence[EnvFn]) -> None:
        """Prepares for the envs; ``reports`` builds them."""
        self.ranges = [range(len(env_fns))]
        self.processes: list[Any] = []
        self.doing = "start"  # the last command, for messages
        self._env_fns = env_fns
        self._pipe = InlinePipe()
        self._host = EnvHost(0, 0, self._pipe)
        self._loop: WorkerLoop | None = None
        self._attached: tuple[Segment, Attachment] | None = None
        self._rollouts: tuple[Any, int] | None = None

    def reports(self) -> list[Report | Failure]:
        """Builds the envs."""
        return [self._host.build(self._env_fns)]

    def attach(self, attachment: Attachment, descriptor: int, segment: Segment) -> None:
        """Makes the worker's loop over the same mapping."""
        self._attached = segment, attachment
        self._loop = self._host.loop(segment, attachment)

    def share_rollouts(self, packed: Any, descriptor: int) -> None:
        """Hands the memory of rollouts to the host, which has been told to read a command."""
        if self._rollouts is not None:
            os.close(self._rollouts[1])
        self._rollouts = packed, os.dup(descriptor)
        self._pipe.send(packed)
        self._pipe.send_descriptor(descriptor)

    def end(self, index: int) -> int | None:
        """Closes the envs, as far as they can be."""
        self._loop = None
        self._host.close()
        return None

    def restart(self, index: int, resets: Resets) -> Failure | None:
        """Builds the envs again; returns what that raised, or None."""
        assert self._attached is not None
        segment, attachment = self._attached
        self._host = EnvHost(0, 0, self._pipe)
        report = self._host.build(self._env_fns)
        if isinstance(report, Failure):
            return report
        self._loop = self._host.loop(segment, replace(attachment, resets=resets))
        if self._rollouts is not None:
            self._pipe.send(self._rollouts[0])
            self._pipe.send_descriptor(self._rollouts[1])
            self._host.command()
        return None

    def interrupt(self, index: int) -> None:
        """Nobody can: there are no time limits here."""

    def rouse(self) -> None:
        """Nobody dozes."""

    def inline(self) -> None:
        """Serves what was posted."""
        assert self._loop is not None
        self._loop.serve_pending()

    def send(self, index: int, packed: Any) -> None:
        """Queues a message for the host."""
        self._pipe.send(packed)

    def receive(self, index: int) -> Any:
        """Takes the host's message."""
        return self._pipe.receive(self.look)

    def look(self) -> None:
        """Nothing can have died."""

    def dismiss(self) -> None:
        """Nobody waits."""

    def stop(
        self, timeout: float | None, remind: Callable[[], object] | None = None
    ) -> list[Failure]:
        """Closes the envs."""
        self._loop = None
        if self._rollouts is not None:
            os.close(self._rollouts[1])
            self._rollouts = None
        return self._host.close()


def _end(processes: Sequence[Any], grace_s: float) -> None:
    """Terminates processes, and kills those that do not obey."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    stubborn = time.monotonic() + grace_s
    for process in processes:
        process.join(max(0.0, stubborn - time.monotonic()))
        if process.is_alive():
            process.kill()
        process.join()


def _pickled(env_fns: Sequence[EnvFn], envs: range) -> bytes:
    try:
        return bytes(cloudpickle.dumps(env_fns))
    except Exception as error:
        for index, env_fn in zip(envs, env_fns, strict=True):
            try:
                cloudpickle.dumps(env_fn)
            except Exception as cause:
                raise TypeError(
                    f"env_fns[{index}] cannot be pickled to send it to a worker: {cause}. Make "
                    "the env inside the function instead of capturing it, or use "
                    "context='fork'."
                ) from cause
        raise TypeError(f"env_fns cannot be pickled to send them to a worker: {error}") from error

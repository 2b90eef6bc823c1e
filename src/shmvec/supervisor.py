"""Starts, watches and ends worker processes, and carries control messages to and from them.

``Supervisor`` owns processes; ``InlineWorker`` looks the same and runs the envs in the calling
process. Whatever happens, ``stop`` leaves no process and no pipe behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import BaseContext
from typing import Any

import cloudpickle
from gymnasium.vector.utils import clear_mpi_env_vars

from shmvec._core.segment import Segment
from shmvec._core.worker import WorkerLoop
from shmvec.faults import Failure, crash
from shmvec.pipes import InlinePipe, Pipe
from shmvec.threads import thread_variables
from shmvec.worker import Attachment, EnvFn, EnvHost, Report, run_worker

__all__ = ["InlineWorker", "Supervisor"]

_KILL_AFTER_S = 2.0  # what a process gets to obey SIGTERM


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
        self._pipes: list[Pipe] = []
        self._alarms: list[int] = []  # written to when workers doze; see csrc/bell.h
        self._owner = os.getpid()
        self._stopped = False
        self._doing = "starting"
        fork = context.get_start_method() == "fork"
        loads = [list(env_fns[envs.start : envs.stop]) for envs in self.ranges]
        pickled = (
            loads
            if fork
            else [_pickled(fns, envs) for fns, envs in zip(loads, ranges, strict=True)]
        )
        ends: list[Any] = []
        try:
            with clear_mpi_env_vars(), thread_variables(threads):
                for index, (envs, fns) in enumerate(zip(self.ranges, pickled, strict=True)):
                    mine, theirs = context.Pipe(duplex=True)
                    ends.append(mine)
                    self._pipes.append(Pipe(mine))
                    process = context.Process(  # type: ignore[attr-defined]
                        target=run_worker,
                        name=f"Worker<{name}>-{index}",
                        args=(
                            index,
                            envs.start,
                            fns,
                            theirs,
                            self._owner,
                            ends if fork else [],
                            threads,
                            pinned,
                        ),
                        daemon=daemon,
                    )
                    try:
                        process.start()
                        self.processes.append(process)
                    finally:
                        theirs.close()
        except BaseException:
            self.stop(timeout=0.0)
            raise

    def reports(self) -> list[Report | Failure]:
        """Waits until every worker has built its envs; one report a worker."""
        return [self.receive(index) for index in range(len(self._pipes))]

    def attach(self, attachment: Attachment, descriptor: int, segment: Segment) -> None:
        """Hands the segment to the workers and waits until all have attached."""
        packed = Pipe.pack(attachment)
        for index in range(len(self._pipes)):
            self.send(index, packed)
            self.send_descriptor(index, descriptor)
            if self.has_alarms:
                alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._alarms.append(alarm)
                self.send_descriptor(index, alarm)
        for index in range(len(self._pipes)):
            self.receive(index)
        self._doing = "stepping, resetting or waiting for work"

    def rouse(self) -> None:
        """Wakes workers that have dozed off."""
        for alarm in self._alarms:
            with suppress(BlockingIOError):  # full: it has not even looked at the last ones
                os.eventfd_write(alarm, 1)

    def send(self, index: int, packed: Any) -> None:
        """Sends a worker what ``Pipe.pack`` returned."""
        self._pipes[index].send(packed)

    def send_descriptor(self, index: int, descriptor: int) -> None:
        """Gives a worker a duplicate of a file descriptor."""
        self._pipes[index].send_descriptor(descriptor, self.processes[index].pid)

    def receive(self, index: int) -> Any:
        """Waits for a message of a worker.

        Raises:
            WorkerCrashError: It died instead.
        """
        try:
            return self._pipes[index].receive(self.look)
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            self.processes[index].join(_KILL_AFTER_S)
            self.look()
            process = self.processes[index]
            raise crash([(index, self.ranges[index], process.exitcode)], self._doing) from error

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
            raise crash(ended, self._doing)

    def dismiss(self) -> None:
        """Tells workers that wait for the segment that there will be none."""
        for pipe in self._pipes:
            try:
                pipe.send(Pipe.pack(None))
            except OSError:
                pass  # it has ended already

    def stop(self, timeout: float | None) -> list[Failure]:
        """Ends all processes, which were asked to close before.

        Args:
            timeout: Seconds they get to close their envs; None: as long as it takes. After that
                they are terminated, and killed if they do not obey.

        Returns:
            What closing the envs raised.
        """
        if self._stopped or self._owner != os.getpid():
            return []  # a fork of the parent must not end the parent's workers
        self._stopped = True
        failures: list[Failure] = []
        deadline = None if timeout is None else time.monotonic() + timeout
        sentinels = {process.sentinel for process in self.processes}
        open_pipes: dict[Any, Pipe] = {pipe.connection: pipe for pipe in self._pipes}
        while sentinels and (deadline is None or time.monotonic() < deadline):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            for ready in wait_for_any([*sentinels, *open_pipes], left):
                if ready in sentinels:
                    sentinels.remove(ready)
                    continue
                try:  # read, whatever it is: a worker must not block on a full pipe
                    message = open_pipes[ready].receive(self.look)
                    if isinstance(message, list):
                        failures += message
                except (EOFError, OSError):
                    del open_pipes[ready]
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        stubborn = time.monotonic() + _KILL_AFTER_S
        for process in self.processes:
            process.join(max(0.0, stubborn - time.monotonic()))
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        for alarm in self._alarms:
            os.close(alarm)
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
        self._env_fns = env_fns
        self._pipe = InlinePipe()
        self._host = EnvHost(0, 0, self._pipe)
        self._loop: WorkerLoop | None = None

    def reports(self) -> list[Report | Failure]:
        """Builds the envs."""
        return [self._host.build(self._env_fns)]

    def attach(self, attachment: Attachment, descriptor: int, segment: Segment) -> None:
        """Makes the worker's loop over the same mapping."""
        self._loop = self._host.loop(segment, attachment)

    def rouse(self) -> None:
        """Nobody dozes."""

    def inline(self) -> None:
        """Serves what was posted."""
        assert self._loop is not None
        self._loop.serve_pending()

    def send(self, index: int, packed: Any) -> None:
        """Queues a message for the host."""
        self._pipe.send(packed)

    def send_descriptor(self, index: int, descriptor: int) -> None:
        """Queues a duplicate of a file descriptor."""
        self._pipe.send_descriptor(descriptor)

    def receive(self, index: int) -> Any:
        """Takes the host's message."""
        return self._pipe.receive(self.look)

    def look(self) -> None:
        """Nothing can have died."""

    def dismiss(self) -> None:
        """Nobody waits."""

    def stop(self, timeout: float | None) -> list[Failure]:
        """Closes the envs."""
        self._loop = None
        return self._host.close()


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

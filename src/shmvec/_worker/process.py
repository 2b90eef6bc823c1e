"""A worker process: builds its envs, serves the parent, answers commands, goes with the parent.

``EnvHost`` is the part that also works in the calling process (``num_workers=0``).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from shmvec._core.segment import Segment
from shmvec._core.worker import WorkerLoop
from shmvec._shared.layout import Layout
from shmvec._shared.memory import map_memory
from shmvec._shared.pipes import InlinePipe, Pipe
from shmvec._shared.threads import limit_threads, pin_to_core
from shmvec.faults import EnvTimeoutError, Failure

if TYPE_CHECKING:
    from shmvec._core.worker import ResetArguments

__all__ = ["Attachment", "EnvFn", "EnvHost", "Late", "Report", "run_worker"]

EnvFn = Callable[[], gym.Env[Any, Any]]


@dataclass(frozen=True)
class Report:
    """What a worker says of its envs once they are built.

    Attributes:
        observation_space: That of its first env.
        action_space: That of its first env.
        metadata: That of its first env.
        render_mode: That of its first env.
        unequal: Envs whose spaces differ from its first env's: (env, which space, space).
    """

    observation_space: Any
    action_space: Any
    metadata: dict[str, Any]
    render_mode: str | None
    unequal: list[tuple[int, str, Any]]


@dataclass(frozen=True)
class Attachment:
    """What a worker needs to attach to the segment, whose descriptor follows.

    Attributes:
        layout: What lies in the slabs.
        nbytes: Size of the segment.
        alarm: Whether a second descriptor follows, which wakes the worker when it dozes.
        autoreset: Value of the ``AutoresetMode``.
        limits: Seconds that a step and a reset of one env may take.
        mends: Whether an env that has raised is reset, and not given up.
        resets: Of a worker that takes another one's place: seed and options for each env's next
            reset that has none.
        rollouts: Whether the command that hands over the memory of rollouts follows.
    """

    layout: Layout
    nbytes: int
    alarm: bool
    autoreset: str
    limits: tuple[float | None, float | None] = (None, None)
    mends: bool = False
    resets: Sequence[tuple[int | None, Any] | None] | None = None
    rollouts: bool = False


@dataclass(frozen=True)
class Late:
    """What did not fit the rings.

    Attributes:
        messages: (kind, env, packed message): infos and observations.
        failures: Exceptions in envs.
        results: Of a command: one packed value an env, None where it failed.
    """

    messages: list[tuple[int, int, Any]]
    failures: list[Failure]
    results: list[Any] | None


class EnvHost:
    """The envs of one worker, and what is done with them besides stepping."""

    def __init__(self, index: int, first_env: int, pipe: Pipe | InlinePipe) -> None:
        """Prepares a host for the envs ``first_env`` and up.

        Args:
            index: The worker's index.
            first_env: Index of its first env.
            pipe: To the parent.
        """
        self.index = index
        self.first_env = first_env
        self.pipe = pipe
        self.envs: list[gym.Env[Any, Any]] = []
        self._look: Callable[[], object] = lambda: None
        self._loop: WorkerLoop | None = None
        self._layout: Layout | None = None

    def build(self, env_fns: Sequence[EnvFn]) -> Report | Failure:
        """Builds the envs. After a failure those that were built are closed again."""
        try:
            for env_fn in env_fns:
                env = env_fn()
                missing = [
                    name
                    for name in ("reset", "step", "observation_space", "action_space")
                    if not hasattr(env, name)
                ]
                if missing:
                    raise TypeError(
                        f"env_fns[{self.first_env + len(self.envs)}]() returned a "
                        f"{type(env).__name__} without {', '.join(missing)}; it must return a "
                        "gymnasium.Env"
                    )
                self.envs.append(env)
        except BaseException as error:
            failure = self._failure(self.first_env + len(self.envs), "make", error)
            self.close()
            return failure
        first = self.envs[0]
        return Report(
            first.observation_space,
            first.action_space,
            dict(getattr(first, "metadata", None) or {}),
            getattr(first, "render_mode", None),
            [
                (self.first_env + i, which, getattr(env, which))
                for i, env in enumerate(self.envs)
                for which in ("observation_space", "action_space")
                if getattr(env, which) != getattr(first, which)
            ],
        )

    def loop(self, segment: Segment, attachment: Attachment) -> WorkerLoop:
        """The hot loop over these envs."""
        self._layout = attachment.layout
        self._loop = WorkerLoop(
            segment,
            self.index,
            self.first_env,
            self.envs,
            self,
            attachment.layout.attach(segment),
            attachment.autoreset,
            attachment.limits != (None, None),
            attachment.mends,
            attachment.resets,
        )
        return self._loop

    def wait_for_parent_with(self, look: Callable[[], object]) -> None:
        """Sets what is called while waiting for the parent; it raises if that is gone."""
        self._look = look

    def command(self) -> tuple[ResetArguments | None, list[Any] | None]:
        """Takes a command from the pipe and carries it out, resets excepted."""
        name, payload = self.pipe.receive(self._look)
        if name == "reset":
            return payload, None
        if name == "rollouts":
            self._take_rollouts(*payload)
            return None, []
        if name == "call":
            attribute, args, kwargs, chosen = payload

            def run(env: gym.Env[Any, Any], index: int) -> Any:
                if chosen is not None and index not in chosen:
                    return None
                found = env.get_wrapper_attr(attribute)
                return found(*args, **kwargs) if callable(found) else found

            return None, self._for_each(run, attribute)
        assert name == "set_attr", name
        attribute, values = payload

        def assign(env: gym.Env[Any, Any], index: int) -> None:
            if index in values:
                env.set_wrapper_attr(attribute, values[index])

        return None, self._for_each(assign, f"set_attr({attribute!r})")

    def interrupt(self, limits: tuple[float | None, float | None]) -> None:
        """Raises EnvTimeoutError, inside an env's step or reset, if that takes too long."""
        busy = self._loop.busy() if self._loop is not None else None
        if busy is not None:
            env, resetting, elapsed = busy
            limit = limits[resetting]
            if limit is not None and elapsed > limit:
                raise EnvTimeoutError(env, "reset" if resetting else "step", limit)

    def _take_rollouts(self, nbytes: int, num_frames: int) -> None:
        """Maps the memory of rollouts, whose descriptor follows."""
        descriptor = self.pipe.receive_descriptor()
        try:
            memory = map_memory(descriptor, nbytes)
        finally:
            os.close(descriptor)
        assert self._loop is not None and self._layout is not None
        self._loop.take_rollouts(self._layout.results_in(memory, num_frames))

    def _for_each(self, run: Callable[[gym.Env[Any, Any], int], Any], name: str) -> list[Any]:
        """One packed result, or the Failure, an env."""
        results: list[Any] = []
        for index, env in enumerate(self.envs, self.first_env):
            try:
                results.append(self.pipe.pack(run(env, index)))
            except BaseException as error:
                results.append(self._failure(index, name, error))
        return results

    def late_actions(self) -> list[tuple[int, Any]]:
        """Takes from the pipe the actions (env, action) that did not fit the ring."""
        actions: list[tuple[int, Any]] = self.pipe.receive(self._look)
        return actions

    def send_late(
        self,
        messages: list[tuple[int, int, dict[str, Any]]],
        failures: list[tuple[int, str, BaseException]],
        results: list[Any] | None,
    ) -> None:
        """Sends the parent what does not fit the rings."""
        failed = [self._failure(*failure) for failure in failures]
        failed += [result for result in results or () if isinstance(result, Failure)]
        if results is not None:
            results = [None if isinstance(r, Failure) else r for r in results]
        packed = []
        for kind, env, message in messages:
            try:
                packed.append((kind, env, self.pipe.pack(message)))
            except Exception as error:
                failed.append(self._failure(env, "info", error))
        self.pipe.send(self.pipe.pack(Late(packed, failed, results)))

    def close(self) -> list[Failure]:
        """Closes all envs, whatever some of them raise."""
        failures = []
        for i, env in enumerate(self.envs):
            try:
                env.close()
            except BaseException as error:
                failures.append(self._failure(self.first_env + i, "close", error))
        self.envs = []
        self._loop = None  # which refers to this host
        return failures

    def _failure(self, env: int, operation: str, error: BaseException) -> Failure:
        return Failure.of(error, env, self.index, operation)


class _ParentWatch:
    """Tells whether the parent process still lives."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._poll: select.poll | None = None
        # A pidfd tells of this very process, and under every start method; the parent of a
        # worker that a fork server started is the server.
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._descriptor = os.pidfd_open(pid)
                self._poll = select.poll()
                self._poll.register(self._descriptor, select.POLLIN)

    def alive(self) -> bool:
        if self._poll is not None:
            return not self._poll.poll(0)
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return False
        return True

    def look(self) -> None:
        if not self.alive():
            raise _Orphaned

    def doze_on(self, alarm: int) -> Callable[[], None] | None:
        """A function that sleeps until there is something on ``alarm``, or the parent is gone.

        None if the system cannot tell of the parent's end through a descriptor.
        """
        if self._poll is None:
            return None
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        poll.register(alarm, select.POLLIN)

        def doze() -> None:
            poll.poll()
            with contextlib.suppress(BlockingIOError):
                os.read(alarm, 8)

        return doze


class _Orphaned(BaseException):
    """The parent is gone."""


def run_worker(
    index: int,
    first_env: int,
    env_fns: Sequence[EnvFn] | bytes,
    connection: Connection,
    parent_pid: int,
    inherited: Sequence[Connection],
    threads: int,
    pinned: bool,
) -> None:
    """The main function of a worker process.

    Args:
        index: The worker's index.
        first_env: Index of its first env.
        env_fns: Make its envs; cloudpickled unless they were inherited by a fork.
        connection: The worker's end of its control pipe.
        parent_pid: Process id of the parent.
        inherited: Pipe ends of the parent that a fork copied; left open they would hide its end.
        threads: Threads that libraries may start in this process; 0: as many as they like.
        pinned: Whether the process stays on one core.
    """
    if hasattr(signal, "SIGINT"):
        # Ctrl-C goes to the whole foreground group; the parent decides what becomes of it. A
        # handler, not SIG_IGN: what an env executes must not inherit deafness.
        signal.signal(signal.SIGINT, lambda number, frame: None)
    for other in inherited:
        other.close()
    if pinned:
        pin_to_core(index)
    limit_threads(threads)
    watch = _ParentWatch(parent_pid)
    pipe = Pipe(connection)
    host = EnvHost(index, first_env, pipe)
    host.wait_for_parent_with(watch.look)
    with contextlib.suppress(_Orphaned, EOFError, BrokenPipeError, ConnectionResetError):
        try:
            _serve(host, pipe, env_fns, watch, threads)
        finally:
            failures = host.close()
            pipe.send(pipe.pack(failures))
    pipe.close()


def _serve(
    host: EnvHost,
    pipe: Pipe,
    env_fns: Sequence[EnvFn] | bytes,
    watch: _ParentWatch,
    threads: int,
) -> None:
    try:
        if isinstance(env_fns, bytes):
            env_fns = pickle.loads(env_fns)
        report = host.build(env_fns)  # type: ignore[arg-type]
        limit_threads(threads)  # again: what building the envs has loaded
    except BaseException as error:  # unpickling env_fns runs imports of the user's modules
        report = Failure.of(error, host.first_env, host.index, "unpickle env_fns")
    pipe.send(pipe.pack(report))
    if isinstance(report, Failure):
        return
    attachment = pipe.receive(watch.look)
    if attachment is None:  # another worker failed
        return
    descriptor = pipe.receive_descriptor()
    try:
        memory = map_memory(descriptor, attachment.nbytes)
    finally:
        os.close(descriptor)
    loop = host.loop(Segment.open(memory), attachment)
    if hasattr(signal, "SIGUSR1") and attachment.mends:
        # The parent's way to get an env out of a step that takes too long.
        signal.signal(signal.SIGUSR1, lambda number, frame: host.interrupt(attachment.limits))
    doze = watch.doze_on(pipe.receive_descriptor()) if attachment.alarm else None
    if attachment.rollouts:
        host.command()
    pipe.send(pipe.pack(True))
    loop.serve(watch.alive, doze)

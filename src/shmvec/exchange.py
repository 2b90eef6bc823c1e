"""``Exchange``: envs in workers, and which of them are in flight or have answered.

``ShmVectorEnv``, planning and the adapters to other systems are built on it; your code may use it,
too. An exchange asks envs (``ask``, ``ask_reset``, ``command``), takes their answers (``take``),
and knows for each env whether it is in flight. Each call is done as a whole or not at all. A
``take`` that an exception ends (Ctrl-C, a time limit) leaves envs in flight, or idle with their
results lost. A call that asks and takes at once (``step``, ``reset``, ``call``, ``set_attr``) and
that an exception ends abandons its requests: the next call waits for their answers, and discards
them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from shmvec._arguments import (
    Envs,
    Options,
    checked_env_fns,
    checked_env_ids,
    existing_env_ids,
)
from shmvec._autoreset import Autoreset, AutoresetMode
from shmvec._core import (
    DONE,
    TIME_UP,
    UP,
    Frames,
    Guard,
    Ledger,
    Loan,
    exclusive,
    whole,
)
from shmvec._cores import time_on_cores
from shmvec._hints import add_note, naming_limits
from shmvec._memory.layout import ActionRows
from shmvec._options import Settings, described, exchange_settings
from shmvec._processes.assembly import agree, assemble, workers_for
from shmvec._processes.commands import copies_of_each, packed_command
from shmvec._processes.host import EnvFn, HostedEnv
from shmvec._processes.inline import Workers
from shmvec._processes.recovery import Recovery
from shmvec.faults import (
    Failure,
    FaultPolicy,
    Report,
    WorkerCrashError,
    cut_traceback,
    log_as_gymnasium_does,
    raise_failures,
)
from shmvec.spaces import one_of
from shmvec.stats import Stats, bits_of_options

__all__ = [
    "ActionRows",
    "Answers",
    "Autoreset",
    "AutoresetMode",
    "EnvFn",
    "Exchange",
    "Guard",
    "HostedEnv",
    "Options",
    "OwnsProcesses",
    "Report",
    "exclusive",
]


class OwnsProcesses:
    """Base of what has worker processes: it can be neither pickled nor copied."""

    def __reduce__(self) -> Any:
        """Refuses to be pickled or copied."""
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: it owns processes. Send the "
            "env_fns, and make one there."
        )


class Exchange(OwnsProcesses):
    """Envs in worker processes, and the one ledger of what is in flight.

    Attributes:
        num_envs: Number of envs.
        num_workers: Number of workers; 0 if the envs live in this process.
        policy: How faults are handled.
        autoreset_mode: When an env is reset after its episode's end.
        autoreset: What that mode means for steps and their results.
        single_observation_space: Observation space of one env.
        observation_space: Observation space of the batch.
        single_action_space: Action space of one env.
        action_space: Action space of the batch.
        metadata: The first env's.
        render_mode: The first env's.
        ranges: The envs of each worker.
        layout: The layout of the shared memory.
        guard: Refuses a call while another one is under way.
        recycles: Whether workers are replaced after so many steps.
        closed: Whether the exchange was closed.
        tracing: The parts that a trace records, and a weak reference to that trace; gone once the
            exchange is closed.

    Example:
        >>> import gymnasium as gym
        >>> from shmvec.exchange import Exchange
        >>> exchange = Exchange([lambda: gym.make("CartPole-v1")] * 3, num_workers=1)
        >>> exchange.ask_reset(None, seeds=[1, 2, 3])
        >>> exchange.take().observations.shape
        (3, 4)
        >>> exchange.ask([2, 0], [1, 0])
        >>> exchange.take([0, 2]).rewards
        array([1., 1.])
        >>> exchange.close()
    """

    # What each step reads: an object with more attributes than 30 reads them slowly.
    __slots__ = "_ledger", "_recovery", "_workers", "guard", "recycles"

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        name: str = "Exchange",
        num_buffers: int = 0,
        hold_batches: int | None = None,
        in_ranges: bool = False,
        may_step_over: bool | None = None,
        wait: bool = True,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        """Starts the workers and builds the envs, all in parallel.

        Args:
            env_fns: One function for each env.
            name: The exchange's name in messages and in the names of processes.
            num_buffers: Frames of results for batches that are handed out as views, with
                ``copy=False``. 0: all batches are copies.
            hold_batches: Number of further batches after which a batch may be overwritten.
            in_ranges: Whether neighbouring envs that are asked together answer together: cheaper,
                if no caller waits for one of them alone.
            may_step_over: Whether an env whose episode is over may be stepped; None: unless the
                mode is DISABLED.
            wait: Whether to wait until all envs are built. False: :meth:`initialize` does.
            settings: Options that were checked before, in place of ``options``.
            **options: Options of :class:`shmvec.ShmVectorEnv`, with the same meaning; not those of
                batches, nor a ``worker`` function.

        Raises:
            Exception: As :class:`shmvec.ShmVectorEnv`.
        """
        # Set first, because close() must work whatever fails below.
        self.closed = False
        self._crash = ""  # the crash that has closed this exchange
        self._workers: Workers | None = None
        self._ledger: Ledger | None = None
        self._owner = os.getpid()
        self.guard = Guard()
        _owned.add(self)
        functions = checked_env_fns(env_fns)
        self._name = name
        self._made_at = _caller()
        self.num_envs = len(functions)
        if settings is None:
            settings = exchange_settings(self.num_envs, options)
        self._settings = settings
        self.num_workers: int = settings.num_workers
        self.recycles = settings.recycle_after is not None
        self.policy: FaultPolicy = settings.faults
        self.autoreset_mode: AutoresetMode = settings.autoreset_mode
        self.autoreset = settings.autoreset
        if may_step_over is None:
            may_step_over = self.autoreset.by_worker
        self._ledger_options = num_buffers, bool(may_step_over), in_ranges, hold_batches
        self._called: Envs | None = None  # the envs of the pending call; None: all
        self._everyone = np.arange(self.num_envs, dtype=np.intp)

        self._workers = workers_for(functions, settings, name)
        self.ranges = self._workers.ranges
        # Ends the workers of an exchange that is forgotten, or still open at exit. It runs before
        # multiprocessing waits for its children, which weakref.finalize does not promise.
        self._finalizer = Finalize(
            self, _finalize, (self._workers, weakref.ref(self)), exitpriority=100
        )
        self.initialized = False
        try:
            self._workers.start()
            if wait:
                self.initialize()
        except BaseException:
            self._abandon()
            raise

    def __repr__(self) -> str:
        """How many envs it steps, where, and how; and whether it is closed."""
        return described(self, self._name, self._settings.method)

    # ---- starting ----------------------------------------------------------------------------

    def initialize(self) -> None:
        """Waits until all envs are built. A second call does nothing.

        Raises:
            Exception: As :class:`shmvec.ShmVectorEnv`; the exchange is closed then.
        """
        if self.initialized:
            return
        self.check_open()
        assert self._workers is not None
        try:
            self._start(self._workers)
        except BaseException as error:
            closed = self.closed  # by another thread, or as the program ends
            self._abandon()
            if closed and isinstance(error, Exception):
                raise ClosedEnvironmentError("The vector env was closed as it started.") from None
            cut_traceback(error)
            raise
        self.initialized = True

    def _start(self, workers: Workers) -> None:
        """Takes the workers' reports, makes the segment and hands it to them."""
        num_buffers, may_step_over, in_ranges, hold_batches = self._ledger_options
        try:
            agreement = agree(workers, self._settings, self._name, num_buffers)
        except BaseException:
            workers.dismiss()
            workers.stop(10.0)  # there is no segment yet: the workers only close their envs
            self._finalizer.cancel()
            raise
        self.single_observation_space, self.observation_space = agreement.spaces[:2]
        self.single_action_space, self.action_space = agreement.spaces[2:]
        self.metadata, self.render_mode = agreement.metadata, agreement.render_mode
        with naming_limits():
            made = assemble(
                workers,
                self._settings,
                agreement,
                self.guard,
                may_step_over,
                in_ranges,
                hold_batches,
            )
        made.links.insight().options = bits_of_options(self._settings)
        self.layout = agreement.layout
        self._links, self._frames, self._ledger = made.links, made.frames, made.ledger
        self._recovery: Recovery = Recovery(
            self.policy,
            self._settings.recycle_after,
            made.ledger,
            workers,
            made.links.count_fault,
        )
        self.tracing: Any = SimpleNamespace(
            guard=self.guard,
            workers=workers,
            links=made.links,
            recovery=self._recovery,
            trace=lambda: None,
        )

    @property
    def processes(self) -> list[Any]:
        """The worker processes, one for each worker that is not the caller."""
        return self._workers.processes if self._workers is not None else []

    # ---- asking ------------------------------------------------------------------------------

    def _settled(self, deadline: float | None = None) -> tuple[Ledger, Workers]:
        """The ledger and the workers, once abandoned answers are discarded."""
        ledger, workers = self._open()
        if self.guard.abandoned and not self._discard(ledger, deadline):
            raise multiprocessing.TimeoutError(
                "timed out: answers to a call that was broken off are still waited for"
            )
        return ledger, workers

    def settle(self, name: str, envs: npt.ArrayLike | None = None, within: Any = None) -> Ledger:
        """The ledger, once the workers of envs are up and no env is in flight.

        Raises:
            AlreadyPendingCallError: The call ``name`` would mix with another one.
        """
        self._check_pending(name, within, alone=True)
        ledger, _ = self._settled()
        self._asked(envs)
        return ledger

    def _chosen(self, envs: npt.ArrayLike | None) -> Envs:
        """Indices of envs, as an array: all if it is None; it may be empty."""
        if type(envs) is np.ndarray and envs.dtype == np.intp and envs.flags.c_contiguous:
            if envs.ndim == 1:  # the usual
                return envs
        if envs is None:
            return self._everyone
        if np.size(envs) == 0:
            return self._everyone[:0]
        return checked_env_ids(envs, self.num_envs)

    def _asked(self, envs: npt.ArrayLike | None, deadline: float | None = None) -> Envs:
        """Indices of envs that are asked; waits for their workers."""
        chosen = self._chosen(envs)
        # What is asked of a worker that is being replaced would be lost.
        if self._open()[0].links.down and not self._wait(UP, chosen, deadline):
            raise multiprocessing.TimeoutError("timed out: a worker is still being replaced")
        return chosen

    @exclusive
    def ask(
        self,
        envs: npt.ArrayLike | None,
        actions: Any,
        *,
        frame: int = -1,
        together: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Asks envs to step, and does not wait, but for workers that are being replaced.

        Args:
            envs: Which, int ``(n,)``. None: all.
            actions: One for each of these envs, batched as the action space says; lists will do.
            frame: The rollout's frame for the results; with some envs, one that has the others'
                results.
            together: Whether neighbouring envs answer together: cheaper, if no caller waits for one
                of them alone.
            timeout: Seconds to wait. None: as long as it takes.

        Raises:
            ClosedEnvironmentError: It is closed.
            AlreadyPendingCallError: Another call is under way.
            multiprocessing.TimeoutError: The time is up. Nothing was sent.
            ValueError: There is no such env, it is named twice, or is in flight; the number or
                shape of the actions is wrong. Nothing was sent.
            TypeError: The dtype of the actions or of ``envs`` is wrong. Nothing was sent.
            BufferError: All frames of an env are held. Nothing was sent.
        """
        ledger = self._ledger
        if ledger is None or self.guard.abandoned or ledger.links.down:
            deadline = _deadline(timeout)
            ledger, _ = self._settled(deadline)
            envs = self._asked(envs, deadline)
        elif envs is not None:
            envs = self._chosen(envs)
        ledger.step(envs, actions, frame, together)

    @exclusive
    def ask_reset(
        self,
        envs: npt.ArrayLike | None = None,
        seeds: Sequence[int | None] | None = None,
        options: Sequence[Any] | None = None,
        *,
        repeat: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Asks envs to reset, and does not wait, but for workers that are being replaced.

        Args:
            envs: Which, int ``(n,)``. None: all.
            seeds: One (or None) for each of these. None: none at all.
            options: Likewise.
            repeat: Whether a reset that is lost with its worker is repeated with its seed and
                options. False: it is repeated with neither, so that the caller sees its loss.
            timeout: As for :meth:`ask`.

        Raises:
            Exception: As :meth:`ask`. Nothing was sent.
        """
        deadline = _deadline(timeout)
        self._settled(deadline)
        together = envs is None
        self._ask_reset(envs, seeds, options, deadline, together=together, repeat=repeat)

    def _ask_reset(
        self,
        envs: npt.ArrayLike | None = None,
        seeds: Sequence[int | None] | None = None,
        options: Sequence[Any] | None = None,
        deadline: float | None = None,
        **how: bool,
    ) -> None:
        ledger, workers = self._open()
        chosen = self._asked(envs, deadline)
        if not len(chosen):
            return
        ledger.reset(chosen, seeds, copies_of_each(workers, options), **how)

    def _command(
        self,
        name: str,
        payload: Any,
        envs: npt.ArrayLike | None,
        deadline: float | None = None,
    ) -> None:
        """Asks envs for a "call" (name, args, kwargs) or to "set_attr" (name, {env: value})."""
        ledger, workers = self._open()
        chosen = self._asked(envs, deadline)
        if not len(chosen):
            return
        ledger.check(chosen)
        packed = packed_command(workers, chosen.tolist(), name, payload, ledger.in_flight)
        workers.doing = name
        ledger.command(np.sort(chosen), packed)

    # ---- answers -----------------------------------------------------------------------------

    @exclusive
    def take(
        self,
        envs: npt.ArrayLike | None = None,
        count: int | None = None,
        least: int | None = None,
        timeout: float | None = None,
        gather: Any = None,
        everyone: bool = False,
        arrays: bool = True,
    ) -> Answers:
        """Waits for answers, and takes them; the envs taken are idle afterwards.

        Args:
            envs: The envs to take, int ``(n,)``, in this order.
            count: Number of envs to take: those that have been ready for longest. If an env has
                raised, none is taken: ``failures`` says what it raised, and the others stay ready.
                With neither ``envs`` nor ``count``: all that are in flight, by index, but for those
                that have raised.
            least: With ``count``: the number of ready envs that ends the wait. When the time is up,
                fewer are taken, if any are ready.
            timeout: Seconds to wait. None: as long as it takes.
            gather: True: infos become Gymnasium's dict of arrays, a row for each env taken. A
                ``VectorEnv`` does the same for ``everyone``, by its own ``_add_info``. None: one
                dict for each env.
            everyone: Whether there are results of all envs: of those that were not asked, the last
                ones.
            arrays: Whether results other than infos are wanted at all.

        Raises:
            ClosedEnvironmentError: It is closed.
            AlreadyPendingCallError: Another call is under way.
            NoAsyncCallError: Fewer envs than that are in flight.
            multiprocessing.TimeoutError: The time is up. Nothing was taken.
            EnvTimeoutError: An env takes longer than its time limit.
            WorkerCrashError: A worker died, and the policy does not restart it.
        """
        deadline = None if timeout is None else _deadline(timeout)
        ledger = self._ledger
        if ledger is None or self.guard.abandoned:
            ledger, _ = self._settled(deadline)
        if count is None:
            count, envs = -1, None if envs is None else self._chosen(envs)
            self._wait_within(envs, deadline)
        else:
            self._wait_for_some(ledger, count if least is None else least, least, deadline)
        chosen, results, rest = ledger.take(envs, count, gather, everyone, arrays)
        if rest is None:
            return Answers(chosen, *results)
        return Answers(chosen, *results, *rest[:2])

    def _take_all(self, ledger: Ledger, gather: Any, arrays: bool = True) -> tuple[Any, ...]:
        """Takes all envs that are in flight; returns results of all, and raises what they raise."""
        self._wait()
        envs, results, rest = ledger.take(None, -1, gather, True, arrays)
        if rest is not None:
            self._deliver(envs, results[-1], *rest[:2])
        return results  # type: ignore[no-any-return]

    def _wait_for_some(
        self, ledger: Ledger, wanted: int, least: int | None, deadline: float | None
    ) -> None:
        """Waits until so many envs are ready, or with ``least`` and a time that is up: any."""
        if ledger.num_in_flight < wanted and not ledger.raised:
            raise NoAsyncCallError(
                f"Waiting for {wanted} envs, but only {ledger.num_in_flight} have been asked to "
                "step or reset. First `send` actions or call `async_reset` (of an Exchange: `ask`, "
                "`ask_reset`).",
                "recv",
            )
        done = self._wait(wanted, deadline=deadline)
        if not done and (least is None or ledger.num_ready == 0):
            raise multiprocessing.TimeoutError(
                f"The call to `recv` has timed out: {ledger.num_ready} of {wanted} envs are ready."
            )

    @exclusive
    def wait_for(self, count: int, timeout: float) -> int:
        """Waits until so many envs are ready, or all that are in flight, or the time is up.

        Args:
            count: Number of envs.
            timeout: Seconds to wait.

        Returns:
            The number of envs that are ready, or have raised.

        Raises:
            Exception: As :meth:`take`, but for a time that is up.
        """
        deadline = _deadline(timeout)
        ledger, _ = self._settled(deadline)
        self._wait(min(count, ledger.num_in_flight), deadline=deadline)
        ready: int = ledger.num_ready
        return ready + len(ledger.raised)

    @exclusive
    def first_ready(self, groups: Sequence[Envs]) -> int:
        """Waits until all envs of one of these groups have answered; returns the group's index.

        Raises:
            Exception: As :meth:`take`.
        """
        ledger, _ = self._settled()
        while True:
            missing = [ledger.num_missing(group) for group in groups]
            if 0 in missing:
                return missing.index(0)
            if ledger.raised:  # then a wait for a number of envs would end at once
                self._wait(envs=groups[missing.index(min(missing))])
            else:
                self._wait(ledger.num_ready + min(missing))

    def discard(self, timeout: float | None = None) -> bool:
        """Waits for all envs in flight, and discards their answers.

        Their next answers report the faults that the discarded ones would have reported. What this
        call leaves in flight, the next call waits for and discards.

        Args:
            timeout: Seconds to wait. 0: it does not wait, and may be called from anywhere, by a
                signal's handler, too. None: as long as it takes.

        Returns:
            Whether no env is in flight any more.

        Raises:
            Exception: As :meth:`take`.
        """
        if timeout != 0.0:
            return self._discard_within(timeout)
        if self.num_in_flight:
            self.guard.abandon()
        return not self.num_in_flight

    @exclusive
    def _discard_within(self, timeout: float | None) -> bool:
        ledger = self._ledger
        if ledger is None:
            return True
        if ledger.num_in_flight:
            self.guard.abandon()
        return self._discard(ledger, _deadline(timeout))

    def _discard(self, ledger: Ledger, deadline: float | None = None) -> bool:
        if not self._wait(deadline=deadline):
            return False
        ledger.discard()
        self.guard.settled()
        return True

    # ---- calls that ask envs and take their answers ------------------------------------------

    def step(
        self,
        actions: Any,
        gather: Any = None,
        envs: Envs | None = None,
        frame: int = -1,
        last: bool = False,
        arrays: bool = True,
        meanwhile: Callable[[], object] | None = None,
        within: Any = None,
    ) -> tuple[Any, ...]:
        """Steps all envs, or some, none of which may be in flight.

        Args:
            actions: As for :meth:`ask`.
            gather: As for :meth:`take`.
            envs: Which. None: all.
            frame: The rollout's frame for the results; -1: none.
            last: Whether that is the rollout's last frame.
            arrays: Whether results other than infos are wanted at all.
            meanwhile: Called while the envs step.
            within: The loan under which this call is made.

        Returns:
            Observations, rewards, terminations and truncations of all envs, and infos.

        Raises:
            AlreadyPendingCallError: Another call is under way, or its results are to be taken.
            Exception: As :meth:`ask` and :meth:`take`, and whatever envs raise.
        """
        ledger = self._ledger
        if ledger is None:
            ledger, _ = self._open()
        try:
            return ledger.step_and_take(  # type: ignore[no-any-return]
                self, actions, gather, envs, frame, last, arrays, meanwhile, within
            )
        except BaseException as error:
            raise cut_traceback(error)  # noqa: B904  # the same error

    def end_step(self, rest: tuple[Any, ...] | None, last: bool) -> None:
        """Raises what envs have raised in a step, recycles workers, and ends a rollout."""
        if rest is not None and rest[1]:
            self.raise_failures(rest[1])
        if self.recycles:
            self._recycle(None)
        if last:
            self._frames.copy_back_from_rollout()

    @whole
    def reset(
        self,
        envs: npt.ArrayLike | None = None,
        seeds: Sequence[int | None] | None = None,
        options: Sequence[Any] | None = None,
        *,
        gather: Any = None,
    ) -> tuple[Any, Any]:
        """Resets envs.

        Args:
            envs: As for :meth:`ask_reset`.
            seeds: Likewise.
            options: Likewise.
            gather: As for :meth:`take`.

        Returns:
            The last observations of all envs, and infos.

        Raises:
            Exception: As :meth:`step`.
        """
        ledger = self.settle("reset_async", envs)
        self._ask_reset(envs, seeds, options, together=True)
        infos = self._take_all(ledger, gather, arrays=False)[-1]
        return self._frames.observe(), infos

    @whole
    def call(
        self,
        name: str,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        envs: npt.ArrayLike | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Calls a method of envs, in parallel, or gets an attribute: one result for each.

        Args:
            name: Name of the method or attribute.
            args: Positional arguments for the method.
            kwargs: Keyword arguments for the method.
            envs: Which, int ``(n,)``, none of them in flight. None: all.
            timeout: Seconds to wait. None: as long as it takes.

        Raises:
            multiprocessing.TimeoutError: The time is up. What is in flight is abandoned.
            WorkerCrashError: A worker died; if it was restarted, the exchange can still be used.
            Exception: As :meth:`ask`; whatever an env raises; or the arguments cannot be pickled.
        """
        deadline = _deadline(timeout)
        self._settled(deadline)
        self._command("call", (name, args, dict(kwargs or {})), envs, deadline)
        return self._returned(envs, deadline)

    @whole
    def set_attr(self, name: str, values: Mapping[int, Any]) -> None:
        """Sets an attribute of envs; ``values`` has one for each env index.

        Raises:
            Exception: As :meth:`call`.
        """
        self._settled()
        envs = list(values)
        self._command("set_attr", (name, dict(values)), envs)
        self._returned(envs)

    @whole
    def leave(self, envs: npt.ArrayLike, timeout: float | None = None) -> None:
        """Calls ``close`` of some envs, which may not be asked again.

        If an env takes longer, its worker is ended; the other envs of that worker are restarted.

        Args:
            envs: Which, int ``(n,)``, none of them in flight.
            timeout: Seconds to wait. None: as long as it takes.

        Raises:
            Exception: As :meth:`call`.
        """
        deadline = _deadline(timeout)
        ledger, workers = self._settled(deadline)
        chosen = self._chosen(envs).tolist()
        self._command("call", ("close", (), {}), envs, deadline)
        ledger.gone.update(chosen)
        try:
            self._returned(envs, deadline)
        except multiprocessing.TimeoutError:  # no later call may wait for these
            for index, owned in enumerate(workers.ranges):
                if workers.is_here(index):  # its envs have closed: the caller has called them
                    continue
                if ledger.gone.issuperset(owned):
                    workers.end(index)
                    ledger.retire(index)
                elif not set(chosen).isdisjoint(owned):
                    with self._closing():
                        self._recovery.restart(owned)
            self.guard.abandon()

    def _returned(
        self, envs: npt.ArrayLike | None = None, deadline: float | None = None
    ) -> list[Any]:
        """Waits for a command: one result for each of its envs, in the given order."""
        ledger, workers = self._open()
        order = self._chosen(envs)
        self._wait_within(order, deadline)
        _, _, rest = ledger.take(order, arrays=False)
        _, failures, results, unanswered = rest or ({}, [], {}, [])
        raise_failures(failures)
        if unanswered:
            raise WorkerCrashError(
                f"The worker of envs {unanswered} died in {workers.doing!r}, and was "
                "restarted: there is no result. The vector env can be used; these envs' next step "
                "truncates."
            )
        return [results[env] for env in order.tolist()]

    # ---- calls in two parts ------------------------------------------------------------------

    @property
    def pending(self) -> Any:
        """The call that was begun and not finished, or the current loan; None: neither."""
        return self.guard.pending

    @exclusive
    def check_pending(self, name: str, *, alone: bool = False) -> None:
        """Raises AlreadyPendingCallError if the call ``name`` would mix with another one.

        Args:
            name: Name of the method.
            alone: Whether no env may be in flight.
        """
        self._check_pending(name, alone=alone)

    def _check_pending(self, name: str, within: Any = None, *, alone: bool = False) -> None:
        self.check_open()
        pending = self.guard.pending
        if pending is not None and pending is not within:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{pending.value}` to "
                "complete.",
                str(pending.value),
            )
        if alone and self.num_in_flight and not self.guard.abandoned:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while envs are in flight: first take their results with `recv`, "
                "or call `drop()` of the Pipeline that steps them.",
                "recv",
            )

    @whole
    def begin(self, pending: Any, *arguments: Any) -> None:
        """Asks all envs for what :meth:`finish` takes.

        It waits only for answers of an abandoned call, and for workers that are being replaced.

        Args:
            pending: The call to begin: its ``value`` is "step", "reset" or "call".
            *arguments: For a step: actions. For a reset: envs, seeds and options. For a call: a
                ``(name, args, kwargs)``, and envs.

        Raises:
            AlreadyPendingCallError: Another call is under way, or its results are to be taken.
            Exception: As :meth:`ask`, :meth:`ask_reset` and :meth:`call`.
        """
        self._check_pending(f"{pending.value}_async", alone=True)
        ledger, _ = self._settled()
        if pending.value == "step":
            self._asked(None)
            ledger.step(None, arguments[0])
        elif pending.value == "reset":
            self._ask_reset(*arguments, together=True)
        else:
            payload, self._called = arguments
            self._command("call", payload, self._called)
        self.guard.leave_pending(pending)

    @whole
    def finish(self, pending: Any, timeout: float | None = None, gather: Any = None) -> Any:
        """Waits for the results of :meth:`begin`, and takes them.

        Args:
            pending: The call that was begun.
            timeout: Seconds to wait. None: as long as it takes.
            gather: As for :meth:`take`.

        Returns:
            As :meth:`step`, :meth:`reset` or :meth:`call`.

        Raises:
            NoAsyncCallError: Nothing of that kind was begun.
            multiprocessing.TimeoutError: The time is up. The requests are abandoned.
            Exception: As :meth:`step`.
        """
        self.check_open()
        operation = pending.value
        if not self.guard.claim(pending):
            raise NoAsyncCallError(
                f"Calling `{operation}_wait` without any prior call to `{operation}_async`.",
                operation,
            )
        ledger, _ = self._open()
        if timeout is not None and not self._wait(deadline=_deadline(timeout)):
            raise multiprocessing.TimeoutError(
                f"The call to `{operation}_wait` has timed out after {timeout} second(s)."
            )
        if operation == "call":
            return self._returned(self._called)
        if operation == "reset":
            infos = self._take_all(ledger, gather, arrays=False)[-1]
            return self._frames.observe(), infos
        results = self._take_all(ledger, gather)
        if self.recycles:
            self._recycle(None)
        return results

    def drop(self, pending: Any) -> None:
        """Abandons the call that :meth:`begin` has begun, if it is pending still."""
        if self.guard.claim(pending):
            self.guard.abandon()

    def lend(
        self, name: str, *, in_flight: bool = False, keeps: bool = False
    ) -> contextlib.AbstractContextManager[Exchange]:
        """Lends the exchange to code that asks envs in its own order, in a ``with`` block.

        Until the block ends, calls that ask and take at once are refused, unless they name the loan
        as ``within``. The loan lapses with its borrower. What is in flight at its end is abandoned.

        Args:
            name: The borrower's name, for messages.
            in_flight: Whether envs may be in flight. False: what an abandoned call has left is
                waited for and discarded.
            keeps: Whether requests stay in flight at the loan's end, if no exception ends it.

        Raises:
            ClosedEnvironmentError: It is closed.
            AlreadyPendingCallError: Another call is under way, or its results are to be taken.
        """

        def begin() -> Exchange:
            self._check_pending(name, alone=not in_flight)
            if not in_flight:
                self._settled()
            return self

        pending = SimpleNamespace(value=name)
        loan: contextlib.AbstractContextManager[Exchange] = Loan(self.guard, begin, pending, keeps)
        return loan

    # ---- questions ---------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Number of envs in flight: asked, and not taken."""
        ledger = self._ledger
        return 0 if ledger is None else ledger.num_in_flight

    def in_flight(self, env: int) -> bool:
        """Whether an env is in flight: asked, and its answer not taken."""
        ledger = self._ledger
        asked: bool = ledger is not None and ledger.in_flight(env)
        return asked

    def over(self, env: int) -> bool:
        """Whether an env's episode is over: its last step ended it, or its worker was restarted."""
        over: bool = self._open()[0].is_over(env)
        return over

    def restarts(self, env: int) -> int:
        """Number of restarts of an env's worker."""
        return self._recovery.restarts_of(env)

    def moves(self) -> npt.NDArray[np.int64]:
        """Two counts for each env, ``(2, num_envs)``, which show whether other code has used it.

        One changes when envs of its worker have stepped, the other when the env was asked to reset.
        """
        ledger, _ = self._open()
        steps = [self._links.steps_of(worker) for worker in range(len(self.ranges))]
        return np.stack([np.repeat(steps, list(map(len, self.ranges))), ledger.resets])

    def stats(self) -> Stats:
        """Counts and times so far."""
        try:
            self._open()
        except ClosedEnvironmentError as error:
            add_note(error, "Its counts went with its memory: call stats() before close().")
            raise
        on_cores = [time_on_cores(process.pid) for process in self.processes]
        if self._settings.caller_steps:
            on_cores.append((None, None))  # the caller has computed other things, too
        return Stats.of(self._links.insight(), on_cores)

    # ---- faults ------------------------------------------------------------------------------

    @exclusive
    def restart(self, envs: npt.ArrayLike | None = None) -> None:
        """Restarts workers of some envs, maybe none; see :meth:`shmvec.ShmVectorEnv.restart`."""
        self._open()
        if envs is not None and np.size(envs) == 0:
            return
        chosen = existing_env_ids(envs, self.num_envs)
        with self._closing():
            self._recovery.restart(chosen.tolist())
        self._wait(UP, chosen)

    def recycle(self, envs: Collection[int] | None = None) -> Collection[int]:
        """Restarts workers that have made as many steps as ``recycle_after`` says.

        Args:
            envs: Only workers are restarted that have no other envs than these. None: any.

        Returns:
            The envs of due workers that were not restarted, because some of their envs are in
            flight, or not named.
        """
        return self._recycle_alone(envs) if self.recycles else ()

    @exclusive
    def _recycle_alone(self, envs: Collection[int] | None) -> Collection[int]:
        return self._recycle(envs)

    def _recycle(self, envs: Collection[int] | None) -> Collection[int]:
        with self._closing():
            return self._recovery.recycle(envs)

    def forgive(self, env: int) -> None:
        """Forgets the faults of an env's worker: they no longer count towards ``max_restarts``."""
        self._recovery.forgive(env)

    def log_failures(self, failures: Sequence[Failure]) -> None:
        """Logs what envs have raised as AsyncVectorEnv does, unless ``log_errors`` is off."""
        if self._settings.log_errors:
            log_as_gymnasium_does(failures)

    def raise_failures(self, failures: Sequence[Failure]) -> None:
        """Logs what envs have raised, and raises the exception of the first of them.

        Raises:
            Exception: What the first env has raised, with the worker's traceback as its cause.
                Notes name the others.
        """
        self.log_failures(failures)
        raise_failures(failures)

    def delivered(self, answers: Answers) -> Answers:
        """Answers with one info dict an env, to which the faults of its worker are added.

        Raises:
            Exception: As :meth:`raise_failures`.
        """
        self._deliver(answers.envs, answers.infos, answers.reports, answers.failures)
        return answers

    def _deliver(
        self, envs: Envs, infos: Any, reports: dict[int, Report], failures: list[Failure]
    ) -> None:
        """Raises what envs have raised; adds the faults of workers to infos, one dict an env."""
        if failures:
            self.raise_failures(failures)
        if isinstance(infos, list):  # else they have been added as infos were gathered
            for env, report in reports.items():
                infos[envs.tolist().index(env)].update(report.info)

    # ---- rollouts ----------------------------------------------------------------------------

    @property
    def frames(self) -> Frames:
        """The register of where each env's results are, for rollouts."""
        self._open()
        return self._frames

    @whole
    def share(self, name: str, size: tuple[Any, ...] = (), descriptor: int | None = None) -> None:
        """Hands memory for rollouts or a log of steps to workers, and to those that replace them.

        Args:
            name: "rollout" or "log".
            size: Its bytes, then the sizes of its content: of a log, first a function that can be
                imported, and makes a worker's ``StepLog`` of the layout, the memory and the sizes.
                Empty: workers write there no more.
            descriptor: Its descriptor, if it has a size.

        Raises:
            Exception: As :meth:`take`.
        """
        ledger, workers = self._settled()
        self._wait(UP, self._everyone)
        ledger.check(self._everyone)
        packed = dict.fromkeys(range(len(workers.ranges)), workers.pack((name, size)))
        if descriptor is None:
            workers.kept.drop(name)
        else:
            workers.kept.put(name, size, descriptor)
        workers.doing = name
        ledger.command(self._everyone, packed, [] if descriptor is None else [descriptor])
        # A worker that died instead of answering has received the memory at its restart.
        self._take_all(ledger, None, arrays=False)

    # ---- a log of steps ----------------------------------------------------------------------

    @property
    def log(self) -> Any:
        """The ``StepLog`` that follows what envs are asked; None: there is none."""
        ledger = self._ledger
        return None if ledger is None else ledger.log

    @log.setter
    def log(self, log: Any) -> None:
        ledger = self._ledger
        if ledger is not None:
            ledger.log = log

    def catch_up(self) -> None:
        """Has the log accept what was logged of envs that are not in flight."""
        ledger = self._ledger
        if ledger is not None:
            ledger.catch_up()

    # ---- waiting -----------------------------------------------------------------------------

    def _wait(
        self, wanted: int = -1, envs: Envs | None = None, deadline: float | None = None
    ) -> bool:
        """Waits as ``Ledger.wait`` does, and handles faults; False: the time is up."""
        ledger = self._ledger
        if ledger is None:
            ledger, _ = self._open()
        while True:
            event = ledger.wait(wanted, envs, deadline)
            if event == DONE:
                return True
            if event == TIME_UP:
                return False
            self.handle(event)

    def handle(self, event: int) -> None:
        """Handles an event of a wait as the policy says; a crash that it raises closes this."""
        with self._closing():
            self._recovery.handle(event)

    def _wait_within(self, envs: Envs | None, deadline: float | None) -> None:
        """Waits until envs have answered, or all; raises TimeoutError if the time is up."""
        if not self._wait(envs=envs, deadline=deadline):
            raise multiprocessing.TimeoutError("timed out: not all envs have answered")

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Closes the exchange when a crash in the block cannot be recovered from."""
        try:
            yield
        except WorkerCrashError as error:
            self._crash = error.summary
            self._abandon()
            raise

    # ---- the end -----------------------------------------------------------------------------

    def close(
        self, timeout: float | None = None, terminate: bool = False, *, wait: bool = True
    ) -> None:
        """Closes the envs and ends the workers. A second call does nothing.

        Args:
            timeout: Seconds the envs get to close. None: as long as they take. Workers that are
                not done by then are terminated, and killed if they do not obey.
            terminate: Do not wait for the envs at all.
            wait: False: the envs are only asked to close; a second call must follow.

        Raises:
            Exception: What an env's ``close`` raises, after everything else is closed.
        """
        workers, ledger = self._workers, self._ledger
        if workers is None or (self.closed and workers.ended):  # an interrupted close() is resumed
            return
        remind = None
        workers.dismiss()  # no worker that is being started, or replaced, comes up later
        if ledger is not None and not terminate:
            remind = ledger.links.remind
            ledger.links.closed = True  # first: ends a wait of another thread
            try:
                ledger.links.ask_to_close()
            except RuntimeError:
                terminate = True  # the request ring is full: the workers are stuck
        if not wait:
            return
        self.catch_up()
        self._let_go()
        failures = workers.stop(0.0 if terminate else timeout, remind)
        if workers.ended:  # else Ctrl-C came before, or another thread is ending them
            self._finalizer.cancel()
        raise_failures(failures)

    def _abandon(self) -> None:
        """Closes the exchange and ends its workers, without waiting for the envs."""
        self._let_go()
        self._finalizer()

    def _let_go(self) -> None:
        """Releases the memory; arrays that the user holds stay valid."""
        self.closed = True
        ledger = self._ledger
        if ledger is not None:
            ledger.links.closed = True
        self._ledger = None
        gone: Any = _Gone()
        self._links = self._frames = self._recovery = self.tracing = gone

    def _disown(self) -> None:
        """Lets go of the workers, in a fork of the process that owns them."""
        self.guard.disown()
        self._let_go()
        if self._workers is not None:
            self._finalizer.cancel()
            self._workers.disown()

    def __del__(self) -> None:
        """Ends the workers of an exchange that was not closed, and warns."""
        if not getattr(self, "closed", True) and getattr(self, "initialized", False):
            try:
                self.warn_unclosed()
            finally:  # warnings may be errors
                self.close(terminate=True)

    def warn_unclosed(self) -> None:
        """Warns that the exchange is about to be freed without having been closed."""
        warnings.warn(
            f"unclosed {self._name}, made at {self._made_at}: call its close()",
            ResourceWarning,
            source=self,
            stacklevel=3,
        )

    def _open(self) -> tuple[Ledger, Workers]:
        ledger, workers = self._ledger, self._workers  # read first: another thread may close it
        self.check_open()
        if ledger is None or workers is None:
            raise RuntimeError(f"initialize() must be called before this {self._name} is used")
        return ledger, workers

    def check_open(self) -> None:
        """Raises ClosedEnvironmentError if the exchange is closed."""
        if self.closed:
            if self._owner != os.getpid():
                raise RuntimeError(
                    f"This {self._name} belongs to process {self._owner}, and this one is a fork "
                    "of it: workers answer only there. Make one in each process."
                )
            closed = f"Trying to operate on `{self._name}`, after a call to `close()`."
            if self._crash:
                closed += (
                    f" A crash has closed it: {self._crash}. Make another one, with "
                    "faults=FaultPolicy(on_crash='restart') if workers are to be restarted."
                )
            raise ClosedEnvironmentError(closed)


class _Gone:
    """Stand-in for what close() has freed: another thread's call that uses it is refused."""

    def __getattr__(self, name: str) -> Any:
        """Raises ClosedEnvironmentError."""
        raise ClosedEnvironmentError("The vector env was closed during this call.")


def _finalize(workers: Workers, forgotten: weakref.ref[Exchange]) -> None:
    """Ends the workers; at exit, code that still has the exchange finds it closed."""
    exchange = forgotten()
    if exchange is not None:
        exchange._let_go()
    workers.stop(0.0)


@dataclass(slots=True)
class Answers:
    """What envs have answered to a step or a reset.

    Attributes:
        envs: Which envs, int ``(n,)``, in the order in which they were taken.
        observations: Their observations, batched as the observation space says.
        rewards: float64 ``(n,)``; 0 for a reset.
        terminations: bool ``(n,)``.
        truncations: bool ``(n,)``.
        infos: One dict for each env, as the env returned it; or, gathered, a dict of arrays:
            Gymnasium's, or by the vector env's own ``_add_info``.
        reports: By env, the fault of its worker that its answer reports, if there is one.
        failures: What envs have raised; these envs have no row above.
    """

    envs: Envs
    observations: Any = None
    rewards: Any = None
    terminations: Any = None
    truncations: Any = None
    infos: Any = field(default_factory=list)
    reports: dict[int, Report] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def by_env(self, space: Any) -> Iterator[tuple[int, Any, float, bool, bool, Any]]:
        """Each env with its observation, reward, termination, truncation and info.

        Args:
            space: Observation space of one env.
        """
        for row, env in enumerate(self.envs.tolist()):
            ends = bool(self.terminations[row]), bool(self.truncations[row])
            observation, reward = one_of(space, self.observations, row), float(self.rewards[row])
            yield env, observation, reward, *ends, self.infos[row]


# The open exchanges of this process; a fork of it must not touch their workers.
_owned: weakref.WeakSet[Exchange] = weakref.WeakSet()


def _disown_all() -> None:
    for exchange in list(_owned):
        exchange._disown()
    _owned.clear()


os.register_at_fork(after_in_child=_disown_all)


def _deadline(timeout: float | None) -> float | None:
    """The time by the monotonic clock when a timeout ends that begins now."""
    return None if timeout is None else time.monotonic() + timeout


def _caller() -> str:
    """The file and line of the user's code that made the current call."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("shmvec", "gymnasium")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

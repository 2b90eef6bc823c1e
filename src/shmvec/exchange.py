"""``Exchange``: envs in workers, and which of them are in flight or have answered.

``ShmVectorEnv``, planning and the adapters to other systems are built on it; your code may use it,
too. An exchange asks envs (``ask``, ``ask_reset``, ``command``), takes their answers (``take``),
and knows for each env whether it is in flight. Each call is done as a whole or not at all. A
``take`` that an exception ends (Ctrl-C, a time limit) leaves its envs in flight; if it had taken
their results, they are idle, and the results are lost. A call that asks and takes at once
(``step``, ``reset``, ``call``, ``set_attr``) and that an exception ends abandons its requests: the
next call waits for their answers, and discards them.
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
from gymnasium.spaces import Box

from shmvec._arguments import (
    Envs,
    Options,
    check_automatic_options,
    checked_env_fns,
    checked_env_ids,
    existing_env_ids,
    reset_arguments,
)
from shmvec._autoreset import Autoreset, AutoresetMode
from shmvec._core import (
    DONE,
    TIME_UP,
    WORKERS_UP,
    Frames,
    Guard,
    Ledger,
    Loan,
    exclusive,
    round_trip,
)
from shmvec._cores import time_on_cores
from shmvec._hints import add_note, explain_process_limits
from shmvec._memory.layout import ActionRows
from shmvec._options import Settings, describe, exchange_settings
from shmvec._processes.assembly import agree, assemble, make_supervisor
from shmvec._processes.commands import pack_command, prepare_copies
from shmvec._processes.host import EnvFn, HostedEnv
from shmvec._processes.recovery import Recovery
from shmvec._processes.supervisor import Supervisor
from shmvec._processes.wakes import WakeEvents
from shmvec.faults import (
    EnvTimeoutError,
    Failure,
    FaultPolicy,
    Report,
    WorkerCrashError,
    cut_traceback,
    log_as_gymnasium_does,
    raise_failures,
)
from shmvec.spaces import one_of
from shmvec.stats import Stats, advised_bits

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
    """Base of classes that have worker processes: they can be neither pickled nor copied."""

    def __reduce__(self) -> Any:
        """Refuses to be pickled or copied."""
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: it owns processes. Send the "
            "env_fns, and make one there."
        )


class Exchange(OwnsProcesses):
    """Envs in worker processes, and the ledger that says which of them are in flight.

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
        reward_space: The space of one env's rewards, a Box of shape ``(k,)``; None: they are
            numbers.
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

    # Slots for what each step reads: objects with more than 30 attributes read them slowly.
    __slots__ = "_ledger", "_recovery", "_wakes", "_workers", "guard", "recycles"

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        name: str = "Exchange",
        num_buffers: int = 0,
        hold_batches: int | None = None,
        in_ranges: bool = False,
        may_step_over: bool | None = None,
        vector_rewards: bool = False,
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
            vector_rewards: Whether rewards may have more than one number, as a ``reward_space`` of
                the envs says. False: such envs are refused.
            wait: Whether to wait until all envs are built. False: :meth:`initialize` does.
            settings: Options that were checked before, in place of ``options``.
            **options: Options of :class:`shmvec.ShmVectorEnv`, with the same meaning; not those of
                batches, nor a ``worker`` function.

        Raises:
            Exception: As :class:`shmvec.ShmVectorEnv`.
        """
        # These come first, because close() must work whatever fails below.
        self.closed = False
        self._crash_summary = ""  # of the crash that has closed this exchange
        self._workers: Supervisor | None = None
        self._ledger: Ledger | None = None
        self._wakes: WakeEvents | None = None  # for an event loop
        self._owner = os.getpid()
        self.guard = Guard()
        _open_exchanges.add(self)
        functions = checked_env_fns(env_fns)
        self._name = name
        self._creation_site = _call_site()
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
        settings.num_buffers, settings.hold_batches = num_buffers, hold_batches
        settings.may_step_over, settings.in_ranges = may_step_over, in_ranges
        settings.vector_rewards = vector_rewards
        self._pending_envs: Envs | None = None  # of the pending call; None: all
        self._all_envs = np.arange(self.num_envs, dtype=np.intp)

        self._workers = make_supervisor(functions, settings, name)
        self.ranges = self._workers.ranges
        # It ends the workers of an exchange that is forgotten, or still open at exit, and runs
        # before multiprocessing waits for its children. weakref.finalize would not promise that.
        self._finalizer = Finalize(
            self, _finalize, (self._workers, weakref.ref(self)), exitpriority=100
        )
        self.initialized = False
        try:
            self._workers.start()
            if wait:
                self.initialize()
        except BaseException:
            self._kill()
            raise

    def __repr__(self) -> str:
        """Names the number of envs and workers, and whether it is closed."""
        return describe(self, self._name, self._settings.method)

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
            self._kill()
            if closed and isinstance(error, Exception):
                raise ClosedEnvironmentError("The vector env was closed as it started.") from None
            cut_traceback(error)
            raise
        self.initialized = True

    def _start(self, workers: Supervisor) -> None:
        """Takes the workers' reports, makes the segment and sends it to them."""
        try:
            agreement = agree(workers, self._settings, self._name)
        except BaseException:
            workers.dismiss()
            workers.stop(10.0)  # there is no segment yet: the workers only close their envs
            self._finalizer.cancel()
            raise
        self.single_observation_space, self.observation_space = agreement.spaces[:2]
        self.single_action_space, self.action_space = agreement.spaces[2:]
        self.metadata, self.render_mode = agreement.metadata, agreement.render_mode
        with explain_process_limits():
            ledger = assemble(workers, self._settings, agreement, self.guard)
        links = ledger.links
        links.insight().options = advised_bits(self._settings)
        self.layout = agreement.layout
        self._links, self._frames, self._ledger = links, ledger.frames, ledger
        self._recovery: Recovery = Recovery(
            self.policy,
            self._settings.recycle_after,
            ledger,
            workers,
            links.count_fault,
        )
        self.tracing: Any = SimpleNamespace(
            guard=self.guard,
            workers=workers,
            links=links,
            recovery=self._recovery,
            trace=lambda: None,
        )

    @property
    def reward_space(self) -> Box | None:
        """The space of one env's rewards, a Box of shape ``(k,)``; None: they are numbers."""
        return self.layout.reward_space

    @property
    def processes(self) -> list[Any]:
        """The worker processes, one for each worker that is not the caller."""
        return self._workers.processes if self._workers is not None else []

    # ---- asking ------------------------------------------------------------------------------

    def _discard_abandoned(self, deadline: float | None = None) -> Ledger:
        """Waits for abandoned answers and discards them."""
        ledger, _ = self._require_open()
        if self.guard.abandoned and not self._discard(ledger, deadline):
            raise multiprocessing.TimeoutError(
                "timed out: envs have not yet answered a call that was interrupted"
            )
        return ledger

    def settle(self, name: str, envs: npt.ArrayLike | None = None, within: Any = None) -> Ledger:
        """Returns the ledger, once the workers of envs are up and no env is in flight.

        Raises:
            AlreadyPendingCallError: The call ``name`` would mix with another one.
        """
        self._check_pending(name, within, alone=True)
        return self._prepare(envs)[0]

    def _env_indices(self, envs: npt.ArrayLike | None) -> Envs:
        if type(envs) is np.ndarray and envs.dtype == np.intp and envs.flags.c_contiguous:
            if envs.ndim == 1:  # the usual case
                return envs
        if envs is None:
            return self._all_envs
        if np.size(envs) == 0:
            return self._all_envs[:0]
        return checked_env_ids(envs, self.num_envs)

    def _prepare(
        self, envs: npt.ArrayLike | None, deadline: float | None = None
    ) -> tuple[Ledger, Supervisor, Envs]:
        """Discards abandoned answers, and waits until the workers of envs are up."""
        self._discard_abandoned(deadline)
        indices = self._env_indices(envs)
        ledger, workers = self._require_open()
        # A request to a worker that is being replaced would be lost.
        if ledger.links.down and not self._wait(WORKERS_UP, indices, deadline):
            raise multiprocessing.TimeoutError("timed out: a worker is still being replaced")
        return ledger, workers, indices

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
        """Asks envs to step, and waits only for workers that are being replaced.

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
            ledger, _, envs = self._prepare(envs, _deadline(timeout))
        elif envs is not None:
            envs = self._env_indices(envs)
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
        """Asks envs to reset, and waits only for workers that are being replaced.

        Args:
            envs: Which, int ``(n,)``. None: all.
            seeds: One (or None) for each of these. None: none at all.
            options: Likewise.
            repeat: Whether a reset that is lost with its worker is repeated with its seed and
                options. False: it is repeated without them, so that the caller sees the loss.
            timeout: As for :meth:`ask`.

        Raises:
            Exception: As :meth:`ask`. Nothing was sent.
        """
        together = envs is None
        self._ask_reset(envs, seeds, options, _deadline(timeout), together=together, repeat=repeat)

    def _ask_reset(
        self,
        envs: npt.ArrayLike | None = None,
        seeds: Sequence[int | None] | None = None,
        options: Sequence[Any] | None = None,
        deadline: float | None = None,
        **flags: bool,
    ) -> None:
        ledger, workers, indices = self._prepare(envs, deadline)
        if len(indices):
            ledger.reset(indices, seeds, prepare_copies(workers, options), **flags)

    def set_reset_options(self, options: Options, envs: npt.ArrayLike | None = None) -> None:
        """See :meth:`shmvec.ShmVectorEnv.set_reset_options`."""
        ledger, workers = self._check_autoreset("set_reset_options", "options")
        check_automatic_options(options)
        chosen, _, each = reset_arguments(self.num_envs, None, options, envs)
        each = prepare_copies(workers, each or [None] * len(chosen))
        ledger.set_automatic(chosen.tolist(), None, each)

    def set_reset_seeds(
        self, seeds: int | Sequence[int | None] | None, envs: npt.ArrayLike | None = None
    ) -> None:
        """See :meth:`shmvec.ShmVectorEnv.set_reset_seeds`."""
        ledger, _ = self._check_autoreset("set_reset_seeds", "seed")
        chosen, each, _ = reset_arguments(self.num_envs, seeds, None, envs)
        ledger.set_automatic(chosen.tolist(), each or [None] * len(chosen))

    def _check_autoreset(self, name: str, argument: str) -> tuple[Ledger, Supervisor]:
        if not self.autoreset.by_worker:
            raise ValueError(
                f"{name}() is for envs that steps reset automatically, and these are not "
                "(AutoresetMode.DISABLED, or a `worker` function of your own): use "
                f"reset({argument}=...)"
            )
        return self._require_open()

    @exclusive
    def ask_call(
        self,
        name: str,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        envs: npt.ArrayLike | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """As :meth:`call`, but it does not wait: :meth:`take` returns the results.

        Args:
            name: Name of the method or attribute.
            args: Positional arguments for the method.
            kwargs: Keyword arguments for the method.
            envs: Which, int ``(n,)``. None: all.
            timeout: As for :meth:`ask`.

        Raises:
            Exception: As :meth:`ask`; or the arguments cannot be pickled. Nothing was sent.
        """
        self._ask_command("call", (name, args, dict(kwargs or {})), envs, _deadline(timeout))

    def _ask_command(
        self,
        name: str,
        payload: Any,
        envs: npt.ArrayLike | None,
        deadline: float | None = None,
    ) -> None:
        """Asks envs for a "call" (name, args, kwargs) or to "set_attr" (name, {env: value})."""
        ledger, workers, indices = self._prepare(envs, deadline)
        if not len(indices):
            return
        ledger.check(indices)
        payloads = pack_command(workers, indices.tolist(), name, payload, ledger.is_in_flight)
        workers.last_command = name
        ledger.command(np.sort(indices), payloads)

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
                With neither ``envs`` nor ``count``: all that are in flight, by index, except those
                that have raised.
            least: With ``count``: the number of ready envs that ends the wait. When the time is up,
                fewer are taken, if any are ready. 0: those that are ready, if any.
            timeout: Seconds to wait. None: as long as it takes.
            gather: True: infos become Gymnasium's dict of arrays, a row for each env taken. A
                ``VectorEnv``: the same, with ``everyone``, by its own ``_add_info``. None: one
                dict for each env.
            everyone: Whether to return results of all envs: of envs that were not asked, their
                last ones.
            arrays: Whether to return more than infos.

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
            ledger = self._discard_abandoned(deadline)
        if count is None:
            count, envs = -1, None if envs is None else self._env_indices(envs)
            self._wait_for_answers(envs, deadline)
        else:
            self._wait_for_count(ledger, count if least is None else least, least, deadline)
        indices, results, rest = ledger.take(envs, count, gather, everyone, arrays)
        if rest is None:
            return Answers(indices, *results)
        return Answers(indices, *results, *rest)

    def _take_all(self, gather: Any, arrays: bool = True) -> tuple[Any, ...]:
        """Takes all envs in flight; returns results of all envs, and raises what they raise."""
        self._wait()
        envs, results, rest = self._require_open()[0].take(None, -1, gather, True, arrays)
        if rest is not None:
            self.delivered(Answers(envs, *results, *rest))
        return results  # type: ignore[no-any-return]

    def _take_reset(self, gather: Any) -> tuple[Any, Any]:
        infos = self._take_all(gather, arrays=False)[-1]
        return self._frames.observe(), infos

    def _wait_for_count(
        self, ledger: Ledger, count: int, least: int | None, deadline: float | None
    ) -> None:
        """Waits until so many envs are ready; with ``least``, one is enough once the time is up."""
        if ledger.num_in_flight < count and not ledger.caller_failures:
            raise NoAsyncCallError(
                f"Waiting for {count} envs, but only {ledger.num_in_flight} have been asked to "
                "step or reset. First `send` actions or call `async_reset` (with an Exchange: "
                "`ask`, `ask_reset`).",
                "recv",
            )
        done = self._wait(count, deadline=deadline)
        if not done and (least is None or ledger.num_ready < min(least, 1)):
            raise multiprocessing.TimeoutError(
                f"The call to `recv` has timed out: {ledger.num_ready} of {count} envs are ready."
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
            Exception: As :meth:`take`, except TimeoutError.
        """
        deadline = _deadline(timeout)
        ledger = self._discard_abandoned(deadline)
        self._wait(min(count, ledger.num_in_flight), deadline=deadline)
        ready: int = ledger.num_ready
        return ready + len(ledger.caller_failures)

    @exclusive
    def first_ready(self, groups: Sequence[Envs]) -> int:
        """Waits until all envs of one of these groups have answered; returns the group's index.

        Raises:
            Exception: As :meth:`take`.
        """
        ledger = self._discard_abandoned()
        while True:
            missing = [ledger.num_missing(group) for group in groups]
            if 0 in missing:
                return missing.index(0)
            if ledger.caller_failures:  # then a wait for a number of envs would end at once
                self._wait(envs=groups[missing.index(min(missing))])
            else:
                self._wait(ledger.num_ready + min(missing))

    def discard(self, timeout: float | None = None) -> bool:
        """Waits for all envs in flight, and discards their answers.

        Their next answers report the faults that the discarded ones would have reported. If the
        time is up, the next call waits for the rest and discards it.

        Args:
            timeout: Seconds to wait. 0: it does not wait, and may be called from anywhere, even by
                a signal's handler. None: as long as it takes.

        Returns:
            Whether no env is in flight any more.

        Raises:
            Exception: As :meth:`take`.
        """
        if timeout != 0.0:
            return self._discard_within(timeout)
        if self.num_in_flight:
            self.guard.abandoned = True
        return not self.num_in_flight

    @exclusive
    def _discard_within(self, timeout: float | None) -> bool:
        ledger = self._ledger
        if ledger is None:
            return True
        if ledger.num_in_flight:
            self.guard.abandoned = True
        return self._discard(ledger, _deadline(timeout))

    def _discard(self, ledger: Ledger, deadline: float | None = None) -> bool:
        if not self._wait(deadline=deadline):
            return False
        ledger.discard()
        self.guard.abandoned = False
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
            arrays: Whether to return more than infos.
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
            ledger, _ = self._require_open()
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
            with self._close_on_crash():
                self._recovery.recycle(None)
        if last:
            self._frames.copy_back_from_rollout()

    @round_trip
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
        self._check_pending("reset_async", alone=True)
        self._ask_reset(envs, seeds, options, together=True)
        return self._take_reset(gather)

    @round_trip
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
        self._ask_command("call", (name, args, dict(kwargs or {})), envs, deadline)
        return self._take_results(envs, deadline)

    @round_trip
    def set_attr(self, name: str, values: Mapping[int, Any]) -> None:
        """Sets an attribute of envs; ``values`` has one for each env index.

        Raises:
            Exception: As :meth:`call`.
        """
        envs = list(values)
        self._ask_command("set_attr", (name, dict(values)), envs)
        self._take_results(envs)

    @round_trip
    def leave(self, envs: npt.ArrayLike, timeout: float | None = None) -> None:
        """Calls ``close`` of some envs, which may not be asked again.

        If an env takes longer, its worker is ended, and the worker's other envs are restarted.

        Args:
            envs: Which, int ``(n,)``, none of them in flight.
            timeout: Seconds to wait. None: as long as it takes.

        Raises:
            Exception: As :meth:`call`.
        """
        deadline = _deadline(timeout)
        ledger, workers = self._require_open()
        indices = self._env_indices(envs).tolist()
        self._ask_command("call", ("close", (), {}), envs, deadline)
        ledger.closed_envs.update(indices)
        try:
            self._take_results(envs, deadline)
        except multiprocessing.TimeoutError:  # no later call may wait for these
            for index, worker_envs in enumerate(workers.ranges):
                if workers.is_inline(index):  # the caller has closed its own envs already
                    continue
                if ledger.closed_envs.issuperset(worker_envs):
                    workers.end(index)
                    ledger.retire(index)
                elif not set(indices).isdisjoint(worker_envs):
                    with self._close_on_crash():
                        self._recovery.restart(worker_envs)
            self.guard.abandoned = True

    def _take_results(
        self, envs: npt.ArrayLike | None = None, deadline: float | None = None
    ) -> list[Any]:
        """Waits for a command; returns one result for each of its envs, in the given order."""
        ledger, workers = self._require_open()
        order = self._env_indices(envs)
        self._wait_for_answers(order, deadline)
        _, _, rest = ledger.take(order, arrays=False)
        _, failures, results, unanswered = rest or ({}, [], {}, [])
        raise_failures(failures)
        if unanswered:
            raise WorkerCrashError(
                f"The worker of envs {unanswered} died in {workers.last_command!r}, and was "
                "restarted: there is no result. The vector env can still be used; the next step of "
                "these envs truncates their episodes."
            )
        return [results[env].open() for env in order.tolist()]

    # ---- calls in two parts ------------------------------------------------------------------

    @property
    def pending(self) -> Any:
        """The call that was begun and not finished, or the current loan; else None."""
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

    @round_trip
    def begin(self, pending: Any, *arguments: Any) -> None:
        """Asks all envs, for :meth:`finish` to take their answers.

        It waits only for answers to an abandoned call, and for workers that are being replaced.

        Args:
            pending: The call to begin: its ``value`` is "step", "reset" or "call".
            *arguments: For a step: actions. For a reset: envs, seeds and options. For a call: a
                ``(name, args, kwargs)``, and envs.

        Raises:
            AlreadyPendingCallError: Another call is under way, or its results are to be taken.
            Exception: As :meth:`ask`, :meth:`ask_reset` and :meth:`call`.
        """
        self._check_pending(f"{pending.value}_async", alone=True)
        if pending.value == "step":
            self._prepare(None)[0].step(None, arguments[0])
        elif pending.value == "reset":
            self._ask_reset(*arguments, together=True)
        else:
            payload, self._pending_envs = arguments
            self._ask_command("call", payload, self._pending_envs)
        self.guard.set_pending(pending)

    @round_trip
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
        if timeout is not None and not self._wait(deadline=_deadline(timeout)):
            raise multiprocessing.TimeoutError(
                f"The call to `{operation}_wait` has timed out after {timeout} second(s)."
            )
        if operation == "call":
            return self._take_results(self._pending_envs)
        if operation == "reset":
            return self._take_reset(gather)
        results = self._take_all(gather)
        self.end_step(None, last=False)
        return results

    def drop(self, pending: Any) -> None:
        """Abandons the call that :meth:`begin` has begun, if it is still pending."""
        if self.guard.claim(pending):
            self.guard.abandoned = True

    def lend(
        self, name: str, *, in_flight: bool = False, keeps: bool = False
    ) -> contextlib.AbstractContextManager[Exchange]:
        """Lends the exchange to code that asks envs in its own order, in a ``with`` block.

        Until the block ends, calls that ask and take at once are refused, unless they name the loan
        as ``within``. The loan lapses with its borrower. What is in flight at its end is abandoned.

        Args:
            name: The borrower's name, for messages.
            in_flight: Whether envs may be in flight. False: this waits for answers to an abandoned
                call, and discards them.
            keeps: Whether requests stay in flight at the loan's end, if no exception ends it.

        Raises:
            ClosedEnvironmentError: It is closed.
            AlreadyPendingCallError: Another call is under way, or its results are to be taken.
        """

        def begin() -> Exchange:
            self._check_pending(name, alone=not in_flight)
            if not in_flight:
                self._discard_abandoned()
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
        asked: bool = ledger is not None and ledger.is_in_flight(env)
        return asked

    def over(self, env: int) -> bool:
        """Whether an env's episode is over: its last step ended it, or its worker was restarted."""
        is_over: bool = self._require_open()[0].is_over(env)
        return is_over

    def restarts(self, env: int) -> int:
        """Number of restarts of an env's worker."""
        return self._recovery.restart_count(env)

    def moves(self) -> npt.NDArray[np.int64]:
        """Two counts for each env, ``(2, num_envs)``, which show whether other code has used it.

        The first changes when envs of its worker step, the second when the env is asked to reset.
        """
        ledger, _ = self._require_open()
        steps = [self._links.steps_of(worker) for worker in range(len(self.ranges))]
        return np.stack([np.repeat(steps, list(map(len, self.ranges))), ledger.resets])

    def stats(self) -> Stats:
        """Counts and times so far."""
        try:
            self._require_open()
        except ClosedEnvironmentError as error:
            add_note(error, "close() has freed the counters: call stats() before it.")
            raise
        core_times = [time_on_cores(process.pid) for process in self.processes]
        if self._settings.caller_steps:
            core_times.append((None, None))  # the caller has computed other things, too
        return Stats.of(self._links.insight(), core_times)

    # ---- faults ------------------------------------------------------------------------------

    @exclusive
    def restart(self, envs: npt.ArrayLike | None = None) -> None:
        """Restarts workers of envs, maybe none; see :meth:`shmvec.ShmVectorEnv.restart`."""
        self._require_open()
        if envs is not None and np.size(envs) == 0:
            return
        indices = existing_env_ids(envs, self.num_envs)
        with self._close_on_crash():
            self._recovery.restart(indices.tolist())
        self._wait(WORKERS_UP, indices)

    def recycle(self, envs: Collection[int] | None = None) -> Collection[int]:
        """Restarts workers that have made as many steps as ``recycle_after`` says.

        Args:
            envs: Only workers whose envs are all among these are restarted. None: any.

        Returns:
            The envs of due workers that were not restarted, because some of their envs are in
            flight, or not named.
        """
        return self._recycle(envs) if self.recycles else ()

    @exclusive
    def _recycle(self, envs: Collection[int] | None) -> Collection[int]:
        with self._close_on_crash():
            return self._recovery.recycle(envs)

    def forgive(self, env: int) -> None:
        """Forgets the faults of an env's worker: they no longer count towards ``max_restarts``."""
        self._recovery.clear_faults(env)

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
        """Returns answers of :meth:`take`, with the faults of workers added to the envs' infos.

        Raises:
            Exception: As :meth:`raise_failures`.
        """
        if answers.failures:
            self.raise_failures(answers.failures)
        if isinstance(answers.infos, list):  # else they were added as infos were gathered
            for env, report in answers.reports.items():
                answers.infos[answers.envs.tolist().index(env)].update(report.info)
        return answers

    # ---- rollouts ----------------------------------------------------------------------------

    @property
    def frames(self) -> Frames:
        """The register of where each env's results are, for rollouts."""
        self._require_open()
        return self._frames

    @round_trip
    def share(self, name: str, size: tuple[Any, ...] = (), descriptor: int | None = None) -> None:
        """Sends memory, or an eventfd, to workers and to those that replace them.

        Args:
            name: "rollout", "log", or "eventfd", to which workers write to wake this process.
            size: Its number of bytes, then the sizes of its content. For a log, these begin with an
                importable function that makes a worker's ``StepLog`` from the layout, the memory
                and the sizes. Empty: workers stop writing to it.
            descriptor: Its descriptor, if it has a size.

        Raises:
            Exception: As :meth:`take`.
        """
        ledger, workers, envs = self._prepare(None)
        ledger.check(envs)
        payloads = dict.fromkeys(range(len(workers.ranges)), workers.pack((name, size)))
        if descriptor is None:
            workers.shared_descriptors.pop(name, None)
        else:
            workers.shared_descriptors.put(name, size, descriptor)
        workers.last_command = name
        ledger.command(envs, payloads, [] if descriptor is None else [descriptor])
        # A worker that died instead of answering gets the memory at its restart.
        self._take_all(None, arrays=False)

    # ---- a log of steps ----------------------------------------------------------------------

    @property
    def log(self) -> Any:
        """The ``StepLog`` that records what envs are asked, or None."""
        ledger = self._ledger
        return None if ledger is None else ledger.log

    @log.setter
    def log(self, log: Any) -> None:
        ledger = self._ledger
        if ledger is not None:
            ledger.log = log

    def catch_up(self) -> None:
        """Makes the log accept what workers have logged for envs that are not in flight."""
        ledger = self._ledger
        if ledger is not None:
            ledger.catch_up()

    # ---- an event loop -----------------------------------------------------------------------

    def fileno(self) -> int:
        """The descriptor by which an event loop waits for envs: readable if :meth:`poll` is due.

        The first call sends a descriptor to the workers, and waits until they have it.

        Example:
            >>> import select
            >>> import gymnasium as gym
            >>> from shmvec.exchange import Exchange
            >>> exchange = Exchange([lambda: gym.make("CartPole-v1")] * 3, num_workers=1)
            >>> descriptor = exchange.fileno()
            >>> exchange.ask_reset([0, 2], seeds=[1, 2])
            >>> taken = []
            >>> while len(taken) < 2:
            ...     seconds = exchange.poll()
            ...     answers = exchange.take(count=3, least=0, timeout=0)
            ...     taken += answers.envs.tolist()
            ...     _ = select.select([descriptor], [], [], 0 if len(answers.envs) else seconds)
            >>> sorted(taken)
            [0, 2]
            >>> exchange.close()

        Raises:
            ValueError: An env is in flight, at the first call.
            Exception: As :meth:`take`.
        """
        self.check_open()
        if self._wakes is None:
            wakes = WakeEvents()
            self.share("eventfd", (8,), wakes.eventfd.number)
            self._wakes = wakes
        return self._wakes.fileno()

    @exclusive
    def poll(self) -> float | None:
        """Handles what has happened, without waiting; :meth:`take` returns the answers.

        The descriptor of :meth:`fileno` becomes readable at the next answer, message or death.

        Returns:
            Seconds after which to call it again, even if the descriptor is not readable until
            then: 0 if an env has answered meanwhile. None: there is no such time.

        Raises:
            RuntimeError: ``fileno`` was not called before.
            EnvTimeoutError: An env takes longer than its time limit. It is raised again after as
                long, if the env has not answered; other envs go on: call this again.
            Exception: As :meth:`take`.
        """
        ledger, workers = self._require_open()
        wakes = self._wakes
        if wakes is None:
            raise RuntimeError("poll() serves the descriptor of fileno(): call fileno() first")
        event = ledger.poll(wakes.clear())
        while event not in (DONE, TIME_UP):
            try:
                self.handle(event)
            except EnvTimeoutError:
                self._links.restart_limit()
                raise
            event = ledger.wait(0, None, 0.0)
        wakes.watch(workers.processes, workers.channels)
        seconds: float | None = ledger.arm()
        return seconds

    # ---- waiting -----------------------------------------------------------------------------

    def _wait(
        self, count: int = -1, envs: Envs | None = None, deadline: float | None = None
    ) -> bool:
        """Waits as ``Ledger.wait`` does, and handles faults; returns False if the time is up."""
        ledger = self._ledger
        if ledger is None:
            ledger, _ = self._require_open()
        while True:
            event = ledger.wait(count, envs, deadline)
            if event == DONE:
                return True
            if event == TIME_UP:
                return False
            self.handle(event)

    def handle(self, event: int) -> None:
        """Handles an event of a wait as the policy says; a crash that is raised closes this."""
        with self._close_on_crash():
            self._recovery.handle(event)

    def _wait_for_answers(self, envs: Envs | None, deadline: float | None) -> None:
        """Waits until envs have answered, or all; raises TimeoutError if the time is up."""
        if not self._wait(envs=envs, deadline=deadline):
            raise multiprocessing.TimeoutError("timed out: not all envs have answered")

    @contextlib.contextmanager
    def _close_on_crash(self) -> Iterator[None]:
        try:
            yield
        except WorkerCrashError as error:
            self._crash_summary = error.summary
            self._kill()
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
            wait: False: the envs are only asked to close; call it again, to wait for them.

        Raises:
            Exception: What an env's ``close`` raises, after everything else is closed.
        """
        workers, ledger = self._workers, self._ledger
        if workers is None or (self.closed and workers.ended):  # an interrupted close() is resumed
            return
        remind = None
        workers.dismiss()  # else a worker that is being started or replaced would come up later
        if ledger is not None and not terminate:
            remind = ledger.links.remind
            ledger.links.closed = True  # first, since it ends a wait of another thread
            try:
                ledger.links.ask_to_close()
            except RuntimeError:
                terminate = True  # the request ring is full: the workers are stuck
        if not wait:
            return
        self.catch_up()
        self._mark_closed()
        failures = workers.stop(0.0 if terminate else timeout, remind)
        if workers.ended:  # not if Ctrl-C has interrupted that, or another thread is ending them
            self._finalizer.cancel()
        raise_failures(failures)

    def _kill(self) -> None:
        self._mark_closed()
        self._finalizer()

    def _mark_closed(self) -> None:
        """Closes the exchange, and frees its memory; arrays that the user holds stay valid."""
        self.closed = True
        ledger = self._ledger
        if ledger is not None:
            ledger.links.closed = True
        self._ledger = self._wakes = None
        freed: Any = _Freed()
        self._links = self._frames = self._recovery = self.tracing = freed

    def _disown(self) -> None:
        """Forgets the workers, in a fork of the process that owns them."""
        self.guard.disown()
        self._mark_closed()
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
            f"unclosed {self._name}, made at {self._creation_site}: call its close()",
            ResourceWarning,
            source=self,
            stacklevel=3,
        )

    def _require_open(self) -> tuple[Ledger, Supervisor]:
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
                    f"This {self._name} belongs to process {self._owner}, and this process is a "
                    "fork of it: workers do not answer forks. Make one in each process."
                )
            message = f"Trying to operate on `{self._name}`, after a call to `close()`."
            if self._crash_summary:
                message += (
                    f" A crash has closed it: {self._crash_summary}. Make another one, with "
                    "faults=FaultPolicy(on_crash='restart') if workers are to be restarted."
                )
            raise ClosedEnvironmentError(message)


class _Freed:
    """Replaces what close() has freed, so that another thread's call that uses it is refused."""

    def __getattr__(self, name: str) -> Any:
        raise ClosedEnvironmentError("The vector env was closed during this call.")


def _finalize(workers: Supervisor, reference: weakref.ref[Exchange]) -> None:
    """Ends the workers; at exit, code that still has the exchange finds it closed."""
    exchange = reference()
    if exchange is not None:
        exchange._mark_closed()
    workers.stop(0.0)


@dataclass(slots=True)
class Answers:
    """What envs have answered to a step or a reset.

    Attributes:
        envs: Which envs, int ``(n,)``, in the order in which they were taken.
        observations: Their observations, batched as the observation space says.
        rewards: float64 ``(n,)``, or ``(n, k)`` as the reward space says; 0 for a reset.
        terminations: bool ``(n,)``.
        truncations: bool ``(n,)``.
        infos: One dict for each env, as the env returned it; or, gathered, a dict of arrays:
            Gymnasium's, or by the vector env's own ``_add_info``.
        reports: By env, the fault of its worker that its answer reports, if any.
        failures: What envs have raised; these envs have no row above.
        returned: By env, the result of an ``ask_call``, in a parcel whose ``open()`` returns it;
            the row of such an env above has no meaning.
        lost: Envs whose ``ask_call`` was lost with their worker; they have no row either.
    """

    envs: Envs
    observations: Any = None
    rewards: Any = None
    terminations: Any = None
    truncations: Any = None
    infos: Any = field(default_factory=list)
    reports: dict[int, Report] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    returned: dict[int, Any] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)

    def by_env(self, space: Any) -> Iterator[tuple[int, Any, Any, bool, bool, Any]]:
        """Each env with its observation, reward, termination, truncation and info.

        Args:
            space: Observation space of one env.
        """
        for row, env in enumerate(self.envs.tolist()):
            ends = bool(self.terminations[row]), bool(self.truncations[row])
            observation, reward = one_of(space, self.observations, row), self.rewards[row]
            if self.rewards.ndim == 1:
                reward = float(reward)
            yield env, observation, reward, *ends, self.infos[row]


# Those of this process: a fork of it must not touch their workers.
_open_exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()


def _disown_all() -> None:
    for exchange in list(_open_exchanges):
        exchange._disown()
    _open_exchanges.clear()


os.register_at_fork(after_in_child=_disown_all)


def _deadline(timeout: float | None) -> float | None:
    """The monotonic time at which a timeout that begins now ends."""
    return None if timeout is None else time.monotonic() + timeout


def _call_site() -> str:
    """The file and line of the user's code that led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("shmvec", "gymnasium")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

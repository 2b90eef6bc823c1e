"""Handles what ends a wait: takes messages, and does what the policy says about faults.

Recovery acts on the ledger, which holds for each env what was lost and what its next answer must
report. A worker that is *down* is being replaced. Nothing here waits for a replacement: each slice
of a wait takes the next steps that can be taken. Each step is idempotent and finds out from
processes and ledger what is left to do, so that the next call continues one that Ctrl-C has
interrupted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from shmvec._core import DEAD, MESSAGE, OVERDUE, RAISED, Ledger
from shmvec._processes.commands import UnreadableError, read_late
from shmvec._processes.control import Resets
from shmvec._processes.supervisor import Supervisor
from shmvec.faults import (
    EnvTimeoutError,
    Failure,
    Fault,
    FaultPolicy,
    TooManyFaultsError,
    WorkerCrashError,
    restart_seed,
    stack_section,
    stderr_before,
    stderr_section,
)

__all__ = ["Recovery"]

log = logging.getLogger("shmvec")

_INTERRUPT_TIMEOUT_S = 1.0  # for an env to react to an interruption
_MAX_BACKOFF_S = 30.0
_CLOSE_TIMEOUT_S = 5.0  # for the envs to close of a worker that is replaced without a fault
# If more time has passed between two looks at a replacement, nobody has waited for it.
_MAX_LOOK_INTERVAL_S = 0.1
_EARLY_RECYCLE_FRACTION = 0.75  # of its steps: then it is recycled when its episodes are over

# The reason why a worker is replaced: an error, or a text that is logged.
Cause = BaseException | Failure | str


@dataclass
class _Replacement:
    """The replacement of a worker that is down.

    Attributes:
        fault: What the next answers of the worker's envs report.
        due_at: When it is to be started.
        remaining_s: Seconds until it must be up. Only time counts in which a call waits for it.
    """

    fault: Fault
    due_at: float
    remaining_s: float = math.inf


class Recovery:
    """Carries out a policy for one vector env."""

    def __init__(
        self,
        policy: FaultPolicy,
        recycle_after: int | None,
        ledger: Ledger,
        workers: Supervisor,
        count: Callable[..., None],
    ) -> None:
        """Takes the policy, and the objects on which it acts.

        Args:
            policy: The action for each kind of fault.
            recycle_after: Steps after which a worker is replaced.
            ledger: The state of each env.
            workers: The workers.
            count: Called for faults, with a name of ``FaultCounts`` and their number.
        """
        self.policy = policy
        self._recycle_after = recycle_after
        self._ledger = ledger
        self._workers = workers
        self._count = count
        self._worker_by_env = [w for w, envs in enumerate(workers.ranges) for _ in envs]
        self._restart_counts = [0] * len(workers.ranges)
        self._recent_faults: list[deque[Fault]] = [deque() for _ in workers.ranges]
        self._replacements: dict[int, _Replacement] = ledger.links.down
        self._down_since = self._last_look = 0.0
        self._interrupts: dict[int, tuple[int, float]] = {}  # worker: (call began, deadline)
        self.on_fault: Callable[[Fault], object] | None = None  # called with each fault

    # ---- questions ---------------------------------------------------------------------------

    def restart_count(self, env: int) -> int:
        """How often an env's worker has been restarted."""
        return self._restart_counts[self._worker_by_env[env]]

    def clear_faults(self, env: int) -> None:
        """Forgets the faults of an env's worker, as if they lay outside the window."""
        self._recent_faults[self._worker_by_env[env]].clear()

    # ---- events ------------------------------------------------------------------------------

    def handle(self, event: int) -> None:
        """Does what an event requires before the wait that it has ended can go on.

        Raises:
            EnvTimeoutError: The policy raises timeouts.
            WorkerCrashError: The policy does not restart a worker that died, or no longer does.
            ClosedEnvironmentError: The vector env was closed meanwhile.
        """
        links = self._ledger.links
        self._workers.check_open()
        if event == MESSAGE:
            for worker in self._ledger.incomplete_workers:
                self._receive_messages(worker)
        elif event == RAISED:
            self._handle_failures()
        elif event == DEAD:
            self._handle_deaths([each for each in links.dead if each not in self._replacements])
        elif event == OVERDUE and self._worker_by_env[links.overdue.env] not in self._replacements:
            self._handle_timeout(links.overdue)
        self._continue_replacements()

    def _receive_messages(self, worker: int) -> None:
        """Takes those messages of a worker that have come and that its answers need."""
        ledger, workers = self._ledger, self._workers
        while worker in ledger.incomplete_workers:
            # A message stays in the channel until the ledger has it, so that an interrupted receive
            # can be retried.
            channel, sequence = workers.channels[worker], ledger.sequence_awaited(worker)
            message = channel.find(sequence)
            if message is None:
                return
            try:
                late = read_late(workers, worker, message.content)
            except UnreadableError as error:
                channel.fail(f"what came through it cannot be read ({error})")
                return
            except Exception:
                self._workers.check_open()  # a signal's handler may have closed the vector env
                raise
            ledger.deliver(worker, late.messages, late.failures, late.results)
            channel.take(sequence)

    # ---- faults ------------------------------------------------------------------------------

    def _handle_deaths(self, workers: list[int]) -> None:
        if not workers:  # an earlier call has handled the death and was interrupted
            return
        error = self._workers.crash_error(workers)
        if self.policy.on_crash != "restart":
            raise error
        self._count("crashes", len(workers))
        self._request_replacements(workers, error)

    def _handle_timeout(self, overdue: Any) -> None:
        worker = self._worker_by_env[overdue.env]
        error = EnvTimeoutError(overdue.env, overdue.operation, overdue.limit)
        if self.policy.on_timeout == "reset":
            began, until = self._interrupts.get(worker, (None, 0.0))
            if began != overdue.began:
                stack = stack_section(self._workers.stack(worker))
                log.warning("%s; it is interrupted%s", error.summary, stack)
                self._interrupts[worker] = overdue.began, time.monotonic() + _INTERRUPT_TIMEOUT_S
                self._workers.interrupt(worker)
                return
            if time.monotonic() < until:
                return
        self._request_replacements([worker], self._record_timeout(worker, error), error.env)

    def _record_timeout(self, worker: int, error: EnvTimeoutError) -> EnvTimeoutError:
        """Counts a timeout, and adds where the worker is; raises it if the policy says so."""
        error.add_stack_and_stderr(self._workers.stack(worker), self._workers.stderr_tail(worker))
        if self.policy.on_timeout == "raise":
            raise error
        self._count("timeouts")
        return error

    def _handle_failures(self) -> None:
        while self._ledger.pending_failures:
            failure = self._ledger.pending_failures[0]
            action = self._choose_action(failure)
            if action == "raise":
                self._ledger.leave_to_caller(failure)
                continue
            is_timeout = failure.type == EnvTimeoutError.__name__
            self._count("timeouts" if is_timeout else "errors")
            if failure.worker in self._replacements or not self._ledger.has_failed(failure.env):
                self._ledger.remove_failure(failure)  # the replacement does the rest
            elif action == "restart":
                self._request_replacements([failure.worker], failure, failure.env)
                self._ledger.remove_failure(failure)
            else:
                fault = self._record_fault(failure, "reset", failure.worker, failure.env)
                self._ledger.answer_failed(failure, fault)

    def _choose_action(self, failure: Failure) -> str:
        if failure.operation not in ("step", "reset", "info"):
            return "raise"
        if self._is_interrupt(failure):
            return "raise"
        is_timeout = failure.type == EnvTimeoutError.__name__
        if is_timeout and self.policy.on_timeout != "raise":
            return "reset"
        return self.policy.on_error

    def _is_interrupt(self, failure: Failure) -> bool:
        """Whether Ctrl-C has interrupted an env of the caller's process."""
        return self._workers.is_inline(failure.worker) and failure.type in (
            "KeyboardInterrupt",
            "SystemExit",
        )

    # ---- restarting --------------------------------------------------------------------------

    def restart(self, envs: Iterable[int]) -> None:
        """Begins to restart the workers of envs, as the user has asked."""
        workers = sorted({self._worker_by_env[env] for env in envs}.difference(self._replacements))
        self._request_replacements(workers, "asked for by restart()")
        self._continue_replacements()

    def recycle(self, envs: Collection[int] | None) -> list[int]:
        """Begins to restart workers that have made their steps and own only these envs.

        In the last quarter of its steps, a worker is restarted as soon as the episodes of all its
        envs are over. The first restarts of the workers are spread over time, and so all later ones
        are, too.

        Args:
            envs: The envs whose workers may be restarted; None: all.

        Returns:
            The envs of workers that have made their steps and were not restarted.
        """
        links, postponed = self._ledger.links, list[int]()
        for worker, worker_envs in enumerate(self._workers.ranges):
            steps, limit = links.steps_of(worker), self._step_limit(worker)
            if steps < _EARLY_RECYCLE_FRACTION * limit:
                continue
            if steps < limit and not all(map(self._ledger.is_over, worker_envs)):
                continue
            if links.is_idle(worker) and (envs is None or set(envs).issuperset(worker_envs)):
                self._request_replacements([worker], f"recycled after {steps} steps")
            else:
                postponed += worker_envs
        self._continue_replacements()
        return postponed

    def _step_limit(self, worker: int) -> float:
        if self._recycle_after is None:
            return math.inf
        most = self._recycle_after
        if self._restart_counts[worker] == 0:
            most = math.ceil(most * (worker + 1) / len(self._workers.ranges))
        return most * len(self._workers.ranges[worker])

    def _request_replacements(
        self, workers: Sequence[int], cause: Cause, env: int | None = None
    ) -> None:
        is_logged = False
        if isinstance(cause, WorkerCrashError) and len(workers) > 1:
            is_logged = True  # one line, because a line a worker would bury other messages
            log.warning("%s: %s; restart", type(cause).__name__, cause.summary)
        for worker in workers:
            self._interrupts.pop(worker, None)
            first = self._workers.ranges[worker].start if env is None else env
            self._request_replacement(worker, cause, first, is_logged=is_logged)

    def _request_replacement(
        self, worker: int, cause: Cause, env: int, *, is_logged: bool = False
    ) -> None:
        """Has a worker replaced after the backoff, which doubles with each recent fault."""
        fault = self._record_fault(cause, "restart", worker, env, is_logged=is_logged)
        before, wait_s = len(self._recent_faults[worker]) - 1, 0.0
        if before > 0 and self.policy.backoff_s > 0:
            wait_s = min(self.policy.backoff_s * 2 ** (before - 1), _MAX_BACKOFF_S)
        now = time.monotonic()
        if not self._replacements:
            self._down_since = now
        self._replacements[worker] = _Replacement(fault, now + wait_s)

    def _continue_replacements(self) -> None:
        if not self._replacements:
            return
        with self._workers.replacement_lock:
            self._workers.check_open()
            try:
                is_lost = self._ledger.is_lost
                self._end_workers([each for each in self._replacements if not is_lost(each)])
                for worker in list(self._replacements):
                    self._advance_replacement(worker)
            except Exception:
                self._workers.check_open()  # a signal's handler may have closed the vector env
                raise
        now = time.monotonic()
        self._last_look = now
        if not self._replacements:
            self._count("restart_ns", int(1e9 * (now - self._down_since)))

    def _end_workers(self, workers: list[int]) -> None:
        """Ends workers before their slots are reused, since a live worker could write there."""
        for worker in workers:
            self._receive_messages(worker)
        self._close_idle(workers)
        for worker in workers:
            self._workers.end(worker)
            self._ledger.lose(worker)

    def _close_idle(self, workers: Sequence[int]) -> None:
        """Closes the envs of workers that live and are idle."""
        links = self._ledger.links
        idle = [
            worker
            for worker in workers
            if links.is_idle(worker)
            and not self._workers.is_inline(worker)
            and self._workers.is_up(worker)
        ]
        if not idle:
            return
        with contextlib.suppress(RuntimeError):  # a request ring is damaged
            links.ask_to_close(idle)
        for failure in self._workers.wait_for_exits(idle, _CLOSE_TIMEOUT_S, [], links.remind):
            log.warning("env %d, as it was closed to be restarted: %s", failure.env, failure.text)

    def _advance_replacement(self, worker: int) -> None:
        """Takes the next step of a worker's replacement, if it can be taken."""
        workers, replacement, now = self._workers, self._replacements[worker], time.monotonic()
        cause: Cause | None = None
        if not workers.is_up(worker):  # it is up if a call was interrupted just before its end
            if not workers.is_starting(worker):
                if now < replacement.due_at:
                    return
                workers.end(worker)  # an exception may have left a replacement half started
                workers.begin_replacement(worker, self._restart_resets(worker))
                if self.policy.reset_timeout is not None:
                    builds_s = self.policy.reset_timeout * len(workers.ranges[worker])
                    replacement.remaining_s = 2 * workers.start_s + builds_s
            cause = workers.continue_start(worker)
        if workers.is_up(worker):
            self._ledger.revive(worker, replacement.fault)
            return
        if isinstance(cause, Failure) and self._is_interrupt(cause):
            raise cause.exception()
        first = workers.ranges[worker].start
        replacement.remaining_s -= min(now - self._last_look, _MAX_LOOK_INTERVAL_S)
        if cause is None and replacement.remaining_s < 0:
            error = EnvTimeoutError(first, "build", self.policy.reset_timeout or 0.0)
            cause = self._record_timeout(worker, error)
        if cause is not None:
            workers.end(worker)
            self._request_replacement(worker, cause, first)

    def _restart_resets(self, worker: int) -> Resets:
        """Seeds and options for the resets of a replacement's envs.

        A user's reset that was lost is repeated as it was. If it had no seed, and for any other
        reset, the seed is derived from the env's last one.
        """
        lost = set(self._ledger.lost_resets(worker))
        resets: list[tuple[int | None, Any] | None] = []
        for env in self._workers.ranges[worker]:
            seed, options = self._ledger.last_reset_arguments[env] if env in lost else (None, None)
            if seed is None:
                seed = restart_seed(self._ledger.last_seeds[env], self._restart_counts[worker])
            resets.append(None if seed is None and options is None else (seed, options))
        return Resets(resets, self._ledger.settings_of(worker))

    def _record_fault(
        self, cause: Cause, action: str, worker: int, env: int, *, is_logged: bool = False
    ) -> Fault:
        """Counts a fault, and logs it unless that was done; raises if there were too many."""
        if action == "restart":
            self._restart_counts[worker] += 1
        if isinstance(cause, Failure):
            kind, env = cause.type, cause.env
            message = cause.summary.removeprefix(f"{kind}: ")
        elif isinstance(cause, str):
            kind, message = "Restart", cause
        else:
            kind, message = type(cause).__name__, getattr(cause, "summary", "") or str(cause)
            if isinstance(cause, WorkerCrashError):
                message = cause.each.get(worker, message)
        stderr = stderr_before(cause, worker)
        stack = details = ""
        if isinstance(cause, EnvTimeoutError):
            stack, details = cause.stack, stack_section(cause.stack)
        elif isinstance(cause, Failure):
            stack = cause.text
            details = "\n" + indent(cause.text.rstrip(), "    ")
        count = self._restart_counts[worker]
        fault = Fault(env, worker, kind, message, action, time.time(), count, stderr, stack)
        if self.on_fault is not None:
            self.on_fault(fault)
        self._count(f"{action}s")
        # A restart that the user or the policy has asked for is no reason to warn.
        level = logging.INFO if isinstance(cause, str) else logging.WARNING
        if not is_logged:
            line = "env %d of worker %d: %s: %s; %s%s"
            log.log(level, line, env, worker, kind, message, action, details)
        if isinstance(cause, str):
            return fault
        recent = self._recent_faults[worker]
        recent.append(fault)
        while recent[0].at < fault.at - self.policy.window_s:
            recent.popleft()
        if len(recent) > self.policy.max_restarts:
            self._raise_too_many_faults(worker, cause)
        return fault

    def _raise_too_many_faults(self, worker: int, cause: BaseException | Failure) -> None:
        recent = self._recent_faults[worker]
        lines = [
            f"  {time.strftime('%H:%M:%S', time.localtime(one.at))} env {one.env}: "
            f"{one.type}: {one.message} ({one.done})"
            for one in recent
        ]
        error = TooManyFaultsError(
            f"{len(recent)} faults of worker {worker} within {self.policy.window_s:g} s, and "
            f"max_restarts={self.policy.max_restarts}. The vector env is closed. They were:\n"
            + "\n".join(lines)
            + (stack_section(recent[-1].stack) if isinstance(cause, EnvTimeoutError) else "")
            + stderr_section({worker: recent[-1].stderr})
        )
        error.history = tuple(recent)
        error.workers = (worker,)
        error.envs = tuple(self._workers.ranges[worker])
        error.stderr = (recent[-1].stderr,)
        raise error from (cause.exception() if isinstance(cause, Failure) else cause)

"""Handles what ends a wait: takes messages, and does what the policy says about faults.

Recovery acts on the ledger, which holds for each env what was lost and what its next answer must
report. A worker that is *down* is being replaced. Nothing here waits for its replacement: that is
done as far as it goes each time that a wait looks around. Each step is idempotent, and learns from
processes and ledger what is left to do: the next call goes on where Ctrl-C has interrupted one.
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

from gymnasium.error import ClosedEnvironmentError

from shmvec._core import DEAD, MESSAGE, OVERDUE, RAISED, Ledger
from shmvec._processes.commands import Unreadable, read_late
from shmvec._processes.inline import Workers
from shmvec.faults import (
    EnvTimeoutError,
    Failure,
    Fault,
    FaultPolicy,
    TooManyFaultsError,
    WorkerCrashError,
    last_words,
    restart_seed,
    stack_text,
    stderr_text,
)

__all__ = ["Recovery"]

log = logging.getLogger("shmvec")

_HEED_S = 1.0  # for an env to react to an interruption
_BACKOFF_MOST_S = 30.0
_CLOSE_S = 5.0  # for the envs of a worker to close that is replaced though it is well
_SLICE_S = 0.1  # between two looks at a replacement; longer, nobody has waited
_LAST_PART = 0.75  # of its steps: after it a worker is recycled once its envs' episodes are over

# The reason why a worker is replaced: an error, or a text that is logged.
Cause = BaseException | Failure | str


@dataclass
class _Replacement:
    """Of a worker that is down.

    Attributes:
        fault: What the next answers of the worker's envs report.
        due: When it is to be started.
        left_s: Seconds until it must be up, of those in which it is waited for.
    """

    fault: Fault
    due: float
    left_s: float = math.inf


class Recovery:
    """Carries out a policy for one vector env."""

    def __init__(
        self,
        policy: FaultPolicy,
        recycle_after: int | None,
        ledger: Ledger,
        workers: Workers,
        counted: Callable[..., None],
    ) -> None:
        """Takes the policy, and the objects on which it acts.

        Args:
            policy: The action for each kind of fault.
            recycle_after: Steps after which a worker is replaced.
            ledger: The state of each env.
            workers: The workers.
            counted: Called for faults, with a name of ``FaultCounts`` and their number.
        """
        self.policy = policy
        self._recycle_after = recycle_after
        self._ledger = ledger
        self._workers = workers
        self._counted = counted
        self._worker_of = [w for w, envs in enumerate(workers.ranges) for _ in envs]
        self._restarts = [0] * len(workers.ranges)
        self._recent: list[deque[Fault]] = [deque() for _ in workers.ranges]
        self._down: dict[int, _Replacement] = ledger.links.down
        self._down_since = self._looked_at = 0.0
        self._interrupted: dict[int, tuple[int, float]] = {}  # worker: (call began, deadline)
        self.on_fault: Callable[[Fault], object] | None = None  # called with each fault

    # ---- questions ---------------------------------------------------------------------------

    def restarts_of(self, env: int) -> int:
        """How often an env's worker has been restarted."""
        return self._restarts[self._worker_of[env]]

    def forgive(self, env: int) -> None:
        """Forgets the faults of an env's worker, as if they lay outside the window."""
        self._recent[self._worker_of[env]].clear()

    # ---- events ------------------------------------------------------------------------------

    def handle(self, event: int) -> None:
        """Does what must be done before a wait goes on that has ended with this event.

        Raises:
            EnvTimeoutError: The policy raises timeouts.
            WorkerCrashError: The policy does not restart a worker that died, or not any more.
            ClosedEnvironmentError: The vector env was closed meanwhile.
        """
        links = self._ledger.links
        self._check_open()
        if event == MESSAGE:
            for worker in self._ledger.incomplete:
                self._receive(worker)
        elif event == RAISED:
            self._decide()
        elif event == DEAD:
            self._on_death([worker for worker in links.dead if worker not in self._down])
        elif event == OVERDUE and self._worker_of[links.overdue.env] not in self._down:
            self._on_timeout(links.overdue)
        self._go_on()

    def _receive(self, worker: int) -> None:
        """Takes the messages of a worker that have come and that its answers wait for."""
        ledger, workers = self._ledger, self._workers
        while worker in ledger.incomplete:
            # A message stays in the channel until the ledger has it: an interrupted receive is
            # retried.
            channel, sequence = workers.channels[worker], ledger.sequence_awaited(worker)
            message = channel.find(sequence)
            if message is None:
                return
            try:
                late = read_late(workers, worker, message.content)
            except Unreadable as error:
                channel.fail(f"what came through it cannot be read ({error})")
                return
            except Exception:
                self._check_open()  # a signal's handler may have closed the vector env
                raise
            ledger.deliver(worker, late.messages, late.failures, late.results)
            channel.take(sequence)

    # ---- faults ------------------------------------------------------------------------------

    def _on_death(self, workers: list[int]) -> None:
        if not workers:  # this was interrupted
            return
        error = self._workers.crash(workers)
        if self.policy.on_crash != "restart":
            raise error
        self._counted("crashes", len(workers))
        self._replace(dict.fromkeys(workers, error))

    def _on_timeout(self, overdue: Any) -> None:
        worker = self._worker_of[overdue.env]
        error = EnvTimeoutError(overdue.env, overdue.operation, overdue.limit)
        if self.policy.on_timeout == "reset":
            began, until = self._interrupted.get(worker, (None, 0.0))
            if began != overdue.began:
                stack = stack_text(self._workers.stack(worker))
                log.warning("%s; it is interrupted%s", error.summary, stack)
                self._interrupted[worker] = overdue.began, time.monotonic() + _HEED_S
                self._workers.interrupt(worker)
                return
            if time.monotonic() < until:
                return
        error.take_last_words(self._workers.stack(worker), self._workers.last_words(worker))
        if self.policy.on_timeout == "raise":
            raise error
        self._counted("timeouts")
        self._replace({worker: error}, error.env)

    def _decide(self) -> None:
        """Applies the policy to envs that have raised."""
        while self._ledger.failures:
            failure = self._ledger.failures[0]
            cure = self._cure(failure)
            if cure == "raise":
                self._ledger.give_up(failure)
                continue
            late = failure.type == EnvTimeoutError.__name__
            self._counted("timeouts" if late else "errors")
            if failure.worker in self._down or not self._ledger.has_failed(failure.env):
                self._ledger.settle_failure(failure)  # the replacement makes it good
            elif cure == "restart":
                self._replace({failure.worker: failure}, failure.env)
                self._ledger.settle_failure(failure)
            else:
                self._ledger.mend(failure, self._note(failure, "reset"))

    def _cure(self, failure: Failure) -> str:
        if failure.operation not in ("step", "reset", "info"):
            return "raise"
        if self._is_ours(failure):
            return "raise"
        late = failure.type == EnvTimeoutError.__name__ and self.policy.on_timeout != "raise"
        return "reset" if late else self.policy.on_error

    def _is_ours(self, failure: Failure) -> bool:
        """Whether a failure is not the env's own: without workers Ctrl-C interrupts its code."""
        return self._workers.is_here(failure.worker) and failure.type in (
            "KeyboardInterrupt",
            "SystemExit",
        )

    # ---- restarting --------------------------------------------------------------------------

    def restart(self, envs: Iterable[int]) -> None:
        """Begins to restart the workers of envs, as the user has asked."""
        workers = sorted({self._worker_of[env] for env in envs}.difference(self._down))
        self._replace(dict.fromkeys(workers, "asked for by restart()"))
        self._go_on()

    def recycle(self, envs: Collection[int] | None) -> list[int]:
        """Begins to restart workers that have made their steps, and own only these envs.

        A worker is restarted earlier, in the last quarter of its steps, where the episodes of all
        its envs are over. The first restarts of workers are spread over time, and so are those that
        follow.

        Returns:
            The envs of such workers that were not restarted.
        """
        links, left = self._ledger.links, list[int]()
        for worker, owned in enumerate(self._workers.ranges):
            steps, most = links.steps_of(worker), self._most_steps(worker)
            if steps < _LAST_PART * most:
                continue
            if steps < most and not all(map(self._ledger.is_over, owned)):
                continue
            if links.is_idle(worker) and (envs is None or set(envs).issuperset(owned)):
                self._replace({worker: f"recycled after {steps} steps"})
            else:
                left += owned
        self._go_on()
        return left

    def _most_steps(self, worker: int) -> float:
        """The number of steps after which a worker is restarted."""
        if self._recycle_after is None:
            return math.inf
        most = self._recycle_after
        if self._restarts[worker] == 0:
            most = math.ceil(most * (worker + 1) / len(self._workers.ranges))
        return most * len(self._workers.ranges[worker])

    def _replace(self, causes: dict[int, Any], env: int | None = None) -> None:
        """Notes that workers are to be replaced."""
        together = len(causes) > 1 and all(
            isinstance(cause, WorkerCrashError) for cause in causes.values()
        )
        if together:  # one line: a line a worker would bury what else is said
            crash = next(iter(causes.values()))
            log.warning("%s: %s; restart", type(crash).__name__, crash.summary)
        for worker, cause in causes.items():
            self._interrupted.pop(worker, None)
            first = self._workers.ranges[worker].start if env is None else env
            fault = self._note_restart(cause, worker, first, logged=together)
            if not self._down:
                self._down_since = time.monotonic()
            self._down[worker] = self._replacement(worker, fault)

    def _replacement(self, worker: int, fault: Fault) -> _Replacement:
        """A replacement that is due after a while, twice as long for each that follows another."""
        before, wait_s = len(self._recent[worker]) - 1, 0.0
        if before > 0 and self.policy.backoff_s > 0:
            wait_s = min(self.policy.backoff_s * 2 ** (before - 1), _BACKOFF_MOST_S)
        return _Replacement(fault, time.monotonic() + wait_s)

    def _go_on(self) -> None:
        """Goes on with the replacements of the workers that are down, and waits for none."""
        if not self._down:
            return
        with self._workers.changing:
            self._check_open()
            self._lose([worker for worker in self._down if not self._ledger.is_lost(worker)])
            for worker in list(self._down):
                self._start(worker)
        now = time.monotonic()
        self._looked_at = now
        if not self._down:
            self._counted("restart_ns", int(1e9 * (now - self._down_since)))

    def _check_open(self) -> None:
        if self._workers.stopped:
            raise ClosedEnvironmentError("The vector env was closed during this call.")

    def _lose(self, workers: list[int]) -> None:
        """Confirms that workers are dead before their slots are reused: a live one could write."""
        for worker in workers:
            self._receive(worker)
        self._close_idle(workers)
        for worker in workers:
            self._workers.end(worker)
            self._ledger.lose(worker)

    def _close_idle(self, workers: Sequence[int]) -> None:
        """Has the envs of workers close that live and have nothing else to do."""
        links = self._ledger.links
        idle = [
            worker
            for worker in workers
            if links.is_idle(worker)
            and not self._workers.is_here(worker)
            and self._workers.is_up(worker)
        ]
        if not idle:
            return
        with contextlib.suppress(RuntimeError):  # a request ring is damaged
            links.ask_to_close(idle)
        for failure in self._workers.wait_for_ends(idle, _CLOSE_S, [], links.remind):
            log.warning("env %d, as it was closed to be restarted: %s", failure.env, failure.text)

    def _start(self, worker: int) -> None:
        """Starts a worker in place of one that is lost, or goes on with that."""
        workers, replacement, now = self._workers, self._down[worker], time.monotonic()
        cause: Cause | None = None
        if not workers.is_up(worker):  # else only this was interrupted
            if not workers.is_starting(worker):
                if now < replacement.due:
                    return
                workers.end(worker)  # an exception may have left its successor half started
                workers.begin(worker, self._resets_of(worker))
                if self.policy.reset_timeout is not None:
                    builds_s = self.policy.reset_timeout * len(workers.ranges[worker])
                    replacement.left_s = 2 * workers.start_s + builds_s
            cause = workers.go_on(worker)
        if workers.is_up(worker):
            self._ledger.revive(worker, replacement.fault)
            return
        if isinstance(cause, Failure) and self._is_ours(cause):
            raise cause.exception()
        first = workers.ranges[worker].start
        replacement.left_s -= min(now - self._looked_at, _SLICE_S)
        if cause is None and replacement.left_s < 0:
            cause = self._too_late(worker, first)
        if cause is not None:
            fault = self._note_restart(cause, worker, first)
            workers.end(worker)
            self._down[worker] = self._replacement(worker, fault)

    def _too_late(self, worker: int, env: int) -> EnvTimeoutError:
        """The error for a worker that does not come up in time, unless it is to be raised."""
        error = EnvTimeoutError(env, "build", self.policy.reset_timeout or 0.0)
        error.take_last_words(self._workers.stack(worker), self._workers.last_words(worker))
        if self.policy.on_timeout == "raise":
            raise error
        self._counted("timeouts")
        return error

    def _resets_of(self, worker: int) -> list[tuple[int | None, Any] | None]:
        """Seed and options for the first reset of each env of a worker.

        A user's reset that was lost is repeated as it was. Where it had no seed, and for any other
        reset, the seed is derived from the last one that the env was given.
        """
        lost = set(self._ledger.lost_resets(worker))
        resets: list[tuple[int | None, Any] | None] = []
        for env in self._workers.ranges[worker]:
            seed, options = self._ledger.asked_with[env] if env in lost else (None, None)
            if seed is None:
                seed = restart_seed(self._ledger.last_seeds[env], self._restarts[worker])
            resets.append(None if seed is None and options is None else (seed, options))
        return resets

    def _note_restart(self, cause: Cause, worker: int, env: int, *, logged: bool = False) -> Fault:
        """Counts and logs a restart of a worker; raises if there were too many faults."""
        self._restarts[worker] += 1
        fault = self._note(cause, "restart", worker, env, logged=logged)
        self._counted("restarts")
        return fault

    def _note(
        self, cause: Cause, done: str, worker: int = -1, env: int = -1, *, logged: bool = False
    ) -> Fault:
        """Counts a fault, and logs it unless it was; raises if there were too many."""
        if isinstance(cause, Failure):
            kind, env = cause.type, cause.env
            worker = self._worker_of[env]
            why = cause.summary.removeprefix(f"{kind}: ")
        elif isinstance(cause, str):
            kind, why = "Restart", cause
        else:
            kind, why = type(cause).__name__, getattr(cause, "summary", "") or str(cause)
            if isinstance(cause, WorkerCrashError):
                why = cause.each.get(worker, why)
        words = last_words(cause, worker)
        stack = details = ""
        if isinstance(cause, EnvTimeoutError):
            stack, details = cause.stack, stack_text(cause.stack)
        elif isinstance(cause, Failure):
            stack = cause.text
            details = "\n" + indent(cause.text.rstrip(), "    ")
        count = self._restarts[worker]
        fault = Fault(env, worker, kind, why, done, time.time(), count, words, stack)
        if self.on_fault is not None:
            self.on_fault(fault)
        if done == "reset":
            self._counted("resets")
        # A restart that the user or the policy has asked for is no reason to warn.
        level = logging.INFO if isinstance(cause, str) else logging.WARNING
        if not logged:
            message = "env %d of worker %d: %s: %s; %s%s"
            log.log(level, message, env, worker, kind, why, done, details)
        if isinstance(cause, str):
            return fault
        recent = self._recent[worker]
        recent.append(fault)
        while recent[0].at < fault.at - self.policy.window_s:
            recent.popleft()
        if len(recent) > self.policy.max_restarts:
            self._give_up(worker, cause)
        return fault

    def _give_up(self, worker: int, cause: BaseException | Failure) -> None:
        recent = self._recent[worker]
        lines = [
            f"  {time.strftime('%H:%M:%S', time.localtime(one.at))} env {one.env}: "
            f"{one.type}: {one.message} ({one.done})"
            for one in recent
        ]
        error = TooManyFaultsError(
            f"{len(recent)} faults of worker {worker} within {self.policy.window_s:g} s, and "
            f"max_restarts={self.policy.max_restarts}. The vector env is closed. They were:\n"
            + "\n".join(lines)
            + (stack_text(recent[-1].stack) if isinstance(cause, EnvTimeoutError) else "")
            + stderr_text({worker: recent[-1].stderr})
        )
        error.history = tuple(recent)
        error.workers = (worker,)
        error.envs = tuple(self._workers.ranges[worker])
        error.stderr = (recent[-1].stderr,)
        raise error from (cause.exception() if isinstance(cause, Failure) else cause)

"""What is done about faults, as the policy says: workers restarted, envs reset, results marked.

A fault leaves an env in one of two states. If the results of its last request were lost, or are an
error, they are *truncated* now. If they had been delivered before, the env is *broken*: its next
step is not sent to it, and returns the truncation instead.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from shmvec._core.parent import ParentLoop
from shmvec._parent.arguments import AutoresetMode
from shmvec._parent.partial import PartialBatches
from shmvec._parent.supervisor import InlineWorker, Supervisor
from shmvec.faults import (
    EnvTimeoutError,
    Failure,
    Fault,
    FaultPolicy,
    TooManyFaultsError,
    WorkerCrashError,
    restart_seed,
)

__all__ = ["Recovery"]

log = logging.getLogger("shmvec")

_HEED_S = 1.0  # what an env gets to heed an interruption
_BACKOFF_MOST_S = 30.0


class Recovery:
    """Carries out a policy for one vector env."""

    def __init__(
        self,
        policy: FaultPolicy,
        recycle_after: int | None,
        mode: AutoresetMode,
        loop: ParentLoop,
        partial: PartialBatches,
        workers: Supervisor | InlineWorker,
        vector_env: VectorEnv[Any, Any, Any],
    ) -> None:
        """Takes the policy and what it works on."""
        self.policy = policy
        # What the next results of an env must tell: the fault, whether it truncates, and the last
        # observation if a reset overwrites it.
        self.told: dict[int, tuple[Fault, bool, list[Any] | None]] = {}
        self.later: dict[int, Fault] = {}  # what those after the next request must tell
        self.counts = dict.fromkeys(("crashes", "errors", "timeouts", "restarts", "resets"), 0)
        self._recycle_after = recycle_after
        self._mode = mode
        self._loop = loop
        self._partial = partial
        self._workers = workers
        self._vector_env = weakref.proxy(vector_env)
        num_envs = vector_env.num_envs
        self._worker_of = [w for w, envs in enumerate(workers.ranges) for _ in envs]
        self._asked: list[tuple[int | None, Any]] = [(None, None)] * num_envs  # seeds, options
        self._restarts = [0] * len(workers.ranges)
        self._recent: list[deque[Fault]] = [deque() for _ in workers.ranges]
        self._broken: dict[int, Fault] = {}
        self._interrupted: dict[int, tuple[int, float]] = {}  # worker: (what began when, until)
        partial.recovery = self

    # ---- what the vector env says ------------------------------------------------------------

    def resets(
        self,
        envs: npt.NDArray[np.intp],
        seeds: Sequence[int | None] | None,
        options: Sequence[Any] | None,
    ) -> None:
        """Envs are about to be reset, which ends what was wrong with them."""
        for env in envs.tolist():
            seed = None if seeds is None else seeds[env]
            seed = self._asked[env][0] if seed is None else seed
            self._asked[env] = seed, None if options is None else options[env]
            self._mend_broken(env)

    def _mend_broken(self, env: int) -> None:
        if self._broken.pop(env, None) is not None:
            self._loop.set_broken(env, False)

    def asked(self, envs: Iterable[int]) -> None:
        """Envs are about to be asked something: their results will tell what is to be told."""
        for env in envs:
            if env in self.later:
                self.told[env] = self.later.pop(env), False, None

    def tell_all(self, infos: dict[str, Any]) -> dict[str, Any]:
        """Adds to infos of a step or reset of all envs what is to be told besides."""
        for env in sorted(self.told):
            infos = self.tell(self._vector_env, infos, env, env)
        return infos

    # ---- faults ------------------------------------------------------------------------------

    def recover(self, error: WorkerCrashError | EnvTimeoutError) -> None:
        """Does what the policy says of a worker that died or an env that takes too long.

        Raises:
            WorkerCrashError: The policy does not restart it, or not again.
            EnvTimeoutError: The policy does nothing about it.
        """
        if isinstance(error, EnvTimeoutError):
            self._on_timeout(error)
            return
        if self.policy.on_crash != "restart" or not error.workers:
            raise error
        for worker in error.workers:
            self.counts["crashes"] += 1
            self._restart(worker, self._workers.ranges[worker].start, error)

    def _on_timeout(self, error: EnvTimeoutError) -> None:
        if self.policy.on_timeout == "raise":
            raise error
        worker = self._worker_of[error.env]
        if self.policy.on_timeout == "reset":
            began, until = self._interrupted.get(worker, (None, 0.0))
            if began != error.began:
                log.warning("%s; it is interrupted", error.summary)
                self._interrupted[worker] = error.began, time.monotonic() + _HEED_S
                self._workers.interrupt(worker)
                return
            if time.monotonic() < until:
                return
        self.counts["timeouts"] += 1
        self._restart(worker, error.env, error)

    def handles(self, failure: Failure) -> bool:
        """Whether the policy does something about what an env has raised."""
        return failure.operation in ("step", "reset", "info") and self._cure(failure) != "raise"

    def _cure(self, failure: Failure) -> str:
        late = failure.type == EnvTimeoutError.__name__ and self.policy.on_timeout != "raise"
        return "reset" if late else self.policy.on_error

    def mend(self, failures: Sequence[Failure]) -> None:
        """Does what the policy says of envs that have raised, and are out."""
        for failure in self._restart_for(failures):
            self._answer_or_reset(failure.env, self._note(failure, "reset"))

    def mend_all(self, failures: Sequence[Failure]) -> None:
        """The same for envs that have raised in lockstep: they become invalid."""
        for failure in failures:
            self._loop.invalidate(failure.env)
        for failure in self._restart_for(failures):
            self._break(failure.env, self._note(failure, "reset"))

    def _restart_for(self, failures: Sequence[Failure]) -> list[Failure]:
        """Restarts the workers for which the policy says so; returns the failures of others."""
        cures = {failure.env: self._cure(failure) for failure in failures}
        restarted: set[int] = set()
        for failure in failures:
            late = failure.type == EnvTimeoutError.__name__
            self.counts["timeouts" if late else "errors"] += 1
            if cures[failure.env] == "restart" and failure.worker not in restarted:
                restarted.add(failure.worker)
                self._restart(failure.worker, failure.env, failure)
        return [failure for failure in failures if failure.worker not in restarted]

    def _break(self, env: int, fault: Fault) -> None:
        """An env's next step, or the one that is invalid, will be answered by a truncation."""
        self.later.pop(env, None)
        self._broken[env] = fault
        self._loop.set_broken(env, True)

    # ---- restarting --------------------------------------------------------------------------

    def restart(self, envs: Iterable[int]) -> None:
        """Restarts the workers of envs, which the user has asked for."""
        for worker in sorted({self._worker_of[env] for env in envs}):
            self._restart(
                worker, self._workers.ranges[worker].start, None, "asked for by restart()"
            )

    def recycle(self) -> None:
        """Restarts workers that have made as many steps as they may."""
        if self._recycle_after is None:
            return
        for worker, envs in enumerate(self._workers.ranges):
            steps = self._loop.steps_of(worker)
            if steps >= self._recycle_after * len(envs) and self._loop.is_idle(worker):
                self._restart(worker, envs.start, None, f"recycled after {steps} steps")

    def _restart(
        self, worker: int, env: int, cause: BaseException | Failure | None, why: str = ""
    ) -> None:
        """Ends a worker, starts another one in its place, and marks what was lost."""
        # Dead before anything of its is touched: a late writer must not write into what comes next.
        self._workers.end(worker)
        self._interrupted.pop(worker, None)
        lost = dict(self._partial.forget(worker))
        self._loop.forget(worker)
        while True:
            self._restarts[worker] += 1
            fault = self._note(cause, "restart", worker, env, why)
            self.counts["restarts"] += 1
            self._wait_before(worker)
            try:
                failure = self._workers.restart(worker, self._resets_of(worker, lost))
            except WorkerCrashError as crash:
                cause, why = crash, ""
                continue
            if failure is None:
                break
            cause, why = failure, ""
        for each in self._workers.ranges[worker]:
            if each in lost:
                self._answer_or_reset(each, fault)
            elif (
                self._loop.is_invalid(each)  # of a call to all envs
                or self._mode is AutoresetMode.SAME_STEP
                or not self._loop.is_over(each)
            ):
                self._break(each, fault)
            else:  # it is to be reset anyway
                self.later[each] = fault

    def _resets_of(self, worker: int, lost: dict[int, bool]) -> list[tuple[int | None, Any] | None]:
        """Seed and options for the first reset of each env of a worker.

        A reset of the user's that was lost is repeated as it was.
        """
        resets: list[tuple[int | None, Any] | None] = []
        in_lockstep = self._loop.resetting
        for env in self._workers.ranges[worker]:
            seed, options = self._asked[env]
            by_user = env not in self.told or not self.told[env][1]
            if (lost.get(env) and by_user) or (in_lockstep and self._loop.is_invalid(env)):
                resets.append((seed, options))
            elif seed is not None:
                resets.append((restart_seed(seed, self._restarts[worker]), None))
            else:
                resets.append(None)
        return resets

    def _note(
        self,
        cause: BaseException | Failure | None,
        done: str,
        worker: int = -1,
        env: int = -1,
        why: str = "",
    ) -> Fault:
        """Counts and logs a fault; raises if there were too many."""
        kind = "Restart"
        if isinstance(cause, Failure):
            worker, env, kind = cause.worker, cause.env, cause.type
            why = cause.summary.removeprefix(f"{kind}: ")
        elif cause is not None:
            kind, why = type(cause).__name__, getattr(cause, "summary", "") or str(cause)
        restarts = self._restarts[worker]
        fault = Fault(env, worker, kind, why, done, time.time(), restarts)
        if done == "reset":
            self.counts["resets"] += 1
        log.warning("env %d of worker %d: %s: %s; %s", env, worker, kind, why, done)
        if cause is None:
            return fault
        recent = self._recent[worker]
        recent.append(fault)
        while recent[0].at < fault.at - self.policy.window_s:
            recent.popleft()
        if len(recent) > self.policy.max_restarts:
            lines = [
                f"  {time.strftime('%H:%M:%S', time.localtime(one.at))} env {one.env}: "
                f"{one.type}: {one.message} ({one.done})"
                for one in recent
            ]
            error = TooManyFaultsError(
                f"{len(recent)} faults of worker {worker} within {self.policy.window_s:g} s, and "
                f"max_restarts={self.policy.max_restarts}. The vector env is closed. They were:\n"
                + "\n".join(lines)
            )
            error.history = tuple(recent)
            error.workers = (worker,)
            error.envs = tuple(self._workers.ranges[worker])
            raise error from (cause.exception() if isinstance(cause, Failure) else cause)
        return fault

    def _wait_before(self, worker: int) -> None:
        """Waits longer and longer if restarts follow each other."""
        before = len(self._recent[worker]) - 1
        if before > 0 and self.policy.backoff_s > 0:
            time.sleep(min(self.policy.backoff_s * 2 ** (before - 1), _BACKOFF_MOST_S))

    # ---- results of single envs --------------------------------------------------------------

    def _answer_or_reset(self, env: int, fault: Fault) -> None:
        """Answers for an env that is out and will not; or has it reset first."""
        if self._partial.was_resetting(env):
            # It may be because of a fault that it is being reset.
            self.told[env] = fault, *self.told.get(env, (None, False, None))[1:]
            self._partial.again(env)
            return
        last = self._loop.truncate(env)
        if self._mode is AutoresetMode.SAME_STEP:
            self.told[env] = fault, True, [last]
            self._partial.again(env)
        else:
            self.told[env] = fault, True, None
            self._partial.answer(env)

    def is_broken(self, env: int) -> bool:
        """Whether an env's next step will be answered by a truncation."""
        return env in self._broken

    def answer_for_broken(self) -> None:
        """Answers for envs that were asked to step, but are broken."""
        for env in self._partial.truncated():
            self._loop.set_broken(env, False)
            self._answer_or_reset(env, self._broken.pop(env))

    def tell(
        self, batch: VectorEnv[Any, Any, Any], infos: dict[str, Any], env: int, row: int
    ) -> dict[str, Any]:
        """Adds to infos what is to be told of an env, whose results are those of this batch."""
        if env not in self.told:
            return infos
        fault, _, finals = self.told.pop(env)
        if finals is not None:  # its last observation, which the reset has overwritten
            self._loop.mark_truncated(env)
        return batch._add_info(infos, _info(fault, finals), row)

    def carry_over(self) -> None:
        """Results were dropped: what they told is told by the next ones."""
        for env, (fault, truncates, _) in list(self.told.items()):
            if truncates:
                del self.told[env]
                self._break(env, fault)

    # ---- results of all envs -----------------------------------------------------------------

    def deliver(self, infos: dict[str, Any]) -> dict[str, Any]:
        """Gives envs without valid results of a step or reset some, and says so in the infos."""
        loop, partial = self._loop, self._partial
        envs = loop.take_invalid()
        resetting, away = loop.resetting, loop.away
        finals: dict[int, Any] = {}
        faults: dict[int, Fault] = {}
        for env in envs.tolist():
            faults[env] = self._broken[env]
            self._mend_broken(env)
            self.told[env] = faults[env], not resetting, None
            if not resetting:
                finals[env] = [loop.truncate(env)]
        if resetting or self._mode is AutoresetMode.SAME_STEP:
            partial.reset(envs, None)
            _, failures = partial.finish()
            assert not failures, failures  # handled, or raised
        else:
            finals.clear()
        for env in envs.tolist():
            for info in partial.infos_of(env) if resetting or env in finals else ():
                infos = self._vector_env._add_info(infos, info, env)
            fault = self.told.pop(env)[0]  # a later one, if the reset was hit as well
            infos = self._vector_env._add_info(infos, _info(fault, finals.get(env)), env)
            if env in finals:
                loop.mark_truncated(env)
        if away >= 0 and finals:
            loop.put_back(away, finals)
        return infos


def _info(fault: Fault, finals: list[Any] | None) -> dict[str, Any]:
    """What infos say of a fault; with the last observation if the episode's end hides it."""
    if finals is None:
        return {"fault": fault.info}
    return {"fault": fault.info, "final_obs": finals[0], "final_info": {"fault": fault.info}}

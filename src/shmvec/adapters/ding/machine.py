"""The state machine of a manager's envs: asks them, and acts on what they answer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shmvec.adapters.ding.answers import Answer, Envs, exception_of
from shmvec.adapters.ding.config import EnvManagerConfig
from shmvec.adapters.ding.env import Orders
from shmvec.adapters.ding.states import BaseEnvTimestep, EnvState, Slot
from shmvec.faults import EnvTimeoutError, Fault, restart_seed

__all__ = ["Machine", "first_of"]

log = logging.getLogger("shmvec")

_FOREVER = math.inf


class Machine:
    """The envs of a manager from ``launch`` to ``close``.

    Attributes:
        envs: What they are asked through.
        slots: Their states, one a env.
        undelivered: Timesteps that ``step`` has not returned yet, in the order of arrival.
        step_errors: What steps are to raise, by env.
        reset_errors: What resets are to raise.
        held: Envs that are not reset automatically now, because the caller does.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        config: EnvManagerConfig,
        slots: list[Slot],
    ) -> None:
        """Builds the envs: they are in INIT."""
        self.envs = Envs(env_fns, config)
        self.slots = slots
        self.undelivered: dict[int, BaseEnvTimestep] = {}
        self.step_errors: dict[int, BaseException] = {}
        self.reset_errors: dict[int, BaseException] = {}
        self.held: frozenset[int] = frozenset()
        self._config = config
        self._turns = 0
        self._to_reset: dict[int, bool] = {}  # env: whether it must be told how
        for slot in slots:
            slot.launched()

    def end(self) -> None:
        """There are no envs any more."""
        for slot in self.slots:
            slot.state, slot.asked, slot.in_flight, slot.retry_at = EnvState.VOID, "", False, None
        for results in self.undelivered, self.step_errors, self.reset_errors, self._to_reset:
            results.clear()

    # ---- asking ------------------------------------------------------------------------------

    def poll(self) -> None:
        """Takes what is there."""
        if any(slot.asked for slot in self.slots):
            self.pump(1, 0.0)

    def wait_until_home(self) -> None:
        """Waits until nothing is asked of any env; results are kept."""
        while any(slot.asked for slot in self.slots):
            self.pump(1, None)

    def pump(self, count: int, deadline: float | None) -> None:
        """Sends what is due, waits for so many answers, and acts on them.

        Returns earlier when something else is due, and at the deadline (monotonic clock).
        """
        now = time.monotonic()
        try:
            due = self._send_due(now)
            until = min(due, _FOREVER if deadline is None else deadline)
            timeout = None if until == _FOREVER else max(0.0, until - now)
            asked = sum([slot.asked != "" for slot in self.slots])
            if asked:
                for answer in self.envs.answers(min(count, asked), timeout):
                    self._take(answer)
            elif timeout is not None:
                time.sleep(timeout)  # until a reset is tried again
            self._send_due(time.monotonic())
        except BaseException:
            if self.envs.vector_env.closed:  # it could not go on
                self.end()
            else:
                self._find_lost()
            raise

    def _find_lost(self) -> None:
        """What was interrupted (Ctrl-C) may have taken an env's answer and not acted on it."""
        for env, slot in enumerate(self.slots):
            if slot.asked and not self.envs.is_out(env):
                asked, slot.asked = slot.asked, ""
                if asked == "reset":
                    self._to_reset[env] = True
                else:
                    self._abnormal(env, "it was interrupted")

    def _send_due(self, now: float) -> float:
        """Asks envs to reset whose time has come; when the next thing is due."""
        due = _FOREVER
        patience = self._config.connect_timeout
        for env, slot in enumerate(self.slots):
            if slot.asked == "reset" and patience is not None and slot.late is None:
                if now >= slot.asked_at + patience:
                    slot.late = ConnectionError(
                        f"env {env}: no answer to reset() within connect_timeout={patience:g} s; "
                        "its process was replaced"
                    )
                    self.envs.renew(env)
                else:
                    due = min(due, slot.asked_at + patience)
            elif slot.retry_at is not None and env not in self.held:
                if now >= slot.retry_at:
                    slot.retry_at = None
                    replaced = self.envs.generation(env) != slot.ordered
                    if self._config.retry_type == "renew" and not replaced:
                        self.envs.renew(env)
                    self._to_reset[env] = True
                else:
                    due = min(due, slot.retry_at)
        for told in (False, True):
            envs = [e for e, tell in self._to_reset.items() if tell is told and e not in self.held]
            if envs:
                self.ask_to_reset(envs, told)
                for env in envs:
                    del self._to_reset[env]
        return due

    def ask_to_step(self, envs: list[int], actions: list[Any]) -> None:
        """Asks envs to step, with an action each: first those that were ready first."""
        # A worker goes by that order. In any other, some of its envs would always come last.
        order = sorted(range(len(envs)), key=lambda i: self.slots[envs[i]].turn)
        sent = envs = [envs[i] for i in order]
        try:
            self.envs.step(envs, [actions[i] for i in order])
        except BaseException:  # Ctrl-C may come after all, or some, were sent
            sent = [env for env in envs if self.envs.is_out(env)]
            raise
        finally:
            self._mark(sent, "step")
            for env in sent:
                self.slots[env].in_flight = True

    def deliver(self) -> tuple[dict[int, BaseEnvTimestep], BaseException | None]:
        """Hands out the timesteps that have arrived, and what is to be raised, if anything."""
        timesteps, self.undelivered = self.undelivered, {}
        errors, self.step_errors = self.step_errors, {}
        for env in (*timesteps, *errors):
            self.slots[env].in_flight = False
        return timesteps, first_of(errors, timesteps) if errors else None

    def ask_to_reset(
        self,
        envs: list[int],
        told: bool,
        params: Mapping[int, dict[str, Any] | None] | None = None,
    ) -> None:
        """Asks envs to reset, and tells them how unless they know."""
        if params is not None:
            self._drop(params)
        else:
            params = {env: self.slots[env].param for env in envs}
        orders = [self._orders(env, params[env]) for env in envs] if told else None
        self.envs.reset(envs, orders)
        self._mark(envs, "reset")
        for env in envs:
            slot = self.slots[env]
            slot.param, slot.state, slot.late = params[env], EnvState.RESET, None
            slot.ordered, slot.told = self.envs.generation(env), told

    def _drop(self, envs: Iterable[int]) -> None:
        """Forgets what was asked of envs and what they returned: the caller resets them."""
        for env in envs:
            slot = self.slots[env]
            slot.in_flight, slot.retry_at, slot.attempts = False, None, 0
            for results in self.undelivered, self.step_errors, self.reset_errors, self._to_reset:
                results.pop(env, None)
            if slot.state is EnvState.RESET:  # it was to be: now it is by the caller
                slot.state = EnvState.NEED_RESET

    def _orders(self, env: int, param: dict[str, Any] | None) -> Orders:
        slot = self.slots[env]
        generation = self.envs.generation(env)
        seed = slot.seed
        if slot.seed_used and seed is not None:
            # A new process goes on with a seed of its own, as the core's do.
            renewed = generation != slot.generation
            seed = restart_seed(seed, generation) if renewed else None
        return Orders(
            param,
            seed,
            slot.dynamic_seed,
            slot.replay_path,
            f"env-{env}" if generation == 0 else f"env-{env}-{generation}",
        )

    def _mark(self, envs: Iterable[int], asked: str) -> None:
        now, wall = time.monotonic(), time.time()
        for env in envs:
            slot = self.slots[env]
            slot.asked, slot.asked_at, slot.asked_at_wall = asked, now, wall

    def _take(self, answer: Answer) -> None:
        """Acts on an answer."""
        slot = self.slots[answer.env]
        asked, slot.asked = slot.asked, ""
        self._turns += 1
        slot.turn = self._turns
        failure = answer.note.failure
        if asked == "reset":
            self._take_reset(slot, answer)
        elif answer.unreadable is not None:
            self._abnormal(answer.env, answer.unreadable.summary)
        elif answer.fault is not None:
            self._take_fault(slot, answer, answer.fault)
        elif answer.note.abnormal is not None:
            slot.state = EnvState.ERROR
            observation, reward, done = answer.note.abnormal
            self.undelivered[answer.env] = BaseEnvTimestep(
                observation, reward, done, answer.info or {}
            )
        elif failure is not None and failure.operation == "step":
            cure = self._cure(failure.type)
            if cure == "raise":
                self._raise_later(answer.env, failure.exception())
            else:
                fault = self.envs.count(failure, cure)
                if cure == "restart":
                    self.envs.renew(answer.env)
                self._truncated(answer.env, fault)
        else:
            self._take_step(slot, answer)

    def _take_step(self, slot: Slot, answer: Answer) -> None:
        """A step that went well."""
        env, info = answer.env, answer.info or {}
        terminated, truncated = answer.terminated, answer.truncated
        ended = answer.note.ended
        if ended is not None:
            terminated, truncated, info["final_obs"], slot.reset_info = ended
        done = terminated or truncated
        if done:
            info["TimeLimit.truncated"] = truncated and not terminated
        timestep = BaseEnvTimestep(answer.observation, answer.reward, done, info)
        self.undelivered[env] = timestep
        if not done:
            slot.observation = timestep.obs
            return
        self._end_episode(env)
        if slot.state is not EnvState.RESET:
            return
        failure = answer.note.failure
        if ended is not None:
            slot.state, slot.observation = EnvState.RUN, timestep.obs
            del self._to_reset[env]
        elif failure is not None:  # the reset in place
            del self._to_reset[env]
            self._fail(env, failure.exception())

    def _end_episode(self, env: int) -> None:
        slot = self.slots[env]
        slot.episodes += 1
        if slot.episodes >= self._config.episode_num:
            slot.state = EnvState.DONE
        elif not self._config.auto_reset:
            slot.state = EnvState.NEED_RESET
        else:
            slot.state = EnvState.RESET
            self._to_reset[env] = not slot.seed_used

    def _take_fault(self, slot: Slot, answer: Answer, fault: Fault) -> None:
        """The worker was restarted: because of this env, or of another one in it."""
        env = answer.env
        mine = self._is_of(slot, env, fault)
        if mine and self._cure(fault.type) == "raise":
            limit = self._config.step_timeout or self.envs.policy.step_timeout
            self._raise_later(env, exception_of(fault, env, "step", limit))
        else:
            self._truncated(env, fault)

    def _is_of(self, slot: Slot, env: int, fault: Fault) -> bool:
        """Whether it was in this env's step or reset that its worker failed."""
        if fault.type == "Restart" or fault.at < slot.asked_at_wall:
            return False
        return fault.env == env or fault.type != EnvTimeoutError.__name__

    def _cure(self, error: str) -> str:
        policy = self.envs.policy
        if error == EnvTimeoutError.__name__:
            return policy.on_timeout
        return policy.on_crash if error == "WorkerCrashError" else policy.on_error

    def _truncated(self, env: int, fault: Fault) -> None:
        """An episode that a fault has cut off."""
        info = {"fault": fault.info, "TimeLimit.truncated": True}
        last = self.slots[env].observation
        self.undelivered[env] = BaseEnvTimestep(last, np.float64(0.0), True, info)
        self._end_episode(env)

    def _abnormal(self, env: int, why: str) -> None:
        """A timestep that could not be read."""
        log.warning("env %d: its timestep cannot be read: %s", env, why)
        self.slots[env].state = EnvState.ERROR
        info = {"abnormal": True, "error": why}
        self.undelivered[env] = BaseEnvTimestep(None, None, False, info)

    def _raise_later(self, env: int, error: BaseException) -> None:
        self.slots[env].state = EnvState.ERROR
        self.step_errors[env] = error
        self.envs.goes_on(env)

    def _take_reset(self, slot: Slot, answer: Answer) -> None:
        env, note, fault = answer.env, answer.note, answer.fault
        late, slot.late = slot.late, None
        failure = answer.unreadable or note.failure
        if late is not None:
            self._fail(env, late)
        elif failure is not None:
            self._fail(env, failure.exception())
        elif not note.fresh:
            slot.state, slot.attempts = EnvState.RUN, 0
            slot.observation, slot.reset_info = answer.observation, answer.info or {}
            if slot.told:
                slot.seed_used, slot.generation = True, slot.ordered
            self.envs.goes_on(env)
        elif fault is not None and self._is_of(slot, env, fault):
            limit = self._config.reset_timeout or self.envs.policy.reset_timeout
            self._fail(env, exception_of(fault, env, "reset", limit))
        else:  # its process was replaced for another reason
            self._to_reset[env] = True

    def _fail(self, env: int, cause: BaseException) -> None:
        """A reset has failed: tries again later, or gives up."""
        slot = self.slots[env]
        slot.attempts += 1
        tries = max(1, int(self._config.max_retry))
        log.warning("env %d: reset failed (%d of %d): %r", env, slot.attempts, tries, cause)
        if slot.attempts < tries:
            slot.retry_at = time.monotonic() + self._config.retry_waiting_time
            return
        slot.state, slot.attempts = EnvState.ERROR, 0
        error = RuntimeError(
            f"Env {env} reset has exceeded max retries({tries}), and the latest exception is: "
            f"{cause!r}"
        )
        error.__cause__ = cause
        self.reset_errors[env] = error
        self.envs.goes_on(env)

    def raise_reset_errors(self, envs: Iterable[int] | None = None) -> None:
        """Raises what the resets of these envs, or of any, have come to; once."""
        chosen = self.reset_errors if envs is None else envs
        errors = {env: self.reset_errors[env] for env in chosen if env in self.reset_errors}
        for env in errors:
            del self.reset_errors[env]
        if errors:
            raise first_of(errors, {})

    def any_goes_on(self) -> bool:
        """Whether there is a timestep to act on, or something to raise."""
        return bool(self.step_errors) or any(
            not step.done and self.slots[env].state is not EnvState.ERROR
            for env, step in self.undelivered.items()
        )


def first_of(errors: dict[int, BaseException], timesteps: dict[int, Any]) -> BaseException:
    """The error of the first env, which names those of others, and has what came with them."""
    first, *others = sorted(errors)
    error = errors[first]
    if others and hasattr(error, "add_note"):  # Python 3.11
        error.add_note(
            "At the same time: " + "; ".join(f"env {env}: {errors[env]!r}" for env in others)
        )
    try:
        error.timesteps = timesteps  # type: ignore[attr-defined]
    except AttributeError:
        log.warning("%r takes no attribute: timesteps of envs %s are lost", error, [*timesteps])
    return error

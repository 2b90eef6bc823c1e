"""The state machine of a manager's envs: asks them, and acts on what they answer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shmvec.adapters.ding.answers import Answer, Envs, StepResult
from shmvec.adapters.ding.config import EnvManagerConfig
from shmvec.adapters.ding.env import Note, Orders
from shmvec.adapters.ding.states import BaseEnvTimestep, EnvState, Slot
from shmvec.faults import EnvTimeoutError, Failure, Fault, WorkerCrashError, restart_seed

__all__ = ["Machine"]

log = logging.getLogger("shmvec")

_NOW = -math.inf  # by the monotonic clock


class Machine:
    """The envs of a manager from ``launch`` to ``close``.

    Attributes:
        envs: What they are asked through.
        exchange: Theirs.
        slots: Their states, one a env.
        undelivered: What ``step`` has not returned, or raised, yet, in the order of arrival.
        reset_errors: What resets are to raise.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        config: EnvManagerConfig,
        slots: list[Slot],
    ) -> None:
        """Builds the envs: they are in INIT."""
        self.envs = Envs(env_fns, config)
        self.exchange = self.envs.exchange
        self.slots = slots
        self.undelivered: dict[int, BaseEnvTimestep | BaseException] = {}
        self.reset_errors: dict[int, BaseException] = {}
        self._config = config
        self._turns = 0
        for slot in slots:
            slot.launched()

    def end(self) -> None:
        """There are no envs any more."""
        for slot in self.slots:
            slot.state, slot.in_flight, slot.reset_at = EnvState.VOID, False, None
        self.undelivered.clear()
        self.reset_errors.clear()

    # ---- asking ------------------------------------------------------------------------------

    def wait_until_home(self) -> None:
        """Waits until nothing is asked of any env; results are kept."""
        while self.exchange.num_asked:
            self.pump(1, math.inf)

    def call(self, envs: Sequence[int], name: str, *args: Any) -> list[Any]:
        """Calls a method of what stands for envs, as soon as nothing is asked of any."""
        self.wait_until_home()
        return self.exchange.call(name, args, envs=envs) if envs else []

    def pump(self, count: int, deadline: float, held: Collection[int] = ()) -> None:
        """Sends what is due, waits for so many answers, and acts on them.

        Returns earlier when something else is due, and at the deadline (monotonic clock). Envs that
        are held are not reset: the caller will.
        """
        now = time.monotonic()
        try:
            until = min(self._send_due(now, held), deadline)
            timeout = None if until == math.inf else max(0.0, until - now)
            asked = self.exchange.num_asked
            if asked:
                for answer in self.envs.answers(min(count, asked), timeout):
                    self._take(answer)
            elif timeout is not None:
                time.sleep(timeout)  # until a reset is tried again
            self._send_due(time.monotonic(), held)
        except BaseException:
            if self.exchange.closed:  # it could not go on
                self.end()
            else:
                self._find_lost()
            raise

    def _find_lost(self) -> None:
        """What was interrupted (Ctrl-C) may have taken an env's answer and not acted on it."""
        for env, slot in enumerate(self.slots):
            if self.exchange.is_out(env):
                continue
            if slot.state is EnvState.RESET and slot.reset_at is None:
                slot.reset_at = _NOW
            elif slot.in_flight and env not in self.undelivered:
                self._abnormal(env, "it was interrupted")

    def _send_due(self, now: float, held: Collection[int]) -> float:
        """Asks envs to reset whose time has come; when the next thing is due."""
        due = math.inf
        patience = self._config.connect_timeout or math.inf
        renews = self._config.retry_type == "renew"
        known: list[int] = []
        to_tell: list[int] = []
        for env, slot in enumerate(self.slots):
            if slot.state is not EnvState.RESET:
                continue
            at = slot.asked_at + patience if slot.reset_at is None else slot.reset_at
            if now < at:
                due = min(due, at)
            elif slot.reset_at is None:
                slot.asked_at = math.inf  # said once
                slot.late = ConnectionError(
                    f"env {env}: no answer to reset() within connect_timeout={patience:g} s; "
                    "its process was replaced"
                )
                self.exchange.restart([env])
            elif env not in held:
                generation = self.exchange.restarts(env)
                if renews and slot.attempts and generation == slot.asked_generation:
                    self.exchange.restart([env])
                    generation = self.exchange.restarts(env)
                is_known = slot.seed_used and generation == slot.generation
                (known if is_known else to_tell).append(env)
        for envs in known, to_tell:
            if envs:
                self.ask_to_reset(envs, envs is to_tell)
        return due

    def ask_to_step(self, envs: list[int], actions: list[Any]) -> None:
        """Asks envs to step, with an action each: first those that were ready first."""
        # A worker goes by that order. In any other, some of its envs would always come last.
        order = sorted(range(len(envs)), key=lambda i: self.slots[envs[i]].turn)
        try:
            self.envs.step([envs[i] for i in order], [actions[i] for i in order])
        finally:
            for env in self._asked(envs):
                self.slots[env].in_flight = True

    def ask_to_reset(
        self,
        envs: list[int],
        told: bool,
        params: Mapping[int, dict[str, Any] | None] | None = None,
    ) -> None:
        """Asks envs to reset, and tells them how unless they know."""
        if params is None:
            params = {env: self.slots[env].param for env in envs}
        else:
            self._drop(params)
        try:
            orders = [self._orders(env, params[env]) for env in envs] if told else None
            self.envs.reset(envs, orders)
        finally:
            for env in self._asked(envs):
                slot = self.slots[env]
                slot.param, slot.with_orders = params[env], told
                slot.state, slot.reset_at, slot.late = EnvState.RESET, None, None

    def _asked(self, envs: Iterable[int]) -> list[int]:
        """Notes that envs were asked: all of them, unless Ctrl-C came before some were."""
        now = time.monotonic()
        asked = [env for env in envs if self.exchange.is_out(env)]
        for env in asked:
            self.slots[env].asked_at = now
            self.slots[env].asked_generation = self.exchange.restarts(env)
        return asked

    def _drop(self, envs: Iterable[int]) -> None:
        """Forgets what was asked of envs and what they returned: the caller resets them."""
        for env in envs:
            slot = self.slots[env]
            slot.in_flight, slot.reset_at, slot.attempts = False, None, 0
            self.undelivered.pop(env, None)
            self.reset_errors.pop(env, None)
            if slot.state is EnvState.RESET:  # it was to be: now it is by the caller
                slot.state = EnvState.NEED_RESET

    def _orders(self, env: int, param: dict[str, Any] | None) -> Orders:
        slot = self.slots[env]
        generation = self.exchange.restarts(env)
        seed = slot.seed
        if slot.seed_used and seed is not None:
            # A new process goes on with a seed of its own, as the core's do.
            seed = None if generation == slot.generation else restart_seed(seed, generation)
        name = f"env-{env}" if generation == 0 else f"env-{env}-{generation}"
        return Orders(param, seed, slot.dynamic_seed, slot.replay_path, name)

    def deliver(self) -> dict[int, BaseEnvTimestep]:
        """Hands out the timesteps that have arrived, or raises what has."""
        arrived, self.undelivered = self.undelivered, {}
        timesteps: dict[int, BaseEnvTimestep] = {}
        errors: dict[int, BaseException] = {}
        for env, each in arrived.items():
            self.slots[env].in_flight = False
            if isinstance(each, BaseException):
                errors[env] = each
            else:
                timesteps[env] = each
        if errors:
            raise _first_of(errors, timesteps)
        return timesteps

    # ---- answers -----------------------------------------------------------------------------

    def _take(self, answer: Answer) -> None:
        """Acts on an answer."""
        env, note, told = answer.env, answer.note, answer.told
        slot = self.slots[env]
        self._turns += 1
        slot.turn = self._turns
        if slot.state is EnvState.RESET:
            self._take_reset(slot, answer)
        elif isinstance(answer.result, Failure):
            self._abnormal(env, answer.result.summary)
        elif told is not None and told.cut_off:  # because of this env, or of another in its worker
            if self._is_of(slot, env, told.fault) and self._cure(told.fault.type) == "raise":
                self._raise_later(env, self._exception(told.fault, env, "step"))
            else:
                self._truncated(env, told.fault)
        elif note.abnormal is not None:
            slot.state = EnvState.ERROR
            self.undelivered[env] = BaseEnvTimestep(*note.abnormal, answer.result[-1])
        elif note.failure is not None and note.failure.operation == "step":
            cure = self._cure(note.failure.type)
            if cure == "raise":
                self._raise_later(env, note.failure.exception())
            else:
                fault = self.exchange.count_fault(note.failure, cure)
                if cure == "restart":
                    self.exchange.restart([env])
                self._truncated(env, fault)
        else:
            self._take_step(slot, env, note, answer.result)

    def _take_step(self, slot: Slot, env: int, note: Note, result: StepResult) -> None:
        """A step that went well."""
        observation, reward, terminated, truncated, info = result
        if note.ended is not None:
            terminated, truncated, info["final_obs"], slot.reset_info = note.ended
        done = terminated or truncated
        if done:
            info["TimeLimit.truncated"] = truncated and not terminated
        self.undelivered[env] = BaseEnvTimestep(observation, reward, done, info)
        if done:
            self._end_episode(env)
        if not done or (note.ended is not None and slot.state is EnvState.RESET):
            slot.state, slot.reset_at, slot.observation = EnvState.RUN, None, observation
        elif note.failure is not None and slot.state is EnvState.RESET:  # the reset in place
            self._fail(env, note.failure.exception())

    def _end_episode(self, env: int) -> None:
        slot = self.slots[env]
        slot.episodes += 1
        if slot.episodes >= self._config.episode_num:
            slot.state = EnvState.DONE
        elif not self._config.auto_reset:
            slot.state = EnvState.NEED_RESET
        else:
            slot.state, slot.reset_at = EnvState.RESET, _NOW

    def _is_of(self, slot: Slot, env: int, fault: Fault) -> bool:
        """Whether it was in this env's step or reset that its worker failed."""
        if fault.type == "Restart" or fault.restarts <= slot.asked_generation:
            return False
        return fault.env == env or fault.type != EnvTimeoutError.__name__

    def _cure(self, error: str) -> str:
        policy = self.envs.policy
        if error == EnvTimeoutError.__name__:
            return policy.on_timeout
        return policy.on_crash if error == WorkerCrashError.__name__ else policy.on_error

    def _exception(self, fault: Fault, env: int, operation: str) -> BaseException:
        """What a fault of an env is raised as, if it is raised."""
        message = f"env {env}: {fault.message}; its process was replaced, and reset() goes on"
        if fault.type == EnvTimeoutError.__name__:
            limit = getattr(self.exchange.policy, f"{operation}_timeout")
            late = EnvTimeoutError(env, operation, limit)
            late.args = (message,)
            return late
        error = WorkerCrashError(message)
        error.summary, error.workers, error.envs = fault.message, (fault.worker,), (env,)
        return error

    def _truncated(self, env: int, fault: Fault) -> None:
        """An episode that a fault has cut off."""
        info = {"fault": fault.info, "TimeLimit.truncated": True}
        observation = self.slots[env].observation  # the last
        self.undelivered[env] = BaseEnvTimestep(observation, np.float64(0.0), True, info)
        self._end_episode(env)

    def _abnormal(self, env: int, why: str) -> None:
        """A timestep that could not be read."""
        log.warning("env %d: its timestep cannot be read: %s", env, why)
        self.slots[env].state = EnvState.ERROR
        self.undelivered[env] = BaseEnvTimestep(None, None, False, {"abnormal": True, "error": why})

    def _raise_later(self, env: int, error: BaseException) -> None:
        self.slots[env].state = EnvState.ERROR
        self.undelivered[env] = error
        self.envs.goes_on(env)

    def _take_reset(self, slot: Slot, answer: Answer) -> None:
        env, note, told = answer.env, answer.note, answer.told
        late, slot.late = slot.late, None
        if late is not None:
            self._fail(env, late)
        elif isinstance(answer.result, Failure):
            self._fail(env, answer.result.exception())
        elif note.failure is not None:
            self._fail(env, note.failure.exception())
        elif not note.fresh:
            slot.state, slot.attempts = EnvState.RUN, 0
            slot.observation, *_, slot.reset_info = answer.result
            if slot.with_orders:
                slot.seed_used, slot.generation = True, slot.asked_generation
            self.envs.goes_on(env)
        elif told is not None and self._is_of(slot, env, told.fault):
            self._fail(env, self._exception(told.fault, env, "reset"))
        else:  # its process was replaced for another reason
            slot.reset_at = _NOW

    def _fail(self, env: int, cause: BaseException) -> None:
        """A reset has failed: tries again later, or gives up."""
        slot = self.slots[env]
        slot.attempts += 1
        tries = max(1, self._config.max_retry)
        log.warning("env %d: reset failed (%d of %d): %r", env, slot.attempts, tries, cause)
        if slot.attempts < tries:
            slot.reset_at = time.monotonic() + self._config.retry_waiting_time
            return
        slot.state, slot.reset_at, slot.attempts = EnvState.ERROR, None, 0
        error = RuntimeError(
            f"Env {env} reset has exceeded max retries({tries}), and the latest exception is: "
            f"{cause!r}"
        )
        error.__cause__ = cause
        self.reset_errors[env] = error
        self.envs.goes_on(env)

    def raise_reset_errors(self, envs: Iterable[int] | None = None) -> None:
        """Raises what the resets of these envs, or of any, have come to; once."""
        chosen = [*self.reset_errors] if envs is None else envs
        errors = {env: self.reset_errors.pop(env) for env in chosen if env in self.reset_errors}
        if errors:
            raise _first_of(errors, {})

    def any_goes_on(self) -> bool:
        """Whether there is a timestep to act on, or something to raise."""
        return any(
            isinstance(each, BaseException)
            or (not each.done and self.slots[env].state is not EnvState.ERROR)
            for env, each in self.undelivered.items()
        )


def _first_of(errors: dict[int, BaseException], timesteps: dict[int, Any]) -> BaseException:
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

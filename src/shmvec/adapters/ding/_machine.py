"""The state machine of a manager's envs: asks them, and acts on what they answer."""

from __future__ import annotations

import logging
import math
import multiprocessing
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium.error import ClosedEnvironmentError

from shmvec.adapters._shared import batched
from shmvec.adapters.ding._config import EnvManagerConfig
from shmvec.adapters.ding._env import NOTE, ManagedEnv, Note, Numbers, Orders
from shmvec.exchange import AutoresetMode, Exchange, Report, given_once
from shmvec.faults import (
    EnvTimeoutError,
    Failure,
    Fault,
    FaultPolicy,
    WorkerCrashError,
    restart_seed,
)
from shmvec.spaces import mapped, one_of

log = logging.getLogger("shmvec")

_NOW = -math.inf  # by the monotonic clock


_PLAIN = Note()
_DEFAULT = FaultPolicy()
_FRAMES = 4  # copy_on_get=False: results of an env that there is room for,
_HELD = 2  # and for how many further batches one is not written again

# Observation, reward, terminated, truncated, and the info as the env returned it.
StepResult: TypeAlias = tuple[Any, Any, bool, bool, dict[str, Any]]
# From an env: what it returned (a reset, too) or why that could not be read; what its wrapper says
# besides; what the core says of its worker.
Answer: TypeAlias = tuple[int, StepResult | Failure, Note, Report | None]


class EnvState(IntEnum):
    """What an env is doing. docs/coming-from/di-engine.md has a table of all transitions."""

    VOID = 0  # there is none: the manager is closed
    INIT = 1  # it is built
    RUN = 2  # it can be stepped
    RESET = 3  # its reset is in flight, or will be retried
    DONE = 4  # it has played its episodes
    ERROR = 5  # it has failed: reset it
    NEED_RESET = 6  # its episode is over, and auto_reset is off: reset it


class BaseEnvTimestep(NamedTuple):
    """What a step of one env returns.

    Attributes:
        obs: Its observation.
        reward: float64; an array where the env returns one.
        done: Whether its episode is over, terminated or truncated.
        info: As the env returned it. If done, with "TimeLimit.truncated": whether it was truncated
            and not terminated.
    """

    obs: Any
    reward: Any
    done: bool
    info: dict[str, Any]


class EnvStateError(RuntimeError, AssertionError):
    """An env cannot do in its state what it was asked; DI-engine's managers assert it."""


class ManagerClosedError(ClosedEnvironmentError, AssertionError):
    """The env manager is not launched; DI-engine's managers assert it."""


@dataclass
class Slot:
    """An env's place in the manager.

    Attributes:
        state: Its state.
        episodes: How many it has played.
        observation: The next one to act on.
        reset_info: The info of its last reset.
        param: Keyword arguments of its resets.
        asked_at: When it was asked last, by the monotonic clock.
        asked_generation: How often its worker had been restarted by then.
        answered: When its last answer came, by the number of answers before it.
        in_flight: Whether a step's result has not been returned yet.
        attempts: How often its reset has failed in a row.
        reset_at: In RESET: when it is to be asked, by the monotonic clock; None: it was.
        late: The error, if the parent waits for its reset no longer.
        seed: The last one that ``seed`` gave it.
        seed_used: Whether a reset has used it.
        dynamic_seed: What ``seed`` said with it.
        generation: How often its worker had been restarted at its last reset with orders.
        with_orders: Whether the reset that was asked last has some, the seed among them.
        replay_path: Where it saves replays.
    """

    state: EnvState = EnvState.VOID
    episodes: int = 0
    observation: Any = None
    reset_info: dict[str, Any] = field(default_factory=dict)
    param: dict[str, Any] | None = None
    asked_at: float = 0.0
    asked_generation: int = 0
    answered: int = 0
    in_flight: bool = False
    attempts: int = 0
    reset_at: float | None = None
    late: BaseException | None = None
    seed: int | None = None
    seed_used: bool = True
    dynamic_seed: bool | None = None
    generation: int = 0
    with_orders: bool = False
    replay_path: str | None = None

    @property
    def ready(self) -> bool:
        """Whether it can be stepped."""
        return self.state is EnvState.RUN and not self.in_flight

    def launched(self) -> None:
        """Begins anew, but for a seed that was not used."""
        kept = ("seed", "seed_used", "dynamic_seed", "replay_path")
        fresh = Slot(EnvState.INIT, **{name: getattr(self, name) for name in kept})
        if self.seed_used:
            fresh.seed = None
        self.__dict__.update(fresh.__dict__)


class Machine:
    """The envs of a manager from ``launch`` to ``close``.

    Attributes:
        exchange: Through which they are asked.
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
        self.exchange = _exchange(env_fns, config)
        self.slots = slots
        self.undelivered: dict[int, BaseEnvTimestep | BaseException] = {}
        self.reset_errors: dict[int, BaseException] = {}
        self._config = config
        self._num_answers = 0
        for slot in slots:
            slot.launched()

    def end(self) -> None:
        """Notes that there are no envs any more."""
        for slot in self.slots:
            slot.state, slot.in_flight, slot.reset_at = EnvState.VOID, False, None
        self.undelivered.clear()
        self.reset_errors.clear()

    # ---- asking ------------------------------------------------------------------------------

    def wait_until_home(self) -> None:
        """Waits until nothing is asked of any env; results are kept."""
        while self.exchange.num_in_flight:
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
            asked = self.exchange.num_in_flight
            if asked:
                for answer in self._answers(min(count, asked), timeout):
                    self._take(*answer)
            elif timeout is not None:
                time.sleep(timeout)  # until a reset is retried
            self._send_due(time.monotonic(), held)
        except BaseException:
            if self.exchange.closed:  # it could not go on
                self.end()
            else:
                self._find_lost()
            raise

    def _find_lost(self) -> None:
        """Makes up for answers that an interrupted call (Ctrl-C) took without acting on them."""
        for env, slot in enumerate(self.slots):
            if self.exchange.in_flight(env):
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
        order = sorted(range(len(envs)), key=lambda i: self.slots[envs[i]].answered)
        try:
            ordered = [envs[i] for i in order]
            self.exchange.ask(ordered, self._batch(ordered, [actions[i] for i in order]))
        finally:
            for env in self._asked(envs):
                self.slots[env].in_flight = True

    def ask_to_reset(
        self,
        envs: list[int],
        told: bool,
        params: Mapping[int, dict[str, Any] | None] | None = None,
    ) -> None:
        """Asks envs to reset; with ``told``, sends them orders how to."""
        if params is None:
            params = {env: self.slots[env].param for env in envs}
        else:
            self._drop(params)
        try:
            orders = [self._orders(env, params[env]) for env in envs] if told else None
            # A new process must not repeat what may have ended the old one before that was
            # counted here: without orders it says that it is fresh.
            self.exchange.ask_reset(envs, options=orders, repeat=False)
        finally:
            for env in self._asked(envs):
                slot = self.slots[env]
                slot.param, slot.with_orders = params[env], told
                slot.state, slot.reset_at, slot.late = EnvState.RESET, None, None

    def _batch(self, envs: Sequence[int], actions: Sequence[Any]) -> Any:
        """Actions of these envs as the core takes them."""
        space = self.exchange.single_action_space
        if isinstance(space, Numbers):
            return space.rows(actions)
        try:
            batch = batched(space, actions)
        except ValueError as error:
            raise ValueError(f"{error} (These are places among envs {list(envs)}.)") from None
        return mapped(space, _with_numbers, space, batch)

    def _asked(self, envs: Iterable[int]) -> list[int]:
        """Notes that envs were asked: all of them, unless Ctrl-C came before some were."""
        now = time.monotonic()
        asked = [env for env in envs if self.exchange.in_flight(env)]
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

    def _answers(self, count: int, timeout: float | None) -> list[Answer]:
        """Waits for so many answers; those that are there, less when the time is up.

        Args:
            count: At most as many as were asked.
            timeout: Seconds to wait. None: as long as it takes.

        Raises:
            WorkerCrashError: Processes could not be kept alive; all is closed.
        """
        try:
            taken = self.exchange.take(count=self.exchange.num_envs, least=count, timeout=timeout)
        except multiprocessing.TimeoutError:
            return []
        rows = taken.observations
        if type(rows) is not np.ndarray:  # else its rows are views, too
            space = self.exchange.single_observation_space
            rows = [one_of(space, taken.observations, row) for row in range(len(taken.envs))]
        found: list[Answer] = [(failure.env, failure, _PLAIN, None) for failure in taken.failures]
        for row, env in enumerate(taken.envs.tolist()):
            info = taken.infos[row]
            note = info.pop(NOTE, _PLAIN)
            reward = taken.rewards[row] if note.reward is None else note.reward
            ended = bool(taken.terminations[row]), bool(taken.truncations[row])
            found.append((env, (rows[row], reward, *ended, info), note, taken.reports.get(env)))
        return found

    def _take(
        self, env: int, result: StepResult | Failure, note: Note, told: Report | None
    ) -> None:
        """Acts on an answer."""
        slot = self.slots[env]
        self._num_answers += 1
        slot.answered = self._num_answers
        if slot.state is EnvState.RESET:
            self._take_reset(slot, env, result, note, told)
        elif isinstance(result, Failure):
            self._abnormal(env, result.summary)
        elif told is not None and told.cut_off:  # because of this env, or of another in its worker
            if self._is_of(slot, env, told.fault) and self._cure(told.fault.type) == "raise":
                self._raise_later(env, self._exception(told.fault, env, "step"))
            else:
                self._truncated(env, told.fault)
        elif note.abnormal is not None:
            slot.state = EnvState.ERROR
            self.undelivered[env] = BaseEnvTimestep(*note.abnormal, result[-1])
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
            self._take_step(slot, env, note, result)

    def _take_step(self, slot: Slot, env: int, note: Note, result: StepResult) -> None:
        """Acts on a step that went well."""
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
        policy = self._config.faults or _DEFAULT
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
        self._goes_on(env)

    def _take_reset(
        self, slot: Slot, env: int, result: StepResult | Failure, note: Note, told: Report | None
    ) -> None:
        """Acts on the answer to a reset."""
        late, slot.late = slot.late, None
        if late is not None:
            self._fail(env, late)
        elif isinstance(result, Failure):
            self._fail(env, result.exception())
        elif note.failure is not None:
            self._fail(env, note.failure.exception())
        elif not note.fresh:
            slot.state, slot.attempts = EnvState.RUN, 0
            slot.observation, *_, slot.reset_info = result
            if slot.with_orders:
                slot.seed_used, slot.generation = True, slot.asked_generation
            self._goes_on(env)
        elif told is not None and self._is_of(slot, env, told.fault):
            self._fail(env, self._exception(told.fault, env, "reset"))
        else:  # its process was replaced for another reason
            slot.reset_at = _NOW

    def _fail(self, env: int, cause: BaseException) -> None:
        """Handles a reset that has failed: retries it later, or gives up."""
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
        self._goes_on(env)

    def _goes_on(self, env: int) -> None:
        """Counts an env's faults anew: it has recovered, or its failure is reported."""
        if self._config.faults is None:
            self.exchange.forgive(env)

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


def _exchange(env_fns: Sequence[Callable[[], Any]], config: EnvManagerConfig) -> Exchange:
    """Starts the workers and builds the envs.

    Raises:
        ValueError: Time limits, or numbers of workers, that cannot be.
        Exception: What an env_fn raises, and as ``Exchange``.
    """
    policy = config.faults or FaultPolicy()
    step_timeout = given_once("step_timeout", config.step_timeout, policy.step_timeout)
    reset_timeout = given_once("reset_timeout", config.reset_timeout, policy.reset_timeout)
    limited = step_timeout is not None or reset_timeout is not None
    num_workers = config.num_workers
    if num_workers is None and (limited or config.retry_type == "renew"):
        num_workers = len(env_fns)
    # Nothing but a new process ends C code that hangs; a policy may try to interrupt first.
    late = "reset" if policy.on_timeout == "reset" else "restart"
    # What the core restarts anyway the manager may still raise. Resets are tried again by the
    # manager, so the core's limit is for those that make no progress at all.
    limits = FaultPolicy(max_restarts=10 + config.max_retry, window_s=math.inf, backoff_s=0.0)
    core = replace(
        limits if config.faults is None else policy,
        on_crash="restart",
        on_error="raise",
        on_timeout=late if limited else "raise",
        step_timeout=step_timeout,
        reset_timeout=reset_timeout,
    )
    return Exchange(
        [
            partial(
                ManagedEnv.made_by,
                env_fn,
                index=index,
                reset_inplace=config.reset_inplace,
                in_messages=not config.shared_memory,
            )
            for index, env_fn in enumerate(env_fns)
        ],
        name="SubprocessEnvManager",
        shared_memory=config.shared_memory,
        copy=config.copy_on_get,
        context=config.context,
        autoreset_mode=AutoresetMode.DISABLED,
        num_workers=num_workers,
        faults=core,
        num_buffers=_FRAMES,
        hold_batches=_HELD,
    )


def _with_numbers(space: Any, actions: Any) -> Any:
    """Actions in which arrays of one, as DI-engine's policies give them, are numbers."""
    if space.shape != ():
        return actions
    return [each[0] if getattr(each, "shape", None) == (1,) else each for each in actions]

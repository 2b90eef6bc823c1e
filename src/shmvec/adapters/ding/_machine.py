"""``Machine``: asks a manager's envs, and changes their states by their answers."""

from __future__ import annotations

import logging
import math
import multiprocessing
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium.error import ClosedEnvironmentError

from shmvec.adapters.ding._config import EnvManagerConfig
from shmvec.adapters.ding._env import NOTE_KEY, DiscreteRows, ManagedEnv, ResetSpec
from shmvec.exchange import AutoresetMode, Exchange, Report
from shmvec.faults import EnvTimeoutError, Fault, FaultPolicy, WorkerCrashError, add_note
from shmvec.spaces import batched, mapped, one_of

log = logging.getLogger("shmvec")

_NUM_BUFFERS = 4  # of results, with copy_on_get=False
_HOLD_BATCHES = 2  # a result stays valid for so many further batches, with copy_on_get=False


class EnvState(IntEnum):
    """The state of an env. docs/coming-from/di-engine.md has a table of all transitions."""

    VOID = 0  # the manager is closed, and there is no env
    INIT = 1  # it is built
    RUN = 2  # it can be stepped
    RESET = 3  # its reset is in flight, or will be retried
    DONE = 4  # it has played its episodes
    ERROR = 5  # it has failed: reset it
    NEED_RESET = 6  # its episode is over, and auto_reset is off: reset it


class BaseEnvTimestep(NamedTuple):
    """The results of a step of one env.

    Attributes:
        obs: The observation.
        reward: float64; an array if the env returns one.
        done: Whether the episode has terminated or was truncated.
        info: The env's info. If done, with "TimeLimit.truncated": whether the episode was truncated
            and not terminated.
    """

    obs: Any
    reward: Any
    done: bool
    info: dict[str, Any]


class EnvStateError(RuntimeError, AssertionError):
    """A request does not fit the env's state; DI-engine's managers raise AssertionError then."""


class ManagerClosedError(ClosedEnvironmentError, AssertionError):
    """The env manager is not launched; DI-engine's managers raise AssertionError then."""


@dataclass
class Slot:
    """The manager's record of an env; the Exchange knows whether it is in flight."""

    state: EnvState = EnvState.VOID  # with a request in flight, RUN means a step, RESET a reset
    episodes: int = 0  # that it has played
    observation: Any = None  # the next one to act on
    reset_info: dict[str, Any] = field(default_factory=dict)  # of its last reset
    param: dict[str, Any] | None = None  # keyword arguments of its resets
    requested_at: float = 0.0  # when it was last asked to reset, by the monotonic clock
    restarts: int = 0  # of its worker, when it was last asked to step or reset
    attempts: int = 0  # failures of its reset in a row
    reset_at: float = 0.0  # in RESET, when its next reset is due, by the monotonic clock
    seed: int | None = None  # of the manager's `seed`, until a reset is requested with it
    unconfirmed_seed: int | None = None  # of that reset, until it has succeeded
    dynamic_seed: bool | None = None  # that was set with the seed
    replay_path: str | None = None  # the folder in which it saves replays

    def renewed(self) -> Slot:
        """A new slot, with settings and an unused seed of this one."""
        seed = self.unconfirmed_seed if self.seed is None else self.seed
        return Slot(
            EnvState.INIT,
            seed=seed,
            dynamic_seed=self.dynamic_seed,
            replay_path=self.replay_path,
        )


class Machine:
    """The envs of a manager from ``launch`` to ``close``.

    Attributes:
        exchange: Asks the envs, and knows which are in flight.
        slots: One slot for each env.
        undelivered: Timesteps and exceptions that ``step`` has not yet returned or raised, in the
            order of arrival.
        reset_errors: Exceptions of resets that are not yet raised.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        config: EnvManagerConfig,
        slots: list[Slot],
    ) -> None:
        """Builds the envs; then their state is INIT."""
        self.exchange = _start_exchange(env_fns, config)
        slots[:] = [slot.renewed() for slot in slots]
        self.slots = slots
        self.undelivered: dict[int, BaseEnvTimestep | BaseException] = {}
        self.reset_errors: dict[int, BaseException] = {}
        self._config = config
        self._policy = config.faults or FaultPolicy()

    def end(self) -> None:
        """Puts all envs into the state VOID."""
        for slot in self.slots:
            slot.state = EnvState.VOID
        self.undelivered.clear()
        self.reset_errors.clear()

    # ---- properties --------------------------------------------------------------------------

    def is_in_flight(self, env: int) -> bool:
        """Whether an env steps, or has a result that is not yet returned."""
        return env in self.undelivered or self._is_stepping(env)

    def _is_stepping(self, env: int) -> bool:
        return self.slots[env].state is EnvState.RUN and self.exchange.in_flight(env)

    @property
    def ready(self) -> list[int]:
        """The envs that can be stepped."""
        return [
            env
            for env, slot in enumerate(self.slots)
            if slot.state is EnvState.RUN and not self.is_in_flight(env)
        ]

    @property
    def stepping(self) -> list[int]:
        """The envs whose steps are in flight."""
        return [env for env in range(len(self.slots)) if self._is_stepping(env)]

    def has_usable_result(self) -> bool:
        """Whether there is a timestep that can be acted on, or an exception to raise."""
        return any(
            isinstance(each, BaseException)
            or (not each.done and self.slots[env].state is not EnvState.ERROR)
            for env, each in self.undelivered.items()
        )

    # ---- asking ------------------------------------------------------------------------------

    def wait_for_all(self) -> None:
        """Waits until no env is in flight; results are kept."""
        while self.exchange.num_in_flight:
            self.process_answers(1, math.inf)

    def call(self, envs: Sequence[int], name: str, *args: Any) -> list[Any]:
        """Calls a method of the ``ManagedEnv`` of each of these envs, once none is in flight."""
        self.wait_for_all()
        return self.exchange.call(name, args, envs=envs) if envs else []

    def step(self, actions: Mapping[int, Any]) -> None:
        """Asks envs to step."""
        space = self.exchange.single_action_space
        envs, action_list = list(actions), list(actions.values())
        if isinstance(space, DiscreteRows):
            batch = space.rows(action_list)
        else:
            try:
                batch = batched(space, action_list)
            except ValueError as error:
                raise ValueError(f"{error} (Indices are places in the envs {envs}.)") from None
            batch = mapped(space, _unwrap_numbers, space, batch)
        for env in envs:
            self.slots[env].restarts = self.exchange.restarts(env)
        self.exchange.ask(envs, batch)

    def reset(self, params: Mapping[int, dict[str, Any] | None]) -> None:
        """Asks envs to reset with these arguments; discards earlier results."""
        while any(map(self.exchange.in_flight, params)):
            self.process_answers(1, math.inf, excluded=params)
        for env in params:
            slot = self.slots[env]
            slot.attempts = 0
            self.undelivered.pop(env, None)
            self.reset_errors.pop(env, None)
            if slot.state is EnvState.RESET:
                slot.state = EnvState.NEED_RESET
        self._request_resets(params)

    def _request_resets(self, params: Mapping[int, dict[str, Any] | None]) -> None:
        seeds: list[int | None] = []
        specs: list[ResetSpec] = []
        for env, param in params.items():
            slot = self.slots[env]
            slot.requested_at, slot.restarts = time.monotonic(), self.exchange.restarts(env)
            if slot.seed is not None:
                slot.unconfirmed_seed, slot.seed = slot.seed, None
            seeds.append(slot.unconfirmed_seed)
            name = f"env-{env}-{slot.restarts}" if slot.restarts else f"env-{env}"
            specs.append(ResetSpec(param, slot.dynamic_seed, slot.replay_path, name))
        try:
            # repeat=False: a reset that is lost with its process counts as a failed attempt.
            self.exchange.ask_reset(list(params), seeds, specs, repeat=False)
        finally:
            for env, param in params.items():
                if self.exchange.in_flight(env):
                    self.slots[env].param, self.slots[env].state = param, EnvState.RESET

    def deliver(self) -> dict[int, BaseEnvTimestep]:
        """Returns the timesteps that have arrived, or raises an exception that has."""
        results = dict(self.undelivered)
        self.undelivered.clear()
        errors = {env: each for env, each in results.items() if isinstance(each, BaseException)}
        timesteps = {
            env: each for env, each in results.items() if not isinstance(each, BaseException)
        }
        _raise_first(errors, timesteps)
        return timesteps

    def raise_reset_errors(self, envs: Iterable[int] | None = None) -> None:
        """Raises exceptions of failed resets of these envs, or of all; each only once."""
        chosen = [*self.reset_errors] if envs is None else envs
        _raise_first(
            {env: self.reset_errors.pop(env) for env in chosen if env in self.reset_errors}, {}
        )

    # ---- answers -----------------------------------------------------------------------------

    def process_answers(self, count: int, deadline: float, excluded: Collection[int] = ()) -> None:
        """Requests resets that are due, waits for ``count`` answers, and processes them.

        Returns earlier when a reset or a timeout is due, and at the deadline (monotonic clock).
        Envs in ``excluded`` are not reset: the caller does that.
        """
        stepping = self.stepping
        try:
            now = time.monotonic()
            until = min(self._handle_due_resets(now, excluded), deadline)
            timeout = None if until == math.inf else max(0.0, until - now)
            in_flight = self.exchange.num_in_flight
            if in_flight:
                self._take(min(count, in_flight), timeout)
            elif timeout is not None:
                time.sleep(timeout)  # until a reset is retried
            self._handle_due_resets(time.monotonic(), excluded)
        except BaseException:
            if self.exchange.closed:  # it could not go on
                self.end()
            for env in stepping:  # Ctrl-C may have lost their results
                if not self.exchange.closed and not self.is_in_flight(env):
                    self._deliver_abnormal(env, "it was interrupted")
            raise

    def _handle_due_resets(self, now: float, excluded: Collection[int]) -> float:
        """Requests resets that are due, and replaces late processes; returns the next due time."""
        due = math.inf
        patience = self._config.connect_timeout or math.inf
        params: dict[int, dict[str, Any] | None] = {}
        for env, slot in enumerate(self.slots):
            if slot.state is not EnvState.RESET:
                continue
            in_flight = self.exchange.in_flight(env)
            at = slot.requested_at + patience if in_flight else slot.reset_at
            if now < at:
                due = min(due, at)
            elif in_flight:
                self.exchange.restart([env])
                self.exchange.take([env])  # discards the answer of the restarted process
                self._reset_failed(
                    env,
                    ConnectionError(
                        f"env {env}: no answer to reset() within connect_timeout={patience:g} s; "
                        "its process was replaced"
                    ),
                )
                due = min(due, slot.reset_at)
            elif env not in excluded:
                params[env] = slot.param
        if params:
            self._request_resets(params)
            due = min(due, now + patience)
        return due

    def _take(self, count: int, timeout: float | None) -> None:
        """Waits for ``count`` answers, or until the time is up, and processes all answers."""
        try:
            answers = self.exchange.take(count=self.exchange.num_envs, least=count, timeout=timeout)
        except multiprocessing.TimeoutError:
            return
        for failure in answers.failures:  # the results could not be read
            if self.slots[failure.env].state is EnvState.RESET:
                self._reset_failed(failure.env, failure.exception())
            else:
                self._deliver_abnormal(failure.env, failure.summary)
        space = self.exchange.single_observation_space
        for row, env in enumerate(answers.envs.tolist()):
            observation, info = one_of(space, answers.observations, row), answers.infos[row]
            note, report = info.pop(NOTE_KEY, {}), answers.reports.get(env)
            if self.slots[env].state is EnvState.RESET:
                self._take_reset(env, observation, info, note, report)
            elif report is not None and report.cut_off:
                self._take_truncated_step(env, report.fault)
            elif "abnormal" in note:
                self.slots[env].state = EnvState.ERROR
                observation, reward, done = note["abnormal"]
                self.undelivered[env] = BaseEnvTimestep(observation, reward, done, info)
            elif "failure" in note:
                self._deliver_error(env, note["failure"].exception())
            else:
                reward = note.get("reward", answers.rewards[row])
                ends = bool(answers.terminations[row]), bool(answers.truncations[row])
                self._take_step(env, observation, reward, ends, info, note)

    def _take_step(
        self,
        env: int,
        observation: Any,
        reward: npt.NDArray[Any],
        ends: tuple[bool, bool],
        info: dict[str, Any],
        note: dict[str, Any],
    ) -> None:
        """Processes the results of a step, and of a reset in the same step."""
        slot = self.slots[env]
        if "reset" in note:
            ends, info["final_obs"], slot.reset_info = note["reset"]
        terminated, truncated = ends
        done = terminated or truncated
        if done:
            info["TimeLimit.truncated"] = truncated and not terminated
        self.undelivered[env] = BaseEnvTimestep(observation, reward, done, info)
        slot.observation = observation
        if not done:
            return
        self._end_episode(env)
        if slot.state is EnvState.RESET and "reset" in note:
            slot.state = EnvState.RUN
        elif slot.state is EnvState.RESET and "reset failed" in note:
            self._reset_failed(env, note["reset failed"].exception())

    def _take_truncated_step(self, env: int, fault: Fault) -> None:
        """Processes a step that was lost by a fault of this env, or of another in its worker."""
        actions_by_type = {
            EnvTimeoutError.__name__: self._policy.on_timeout,
            WorkerCrashError.__name__: self._policy.on_crash,
        }
        fault_action = actions_by_type.get(fault.type, self._policy.on_error)
        if fault_action == "raise" and self._blames(fault, env):
            self._deliver_error(env, self._exception(fault, env, "step"))
            return
        info = {"fault": fault.info, "TimeLimit.truncated": True}
        last = self.slots[env].observation
        self.undelivered[env] = BaseEnvTimestep(last, np.float64(0.0), True, info)
        self._end_episode(env)

    def _take_reset(
        self,
        env: int,
        observation: Any,
        info: dict[str, Any],
        note: dict[str, Any],
        report: Report | None,
    ) -> None:
        """Processes the answer to a reset."""
        slot = self.slots[env]
        if report is not None and report.fault.restarts > slot.restarts:  # the reset was lost
            if self._blames(report.fault, env):
                self._reset_failed(env, self._exception(report.fault, env, "reset"))
        elif "reset failed" in note:
            self._reset_failed(env, note["reset failed"].exception())
        else:
            slot.state, slot.attempts, slot.unconfirmed_seed = EnvState.RUN, 0, None
            slot.observation, slot.reset_info = observation, info
            self._forgive(env)

    def _reset_failed(self, env: int, cause: BaseException) -> None:
        """Schedules a retry of a failed reset, or gives up."""
        slot = self.slots[env]
        slot.attempts += 1
        tries = max(1, self._config.max_retry)
        log.warning("env %d: reset failed (%d of %d): %r", env, slot.attempts, tries, cause)
        if slot.attempts < tries:
            slot.reset_at = time.monotonic() + self._config.retry_waiting_time
            replaced = self.exchange.restarts(env) > slot.restarts
            if self._config.retry_type == "renew" and not replaced:
                self.exchange.restart([env])
            return
        slot.state, slot.attempts = EnvState.ERROR, 0
        error = RuntimeError(
            f"Env {env} reset has exceeded max retries({tries}), and the latest exception is: "
            f"{cause!r}"
        )
        error.__cause__ = cause
        self.reset_errors[env] = error
        self._forgive(env)

    # ---- faults and states -------------------------------------------------------------------

    def _blames(self, fault: Fault, env: int) -> bool:
        """Whether the worker has failed in this env's step or reset."""
        if fault.type == "Restart" or fault.restarts <= self.slots[env].restarts:
            return False
        return fault.env == env or fault.type != EnvTimeoutError.__name__

    def _exception(self, fault: Fault, env: int, operation: str) -> BaseException:
        message = f"env {env}: {fault.message}; its process was replaced: reset() this env"
        if fault.type == EnvTimeoutError.__name__:
            limit = getattr(self.exchange.policy, f"{operation}_timeout")
            late = EnvTimeoutError(env, operation, limit)
            late.args = (message,)
            return late
        error = WorkerCrashError(message)
        error.summary, error.workers, error.envs = fault.message, (fault.worker,), (env,)
        return error

    def _end_episode(self, env: int) -> None:
        slot = self.slots[env]
        slot.episodes += 1
        slot.reset_at = 0.0
        if slot.episodes >= self._config.episode_num:
            slot.state = EnvState.DONE
        else:
            slot.state = EnvState.RESET if self._config.auto_reset else EnvState.NEED_RESET

    def _deliver_abnormal(self, env: int, why: str) -> None:
        """Delivers an abnormal timestep in place of results that could not be read."""
        log.warning("env %d: its timestep cannot be read: %s", env, why)
        self.slots[env].state = EnvState.ERROR
        self.undelivered[env] = BaseEnvTimestep(None, None, False, {"abnormal": True, "error": why})

    def _deliver_error(self, env: int, error: BaseException) -> None:
        self.slots[env].state = EnvState.ERROR
        self.undelivered[env] = error
        self._forgive(env)

    def _forgive(self, env: int) -> None:
        """Forgets an env's faults, when it has recovered or its failure was reported."""
        if self._config.faults is None:
            self.exchange.forgive(env)


def _raise_first(errors: dict[int, BaseException], timesteps: dict[int, Any]) -> None:
    """Raises the first env's error, with those of other envs in a note, and with ``timesteps``."""
    if not errors:
        return
    first, *others = sorted(errors)
    error = errors[first]
    if others:
        other_errors = "; ".join(f"env {env}: {errors[env]!r}" for env in others)
        add_note(error, f"At the same time: {other_errors}")
    try:
        error.timesteps = timesteps  # type: ignore[attr-defined]
    except AttributeError:
        log.warning("%r takes no attribute: timesteps of envs %s are lost", error, [*timesteps])
    raise error


def _start_exchange(env_fns: Sequence[Callable[[], Any]], config: EnvManagerConfig) -> Exchange:
    # The manager counts the retries of resets, so the exchange only needs to limit restarts of
    # processes that make no progress.
    default = FaultPolicy(max_restarts=10 + config.max_retry, window_s=math.inf, backoff_s=0.0)
    policy = config.faults or default
    limits = {
        name: getattr(policy, name) or getattr(config, name)
        for name in ("step_timeout", "reset_timeout")
    }
    has_limits = any(limits.values())
    num_workers = config.num_workers
    if num_workers is None and (has_limits or config.retry_type == "renew"):
        num_workers = len(env_fns)
    # Only a new process ends C code that hangs; the user's policy may try to interrupt first.
    timeout_action = "reset" if policy.on_timeout == "reset" else "restart"
    # The exchange's policy handles exceptions of these types; the manager raises all others.
    handled_types: tuple[type[Exception], ...] = () if policy.on_error == "raise" else (Exception,)
    if timeout_action == "reset":
        handled_types = *handled_types, EnvTimeoutError
    return Exchange(
        [
            partial(
                ManagedEnv.made_by,
                env_fn,
                index=index,
                reset_inplace=config.reset_inplace,
                in_messages=not config.shared_memory,
                raises=handled_types,
            )
            for index, env_fn in enumerate(env_fns)
        ],
        name="SubprocessEnvManager",
        shared_memory=config.shared_memory,
        copy=config.copy_on_get,
        context=config.context,
        autoreset_mode=AutoresetMode.DISABLED,
        num_workers=num_workers,
        step_timeout=config.step_timeout,
        reset_timeout=config.reset_timeout,
        faults=replace(
            policy,
            on_crash="restart",
            on_timeout=timeout_action if has_limits else "raise",
            **limits,
        ),
        num_buffers=_NUM_BUFFERS,
        hold_batches=_HOLD_BATCHES,
    )


def _unwrap_numbers(space: Any, actions: Any) -> Any:
    """Replaces arrays of size 1, which DI-engine's policies return, by numbers."""
    if space.shape != ():
        return actions
    return [each[0] if getattr(each, "shape", None) == (1,) else each for each in actions]

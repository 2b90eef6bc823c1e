"""Asks envs through a ``ShmVectorEnv`` and takes their answers, one by one, as they come.

The batches of ``recv`` have one dtype for a key of all infos; a manager returns each env's info as
the env returned it, and acts on each env's fault: so this takes them before they are batched.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from shmvec._parent.arguments import AutoresetMode, given_once
from shmvec._parent.partial import EnvsFailed
from shmvec.adapters.actions import batched
from shmvec.adapters.ding.config import EnvManagerConfig
from shmvec.adapters.ding.env import NOTE, ManagedEnv, Note, Orders
from shmvec.faults import EnvTimeoutError, Failure, Fault, FaultPolicy, WorkerCrashError
from shmvec.vector_env import ShmVectorEnv

__all__ = ["Answer", "Envs", "exception_of"]

_PLAIN = Note()
_FRAMES = 4  # copy_on_get=False: results of an env that there is room for,
_HELD = 2  # and for how many further batches one is not written again


@dataclass
class Answer:
    """What came back from one env.

    Attributes:
        env: Its index.
        observation: Its observation.
        reward: Its reward.
        terminated: Whether its episode ended.
        truncated: Whether it was cut off.
        info: As the env returned it.
        note: What the env's wrapper tells besides.
        fault: What has befallen its worker.
        unreadable: Why the answer could not be read, if it could not.
    """

    env: int
    observation: Any = None
    reward: Any = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] | None = None
    note: Note = _PLAIN
    fault: Fault | None = None
    unreadable: Failure | None = None


class Envs:
    """The envs of a manager that is launched."""

    def __init__(self, env_fns: Sequence[Callable[[], Any]], config: EnvManagerConfig) -> None:
        """Starts the workers and builds the envs.

        Raises:
            ValueError: Time limits, or numbers of workers, that cannot be.
            Exception: What an env_fn raises, and as ``ShmVectorEnv``.
        """
        self.policy = config.faults or FaultPolicy()
        step_timeout = given_once("step_timeout", config.step_timeout, self.policy.step_timeout)
        reset_timeout = given_once("reset_timeout", config.reset_timeout, self.policy.reset_timeout)
        limited = step_timeout is not None or reset_timeout is not None
        num_workers = config.num_workers
        if num_workers is None and (limited or config.retry_type == "renew"):
            num_workers = len(env_fns)
        # What the core restarts anyway the manager may still raise. Resets are tried again by the
        # manager, so the core's limit is for those that make no progress at all.
        bounded = config.faults is not None
        core = FaultPolicy(
            on_crash="restart",
            on_timeout=_cure_of_timeouts(self.policy) if limited else "raise",
            step_timeout=step_timeout,
            reset_timeout=reset_timeout,
            max_restarts=self.policy.max_restarts if bounded else 10 + int(config.max_retry),
            window_s=self.policy.window_s if bounded else float("inf"),
            backoff_s=self.policy.backoff_s if bounded else 0.0,
        )
        self._forgiving = not bounded
        self.vector_env = ShmVectorEnv(
            [
                partial(  # type: ignore[misc]
                    ManagedEnv, env_fn, index, config.reset_inplace, not config.shared_memory
                )
                for index, env_fn in enumerate(env_fns)
            ],
            shared_memory=config.shared_memory,
            copy=config.copy_on_get,
            context=config.context,
            autoreset_mode=AutoresetMode.DISABLED,
            num_workers=num_workers,
            faults=core,
            batch_size=None if config.copy_on_get else len(env_fns),
            num_buffers=_FRAMES,
            hold_batches=None if config.copy_on_get else _HELD,
        )
        self._space = self.vector_env.single_observation_space
        self._recovery = self.vector_env._recovery

    # ---- asking ------------------------------------------------------------------------------

    def step(self, envs: Sequence[int], actions: Sequence[Any]) -> None:
        """Asks envs to step, with an action each."""
        space = self.vector_env.single_action_space
        try:
            batch = batched(space, actions)
        except ValueError as error:
            raise ValueError(f"{error} (These are places among envs {list(envs)}.)") from None
        # Policies of DI-engine give numbers as arrays of one.
        self.vector_env.send(_with_numbers(space, batch), list(envs))

    def reset(self, envs: Sequence[int], orders: Sequence[Orders] | None) -> None:
        """Asks envs to reset; with orders each, or as they were told last."""
        ids = np.array(envs, np.intp)
        self.vector_env.async_reset(options=orders, env_id=ids)  # type: ignore[arg-type]
        if orders is not None:
            # A new process must not repeat what may have ended the old one before the manager
            # has counted that: without orders it says that it is fresh.
            self._recovery.resets(ids, None, None)

    def renew(self, env: int) -> None:
        """Puts a new process in the place of an env's."""
        self.vector_env.restart([env])

    def call(self, envs: Sequence[int], name: str, *args: Any) -> list[Any]:
        """Calls a method of the envs' wrappers; no env may be out."""
        return list(self.vector_env.call_some(list(envs), name, *args))

    def is_out(self, env: int) -> bool:
        """Whether an env was asked something whose answer was not taken."""
        try:
            self.vector_env._partial.check(np.array([env], np.intp))
        except ValueError:
            return True
        return False

    def generation(self, env: int) -> int:
        """How often an env's worker has been restarted."""
        return self._recovery._restarts[self._recovery._worker_of[env]]

    def goes_on(self, env: int) -> None:
        """An env is well again, or the caller has been told that it is not: count anew."""
        if self._forgiving:
            self._recovery._recent[self._recovery._worker_of[env]].clear()

    def count(self, failure: Failure, cure: str) -> Fault:
        """Counts, as a fault, what an env has raised.

        Raises:
            TooManyFaultsError: There were more than the policy allows; all is closed.
        """
        worker = self._recovery._worker_of[failure.env]
        self._recovery.counts["errors"] += 1
        try:
            return self._recovery._note(replace(failure, worker=worker), cure)
        except WorkerCrashError:
            self.vector_env._abandon()
            raise

    # ---- answers -----------------------------------------------------------------------------

    def answers(self, count: int, timeout: float | None) -> list[Answer]:
        """Waits for so many answers; those that are there, less when the time is up.

        Args:
            count: At most as many as were asked.
            timeout: Seconds to wait. None: as long as it takes.

        Raises:
            WorkerCrashError: Processes could not be kept alive; all is closed.
        """
        vector_env = self.vector_env
        vector_env._idle_loop("recv", asking=True)
        batches = vector_env._partial
        try:
            taken = batches.take(vector_env.num_envs, count, timeout)
        except EnvsFailed as failed:
            return [Answer(failure.env, unreadable=failure) for failure in failed.failures]
        except multiprocessing.TimeoutError:
            return []
        except WorkerCrashError:
            vector_env._abandon()
            raise
        envs = taken.tolist()
        infos = [batches.info_of(env) for env in envs]
        faults = {env: told[0] for env, told in self._recovery.told.items() if env in envs}
        observations, rewards, terminations, truncations, _ = batches.results(taken)
        rows = _rows(self._space, observations, len(envs))
        found = []
        for row, env in enumerate(envs):
            info = infos[row]
            note = info.pop(NOTE, _PLAIN)
            found.append(
                Answer(
                    env,
                    rows[row],
                    rewards[row] if note.reward is None else note.reward,
                    bool(terminations[row]),
                    bool(truncations[row]),
                    info,
                    note,
                    faults.get(env),
                )
            )
        return found


def exception_of(fault: Fault, env: int, operation: str, limit: float | None) -> BaseException:
    """What a fault of an env is raised as, if it is raised."""
    message = f"env {env}: {fault.message}; its process was replaced, and reset() goes on"
    if fault.type == EnvTimeoutError.__name__ and limit is not None:
        late = EnvTimeoutError(env, operation, limit)
        late.args = (message,)
        return late
    error = WorkerCrashError(message)
    error.summary, error.workers, error.envs = fault.message, (fault.worker,), (env,)
    return error


def _rows(space: spaces.Space[Any], batch: Any, count: int) -> Sequence[Any]:
    """The parts of a batch, one for each of so many envs; of arrays views, unless numbers."""
    if type(batch) is np.ndarray:  # the usual
        return list(batch)
    if isinstance(space, spaces.Dict):
        parts = {key: _rows(part, batch[key], count) for key, part in space.spaces.items()}
        return [{key: values[row] for key, values in parts.items()} for row in range(count)]
    if isinstance(space, spaces.Tuple):
        lists = [_rows(part, batch[i], count) for i, part in enumerate(space.spaces)]
        return [tuple(values[row] for values in lists) for row in range(count)]
    return [batch[row] for row in range(count)]


def _with_numbers(space: spaces.Space[Any], batch: Any) -> Any:
    """A batch of actions in which arrays of one are numbers, where the space has numbers."""
    if isinstance(space, spaces.Dict):
        return {key: _with_numbers(part, batch[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(_with_numbers, space.spaces, batch))
    return [_number(action) for action in batch] if space.shape == () else batch


def _number(action: Any) -> Any:
    if getattr(action, "shape", None) == (1,):
        return action[0]
    return action


def _cure_of_timeouts(policy: FaultPolicy) -> str:
    """Nothing but a new process ends C code that hangs; a policy may try to interrupt first."""
    return "reset" if policy.on_timeout == "reset" else "restart"

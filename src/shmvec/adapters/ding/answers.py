"""Asks envs through an ``Exchange`` and takes their answers, one by one, as they come."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from shmvec.adapters._shared import batched
from shmvec.adapters.ding.config import EnvManagerConfig
from shmvec.adapters.ding.env import NOTE, ManagedEnv, Note, Orders
from shmvec.adapters.ding.spaces import Numbers
from shmvec.exchange import AutoresetMode, Exchange, Told, given_once
from shmvec.faults import Failure, FaultPolicy
from shmvec.spaces import mapped, one_of

__all__ = ["Answer", "Envs", "StepResult"]

_PLAIN = Note()
_FRAMES = 4  # copy_on_get=False: results of an env that there is room for,
_HELD = 2  # and for how many further batches one is not written again

# Observation, reward, terminated, truncated, and the info as the env returned it.
StepResult: TypeAlias = tuple[Any, Any, bool, bool, dict[str, Any]]


@dataclass
class Answer:
    """What came back from one env.

    Attributes:
        env: Its index.
        result: What it returned, a reset too; or why that could not be read.
        note: What the env's wrapper tells besides.
        told: What has befallen its worker.
    """

    env: int
    result: StepResult | Failure
    note: Note = _PLAIN
    told: Told | None = None


class Envs:
    """The envs of a manager that is launched.

    Attributes:
        exchange: Through which they are asked.
        policy: What is done when one fails.
    """

    def __init__(self, env_fns: Sequence[Callable[[], Any]], config: EnvManagerConfig) -> None:
        """Starts the workers and builds the envs.

        Raises:
            ValueError: Time limits, or numbers of workers, that cannot be.
            Exception: What an env_fn raises, and as ``Exchange``.
        """
        self.policy = policy = config.faults or FaultPolicy()
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
        self._forgiving = config.faults is None
        limits = FaultPolicy(max_restarts=10 + config.max_retry, window_s=math.inf, backoff_s=0.0)
        core = replace(
            limits if self._forgiving else policy,
            on_crash="restart",
            on_error="raise",
            on_timeout=late if limited else "raise",
            step_timeout=step_timeout,
            reset_timeout=reset_timeout,
        )
        self.exchange = Exchange(
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

    def step(self, envs: Sequence[int], actions: Sequence[Any]) -> None:
        """Asks envs to step, with an action each."""
        space = self.exchange.single_action_space
        if isinstance(space, Numbers):
            self.exchange.ask(envs, space.rows(actions))
            return
        try:
            batch = batched(space, actions)
        except ValueError as error:
            raise ValueError(f"{error} (These are places among envs {list(envs)}.)") from None
        # Policies of DI-engine give numbers as arrays of one.
        self.exchange.ask(envs, mapped(space, _with_numbers, space, batch))

    def reset(self, envs: Sequence[int], orders: Sequence[Orders] | None) -> None:
        """Asks envs to reset; with orders each, or as they were told last."""
        # A new process must not repeat what may have ended the old one before the manager has
        # counted that: without orders it says that it is fresh.
        self.exchange.ask_reset(envs, options=orders, repeat=False)

    def goes_on(self, env: int) -> None:
        """An env is well again, or the caller has been told that it is not: count anew."""
        if self._forgiving:
            self.exchange.forgive(env)

    def answers(self, count: int, timeout: float | None) -> list[Answer]:
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
        found = [Answer(failure.env, failure) for failure in taken.failures]
        for row, env in enumerate(taken.envs.tolist()):
            info = taken.infos[row]
            note = info.pop(NOTE, _PLAIN)
            reward = taken.rewards[row] if note.reward is None else note.reward
            ended = bool(taken.terminations[row]), bool(taken.truncations[row])
            found.append(Answer(env, (rows[row], reward, *ended, info), note, taken.told.get(env)))
        return found


def _with_numbers(space: Any, actions: Any) -> Any:
    """Actions in which arrays of one are numbers, where the space has numbers."""
    if space.shape != ():
        return actions
    return [each[0] if getattr(each, "shape", None) == (1,) else each for each in actions]

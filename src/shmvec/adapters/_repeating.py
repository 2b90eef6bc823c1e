"""Envs that are asked one by one; what a worker's crash has cut off is repeated.

The core truncates an episode that a worker's death cut off. Here a new one begins instead: the
env is reset, the step is made once more, and its info says so. A step after an episode's end resets
the env first, in the worker and in the same request. So the core must not know of ends, in whose
modes such a step is a reset or an error: they travel in infos, which costs nothing where there is
none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from multiprocessing import TimeoutError as WaitTimeoutError
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from shmvec.adapters._shared import batched
from shmvec.exchange import AutoresetMode, EnvFn, Exchange, HostedEnv
from shmvec.faults import Failure, FaultPolicy, WorkerCrashError, log_as_gymnasium_does
from shmvec.spaces import mapped, one_of

_ENDED = "shmvec.ended"  # in an info: 1: terminated; 2: truncated; 3: both


class Episodes(HostedEnv):
    """An env as the core steps it: ends of episodes go into infos, and it is closed once."""

    def __init__(self, env: Any) -> None:
        """Takes the env."""
        super().__init__(env)
        self._over = False
        self._closed = False

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of the env or one of its wrappers."""
        return self.close if name == "close" else super().get_wrapper_attr(name)

    def reset(self, **arguments: Any) -> Any:
        """Resets the env."""
        result = self.env.reset(**arguments)
        self._over = False
        return result

    def step(self, action: Any) -> Any:
        """Resets the env if its episode is over, and steps it."""
        # A copy: the step may change the arrays.
        began = deepcopy(self.reset()) if self._over else None
        result = self.env.step(action)
        if len(result) != 5:
            return result  # the core says what is wrong
        observation, reward, terminated, truncated, info = result
        if terminated or truncated:
            self._over = True
            info = {**info, _ENDED: bool(terminated) + 2 * bool(truncated)}
        if began is not None:
            info = {**info, "reset_observation": began[0], "reset_info": began[1]}
        return observation, reward, False, False, info

    def close(self) -> None:
        """Closes the env, once."""
        if not self._closed:
            self._closed = True
            self.env.close()


def _hosted(env_fn: EnvFn) -> Any:
    """Makes an env, wrapped in :class:`Episodes` unless the core will refuse the env."""
    env = env_fn()
    needed = ("reset", "step", "observation_space", "action_space")
    return Episodes(env) if all(hasattr(env, name) for name in needed) else env


def _take_end(info: dict[str, Any]) -> tuple[bool, bool]:
    """Takes out of an info how the step ended the episode: (terminated, truncated)."""
    ended = int(info.pop(_ENDED, 0))
    return bool(ended & 1), bool(ended & 2)


@dataclass(frozen=True)
class Step:
    """A request to make a step.

    Attributes:
        action: Its action.
    """

    action: Any


@dataclass(frozen=True)
class Reset:
    """A request to reset.

    Attributes:
        seed: For its generator, or None.
        options: For it, or None.
    """

    seed: int | None = None
    options: dict[str, Any] | None = None


# What the env has returned (five values for a step, two for a reset), or what it has raised.
Answer: TypeAlias = tuple[Any, ...] | Failure


class RepeatingEnvs:
    """Envs that are asked one by one, in processes that are started without waiting for them.

    Attributes:
        exchange: The exchange that asks them; its ``initialize`` waits for them.
        over: Whether an env's episode is over, for each.
    """

    def __init__(
        self, env_fns: Sequence[EnvFn], faults: FaultPolicy | None = None, **options: Any
    ) -> None:
        """Starts the processes.

        Args:
            env_fns: One for each env.
            faults: What is done when a worker dies. None: it is restarted.
            **options: Further arguments of ``Exchange``.
        """
        options.setdefault("num_workers", len(env_fns))
        self.exchange = Exchange(
            [partial(_hosted, env_fn) for env_fn in env_fns],
            name="SubprocessEnv",  # what messages and processes are called by
            autoreset_mode=AutoresetMode.DISABLED,
            faults=faults or FaultPolicy(on_crash="restart", backoff_s=0.01),
            wait=False,
            **options,
        )
        self.over = [False] * len(env_fns)
        self._resets: Mapping[int, Reset] = {}  # those in flight, or the last ones
        self._options: dict[int, Any] = {}  # of each env's last reset
        self._faults: dict[int, dict[str, Any]] = {}  # those that are in no info yet
        self._open = set(range(len(env_fns)))

    # ---- steps and resets --------------------------------------------------------------------

    def begin(self, requests: Mapping[int, Step | Reset]) -> None:
        """Asks envs and does not wait; :meth:`finish` must follow.

        Args:
            requests: By env.

        Raises:
            ValueError: The number or shape of the actions is wrong. Nothing was sent.
            TypeError: Their dtype is. Nothing was sent.
        """
        self.exchange.discard()  # what an interrupted call has left in flight
        self.exchange.recycle()
        self._send(requests)

    def _send(self, requests: Mapping[int, Step | Reset]) -> None:
        """Asks envs to step or reset; first to reset if a crash has cut their episode off."""
        steps: dict[int, Any] = {}
        resets: dict[int, Reset] = {}
        for env, asked in requests.items():
            if isinstance(asked, Reset):
                resets[env] = asked
            elif self.exchange.over(env):  # the core knows only of ends by crashes
                resets[env] = Reset(None, self._options.get(env))
            else:
                steps[env] = asked.action
        self._resets = resets
        if steps:
            actions = batched(self.exchange.single_action_space, list(steps.values()))
            self.exchange.ask(list(steps), actions)
        if resets:
            seeds: list[Any] = [asked.seed for asked in resets.values()]
            options: list[Any] = [asked.options for asked in resets.values()]
            self._options.update(zip(resets, options, strict=True))
            given = [None if all(x is None for x in each) else each for each in (seeds, options)]
            self.exchange.ask_reset(list(resets), *given)

    def finish(self, requests: Mapping[int, Step | Reset]) -> dict[int, Answer]:
        """Waits for what :meth:`begin` has asked, and repeats what was lost.

        Args:
            requests: The same.

        Returns:
            By env. The info of one that was restarted has ``fault``; after a repeated step also
            ``reset_observation`` and ``reset_info``, with which the new episode began.

        Raises:
            WorkerCrashError: A worker died, and the policy does not restart it, or not again.
            EnvTimeoutError: An env takes longer than its time limit.
        """
        space = self.exchange.single_observation_space
        waiting = requests
        answers: dict[int, Answer] = {}
        began: dict[int, tuple[Any, dict[str, Any]]] = {}  # with which a step is repeated
        while waiting:
            taken = self.exchange.take()
            if taken.failures:
                log_as_gymnasium_does(taken.failures)
            answers.update({failure.env: failure for failure in taken.failures})
            self._faults.update({env: report.fault.info for env, report in taken.reports.items()})
            for row, env in enumerate(taken.envs.tolist()):
                if env in taken.reports and taken.reports[env].cut_off:
                    continue  # asked once more below
                observation, info = one_of(space, taken.observations, row), taken.infos[row]
                if env not in self._resets:
                    reward = float(taken.rewards[row])
                    terminated, truncated = _take_end(info)
                    self.over[env] = terminated or truncated
                    if "reset_info" in info:
                        self._options[env] = None
                    if env in began:
                        info["reset_observation"], info["reset_info"] = began[env]
                    answers[env] = observation, reward, terminated, truncated, info
                elif isinstance(waiting[env], Step):
                    began[env] = observation, info
                    continue
                else:
                    self.over[env] = False
                    answers[env] = observation, info
                if env in self._faults:
                    info["fault"] = self._faults.pop(env)
            waiting = {env: asked for env, asked in waiting.items() if env not in answers}
            self._send(waiting)
        return answers

    # ---- calls -------------------------------------------------------------------------------

    def call_one(self, env: int, name: str) -> Any:
        """What a method of an env returns; if its worker dies it is reset and called again.

        Raises:
            WorkerCrashError: A worker died, and the policy does not restart it, or not again.
            Exception: Whatever the env raises.
        """
        while True:
            self.exchange.discard()
            try:
                return self.exchange.call(name, envs=[env])[0]
            except WorkerCrashError:
                if self.exchange.closed:
                    raise
            if self.exchange.over(env):  # else it was another one's worker
                reset = {env: Reset(None, self._options.get(env))}
                self.begin(reset)
                answer = self.finish(reset)[env]
                if isinstance(answer, Failure):
                    raise answer.exception()
                self._faults[env] = answer[-1]["fault"]

    # ---- closing -----------------------------------------------------------------------------

    def leave(self, envs: Sequence[int], timeout: float | None) -> bool:
        """Closes some envs, whose processes end with the last one.

        Args:
            envs: Which.
            timeout: Seconds that they may take.

        Returns:
            Whether none is left, so that ``exchange.close`` is due.

        Raises:
            Exception: What an env's ``close`` raises.
        """
        self._open.difference_update(envs)
        if not self._open or self.exchange.closed:
            return True
        try:
            self.exchange.discard()
            self.exchange.command("call", ("close", (), {}), envs)
            self.exchange.returned(envs, timeout)
        except WorkerCrashError:
            if self.exchange.closed:
                raise
        except WaitTimeoutError:  # no later call may wait for these
            for owned in self.exchange.ranges:
                if not set(envs).isdisjoint(owned):
                    left = self._open.isdisjoint(owned)
                    (self.exchange.end_workers if left else self.exchange.restart)(owned)
        return False


def check_action(space: Any, action: Any) -> None:
    """Checks an action as the core would, where it must be known before anything is sent.

    Args:
        space: Action space of the env.
        action: One action.

    Raises:
        ValueError: Its shape is wrong.
        TypeError: Its dtype is.
    """
    batched(space, [action])  # has it all its parts?
    mapped(space, _check_part, space, action)


def _check_part(space: Any, action: Any) -> None:
    if not isinstance(
        space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    ):
        return
    array = np.asarray(action)
    for wrong, what, error in (
        (array.shape != space.shape, f"shape {array.shape}", ValueError),
        (not np.can_cast(array.dtype, space.dtype, "same_kind"), f"dtype {array.dtype}", TypeError),
    ):
        if wrong:
            raise error(
                f"wrong actions: {action!r} has {what}, and the action space is {space}. Nothing "
                "was sent to any env."
            )

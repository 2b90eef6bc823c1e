"""A vector env whose envs are asked one by one, and that repeats what a crash has cut off.

The core truncates an episode that a dead worker has broken. Here it is begun anew instead: the env
is reset, the step is made again, and its info says so. A step after an episode's end resets the
env first, too (see ``episodes.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import TimeoutError as WaitTimeoutError
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.async_vector_env import AsyncState

from shmvec._parent.arguments import AutoresetMode
from shmvec._parent.supervisor import InlineWorker, Supervisor
from shmvec.adapters.actions import batched
from shmvec.adapters.episodes import build, take_end
from shmvec.faults import Failure, FaultPolicy, WorkerCrashError, log_as_gymnasium_does
from shmvec.spaces import one_of
from shmvec.vector_env import ShmVectorEnv

__all__ = ["Answer", "RepeatingVectorEnv", "Reset", "Step", "check_action"]


@dataclass(frozen=True)
class Step:
    """Asks an env to make a step.

    Attributes:
        action: Its action.
    """

    action: Any


@dataclass(frozen=True)
class Reset:
    """Asks an env to reset.

    Attributes:
        seed: For its generator, or None.
        options: For it, or None.
    """

    seed: int | None = None
    options: dict[str, Any] | None = None


# What the env has returned (five values for a step, two for a reset), or what it has raised.
Answer: TypeAlias = tuple[Any, ...] | Failure


class RepeatingVectorEnv(ShmVectorEnv):
    """Starts its processes without waiting for them, and asks its envs one by one."""

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        faults: FaultPolicy | None = None,
        **options: Any,
    ) -> None:
        """Starts the processes; :meth:`initialize` waits for them.

        Args:
            env_fns: One for each env.
            faults: What is done when a worker dies. None: it is restarted.
            **options: Further arguments of ``ShmVectorEnv``.
        """
        self._deferred: Supervisor | InlineWorker | None = None
        self._asked: Mapping[int, Step | Reset] = {}
        self._options: dict[int, Any] = {}  # of each env's last reset
        self._untold: dict[int, dict[str, Any]] = {}  # faults that no info has told of yet
        self._over = [False] * len(env_fns)
        self._open = set(range(len(env_fns)))
        options.setdefault("num_workers", len(env_fns))
        if faults is None:
            faults = FaultPolicy(on_crash="restart", backoff_s=0.01)
        super().__init__(
            [partial(build, env_fn) for env_fn in env_fns],
            autoreset_mode=AutoresetMode.DISABLED,
            faults=faults,
            batch_size=None,
            **options,
        )

    def _start(self, workers: Supervisor | InlineWorker) -> None:
        self._deferred = workers

    @property
    def initialized(self) -> bool:
        """Whether :meth:`initialize` has been called."""
        return self._deferred is None

    def initialize(self) -> None:
        """Waits until all envs are built.

        Raises:
            Exception: As ``ShmVectorEnv`` does when it is made; it is closed then.
        """
        workers, self._deferred = self._deferred, None
        if workers is None:
            return
        try:
            super()._start(workers)
        except BaseException:
            self._abandon()
            raise

    def is_over(self, env: int) -> bool:
        """Whether an env's episode is over."""
        return self._over[env]

    # ---- steps and resets --------------------------------------------------------------------

    def begin(self, requests: Mapping[int, Step | Reset]) -> None:
        """Asks envs and does not wait; :meth:`finish` must follow.

        Args:
            requests: By env.

        Raises:
            ValueError: The number or shape of the actions is wrong. Nothing was sent.
            TypeError: Their dtype is. Nothing was sent.
        """
        self._idle_loop("begin", asking=True)  # takes what an interrupted call has left
        steps = {env: asked for env, asked in requests.items() if isinstance(asked, Step)}
        resets = {env: asked for env, asked in requests.items() if isinstance(asked, Reset)}
        self._asked = requests
        try:
            if steps:
                actions = [asked.action for asked in steps.values()]
                self.send(batched(self.single_action_space, actions), list(steps))
            if resets:
                self._begin_resets(resets)
        finally:
            self._masked = True  # whoever comes next takes these results, if finish() does not

    def _begin_resets(self, resets: Mapping[int, Reset]) -> None:
        for env, asked in resets.items():
            self._options[env] = asked.options
            fault = self._recovery._broken.get(env)  # which this reset mends, without a word
            if fault is not None:
                self._untold[env] = fault.info
        seeds = [asked.seed for asked in resets.values()]
        options = [asked.options for asked in resets.values()]
        self.async_reset(
            None if seeds.count(None) == len(seeds) else seeds,
            None if options.count(None) == len(options) else options,
            list(resets),
        )

    def finish(self) -> dict[int, Answer]:
        """Waits for what :meth:`begin` has asked, and repeats what was lost.

        Returns:
            By env. The info of one that was restarted has ``fault``; after a repeated step also
            ``reset_observation`` and ``reset_info``, with which the new episode began.

        Raises:
            WorkerCrashError: A worker died, and the policy does not restart it, or not again.
            EnvTimeoutError: An env takes longer than its time limit.
        """
        asked, self._asked = self._asked, {}
        envs, failures = self._finish_masked()
        told = dict(self._recovery.told)
        self._recovery.told.clear()
        if failures:
            log_as_gymnasium_does(failures)
        answers: dict[int, Answer] = {failure.env: failure for failure in failures}
        for env in told.keys() & answers.keys():
            self._untold[env] = told[env][0].info
        if not len(envs):
            return answers
        infos = {env: self._partial.info_of(env) for env in envs.tolist()}
        observations, rewards, *_ = self._partial.results(envs)
        space = self.single_observation_space
        lost = []
        for row, env in enumerate(envs.tolist()):
            info = infos[env]
            if env in self._untold:
                info["fault"] = self._untold.pop(env)
            if env in told:
                fault, cut_off, _ = told[env]
                info["fault"] = fault.info
                if cut_off:
                    self._untold[env] = fault.info
                    lost.append(env)
                    continue
            observation = one_of(space, observations, row)
            if isinstance(asked[env], Reset):
                self._over[env] = False
                answers[env] = observation, info
                continue
            terminated, truncated = take_end(info)
            self._over[env] = terminated or truncated
            if "reset_info" in info:
                self._options[env] = None
            answers[env] = observation, float(rewards[row]), terminated, truncated, info
        if lost:
            answers.update(self._repeat({env: asked[env] for env in lost}))
        return answers

    def _repeat(self, lost: Mapping[int, Step | Reset]) -> dict[int, Answer]:
        """Resets envs whose worker died in a step, with their last options, and steps them."""
        self.begin({env: Reset(None, self._options.get(env)) for env in lost})
        resets = self.finish()
        self.begin({env: lost[env] for env in lost if not isinstance(resets[env], Failure)})
        answers = {**resets, **self.finish()}
        for env, answer in answers.items():
            reset = resets[env]
            if isinstance(answer, Failure) or isinstance(reset, Failure):
                continue
            observation, info = reset
            fault = info.pop("fault")
            if "reset_observation" not in answer[-1]:  # else this step was repeated as well
                answer[-1].update(fault=fault, reset_observation=observation, reset_info=info)
        return answers

    # ---- calls -------------------------------------------------------------------------------

    def call_one(self, env: int, name: str) -> Any:
        """What a method of an env returns; if its worker dies it is reset and called again.

        Raises:
            WorkerCrashError: A worker died, and the policy does not restart it, or not again.
            Exception: Whatever the env raises.
        """
        while True:
            try:
                return self.call_some([env], name)[0]
            except WorkerCrashError:
                if self.closed:
                    raise
            if env in self._recovery._broken:  # else it was another one's worker
                self.begin({env: Reset(None, self._options.get(env))})
                answer = self.finish()[env]
                if isinstance(answer, Failure):
                    raise answer.exception()
                self._untold[env] = answer[-1]["fault"]

    # ---- closing -----------------------------------------------------------------------------

    def leave(self, envs: Sequence[int], timeout: float | None) -> bool:
        """Closes some envs, whose processes end with the last one.

        Args:
            envs: Which.
            timeout: Seconds that they may take.

        Returns:
            Whether none is left, so that ``close`` is due.

        Raises:
            Exception: What an env's ``close`` raises.
        """
        self._open.difference_update(envs)
        if not self._open or self.closed:
            return True
        chosen = frozenset(envs)
        try:
            loop = self._idle_loop("close")
            self._begin(
                AsyncState.WAITING_CALL,
                loop,
                self._command("call", lambda _: ("close", (), {}, chosen)),
            )
            self.call_wait(timeout)
        except WorkerCrashError:
            if self.closed:
                raise
        except WaitTimeoutError:  # nobody must wait for these any more
            assert self._workers is not None
            for worker, owned in enumerate(self._workers.ranges):
                if chosen.intersection(owned):
                    self._workers.end(worker)
        return False

    def begin_close(self) -> None:
        """Tells the workers to close their envs, and does not wait."""
        if self._deferred is not None:
            self._deferred.dismiss()
        elif self._loop is not None and self.num_workers:
            with suppress(RuntimeError):  # the ring is full: close() will see
                self._loop.post_close()

    def _stop(self, timeout: float | None, terminate: bool) -> None:
        if self._deferred is not None:
            self._deferred.dismiss()
        super()._stop(timeout, terminate)


def check_action(space: Any, action: Any) -> None:
    """Checks an action as the core would, where it must be known before anything is sent.

    Args:
        space: That of the env's actions.
        action: One action.

    Raises:
        ValueError: Its shape is wrong.
        TypeError: Its dtype is.
    """
    batched(space, [action])  # has it all its parts?
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            check_action(part, action[key])
    elif isinstance(space, spaces.Tuple):
        for part, value in zip(space.spaces, action, strict=True):
            check_action(part, value)
    elif isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        array = np.asarray(action)
        if array.shape != space.shape:
            raise ValueError(
                f"wrong actions: {action!r} has shape {array.shape}, and the action space is "
                f"{space}. Nothing was sent to any env."
            )
        if not np.can_cast(array.dtype, space.dtype, "same_kind"):
            raise TypeError(
                f"wrong actions: {action!r} has dtype {array.dtype}, and the action space is "
                f"{space}. Nothing was sent to any env."
            )

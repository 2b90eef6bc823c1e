"""What ``ShmVectorEnv`` does beyond Gymnasium's contract: partial batches, masks and rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector.async_vector_env import AsyncState

from shmvec._core.parent import ParentLoop
from shmvec._parent.arguments import (
    Options,
    checked_mask,
    checked_options,
    checked_seeds,
    of_each_env,
)
from shmvec._parent.partial import (
    EnvsFailed,
    PartialBatches,
    checked_env_ids,
    existing_env_ids,
    given_actions,
    release,
)
from shmvec._parent.recovery import Recovery
from shmvec._parent.rollout import Rollout, Rollouts
from shmvec.faults import Failure, WorkerCrashError, log_as_gymnasium_does, raise_failures

__all__ = ["BeyondGymnasium", "StepResults"]

# Names that `call` refuses; the last two are commands of AsyncVectorEnv's worker.
_NOT_CALLED = ("reset", "step", "close", "_setattr", "_check_spaces")

# Observations, rewards, terminations, truncations, infos.
StepResults: TypeAlias = tuple[
    Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]
]


class BeyondGymnasium:
    """Methods of ``ShmVectorEnv``, which has what they need.

    It is a ``VectorEnv`` by a direct base, as skrl wants it: so this one is none.
    """

    num_envs: int
    single_action_space: gym.Space[Any]
    batch_size: int | None
    _partial: PartialBatches
    _rollouts: Rollouts
    _recovery: Recovery
    _masked: bool  # the single envs that were asked are those of a masked step or reset
    _abandon: Callable[[], None]
    _idle_loop: Callable[..., ParentLoop]
    _begin: Callable[[AsyncState, ParentLoop, Callable[[], object]], None]
    call_wait: Callable[[], tuple[Any, ...]]
    _settle: Callable[[ParentLoop], None]
    _command: Callable[[str, Callable[[range], Any]], Callable[[], None]]
    _packed: Callable[[str, Callable[[range], Any]], list[Any]]

    def async_reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
        env_id: npt.ArrayLike | None = None,
    ) -> None:
        """Starts to reset envs; :meth:`recv` returns those that are ready first.

        Args:
            seed: An int: env ``i`` gets ``seed + i``. A list: one seed (or None) for each of the
                envs. None: they go on with the generators they have.
            options: Passed to the envs' ``reset``; of a list, each gets its own. ``reset_mask``
                as for :meth:`reset`.
            env_id: Which envs, int ``(n,)``. None: all.

        Raises:
            ClosedEnvironmentError: After ``close``.
            AlreadyPendingCallError: Another call waits for its results.
            ValueError: There is no such env, it is named twice, or it has been asked already;
                seeds, options or mask are wrong. Nothing was sent.
            TypeError: A seed is no integer, or the mask no array of bools. Nothing was sent.
        """
        loop = self._idle_loop("async_reset", asking=True)
        envs = None if env_id is None else existing_env_ids(env_id, self.num_envs)
        self._ask_to_reset(loop, seed, options, envs)

    def _ask_to_reset(
        self,
        loop: ParentLoop,
        seed: int | Sequence[int | None] | None,
        options: Options,
        env_id: npt.NDArray[np.intp] | None = None,
    ) -> None:
        self._settle(loop)
        envs, payload = self._reset_arguments(seed, options, env_id)
        command = None if payload is None else partial(self._packed, "reset", payload)
        self._partial.reset(envs, command)

    def _reset_arguments(
        self,
        seed: int | Sequence[int | None] | None,
        options: Options,
        env_id: npt.NDArray[np.intp] | None = None,
    ) -> tuple[npt.NDArray[np.intp], Callable[[range], Any] | None]:
        """The envs to reset, and what makes a worker's arguments; None if there are none."""
        mask: Any = None
        if env_id is not None:
            mask = np.isin(np.arange(self.num_envs), env_id)
        elif isinstance(options, dict) and "reset_mask" in options:
            options = dict(options)
            mask = checked_mask(options.pop("reset_mask"), self.num_envs)
        chosen = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        seeds = of_each_env(checked_seeds, seed, env_id, self.num_envs)
        each = of_each_env(checked_options, options, env_id, self.num_envs)
        self._partial.check(chosen)
        self._recovery.resets(chosen, seeds, each)
        if seeds is None and each is None:
            return chosen, None
        return chosen, lambda envs: tuple(
            None if values is None else values[envs.start : envs.stop]
            for values in (seeds, each, mask)
        )

    def send(self, actions: Any, env_id: npt.ArrayLike | None = None) -> None:
        """Starts to step some envs; :meth:`recv` returns those that are ready first.

        The interface is that of EnvPool.

        Args:
            actions: One for each of these envs, batched as ``action_space`` says for so many.
            env_id: Which envs, int ``(n,)``: usually the last batch's ``infos["env_id"]``.
                None: all.

        Raises:
            ClosedEnvironmentError: After ``close``.
            AlreadyPendingCallError: Another call waits for its results.
            ValueError: There is no such env, it is named twice, or it has been asked already; the
                number or shape of the actions is wrong. Nothing was sent.
            TypeError: The dtype of the actions or of ``env_id`` is wrong. Nothing was sent.
            BufferError: With ``copy=False``: all buffers of an env are held. Nothing was sent.
        """
        self._send(checked_env_ids(env_id, self.num_envs), actions)

    def _send(self, envs: npt.NDArray[np.intp], actions: Any) -> None:
        loop = self._idle_loop("send", asking=True)
        self._settle(loop)
        self._partial.send(envs, actions)

    def recv(self, *, min_envs: int | None = None, timeout: float | None = None) -> StepResults:
        """Waits for a batch of envs: those that have been ready for longest.

        Every env is returned once for each time it was asked, by ``send`` or ``async_reset``, and
        none twice before another that was ready earlier.

        Args:
            min_envs: Return as soon as so many are ready, with all that are, at most
                ``batch_size``; and with those that are when the time is up. None: ``batch_size``.
            timeout: Seconds to wait. None: as long as it takes.

        Returns:
            As :meth:`step`, of the envs in ``infos["env_id"]``, int64 ``(n,)``, in this order. An
            env that was reset has reward 0.

            The arrays are copies. With ``copy=False`` and ``batch_size``, they are views of shared
            memory where the batch is whole workers, in order: choose ``batch_size`` as the number
            of envs of a worker. Such a batch is leased: nothing writes to it until its arrays, and
            what was made of them without a copy, are gone; until :meth:`release`; or until
            ``hold_batches`` further calls.

        Raises:
            ClosedEnvironmentError: After ``close``.
            AlreadyPendingCallError: Another call waits for its results.
            NoAsyncCallError: So many envs have not been asked anything.
            multiprocessing.TimeoutError: The time is up, and less (with ``min_envs``: none) are
                ready. Nothing is lost: call again.
            ValueError: ``min_envs`` is out of range; ``replay_order`` does not fit or is over.
            EnvTimeoutError: An env takes longer than its time limit.
            WorkerCrashError: A worker process died.
            Exception: Whatever an env raises, with the worker's traceback as its cause. That env
                may be reset; the others' results are returned by the next call.

        Example:
            >>> import shmvec
            >>> envs = shmvec.make_vec("CartPole-v1", 4, vector_kwargs={"batch_size": 2})
            >>> envs.async_reset(seed=0)
            >>> for _ in range(3):
            ...     observations, rewards, terminations, truncations, infos = envs.recv()
            ...     envs.send([1, 0], infos["env_id"])
            >>> observations.shape
            (2, 4)
            >>> envs.close()
        """
        size = self.batch_size or self.num_envs
        if min_envs is not None and not 1 <= min_envs <= size:
            raise ValueError(f"min_envs must be between 1 and {size}, got {min_envs}")
        return self._recv(size, min_envs, timeout)

    def _recv(self, count: int, min_envs: int | None, timeout: float | None) -> StepResults:
        self._idle_loop("recv", asking=True)
        return self._partial.results(self._take(count, min_envs, timeout))

    def _take(
        self, count: int, min_envs: int | None, timeout: float | None
    ) -> npt.NDArray[np.intp]:
        """Waits for envs that were asked one by one."""
        try:
            envs = self._partial.take(count, min_envs, timeout)
            self._recovery.recycle()
            return envs
        except EnvsFailed as failed:
            log_as_gymnasium_does(failed.failures)
            raise_failures(failed.failures)
            raise AssertionError from failed
        except WorkerCrashError:
            self._abandon()
            raise

    def release(self, array: npt.NDArray[Any]) -> None:
        """Ends the lease of a batch that :meth:`recv` returned as views: it may be written again.

        Args:
            array: One of its arrays, such as its rewards. A copy holds no lease: nothing is done.

        Raises:
            TypeError: It is no array.
        """
        release(array)

    def rollout(self, length: int, *, pin: bool = False) -> Rollout:
        """Begins a rollout: so many steps, in arrays that workers write step after step.

        Nothing is copied, neither after a step nor for a learner. Two rollouts alternate: you can
        learn from one while the next is being filled. Envs must have been reset before; wrappers
        around the vector env see nothing of the steps.

        Args:
            length: Number of steps.
            pin: Whether the memory is page-locked, for faster transfers to a GPU. Needs torch and
                CUDA.

        Returns:
            The rollout, whose index 0 holds the last results. Step it ``length`` times.

        Raises:
            ClosedEnvironmentError: After ``close``.
            AlreadyPendingCallError: Another call waits for its results.
            TypeError: The length is no integer; observations or actions are not arrays in shared
                memory, or Dicts or Tuples of them.
            ValueError: The length is below 1; episodes that are over are not reset
                (AutoresetMode.DISABLED).
            BufferError: Arrays of the last two rollouts are still in use.
            OSError: There is not enough shared memory.
            RuntimeError: There is no CUDA to page-lock memory for.

        Example:
            >>> import shmvec
            >>> envs = shmvec.make_vec("CartPole-v1", 4)
            >>> _ = envs.reset(seed=0)
            >>> rollout = envs.rollout(8)
            >>> for t in range(8):
            ...     # a policy would look at rollout.observations[t]
            ...     infos = rollout.step([0, 1, 1, 0])
            >>> rollout.observations.shape, rollout.rewards[1:].sum(axis=0)
            ((9, 4, 4), array([8., 8., 8., 8.]))
            >>> envs.close()
        """
        self._settle(self._idle_loop("rollout"))
        return self._rollouts.begin(length, pin)

    def call_some(
        self, env_id: npt.ArrayLike, name: str, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Calls a method of some envs, in parallel, or gets an attribute; as :meth:`call`.

        Args:
            env_id: Indices of the envs, int ``(n,)``.
            name: Of the method or attribute, of the env or one of its wrappers.
            *args: For the method.
            **kwargs: For the method.

        Returns:
            One result for each of these envs, in this order.

        Raises:
            ValueError: There is no such env, or it is named twice; and as :meth:`call`.
            TypeError: ``env_id`` is not of integers.
        """
        loop = self._idle_loop("call_some")
        envs = existing_env_ids(env_id, self.num_envs)
        self._begin(AsyncState.WAITING_CALL, loop, self._calling(envs, name, args, kwargs))
        results = self.call_wait()
        return tuple(results[env] for env in envs.tolist())

    def _calling(
        self, env_id: npt.NDArray[np.intp] | None, name: str, args: Any, kwargs: Any
    ) -> Callable[[], None]:
        """What sends a call of a method of some envs; None: of all."""
        if name in _NOT_CALLED:
            raise ValueError(
                f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
            )
        chosen = None if env_id is None else frozenset(env_id.tolist())
        return self._command("call", lambda envs: (name, args, kwargs, chosen))

    def restart(self, env_id: npt.ArrayLike | None = None) -> None:
        """Restarts the workers of some envs, for simulators that leak.

        Their next step returns a truncation, with ``infos["fault"]``, and resets follow as after
        any other; so it is for the other envs of these workers. Envs whose episode is over go on
        with a reset at once. See ``FaultPolicy``, whose counts this does not touch.

        Args:
            env_id: Indices of envs, int ``(n,)``. None: all.

        Raises:
            ClosedEnvironmentError: After ``close``.
            AlreadyPendingCallError: Another call waits for its results.
            ValueError: There is no such env.
            TypeError: ``env_id`` is not of integers.
            WorkerCrashError: A new worker died while it built its envs.
        """
        envs = existing_env_ids(env_id, self.num_envs)
        self._settle(self._idle_loop("restart", asking=True))
        try:
            self._recovery.restart(envs.tolist())
        except WorkerCrashError:
            self._abandon()
            raise

    def _step_some(self, actions: Any, mask: Any) -> StepResults:
        """Steps the envs of a mask; the others' results are still in the slabs."""
        envs = np.flatnonzero(checked_mask(mask, self.num_envs, "`mask`"))
        loop = self._idle_loop("step")
        self._settle(loop)
        self._partial.send(envs, given_actions(self.single_action_space, actions, envs))
        return loop.results(self._infos_of_masked())

    def _reset_some(
        self, seed: int | Sequence[int | None] | None, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the envs of a mask; the others' observations are still in the slabs."""
        loop = self._idle_loop("reset")
        self._ask_to_reset(loop, seed, options)
        infos = self._infos_of_masked()
        return loop.observe(), infos

    def _infos_of_masked(self) -> dict[str, Any]:
        """Waits for the envs of a mask, which were asked just now."""
        self._masked = True
        envs, failures = self._finish_masked()
        if failures:
            log_as_gymnasium_does(failures)
            raise_failures(failures)
        return self._partial.infos(envs)

    def _finish_masked(self) -> tuple[npt.NDArray[np.intp], list[Failure]]:
        """Waits for the envs of a masked step: those that have made it, and what others raised."""
        try:
            finished = self._partial.finish()
        except WorkerCrashError:
            self._abandon()
            raise
        self._masked = False
        return finished

"""``ShmVectorEnv``: Gymnasium's ``VectorEnv`` contract, and more, translated to an Exchange."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import logger
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv
from gymnasium.vector.async_vector_env import AsyncState

import shmvec
from shmvec._arguments import (
    Options,
    checked_env_ids,
    existing_env_ids,
    masked_env_ids,
    reset_arguments,
    select_actions,
    values_by_env,
)
from shmvec._autoreset import AutoresetMode
from shmvec._core import release
from shmvec._memory.rollout import Rollout, Rollouts
from shmvec._options import Settings, VectorEnvOptions, describe, with_signature_of
from shmvec._processes.worker_function import FunctionEnv
from shmvec.exchange import Exchange, OwnsProcesses
from shmvec.stats import Stats

if TYPE_CHECKING:
    from shmvec.exchange import Answers
    from shmvec.trace import Trace

__all__ = ["ShmVectorEnv", "StepResults"]


# The states between the two parts of a call.
_STEP, _RESET, _CALL = AsyncState.WAITING_STEP, AsyncState.WAITING_RESET, AsyncState.WAITING_CALL

# Observations, rewards, terminations, truncations, infos.
StepResults: TypeAlias = tuple[
    Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]
]

# Names that `call` refuses; the last two are commands of AsyncVectorEnv's worker.
_FORBIDDEN_CALLS = ("reset", "step", "close", "_setattr", "_check_spaces")


class ShmVectorEnv(OwnsProcesses, VectorEnv[Any, Any, npt.NDArray[Any]]):
    """Steps ordinary Gymnasium envs in parallel worker processes, through shared memory.

    A drop-in for :class:`gymnasium.vector.AsyncVectorEnv`: the same arguments, methods, results
    and exceptions; docs/differences.md lists where it does better. Results are those of
    :class:`gymnasium.vector.SyncVectorEnv`, bit for bit, for any number of workers, if an env's
    randomness is its own; docs/settings.md has the details.

    Attributes:
        num_envs: Number of envs.
        num_workers: Number of workers; 0 if the envs live in this process.
        processes: The worker processes, one for each worker that is not the caller.
        single_observation_space: Observation space of one env.
        observation_space: Observation space of the batch.
        single_action_space: Action space of one env.
        action_space: Action space of the batch.
        reward_space: The space of one env's rewards, where they have more than one number; else
            None.
        metadata: A copy of the first env's, with ``autoreset_mode``.
        render_mode: The first env's.
        closed: Whether the vector env has been closed.
        exchange: The :class:`Exchange` that does the work, for code that builds on it.

    Example:
        >>> import gymnasium as gym
        >>> import shmvec
        >>> envs = shmvec.ShmVectorEnv([lambda: gym.make("CartPole-v1")] * 3, num_workers=2)
        >>> observations, infos = envs.reset(seed=42)
        >>> observations.shape, observations.dtype
        ((3, 4), dtype('float32'))
        >>> observations, rewards, terminations, truncations, infos = envs.step([0, 1, 0])
        >>> rewards
        array([1., 1., 1.])
        >>> envs.close()
    """

    # A class attribute, since close() and __del__ must work whatever fails in __init__.
    _exchange: Exchange | None = None

    @with_signature_of(VectorEnvOptions)
    def __init__(self, env_fns: list[Any], settings: Settings) -> None:
        """Starts the workers and builds the envs, all in parallel.

        Raises:
            ValueError: No env_fns, or two that return the same env; a bad number of workers,
                threads or envs in a batch, ``max_concurrency``, ``context``, policy or mode; an
                observation space that cannot be shared memory.
            TypeError: Something in ``env_fns`` is not callable, returns no env, or cannot be
                pickled; ``num_workers`` is no integer; the pair of spaces holds none; a Sequence
                or Graph was to be shared memory.
            RuntimeError: Spaces of the envs differ.
            OSError: There is not enough shared memory.
            WorkerCrashError: A worker process died while it built its envs.
            Exception: Whatever an env_fn raises, with the worker's traceback as its cause.
        """
        super().__init__()
        self._overrides_step_parts = self._overrides("step_async", "step_wait")
        self._lockstep_exchange: Exchange | None = None  # set if step() may call it directly

        self.env_fns = env_fns
        self.num_envs = settings.num_envs
        self.shared_memory = settings.shared_memory
        self.copy = settings.copy
        self.context = settings.context
        self._start_method = settings.method
        self.daemon = settings.daemon
        self.worker = settings.worker
        self.observation_mode = settings.observation_mode
        self.autoreset_mode = settings.autoreset_mode
        self.max_concurrency = settings.max_concurrency
        self.wait_policy = settings.wait_policy
        size = settings.batch_size
        self._min_batch_size, self.batch_size = size if isinstance(size, tuple) else (size, size)
        self._batch_timeout: float | None = settings.batch_timeout
        self._recorded_order = settings.record_order
        order = settings.replay_order
        self._order_replay = None if order is None else OrderReplay(order)
        functions: Sequence[Callable[[], Any]] = self.env_fns
        if self.worker is not None:
            functions = [
                partial(FunctionEnv, self.worker, index, env_fn, self.autoreset_mode)
                for index, env_fn in enumerate(functions)
            ]
            # A worker function resets envs itself, so the core must not.
            settings.autoreset_mode = AutoresetMode.DISABLED
        self._exchange = Exchange(
            functions,
            name=type(self).__name__,
            num_buffers=0 if self.batch_size is None else settings.num_buffers,
            hold_batches=settings.hold_batches,
            may_step_over=settings.autoreset.by_worker or self.worker is not None,
            vector_rewards=True,
            wait=False,
            settings=settings,
        )
        exchange = self._exchange
        exchange.initialize()
        self.num_workers = exchange.num_workers
        self.faults = exchange.policy
        self.metadata = {**exchange.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = exchange.render_mode
        self.single_observation_space = exchange.single_observation_space
        self.observation_space = exchange.observation_space
        self.single_action_space = exchange.single_action_space
        self.action_space = exchange.action_space
        if self.batch_size is None and not self._overrides_step_parts:
            self._lockstep_exchange = exchange
        # A weak reference makes no cycle: a forgotten vector env is freed at once.
        self._rollouts = Rollouts(exchange, weakref.ref(self))

    def __enter__(self) -> ShmVectorEnv:
        """Returns the vector env, which the end of the ``with`` block closes."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the vector env."""
        self.close()

    def __repr__(self) -> str:
        """Names the env, the number of envs and workers, and whether it is closed."""
        name = type(self).__name__
        if self._exchange is None or not self._exchange.initialized:
            return f"{name}(not started)"
        return describe(self, name, self._start_method, self.spec)

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, with a hint, since the single envs may have the attribute."""
        if hasattr(type(self), name):  # a property has raised it
            return object.__getattribute__(self, name)
        hint = ""
        if not name.startswith("_"):
            hint = (
                f". For the single envs, get_attr({name!r}) returns the attribute, and "
                f"call({name!r}, ...) calls the method"
            )
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self
        )

    @property
    def exchange(self) -> Exchange:
        """The exchange below this vector env, for code that asks envs one by one."""
        assert self._exchange is not None
        return self._exchange

    @property
    def reward_space(self) -> Box | None:
        """The space of one env's rewards, a Box of shape ``(k,)``; None: they are numbers."""
        return self.exchange.reward_space

    @property
    def _state(self) -> Any:
        """The pending call, as in AsyncVectorEnv."""
        pending = None if self._exchange is None else self._exchange.pending
        return AsyncState.DEFAULT if pending is None else pending

    def _assert_is_running(self) -> None:
        """Raises ClosedEnvironmentError after ``close``; wrappers of Gymnasium's call it."""
        self.exchange.check_open()

    def _overrides(self, *names: str) -> bool:
        kind = type(self)
        if kind is ShmVectorEnv:
            return False
        return any(getattr(kind, name) is not getattr(ShmVectorEnv, name) for name in names)

    @property
    def closed(self) -> bool:
        """Whether the vector env was closed, by :meth:`close` or by a crash."""
        return self._exchange is not None and self._exchange.closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        """Does nothing: Gymnasium's ``close`` sets it after ``close_extras``, which has done so."""

    @property
    def processes(self) -> list[Any]:
        """The worker processes, one for each worker that is not the caller."""
        return self._exchange.processes if self._exchange is not None else []

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """A copy of the random generator of each env."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each env's random generator."""
        return self.get_attr("np_random_seed")

    # ---- resets ------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Resets all envs, in parallel.

        Args:
            seed: An int: env ``i`` gets ``seed + i``. A list: one seed (or None) for each env.
                None: envs go on with the generators they have.
            options: Passed to every env's ``reset``. A list: one dict (or None) for each env.
                ``options["reset_mask"]``, a bool array of shape ``(num_envs,)``, is not passed:
                only the envs that it marks are reset.

        Returns:
            Observations, batched as ``observation_space`` says, and infos, a dict of arrays. With
            ``batch_size=``, those of the first batch, as :meth:`recv` returns them; the other envs
            are in flight.

        Raises:
            ClosedEnvironmentError: After ``close``.
            ValueError: The number of seeds or options, or the shape of the mask, is wrong.
            TypeError: A seed is no integer, or the mask no array of bools.
            EnvTimeoutError: An env takes longer than its time limit.
            WorkerCrashError: A worker process died.
            Exception: Whatever an env raises, with the worker's traceback as its cause.
        """
        if self.batch_size is not None:
            self.async_reset(seed, options)
            observations, *_, infos = self._recv_at_most(self.batch_size)
            return observations, infos
        if self._overrides("reset_async", "reset_wait"):
            if not (isinstance(options, dict) and "reset_mask" in options):
                begin = partial(self.reset_async, seed, options)
                results: tuple[Any, dict[str, Any]] = self._call_both_parts(begin, self.reset_wait)
                return results
        arguments = reset_arguments(self.num_envs, seed, options)
        return self.exchange.reset(*arguments, gather=self)

    def _call_both_parts(self, begin: Callable[[], object], finish: Callable[[], Any]) -> Any:
        return self.exchange.guard.begin_and_finish(begin, finish)

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
    ) -> None:
        """Starts to reset all envs and does not wait; see :meth:`reset`.

        Raises:
            AlreadyPendingCallError: Another call waits for its results.
        """
        exchange = self.exchange
        exchange.check_pending("reset_async")
        exchange.begin(_RESET, *reset_arguments(self.num_envs, seed, options))

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Waits for what :meth:`reset_async` started.

        Args:
            timeout: Seconds to wait. None: as long as it takes.

        Returns:
            As :meth:`reset`.

        Raises:
            Exception: As :meth:`step_wait`.
        """
        results: tuple[Any, dict[str, Any]] = self.exchange.finish(_RESET, timeout, self)
        return results

    def set_reset_options(self, options: Options, env_id: npt.ArrayLike | None = None) -> None:
        """Sets the options that automatic resets pass to an env's ``reset`` from now on.

        This serves a curriculum, in which the learner chooses the next episodes. It does not wait,
        and may be called at any time, even by another thread or while envs are in flight. An env
        gets the options with its next step or reset, and uses them from the first automatic reset
        that it begins after that; with ``spare_envs``, from the first reset of a spare env. They
        survive a restart of the worker. :meth:`reset` passes its own ``options`` and not these.

        Args:
            options: A dict for all envs, or a list with one (or None) for each. None: none, the
                default. They are copied now, and each reset gets a copy of its own.
            env_id: Which envs, int ``(n,)``. None: all.

        Raises:
            ClosedEnvironmentError: After ``close``.
            TypeError: Options are no dict, or ``env_id`` is not of integers.
            ValueError: The list has another length than there are envs, there is no such env, or
                ``"reset_mask"`` is among the options; or no env is reset automatically
                (AutoresetMode.DISABLED, or ``worker=``).
            Exception: Options cannot be pickled.

        Example:
            >>> import shmvec
            >>> envs = shmvec.make_vec("CartPole-v1", 2)  # it takes its bounds as options
            >>> _ = envs.reset(seed=0)
            >>> envs.set_reset_options({"low": -0.01, "high": 0.01})
            >>> over = [False, False]
            >>> while not all(over):
            ...     observations, _, over, _, _ = envs.step([0, 0])
            >>> observations, *_ = envs.step([0, 0])  # both are reset
            >>> bool((abs(observations) <= 0.01).all())
            True
            >>> envs.close()
        """
        self.exchange.set_reset_options(options, env_id)

    def set_reset_seeds(
        self, seeds: int | Sequence[int | None] | None, env_id: npt.ArrayLike | None = None
    ) -> None:
        """Sets the seed of the next automatic reset of each env, for that one reset.

        This serves level replay: the next episode of an env is that of the seed. It may be called
        at any time, as :meth:`set_reset_options`, and the seed holds for the same reset. With
        ``spare_envs`` it holds for the next episode, even if a spare env has already been reset for
        that: it is then reset again. If the reset is lost with its worker, it is repeated with the
        seed. A seed replaces an earlier one that was not used yet.

        Args:
            seeds: An int: env ``i`` gets ``seeds + i``. A list: one seed (or None) for each env.
                None: no seed; envs go on with the generators they have.
            env_id: Which envs, int ``(n,)``. None: all.

        Raises:
            ClosedEnvironmentError: After ``close``.
            TypeError: A seed is no integer, or ``env_id`` is not of integers.
            ValueError: The list has another length than there are envs, there is no such env, or no
                env is reset automatically (AutoresetMode.DISABLED, or ``worker=``).

        Example:
            >>> import shmvec
            >>> envs = shmvec.make_vec("CartPole-v1", 2)
            >>> first, _ = envs.reset(seed=[7, 8])
            >>> envs.set_reset_seeds([8, 7])
            >>> over = [False, False]
            >>> while not over[0]:
            ...     _, _, over, _, _ = envs.step([0, 0])
            >>> observations, *_ = envs.step([0, 0])  # env 0 is reset
            >>> bool((observations[0] == first[1]).all())
            True
            >>> envs.close()
        """
        self.exchange.set_reset_seeds(seeds, env_id)

    # ---- steps -------------------------------------------------------------------------------

    def step(
        self, actions: Any, env_id: npt.ArrayLike | None = None, *, mask: Any = None
    ) -> StepResults:
        """Steps all envs, in parallel. An env whose episode had ended is reset instead.

        Args:
            actions: One action for each env, batched as ``action_space`` says; lists will do.
                Each env gets its action in the dtype in which you give it. None in a list (not in a
                tuple) leaves that env out.
            env_id: Envs to step, with an action each; their results come in this order. With
                ``batch_size``: as ``send``, and then ``recv``.
            mask: Which envs to step, bool ``(num_envs,)``. The others keep their state, and their
                last results are returned once more, without infos.

        Returns:
            Observations; rewards, float64 ``(num_envs,)``, or ``(num_envs, k)`` in the dtype of
            ``reward_space``; terminations and truncations, bool ``(num_envs,)``; infos, a dict of
            arrays. With ``batch_size`` or ``env_id``, of the envs in ``infos["env_id"]``; see
            :meth:`recv`.

        Raises:
            ClosedEnvironmentError: After ``close``.
            ValueError: The number or the shape of the actions is wrong. Nothing was sent.
            TypeError: Their dtype is wrong. Nothing was sent.
            EnvTimeoutError: An env takes longer than its time limit.
            WorkerCrashError: A worker process died.
            Exception: Whatever an env raises, with the worker's traceback as its cause. The other
                envs have made their step; ``reset`` or ``close`` as you like.
        """
        if env_id is None and mask is None and type(actions) is not list:
            exchange = self._lockstep_exchange
            if exchange is not None:  # the fast path
                return exchange.step(actions, self)
        if type(actions) is list and mask is None and any(action is None for action in actions):
            mask = np.array([action is not None for action in actions])
            if not mask.any():
                raise ValueError(
                    f"wrong actions: all {len(actions)} are None, which leaves their envs out: "
                    "give at least one env an action. Nothing was sent to any env."
                )
        if mask is not None:
            if env_id is not None:
                raise ValueError("step() takes a mask (or None actions) or env_id, not both")
            exchange = self.exchange
            exchange.check_pending("step_async", alone=True)
            envs = masked_env_ids(mask, self.num_envs, "`mask`")
            actions = select_actions(envs, self.single_action_space, actions, self.num_envs)
            return exchange.step(actions, self, envs)
        if self.batch_size is not None:
            self.send(actions, env_id)
            return self._recv_at_most(self.batch_size)
        if env_id is not None:
            return self._step_some(actions, checked_env_ids(env_id, self.num_envs))
        if self._overrides_step_parts:
            begin = partial(self.step_async, actions)
            results: StepResults = self._call_both_parts(begin, self.step_wait)
            return results
        assert self._exchange is not None
        return self._exchange.step(actions, self)

    def _step_some(self, actions: Any, envs: npt.NDArray[np.intp]) -> StepResults:
        """Steps some envs and waits for them; their results come in the order of ``envs``."""
        exchange = self.exchange
        exchange.recycle()
        take = partial(exchange.take, envs, gather=self)
        answers = self._call_both_parts(partial(self.send, actions, envs), take)
        if answers.failures:
            exchange.raise_failures(answers.failures)
        arrays = answers.observations, answers.rewards, answers.terminations, answers.truncations
        return (*arrays, {**answers.infos, "env_id": envs.copy()})

    def step_async(self, actions: Any) -> None:
        """Starts to step all envs and does not wait; see :meth:`step`.

        Raises:
            AlreadyPendingCallError: Another call waits for its results.
        """
        self.exchange.begin(_STEP, actions)

    def step_wait(self, timeout: float | None = None) -> StepResults:
        """Waits for what :meth:`step_async` started.

        Args:
            timeout: Seconds to wait. None: as long as it takes.

        Returns:
            As :meth:`step`.

        Raises:
            NoAsyncCallError: Nothing was started.
            multiprocessing.TimeoutError: The time is up. The results, when they come, are
                discarded; the next call waits for them first.
        """
        results: StepResults = self.exchange.finish(_STEP, timeout, self)
        return results

    # ---- calls -------------------------------------------------------------------------------

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of every env, in parallel, or gets an attribute.

        Args:
            name: Name of the method or attribute, of the env or one of its wrappers.
            *args: Positional arguments of the method.
            **kwargs: Keyword arguments of the method.

        Returns:
            One result for each env.

        Raises:
            ClosedEnvironmentError: After ``close``.
            ValueError: For "reset", "step" and "close": use the method of that name.
            Exception: Whatever an env raises, AttributeError included.
        """
        if self._overrides("call_async", "call_wait"):
            begin = partial(self.call_async, name, *args, **kwargs)
            results: tuple[Any, ...] = self._call_both_parts(begin, self.call_wait)
            return results
        self._check_call("call_async", name)
        return tuple(self.exchange.call(name, args, kwargs))

    def _check_call(self, method: str, name: str) -> None:
        """Raises unless ``method`` may call ``name``, and no env is in flight."""
        self.exchange.check_pending(method, alone=True)
        if name in _FORBIDDEN_CALLS:
            raise ValueError(
                f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
            )

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Starts to call all envs and does not wait; see :meth:`call`.

        Raises:
            AlreadyPendingCallError: Another call waits for its results.
        """
        self._check_call("call_async", name)
        self.exchange.begin(_CALL, (name, args, kwargs), None)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Waits for what :meth:`call_async` started.

        Args:
            timeout: Seconds to wait. None: as long as it takes.

        Returns:
            One result for each env.

        Raises:
            Exception: As :meth:`step_wait`.
        """
        return tuple(self.exchange.finish(_CALL, timeout))

    def call_some(
        self, env_id: npt.ArrayLike, name: str, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Calls a method of some envs, in parallel, or gets an attribute; as :meth:`call`.

        Args:
            env_id: Indices of the envs, int ``(n,)``.
            name: Name of the method or attribute, of the env or one of its wrappers.
            *args: Positional arguments of the method.
            **kwargs: Keyword arguments of the method.

        Returns:
            One result for each of these envs, in this order.

        Raises:
            ValueError: There is no such env, or it is named twice; and as :meth:`call`.
            TypeError: ``env_id`` is not of integers.
        """
        envs = existing_env_ids(env_id, self.num_envs)
        self._check_call("call_some", name)
        return tuple(self.exchange.call(name, args, kwargs, envs))

    def get_attr(self, name: str, env_id: npt.ArrayLike | None = None) -> tuple[Any, ...]:
        """The attribute of every env, or of those in ``env_id``, as a tuple; see :meth:`call`."""
        return self.call(name) if env_id is None else self.call_some(env_id, name)

    def set_attr(self, name: str, values: Any, env_id: npt.ArrayLike | None = None) -> None:
        """Sets an attribute of every env.

        Args:
            name: Name of the attribute.
            values: A list or tuple has one value for each env. Anything else is the value for all.
            env_id: Indices of the envs, int ``(n,)``. None: all.

        Raises:
            ClosedEnvironmentError: After ``close``.
            ValueError: The list has another length than there are envs, or there is no such env.
            TypeError: ``env_id`` is not of integers.
            AlreadyPendingCallError: Another call waits for its results.
            Exception: Whatever an env raises.
        """
        self.exchange.check_pending("set_attr", alone=True)
        envs = existing_env_ids(env_id, self.num_envs).tolist()
        self.exchange.set_attr(name, values_by_env(values, envs))

    def render(self) -> tuple[Any, ...]:
        """The results of every env's ``render``, as a tuple."""
        return self.call("render")

    def stats(self) -> Stats:
        """Counts and times so far; printed, they are a table with a verdict.

        Example:
            >>> import shmvec
            >>> envs = shmvec.make_vec("CartPole-v1", 4)
            >>> _ = envs.reset()
            >>> before = envs.stats()
            >>> _ = envs.step([0, 1, 0, 1])
            >>> sum(worker.steps for worker in (envs.stats() - before).workers)
            4
            >>> envs.close()

        Raises:
            ClosedEnvironmentError: After ``close``.
        """
        return self.exchange.stats()

    # ---- partial batches ---------------------------------------------------------------------

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
            options: Passed to the envs' ``reset``. A list: one dict (or None) for each of the envs.
                ``reset_mask``: as for :meth:`reset`.
            env_id: Which envs, int ``(n,)``. None: all.

        Raises:
            ClosedEnvironmentError: After ``close``.
            AlreadyPendingCallError: Another call waits for its results.
            ValueError: There is no such env, it is named twice, or it has been asked already;
                seeds, options or mask are wrong. Nothing was sent.
            TypeError: A seed is no integer, or the mask no array of bools. Nothing was sent.
        """
        exchange = self.exchange
        exchange.check_pending("async_reset")
        if env_id is None and not (isinstance(options, dict) and "reset_mask" in options):
            self._check_none_in_flight()
        exchange.ask_reset(*reset_arguments(self.num_envs, seed, options, env_id))

    def send(self, actions: Any, env_id: npt.ArrayLike | None = None) -> None:
        """Starts to step some envs; :meth:`recv` returns those that are ready first.

        The interface is that of EnvPool.

        Args:
            actions: One for each of these envs, batched as ``action_space`` is.
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
        exchange = self._exchange
        assert exchange is not None
        if exchange.guard.pending is not None:
            exchange.check_pending("send")
        if type(env_id) is not np.ndarray or env_id.size == 0:
            if env_id is None:
                self._check_none_in_flight()
            env_id = checked_env_ids(env_id, self.num_envs)
        exchange.ask(env_id, actions)

    def _check_none_in_flight(self) -> None:
        """Raises if with ``batch_size=`` some envs are in flight, while all are to be asked."""
        exchange = self.exchange
        if self.batch_size is None or exchange.guard.abandoned or not exchange.num_in_flight:
            return
        first = next(env for env in range(self.num_envs) if exchange.in_flight(env))
        raise ValueError(
            f"env {first} has been asked already: with batch_size={self.batch_size}, reset() and "
            "step() return so many envs and leave the others in flight. Step those returned: "
            'step(actions, infos["env_id"]); before a reset of all, take the others\' results with '
            "recv(). Wrappers of vector envs, which step all envs, need envs without batch_size. "
            "Nothing was sent to any env."
        )

    def recv(self, *, min_envs: int | None = None, timeout: float | None = None) -> StepResults:
        """Waits for a batch of envs: those that have been ready for the longest time.

        Every env is returned once for each ``send`` or ``async_reset`` that asked it, and never
        twice before another env that was ready earlier.

        Args:
            min_envs: Return as soon as so many envs are ready, or the time is up, with all that are
                ready, at most ``batch_size``. None: ``batch_size``; if that is a pair, the most,
                or after ``batch_timeout`` the least.
            timeout: Seconds to wait. None: as long as it takes.

        Returns:
            As :meth:`step`, of the envs in ``infos["env_id"]``, int64 ``(n,)``, in this order. An
            env that was reset has reward 0.

            The arrays are copies. With ``copy=False`` and ``batch_size``, they are views of shared
            memory if the batch has all envs of some workers, in order: choose ``batch_size`` as the
            number of envs of a worker. Such a batch is leased: nothing writes to it until its
            arrays, and what shares their memory, are gone; until :meth:`release`; or until
            ``hold_batches`` further calls.

        Raises:
            ClosedEnvironmentError: After ``close``.
            AlreadyPendingCallError: Another call waits for its results.
            NoAsyncCallError: Fewer envs than that are in flight.
            multiprocessing.TimeoutError: The time is up, and fewer (with ``min_envs``: none) are
                ready. Nothing is lost: retry.
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

    def _recv_at_most(self, count: int) -> StepResults:
        """Waits for so many envs, or for all that are in flight if they are fewer."""
        return self._recv(max(1, min(count, self.exchange.num_in_flight)), None, None)

    def _recv(self, count: int, min_envs: int | None, timeout: float | None) -> StepResults:
        exchange = self._exchange
        assert exchange is not None
        if exchange.pending is not None:
            exchange.check_pending("recv")
        if exchange.recycles:
            exchange.recycle()
        if self._order_replay is not None:
            answers = self._order_replay.take(exchange, timeout, self)
        else:
            if self._batch_timeout is not None and min_envs is None:
                timeout = self._wait_for_full_batch(count, timeout)
                least = self._min_batch_size
                min_envs = None if least is None else min(least, count)
            answers = exchange.take(None, count, min_envs, timeout, self)
        if answers.failures:
            exchange.raise_failures(answers.failures)
        if self._recorded_order is not None:
            self._recorded_order.append(answers.envs.copy())
        answers.infos["env_id"] = answers.envs
        arrays = answers.observations, answers.rewards, answers.terminations, answers.truncations
        return (*arrays, answers.infos)

    def _wait_for_full_batch(self, count: int, timeout: float | None) -> float | None:
        """Waits for a full batch, up to ``batch_timeout``; returns what is left of the timeout."""
        assert self._batch_timeout is not None
        limit = self._batch_timeout if timeout is None else min(self._batch_timeout, timeout)
        begin = time.monotonic()
        self.exchange.wait_for(count, limit)
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - begin))

    def release(self, array: npt.NDArray[Any]) -> None:
        """Ends the lease of a batch that :meth:`recv` returned as views: workers may write to it.

        Args:
            array: One of its arrays, such as its rewards. For a copy, which has no lease, this does
                nothing.

        Raises:
            TypeError: It is no array.
        """
        release(array)

    def rollout(self, length: int, *, pin: bool = False) -> Rollout:
        """Begins a rollout: ``length`` steps, in arrays that workers write step after step.

        Nothing is copied, neither after a step nor for a learner. Two rollouts alternate: you can
        learn from one while the next is being filled. Envs must have been reset before; wrappers
        around the vector env do not see the steps.

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
            RuntimeError: ``pin`` needs CUDA, which is missing.

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
        with self.exchange.lend("rollout"):
            return self._rollouts.begin(length, pin)

    def trace(self, path: str | os.PathLike[str], *, size: int = 65_536) -> Trace:  # noqa: D417
        """Records a timeline of parent and workers, env by env, while a ``with`` block runs.

        Args:
            path: A file that is written at the end, also if the block raises: JSON in Chrome's
                trace-event format, which https://ui.perfetto.dev and chrome://tracing open.
            size: Entries kept for each worker, the last ones; rounded up to a power of two. A step
                is an entry, and so is a reset and each phase of a wait; an entry has 24 bytes.

        Returns:
            A :class:`~shmvec.trace.Trace`: a context manager, with ``start()`` and ``stop()``, too.

        Raises:
            ClosedEnvironmentError: After ``close``.
            OSError: As the block begins: the file cannot be written, or there is not enough
                shared memory.
            RuntimeError: As the block begins: another trace is being recorded; or a worker has not
                yet reached many traces that were begun before.

        Example:
            >>> import os, tempfile
            >>> import shmvec
            >>> envs = shmvec.make_vec("CartPole-v1", 4)
            >>> path = os.path.join(tempfile.mkdtemp(), "run.json")
            >>> with envs.trace(path):
            ...     _ = envs.reset(seed=0)
            ...     _ = envs.step([0, 1, 1, 0])
            >>> envs.close()
        """
        return shmvec.trace.Trace(self.exchange, path, size)

    def restart(self, env_id: npt.ArrayLike | None = None) -> None:
        """Restarts the workers of some envs, for simulators that leak.

        Their next step returns a truncation, with ``infos["fault"]``, and resets follow as after
        any other truncation; the same holds for the other envs of these workers. Envs whose episode
        is over go on with a reset at once; if you reset an env, its infos report the restart. If no
        env of a worker is in flight, its envs are closed first, for up to 5 s. This does not wait
        for an env that is in flight after a call timed out. It does not change the counts of
        ``FaultPolicy``.

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
        self.exchange.check_pending("restart")
        self.exchange.restart(envs)

    def lend(self, name: str) -> AbstractContextManager[Exchange]:
        """Lends the exchange to a loop of your own, in a ``with`` block.

        Within the block, calls of this vector env's methods are refused. The first call after it
        discards what is in flight at the block's end.

        Args:
            name: Name of the loop, for messages.

        Raises:
            ClosedEnvironmentError: After ``close``.
            AlreadyPendingCallError: Another call is under way, or its results are to be taken.
        """
        return self.exchange.lend(name)

    # ---- the end -----------------------------------------------------------------------------

    def close(self, **kwargs: Any) -> None:
        """Closes the envs and ends the workers; a second call finishes an interrupted first one.

        Args:
            **kwargs: ``timeout=`` and ``terminate=``, and others that a subclass's
                :meth:`close_extras` takes.

        Raises:
            Exception: As :meth:`close_extras`.
        """
        if self.closed and self._exchange is not None:
            self._exchange.close(kwargs.get("timeout"), kwargs.get("terminate", False))
        else:
            super().close(**kwargs)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes the envs and ends the workers; called by :meth:`close`.

        Args:
            timeout: Seconds the envs get to close. None: as long as they take. Workers that are
                not done by then are terminated, and killed if they do not obey.
            terminate: Do not wait for the envs at all.

        Raises:
            Exception: What an env's ``close`` raises, after everything else is closed.
        """
        pending = None if self._exchange is None else self._exchange.pending
        try:
            if pending is not None:
                logger.warn(
                    f"Calling `close` while waiting for a pending call to `{pending.value}` to "
                    "complete."
                )
        finally:  # the warning may be an error
            if self._exchange is not None:
                self._exchange.close(timeout, terminate)

    def __del__(self) -> None:
        """Ends the workers of a vector env that was not closed, and warns."""
        exchange = self._exchange
        if exchange is not None and not exchange.closed:
            try:
                if "_rollouts" in self.__dict__:  # not if __init__ failed: nobody could close it
                    exchange.warn_unclosed()
            finally:  # the warning may be an error
                self.close(terminate=True)


class OrderReplay:
    """A recorded order of batches, and how far it has been repeated."""

    def __init__(self, order: Iterable[npt.ArrayLike]) -> None:
        """Takes what ``record_order`` noted: the envs of each batch."""
        self._order = iter(order)
        self._num_taken = 0
        self._batch: npt.NDArray[np.intp] | None = None  # the next one, once it was tried

    def take(self, exchange: Exchange, timeout: float | None, gather: Any) -> Answers:
        """Takes the next batch, which stays the next one if the time is up.

        Raises:
            ValueError: There is no next batch; or not all of its envs are in flight. The next call
                goes on with the batch after it.
        """
        if self._batch is None:
            try:
                self._batch = np.ascontiguousarray(next(self._order), np.intp)
            except StopIteration:
                raise ValueError(
                    f"replay_order is over: it holds {self._num_taken} batches"
                ) from None
        envs = self._batch
        fits = all(map(exchange.in_flight, envs.tolist()))
        answers = exchange.take(envs, timeout=timeout, gather=gather) if fits else None
        self._batch = None
        self._num_taken += 1
        if answers is None:
            raise ValueError(
                f"replay_order does not fit: batch {self._num_taken - 1} has envs {envs.tolist()}, "
                f"and not all of them are in flight (in all, {exchange.num_in_flight} envs are). "
                "Ask envs in the same order as in the recorded run"
            )
        return answers

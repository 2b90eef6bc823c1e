"""``PlanningVectorEnv``: steps batches of (state, action) pairs, with plangym's interface."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.error import ClosedEnvironmentError

from shmvec._arguments import checked_count, existing_env_ids
from shmvec._cores import usable_cores
from shmvec._options import takes_options
from shmvec.exchange import EnvFn, Guard, OwnsProcesses, exclusive
from shmvec.planning.batches import checked_dt
from shmvec.planning.rows import SharedEnv, copy_state
from shmvec.planning.workers import Task, Workers
from shmvec.spaces import one_of

__all__ = ["PlanningVectorEnv"]

_DEFAULT_ROWS = 512


class PlanningVectorEnv(OwnsProcesses):
    """Steps batches of states and actions in parallel, for tree search and random shooting.

    Each worker process has one env. A batch may have any size: it is split evenly over the workers.
    For each row, a worker sets the row's state, steps with its action, and returns the new state.

    Without states, each worker's env continues from its present state, row after row of its part of
    the batch: use as many rows as workers, or call ``sync_states`` first.

    One more env, in this process, serves what is not about batches: ``step``, ``get_state``,
    ``render``, attributes of the env. It is built at its first use.

    The interface is that of plangym's ``ParallelEnv``, for plain Gymnasium envs. States of MuJoCo,
    Atari, classic control and toy text envs under Gymnasium's usual wrappers are arrays of fixed
    size. An env with ``get_state()`` and ``set_state(state)`` defines its own states. For any other
    env, a state is its pickled attributes.

    Attributes:
        n_workers: Number of worker processes; 0: the envs are in this process.
        processes: The worker processes, one for each worker.
        frameskip: How often each step is repeated with the same action.
        autoreset: Whether an env whose episode has ended is reset by its next step without a state.
        observation_space: Observation space of one env.
        action_space: Action space of one env.
        state_space: Space of states: a Box, or ``shmvec.spaces.Anything``.
        closed: Whether ``close`` was called.
        guard: Refuses a call while another one is under way, in another thread for example.

    Example:
        >>> import gymnasium as gym
        >>> from shmvec.planning import PlanningVectorEnv
        >>> env = PlanningVectorEnv(lambda: gym.make("CartPole-v1"), n_workers=2)
        >>> state, observation, info = env.reset(seed=1)
        >>> states = [state] * 5
        >>> new_states, observations, rewards, ends, truncateds, infos = env.step_batch(
        ...     [0, 1, 0, 1, 0], states, dt=3
        ... )
        >>> rewards
        array([3., 3., 3., 3., 3.])
        >>> env.close()
    """

    @takes_options(
        "autoreset_mode",
        "copy",
        "max_concurrency",
        "num_workers",
        "observation_mode",
        "overlap",
        "recycle_after",
        "spare_envs",
        reason="n_workers= says how many processes there are, all rows of one share an env, and "
        "results are copies",
    )
    def __init__(
        self,
        env_fns: EnvFn | Sequence[EnvFn],
        n_workers: int | None = None,
        *,
        frameskip: int = 1,
        autoreset: bool = True,
        include_rng: bool = True,
        delay_setup: bool = False,
        rows: int | None = None,
        list_infos: bool = False,
        **options: Any,
    ) -> None:
        """Starts the workers, each with its env.

        Args:
            env_fns: Makes an env; or one such function for each worker, of envs that are alike.
            n_workers: Number of worker processes. None: one for each usable core, or for each of
                the functions. 0: the env is in this process, for debuggers and profilers.
            frameskip: How often each step is repeated with the same action.
            autoreset: Whether an env whose episode has ended is reset by its next step without a
                state; ``infos["autoreset"]`` says so.
            include_rng: Whether states include the random generators of envs whose steps are
                random, so that the same state and action always lead to the same result. False:
                each worker draws its own numbers.
            delay_setup: Whether the workers are only started by ``setup``, or at their first use.
            rows: Number of pairs that the workers get at a time; larger batches are stepped in
                rounds. Each takes the memory of two states, an observation and an action. None:
                512, or the number of workers if that is larger.
            list_infos: Whether the infos of a batch are a list of the dicts that the envs have
                returned. False: they are gathered into a dict of arrays, as in Gymnasium's vector
                envs.
            **options: Of :class:`shmvec.ShmVectorEnv`: {options}.
                With a fault policy, rows whose worker has died are retried, if their states were
                given. A row that fails otherwise, or a third time, is truncated: its results are
                void, and ``infos["fault"]`` says why.

        Raises:
            TypeError: An env_fn is not callable; the state of an env cannot be read; and as
                ``ShmVectorEnv``.
            ValueError: A number is out of range; and as ``ShmVectorEnv``.
            Exception: Whatever an env_fn raises.
        """
        self._workers: Workers | None = None
        self._local: SharedEnv | None = None
        self._current_state: Any = None  # the last state that was set in all envs
        self._last_set_call = object()  # identifies the last call that sets such a state
        self.closed = False
        self.guard = Guard()
        self._arguments = {
            "env_fns": env_fns,
            "n_workers": n_workers,
            "frameskip": frameskip,
            "autoreset": autoreset,
            "include_rng": include_rng,
            "delay_setup": delay_setup,
            "rows": rows,
            "list_infos": list_infos,
            **options,
        }
        functions = [env_fns] if callable(env_fns) else list(env_fns)
        if not functions or not all(map(callable, functions)):
            raise TypeError("env_fns must be a function that makes an env, or a list of some")
        if n_workers is None:
            n_workers = usable_cores() if callable(env_fns) else len(functions)
        try:
            self.n_workers = operator.index(n_workers)
        except TypeError:
            raise TypeError(f"n_workers must be an int or None, got {n_workers!r}") from None
        if self.n_workers < 0 or len(functions) not in (1, max(1, self.n_workers)):
            raise ValueError(
                f"n_workers={n_workers} does not go with {len(functions)} env_fns: give one, or "
                "one for each worker"
            )
        self.frameskip = checked_count("frameskip", frameskip)
        self.autoreset = bool(autoreset)
        default = max(1, self.n_workers, _DEFAULT_ROWS)
        num_rows = default if rows is None else checked_count("rows", rows)
        if num_rows < self.n_workers:
            raise ValueError(f"rows={rows} is less than there are workers ({self.n_workers})")
        makers = [
            partial(SharedEnv, function, self.frameskip, self.autoreset, include_rng)
            for function in functions
        ]
        self._make_workers = partial(
            Workers, makers, self.n_workers, num_rows, list_infos, self.guard, options
        )
        self._make_local = makers[0]
        if not delay_setup:
            self._get_workers()

    @exclusive
    def setup(self) -> None:
        """Starts the workers, if they are not running; only useful with ``delay_setup``."""
        self._get_workers()

    def _get_workers(self) -> Workers:
        """The workers, started at the first use."""
        if self.closed:
            raise ClosedEnvironmentError("This PlanningVectorEnv is closed: make another one.")
        if self._workers is None:
            self._workers = self._make_workers()
        return self._workers

    @property
    def processes(self) -> list[Any]:
        """The worker processes, one for each worker; empty if ``n_workers`` is 0."""
        return self._get_workers().processes

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Observation space of one env."""
        return self._get_workers().batches.observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Action space of one env."""
        return self._get_workers().batches.action_space

    @property
    def state_space(self) -> gym.Space[Any]:
        """The space of states."""
        return self._get_workers().batches.state_space

    # ---- batches -----------------------------------------------------------------------------

    @exclusive
    def step_batch(
        self,
        actions: Any,
        states: Any = None,
        dt: int | npt.ArrayLike = 1,
        return_state: bool | None = None,
        blocking: bool = True,
    ) -> Any:
        """Steps a batch of actions, each from a state of its own.

        Args:
            actions: ``(n, ...)``: a list, or batched as ``action_space`` says. ``n`` may be any
                number, also 0.
            states: One for each action: an array ``(n, ...)`` or a list. None: the workers' envs
                continue from their present states.
            dt: How often each action is repeated, an int or ints ``(n,)``, unless the episode ends
                before. Rewards are summed.
            return_state: Whether the new states are returned. None: if states were given.
            blocking: Whether to wait. False: returns a ``Promise``.

        Returns:
            ``(observations, rewards, ends, truncateds, infos)``, after the new states if these are
            returned. Observations and states are arrays ``(n, ...)``; states without a fixed size
            are a list. Rewards are float64 ``(n,)``, ends and truncateds bool ``(n,)``. Infos are
            as Gymnasium's vector envs return them, or as ``list_infos`` says.

        Raises:
            AlreadyPendingCallError: Another call is under way. Nothing was sent.
            ValueError: Numbers or shapes do not fit. Nothing was sent.
            TypeError: A dtype does not fit. Nothing was sent.
            Exception: Whatever an env raises, with a note that names the row of the batch.
        """
        workers = self._get_workers()
        with_states = states is not None if return_state is None else bool(return_state)
        # Copied if it may be sent later, since the caller may change the arrays before.
        batch = workers.batches.make_step_batch(actions, states, dt, with_states, not blocking)
        return workers.run_task(workers.step_task(batch), blocking)

    # ---- states of all workers ---------------------------------------------------------------

    @exclusive
    def sync_states(self, state: Any = None, blocking: bool = True) -> Any:
        """Sets one state in all workers.

        Args:
            state: The state. None: that of this process's env.
            blocking: Whether to wait. False: returns a ``Promise``.

        Raises:
            ValueError: It has another shape than this env's states.
            TypeError: It has another dtype.
        """
        workers = self._get_workers()
        state = self.get_state() if state is None else copy_state(state)
        task = workers.set_state_task(workers.batches.checked_state(state))
        return workers.run_task(task, blocking)

    @exclusive
    def set_state(self, state: Any, blocking: bool = True) -> Any:
        """Sets the state of this process's env and of all workers.

        Args:
            state: The state.
            blocking: Whether to wait for the workers. False: returns a ``Promise``.

        Raises:
            ValueError: It has another shape than this env's states.
            TypeError: It has another dtype.
        """
        workers = self._get_workers()
        state = workers.batches.checked_state(copy_state(state))
        self._last_set_call = object()
        self._set_current(state)
        return workers.run_task(workers.set_state_task(state), blocking)

    def get_state(self) -> Any:
        """The state of this process's env, after its last ``reset``, ``set_state`` or ``step``."""
        if self._local is None and self._current_state is not None:
            return copy_state(self._current_state)
        return self._get_local().get_state()

    def _set_current(self, state: Any) -> None:
        self._current_state = state
        if self._local is not None:
            self._local.set_state(state)

    @exclusive
    def reset(
        self,
        return_state: bool = True,
        indices: npt.ArrayLike | None = None,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        blocking: bool = True,
    ) -> Any:
        """Resets the env, and sets its new state in all workers.

        Args:
            return_state: Whether the state is returned.
            indices: Workers whose envs are reset, each by itself. None: one env is reset, and the
                others get its state.
            seed: For the env's ``reset``; with ``indices``, worker ``i`` gets ``seed + i``.
            options: For the env's ``reset``.
            blocking: Whether to wait. False: returns a ``Promise``.

        Returns:
            ``(state, observation, info)``, or without the state; with ``indices``, batches of them.

        Raises:
            ValueError: There is no such worker, or it is named twice.
            TypeError: An index is no integer.
            Exception: Whatever the env raises.
        """
        workers = self._get_workers()
        if indices is None:
            self._last_set_call = call = object()
            return workers.run_task(self._reset_task(seed, options, return_state, call), blocking)
        worker_ids = existing_env_ids(indices, workers.count)
        task = self._reset_some_task(worker_ids, seed, options, return_state)
        return workers.run_task(task, blocking)

    def _reset_task(
        self, seed: int | None, options: Any, returns_state: bool, call: object
    ) -> Task[tuple[Any, ...]]:
        workers = self._get_workers()
        answers = yield from workers.reset_task(np.zeros(1, np.intp), [seed], options)
        state = copy_state(answers.observations["state"][0])
        if self._last_set_call is call:  # no other state was set meanwhile
            self._set_current(state)
        yield from workers.set_state_task(state)
        observations = answers.observations["observation"]
        result = one_of(self.observation_space, observations, 0), answers.infos[0]
        return (copy_state(state), *result) if returns_state else result

    def _reset_some_task(
        self, worker_ids: npt.NDArray[np.intp], seed: int | None, options: Any, returns_state: bool
    ) -> Task[tuple[Any, ...]]:
        seeds = [None if seed is None else seed + worker for worker in worker_ids.tolist()]
        answers = yield from self._get_workers().reset_task(worker_ids, seeds, options, gather=True)
        states = answers.observations["state"]
        states = states if isinstance(states, np.ndarray) else list(states)
        result = answers.observations["observation"], answers.infos
        return (states, *result) if returns_state else result

    # ---- the env of this process -------------------------------------------------------------

    def _get_local(self) -> SharedEnv:
        """The env of this process, built at the first use."""
        if self.closed:
            raise ClosedEnvironmentError("This PlanningVectorEnv is closed: make another one.")
        if self._local is None:
            local = self._make_local()
            try:
                state = local.state
                if self._current_state is not None:
                    state.set(copy_state(self._current_state))
            except BaseException:
                local.close()
                raise
            self._local = local
        return self._local

    @property
    def env(self) -> gym.Env[Any, Any]:
        """The env of this process."""
        env: gym.Env[Any, Any] = self._get_local().env
        return env

    def step(
        self, action: Any, state: Any = None, dt: int = 1, return_state: bool | None = None
    ) -> tuple[Any, ...]:
        """Steps the env of this process, as :meth:`step_batch` does with many.

        Args:
            action: The action.
            state: The state to begin with. None: the env continues from its present state.
            dt: How often the action is repeated.
            return_state: Whether the new state is returned. None: if one was given.

        Returns:
            ``(observation, reward, end, truncated, info)``, with the new state first if it is
            returned.
        """
        times = int(checked_dt(dt, 1)[0])
        local = self._get_local()
        if state is not None:
            local.set_state(state)
        reward, end, truncated, info = local.step(action, times)
        result = local.observation, reward, end, truncated, info
        returns_state = state is not None if return_state is None else return_state
        return (local.get_state(), *result) if returns_state else result

    def sample_action(self) -> Any:
        """A random action."""
        return self.action_space.sample()

    def render(self) -> Any:
        """The ``render()`` of this process's env, in its present state."""
        return self._get_local().render()

    def get_image(self) -> npt.NDArray[np.uint8]:
        """A picture of the env of this process, ``(height, width, 3)``.

        Raises:
            RuntimeError: It was not made with ``render_mode="rgb_array"``.
        """
        if self.env.render_mode != "rgb_array":
            raise RuntimeError(
                f"get_image needs an env with render_mode='rgb_array', this one has "
                f"{self.env.render_mode!r}: write gym.make(..., render_mode='rgb_array')"
            )
        image: npt.NDArray[np.uint8] = np.asarray(self.render())
        return image

    def __getattr__(self, name: str) -> Any:
        """An attribute or method of the env of this process."""
        if name.startswith("_"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        if hasattr(type(self), name):  # a property has raised AttributeError: it raises it again
            return object.__getattribute__(self, name)
        return self.env.get_wrapper_attr(name)

    @exclusive
    def call(self, name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of every worker's env, or gets an attribute: one result for each.

        Raises:
            AttributeError: The env has no such attribute.
            Exception: Whatever an env raises.
        """
        return self._get_workers().call(name, args, kwargs)

    # ---- copies and end ----------------------------------------------------------------------

    def clone(self, **changes: Any) -> PlanningVectorEnv:
        """Makes another PlanningVectorEnv with the same arguments, except for ``changes``."""
        return type(self)(**{**self._arguments, **changes})

    def close(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ends the workers and closes the envs. A second call does nothing.

        Args:
            timeout: Seconds that the envs have to close. None: no limit.
            terminate: Whether to end the workers without closing their envs.
        """
        if self.closed:
            return
        self.closed = True
        try:
            if self._workers is not None:
                self._workers.close(timeout, terminate)
        finally:
            if self._local is not None:
                self._local.close()

    def __enter__(self) -> PlanningVectorEnv:
        """Returns the PlanningVectorEnv."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes it."""
        self.close()

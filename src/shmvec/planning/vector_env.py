"""``PlanningVectorEnv`` steps batches of (state, action) pairs; its interface is plangym's."""

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
from shmvec.planning.rows import SharedEnv, copied
from shmvec.planning.workers import Task, Workers
from shmvec.spaces import one_of

__all__ = ["PlanningVectorEnv"]

_ROWS = 512


class PlanningVectorEnv(OwnsProcesses):
    """Steps batches of states and actions in parallel, for tree search and random shooting.

    Every worker process has one env. A batch may have any size: it is split evenly over the
    workers, which for each row set its state, step its action and return the new state.

    Without states, each worker's env continues from its present state, row by row of its part of
    the batch: use as many rows as workers, or ``sync_states`` first.

    What is not about batches (``step``, ``get_state``, ``render``, attributes of the env) is done
    by one more env in this process, which is built at its first use.

    The interface is that of plangym's ``ParallelEnv``, for plain Gymnasium envs. States of MuJoCo,
    Atari, classic control and toy text envs under Gymnasium's usual wrappers are arrays of fixed
    size; an env with ``get_state()`` and ``set_state(state)`` defines its own states; of any other
    env all attributes are pickled.

    Attributes:
        n_workers: Number of worker processes; 0: the envs live in this process.
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
        because="n_workers= says how many processes there are, all rows of one share an env, and "
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
                the functions. 0: the env lives in this process, for debuggers and profilers.
            frameskip: How often each step is repeated with the same action.
            autoreset: Whether an env whose episode has ended is reset by its next step without a
                state; ``infos["autoreset"]`` says so.
            include_rng: Whether states hold the random generators of envs whose steps are random:
                the same state and action then always lead to the same result. False: each worker
                draws its own numbers.
            delay_setup: Whether nothing is started before ``setup``, or the first use.
            rows: How many pairs the workers get at a time; larger batches are stepped in rounds.
                Each takes the memory of two states, an observation and an action. None: 512.
            list_infos: Whether infos of batches are a list with the dict that each row's env has
                returned. False: they are gathered as Gymnasium's vector envs do.
            **options: Of :class:`shmvec.ShmVectorEnv`: {options}.
                With a fault policy, rows whose worker has died are retried, if their states were
                given; a row that fails otherwise, or a third time, is truncated, its results are
                void, and ``infos["fault"]`` says why.

        Raises:
            TypeError: An env_fn is not callable; the state of an env cannot be taken; and as
                ``ShmVectorEnv``.
            ValueError: A number is out of range; and as ``ShmVectorEnv``.
            Exception: Whatever an env_fn raises.
        """
        self._workers: Workers | None = None
        self._local: SharedEnv | None = None
        self._current: Any = None  # the state that was last set in all envs
        self._newest = object()  # identifies the last call that sets such a state
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
        num_rows = max(1, self.n_workers, _ROWS) if rows is None else checked_count("rows", rows)
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
            self._running()

    @exclusive
    def setup(self) -> None:
        """Starts the workers, if they are not running; only needed with ``delay_setup``."""
        self._running()

    def _running(self) -> Workers:
        """The workers, started at the first use."""
        if self.closed:
            raise ClosedEnvironmentError("This PlanningVectorEnv is closed: make another one.")
        if self._workers is None:
            self._workers = self._make_workers()
        return self._workers

    @property
    def processes(self) -> list[Any]:
        """The worker processes, one for each worker; empty if ``n_workers`` is 0."""
        return self._running().processes

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Observation space of one env."""
        return self._running().batches.observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Action space of one env."""
        return self._running().batches.action_space

    @property
    def state_space(self) -> gym.Space[Any]:
        """The space of states."""
        return self._running().batches.state_space

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
            actions: ``(n, ...)``: a list, or batched as ``action_space`` says. ``n`` may be
                anything, 0 included.
            states: One for each action: an array ``(n, ...)`` or a list. None: the workers' envs
                continue from their present states.
            dt: How often each action is repeated, an int or ints ``(n,)``; the end of an episode
                ends it. Rewards are summed.
            return_state: Whether the new states are returned. None: if states were given.
            blocking: Whether to wait. False: returns a ``Promise``.

        Returns:
            ``(observations, rewards, ends, truncateds, infos)``, with the new states first if they
            are returned: arrays ``(n, ...)`` (states of no fixed size: a list), float64, bool and
            bool ``(n,)``, and infos as Gymnasium's vector envs return them, or as ``list_infos``
            says.

        Raises:
            AlreadyPendingCallError: Another call is under way. Nothing was sent.
            ValueError: Numbers or shapes do not fit. Nothing was sent.
            TypeError: A dtype does not. Nothing was sent.
            Exception: Whatever an env raises, with a note that names the row of the batch.
        """
        workers = self._running()
        returned = states is not None if return_state is None else bool(return_state)
        # Copied if it is sent later: the caller may have changed the arrays by then.
        batch = workers.batches.to_step(actions, states, dt, returned, kept=not blocking)
        return workers.do(workers.stepping(batch), blocking)

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
        workers = self._running()
        given = self.get_state() if state is None else copied(state)
        return workers.do(workers.setting(workers.batches.checked_state(given)), blocking)

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
        workers = self._running()
        given = workers.batches.checked_state(copied(state))
        self._newest = object()
        self._set_current(given)
        return workers.do(workers.setting(given), blocking)

    def get_state(self) -> Any:
        """The state of this process's env: of the last ``reset``, ``set_state`` or ``step``."""
        if self._local is None and self._current is not None:
            return copied(self._current)
        return self._here().get_state()

    def _set_current(self, state: Any) -> None:
        self._current = state
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
            ``(state, observation, info)``, or without the state; with ``indices`` batches of them.

        Raises:
            ValueError: There is no such worker, or it is named twice.
            TypeError: An index is no integer.
            Exception: Whatever the env raises.
        """
        workers = self._running()
        if indices is None:
            self._newest = this = object()
            return workers.do(self._resetting(seed, options, return_state, this), blocking)
        which = existing_env_ids(indices, workers.count)
        return workers.do(self._resetting_some(which, seed, options, return_state), blocking)

    def _resetting(
        self, seed: int | None, options: Any, returned: bool, this: object
    ) -> Task[tuple[Any, ...]]:
        workers = self._running()
        answers = yield from workers.resetting(np.zeros(1, np.intp), [seed], options)
        state = copied(answers.observations["state"][0])
        if self._newest is this:  # else another state was set meanwhile
            self._set_current(state)
        yield from workers.setting(state)
        observations = answers.observations["observation"]
        result = one_of(self.observation_space, observations, 0), answers.infos[0]
        return (copied(state), *result) if returned else result

    def _resetting_some(
        self, which: npt.NDArray[np.intp], seed: int | None, options: Any, returned: bool
    ) -> Task[tuple[Any, ...]]:
        seeds = [None if seed is None else seed + worker for worker in which.tolist()]
        answers = yield from self._running().resetting(which, seeds, options, gathered=True)
        states = answers.observations["state"]
        states = states if isinstance(states, np.ndarray) else list(states)
        result = answers.observations["observation"], answers.infos
        return (states, *result) if returned else result

    # ---- the env of this process -------------------------------------------------------------

    def _here(self) -> SharedEnv:
        """The env of this process, built at the first use."""
        if self.closed:
            raise ClosedEnvironmentError("This PlanningVectorEnv is closed: make another one.")
        if self._local is None:
            local = self._make_local()
            try:
                state = local.state
                if self._current is not None:
                    state.set(copied(self._current))
            except BaseException:
                local.close()
                raise
            self._local = local
        return self._local

    @property
    def env(self) -> gym.Env[Any, Any]:
        """The env of this process."""
        env: gym.Env[Any, Any] = self._here().env
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
        here = self._here()
        if state is not None:
            here.set_state(state)
        reward, end, truncated, info = here.step(action, times)
        result = here.observation, reward, end, truncated, info
        returned = state is not None if return_state is None else return_state
        return (here.get_state(), *result) if returned else result

    def sample_action(self) -> Any:
        """A random action."""
        return self.action_space.sample()

    def render(self) -> Any:
        """The ``render()`` of this process's env, in its present state."""
        return self._here().render()

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
        if hasattr(type(self), name):  # a property that has raised AttributeError: raise it anew
            return object.__getattribute__(self, name)
        return self.env.get_wrapper_attr(name)

    @exclusive
    def call(self, name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of every worker's env, or gets an attribute: one result for each.

        Raises:
            AttributeError: There is none.
            Exception: Whatever an env raises.
        """
        return self._running().call(name, args, kwargs)

    # ---- the rest ----------------------------------------------------------------------------

    def clone(self, **changes: Any) -> PlanningVectorEnv:
        """Makes another one with the same arguments except for ``changes``."""
        return type(self)(**{**self._arguments, **changes})

    def close(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ends the workers and closes the envs. A second call does nothing.

        Args:
            timeout: Seconds that the envs get to close; None: as long as they take.
            terminate: Whether not to wait for the workers' envs at all.
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
        """Returns itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes it."""
        self.close()

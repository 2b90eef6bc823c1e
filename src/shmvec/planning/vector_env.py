"""``PlanningVectorEnv``: batches of (state, action) pairs, stepped by the workers' envs.

The workers' rows (see rows.py) are the envs of a ``ShmVectorEnv``: states and actions lie in its
slabs, or travel through its rings, and its hot loop steps them.
"""

from __future__ import annotations

import copy
import multiprocessing
import operator
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.error import ClosedEnvironmentError

from shmvec._parent.arguments import AutoresetMode, checked_count
from shmvec._parent.partial import existing_env_ids
from shmvec._parent.supervisor import InlineWorker, Supervisor
from shmvec._shared.pipes import uninterrupted
from shmvec._shared.scheduling import split_evenly, usable_cores
from shmvec.faults import EnvTimeoutError, WorkerCrashError
from shmvec.planning.batches import Batches, checked_dt
from shmvec.planning.pieces import fill, filled, joined_infos, room_for, single_info
from shmvec.planning.promise import Queue, Work
from shmvec.planning.rows import DT, INDEX, NUM_ORDERS, SET, WANTED, SharedEnv
from shmvec.spaces import one_of
from shmvec.vector_env import ShmVectorEnv

__all__ = ["PlanningVectorEnv"]

Rows = npt.NDArray[np.intp]
EnvFn = Callable[[], gym.Env[Any, Any]]
Answers: TypeAlias = tuple[Any, npt.NDArray[np.float64], Any, Any, dict[str, Any]]

# Options of ShmVectorEnv that make sense here.
_OPTIONS = frozenset(
    {
        "context",
        "daemon",
        "faults",
        "pin_workers",
        "reset_timeout",
        "shared_memory",
        "step_timeout",
        "threads_per_worker",
        "wait_policy",
    }
)
_ROWS = 512
_TRIES = 2  # to step rows again whose worker has died
_ROUNDS = 2  # under way at a time: while the parent takes one, the workers have the other
_LEAST = 32  # rows of a round; taking its results costs the parent as much as some steps


class PlanningRows(ShmVectorEnv):
    """The rows of all workers."""

    def _start(self, workers: Supervisor | InlineWorker) -> None:
        super()._start(workers)
        self._partial.ask_in_ranges()  # a worker's rows of a round: nobody waits for single ones

    def ask(self, rows: Rows, actions: dict[str, Any]) -> None:
        """Sends rows what they are to do."""
        self._send(rows, actions)

    def collect(self, rows: Rows, timeout: float | None) -> Answers:
        """Waits for rows that were asked: their results, in this order."""
        self._idle_loop("recv", asking=True)
        try:
            self._partial.take_these(rows, timeout)
        except WorkerCrashError:
            self._abandon()
            raise
        with uninterrupted():
            results = self._partial.results(rows)
        observations, rewards, terminations, truncations, infos = results
        del infos["env_id"]
        return observations, rewards, terminations, truncations, infos

    def drop(self) -> None:
        """Waits for all rows that were asked, and drops what they say."""
        if self._loop is not None:
            self._masked = True  # what is broken off is finished before the next call
            with suppress(WorkerCrashError):  # which has closed it
                self._finish_masked()
                self._recovery.carry_over()
                spoiled = [row for row in range(self.num_envs) if self._is_spoiled(row)]
                if spoiled:
                    self.async_reset(env_id=spoiled)
                    self._masked = True
                    self._finish_masked()

    def tries_again(self, faults: set[str]) -> bool:
        """Whether rows with these types of faults are stepped again.

        Where a worker is restarted, rows that have done nothing wrong are lost, too.
        """
        return self._recovery.policy.on_error == "restart" or not faults.isdisjoint(
            ("WorkerCrashError", "EnvTimeoutError", "Restart")
        )

    def _is_spoiled(self, row: int) -> bool:
        """Whether a fault's result was dropped, or is still to come: others must not get it."""
        assert self._loop is not None
        return self._loop.is_over(row) or self._recovery.is_broken(row)


class PlanningVectorEnv:
    """Steps batches of states and actions in parallel: the tree search's and shooter's env.

    Every worker process holds one env. A batch may have any size: it is split evenly over the
    workers, which set row ``i``'s state, step its action and say the state that came of it.

    Without states, each worker's env goes on from where it stands, row by row of its part of the
    batch: use as many rows as workers, or ``sync_states`` first.

    What is not about batches (``step``, ``get_state``, ``render``, attributes of the env) is done
    by one more env in this process, which is built when it is first asked for.

    The interface is that of plangym's ``ParallelEnv``, for plain Gymnasium envs. States of MuJoCo,
    Atari, classic control and toy text envs under Gymnasium's usual wrappers are arrays of fixed
    size; envs with ``get_state()`` and ``set_state(state)`` say themselves what theirs are; of any
    other env everything it holds is pickled.

    Attributes:
        n_workers: Number of worker processes; 0: the envs live in this process.
        frameskip: How often each step is repeated with the same action.
        autoreset: Whether an env whose episode has ended is reset by its next step without a state.
        observation_space: Of one env.
        action_space: Of one env.
        state_space: Of states: a Box, or ``shmvec.spaces.Anything``.

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
            include_rng: Whether states hold the random generators of envs that roll dice in their
                steps: the same state and action then always lead to the same result. False: each
                worker rolls its own.
            delay_setup: Whether nothing is started before ``setup``, or the first use.
            rows: How many pairs are with the workers at a time; larger batches go in rounds. Each
                takes the memory of two states, an observation and an action. None: 512.
            **options: Of ``ShmVectorEnv``: ``context``, ``daemon``, ``faults``, ``pin_workers``,
                ``reset_timeout``, ``shared_memory``, ``step_timeout``, ``threads_per_worker`` and
                ``wait_policy``. With a fault policy, rows whose worker has
                died are stepped again, if their states were given; a row that fails otherwise, or
                a third time, is truncated, its results are void, and ``infos["fault"]`` says why.

        Raises:
            TypeError: An env_fn is not callable; the state of an env cannot be taken; and as
                ``ShmVectorEnv``.
            ValueError: A number is out of range; and as ``ShmVectorEnv``.
            Exception: Whatever an env_fn raises.
        """
        self._envs: PlanningRows | None = None  # first: __getattr__ looks for it
        self._local: _LocalEnv | None = None
        self._current: Any = None  # the state that was last set everywhere
        self._newest = object()  # stands for the call that sets it
        self._closed = False
        self._arguments = {
            "env_fns": env_fns,
            "n_workers": n_workers,
            "frameskip": frameskip,
            "autoreset": autoreset,
            "include_rng": include_rng,
            "delay_setup": delay_setup,
            "rows": rows,
            **options,
        }
        refused = sorted(options.keys() - _OPTIONS)
        if refused:
            raise TypeError(
                f"PlanningVectorEnv() takes no {', '.join(refused)}; of ShmVectorEnv's options it "
                f"takes {', '.join(sorted(_OPTIONS))}"
            )
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
        self._num_rows = num_rows
        self._options = options
        self._env_makers = [
            partial(SharedEnv, function, self.frameskip, self.autoreset, include_rng)
            for function in functions
        ]
        self._queue = Queue(
            self._collect,
            (multiprocessing.TimeoutError, EnvTimeoutError),
            self._drop,
        )
        if not delay_setup:
            self.setup()

    def setup(self) -> None:
        """Starts the workers, unless they have been; only needed with ``delay_setup``."""
        if self._closed:
            raise ClosedEnvironmentError("This PlanningVectorEnv is closed: make another one.")
        if self._envs is not None:
            return
        self._ranges = split_evenly(self._num_rows, max(1, self.n_workers))
        makers = self._env_makers * (len(self._ranges) // len(self._env_makers))
        shared = [make() for make in makers]
        self._envs = PlanningRows(
            [one.row for one, rows in zip(shared, self._ranges, strict=True) for _ in rows],
            num_workers=self.n_workers,
            autoreset_mode=AutoresetMode.DISABLED,
            **self._options,
        )
        observation: Any = self._envs.single_observation_space
        action: Any = self._envs.single_action_space
        self._observation_space: gym.Space[Any] = observation["observation"]
        self._action_space: gym.Space[Any] = action["action"]
        self._state_space: gym.Space[Any] = observation["state"]
        self._first_rows = np.array([rows.start for rows in self._ranges], np.intp)
        self._batches = Batches(self._observation_space, self._action_space, self._state_space)

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Of one env."""
        self.setup()
        return self._observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Of one env."""
        self.setup()
        return self._action_space

    @property
    def state_space(self) -> gym.Space[Any]:
        """Of states."""
        self.setup()
        return self._state_space

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._closed

    # ---- batches -----------------------------------------------------------------------------

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
            states: One for each: an array ``(n, ...)`` or a list. None: the workers' envs go on
                from where they stand.
            dt: How often each action is repeated, an int or ints ``(n,)``; the end of an episode
                ends it. Rewards are summed.
            return_state: Whether the states that came of it are returned. None: if states were
                given.
            blocking: Whether to wait. False: returns a ``Promise``.

        Returns:
            ``(observations, rewards, ends, truncateds, infos)``, with the new states first if they
            are returned: arrays ``(n, ...)`` (states of no fixed size: a list), float64, bool and
            bool ``(n,)``, and infos as Gymnasium's vector envs return them.

        Raises:
            ValueError: Numbers or shapes do not fit. Nothing was sent.
            TypeError: A dtype does not. Nothing was sent.
            Exception: Whatever an env raises, with a note that names the row of the batch.
        """
        self.setup()
        batched, count = self._batches.actions(actions)
        given = None if states is None else self._batches.states(states, count)
        if not blocking:  # they may be sent later, and the caller's arrays used again by then
            batched, given = copy.deepcopy((batched, given))
        orders = np.zeros((count, NUM_ORDERS), np.int64)
        orders[:, DT] = checked_dt(dt, count)
        orders[:, SET] = given is not None
        returned = given is not None if return_state is None else bool(return_state)
        orders[:, WANTED] = returned
        orders[:, INDEX] = np.arange(count)
        return self._do(self._stepping(batched, given, orders, returned), blocking)

    def _stepping(
        self, actions: Any, states: Any, orders: npt.NDArray[np.int64], returned: bool
    ) -> Work[tuple[Any, ...]]:
        """Sends a batch in rounds, some of which are under way at any time."""
        count = len(orders)
        if count == 0:
            return self._results(self._batches.empty(), np.zeros(0), {}, returned)
        rounds, turns = self._rounds(count)

        assert self._envs is not None
        space = self._envs.single_observation_space
        seen: Any = None
        rewards = np.empty(count)
        infos: list[tuple[dict[str, Any], Rows]] = []
        waiting = deque((rows, where, _TRIES) for rows, where in rounds)
        flying: deque[tuple[Rows, Rows, int]] = deque()
        lost: deque[tuple[Rows, Rows, int]] = deque()

        def ask(rows: Rows, where: Rows, tries: int) -> None:
            assert self._envs is not None
            self._envs.ask(rows, self._batches.part(actions, states, orders, where))
            flying.append((rows, where, tries))

        while waiting or flying or lost:
            if lost and not flying:  # infos come in the order in which rows were asked
                rows, where, tries = lost.popleft()
                assert self._envs is not None
                self._envs.async_reset(env_id=rows)
                yield rows
                if tries > 0 and states is not None:
                    ask(rows, where, tries - 1)
                else:
                    seen["ends"][where] = (0, 1)
                continue
            while waiting and not lost and len(flying) < turns:
                ask(*waiting.popleft())
            rows, where, tries = flying.popleft()
            answers = yield rows
            truncated = np.flatnonzero(answers[3])  # nothing but a fault does that to a row
            if len(where) == count and len(truncated) == 0 and not infos:  # as they are
                return self._results(answers[0], answers[1], answers[4], returned)
            if seen is None:
                seen = room_for(space, answers[0], count)
            fill(space, seen, where, answers[0])
            rewards[where] = answers[1]
            infos.append((answers[4], where))
            if len(truncated):
                faults = set(answers[4]["fault"]["type"][truncated].tolist())
                tries = tries if self._envs.tries_again(faults) else 0
                # Those behind the row that kills its worker are lost with it: one by one at last.
                size = len(truncated) if tries in (0, _TRIES) else 1
                for some in np.split(truncated, range(size, len(truncated), size)):
                    lost.append((rows[some], where[some], tries))
        return self._results(filled(space, seen), rewards, joined_infos(infos, count), returned)

    def _rounds(self, count: int) -> tuple[list[tuple[Rows, Rows]], int]:
        """Rows for each round of a batch, which of the batch they get, and how many may be out.

        Rounds take turns with halves of the rows. Each is spread evenly over the workers.
        """
        fewest = min(map(len, self._ranges))
        turns = _ROUNDS if count >= _ROUNDS * _LEAST and fewest >= _ROUNDS else 1
        most = -(-count // turns)
        rounds: list[tuple[Rows, Rows]] = []
        begin = 0
        while begin < count:
            turn = len(rounds) % turns
            parts = [
                range(rows.start + turn * fewest // turns,
                      rows.start + (turn + 1) * fewest // turns)
                for rows in self._ranges
            ]  # fmt: skip
            size = min(count - begin, sum(map(len, parts)), most)
            shares = split_evenly(size, len(parts)) if size >= len(parts) else [range(1)] * size
            rows = np.concatenate(
                [part[: len(share)] for part, share in zip(parts, shares, strict=False)]
            )
            rounds.append((rows.astype(np.intp), np.arange(begin, begin + size, dtype=np.intp)))
            begin += size
        return rounds, turns

    def _results(
        self, seen: dict[str, Any], rewards: Any, infos: dict[str, Any], returned: bool
    ) -> tuple[Any, ...]:
        ends = seen["ends"].astype(bool)
        results = (
            seen["observation"],
            rewards,
            np.ascontiguousarray(ends[:, 0]),
            np.ascontiguousarray(ends[:, 1]),
            infos,
        )
        if not returned:
            return results
        states = seen["state"]
        return (states if isinstance(states, np.ndarray) else list(states), *results)

    # ---- states of all workers ---------------------------------------------------------------

    def sync_states(self, state: Any = None, blocking: bool = True) -> Any:
        """Sets one state in all workers.

        Args:
            state: The state. None: that of this process's env.
            blocking: Whether to wait. False: returns a ``Promise``.

        Raises:
            ValueError: It has another shape than this env's states.
            TypeError: It has another dtype.
        """
        self.setup()
        given = self._batches.one_state(self.get_state() if state is None else _kept(state))
        return self._do(self._syncing(given), blocking)

    def _syncing(self, given: Any) -> Work[None]:
        assert self._envs is not None
        rows = self._first_rows
        orders = np.zeros((1, NUM_ORDERS), np.int64)
        orders[:, SET] = 1
        for _ in range(1 + _TRIES):
            zeros = np.zeros(len(rows), np.intp)
            self._envs.ask(rows, self._batches.part(None, given, orders, zeros))
            answers = yield rows
            failed = np.flatnonzero(answers[3])  # nothing but a fault does that to a row
            if len(failed) == 0:
                return
            fault = {key: values[failed[0]] for key, values in answers[4]["fault"].items()}
            rows = rows[failed]
            self._envs.async_reset(env_id=rows)
            yield rows
        raise RuntimeError(
            f"the state could not be set in {len(rows)} of {len(self._ranges)} workers: "
            f"{fault['type']}: {fault['message']}"
        )

    def set_state(self, state: Any, blocking: bool = True) -> Any:
        """Sets the state of this process's env and of all workers.

        Args:
            state: The state.
            blocking: Whether to wait for the workers. False: returns a ``Promise``.

        Raises:
            ValueError: It has another shape than this env's states.
            TypeError: It has another dtype.
        """
        self.setup()
        given = self._batches.one_state(_kept(state))
        self._newest = object()
        self._set_current(_kept(given[0]))
        return self._do(self._syncing(given), blocking)

    def get_state(self) -> Any:
        """The state of this process's env, which is that of the last ``reset`` or ``set_state``.

        Unless ``step`` has changed it.
        """
        if self._local is None and self._current is not None:
            return _kept(self._current)
        return _kept(self._here().state)

    def _set_current(self, state: Any) -> None:
        self._current = state
        if self._local is not None:
            self._local.state = state

    def reset(
        self,
        return_state: bool = True,
        indices: npt.ArrayLike | None = None,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        blocking: bool = True,
    ) -> Any:
        """Resets the env, and sets the state that came of it everywhere.

        Args:
            return_state: Whether the state is returned.
            indices: Workers whose envs are to be reset, each by itself. None: one env is, and the
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
        self.setup()
        if indices is None:
            self._newest = this = object()
            return self._do(self._resetting(seed, options, return_state, this), blocking)
        workers = existing_env_ids(indices, len(self._ranges))
        return self._do(self._resetting_some(workers, seed, options, return_state), blocking)

    def _resetting(
        self, seed: int | None, options: Any, returned: bool, this: object
    ) -> Work[tuple[Any, ...]]:
        assert self._envs is not None
        first = self._first_rows[:1]
        self._envs.async_reset([seed], [options], env_id=first)
        answers = yield first
        seen = answers[0]
        state = _kept(seen["state"][0])
        if self._newest is this:  # else another state was set meanwhile
            self._set_current(state)
        yield from self._syncing(self._batches.one_state(state))
        result = one_of(self._observation_space, seen["observation"], 0), single_info(answers[4])
        return (_kept(state), *result) if returned else result

    def _resetting_some(
        self, workers: Rows, seed: int | None, options: Any, returned: bool
    ) -> Work[tuple[Any, ...]]:
        assert self._envs is not None
        rows = self._first_rows[workers]
        seeds = None if seed is None else [seed + worker for worker in workers.tolist()]
        self._envs.async_reset(seeds, [options] * len(rows), env_id=rows)
        answers = yield rows
        seen = answers[0]
        states = seen["state"]
        states = states if isinstance(states, np.ndarray) else list(states)
        result = seen["observation"], answers[4]
        return (states, *result) if returned else result

    # ---- the env of this process -------------------------------------------------------------

    def _here(self) -> _LocalEnv:
        """The env of this process, built now if it was not."""
        if self._closed:
            raise ClosedEnvironmentError("This PlanningVectorEnv is closed: make another one.")
        if self._local is None:
            self._local = _LocalEnv(self._env_makers[0]())
            if self._current is not None:
                self._local.state = self._current
        return self._local

    @property
    def env(self) -> gym.Env[Any, Any]:
        """The env of this process."""
        return self._here().env

    def step(
        self, action: Any, state: Any = None, dt: int = 1, return_state: bool | None = None
    ) -> tuple[Any, ...]:
        """Steps the env of this process; as :meth:`step_batch`, of one action.

        Args:
            action: The action.
            state: Set before. None: the env goes on from where it stands.
            dt: How often the action is repeated.
            return_state: Whether the new state is returned. None: if one was given.

        Returns:
            ``(observation, reward, end, truncated, info)``, with the new state first if it is
            returned.
        """
        times = int(checked_dt(dt, 1)[0])
        return self._here().step(
            action, state, times, state is not None if return_state is None else return_state
        )

    def sample_action(self) -> Any:
        """A random action."""
        return self.action_space.sample()

    def render(self) -> Any:
        """What the env of this process renders, in the state it is in."""
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
        if hasattr(type(self), name):  # a property that has raised AttributeError: that counts
            return object.__getattribute__(self, name)
        return self.env.get_wrapper_attr(name)

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of every worker's env, or gets an attribute: one result for each.

        Raises:
            AttributeError: There is none.
            Exception: Whatever an env raises.
        """
        self.setup()
        self._queue.finish()
        assert self._envs is not None
        return self._envs.call_some(self._first_rows, name, *args, **kwargs)

    # ---- the rest ----------------------------------------------------------------------------

    def clone(self, **changes: Any) -> PlanningVectorEnv:
        """Another one, made with the same arguments but for these."""
        return type(self)(**{**self._arguments, **changes})

    def close(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ends the workers and closes the envs. A second call does nothing.

        Args:
            timeout: Seconds that the envs get to close; None: as long as they take.
            terminate: Do not wait for the workers' envs at all.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._envs is not None and not self._envs.closed:
                self._envs.close(timeout=timeout, terminate=terminate)
        finally:
            if self._local is not None:
                self._local.close()

    def __enter__(self) -> PlanningVectorEnv:
        """For ``with``."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes it."""
        self.close()

    def _do(self, work: Work[Any], blocking: bool) -> Any:
        promise = self._queue.add(work)
        return promise() if blocking else promise

    def _collect(self, rows: Rows, timeout: float | None) -> Answers:
        assert self._envs is not None
        return self._envs.collect(rows, timeout)

    def _drop(self) -> None:
        assert self._envs is not None
        self._envs.drop()


class _LocalEnv:
    """The env of this process: a row that is stepped here."""

    def __init__(self, shared: SharedEnv) -> None:
        """Builds the env."""
        self._row = shared.row()
        self._shared = shared
        assert shared.env is not None
        self.env = shared.env

    @property
    def state(self) -> Any:
        """Its state."""
        return self._shared.state.get()

    @state.setter
    def state(self, state: Any) -> None:
        self._shared.state.set(_kept(state))
        self._shared.over = False

    def step(self, action: Any, state: Any, dt: int, returned: bool) -> tuple[Any, ...]:
        """Steps it as a worker would."""
        if state is not None:
            self.state = state
        orders = np.array([dt, False, returned, 0], np.int64)
        seen, reward, _, _, info = self._row.step(
            {"action": action, "state": None, "orders": orders}
        )
        result = seen["observation"], reward, bool(seen["ends"][0]), bool(seen["ends"][1]), info
        return (_kept(seen["state"]), *result) if returned else result

    def render(self) -> Any:
        """What it renders."""
        return self._shared.state.rendered(self.env.render)

    def close(self) -> None:
        """Closes it."""
        self._row.close()


def _kept(state: Any) -> Any:
    """A state that nothing else will change."""
    return state.copy() if isinstance(state, np.ndarray) else copy.deepcopy(state)

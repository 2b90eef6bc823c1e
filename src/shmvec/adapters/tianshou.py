"""Tianshou's ``BaseVectorEnv`` over ``ShmVectorEnv``: its collectors run on it as they are."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from shmvec._parent.arguments import AutoresetMode
from shmvec._parent.partial import existing_env_ids
from shmvec.adapters.infos import InfosByEnv
from shmvec.adapters.tianshou_env import KWARGS, REWARD, SPACES, WorkerEnv
from shmvec.faults import (
    EnvTimeoutError,
    WorkerCrashError,
    log_as_gymnasium_does,
    raise_failures,
)
from shmvec.spaces import Anything

try:
    from tianshou.env import BaseVectorEnv
except ImportError as error:
    raise ImportError(
        "shmvec.adapters.tianshou needs Tianshou: pip install tianshou"
    ) from error  # pragma: no cover

__all__ = ["TianshouVectorEnv"]

Array: TypeAlias = npt.NDArray[Any]
Envs: TypeAlias = npt.NDArray[np.intp]
# Which envs: one, some, or None for all.
Ids: TypeAlias = int | Sequence[int] | Array | None


class TianshouVectorEnv(BaseVectorEnv):
    """Tianshou's vector env, with envs in workers that are reached through shared memory.

    In place of ``SubprocVectorEnv`` and ``ShmemVectorEnv``: the same methods and results, for
    ``Collector`` and, with ``wait_num`` or ``timeout``, for ``AsyncCollector``. Nobody resets an
    env at the end of its episode but you, with ``reset(env_id)``, as Tianshou has it.

    Attributes:
        envs: The ``ShmVectorEnv`` behind it, for ``stats()``, ``restart()`` and the like.
        env_num: Number of envs; also ``len()``.
        is_async: Whether ``step`` returns before all envs are ready.
        wait_num: For how many envs a ``step`` waits.
        timeout: Seconds that it waits for so many; None: as long as it takes.
        waiting_id: Envs that are stepping: asked, and not returned by ``step`` yet.
        ready_id: All others.
        is_closed: Whether it has been closed.
        observation_space: That of each env, a list; so are ``action_space``, ``metadata`` and
            ``spec``.

    Example:
        >>> import gymnasium as gym
        >>> from shmvec.adapters.tianshou import TianshouVectorEnv
        >>> envs = TianshouVectorEnv([lambda: gym.make("CartPole-v1")] * 3)
        >>> obs, infos = envs.reset(seed=7)
        >>> obs.shape, infos
        ((3, 4), array([{}, {}, {}], dtype=object))
        >>> obs, rewards, terminated, truncated, infos = envs.step([1, 0], id=[2, 0])
        >>> rewards, infos
        (array([1., 1.]), array([{'env_id': 2}, {'env_id': 0}], dtype=object))
        >>> envs.close()
    """

    # Of the base class nothing is used: its constructor makes workers of its own, and its
    # __getattribute__ asks these for spaces. That it is the base is what collectors look at.
    __getattribute__ = object.__getattribute__

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        wait_num: int | None = None,
        timeout: float | None = None,
        share_memory: bool = True,
        **options: Any,
    ) -> None:
        """Starts the workers and builds the envs, all in parallel.

        Args:
            env_fns: One function for each env.
            wait_num: ``step`` returns when so many envs are ready, with all that are; the others
                come with a later one. None: all.
            timeout: Seconds after which ``step`` returns with those that are ready, at least one.
            share_memory: Whether observations and actions lie in arrays in shared memory; all
                envs then need spaces of one shape and dtype. False: they travel as messages, and
                may be anything, of another shape in each env and at each step.
            **options: Of ``ShmVectorEnv``: ``num_workers``, ``context``, ``step_timeout``,
                ``reset_timeout``, ``faults`` and so on. ``num_workers`` is by default one for
                each env if ``wait_num`` or ``timeout`` is given, so that none waits for another.

        Raises:
            ValueError: ``wait_num`` or ``timeout`` is out of range; and as ``ShmVectorEnv``.
            TypeError: Observations are tuples, which Tianshou does not take; an option is not to
                be chosen; and as ``ShmVectorEnv``.
            RuntimeError: Spaces of the envs do not fit together.
            Exception: Whatever an env_fn raises, with the worker's traceback as its cause.
        """
        functions = list(env_fns)
        num_envs = len(functions)
        if wait_num is not None and not 1 <= wait_num <= max(num_envs, 1):
            raise ValueError(f"wait_num must be between 1 and {num_envs}, got {wait_num}")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be positive seconds or None, got {timeout}")
        chosen = {"autoreset_mode", "batch_size", "copy", "observation_mode", "shared_memory"}
        if chosen & set(options):
            raise TypeError(
                f"{', '.join(sorted(chosen & set(options)))}: what Tianshou expects is chosen here"
            )
        self.env_num = num_envs
        self.wait_num = num_envs if wait_num is None else int(wait_num)
        self.timeout = timeout
        self.is_async = self.wait_num != num_envs or timeout is not None
        if self.is_async and options.get("max_concurrency") is None:
            options.setdefault("num_workers", num_envs)
        self.envs = _made(functions, share_memory, options)
        self.is_closed = False
        self.waiting_id: list[int] = []
        self.ready_id = list(range(num_envs))
        self._stash: list[_Batch] = []  # results that came before somebody asked for them
        self._resetting: list[int] = []
        try:
            described = self.envs.call("shmvec_describe")
            self._spaces = {name: [one[name] for one in described] for name in SPACES}
            self._reseeds = [env for env in range(num_envs) if not described[env]["seed"]]
            if any(isinstance(space, spaces.Tuple) for space in self._spaces["observation_space"]):
                raise TypeError(
                    "Tianshou takes no observations that are tuples: make them arrays or dicts, "
                    "for example by gymnasium.wrappers.TransformObservation"
                )
        except BaseException:
            self.envs.close()
            raise

    def __len__(self) -> int:
        """The number of envs."""
        return self.env_num

    @property
    def observation_space(self) -> list[gym.Space[Any]]:
        """The observation space of each env."""
        return self.get_env_attr("observation_space")

    @property
    def action_space(self) -> list[gym.Space[Any]]:
        """The action space of each env; always the same objects, which :meth:`seed` seeds."""
        return self.get_env_attr("action_space")

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """The metadata of each env."""
        return self.get_env_attr("metadata")

    @property
    def spec(self) -> list[Any]:
        """The spec of each env."""
        return self.get_env_attr("spec")

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:
        """The attribute of envs, looked for in their wrappers from the outermost inwards.

        Args:
            key: Its name.
            id: Which envs; None: all.

        Returns:
            One value for each of these envs, in this order.

        Raises:
            AssertionError: After ``close``, or one of these envs is stepping.
            AttributeError: An env has no such attribute.
            ValueError: There is no such env, or it is named twice.
            TypeError: ``id`` is not of integers.
        """
        self._check_open()
        envs = self._ids(id)
        if key in SPACES:
            return [self._spaces[key][env] for env in envs.tolist()]
        self._check_ready(envs)
        self._settle()
        return list(self.envs.call_some(envs, "shmvec_get", key)) if len(envs) else []

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:
        """Sets an attribute of envs, of the innermost ("unwrapped") one as Tianshou does.

        Args:
            key: Its name.
            value: The same for all.
            id: Which envs; None: all.

        Raises:
            AssertionError: After ``close``, or one of these envs is stepping.
            ValueError: There is no such env, or it is named twice.
            TypeError: ``id`` is not of integers.
        """
        self._check_open()
        envs = self._ids(id)
        self._check_ready(envs)
        self._settle()
        if len(envs):
            self.envs.call_some(envs, "shmvec_set", key, value)

    def reset(self, env_id: Ids = None, **kwargs: Any) -> tuple[Array, Array]:
        """Resets envs, in parallel.

        Args:
            env_id: Which envs; None: all.
            **kwargs: For each env's ``reset``: ``seed``, ``options``, or what it takes. A seed
                that is a list or array has one for each of these envs; an int is every env's, as
                in Tianshou.

        Returns:
            Observations ``(n, ...)``, and infos, an object array ``(n,)`` of dicts. Observations
            of Dict spaces are an object array of dicts. All are yours: nothing overwrites them.

        Raises:
            AssertionError: After ``close``, or one of these envs is stepping.
            ValueError: There is no such env, it is named twice, or the number of seeds is wrong.
            TypeError: ``env_id`` or a seed is not of integers.
            EnvTimeoutError: An env takes longer than its time limit.
            WorkerCrashError: A worker process died.
            Exception: Whatever an env raises, with the worker's traceback as its cause.
        """
        self._check_open()
        envs = self._ids(env_id)
        self._check_ready(envs)
        if len(envs) == 0:
            return self._joined([]).results[0], np.empty(0, object)
        seed, options = _reset_arguments(kwargs, len(envs))
        if self.is_async:
            self.envs.async_reset(seed, options, envs)
            self._resetting = envs.tolist()
            batch = self._received(envs.tolist())
            self._resetting = []
        elif self._are_all(envs):
            observations, infos = self.envs.reset(seed=seed, options=options)
            nothing = np.zeros(len(envs))
            batch = self._batch(envs, (observations, nothing, nothing, nothing, infos))
        else:
            batch = self._batch(envs, self.envs.reset_these(envs, seed, options))
        return self._final(batch.observations), batch.infos

    def step(self, action: Any, id: Ids = None) -> tuple[Array, Array, Array, Array, Array]:
        """Steps envs, in parallel.

        With ``wait_num`` or ``timeout`` it returns as soon as so many of those that are stepping
        are ready; which they are is in their infos.

        Args:
            action: One for each of these envs: an array, a tensor or a list. None, if async: step
                nobody, take results.
            id: Which envs, ready ones; None: all. With ``action=None`` and ``id`` it is the results
                of these envs that are waited for.

        Returns:
            Observations ``(n, ...)``, rewards, float64 ``(n,)`` (or ``(n, ...)`` if envs give
            arrays), terminations and truncations, bool ``(n,)``, and infos, an object array
            ``(n,)`` of dicts with ``env_id``. All are yours: nothing overwrites them.

        Raises:
            AssertionError: After ``close``, one of these envs is stepping, or its episode is over
                and nobody has reset it. Nothing was sent.
            ValueError: There is no such env, it is named twice, the number or shape of the
                actions is wrong, or there are none. Nothing was sent.
            TypeError: ``id`` or the dtype of the actions is wrong. Nothing was sent.
            NoAsyncCallError: ``action`` is None and nobody is stepping.
            EnvTimeoutError: An env takes longer than ``step_timeout``. Without that a step takes
                as long as its env does.
            WorkerCrashError: A worker process died.
            Exception: Whatever an env raises, with the worker's traceback as its cause. That env
                is ready to be reset; results of the others are returned by the next call.
        """
        self._check_open()
        envs = self._ids(id)
        if self.is_async:
            return self._step_async(action, envs, named=id is not None)
        if action is None:
            raise ValueError("action must not be None: it is for wait_num= or timeout= only")
        self._check_ready(envs)
        actions = self._actions(action, len(envs))
        if len(envs) == 0:
            batch = self._joined([])
        elif self._are_all(envs):
            batch = self._batch(envs, self.envs.step(actions))
        else:
            batch = self._batch(envs, self.envs.step_these(envs, actions))
        return self._returned(batch)

    def _step_async(
        self, action: Any, envs: Envs, named: bool
    ) -> tuple[Array, Array, Array, Array, Array]:
        if action is not None:
            self._check_ready(envs)
            actions = self._actions(action, len(envs))
            if len(envs):
                self.envs.send(actions, envs)
            asked = envs.tolist()
            self.waiting_id += asked
            self.ready_id = [env for env in self.ready_id if env not in asked]
        elif named:
            stepping = [env for env in envs.tolist() if env in self.waiting_id]
            if len(stepping) < len(envs):
                raise ValueError(f"envs {envs.tolist()} are not all stepping: {self.waiting_id}")
            return self._returned(self._received(stepping))
        wanted = min(self.wait_num, len(self.waiting_id)) - sum(map(len, self._stash))
        if wanted > 0 or not self.waiting_id:  # then that is an error
            self._wait_for(max(1, wanted))
        taken, self._stash = self._stash, []
        return self._returned(self._joined(taken))

    def _wait_for(self, wanted: int) -> None:
        """Waits until so many more are ready, or the time is up and some are."""
        try:
            self._receive(wanted, self.timeout)
        except multiprocessing.TimeoutError as error:
            if isinstance(error, EnvTimeoutError):
                raise
            if not self._stash:
                self._receive(1, None)

    def _receive(self, wanted: int, timeout: float | None) -> None:
        """Puts the results of envs that are ready, at least so many, aside."""
        try:
            envs, results = self.envs.receive(wanted, timeout)
        except BaseException:
            for env in [env for env in self.waiting_id if self.envs.has_failed(env)]:
                if not any(env in batch.envs for batch in self._stash):
                    self.waiting_id.remove(env)
                    self.ready_id.append(env)
            raise
        batch = self._batch(envs, results)
        expected = [env in self.waiting_id or env in self._resetting for env in envs.tolist()]
        if not all(expected):  # of a reset that was broken off
            batch = batch.rows(np.flatnonzero(expected).tolist())
        if len(batch):
            self._stash.append(batch)

    def _received(self, envs: list[int]) -> _Batch:
        """The results of these envs, in this order, when they are there; others wait."""
        wanted = set(envs)
        while missing := wanted.difference(*(batch.envs.tolist() for batch in self._stash)):
            self._receive(1, None)
        assert not missing
        joined = self._joined(self._stash)
        rows = {env: row for row, env in enumerate(joined.envs.tolist())}
        others = [row for env, row in rows.items() if env not in wanted]
        self._stash = [joined.rows(others)] if others else []
        return joined.rows([rows[env] for env in envs])

    def _settle(self) -> None:
        """Waits for all envs that are stepping; their results come with the next steps."""
        while self.is_async and self.envs.num_asked:
            self._receive(self.envs.num_asked, None)

    def _drop_reset(self) -> None:
        """Waits for a reset that was broken off; what became of it nobody wants to know."""
        self._resetting = []
        while self.envs.num_asked:
            stepping = len(self.waiting_id)
            try:
                self._receive(self.envs.num_asked, None)
            except (EnvTimeoutError, WorkerCrashError):
                raise
            except Exception:
                if len(self.waiting_id) < stepping:  # it is of an env that was stepping
                    raise

    def _returned(self, batch: _Batch) -> tuple[Array, Array, Array, Array, Array]:
        envs = batch.envs.tolist()
        if self.is_async:
            self.waiting_id = [env for env in self.waiting_id if env not in envs]
            self.ready_id += envs
        for env, info in zip(envs, batch.infos, strict=True):
            info["env_id"] = env
        observations, *rest = batch.results
        return (self._final(observations), *rest)  # type: ignore[return-value]

    def seed(self, seed: int | Sequence[int] | None = None) -> list[list[int] | None]:
        """Seeds the envs, and what samples from their action spaces here and there.

        Envs that have a method ``seed`` are given theirs; the others are reset with it.

        Args:
            seed: An int: env ``i`` gets ``seed + i``. A sequence: one for each env.

        Returns:
            For each env a list of the seeds that it used.

        Raises:
            AssertionError: After ``close``, or an env is stepping.
            ValueError: The number of seeds is not that of the envs.
        """
        self._check_open()
        everyone = self._ids(None)
        self._check_ready(everyone)
        if seed is None or isinstance(seed, (int, np.integer)):
            seeds = [None if seed is None else int(seed) + env for env in range(self.env_num)]
        else:
            seeds = [None if one is None else int(one) for one in seed]
        if len(seeds) != self.env_num:
            raise ValueError(f"there are {len(seeds)} seeds for {self.env_num} envs")
        for space, one in zip(self._spaces["action_space"], seeds, strict=True):
            if isinstance(space, gym.Space):
                space.seed(one)
        used = self.envs.call("shmvec_seed", seeds)
        if self._reseeds:
            self.reset(self._reseeds, seed=[seeds[env] for env in self._reseeds])
        return [None if one is None else np.atleast_1d(one).tolist() for one in used]

    def render(self, **kwargs: Any) -> list[Any]:
        """What each env's ``render`` returns.

        Args:
            **kwargs: For it.

        Raises:
            AssertionError: After ``close``.
            RuntimeError: An env is stepping.
        """
        self._check_open()
        if self.waiting_id:
            raise RuntimeError(f"envs {self.waiting_id} are stepping and cannot be rendered now")
        return list(self.envs.call("render", **kwargs))

    def close(self) -> None:
        """Closes the envs and ends the workers, also while envs are stepping; twice is once."""
        self.is_closed = True
        self.envs.close()

    # ---- arguments and results ---------------------------------------------------------------

    def _ids(self, id: Ids) -> Envs:
        """Indices of envs, which there are; none if it is empty."""
        if id is None:
            return np.arange(self.env_num, dtype=np.intp)
        ids = np.atleast_1d(np.asarray(id))
        return np.empty(0, np.intp) if ids.size == 0 else existing_env_ids(ids, self.env_num)

    def _are_all(self, envs: Envs) -> bool:
        return len(envs) == self.env_num and bool((envs == np.arange(self.env_num)).all())

    def _check_open(self) -> None:
        if self.is_closed:
            raise AssertionError(
                f"Methods of {type(self).__name__} cannot be called after close()."
            )

    def _check_ready(self, envs: Envs) -> None:
        if self._resetting:
            self._drop_reset()
        stepping = [env for env in envs.tolist() if env in self.waiting_id]
        if stepping:
            raise AssertionError(
                f"Cannot interact with envs {stepping}, which are stepping now: take their "
                f"results, with step(None, id), first. Ready are {self.ready_id}."
            )

    def _actions(self, action: Any, count: int) -> Any:
        """Actions as ``ShmVectorEnv`` takes them: a list, an array, or batched dicts."""
        if action is None or len(action) != count:
            number = 0 if action is None else len(action)
            raise ValueError(f"there are {number} actions for {count} envs. Nothing was sent.")
        space = self.envs.single_action_space
        if isinstance(space, Anything):
            return list(action)
        if isinstance(space, (spaces.Dict, spaces.Tuple)):
            room: Any = create_empty_array(space, count)
            return concatenate(space, list(action), room)
        actions = np.asarray(action)
        kind = np.dtype(space.dtype).kind if space.dtype is not None else ""
        if actions.dtype.kind == "f" and kind in ("i", "u") and (actions == actions.round()).all():
            return actions.astype(np.int64)  # policies for Tianshou give such, too
        return actions

    def _batch(self, envs: Envs, results: Any) -> _Batch:
        """Results of ``ShmVectorEnv``, of these envs, as Tianshou has them."""
        observations, rewards, terminations, truncations, infos = results
        dicts = _boxed([infos.get(env) or {} for env in envs.tolist()])
        given = [info.pop(REWARD, None) for info in dicts]
        arrays = [reward for reward in given if reward is not None]
        if arrays:  # who has none was reset, or had a fault
            nothing = np.zeros_like(arrays[0])
            rewards = np.stack([nothing if reward is None else reward for reward in given])
        if not isinstance(observations, np.ndarray):
            rows: Any = observations  # one by one already
            if isinstance(observations, dict):
                rows = [_row(observations, row) for row in range(len(envs))]
            observations = _boxed(rows)
        return _Batch(envs, (observations, rewards, terminations, truncations, dicts))

    def _joined(self, batches: Sequence[_Batch]) -> _Batch:
        if len(batches) == 1:
            return batches[0]
        if batches:
            columns = zip(*(batch.results for batch in batches), strict=True)
            return _Batch(
                np.concatenate([batch.envs for batch in batches]),
                tuple(np.concatenate(parts) for parts in columns),
            )
        space = self.envs.single_observation_space
        observations: Any = create_empty_array(space, 0) if isinstance(space, spaces.Box) else []
        flags = np.empty(0, np.bool_)
        return _Batch(
            np.empty(0, np.intp),
            (np.asarray(observations), np.empty(0), flags, flags.copy(), np.empty(0, object)),
        )

    def _final(self, observations: Array) -> Array:
        """Observations that came one by one are stacked if that is possible."""
        if observations.dtype != object or len(observations) == 0:
            return observations
        if not all(isinstance(one, (np.ndarray, np.generic, int, float)) for one in observations):
            return observations
        try:
            return np.stack(list(observations))
        except ValueError:  # of different shapes
            return observations


@dataclass(frozen=True)
class _Batch:
    """Results of some envs.

    Attributes:
        envs: Which.
        results: Observations, rewards, terminations, truncations and infos: a row for each.
    """

    envs: Envs
    results: tuple[Array, ...]

    def __len__(self) -> int:
        return len(self.envs)

    @property
    def observations(self) -> Array:
        return self.results[0]

    @property
    def infos(self) -> Array:
        return self.results[4]

    def rows(self, rows: Sequence[int]) -> _Batch:
        """Some of them, in this order."""
        return _Batch(self.envs[rows], tuple(part[rows] for part in self.results))


def _row(batch: Any, row: int) -> Any:
    """One env's part of a batch of any structure."""
    if isinstance(batch, dict):
        return {key: _row(part, row) for key, part in batch.items()}
    if isinstance(batch, tuple) and batch and isinstance(batch[0], (np.ndarray, dict, tuple)):
        return tuple(_row(part, row) for part in batch)
    return batch[row]


def _boxed(values: Sequence[Any]) -> Array:
    """An array of objects, into which NumPy does not look."""
    boxes = np.empty(len(values), object)
    for index, value in enumerate(values):
        boxes[index] = value
    return boxes


def _reset_arguments(kwargs: dict[str, Any], count: int) -> tuple[Any, Any]:
    """Seeds and options, one for each env."""
    seed = kwargs.get("seed")
    if seed is not None and np.ndim(seed) == 0:
        seed = [seed] * count
    others = {key: value for key, value in kwargs.items() if key not in ("seed", "options")}
    options = kwargs.get("options")
    if others:
        options = {KWARGS: others, "options": options}
    return seed, None if options is None else [options] * count


# ---- over ShmVectorEnv -----------------------------------------------------------------------


def _made(env_fns: Sequence[Any], share_memory: bool, options: dict[str, Any]) -> _Envs:
    functions: list[Any] = [
        partial(WorkerEnv, env, env_fn, share_memory) for env, env_fn in enumerate(env_fns)
    ]
    try:
        return _Envs(
            functions,
            shared_memory=share_memory,
            observation_mode="different" if share_memory else "same",
            autoreset_mode=AutoresetMode.DISABLED,
            **options,
        )
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        if share_memory and hasattr(error, "add_note"):
            error.add_note(
                "If it is for the envs' spaces: share_memory=False takes observations and actions "
                "of any kind, unlike ones as well."
            )
        raise


class _Envs(InfosByEnv):
    """Answers for the envs it is asked."""

    @property
    def num_asked(self) -> int:
        """How many envs were asked one by one and have not been taken."""
        self._assert_is_running()
        assert self._loop is not None
        return self._loop.asked

    def has_failed(self, env: int) -> bool:
        """Whether an env that was asked has raised."""
        if self._loop is None:
            return False
        try:
            self._partial.check(np.array([env], np.intp))
        except ValueError:
            return False  # it is out, or ready
        return True

    def step_these(self, envs: Envs, actions: Any) -> tuple[Any, ...]:
        """Steps some envs and waits for them: results in their order."""
        self._settle(self._idle_loop("step"))
        self._partial.send(envs, actions)
        return self._finish_these(envs)

    def reset_these(self, envs: Envs, seed: Any, options: Any) -> tuple[Any, ...]:
        """Resets some envs and waits for them: results in their order."""
        self._ask_to_reset(self._idle_loop("reset"), seed, options, envs)
        return self._finish_these(envs)

    def _finish_these(self, envs: Envs) -> tuple[Any, ...]:
        self._masked = True  # if this is broken off, the next call drops the results
        _, failures = self._finish_masked()
        if failures:
            log_as_gymnasium_does(failures)
            raise_failures(failures)
        return self._results_of(envs)

    def receive(self, wanted: int, timeout: float | None) -> tuple[Envs, tuple[Any, ...]]:
        """As ``recv(min_envs=wanted, timeout=timeout)``: envs and their results."""
        self._idle_loop("recv", asking=True)
        envs = self._take(self.num_envs, wanted, timeout)
        return envs, self._results_of(envs)

    def _results_of(self, envs: Envs) -> tuple[Any, ...]:
        infos: dict[int, dict[str, Any]] = {}
        for env in envs.tolist():
            if info := self._partial.info_of(env):
                self._add_info(infos, info, env)
        *results, told = self._partial.results(envs)
        del told["env_id"]
        for row, env in enumerate(envs.tolist() if told else ()):
            self._add_info(infos, _told_of(told, row), env)
        return (*results, infos)


def _told_of(infos: Mapping[str, Any], row: int) -> dict[str, Any]:
    """What Gymnasium's dict of arrays says of one env: here, of its faults."""
    return {
        key: _told_of(value, row) if isinstance(value, dict) else value[row]
        for key, value in infos.items()
        if not key.startswith("_") and infos[f"_{key}"][row]
    }

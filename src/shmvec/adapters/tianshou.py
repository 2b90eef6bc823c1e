"""Tianshou's ``BaseVectorEnv`` over an ``Exchange``, for Tianshou's own collectors.

Methods, their arguments and results are those of `Tianshou's BaseVectorEnv
<https://github.com/thu-ml/tianshou/blob/master/tianshou/env/venvs.py>`_.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from shmvec._arguments import Envs, checked_seconds, checked_seeds, existing_env_ids
from shmvec._options import takes_options
from shmvec.adapters._tianshou_env import KWARGS_KEY, REWARD_KEY, SPACE_NAMES, TianshouEnv
from shmvec.exchange import Answers, AutoresetMode, OwnsProcesses
from shmvec.faults import EnvTimeoutError, add_note
from shmvec.spaces import Anything, batched, one_of
from shmvec.vector_env import ShmVectorEnv

try:
    from tianshou.env import BaseVectorEnv
except ImportError as error:
    raise ImportError(
        "shmvec.adapters.tianshou needs Tianshou: pip install tianshou"
    ) from error  # pragma: no cover

__all__ = ["ShmemVectorEnv", "SubprocVectorEnv", "TianshouVectorEnv"]

Array: TypeAlias = npt.NDArray[Any]
# Ids of envs: one, some, or None for all.
Ids: TypeAlias = int | Sequence[int] | Array | None


def _attribute_of_each(name: str) -> Any:
    return property(lambda self: self.get_env_attr(name), doc=f"``{name}`` of each env, a list.")


class TianshouVectorEnv(OwnsProcesses, BaseVectorEnv):
    """Tianshou's vector env, with envs in workers, through shared memory.

    It replaces ``SubprocVectorEnv`` and ``ShmemVectorEnv``; this module has classes with these
    names and defaults, too. Methods and results are the same, for ``Collector`` and, with
    ``wait_num`` or ``timeout``, for ``AsyncCollector``. As with Tianshou's, envs are not reset
    automatically: call ``reset(env_id)``.

    Methods raise ``AssertionError`` after ``close``, and if an env that they ask is stepping;
    ``EnvTimeoutError`` if an env takes longer than its limit, ``WorkerCrashError`` if a worker has
    died, and the exceptions of envs, with the worker's traceback as the cause. Wrong actions or ids
    raise ValueError or TypeError, and no env makes a step. Results are never overwritten.

    Attributes:
        envs: The ``ShmVectorEnv`` behind it, for ``stats()``, ``restart()`` and the like.
        env_num: Number of envs; also ``len()``.
        is_async: Whether ``step`` returns before all envs are ready.
        wait_num: Number of envs that ``step`` waits for.
        timeout: Seconds that a ``step`` waits for these; None: as long as it takes.
        waiting_id: Envs that are stepping, and not yet returned by ``step``.
        is_closed: Whether it has been closed.

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

    # Collectors check for the base class. None of its code is used, because its constructor makes
    # other workers, and its __getattribute__ asks these for spaces.
    __getattribute__ = object.__getattribute__

    @takes_options(
        "autoreset_mode",
        "copy",
        "observation_mode",
        "shared_memory",
        "spare_envs",
        reason="they are chosen as Tianshou expects them",
    )
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
            wait_num: Number of ready envs at which ``step`` returns, with all ready ones; a later
                ``step`` returns the others. None: all.
            timeout: Seconds after which ``step`` returns with the ready envs, at least one.
            share_memory: Whether observations and actions lie in shared memory; then all envs need
                spaces of one shape and dtype. False: they travel as messages, and may be anything,
                with other shapes in each env and step.
            **options: Options of :class:`shmvec.ShmVectorEnv`: {options}.
                With ``wait_num`` or ``timeout`` there is by default one worker for each env, so
                that no env waits for another.

        Raises:
            ValueError: ``wait_num`` or ``timeout`` is out of range.
            TypeError: Observations are tuples, which Tianshou does not take.
            Exception: As :class:`shmvec.ShmVectorEnv`.
        """
        functions = list(env_fns)
        num_envs = len(functions)
        if wait_num is not None and not 1 <= wait_num <= max(num_envs, 1):
            raise ValueError(f"wait_num must be between 1 and {num_envs}, got {wait_num}")
        self.env_num = num_envs
        self.wait_num = num_envs if wait_num is None else int(wait_num)
        self.timeout = checked_seconds("timeout", timeout)
        self.is_async = self.wait_num != num_envs or timeout is not None
        if self.is_async and options.get("max_concurrency") is None:
            options.setdefault("num_workers", num_envs)
        self.envs = _make_envs(functions, share_memory, options)
        self._exchange = self.envs.exchange
        self.is_closed = False
        self.waiting_id: list[int] = []
        try:
            described = self._exchange.call("shmvec_describe")
            self._spaces = {name: [one[name] for one in described] for name in SPACE_NAMES}
            self._seedless_envs = [env for env in range(num_envs) if not described[env]["seed"]]
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
    def ready_id(self) -> list[int]:
        """The envs that are not stepping."""
        return [env for env in range(self.env_num) if env not in self.waiting_id]

    observation_space = _attribute_of_each("observation_space")
    action_space = _attribute_of_each("action_space")  # the same objects, which `seed` seeds
    metadata = _attribute_of_each("metadata")
    spec = _attribute_of_each("spec")

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:
        """See ``BaseVectorEnv.get_env_attr``; wrappers are searched from the outermost inwards."""
        self._check_open()
        envs = self._env_indices(id)
        if key in SPACE_NAMES:
            return [self._spaces[key][env] for env in envs.tolist()]
        self._check_ready(envs)
        return self._exchange.call("shmvec_get_attr", (key,), envs=envs)

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:
        """See ``BaseVectorEnv.set_env_attr``; sets it on the innermost ("unwrapped") env."""
        self._check_open()
        envs = self._env_indices(id)
        self._check_ready(envs)
        self._exchange.call("shmvec_set", (key, value), envs=envs)

    def reset(self, env_id: Ids = None, **kwargs: Any) -> tuple[Array, Array]:
        """See ``BaseVectorEnv.reset``.

        Args:
            env_id: Which envs; None: all.
            **kwargs: Arguments of each env's ``reset``: ``seed``, ``options``, or others. A list or
                array of seeds has one for each of these envs; an int is the seed of every env, as
                in Tianshou.

        Returns:
            Observations ``(n, ...)``, and infos, an object array ``(n,)`` of dicts. Observations
            of Dict spaces are an object array of dicts.
        """
        self._check_open()
        envs = self._env_indices(env_id)
        self._check_ready(envs)
        envs_or_none = self._envs_to_ask(envs)
        self._exchange.recycle()  # a new episode begins
        self._exchange.ask_reset(envs_or_none, *_reset_arguments(kwargs, len(envs)))
        observations, *_, infos = self._to_tianshou(self._exchange.take(envs_or_none))
        return observations, infos

    def step(self, action: Any, id: Ids = None) -> tuple[Array, Array, Array, Array, Array]:
        """See ``BaseVectorEnv.step``.

        With ``wait_num`` or ``timeout`` it returns as soon as ``wait_num`` of the stepping envs are
        ready; ``env_id`` in their infos says which they are. With ``action=None`` it steps no env,
        and only takes results, with ``id`` of these envs. If an env raises then, the next call
        returns the results of the others, unless ``id`` named them as well.
        """
        self._check_open()
        envs = self._env_indices(id)
        envs_or_none = self._envs_to_ask(envs)
        if action is not None:
            self._check_ready(envs)
            self._exchange.recycle()
            self._exchange.ask(envs_or_none, self._batch_actions(action, len(envs)))
        elif not self.is_async:
            raise ValueError("action must not be None: it is for wait_num= or timeout= only")
        if self.is_async:
            answers = self._take_async(envs, action is not None, id is not None)
        else:
            answers = self._exchange.take(envs_or_none)
        results = self._to_tianshou(answers)
        for env, info in zip(answers.envs.tolist(), results[-1], strict=True):
            info["env_id"] = env
        return results

    def _take_async(self, envs: Envs, has_asked: bool, has_ids: bool) -> Answers:
        """Takes answers of stepping envs: those that are ready first, or the named ones."""
        if has_asked:
            self.waiting_id += envs.tolist()
        elif has_ids and not set(envs.tolist()) <= set(self.waiting_id):
            raise ValueError(f"envs {envs.tolist()} are not all stepping: {self.waiting_id}")
        return self._exchange.take(envs) if has_ids and not has_asked else self._take_first_ready()

    def _take_first_ready(self) -> Answers:
        """Waits for ``wait_num`` of the envs that are stepping, or for ``timeout`` and one."""
        stepping = max(1, len(self.waiting_id))  # with none, taking 1 raises the right error
        try:
            return self._exchange.take(
                count=stepping, least=min(self.wait_num, stepping), timeout=self.timeout
            )
        except multiprocessing.TimeoutError as error:
            if isinstance(error, EnvTimeoutError):
                raise
            return self._exchange.take(count=stepping, least=1)

    def seed(self, seed: int | Sequence[int] | None = None) -> list[list[int] | None]:
        """See ``BaseVectorEnv.seed``; seeds the action spaces in this process, too.

        Envs that have a method ``seed`` are seeded by it; the others are reset with their seed.
        """
        self._check_open()
        everyone = self._env_indices(None)
        self._check_ready(everyone)
        seeds = checked_seeds(seed, self.env_num) or [None] * self.env_num
        for space, one in zip(self._spaces["action_space"], seeds, strict=True):
            if isinstance(space, gym.Space):
                space.seed(one)
        used = self._exchange.call("shmvec_seed", (seeds,))
        if self._seedless_envs:
            self.reset(self._seedless_envs, seed=[seeds[env] for env in self._seedless_envs])
        return [None if one is None else np.atleast_1d(one).tolist() for one in used]

    def render(self, **kwargs: Any) -> list[Any]:
        """See ``BaseVectorEnv.render``; raises ``RuntimeError`` if an env is stepping."""
        self._check_open()
        if self.waiting_id:
            raise RuntimeError(f"envs {self.waiting_id} are stepping and cannot be rendered now")
        return self._exchange.call("render", kwargs=kwargs)

    def close(self) -> None:
        """Closes the envs, stepping ones too, and ends the workers. A second call does nothing."""
        self.is_closed = True
        self.envs.close()

    # ---- arguments and results ---------------------------------------------------------------

    def _env_indices(self, id: Ids) -> Envs:
        """Indices of existing envs; an empty ``id`` has none."""
        if id is None:
            return np.arange(self.env_num, dtype=np.intp)
        ids = np.atleast_1d(np.asarray(id))
        return np.empty(0, np.intp) if ids.size == 0 else existing_env_ids(ids, self.env_num)

    def _envs_to_ask(self, envs: Envs) -> Envs | None:
        """The envs for the exchange's methods: None if all envs are stepped in lockstep."""
        everyone = len(envs) == self.env_num and (envs == np.arange(self.env_num)).all()
        return None if everyone and not self.is_async else envs

    def _check_open(self) -> None:
        if self.is_closed:
            raise AssertionError(
                f"Methods of {type(self).__name__} cannot be called after close()."
            )

    def _check_ready(self, envs: Envs) -> None:
        if self._exchange.num_in_flight > len(self.waiting_id):
            # An interrupted call has left envs in flight; their results are discarded.
            self._exchange.take([env for env in self.ready_id if self._exchange.in_flight(env)])
        stepping = [env for env in envs.tolist() if env in self.waiting_id]
        if stepping:
            raise AssertionError(
                f"Cannot interact with envs {stepping}, which are stepping now: take their "
                f"results, with step(None, id), first. Ready are {self.ready_id}."
            )

    def _batch_actions(self, action: Any, count: int) -> Any:
        """Actions for the exchange: a list, an array, or dicts and tuples of lists."""
        if action is None or len(action) != count:
            number = 0 if action is None else len(action)
            raise ValueError(f"there are {number} actions for {count} envs. Nothing was sent.")
        space = self.envs.single_action_space
        if isinstance(space, (Anything, spaces.Dict, spaces.Tuple)):
            return batched(space, list(action))
        actions = np.asarray(action)
        kind = np.dtype(space.dtype).kind if space.dtype is not None else ""
        if actions.dtype.kind == "f" and kind in ("i", "u") and (actions == actions.round()).all():
            return actions.astype(np.int64)  # Tianshou's policies may return such actions
        return actions

    def _to_tianshou(self, answers: Answers) -> tuple[Array, Array, Array, Array, Array]:
        """Answers in Tianshou's form; raises exceptions of envs."""
        if self.waiting_id:
            answered = {*answers.envs.tolist(), *(failure.env for failure in answers.failures)}
            self.waiting_id = [env for env in self.waiting_id if env not in answered]
        self._exchange.delivered(answers)
        observations, rewards, infos = answers.observations, answers.rewards, answers.infos
        array_rewards = [info.pop(REWARD_KEY, None) for info in infos]
        arrays = [reward for reward in array_rewards if reward is not None]
        if arrays:  # an env without an array was reset, or had a fault
            zero = np.zeros_like(arrays[0])
            rewards = np.stack([zero if reward is None else reward for reward in array_rewards])
        if isinstance(observations, dict):
            space = self.envs.single_observation_space
            observations = _objects([one_of(space, observations, i) for i in range(len(infos))])
        elif not isinstance(observations, np.ndarray):  # they have one item for each env already
            observations = _stack(observations or ())
        return observations, rewards, answers.terminations, answers.truncations, _objects(infos)


class SubprocVectorEnv(TianshouVectorEnv):
    """:class:`TianshouVectorEnv` with the defaults of Tianshou's class of this name.

    Observations and actions travel as messages, and may be of any kind.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        wait_num: int | None = None,
        timeout: float | None = None,
        share_memory: bool = False,
        context: str | None = None,
        **options: Any,
    ) -> None:
        """Starts the workers; see :class:`TianshouVectorEnv`."""
        super().__init__(env_fns, wait_num, timeout, share_memory, context=context, **options)


class ShmemVectorEnv(TianshouVectorEnv):
    """:class:`TianshouVectorEnv` with the name of Tianshou's class with shared memory."""


def _stack(rows: Sequence[Any]) -> Array:
    """Rows as one array, or as an array of objects where that is impossible."""
    if all(isinstance(row, (np.ndarray, np.generic, int, float)) for row in rows):
        with suppress(ValueError):  # there are none, or they are of different shapes
            return np.stack(rows)
    return _objects(rows)


def _objects(values: Sequence[Any]) -> Array:
    """An array of objects; NumPy does not convert them."""
    array = np.empty(len(values), object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def _reset_arguments(kwargs: dict[str, Any], count: int) -> tuple[Any, Any]:
    """Seeds and options, one for each env."""
    seed, options = kwargs.pop("seed", None), kwargs.pop("options", None)
    if seed is not None and np.ndim(seed) == 0:
        seed = [seed] * count
    if kwargs:
        options = {KWARGS_KEY: kwargs, "options": options}
    return checked_seeds(seed, count), None if options is None else [options] * count


def _make_envs(env_fns: Sequence[Any], share_memory: bool, options: dict[str, Any]) -> ShmVectorEnv:
    functions: list[Any] = [
        partial(TianshouEnv, env, env_fn, share_memory) for env, env_fn in enumerate(env_fns)
    ]
    try:
        return ShmVectorEnv(
            functions,
            shared_memory=share_memory,
            observation_mode="different" if share_memory else "same",
            autoreset_mode=AutoresetMode.DISABLED,
            **options,
        )
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        if share_memory:
            add_note(
                error,
                "If the envs' spaces are the reason: share_memory=False takes observations and "
                "actions of any kind, also different ones.",
            )
        raise

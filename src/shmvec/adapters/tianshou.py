"""Tianshou's ``BaseVectorEnv`` over an ``Exchange``: its collectors run on it as they are.

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

from shmvec._arguments import Envs, checked_seeds, existing_env_ids
from shmvec._options import takes_options
from shmvec.adapters._tianshou_env import KWARGS, REWARD, SPACES, TianshouEnv
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


class TianshouVectorEnv(OwnsProcesses, BaseVectorEnv):
    """Tianshou's vector env, with envs in workers that are reached through shared memory.

    It replaces ``SubprocVectorEnv`` and ``ShmemVectorEnv``, whose names this module has, too, with
    their defaults. It has the same methods and results, for ``Collector`` and, with ``wait_num`` or
    ``timeout``, for ``AsyncCollector``. No env is reset automatically at the end of its episode:
    call ``reset(env_id)``, as with Tianshou's.

    Methods raise ``AssertionError`` after ``close``, and if an env that they ask is stepping;
    ``EnvTimeoutError`` if an env takes longer than its limit, ``WorkerCrashError`` if a worker has
    died, and whatever an env raises, with the worker's traceback as its cause. Of wrong actions or
    ids (ValueError, TypeError) nothing was sent. Results are yours: nothing overwrites them.

    Attributes:
        envs: The ``ShmVectorEnv`` behind it, for ``stats()``, ``restart()`` and the like.
        env_num: Number of envs; also ``len()``.
        is_async: Whether ``step`` returns before all envs are ready.
        wait_num: Number of envs for which a ``step`` waits.
        timeout: Seconds that a ``step`` waits for these; None: as long as it takes.
        waiting_id: Envs that are stepping: asked, and not returned by ``step`` yet.
        ready_id: All others, in order.
        is_closed: Whether it has been closed.
        observation_space: The space of each env, a list; so are ``action_space``, ``metadata`` and
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

    # The base class is there because collectors check for it. None of its code is used: its
    # constructor makes workers of its own, and its __getattribute__ asks these for spaces.
    __getattribute__ = object.__getattribute__

    @takes_options(
        "autoreset_mode",
        "copy",
        "observation_mode",
        "shared_memory",
        "spare_envs",
        because="they are chosen as Tianshou expects them",
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
            wait_num: Number of ready envs at which ``step`` returns, with all that are ready; a
                later ``step`` returns the others. None: all.
            timeout: Seconds after which ``step`` returns with those that are ready, at least one.
            share_memory: Whether observations and actions lie in arrays in shared memory; all
                envs then need spaces of one shape and dtype. False: they travel as messages, and
                may be anything, of another shape in each env and at each step.
            **options: Options of :class:`shmvec.ShmVectorEnv`: {options}.
                With ``wait_num`` or ``timeout`` there is by default one worker for each env, so
                that no env waits for another.

        Raises:
            ValueError: ``wait_num`` or ``timeout`` is out of range; and as ``ShmVectorEnv``.
            TypeError: Observations are tuples, which Tianshou does not take; an option is fixed
                here; and as ``ShmVectorEnv``.
            RuntimeError: Spaces of the envs do not fit together.
            Exception: Whatever an env_fn raises, with the worker's traceback as its cause.
        """
        functions = list(env_fns)
        num_envs = len(functions)
        if wait_num is not None and not 1 <= wait_num <= max(num_envs, 1):
            raise ValueError(f"wait_num must be between 1 and {num_envs}, got {wait_num}")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be positive seconds or None, got {timeout}")
        self.env_num = num_envs
        self.wait_num = num_envs if wait_num is None else int(wait_num)
        self.timeout = timeout
        self.is_async = self.wait_num != num_envs or timeout is not None
        if self.is_async and options.get("max_concurrency") is None:
            options.setdefault("num_workers", num_envs)
        self.envs = _made(functions, share_memory, options)
        self._exchange = self.envs.exchange
        self.is_closed = False
        self.waiting_id: list[int] = []
        try:
            described = self._exchange.call("shmvec_describe")
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
    def ready_id(self) -> list[int]:
        """Envs that are not stepping."""
        return [env for env in range(self.env_num) if env not in self.waiting_id]

    @property
    def observation_space(self) -> list[gym.Space[Any]]:
        """The observation space of each env."""
        return self.get_env_attr("observation_space")

    @property
    def action_space(self) -> list[gym.Space[Any]]:
        """The action space of each env: always the same objects, which :meth:`seed` seeds."""
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
        """See ``BaseVectorEnv.get_env_attr``; wrappers are searched from the outermost inwards."""
        self._check_open()
        envs = self._ids(id)
        if key in SPACES:
            return [self._spaces[key][env] for env in envs.tolist()]
        self._check_ready(envs)
        return self._exchange.call("shmvec_get", (key,), envs=envs)

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:
        """See ``BaseVectorEnv.set_env_attr``; it is set on the innermost ("unwrapped") env."""
        self._check_open()
        envs = self._ids(id)
        self._check_ready(envs)
        self._exchange.call("shmvec_set", (key, value), envs=envs)

    def reset(self, env_id: Ids = None, **kwargs: Any) -> tuple[Array, Array]:
        """See ``BaseVectorEnv.reset``.

        Args:
            env_id: Which envs; None: all.
            **kwargs: Arguments of each env's ``reset``: ``seed``, ``options``, or others that it
                takes. A list or array of seeds has one for each of these envs; an int is the seed
                of every env, as in Tianshou.

        Returns:
            Observations ``(n, ...)``, and infos, an object array ``(n,)`` of dicts. Observations
            of Dict spaces are an object array of dicts.
        """
        self._check_open()
        envs = self._ids(env_id)
        self._check_ready(envs)
        asked = self._asked(envs)
        self._exchange.recycle()  # before an episode begins, if one is over
        self._exchange.ask_reset(asked, *_reset_arguments(kwargs, len(envs)))
        observations, *_, infos = self._results(self._exchange.take(asked))
        return observations, infos

    def step(self, action: Any, id: Ids = None) -> tuple[Array, Array, Array, Array, Array]:
        """See ``BaseVectorEnv.step``.

        With ``wait_num`` or ``timeout`` it returns as soon as ``wait_num`` of the stepping envs are
        ready; their infos say which envs they are (``env_id``). With ``action=None`` it steps no
        env, and takes results, with ``id`` of these envs. If an env raises then, results of the
        others are returned by the next call, unless these were named as well.
        """
        self._check_open()
        envs = self._ids(id)
        asked = self._asked(envs)
        if action is not None:
            self._check_ready(envs)
            self._exchange.recycle()
            self._exchange.ask(asked, self._actions(action, len(envs)))
        elif not self.is_async:
            raise ValueError("action must not be None: it is for wait_num= or timeout= only")
        if self.is_async:
            answers = self._take_async(envs, action is not None, id is not None)
        else:
            answers = self._exchange.take(asked)
        results = self._results(answers)
        for env, info in zip(answers.envs.tolist(), results[-1], strict=True):
            info["env_id"] = env
        return results

    def _take_async(self, envs: Envs, asked: bool, named: bool) -> Answers:
        """Takes answers of stepping envs: of those that are ready first, or of the named ones."""
        if asked:
            self.waiting_id += envs.tolist()
        elif named and not set(envs.tolist()) <= set(self.waiting_id):
            raise ValueError(f"envs {envs.tolist()} are not all stepping: {self.waiting_id}")
        return self._exchange.take(envs) if named and not asked else self._first_ready()

    def _first_ready(self) -> Answers:
        """Waits for ``wait_num`` of the envs that are stepping, or for ``timeout`` and one."""
        out = max(1, len(self.waiting_id))  # at least 1, so that taking from no env is an error
        try:
            return self._exchange.take(
                count=out, least=min(self.wait_num, out), timeout=self.timeout
            )
        except multiprocessing.TimeoutError as error:
            if isinstance(error, EnvTimeoutError):
                raise
            return self._exchange.take(count=out, least=1)

    def seed(self, seed: int | Sequence[int] | None = None) -> list[list[int] | None]:
        """See ``BaseVectorEnv.seed``; seeds the action spaces in this process, too.

        Envs that have a method ``seed`` are seeded by it; the others are reset with their seed.
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
        used = self._exchange.call("shmvec_seed", (seeds,))
        if self._reseeds:
            self.reset(self._reseeds, seed=[seeds[env] for env in self._reseeds])
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

    def _ids(self, id: Ids) -> Envs:
        """Indices of existing envs; an empty ``id`` has none."""
        if id is None:
            return np.arange(self.env_num, dtype=np.intp)
        ids = np.atleast_1d(np.asarray(id))
        return np.empty(0, np.intp) if ids.size == 0 else existing_env_ids(ids, self.env_num)

    def _asked(self, envs: Envs) -> Envs | None:
        """Envs as the exchange takes them: None for all of them in lockstep."""
        everyone = len(envs) == self.env_num and (envs == np.arange(self.env_num)).all()
        return None if everyone and not self.is_async else envs

    def _check_open(self) -> None:
        if self.is_closed:
            raise AssertionError(
                f"Methods of {type(self).__name__} cannot be called after close()."
            )

    def _check_ready(self, envs: Envs) -> None:
        if self._exchange.num_in_flight > len(self.waiting_id):
            # Discards results of envs that an interrupted call has left in flight.
            self._exchange.take([env for env in self.ready_id if self._exchange.in_flight(env)])
        stepping = [env for env in envs.tolist() if env in self.waiting_id]
        if stepping:
            raise AssertionError(
                f"Cannot interact with envs {stepping}, which are stepping now: take their "
                f"results, with step(None, id), first. Ready are {self.ready_id}."
            )

    def _actions(self, action: Any, count: int) -> Any:
        """Actions as the exchange takes them: a list, an array, or dicts and tuples of lists."""
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

    def _results(self, answers: Answers) -> tuple[Array, Array, Array, Array, Array]:
        """Answers in Tianshou's form; raises what envs have raised."""
        if self.waiting_id:
            answered = {*answers.envs.tolist(), *(failure.env for failure in answers.failures)}
            self.waiting_id = [env for env in self.waiting_id if env not in answered]
        self._exchange.delivered(answers)
        observations, rewards, infos = answers.observations, answers.rewards, answers.infos
        given = [info.pop(REWARD, None) for info in infos]
        arrays = [reward for reward in given if reward is not None]
        if arrays:  # rewards; an env without one was reset, or had a fault
            nothing = np.zeros_like(arrays[0])
            rewards = np.stack([nothing if reward is None else reward for reward in given])
        if isinstance(observations, dict):
            space = self.envs.single_observation_space
            observations = _boxed([one_of(space, observations, i) for i in range(len(infos))])
        elif not isinstance(observations, np.ndarray):  # they have one item an env already
            observations = _stacked(observations or ())
        return observations, rewards, answers.terminations, answers.truncations, _boxed(infos)


class SubprocVectorEnv(TianshouVectorEnv):
    """:class:`TianshouVectorEnv` with the defaults of Tianshou's class of this name.

    Observations and actions travel as messages: they are what the envs return, of any kind.
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
    """:class:`TianshouVectorEnv` by the name of Tianshou's class with shared memory."""

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        wait_num: int | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        """Starts the workers; see :class:`TianshouVectorEnv`."""
        super().__init__(env_fns, wait_num, timeout, True, **options)


def _stacked(rows: Sequence[Any]) -> Array:
    """Rows as one array, or as an array of objects where that is impossible."""
    if all(isinstance(row, (np.ndarray, np.generic, int, float)) for row in rows):
        with suppress(ValueError):  # there are none, or they are of different shapes
            return np.stack(rows)
    return _boxed(rows)


def _boxed(values: Sequence[Any]) -> Array:
    """An array of objects, into which NumPy does not look."""
    boxes = np.empty(len(values), object)
    for index, value in enumerate(values):
        boxes[index] = value
    return boxes


def _reset_arguments(kwargs: dict[str, Any], count: int) -> tuple[Any, Any]:
    """Seeds and options, one for each env."""
    seed, options = kwargs.pop("seed", None), kwargs.pop("options", None)
    if seed is not None and np.ndim(seed) == 0:
        seed = [seed] * count
    if kwargs:
        options = {KWARGS: kwargs, "options": options}
    return checked_seeds(seed, count), None if options is None else [options] * count


def _made(env_fns: Sequence[Any], share_memory: bool, options: dict[str, Any]) -> ShmVectorEnv:
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
                "If it is for the envs' spaces: share_memory=False takes observations and actions "
                "of any kind, unlike ones as well.",
            )
        raise

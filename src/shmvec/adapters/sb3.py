"""Stable-Baselines3's ``VecEnv`` for Gymnasium envs, and for the agents of PettingZoo envs.

Methods, their arguments and results are those of `SB3's VecEnv
<https://stable-baselines3.readthedocs.io/en/master/guide/vec_envs.html>`_.
"""

from __future__ import annotations

import multiprocessing
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

try:
    from stable_baselines3.common.vec_env import VecEnv
    from stable_baselines3.common.vec_env.base_vec_env import (
        VecEnvIndices,
        VecEnvObs,
        VecEnvStepReturn,
    )
except ImportError as error:
    raise ImportError(
        "shmvec.adapters.sb3 adapts to Stable-Baselines3, which cannot be imported "
        f"({error}): pip install stable-baselines3"
    ) from error

from shmvec._arguments import checked_env_fns, checked_options, checked_seeds
from shmvec._options import takes_options
from shmvec.adapters._sb3_env import RESET_INFO, SB3Env
from shmvec.adapters._sb3_replay import ShmReplayBuffer
from shmvec.adapters._shared import STEP, delegate, split_final_info, waiting_property
from shmvec.exchange import Autoreset, AutoresetMode, Exchange, Options, OwnsProcesses
from shmvec.faults import EnvTimeoutError, WorkerCrashError
from shmvec.spaces import batched

__all__ = ["AgentVecEnv", "ShmReplayBuffer", "ShmVecEnv"]

_CLOSE_TIMEOUT_S = 2.0  # if an env is over its time limit


class _RowsVecEnv(OwnsProcesses, VecEnv):
    """A ``VecEnv`` over the results of a vector env, with a row for each of SB3's envs."""

    def reset(self) -> VecEnvObs:
        """See ``VecEnv.reset``; a step that was begun is finished first, its results discarded."""
        seeds = self._seeds if any(seed is not None for seed in self._seeds) else None
        options = self._options if any(self._options) else None
        observations, infos = self._reset_rows(seed=seeds, options=options)
        self.reset_infos = [self._reset_info(info) for info in infos]
        # Seeds and options are used once.
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_wait(self) -> VecEnvStepReturn:
        """See ``VecEnv.step_wait``; raises ``NoAsyncCallError`` if no step was begun."""
        observations, rewards, terminations, truncations, infos = self._finish_step()
        dones = terminations | truncations
        # By SB3's rule an episode that terminated as well was not truncated.
        truncated_rows = (truncations & ~terminations).tolist()
        final_observations = {}
        for row in dones.nonzero()[0].tolist():
            final_observations[row], reset_info = split_final_info(infos, row)
            self.reset_infos[row] = self._reset_info(reset_info)
        for info, truncated in zip(infos, truncated_rows, strict=True):
            info["TimeLimit.truncated"] = truncated
        for row, last in final_observations.items():
            infos[row]["terminal_observation"] = last
        return observations, rewards.astype(np.float32), dones, infos

    def _reset_rows(self, *, seed: Any, options: Any) -> tuple[Any, list[dict[str, Any]]]:
        raise NotImplementedError

    def _finish_step(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def _reset_info(self, info: dict[str, Any]) -> dict[str, Any]:
        """The env's own info of a reset, from the core's info."""
        return info


class ShmVecEnv(_RowsVecEnv):
    """Steps Gymnasium envs in worker processes, for Stable-Baselines3.

    It replaces ``SubprocVecEnv``, with the same arguments, methods and results. Rewards are float32
    and observations have the dtype of their space, as with ``DummyVecEnv``.

    Methods raise ``ClosedEnvironmentError`` after ``close``, ``AlreadyPendingCallError`` between
    the two calls of a step (except ``reset`` and ``close``), ``WorkerCrashError`` if a worker has
    died, ``EnvTimeoutError`` if an env takes longer than its limit, and the exceptions of envs,
    with the worker's traceback as the cause; the other envs have made their step then. Wrong
    actions raise ValueError or TypeError, and no env makes a step.

    Attributes:
        num_envs: Number of envs.
        num_workers: Number of worker processes; 0 if the envs live in this process.
        processes: The worker processes, one for each worker.
        observation_space: Observation space of one env.
        action_space: Action space of one env.
        render_mode: Render mode of the envs.
        metadata: The first env's, with the render modes that a ``VecEnv`` has.
        reset_infos: The info of the last reset of each env, a list of dicts.
        waiting: Whether a step was begun, by ``step_async``, and not waited for.
        closed: Whether it has been closed.

    Example:
        >>> from stable_baselines3.common.env_util import make_vec_env
        >>> from shmvec.adapters.sb3 import ShmVecEnv
        >>> env = make_vec_env(
        ...     "CartPole-v1",
        ...     n_envs=4,
        ...     seed=0,
        ...     vec_env_cls=ShmVecEnv,
        ...     vec_env_kwargs={"start_method": "fork", "num_workers": 2},
        ... )
        >>> env.reset().shape
        (4, 4)
        >>> observations, rewards, dones, infos = env.step([0, 1, 0, 1])
        >>> rewards, dones, infos[0]
        (array([1., 1., 1., 1.], dtype=float32), array([False, False, False, False]), \
{'TimeLimit.truncated': False})
        >>> env.close()
    """

    metadata: dict[str, Any]

    @takes_options(
        "autoreset_mode",
        "context",
        "copy",
        reason="envs are reset in the step that ends an episode, results are copies, and "
        "start_method= says how processes start",
    )
    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        start_method: str | None = None,
        **options: Any,
    ) -> None:
        """Starts the workers and builds the envs, all in parallel.

        Args:
            env_fns: One function for each env; no two may return the same env.
            start_method: How processes are started: "fork", "spawn" or "forkserver". None:
                "forkserver" where there is one, else "spawn"; both are safe with threads such as
                torch's.
            **options: Options of :class:`shmvec.ShmVectorEnv`: {options}.

        Raises:
            TypeError: There is no such option, or it would break the contract of ``VecEnv``.
            AssertionError: The envs' render modes differ.
            Exception: As :class:`shmvec.ShmVectorEnv`.
        """
        if start_method is None:
            available = multiprocessing.get_all_start_methods()
            start_method = "forkserver" if "forkserver" in available else "spawn"
        hosted: list[Any] = [partial(SB3Env, env_fn) for env_fn in checked_env_fns(env_fns)]
        self._exchange = Exchange(
            hosted,
            name=type(self).__name__,
            context=start_method,
            autoreset_mode=AutoresetMode.SAME_STEP,
            **options,
        )
        self.num_envs = self._exchange.num_envs  # the base class asks the envs for attributes
        try:
            super().__init__(
                self.num_envs,
                self._exchange.single_observation_space,
                self._exchange.single_action_space,
            )
        except BaseException:
            self.close()
            raise
        self.metadata = {**self._exchange.metadata, **self.metadata}

    waiting = waiting_property

    def __repr__(self) -> str:
        """Number of envs and workers, the options, and whether it is closed."""
        return repr(self._exchange)

    @property
    def exchange(self) -> Exchange:
        """The :class:`~shmvec.exchange.Exchange` that steps the envs."""
        return self._exchange

    num_workers = delegate("_exchange", "num_workers")
    processes = delegate("_exchange", "processes")
    closed = delegate("_exchange", "closed")
    stats = delegate("_exchange", "stats")

    @property
    def envs(self) -> list[gym.Env[Any, Any]]:
        """The envs themselves, as ``DummyVecEnv`` has them; only with ``num_workers=0``."""
        if self.num_workers:
            raise AttributeError(
                "the envs live in workers: use get_attr(), set_attr() and env_method(), or make "
                "the ShmVecEnv with num_workers=0"
            )
        return self._ask(None, "shmvec_get_env")

    def _reset_rows(self, *, seed: Any, options: Any) -> tuple[Any, list[dict[str, Any]]]:
        seeds, each = checked_seeds(seed, self.num_envs), checked_options(options, self.num_envs)
        self._exchange.drop(STEP)
        return self._exchange.reset(None, seeds, each)

    def _reset_info(self, info: dict[str, Any]) -> dict[str, Any]:
        """The env's own info, and the core's report of a fault."""
        own: dict[str, Any] = info.pop(RESET_INFO, {})
        own.update(info)
        return own

    def set_reset_options(self, options: Options, indices: VecEnvIndices = None) -> None:
        """Sets options of automatic resets; see :meth:`shmvec.ShmVectorEnv.set_reset_options`.

        SB3's own ``set_options`` is only for the next call of ``reset``; ``learn`` calls it once.
        """
        self._exchange.set_reset_options(options, self._indices_or_none(indices))

    def set_reset_seeds(
        self, seeds: int | Sequence[int | None] | None, indices: VecEnvIndices = None
    ) -> None:
        """Sets seeds of automatic resets; see :meth:`shmvec.ShmVectorEnv.set_reset_seeds`."""
        self._exchange.set_reset_seeds(seeds, self._indices_or_none(indices))

    def _indices_or_none(self, indices: VecEnvIndices) -> list[int] | None:
        return None if indices is None else self._checked_indices(indices)

    def step_async(self, actions: npt.ArrayLike) -> None:
        """See ``VecEnv.step_async``; of Dict and Tuple action spaces, actions are a list."""
        self._exchange.begin(STEP, _batch_actions(self.action_space, actions))

    def _finish_step(self) -> tuple[Any, ...]:
        results: tuple[Any, ...] = self._exchange.finish(STEP)
        return results

    def close(self) -> None:
        """Closes the envs and ends the workers, also while a step is in flight, or a second time.

        If an env is over its time limit, all envs get two seconds to close; then their processes
        are terminated.
        """
        self._exchange.drop(STEP)
        timeout = None
        try:
            self._exchange.discard()
        except EnvTimeoutError:
            timeout = _CLOSE_TIMEOUT_S
        except WorkerCrashError:  # the crash has closed the exchange
            pass
        finally:
            self._exchange.close(timeout=timeout)

    def has_attr(self, attr_name: str) -> bool:
        """Whether all envs, or their wrappers, have an attribute or method of this name."""
        return all(self._ask(None, "shmvec_has_attr", attr_name))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """See ``VecEnv.get_attr``; a method is returned, not called."""
        return self._ask(indices, "shmvec_get_attr", attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """See ``VecEnv.set_attr``; sets it on the wrapper that has it, or on the env itself."""
        envs = self._checked_indices(indices)
        self._exchange.check_pending("set_attr")
        self._exchange.set_attr(attr_name, dict.fromkeys(envs, value))

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: VecEnvIndices = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """See ``VecEnv.env_method``; an env that is named twice is called twice."""
        return self._ask(indices, "shmvec_env_method", method_name, method_args, method_kwargs)

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """See ``VecEnv.env_is_wrapped``."""
        return self._ask(indices, "shmvec_is_wrapped", wrapper_class)

    def get_images(self) -> Sequence[npt.NDArray[Any] | None]:
        """A frame of each env; warns and returns None unless the render mode is "rgb_array"."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"envs with render_mode={self.render_mode!r} return no images: make them with "
                'render_mode="rgb_array"',
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self._ask(None, "render")

    def restart(self, indices: VecEnvIndices = None) -> None:
        """Restarts the workers of some envs, whose next step truncates; see ``ShmVectorEnv``."""
        self._exchange.check_pending("restart")
        self._exchange.restart(sorted(set(self._checked_indices(indices))))

    def _checked_indices(self, indices: VecEnvIndices) -> list[int]:
        """Indices of envs as a list of non-negative ints."""
        if indices is None:
            return list(range(self.num_envs))
        try:
            indices = [operator.index(indices)]
        except TypeError:  # not one int, but several
            indices = [operator.index(index) for index in indices]
        for index in indices:
            if not -self.num_envs <= index < self.num_envs:
                raise IndexError(f"there is no env {index}: there are {self.num_envs}")
        return [index % self.num_envs for index in indices]

    def _ask(self, indices: VecEnvIndices, name: str, *args: Any) -> list[Any]:
        """Calls a method of ``SB3Env`` for each of these envs, as often as an env is named."""
        envs = self._checked_indices(indices)
        left = Counter(envs)
        answers: dict[int, list[Any]] = {env: [] for env in left}
        self._exchange.check_pending(name.removeprefix("shmvec_"))
        while left:
            results = self._exchange.call(name, args, envs=list(left))
            for env, result in zip(left, results, strict=True):
                answers[env].append(result)
            left -= Counter(list(left))
        return [answers[env].pop(0) for env in envs]


def _batch_actions(space: gym.Space[Any], actions: Any) -> Any:
    """Batches SB3's actions, one for each env, as Gymnasium's vector envs take them."""
    if isinstance(actions, dict):
        raise TypeError(
            f"wrong actions: envs with action space {space} need a list, one action for each env, "
            "not one dict of batches. Nothing was sent to any env."
        )
    return batched(space, actions)


class AgentVecEnv(_RowsVecEnv):
    """:class:`shmvec.adapters.pettingzoo.AgentRows`, with SB3's four values and lists of infos.

    A request to a row goes to the row's env: ``get_attr``, ``env_method`` and ``set_attr`` reach
    each env once, however many of its rows are named.

    Attributes:
        rows: The ``AgentRows``, with ``alive``, and with the envs as ``rows.parallel``.
    """

    def __init__(self, rows: Any) -> None:
        """See :meth:`shmvec.adapters.pettingzoo.ParallelVectorEnv.as_rows`.

        Raises:
            ValueError: The autoreset mode is not SAME_STEP.
        """
        mode = rows.parallel.envs.autoreset_mode
        if not Autoreset.of(mode).in_step:
            raise ValueError(
                "SB3 needs envs that are reset in the step that ends an episode: make it "
                f'ParallelVectorEnv(..., autoreset_mode="SameStep"), not "{mode.value}"'
            )
        self.rows = rows
        self.num_envs = rows.num_envs  # the base class asks the envs for attributes
        super().__init__(rows.num_envs, rows.single_observation_space, rows.single_action_space)

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seeds the next reset: env ``e`` gets ``seed + e``, as in ``AgentRows.reset``.

        Returns:
            For each row, the seed of its env.
        """
        first: Any = super().seed(seed)[0]
        count = self.rows.parallel.num_agents
        self._seeds = [first + row // count for row in range(self.num_envs)]
        return self._seeds

    def step_async(self, actions: Any) -> None:
        """Starts to step all rows and does not wait; see ``AgentRows.step``."""
        self.rows.step_async(actions)

    def close(self) -> None:
        """Closes the envs and ends the workers."""
        self.rows.close()

    _reset_rows = delegate("rows", "reset_rows")
    _finish_step = delegate("rows", "finish_rows")

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Gets the attribute of the env of each of these rows."""
        return self._call_envs(indices, attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Sets an attribute of the envs of these rows."""
        envs = sorted(set(self._envs_of(indices)))
        self.rows.parallel.envs.set_attr(attr_name, [value] * len(envs), envs)

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: VecEnvIndices = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """Calls a method of the envs of these rows; returns one result for each row."""
        return self._call_envs(indices, method_name, *method_args, **method_kwargs)

    def env_is_wrapped(self, wrapper_class: Any, indices: VecEnvIndices = None) -> list[bool]:
        """False for each row: envs of many agents have no wrappers of Gymnasium's."""
        return [False] * len(self._envs_of(indices))

    def get_images(self) -> Sequence[Any]:
        """A frame of each env, for all its agents."""
        return list(self.rows.render())

    def _envs_of(self, indices: VecEnvIndices) -> list[int]:
        rows = np.atleast_1d(np.arange(self.num_envs)[slice(None) if indices is None else indices])
        envs: list[int] = (rows // self.rows.parallel.num_agents).tolist()
        return envs

    def _call_envs(self, indices: VecEnvIndices, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        envs = self._envs_of(indices)
        each = sorted(set(envs))
        results = self.rows.parallel.envs.call_some(each, name, *args, **kwargs)
        found = dict(zip(each, results, strict=True))
        return [found[env] for env in envs]

"""OpenAI baselines' ``SubprocVecEnv`` over :class:`shmvec.ShmVectorEnv`.

Steps Gymnasium envs and returns what baselines' algorithms and wrappers expect: four values, one
``done`` for each env, infos as dicts, and envs that are reset at once. Methods, their arguments and
results are those of `baselines' VecEnv
<https://github.com/openai/baselines/blob/master/baselines/common/vec_env/vec_env.py>`_; baselines
itself is not needed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from shmvec._arguments import checked_count, checked_env_fns, checked_options, checked_seeds
from shmvec.adapters._shared import STEP, delegate, register_as, split_final_info, waiting_property
from shmvec.exchange import AutoresetMode, Options, OwnsProcesses
from shmvec.rendering import Viewer, checked_frames, tile_images
from shmvec.spaces import batched, refuse_reward_space
from shmvec.vector_env import ShmVectorEnv

__all__ = ["AlreadySteppingError", "NotSteppingError", "SubprocVecEnv", "tile_images"]

# Observations, rewards, dones, infos.
StepResults: TypeAlias = tuple[
    Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], tuple[dict[str, Any], ...]
]

_RENDER_MODES = ["human", "rgb_array"]
_CLOSE_TIMEOUT_S = 30.0


class AlreadySteppingError(Exception):
    """Another method was called while a step that ``step_async`` has started is running."""

    def __init__(self, name: str = "step_async") -> None:
        """Makes the message.

        Args:
            name: Name of the method that was called.
        """
        super().__init__(f"already running an async step: call step_wait() before {name}()")


class NotSteppingError(Exception):
    """``step_wait`` was called, but no step is running."""

    def __init__(self) -> None:
        """Makes the message."""
        super().__init__("not running an async step: call step_async() before step_wait()")


class _NamedVectorEnv(ShmVectorEnv):
    """A ``ShmVectorEnv`` with another name in messages."""


_NamedVectorEnv.__name__ = "SubprocVecEnv"  # the name in messages and of processes


class SubprocVecEnv(OwnsProcesses):
    """Steps envs in worker processes; baselines' interface.

    An env that is done is reset at once: the observation is the new episode's first one, and the
    last one is in ``terminal_observations``. If the episode was truncated, the info has
    ``TimeLimit.truncated``, as by gym's time limit: whether the episode did not terminate as well.

    Methods raise ``ClosedEnvironmentError`` after ``close``, ``WorkerCrashError`` if a worker has
    died, ``EnvTimeoutError`` if an env takes longer than its limit, and the exceptions of envs,
    with the worker's traceback as the cause. Wrong actions raise ValueError or TypeError, and no
    env makes a step.

    Attributes:
        num_envs: Number of envs.
        observation_space: Observation space of one env.
        action_space: Action space of one env.
        spec: The first env's, or None.
        metadata: The first env's, with the two modes of :meth:`render`.
        render_mode: The first env's.
        reset_infos: For each env, the info of its last reset.
        terminal_observations: For each env, the last observation of its last finished episode; None
            before an episode has finished.
        viewer: The window, once :meth:`get_viewer` has made it.
        vector_env: The :class:`shmvec.ShmVectorEnv` below, for its ``call``, ``set_attr`` and
            ``stats``.
        waiting: Whether a step is running that ``step_async`` has started.
        closed: Whether the envs are closed, by ``close`` or because a worker has died.

    Example:
        >>> import gymnasium as gym
        >>> from shmvec.adapters.baselines import SubprocVecEnv
        >>> venv = SubprocVecEnv([lambda: gym.make("CartPole-v1")] * 4, in_series=2)
        >>> observations = venv.reset()
        >>> observations, rewards, dones, infos = venv.step([0, 1, 0, 1])
        >>> observations.shape, rewards, dones
        ((4, 4), array([1., 1., 1., 1.]), array([False, False, False, False]))
        >>> venv.close()
    """

    def __init__(
        self,
        env_fns: Iterable[Callable[[], gym.Env[Any, Any]]],
        spaces: tuple[gym.Space[Any], gym.Space[Any]] | None = None,
        context: str | None = "spawn",
        in_series: int = 1,
        **options: Any,
    ) -> None:
        """Starts the processes and builds the envs, all in parallel.

        Args:
            env_fns: One function for each env; sent by cloudpickle, so a lambda will do.
            spaces: The expected observation and action space. None: any.
            context: How processes are started: "spawn", "fork", "forkserver", or None for Python's
                default.
            in_series: Number of envs in each process, which steps them one after the other.
            **options: Further arguments of :class:`shmvec.ShmVectorEnv`, such as ``step_timeout=``
                or ``faults=``. ``num_workers=``, instead of ``in_series``, allows any number of
                processes; 0 steps the envs in this process.

        Raises:
            ValueError: ``in_series`` does not divide the number of envs, or ``spaces`` are not the
                envs'.
            Exception: As :class:`shmvec.ShmVectorEnv`.
        """
        functions = checked_env_fns(list(env_fns))
        self.in_series = checked_count("in_series", in_series)
        if len(functions) % self.in_series != 0:
            raise ValueError(
                f"the number of envs, {len(functions)}, must be divisible by the number of envs to "
                f"run in series, {self.in_series}; num_workers= may be any number"
            )
        if "num_workers" not in options:
            options["num_workers"] = len(functions) // self.in_series
        elif self.in_series != 1:
            raise ValueError("in_series and num_workers exclude each other: leave one of them out")
        self.viewer: Viewer | None = None
        self.vector_env = envs = _NamedVectorEnv(
            functions,
            context=context,
            autoreset_mode=AutoresetMode.SAME_STEP,
            batch_size=None,
            worker=None,
            **options,
        )
        try:
            refuse_reward_space(envs.reward_space, "SubprocVecEnv")
            self.num_envs = envs.num_envs
            self.observation_space = envs.single_observation_space
            self.action_space = envs.single_action_space
            env_spaces = [self.observation_space, self.action_space]
            if spaces is not None and spaces not in (env_spaces, tuple(env_spaces)):
                raise ValueError(
                    f"spaces must be None or those of the envs, {env_spaces}, got {spaces}"
                )
            self.render_mode = envs.render_mode
            self.metadata = {
                **{key: value for key, value in envs.metadata.items() if key != "autoreset_mode"},
                "render_modes": _RENDER_MODES,
                "render.modes": _RENDER_MODES,  # gym's name
            }
            self.spec: Any = None
            with suppress(AttributeError):  # the env is no gym.Env
                (self.spec,) = envs.get_attr("spec", [0])
        except BaseException:
            envs.close(terminate=True)
            raise
        self._exchange = envs.exchange
        self.reset_infos: list[dict[str, Any]] = [{} for _ in functions]
        self.terminal_observations: list[Any] = [None] * self.num_envs
        register_as(SubprocVecEnv, "baselines.common.vec_env:VecEnv")

    waiting = waiting_property
    closed = delegate("vector_env", "closed")

    @property
    def unwrapped(self) -> SubprocVecEnv:
        """Itself."""
        return self

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> Any:
        """See ``VecEnv.reset``; a running step is finished, and its results are discarded.

        Args:
            seed: An int: env ``i`` gets ``seed + i``. A list: one seed (or None) for each env.
                None: the envs' random generators continue.
            options: Passed to every env's ``reset``; of a list, each env gets its own.
        """
        seeds, each = checked_seeds(seed, self.num_envs), checked_options(options, self.num_envs)
        self._exchange.drop(STEP)
        observations, self.reset_infos = self._exchange.reset(None, seeds, each)
        return observations

    def step_async(self, actions: Any) -> None:
        """See ``VecEnv.step_async``.

        Args:
            actions: One for each env: an array ``(num_envs, ...)`` or a list. For Dict and Tuple
                spaces a list of dicts or tuples, or a dict or tuple of arrays.
        """
        self._check_idle("step_async")
        if isinstance(actions, list):
            actions = batched(self.action_space, actions)
        self._exchange.begin(STEP, actions)

    def step_wait(self) -> StepResults:
        """See ``VecEnv.step_wait``; rewards are float64, dones bool, infos a tuple of dicts."""
        self._exchange.check_open()
        if not self.waiting:
            raise NotSteppingError
        observations, rewards, terminations, truncations, infos = self._exchange.finish(STEP)
        dones = terminations | truncations
        for env in np.flatnonzero(dones).tolist():
            self.terminal_observations[env], self.reset_infos[env] = split_final_info(infos, env)
            if truncations[env]:
                infos[env]["TimeLimit.truncated"] = not terminations[env]
        return observations, rewards, dones, tuple(infos)

    def step(self, actions: Any) -> StepResults:
        """Steps all envs, in parallel: :meth:`step_async`, then :meth:`step_wait`."""
        self.step_async(actions)
        return self.step_wait()

    def get_images(self) -> list[npt.NDArray[Any]]:
        """See ``VecEnv.get_images``; the envs need ``render_mode="rgb_array"``."""
        self._check_idle("get_images")
        return checked_frames(self.vector_env.render())

    def render(self, mode: str = "human") -> Any:
        """See ``VecEnv.render``; "human" needs pygame, and returns whether the window is open."""
        if mode not in _RENDER_MODES:
            raise NotImplementedError(f"render(mode={mode!r}): the modes are {_RENDER_MODES}")
        viewer = self.get_viewer() if mode == "human" else None
        picture = tile_images(self.get_images())
        if viewer is None:
            return picture
        viewer.imshow(picture)
        return viewer.isopen

    def get_viewer(self) -> Viewer:
        """The window, which opens with the first picture, and needs pygame."""
        if self.viewer is None:
            self.viewer = Viewer(f"{self.num_envs} envs")
        return self.viewer

    def close(self, timeout: float | None = _CLOSE_TIMEOUT_S) -> None:
        """See ``VecEnv.close``; a second call is harmless.

        Args:
            timeout: Seconds that a running step may take, and closing the envs as well. Then the
                processes are terminated. None: as long as it takes.
        """
        viewer, self.viewer = self.viewer, None
        timed_out = False
        try:
            if viewer is not None:
                viewer.close()
            if self.waiting and not self.closed:
                self._exchange.finish(STEP, timeout)
        except multiprocessing.TimeoutError:
            timed_out = True
        except Exception:  # raised by a step whose results are discarded
            pass
        finally:
            self.vector_env.close(timeout=timeout, terminate=timed_out)

    def _check_idle(self, name: str) -> None:
        self._exchange.check_open()
        if self.waiting:
            raise AlreadySteppingError(name)

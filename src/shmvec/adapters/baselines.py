"""OpenAI baselines' ``SubprocVecEnv`` over :class:`shmvec.ShmVectorEnv`.

Steps Gymnasium envs and returns what baselines' algorithms and wrappers expect: four values, one
``done`` for each env, infos as dicts, and envs that are reset at once. Methods, their arguments and
results are those of `baselines' VecEnv
<https://github.com/openai/baselines/blob/master/baselines/common/vec_env/vec_env.py>`_; baselines
itself is not needed.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.error import ClosedEnvironmentError

from shmvec._arguments import checked_count, checked_env_fns, checked_options, checked_seeds
from shmvec.adapters._shared import STEP, split_end, waiting
from shmvec.exchange import AutoresetMode, Options, OwnsProcesses
from shmvec.rendering import Viewer, checked_frames, tile_images
from shmvec.spaces import batched
from shmvec.vector_env import ShmVectorEnv

__all__ = ["AlreadySteppingError", "NotSteppingError", "SubprocVecEnv", "tile_images"]

# Observations, rewards, dones, infos.
StepResults: TypeAlias = tuple[
    Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], tuple[dict[str, Any], ...]
]

_RENDER_MODES = ["human", "rgb_array"]
_CLOSE_S = 30.0


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


class _Envs(ShmVectorEnv):
    """The vector env below, under another name."""


_Envs.__name__ = "SubprocVecEnv"  # the name in messages and of processes


class SubprocVecEnv(OwnsProcesses):
    """Steps envs in worker processes; baselines' interface.

    An env that is done is reset at once: the observation is the new episode's first one, and the
    last one is kept beside the results, in ``terminal_observations``. If a limit has cut the
    episode off (Gymnasium's ``truncated``) the info has ``TimeLimit.truncated``, as gym's limits
    set it: whether it would have gone on.

    Methods raise ``ClosedEnvironmentError`` after ``close``, ``WorkerCrashError`` if a worker has
    died, ``EnvTimeoutError`` if an env takes longer than its limit, and whatever an env raises,
    with the worker's traceback as its cause. Of wrong actions (ValueError, TypeError) nothing was
    sent.

    Attributes:
        num_envs: Number of envs.
        observation_space: Observation space of one env.
        action_space: Action space of one env.
        spec: The first env's, or None.
        metadata: The first env's, with the two modes of :meth:`render`.
        render_mode: The first env's.
        reset_infos: For each env, the info of its last reset, which the interface has no room for.
        terminal_observations: For each env, the last observation of its last finished episode, for
            which the interface has no room either; None before an episode has finished.
        viewer: The window, once :meth:`get_viewer` has made it.
        vector_env: The :class:`shmvec.ShmVectorEnv` below, for its ``call``, ``set_attr`` and
            ``stats``.
        waiting: Whether a step is running that ``step_async`` has started.

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
            spaces: Observation and action space, if you want them checked. None: the envs'.
            context: How processes are started: "spawn", "fork", "forkserver", or None for Python's
                default.
            in_series: Number of envs in each process, which steps them one after the other.
            **options: Further arguments of :class:`shmvec.ShmVectorEnv`, such as
                ``step_timeout=`` or ``faults=``; with ``num_workers=`` instead of ``in_series``
                any split will do, and 0 steps the envs in this process.

        Raises:
            ValueError: No env_fns; ``in_series`` does not divide their number, or is below 1;
                ``spaces`` is no pair of spaces, or not the envs'; a bad ``context`` or option.
            TypeError: Something in ``env_fns`` is not callable, or cannot be pickled;
                ``in_series`` is no integer; an option does not exist, or is fixed here.
            RuntimeError: Spaces of the envs differ.
            WorkerCrashError: A worker process died while it built its envs.
            Exception: Whatever an env_fn raises, with the worker's traceback as its cause.
        """
        functions = checked_env_fns(list(env_fns))
        _check_spaces(spaces)
        self.in_series = checked_count("in_series", in_series)
        if len(functions) % self.in_series != 0:
            raise ValueError(
                f"the number of envs, {len(functions)}, must be divisible by the number of envs to "
                f"run in series, {self.in_series}; num_workers= takes any split"
            )
        if "num_workers" not in options:
            options["num_workers"] = len(functions) // self.in_series
        elif self.in_series != 1:
            raise ValueError("in_series and num_workers say the same: leave one of them out")
        self.viewer: Viewer | None = None
        self.vector_env = envs = _Envs(
            functions,
            context=context,
            autoreset_mode=AutoresetMode.SAME_STEP,
            batch_size=None,
            worker=None,
            **options,
        )
        try:
            self.num_envs = envs.num_envs
            self.observation_space = envs.single_observation_space
            self.action_space = envs.single_action_space
            self._compare_with(spaces)
            self.render_mode = envs.render_mode
            self.metadata = {
                **{key: value for key, value in envs.metadata.items() if key != "autoreset_mode"},
                "render_modes": _RENDER_MODES,
                "render.modes": _RENDER_MODES,  # as gym called it
            }
            self.spec: Any = None
            with suppress(AttributeError):  # an env that is no gym.Env
                (self.spec,) = envs.get_attr("spec", [0])
        except BaseException:
            envs.close(terminate=True)
            raise
        self._exchange = envs.exchange
        self.reset_infos: list[dict[str, Any]] = [{} for _ in functions]
        self.terminal_observations: list[Any] = [None] * self.num_envs
        _register_with_baselines()

    waiting = waiting

    @property
    def closed(self) -> bool:
        """Whether the envs are closed, by ``close`` or because a worker has died."""
        return self.vector_env.closed

    @property
    def unwrapped(self) -> SubprocVecEnv:
        """Itself."""
        return self

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> Any:
        """See ``VecEnv.reset``; a step that is running is finished, and its results lost.

        Args:
            seed: An int: env ``i`` gets ``seed + i``. A list: one seed (or None) for each env.
                None: envs go on with the generators they have.
            options: Passed to every env's ``reset``; of a list, each env gets its own.
        """
        self._assert_open("reset")
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
        self._idle("step_async")
        if isinstance(actions, list):
            if len(actions) != self.num_envs:
                raise ValueError(
                    f"wrong actions: there are {len(actions)} for {self.num_envs} envs. Nothing "
                    "was sent to any env."
                )
            actions = batched(self.action_space, actions)
        self._exchange.begin(STEP, actions)

    def step_wait(self) -> StepResults:
        """See ``VecEnv.step_wait``; rewards are float64, dones bool, infos a tuple of dicts."""
        self._assert_open("step_wait")
        if not self.waiting:
            raise NotSteppingError
        observations, rewards, terminations, truncations, infos = self._exchange.finish(STEP)
        dones = terminations | truncations
        for env in np.flatnonzero(dones).tolist():
            self.terminal_observations[env], self.reset_infos[env] = split_end(infos, env)
            if truncations[env]:
                infos[env]["TimeLimit.truncated"] = not terminations[env]
        return observations, rewards, dones, tuple(infos)

    def step(self, actions: Any) -> StepResults:
        """Steps all envs, in parallel: :meth:`step_async`, then :meth:`step_wait`."""
        self.step_async(actions)
        return self.step_wait()

    def get_images(self) -> list[npt.NDArray[Any]]:
        """See ``VecEnv.get_images``; the envs need ``render_mode="rgb_array"``."""
        self._idle("get_images")
        return checked_frames(self.vector_env.render())

    def render(self, mode: str = "human") -> Any:
        """See ``VecEnv.render``; "human" returns whether the window is open, and needs pygame."""
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

    def close(self, timeout: float | None = _CLOSE_S) -> None:
        """See ``VecEnv.close``; a second call is harmless.

        Args:
            timeout: Seconds that a running step, and closing the envs, may take each. Then the
                processes are terminated. None: as long as they take.
        """
        viewer, self.viewer = self.viewer, None
        late = False
        try:
            if viewer is not None:
                viewer.close()
            if self.waiting and not self.closed:
                self._exchange.finish(STEP, timeout)
        except multiprocessing.TimeoutError:
            late = True
        except Exception:  # raised by a step whose results are discarded
            pass
        finally:
            self.vector_env.close(timeout=timeout, terminate=late)

    def _assert_open(self, name: str) -> None:
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on a SubprocVecEnv after calling close(): {name}()"
            )

    def _idle(self, name: str) -> None:
        self._assert_open(name)
        if self.waiting:
            raise AlreadySteppingError(name)

    def _compare_with(self, spaces: Any) -> None:
        for kind, given in zip(("observation", "action"), spaces or (), strict=False):
            found = getattr(self, f"{kind}_space")
            if given != found:
                raise ValueError(f"`spaces` says the {kind} space is {given}, but it is {found}")


def _check_spaces(spaces: Any) -> None:
    if spaces is None:
        return
    if not (
        isinstance(spaces, (tuple, list))
        and len(spaces) == 2
        and all(isinstance(space, gym.Space) for space in spaces)
    ):
        raise ValueError(
            "spaces must be a pair, the observation space and the action space of one env, or None "
            f"for those that the envs have; got {spaces!r}"
        )


def _register_with_baselines() -> None:
    """Makes ``isinstance(env, VecEnv)`` true for baselines, if it is imported."""
    theirs = sys.modules.get("baselines.common.vec_env")
    base = getattr(theirs, "VecEnv", None)
    if base is not None and hasattr(base, "register"):
        base.register(SubprocVecEnv)

"""Videos of chosen episodes, in Gymnasium's format, made in the worker that plays them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import RecordVideo

__all__ = ["EPISODE", "recorded"]

EPISODE = "shmvec.episode"  # the option by which a reset says which episode it begins

_Env = gym.Env[Any, Any]


def recorded(
    env_fns: Collection[Callable[[], _Env]], folder: str | os.PathLike[str], chosen: Collection[int]
) -> list[Callable[[], _Env]]:
    """Env_fns whose envs record these episodes, as ``episode-<number>.mp4``.

    Raises:
        gymnasium.error.DependencyNotInstalled: moviepy is not installed.
    """
    return [
        partial(_make, env_fn, os.path.abspath(folder), frozenset(chosen)) for env_fn in env_fns
    ]


def _make(env_fn: Callable[[], _Env], folder: str, chosen: frozenset[int]) -> _Env:
    return Recorder(env_fn(), folder, chosen)


class Recorder(RecordVideo[Any, Any]):
    """Gymnasium's, which is told the number of an episode: its own counts are of one env."""

    def __init__(self, env: _Env, folder: str, chosen: frozenset[int]) -> None:
        """Wraps an env."""
        with warnings.catch_warnings():  # other workers make the folder, too
            warnings.simplefilter("ignore")
            super().__init__(
                env, folder, episode_trigger=chosen.__contains__, name_prefix="evaluation"
            )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins the episode that the options name."""
        if options is not None and EPISODE in options:
            self.episode_id = options[EPISODE] - 1  # the wrapper counts on
            options = options.get("")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Writes the video at an episode's end; there may be no other reset."""
        results = super().step(action)
        if self.recording and (results[2] or results[3]):
            self.stop_recording()  # type: ignore[no-untyped-call]
        return results

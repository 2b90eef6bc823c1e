"""Episodes, each with its seed, and envs that record videos of some."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import RecordVideo

__all__ = ["EPISODE_OPTION", "Episode", "EpisodeRecorder", "draw_seeds", "record_videos"]

_NUM_SEEDS = 2**31  # larger seeds are not taken by all generators
_POLICY_STREAM = 1  # distinguishes a policy's random numbers from the env's


@dataclass(slots=True)
class Episode:
    """An episode of an evaluation.

    Attributes:
        number: Its place among the episodes asked for.
        seed: The seed of its reset.
        options: The options of its reset.
        return_: The sum of its rewards, so far.
        length: The number of its steps, so far.
        info: The last step's info.
        terminated: Whether it has terminated; if it ended otherwise, it was truncated.
        finished: Whether it has been played to its end.
        repeats: How often it was interrupted by a fault, and repeated.
        task: In a suite: the name of its task.
        failed: In a suite: why it counts as failed. "": it does not.
        steps: The number of steps made for it, including those before interruptions.
        seconds: The time it has taken.
    """

    number: int
    seed: int | None
    options: Any
    return_: float = 0.0
    length: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    terminated: bool = False
    finished: bool = False
    repeats: int = 0
    task: str = ""
    failed: str = ""
    steps: int = 0
    seconds: float = 0.0

    @property
    def policy_seed(self) -> int:
        """A seed for the policy, which differs from ``seed``, so that the numbers differ, too."""
        return int(np.random.SeedSequence([self.seed or 0, _POLICY_STREAM]).generate_state(1)[0])

    @property
    def settled(self) -> bool:
        """Whether it has been played, or counts as failed."""
        return self.finished or bool(self.failed)

    def interrupt(self) -> None:
        """Returns it to its beginning, after a fault."""
        self.repeats += 1
        self.return_, self.length = 0.0, 0


def draw_seeds(count: int, base: int | None = None) -> list[int]:
    """Draws seeds by a generator with the seed ``base``; None: from the system's entropy."""
    numbers: list[int] = np.random.default_rng(base).integers(_NUM_SEEDS, size=count).tolist()
    return numbers


EPISODE_OPTION = "shmvec.episode"  # a reset's option with the number of the episode

_Env = gym.Env[Any, Any]


def record_videos(
    env_fns: Collection[Callable[[], _Env]], folder: str | os.PathLike[str], chosen: Collection[int]
) -> list[Callable[[], _Env]]:
    """Env functions whose envs record the chosen episodes, as ``episode-<number>.mp4``.

    Raises:
        gymnasium.error.DependencyNotInstalled: moviepy is not installed.
    """
    return [
        partial(_make, env_fn, os.path.abspath(folder), frozenset(chosen)) for env_fn in env_fns
    ]


def _make(env_fn: Callable[[], _Env], folder: str, chosen: frozenset[int]) -> _Env:
    return EpisodeRecorder(env_fn(), folder, chosen)


if TYPE_CHECKING:
    _RecordVideo = RecordVideo[Any, Any]
else:  # Gymnasium 1.1 to 1.3 give it three type arguments
    _RecordVideo = RecordVideo


class EpisodeRecorder(_RecordVideo):
    """Gymnasium's RecordVideo, with an evaluation's numbers of episodes instead of each env's."""

    def __init__(self, env: _Env, folder: str, chosen: frozenset[int]) -> None:
        """Wraps an env."""
        with warnings.catch_warnings():  # it warns that the folder exists: other workers make it
            warnings.simplefilter("ignore")
            super().__init__(
                env, folder, episode_trigger=chosen.__contains__, name_prefix="evaluation"
            )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins the episode that the options name."""
        if options is not None and EPISODE_OPTION in options:
            self.episode_id = options[EPISODE_OPTION] - 1  # the wrapper adds 1
            options = options.get("")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the env, and writes the video at an episode's end: no reset may follow."""
        results = super().step(action)
        if self.recording and (results[2] or results[3]):
            self.stop_recording()  # type: ignore[no-untyped-call]
        return results

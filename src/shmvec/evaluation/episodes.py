"""Episodes, each from its seed, and the envs that record some of them."""

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

__all__ = ["EPISODE", "Episode", "Recorder", "drawn_seeds", "recorded"]

_SEEDS = 2**31  # as many as all generators take
_OF_POLICIES = 1  # tells a policy's stream of numbers from the env's


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
        terminated: Whether it ended in a terminal state, and not by a truncation.
        finished: Whether it has been played.
        repeats: How often it was interrupted by a fault, and repeated.
        task: Of a suite: the name of its task.
        failed: Of a suite: why it counts as failed; "": it does not.
        steps: The steps made, with those before interruptions.
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
        """A seed for what the policy draws in it: of ``seed`` the env draws the same numbers."""
        return int(np.random.SeedSequence([self.seed or 0, _OF_POLICIES]).generate_state(1)[0])

    @property
    def settled(self) -> bool:
        """Whether it has been played, or counts as failed."""
        return self.finished or bool(self.failed)

    def interrupt(self) -> None:
        """Has it begin anew."""
        self.repeats += 1
        self.return_, self.length = 0.0, 0


def drawn_seeds(count: int, base: int | None = None) -> list[int]:
    """Seeds that follow from a number; None: from the system's entropy."""
    numbers: list[int] = np.random.default_rng(base).integers(_SEEDS, size=count).tolist()
    return numbers


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


if TYPE_CHECKING:
    _RecordVideo = RecordVideo[Any, Any]
else:  # Gymnasium 1.1 to 1.3 give it three type arguments
    _RecordVideo = RecordVideo


class Recorder(_RecordVideo):
    """Gymnasium's RecordVideo with given episode numbers; its own count the episodes of one env."""

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

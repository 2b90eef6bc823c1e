"""Episodes, and what plays them: each from its seed, without a wasted step."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import RecordVideo

from shmvec._policy import InformedPolicy, Policy, PolicyCaller
from shmvec.exchange import Answers, Exchange

__all__ = ["EPISODE", "Episode", "EpisodePlayer", "Recorder", "drawn_seeds", "recorded"]


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
        steps: Of a suite: the steps made, with those before interruptions.
        seconds: Of a suite: the time it has taken.
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


class EpisodePlayer:
    """Plays episodes, each from its seed and its options, without a wasted step."""

    def __init__(
        self,
        exchange: Exchange,
        policy: Policy,
        episodes: Sequence[Episode],
        *,
        batch_size: int,
        fixed: bool,
        options_of: Callable[[Episode], Any],
        finished: Callable[[Episode], object],
    ) -> None:
        """Prepares to play.

        Args:
            exchange: The envs; answers in flight are discarded when they come.
            policy: Chooses actions.
            episodes: The episodes to play, in this order.
            batch_size: Number of envs that the policy is asked about at a time, at most.
            fixed: Whether batches are filled up to this size.
            options_of: Returns the options that an episode's reset is given.
            finished: Called with each episode when it is over.
        """
        self._exchange = exchange
        policy = InformedPolicy(policy, {}, {"seeds": lambda env: self._playing[env].policy_seed})
        self._caller = PolicyCaller(exchange, policy, batch_size if fixed else None)
        self._waiting = deque(episodes)
        self._batch_size = batch_size
        self._options_of = options_of
        self._finished = finished
        self._last_start = np.inf
        self._playing: dict[int, Episode] = {}  # by env
        self._begun: set[int] = set()  # envs that were asked to reset
        self.steps = 0

    def play(self, last_start: float, deadline: float) -> None:
        """Plays the episodes, as far as the time allows.

        Args:
            last_start: When the last episode may begin, by the monotonic clock.
            deadline: When it stops to wait for those that have begun.

        Raises:
            Exception: What envs and the policy raise.
        """
        exchange = self._exchange
        everyone = range(exchange.num_envs)
        self._last_start, self._deadline = last_start, deadline
        try:
            if not exchange.discard(_left(deadline)):
                return
            self._begin(everyone)
            while self._playing or self._waiting:
                if self._waiting and len(self._playing) < len(everyone):
                    self._begin([env for env in everyone if env not in self._playing])
                    if not self._playing:  # the time is up
                        break
                count = min(self._batch_size, exchange.num_in_flight)
                # Takes only the envs that are ready: the others become ready while the policy is
                # busy with these.
                answers = exchange.take(count=count, least=1, timeout=_left(deadline))
                if answers.failures:
                    exchange.raise_failures(answers.failures)
                self._go_on(answers)
                if time.monotonic() >= deadline:
                    break
        except multiprocessing.TimeoutError:
            if time.monotonic() < deadline:  # then it is an env's own limit
                raise

    def _begin(self, envs: Sequence[int]) -> None:
        """Has envs begin the next episodes, as long as there are any, and time is left."""
        worn = self._exchange.recycle(envs) if self._waiting else ()
        for env in envs:
            if not self._waiting or time.monotonic() >= self._last_start:
                break
            if env in worn:  # its worker restarts first, when the episodes of its envs are over
                continue
            self._playing[env] = self._waiting.popleft()
        self._reset([env for env in envs if env in self._playing])

    def _reset(self, envs: list[int]) -> None:
        if not envs:
            return
        mine = [self._playing[env] for env in envs]
        options = [self._options_of(episode) for episode in mine]
        self._begun.update(envs)
        seeds, left = [episode.seed for episode in mine], _left(self._deadline)
        self._exchange.ask_reset(envs, seeds, options, timeout=left)

    def _go_on(self, answers: Answers) -> None:
        """Takes what envs have answered, and asks them for their next step or reset."""
        over = answers.terminations | answers.truncations
        rows: list[int] = []
        begun: list[int] = []
        broken: list[int] = []
        ended: dict[int, Episode] = {}
        for row, env in enumerate(answers.envs.tolist()):
            episode = self._playing[env]
            report = answers.reports.get(env)
            resets = env in self._begun
            self._begun.discard(env)
            if report is not None and report.cut_off:
                episode.interrupt()
                broken.append(env)
            elif resets:
                begun.append(env)
                rows.append(row)
            else:
                self.steps += 1
                episode.return_ += float(answers.rewards[row])
                episode.length += 1
                if over[row]:
                    episode.info = answers.infos[row]
                    episode.terminated = bool(answers.terminations[row])
                    episode.finished = True
                    ended[env] = self._playing.pop(env)
                else:
                    rows.append(row)
        # Resets first: they keep workers busy while the policy computes.
        self._reset(broken)
        self._begin(list(ended))
        for episode in ended.values():
            self._finished(episode)
        if rows:
            chosen = np.array(rows, np.intp)
            self._caller.step(answers.envs, answers.observations, chosen, begun, ask=self._ask)

    def _ask(self, envs: Any, actions: Any, extras: object) -> None:
        self._exchange.ask(envs, actions, timeout=_left(self._deadline))


def _left(deadline: float) -> float | None:
    """Seconds until the deadline; None: there is none."""
    return None if deadline == np.inf else max(0.0, deadline - time.monotonic())


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

"""Plays episodes by continuous batching: an env whose episode has ended takes the next at once."""

from __future__ import annotations

import copy
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shmvec._loops.policy import Policy, PolicyCaller
from shmvec.exchange import Answers, Exchange
from shmvec.faults import raise_as_gymnasium_does

__all__ = ["Episode", "EpisodePlayer"]


@dataclass(slots=True)
class Episode:
    """An episode of an evaluation.

    Attributes:
        number: Its place among those asked for.
        seed: With which it is reset.
        options: With which it is reset.
        return_: The sum of its rewards, so far.
        length: Its steps, so far.
        info: The last step's.
        terminated: Whether it ended in a terminal state, and not by a truncation.
        finished: Whether it has been played.
        repeats: How often it was broken off by a fault, and begun again.
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


class EpisodePlayer:
    """Plays episodes, each from its seed and its options; no step is made for nobody."""

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
            exchange: The envs; what is out is dropped when it comes.
            policy: Chooses actions.
            episodes: To play, in this order.
            batch_size: Most envs that the policy is asked about at a time.
            fixed: Whether batches are filled up to this size.
            options_of: What an episode's reset is given.
            finished: Called with each episode when it is over.
        """
        self._exchange = exchange
        self._caller = PolicyCaller(exchange, policy, batch_size if fixed else None)
        self._waiting = deque(episodes)
        self._batch_size = batch_size
        self._options_of = options_of
        self._finished = finished
        self._playing: dict[int, Episode] = {}  # by env
        self._begun: set[int] = set()  # envs that were asked to reset
        self.steps = 0

    def play(self, deadline: float) -> bool:
        """Plays all; False: ``deadline``, by the monotonic clock, comes first.

        Raises:
            Exception: What envs and the policy raise.
        """
        exchange = self._exchange
        everyone = range(exchange.num_envs)
        try:
            if not exchange.wait(_left(deadline)):
                return False
            exchange.drop()
            self._begin(everyone)
            while self._playing or self._waiting:
                if self._waiting and len(self._playing) < len(everyone):
                    idle = [env for env in everyone if env not in self._playing]
                    exchange.recycle(idle)
                    self._begin(idle)
                count = min(self._batch_size, exchange.num_asked)
                # All that are ready: more than these the policy could have only by waiting, and
                # while it is busy the others become ready.
                answers = exchange.take(count=count, least=1, timeout=_left(deadline))
                if answers.failures:
                    raise_as_gymnasium_does(answers.failures)
                self._go_on(answers)
                if time.monotonic() >= deadline:
                    break
        except multiprocessing.TimeoutError:
            if time.monotonic() < deadline:  # an env's own limit
                raise
        return not self._playing and not self._waiting

    def _begin(self, envs: Sequence[int]) -> None:
        """Has envs begin the episodes that come next, as long as there are any."""
        for env in envs:
            if not self._waiting:
                break
            if self._exchange.is_worn(env):  # when its worker's other episodes are over, too
                continue
            self._playing[env] = self._waiting.popleft()
        self._reset([env for env in envs if env in self._playing])

    def _reset(self, envs: list[int]) -> None:
        if not envs:
            return
        mine = [self._playing[env] for env in envs]
        # Copies: an env may change its options, which others have, too, and which it may get again.
        options = [copy.deepcopy(self._options_of(episode)) for episode in mine]
        self._begun.update(envs)
        self._exchange.ask_reset(envs, [episode.seed for episode in mine], options)

    def _go_on(self, answers: Answers) -> None:
        """Takes what envs have answered, and asks them what comes next."""
        over = answers.terminations | answers.truncations
        rows: list[int] = []
        begun: list[int] = []
        broken: list[int] = []
        ended: dict[int, Episode] = {}
        for row, env in enumerate(answers.envs.tolist()):
            episode = self._playing[env]
            told = answers.told.get(env)
            resets = env in self._begun
            self._begun.discard(env)
            if told is not None and told.cut_off:
                episode.repeats += 1
                episode.return_, episode.length = 0.0, 0
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
        # First what keeps workers busy while the policy computes.
        self._reset(broken)
        self._begin(list(ended))
        for episode in ended.values():
            self._finished(episode)
        if rows:
            self._caller.step(answers.envs, answers.observations, np.array(rows, np.intp), begun)


def _left(deadline: float) -> float | None:
    """Seconds; None: there is no deadline."""
    return None if deadline == np.inf else max(0.0, deadline - time.monotonic())

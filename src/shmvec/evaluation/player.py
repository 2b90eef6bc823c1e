"""Plays episodes: takes what is ready, over pools of envs, and asks the policy for actions.

One thread, the caller's, asks the policy and all envs. Envs whose observations and actions are of
equal spaces share the policy's batches, whichever pools they are of.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from shmvec._arguments import checked_count
from shmvec._policy import InformedPolicy, Policy, PolicyCaller, check_policy, chosen
from shmvec.evaluation.episodes import Episode
from shmvec.evaluation.pools import Plan, Pool, Rows, seconds_until
from shmvec.exchange import Answers, Exchange
from shmvec.faults import EnvTimeoutError
from shmvec.spaces import mapped

__all__ = ["Player"]


class Player:
    """Plays episodes in the pools that it is given; what their envs raise ends it.

    Attributes:
        plans: The tasks to play, by name.
        pools: The pools that play.
        num_envs: Number of envs, and so of episodes that are played at a time.
    """

    of_calls: tuple[str, ...] = ()  # names of what the policy's calls get besides, if they name it
    of_resets: tuple[str, ...] = ("seeds",)  # likewise its reset

    def __init__(
        self, policy: Policy, num_envs: int, *, batch: str, batch_size: int | None, across: bool
    ) -> None:
        """Prepares to play, with neither plans nor pools yet.

        Args:
            policy: Chooses actions.
            num_envs: Number of envs.
            batch: "ready" or "fixed".
            batch_size: Number of envs that the policy is asked about at a time, at most.
            across: Whether the policy gets envs of several tasks in one batch.
        """
        check_policy(policy, batch, self.of_calls, self.of_resets)
        values: dict[str, Callable[[int], Any]] = {
            "task": lambda number: self.pool_of(number).plan.task,
            "seeds": lambda number: self._episode_of(number).policy_seed,
        }
        of_calls, of_resets = (
            {name: values[name] for name in names} for names in (self.of_calls, self.of_resets)
        )
        self.policy = InformedPolicy(policy, of_calls, of_resets)
        self.num_envs = num_envs
        self._size = num_envs if batch == "ready" else max(1, num_envs // 2)
        if batch_size is not None:
            self._size = checked_count("batch_size", batch_size)
        self._fixed = batch == "fixed"
        self.plans: dict[str, Plan] = {}
        self.pools: list[Pool] = []
        self._across = across
        self._groups: list[Group] = []
        self._by_number: dict[int, Pool] = {}
        self._settled: Callable[[Episode], object] = id
        self._late = False  # whether only episodes that had begun may begin

    def add(self, episodes: Iterable[Episode]) -> None:
        """Takes episodes to play; those that are over tell how long others will take."""
        for episode in episodes:
            self.plans[episode.task].add(episode)

    @property
    def given_up(self) -> dict[str, str]:
        """The tasks that are given up, and why."""
        return {name: plan.failure for name, plan in self.plans.items() if plan.failure}

    def play(
        self,
        settled: Callable[[Episode], object],
        last_start: float = math.inf,
        deadline: float = math.inf,
        pause: float = math.inf,
    ) -> None:
        """Plays the episodes, as far as the time allows. All times are by the monotonic clock.

        Args:
            settled: Called with each episode that is over, or counts as failed.
            last_start: When the last episode may begin.
            deadline: When nothing is waited for any more.
            pause: When it returns; the next call goes on.

        Raises:
            Exception: What the policy raises, and what envs do.
        """
        self._settled = settled
        for pool in self.pools:
            pool.deadline = deadline
        end = min(deadline, pause)
        active = time.monotonic()
        try:
            while (now := time.monotonic()) < end:
                self._late = now >= last_start
                self._see_to_pools(now)
                ready = [rows for pool in self._up() if (rows := self._serve(pool, end))]
                if ready:
                    self._ask_policy(ready)
                    active = time.monotonic()
                elif not self._is_busy():
                    return
                else:
                    self._wait(now - active)
        except multiprocessing.TimeoutError:
            if time.monotonic() < deadline:  # then it is an env's own limit
                raise

    def _see_to_pools(self, now: float) -> None:
        """Starts and ends pools."""

    def _up(self) -> Sequence[Pool]:
        """The pools that have started."""
        return self.pools

    def _is_busy(self) -> bool:
        """Whether there is anything left to do."""
        return any(pool.playing or pool.plan.num_due(self._late) for pool in self.pools)

    def _patience(self, end: float) -> float | None:
        """Seconds to wait for one pool, while others may be ready; None: as long as it takes."""
        return seconds_until(end)

    def _wait(self, idle_s: float) -> None:
        """Waits for any pool, after so many seconds without an answer."""

    def _begin(self, pool: Pool) -> None:
        pool.begin(self._late)

    def _serve(self, pool: Pool, end: float) -> Rows | None:
        """Takes what a pool's envs have answered; returns what waits for actions."""
        self._begin(pool)
        try:
            answers = pool.take(self._size, self._patience(end))
        except (EnvTimeoutError, RuntimeError) as error:  # a crash is a RuntimeError
            self._lost(pool, error)
            return None
        if answers is None:
            return None
        if answers.failures:
            self._raised(pool, answers)
            return None
        rows, over = pool.add(answers)
        self._begin(pool)  # first: resets keep workers busy while the policy computes
        for episode in over:
            self._end_episode(pool, episode)
        return rows if len(rows.chosen) else None

    def _end_episode(self, pool: Pool, episode: Episode) -> None:
        pool.plan.add(episode)
        self._settled(episode)

    def _lost(self, pool: Pool, error: Exception) -> None:
        """Deals with a pool that can step no longer."""
        raise error

    def _raised(self, pool: Pool, answers: Answers) -> None:
        """Deals with what envs have raised."""
        pool.exchange.raise_failures(answers.failures)

    # ---- the policy --------------------------------------------------------------------------

    def take_in(self, pool: Pool) -> None:
        """Has a pool that has started play, in batches with those whose spaces are equal."""
        self._by_number.update(dict.fromkeys(pool.numbers.tolist(), pool))
        group = next((group for group in self._groups if self._fits(group, pool)), None)
        if group is None:
            group = Group(pool, self, self._size if self._fixed else None)
            self._groups.append(group)
        pool.group = group

    def _fits(self, group: Group, pool: Pool) -> bool:
        return (self._across or group.task is pool.plan.task) and group.fits(pool.exchange)

    def pool_of(self, number: int) -> Pool:
        """The pool of the env with this number."""
        return self._by_number[number]

    def _episode_of(self, number: int) -> Episode:
        pool = self.pool_of(number)
        return pool.playing[int(np.searchsorted(pool.numbers, number))]

    def _ask_policy(self, ready: Sequence[Rows]) -> None:
        """Asks the policy for actions, in batches of those that fit together."""
        for group in self._groups:
            parts = [rows for rows in ready if rows.pool.group is group]
            if parts:
                group.ask_policy(parts, self._size)
            lost, group.lost = group.lost, {}
            for pool, error in lost.items():
                self._lost(pool, error)


class Group:
    """Envs whose observations and actions fit into one batch.

    It stands for an exchange to a ``PolicyCaller``, which asks the envs of all pools by it.

    Attributes:
        lost: The pools that could not be asked, and why.
    """

    def __init__(self, pool: Pool, player: Player, size: int | None) -> None:
        """Makes the group of a pool; with a size, all its batches have that."""
        self.single_observation_space = pool.exchange.single_observation_space
        self.single_action_space = pool.exchange.single_action_space
        self.task = pool.plan.task
        self.lost: dict[Pool, RuntimeError] = {}
        self._pool_of = player.pool_of
        self._caller = PolicyCaller(self, player.policy, size)

    def fits(self, exchange: Exchange) -> bool:
        """Whether the observations and actions of an exchange's envs are of the same spaces."""
        return bool(
            exchange.single_observation_space == self.single_observation_space
            and exchange.single_action_space == self.single_action_space
        )

    def ask_policy(self, parts: Sequence[Rows], size: int) -> None:
        """Asks the policy for the actions of several pools' envs, at most ``size`` at a time."""
        if len(parts) == 1:  # the usual: nothing is copied
            _, numbers, observations, rows, begun = parts[0]
        else:
            numbers = np.concatenate([each.numbers[each.chosen] for each in parts])
            observations = mapped(self.single_observation_space, _joined, *map(self._part, parts))
            rows = np.arange(len(numbers))
            begun = [number for each in parts for number in each.begun]
        for first in range(0, len(rows), size):
            some = rows[first : first + size]
            new = begun if len(some) == len(rows) else [n for n in begun if n in numbers[some]]
            self._caller.step(numbers, observations, some, new)

    def _part(self, rows: Rows) -> Any:
        """The observations of those that wait for actions."""
        if len(rows.chosen) == len(rows.numbers):
            return rows.observations
        some = partial(chosen, rows=rows.chosen)
        return mapped(self.single_observation_space, some, rows.observations)

    def ask(self, numbers: Any, actions: Any) -> None:
        """Has envs step, each with its row of a batch of actions."""
        first = 0
        for pool, those in groupby(numbers.tolist(), self._pool_of):
            end = first + len(list(those))
            its = actions
            if end - first < len(numbers):
                its_rows = itemgetter(slice(first, end))
                its = mapped(self.single_action_space, its_rows, actions)
            try:
                pool.ask(numbers[first:end], its)
            except RuntimeError as error:  # its worker has died, and with it its exchange
                self.lost[pool] = error
            first = end


def _joined(*parts: Any) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return tuple(value for part in parts for value in part)

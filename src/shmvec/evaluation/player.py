"""Plays episodes: takes the answers of ready envs from all pools, and asks the policy for actions.

A pool has envs of one task, each of which plays an episode at a time. The caller's thread asks the
policy and all envs. Envs with equal observation and action spaces share the policy's batches, also
across pools.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shmvec._arguments import checked_count
from shmvec._policy import InformedPolicy, Policy, PolicyCaller, check_policy, select_rows
from shmvec.evaluation.episodes import EPISODE_OPTION, Episode
from shmvec.evaluation.tasks import EnvFn, Task
from shmvec.exchange import Answers, Exchange
from shmvec.faults import EnvTimeoutError
from shmvec.spaces import mapped

__all__ = ["Plan", "Player", "Pool", "seconds_until"]


@dataclass(eq=False)
class Plan:
    """A task, its episodes that are left to play, and what is known of its envs.

    Attributes:
        task: The task.
        make: Makes its env. None: its pool existed before.
        waiting: The episodes that no env plays, in order: those that were interrupted come first.
        faults: How often the env of each episode has failed, by number.
        start_s: Average time that its pools take to start. None: none has started.
        played_s: Time that the episodes that are over have taken, together.
        played: Their number.
        played_steps: Their steps.
        may_share: Whether its envs may share a process: not after a shared process has failed.
        single_pool: Whether at most one pool of it may run: not even one more could be built.
        build_failures: Number of successive pools that could not be built while it had no other.
        failure: Why it cannot be played. "": it can.
    """

    task: Task
    make: EnvFn | None = None
    waiting: deque[Episode] = field(default_factory=deque)
    faults: Counter[int] = field(default_factory=Counter)
    start_s: float | None = None
    played_s: float = 0.0
    played: int = 0
    played_steps: int = 0
    may_share: bool = True
    single_pool: bool = False
    build_failures: int = 0
    failure: str = ""

    def add(self, episode: Episode) -> None:
        """Adds an episode; one that is over serves to estimate how long others take."""
        if not episode.settled:
            self.waiting.append(episode)
        elif episode.finished:
            self.played_s += episode.seconds
            self.played += 1
            self.played_steps += episode.steps

    @property
    def episode_s(self) -> float | None:
        """Average time of its episodes in seconds; None: none is over."""
        return self.played_s / self.played if self.played else None

    @property
    def step_s(self) -> float | None:
        """Average time of a step in seconds, the policy's included; None: no episode is over."""
        return self.played_s / max(1, self.played_steps) if self.played else None

    def num_due(self, only_begun: bool) -> int:
        """Number of episodes that may begin; ``only_begun``: of those that had begun before."""
        if only_begun:
            return sum(bool(each.steps or each.repeats) for each in self.waiting)
        return len(self.waiting)


class Pool:
    """Envs of one task, which one exchange steps.

    Attributes:
        plan: The task whose next episodes they play.
        exchange: The exchange.
        numbers: The numbers by which the policy knows its envs, in order.
        playing: By env, the episode that it plays.
        group: The group of pools with which it shares batches. None: it has not started.
        last_request: When an env was last asked, by the monotonic clock.
        deadline: The time after which a request does not wait for a worker's replacement.
    """

    exchange: Exchange
    group: Any = None
    deadline = math.inf

    def __init__(self, plan: Plan, numbers: Iterable[int], recording: bool) -> None:
        """Prepares a pool, whose exchange is set later.

        Args:
            plan: The task that it plays.
            numbers: A number for each env, in ascending order.
            recording: Whether envs get the numbers of their episodes, to record videos of some.
        """
        self.plan = plan
        self.numbers = np.array([*numbers], np.intp)
        self.playing: dict[int, Episode] = {}
        self.last_request = 0.0
        self._recording = recording
        self._resetting: set[int] = set()  # envs that were asked to reset
        self._start_times: dict[int, float] = {}  # when their episodes began

    def begin(self, only_begun: bool) -> None:
        """Has idle envs begin the next episodes, if any are left."""
        due = self.plan.num_due(only_begun)
        if not due or len(self.playing) == len(self.numbers):
            return
        idle = [env for env in range(len(self.numbers)) if env not in self.playing]
        worn = self.exchange.recycle(idle)  # envs whose worker restarts once all of them are idle
        envs = [env for env in idle if env not in worn][:due]
        self.playing.update((env, self.plan.waiting.popleft()) for env in envs)
        self._start_times.update(dict.fromkeys(envs, time.monotonic()))
        self._reset(envs)

    def _reset(self, envs: list[int]) -> None:
        if not envs:
            return
        episodes = [self.playing[env] for env in envs]
        options = [episode.options for episode in episodes]
        if self._recording:
            options = [{EPISODE_OPTION: each.number, "": each.options} for each in episodes]
        seeds = [episode.seed for episode in episodes]
        self._resetting.update(envs)
        self.last_request = time.monotonic()
        self.exchange.ask_reset(envs, seeds, options, timeout=seconds_until(self.deadline))

    def ask(self, numbers: npt.NDArray[np.intp], actions: Any) -> None:
        """Asks the envs with these numbers to step, with a batch of actions."""
        self.last_request = time.monotonic()
        envs = np.searchsorted(self.numbers, numbers)
        self.exchange.ask(envs, actions, timeout=seconds_until(self.deadline))

    def take(self, most: int, timeout: float | None) -> Answers | None:
        """Takes the answers of envs, as soon as there is one; None: there is none in time."""
        exchange = self.exchange
        if not self.playing or (timeout is not None and not exchange.wait_for(1, timeout)):
            return None
        # Only those that are ready: the others step while the policy is busy with these.
        return exchange.take(count=min(most, exchange.num_in_flight), least=1)

    def add(self, answers: Answers) -> tuple[list[int], set[int], list[Episode]]:
        """Adds answers to the episodes.

        Returns:
            The rows of the envs that wait for actions; the numbers of those in which an episode
            begins; and the episodes that are over.
        """
        over = answers.terminations | answers.truncations
        rows: list[int] = []
        starting: set[int] = set()
        broken: list[int] = []
        ended: list[Episode] = []
        for row, env in enumerate(answers.envs.tolist()):
            episode = self.playing[env]
            report = answers.reports.get(env)
            was_reset = env in self._resetting
            self._resetting.discard(env)
            if report is not None and report.cut_off:
                episode.interrupt()
                broken.append(env)
            elif was_reset:
                starting.add(int(self.numbers[env]))
                rows.append(row)
            else:
                episode.steps += 1
                episode.length += 1
                episode.return_ += float(answers.rewards[row])
                if over[row]:
                    episode.info = answers.infos[row]
                    episode.terminated = bool(answers.terminations[row])
                    episode.finished = True
                    ended.append(self.remove_episode(env))
                else:
                    rows.append(row)
        self._reset(broken)
        return rows, starting, ended

    def remove_episode(self, env: int) -> Episode:
        """Takes an env's episode away from it, and returns it."""
        episode = self.playing.pop(env)
        episode.seconds += time.monotonic() - self._start_times[env]
        return episode


class Player:
    """Plays episodes in its pools, until an env raises.

    Attributes:
        plans: The tasks to play, by name.
        pools: The pools.
        num_envs: Number of envs, and so of episodes that are played at a time.
    """

    call_names: tuple[str, ...] = ()  # arguments that the policy gets if it has them
    reset_names: tuple[str, ...] = ("seeds",)  # the same for its reset

    def __init__(
        self, policy: Policy, num_envs: int, *, batch: str, batch_size: int | None, mix_tasks: bool
    ) -> None:
        """Prepares to play, without plans and pools.

        Args:
            policy: Chooses actions.
            num_envs: Number of envs.
            batch: "ready" or "fixed".
            batch_size: Largest number of envs in a batch of the policy.
            mix_tasks: Whether a batch may have envs of several tasks.
        """
        check_policy(policy, batch, self.call_names, self.reset_names)
        values: dict[str, Callable[[int], Any]] = {
            "task": lambda number: self.pool_of(number).plan.task,
            "seeds": lambda number: self._episode_of(number).policy_seed,
        }
        call_values = {name: values[name] for name in self.call_names}
        reset_values = {name: values[name] for name in self.reset_names}
        self.policy = InformedPolicy(policy, call_values, reset_values)
        self.num_envs = num_envs
        self._batch_size = num_envs if batch == "ready" else max(1, num_envs // 2)
        if batch_size is not None:
            self._batch_size = checked_count("batch_size", batch_size)
        self._fixed_size = batch == "fixed"
        self.plans: dict[str, Plan] = {}
        self.pools: list[Pool] = []
        self._mixes_tasks = mix_tasks
        self._groups: list[Group] = []
        self._pools_by_number: dict[int, Pool] = {}
        self._on_settled: Callable[[Episode], object] = id
        self._only_begun = False  # whether only episodes that had begun before may begin again

    def add(self, episodes: Iterable[Episode]) -> None:
        """Adds episodes to play; those that are over serve to estimate how long others take."""
        for episode in episodes:
            self.plans[episode.task].add(episode)

    @property
    def failures(self) -> dict[str, str]:
        """By name, why a task cannot be played."""
        return {name: plan.failure for name, plan in self.plans.items() if plan.failure}

    def play(
        self,
        on_settled: Callable[[Episode], object],
        last_start: float = math.inf,
        deadline: float = math.inf,
        pause: float = math.inf,
    ) -> None:
        """Plays the episodes, as far as the time allows. All times are of the monotonic clock.

        Args:
            on_settled: Called with each episode that is over, or counts as failed.
            last_start: The time after which no episode begins.
            deadline: The time after which nothing is waited for.
            pause: The time at which it returns; the next call continues.

        Raises:
            Exception: Whatever the policy or an env raises.
        """
        self._on_settled = on_settled
        for pool in self.pools:
            pool.deadline = deadline
        end = min(deadline, pause)
        active = time.monotonic()
        try:
            while (now := time.monotonic()) < end:
                self._only_begun = now >= last_start
                self._manage_pools(now)
                answers = (self._take_answers(pool, end) for pool in self._running_pools())
                ready = [rows for rows in answers if rows]
                if ready:
                    self._ask_policy(ready)
                    active = time.monotonic()
                elif not self._has_work():
                    return
                else:
                    self._wait(now - active)
        except multiprocessing.TimeoutError:
            if time.monotonic() < deadline:  # it was an env's own time limit
                raise

    def _manage_pools(self, now: float) -> None:
        """Starts and ends pools."""

    def _running_pools(self) -> list[Pool]:
        return [pool for pool in self.pools if pool.group is not None]

    def _has_work(self) -> bool:
        """Whether anything is left to do."""
        return any(pool.playing or pool.plan.num_due(self._only_begun) for pool in self.pools)

    def _wait_limit(self, end: float) -> float | None:
        """Seconds to wait for one pool, while others may be ready; None: no limit."""
        return seconds_until(end)

    def _wait(self, idle_s: float) -> None:
        """Waits for any pool; ``idle_s``: seconds without an answer so far."""

    def _begin(self, pool: Pool) -> None:
        pool.begin(self._only_begun)

    def _take_answers(self, pool: Pool, end: float) -> Batch | None:
        """Takes the answers of a pool's envs; returns those that wait for actions."""
        self._begin(pool)
        try:
            answers = pool.take(self._batch_size, self._wait_limit(end))
        except (EnvTimeoutError, RuntimeError) as error:  # a crash is a RuntimeError
            self._handle_lost_pool(pool, error)
            return None
        if answers is None:
            return None
        if answers.failures:
            self._handle_failures(pool, answers)
            return None
        rows, starting, over = pool.add(answers)
        self._begin(pool)  # first: resets keep workers busy while the policy computes
        for episode in over:
            self._end_episode(pool, episode)
        if not rows:
            return None
        envs, observations = answers.envs, answers.observations
        if len(rows) < len(envs):
            waiting = np.array(rows, np.intp)
            space = pool.exchange.single_observation_space
            envs, observations = envs[waiting], select_rows(space, observations, waiting)
        return Batch(pool, pool.numbers[envs], observations, starting)

    def _end_episode(self, pool: Pool, episode: Episode) -> None:
        pool.plan.add(episode)
        self._on_settled(episode)

    def _handle_lost_pool(self, pool: Pool, error: Exception) -> None:
        """Handles a pool that cannot step any more."""
        raise error

    def _handle_failures(self, pool: Pool, answers: Answers) -> None:
        """Handles exceptions of envs."""
        pool.exchange.raise_failures(answers.failures)

    # ---- the policy --------------------------------------------------------------------------

    def admit(self, pool: Pool) -> None:
        """Lets a pool that has started play, in the batches of the pools with equal spaces."""
        self._pools_by_number.update(dict.fromkeys(pool.numbers.tolist(), pool))
        group = next((group for group in self._groups if self._fits(group, pool)), None)
        if group is None:
            group = Group(pool, self, self._batch_size if self._fixed_size else None)
            self._groups.append(group)
        pool.group = group

    def _fits(self, group: Group, pool: Pool) -> bool:
        return (self._mixes_tasks or group.task is pool.plan.task) and group.fits(pool.exchange)

    def pool_of(self, number: int) -> Pool:
        """The pool of the env with this number."""
        return self._pools_by_number[number]

    def _episode_of(self, number: int) -> Episode:
        pool = self.pool_of(number)
        return pool.playing[int(np.searchsorted(pool.numbers, number))]

    def _ask_policy(self, ready: Sequence[Batch]) -> None:
        """Asks the policy for actions, in batches by group."""
        for group in self._groups:
            parts = [batch for batch in ready if batch.pool.group is group]
            if parts:
                group.ask_policy(parts, self._batch_size)
            lost, group.lost = group.lost, {}
            for pool, error in lost.items():
                self._handle_lost_pool(pool, error)


class Batch(NamedTuple):
    """Envs of a pool that wait for actions.

    Attributes:
        pool: The pool.
        numbers: The numbers of these envs.
        observations: Their observations.
        starting: The numbers of those in which an episode begins.
    """

    pool: Pool
    numbers: npt.NDArray[np.intp]
    observations: Any
    starting: set[int]


class Group:
    """Envs whose observations and actions fit into one batch.

    Attributes:
        task: The task of its first pool.
        lost: The pools that could not be asked, and why.
    """

    def __init__(self, pool: Pool, player: Player, size: int | None) -> None:
        """Makes a group for a pool; all its batches have ``size`` rows, unless that is None."""
        exchange = pool.exchange
        self._spaces = exchange.single_observation_space, exchange.single_action_space
        self.task = pool.plan.task
        self.lost: dict[Pool, RuntimeError] = {}
        self._pool_of = player.pool_of
        self._caller = PolicyCaller(*self._spaces, player.policy, size)

    def fits(self, exchange: Exchange) -> bool:
        """Whether the spaces of an exchange's envs are equal to the group's."""
        spaces = exchange.single_observation_space, exchange.single_action_space
        return spaces == self._spaces

    def ask_policy(self, parts: Sequence[Batch], size: int) -> None:
        """Asks the policy for the actions of several pools' envs, at most ``size`` at a time."""
        space = self._spaces[0]
        if len(parts) == 1:  # the usual case, in which nothing is copied
            _, numbers, observations, starting = parts[0]
        else:
            numbers = np.concatenate([each.numbers for each in parts])
            observations = mapped(space, _concatenate, *(each.observations for each in parts))
            starting = {number for each in parts for number in each.starting}
        for first in range(0, len(numbers), size):
            rows = slice(first, first + size)
            some = mapped(space, itemgetter(rows), observations)
            new = [number for number in numbers[rows].tolist() if number in starting]
            self._caller.step(numbers[rows], some, new, self._ask)

    def _ask(self, numbers: npt.NDArray[np.intp], actions: Any, _: object) -> None:
        """Asks envs to step, each with its row of a batch of actions."""
        first = 0
        for pool, pool_numbers in groupby(numbers.tolist(), self._pool_of):
            end = first + len(list(pool_numbers))
            part = actions
            if end - first < len(numbers):
                part_rows = itemgetter(slice(first, end))
                part = mapped(self._spaces[1], part_rows, actions)
            try:
                pool.ask(numbers[first:end], part)
            except RuntimeError as error:  # its worker has died, and with it its exchange
                self.lost[pool] = error
            first = end


def _concatenate(*parts: Any) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return tuple(value for part in parts for value in part)


def seconds_until(deadline: float) -> float | None:
    """Seconds until a deadline; None if that is infinite."""
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())

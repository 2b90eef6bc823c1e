"""Pools of envs: each has envs of one task, each of which plays an episode at a time."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shmvec.evaluation.episodes import EPISODE_OPTION, Episode
from shmvec.evaluation.tasks import EnvFn, Task
from shmvec.exchange import Answers, Exchange

__all__ = ["Plan", "Pool", "seconds_until"]


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


def seconds_until(deadline: float) -> float | None:
    """Seconds until a deadline; None if that is infinite."""
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())

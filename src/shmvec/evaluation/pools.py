"""Pools of envs: each steps envs of one task, and each of these plays an episode at a time."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shmvec.evaluation.episodes import EPISODE, Episode
from shmvec.evaluation.tasks import EnvFn, Task
from shmvec.exchange import Answers, Exchange

__all__ = ["Plan", "Pool", "Rows", "seconds_until"]


@dataclass(eq=False)
class Plan:
    """A task, what is left of it to play, and what is known of its envs.

    Attributes:
        task: The task.
        make: Makes its env; None: its pool was there before.
        waiting: The episodes that no env plays, in order: those that were interrupted come first.
        faults: How often the env of each episode has failed, by number.
        start_s: How long its pools have taken to start, on average; None: none has.
        played_s: How long the episodes that are over have taken, together.
        played: Their number.
        played_steps: Their steps.
        shares: Whether envs of it may share a process: none has failed in company.
        alone: Whether at most one pool of it may run: others could not be built beside it.
        failures: How many pools in a row could not be built, with none of its others there.
        failure: Why it is given up; "": it is not.
    """

    task: Task
    make: EnvFn | None = None
    waiting: deque[Episode] = field(default_factory=deque)
    faults: Counter[int] = field(default_factory=Counter)
    start_s: float | None = None
    played_s: float = 0.0
    played: int = 0
    played_steps: int = 0
    shares: bool = True
    alone: bool = False
    failures: int = 0
    failure: str = ""

    def add(self, episode: Episode) -> None:
        """Takes an episode: one that is over tells how long others will take."""
        if not episode.settled:
            self.waiting.append(episode)
        elif episode.finished:
            self.played_s += episode.seconds
            self.played += 1
            self.played_steps += episode.steps

    @property
    def episode_s(self) -> float | None:
        """How long its episodes have taken, on average; None: none is over."""
        return self.played_s / self.played if self.played else None

    @property
    def step_s(self) -> float | None:
        """How long their steps have taken, with the policy's share, on average."""
        return self.played_s / max(1, self.played_steps) if self.played else None

    def num_due(self, late: bool) -> int:
        """How many episodes may begin; late: only those that had begun before."""
        if late:
            return sum(bool(each.steps or each.repeats) for each in self.waiting)
        return len(self.waiting)


class Rows(NamedTuple):
    """Rows of answers that wait for actions.

    Attributes:
        pool: The pool.
        numbers: The envs of all rows, by number.
        observations: Their observations, batched.
        chosen: Which of the rows wait.
        begun: The envs in which an episode begins, by number.
    """

    pool: Pool
    numbers: npt.NDArray[np.intp]
    observations: Any
    chosen: npt.NDArray[np.intp]
    begun: list[int]


class Pool:
    """Envs of one task, which one exchange steps.

    Attributes:
        plan: The task, whose next episodes they play.
        exchange: The exchange.
        numbers: What the policy knows its envs by, in order.
        playing: By env, the episode that it plays.
        group: Which pools it shares batches with; None: it has not started.
        asked: When envs were last asked, by the monotonic clock.
        deadline: When asking them waits no longer for a worker that is being replaced.
    """

    exchange: Exchange
    group: Any = None
    deadline = math.inf

    def __init__(self, plan: Plan, numbers: Iterable[int], recording: bool) -> None:
        """Prepares a pool, whose exchange is set later.

        Args:
            plan: What it plays.
            numbers: A number for each env, in ascending order.
            recording: Whether envs get the numbers of their episodes, to record some.
        """
        self.plan = plan
        self.numbers = np.array([*numbers], np.intp)
        self.playing: dict[int, Episode] = {}
        self.asked = 0.0
        self._recording = recording
        self._begun: set[int] = set()  # envs that were asked to reset
        self._since: dict[int, float] = {}  # when their episodes began

    def begin(self, late: bool) -> None:
        """Has idle envs begin the next episodes, as far as there are any."""
        due = self.plan.num_due(late)
        if not due or len(self.playing) == len(self.numbers):
            return
        idle = [env for env in range(len(self.numbers)) if env not in self.playing]
        worn = self.exchange.recycle(idle)  # whose worker restarts once all its envs are idle
        envs = [env for env in idle if env not in worn][:due]
        self.playing.update((env, self.plan.waiting.popleft()) for env in envs)
        self._since.update(dict.fromkeys(envs, time.monotonic()))
        self._reset(envs)

    def _reset(self, envs: list[int]) -> None:
        if not envs:
            return
        episodes = [self.playing[env] for env in envs]
        options = [episode.options for episode in episodes]
        if self._recording:
            options = [{EPISODE: each.number, "": each.options} for each in episodes]
        seeds = [episode.seed for episode in episodes]
        self._begun.update(envs)
        self.asked = time.monotonic()
        self.exchange.ask_reset(envs, seeds, options, timeout=seconds_until(self.deadline))

    def ask(self, numbers: npt.NDArray[np.intp], actions: Any) -> None:
        """Has envs step, named by their numbers, with a batch of actions."""
        self.asked = time.monotonic()
        envs = np.searchsorted(self.numbers, numbers)
        self.exchange.ask(envs, actions, timeout=seconds_until(self.deadline))

    def take(self, most: int, timeout: float | None) -> Answers | None:
        """Takes what envs have answered, as soon as one has; None: none has in time."""
        exchange = self.exchange
        if not self.playing or (timeout is not None and not exchange.wait_for(1, timeout)):
            return None
        # Not more than are ready: others become so while the policy is busy with these.
        return exchange.take(count=min(most, exchange.num_in_flight), least=1)

    def add(self, answers: Answers) -> tuple[Rows, list[Episode]]:
        """Adds answers to the episodes; returns what waits for actions, and what is over."""
        over = answers.terminations | answers.truncations
        rows: list[int] = []
        begun: list[int] = []
        broken: list[int] = []
        ended: list[Episode] = []
        for row, env in enumerate(answers.envs.tolist()):
            episode = self.playing[env]
            report = answers.reports.get(env)
            was_reset = env in self._begun
            self._begun.discard(env)
            if report is not None and report.cut_off:
                episode.interrupt()
                broken.append(env)
            elif was_reset:
                begun.append(int(self.numbers[env]))
                rows.append(row)
            else:
                episode.steps += 1
                episode.length += 1
                episode.return_ += float(answers.rewards[row])
                if over[row]:
                    episode.info = answers.infos[row]
                    episode.terminated = bool(answers.terminations[row])
                    episode.finished = True
                    ended.append(self.leave(env))
                else:
                    rows.append(row)
        self._reset(broken)
        numbers = self.numbers[answers.envs]
        chosen = np.array(rows, np.intp)
        return Rows(self, numbers, answers.observations, chosen, begun), ended

    def leave(self, env: int) -> Episode:
        """Has an env play its episode no longer; returns that."""
        episode = self.playing.pop(env)
        episode.seconds += time.monotonic() - self._since[env]
        return episode


def seconds_until(deadline: float) -> float | None:
    """Seconds until the deadline; None: there is none."""
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())

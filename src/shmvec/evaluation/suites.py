"""Has suites played: here or on the nodes of a cluster, what their record does not have yet."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from gymnasium import logger
from gymnasium.vector import VectorEnv

from shmvec._arguments import checked_count, checked_int
from shmvec._cores import usable_cores
from shmvec._policy import check_policy
from shmvec.evaluation.episodes import Episode, drawn_seeds, recorded
from shmvec.evaluation.memory import Budget, Resident, gpu_bytes, parsed_bytes
from shmvec.evaluation.progress import reporter
from shmvec.evaluation.record import Record, RecordError
from shmvec.evaluation.results import Evaluation
from shmvec.evaluation.suite import SuitePlayer, TaskPlan
from shmvec.evaluation.suite_results import SuiteEvaluation, of_task
from shmvec.evaluation.tasks import Task, env_fn_of, identity_of, is_suite, tasks_of

__all__ = ["How", "evaluate_suite"]

_SLICE_S = 1.0  # after which a node returns the episodes that are over
# Options that mean nothing where each env has a process of its own, and retries= rules faults.
_REFUSED = (
    "num_workers",
    "caller_steps",
    "overlap",
    "spare_envs",
    "pin_workers",
    "faults",
    "autoreset_mode",
    "recycle_after",
)


@dataclass(frozen=True)
class How:
    """How a suite is played: the arguments of ``evaluate`` of these names.

    Attributes:
        keys: The keys of last infos that are kept; the first is that of success.
        recording: Whether videos are recorded.
        across: Whether a batch may have envs of several tasks.
    """

    keys: tuple[str, ...]
    max_envs: int | None
    memory: int | float | str | None
    gpu_memory: int | float | str | None
    across: bool
    batch: str
    batch_size: int | None
    retries: int
    recording: bool
    vector_options: Mapping[str, Any]

    @property
    def num_envs(self) -> int:
        """How many envs run at a time on this machine, whose cores it counts."""
        if self.max_envs is None:
            return 2 * usable_cores()
        return checked_count("max_envs", self.max_envs)

    def player(self, policy: Any) -> SuitePlayer:
        """What plays tasks on this machine; it has none yet.

        Raises:
            ValueError: An argument is out of range.
            TypeError: An argument is of a wrong type.
        """
        check_policy(policy, self.batch, ("task",), ("task", "seeds"))
        refused = [name for name in _REFUSED if self.vector_options.get(name) is not None]
        if refused:
            raise ValueError(
                f"each env of a suite has a process of its own, without {', '.join(refused)}: "
                "max_envs= is their number, and retries= says what becomes of faults"
            )
        most = self.num_envs
        size = most if self.batch == "ready" else max(1, most // 2)
        if self.batch_size is not None:
            size = checked_count("batch_size", self.batch_size)
        if checked_int("retries", self.retries) < 0:
            raise ValueError(f"retries must not be negative, got {self.retries}")
        budgets = []
        if self.memory is not None:
            budgets.append(Budget("memory", parsed_bytes("memory", self.memory), Resident()))
        if self.gpu_memory is not None:
            limit = parsed_bytes("gpu_memory", self.gpu_memory)
            budgets.append(Budget("gpu_memory", limit, gpu_bytes()))
        return SuitePlayer(
            policy,
            max_envs=most,
            budgets=budgets,
            batch_across_tasks=self.across,
            batch_size=size,
            fixed=self.batch == "fixed",
            retries=self.retries,
            keys=self.keys,
            recording=self.recording,
            vector_options=self.vector_options,
        )


def evaluate_suite(
    envs: Any,
    policy: Any,
    pattern: Sequence[Episode],
    how: How,
    *,
    drawn: bool,
    record: str | os.PathLike[str] | None,
    videos: tuple[str | os.PathLike[str] | None, Collection[int]],
    limits: Mapping[str, float | None],
    progress: Any,
    actor_options: Mapping[str, Any] | None,
) -> Evaluation | SuiteEvaluation:
    """Evaluates a suite of tasks; or one env, as a suite of one task.

    Args:
        envs: The tasks.
        policy: Chooses actions.
        pattern: The episodes of each task.
        how: How they are played.
        drawn: Whether their seeds were drawn: then a record's are taken.
        record: The file to which episodes are appended.
        videos: The folder of videos, and the episodes to record.
        limits: The arguments ``time_limit`` and ``hard_time_limit``.
        progress: As for ``evaluate``.
        actor_options: Ray's options for the actors of a cluster; None: it is played here.
    """
    begin = time.monotonic()
    if isinstance(envs, VectorEnv):
        raise ValueError("a suite, a record and memory= need what makes the envs, no vector env")
    if isinstance(envs, Sequence) and not isinstance(envs, str) and not is_suite(envs):
        raise TypeError(
            "record=, retries=, max_envs=, memory=, gpu_memory= and batch_across_tasks= need one "
            f"function that makes the env, and not a list of {len(envs)}: give it, and "
            f"max_envs={len(envs)}"
        )
    tasks = tasks_of(envs)
    if videos[0] is not None:
        folders = Counter(_file_name(task.name).lower() for task in tasks)
        same = [task.name for task in tasks if folders[_file_name(task.name).lower()] > 1]
        if same:
            raise ValueError(f"the videos of these tasks would be in one folder: {same}")
    if actor_options is not None:
        refused = [name for name, value in {**limits, "video_folder": videos[0]}.items() if value]
        if refused:
            raise ValueError(f"on a cluster there is no {' and no '.join(refused)}")
    player = how.player(policy)  # wrong arguments are refused before a record is begun
    kept = None if record is None else Record(record)
    try:
        plans = _plans(tasks, pattern, drawn, how.keys, kept, videos)
        every = [episode for plan in plans for episode in plan.episodes]
        player.plans += plans
        done = sum(episode.settled for episode in every)
        left = player.seconds_left if actor_options is None else _unknown
        report, ended = reporter(progress, len(every), done, left)

        def settled(episode: Episode) -> None:
            if kept is not None:
                kept.add(episode)
            report(episode)

        try:
            if actor_options is None:
                _play_here(player, settled, begin, limits)
            else:
                _play_on_nodes(plans, policy, how, settled, actor_options)
        finally:
            ended()
    finally:
        if kept is not None:
            kept.close()
    found = {plan.task.name: of_task(plan.episodes, how.keys, how.keys[0]) for plan in plans}
    for key in how.keys[1:]:
        played = [each for each in found.values() if len(each)]
        if played and not any(key in each.infos for each in played):
            logger.warn("%s", f"no episode's last info has {key!r}")
    failures = {  # another env of the task may have played everything
        plan.task.name: plan.failure
        for plan in plans
        if plan.failure and not all(episode.settled for episode in plan.episodes)
    }
    if is_suite(envs):
        return SuiteEvaluation(tuple(tasks), found, failures, time.monotonic() - begin)
    (plan,) = plans
    if failures:
        raise RuntimeError(f"the env could not be built: {plan.failure}")
    return replace(found[plan.task.name], seconds=time.monotonic() - begin)


def _plans(
    tasks: Sequence[Task],
    pattern: Sequence[Episode],
    drawn: bool,
    keys: Sequence[str],
    record: Record | None,
    videos: tuple[Any, Collection[int]],
) -> list[TaskPlan]:
    """What there is to play of each task, less what the record has."""
    seeds: list[Any] = [episode.seed for episode in pattern]
    if record is not None:
        if not record.head:
            record.begin({"drawn": drawn_seeds(1)[0] if drawn else None})
        if drawn:  # the same ones when it is resumed
            base = record.head["drawn"]
            if base is None:
                raise RecordError(
                    f"{record.path} was recorded with seeds=: give the same ones to resume it"
                )
            seeds = drawn_seeds(len(seeds), base)
    plans = []
    for task in tasks:
        folder, chosen = videos
        make = env_fn_of(task, folder is not None)
        if folder is not None:
            make = recorded([make], os.path.join(folder, _file_name(task.name)), chosen)[0]
        episodes = [
            Episode(each.number, seed, each.options, task=task.name)
            for each, seed in zip(pattern, seeds, strict=True)
        ]
        if record is not None:
            about = {"env": identity_of(task), "info_keys": list(keys)}
            record.check_task(task.name, about, {"reference": task.reference})
            for episode in episodes:
                record.fill(episode)
        plans.append(TaskPlan(task, make, episodes))
    return plans


def _unknown() -> float:
    """How long the rest takes on a cluster, whose nodes play at speeds of their own."""
    return float("nan")


def _file_name(name: str) -> str:
    """A task's name as that of a folder."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".")[:100] or "task"


def _play_here(
    player: SuitePlayer, settled: Any, begin: float, limits: Mapping[str, float | None]
) -> None:
    last_start, deadline = (
        np.inf if limits[name] is None else begin + (limits[name] or 0.0)
        for name in ("time_limit", "hard_time_limit")
    )
    at_once = True
    try:
        player.play(settled, last_start, deadline)
        at_once = deadline < np.inf
    finally:
        player.close(at_once)


# ---- on a cluster --------------------------------------------------------------------------------


def _play_on_nodes(
    plans: Sequence[TaskPlan],
    policy: Any,
    how: How,
    settled: Any,
    actor_options: Mapping[str, Any],
) -> None:
    """Plays a suite on all nodes of a cluster: tasks as wholes, and parts of the last ones."""
    from shmvec.cluster.evaluation import play_on_nodes  # imported only where it is needed

    by_name = {plan.task.name: plan for plan in plans}

    def finished(episode: Episode) -> None:
        by_name[episode.task].learn(episode)
        settled(episode)

    waiting = [episode for plan in plans for episode in plan.waiting]
    make = partial(Stage, [(plan.task, plan.make) for plan in plans], how)
    given_up: dict[str, str] = {}
    play_on_nodes(make, policy, _played_on_node, waiting, {}, finished, actor_options, given_up)
    for name, reason in given_up.items():
        by_name[name].failure = reason


class Stage:
    """A node's part of a suite: envs of the tasks whose episodes it is given.

    Attributes:
        num_envs: The number of envs, and so of episodes that are played at a time.
    """

    def __init__(self, tasks: Sequence[tuple[Task, Any]], how: How) -> None:
        """Takes the tasks, and what makes their envs; starts nothing."""
        self._plans = {task.name: TaskPlan(task, make, []) for task, make in tasks}
        self._how = how
        self._player: SuitePlayer | None = None
        self.num_envs = how.num_envs

    def play(
        self, policy: Any, orders: Sequence[Episode]
    ) -> tuple[list[Episode], int, dict[str, str]]:
        """Plays for a while; returns what is over, the steps made, and tasks that are given up.

        Args:
            policy: Chooses actions; always the same one.
            orders: Further episodes to play.
        """
        if self._player is None:
            self._player = self._how.player(policy)
            self._player.plans += self._plans.values()
        for order in orders:
            plan = self._plans[order.task]
            order.repeats = 0  # those on other nodes count there, and not as faults of its env
            plan.episodes.append(order)
            plan.waiting.append(order)
        over: list[Episode] = []
        self._player.play(over.append, np.inf, time.monotonic() + _SLICE_S)
        return over, sum(episode.steps for episode in over), self._player.given_up

    def close(self) -> None:
        """Ends its envs."""
        if self._player is not None:
            self._player.close(at_once=True)


def _played_on_node(
    stage: Stage, policy: Any, orders: Sequence[Episode], how: Mapping[str, Any]
) -> tuple[list[Episode], int, dict[str, str]]:
    return stage.play(policy, orders)

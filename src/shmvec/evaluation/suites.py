"""Has suites played: here or on the nodes of a cluster, what their record does not have yet."""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gymnasium import logger
from gymnasium.vector import VectorEnv

from shmvec.evaluation.episodes import Episode, drawn_seeds, recorded
from shmvec.evaluation.nodes import play_on_nodes
from shmvec.evaluation.progress import reporter
from shmvec.evaluation.record import Record, RecordError
from shmvec.evaluation.results import Evaluation, evaluation_of
from shmvec.evaluation.suite import SuitePlayer
from shmvec.evaluation.suite_results import SuiteEvaluation
from shmvec.evaluation.tasks import EnvFn, Task, env_fn_of, identity_of, is_suite, tasks_of

__all__ = ["evaluate_suite"]


def evaluate_suite(
    envs: Any,
    policy: Any,
    pattern: Sequence[Episode],
    keys: tuple[str, ...],
    options: Mapping[str, Any],
    *,
    drawn: bool,
    record: str | os.PathLike[str] | None,
    videos: tuple[str | os.PathLike[str] | None, Collection[int]],
    ends: Sequence[float],
    progress: Any,
    actor_options: Mapping[str, Any] | None,
) -> Evaluation | SuiteEvaluation:
    """Evaluates a suite of tasks; or one env, as a suite of one task.

    Args:
        envs: The tasks.
        policy: Chooses actions.
        pattern: The episodes of each task.
        keys: The keys of last infos that are kept; the first is that of success.
        options: Further options of :class:`SuitePlayer`.
        drawn: Whether their seeds were drawn: then a record's are taken.
        record: The file to which episodes are appended.
        videos: The folder of videos, and the episodes to record.
        ends: When the last episode may begin, and when nothing is waited for any more.
        progress: As for ``evaluate``.
        actor_options: Ray's options for the actors of a cluster; None: it is played here.
    """
    begin = time.monotonic()
    if isinstance(envs, VectorEnv):
        raise ValueError("a suite, a record and memory= need what makes the envs, no vector env")
    if isinstance(envs, Sequence) and not isinstance(envs, str) and not is_suite(envs):
        raise TypeError(
            "record=, retries=, max_envs=, memory= and batch_across_tasks= need one function that "
            f"makes the env, and not a list of {len(envs)}: give it, and max_envs={len(envs)}"
        )
    tasks = tasks_of(envs)
    if videos[0] is not None:
        folders = Counter(_file_name(task.name).lower() for task in tasks)
        same = [task.name for task in tasks if folders[_file_name(task.name).lower()] > 1]
        if same:
            raise ValueError(f"the videos of these tasks would be in one folder: {same}")
    sources = [(task, _make(task, videos)) for task in tasks]
    options = {**options, "keys": keys, "recording": videos[0] is not None}
    player = SuitePlayer(sources, policy, **options)  # wrong ones are refused before a record
    kept = None if record is None else Record(record)
    try:
        played = _episodes(tasks, pattern, drawn, keys, kept)
        every = [episode for episodes in played.values() for episode in episodes]
        done = sum(episode.settled for episode in every)
        report, ended = reporter(progress, len(every), done)

        def settled(episode: Episode) -> None:
            if kept is not None:
                kept.add(episode)
            report(episode)

        try:
            if actor_options is None:
                given_up = _play_here(player, every, settled, ends)
            else:
                waiting = [episode for episode in every if not episode.settled]
                make = partial(_node, sources, options)
                given_up = play_on_nodes(make, policy, waiting, settled, actor_options)
        finally:
            ended()
    finally:
        if kept is not None:
            kept.close()
    found = {name: evaluation_of(episodes, keys, keys[0]) for name, episodes in played.items()}
    for key in keys[1:]:
        some = [each for each in found.values() if len(each)]
        if some and not any(key in each.infos for each in some):
            logger.warn("%s", f"no episode's last info has {key!r}")
    failures = {  # another env of the task may have played everything
        name: reason
        for name, reason in given_up.items()
        if not all(episode.settled for episode in played[name])
    }
    if is_suite(envs):
        return SuiteEvaluation(tuple(tasks), found, failures, time.monotonic() - begin)
    (name,) = found
    if failures:
        raise RuntimeError(f"the env could not be built: {failures[name]}")
    return replace(found[name], seconds=time.monotonic() - begin)


def _make(task: Task, videos: tuple[Any, Collection[int]]) -> EnvFn:
    """What makes a task's env, which may record videos."""
    folder, chosen = videos
    make = env_fn_of(task, folder is not None)
    if folder is None:
        return make
    return recorded([make], os.path.join(folder, _file_name(task.name)), chosen)[0]


def _episodes(
    tasks: Sequence[Task],
    pattern: Sequence[Episode],
    drawn: bool,
    keys: Sequence[str],
    record: Record | None,
) -> dict[str, list[Episode]]:
    """The episodes of each task, those that the record has filled in."""
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
    played = {}
    for task in tasks:
        episodes = [
            Episode(each.number, seed, each.options, task=task.name)
            for each, seed in zip(pattern, seeds, strict=True)
        ]
        if record is not None:
            about = {"env": identity_of(task), "info_keys": list(keys)}
            record.check_task(task.name, about, {"reference": task.reference})
            for episode in episodes:
                record.fill(episode)
        played[task.name] = episodes
    return played


def _file_name(name: str) -> str:
    """A task's name as that of a folder."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".")[:100] or "task"


def _play_here(
    player: SuitePlayer, episodes: Sequence[Episode], settled: Any, ends: Sequence[float]
) -> dict[str, str]:
    last_start, deadline = ends
    at_once = True
    try:
        player.add(episodes)
        player.play(settled, last_start, deadline)
        at_once = deadline < math.inf
    finally:
        player.close(at_once)
    return player.given_up


def _node(
    sources: Sequence[tuple[Task, EnvFn]], options: Mapping[str, Any], policy: Any
) -> tuple[SuitePlayer, Callable[[], object]]:
    """A node's player, and what ends its envs."""
    player = SuitePlayer(sources, policy, **options)
    return player, player.close

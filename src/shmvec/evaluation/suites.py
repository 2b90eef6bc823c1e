"""Has suites played, here or on the nodes of a cluster, except for what their record has."""

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

from shmvec.evaluation.episodes import Episode, draw_seeds, record_videos
from shmvec.evaluation.progress import reporting
from shmvec.evaluation.record import Record, RecordError
from shmvec.evaluation.results import Evaluation, evaluation_of
from shmvec.evaluation.suite import SuitePlayer
from shmvec.evaluation.suite_results import SuiteEvaluation
from shmvec.evaluation.tasks import EnvFn, Task, env_fn_of, identity_of, is_suite, tasks_of

__all__ = ["evaluate_suite"]


def evaluate_suite(
    envs: Any,
    policy: Any,
    schedule: Sequence[Episode],
    keys: tuple[str, ...],
    options: Mapping[str, Any],
    *,
    draws_seeds: bool,
    record: str | os.PathLike[str] | None,
    videos: tuple[str | os.PathLike[str] | None, Collection[int]],
    ends: Sequence[float],
    progress: Any,
    play_on_nodes: Callable[..., dict[str, str]] | None,
) -> Evaluation | SuiteEvaluation:
    """Evaluates a suite of tasks; or one env, as a suite of one task.

    Args:
        envs: The tasks.
        policy: Chooses actions.
        schedule: The episodes of each task.
        keys: The keys of last infos that are kept; the first is that of success.
        options: Further options of :class:`SuitePlayer`.
        draws_seeds: Whether the seeds were drawn; if so, those of a record replace them.
        record: The file to which episodes are appended.
        videos: The folder of videos, and the episodes to record.
        ends: The times after which no episode begins, and after which nothing is waited for.
        progress: As for ``evaluate``.
        play_on_nodes: Plays on the nodes of a cluster. None: it is played here.
    """
    begin = time.monotonic()
    if isinstance(envs, VectorEnv):
        raise ValueError(
            "a suite, a record and memory= need functions that make the envs, not a vector env"
        )
    if isinstance(envs, Sequence) and not isinstance(envs, str) and not is_suite(envs):
        raise TypeError(
            "record=, retries=, max_envs=, memory= and batch_across_tasks= need one function that "
            f"makes the env, and not a list of {len(envs)}: give it, and max_envs={len(envs)}"
        )
    tasks = tasks_of(envs)
    if videos[0] is not None:
        folders = Counter(_file_name(task.name).lower() for task in tasks)
        clashes = [task.name for task in tasks if folders[_file_name(task.name).lower()] > 1]
        if clashes:
            raise ValueError(f"the videos of these tasks would be in one folder: {clashes}")
    sources = [(task, _env_fn(task, videos)) for task in tasks]
    options = {**options, "keys": keys, "recording": videos[0] is not None}
    player = SuitePlayer(sources, policy, **options)  # first: it refuses wrong options
    record_file = None if record is None else Record(record)
    try:
        played = _episodes(tasks, schedule, draws_seeds, keys, record_file)
        all_episodes = [episode for episodes in played.values() for episode in episodes]
        done = sum(episode.settled for episode in all_episodes)
        with reporting(progress, len(all_episodes), done) as report:

            def on_settled(episode: Episode) -> None:
                if record_file is not None:
                    record_file.add(episode)
                report(episode)

            if play_on_nodes is None:
                failures = _play_here(player, all_episodes, on_settled, ends)
            else:
                waiting = [episode for episode in all_episodes if not episode.settled]
                make = partial(_node, sources, options)
                failures = play_on_nodes(make, policy, waiting, on_settled)
    finally:
        if record_file is not None:
            record_file.close()
    results = {name: evaluation_of(episodes, keys, keys[0]) for name, episodes in played.items()}
    for key in keys[1:]:
        with_episodes = [each for each in results.values() if len(each)]
        if with_episodes and not any(key in each.infos for each in with_episodes):
            logger.warn("%s", f"no episode's last info has {key!r}")
    failures = {  # no failure if another env of the task has played everything
        name: reason
        for name, reason in failures.items()
        if not all(episode.settled for episode in played[name])
    }
    if is_suite(envs):
        return SuiteEvaluation(tuple(tasks), results, failures, time.monotonic() - begin)
    (name,) = results
    if failures:
        raise RuntimeError(f"the env could not be built: {failures[name]}")
    return replace(results[name], seconds=time.monotonic() - begin)


def _env_fn(task: Task, videos: tuple[Any, Collection[int]]) -> EnvFn:
    """The function that makes a task's env, which may record videos."""
    folder, chosen = videos
    make = env_fn_of(task, folder is not None)
    if folder is None:
        return make
    return record_videos([make], os.path.join(folder, _file_name(task.name)), chosen)[0]


def _episodes(
    tasks: Sequence[Task],
    schedule: Sequence[Episode],
    draws_seeds: bool,
    keys: Sequence[str],
    record: Record | None,
) -> dict[str, list[Episode]]:
    """The episodes of each task, with the results that the record has."""
    seeds: list[Any] = [episode.seed for episode in schedule]
    if record is not None:
        if not record.head:
            record.begin({"drawn": draw_seeds(1)[0] if draws_seeds else None})
        if draws_seeds:  # the record's, so that it can be resumed
            base = record.head["drawn"]
            if base is None:
                raise RecordError(
                    f"{record.path} was recorded with seeds=: give the same seeds to resume it"
                )
            seeds = draw_seeds(len(seeds), base)
    played = {}
    for task in tasks:
        episodes = [
            Episode(each.number, seed, each.options, task=task.name)
            for each, seed in zip(schedule, seeds, strict=True)
        ]
        if record is not None:
            identity = {"env": identity_of(task), "info_keys": list(keys)}
            record.check_task(task.name, identity, {"reference": task.reference})
            for episode in episodes:
                record.fill(episode)
        played[task.name] = episodes
    return played


def _file_name(name: str) -> str:
    """The name of a task's folder."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".")[:100] or "task"


def _play_here(
    player: SuitePlayer, episodes: Sequence[Episode], on_settled: Any, ends: Sequence[float]
) -> dict[str, str]:
    last_start, deadline = ends
    at_once = True
    try:
        player.add(episodes)
        player.play(on_settled, last_start, deadline)
        at_once = deadline < math.inf
    finally:
        player.close(at_once)
    return player.failures


def _node(
    sources: Sequence[tuple[Task, EnvFn]], options: Mapping[str, Any], policy: Any
) -> tuple[SuitePlayer, Callable[[], object]]:
    """Makes a node's player; returns it, and the function that ends its envs."""
    player = SuitePlayer(sources, policy, **options)
    return player, player.close

"""``evaluate``: checks its arguments, and has the episodes played."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, overload

import gymnasium as gym
import numpy as np
from gymnasium import logger
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from shmvec._arguments import checked_count, checked_int, checked_seconds
from shmvec._cores import usable_cores
from shmvec._hints import refuse_unknown
from shmvec._options import OPTIONS, Fallback, MaxWorkers
from shmvec._policy import Policy, as_policy, check_policy
from shmvec.evaluation.episodes import Episode, draw_seeds, record_videos
from shmvec.evaluation.player import Plan, Player, Pool, seconds_until
from shmvec.evaluation.progress import reporting
from shmvec.evaluation.record import Record, RecordError
from shmvec.evaluation.results import SUCCESS, Evaluation, evaluation_of
from shmvec.evaluation.suite import SuitePlayer
from shmvec.evaluation.suite_results import SuiteEvaluation
from shmvec.evaluation.tasks import (
    EnvFn,
    Suite,
    Task,
    env_fn_of,
    identity_of,
    is_suite,
    tasks_of,
)
from shmvec.exchange import Autoreset, AutoresetMode
from shmvec.faults import FaultPolicy, RemoteTraceback, add_note
from shmvec.spaces import refuse_reward_space
from shmvec.vector_env import ShmVectorEnv

__all__ = ["evaluate", "num_episodes"]

Envs: TypeAlias = (
    "str | EnvSpec | Task | Callable[[], gym.Env[Any, Any]] | "
    "Sequence[Callable[[], gym.Env[Any, Any]]] | ShmVectorEnv"
)

_DEFAULT_EPISODES = 100
_CLOSE_TIMEOUT_S = 5.0  # for envs to close that may be in the middle of a step


# A text is an id of one env here: types cannot tell it from a pattern for several.
@overload
def evaluate(envs: Envs, policy: Any, episodes: int | None = ..., **options: Any) -> Evaluation: ...


@overload
def evaluate(
    envs: Suite, policy: Any, episodes: int | None = ..., **options: Any
) -> SuiteEvaluation: ...


def evaluate(
    envs: Envs | Suite,
    policy: Any,
    episodes: int | None = None,
    *,
    num_envs: int | None = None,
    seeds: int | Sequence[int] | None = None,
    options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
    batch_size: int | None = None,
    batch: str = "ready",
    info_keys: Collection[str] = (),
    time_limit: float | None = None,
    hard_time_limit: float | None = None,
    progress: bool | Callable[..., object] = False,
    video_folder: str | os.PathLike[str] | None = None,
    video_episodes: Collection[int] = (0,),
    cluster: bool = False,
    actor_options: Mapping[str, Any] | None = None,
    success_key: str = SUCCESS,
    record: str | os.PathLike[str] | None = None,
    max_envs: int | None = None,
    memory: int | float | str | None = None,
    batch_across_tasks: bool | None = None,
    retries: int | None = None,
    **vector_options: Any,
) -> Evaluation | SuiteEvaluation:
    """Plays episodes with a policy, in parallel, each of them exactly once.

    An episode has a seed and options, with which its env is reset. An env whose episode is over
    begins the next one at once, and stops when none is left: no step is wasted, and short episodes
    do not count more than long ones. While the policy computes for the envs that are ready, the
    others step.

    The result does not depend on the numbers of envs and workers, on their speed, or on faults. It
    is, bit for bit, that of playing one episode after the other, if the policy's action for an
    observation does not depend on the rest of its batch, and if each env has its own random numbers
    that follow from its seed. An episode that is interrupted because its worker dies is repeated
    from its seed.

    In a suite of tasks, each task plays this number of episodes, in envs that have their own
    processes and are started when it is their turn. An env that cannot be built, crashes, raises or
    hangs does not affect the others. docs/suites.md.

    Args:
        envs: An id of Gymnasium's registry, "module:Env-v0" to import a module first, or a spec;
            "module:function" or "path/file.py:function"; a function that makes an env; a list of
            such functions, one for each env, each of which may play any episode; or a
            :class:`shmvec.ShmVectorEnv`, which is not closed, and whose envs must be reset before
            they are used again. If an earlier call was interrupted, its answers are waited for
            first. A suite is a dict from names to such texts, functions or :class:`shmvec.Task`;
            a list of ids; or a pattern for ids, as ``ALE/*-v5``.
        policy: ``policy(observations, env_ids)`` returns an action for each observation, batched
            as ``action_space`` says. ``env_ids``, int64 ``(n,)``, are the envs of the observations.
            If the policy has a method ``reset(env_ids)``, that is called before it gets the first
            observations of episodes in these envs. If ``reset`` takes ``seeds=``, it gets a number
            below 2**32 for each env, which follows from the episode's seed: a policy that samples
            makes a ``default_rng(seed)`` of it for each env. In a suite, a policy that takes
            ``task=`` gets the task of each row, a list of :class:`shmvec.Task`; so does its
            ``reset``. Instead of a policy, a model with ``predict(observations)``, as
            Stable-Baselines3's, without a state; if ``predict`` takes ``deterministic=``, it gets
            True.
        episodes: Number of episodes; in a suite, of each task. None: the length of the list
            ``seeds`` or ``options``, else 100.
        num_envs: Number of envs, at most one for each episode. None: two for each core, or two for
            each worker if ``num_workers`` is given.
        seeds: A number: episode ``i`` gets ``seeds + i``. A list: one for each episode. None: drawn
            from the system's entropy; ``Evaluation.seeds`` has them.
        options: Options of all episodes' resets, or a list with those of each episode.
        batch_size: Largest number of envs in a batch of the policy, while the others step. None:
            all envs; with "fixed", half of them.
        batch: "ready": a batch has the envs that are ready. "fixed": batches always have
            ``batch_size`` rows, for compiled policies, and for kernels whose result depends on the
            size: missing rows are copies of the first one, with env -1, and their actions are
            discarded.
        info_keys: Further keys of an episode's last info that ``Evaluation.infos`` has, besides
            ``success_key``.
        time_limit: Seconds after which no episode begins. Those that have begun are played to their
            end and count, whatever their length.
        hard_time_limit: Seconds after which nothing is waited for, not even an env in the middle
            of a step. Only the episodes before the first unfinished one count; so short ones are
            more likely to count, and the mean is biased towards them.
        progress: True: a bar, if tqdm is installed. A function: it is called with each
            :class:`Episode` that is over. If it takes four arguments, it also gets the number of
            episodes that are over, the number of all, and an estimate of the seconds left.
        video_folder: The folder of videos, which Gymnasium's ``RecordVideo`` writes:
            ``evaluation-episode-0.mp4``, ... Needs moviepy, and envs with the render mode
            ``rgb_array``, which envs made by id get.
        video_episodes: Episodes to record, by number.
        cluster: Whether to play on all nodes of a Ray cluster, each of which has ``num_envs`` envs
            and a copy of the policy; envs and policy must be picklable. The episodes of a lost node
            are played by others. docs/cluster.md.
        actor_options: With ``cluster``: options for Ray's actors, ``num_cpus``, ``resources``,
            ``scheduling_strategy`` and ``runtime_env`` for example.
        success_key: The key of last infos that says whether an episode was a success.
        record: A file to which each episode is appended as it ends, as a line of JSON. If the file
            exists, only the episodes that it lacks are played, and the result is that of an
            uninterrupted call. With this or an argument below, one env is played as a suite of one
            task.
        max_envs: In a suite: number of envs at a time. None: two for each core.
        memory: In a suite: the memory that all envs may use together, as "20 GiB".
        batch_across_tasks: In a suite: whether a batch may have envs of several tasks, if their
            spaces are equal. None: it may.
        retries: In a suite: how often an episode is repeated because its env has crashed, raised or
            taken too long, before it counts as failed. None: twice.
        **vector_options: Arguments of :class:`shmvec.ShmVectorEnv`, ``num_workers`` for example.
            The default of ``faults`` is ``FaultPolicy(on_crash="restart")``, unless ``install`` or
            an environment variable sets another one. In a suite they are for one env each, and the
            defaults of ``step_timeout`` and ``reset_timeout``, which also limits the building of an
            env, are 600 s.

    Returns:
        The result; for a suite, a :class:`SuiteEvaluation`.

    Raises:
        ValueError: The number of seeds or options is not that of episodes; an argument is out of
            range; the policy's actions are wrong in number or shape.
        TypeError: The policy cannot be called, or an argument or an action is of a wrong type.
        Exception: Whatever the policy or an env raises.

    Example:
        >>> import numpy as np
        >>> import shmvec
        >>> def policy(observations, env_ids):
        ...     return (observations[:, 2] > 0).astype(int)
        >>> result = shmvec.evaluate("CartPole-v1", policy, episodes=4, seeds=1)
        >>> result.returns
        array([51., 35., 36., 25.])
        >>> result.steps, result.lengths.tolist()
        (147, [51, 35, 36, 25])
    """
    begin = time.monotonic()
    policy = as_policy(policy)
    if isinstance(info_keys, str):
        raise TypeError(f"info_keys must be several, as [{info_keys!r}]")
    keys = dict.fromkeys(info_keys)  # here, so that an error is raised before any work
    schedule = _episodes(num_episodes(episodes, seeds, options), seeds, options)
    limits = {"time_limit": time_limit, "hard_time_limit": hard_time_limit}
    for name, limit in limits.items():
        checked_seconds(name, limit)
    refuse_removed(vector_options)
    refuse_unknown("evaluate", vector_options, _known_options())
    suite_options = (record, max_envs, memory, batch_across_tasks, retries)
    as_suite = isinstance(envs, Task) or any(value is not None for value in suite_options)
    if actor_options is not None and not cluster:
        raise ValueError("actor_options are for Ray's actors: they need cluster=True")
    play_on_nodes = None
    if cluster:
        unsupported = {**limits, "video_folder": video_folder}
        refused = [name for name, value in unsupported.items() if value is not None]
        if refused:
            raise ValueError(f"on a cluster there is no {' and no '.join(refused)}")
        nodes = importlib.import_module("shmvec.cluster.evaluation")  # needs Ray
        play_on_nodes = partial(nodes.play_on_nodes, actor_options or {})
    ends = [math.inf if limit is None else begin + limit for limit in limits.values()]
    recording = None if video_folder is None else (video_folder, frozenset(video_episodes))
    if as_suite or is_suite(envs):
        if not all(isinstance(key, str) for key in (success_key, *keys)):
            raise TypeError(f"keys of infos must be texts, got {[success_key, *keys]}")
        if num_envs is not None and max_envs is not None:
            raise ValueError("num_envs and max_envs are the same here: give one of them")
        player_options = {
            "max_envs": num_envs if max_envs is None else max_envs,
            "memory": memory,
            "mix_tasks": batch_across_tasks is not False,
            "batch": batch,
            "batch_size": batch_size,
            "retries": 2 if retries is None else retries,
            "vector_options": vector_options,
        }
        return _evaluate_suite(
            envs,
            policy,
            schedule,
            (success_key, *keys),
            player_options,
            draws_seeds=seeds is None,
            record=record,
            recording=recording,
            ends=ends,
            progress=progress,
            play_on_nodes=play_on_nodes,
        )
    check_policy(policy, batch, Player.call_names, Player.reset_names)
    batch_options = {"batch": batch, "batch_size": batch_size}
    env_options = {"num_envs": num_envs, **vector_options}
    if isinstance(envs, ShmVectorEnv):
        refused = [name for name, value in env_options.items() if value is not None]
        refused += ["video_folder"] if recording else []
        if refused:
            raise ValueError(f"these cannot be set for a vector env that exists: {refused}")
        if cluster:
            raise ValueError("a vector env cannot be sent to other nodes: give what makes its envs")
    if play_on_nodes is not None:
        make = partial(_make_node_player, envs, len(schedule), env_options, batch_options)
        with reporting(progress, len(schedule)) as report:
            play_on_nodes(make, policy, schedule, report)
    else:
        _play_here(envs, env_options, recording, policy, batch_options, schedule, progress, ends)
    return _result(schedule, keys, begin, success_key)


def refuse_removed(options: Collection[str]) -> None:
    """Raises TypeError if an option is one that was removed."""
    if "gpu_memory" in options:
        raise TypeError(
            "gpu_memory= is gone: it was never tried on a GPU. max_envs= says how many envs there "
            "are at a time"
        )


def _play_here(
    envs: Any,
    env_options: dict[str, Any],
    recording: Any,
    policy: Policy,
    batch_options: dict[str, Any],
    episodes: Sequence[Episode],
    progress: Any,
    ends: Sequence[float],
) -> None:
    """Plays in a vector env that exists, or in one that it makes and closes."""
    own: ShmVectorEnv | None = None
    last_start, deadline = ends
    try:
        if isinstance(envs, ShmVectorEnv):
            vector = envs
        else:
            vector = own = _make_vector_env(envs, len(episodes), recording, **env_options)
        player = _make_player(vector, policy, recording is not None, batch_options)
        player.add(episodes)
        vector.exchange.check_pending("evaluate", alone=True)
        with (
            reporting(progress, len(episodes)) as report,
            vector.exchange.lend("evaluate", in_flight=True) as exchange,
        ):
            if exchange.discard(seconds_until(deadline)):
                player.play(report, last_start, deadline)
        if own is not None:
            _close(own, None if deadline == math.inf else _CLOSE_TIMEOUT_S, None)
    except BaseException as error:
        if own is not None:
            _close(own, _CLOSE_TIMEOUT_S, error)
        raise


def _make_vector_env(
    envs: Any, episodes: int, recording: Any = None, num_envs: int | None = None, **options: Any
) -> ShmVectorEnv:
    """Makes a vector env for ``episodes`` episodes, without autoreset, for this machine's cores."""
    if options.get("num_workers") is not None:
        options["num_workers"] = MaxWorkers(options["num_workers"])
    workers = options.get("num_workers") or usable_cores()
    env_fns = _env_fns(envs, num_envs, 2 * workers, episodes, recording is not None)
    if recording is not None:
        env_fns = record_videos(env_fns, *recording)
    options.setdefault("faults", Fallback(FaultPolicy(on_crash="restart")))
    options.setdefault("autoreset_mode", AutoresetMode.DISABLED)
    return ShmVectorEnv(env_fns, **options)


def _make_player(
    vector: ShmVectorEnv, policy: Policy, recording: bool, batch_options: dict[str, Any]
) -> Player:
    """Makes a player with a vector env as its only pool, whose task has no name."""
    _check_mode(vector)
    refuse_reward_space(vector.reward_space, "evaluate()")
    player = Player(policy, vector.num_envs, mix_tasks=True, **batch_options)
    plan = player.plans[""] = Plan(Task(""))
    pool = Pool(plan, range(vector.num_envs), recording)
    pool.exchange = vector.exchange
    player.pools.append(pool)
    player.admit(pool)
    return player


def _make_node_player(
    envs: Any, episodes: int, env_options: Any, batch_options: Any, policy: Policy
) -> tuple[Player, Callable[[], object]]:
    """Makes a node's player; returns it, and the function that closes its envs."""
    vector = _make_vector_env(envs, episodes, **env_options)
    return _make_player(vector, policy, False, batch_options), vector.close


def _result(
    played: Sequence[Episode], keys: Collection[str], begin: float, success_key: str
) -> Evaluation:
    """The result of one env's episodes; warns of keys that no last info has."""
    result = evaluation_of(played, keys, success_key, time.monotonic() - begin)
    for key in keys:
        if key not in result.infos and len(result):
            logger.warn("%s", f"no episode's last info has {key!r}; it has {list(played[0].info)}")
    return result


def _known_options() -> list[str]:
    return [*inspect.signature(evaluate).parameters, *OPTIONS]


def num_episodes(episodes: int | None, seeds: Any, options: Any) -> int:
    """The number of episodes, from these arguments of ``evaluate``."""
    if episodes is not None:
        return checked_count("episodes", episodes)
    lists = [each for each in (seeds, options) if _is_list(each)]
    return checked_count("episodes", len(lists[0])) if lists else _DEFAULT_EPISODES


def _is_list(values: Any) -> bool:
    """Whether an argument has a value for each episode."""
    if isinstance(values, np.ndarray):
        return values.ndim > 0
    return isinstance(values, Sequence) and not isinstance(values, str)


def _episodes(count: int, seeds: Any, options: Any) -> list[Episode]:
    if seeds is None:
        numbers = draw_seeds(count)
    elif _is_list(seeds):
        numbers = [_seed(seed) for seed in seeds]
        if len(numbers) != count:
            raise ValueError(f"seeds has {len(numbers)} seeds, for {count} episodes")
    else:
        numbers = [_seed(_seed(seeds) + i) for i in range(count)]
    each = list(options) if isinstance(options, (list, tuple)) else [options] * count
    if len(each) != count:
        raise ValueError(f"options has {len(each)} options, for {count} episodes")
    for one in each:
        if one is not None and not isinstance(one, dict):
            raise TypeError(f"options must be dicts or None, got {one!r}")
    return [Episode(*of) for of in zip(range(count), numbers, each, strict=True)]


def _seed(value: Any) -> int:
    seed = checked_int("a seed", value)
    if seed < 0:
        raise ValueError(f"a seed must not be negative, got {seed}")
    if seed > np.iinfo(np.int64).max:
        raise ValueError(f"a seed must be less than 2**63, got {seed}")
    return seed


def _env_fns(
    envs: Any, num_envs: int | None, default: int, episodes: int, renders: bool
) -> list[Callable[[], Any]]:
    if isinstance(envs, VectorEnv):
        raise TypeError(
            f"evaluate() needs a ShmVectorEnv, without wrappers around it, got "
            f"{type(envs).__name__}: wrap the single envs, or give a function that makes one"
        )
    if not isinstance(envs, (str, EnvSpec)) and isinstance(envs, Sequence):
        if num_envs not in (None, len(envs)):
            raise ValueError(f"num_envs is {num_envs}, and there are {len(envs)} env_fns")
        return list(envs[:episodes])
    count = default if num_envs is None else checked_count("num_envs", num_envs)
    if isinstance(envs, (str, EnvSpec)):
        envs = env_fn_of(Task(envs), renders)
    return [envs] * min(count, episodes)


def _check_mode(envs: ShmVectorEnv) -> None:
    autoreset = Autoreset.of(envs.autoreset_mode)
    # A worker function may reset envs itself: with autoreset they would be reset twice.
    if autoreset.in_step or (envs.worker and autoreset.by_worker):
        raise ValueError(
            "evaluate() resets envs itself: make them with autoreset_mode=AutoresetMode.DISABLED"
        )


def _close(vector: ShmVectorEnv, timeout: float | None, reason: BaseException | None) -> None:
    """Closes a vector env; an env's exception becomes a note on ``reason``, or a warning."""
    try:
        vector.close(timeout=timeout)
    except Exception as error:
        if not isinstance(error.__cause__, RemoteTraceback):  # raised by a signal handler
            raise
        failure = f"as it was closed, an env has raised {type(error).__name__}: {error}"
        if reason is None:
            logger.warn("%s", f"the results of evaluate() are complete, but {failure}")
        else:
            add_note(reason, failure)


# ---- suites -------------------------------------------------------------------------------------


def _evaluate_suite(
    envs: Any,
    policy: Any,
    schedule: Sequence[Episode],
    keys: tuple[str, ...],
    options: Mapping[str, Any],
    *,
    draws_seeds: bool,
    record: str | os.PathLike[str] | None,
    recording: tuple[str | os.PathLike[str], Collection[int]] | None,
    ends: Sequence[float],
    progress: Any,
    play_on_nodes: Callable[..., dict[str, str]] | None,
) -> Evaluation | SuiteEvaluation:
    """Evaluates a suite of tasks, or one env as a suite of one task; ``keys[0]`` is of success."""
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
    if recording is not None:
        folders = Counter(_file_name(task.name).lower() for task in tasks)
        clashes = [task.name for task in tasks if folders[_file_name(task.name).lower()] > 1]
        if clashes:
            raise ValueError(f"the videos of these tasks would be in one folder: {clashes}")
    sources = [(task, _task_env_fn(task, recording)) for task in tasks]
    options = {**options, "keys": keys, "recording": recording is not None}
    player = SuitePlayer(sources, policy, **options)  # first: it refuses wrong options
    record_file = None if record is None else Record(record)
    try:
        played = _episodes_of_tasks(tasks, schedule, draws_seeds, keys, record_file)
        all_episodes = [episode for episodes in played.values() for episode in episodes]
        done = sum(episode.settled for episode in all_episodes)
        with reporting(progress, len(all_episodes), done) as report:

            def on_settled(episode: Episode) -> None:
                if record_file is not None:
                    record_file.add(episode)
                report(episode)

            if play_on_nodes is None:
                failures = _play_suite_here(player, all_episodes, on_settled, ends)
            else:
                waiting = [episode for episode in all_episodes if not episode.settled]
                make = partial(_make_suite_player, sources, options)
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


def _task_env_fn(task: Task, recording: tuple[Any, Collection[int]] | None) -> EnvFn:
    """The function that makes a task's env, which may record videos."""
    make = env_fn_of(task, recording is not None)
    if recording is None:
        return make
    folder, chosen = recording
    return record_videos([make], os.path.join(folder, _file_name(task.name)), chosen)[0]


def _episodes_of_tasks(
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


def _play_suite_here(
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


def _make_suite_player(
    sources: Sequence[tuple[Task, EnvFn]], options: Mapping[str, Any], policy: Any
) -> tuple[SuitePlayer, Callable[[], object]]:
    """Makes a node's player; returns it, and the function that ends its envs."""
    player = SuitePlayer(sources, policy, **options)
    return player, player.close

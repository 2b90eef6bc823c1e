"""Play episodes with your policy in parallel, and print the returns.

    shmvec evaluate CartPole-v1 --policy my_policy.py:policy --episodes 100 --seeds 1

It does what shmvec.evaluate() does. ENV may be a suite: a pattern for ids, such as 'ALE/*-v5', or a
TOML file with a table [tasks.NAME] for each task (env = "an id"), and arguments of evaluate() above
them.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import gymnasium as gym

from shmvec._commands import measuring
from shmvec._commands.arguments import (
    NAMES_AN_ENV,
    add_json,
    add_kwargs,
    env_fn,
    file_to_write,
    positive,
    write_json,
)
from shmvec._hints import refuse_unknown, takes
from shmvec._named import find_policy
from shmvec._options import OPTIONS
from shmvec._policy import as_policy, check_policy
from shmvec.evaluation import Episode, SuiteEvaluation, Task, evaluate
from shmvec.evaluation.call import num_episodes, refuse_gone
from shmvec.evaluation.memory import parsed_bytes
from shmvec.evaluation.record import RecordError, read_lines, recorded_episodes
from shmvec.evaluation.tasks import is_suite, read_suite, tasks_of

__all__ = ["SUMMARY", "add_arguments", "main"]

SUMMARY = "play episodes with your policy, each exactly once, and print the returns"

# Options of the command `evaluate` that are arguments of the function.
_OF_SUITES = {"record", "max_envs", "memory", "retries", "batch_across_tasks"}
_OF_EVALUATE = _OF_SUITES | {
    "episodes",
    "num_envs",
    "num_workers",
    "seeds",
    "batch",
    "info_keys",
    "success_key",
    "time_limit",
    "hard_time_limit",
    "video_folder",
}


# What the file of a suite may say, besides its tasks.
_IN_FILES = (
    *(inspect.signature(evaluate).parameters.keys() - {"envs", "policy", "progress"}),
    *OPTIONS,
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    command.add_argument(
        "env", metavar="ENV", help=f"{NAMES_AN_ENV}, a suite.toml, or a pattern for ids"
    )
    add_kwargs(command)
    command.add_argument(
        "--policy",
        required=True,
        metavar="MODULE:FUNCTION",
        help="policy(observations, env_ids), which returns actions, or a model with predict: "
        "module:function or path/file.py:function; a class is called without arguments first",
    )
    command.add_argument(
        "--episodes",
        type=positive(int),
        help="episodes of each task (default: the file's, as many as its seeds, or 100)",
    )
    command.add_argument("--num-envs", type=positive(int), metavar="N", help="envs at a time")
    command.add_argument("--num-workers", type=positive(int), metavar="W", help="worker processes")
    command.add_argument(
        "--seeds",
        "--seed",
        type=_seed,
        metavar="S",
        help="seed of the first episode; each next episode has one more",
    )
    command.add_argument(
        "--fixed-batch",
        dest="batch",
        action="store_const",
        const="fixed",
        help="ask the policy about batches of one size",
    )
    command.add_argument(
        "--time-limit",
        type=positive(float),
        metavar="S",
        help="begin no further episode after so many seconds",
    )
    command.add_argument(
        "--hard-time-limit",
        type=positive(float),
        metavar="S",
        help="stop after so many seconds; short episodes then count for more",
    )
    command.add_argument(
        "--progress", action="store_true", help="show progress also where stderr is no terminal"
    )
    command.add_argument(
        "--info",
        dest="info_keys",
        nargs="+",
        metavar="KEY",
        help="keys of each episode's last info to report",
    )
    command.add_argument(
        "--success-key", metavar="KEY", help="key of the last info (default: is_success)"
    )
    command.add_argument("--videos", dest="video_folder", metavar="FOLDER", help="record episode 0")
    add_json(command, "episodes")
    suites = command.add_argument_group("suites (or one env, as a suite of one task)")
    suites.add_argument(
        "--record",
        type=file_to_write,
        metavar="FILE",
        help="append each episode to this file, and resume from it",
    )
    suites.add_argument("--max-envs", type=positive(int), metavar="N", help="envs at a time")
    suites.add_argument(
        "--memory", type=_size, metavar="SIZE", help="memory that all envs may use, such as 20GiB"
    )
    suites.add_argument("--gpu-memory", type=_gone, help=argparse.SUPPRESS)
    suites.add_argument(
        "--retries", type=_retries, metavar="N", help="repeats of an episode whose env fails"
    )
    suites.add_argument(
        "--separate-tasks",
        dest="batch_across_tasks",
        action="store_const",
        const=False,
        help="give the policy one task in each batch",
    )
    suites.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="compare with the episodes of the same seeds in an earlier record",
    )


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    policy = _policy(options.policy)
    given = {
        name: value
        for name, value in vars(options).items()
        if name in _OF_EVALUATE and value is not None
    }
    envs: Any = options.env
    try:
        before = None if options.compare is None else SuiteEvaluation.read(options.compare)
        if envs.endswith(".toml"):
            envs, arguments = read_suite(Path(envs))
            refuse_gone(arguments)
            refuse_unknown(options.env, arguments, _IN_FILES)
            given = {**arguments, **given}
        numbers = given.pop("episodes", None), given.get("seeds"), given.get("options")
        episodes = num_episodes(*numbers)
        if before is not None and given.get("seeds") is None:
            raise ValueError("--compare compares episodes of equal seeds: give --seeds")
        if options.kwargs and is_suite(envs):
            raise ValueError("--kwargs are for one env, and not for a suite")
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise argparse.ArgumentError(None, str(error)) from error
    if not is_suite(envs):
        name = envs
        envs = env_fn(name, options.kwargs)[0]
        if before is not None or _OF_SUITES & given.keys():
            envs = {name: Task(name, kwargs=options.kwargs)}
    try:
        tasks = {task.name for task in tasks_of(envs)} if is_suite(envs) else {""}
        done = _recorded(given.get("record"), tasks, episodes)
    except (OSError, ValueError, ImportError, gym.error.Error) as error:
        notes = getattr(error, "__notes__", ())
        raise argparse.ArgumentError(None, " ".join([str(error), *notes])) from error
    say = measuring.Progress(sys.stderr)
    wanted = sys.stderr is not None and (options.progress or sys.stderr.isatty())
    try:
        result = evaluate(
            envs,
            policy,
            episodes,
            progress=_counting(say, episodes * len(tasks), done) if wanted else False,
            **given,
        )
    except (RecordError, BlockingIOError) as error:
        raise argparse.ArgumentError(None, str(error)) from error
    except (TypeError, ValueError) as error:
        if not _is_of_policies(error):
            raise
        raise argparse.ArgumentError(None, f"--policy {options.policy}: {error}") from error
    finally:
        say.done()
    print(result)
    write_json(options, {name: values.tolist() for name, values in result.columns().items()})
    if before is not None:
        try:
            print(f"\n{before.compared_with(result)}")
        except ValueError as error:  # they have no episode in common
            print(f"shmvec: {error}", file=sys.stderr)
            return 1
    return 0 if result.complete else 1


def _seed(text: str) -> int:
    """An argparse type: a first seed."""
    value = int(text)
    if not 0 <= value < 2**62:
        raise argparse.ArgumentTypeError(f"must be at least 0 and less than 2**62, got {text}")
    return value


def _retries(text: str) -> int:
    """An argparse type: a number that may be 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value


def _size(text: str) -> int:
    """An argparse type: a number of bytes."""
    try:
        return parsed_bytes("it", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _gone(text: str) -> None:
    """An argparse type: none, of what there was."""
    try:
        refuse_gone(["gpu_memory"])
    except TypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _policy(name: str) -> Any:
    """The policy of this name; a class is called."""
    try:
        policy = find_policy(name)
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from error
    if isinstance(policy, type):  # a policy with a state
        if not takes(policy):
            message = f"--policy: the class {name} is called without arguments, and needs some"
            raise argparse.ArgumentError(None, message)
        policy = policy()
    if not callable(as_policy(policy)):
        raise argparse.ArgumentError(None, f"--policy: what {name} makes cannot be called")
    return policy


def _is_of_policies(error: Exception) -> bool:
    """Whether an error says what is wrong with a policy, and is none from within it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__") == check_policy.__module__


def _recorded(record: Any, tasks: Collection[str], episodes: int) -> int:
    """How many of the episodes a record has."""
    if record is None or not Path(record).is_file():
        return 0
    recorded = recorded_episodes(read_lines(Path(record))[0])
    return sum(each.task in tasks and each.number < episodes for each in recorded)


def _counting(say: measuring.Progress, episodes: int, done: int) -> Callable[..., object]:
    """A function that shows how many episodes are over, and the mean return of the new ones."""
    returns: list[float] = []

    def count(episode: Episode, left_s: float) -> None:
        nonlocal done
        done += 1
        text = f"{done} of {episodes} episodes"
        if not episode.failed:
            returns.append(episode.return_)
        if returns:
            text += f", mean return {sum(returns) / len(returns):,.2f}"
        if done < episodes:
            text += f", about {left_s:,.0f} s more"
        say(text, milestone=done == episodes or done % max(1, episodes // 10) == 0)

    return count

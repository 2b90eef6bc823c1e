"""Play episodes with your policy in parallel, and print the returns.

    shmvec evaluate CartPole-v1 --policy my_policy.py:policy --episodes 100 --seeds 1

It calls shmvec.evaluate(). ENV may be a suite: a pattern for ids, such as 'ALE/*-v5', or a TOML
file with a table [tasks.NAME] for each task (env = "an id"), and arguments of evaluate() above
the tables.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym

from shmvec._commands import measuring
from shmvec._commands.arguments import (
    ENV_HELP,
    add_json_option,
    add_kwargs_option,
    output_file,
    positive,
    write_json,
)
from shmvec._hints import can_be_called, refuse_unknown
from shmvec._named import find_policy
from shmvec._options import OPTIONS
from shmvec._policy import as_policy, check_policy
from shmvec.evaluation import Episode, SuiteEvaluation, Task, evaluate
from shmvec.evaluation.call import refuse_removed
from shmvec.evaluation.tasks import env_fn_of, is_suite, read_suite, tasks_of
from shmvec.faults import module_that_raised

__all__ = ["SUMMARY", "add_arguments", "main"]

SUMMARY = "play episodes with your policy, each exactly once, and print the returns"

_SUITE_ARGUMENTS = {"record", "max_envs", "memory", "retries", "batch_across_tasks"}
# Errors of these modules are about arguments.
_CHECKERS = check_policy.__module__, evaluate.__module__.rpartition(".")[0], "shmvec._arguments"
# Names of the command's options, and of the arguments in a suite's file.
_EVALUATE_ARGUMENTS = (
    *(inspect.signature(evaluate).parameters.keys() - {"envs", "policy", "progress"}),
    *OPTIONS,
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    command.add_argument(
        "env", metavar="ENV", help=f"{ENV_HELP}, a suite.toml, or a pattern for ids"
    )
    add_kwargs_option(command)
    command.add_argument(
        "--policy",
        required=True,
        metavar="MODULE:FUNCTION",
        help="policy(observations, env_ids), which returns actions, or a model with predict: "
        "module:function or path/file.py:function; a class is called without arguments",
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
        type=int,
        metavar="S",
        help="seed of the first episode; each further episode has the next one",
    )
    command.add_argument(
        "--fixed-batch",
        dest="batch",
        action="store_const",
        const="fixed",
        help="give the policy batches of one size",
    )
    command.add_argument(
        "--time-limit",
        type=positive(float),
        metavar="S",
        help="begin no episode after so many seconds",
    )
    command.add_argument(
        "--hard-time-limit",
        type=positive(float),
        metavar="S",
        help="stop after so many seconds; short episodes then count for more",
    )
    command.add_argument(
        "--progress", action="store_true", help="show progress even if stderr is no terminal"
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
    add_json_option(command, "episodes")
    suites = command.add_argument_group("suites (or one env, as a suite of one task)")
    suites.add_argument(
        "--record",
        type=output_file,
        metavar="FILE",
        help="append each episode to this file, and resume from it",
    )
    suites.add_argument("--max-envs", type=positive(int), metavar="N", help="envs at a time")
    suites.add_argument(
        "--memory", metavar="SIZE", help="memory that all envs may use, such as 20GiB"
    )
    suites.add_argument("--gpu-memory", help=argparse.SUPPRESS)
    suites.add_argument(
        "--retries", type=int, metavar="N", help="repeats of an episode whose env fails"
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
    policy = _load_policy(options.policy)
    arguments = {
        name: value
        for name, value in vars(options).items()
        if name in _EVALUATE_ARGUMENTS and value is not None
    }
    envs: Any = options.env
    try:
        refuse_removed(["gpu_memory"] if options.gpu_memory is not None else [])
        earlier = None if options.compare is None else SuiteEvaluation.read(options.compare)
        if envs.endswith(".toml"):
            envs, file_arguments = read_suite(Path(envs))
            refuse_removed(file_arguments)
            refuse_unknown(options.env, file_arguments, _EVALUATE_ARGUMENTS)
            arguments = {**file_arguments, **arguments}
        if earlier is not None and arguments.get("seeds") is None:
            raise ValueError("--compare needs episodes with equal seeds: give --seeds")
        if options.kwargs and is_suite(envs):
            raise ValueError("--kwargs is for one env, not for a suite")
        if not is_suite(envs):
            task = Task(envs, options.kwargs)
            as_suite = earlier is not None or _SUITE_ARGUMENTS & arguments.keys()
            envs = {envs: task} if as_suite else env_fn_of(task, "video_folder" in arguments)
        if is_suite(envs):
            tasks_of(envs)  # raises if a task is wrong
    except (OSError, ValueError, TypeError, ImportError, gym.error.Error) as error:
        notes = getattr(error, "__notes__", ())
        raise argparse.ArgumentError(None, " ".join([str(error), *notes])) from error
    say = measuring.Progress(sys.stderr)
    shows_progress = sys.stderr is not None and (options.progress or sys.stderr.isatty())
    try:
        progress = _progress_callback(say) if shows_progress else False
        result = evaluate(envs, policy, progress=progress, **arguments)
    except (TypeError, ValueError, BlockingIOError) as error:
        raised_in = module_that_raised(error)
        if not raised_in.startswith(_CHECKERS):
            raise
        prefix = f"--policy {options.policy}: " * (raised_in == check_policy.__module__)
        raise argparse.ArgumentError(None, f"{prefix}{error}") from error
    finally:
        say.done()
    print(result)
    write_json(options, {name: values.tolist() for name, values in result.columns().items()})
    if earlier is not None:
        try:
            print(f"\n{earlier.compared_with(result)}")
        except ValueError as error:  # no episode has the same seed
            print(f"shmvec: {error}", file=sys.stderr)
            return 1
    return 0 if result.complete else 1


def _load_policy(name: str) -> Any:
    """The named policy; a class is called."""
    try:
        policy = find_policy(name)
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from error
    if isinstance(policy, type):  # a policy with a state
        if not can_be_called(policy):
            message = f"--policy: the class {name} needs arguments: name a function instead"
            raise argparse.ArgumentError(None, message)
        policy = policy()
    if not callable(as_policy(policy)):
        raise argparse.ArgumentError(None, f"--policy: an object of {name} cannot be called")
    return policy


def _progress_callback(say: measuring.Progress) -> Callable[..., object]:
    """A function that shows how many episodes are over, and the mean return of the new ones."""
    returns: list[float] = []

    def count(episode: Episode, done: int, episodes: int, left_s: float) -> None:
        text = f"{done} of {episodes} episodes"
        if not episode.failed:
            returns.append(episode.return_)
        if returns:
            text += f", mean return {sum(returns) / len(returns):,.2f}"
        if done < episodes:
            text += f", about {left_s:,.0f} s more"
        say(text, milestone=done == episodes or done % max(1, episodes // 10) == 0)

    return count

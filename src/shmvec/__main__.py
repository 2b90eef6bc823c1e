"""The command line: ``python -m shmvec``, followed by a command; ``--help`` lists them."""

from __future__ import annotations

import argparse
import codecs
import errno
import importlib.util
import inspect
import json
import math
import multiprocessing
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import gymnasium as gym

from shmvec import __version__
from shmvec._commands import bench, check, doctor, measuring, stacks, top, tune
from shmvec._commands.machine import Machine, Prices
from shmvec._commands.measuring import described
from shmvec._hints import refuse_unknown, takes
from shmvec._named import find_env, find_policy
from shmvec._options import OPTIONS
from shmvec._policy import as_policy, check_policy
from shmvec.evaluation import Episode, SuiteEvaluation, Task, evaluate
from shmvec.evaluation.call import num_episodes
from shmvec.evaluation.memory import parsed_bytes
from shmvec.evaluation.record import RecordError, read_lines, recorded_episodes
from shmvec.evaluation.tasks import is_suite, read_suite, tasks_of

_NAMES_AN_ENV = (
    "an id (CartPole-v1, module:Env-v0), or a function or class that makes an env "
    "(module:make_env, path/file.py:MyEnv)"
)


_EXAMPLES = """\
examples:
  shmvec bench                    how fast is this machine?
  shmvec check my_env.py:MyEnv    may my env run in parallel?
  shmvec tune my_env.py:MyEnv     which settings are best for it?
  shmvec top                      what limits the program that is running?
  shmvec stacks PID               where does it hang?

To record a timeline of a run, write `with envs.trace('run.json'):` in the program.
`shmvec COMMAND --help` lists a command's options. `python -m shmvec` is the same as `shmvec`.
"""


_EVALUATE = """\
Play episodes with your policy in parallel, and print the returns.

    shmvec evaluate CartPole-v1 --policy my_policy.py:policy --episodes 100 --seeds 1

It does what shmvec.evaluate() does. ENV may be a suite: a pattern for ids, such as 'ALE/*-v5', or a
TOML file with a table [tasks.NAME] for each task (env = "an id"), and arguments of evaluate() above
them.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _keep_encodable()
    try:
        status = int(options.run(options))
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except argparse.ArgumentError as error:  # one that only the command could find
        parser.error(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _has_lost_reader():
            raise
        # The reader has closed the pipe, which is no error.
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if not _is_full(error):
            raise
        print(f"shmvec: standard output: {error.strerror}", file=sys.stderr)
        _discard_output()
        return 1


# ---- arguments -----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    """The parser; the function of a command is its options' ``run``."""
    parser = argparse.ArgumentParser(
        prog="shmvec",
        description="Measure, check, evaluate and inspect Gymnasium envs that step in parallel.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shmvec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    # Descriptions are docstrings, and keep their lines.
    add = partial(commands.add_parser, formatter_class=argparse.RawDescriptionHelpFormatter)
    command = add(
        "bench",
        help="compare with AsyncVectorEnv and SyncVectorEnv, on built-in envs or on yours",
        description=bench.__doc__,
    )
    command.add_argument(
        "env",
        nargs="*",
        metavar="ENV",
        help=f"{_NAMES_AN_ENV}, or one of the built-in {', '.join(bench.WORKLOADS)} (Noop does "
        f"nothing); default: {' '.join(bench.DEFAULT_WORKLOADS)}",
    )
    _add_kwargs(command)
    command.add_argument(
        "--num-workers",
        type=_positive(int),
        metavar="W",
        help="workers of ShmVectorEnv, at most one for each env (default: one for each core)",
    )
    _add_measuring(command, [1, 2, 8, 32], 2.0)
    command.set_defaults(run=_bench)

    command = add(
        "tune",
        help="find the best numbers of envs and workers, and the best options, for your env",
        description=tune.__doc__,
    )
    _add_env(command)
    _add_measuring(command, [8, 32, 128], 1.0)
    command.add_argument("--plot", type=_file, metavar="FILE", help="plot them (needs matplotlib)")
    command.set_defaults(run=_tune)

    command = add(
        "check",
        help="test whether your env may run in parallel, and which option fixes it",
        description=check.__doc__,
    )
    _add_env(command)
    command.add_argument(
        "--beside",
        metavar="ENV",
        help="another kind of env, to run in the same processes (default: the same kind)",
    )
    command.add_argument(
        "--context",
        nargs="+",
        choices=multiprocessing.get_all_start_methods(),
        metavar="METHOD",
        help="start methods to try; put the one you use first (default: all)",
    )
    command.add_argument(
        "--steps", type=_positive(int), default=50, help="steps of each env (default: %(default)s)"
    )
    command.add_argument(
        "--time-limit",
        type=_positive(float),
        default=20.0,
        metavar="S",
        help="seconds after which a run of envs counts as hanging (default: %(default)g)",
    )
    _add_json(command, "findings")
    command.set_defaults(run=_check)

    command = add(
        "evaluate",
        help="play episodes with your policy, each exactly once, and print the returns",
        description=_EVALUATE,
    )
    command.add_argument(
        "env", metavar="ENV", help=f"{_NAMES_AN_ENV}, a suite.toml, or a pattern for ids"
    )
    _add_kwargs(command)
    command.add_argument(
        "--policy",
        required=True,
        metavar="MODULE:FUNCTION",
        help="policy(observations, env_ids), which returns actions, or a model with predict: "
        "module:function or path/file.py:function; a class is called without arguments first",
    )
    command.add_argument(
        "--episodes",
        type=_positive(int),
        help="episodes of each task (default: the file's, as many as its seeds, or 100)",
    )
    command.add_argument("--num-envs", type=_positive(int), metavar="N", help="envs at a time")
    command.add_argument("--num-workers", type=_positive(int), metavar="W", help="worker processes")
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
        type=_positive(float),
        metavar="S",
        help="begin no further episode after so many seconds",
    )
    command.add_argument(
        "--hard-time-limit",
        type=_positive(float),
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
    _add_json(command, "episodes")
    suites = command.add_argument_group("suites (or one env, as a suite of one task)")
    suites.add_argument(
        "--record",
        type=_file,
        metavar="FILE",
        help="append each episode to this file, and resume from it",
    )
    suites.add_argument("--max-envs", type=_positive(int), metavar="N", help="envs at a time")
    suites.add_argument(
        "--memory", type=_size, metavar="SIZE", help="memory that all envs may use, such as 20GiB"
    )
    suites.add_argument("--gpu-memory", type=_size, metavar="SIZE", help="the same for NVIDIA GPUs")
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
    command.set_defaults(run=_evaluate)

    command = add(
        "doctor",
        help="test whether this machine lets workers run fast, and what to change",
        description=doctor.__doc__,
    )
    _add_json(command, "findings")
    command.set_defaults(run=_doctor)

    command = add(
        "stacks",
        help="print where in Python a running program's workers are, or hang",
        description=stacks.__doc__,
    )
    command.add_argument(
        "pid", type=_positive(int), metavar="PID", help="process id of the program, or of a worker"
    )
    command.set_defaults(run=_stacks)

    command = add(
        "top",
        help="show what running vector envs do, and what limits their speed",
        description=top.__doc__,
    )
    which = command.add_mutually_exclusive_group()
    which.add_argument(
        "pid", nargs="?", type=_positive(int), metavar="PID", help="process id of the program"
    )
    which.add_argument("--all", action="store_true", help="all your vector envs (the default)")
    command.add_argument(
        "--interval", type=_seconds, metavar="S", help="seconds between two pictures"
    )
    how = command.add_mutually_exclusive_group()
    how.add_argument("--json", dest="as_json", action="store_true", help="print JSON, once")
    how.add_argument(
        "--prometheus", action="store_true", help="print Prometheus' text format, once"
    )
    command.set_defaults(run=_top)

    return parser


def _add_env(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that name an env."""
    command.add_argument("env", metavar="ENV", help=_NAMES_AN_ENV)
    _add_kwargs(command)


def _add_kwargs(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of the env."""
    command.add_argument(
        "--kwargs",
        type=_arguments,
        default={},
        metavar="JSON",
        help='arguments of the env, such as \'{"render_mode": "rgb_array"}\'',
    )


def _add_json(command: argparse.ArgumentParser, what: str) -> None:
    """Adds the argument for a file of results."""
    command.add_argument("--json", type=_file, metavar="FILE", help=f"write the {what} to a file")


def _add_measuring(
    command: argparse.ArgumentParser, nums_envs: Sequence[int], seconds: float
) -> None:
    """Adds the arguments of commands that measure."""
    command.add_argument(
        "--num-envs",
        nargs="+",
        type=_positive(int),
        default=nums_envs,
        metavar="N",
        help=f"numbers of envs to try (default: {' '.join(map(str, nums_envs))})",
    )
    command.add_argument(
        "--seconds",
        type=_positive(float),
        default=seconds,
        help="seconds for each system or setting, with each number of envs (default: %(default)g)",
    )
    command.add_argument(
        "--compute",
        type=_positive(float),
        metavar="US",
        help="let the parent compute for so many µs between steps, as a learner does; bench then "
        "prints how much waiting workers slow that down",
    )
    _add_json(command, "results")


def _arguments(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object, from names to values")
    return value


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


def _seconds(text: str) -> float:
    """An argparse type: seconds that can be slept."""
    value = float(text)
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"must be positive, and at most a million, got {text}")
    return value


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """An argparse type: a positive number."""

    def parsed(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        return value

    parsed.__name__ = kind.__name__  # which messages of argparse name
    return parsed


def _file(text: str) -> Path:
    """An argparse type: a file to write, whose folder exists."""
    file = Path(text)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {file.parent}")
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder")
    return file


# Options of the command `evaluate` that are arguments of the function.
_OF_SUITES = {"record", "max_envs", "memory", "gpu_memory", "retries", "batch_across_tasks"}
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


# ---- commands ------------------------------------------------------------------------------------


def _env_fn(name: str, kwargs: dict[str, Any]) -> tuple[measuring.EnvFn, str]:
    """The function that makes the env of this name, and code that defines it."""
    try:
        return find_env(name, kwargs)
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from error


def _write_json(options: argparse.Namespace, results: object) -> None:
    """Writes results to the file of ``--json``, if it was given."""
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2, default=str) + "\n")


def _bench(options: argparse.Namespace) -> int:
    workloads = {}
    for name in options.env or bench.DEFAULT_WORKLOADS:
        if name in bench.WORKLOADS and not options.kwargs:
            workloads[name] = bench.WORKLOADS[name]
        else:
            workloads[name] = bench.Workload(_env_fn(name, options.kwargs)[0])
    results = bench.run(
        workloads,
        options.num_envs,
        num_workers=options.num_workers,
        seconds=options.seconds,
        compute_us=options.compute,
        progress=sys.stderr,
    )
    print(bench.table(results))
    _write_json(options, results)
    return 0 if results["rows"] else 1


def _tune(options: argparse.Namespace) -> int:
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentError(
            None, "--plot: matplotlib is not installed; pip install 'shmvec[plot]'"
        )
    make, code = _env_fn(options.env, options.kwargs)
    results = tune.tune(
        make,
        options.num_envs,
        seconds=options.seconds,
        compute_us=options.compute,
        progress=sys.stderr,
    )
    print(tune.report(results, code))
    _write_json(options, results)
    if options.plot is not None:
        tune.plot(results, options.plot)
    return 0


def _check(options: argparse.Namespace) -> int:
    make, _ = _env_fn(options.env, options.kwargs)
    beside = options.beside and _env_fn(options.beside, options.kwargs)[0]
    report = check.check(
        make,
        beside=beside,
        contexts=options.context,
        steps=options.steps,
        time_limit=options.time_limit,
        progress=sys.stderr,
    )
    print(report)
    _write_json(options, {"ok": report.ok, "findings": list(map(asdict, report.findings))})
    return 0 if report.ok else 1


def _evaluate(options: argparse.Namespace) -> int:
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
        envs = _env_fn(name, options.kwargs)[0]
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
    _write_json(options, {name: values.tolist() for name, values in result.columns().items()})
    if before is not None:
        try:
            print(f"\n{before.compared_with(result)}")
        except ValueError as error:  # they have no episode in common
            print(f"shmvec: {error}", file=sys.stderr)
            return 1
    return 0 if result.complete else 1


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

    def count(episode: Episode, left_s: float = math.nan) -> None:
        nonlocal done
        done += 1
        text = f"{done} of {episodes} episodes"
        if not episode.failed:
            returns.append(episode.return_)
        if returns:
            text += f", mean return {sum(returns) / len(returns):,.2f}"
        if not math.isnan(left_s):
            text += f", about {left_s:,.0f} s more"
        say(text, milestone=done == episodes or done % max(1, episodes // 10) == 0)

    return count


def _doctor(options: argparse.Namespace) -> int:
    machine = Machine.read()
    prices = Prices.measured(machine.cores)
    found = doctor.findings(machine, prices)
    print(f"{described(measuring.machine())}\n{doctor.report(found)}")
    findings = list(map(asdict, found))
    shown = {"machine": asdict(machine), "prices": asdict(prices), "findings": findings}
    _write_json(options, shown)
    return 0


def _stacks(options: argparse.Namespace) -> int:
    try:
        for stack in stacks.stacks_of(options.pid):
            print(stack, flush=True)
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        return 1
    return 0


def _top(options: argparse.Namespace) -> int:
    return top.run(
        options.pid,
        as_json=options.as_json,
        prometheus=options.prometheus,
        interval=options.interval,
    )


# ---- standard output -----------------------------------------------------------------------------


def _keep_encodable() -> None:
    """Lets standard output replace what its encoding lacks: us for µs, or a question mark."""
    out = sys.stdout
    if isinstance(out, TextIOWrapper) and out.errors in ("strict", "surrogateescape"):
        codecs.register_error("shmvec.replace", _replacement)
        out.reconfigure(errors="shmvec.replace")


def _replacement(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: the replacement for what cannot be encoded."""
    assert isinstance(error, UnicodeEncodeError)
    instead = {"µ": "u", "×": "x", "±": "+-", "…": "..."}
    return "".join(instead.get(c, "?") for c in error.object[error.start : error.end]), error.end


def _has_lost_reader() -> bool:
    """Whether the reader of standard output has closed it."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _is_full(error: OSError) -> bool:
    """Whether the error is that of a full standard output, and not of another file."""
    if sys.stdout is None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return False
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as second:
        return second.errno == error.errno
    return False


def _discard_output() -> None:
    """Redirects standard output, so that Python does not write what is left when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())

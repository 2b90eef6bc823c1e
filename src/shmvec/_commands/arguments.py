"""What commands share: arguments that name an env, types of arguments, reports and their files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym

from shmvec._named import find_env

__all__ = [
    "NAMES_AN_ENV",
    "add_env",
    "add_json",
    "add_kwargs",
    "add_measuring",
    "env_fn",
    "file_to_write",
    "positive",
    "report_lines",
    "write_json",
]

NAMES_AN_ENV = (
    "an id (CartPole-v1, module:Env-v0), or a function or class that makes an env "
    "(module:make_env, path/file.py:MyEnv)"
)


def add_env(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that name an env."""
    command.add_argument("env", metavar="ENV", help=NAMES_AN_ENV)
    add_kwargs(command)


def add_kwargs(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of the env."""
    command.add_argument(
        "--kwargs",
        type=_arguments,
        default={},
        metavar="JSON",
        help='arguments of the env, such as \'{"render_mode": "rgb_array"}\'',
    )


def add_json(command: argparse.ArgumentParser, what: str) -> None:
    """Adds the argument for a file of results."""
    command.add_argument(
        "--json", type=file_to_write, metavar="FILE", help=f"write the {what} to a file"
    )


def add_measuring(
    command: argparse.ArgumentParser, nums_envs: Sequence[int], seconds: float
) -> None:
    """Adds the arguments of commands that measure."""
    command.add_argument(
        "--num-envs",
        nargs="+",
        type=positive(int),
        default=nums_envs,
        metavar="N",
        help=f"numbers of envs to try (default: {' '.join(map(str, nums_envs))})",
    )
    command.add_argument(
        "--seconds",
        type=positive(float),
        default=seconds,
        help="seconds for each system or setting, with each number of envs (default: %(default)g)",
    )
    command.add_argument(
        "--compute",
        type=positive(float),
        metavar="US",
        help="let the parent compute for so many µs between steps, as a learner does; bench then "
        "prints how much waiting workers slow that down",
    )
    add_json(command, "results")


def _arguments(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object, from names to values")
    return value


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """An argparse type: a positive number."""

    def parsed(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        return value

    parsed.__name__ = kind.__name__  # which messages of argparse name
    return parsed


def file_to_write(text: str) -> Path:
    """An argparse type: a file to write, whose folder exists."""
    file = Path(text)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {file.parent}")
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder")
    return file


def env_fn(name: str, kwargs: dict[str, Any]) -> tuple[Callable[[], gym.Env[Any, Any]], str]:
    """The function that makes the env of this name, and code that defines it."""
    try:
        return find_env(name, kwargs)
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from error


def write_json(options: argparse.Namespace, results: object) -> None:
    """Writes results to the file of ``--json``, if it was given."""
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2, default=str) + "\n")


def report_lines(rows: Sequence[tuple[str, str, str, str | None]]) -> Iterator[str]:
    """Lines of findings, each of which has a mark, a topic, what was seen, and advice or None."""
    marks = max((len(mark) for mark, *_ in rows), default=0)
    topics = max((len(topic) for _, topic, *_ in rows), default=0)
    for mark, topic, seen, advice in rows:
        yield f"{mark:{marks}}  {topic:{topics}}  {seen}"
        if advice is not None:
            yield f"{'':{marks + topics + 4}}-> {advice}"

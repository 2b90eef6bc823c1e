"""Helpers of several commands: arguments that name an env, types of arguments, reports, files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym

from shmvec._named import find_env

__all__ = [
    "ENV_HELP",
    "add_env_arguments",
    "add_json_option",
    "add_kwargs_option",
    "add_measuring_options",
    "find_env_fn",
    "output_file",
    "positive",
    "report_lines",
    "write_json",
]

ENV_HELP = (
    "an id (CartPole-v1, module:Env-v0), or a function or class that makes an env "
    "(module:make_env, path/file.py:MyEnv)"
)


def add_env_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("env", metavar="ENV", help=ENV_HELP)
    add_kwargs_option(command)


def add_kwargs_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help='arguments of the env, such as \'{"render_mode": "rgb_array"}\'',
    )


def add_json_option(command: argparse.ArgumentParser, content: str) -> None:
    command.add_argument(
        "--json", type=output_file, metavar="FILE", help=f"write the {content} to a file"
    )


def add_measuring_options(
    command: argparse.ArgumentParser, nums_envs: Sequence[int], seconds: float
) -> None:
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
    add_json_option(command, "results")


def _json_object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object, from names to values")
    return value


def positive(number_type: type[int] | type[float]) -> Callable[[str], float]:
    """An argparse type: a positive number."""

    def parse(text: str) -> float:
        value = number_type(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        return value

    parse.__name__ = number_type.__name__  # argparse names it in messages
    return parse


def output_file(text: str) -> Path:
    """An argparse type: a file that can be written, because its folder exists."""
    file = Path(text)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {file.parent}")
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder")
    return file


def find_env_fn(name: str, kwargs: dict[str, Any]) -> tuple[Callable[[], gym.Env[Any, Any]], str]:
    """The function that makes the named env, and code that defines this function."""
    try:
        return find_env(name, kwargs)
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from error


def write_json(options: argparse.Namespace, results: object) -> None:
    """Writes results to the file of ``--json``, if there is one."""
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2, default=str) + "\n")


def report_lines(rows: Sequence[tuple[str, str, str, str | None]]) -> Iterator[str]:
    """The lines of a report; a row is a mark, a topic, a fact, and advice or None."""
    marks = max((len(mark) for mark, *_ in rows), default=0)
    topics = max((len(topic) for _, topic, *_ in rows), default=0)
    for mark, topic, fact, advice in rows:
        yield f"{mark:{marks}}  {topic:{topics}}  {fact}"
        if advice is not None:
            yield f"{'':{marks + topics + 4}}-> {advice}"

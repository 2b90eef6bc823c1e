"""The tasks of a suite, and the functions that make their envs."""

from __future__ import annotations

import fnmatch
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from shmvec._hints import did_you_mean, find_env_spec, refuse_unknown
from shmvec._named import find_env
from shmvec.evaluation.record import to_plain

__all__ = ["Task", "env_fn_of", "identity_of", "is_suite", "read_suite", "tasks_of"]

EnvFn = Callable[[], gym.Env[Any, Any]]
Source: TypeAlias = "str | EnvSpec | EnvFn"

_WILDCARDS = "*?["


@dataclass(frozen=True)
class Task:
    """One task of a suite.

    Attributes:
        env: Its env: an id of Gymnasium's registry ("module:Env-v0" to import a module first),
            "module:function", "path/file.py:function", a spec, or a function that makes it.
        kwargs: Arguments of the env, if ``env`` is a text or a spec.
        instruction: What a policy is to do, in words or as any object; only the policy reads it.
        reference: The returns of a random policy and of a human or an expert. If all tasks have
            them, scores are normalised: 0 and 1 stand for these two.
        name: Its name, set by :func:`shmvec.evaluate`.
        index: Its place in the suite, set by :func:`shmvec.evaluate`.
    """

    env: Source = field(hash=False)
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    instruction: Any = field(default=None, hash=False)
    reference: tuple[float, float] | None = None
    name: str = ""
    index: int = -1

    def __post_init__(self) -> None:
        """Checks the reference.

        Raises:
            ValueError: It is not two different numbers.
        """
        if self.reference is not None:
            try:
                low, high = (float(each + 0.0) for each in self.reference)
            except (TypeError, ValueError):
                low = high = 0.0
            if not 0 < abs(high - low) < float("inf"):
                raise ValueError(
                    f"reference must be the returns of a random policy and of an expert, two "
                    f"different numbers, got {self.reference!r}"
                )
            object.__setattr__(self, "reference", (low, high))

    def normalised(self, returns: Any) -> Any:
        """Returns on the scale of the reference: 0 for its first number, 1 for its second.

        Args:
            returns: A return, or an array of them.

        Raises:
            ValueError: The task has no reference.
        """
        if self.reference is None:
            raise ValueError(f"task {self.name!r} has no reference to normalise returns by")
        low, high = self.reference
        return (returns - low) / (high - low)


Suite: TypeAlias = "str | Mapping[str, Source | Task] | Sequence[str | EnvSpec | Task]"


def is_suite(envs: Any) -> bool:
    """Whether the argument of ``evaluate`` is a suite of tasks, and not one env."""
    if isinstance(envs, str):
        return any(each in envs for each in _WILDCARDS)
    if isinstance(envs, Mapping):
        return True
    return isinstance(envs, (list, tuple)) and any(
        isinstance(each, (str, EnvSpec, Task)) for each in envs
    )


def tasks_of(envs: Any) -> list[Task]:
    """The tasks of a suite, or of one env; no env is built.

    Raises:
        ValueError: There are none, two have the same name, or there is no such id, file or module.
        TypeError: A task or a name is of a wrong type.
    """
    if isinstance(envs, str) and is_suite(envs):  # a pattern
        named: list[tuple[str, Any]] = [(name, name) for name in _matching_ids(envs)]
    elif isinstance(envs, Mapping):
        named = list(envs.items())
    elif is_suite(envs):
        named = [(_name(each), each) for each in envs]
    else:
        named = [(_name(envs), envs)]
    if not named:
        raise ValueError("a suite needs at least one task")
    tasks: dict[str, Task] = {}
    for index, (name, each) in enumerate(named):
        task = each if isinstance(each, Task) else Task(each)
        if not isinstance(name, str) or not name or "\n" in name:
            raise TypeError(f"the name of a task must be a text of one line, got {name!r}")
        if name in tasks:
            raise ValueError(f"two tasks are called {name!r}: give a dict, from names to envs")
        tasks[name] = replace(task, name=name, index=index)
        env_fn_of(tasks[name])  # a missing id, file or module raises now, and not hours later
    return list(tasks.values())


def _name(source: Any) -> str:
    if isinstance(source, Task):
        return source.name or _name(source.env)
    if isinstance(source, str):
        return source
    if isinstance(source, EnvSpec):
        return source.id
    return str(getattr(source, "__qualname__", None) or type(source).__qualname__)


def _matching_ids(pattern: str) -> list[str]:
    """The ids of Gymnasium's registry that match a pattern, in all versions."""
    module, _, pattern = pattern.rpartition(":")
    if module:
        importlib.import_module(module)
    ids = [id for id in gym.registry if fnmatch.fnmatchcase(id, pattern)]
    if not ids:
        hint = did_you_mean([pattern.strip(_WILDCARDS)], gym.registry)
        raise ValueError(f"no id of Gymnasium's registry matches {pattern!r}{hint}")
    prefix = f"{module}:" if module else ""
    return [prefix + id for id in ids]


def env_fn_of(task: Task, renders: bool = False) -> EnvFn:
    """The function that makes a task's env.

    Args:
        task: The task.
        renders: Whether it gets the render mode ``rgb_array``, if it is made by id.

    Raises:
        ValueError: There is no such file, module or function.
        gymnasium.error.Error: There is no such id.
        TypeError: The task's env is of a wrong type.
    """
    source, kwargs = task.env, dict(task.kwargs)
    if isinstance(source, str) and _names_function(source):
        return find_env(source, kwargs)[0]
    if isinstance(source, (str, EnvSpec)):
        spec = find_env_spec(source) if isinstance(source, str) else source
        render_option = {"render_mode": "rgb_array"} if renders else {}
        return partial(gym.make, spec, **{**render_option, **kwargs})
    if not callable(source):
        raise TypeError(
            f"task {task.name!r}: an env is an id, a spec, 'path/file.py:function' or a function, "
            f"got {source!r}"
        )
    if kwargs:
        raise TypeError(f"task {task.name!r}: kwargs are for ids; give functools.partial")
    return source


def _names_function(name: str) -> bool:
    """Whether a text is "path/file.py:function" or "module:function", and not an id."""
    where, _, what = name.rpartition(":")
    if where.endswith(".py") or what.endswith(".py"):
        return True
    if not where:
        return False
    with suppress(ImportError):  # the text is then looked up as an id, which raises
        return callable(getattr(importlib.import_module(where), what, None))
    return False


def identity_of(task: Task) -> str:
    """A text that identifies a task's env by its name and arguments."""
    source = task.env
    if isinstance(source, EnvSpec):
        source = source.id
    arguments: list[Any] = [dict(task.kwargs)]
    if not isinstance(source, str):
        inner: Any = source
        while isinstance(inner, partial):
            arguments += [inner.args, inner.keywords]
            inner = inner.func
        kind = getattr(inner, "__qualname__", None) or type(inner).__qualname__
        source = f"{getattr(inner, '__module__', '')}:{kind}"
    return json.dumps([source, *map(to_plain, arguments)], sort_keys=True)


def read_suite(file: Path) -> tuple[dict[str, Task], dict[str, Any]]:
    """The tasks in a TOML file, and the other arguments of ``evaluate`` in it.

    Relative paths of envs' files are relative to its folder.

    Raises:
        ImportError: This is Python 3.10, and tomli is not installed.
        ValueError: The file is not TOML, or does not describe tasks.
    """
    try:
        toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError as error:
        raise ImportError("Python 3.10 needs tomli to read TOML: pip install tomli") from error
    try:
        content = toml.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not TOML: {error}") from error
    tables = content.pop("tasks", None)
    if isinstance(tables, list) and all(isinstance(id, str) for id in tables):
        tables = {id: {"env": id} for id in tables}
    if not isinstance(tables, dict) or not tables:
        raise ValueError(f"{file} has no tasks: [tasks.NAME] with env = 'an id' for each")
    tasks = {}
    for name, table in tables.items():
        try:
            each: dict[str, Any] = {"env": table} if isinstance(table, str) else table
            for key, kind in {"env": str, "kwargs": dict, "reference": list}.items():
                if not isinstance(each, dict) or not isinstance(each.get(key, kind()), kind):
                    raise TypeError("needs env = 'a text', kwargs = {} and reference = [0, 1]")
            refuse_unknown("it", each, ("env", "kwargs", "instruction", "reference"))
            source = each.get("env", "")
            if isinstance(source, str) and source.rpartition(":")[0].endswith(".py"):
                each = {**each, "env": str(file.parent / source)}
            tasks[name] = Task(**each)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}, task {name!r}: {error}") from error
    return tasks, content

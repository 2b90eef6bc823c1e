"""The tasks of a suite: what makes their envs, and what the policy gets of them."""

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

from shmvec._hints import did_you_mean, found_spec, refuse_unknown
from shmvec._named import find_env
from shmvec.evaluation.record import plain

__all__ = ["Task", "env_fn_of", "identity_of", "is_suite", "read_suite", "tasks_of"]

EnvFn = Callable[[], gym.Env[Any, Any]]
Source: TypeAlias = "str | EnvSpec | EnvFn"

_WILDCARDS = "*?["


@dataclass(frozen=True)
class Task:
    """One task of a suite.

    Attributes:
        env: What makes its env: an id of Gymnasium's registry ("module:Env-v0" to import a module
            first), "module:function", "path/file.py:function", a spec, or a function.
        kwargs: Arguments of the env, where ``env`` is a text or a spec.
        instruction: What a policy is to do, in words or as anything else; only the policy reads it.
        reference: The returns of a random policy and of a human or an expert. Where all tasks have
            them, scores are normalised: 0 and 1 are these two.
        name: Its name, which :func:`shmvec.evaluate` sets.
        index: Its place in the suite, which :func:`shmvec.evaluate` sets.
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
        """Returns by the scale of the reference: 0 for its first number, 1 for its second.

        Raises:
            ValueError: The task has no reference.
        """
        if self.reference is None:
            raise ValueError(f"task {self.name!r} has no reference to normalise returns by")
        low, high = self.reference
        return (returns - low) / (high - low)


Suite: TypeAlias = "str | Mapping[str, Source | Task] | Sequence[str | EnvSpec | Task]"


def is_suite(envs: Any) -> bool:
    """Whether ``evaluate`` is given tasks, and not one env."""
    if isinstance(envs, str):
        return any(each in envs for each in _WILDCARDS)
    if isinstance(envs, Mapping):
        return True
    return isinstance(envs, (list, tuple)) and any(
        isinstance(each, (str, EnvSpec, Task)) for each in envs
    )


def tasks_of(envs: Any) -> list[Task]:
    """The tasks of a suite, or of one env; none of their envs is built.

    Raises:
        ValueError: There are none, two have the same name, or there is no such id, file or module.
        TypeError: One is something else.
    """
    if isinstance(envs, str) and is_suite(envs):  # a pattern
        named: list[tuple[str, Any]] = [(name, name) for name in _matching(envs)]
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
        env_fn_of(tasks[name])  # its id, file or module is looked for now, and not hours later
    return list(tasks.values())


def _name(source: Any) -> str:
    if isinstance(source, Task):
        return source.name or _name(source.env)
    if isinstance(source, str):
        return source
    if isinstance(source, EnvSpec):
        return source.id
    return str(getattr(source, "__qualname__", None) or type(source).__qualname__)


def _matching(pattern: str) -> list[str]:
    """The ids of Gymnasium's registry that match, all versions of them."""
    module, _, pattern = pattern.rpartition(":")
    if module:
        importlib.import_module(module)
    found = [id for id in gym.registry if fnmatch.fnmatchcase(id, pattern)]
    if not found:
        hint = did_you_mean([pattern.strip(_WILDCARDS)], gym.registry)
        raise ValueError(f"no id of Gymnasium's registry matches {pattern!r}{hint}")
    prefix = f"{module}:" if module else ""
    return [prefix + id for id in found]


def env_fn_of(task: Task, draws: bool = False) -> EnvFn:
    """The function that makes a task's env.

    Args:
        task: The task.
        draws: Whether it is to have the render mode ``rgb_array``, if it is made by its id.

    Raises:
        ValueError: There is no such file, module or function.
        gymnasium.error.Error: There is no such id.
        TypeError: It is none of these.
    """
    source, kwargs = task.env, dict(task.kwargs)
    if isinstance(source, str) and _names_function(source):
        return find_env(source, kwargs)[0]
    if isinstance(source, (str, EnvSpec)):
        spec = found_spec(source) if isinstance(source, str) else source
        drawing = {"render_mode": "rgb_array"} if draws else {}
        return partial(gym.make, spec, **{**drawing, **kwargs})
    if not callable(source):
        raise TypeError(
            f"task {task.name!r}: an env is an id, a spec, 'path/file.py:function' or a function, "
            f"got {source!r}"
        )
    if kwargs:
        raise TypeError(f"task {task.name!r}: kwargs are for ids; give functools.partial")
    return source


def _names_function(name: str) -> bool:
    """Whether a text is "path/file.py:function" or "module:function", and no id."""
    where, _, what = name.rpartition(":")
    if where.endswith(".py") or what.endswith(".py"):
        return True
    if not where:
        return False
    with suppress(ImportError):  # what is wrong with it is said of the id
        return callable(getattr(importlib.import_module(where), what, None))
    return False


def identity_of(task: Task) -> str:
    """A text that says which env a task has, as far as its name and arguments do."""
    source = task.env
    if isinstance(source, EnvSpec):
        source = source.id
    given: list[Any] = [dict(task.kwargs)]
    if not isinstance(source, str):
        inner: Any = source
        while isinstance(inner, partial):
            given += [inner.args, inner.keywords]
            inner = inner.func
        kind = getattr(inner, "__qualname__", None) or type(inner).__qualname__
        source = f"{getattr(inner, '__module__', '')}:{kind}"
    return json.dumps([source, *map(plain, given)], sort_keys=True)


def read_suite(file: Path) -> tuple[dict[str, Task], dict[str, Any]]:
    """The tasks of a TOML file, and the other arguments of ``evaluate`` that it has.

    Files of envs are looked for beside it.

    Raises:
        ImportError: This is Python 3.10, and tomli is not installed.
        ValueError: The file is none, or has something else.
    """
    try:
        toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError as error:
        raise ImportError("Python 3.10 reads TOML by tomli: pip install tomli") from error
    try:
        content = toml.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no TOML: {error}") from error
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

"""Finds the env or the policy that a command line names."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import gymnasium as gym

from shmvec._hints import can_be_called, env_id_hint
from shmvec._processes.host import EnvFn

__all__ = ["find_env", "find_policy"]

_CODE = """{}
import shmvec


def make_env():
    return {}

"""


def find_env(name: str, kwargs: dict[str, Any]) -> tuple[EnvFn, str]:
    """Finds the function that makes the env of this name.

    Args:
        name: An id of Gymnasium's registry, which may name a module to import first
            ("module:Env-v0"), or a function or class: "module:make_env" or "path/file.py:make_env".
        kwargs: Arguments for it.

    Returns:
        A function that makes an env, and code that defines ``make_env``.

    Raises:
        ValueError: There is no such file, module, function or id, or it takes other arguments.
    """
    place, _, target = name.rpartition(":")
    if target.endswith(".py"):
        raise ValueError(f"{name!r} is a file: add a function that makes the env, {name}:make_env")
    arguments = "".join(f", {key}={value!r}" for key, value in kwargs.items())
    if place:
        module = _import_module(place)
        function = getattr(module, target, None)
        if callable(function):
            if not can_be_called(function, **kwargs):
                raise ValueError(
                    f"{target} takes {inspect.signature(function)}: give its arguments by --kwargs"
                )
            imports, callee = f"from {module.__name__} import {target}", target
            if target == "make_env":  # the code defines a function of that name, too
                imports, callee = f"{imports} as make_one", "make_one"
            return (lambda: function(**kwargs)), _CODE.format(imports, f"{callee}({arguments[2:]})")
        if place.endswith(".py"):
            raise ValueError(f"{place} has no function {target!r}")
    try:
        gym.spec(target)
    except gym.error.Error as error:
        raise ValueError(f"{error} {env_id_hint(error)}".strip()) from error
    code = _CODE.format("import gymnasium as gym", f"gym.make({name!r}{arguments})")
    return (lambda: gym.make(name, **kwargs)), code


def find_policy(name: str) -> Any:
    """Finds a policy or a class of policies: "module:function" or "path/file.py:function".

    Raises:
        ValueError: There is no such file, module or function.
    """
    place, _, target = name.rpartition(":")
    if not place:
        raise ValueError(f"{name!r} names no function: module:function or path/file.py:function")
    policy = getattr(_import_module(place), target, None)
    if not callable(policy) and not callable(getattr(policy, "predict", None)):
        raise ValueError(f"{place} has no function {target!r}")
    return policy


def _import_module(place: str) -> ModuleType:
    if not {"", os.getcwd()} & set(sys.path):  # as `python -m` does
        sys.path.insert(0, os.getcwd())
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ImportError as error:
            raise ValueError(f"cannot import {place!r}: {error}") from error
    if not Path(place).is_file():
        raise ValueError(f"there is no file {place}")
    file = Path(place).resolve()
    name, folder = file.stem, file.parent
    while (folder / "__init__.py").is_file():  # the file is part of a package
        name = folder.name if name == "__init__" else f"{folder.name}.{name}"
        folder = folder.parent
    if str(folder) not in sys.path:  # the file may import its neighbours, as a script does
        sys.path.insert(0, str(folder))
    if _is_from(sys.modules.get(name), file):
        return sys.modules[name]  # env and policy are in one file
    try:
        return _import_file(name, file)
    except ImportError as error:
        if "relative import" not in str(error):
            raise
        raise ValueError(
            f"{place} has a relative import, but is in no package: its folder has no __init__.py"
        ) from error


def _is_from(module: ModuleType | None, file: Path) -> bool:
    module_file = getattr(module, "__file__", None)
    return module_file is not None and Path(module_file).resolve() == file


def _import_file(name: str, file: Path) -> ModuleType:
    """Imports a file: one of a package by its name, any other from its path."""
    if (file.parent / "__init__.py").is_file():
        package = name.partition(".")[0]
        if find_spec(name) is None or not _is_from(module := importlib.import_module(name), file):
            raise ValueError(f"{file} cannot be imported: {package!r} is another package")
        return module
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    cloudpickle.register_pickle_by_value(module)  # workers could not import it
    return module

"""Finds the env or the function that a command line names."""

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

from shmvec._hints import of_id, takes
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
        A function that makes one, and code that defines ``make_env``.

    Raises:
        ValueError: There is no such file, module, function or id, or it takes other arguments.
    """
    where, _, what = name.rpartition(":")
    if what.endswith(".py"):
        raise ValueError(f"{name!r} is a file: name what makes the env, {name}:make_env")
    arguments = "".join(f", {key}={value!r}" for key, value in kwargs.items())
    if where:
        module = _module(where)
        function = getattr(module, what, None)
        if callable(function):
            if not takes(function, **kwargs):
                raise ValueError(
                    f"{what} takes {inspect.signature(function)}: give its arguments by --kwargs"
                )
            imports, called = f"from {module.__name__} import {what}", what
            if what == "make_env":  # the code defines a function of that name
                imports, called = f"{imports} as make_one", "make_one"
            return (lambda: function(**kwargs)), _CODE.format(imports, f"{called}({arguments[2:]})")
        if where.endswith(".py"):
            raise ValueError(f"{where} has no function {what!r}")
    try:
        gym.spec(what)
    except gym.error.Error as error:
        raise ValueError(f"{error} {of_id(error)}".strip()) from error
    code = _CODE.format("import gymnasium as gym", f"gym.make({name!r}{arguments})")
    return (lambda: gym.make(name, **kwargs)), code


def find_policy(name: str) -> Any:
    """Finds a policy or a class of policies: "module:function" or "path/file.py:function".

    Raises:
        ValueError: There is no such file, module or function.
    """
    where, _, what = name.rpartition(":")
    if not where:
        raise ValueError(f"{name!r} names no function: module:function or path/file.py:function")
    found = getattr(_module(where), what, None)
    if not callable(found) and not callable(getattr(found, "predict", None)):
        raise ValueError(f"{where} has no function {what!r}")
    return found


def _module(where: str) -> ModuleType:
    if not {"", os.getcwd()} & set(sys.path):  # as `python -m` does
        sys.path.insert(0, os.getcwd())
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ImportError as error:
            raise ValueError(f"cannot import {where!r}: {error}") from error
    if not Path(where).is_file():
        raise ValueError(f"there is no file {where}")
    file = Path(where).resolve()
    name, folder = file.stem, file.parent
    while (folder / "__init__.py").is_file():  # the file is part of a package
        name = folder.name if name == "__init__" else f"{folder.name}.{name}"
        folder = folder.parent
    if str(folder) not in sys.path:  # for what the file imports from beside it, as in a script
        sys.path.insert(0, str(folder))
    if _is_of(sys.modules.get(name), file):
        return sys.modules[name]  # env and policy are in one file
    try:
        return _loaded(name, file)
    except ImportError as error:
        if "relative import" not in str(error):
            raise
        raise ValueError(
            f"{where} has a relative import, and is in no package: no __init__.py is beside it"
        ) from error


def _is_of(module: ModuleType | None, file: Path) -> bool:
    known = getattr(module, "__file__", None)
    return known is not None and Path(known).resolve() == file


def _loaded(name: str, file: Path) -> ModuleType:
    """Imports a file: one of a package by its name, any other from its path."""
    if (file.parent / "__init__.py").is_file():
        package = name.partition(".")[0]
        if find_spec(name) is None or not _is_of(module := importlib.import_module(name), file):
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

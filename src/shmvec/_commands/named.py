"""What a command line names: an env, or a function of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import gymnasium as gym

from shmvec._commands.measuring import EnvFn

__all__ = ["find_env", "find_function"]

_CODE = """{}
import shmvec


def make_env():
    return {}

"""


def find_env(name: str, kwargs: dict[str, Any]) -> tuple[EnvFn, str]:
    """What makes the env that a user has named.

    Args:
        name: An id of Gymnasium's registry, which may name a module to import first
            ("module:Env-v0"), or a function or class: "module:make_env" or "path/file.py:make_env".
        kwargs: Arguments for it.

    Returns:
        A function that makes one, and code that defines ``make_env``.

    Raises:
        ValueError: There is no such file, module, function or id.
    """
    where, _, what = name.rpartition(":")
    arguments = "".join(f", {key}={value!r}" for key, value in kwargs.items())
    if where:
        module = _module(where)
        function = getattr(module, what, None)
        if callable(function):
            imports, made = f"from {module.__name__} import {what}", what
            if what == "make_env":  # which the code defines
                imports, made = f"{imports} as make_one", "make_one"
            return (lambda: function(**kwargs)), _CODE.format(imports, f"{made}({arguments[2:]})")
        if where.endswith(".py"):
            raise ValueError(f"{where} has no function {what!r}")
    try:
        gym.spec(what)
    except gym.error.Error as error:
        raise ValueError(str(error)) from error
    code = _CODE.format("import gymnasium as gym", f"gym.make({name!r}{arguments})")
    return (lambda: gym.make(name, **kwargs)), code


def find_function(name: str) -> Callable[..., Any]:
    """A function or another callable: "module:function" or "path/file.py:function".

    Raises:
        ValueError: There is no such file, module or function.
    """
    where, _, what = name.rpartition(":")
    if not where:
        raise ValueError(f"{name!r} names no function: module:function or path/file.py:function")
    function = getattr(_module(where), what, None)
    if not callable(function):
        raise ValueError(f"{where} has no function {what!r}")
    found: Callable[..., Any] = function
    return found


def _module(where: str) -> ModuleType:
    if not {"", os.getcwd()} & set(sys.path):  # as for a module that Python runs
        sys.path.insert(0, os.getcwd())
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ImportError as error:
            raise ValueError(f"cannot import {where!r}: {error}") from error
    if not Path(where).is_file():
        raise ValueError(f"there is no file {where}")
    name = Path(where).stem
    known = getattr(sys.modules.get(name), "__file__", None)
    if known is not None and Path(known).resolve() == Path(where).resolve():
        return sys.modules[name]  # the env and the policy are in one file
    spec = importlib.util.spec_from_file_location(name, where)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # workers could not import it
    return module

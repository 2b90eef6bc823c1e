"""Imports the modules that workers need once, before the workers are forked.

Workers that are forked after an import share its time and its memory. Only a run of an env function
shows which modules it needs, so the first worker reports them, and the process that forks the
others imports them.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np

from shmvec._pickling import share_classes
from shmvec._processes.libraries import note_libraries

__all__ = [
    "ImportRecorder",
    "preimport",
    "num_threads",
    "prepare_to_fork",
    "reported_modules",
]

# After an import of one of these, a fork causes a warning or does not work.
_UNSAFE_BEFORE_FORK = frozenset({"jax", "jaxlib", "tensorflow"})
_MAIN_MODULES = frozenset({"__main__", "__mp_main__"})
_IMPORTLIB_FILE = "<frozen importlib._bootstrap>"

# The modules that first workers, which were forked from this process, have reported.
reported_modules: list[str] = []

_module_dict = vars(types.ModuleType)["__dict__"].__get__  # bypasses a module's own attributes


class ImportRecorder:
    """A context that records which modules this process imports."""

    def __enter__(self) -> ImportRecorder:
        """Begins to record imports, and notes the state that they may change."""
        self._module_names: dict[str, None] = {}  # in their order, which sys.modules does not keep
        self._path, self._threads = list(sys.path), num_threads()
        self._sets_variables = False
        self._putenv, self._unsetenv = os.putenv, os.unsetenv
        sys.meta_path.insert(0, self)
        # os.environ also calls these functions.
        os.putenv = self._recorded(os.putenv)
        os.unsetenv = self._recorded(os.unsetenv)
        return self

    def __exit__(self, *details: object) -> None:
        """Ends the recording, and restores the functions."""
        sys.meta_path.remove(self)
        os.putenv, os.unsetenv = self._putenv, self._unsetenv

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Records an import, as the first finder that is asked for the module."""
        self._module_names.setdefault(name)

    def _recorded(self, change: Callable[..., None]) -> Callable[..., None]:
        begin = sys._getframe(2)

        def change_and_note(*arguments: Any) -> None:
            # Variables that an import sets are set in every process that imports the module.
            self._sets_variables |= not _is_importing(begin)
            change(*arguments)

        return change_and_note

    def modules(self) -> list[str]:
        """The names of modules that may be imported before other workers are forked.

        There are none if an env function has changed environment variables or ``sys.path``, on
        which imports depend, or if threads were started, which do not exist in a fork.
        """
        if self._sets_variables or sys.path != self._path or num_threads() > self._threads:
            return []
        names = [
            name
            for name in self._module_names
            if name in sys.modules and _is_importable(name, sys.modules[name])
        ]
        packages = {name.partition(".")[0] for name in names}
        return names if packages.isdisjoint(_UNSAFE_BEFORE_FORK) else []


def _is_importing(end: types.FrameType) -> bool:
    """Whether the caller's caller runs within an import that began inside frame ``end``."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame is not end:
        if frame.f_code.co_filename == _IMPORTLIB_FILE:
            return True
        frame = frame.f_back
    return False


def _is_importable(name: str, module: Any) -> bool:
    """Whether the module's spec says that an import of this name makes it."""
    if name in _MAIN_MODULES or not issubclass(type(module), types.ModuleType):
        return False
    return getattr(_module_dict(module).get("__spec__"), "name", None) == name


def num_threads() -> int:
    """The number of this process's threads, including those of libraries."""
    return len(os.listdir("/proc/self/task"))


def prepare_to_fork(preload: Iterable[str] = ()) -> None:
    """Has workers that are forked from this process share modules and classes with it.

    Args:
        preload: Names of modules to import, besides those that were reported.

    Raises:
        ImportError: One of them cannot be imported.
    """
    state, array_state = random.getstate(), np.random.get_state(legacy=False)
    try:
        for name in preload:
            importlib.import_module(name)
        preimport(reported_modules)
    finally:  # modules may seed the global generators
        random.setstate(state)
        np.random.set_state(array_state)
    reported_modules.clear()
    share_classes()
    note_libraries()


def preimport(names: Iterable[str], quiet: bool = True) -> None:
    """Imports modules for processes that will be forked from this one.

    Errors are ignored here. A process that needs the module imports it itself, and reports them.

    Args:
        names: The names of the modules.
        quiet: Whether warnings are discarded, because the first worker has shown them.
    """
    for name in names:
        if name in sys.modules:
            continue
        try:
            with warnings.catch_warnings(record=True) if quiet else nullcontext():
                importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException:  # SystemExit and exceptions of test runners too
            pass

"""Imports the modules that workers need once, before the workers are forked.

Workers that are forked after an import share its time and its memory; a module that each worker
imports by itself costs each of them both. Only a run of an env function shows which modules it
needs: so the first worker reports them, and the process that forks the others imports them.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from shmvec._pickling import share_classes
from shmvec._processes.libraries import fresh_openmp, loaded_openmp

__all__ = ["Imports", "import_ahead", "import_reported", "num_threads", "ready_to_fork", "reported"]

# After an import of one of these, every fork causes a warning, or does not work.
_NEVER_BEFORE_A_FORK = frozenset({"jax", "jaxlib", "tensorflow"})
_NO_MODULES = frozenset({"__main__", "__mp_main__"})
_IMPORTER = "<frozen importlib._bootstrap>"

# The modules that first workers of vector envs, forked from this process, have reported.
reported: list[str] = []

_content_of = vars(types.ModuleType)["__dict__"].__get__  # bypasses the module's attributes


class Imports:
    """Notes which modules this process imports, while it is entered."""

    def __init__(self) -> None:
        """Notes the present state, which imports may change."""
        self._begun: dict[str, None] = {}  # imports, in the order in which they began
        self._path = list(sys.path)
        self._threads = num_threads()
        self._sets_variables = False

    def __enter__(self) -> Imports:
        """Begins to note imports."""
        self._putenv, self._unsetenv = os.putenv, os.unsetenv
        sys.meta_path.insert(0, self)
        # os.environ calls these functions, too.
        os.putenv = self._noting(os.putenv)
        os.unsetenv = self._noting(os.unsetenv)
        return self

    def __exit__(self, *details: object) -> None:
        """Ends noting imports, and restores the functions."""
        sys.meta_path.remove(self)
        os.putenv, os.unsetenv = self._putenv, self._unsetenv

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Notes an import, as the first finder that is asked for the module."""
        self._begun.setdefault(name)

    def _noting(self, change: Callable[..., None]) -> Callable[..., None]:
        begin = sys._getframe(2)

        def noted(*arguments: Any) -> None:
            # A module that sets variables on import sets them in every process that imports it.
            self._sets_variables |= not _is_importing(begin)
            change(*arguments)

        return noted

    def modules(self) -> list[str]:
        """The names of modules that may be imported before other workers are forked.

        There are none if environment variables or ``sys.path`` were changed, since imports depend
        on these, or if threads were started, which no fork survives.
        """
        if self._sets_variables or sys.path != self._path or num_threads() > self._threads:
            return []
        found = [
            name
            for name in self._begun
            if name in sys.modules and _is_importable(name, sys.modules[name])
        ]
        tops = {name.partition(".")[0] for name in found}
        return found if tops.isdisjoint(_NEVER_BEFORE_A_FORK) else []


def _is_importing(end: types.FrameType) -> bool:
    """Whether the caller's caller runs within an import that began inside frame ``end``."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame is not end:
        if frame.f_code.co_filename == _IMPORTER:
            return True
        frame = frame.f_back
    return False


def _is_importable(name: str, module: Any) -> bool:
    """Whether an import of that name makes that module, by its spec."""
    if name in _NO_MODULES or not issubclass(type(module), types.ModuleType):
        return False
    return getattr(_content_of(module).get("__spec__"), "name", None) == name


def num_threads() -> int:
    """The number of threads of this process, those of libraries included."""
    return len(os.listdir("/proc/self/task"))


@contextmanager
def ready_to_fork(preload: Iterable[str] = ()) -> Iterator[None]:
    """A context in which forked workers share modules and classes with this process.

    Args:
        preload: Names of modules to import.

    Raises:
        ImportError: One of them cannot be imported.
    """
    with fresh_openmp():
        with _kept_generators():
            for name in preload:
                importlib.import_module(name)
        share_classes()
        loaded_openmp()
        yield


def import_reported() -> None:
    """Imports the reported modules in this process, for workers that it is about to fork."""
    if reported:
        with _kept_generators():
            import_ahead(reported)
        reported.clear()
        share_classes()
        loaded_openmp()


@contextmanager
def _kept_generators() -> Iterator[None]:
    """Restores the global generators at the end: modules may seed them."""
    state, array_state = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(array_state)


def import_ahead(names: Iterable[str], quiet: bool = True) -> None:
    """Imports modules for processes that will be forked from this one.

    Errors are not reported here: a process that needs a module that cannot be imported imports it
    itself, and reports the error.

    Args:
        names: The names of the modules.
        quiet: Whether warnings are discarded: the first worker has shown them already.
    """
    for name in names:
        if name in sys.modules:
            continue
        try:
            with warnings.catch_warnings(record=True) as caught:
                importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException:  # SystemExit and exceptions of test runners too
            continue
        for each in () if quiet else caught:
            warnings.showwarning(
                each.message, each.category, each.filename, each.lineno, each.file, each.line
            )

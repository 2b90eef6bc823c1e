"""Modules that workers need, imported once before they are forked.

A module that is imported here is shared by all workers that are forked afterwards, its time and its
memory; one that each of them imports costs each of them both. Only a run of an env function tells
which modules it needs: so the first worker reports them, and what forks the others imports them.
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

__all__ = ["Imports", "import_ahead", "import_here", "num_threads", "ready_to_fork"]

# These warn of every fork after their import, or do not survive one.
_NEVER_BEFORE_A_FORK = frozenset({"jax", "jaxlib", "tensorflow"})
_NO_MODULES = frozenset({"__main__", "__mp_main__"})
_IMPORTER = "<frozen importlib._bootstrap>"

_content_of = vars(types.ModuleType)["__dict__"].__get__  # past what the module says about it


class Imports:
    """Notes which modules this process imports, while it is entered."""

    def __init__(self) -> None:
        """Notes what might change meanwhile."""
        self._begun: dict[str, None] = {}  # imports, in the order in which they began
        self._path = list(sys.path)
        self._threads = num_threads()
        self._sets_variables = False

    def __enter__(self) -> Imports:
        """Begins to watch."""
        self._putenv, self._unsetenv = os.putenv, os.unsetenv
        sys.meta_path.insert(0, self)
        # os.environ, too, calls these.
        os.putenv = self._noting(os.putenv)
        os.unsetenv = self._noting(os.unsetenv)
        return self

    def __exit__(self, *details: object) -> None:
        """Ends that."""
        sys.meta_path.remove(self)
        os.putenv, os.unsetenv = self._putenv, self._unsetenv

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Notes an import, as the first that is asked where the module is."""
        self._begun.setdefault(name)

    def _noting(self, change: Callable[..., None]) -> Callable[..., None]:
        begin = sys._getframe(2)

        def noted(*arguments: Any) -> None:
            # What a module sets when it is imported, it sets wherever it is imported.
            self._sets_variables |= not _is_importing(begin)
            change(*arguments)

        return noted

    def modules(self) -> list[str]:
        """The names of modules that may be imported before others are forked.

        None may if environment variables or ``sys.path`` were changed, since imports depend on
        these, or threads were started, which no fork survives.
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
    """Whether the caller's caller runs within an import that was begun within a frame."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame is not end:
        if frame.f_code.co_filename == _IMPORTER:
            return True
        frame = frame.f_back
    return False


def _is_importable(name: str, module: Any) -> bool:
    """Whether an import of that name makes that module, as far as it says."""
    if name in _NO_MODULES or not issubclass(type(module), types.ModuleType):
        return False
    return getattr(_content_of(module).get("__spec__"), "name", None) == name


def num_threads() -> int:
    """The threads of this process, those of libraries included."""
    return len(os.listdir("/proc/self/task"))


@contextmanager
def ready_to_fork(preload: Iterable[str] = ()) -> Iterator[None]:
    """What is forked inside shares modules and classes with this process.

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


def import_here(names: Iterable[str]) -> None:
    """Imports modules in the program for workers that it will fork."""
    with _kept_generators():
        import_ahead(names)
    share_classes()
    loaded_openmp()


@contextmanager
def _kept_generators() -> Iterator[None]:
    """What is drawn from the global generators inside is given back: modules may seed them."""
    state, array_state = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(array_state)


def import_ahead(names: Iterable[str], quiet: bool = True) -> None:
    """Imports modules for processes that will be forked from this one.

    A process that needs one of them imports it again, and reports what goes wrong: so a module that
    cannot be imported leaves no trace here.

    Args:
        names: Of modules.
        quiet: Whether warnings are dropped: a worker that has imported them has shown these.
    """
    for name in names:
        if name in sys.modules:
            continue
        try:
            with warnings.catch_warnings(record=True) as caught:
                importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException:  # SystemExit, and what test runners raise, too
            continue
        for each in () if quiet else caught:
            warnings.showwarning(
                each.message, each.category, each.filename, each.lineno, each.file, each.line
            )

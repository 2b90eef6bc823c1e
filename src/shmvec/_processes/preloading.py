"""What env_fns need of this process before it forks: modules that they will import, and classes.

A module that is imported here once is shared by all workers that are forked afterwards, its time
and its memory; one that each of them imports costs each of them both.
"""

from __future__ import annotations

import dis
import functools
import importlib
import importlib.util
import random
import re
import sys
import sysconfig
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, WrapperSpec

from shmvec._pickling import share_classes
from shmvec._processes.libraries import fresh_openmp, loaded_openmp

__all__ = ["import_ahead", "needed_modules", "ready_to_fork"]


# Env_fns are looked through as far as that costs nothing worth mentioning.
_MOST_OBJECTS = 5000
_MOST_ITEMS = 100  # of a container
_DEEPEST = 12
_LONGEST_ID = 200

# Methods that run when an env is made and used; with what these call, but nothing that renders.
_MADE_BY = ("__new__", "__init__", "__post_init__")
_USED_BY = ("__call__", "reset", "step")
_NO_MODULES = frozenset({"__main__", "__mp_main__", "builtins"})
_VERSIONED = re.compile(r"([A-Za-z_][\w.]*):(?:[\w:-]+/)?[\w:.-]+-v\d+")
_LIBRARIES = (sysconfig.get_path("stdlib"), str(__file__).rpartition("_parent")[0], "<frozen ")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
# These warn of every fork after their import, or do not survive one.
_NEVER_BEFORE_A_FORK = frozenset({"jax", "jaxlib", "tensorflow"})

# What objects say of themselves, past whatever their classes have to say about it.
_dict_of_class = type.__dict__["__dict__"].__get__
_mro_of = type.__dict__["__mro__"].__get__
_module_of = type.__dict__["__module__"].__get__
_namespace_of: Callable[[Any], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__


@contextmanager
def ready_to_fork(env_fns: Sequence[Any], preload: Iterable[str] = ()) -> Iterator[None]:
    """What is forked inside shares modules and classes with this process.

    Modules that start threads when they are imported, or open a device, do so here, which forks do
    not always survive. Nobody can know that of a module before it was imported: for such envs there
    is ``context="forkserver"``. What a module draws from the global generators is given back.

    Args:
        env_fns: What the workers will call; empty if they must set variables before they import.
        preload: Names of further modules.

    Raises:
        ImportError: One of those cannot be imported.
    """
    with fresh_openmp():
        before, arrays_before = random.getstate(), np.random.get_state(legacy=False)
        for name in preload:
            importlib.import_module(name)
        _import_needed(env_fns)
        random.setstate(before)
        np.random.set_state(arrays_before)
        share_classes()
        loaded_openmp()
        yield


def _import_needed(env_fns: Sequence[Any]) -> None:
    tried: set[str] = set()
    for _ in range(3):  # what was imported has registered ids, which say more
        names = [name for name in needed_modules(env_fns) if name not in tried]
        if not names:
            break
        tried.update(names)
        import_ahead(names)


def needed_modules(env_fns: Iterable[Any]) -> list[str]:
    """Names of modules that env_fns will import when they run, as far as can be seen from outside.

    These are: the modules of functions, classes and objects that they consist of or refer to; those
    that their code imports; and, for ids of Gymnasium's registry that they hold, those that the
    specs name. Code of installed libraries is not read: what it may import when, it knows itself.

    Nothing of theirs is called or imported, and nothing large is looked through.

    Args:
        env_fns: Functions that make envs, anything callable; None is nothing.

    Returns:
        Names, those first that were found first. They may be imported or not, and some may not
        even exist; jax and tensorflow are not among them. None at all if the code sets environment
        variables: whatever it imports is meant to see these.
    """
    search = _Search()
    for env_fn in env_fns:
        search.add(env_fn, 0, root=True)
        search.run()
    if search.sets_variables:
        return []
    return [name for name in search.modules if name.partition(".")[0] not in _NEVER_BEFORE_A_FORK]


class _Search:
    """Goes from env_fns to what they refer to, breadth first.

    Attributes:
        modules: What was found: an ordered set.
        sets_variables: Whether code was found that sets environment variables.
    """

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self.sets_variables = False
        self._seen: dict[int, Any] = {}  # held, or another object could get the same id
        self._queue: deque[tuple[Any, int, bool]] = deque()
        self._latest: dict[str, EnvSpec] | None = None

    def add(self, found: Any, depth: int, root: bool = False) -> None:
        """Notes an object to look at; ``root``: its code is read wherever it comes from."""
        if found is None or depth > _DEEPEST or len(self._seen) >= _MOST_OBJECTS:
            return
        if id(found) not in self._seen:
            self._seen[id(found)] = found
            self._queue.append((found, depth, root))

    def run(self) -> None:
        """Looks at everything that was noted, and what that refers to."""
        while self._queue:
            found, depth, root = self._queue.popleft()
            # Not isinstance(): it would ask the object what its class is.
            kind = type(found)
            if kind is str:
                self._text(found, depth)
            elif kind is types.FunctionType:
                self._function(found, depth, root)
            elif kind is types.MethodType:
                self.add(found.__func__, depth, root)
                self.add(found.__self__, depth + 1)
            elif issubclass(kind, functools.partial):
                self.add(_member(functools.partial, "func", found), depth, root)
                self.add(_member(functools.partial, "args", found), depth + 1)
                self.add(_member(functools.partial, "keywords", found), depth + 1)
            elif kind in (tuple, list, set, frozenset, dict):
                self._items(found, depth)
            elif kind is types.CellType:
                with suppress(ValueError):  # it is empty
                    self.add(found.cell_contents, depth)
            elif kind is types.BuiltinFunctionType:
                self._module(found.__module__)
                self.add(found.__self__, depth + 1)
            elif issubclass(kind, types.ModuleType):
                self._module(_namespace_of(found).get("__name__"))
            elif issubclass(kind, type):
                self._class(found, depth, (*_MADE_BY, *_USED_BY))
            elif issubclass(kind, (EnvSpec, WrapperSpec)):
                self._spec(found, depth)
            else:
                self._class(kind, depth, _USED_BY)
                for attribute in _attributes(found):
                    self.add(attribute, depth)

    def _items(self, found: Any, depth: int) -> None:
        """The first items of a container."""
        if type(found) is dict:
            # At once: another thread may change it.
            for key, value in list(islice(found.items(), _MOST_ITEMS)):
                self.add(key, depth + 1)
                self.add(value, depth + 1)
        else:
            for value in list(islice(found, _MOST_ITEMS)):
                self.add(value, depth + 1)

    # ---- modules -----------------------------------------------------------------------------

    def _module(self, name: Any) -> None:
        if type(name) is str and name and name not in _NO_MODULES:
            self.modules.setdefault(name)

    def _imported(self, name: str, names: Any, level: int, namespace: dict[str, Any]) -> None:
        """``import name``, or ``from name import names``."""
        if level:
            package = namespace.get("__package__") or namespace.get("__name__")
            try:
                name = importlib.util.resolve_name("." * level + name, str(package))
            except ImportError:
                return
        self._module(name)
        module = sys.modules.get(name)
        for part in names if type(names) is tuple else ():
            full = f"{name}.{part}"
            known = {} if module is None else _namespace_of(module)
            if full in sys.modules or (
                part != "*"
                and part not in known
                # A module without __path__ is no package, and has no modules in it.
                and (module is None or "__path__" in known)
            ):
                self._module(full)

    # ---- code --------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType, depth: int, root: bool) -> None:
        self._module(function.__module__)
        for part in (function.__closure__, function.__defaults__, function.__kwdefaults__):
            self.add(part, depth)
        own = _is_own(function.__code__.co_filename)
        if own or root:
            self._code(function.__code__, function.__globals__, depth, own)

    def _code(
        self, code: types.CodeType, namespace: dict[str, Any], depth: int, follow: bool
    ) -> None:
        """What code imports and names; ``follow``: also what global names mean."""
        if id(code) in self._seen:
            return
        self._seen[id(code)] = code
        names = set(code.co_names)
        self.sets_variables |= not names.isdisjoint(("putenv", "unsetenv"))
        self.sets_variables |= "environ" in names and not names.isdisjoint(
            ("update", "setdefault", "pop", "clear")
        )
        before: list[Any] = [None, None]  # what the instructions before have loaded
        loaded: Any = None  # by the last instruction: a global, or an attribute of a module
        for instruction in dis.get_instructions(code):
            operation, argument = instruction.opname, instruction.argval
            if operation in ("EXTENDED_ARG", "CACHE", "PUSH_NULL"):
                continue
            if operation == "IMPORT_NAME":
                level, fromlist = before
                self._imported(argument, fromlist, level or 0, namespace)
            elif operation in ("STORE_SUBSCR", "DELETE_SUBSCR"):
                self.sets_variables |= "environ" in names
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                loaded = namespace.get(argument)
            elif operation in ("LOAD_ATTR", "LOAD_METHOD") and _is_module(loaded):
                loaded = _namespace_of(loaded).get(argument)  # or it is made when asked for
            else:
                loaded = None
            if follow:
                self.add(loaded, depth + 1)
            before = [before[1], argument]
        for constant in code.co_consts:
            if type(constant) is types.CodeType:
                self._code(constant, namespace, depth, follow)
            else:
                self.add(constant, depth)

    def _class(self, kind: type, depth: int, names: Sequence[str]) -> None:
        """A class, of whose methods those are read that run when an env is made and used."""
        self._module(_module_of(kind))
        for base in _mro_of(kind):
            if _is_own(_file_of(base)):
                self._module(_module_of(base))
        wanted, done = list(names), set(names)
        while wanted:
            name = wanted.pop()
            for base in _mro_of(kind):
                found = _dict_of_class(base).get(name)
                if type(found) in (classmethod, staticmethod):
                    found = found.__func__
                if type(found) is types.FunctionType and _is_own(found.__code__.co_filename):
                    self.add(found, depth + 1)
                    called = {each for each in found.__code__.co_names if "render" not in each}
                    wanted += called - done
                    done |= called

    # ---- ids and specs -----------------------------------------------------------------------

    def _text(self, text: str, depth: int) -> None:
        """A string, which may be the id of an env."""
        if not text or len(text) > _LONGEST_ID:
            return
        spec = gym.registry.get(text)
        if spec is None and ":" in text:
            match = _VERSIONED.fullmatch(text)
            if match is not None:
                self._module(match[1])
            spec = gym.registry.get(text.partition(":")[2])
        if spec is None:
            spec = self._latest_versions().get(text)
        self.add(spec, depth)

    def _latest_versions(self) -> dict[str, EnvSpec]:
        """Specs by what may stand for their ids: those without a version."""
        if self._latest is None:
            self._latest = {}
            for spec in list(gym.registry.values()):
                name = f"{spec.namespace}/{spec.name}" if spec.namespace else spec.name
                if (self._latest.get(str(name), spec).version or 0) <= (spec.version or 0):
                    self._latest[str(name)] = spec
        return self._latest

    def _spec(self, spec: Any, depth: int) -> None:
        """A spec: where its env, its wrappers and its vector env come from."""
        attributes = vars(spec)
        for name in ("entry_point", "vector_entry_point"):
            value = attributes.get(name)
            if type(value) is str:
                self._module(value.partition(":")[0])
            elif name == "entry_point":
                self.add(value, depth)
        self.add(attributes.get("kwargs"), depth)
        self.add(attributes.get("additional_wrappers"), depth)


def _is_own(filename: str) -> bool:
    """Whether code is neither Python's, an installed library's, nor ours."""
    return not (filename.startswith(_LIBRARIES) or _INSTALLED.search(filename))


def _file_of(kind: type) -> str:
    """The file of a class's module; "" if it has none."""
    name = _module_of(kind)
    module = sys.modules.get(name) if type(name) is str else None
    if not _is_module(module):
        return ""
    return "<frozen builtins>" if name == "builtins" else str(_namespace_of(module).get("__file__"))


def _is_module(found: Any) -> bool:
    return issubclass(type(found), types.ModuleType)


def _member(kind: type, name: str, found: Any) -> Any:
    """An attribute that C code keeps."""
    return kind.__dict__[name].__get__(found)


def _attributes(found: Any) -> Iterator[Any]:
    """What an object holds, without asking its class for it: its dict, and values of slots."""
    for kind in _mro_of(type(found)):
        for name, value in _dict_of_class(kind).items():
            if type(value) is types.MemberDescriptorType or (
                name == "__dict__" and type(value) is types.GetSetDescriptorType
            ):
                with suppress(AttributeError):  # it is not set
                    yield value.__get__(found)


def import_ahead(names: Iterable[str]) -> None:
    """Imports modules for processes that will be forked from this one.

    Whoever needs one of them imports it again, and it is for him to report what goes wrong: a
    module that cannot be imported leaves no trace here. Warnings of the others are shown.

    Args:
        names: Of modules.
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
        for each in caught:
            warnings.showwarning(
                each.message, each.category, each.filename, each.lineno, each.file, each.line
            )

"""Pickles values; a class that cannot be imported is the same class in all processes.

Classes of ``__main__``, of notebooks and inside functions are pickled by value, with an id by which
cloudpickle finds the class in a process that has it. A class gets its id when it is first pickled:
two forked workers would each make one, and the parent would find neither. So ``share_classes``
gives classes their ids before the forks.

An object that comes back then has the parent's own class, unchanged: cloudpickle would set all
attributes of the sender's class on it, such as the worker's counters, and methods with copies of
the module's globals. ``dumps`` has them set only where the class is new.

The ``__main__`` of a fresh interpreter is not the program's. Its functions and classes that are
sent there by value are also put into it by name (``dumps_for_main``), so that an env can pickle
them in the usual way.
"""

from __future__ import annotations

import io
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pickle import loads
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID, _get_or_create_tracker_id

__all__ = [
    "Copies",
    "ExceptionPickler",
    "Pickler",
    "copied_from",
    "dumps",
    "dumps_for_main",
    "loads_in_main",
    "share_classes",
]

_unfilled: weakref.WeakSet[type] = weakref.WeakSet()  # classes that are made, without attributes

# Attributes of a class as the interpreter has them, whatever its metaclass returns.
_module_of = type.__dict__["__module__"].__get__
_qualname_of = type.__dict__["__qualname__"].__get__
_attributes_of = type.__dict__["__dict__"].__get__
_flags_of = type.__dict__["__flags__"].__get__
_content_of = vars(ModuleType)["__dict__"].__get__
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: all classes that Python code makes have it
_NOT_SENT = ("obj", "__suppress_context__")  # an AttributeError's obj may be the env

# What an exception has, whatever its class makes of it.
_args = vars(BaseException)["args"]
_dict_of = vars(BaseException)["__dict__"].__get__


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler; but a class that the receiver has is not changed.

    Attributes:
        of_main: Collects, by name, pickled objects of the program's main module, unless None.
    """

    of_main: dict[str, Any] | None = None

    def reducer_override(self, obj: Any) -> Any:
        """Reduces an object that cannot be pickled in the usual way."""
        if self.of_main is not None:
            self._note(obj, self.of_main)
        if type(obj) is CodeType:
            make, arguments = self.dispatch_table[CodeType](obj)
            return _code_of_file, (obj.co_filename, make, arguments)
        reduced = super().reducer_override(obj)
        if issubclass(type(obj), type) and type(reduced) is tuple and len(reduced) == 6:
            make, arguments, state, _, _, fill = reduced
            return _found_or_made, (make, arguments), (fill, state), None, None, _fill_if_made
        return reduced

    def _note(self, obj: Any, of_main: dict[str, Any]) -> None:
        if type(obj) is FunctionType:
            name = obj.__qualname__
        elif issubclass(type(obj), type):
            name = _qualname_of(obj)
        else:
            return
        if _content_of(sys.modules["__main__"]).get(name) is obj:
            of_main[name] = obj


class ExceptionPickler(Pickler):
    """Takes exceptions by what they hold: arguments, dict, slots and members in C.

    No constructor is called: it may need other arguments than ``args``, or act once more.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Reduces an exception; all other objects as ``Pickler`` does."""
        if issubclass(type(obj), BaseException):
            kind, args = type(obj), _args.__get__(obj)
            with suppress(Exception):  # a class in C makes its objects in another way
                _empty(kind, args)
                state = args, _dict_of(obj), dict(_members(obj))
                return _empty, (kind, args), state, None, None, _fill
        return super().reducer_override(obj)


def _empty(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An exception for which no code of its class has run."""
    base: Any = kind
    while _flags_of(base) & _HEAP_TYPE:
        base = base.__base__
    made: BaseException = base.__new__(kind, *args)
    return made


def _fill(error: BaseException, state: tuple[tuple[Any, ...], dict[str, Any], Any]) -> None:
    args, attributes, members = state
    _args.__set__(error, args)
    _dict_of(error).update(attributes)
    held = dict(_members(error))
    for name, value in members.items():
        if held.get(name, held) is not value:  # OSError shows a member that was set to None
            with suppress(AttributeError, TypeError):  # some cannot be set, and are right
                BaseException.__setattr__(error, name, value)


def _members(error: BaseException) -> Iterator[tuple[str, Any]]:
    """What an exception has beside its arguments and its dict: members in C, and slots."""
    for kind in type(error).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, MemberDescriptorType) and name not in _NOT_SENT:
                with suppress(AttributeError):  # a slot without a value
                    yield name, member.__get__(error)


def dumps(
    value: Any,
    protocol: int | None = None,
    buffer_callback: Callable[[Any], object] | None = None,
    *,
    kind: type[Pickler] = Pickler,
    of_main: dict[str, Any] | None = None,
) -> bytes:
    """Pickles a value; ``pickle.loads`` reads it.

    Args:
        value: Anything that cloudpickle takes.
        protocol: The pickle protocol.
        buffer_callback: As for ``pickle.dumps``.
        kind: The class of the pickler.
        of_main: As for ``Pickler``.

    Returns:
        The pickle.
    """
    with io.BytesIO() as file:
        pickler = kind(file, protocol=protocol, buffer_callback=buffer_callback)
        pickler.of_main = of_main
        pickler.dump(value)
        return file.getvalue()


class Copies:
    """A value of which each env gets a copy of its own, by which it changes no other env's.

    Attributes:
        empty: Whether the value is an empty dict.
    """

    __slots__ = ("_pickled", "empty")

    def __init__(self, value: Any) -> None:
        """Pickles the value; raises what that raises."""
        self._pickled = dumps(value)
        self.empty = type(value) is dict and not value

    def take(self) -> Any:
        """A new copy."""
        return loads(self._pickled)


EMPTY = Copies({})


def copied_from(value: Any) -> Any:
    """A new copy, if this is Copies; else the value itself."""
    return value.take() if type(value) is Copies else value


def dumps_for_main(value: Any, kind: type[Pickler] = Pickler) -> bytes:
    """Pickles a value for :func:`loads_in_main`; the arguments are those of :func:`dumps`."""
    of_main: dict[str, Any] = {}
    # After the value, so that the dict is complete, and its objects refer to the value's.
    return dumps((value, of_main), kind=kind, of_main=of_main)


def loads_in_main(packed: bytes) -> Any:
    """Unpickles a value of ``dumps_for_main``, in a process with another main module."""
    value, of_main = loads(packed)
    namespace = vars(sys.modules["__main__"])
    for name, found in of_main.items():
        namespace.setdefault(name, found)  # earlier classes refer to the one that is there
    return value


def _code_of_file(filename: str, make: Callable[..., CodeType], arguments: Any) -> CodeType:
    """Code with the name of its file, which cloudpickle leaves out and tracebacks show."""
    return make(*arguments).replace(co_filename=filename)


def _found_or_made(make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """Finds the class of this id in this process, or makes an empty one."""
    found: type | None = _DYNAMIC_CLASS_TRACKER_BY_ID.get(arguments[-2])
    if found is None:
        found = make(*arguments)
        _unfilled.add(found)
    return found


def _fill_if_made(kind: type, content: tuple[Callable[[type, Any], object], Any]) -> None:
    fill, state = content
    if kind in _unfilled:
        fill(kind, state)
        _unfilled.discard(kind)


def share_classes() -> None:
    """Gives each class that cannot be imported its id, for processes that are forked later.

    All classes are examined, since an env may put any of them into its infos; that takes some
    30 ms with torch loaded. None of their code is called.
    """
    by_value: set[str] = cloudpickle.list_registry_pickle_by_value()
    for kind in _classes():
        with suppress(Exception):  # its metaclass may refuse to hash it
            if _goes_by_value(kind, by_value):
                _get_or_create_tracker_id(kind)


def _goes_by_value(kind: type, by_value: set[str]) -> bool:
    """Whether cloudpickle pickles a class by value: its module lacks it, or is registered so."""
    if not _flags_of(kind) & _HEAP_TYPE:
        return False
    try:
        module = _module_of(kind)
    except AttributeError:  # what made it has no __name__: exec(source, {})
        return True
    if type(module) is not str:
        return False
    if module == "__main__" or (
        by_value and any(f"{module}.".startswith(f"{each}.") for each in by_value)
    ):
        return True
    home = sys.modules.get(module)
    if not isinstance(home, ModuleType):
        return False
    namespace: Mapping[str, Any] = _content_of(home)
    *outer, name = _qualname_of(kind).split(".")
    for each in outer:
        found = namespace.get(each)
        if not issubclass(type(found), type):
            return True
        namespace = _attributes_of(found)
    return namespace.get(name) is not kind


def _classes() -> Iterator[type]:
    """Every class of this process."""
    subclasses: Callable[[type], list[type]] = type.__subclasses__
    seen = {id(object)}
    found: list[type] = [object]
    while found:
        kind = found.pop()
        yield kind
        for each in subclasses(kind):
            if id(each) not in seen:
                seen.add(id(each))
                found.append(each)

"""Pickles values; a class that cannot be imported is the same class in all processes.

Classes of ``__main__``, of notebooks and inside functions are pickled by value, with an id by which
cloudpickle finds the class in a process that has it. A class gets its id when it is first pickled:
two forked workers would each make one, and the parent would find neither. So ``share_classes``
gives classes their ids before the forks.

An object that comes back then has the parent's own class, unchanged: cloudpickle would set all
attributes of the sender's class on it, such as the worker's counters, and methods with copies of
the module's globals. ``dumps`` makes the receiver set them only if the class is new there.

The ``__main__`` of a fresh interpreter is not the program's. The program's functions and classes
that are sent there by value are also put into it by name (``dumps_for_main``), so that an env can
pickle them in the usual way.
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
    "CopySource",
    "ExceptionPickler",
    "Pickler",
    "new_copy",
    "dumps",
    "dumps_for_main",
    "loads_in_main",
    "share_classes",
]

_empty_classes: weakref.WeakSet[type] = weakref.WeakSet()  # their attributes are not yet set

# They read attributes of a class as the interpreter has them, whatever its metaclass returns.
_module_of = type.__dict__["__module__"].__get__
_qualname_of = type.__dict__["__qualname__"].__get__
_attributes_of = type.__dict__["__dict__"].__get__
_flags_of = type.__dict__["__flags__"].__get__
_namespace_of = vars(ModuleType)["__dict__"].__get__
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: all classes that Python code makes have it
_SKIPPED_MEMBERS = ("obj", "__suppress_context__")  # an AttributeError's obj may be the env

# They read what an exception has, whatever properties its class defines.
_args_member = vars(BaseException)["args"]
_dict_of = vars(BaseException)["__dict__"].__get__


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler; but a class that the receiver has is not changed.

    Attributes:
        main_objects: If not None, it collects pickled objects of the program's main module, by
            name.
    """

    main_objects: dict[str, Any] | None = None

    def reducer_override(self, obj: Any) -> Any:
        """Reduces an object that cannot be pickled in the usual way."""
        if self.main_objects is not None:
            self._collect(obj, self.main_objects)
        if type(obj) is CodeType:
            make, arguments = self.dispatch_table[CodeType](obj)
            return _code_with_filename, (obj.co_filename, make, arguments)
        reduction = super().reducer_override(obj)
        if issubclass(type(obj), type) and type(reduction) is tuple and len(reduction) == 6:
            make, arguments, state, _, _, fill = reduction
            return _find_or_make_class, (make, arguments), (fill, state), None, None, _fill_if_new
        return reduction

    def _collect(self, obj: Any, main_objects: dict[str, Any]) -> None:
        if type(obj) is FunctionType:
            name = obj.__qualname__
        elif issubclass(type(obj), type):
            name = _qualname_of(obj)
        else:
            return
        if _namespace_of(sys.modules["__main__"]).get(name) is obj:
            main_objects[name] = obj


class ExceptionPickler(Pickler):
    """Pickles exceptions by their content: arguments, dict, slots and members in C.

    No constructor is called, because it may need other arguments than ``args``, or have effects.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Reduces an exception; all other objects as ``Pickler`` does."""
        if issubclass(type(obj), BaseException):
            kind, args = type(obj), _args_member.__get__(obj)
            with suppress(Exception):  # a class in C makes its objects in another way
                _make_empty(kind, args)
                state = args, _dict_of(obj), dict(_members(obj))
                return _make_empty, (kind, args), state, None, None, _fill
        return super().reducer_override(obj)


def _make_empty(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Makes an exception without running code of its class."""
    base: Any = kind
    while _flags_of(base) & _HEAP_TYPE:
        base = base.__base__
    error: BaseException = base.__new__(kind, *args)
    return error


def _fill(error: BaseException, state: tuple[tuple[Any, ...], dict[str, Any], Any]) -> None:
    args, attributes, members = state
    _args_member.__set__(error, args)
    _dict_of(error).update(attributes)
    current = dict(_members(error))
    for name, value in members.items():
        if current.get(name, current) is not value:  # OSError prints a member that was set to None
            with suppress(AttributeError, TypeError):  # some cannot be set, and are right already
                BaseException.__setattr__(error, name, value)


def _members(error: BaseException) -> Iterator[tuple[str, Any]]:
    """What an exception has besides its arguments and its dict: members in C, and slots."""
    for kind in type(error).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, MemberDescriptorType) and name not in _SKIPPED_MEMBERS:
                with suppress(AttributeError):  # a slot without a value
                    yield name, member.__get__(error)


def dumps(
    value: Any,
    protocol: int | None = None,
    buffer_callback: Callable[[Any], object] | None = None,
    *,
    kind: type[Pickler] = Pickler,
    main_objects: dict[str, Any] | None = None,
) -> bytes:
    """Pickles a value; ``pickle.loads`` reads it.

    Args:
        value: Anything that cloudpickle takes.
        protocol: The pickle protocol.
        buffer_callback: As for ``pickle.dumps``.
        kind: The class of the pickler.
        main_objects: As for ``Pickler``.

    Returns:
        The pickle.
    """
    with io.BytesIO() as file:
        pickler = kind(file, protocol=protocol, buffer_callback=buffer_callback)
        pickler.main_objects = main_objects
        pickler.dump(value)
        return file.getvalue()


class CopySource:
    """A value of which each env gets a copy, so that no env can change another env's."""

    __slots__ = ("_pickled",)

    def __init__(self, value: Any) -> None:
        """Pickles the value; raises what that raises."""
        self._pickled = dumps(value)

    def take(self) -> Any:
        """A new copy."""
        return loads(self._pickled)


EMPTY_DICT = CopySource({})


def new_copy(value: Any) -> Any:
    """Returns a new copy, if this is a CopySource; else the value itself."""
    return value.take() if type(value) is CopySource else value


def dumps_for_main(value: Any, kind: type[Pickler] = Pickler) -> bytes:
    """Pickles a value for :func:`loads_in_main`; the arguments are those of :func:`dumps`."""
    main_objects: dict[str, Any] = {}
    # The dict comes after the value: by then it is complete, and refers to the value's objects.
    return dumps((value, main_objects), kind=kind, main_objects=main_objects)


def loads_in_main(packed: bytes) -> Any:
    """Unpickles a value of ``dumps_for_main``, in a process with another main module."""
    value, main_objects = loads(packed)
    namespace = vars(sys.modules["__main__"])
    for name, item in main_objects.items():
        namespace.setdefault(name, item)  # an existing one stays: earlier classes refer to it
    return value


def _code_with_filename(filename: str, make: Callable[..., CodeType], arguments: Any) -> CodeType:
    """Sets the name of the code's file, which cloudpickle leaves out and tracebacks show."""
    return make(*arguments).replace(co_filename=filename)


def _find_or_make_class(make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """Finds the class of this id in this process, or makes an empty one."""
    kind: type | None = _DYNAMIC_CLASS_TRACKER_BY_ID.get(arguments[-2])
    if kind is None:
        kind = make(*arguments)
        _empty_classes.add(kind)
    return kind


def _fill_if_new(kind: type, content: tuple[Callable[[type, Any], object], Any]) -> None:
    fill, state = content
    if kind in _empty_classes:
        fill(kind, state)
        _empty_classes.discard(kind)


def share_classes() -> None:
    """Gives each class that cannot be imported its id, for processes that are forked later.

    It examines all classes, since an env may put any of them into its infos. That takes some 30 ms
    with torch loaded, and calls none of their code.
    """
    by_value: set[str] = cloudpickle.list_registry_pickle_by_value()
    for kind in _classes():
        with suppress(Exception):  # its metaclass may refuse to hash it
            if _is_pickled_by_value(kind, by_value):
                _get_or_create_tracker_id(kind)


def _is_pickled_by_value(kind: type, by_value: set[str]) -> bool:
    """Whether cloudpickle pickles a class by value: its module lacks it, or is registered."""
    if not _flags_of(kind) & _HEAP_TYPE:
        return False
    try:
        module = _module_of(kind)
    except AttributeError:  # its code ran without a __name__, as by exec(source, {})
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
    namespace: Mapping[str, Any] = _namespace_of(home)
    *outer, name = _qualname_of(kind).split(".")
    for each in outer:
        owner = namespace.get(each)
        if not issubclass(type(owner), type):
            return True
        namespace = _attributes_of(owner)
    return namespace.get(name) is not kind


def _classes() -> Iterator[type]:
    subclasses: Callable[[type], list[type]] = type.__subclasses__
    seen = {id(object)}
    pending: list[type] = [object]
    while pending:
        kind = pending.pop()
        yield kind
        for each in subclasses(kind):
            if id(each) not in seen:
                seen.add(id(each))
                pending.append(each)

"""Wrappers, compiled: an env's chain of wrappers is looked at, and known ones are stepped in C.

``compiled(env)`` returns what steps the env: an object with its ``step``, or the env itself where
nothing is compiled. All else (``reset``, attributes, ``render``) is asked of the env, and its
wrappers keep their state. ``originals.py`` has the code that is recognised, ``chain.pyx`` says how
the rest works, and each other compiled file has the twins of a family of wrappers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import getattr_static
from types import CodeType, FunctionType
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec._wrappers import originals
from shmvec._wrappers.chain import Chain, Python, Twin, has_version

__all__ = ["compiled", "notes_of"]

# Twins, by the compiled file that has them.
_FILES = {
    "checks": "PassiveEnvChecker PassiveEnvChecker13 OrderEnforcing TimeLimit",
    "normalising": "NormalizeObservation NormalizeReward",
    "statistics": "RecordEpisodeStatistics",
    "transforms": "TransformObservation FlattenObservation TransformAction ClipAction "
    "TransformReward ClipReward",
}
_TWINS = {name: file for file, names in _FILES.items() for name in names.split()}
# A frame of Python costs as little as a twin does: only with one of these a chain is compiled.
_PAYING = {
    "FlattenObservation",
    "ClipAction",
    "ClipReward",
    "NormalizeObservation",
    "NormalizeReward",
}
_METHODS = ("observation", "action", "reward")  # which a step calls on its wrapper
_LOOKED_AT = ("step", *_METHODS, "action_space", "observation_space")

Note = tuple[str, str]  # name of a wrapper's class, why it is not compiled; "": it is


def compiled(env: Any, always: bool = False) -> Any:
    """What steps an env: an object with the same ``step``; the env itself if nothing is compiled.

    Args:
        env: The env with its wrappers. It is left as it is.
        always: Whether it is compiled even where Python is as fast.
    """
    chain = Chain(env, _built)
    return chain if always or _pays(chain) else env


def _pays(chain: Chain) -> bool:
    return any(name in _PAYING and not why for name, why in chain.notes)


def notes_of(stepper: Any) -> list[Note]:
    """What is compiled of an env's wrappers, and why others are not; the outermost comes first.

    Args:
        stepper: What ``compiled`` has returned.
    """
    if isinstance(stepper, Chain):
        return list(stepper.notes)
    return [(name, why or "Python is as fast") for name, why in Chain(stepper, _built).notes]


def _built(env: Any, chain: Chain) -> tuple[Any, list[Note]]:
    """What steps an env in a chain, and notes about its wrappers."""
    try:
        return _looked_through(env, chain)
    except Exception as error:  # of an env that answers oddly when it is looked at
        return Python(env, chain), [(type(env).__name__, f"looking at it raises {error!r}")]


def _looked_through(env: Any, chain: Chain) -> tuple[Any, list[Note]]:
    below = _below(env)
    if below is None:
        return Python(env, chain), []
    inner, notes = _built(below, chain)
    twin, why = _twin_of(env)
    notes = [(type(env).__name__, why), *notes]
    if twin is not None:
        return twin(env, chain, below, inner, _method(type(env))), notes
    if isinstance(inner, Python):
        return Python(env, chain, *inner.beneath), notes
    # What it wraps gets a chain of its own, to which this wrapper's `self.env.step` leads.
    beneath = Chain(below, _built)
    if _pays(beneath):
        return Python(env, chain, below, beneath), notes
    return Python(env, chain), notes


def _below(env: Any) -> Any:
    """The env that a wrapper wraps; None: it is no wrapper, as far as can be seen."""
    own = getattr(env, "__dict__", None)
    below = own.get("env") if type(own) is dict else None
    return below if isinstance(below, gym.Env) else None


def _method(kind: type) -> str | None:
    return next((name for name in _METHODS if hasattr(kind, name)), None)


def _twin_of(wrapper: Any) -> tuple[type[Twin] | None, str]:
    """The twin that can take a wrapper's place; None, and the reason why there is none."""
    kind = type(wrapper)
    name = kind.__name__
    if name not in _TWINS or getattr(gym.wrappers, name, None) is not kind:
        return None, "it has no twin"
    for method in ("step", *_METHODS):
        if method in vars(wrapper):
            return None, f"its {method} has been replaced"
    versions = [each for each in _TWINS if each.rstrip("0123456789") == name]
    found = [_difference(kind, each) for each in versions]
    if all(found):
        return None, found[0]
    name = versions[found.index("")]
    for attribute in vars(wrapper):
        if getattr_static(kind, attribute, None) is not None:
            return None, f"its class has an attribute {attribute}"
    made_func = getattr(getattr(originals, name), "made_func", None)
    if made_func is not None and not _is_made_by(made_func, getattr(wrapper, "func", None)):
        name = name.replace("Flatten", "Transform").replace("Clip", "Transform")
    hasattr(wrapper, "step")  # so that its class has a version
    if not has_version(kind):
        return None, "changes of its class would not be noticed"
    twin: type[Twin] = getattr(import_module(f"{__name__}.{_TWINS[name]}"), name)
    return twin, ""


def _difference(kind: type, name: str) -> str:
    """How a class of wrappers differs from the one that a twin is for; empty if it does not."""
    original = getattr(originals, name)
    for method in _LOOKED_AT:
        expected = list(_definitions(original, method))
        found = list(_definitions(kind, method))[: len(expected)]
        if len(found) != len(expected) or not all(map(_same, found, expected)):
            return f"its {method} is not the one that its twin is for"
    for method in ("__getattribute__", "__setattr__"):
        if getattr_static(kind, method) is not getattr_static(object, method):
            return f"it has a {method}"
    if getattr_static(kind, "__getattr__", None) is not None:
        return "it has a __getattr__"
    if name in originals.HELPERS and not _same(*_helper(name)):
        return "a function that it calls is not the one that its twin is for"
    if name.startswith("Normalize"):
        from gymnasium.wrappers.utils import RunningMeanStd

        for method in ("update", "update_from_moments"):
            mine = getattr_static(originals.RunningMeanStd, method)
            if not _same(getattr_static(RunningMeanStd, method), mine):
                return f"RunningMeanStd.{method} is not the one that its twin is for"
        hasattr(RunningMeanStd, "update")  # so that it has a version
        if not has_version(RunningMeanStd):
            return "changes of RunningMeanStd would not be noticed"
    return ""


def _helper(name: str) -> tuple[Any, Any]:
    """A function that a wrapper of this class calls, and its original."""
    helper: tuple[Callable[[], Any], Any] = originals.HELPERS[name]
    called, original = helper
    return called(), original


def _definitions(kind: type, name: str) -> Iterator[Any]:
    """The definitions of a name by a class and its bases, the first one found being first."""
    for each in kind.__mro__:
        if name in vars(each):
            yield vars(each)[name]


def _same(found: Any, expected: Any) -> bool:
    """Whether two functions, or the getters of two properties, do the same."""
    if isinstance(expected, property):
        return type(found) is property and _same(found.fget, expected.fget)
    return (
        type(found) is FunctionType
        and _text(found.__code__) == _text(expected.__code__)
        and found.__defaults__ == expected.__defaults__
        and found.__kwdefaults__ == expected.__kwdefaults__
        and found.__globals__.get("np", np) is np
    )


def _is_made_by(maker: Callable[..., Any], func: Any) -> bool:
    """Whether a function is the one that an original makes, whatever it holds."""
    made = next(each for each in maker.__code__.co_consts if isinstance(each, CodeType))
    return (
        type(func) is FunctionType
        and _text(func.__code__) == _text(made)
        and not func.__defaults__
        and not func.__kwdefaults__
    )


@functools.cache
def _text(code: CodeType) -> tuple[Any, ...]:
    """What a code object does: all but its names for people, its lines and its docstring."""
    constants = code.co_consts
    if constants and isinstance(constants[0], str):
        constants = constants[1:]  # a docstring
    return (
        code.co_code,
        tuple(_text(each) if isinstance(each, CodeType) else repr(each) for each in constants),
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_flags,
        code.co_argcount,
        code.co_kwonlyargcount,
        code.co_posonlyargcount,
        getattr(code, "co_exceptiontable", b""),
    )

"""Options that a program does not give: those of ``install``, and of environment variables."""

from __future__ import annotations

import inspect
import os
from ast import literal_eval
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec

from shmvec._parent.arguments import AtMost
from shmvec.faults import FaultPolicy

__all__ = ["installed", "of_workers", "set_installed", "with_defaults"]

P = ParamSpec("P")


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("it must be 0 or 1")
    return text == "1"


def _policy(text: str) -> FaultPolicy:
    """Of ``on_crash=restart,max_restarts=3``."""
    fields: dict[str, Any] = {}
    for field in text.split(","):
        name, _, value = field.partition("=")
        fields[name.strip()] = literal_eval(value) if value[:1].isdigit() else value.strip()
    return FaultPolicy(**fields)


# How workers run, which is nobody's concern but theirs: for all that stands on an Exchange.
_OF_WORKERS: dict[str, Callable[[str], Any]] = {
    "num_workers": AtMost,
    "threads_per_worker": int,
    "wait_policy": str,
    "pin_workers": _flag,
}
_OF_VECTOR_ENVS: dict[str, Callable[[str], Any]] = {
    **_OF_WORKERS,
    "context": str,
    "preload": lambda text: [name.strip() for name in text.split(",")],
    "shared_memory": _flag,
    "step_timeout": float,
    "reset_timeout": float,
    "faults": _policy,
    "recycle_after": int,
}

_installed: dict[str, Any] = {}


def installed() -> dict[str, Any]:
    """The options of ``install``."""
    return dict(_installed)


def set_installed(options: Mapping[str, Any]) -> None:
    """Replaces them."""
    checked = dict(options)
    if checked.get("num_workers") is not None:
        checked["num_workers"] = AtMost(checked["num_workers"])
    _installed.clear()
    _installed.update(checked)


def with_defaults(init: Callable[P, None]) -> Callable[P, None]:
    """An ``__init__`` whose options, if they are left out or None, have these defaults."""
    signature = inspect.signature(init)

    @wraps(init)
    def filled(*args: P.args, **kwargs: P.kwargs) -> None:
        bound = signature.bind_partial(*args, **kwargs)
        given = {name for name, value in bound.arguments.items() if value is not None}
        # What the program gives must not be made an error by what it does not.
        if bound.arguments.get("num_workers") == 0:
            given |= {"step_timeout", "reset_timeout", "faults", "worker_environ", "worker_init"}
        elif "faults" in given:
            given |= {"step_timeout", "reset_timeout"}
        defaults = {**_from_environment(_OF_VECTOR_ENVS), **_installed}
        bound.arguments.update({name: defaults[name] for name in defaults.keys() - given})
        init(*bound.args, **bound.kwargs)

    return filled


def of_workers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an Exchange; how its workers run, where it is not given, as the environment says.

    What ``install`` says is for vector envs.
    """
    given = {name: value for name, value in options.items() if value is not None}
    return {**options, **_from_environment(_OF_WORKERS), **given}


def _from_environment(options: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    found = {}
    for name, parse in options.items():
        variable = f"SHMVEC_{name.upper()}"
        text = os.environ.get(variable, "").strip()
        if text:
            try:
                found[name] = parse(text)
            except (ValueError, TypeError, SyntaxError) as error:
                raise ValueError(f"{variable}={text!r} in the environment: {error}") from None
    return found

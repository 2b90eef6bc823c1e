"""Whose an exchange is: where it was made, and in which process."""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any

__all__ = ["caller", "own"]

# Those that are open in this process.
_owned: weakref.WeakSet[Any] = weakref.WeakSet()


def own(exchange: Any) -> None:
    """A fork of this process must not touch this exchange's workers."""
    _owned.add(exchange)


def _disown_all() -> None:
    for exchange in list(_owned):
        exchange.disown()
    _owned.clear()


os.register_at_fork(after_in_child=_disown_all)


def caller() -> str:
    """Where the user's code is: file and line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("shmvec", "gymnasium")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

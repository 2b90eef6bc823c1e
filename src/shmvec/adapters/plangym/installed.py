"""plangym itself, where it is installed: its classes by name, and ours among their kind."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__all__ = ["class_for", "count_among"]


def class_for(name: str, domain_name: str | None, state: str | None) -> Any:
    """The class that plangym has for an env; None if it has none, or is not installed."""
    try:
        registry = import_module("plangym.registry")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "plangym":
            raise  # what plangym needs is missing
        return None
    found = registry.get_planenv_class(name, domain_name, state)
    # Which it says of every name that it does not know.
    stray = found.__name__ == "BalloonEnv" and not name.startswith("BalloonLearning")
    return None if stray else found


def count_among(kind: type[Any], *names: str) -> None:
    """Makes a class count as one of plangym's, for ``isinstance``, if these are imported.

    Args:
        kind: The class.
        *names: Of abstract classes, as "module:class".
    """
    for name in names:
        module, _, of_plangym = name.partition(":")
        if module in sys.modules:
            getattr(sys.modules[module], of_plangym).register(kind)

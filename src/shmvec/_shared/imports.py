"""Imports modules ahead of those who need them, who must not notice if that fails."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterable

__all__ = ["import_ahead"]


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

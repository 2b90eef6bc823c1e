"""Processes of this system, as /proc shows them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["identity", "processes"]


def processes() -> Iterator[int]:
    """The ids of those that there are."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def identity(pid: int) -> tuple[str, int] | None:
    """A process's namespace of ids (its container's), and what it is called there.

    None: it has gone, or that is not to be known.
    """
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines():
            if line.startswith("NSpid:"):
                return os.readlink(f"/proc/{pid}/ns/pid"), int(line.split()[-1])
    return None

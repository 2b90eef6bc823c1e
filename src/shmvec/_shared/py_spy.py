"""Stacks by py-spy, where that is installed: it needs nothing of the process it looks at."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["dumped"]

_PATIENCE_S = 2.0
_MAIN = "MainThread"


def dumped(pid: int) -> str:
    """The stacks of a process's threads, its main thread's first, as faulthandler writes them.

    Empty where there is no py-spy, or it says nothing: it has no right to trace, say. The process
    is not paused: it runs on whatever becomes of py-spy, which may read something wrong meanwhile.
    """
    beside = str(Path(sys.executable).parent)  # of a virtual environment that is not activated
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), beside])
    program = shutil.which("py-spy", path=path)
    if program is None:
        return ""
    with suppress(
        OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError, AttributeError
    ):
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            check=True,
        )
        threads = sorted(json.loads(done.stdout), key=lambda each: each["thread_name"] != _MAIN)
        return "\n\n".join(map(_as_faulthandler, threads))
    return ""


def _as_faulthandler(thread: Mapping[str, Any]) -> str:
    frames = [
        f'  File "{frame["filename"]}", line {frame["line"]} in {frame["name"].rpartition(".")[2]}'
        for frame in thread["frames"]
    ]
    return "\n".join([f"Thread 0x{thread['thread_id']:016x} (most recent call first):", *frames])

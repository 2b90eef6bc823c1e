"""Ends the processes that a worker's envs have started, together with the worker (csrc/family.h).

The worker marks itself, and every process that it starts inherits the mark. The parent also knows
the mark, and ends the family of a worker that has ended without doing that itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from multiprocessing import resource_tracker, util
from resource import RUSAGE_CHILDREN, getrusage
from secrets import randbits
from time import monotonic, sleep

from shmvec._core import signal_marked

__all__ = ["end_families", "end_own_family", "new_mark"]

_SIGKILL_TIMEOUT_S = 1.0  # for killed processes to end; one that hangs in the kernel does not
_MAX_PAUSE_S = 0.02
_WAIT_ALL_CHILDREN = 0x40000000  # __WALL: children of every kind. The module os lacks it.
# These are bound here because an env may patch the modules.
_waitid, _getsignal = os.waitid, signal.getsignal


def new_mark() -> int:
    """A new mark, for a worker that is about to be started."""
    return 1 << 62 | randbits(62)


def end_families(marks: Sequence[int], patience_s: float, spared: int = 0) -> None:
    """Ends workers, and the processes that they have started.

    Args:
        marks: The workers' marks.
        patience_s: Seconds they get to obey SIGTERM, before they are killed.
        spared: A process that may live on.
    """
    begin = monotonic()
    number, pause = int(signal.SIGTERM), 0.001
    while signal_marked(marks, number, spared):
        elapsed = monotonic() - begin
        if elapsed > patience_s + _SIGKILL_TIMEOUT_S:
            return  # some process hangs in the kernel
        number = signal.SIGKILL if elapsed > patience_s else 0
        sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE_S)


def end_own_family(mark: int, patience_s: float) -> None:
    """Ends the processes that this worker has started, before the worker ends."""
    if _had_no_children():
        return
    # multiprocessing's pools and the like are ended first, as at exit: after their processes were
    # killed, they would wait for them.
    util._run_finalizers(0)  # type: ignore[attr-defined]
    # The resource tracker is spared, because it removes leftovers once this process has ended.
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    end_families([mark], patience_s, spared=tracker or 0)


def _had_no_children() -> bool:
    """Whether this process has no child, and has never waited for one."""
    if _getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # ended children then leave no trace
        return False
    with contextlib.suppress(ChildProcessError):
        _waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _WAIT_ALL_CHILDREN)
        return False
    return getrusage(RUSAGE_CHILDREN).ru_maxrss == 0

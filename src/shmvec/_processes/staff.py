"""Who steps the envs of an Exchange: this process, or workers of its own, and how these start."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from shmvec._cores import split_evenly
from shmvec._options import Settings
from shmvec._processes.host import EnvFn
from shmvec._processes.inline import InlineWorker
from shmvec._processes.launcher import Launcher
from shmvec._processes.preloading import needed_modules, ready_to_fork
from shmvec._processes.supervisor import Supervisor, Workers

__all__ = ["staff_for"]


def staff_for(
    functions: Sequence[EnvFn], settings: Settings, name: str
) -> tuple[Workers, AbstractContextManager[Any]]:
    """Makes the workers, which are not started.

    Args:
        functions: One for each env.
        settings: How workers are to run.
        name: Of their processes.

    Returns:
        The workers, and what they are to be started in: where they are forked, what their envs need
        is imported before.
    """
    if settings.num_workers == 0:
        return InlineWorker(functions), nullcontext()
    ranges = split_evenly(len(functions), settings.num_workers, settings.pin_workers)
    method = settings.method
    # What is to see a worker's own variables must not be imported before these are set.
    calls = () if any(settings.worker_environ) else (*functions, settings.worker_init)
    launcher = Launcher(
        functions,
        ranges,
        method=method,
        daemon=settings.daemon,
        name=name,
        threads=settings.threads_per_worker,
        pinned=settings.pin_workers,
        preload=settings.preload,
        needed=needed_modules(calls) if method == "forkserver" else (),
        environs=settings.worker_environ,
        init=settings.worker_init,
    )
    forked = method == "fork"
    prepared = ready_to_fork(calls, settings.preload) if forked else nullcontext()
    return Supervisor(launcher, ranges, settings.hang_warning_s), prepared

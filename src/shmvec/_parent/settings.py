"""How the envs of an exchange are run: the options of ``ShmVectorEnv``, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from shmvec._parent.arguments import (
    AutoresetMode,
    WorkerEnviron,
    checked_autoreset_mode,
    checked_context,
    checked_count,
    checked_environs,
    checked_hang_warning,
    checked_limits,
    checked_max_concurrency,
    checked_num_workers,
    checked_observation_mode,
    checked_preload,
    checked_threads,
    checked_wait_policy,
    checked_worker_init,
    given_once,
)
from shmvec._shared.scheduling import usable_cores
from shmvec.faults import FaultPolicy

__all__ = ["Settings"]


@dataclass(kw_only=True)
class Settings:
    """Options of ``ShmVectorEnv``, by their names there, and what follows from them.

    Attributes:
        method: How processes are started, as ``context`` says.
        environs: Each worker's own environment variables.
        limits: Seconds that a step and a reset of one env may take.
        threads: Threads that libraries may start in a worker; 0: as many as they like.
    """

    num_envs: int
    shared_memory: bool = True
    copy: bool = True
    context: InitVar[Any] = None
    daemon: bool = True
    preload: Sequence[str] = ()
    worker_environ: InitVar[WorkerEnviron] = None
    worker_init: Callable[[int], object] | None = None
    observation_mode: Any = "same"
    autoreset_mode: Any = AutoresetMode.NEXT_STEP
    max_concurrency: int | None = None
    num_workers: Any = None
    wait_policy: str = "adaptive"
    threads_per_worker: InitVar[int | None] = None
    pin_workers: bool = False
    step_timeout: InitVar[float | None] = None
    reset_timeout: InitVar[float | None] = None
    faults: Any = None
    recycle_after: int | None = None
    hang_warning_s: float | None = 30.0
    method: str = field(init=False)
    environs: list[dict[str, str]] = field(init=False)
    limits: tuple[float | None, float | None] = field(init=False)
    threads: int = field(init=False)

    def __post_init__(
        self,
        context: Any,
        worker_environ: WorkerEnviron,
        threads_per_worker: int | None,
        step_timeout: float | None,
        reset_timeout: float | None,
    ) -> None:
        """Checks the values.

        Raises:
            ValueError: One of them is out of range, or no such word.
            TypeError: One of them is of another kind.
        """
        self.method = checked_context(context)
        self.autoreset_mode = checked_autoreset_mode(self.autoreset_mode)
        checked_observation_mode(self.observation_mode)
        checked_max_concurrency(self.max_concurrency)
        checked_wait_policy(self.wait_policy)
        cores = usable_cores()
        self.num_workers = checked_num_workers(
            self.num_workers, self.num_envs, cores, self.max_concurrency
        )
        self.environs = checked_environs(worker_environ, self.num_workers)
        self.preload = checked_preload(self.preload)
        checked_worker_init(self.worker_init, self.num_workers)
        if self.faults is None:
            self.faults = FaultPolicy()
        if not isinstance(self.faults, FaultPolicy):
            raise TypeError(f"faults must be a shmvec.FaultPolicy, got {self.faults!r}")
        if self.recycle_after is not None:
            self.recycle_after = checked_count("recycle_after", self.recycle_after)
        self.hang_warning_s = checked_hang_warning(self.hang_warning_s)
        if self.num_workers == 0:
            self.hang_warning_s = None  # nobody is left to say so
        self.limits = checked_limits(
            given_once("step_timeout", step_timeout, self.faults.step_timeout),
            given_once("reset_timeout", reset_timeout, self.faults.reset_timeout),
            self.num_workers,
        )
        self.threads = checked_threads(threads_per_worker, self.num_workers, cores)

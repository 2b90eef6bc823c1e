"""What a vector env has done so far, and where its processes spent their time."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["FaultCounts", "Stats", "Waits", "WorkerStats"]


@dataclass(frozen=True)
class Waits:
    """How a process has waited for the other side; csrc/wait.h explains the phases.

    Attributes:
        requests: Requests: sent by the parent, answered by a worker.
        waits: Times that it had to wait at all.
        pause_s: Seconds spun on the core's pause instruction.
        yield_s: Seconds spun on ``sched_yield``.
        park_s: Seconds asleep.
        parks: Times that it went to sleep; a long sleep is taken in slices of 50 ms.
        late_wakes: Sleeps that ended more than 100 µs after they should have.
        wakes: Times that it woke somebody else, which takes a system call.
    """

    requests: int
    waits: int
    pause_s: float
    yield_s: float
    park_s: float
    parks: int
    late_wakes: int
    wakes: int


@dataclass(frozen=True)
class WorkerStats(Waits):
    """What a worker has done.

    Attributes:
        steps: Steps of its envs.
        step_s: Seconds in ``env.step``, and taking its results.
        resets: Resets of its envs.
        reset_s: Seconds in ``env.reset``.
    """

    steps: int
    step_s: float
    resets: int
    reset_s: float


@dataclass(frozen=True)
class FaultCounts:
    """What went wrong, and was dealt with as the ``FaultPolicy`` says.

    Attributes:
        crashes: Workers that died.
        errors: Exceptions in envs.
        timeouts: Steps and resets that took too long.
        restarts: Workers started in place of others, by ``restart`` and ``recycle_after`` as well.
        resets: Envs that were reset for it.
    """

    crashes: int
    errors: int
    timeouts: int
    restarts: int
    resets: int


@dataclass(frozen=True)
class Stats:
    """Counts and times since the vector env was made; subtract two to measure what lies between.

    Attributes:
        parent: The waits of the calling process.
        workers: What each worker has done.
        faults: What went wrong.
    """

    parent: Waits
    workers: tuple[WorkerStats, ...]
    faults: FaultCounts

    @classmethod
    def of(
        cls, parent: dict[str, int], workers: list[dict[str, int]], faults: dict[str, int]
    ) -> Stats:
        """Makes it from the core's counters."""
        return cls(
            Waits(**_named(parent, Waits)),
            tuple(WorkerStats(**_named(worker, WorkerStats)) for worker in workers),
            FaultCounts(**faults),
        )

    def __sub__(self, earlier: Stats) -> Stats:
        """What was done between two calls of ``stats``."""
        return Stats(
            Waits(**_difference(self.parent, earlier.parent)),
            tuple(
                WorkerStats(**_difference(now, then))
                for now, then in zip(self.workers, earlier.workers, strict=True)
            ),
            FaultCounts(**_difference(self.faults, earlier.faults)),
        )


def _named(counters: dict[str, int], kind: Any) -> dict[str, Any]:
    """Those that it has fields for, nanoseconds as seconds."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        in_ns = field.name.removesuffix("_s") + "_ns"
        values[field.name] = 1e-9 * counters[in_ns] if in_ns in counters else counters[field.name]
    return values


def _difference(now: Any, then: Any) -> dict[str, Any]:
    return {
        field.name: getattr(now, field.name) - getattr(then, field.name) for field in fields(now)
    }

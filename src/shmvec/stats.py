"""What a vector env has done so far, and where its processes spent their time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from shmvec import _table
from shmvec._judgement import Verdict, judged

if TYPE_CHECKING:
    from shmvec._core.insight import Insight

__all__ = [
    "Doing",
    "EnvStats",
    "FaultCounts",
    "Process",
    "Stats",
    "Timing",
    "Verdict",
    "Waits",
    "WorkerStats",
]

_FIRST_S = 512e-9  # where the first bucket ends; each further one is twice as wide: csrc/timings.h


@dataclass(frozen=True)
class Timing:
    """How long something has taken, each time: a histogram.

    Attributes:
        count: How often it was done.
        total_s: Seconds in all.
        longest_s: Seconds of the longest. Of a difference of two: known if the longest of all is in
            it; otherwise where the bucket ends in which it lies.
        buckets: How often it took less than 512 ns, less than twice as long, and so on; in the last
            one, 137 s and more.
    """

    count: int
    total_s: float
    longest_s: float
    buckets: tuple[int, ...]

    @classmethod
    def of(cls, words: Sequence[int]) -> Timing:
        """Makes it from the core's: the sum and the longest in ns, and the buckets."""
        total_ns, longest_ns, *buckets = words
        return cls(sum(buckets), 1e-9 * total_ns, 1e-9 * longest_ns, tuple(buckets))

    @property
    def mean_s(self) -> float:
        """Seconds on average; 0 if it was never done."""
        return self.total_s / self.count if self.count else 0.0

    @property
    def bounds(self) -> list[float]:
        """Where each bucket ends, in seconds; the last one has no end."""
        return [*(_bounds(bucket)[1] for bucket in range(len(self.buckets) - 1)), math.inf]

    def quantile(self, share: float) -> float:
        """About so many seconds, or less, took this share of them.

        It lies in the right bucket, where between is a guess: true within a factor of two.

        Args:
            share: 0.5 for the median, 0.99 for what one in a hundred exceeds.

        Returns:
            Seconds; 0 if it was never done.
        """
        wanted, seen = share * self.count, 0
        for number, count in enumerate(self.buckets):
            if count and seen + count >= wanted:
                begin, end = _bounds(number)
                within = (wanted - seen) / count
                return min(begin + within * (end - begin), self.longest_s)
            seen += count
        return 0.0

    def __add__(self, other: Timing) -> Timing:
        """Both together."""
        return Timing(
            self.count + other.count,
            self.total_s + other.total_s,
            max(self.longest_s, other.longest_s),
            tuple(map(add, self.buckets, other.buckets)),
        )

    def __sub__(self, earlier: Timing) -> Timing:
        """What came between."""
        buckets = tuple(now - then for now, then in zip(self.buckets, earlier.buckets, strict=True))
        longest = 0.0
        if any(buckets):
            longest = self.longest_s
            if longest <= earlier.longest_s:
                last = max(number for number, count in enumerate(buckets) if count)
                longest = min(longest, _bounds(last)[1])
        return Timing(self.count - earlier.count, self.total_s - earlier.total_s, longest, buckets)


def _bounds(bucket: int) -> tuple[float, float]:
    """Where a bucket begins and ends, in seconds."""
    return (_FIRST_S * 2 ** (bucket - 1) if bucket else 0.0), _FIRST_S * 2.0**bucket


@dataclass(frozen=True)
class Waits:
    """How a process has waited for the other side; csrc/wait.h explains the phases.

    Attributes:
        requests: Requests: sent by the parent, answered by a worker.
        waits: Times that it had to wait at all.
        pause_s: Seconds spun on the core's pause instruction.
        yield_s: Seconds spun on ``sched_yield``.
        park_s: Seconds asleep; also those of a wait of the parent's that is not over yet.
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

    @property
    def waited_s(self) -> float:
        """Seconds that it has waited, in all."""
        return self.pause_s + self.yield_s + self.park_s


@dataclass(frozen=True)
class WorkerStats(Waits):
    """What a worker has done.

    Attributes:
        steps: Steps of its envs.
        step_s: Seconds in ``env.step``, and taking its results.
        resets: Resets of its envs.
        reset_s: Seconds in ``env.reset``.
        late: Observations, infos and actions that fitted no ring in shared memory, and went through
            the worker's socket.
        cpu_s: Seconds that its process has run since it serves; of the one that there is now, if it
            was restarted. None: the system does not say.
        starved_s: Seconds that it could have run, and others had the cores.
        first_env: The first of its envs,
        num_envs: and how many it has.
    """

    steps: int
    step_s: float
    resets: int
    reset_s: float
    late: int
    cpu_s: float | None = None
    starved_s: float | None = None
    first_env: int = 0
    num_envs: int = 0

    @property
    def envs(self) -> range:
        """Its envs."""
        return range(self.first_env, self.first_env + self.num_envs)

    @property
    def busy_s(self) -> float:
        """Seconds in its envs."""
        return self.step_s + self.reset_s

    @property
    def lacked_s(self) -> float:
        """Seconds in which it lacked a core, and did not offer it to others."""
        return max(0.0, (self.starved_s or 0.0) - self.yield_s)


@dataclass(frozen=True)
class EnvStats:
    """How long an env's steps and resets took.

    Attributes:
        step: ``env.step``, and taking its results.
        reset: ``env.reset``.
    """

    step: Timing
    reset: Timing

    def __sub__(self, earlier: EnvStats) -> EnvStats:
        """What came between."""
        return EnvStats(self.step - earlier.step, self.reset - earlier.reset)


@dataclass(frozen=True)
class Doing:
    """What a worker is in the middle of.

    Attributes:
        env: Which env.
        operation: "step", "reset", or "call": a method or attribute of it.
        for_s: Seconds since it began.
    """

    env: int
    operation: str
    for_s: float

    def __str__(self) -> str:
        """In words."""
        return f"{self.operation} of env {self.env} for {_table.duration(self.for_s)}"


@dataclass(frozen=True)
class Process:
    """A worker's process.

    Attributes:
        pid: Its id.
        rss: Bytes that it has in memory; None: the system does not say.
        pss: The same, but of what it shares with others only its part.
    """

    pid: int
    rss: int | None
    pss: int | None


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

    ``print(envs.stats())`` shows a table and the verdict.

    Attributes:
        parent: The waits of the calling process.
        workers: What each worker has done.
        faults: What went wrong.
        envs: How long each env took.
        elapsed_s: Seconds since the vector env was made.
        num_workers: Worker processes; 0 if the envs live in the calling one.
        cores: Cores that the program may use.
        doing: What each worker was doing when it was asked; None: neither a step nor a reset.
        waiting_s: Seconds for which the caller had been waiting for answers then; None: it was not.
        processes: The workers' processes, None for one that is gone; empty if nobody has looked, as
            in ``stats()``: ``python -m shmvec top`` does.
        caller: The calling process, likewise.
        shared: Bytes of the segment, in which requests, results and counters are.
    """

    parent: Waits
    workers: tuple[WorkerStats, ...]
    faults: FaultCounts
    envs: tuple[EnvStats, ...] = ()
    elapsed_s: float = 0.0
    num_workers: int = 0
    cores: int = 1
    doing: tuple[Doing | None, ...] = ()
    waiting_s: float | None = None
    processes: tuple[Process | None, ...] = ()
    caller: Process | None = None
    shared: int = 0

    @classmethod
    def of(
        cls,
        insight: Insight,
        on_cores: Sequence[tuple[float | None, float | None]],
        processes: Sequence[Process | None] = (),
        caller: Process | None = None,
    ) -> Stats:
        """Makes it from what the segment says and the system knows of the processes."""
        workers = insight.workers()
        unknown = [(None, None)] * len(workers)
        of_each = zip(
            workers,
            map(_since, [*on_cores, *unknown], insight.spent_before()),
            insight.ranges(),
            strict=True,
        )
        return cls(
            Waits(**_named(insight.parent(), Waits)),
            tuple(
                WorkerStats(
                    **_named(worker, WorkerStats),
                    cpu_s=cpu_s,
                    starved_s=starved_s,
                    first_env=first,
                    num_envs=count,
                )
                for worker, (cpu_s, starved_s), (first, count) in of_each
            ),
            FaultCounts(**insight.faults()),
            tuple(EnvStats(*map(Timing.of, kinds)) for kinds in insight.timings().tolist()),
            insight.elapsed_s,
            insight.num_workers,
            insight.cores,
            tuple(each and Doing(*each) for each in insight.doing()),
            insight.waiting(),
            tuple(processes),
            caller,
            insight.nbytes,
        )

    def __sub__(self, earlier: Stats) -> Stats:
        """What was done between two calls of ``stats``.

        Raises:
            ValueError: They are of two vector envs.
        """
        shapes = [(len(each.workers), len(each.envs)) for each in (self, earlier)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                "stats of one vector env are to be subtracted from those of the same; these have "
                "{0[0]} workers and {0[1]} envs, and {1[0]} and {1[1]}".format(*shapes)
            )
        return Stats(
            Waits(**_difference(self.parent, earlier.parent)),
            tuple(
                WorkerStats(**_difference(now, then))
                for now, then in zip(self.workers, earlier.workers, strict=True)
            ),
            FaultCounts(**_difference(self.faults, earlier.faults)),
            tuple(now - then for now, then in zip(self.envs, earlier.envs, strict=True)),
            self.elapsed_s - earlier.elapsed_s,
            self.num_workers,
            self.cores,
            self.doing,
            self.waiting_s,
            self.processes,
            self.caller,
            self.shared,
        )

    @property
    def verdict(self) -> Verdict:
        """What the time went into, and what to change: a judgement by these numbers alone."""
        return judged(self)

    @property
    def steps_per_s(self) -> float:
        """Steps of envs a second."""
        return sum(worker.steps for worker in self.workers) / max(self.elapsed_s, 1e-9)

    @property
    def share_of_limit(self) -> float:
        """Steps per second, by those that loops would make that only step, one on each core.

        It is the time that workers were in their envs, by what there was on as many cores as envs
        can use: that of a loop whose steps take as long as here. Where workers share cores, steps
        take longer than there, and it is too much. Envs that sleep may reach more than 1.
        """
        busy = sum(worker.busy_s for worker in self.workers)
        return busy / (max(1, min(self.cores, len(self.envs))) * max(self.elapsed_s, 1e-9))

    def metrics(self) -> dict[str, float]:
        """The most telling numbers by name, to be logged: times in seconds, shares of all time.

        Example:
            >>> import shmvec
            >>> envs = shmvec.make_vec("CartPole-v1", num_envs=2)
            >>> sorted(envs.stats().metrics())[:3]
            ['caller_waited_share', 'crashes', 'errors']
            >>> envs.close()
        """
        seconds = max(self.elapsed_s, 1e-9)
        of_workers = seconds * max(1, len(self.workers))
        return {
            "steps_per_s": self.steps_per_s,
            "share_of_limit": self.share_of_limit,
            "caller_waited_share": self.parent.waited_s / seconds,
            "in_step_share": sum(worker.step_s for worker in self.workers) / of_workers,
            "in_reset_share": sum(worker.reset_s for worker in self.workers) / of_workers,
            "workers_waited_share": sum(worker.waited_s for worker in self.workers) / of_workers,
            **{
                f"{name}_{what}_s": seconds
                for name, timing in (("step", self.step), ("reset", self.reset))
                for what, seconds in (
                    ("p50", timing.quantile(0.5)),
                    ("p99", timing.quantile(0.99)),
                    ("longest", timing.longest_s),
                )
            },
            **{field.name: getattr(self.faults, field.name) for field in fields(self.faults)},
        }

    @property
    def step(self) -> Timing:
        """The steps of all envs."""
        return _together(env.step for env in self.envs)

    @property
    def reset(self) -> Timing:
        """The resets of all envs."""
        return _together(env.reset for env in self.envs)

    def __str__(self) -> str:
        """A table, and the verdict."""
        return f"{self.table()}\n{self.verdict}"

    def table(self, width: int | None = None) -> str:
        """Who did what, in lines.

        Args:
            width: Of how many characters, about: columns that do not fit are left out.
        """
        return "\n".join(_table.lines(self, width))


def _together(timings: Iterable[Timing]) -> Timing:
    return reduce(add, timings, Timing(0, 0.0, 0.0, (0,) * 30))


def _named(counters: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Those that it has fields for, nanoseconds as seconds."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        in_ns = field.name.removesuffix("_s") + "_ns"
        if in_ns in counters:
            values[field.name] = 1e-9 * counters[in_ns]
        elif field.name in counters:
            values[field.name] = counters[field.name]
    return values


def _since(
    spent: tuple[float | None, float | None], before: tuple[float, float]
) -> tuple[float | None, float | None]:
    """What the system says of a process, less what it was before that served."""
    ran, starved = (
        None if now is None else max(0.0, now - then)
        for now, then in zip(spent, before, strict=True)
    )
    return ran, starved


def _difference(now: Any, then: Any) -> dict[str, Any]:
    return {
        field.name: _less(field.name, getattr(now, field.name), getattr(then, field.name))
        for field in fields(now)
    }


def _less(name: str, now: Any, then: Any) -> Any:
    if now is None or then is None or name in ("first_env", "num_envs"):
        return now
    if name in ("cpu_s", "starved_s") and now < then:
        return now  # what only its process knows begins anew in one that takes its place
    # What has not ended is known about: once it has, there may be a little less.
    return max(0, now - then)

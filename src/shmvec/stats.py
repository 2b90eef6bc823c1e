"""Statistics of a vector env: counts and times of its processes, a verdict on them, and a table."""

from __future__ import annotations

import html
import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import reduce
from itertools import accumulate
from operator import add, sub
from typing import TYPE_CHECKING, Any, TypeVar

from shmvec._core import COUNTERS

if TYPE_CHECKING:
    from shmvec._core import Insight

__all__ = [
    "Doing",
    "EnvStats",
    "FaultCounts",
    "Process",
    "Stats",
    "Table",
    "Timing",
    "Verdict",
    "Waits",
    "WorkerStats",
    "advised_bits",
]

_CountersT = TypeVar("_CountersT", bound="_Counters")

# ---- counters ------------------------------------------------------------------------------------


def _stats_name(counter: str) -> str:
    """The name in stats of a counter of csrc/counters.h; in stats, times are in seconds."""
    return f"{counter.removesuffix('_ns')}_s" if counter.endswith("_ns") else counter


def _in_units(counters: dict[str, int]) -> dict[str, float]:
    """Counters of csrc/counters.h, with the names and units of stats."""
    return {
        _stats_name(name): 1e-9 * count if name.endswith("_ns") else count
        for name, count in counters.items()
    }


_CORE_COUNTERS = [_stats_name(name) for name, _, _ in COUNTERS["on_cores"]]


@dataclass(frozen=True)
class _Counters:
    """A dataclass with a field for each counter of some tables; see ``_with_counters_of``."""

    if TYPE_CHECKING:

        def __init__(self, *counts: float, **named: float | None) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __sub__(self: _CountersT, earlier: _CountersT) -> _CountersT:
        """The counts between two calls of ``stats``."""
        names = [each.name for each in fields(self)]
        counts = {n: _difference(n, getattr(self, n), getattr(earlier, n)) for n in names}
        return replace(self, **counts)


def _difference(name: str, now: Any, then: Any) -> Any:
    if now is None or then is None or name in ("first_env", "num_envs"):
        return now
    if name in _CORE_COUNTERS and now < then:
        return now  # a worker's replacement is a new process, whose counts begin at 0
    # The time of an operation under way is estimated, and may be a little too long.
    return max(0, now - then)


def _with_counters_of(*tables: str) -> Callable[[type[_CountersT]], type[_CountersT]]:
    """A decorator that makes a dataclass, with a documented field for each of these counters."""

    def decorate(kind: type[_CountersT]) -> type[_CountersT]:
        lines = {_stats_name(name): text for table in tables for name, _, text in COUNTERS[table]}
        kind.__annotations__ = dict.fromkeys(lines, "float") | kind.__annotations__
        for name, text in lines.items():
            default = None if name in _CORE_COUNTERS else MISSING
            setattr(kind, name, field(default=default, metadata={"help": text}))
        summary, _, others = inspect.cleandoc(kind.__doc__ or "").partition("\n\nAttributes:\n")
        attributes = [f"    {name}: {text}" for name, text in lines.items()]
        kind.__doc__ = "\n".join([summary, "", "Attributes:", *attributes, others])
        return dataclass(frozen=True)(kind)

    return decorate


@_with_counters_of("waits")
class Waits(_Counters):
    """Waits of a process for the other side; csrc/wait.h explains the phases."""

    @property
    def waited_s(self) -> float:
        """Seconds that the process has waited, in all."""
        return float(self.pause_s + self.yield_s + self.park_s)


@_with_counters_of("work", "on_cores")
class WorkerStats(Waits):
    """Counts of a worker, including its ``Waits``; None if the system does not report one.

    Attributes:
        first_env: The first of its envs.
        num_envs: Number of its envs.
    """

    first_env: int = 0
    num_envs: int = 0

    @property
    def envs(self) -> range:
        """The worker's envs."""
        return range(self.first_env, self.first_env + self.num_envs)

    @property
    def busy_s(self) -> float:
        """Seconds in its envs."""
        return float(self.step_s + self.reset_s)

    @property
    def lacked_s(self) -> float:
        """Seconds in which it was ready to run and had no core, without those of its yields."""
        return float(max(0.0, (self.starved_s or 0.0) - self.yield_s))

    def shares(self, elapsed_s: float) -> dict[str, float]:
        """The shares of its time in steps, in resets, without a core and waiting.

        Time without a core is a guess: the time that it lacked one, up to the time in envs. The
        shares add up to at most 1; the rest is other work.

        Args:
            elapsed_s: Seconds in which the counts were made.
        """
        lacked = min(self.lacked_s, self.busy_s)
        with_core = 1 - lacked / self.busy_s if self.busy_s else 0.0
        parts = {
            "in step": self.step_s * with_core,
            "in reset": self.reset_s * with_core,
            "no core": lacked,
            "waiting": self.waited_s,
        }
        shares, left = {}, 1.0
        for name, seconds in parts.items():
            shares[name] = min(left, seconds / max(elapsed_s, 1e-9))
            left -= shares[name]
        return shares


@_with_counters_of("faults")
class FaultCounts(_Counters):
    """Numbers of faults that were handled as the ``FaultPolicy`` says, and their time."""

    def __str__(self) -> str:
        """The counts that are not 0, as text."""
        counts = asdict(self)
        restart_s = counts.pop("restart_s")
        parts = [f"{count} {name}" for name, count in counts.items() if count]
        return ", ".join(parts + [f"{restart_s:.3g} s of restarts"] * bool(restart_s))


# ---- durations and current operations ------------------------------------------------------------

_FIRST_BUCKET_S = 512e-9  # its end; each further bucket ends at twice as much: csrc/timings.h


@dataclass(frozen=True)
class Timing:
    """A histogram of durations.

    Attributes:
        count: The number of durations.
        total_s: Their sum, in seconds.
        longest_s: The longest, in seconds. In a difference of two Timings it is exact if it is the
            longest of all; otherwise it is the end of its bucket.
        buckets: The number of durations below 512 ns, of longer ones below twice that, and so on;
            the last one counts those of 137 s and more.
    """

    count: int
    total_s: float
    longest_s: float
    buckets: tuple[int, ...]

    @classmethod
    def of(cls, words: Sequence[int]) -> Timing:
        """Makes a Timing from the core's words: the sum and the longest in ns, and the buckets."""
        total_ns, longest_ns, *buckets = words
        return cls(sum(buckets), 1e-9 * total_ns, 1e-9 * longest_ns, tuple(buckets))

    @property
    def mean_s(self) -> float:
        """The mean in seconds; 0 if there is no duration."""
        return self.total_s / self.count if self.count else 0.0

    @property
    def bounds(self) -> list[float]:
        """The end of each bucket, in seconds; that of the last one is infinite."""
        return [*(_bounds(bucket)[1] for bucket in range(len(self.buckets) - 1)), math.inf]

    def quantile(self, share: float) -> float:
        """A quantile of the durations, in seconds: this share of them took as long, or less.

        The bucket is exact and the place within it an estimate, so the result is right within a
        factor of two.

        Args:
            share: 0.5 for the median, 0.99 for what one in a hundred exceeds.

        Returns:
            Seconds; 0 if there is no duration.
        """
        rank, lower = share * self.count, 0  # lower: the number of durations in earlier buckets
        for number, count in enumerate(self.buckets):
            if count and lower + count >= rank:
                begin, end = _bounds(number)
                place = (rank - lower) / count
                return min(begin + place * (end - begin), self.longest_s)
            lower += count
        return 0.0

    def __add__(self, other: Timing) -> Timing:
        """The sum of both histograms."""
        return Timing(
            self.count + other.count,
            self.total_s + other.total_s,
            max(self.longest_s, other.longest_s),
            tuple(map(add, self.buckets, other.buckets)),
        )

    def __sub__(self, earlier: Timing) -> Timing:
        """The durations between two calls of ``stats``."""
        buckets = tuple(now - then for now, then in zip(self.buckets, earlier.buckets, strict=True))
        longest = 0.0
        if any(buckets):
            longest = self.longest_s
            if longest <= earlier.longest_s:
                last = max(number for number, count in enumerate(buckets) if count)
                longest = min(longest, _bounds(last)[1])
        return Timing(self.count - earlier.count, self.total_s - earlier.total_s, longest, buckets)


def _bounds(bucket: int) -> tuple[float, float]:
    """The begin and end of a bucket, in seconds."""
    return (_FIRST_BUCKET_S * 2 ** (bucket - 1) if bucket else 0.0), _FIRST_BUCKET_S * 2.0**bucket


@dataclass(frozen=True)
class EnvStats:
    """The durations of an env's steps and resets.

    Attributes:
        step: Durations of ``env.step``, writing its results included.
        reset: Durations of ``env.reset``.
    """

    step: Timing
    reset: Timing

    def __sub__(self, earlier: EnvStats) -> EnvStats:
        """The durations between two calls of ``stats``."""
        return EnvStats(self.step - earlier.step, self.reset - earlier.reset)


@dataclass(frozen=True)
class Doing:
    """The operation that a worker is in.

    Attributes:
        env: The index of its env.
        operation: "step", "reset", or "call": of a method or attribute.
        for_s: Seconds since it began.
        others: Number of further envs that it is busy with, not for as long.
    """

    env: int
    operation: str
    for_s: float
    others: int = 0

    def __str__(self) -> str:
        """The operation, env and duration in words."""
        others = f", {self.others} others" if self.others else ""
        return f"{self.operation} of env {self.env} for {_format_duration(self.for_s)}{others}"


@dataclass(frozen=True)
class Process:
    """A process and its memory; None where the system does not report it.

    Attributes:
        pid: The process id.
        rss: Resident bytes.
        pss: Resident bytes, where pages shared by n processes count as one nth.
    """

    pid: int
    rss: int | None
    pss: int | None


# ---- stats ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stats:
    """Counts and times since the vector env was made; the difference of two measures a part.

    ``print(envs.stats())`` shows a table and the verdict. A notebook's cell that ends with
    ``envs.stats()`` shows them, too.

    Attributes:
        parent: The waits of the calling process.
        workers: The counts of each worker.
        faults: The numbers of faults.
        envs: The durations of each env's steps and resets.
        elapsed_s: Seconds since the vector env was made.
        num_workers: Number of workers; 0 if the envs live in the calling process.
        cores: Number of cores that the program may use.
        doing: The operation that each worker was in when ``stats`` was called; None: none.
        waiting_s: Seconds for which the caller had waited for answers by then; None: it did not
            wait.
        processes: The workers' processes, None for one that has ended. Only ``python -m shmvec
            top`` fills it: it is empty in ``stats()``.
        caller: The calling process; None in ``stats()``.
        shared: Bytes of the segment, which holds requests, results and counters.
        wrappers: For each env, which of its wrappers were compiled when its worker started, and
            what prevents the others, in words. "": it has none, or ``compile_wrappers=False``, or
            the texts of all kinds of its worker's envs take more than 1 KB.
        caller_steps: Whether the calling process is the last worker.
        overlaps: Whether a worker may be busy with several envs at once. Then the times of its envs
            add up to more than its own, and the time on cores is that of its first thread.
        options: Names of the options that are set, among those that a verdict may advise.
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
    wrappers: tuple[str, ...] = ()
    caller_steps: bool = False
    overlaps: bool = False
    options: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        insight: Insight,
        on_cores: Sequence[tuple[float | None, float | None]],
        processes: Sequence[Process | None] = (),
        caller: Process | None = None,
    ) -> Stats:
        """Makes Stats from the segment's counters and the kernel's times of the processes."""
        workers, before = insight.workers(), map(_in_units, insight.on_cores_before())
        now = on_cores or [(None, None)] * len(workers)
        return cls(
            Waits(**_in_units(insight.parent())),
            tuple(
                WorkerStats(
                    **_in_units(counters),
                    **_core_times(spent, then),
                    first_env=first,
                    num_envs=count,
                )
                for counters, spent, then, (first, count) in zip(
                    workers, now, before, insight.ranges(), strict=True
                )
            ),
            FaultCounts(**_in_units(insight.faults())),
            tuple(EnvStats(*map(Timing.of, kinds)) for kinds in insight.timings().tolist()),
            insight.elapsed_s,
            insight.num_workers,
            insight.cores,
            tuple(each and Doing(*each) for each in insight.doing()),
            insight.waiting(),
            tuple(processes),
            caller,
            insight.nbytes,
            tuple(insight.wrappers()),
            insight.caller_steps,
            insight.overlaps,
            tuple(name for bit, name in enumerate(_ADVISED) if insight.options >> bit & 1),
        )

    def __sub__(self, earlier: Stats) -> Stats:
        """The counts and times between two calls of ``stats``.

        Raises:
            ValueError: They are of different vector envs.
        """
        mine, theirs = ((len(each.workers), len(each.envs)) for each in (self, earlier))
        if mine != theirs:
            raise ValueError(
                "stats of one vector env can only be subtracted from those of the same; these have "
                f"{mine[0]} workers and {mine[1]} envs, and {theirs[0]} and {theirs[1]}"
            )
        return replace(
            self,
            parent=self.parent - earlier.parent,
            workers=tuple(map(sub, self.workers, earlier.workers)),
            faults=self.faults - earlier.faults,
            envs=tuple(map(sub, self.envs, earlier.envs)),
            elapsed_s=self.elapsed_s - earlier.elapsed_s,
        )

    @property
    def verdict(self) -> Verdict:
        """The judgement on what limits the speed and what to change, by these numbers alone."""
        return _judge(self)

    @property
    def steps_per_s(self) -> float:
        """Env steps a second."""
        steps = sum(worker.steps for worker in self.workers)
        return float(steps / max(self.elapsed_s, 1e-9))

    @property
    def share_of_limit(self) -> float:
        """Steps per second, as a share of the limit: free-running loops of steps, one on each core.

        It is the time that workers were in their envs, divided by the time on as many cores as the
        envs can use. It assumes that steps take as long in such loops as here: where workers share
        cores, steps take longer here, and the share is too high. Envs that sleep may reach more
        than 1.
        """
        busy = sum(worker.busy_s for worker in self.workers)
        return busy / (max(1, min(self.cores, len(self.envs))) * max(self.elapsed_s, 1e-9))

    def metrics(self) -> dict[str, float]:
        """The main numbers by name, for logging: times in seconds, and shares of all time.

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
            **asdict(self.faults),
        }

    @property
    def step(self) -> Timing:
        """The durations of all envs' steps."""
        return _sum_timings(env.step for env in self.envs)

    @property
    def reset(self) -> Timing:
        """The durations of all envs' resets."""
        return _sum_timings(env.reset for env in self.envs)

    def __str__(self) -> str:
        """The table and the verdict."""
        return f"{self.table()}\n{self.verdict}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The same, on IPython's terminal."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """The verdict and the table, for a notebook."""
        return _as_html(self)

    def table(self, width: int | None = None) -> str:
        """The counts of each worker as a table.

        Args:
            width: About how many characters a line may have; columns that do not fit are left out.
        """
        return str(Table.of(self).fitted(width))


def advised_bits(settings: Any) -> int:
    """A bit for each option that a verdict may advise and that is set; see ``Stats.options``."""
    values = {name: getattr(settings, name, None) for name in _ADVISED}
    values["threads_per_worker"] = values["threads_per_worker"] == 1  # the value that is advised
    return sum(1 << bit for bit, value in enumerate(values.values()) if value not in (None, False))


def _sum_timings(timings: Iterable[Timing]) -> Timing:
    return reduce(add, timings, Timing(0, 0.0, 0.0, (0,) * 30))


def _core_times(spent: tuple[float | None, ...], before: dict[str, float]) -> dict[str, Any]:
    """The kernel's times of a process, less those from before it was a worker."""
    return {
        name: None if now is None else max(0.0, now - before[name])
        for name, now in zip(_CORE_COUNTERS, spent, strict=True)
    }


# ---- the verdict ---------------------------------------------------------------------------------

# Shares and ratios from which a verdict is given.
_LATE_SHARE = 0.05  # messages through sockets / all steps
_CALLER_WAIT_SHARE = 0.5  # time in which the caller waits / all time: less is policy-bound
_STARVED_RATIO = 0.25  # time without a core / time in envs
_OWN_SHARE = 0.5  # time on cores / that of all cores while the caller waits: less is others'
_UNEVEN = 1.5  # time in envs of the busiest worker / of the others
_SLOW_RATIO = 3  # a step of the slowest env / of the median env: any verdict names that env
_RESET_SHARE = 0.5  # time in resets / time in envs
_WAITING_RESET_SHARE = 0.25  # the same, if workers wait for each other
_BUSY_SHARE = 0.7  # time in envs / time in which workers could have been in them: less is idle
_EVEN_BUSY_SHARE = 0.85  # the same, if workers are as even as shared cores allow
_TAIL_RATIO = 8  # the slowest hundredth of steps / the median
_CALLER_S_PER_ENV = 2e-6  # what an env costs the caller, if not all envs are stepped at a time
_CALLER_S_PER_BATCH = 30e-6  # what a call of step costs, with the loop around it
_SMALL_REQUEST_S = 20e-6  # a request with less work is not worth a worker
_HANG_S = 10.0  # an operation hangs if it takes longer, and
_HANG_RATIO = 10  # so many times as long as the longest that has ended
_AWAKE_SHARE = 0.5  # time on a core / time in envs: less is asleep
_MIN_STEPS = 5  # with fewer steps of an env, and
_MIN_ELAPSED_S = 1.0  # in a shorter time, a verdict would be a guess
_INCONCLUSIVE_KINDS = ("idle", "too early")
_RESTART_SHARE = 0.2  # time of restarts / all time: more is restart-bound
_PROBLEM_KINDS = ("restart-bound", "straggler", "oversubscribed", "messages through pipes")
_MAX_LIMIT_SHARE = 1.05  # share of the limit: only envs that sleep exceed it
_HANG_ADVICE = "If it hangs"  # begins advice on an operation that may still end
# Options that a verdict may advise. The segment has a bit for each, in this order.
_ADVISED = ("batch_size", "shared_memory", "step_timeout", "reset_timeout", "threads_per_worker")


@dataclass(frozen=True)
class Verdict:
    """The judgement on what limits the speed.

    Attributes:
        kind: "env-bound", "policy-bound", "straggler", "reset-bound", "restart-bound",
            "oversubscribed", "messages through pipes", "too many workers"; "idle": nothing was
            stepped; or "too early": too little was stepped.
        reason: The numbers that show it.
        advice: What to do about it; empty if there is nothing.
        option: The option of ``ShmVectorEnv`` to change, as code; empty: none helps.
    """

    kind: str
    reason: str
    advice: str = ""
    option: str = ""

    @property
    def severity(self) -> str:
        """How bad it is: "none" (nothing to say), "good", "change" or "problem"."""
        if self.kind in _INCONCLUSIVE_KINDS:
            return "none"
        if self.kind in _PROBLEM_KINDS or self.advice.startswith(_HANG_ADVICE):
            return "problem"
        return "good" if self.kind == "env-bound" and not self.option else "change"

    def __str__(self) -> str:
        """The verdict on one line."""
        return f"{self.kind}: {self.reason}." + (f" {self.advice}." if self.advice else "")


def _judge(stats: Stats) -> Verdict:
    """The verdict on these numbers: the first kind that applies."""
    workers = stats.workers
    num_done = sum(worker.steps + worker.resets for worker in workers)
    if num_done == 0:
        nothing = Verdict("idle", "nothing was stepped or reset")
        return _judge_restarts(stats) or _judge_hangs(stats, num_done) or nothing
    if (hanging := _judge_hangs(stats, num_done)) is not None:
        return hanging
    most_steps = max(env.step.count for env in stats.envs)
    if most_steps < _MIN_STEPS and stats.elapsed_s < _MIN_ELAPSED_S:
        return Verdict(
            "too early",
            f"only {num_done} steps and resets have been made",
            f"Make at least {_MIN_STEPS} steps of an env, or some for a second",
        )
    if (restarting := _judge_restarts(stats)) is not None:
        return restarting
    messages = sum(worker.late for worker in workers)
    if messages > _LATE_SHARE * num_done:
        is_message_mode = "shared_memory" not in stats.options
        advice = "; observations in a space of fixed size need no messages, with shared_memory=True"
        return Verdict(
            "messages through pipes",
            f"{messages:,} observations, infos or actions of {num_done:,} steps and resets did not "
            "fit the rings in shared memory",
            "Return less in infos" + advice * is_message_mode,
            "shared_memory=True" * is_message_mode,
        )
    busy = [worker.busy_s for worker in workers]
    waited = sum(busy) if not stats.num_workers else stats.parent.waited_s
    if stats.caller_steps:
        waited += busy[-1]
    busy_share = _busy_share(busy, waited)
    return (
        _judge_policy(stats, max(busy), waited)
        or _judge_slow_env(stats, busy, waited)
        or _judge_cores(stats, sum(busy))
        or _judge_resets(stats, sum(busy), busy_share)
        or _judge_slow_steps(stats, busy_share)
        or _judge_request_size(stats, sum(busy), busy_share)
        or _judge_envs(stats, sum(busy), busy_share)
    )


def _busy_share(times: list[float], waited: float) -> float:
    """The sum of these times of workers, as a share of the time that the caller waited for them."""
    return sum(times) / (len(times) * max(waited, *times, 1e-9))


def _judge_hangs(stats: Stats, num_done: int) -> Verdict | None:
    """The verdict if an env's step or reset does not return, or not even the first one has yet."""
    hanging = [
        (now.for_s, worker, now, ended)
        for worker, now in enumerate(stats.doing)
        if now is not None
        for ended in [stats.reset if now.operation == "reset" else stats.step]
        if not num_done or now.operation != "call"
        if not num_done or now.for_s > max(_HANG_S, _HANG_RATIO * ended.longest_s)
    ]
    if not hanging:
        return None
    _, worker, now, ended = max(hanging, key=lambda each: each[0])
    others = f"no {now.operation} has ended"
    if ended.count:
        longest = f"the longest {now.operation} that has ended"
        others = f"{longest} took {1e3 * ended.longest_s:.3g} ms"
    return Verdict(
        "straggler" if len(hanging) < len(stats.workers) else "env-bound",
        f"worker {worker} has been in {now}; {others}",
        *_advise_on_hang(stats, now.operation),
    )


def _advise_on_hang(stats: Stats, operation: str) -> tuple[str, str]:
    """Advice on an env that may hang in an operation, and the option for it."""
    limit = f"{operation}_timeout="
    if operation == "call":
        return f"{_HANG_ADVICE}: no time limit ends a call; python -m shmvec stacks says where", ""
    if limit[:-1] in stats.options:
        return f"{_HANG_ADVICE}: {limit} names it; python -m shmvec stacks says where", ""
    advice, option = _permitted_option(stats, limit)
    if stats.num_workers == 0:
        option = "num_workers=1"
        advice = f"{option} and {limit}"
    return f"{_HANG_ADVICE}: {advice} names such an env, and a FaultPolicy replaces it", option


def _permitted_option(stats: Stats, option: str) -> tuple[str, str]:
    """Advice to set an option, and the one to change first, since caller_steps refuses some."""
    if stats.caller_steps:
        return f"caller_steps=False and {option}", "caller_steps=False"
    return option, option


def _judge_restarts(stats: Stats) -> Verdict | None:
    """The verdict if much of the time goes into restarts of workers."""
    restart_s = stats.faults.restart_s
    if restart_s <= _RESTART_SHARE * max(0.0, stats.elapsed_s):
        return None
    share = restart_s / max(restart_s, stats.elapsed_s)  # restarts may have begun earlier
    return Verdict(
        "restart-bound",
        f"{share:.0%} of the time went into restarts of workers",
        "The log names their envs, and the reasons",
    )


def _judge_policy(stats: Stats, busiest: float, waited: float) -> Verdict | None:
    """The verdict if the caller computes while no env is stepped."""
    elapsed = max(stats.elapsed_s, 1e-9)
    batches = stats.parent.requests / len(stats.workers)
    if (
        waited >= _CALLER_WAIT_SHARE * elapsed
        or busiest >= _BUSY_SHARE * elapsed
        or elapsed - waited < _CALLER_S_PER_BATCH * batches
    ):
        return None
    advice, option = "Make the policy faster", ""
    if len(stats.envs) > 1:
        option = "" if stats.num_workers else "num_workers=1"
        advice += ", or let it compute while envs are stepped: "
        advice += f"{option} and shmvec.Pipeline" if option else "shmvec.Pipeline"
    return Verdict(
        "policy-bound",
        f"the caller computed for {1 - waited / elapsed:.0%} of the time, and waited for the "
        "envs for the rest",
        advice,
        option,
    )


def _judge_cores(stats: Stats, busy: float) -> Verdict | None:
    """The verdict if workers lack cores: there are too many of them, or other programs."""
    starved = sum(worker.lacked_s for worker in stats.workers)
    # Envs that sleep need few cores, however many workers they have.
    if stats.num_workers == 0 or starved <= _STARVED_RATIO * max(0.0, busy) or _are_asleep(stats):
        return None
    lacked = f"workers were ready to run and had no core for {starved:.3g} s, "
    share = starved / max(busy, 1e-9)
    lacked += (
        f"{share:.0%} of their time in envs"
        if share < 1
        else f"{share:.1f} times as long as they were in envs"
    )
    cpu_s = sum(worker.cpu_s or 0.0 for worker in stats.workers)
    if stats.num_workers > stats.cores and cpu_s > _OWN_SHARE * stats.cores * stats.parent.waited_s:
        option = f"num_workers={stats.cores}"
        return Verdict(
            "too many workers",
            f"{stats.num_workers} share {stats.cores} cores: {lacked}",
            f"{option}; where other programs use the cores, more workers may get more of them",
            option,
        )
    option = "threads_per_worker=1" * ("threads_per_worker" not in stats.options)
    return Verdict(
        "oversubscribed",
        f"{lacked}: other programs or threads have the cores{_slow_env_text(stats)}",
        (f"{option} if they are the envs' own libraries; " if option else "")
        + "torch.set_num_threads for the policy's; otherwise end other programs: what limits the "
        "envs shows on a quieter machine. More workers may get more of contended cores, as "
        "python -m shmvec tune measures",
        option,
    )


def _judge_resets(stats: Stats, busy: float, busy_share: float) -> Verdict | None:
    """The verdict if resets take much of the time."""
    resets = sum(worker.reset_s for worker in stats.workers) / busy if busy else 0.0
    if resets < (_WAITING_RESET_SHARE if busy_share < _BUSY_SHARE else _RESET_SHARE):
        return None
    remedy, option = _advise_on_slow_envs(stats, stats.num_workers > 1)
    return Verdict(
        "reset-bound",
        f"{resets:.0%} of the workers' time went into {stats.reset.count:,} resets, of "
        f"{1e3 * stats.reset.mean_s:.3g} ms each (a step: {1e3 * stats.step.mean_s:.3g} ms)",
        f"{remedy}; or make env.reset cheaper" if remedy else "Make env.reset cheaper",
        option,
    )


def _advise_on_slow_envs(stats: Stats, late: bool) -> tuple[str, str]:
    """Advice on slow envs, and the option for it; both are empty if none helps.

    Args:
        stats: The stats.
        late: Whether workers wait for the last of each batch.
    """
    usable_workers = min(stats.cores, len(stats.envs))
    if stats.num_workers < usable_workers > 1:
        option = f"num_workers={usable_workers}"
        return f"There are {stats.cores} cores: {option}", option
    if 0 < stats.num_workers < len(stats.envs) and not stats.overlaps and _are_asleep(stats):
        advice, option = _permitted_option(stats, 'overlap="auto"')
        return (
            f"Most of it was asleep, and envs of a worker can wait at the same time: {advice}",
            option,
        )
    lockstep = late and len(stats.envs) > 1 and _is_in_lockstep(stats)
    return _advise_batch_size(stats) if lockstep else ("", "")


def _is_in_lockstep(stats: Stats) -> bool:
    """Whether all envs were stepped equally often; if not, nothing waits for slow ones."""
    if "batch_size" in stats.options:
        return False
    # A reset replaces a step, or is part of one; and some envs may be one step ahead.
    for resets in (0, 1):
        counts = [env.step.count + resets * env.reset.count for env in stats.envs]
        if max(counts) <= 2 * min(counts) + 2:
            return True
    return False


def _advise_batch_size(stats: Stats) -> tuple[str, str]:
    """Advice not to wait for all envs, and the option for it."""
    advice, option = _permitted_option(stats, f"batch_size={max(1, len(stats.envs) // 2)}")
    return f"Do not wait for it: {advice} with send and recv", option


def _judge_slow_env(stats: Stats, busy: list[float], waited: float) -> Verdict | None:
    """The verdict if all envs wait for the same slow one, whatever other programs do."""
    if stats.num_workers < 2 or not _is_in_lockstep(stats):
        return None
    # Other programs delay some workers more than others; that time is not counted as an env's.
    own_s = [max(w.busy_s - w.lacked_s, min(w.busy_s, w.cpu_s or 0.0)) for w in stats.workers]
    worker = own_s.index(max(own_s))
    uneven = max(own_s) > _UNEVEN * _rest_mean(own_s) and busy[worker] > _UNEVEN * _rest_mean(busy)
    slow = _slow_env_text(stats, stats.workers[worker].envs, _UNEVEN)
    if not uneven or not slow or _busy_share(own_s, waited) >= _BUSY_SHARE:
        return None
    return Verdict(
        "straggler",
        f"worker {worker} was in its envs for {busy[worker]:.3g} s, others for "
        f"{_rest_mean(busy):.3g} s on average{slow}",
        *_advise_batch_size(stats),
    )


def _rest_mean(times: list[float]) -> float:
    """The mean of all but the largest."""
    return (sum(times) - max(times)) / (len(times) - 1)


def _slow_env_text(stats: Stats, envs: Sequence[int] = (), factor: float = _SLOW_RATIO) -> str:
    """Names the slowest of these envs (default: all) if it is so much slower than usual; or ""."""
    means = [env.step.mean_s for env in stats.envs]
    for now in stats.doing:  # all may wait for a step that is not over yet
        if now is not None and now.operation == "step":
            means[now.env] = max(means[now.env], now.for_s)
    slowest = max(envs or range(len(means)), key=means.__getitem__)
    usual = sorted(means)[(len(means) - 1) // 2]  # the lower median
    if means[slowest] <= factor * usual:
        return ""
    return (
        f"; a step of env {slowest} takes {1e3 * means[slowest]:.3g} ms, of the median env "
        f"{1e3 * usual:.3g} ms"
    )


def _judge_slow_steps(stats: Stats, busy_share: float) -> Verdict | None:
    """The verdict if each batch waits for a slow step, of another env each time."""
    usual, slow = stats.step.quantile(0.5), stats.step.quantile(0.99)
    if stats.num_workers < 2 or not _is_in_lockstep(stats):
        return None
    if busy_share >= _BUSY_SHARE or slow <= _TAIL_RATIO * usual:
        return None
    return Verdict(
        "straggler",
        f"the slowest hundredth of all steps takes {1e3 * slow:.3g} ms and more, the median "
        f"{1e3 * usual:.3g} ms: each batch waits for its slowest",
        *_advise_batch_size(stats),
    )


def _judge_request_size(stats: Stats, busy: float, busy_share: float) -> Verdict | None:
    """The verdict if requests are too small for so many workers."""
    requests = sum(worker.requests for worker in stats.workers)
    work = busy / max(1, requests)
    if stats.num_workers == 0 or work > _SMALL_REQUEST_S or busy_share >= _BUSY_SHARE:
        return None
    option = f"num_workers={0 if stats.caller_steps else stats.num_workers // 2}"
    if stats.num_workers == 2 and not stats.caller_steps:
        option = "caller_steps=True"
    return Verdict(
        "too many workers",
        f"a request to a worker has {1e6 * work:.3g} µs of work, less than the request costs",
        f"{option}, or more envs",
        option,
    )


def _judge_envs(stats: Stats, busy: float, busy_share: float) -> Verdict:
    """The verdict if the envs themselves limit the speed."""
    small = busy < _SMALL_REQUEST_S * sum(worker.requests for worker in stats.workers)
    # The more workers there are, the later is the last, even if their envs are alike.
    late = stats.num_workers > 2 and busy_share < _EVEN_BUSY_SHARE and _is_in_lockstep(stats)
    late = late and stats.step.mean_s > stats.num_workers * _CALLER_S_PER_ENV
    inline = stats.num_workers == 0 and small
    remedy, option = ("", "") if inline else _advise_on_slow_envs(stats, late)
    reason = f"{busy / max(stats.elapsed_s, 1e-9):.2g} workers were in their envs at a time"
    reason += f"; a step takes {1e3 * stats.step.mean_s:.3g} ms{_slow_env_text(stats)}"
    if late:
        reason += f"; {1 - busy_share:.0%} of the time workers waited for the last of each batch"
    if remedy:
        return Verdict("env-bound", reason, f"{remedy}; or make env.step faster", option)
    asleep = _are_asleep(stats)
    if asleep and stats.overlaps:
        reason += "; most of it was asleep, at the same time as others"
    has_free_cores = inline or asleep or min(stats.cores, len(stats.envs)) < stats.cores
    more = "step more envs at a time" if has_free_cores else "use more cores"
    if asleep is None:
        more += "; whether they sleep shows in stats() - before of a time without restarts"
    return Verdict("env-bound", reason, f"Make env.step faster, or {more}")


def _are_asleep(stats: Stats) -> bool | None:
    """Whether envs mostly waited, and not for a core; None: it is unknown."""
    known = [worker for worker in stats.workers if worker.cpu_s is not None]
    awake = sum(worker.cpu_s + worker.lacked_s for worker in known)
    if awake >= _AWAKE_SHARE * sum(worker.busy_s for worker in known):
        return False
    # After a restart, the time on cores is that of the last process, but the time in envs of all.
    return None if stats.faults.restarts else True


# ---- the table -----------------------------------------------------------------------------------

_MAX_ROWS = 16
_MAX_WRAPPER_KINDS = 4  # kinds of envs whose wrappers are described
# Columns by importance: if there is no room, others are left out first, then the last of these.
_IMPORTANCE = (
    *("worker", "now", "in step", "envs", "steps", "pid", "time", "waiting", "resets", "memory"),
    *("in reset", "CPU", "starved"),
)
_NOW_WIDTH = len("reset of env 100 for 2.63 ms")
_BAR_LETTERS = {"in step": "█", "in reset": "▓", "no core": "×", "waiting": "░"}
_BAR_WIDTH = 20
_NUM_SLOWEST = 3  # envs whose timings are listed
_MIN_SHOWN_WAIT_S = 0.1  # a shorter wait of the caller is not shown


@dataclass(frozen=True)
class Table:
    """The parts of a table of stats: ``str`` joins them as text, notebooks and ``top`` colour them.

    Attributes:
        sentences: Sentences on all workers together.
        columns: By column name, a cell for each of the first workers.
        hidden: Text on how many more workers there are; empty: none.
        timings: Rows on durations of steps and resets, of all envs and of the slowest; the first
            row has the headings.
        faults: Text on the faults; empty: none.
    """

    sentences: tuple[str, ...]
    columns: dict[str, list[str]]
    hidden: str
    timings: tuple[tuple[str, ...], ...]
    faults: str

    @classmethod
    def of(cls, stats: Stats, bars: bool = False) -> Table:
        """Makes the table of stats; ``bars`` adds a column with a bar of each worker's time."""
        more = len(stats.workers) - _MAX_ROWS
        faults = str(stats.faults)
        return cls(
            tuple(_sentences(stats)),
            _columns(stats, bars),
            f"... and {more} more" if more > 0 else "",
            tuple(_timing_rows(stats)),
            f"faults: {faults}" if faults else "",
        )

    @property
    def width(self) -> int:
        """Characters that the columns take side by side, with the longest text in "now"."""
        widths = [
            _NOW_WIDTH if name == "now" else max(map(len, (name, *cells)))
            for name, cells in self.columns.items()
        ]
        return sum(widths) + 2 * (len(widths) - 1)

    def fitted(self, width: int | None) -> Table:
        """This table without the least important columns, so that it fits; None: all columns."""
        table = self
        for name in sorted(self.columns, key=_rank_of, reverse=True)[:-1]:
            if width is None or table.width <= width:
                break
            columns = {key: cells for key, cells in table.columns.items() if key != name}
            table = replace(self, columns=columns)
        return table

    @property
    def worker_lines(self) -> list[str]:
        """The columns as lines; the first line has their names."""
        workers = [(name, *cells) for name, cells in self.columns.items()]
        return _align(list(zip(*workers, strict=True)))

    @property
    def keys(self) -> str:
        """A legend for the letters of bars; empty: there are no bars."""
        keys = [f"{letter} {name}" for name, letter in _BAR_LETTERS.items()]
        return "  ".join(keys) if "time" in self.columns else ""

    @property
    def timing_lines(self) -> list[str]:
        """``timings`` as lines."""
        return _align(self.timings)

    @property
    def lines(self) -> list[str]:
        """All lines below the sentences."""
        lines = *self.worker_lines, self.keys, self.hidden, *self.timing_lines, self.faults
        return [line for line in lines if line]

    def __str__(self) -> str:
        """The table as text."""
        return "\n".join([*self.sentences, *self.lines])


def _rank_of(column: str) -> int:
    return _IMPORTANCE.index(column) if column in _IMPORTANCE else len(_IMPORTANCE)


def _sentences(stats: Stats) -> list[str]:
    steps = sum(worker.steps for worker in stats.workers)
    resets = sum(worker.resets for worker in stats.workers)
    waiting_s = stats.waiting_s or 0.0
    share = stats.share_of_limit
    has_limit = share < _MAX_LIMIT_SHARE and not stats.overlaps  # envs that sleep have none
    limit = f", {share:.0%} of the limit" if has_limit else ""
    sentences = [
        f"{stats.elapsed_s:.3g} s: {steps:,} steps ({stats.steps_per_s:,.0f} a second{limit}), "
        f"{resets:,} resets; "
        f"{stats.num_workers} workers, {len(stats.envs)} envs, {stats.cores} cores",
        f"the caller waited {_format_percent(stats.parent.waited_s, stats.elapsed_s)} of the time "
        f"({stats.parent.parks:,} sleeps)"
        + (f", now for {_format_duration(waiting_s)}" if waiting_s >= _MIN_SHOWN_WAIT_S else ""),
    ]
    sentences += [f"wrappers{whose}: {words}" for whose, words in _wrapper_groups(stats.wrappers)]
    if spent := sum(worker.wrappers_s for worker in stats.workers):
        cost = f"{_format_duration(spent / max(1, steps))} a step"
        sentences.append(f"wrappers that are not compiled, around those that are: {cost}")
    if stats.caller is not None:
        known = [each.pss for each in stats.processes if each is not None and each.pss is not None]
        of_workers = f", workers {_format_bytes(sum(known))}" if known else ""
        sentences.append(
            f"memory: caller {_format_memory(stats.caller)}{of_workers}, "
            f"shared {_format_bytes(stats.shared)}"
        )
    return sentences


def _wrapper_groups(wrappers: Sequence[str]) -> list[tuple[str, str]]:
    """Descriptions of envs' wrappers, each with the envs that share it."""
    envs_by_text: dict[str, list[int]] = {}
    for env, text in enumerate(wrappers):
        envs_by_text.setdefault(text, []).append(env)
    if len(envs_by_text) == 1:
        return [("", text) for text in envs_by_text if text]
    groups = [(_envs_phrase(envs), text) for text, envs in envs_by_text.items() if text]
    more = len(groups) - _MAX_WRAPPER_KINDS
    return groups[:_MAX_WRAPPER_KINDS] + [("", f"{more} other kinds of envs")] * (more > 0)


def _envs_phrase(envs: list[int]) -> str:
    if len(envs) == 1:
        return f" of env {envs[0]}"
    if envs[-1] - envs[0] == len(envs) - 1:
        return f" of envs {envs[0]}-{envs[-1]}"
    return f" of env {envs[0]} and {len(envs) - 1} others"


def _columns(stats: Stats, bars: bool) -> dict[str, list[str]]:
    workers = stats.workers[:_MAX_ROWS]
    processes = stats.processes[:_MAX_ROWS]
    columns = {
        "worker": [str(index) for index in range(len(workers))],
        "envs": [_range_text(worker.envs) for worker in workers],
        "pid": [str(each.pid) if each else "?" for each in processes],
        **_counter_columns(stats, "work"),
        "waiting": [_format_percent(worker.waited_s, stats.elapsed_s) for worker in workers],
        **_counter_columns(stats, "waits"),
        **_counter_columns(stats, "on_cores"),
        "memory": [_format_memory(each) for each in processes],
        "time": [_bar(worker.shares(stats.elapsed_s)) for worker in workers if bars],
        "now": [_current_operation(stats, index) for index in range(len(workers))],
    }
    return {name: cells for name, cells in columns.items() if cells}


def _bar(shares: dict[str, float]) -> str:
    """A worker's time as a bar, which stays empty for the rest of the time."""
    bar = ""
    for name, end in zip(shares, accumulate(shares.values()), strict=True):
        bar += _BAR_LETTERS[name] * (round(_BAR_WIDTH * end) - len(bar))
    return bar.ljust(_BAR_WIDTH)


def _counter_columns(stats: Stats, table: str) -> dict[str, list[str]]:
    """Columns of the counters that have a heading; times are shares."""
    columns = {}
    for counter, heading, _ in COUNTERS[table]:
        name = _stats_name(counter)
        counts = [getattr(worker, name) for worker in stats.workers[:_MAX_ROWS]]
        if heading and counter.endswith("_ns"):
            columns[heading] = [_format_percent(count, stats.elapsed_s) for count in counts]
        elif heading:
            columns[heading] = [f"{count:,}" for count in counts]
    return columns


def _timing_rows(stats: Stats) -> list[tuple[str, ...]]:
    rows = [
        (f"{who} {name}", *map(_format_duration, (t.quantile(0.5), t.quantile(0.99), t.longest_s)))
        for name in ("step", "reset")
        for who, t in (("any env's", getattr(stats, name)), *_slowest_envs(stats, name))
        if t.count
    ]
    return [("", "p50", "p99", "longest"), *rows] if rows else []


def _format_duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def _current_operation(stats: Stats, worker: int) -> str:
    if stats.processes and stats.processes[worker] is None:
        return "no process"
    return str(stats.doing[worker] or "-") if stats.doing else "-"


def _slowest_envs(stats: Stats, name: str) -> list[tuple[str, Timing]]:
    """The envs whose steps or resets take longest; none if there are few envs."""
    if len(stats.envs) <= _NUM_SLOWEST:
        return []
    timings = [(getattr(env, name), index) for index, env in enumerate(stats.envs)]
    slowest = sorted(timings, key=lambda each: -each[0].quantile(0.99))[:_NUM_SLOWEST]
    return [(f"env {index}'s", timing) for timing, index in slowest]


def _format_percent(part: float | None, whole: float) -> str:
    return "?" if part is None else f"{100 * part / max(whole, 1e-9):.0f} %"


def _format_memory(process: Process | None) -> str:
    if process is None or process.pss is None:
        return "?"
    return _format_bytes(process.pss)


def _format_bytes(number: int) -> str:
    mib = number / 2**20
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"


def _range_text(envs: range) -> str:
    return "-".join(map(str, dict.fromkeys((envs[0], envs[-1])))) if envs else "?"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


# ---- the table in a notebook ---------------------------------------------------------------------

# Only these elements are coloured. Text has the page's colour, since the page may be dark.
_BADGES = {"none": "#616161", "good": "#2e7d32", "change": "#8a5a00", "problem": "#c62828"}
_COLOURS = {"█": "#43a047", "▓": "#00acc1", "×": "#e53935", "░": "#9e9e9e"}
_STYLE = "font-size:0.9em;line-height:1.5"
_PRE_STYLE = "margin:0.4em 0;overflow-x:auto;background:none;color:inherit;line-height:1.3"


def _as_html(stats: Stats) -> str:
    """The verdict, and the table with coloured bars."""
    table, verdict = Table.of(stats, bars=True), stats.verdict
    badge = f"background:{_BADGES[verdict.severity]};color:#fff;border-radius:0.3em;padding:0 0.5em"
    text = f'<b style="{badge}">{html.escape(verdict.kind)}</b> {html.escape(verdict.reason)}.'
    text += f" <b>{html.escape(verdict.advice)}.</b>" if verdict.advice else ""
    sentences = "".join(f"<div>{html.escape(each)}</div>" for each in table.sentences)
    lines = html.escape("\n".join(table.lines))
    for letter, colour in _COLOURS.items():
        lines = re.sub(f"{letter}+", rf'<span style="color:{colour}">\g<0></span>', lines)
    body = f'<div>{text}</div>{sentences}<pre style="{_PRE_STYLE}">{lines}</pre>'
    return f'<div style="{_STYLE}">{body}</div>'
